"""In which operations the ranks were when their connections broke.

gloo aborts a process that receives more than it expects, which is what happens when ranks are in different operations.
The one that is aborted need not be the wrong one: it is the one whose operation was the smaller. What the others were
in they tell with their last words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpwatch.core.endings import is_timeout

if TYPE_CHECKING:
    from ddpwatch.core.endings import End, Endings
    from ddpwatch.wire import Collective


@dataclass(frozen=True)
class Break:
    """Ranks that lost each other, by the operation that they were in."""

    camps: tuple[tuple[End, ...], ...]
    """The largest first. Those that were aborted are in the camp where they belong by its size, if there are two."""
    ops: tuple[Collective, ...]
    """What each camp was in."""
    aborted: tuple[End, ...]
    """Those that their own runtime has ended."""
    unplaced: tuple[End, ...] = ()
    """Those of them that are in no camp."""

    @property
    def odd(self) -> tuple[End, ...]:
        """The few, where it is certain that they are; empty = it cannot be told who is wrong."""
        if len(self.camps) < 2 or len(self.camps[0]) <= sum(map(len, self.camps[1:])) + len(self.unplaced):
            return ()
        return tuple(end for camp in self.camps[1:] for end in camp)


def at_the_break(endings: Endings) -> Break | None:
    """What the ranks were in; None where something else explains the end, or nothing has broken."""
    ends = [*endings.first, *(end for end, _ in endings.later)]
    broken = [end for end in ends if end.complains_of_peer and not is_timeout(_text(end))]
    aborted = tuple(end for end in ends if end.aborted)
    if not broken or any(end.own_error or end.how == "silent" or is_timeout(_text(end)) for end in ends):
        return None
    told = [end for end in broken if _last(end) is not None]
    by_op: dict[tuple[str, int, str, str], list[End]] = {}
    ops: dict[tuple[str, int, str, str], Collective] = {}
    for end, op in zip(told, _met(told), strict=True):
        key = (op.group, op.seq, op.op, op.shape)
        by_op.setdefault(key, []).append(end)
        ops[key] = op
    # Aborted by another reason, or others were ended before they could tell.
    placed = _smaller(ops) if len(ops) == 2 else None
    if placed is not None:
        by_op[placed] += aborted
    order = sorted(by_op, key=lambda key: -len(by_op[key]))
    return Break(
        tuple(tuple(by_op[key]) for key in order),
        tuple(ops[key] for key in order),
        aborted,
        () if placed is not None else aborted,
    )


def _met(told: list[End]) -> list[Collective]:
    """Of each rank the operation that it broke in. Some are ahead, having joined more without waiting: where all are in
    the same group, it is the last one that all have joined.
    """
    last = [op for end in told if (op := _last(end)) is not None]
    if len({op.group for op in last}) > 1:
        return last
    seq = min((op.seq for op in last), default=0)
    return [
        next((op for op in _ops(end) if op.group == mine.group and op.seq == seq), mine)
        for end, mine in zip(told, last, strict=True)
    ]


def _smaller(ops: dict[tuple[str, int, str, str], Collective]) -> tuple[str, int, str, str] | None:
    """Of two operations of one kind the one with less data: who is in it receives more than it expects."""
    (one, first), (other, second) = ops.items()
    if first.op != second.op or first.bytes == second.bytes or not (first.bytes and second.bytes):
        return None
    return one if first.bytes < second.bytes else other


def _ops(end: End) -> list[Collective]:
    return end.rank.bye.collectives if end.rank.bye is not None else []


def _last(end: End) -> Collective | None:
    ops = _ops(end)
    return ops[-1] if ops else None


def _text(end: End) -> str:
    return end.rank.bye.text if end.rank.bye is not None else ""
