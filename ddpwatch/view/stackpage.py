"""Where a rank is in the script, as its own page shows it."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Final

from ddpwatch.core.numbers import duration
from ddpwatch.core.stack import is_library, training_thread
from ddpwatch.view.cells import Cell, Level, fit
from ddpwatch.view.prose import heading, paragraph

if TYPE_CHECKING:
    from ddpwatch.core.rank import RankState
    from ddpwatch.view.cells import Line
    from ddpwatch.wire import StackFrame

MOST_FRAMES: Final = 16
MOST_COLLECTIVES: Final = 4
NONE_YET: Final = "It was asked for its stack and has not answered: it is stopped, or something holds Python's lock."


def stack_lines(rank: RankState, columns: int, *, asked: bool) -> list[Line]:
    """The calls that the training thread is in, the innermost first; the script's own stand out.

    `asked` = somebody wants to know, so no answer says something, too.
    """
    thread = training_thread(rank.stack)
    if rank.stack is None or thread is None:
        return [heading("stack", columns), *paragraph(NONE_YET, columns, Level.DIM)] if asked else []
    age_s = max(0, (rank.beat.mono_ns if rank.beat is not None else 0) - rank.stack.mono_ns) / 1e9
    note = "now" if age_s < 2 else f"{duration(age_s)} ago"
    lines = [heading("stack", columns, f"{thread.name}, {note}, innermost first")]
    lines += [fit(_frame(frame), columns) for frame in thread.frames[:MOST_FRAMES]]
    if len(thread.frames) > MOST_FRAMES:
        lines.append([Cell(f"… {len(thread.frames) - MOST_FRAMES} more calls", Level.DIM)])
    if rank.stack.collectives:
        lines += [[], heading("last collectives", columns)]
        for collective in reversed(rank.stack.collectives[-MOST_COLLECTIVES:]):
            state = Cell("done", Level.DIM) if collective.done else Cell("waits", Level.WARN)
            what = f"{collective.op} #{collective.seq} {collective.shape}".rstrip()
            lines.append(fit([Cell(f"{what}, group {collective.group}: "), state], columns))
    return lines


def _frame(frame: StackFrame) -> Line:
    level = Level.DIM if is_library(frame) else Level.STRONG
    mark = "  " if is_library(frame) else "▸ "
    return [Cell(f"{mark}{frame.function}", level), Cell(f"  {PurePath(frame.file).name}:{frame.line}", Level.DIM)]
