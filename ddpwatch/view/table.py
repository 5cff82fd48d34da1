"""The rank table: one row a rank, as many columns as the terminal has room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ddpwatch.core.numbers import UNPROVEN, ms, size
from ddpwatch.view.cells import Cell, Level, columns_of, fit, pad
from ddpwatch.view.phasebar import phase_bar
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.figures import RankFigures
    from ddpwatch.core.rank import RankState
    from ddpwatch.core.state import Condition
    from ddpwatch.view.cells import Line

BAR_MIN_COLUMNS: Final = 12
BAR_MAX_COLUMNS: Final = 120
ROOMY_COLUMNS: Final = 100
"""From here on columns stand two blanks apart, and every rank shows its host and pid."""
LONG_IN_PHASE_NS: Final = 1_000_000_000
"""A rank that has been in one phase for longer says so."""

_ALWAYS: Final = 99
_MARKS: Final[dict[Condition, tuple[str, Level]]] = {
    "ok": ("", Level.OK),
    "paused": ("‖ ", Level.WARN),
    "ended": ("■ ", Level.DIM),
    "failed": ("✖ ", Level.BAD),
    "lost": ("✖ ", Level.BAD),
    "silent": ("▲ ", Level.WARN),
    "missing": ("✖ ", Level.BAD),
}


@dataclass(frozen=True)
class Row:
    """One rank as the table sees it."""

    state: RankState
    condition: Condition
    figures: RankFigures | None
    stands_out: bool
    """Whether this is the rank that the others wait for."""


@dataclass(frozen=True)
class Column:
    """A column of text; `keep` tells which go first when there is no room: the lowest."""

    title: str
    read: Callable[[Row], Cell]
    keep: int
    right: bool = True


def _time(name: str) -> Callable[[Row], Cell]:
    def read(row: Row) -> Cell:
        return Cell(ms(getattr(row.figures, f"{name}_ns") if row.figures else None), _dim_unless(row.figures))

    return read


def _self(row: Row) -> Cell:
    level = Level.WARN if row.stands_out else _dim_unless(row.figures)
    return Cell(("▲" if row.stands_out else "") + ms(row.figures.self_ns if row.figures else None), level)


def _cpu(row: Row) -> Cell:
    beat = row.state.beat
    return Cell(f"{min(beat.cpu_percent, 99_999):.0f}" if beat else UNPROVEN, _dim_unless(beat))


def _rss(row: Row) -> Cell:
    beat = row.state.beat
    return Cell(size(beat.rss_bytes) if beat and beat.rss_bytes else UNPROVEN, _dim_unless(beat))


def _state(row: Row) -> Cell:
    mark, level = _MARKS[row.condition]
    beat, bye = row.state.beat, row.state.bye
    if row.condition == "paused" and beat:
        return Cell(f"{mark}{beat.pause}", level)
    if row.condition == "ended" and bye and bye.reason == "off":
        return Cell("▲ agent off", Level.WARN)
    if row.condition == "ok" and beat and beat.phase_ns >= LONG_IN_PHASE_NS:
        return Cell(f"▲ {beat.phase_ns / 1e9:.0f} s in {PHASES[beat.phase]}", Level.WARN)
    return Cell(f"{mark}{row.condition}", level)


def _dim_unless(known: object) -> Level:
    return Level.PLAIN if known is not None else Level.DIM


_LEFT: Final = (
    Column("RANK", lambda row: Cell(str(row.state.rank), Level.STRONG), _ALWAYS),
    Column("HOST", lambda row: Cell(row.state.host, Level.DIM), 2, right=False),
    Column("PID", lambda row: Cell(str(row.state.pid or UNPROVEN), Level.DIM), 1),
)
_RIGHT: Final = (
    Column("SELF", _self, _ALWAYS),
    Column("SYNC", _time("sync"), 11),
    Column("WAIT", _time("wait"), _ALWAYS),
    Column("data", _time("data"), 9),
    Column("fwd", _time("forward"), 8),
    Column("bwd", _time("backward"), 10),
    Column("opt", _time("optimizer"), 5),
    Column("other", _time("other"), 4),
    Column("CPU%", _cpu, 7),
    Column("RSS", _rss, 6),
    Column("STATE", _state, _ALWAYS, right=False),
)
_STATE_MAX_COLUMNS: Final = 24
_HOST_MAX_COLUMNS: Final = 20


def rank_table(rows: Sequence[Row], columns: int, *, show_host: bool) -> list[Line]:
    """The heading and one line a row, none wider than `columns`. All bars have one scale: the longest step."""
    gap = 2 if columns >= ROOMY_COLUMNS else 1
    left, right, widths = _choose(rows, columns, gap, show_host=show_host)
    bar_columns = columns - sum(widths.values()) - gap * len(widths)
    bar_columns = min(bar_columns, BAR_MAX_COLUMNS)
    full_ns = max((row.figures.step_ns for row in rows if row.figures), default=1.0)
    heading = _line(
        [(Cell(column.title, Level.DIM), column) for column in left],
        [Cell(pad("ONE STEP", bar_columns), Level.DIM)],
        [(Cell(column.title, Level.DIM), column) for column in right],
        widths,
        gap,
    )
    lines = [heading]
    for row in rows:
        bar = phase_bar(row.figures, full_ns, bar_columns) if row.figures else [Cell(" " * bar_columns)]
        lines.append(
            _line(
                [(column.read(row), column) for column in left],
                bar,
                [(column.read(row), column) for column in right],
                widths,
                gap,
            )
        )
    return [fit(line, columns) for line in lines]


def _choose(
    rows: Sequence[Row], columns: int, gap: int, *, show_host: bool
) -> tuple[list[Column], list[Column], dict[str, int]]:
    """The columns there is room for beside the bar, and their widths."""
    roomy = columns >= ROOMY_COLUMNS
    wanted = {"HOST": roomy or show_host, "PID": roomy}
    chosen = [column for column in (*_LEFT, *_RIGHT) if wanted.get(column.title, True)]
    widths = {column.title: _natural_columns(column, rows) for column in chosen}
    while len(chosen) > 1 and sum(widths.values()) + gap * len(widths) + BAR_MIN_COLUMNS > columns:
        least = min(chosen, key=lambda column: column.keep)
        if least.keep == _ALWAYS:
            break
        chosen.remove(least)
        del widths[least.title]
    return [column for column in chosen if column in _LEFT], [column for column in chosen if column in _RIGHT], widths


def _natural_columns(column: Column, rows: Sequence[Row]) -> int:
    longest = max((columns_of(column.read(row).text) for row in rows), default=0)
    limit = {"STATE": _STATE_MAX_COLUMNS, "HOST": _HOST_MAX_COLUMNS}.get(column.title, longest)
    # Four at least, the length of any time: the table must not jitter when 99.9 becomes 100.
    return max(columns_of(column.title), min(longest, limit), 4 if column.right else 0)


def _line(
    left: list[tuple[Cell, Column]],
    bar: Line,
    right: list[tuple[Cell, Column]],
    widths: dict[str, int],
    gap: int,
) -> Line:
    line: Line = []
    for cell, column in left:
        line += [Cell(pad(cell.text, widths[column.title], right=column.right), cell.level), Cell(" " * gap)]
    line += bar
    for cell, column in right:
        line += [Cell(" " * gap), Cell(pad(cell.text, widths[column.title], right=column.right), cell.level)]
    return line
