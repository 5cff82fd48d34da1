"""The columns of the rank table: what each one reads from a rank, how it sorts, and which gives way first.

The rows of the rank table: each rank with its figures, and the worst that is said of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddpwatch.core import rules
from ddpwatch.core.alerts.hangs import is_hang, is_suspect
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.alerts.severity import OF_CONDITION, rank_severity
from ddpwatch.core.state.rank import frozen_rank
from ddpwatch.core.units import UNPROVEN, ms, percent, size
from ddpwatch.view.alerts.format import MARKS
from ddpwatch.view.cells import Cell, Level
from ddpwatch.view.gpus.usage import WORTH_SAYING_PERCENT, rank_memory, rank_util, rank_waiting, stale_s
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpwatch.core.alerts.model import Finding
    from ddpwatch.core.metrics.figures import Figures, RankFigures
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import Condition, RunState
    from ddpwatch.wire import Beat

LONG_IN_PHASE_NS: Final = 1_000_000_000
"""A rank that has been in one phase for longer says so."""
ALWAYS: Final = 99
"""A column that is never left out."""
_CALM: Final[dict[Condition, Cell]] = {
    "ok": Cell("ok", Level.OK),
    "paused": Cell("‖ paused", Level.WARN),
    "ended": Cell("■ ended", Level.DIM),
}
"""State of a rank with which nothing is wrong."""


class Row(NamedTuple):
    """One rank as the table sees it."""

    state: RankState
    condition: Condition
    figures: RankFigures | None
    stands_out: bool
    """Whether this is the rank that the others wait for."""
    finding: Finding | None = None
    """The most urgent one that names the rank."""
    then: bool = False
    """Whether the figures are of a step long past: what the rank says of itself does not belong to it."""

    @property
    def severity(self) -> Severity | None:
        """How bad it is, or was at the step that is looked back at; None = nothing is wrong."""
        return rank_severity(self.state, "ok" if self.then else self.condition, self.finding)

    @property
    def waited_for(self) -> bool:
        """Whether the others hang because of it."""
        return self.finding is not None and is_hang(self.finding)


@dataclass(frozen=True)
class Column:
    """A column of text; `keep` tells which go first when there is no room: the lowest."""

    title: str
    read: Callable[[Row], Cell]
    keep: int
    columns: int
    """How wide it is where widths must not change with what is in them."""
    order: Callable[[Row], Any]
    """What it sorts by, smallest first; where a large number is the one to look at, its negative."""
    right: bool = True
    rises: bool = False
    """Whether the smallest number, or the first of the alphabet, comes first."""


def arrow(*, rises: bool) -> str:
    """The mark of a column that is sorted by."""
    return "▴" if rises else "▾"


def badge(row: Row) -> Cell:
    """The state of a rank in a few words, with the reason where there is one."""
    condition, severity, beat, bye, finding = row.condition, row.severity, row.state.beat, row.state.bye, row.finding
    if row.then:
        return _badge_of_then(row)
    calm = Cell(f"‖ {beat.pause}", Level.WARN) if condition == "paused" and beat else _CALM.get(condition)
    text = ""
    if condition in {"ok", "silent"} and finding is not None and is_suspect(finding) and beat:
        where = "silent" if condition == "silent" else PHASES[beat.phase]
        text = "out of line" if finding.rule == rules.DESYNC else f"not come: {where}"
    elif condition == "ok" and beat and beat.phase_ns >= LONG_IN_PHASE_NS:
        text = f"{beat.phase_ns / 1e9:.0f} s in {PHASES[beat.phase]}"
        severity = max(severity or Severity.WARNING, Severity.WARNING)
    elif condition == "ok" and finding is not None:
        text = _found(row, finding)
    elif condition == "ended" and bye and bye.reason == "off":
        text = "agent off"
    if text or calm is None:
        return _marked(text or condition, severity or Severity.INFO)
    # The mark of a pause or an orderly end stays; the severity shows in its level.
    return calm if severity is None else calm._replace(level=MARKS[severity].level)


def _marked(text: str, severity: Severity) -> Cell:
    return Cell(f"{MARKS[severity].text} {text}", MARKS[severity].level)


def _badge_of_then(row: Row) -> Cell:
    """What was found then; how the rank does now is said as that."""
    if row.finding is not None:
        return _marked(_found(row, row.finding), row.finding.severity)
    if row.condition in {"ok", "paused"}:
        return Cell("ok" if row.figures is not None else UNPROVEN, Level.DIM)
    return Cell(f"now {row.condition}", Level.DIM)


def _found(row: Row, finding: Finding) -> str:
    cost = percent(finding.cost) if finding.cost else None
    return " ".join(filter(None, ("slow", finding.phase, cost))) if row.stands_out else finding.rule


def attention(row: Row) -> tuple[int, bool, float, int]:
    """Sorts what needs a look to the top and leaves the others in their order, so that healthy ranks keep still."""
    severity = row.severity
    # By what was found, and not by the figures: those of a whole host that is slow change places with every step.
    cost = row.finding.cost or 0.0 if row.finding else 0.0
    return 1 if severity is None else -severity, row.condition not in OF_CONDITION, -cost, row.state.rank


def _time(name: str) -> Callable[[Row], Cell]:
    def read(row: Row) -> Cell:
        return Cell(ms(getattr(row.figures, f"{name}_ns") if row.figures else None), _dim_unless(row.figures))

    return read


def _longest(name: str) -> Callable[[Row], float]:
    def order(row: Row) -> float:
        value = getattr(row.figures, f"{name}_ns") if row.figures else None
        # Ranks without figures are the ones to look at.
        return float("-inf") if value is None else -value

    return order


def _self(row: Row) -> Cell:
    text = ms(row.figures.self_ns if row.figures else None)
    if not row.stands_out or row.finding is None:
        return Cell(text, _dim_unless(row.figures))
    mark, level, _ = MARKS[row.finding.severity]
    return Cell(f"{mark}{text}", level)


def _cpu(row: Row) -> Cell:
    beat = _beat(row)
    return Cell(f"{min(beat.cpu_percent, 99_999):.0f}" if beat else UNPROVEN, _dim_unless(beat))


def _rss(row: Row) -> Cell:
    beat = _beat(row)
    return Cell(size(beat.rss_bytes) if beat and beat.rss_bytes else UNPROVEN, _dim_unless(beat))


def _gpu(row: Row) -> Cell:
    """Utilisation; the mark of waiting stands behind one of which much is waiting, as in the bar of the step."""
    util = rank_util(row.state)
    if util is None or row.then:
        return Cell(UNPROVEN, Level.DIM)
    waits = (rank_waiting(row) or 0.0) >= WORTH_SAYING_PERCENT
    level = Level.DIM if stale_s(row.state) is not None else Level.WAITING if waits else Level.PLAIN
    return Cell(f"{util:.0f}{'░' if waits else ' '}", level)


def _gpu_memory(row: Row) -> Cell:
    memory = rank_memory(row.state)
    if memory is None or row.then:
        return Cell(UNPROVEN, Level.DIM)
    return Cell(size(memory[0]), Level.DIM if stale_s(row.state) is not None else Level.PLAIN)


def _least_util(row: Row) -> float:
    util = rank_util(row.state)
    return -1.0 if util is None else util


def _most_gpu_memory(row: Row) -> float:
    memory = rank_memory(row.state)
    return float("-inf") if memory is None else -memory[0]


def _beat(row: Row) -> Beat | None:
    """What the rank has told of its process; None = nothing, or not of then."""
    return None if row.then else row.state.beat


def _dim_unless(known: object) -> Level:
    return Level.PLAIN if known is not None else Level.DIM


def _phase_column(title: str, name: str, keep: int) -> Column:
    return Column(title, _time(name), keep, 5, _longest(name))


GPU_TITLES: Final = frozenset({"GPU%", "GPU MEM"})
"""Columns that are there only where GPUs are read."""
LEFT: Final = (
    Column(
        "RANK", lambda row: Cell(str(row.state.rank), Level.STRONG), ALWAYS, 4, lambda row: row.state.rank, rises=True
    ),
    Column(
        "HOST",
        lambda row: Cell(row.state.host, Level.DIM),
        2,
        20,
        lambda row: row.state.host.casefold(),
        right=False,
        rises=True,
    ),
    Column(
        "PID", lambda row: Cell(str(row.state.pid or UNPROVEN), Level.DIM), 1, 7, lambda row: row.state.pid, rises=True
    ),
)
RIGHT: Final = (
    Column("SELF", _self, ALWAYS, 5, _longest("self")),
    _phase_column("SYNC", "sync", 11),
    _phase_column("WAIT", "wait", ALWAYS),
    _phase_column("data", "data", 9),
    _phase_column("fwd", "forward", 8),
    _phase_column("bwd", "backward", 10),
    _phase_column("opt", "optimizer", 5),
    _phase_column("other", "other", 4),
    Column("CPU%", _cpu, 7, 4, lambda row: -row.state.beat.cpu_percent if row.state.beat else float("-inf")),
    Column("RSS", _rss, 6, 5, lambda row: -row.state.beat.rss_bytes if row.state.beat else float("-inf")),
    Column("GPU%", _gpu, 12, 4, _least_util, rises=True),
    Column("GPU MEM", _gpu_memory, 9, 7, _most_gpu_memory),
    Column("STATE", badge, ALWAYS, 24, attention, right=False),
)


def rows_of(
    state: RunState,
    figures: Figures | None,
    worst: Mapping[int, Finding],
    *,
    then: bool = False,
    frozen: bool = False,
) -> tuple[Row, ...]:
    """One a rank, in their order. `then` = the figures are of a step long past; `frozen` = what the ranks say of
    themselves stays as it is now.
    """
    measured = figures.ranks if figures else {}
    rows: list[Row] = []
    for number, received in state.ranks.items():
        rank = frozen_rank(received) if frozen else received
        finding = worst.get(number)
        stands_out = finding is not None and finding.rule == rules.STRAGGLER
        # By position, in the order of the fields: there may be thousands.
        rows.append(Row(rank, state.condition(rank), measured.get(number), stands_out, finding, then))
    return tuple(rows)
