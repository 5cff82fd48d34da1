"""One look at a run, and how the values of metrics are read from it. What is not known is None, and never zero."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from ddpwatch.core.alerts import Severity
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.gpu import HOLDING
from ddpwatch.view.status import backend
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ddpwatch.core.alerts import Alert
    from ddpwatch.core.figures import Figures, RankFigures
    from ddpwatch.core.rank import RankState
    from ddpwatch.core.state import Condition, RunState
    from ddpwatch.core.watch import Watch
    from ddpwatch.wire import Beat, Gpu

MOST_RANKS: Final = 256
"""So many ranks are told one by one."""
WORST_RANKS: Final = 32
"""Of more ranks, these are: who an alert is about, then who is not up, then whose own work takes longest."""
MOST_GPUS: Final = 8
"""Of one rank."""
UP: Final[frozenset[Condition]] = frozenset({"ok", "paused"})
_IN_ORDER: Final[frozenset[Condition]] = UP | {"ended"}
_STATS: Final = ("min", "median", "p90", "max")

Labels: TypeAlias = tuple[object, ...]
Readings: TypeAlias = "Iterable[tuple[Labels, float | None]]"
Reader: TypeAlias = "Callable[[Look], Readings]"


@dataclass(frozen=True)
class Look:
    """A run at one moment."""

    state: RunState
    figures: Figures | None
    open: tuple[Alert, ...]
    opened: Counter[str]
    """By rule, alerts that were opened since watching began."""
    conditions: dict[int, Condition]
    ranks: Sequence[RankState]
    """Those that are told one by one."""


def look_at(watch: Watch, opened: Counter[str], before: frozenset[int] = frozenset()) -> Look:
    """A look at the run now. `before` are the ranks that were told one by one the last time."""
    state, figures, alerts = watch.state, watch.figures(), tuple(watch.book.open.values())
    conditions = {rank.rank: state.condition(rank) for rank in state.ranks.values()}
    ranks: Sequence[RankState] = list(state.ranks.values())
    if len(ranks) > MOST_RANKS:
        ranks = _worst(state, figures, alerts, conditions, before)
    return Look(state, figures, alerts, Counter(opened), conditions, ranks)


def _worst(
    state: RunState,
    figures: Figures | None,
    alerts: Iterable[Alert],
    conditions: dict[int, Condition],
    before: frozenset[int],
) -> list[RankState]:
    """The worst ranks in order of their number. Who was among them stays for a while: each newcomer is a new series."""
    accused = {rank for alert in alerts for rank in alert.finding.ranks}
    measured = figures.ranks if figures else {}

    def badness(rank: int) -> tuple[bool, bool, float]:
        own = measured.get(rank)
        return rank in accused, conditions[rank] not in _IN_ORDER, own.self_ns if own else 0.0

    order = sorted(state.ranks, key=badness, reverse=True)
    surely, maybe = order[: WORST_RANKS // 2], order[WORST_RANKS // 2 : 2 * WORST_RANKS]
    maybe.sort(key=lambda rank: rank not in before)
    return [state.ranks[rank] for rank in sorted((surely + maybe)[:WORST_RANKS])]


def of_run(get: Callable[[Look], float | None]) -> Reader:
    """One value."""
    return lambda look: [((), get(look))]


def of_figures(get: Callable[[Figures], float | None]) -> Reader:
    """One value; absent while there are no figures."""
    return lambda look: [((), get(look.figures))] if look.figures else ()


def of_states(states: tuple[str, ...], count: Callable[[Look, str], float]) -> Reader:
    """A value for each state."""
    return lambda look: [((state,), count(look, state)) for state in states]


def of_ranks(get: Callable[[Look, RankState], float | None]) -> Reader:
    """A value for each rank that is told by itself."""
    return lambda look: [((rank.rank, rank.host), get(look, rank)) for rank in look.ranks]


def of_beats(get: Callable[[Beat], float | None]) -> Reader:
    """A value from the latest sign of life of each rank."""
    return of_ranks(lambda _, rank: get(rank.beat) if rank.beat else None)


def of_measured(get: Callable[[RankFigures], float | None]) -> Reader:
    """A value from the figures of each rank."""

    def value(look: Look, rank: RankState) -> float | None:
        found = look.figures.ranks.get(rank.rank) if look.figures else None
        return None if found is None else get(found)

    return of_ranks(value)


def phases(look: Look) -> Readings:
    """The phases of each rank."""
    for rank in look.ranks:
        if look.figures and (found := look.figures.ranks.get(rank.rank)):
            for phase in PHASES:
                yield (rank.rank, rank.host, phase), seconds(getattr(found, f"{phase}_ns"))


def _spread(values: Sequence[float | None]) -> Iterator[tuple[str, float]]:
    """Smallest, median, ninth tenth and largest of those that are known."""
    known = [value for value in values if value is not None]
    if known:
        yield from zip(_STATS, np.percentile(known, (0, 50, 90, 100)).tolist(), strict=True)


def over_ranks(get: Callable[[RankFigures], float | None]) -> Reader:
    """How a figure is spread over all ranks."""

    def values(look: Look) -> Readings:
        found = look.figures.ranks.values() if look.figures else ()
        return [((stat,), value) for stat, value in _spread([get(one) for one in found])]

    return values


def phases_over_ranks(look: Look) -> Readings:
    """How each phase is spread over all ranks."""
    found = look.figures.ranks.values() if look.figures else ()
    for phase in PHASES:
        for stat, value in _spread([seconds(getattr(one, f"{phase}_ns")) for one in found]):
            yield (phase, stat), value


def _gpus_of(look: Look, rank: RankState) -> list[Gpu]:
    return rank.gpus.now(look.state.now_ns)[:MOST_GPUS]


def of_gpus(get: Callable[[Gpu], float | None]) -> Reader:
    """A value for each GPU; absent when its last reading is too old to tell of now."""
    return lambda look: [
        ((rank.rank, rank.host, gpu.device), get(gpu)) for rank in look.ranks for gpu in _gpus_of(look, rank)
    ]


def gpu_info(look: Look) -> Readings:
    """What the GPUs are."""
    for rank in look.ranks:
        for gpu in _gpus_of(look, rank):
            yield (rank.rank, rank.host, gpu.device, gpu.name, gpu.uuid), 1


def throttled(look: Look) -> Readings:
    """Whether each of the reasons that matter holds the clocks down."""
    for rank in look.ranks:
        for gpu in _gpus_of(look, rank):
            for reason in HOLDING if "throttle" not in gpu.absent and not gpu.lost else ():
                yield (rank.rank, rank.host, gpu.device, reason), reason in gpu.throttle


def gpus_over_ranks(look: Look) -> Readings:
    """How utilisation is spread over all GPUs."""
    gpus = (gpu for rank in look.state.ranks.values() for gpu in _gpus_of(look, rank))
    return [((stat,), value) for stat, value in _spread([ratio(gpu.util_percent) for gpu in gpus])]


def open_alerts(look: Look) -> Readings:
    """By rule and severity; zeros, too, so that a rule that has never fired can be told from one there is not."""
    counts = Counter((alert.finding.rule, alert.finding.severity) for alert in look.open)
    for detector in DETECTORS:
        for severity in Severity:
            yield (detector.rule, severity.word), counts[detector.rule, severity]


def all_reduce(look: Look) -> Readings:
    """The share of the step; absent for one rank, which has nobody to meet."""
    return [((), look.figures.share)] if look.figures and look.state.world_size > 1 else ()


def shares(look: Look) -> Readings:
    """The two parts of the all-reduce share; absent where a rank is missing, and for one rank."""
    if look.figures and look.state.world_size > 1:
        yield ("wire",), look.figures.wire_share
        yield ("wait",), look.figures.wait_share


def run_info(look: Look) -> Readings:
    """Which run it is."""
    state = look.state
    return [((state.run_id, state.name, backend(state) or ""), 1)]


def sum_of_beats(look: Look, get: Callable[[Beat], float]) -> float | None:
    """The sum over all ranks that were heard."""
    heard = [get(rank.beat) for rank in look.state.ranks.values() if rank.beat]
    return sum(heard) if heard else None


def seconds(ns: float | None) -> float | None:
    """From nanoseconds."""
    return None if ns is None else ns / 1e9


def ratio(percent: float | None) -> float | None:
    """From per cent."""
    return None if percent is None else percent / 100


def scaled(value: float | None, factor: float) -> float | None:
    """In another unit."""
    return None if value is None else value * factor
