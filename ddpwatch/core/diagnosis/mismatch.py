"""Mismatched collectives: the operations that ranks were in when their connections broke.

gloo aborts a process that receives more than it expects, as happens when ranks are in different operations. The aborted
rank need not be the wrong one: its operation was the smaller. The others report theirs in their goodbye, or, if a
launcher ends them before, when a viewer on their host sees the abort and requests it.
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
"""An operation: group, sequence number, name, shape."""
_SPOT: Final = re.compile(r"([^/\s(]+):(\d{1,7})\b")
"""File name and line number."""


@dataclass(frozen=True)
class OpMismatch:
    """Ranks with broken connections, grouped by the operation that they were in."""

    op_groups: tuple[tuple[End, ...], ...]
    """The largest first. Of two, the one with the smaller operation has the aborted ranks."""
    ops: tuple[Collective, ...]
    """The operation of each group."""
    aborted: tuple[End, ...]
    """Ranks that their own runtime aborted."""
    unplaced: tuple[End, ...] = ()
    """Aborted ranks that are in none of the groups."""
    unreported: tuple[End, ...] = ()
    """Ranks that ended before they could report their operation."""
    unseen: tuple[End, ...] = ()
    """Those of them whose end was not observed: they may have been aborted, killed, or ended by the launcher."""

    @property
    def minority(self) -> tuple[End, ...]:
        """Ranks outside of the largest group, if it has more than all others; empty = no majority is known."""
        elsewhere = sum(map(len, self.op_groups[1:])) + len(self.unplaced) + len(self.unreported)
        if len(self.op_groups) < 2 or len(self.op_groups[0]) <= elsewhere:
            return ()
        return tuple(end for op_group in self.op_groups[1:] for end in op_group)


def mismatch_at_end(endings: Endings) -> OpMismatch | None:
    """Operations of the ranks at the end; None = something else explains it, or no connection broke."""
    ends = [*endings.first, *(end for end, _ in endings.later)]
    if any(end.own_error or end.how == "silent" or is_timeout(end.text) for end in ends):
        return None
    aborted = tuple(end for end in ends if end.aborted)
    left = [end for end in ends if end.complains_of_peer] + [end for end in ends if aborted and end.signaled]
    if not left:
        return None
    since_ns = min((end.at_ns for end in aborted), default=None)
    reports = [(end, reported) for end in left if (reported := _ops(end, since_ns))]
    by_op: dict[_Key, list[End]] = {}
    ops: dict[_Key, Collective] = {}
    for (end, _), op in zip(reports, _ops_at_end([reported for _, reported in reports]), strict=True):
        key = (op.group, op.seq, op.op, op.shape)
        by_op.setdefault(key, []).append(end)
        ops[key] = op
    # A viewer on their host would have observed their exit codes.
    unseen = [end for end in ends if end.how == "lost" and end.code is None]
    unreported = _join_by_place(by_op, [end for end in [*left, *unseen] if not _ops(end, since_ns)])
    # Else they were aborted for another reason, or the others ended before they could report.
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
    """Add ranks without a reported operation to those at the same line of the script; return the rest."""
    by_line: dict[str, set[_Key]] = {}
    for key, ends in by_op.items():
        for line in filter(None, map(_line, ends)):
            by_line.setdefault(line, set()).add(key)
    left = []
    for end in unreported:
        keys = by_line.get(_line(end), set())
        if len(keys) == 1:
            by_op[next(iter(keys))].append(end)
        else:
            left.append(end)
    return left


def _line(end: End) -> str:
    """File and line that it was at; empty = not known."""
    found = _SPOT.search(place_of(end))
    return found[0] if found else ""


def _ops_at_end(reports: list[list[Collective]]) -> list[Collective]:
    """The operation in which each rank broke: in one group the last that all have joined, as some may be ahead."""
    last = [ops[-1] for ops in reports]
    if len({op.group for op in last}) > 1:
        return last
    seq = min((op.seq for op in last), default=0)
    return [
        next((op for op in ops if op.group == mine.group and op.seq == seq), mine)
        for ops, mine in zip(reports, last, strict=True)
    ]


def _smaller(ops: dict[_Key, Collective]) -> _Key | None:
    """Of two operations with the same name the one with less data: its ranks receive more than they expect."""
    (one, first), (other, second) = ops.items()
    if first.op != second.op or first.bytes == second.bytes or not (first.bytes and second.bytes):
        return None
    return one if first.bytes < second.bytes else other


def _ops(end: End, since_ns: int | None) -> list[Collective]:
    """Its last operations, from its goodbye, or reported since the first abort; older ones may be past."""
    rank = end.rank
    if rank.bye is not None and rank.bye.collectives:
        return rank.bye.collectives
    recent = since_ns is not None and rank.collectives_ns is not None and rank.collectives_ns >= since_ns
    return rank.stack.collectives if recent and rank.stack is not None else []
