"""What one needs to run a job again: versions, places, settings, how it was started. And what is not known of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeAlias

from ddpwatch.core.numbers import count, plural, ranks_text, size
from ddpwatch.core.text import NAME_CHARS, tame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ddpwatch.core.state import RunState
    from ddpwatch.wire import Hello

Facts: TypeAlias = list[tuple[str, str]]
MOST_VALUES: Final = 4
"""Different values of one thing that are told."""
MOST_SETTING_CHARS: Final = 80
"""A setting that takes more to tell rank by rank, such as a temporary file of each, is only told to differ."""
MOST_HOSTS: Final = 64
MOST_LIMITS: Final = 32
DATA_PATH: Final = "DDPWATCH_DATA"
"""The variable that users say with where the data are."""
NOT_TOLD: Final = "not told"
DIFFERS: Final = "differs between ranks"


def manifest(state: RunState) -> list[tuple[str, Facts]]:
    """Groups of facts, each with a title. Ranks that differ are told apart."""
    return [
        ("Versions", _versions(state)),
        ("Where it ran", _places(state)),
        ("Model", _model(state)),
        ("DDP settings", _settings(state, lambda hello: hello.ddp)),
        ("Data", _data(state)),
        ("Started as", [("command", _said(state, lambda hello: hello.command))]),
        ("Environment", _settings(state, lambda hello: hello.environment)),
    ]


def judged_by(recorder: str, limits: Mapping[str, Mapping[str, float]]) -> Facts:
    """Which version recorded it, and the limits that were set."""
    if not recorder:
        return [("recorded by", NOT_TOLD), ("limits", NOT_TOLD)]
    set_to = [f"{group}.{key}={value:g}" for group, keys in limits.items() for key, value in keys.items()]
    shown = ", ".join(tame(text, NAME_CHARS) for text in set_to[:MOST_LIMITS]) or "as they come"
    return [("recorded by", f"ddpwatch {tame(recorder, NAME_CHARS)}"), ("limits", shown)]


def lacks(state: RunState) -> list[str]:
    """What is missing in all that came, each as a sentence."""
    found = []
    missing = [rank.rank for rank in state.ranks.values() if state.condition(rank) == "missing"]
    if missing:
        found.append(f"Of {ranks_text(missing)} nothing was heard.")
    ranks = state.ranks.values()
    if lost := sum(rank.lost for rank in ranks):
        found.append(f"{plural(lost, 'message')} did not arrive, or could not be written by the recorder.")
    if dropped := sum(rank.dropped for rank in ranks):
        found.append(f"{plural(dropped, 'step')} were overwritten before an agent could send them.")
    if state.bad:
        found.append(f"{plural(state.bad, 'message or step')} could not be used: {state.bad_reason or 'impossible'}.")
    if state.unknown:
        found.append(f"{plural(state.unknown, 'message')} of a kind that this version does not know.")
    return found


def _versions(state: RunState) -> Facts:
    return [
        ("ddpwatch agent", _said(state, lambda hello: hello.agent_version)),
        ("torch", _said(state, lambda hello: hello.torch)),
        ("python", _said(state, lambda hello: hello.python)),
        ("backend", _said(state, lambda hello: hello.backend)),
    ]


def _places(state: RunState) -> Facts:
    hosts: dict[str, list[int]] = {}
    for rank in state.ranks.values():
        if rank.host:
            hosts.setdefault(rank.host, []).append(rank.rank)
    shown = [f"{host} ({ranks_text(ranks)})" for host, ranks in list(hosts.items())[:MOST_HOSTS]]
    more = f", {len(hosts) - MOST_HOSTS} more" if len(hosts) > MOST_HOSTS else ""
    gpus: dict[str, int] = {}
    for rank in state.ranks.values():
        for gpu in rank.gpus.latest.gpus if rank.gpus.latest is not None else ():
            gpus[gpu.name or gpu.device] = gpus.get(gpu.name or gpu.device, 0) + 1
    return [
        ("world size", plural(state.world_size, "rank")),
        ("hosts", (", ".join(shown) or NOT_TOLD) + more),
        ("devices", _said(state, lambda hello: hello.device.partition(":")[0])),
        ("GPUs", ", ".join(f"{number} × {name}" for name, number in list(gpus.items())[:MOST_VALUES]) or "none read"),
        ("cores a rank", _said(state, lambda hello: str(hello.cores or ""))),
    ]


def _model(state: RunState) -> Facts:
    return [
        ("model", _said(state, lambda hello: hello.model)),
        ("wrapped as", _said(state, lambda hello: hello.kind)),
        ("parameters", _said(state, lambda hello: count(hello.parameters) if hello.parameters else "")),
        ("their size", _said(state, lambda hello: size(hello.parameter_bytes) if hello.parameter_bytes else "")),
        ("communication", _said(state, lambda hello: hello.comm)),
        ("clock", _said(state, lambda hello: hello.clock)),
    ]


def _data(state: RunState) -> Facts:
    path = _said(state, lambda hello: hello.environment.get(DATA_PATH, ""))
    where = [] if path == NOT_TOLD else [("path", path)]
    loaders = [(rank.rank, rank.loaders[max(rank.loaders)]) for rank in state.ranks.values() if rank.loaders]
    if not loaders:
        return [*where, ("DataLoader", NOT_TOLD)]
    return [
        *where,
        ("sampler", _spread((rank, loader.sampler) for rank, loader in loaders)),
        ("batch size", _spread((rank, str(loader.batch_size or "")) for rank, loader in loaders)),
        ("workers", _spread((rank, str(loader.workers)) for rank, loader in loaders)),
        ("batches a pass", _spread((rank, str(loader.length or "")) for rank, loader in loaders)),
    ]


def _settings(state: RunState, of: Callable[[Hello], dict[str, str]]) -> Facts:
    names = sorted({name for rank in state.ranks.values() if rank.hello is not None for name in of(rank.hello)})
    hellos = [(rank.rank, of(rank.hello)) for rank in state.ranks.values() if rank.hello is not None]
    pairs = [(name, _setting([(rank, told.get(name, "")) for rank, told in hellos])) for name in names]
    return pairs or [("settings", NOT_TOLD)]


def _setting(said: list[tuple[int, str]]) -> str:
    text = _spread(said)
    same = len({value for _, value in said if value}) <= 1
    return text if same or len(text) <= MOST_SETTING_CHARS else DIFFERS


def _said(state: RunState, of: Callable[[Hello], str]) -> str:
    return _spread((rank.rank, of(rank.hello)) for rank in state.ranks.values() if rank.hello is not None)


def _spread(said: Iterable[tuple[int, str]]) -> str:
    """What all say, or who says what."""
    speakers: dict[str, list[int]] = {}
    for rank, value in said:
        speakers.setdefault(value, []).append(rank)
    speakers.pop("", None)
    if not speakers:
        return NOT_TOLD
    if len(speakers) == 1:
        return next(iter(speakers))
    if len(speakers) > MOST_VALUES:
        return f"{len(speakers)} different ones"
    return "; ".join(f"{value} ({ranks_text(ranks)})" for value, ranks in speakers.items())
