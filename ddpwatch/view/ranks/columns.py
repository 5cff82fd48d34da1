"""The rows and columns of the rank table: what a column shows of a rank, what it sorts by, which are dropped first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.hang_alerts import is_hang, is_suspect
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.alerts.severity import OF_CONDITION, is_long_in_phase, rank_severity, steady_severity
from ddpwatch.core.state.rank import frozen_rank
from ddpwatch.core.state.run import ALIVE
from ddpwatch.core.units import UNPROVEN, ms, percent, size
from ddpwatch.view.alerts.format import MARKS
from ddpwatch.view.cells import Cell, Level
from ddpwatch.view.columns import ALWAYS, Column, sort_keys
from ddpwatch.view.gpus.busy_and_waiting import (
    WORTH_SAYING_PERCENT,
    cpu_percent,
    rank_memory,
    rank_util,
    rank_waiting,
    stale_s,
)
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddpwatch.core.alerts.model import Finding
    from ddpwatch.core.metrics.live_metrics import Figures, RankFigures
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import Condition, RunState
    from ddpwatch.wire import Beat

_CALM: Final[dict[Condition, Cell]] = {
    "ok": Cell("ok", Level.OK),
    "paused": Cell("‖ paused", Level.WARN),
    "ended": Cell("■ exited", Level.DIM),
}
"""State of a rank with which nothing is wrong."""


class Row(NamedTuple):
    """One rank with its figures and the most urgent finding about it."""

    state: RankState
    condition: Condition
    figures: RankFigures | None
    stands_out: bool
    """Whether this is the rank that the others wait for."""
    finding: Finding | None = None
    """The most urgent finding that names the rank."""
    then: bool = False
    """Whether the figures are of a step long past, so that current readings of the rank do not belong to them."""

    @property
    def severity(self) -> Severity | None:
        """Severity of the rank, or at the step that is shown; None = nothing is wrong."""
        if self.then:
            return None if self.finding is None else self.finding.severity
        return rank_severity(self.state, self.condition, self.finding)

    @property
    def waited_for(self) -> bool:
        """Whether the others hang because of this rank."""
        return self.finding is not None and is_hang(self.finding)


def rows_of(
    state: RunState, figures: Figures | None, worst: Mapping[int, Finding], *, then: bool = False, frozen: bool = False
) -> tuple[Row, ...]:
    """One row per rank, in their order. `then` = the figures are of a step long past; `frozen` = current readings do
    not change after this moment.
    """
    measured = figures.ranks if figures else {}
    rows: list[Row] = []
    for number, received in state.ranks.items():
        rank = frozen_rank(received) if frozen else received
        finding = worst.get(number)
        stands_out = finding is not None and finding.rule == rules.STRAGGLER
        # Positional arguments are faster, and there may be thousands of ranks.
        rows.append(Row(rank, state.condition(rank), measured.get(number), stands_out, finding, then))
    return tuple(rows)


def condition_text(condition: Condition) -> str:
    """Condition of a rank as it is shown; its own name is part of the JSON interface."""
    return {"silent": "no heartbeat", "ended": "exited"}.get(condition, condition)


def badge(row: Row) -> Cell:
    """The state of a rank in a few words, with the reason if there is one."""
    condition, severity, beat, finding = row.condition, row.severity, row.state.beat, row.finding
    if row.then:
        return _past_badge(row)
    calm = Cell(f"‖ {beat.pause}", Level.WARN) if condition == "paused" and beat else _CALM.get(condition)
    text = ""
    if condition in {"ok", "silent"} and finding is not None and is_suspect(finding) and beat:
        joined = f"not joined: {PHASES[beat.phase]}" if condition == "ok" else condition_text(condition)
        text = "mismatch" if finding.rule == rules.DESYNC else joined
    elif beat and is_long_in_phase(row.state, condition):
        text = f"{beat.phase_ns / 1e9:.0f} s in {PHASES[beat.phase]}"
    elif condition == "ok" and finding is not None:
        text = _found(row, finding)
    elif condition == "ended" and row.state.agent_off:
        text = "agent off"
    if text or calm is None:
        return _marked(text or condition_text(condition), severity or Severity.INFO)
    # The mark of a pause or a clean exit stays; the severity shows in its level.
    return calm if severity is None else calm._replace(level=MARKS[severity].level)


def _marked(text: str, severity: Severity) -> Cell:
    return Cell(f"{MARKS[severity].text} {text}", MARKS[severity].level)


def _past_badge(row: Row) -> Cell:
    """The finding at that step; else the current condition, marked as such."""
    if row.finding is not None:
        return _marked(_found(row, row.finding), row.finding.severity)
    if row.condition in ALIVE:
        return Cell("ok" if row.figures is not None else UNPROVEN, Level.DIM)
    return Cell(f"now {condition_text(row.condition)}", Level.DIM)


def _found(row: Row, finding: Finding) -> str:
    cost = percent(finding.cost) if finding.cost else None
    return " ".join(filter(None, ("slow", finding.phase, cost))) if row.stands_out else finding.rule


def attention(row: Row) -> tuple[int, bool, float, int]:
    """Sort key that puts urgent ranks first and leaves healthy ones in their order."""
    severity = steady_severity(row.state, "ok" if row.then else row.condition, row.finding)
    # By findings and not by figures: the figures of the ranks of a slow host change places with every step.
    cost = row.finding.cost or 0.0 if row.finding else 0.0
    return 1 if severity is None else -severity, row.condition not in OF_CONDITION, -cost, row.state.rank


def _self(row: Row) -> Cell:
    text = ms(row.figures.self_ns if row.figures else None)
    if not row.stands_out or row.finding is None:
        return Cell(text, _dim_unless(row.figures))
    mark, level, _ = MARKS[row.finding.severity]
    return Cell(f"{mark}{text}", level)


def _cpu(row: Row) -> Cell:
    beat = _beat(row)
    return Cell(f"{cpu_percent(row.state):.0f}" if beat else UNPROVEN, _dim_unless(beat))


def _rss(row: Row) -> Cell:
    beat = _beat(row)
    return Cell(size(beat.rss_bytes) if beat and beat.rss_bytes else UNPROVEN, _dim_unless(beat))


def _gpu(row: Row) -> Cell:
    """Utilization, followed by the glyph of waiting where enough of it is waiting."""
    util = rank_util(row.state)
    if util is None or row.then:
        return Cell(UNPROVEN, Level.DIM)
    waits = (rank_waiting(row) or 0.0) >= WORTH_SAYING_PERCENT
    level = Level.DIM if stale_s(row.state) is not None else Level.WAITING if waits else Level.PLAIN
    return Cell(f"{util:.0f}{'░' if waits else ' '}", level)


def _gpu_memory(row: Row) -> Cell:
    used = rank_memory(row.state)
    if used is None or row.then:
        return Cell(UNPROVEN, Level.DIM)
    return Cell(size(used), Level.DIM if stale_s(row.state) is not None else Level.PLAIN)


def _by_gpu(row: Row) -> float:
    util = rank_util(row.state)
    return -1.0 if util is None else util


def _by_gpu_memory(row: Row) -> float:
    used = rank_memory(row.state)
    return float("-inf") if used is None else -used


def _beat(row: Row) -> Beat | None:
    """The last heartbeat; None = there is none, or it does not belong to the step that is shown."""
    return None if row.then else row.state.beat


def _dim_unless(known: object) -> Level:
    return Level.PLAIN if known is not None else Level.DIM


def _time_column(title: str, phase: str, keep: int, read: Callable[[Row], Cell] | None = None) -> Column[Row]:
    """Median time of a phase in milliseconds; the longest comes first, ranks without figures before it."""

    def time_ns(row: Row) -> float | None:
        value: float | None = getattr(row.figures, f"{phase}_ns", None)
        return value

    def order(row: Row) -> float:
        value = time_ns(row)
        return float("-inf") if value is None else -value

    return Column(title, 5, keep, read or (lambda row: Cell(ms(time_ns(row)), _dim_unless(row.figures))), order=order)


BAR: Final = "ONE STEP"
GPU_TITLES: Final = frozenset({"GPU%", "GPU MEM"})
"""Columns that are shown only where GPUs are read."""
COLUMNS: Final = (
    Column[Row](
        "RANK", 4, read=lambda row: Cell(str(row.state.rank), Level.STRONG), order=lambda row: row.state.rank,
        rises=True,
    ),
    Column[Row](
        "HOST", 20, 2, lambda row: Cell(row.state.host, Level.DIM), order=lambda row: row.state.host.casefold(),
        right=False, rises=True,
    ),
    Column[Row](
        "PID", 7, 1, lambda row: Cell(str(row.state.pid or UNPROVEN), Level.DIM), order=lambda row: row.state.pid,
        rises=True,
    ),
    Column[Row](BAR, 12, right=False, grow=(120,)),
    _time_column("SELF", "self", ALWAYS, _self),
    _time_column("SYNC", "sync", 11),
    _time_column("WAIT", "wait", ALWAYS),
    _time_column("data", "data", 9),
    _time_column("fwd", "forward", 8),
    _time_column("bwd", "backward", 10),
    _time_column("opt", "optimizer", 5),
    _time_column("other", "other", 4),
    Column[Row](
        "CPU%", 4, 7, _cpu, order=lambda row: -row.state.beat.cpu_percent if row.state.beat else float("-inf")
    ),
    Column[Row]("RSS", 5, 6, _rss, order=lambda row: -row.state.beat.rss_bytes if row.state.beat else float("-inf")),
    Column("GPU%", 4, 12, _gpu, order=_by_gpu, rises=True),
    Column("GPU MEM", 7, 9, _gpu_memory, order=_by_gpu_memory),
    Column("STATE", 24, read=badge, order=attention, right=False),
)  # fmt: skip
"""The bar gets its scale, and so its `draw`, with the layout."""
SORT_KEYS: Final = sort_keys(COLUMNS)
