"""Stacks of many ranks, with identical ones grouped."""

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
"""Width of functions' names, in terminal cells, so that places stand in line; longer names are not cut."""
NO_ANSWER: Final = "no answer: stopped, exited, or something holds the GIL"


def stacks_lines(ranks: Sequence[RankState], columns: int) -> list[Line]:
    """Each different stack with its ranks: training threads and large groups first, ranks without an answer last."""
    groups: dict[tuple[object, ...], tuple[ThreadStack, list[RankState]]] = {}
    unanswered: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.stack is None:
            why = why_no_heartbeat(rank)
            unanswered.setdefault(f"no answer: {why}" if why else NO_ANSWER, []).append(rank.rank)
            continue
        for thread in rank.stack.threads:
            key = thread.name, *((frame.function, frame.file, frame.line) for frame in thread.frames)
            groups.setdefault(key, (thread, []))[1].append(rank)
    ordered = sorted(groups.values(), key=lambda group: (not group[0].training, -len(group[1]), group[1][0].rank))
    blocks = [_stack(thread, alike, columns) for thread, alike in ordered]
    blocks += [paragraph(f"{ranks_text(them)}: {why}", columns, Level.WARN) for why, them in unanswered.items()]
    return [line for block in blocks for line in ([], *block)][1:]


def _stack(thread: ThreadStack, ranks: Sequence[RankState], columns: int) -> list[Line]:
    # The phase at the moment of the stack; a heartbeat has that of another moment.
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
    """The stacks as JSON objects, one per rank; `threads` is None if it did not answer."""
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
