"""In which operations the ranks were when their connections broke.

gloo aborts a process that receives more than it expects, which is what happens when ranks are in different operations.
The one that is aborted need not be the wrong one: it is the one whose operation was the smaller. What the others were
in they tell with their last words; and those that a launcher ends before they come to that, when a viewer on their host
sees the abort and asks at once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from ddpwatch.core.diagnosis.exits import is_timeout, place_of

if TYPE_CHECKING:
    from ddpwatch.core.diagnosis.exits import End, Endings
    from ddpwatch.wire import Collective


_Key: TypeAlias = tuple[str, int, str, str]
"""Of an operation: group, number, name, sizes."""
_SPOT: Final = re.compile(r"([^/\s(]+):(\d{1,7})\b")


@dataclass(frozen=True)
class OpMismatch:
    """Ranks that lost each other, by the operation that they were in."""

    op_groups: tuple[tuple[End, ...], ...]
    """The largest first. Those that were aborted are in the camp where they belong by its size, if there are two."""
    ops: tuple[Collective, ...]
    """What each camp was in."""
    aborted: tuple[End, ...]
    """Those that their own runtime has ended."""
    unplaced: tuple[End, ...] = ()
    """Those of them that are in no camp."""
    unreported: tuple[End, ...] = ()
    """Those that were ended before they could tell what they were in."""
    unseen: tuple[End, ...] = ()
    """Those of them whose end nobody saw: they may have been aborted, killed, or ended by the launcher."""

    @property
    def minority(self) -> tuple[End, ...]:
        """The few, where it is certain that they are; empty = it cannot be told who is wrong."""
        elsewhere = sum(map(len, self.op_groups[1:])) + len(self.unplaced) + len(self.unreported)
        if len(self.op_groups) < 2 or len(self.op_groups[0]) <= elsewhere:
            return ()
        return tuple(end for op_group in self.op_groups[1:] for end in op_group)


def mismatch_at_end(endings: Endings) -> OpMismatch | None:
    """What the ranks were in; None where something else explains the end, or nothing has broken."""
    ends = [*endings.first, *(end for end, _ in endings.later)]
    broken = [end for end in ends if end.complains_of_peer and not is_timeout(_text(end))]
    aborted = tuple(end for end in ends if end.aborted)
    if any(end.own_error or end.how == "silent" or is_timeout(_text(end)) for end in ends):
        return None
    left = [*broken, *(end for end in ends if aborted and end.asked)]
    since_ns = min((end.at_ns for end in aborted), default=None)
    words = [(end, reported) for end in left if (reported := _ops(end, since_ns))]
    if not left:
        return None
    by_op: dict[_Key, list[End]] = {}
    ops: dict[_Key, Collective] = {}
    for (end, _), op in zip(words, _ops_at_end([reported for _, reported in words]), strict=True):
        key = (op.group, op.seq, op.op, op.shape)
        by_op.setdefault(key, []).append(end)
        ops[key] = op
    # A viewer that was there when it ended knows more.
    unseen = [end for end in ends if end.how == "lost" and end.code is None]
    unreported = _join_by_place(by_op, [end for end in [*left, *unseen] if not _ops(end, since_ns)])
    # Aborted by another reason, or others were ended before they could tell.
    placed = _smaller(ops) if len(ops) == 2 else None
    if placed is not None:
        by_op[placed] += aborted
    order = sorted(by_op, key=lambda key: -len(by_op[key]))
    return OpMismatch(
        tuple(tuple(by_op[key]) for key in order),
        tuple(ops[key] for key in order),
        aborted,
        () if placed is not None else aborted,
        tuple(unreported),
        tuple(end for end in unseen if end in unreported),
    )


def _join_by_place(by_op: dict[_Key, list[End]], unreported: list[End]) -> list[End]:
    """Put those who have not told their operation to those who were at the same place in the script; who is left."""
    op_groups: dict[tuple[str, str], set[_Key]] = {}
    for key, ends in by_op.items():
        for place in filter(None, map(_spot, ends)):
            op_groups.setdefault(place, set()).add(key)
    left = []
    for end in unreported:
        spot = _spot(end)
        keys = op_groups.get(spot, set()) if spot is not None else set()
        if len(keys) == 1:
            by_op[next(iter(keys))].append(end)
        else:
            left.append(end)
    return left


def _spot(end: End) -> tuple[str, str] | None:
    """File and line that it was at; None = not told."""
    found = _SPOT.search(place_of(end))
    return (found[1], found[2]) if found else None


def _ops_at_end(words: list[list[Collective]]) -> list[Collective]:
    """Of each rank the operation that it broke in. Some are ahead, having joined more without waiting: where all are in
    the same group, it is the last one that all have joined.
    """
    last = [ops[-1] for ops in words]
    if len({op.group for op in last}) > 1:
        return last
    seq = min((op.seq for op in last), default=0)
    return [
        next((op for op in ops if op.group == mine.group and op.seq == seq), mine)
        for ops, mine in zip(words, last, strict=True)
    ]


def _smaller(ops: dict[_Key, Collective]) -> _Key | None:
    """Of two operations of one kind the one with less data: who is in it receives more than it expects."""
    (one, first), (other, second) = ops.items()
    if first.op != second.op or first.bytes == second.bytes or not (first.bytes and second.bytes):
        return None
    return one if first.bytes < second.bytes else other


def _ops(end: End, since_ns: int | None) -> list[Collective]:
    """Its last operations, as it said at its end, or when it was asked after another was aborted, which was then; what
    it told before may be long ago.
    """
    rank = end.rank
    if rank.bye is not None and rank.bye.collectives:
        return rank.bye.collectives
    reported_ns = rank.collectives_ns
    answered = since_ns is not None and reported_ns is not None and reported_ns >= since_ns
    return rank.stack.collectives if answered and rank.stack is not None else []


def _text(end: End) -> str:
    return end.rank.bye.text if end.rank.bye is not None else ""
