"""The stacks of many ranks, each told once: ranks that are at the same place stand together."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from ddpwatch.core.diagnosis.exits import why_no_heartbeat
from ddpwatch.core.diagnosis.stacks import is_library
from ddpwatch.core.units import ranks_text
from ddpwatch.view.cells import Cell, Level, fit, pad
from ddpwatch.view.layout import paragraph
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.view.cells import Line
    from ddpwatch.wire import ThreadStack

FUNCTION_COLUMNS: Final = 44
NO_ANSWER: Final = "no answer: stopped, gone, or something holds Python's lock"


def stacks_lines(ranks: Sequence[RankState], columns: int) -> list[Line]:
    """Thread by thread, those of most ranks first; then who has not answered."""
    together: dict[tuple[str, tuple[tuple[str, str, int], ...]], list[RankState]] = {}
    stacks: dict[tuple[str, tuple[tuple[str, str, int], ...]], ThreadStack] = {}
    for rank in ranks:
        for thread in rank.stack.threads if rank.stack is not None else ():
            key = thread.name, tuple((frame.function, frame.file, frame.line) for frame in thread.frames)
            together.setdefault(key, []).append(rank)
            stacks[key] = thread
    lines: list[Line] = []
    for key in sorted(together, key=lambda key: (not stacks[key].training, -len(together[key]), together[key][0].rank)):
        lines += [*([[]] if lines else []), *_stack(stacks[key], together[key], columns)]
    silent: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.stack is None:
            why = f"no answer: {why_no_heartbeat(rank)}" if why_no_heartbeat(rank) else NO_ANSWER
            silent.setdefault(why, []).append(rank.rank)
    for why, numbers in silent.items():
        lines += [*([[]] if lines else []), *paragraph(f"{ranks_text(numbers)}: {why}", columns, Level.WARN)]
    return lines


def _stack(thread: ThreadStack, ranks: Sequence[RankState], columns: int) -> list[Line]:
    # Of the stack's own moment: a beat tells another one.
    phases = sorted({PHASES[rank.stack.phase] for rank in ranks if rank.stack is not None and rank.stack.phase >= 0})
    where = f", in {' or '.join(phases)}" if thread.training and phases else ""
    title = [Cell(ranks_text(rank.rank for rank in ranks), Level.STRONG), Cell(f" · {thread.name}{where}", Level.DIM)]
    lines = [fit(title, columns)]
    for frame in thread.frames:
        library = is_library(frame)
        place = f"{frame.file if not library else PurePath(frame.file).name}:{frame.line}"
        text = pad(frame.function, FUNCTION_COLUMNS) if len(frame.function) < FUNCTION_COLUMNS else frame.function
        mark = "  " if library else "▸ "
        level = Level.DIM if library else Level.PLAIN
        lines.append(fit([Cell(f"  {mark}{text} ", level), Cell(place, Level.DIM)], columns))
    return lines


def stacks_object(ranks: Sequence[RankState]) -> list[dict[str, Any]]:
    """For machines: one object a rank; `threads` is null where it has not answered."""
    return [
        {
            "rank": rank.rank,
            "phase": PHASES[rank.stack.phase] if rank.stack is not None and rank.stack.phase >= 0 else None,
            "threads": None if rank.stack is None else [
                {
                    "name": thread.name,
                    "training": thread.training,
                    "frames": [{"function": f.function, "file": f.file, "line": f.line} for f in thread.frames],
                }
                for thread in rank.stack.threads
            ],
        }
        for rank in ranks
    ]  # fmt: skip
