"""Bad exits of ranks in order: first failures and secondary failures.

A rank that dies takes the others along: their connections break, or the launcher ends them. The order comes from the
viewer's clock and is as coarse as the heartbeat interval, unless an exit was observed as it happened. Between closer
exits the exception or exit code decides: a rank that complains of a peer, or that SIGTERM ended, was not the first; one
that SIGKILL or a crash ended went by itself.

If one signal ended all ranks of a host within a moment, their order is chance and none is the root cause. A single rank
that was signaled, with the launcher signaling the others at once, looks the same.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ddpwatch.core.diagnosis.stacks import top_of_stack
from ddpwatch.core.limits import LivenessLimits, RankLostLimits
from ddpwatch.core.state.rank import PARTS
from ddpwatch.core.state.run import ALIVE
from ddpwatch.core.units import ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState

INTERRUPT: Final = "KeyboardInterrupt"
_ASKED: Final = frozenset({-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
"""Exit codes of processes that a launcher, a scheduler or a person ended."""

# Errors of gloo, NCCL, c10d's store and the sockets beneath. A timeout is raised by the rank that waited.
_PEER_ERROR: Final = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|error|timeout)"
    r"|remote (process|peer)|nccl\w*remoteerror|unhandled system error|failed to (recv|send)"
    r"|(read|write) error \[|timed out waiting \d+ ?ms|collective operation timeout|application timeout caused pair"
    r"|distnetworkerror|diststoreerror",
    re.IGNORECASE,
)
_PLACE: Final = re.compile(r":\d{1,7} in \S")
# Timeouts of gloo, of NCCL's watchdog and of the store.
_TIMEOUT: Final = re.compile(
    r"timed out waiting \d+ ?ms|collective operation timeout|watchdog (caught|timeout)|application timeout caused pair"
    r"|wait timeout after \d+ ?ms|failed to pass monitoredbarrier",
    re.IGNORECASE,
)

How: TypeAlias = Literal["failed", "lost", "silent"]
"""Conditions that are bad exits."""
_HOLDS: Final = {
    "signal": "its process was stopped by a signal",
    "debugger": "a debugger has stopped its process",
    "disk": "its process is blocked in the kernel, on a disk or a driver",
}
FREE: Final = "nothing"
"""Value of `held_by` for a process on this host that nothing keeps from running."""
LOCKED: Final = "its process is alive, but a thread holds the GIL, or it is starved of CPU"
_SIGNALS: Final = {
    signal.SIGKILL: "was killed",
    signal.SIGABRT: "was aborted by its runtime",
    signal.SIGSEGV: "crashed",
    signal.SIGBUS: "crashed",
    signal.SIGILL: "crashed",
    signal.SIGFPE: "crashed",
    signal.SIGTERM: "was terminated",
}


def what_holds(rank: RankState) -> str:
    """In words, what keeps the process of a rank from running; empty = nothing, or it is on another host."""
    return _HOLDS.get(rank.held_by, "")


def why_no_heartbeat(rank: RankState) -> str:
    """In words, why no heartbeat comes from a process on this host; empty = it is on another host."""
    return LOCKED if rank.held_by == FREE else what_holds(rank)


def how_ended(code: int) -> str:
    """An exit code in words: `was killed (SIGKILL)`."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"was terminated (signal {-code})"
    return f"{_SIGNALS.get(number, 'was terminated')} ({number.name})"


def why_failed(rank: RankState) -> str:
    """Why a rank failed: its exception, or its exit code if it sent none."""
    if rank.bye is not None and rank.bye.text:
        return rank.bye.text
    return f"exit code {rank.exit_code}, without an exception" if rank.exit_code else "an exception"


def advice_on(causes: Sequence[End]) -> str:
    """Advice on secondary failures after these causes."""
    if waited := [end for end in causes if is_timeout(end.text)]:
        return f"{names_of(waited).capitalize()} timed out waiting for another rank: see the `timeout` alert."
    if any(end.aborted for end in causes):
        return f"{names_of(causes).capitalize()} may not be the root cause: see the alert on the abort, and `desync`."
    return f"Find out what ended {names_of(causes)}: the launcher terminates the others when one rank exits."


def place_of(end: End) -> str:
    """Where in the script it failed, by its exception, or by its stack if it sent no goodbye; empty = not known."""
    if end.rank.bye is None:
        recent = end.rank.stack_ns is not None and end.at_ns - end.rank.stack_ns < RankLostLimits.MAX_STACK_AGE_NS
        return top_of_stack(end.rank.stack) if recent else ""
    places = [line for line in end.text.split(PARTS) if _PLACE.search(line)]
    return next((place for place in places if "/torch/" not in place), places[0] if places else "")


def names_of(ends: Sequence[End]) -> str:
    """The ranks of these exits, in words."""
    return ranks_text(end.rank.rank for end in ends)


def is_timeout(text: str) -> bool:
    """Whether an exception is a timeout in a collective or in the store."""
    return _TIMEOUT.search(text) is not None


def is_complaint(text: str) -> bool:
    """Whether an exception is about another rank: a broken connection, or a timeout."""
    return _PEER_ERROR.search(text) is not None or is_timeout(text)


@dataclass(frozen=True)
class End:
    """Bad exit of a rank, or its silence."""

    rank: RankState
    how: How
    at_ns: int
    """Viewer's clock at its goodbye, last heartbeat or discovered end; of ranks signaled together, of the first."""
    complains_of_peer: bool = False
    """Whether its exception is about the connection to another rank."""

    @property
    def text(self) -> str:
        """The exception in its goodbye; empty = it sent none."""
        return self.rank.bye.text if self.rank.bye is not None else ""

    @property
    def code(self) -> int | None:
        """Exit code of a process without a goodbye; None = not known, or it sent one."""
        return self.rank.exit_code if self.how == "lost" else None

    @property
    def signaled(self) -> bool:
        """Whether a signal asked it to end, as launchers send to the others when one is gone."""
        return self.code in _ASKED

    @property
    def aborted(self) -> bool:
        """Whether its own runtime aborted it: gloo does when it receives more than it expects."""
        return self.code == -signal.SIGABRT

    @property
    def own_error(self) -> bool:
        """Whether it ended by an exception that is not about a peer, a kill, a crash or an exit."""
        if self.how == "failed":
            return not self.complains_of_peer
        return self.code is not None and not self.signaled and not self.aborted

    @property
    def observed(self) -> bool:
        """Whether its end was observed as it happened."""
        return self.how == "lost" and self.rank.ended_ns is not None


def is_interrupt(end: End) -> bool:
    """Whether the keyboard interrupted it, or the signal that a keyboard sends."""
    return end.how == "failed" and end.text.startswith(INTERRUPT)


def is_innocent(end: End) -> bool:
    """Whether it need not be the root cause, though it was the first: it timed out, or its runtime aborted it."""
    return end.aborted or is_timeout(end.text)


@dataclass(frozen=True)
class Endings:
    """All bad exits so far, in order."""

    first: tuple[End, ...] = ()
    """First failures, as far as is known."""
    later: tuple[tuple[End, End], ...] = ()
    """Secondary failures, each with its cause."""

    def causes(self, how: frozenset[How] | None = None) -> tuple[End, ...]:
        """Possible causes of the secondary failures: of first failures without an order, all."""
        followed = [cause for end, cause in self.later if how is None or end.how in how]
        return tuple(end for end in self.first if any(end is each or without_order(end, each) for each in followed))


def endings(state: RunState, silent_s: float) -> Endings:
    """Bad exits, first and secondary failures apart. An exit counts once every living rank has sent a heartbeat after
    it: until then one of them may be the first failure.
    """
    found: list[End] = []
    received_ns: int | None = None
    for rank in state.ranks.values():
        how = state.condition(rank)
        if how == "failed" and rank.bye is not None:
            found.append(End(rank, "failed", rank.bye_ns or 0, bool(_PEER_ERROR.search(rank.bye.text))))
        elif how == "lost":
            at_ns = next(each for each in (rank.ended_ns, rank.last_received_ns, rank.gone_ns, 0) if each is not None)
            found.append(End(rank, "lost", at_ns))
        elif how == "silent" and _has_no_heartbeat(state, rank.last_received_ns, silent_s):
            found.append(End(rank, "silent", rank.last_received_ns or 0))
        elif how in ALIVE and rank.last_received_ns is not None:
            received_ns = rank.last_received_ns if received_ns is None else min(received_ns, rank.last_received_ns)
    return _in_order(_signaled_together([end for end in found if _is_settled(end, received_ns)]))


def _has_no_heartbeat(state: RunState, last_received_ns: int | None, silent_s: float) -> bool:
    """Whether the silence is the rank's own, and not that of its relay."""
    if last_received_ns is None or state.no_heartbeat_ns(last_received_ns) <= silent_s * 1e9:
        return False
    return not state.relay_lost or last_received_ns < state.relay_ns - LivenessLimits.NO_HEARTBEAT_NS


def _is_settled(end: End, received_ns: int | None) -> bool:
    proof_ns = end.at_ns + RankLostLimits.PROOF_NS
    return received_ns is None or end.rank.last_received_ns is None or received_ns >= proof_ns


def _signaled_together(ends: list[End]) -> list[End]:
    """Exits with one time for those by the same signal, unless a host has other exits: they came before the signal."""
    codes: dict[str, set[int | None]] = {}
    for end in ends:
        codes.setdefault(end.rank.host, set()).add(end.code if end.signaled else None)
    spans_ns: dict[int, tuple[int, int]] = {}
    """By exit code, times of the first and the last exit so far."""
    placed = []
    for end in sorted(ends, key=lambda end: end.at_ns):
        code = end.code if len(codes[end.rank.host]) == 1 and end.signaled else None
        if code is None:
            placed.append(end)
            continue
        first_ns, last_ns = spans_ns.get(code, (end.at_ns, end.at_ns))
        first_ns = first_ns if end.at_ns - last_ns <= RankLostLimits.ASKED_GAP_NS else end.at_ns
        spans_ns[code] = first_ns, end.at_ns
        placed.append(replace(end, at_ns=first_ns))
    return placed


def _in_order(ends: list[End]) -> Endings:
    first: list[End] = []
    causes: list[End] = []
    later: list[tuple[End, End]] = []
    for end in sorted(ends, key=_place):
        cause = next((cause for cause in causes if _follows(end, cause)), None)
        if cause is None:
            first.append(end)
            if len(causes) < RankLostLimits.MAX_CAUSES:
                causes.append(end)
        else:
            later.append((end, cause))
    return Endings(tuple(first), tuple(later))


def _place(end: End) -> tuple[int, int]:
    """Sort key: time; of exits without an order, own errors first and complaints last."""
    lead = 1 if end.own_error else -1 if end.complains_of_peer or end.signaled else 0
    return end.at_ns - lead * RankLostLimits.ORDER_NS, end.rank.rank


def _follows(end: End, cause: End) -> bool:
    """Whether an exit is a secondary failure of another that is not sorted after it."""
    if end.rank.last_received_ns is None:
        # It was gone before its first message.
        return False
    after_ns = end.at_ns - cause.at_ns
    if end.complains_of_peer:
        # It may have waited for the timeout of its connection, however long that is.
        return not cause.complains_of_peer or RankLostLimits.ORDER_NS < after_ns <= RankLostLimits.FOLLOWS_NS
    if cause.how == "silent" or after_ns > RankLostLimits.FOLLOWS_NS:
        return False
    if end.how == "lost" and end.own_error:
        return after_ns > (RankLostLimits.ORDER_NS if (end.code or 0) > 0 else RankLostLimits.KILL_DELAY_NS)
    if end.how != "failed" and (cause.own_error or (end.signaled and not cause.signaled)):
        return after_ns >= -RankLostLimits.ORDER_NS
    return after_ns > _apart_ns(end, cause)


def without_order(end: End, other: End) -> bool:
    """Whether two ranks were lost too close together to know which was first."""
    return (end.how, other.how) == ("lost", "lost") and abs(end.at_ns - other.at_ns) <= _apart_ns(end, other)


def _apart_ns(end: End, other: End) -> int:
    return RankLostLimits.SEEN_ORDER_NS if end.observed and other.observed else RankLostLimits.ORDER_NS
