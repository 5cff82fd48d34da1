"""What one needs to run a job again: versions, places, settings, how it was started. And what is not known of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, sanitize
from ddpwatch.core.units import count, plural, ranks_text, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ddpwatch.core.state.run import RunState
    from ddpwatch.wire import Hello

Facts: TypeAlias = list[tuple[str, str]]
Speakers: TypeAlias = "list[tuple[int, Any]]"
"""By rank, its greeting, or its latest pass over the data."""
MAX_VALUES: Final = 4
"""Different values of one thing that are told."""
MAX_SETTING_CHARS: Final = 80
"""A setting that takes more to tell rank by rank, such as a temporary file of each, is only told to differ."""
MAX_HOSTS: Final = 64
MAX_LIMITS: Final = 32
DATA_PATH: Final = "DDPWATCH_DATA"
"""The variable that users say with where the data are."""
NOT_REPORTED: Final = "not told"
DIFFERS: Final = "differs between ranks"


class Fact(NamedTuple):
    """Something that ranks say of themselves."""

    key: str
    """In JSON."""
    name: str
    """On a page."""
    of: Callable[[Any], str | int | None]
    """From a greeting, or from a pass over the data; empty or None = not told."""
    shown: Callable[[Any], str] = str


VERSIONS: Final = (
    Fact("agent_version", "ddpwatch agent", lambda hello: hello.agent_version),
    Fact("torch", "torch", lambda hello: hello.torch),
    Fact("python", "python", lambda hello: hello.python),
    Fact("backend", "backend", lambda hello: hello.backend),
)
DEVICE: Final = Fact("device", "devices", lambda hello: hello.device.partition(":")[0])
CORES: Final = Fact("cores", "cores a rank", lambda hello: hello.cores or None)
MODEL: Final = (
    Fact("model", "model", lambda hello: hello.model),
    Fact("kind", "wrapped as", lambda hello: hello.kind),
    Fact("parameters", "parameters", lambda hello: hello.parameters or None, count),
    Fact("parameter_bytes", "their size", lambda hello: hello.parameter_bytes or None, size),
    Fact("comm", "communication", lambda hello: hello.comm),
    Fact("clock", "clock", lambda hello: hello.clock),
)
COMMAND: Final = Fact("command", "command", lambda hello: hello.command)
DATA: Final = Fact("data_path", "path", lambda hello: hello.environment.get(DATA_PATH))
LOADER: Final = (
    Fact("sampler", "sampler", lambda loader: loader.sampler),
    Fact("batch_size", "batch size", lambda loader: loader.batch_size or None),
    Fact("workers", "workers", lambda loader: loader.workers),
    Fact("batches", "batches a pass", lambda loader: loader.length or None),
)
LARGEST: Final = frozenset({"parameters", "parameter_bytes"})
"""Of these JSON has one number, the largest."""


def manifest(state: RunState) -> list[tuple[str, Facts]]:
    """Groups of facts, each with a title. Ranks that differ are told apart."""
    hellos, loaders = _hellos(state), _loaders(state)
    path = [] if (reported := _facts_of(DATA, hellos)) == NOT_REPORTED else [(DATA.name, reported)]
    data = [(fact.name, _facts_of(fact, loaders)) for fact in LOADER] if loaders else [("DataLoader", NOT_REPORTED)]
    return [
        ("Versions", [(fact.name, _facts_of(fact, hellos)) for fact in VERSIONS]),
        ("Where it ran", _places(state)),
        ("Model", [(fact.name, _facts_of(fact, hellos)) for fact in MODEL]),
        ("DDP settings", _settings(state, lambda hello: hello.ddp) or [("settings", NOT_REPORTED)]),
        ("Data", [*path, *data]),
        ("Started as", [(COMMAND.name, _facts_of(COMMAND, hellos))]),
        ("Environment", _settings(state, lambda hello: hello.environment) or [("settings", NOT_REPORTED)]),
    ]


def manifest_object(state: RunState) -> dict[str, Any]:
    """The same as plain values, ready for JSON: each that was told, once; settings as a page tells them."""
    found: dict[str, Any] = {}
    for facts, speakers in (
        ((*VERSIONS, DEVICE, CORES, *MODEL, COMMAND, DATA), _hellos(state)),
        (LOADER, _loaders(state)),
    ):
        for fact in facts:
            reported = sorted(
                {_plain(value) for _, speaker in speakers if (value := fact.of(speaker)) not in ("", None)}
            )
            found[fact.key] = reported if fact.key not in LARGEST else reported[-1] if reported else None
    for name, pairs in (
        ("ddp", _settings(state, lambda hello: hello.ddp)),
        ("environment", _settings(state, lambda hello: hello.environment)),
    ):
        found[name] = {sanitize(key, NAME_CHARS): sanitize(text, NOTE_CHARS) for key, text in pairs}
    return found


def recorded_by_facts(recorder: str, limits: Mapping[str, Mapping[str, float]]) -> Facts:
    """Which version recorded it, and the limits that were set."""
    if not recorder:
        return [("recorded by", NOT_REPORTED), ("limits", NOT_REPORTED)]
    set_to = [f"{group}.{key}={value:g}" for group, keys in limits.items() for key, value in keys.items()]
    shown = ", ".join(sanitize(text, NAME_CHARS) for text in set_to[:MAX_LIMITS]) or "as they come"
    return [("recorded by", f"ddpwatch {sanitize(recorder, NAME_CHARS)}"), ("limits", shown)]


def missing_facts(state: RunState, *, damaged: bool = False) -> list[str]:
    """What is missing in all that came, each as a sentence; of a damaged recording it may be missing for that."""
    found = []
    missing = [rank.rank for rank in state.ranks.values() if state.condition(rank) == "missing"]
    if missing:
        found.append(f"Of {ranks_text(missing)} nothing was heard.")
    ranks = state.ranks.values()
    if lost := sum(rank.lost for rank in ranks):
        why = "did not arrive, or could not be written by the recorder"
        found.append(f"{plural(lost, 'message')} {'cannot be read, ' if damaged else ''}{why}.")
    if dropped := sum(rank.dropped for rank in ranks):
        found.append(f"{plural(dropped, 'step')} were overwritten before an agent could send them.")
    if state.bad:
        found.append(f"{plural(state.bad, 'message or step')} could not be used: {state.bad_reason or 'impossible'}.")
    if state.unknown:
        found.append(f"{plural(state.unknown, 'message')} of a kind that this version does not know.")
    return found


def _places(state: RunState) -> Facts:
    hosts: dict[str, list[int]] = {}
    for rank in state.ranks.values():
        if rank.host:
            hosts.setdefault(rank.host, []).append(rank.rank)
    shown = [f"{host} ({ranks_text(ranks)})" for host, ranks in list(hosts.items())[:MAX_HOSTS]]
    more = f", {len(hosts) - MAX_HOSTS} more" if len(hosts) > MAX_HOSTS else ""
    gpus: dict[str, int] = {}
    for rank in state.ranks.values():
        for gpu in rank.gpus.latest.gpus if rank.gpus.latest is not None else ():
            gpus[gpu.name or gpu.device] = gpus.get(gpu.name or gpu.device, 0) + 1
    return [
        ("world size", plural(state.world_size, "rank")),
        ("hosts", (", ".join(shown) or NOT_REPORTED) + more),
        (DEVICE.name, _facts_of(DEVICE, _hellos(state))),
        ("GPUs", ", ".join(f"{number} × {name}" for name, number in list(gpus.items())[:MAX_VALUES]) or "none read"),
        (CORES.name, _facts_of(CORES, _hellos(state))),
    ]


def _hellos(state: RunState) -> Speakers:
    return [(rank.rank, rank.hello) for rank in state.ranks.values() if rank.hello is not None]


def _loaders(state: RunState) -> Speakers:
    return [(rank.rank, rank.loaders[max(rank.loaders)]) for rank in state.ranks.values() if rank.loaders]


def _plain(value: Any) -> Any:
    return sanitize(value, NOTE_CHARS) if isinstance(value, str) else value


def _facts_of(fact: Fact, speakers: Speakers) -> str:
    values = ((rank, fact.of(speaker)) for rank, speaker in speakers)
    return _spread((rank, "" if value is None else fact.shown(value)) for rank, value in values)


def _settings(state: RunState, of: Callable[[Hello], dict[str, str]]) -> Facts:
    said = [(rank, of(hello)) for rank, hello in _hellos(state)]
    names = sorted({name for _, reported in said for name in reported})
    return [(name, _setting([(rank, reported.get(name, "")) for rank, reported in said])) for name in names]


def _setting(said: list[tuple[int, str]]) -> str:
    text = _spread(said)
    same = len({value for _, value in said if value}) <= 1
    return text if same or len(text) <= MAX_SETTING_CHARS else DIFFERS


def _spread(said: Iterable[tuple[int, str]]) -> str:
    """What all say, or who says what."""
    speakers: dict[str, list[int]] = {}
    for rank, value in said:
        speakers.setdefault(value, []).append(rank)
    speakers.pop("", None)
    if not speakers:
        return NOT_REPORTED
    if len(speakers) == 1:
        return next(iter(speakers))
    if len(speakers) > MAX_VALUES:
        return f"{len(speakers)} different ones"
    return "; ".join(f"{value} ({ranks_text(ranks)})" for value, ranks in speakers.items())
