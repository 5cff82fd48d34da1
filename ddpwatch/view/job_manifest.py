"""Manifest of a job, for running it again: versions, hosts, settings and command; and what is missing of its data."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, sanitize
from ddpwatch.core.units import count, plural, ranks_text, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ddpwatch.core.state.run import RunState
    from ddpwatch.wire import Hello

Facts: TypeAlias = list[tuple[str, str]]
Messages: TypeAlias = "list[tuple[int, Any]]"
"""Ranks, each with its Hello or its latest message about the DataLoader."""
MAX_VALUES: Final = 4
"""Max. number of different values of one fact that are listed."""
MAX_SETTING_CHARS: Final = 80
"""Max. length, in characters, of a setting that differs between ranks, such as a temporary file of each."""
# Max. numbers of hosts and of changed thresholds listed.
MAX_HOSTS: Final = 64
MAX_LIMITS: Final = 32
DATA_PATH: Final = "DDPWATCH_DATA"
"""Environment variable with which users state the path of the data."""
NOT_REPORTED: Final = "not reported"
DIFFERS: Final = "differs between ranks"


class Fact(NamedTuple):
    """One fact that ranks report about themselves."""

    key: str
    """Key in JSON."""
    name: str
    """Name in the report."""
    of: Callable[[Any], str | int | None]
    """Reads the fact from a message; empty or None = not reported."""
    shown: Callable[[Any], str] = str


VERSIONS: Final = (
    Fact("agent_version", "ddpwatch agent", lambda hello: hello.agent_version),
    Fact("torch", "torch", lambda hello: hello.torch),
    Fact("python", "python", lambda hello: hello.python),
    Fact("backend", "backend", lambda hello: hello.backend),
)
DEVICE: Final = Fact("device", "devices", lambda hello: hello.device.partition(":")[0])
CORES: Final = Fact("cores", "cores per rank", lambda hello: hello.cores or None)
MODEL: Final = (
    Fact("model", "model", lambda hello: hello.model),
    Fact("kind", "wrapped as", lambda hello: hello.kind),
    Fact("parameters", "parameters", lambda hello: hello.parameters or None, count),
    Fact("parameter_bytes", "parameter size", lambda hello: hello.parameter_bytes or None, size),
    Fact("comm", "communication", lambda hello: hello.comm),
    Fact("clock", "clock", lambda hello: hello.clock),
)
COMMAND: Final = Fact("command", "command", lambda hello: hello.command)
DATA: Final = Fact("data_path", "path", lambda hello: hello.environment.get(DATA_PATH))
LOADER: Final = (
    Fact("sampler", "sampler", lambda loader: loader.sampler),
    Fact("batch_size", "batch size", lambda loader: loader.batch_size or None),
    Fact("workers", "workers", lambda loader: loader.workers),
    Fact("batches", "batches per epoch", lambda loader: loader.length or None),
)
LARGEST: Final = frozenset({"parameters", "parameter_bytes"})
"""Facts that are one number in JSON, the largest of all ranks; others are lists."""


def manifest(state: RunState) -> list[tuple[str, Facts]]:
    """Groups of facts with their titles; where ranks differ, each value names its ranks."""
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
    """The manifest as a JSON object, with each reported value once; settings are as in the report."""
    found: dict[str, Any] = {}
    hellos = (*VERSIONS, DEVICE, CORES, *MODEL, COMMAND, DATA), _hellos(state)
    for facts, messages in (hellos, (LOADER, _loaders(state))):
        for fact in facts:
            values = {_sanitized(value) for _, message in messages if (value := fact.of(message)) not in ("", None)}
            found[fact.key] = max(values, default=None) if fact.key in LARGEST else sorted(values)
    for name, pairs in (
        ("ddp", _settings(state, lambda hello: hello.ddp)),
        ("environment", _settings(state, lambda hello: hello.environment)),
    ):
        found[name] = {sanitize(key, NAME_CHARS): sanitize(text, NOTE_CHARS) for key, text in pairs}
    return found


def recorded_by_facts(recorder: str, limits: Mapping[str, Mapping[str, float]]) -> Facts:
    """Version of the recorder, and the thresholds that differ from the defaults."""
    if not recorder:
        return [("recorded by", NOT_REPORTED), ("thresholds", NOT_REPORTED)]
    set_to = [f"{group}.{key}={value:g}" for group, keys in limits.items() for key, value in keys.items()]
    shown = ", ".join(sanitize(text, NAME_CHARS) for text in set_to[:MAX_LIMITS]) or "defaults"
    return [("recorded by", f"ddpwatch {sanitize(recorder, NAME_CHARS)}"), ("thresholds", shown)]


def missing_facts(state: RunState, *, damaged: bool = False) -> list[str]:
    """What is missing of the run's messages, as sentences."""
    found = []
    ranks = state.ranks.values()
    if missing := [rank.rank for rank in ranks if state.condition(rank) == "missing"]:
        found.append(f"No message arrived from {ranks_text(missing)}.")
    if lost := sum(rank.lost for rank in ranks):
        why = "did not arrive, or could not be written by the recorder"
        found.append(f"{plural(lost, 'message')} {'cannot be read, ' if damaged else ''}{why}.")
    if dropped := sum(rank.dropped for rank in ranks):
        found.append(f"{plural(dropped, 'step')} were overwritten before an agent could send them.")
    if state.bad:
        found.append(f"{plural(state.bad, 'message or step')} could not be used: {state.bad_reason or 'invalid'}.")
    if state.unknown:
        found.append(f"{plural(state.unknown, 'message')} of an unknown kind.")
    return found


def _places(state: RunState) -> Facts:
    hosts: dict[str, list[int]] = {}
    for rank in state.ranks.values():
        if rank.host:
            hosts.setdefault(rank.host, []).append(rank.rank)
    shown = [f"{host} ({ranks_text(ranks)})" for host, ranks in list(hosts.items())[:MAX_HOSTS]]
    more = f", {len(hosts) - MAX_HOSTS} more" if len(hosts) > MAX_HOSTS else ""
    latest = (rank.gpus.latest for rank in state.ranks.values())
    gpus = Counter(gpu.name or gpu.device for message in latest if message is not None for gpu in message.gpus)
    return [
        ("world size", plural(state.world_size, "rank")),
        ("hosts", (", ".join(shown) or NOT_REPORTED) + more),
        (DEVICE.name, _facts_of(DEVICE, _hellos(state))),
        ("GPUs", ", ".join(f"{number} × {name}" for name, number in list(gpus.items())[:MAX_VALUES]) or "no data"),
        (CORES.name, _facts_of(CORES, _hellos(state))),
    ]


def _hellos(state: RunState) -> Messages:
    return [(rank.rank, rank.hello) for rank in state.ranks.values() if rank.hello is not None]


def _loaders(state: RunState) -> Messages:
    return [(rank.rank, rank.loaders[max(rank.loaders)]) for rank in state.ranks.values() if rank.loaders]


def _sanitized(value: Any) -> Any:
    return sanitize(value, NOTE_CHARS) if isinstance(value, str) else value


def _facts_of(fact: Fact, messages: Messages) -> str:
    values = ((rank, fact.of(message)) for rank, message in messages)
    return _by_ranks((rank, "" if value is None else fact.shown(value)) for rank, value in values)


def _settings(state: RunState, of: Callable[[Hello], dict[str, str]]) -> Facts:
    settings = [(rank, of(hello)) for rank, hello in _hellos(state)]
    names = sorted({name for _, reported in settings for name in reported})
    return [(name, _setting([(rank, reported.get(name, "")) for rank, reported in settings])) for name in names]


def _setting(values: list[tuple[int, str]]) -> str:
    text = _by_ranks(values)
    same = len({value for _, value in values if value}) <= 1
    return text if same or len(text) <= MAX_SETTING_CHARS else DIFFERS


def _by_ranks(values: Iterable[tuple[int, str]]) -> str:
    """The value that all ranks have, or each value with its ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values:
        ranks_of.setdefault(value, []).append(rank)
    ranks_of.pop("", None)
    if not ranks_of:
        return NOT_REPORTED
    if len(ranks_of) == 1:
        return next(iter(ranks_of))
    if len(ranks_of) > MAX_VALUES:
        return f"{len(ranks_of)} different values"
    return "; ".join(f"{value} ({ranks_text(ranks)})" for value, ranks in ranks_of.items())
