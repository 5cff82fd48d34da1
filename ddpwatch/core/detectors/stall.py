"""Ranks that wait in a collective for one that has not arrived."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.detectors.context import Detector
from ddpwatch.core.detectors.rank_lost import HOST_ADVICE, host_gone
from ddpwatch.core.diagnosis.arrivals import FRESH_BEATS, HERE
from ddpwatch.core.diagnosis.early_exit import ran_out
from ddpwatch.core.diagnosis.exits import FREE, what_holds, why_silent
from ddpwatch.core.diagnosis.stacks import top_of_stack
from ddpwatch.core.units import duration, ranks_text, size
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import Evidence
    from ddpwatch.core.diagnosis.arrivals import Meeting, Standing
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState

RULE: Final = rules.STALL
MOST_DOINGS: Final = 3
"""Missing ranks that are told of one by one."""
MISSING_ADVICE: Final = (
    "See what the missing rank is doing: its stack is on its page, and `ddpwatch stacks` prints it. Usual reasons: its "
    "data has ended or its loader is stuck, it saves a checkpoint or evaluates alone (say so with agent.pause), a "
    "debugger, or a branch that skips the collective."
)
HELD_ADVICE: Final = (
    "Let it go on: kill -CONT and its pid, or end the debugger; for a disk, look at its mount (dmesg, df)."
)
SILENT_ADVICE: Final = (
    "Nothing is heard of the missing rank either: it is stopped, its host is gone, or something holds Python's lock. "
    "Look at the process (ps -o stat,wchan; py-spy dump --pid)."
)
LOCKED_ADVICE: Final = (
    "The missing rank is not heard although its process lives: see which call holds Python's lock (py-spy dump "
    "--native --pid, gdb -p), and whether its host has cores left (top)."
)
TRANSPORT_ADVICE: Final = (
    "Every rank has joined, so no rank is to blame: look at the network. Run with NCCL_DEBUG=WARN, look for Xid errors "
    "(dmesg) and link errors (ibstat, ethtool -S), and check NCCL_SOCKET_IFNAME / GLOO_SOCKET_IFNAME."
)


def stall(evidence: Evidence) -> list[Finding]:
    """Ranks wait in a collective for longer than they ever have, and one of them has not joined it.

    Every rank counts the operations that it joins, group by group: who has joined the fewest is the one that the
    others wait for, whoever complains first. Where all have joined, and it lasts, it is the network. A wait counts when
    it exceeds a second and five times the usual; one that is announced with `agent.pause` does not. One whose data has
    ended is a matter of `uneven-batch`; once a rank has given up waiting, it is one of `timeout`.
    """
    findings = []
    told: set[tuple[int, ...]] = set()
    missing = [(meeting, _ranks(meeting.missing)) for meeting in evidence.stuck if meeting.missing]
    if evidence.gave_up is not None and evidence.gave_up.culprits:
        return []  # a matter of `timeout` by now
    for meeting in evidence.stuck:
        if meeting.crossed or ran_out(meeting) or (meeting.missing and _ranks(meeting.missing) in told):
            continue  # a matter of `desync` or `uneven-batch`; or the same ranks are missing in more than one group
        if meeting.missing:
            told.add(_ranks(meeting.missing))
            also = [each for each, ranks in missing if each is not meeting and ranks == _ranks(meeting.missing)]
            findings.append(_missing(evidence, meeting, also))
        elif unheard := _unheard(evidence.state, meeting):
            findings.append(_without_word(evidence, meeting, unheard))
        elif meeting.everybody and len(meeting.camps) <= 1 and _all_say_so(evidence, meeting):
            findings.append(_transport(evidence, meeting))
    return findings


def _unheard(state: RunState, meeting: Meeting) -> list[RankState]:
    """Ranks of the group that have an agent and have not said a word to this viewer: they were stuck when it came."""
    if meeting.everybody or not meeting.default:
        return []
    never = [rank for rank in state.ranks.values() if rank.pid and rank.sign_ns is None]
    return [rank for rank in never if state.condition(rank) in {"missing", "silent"}]


def _without_word(evidence: Evidence, meeting: Meeting, unheard: Sequence[RankState]) -> Finding:
    names = ranks_text(rank.rank for rank in unheard)
    does = "does" if len(unheard) == 1 else "do"
    hosts = [f"{rank.host}, " if evidence.state.spans_hosts else "" for rank in unheard[:MOST_DOINGS]]
    where = ", ".join(f"{host}pid {rank.pid}" for host, rank in zip(hosts, unheard, strict=False))
    out_of_reach = _out_of_reach(evidence.state, unheard)
    held = next(filter(None, map(why_silent, unheard)), "stopped, or something holds Python's lock")
    doings = f"{names} ({where}) {does} not answer: {out_of_reach or held}"
    return Finding(
        rule=RULE,
        severity=_severity(evidence, meeting),
        subject=f"group {meeting.name}",
        message=f"{names} {'has' if len(unheard) == 1 else 'have'} most likely not joined {operation(meeting)}: "
        f"{waiting_text(meeting)}{deadline_text(evidence)}. {doings}",
        advice=HOST_ADVICE if out_of_reach else _silent_advice(unheard),
        ranks=tuple(rank.rank for rank in unheard),
        urgent=evidence.urgent,
        evidence=facts(evidence, meeting) | {"doing": doings},
    )


def _out_of_reach(state: RunState, unheard: Sequence[RankState]) -> str:
    """In words, that nothing at all was ever heard or seen of the hosts of these ranks; empty = something was."""
    hosts = {rank.host for rank in unheard}
    known = {rank.host for rank in state.ranks.values() if rank.sign_ns is not None or rank.held_by}
    if not state.spans_hosts or "" in hosts or hosts & known:
        return ""
    named = sorted(hosts)[:MOST_DOINGS]
    more = f" and {len(hosts) - len(named)} more" if len(hosts) > len(named) else ""
    where = f"host{'s' if len(hosts) > 1 else ''} {', '.join(named)}{more}"
    return f"{where} cannot be reached, or the rank{' is' if len(unheard) == 1 else 's are'} stopped"


def _gone_hosts(state: RunState, missing: Sequence[Standing]) -> dict[str, list[RankState]]:
    """The hosts of the missing ranks, with their ranks, if all of these have fallen silent while others are heard, and
    none of their processes can be seen from here; empty = not all are like that.
    """
    hosts = {standing.rank.host for standing in missing}
    if "" in hosts or not state.spans_hosts or state.run_condition() != "live":
        return {}
    ranks = {host: [rank for rank in state.ranks.values() if rank.host == host] for host in sorted(hosts)}
    silent = all(state.condition(rank) == "silent" and not rank.held_by for each in ranks.values() for rank in each)
    return ranks if silent else {}


def _silent_advice(ranks: Sequence[RankState]) -> str:
    """What to do about ranks of which nothing is heard, by what is known of the first that is known."""
    if any(map(what_holds, ranks)):
        return HELD_ADVICE
    return LOCKED_ADVICE if any(rank.held_by == FREE for rank in ranks) else SILENT_ADVICE


def _missing(evidence: Evidence, meeting: Meeting, also: Sequence[Meeting]) -> Finding:
    """The finding for one group, and for others in which the same ranks are missing."""
    state, missing = evidence.state, meeting.missing
    has = "has" if len(missing) == 1 else "have"
    gone = _gone_hosts(state, missing)
    doings = "; ".join(
        [host_gone(host, ranks, _silence(state, ranks)) for host, ranks in list(gone.items())[:MOST_DOINGS]]
        or [doing(state, standing) for standing in missing[:MOST_DOINGS]]
    )
    silent = all(is_unheard(state, standing.rank) for standing in missing)
    beat = missing[0].rank.beat
    advice = _silent_advice([standing.rank for standing in missing]) if silent else MISSING_ADVICE
    advice = HOST_ADVICE if gone else advice
    return Finding(
        rule=RULE,
        severity=_severity(evidence, meeting),
        subject=f"group {meeting.name}",
        message=f"{_names(missing)} {has} not joined {operation(meeting)}: {waiting_text(meeting)}"
        f"{_elsewhere(meeting, also)}{deadline_text(evidence)}. {doings}",
        advice=advice,
        ranks=_ranks(missing),
        phase=PHASES[beat.phase] if beat is not None else None,
        detail=top_of_stack(missing[0].rank.stack) or ("silent" if silent else ""),
        urgent=evidence.urgent,
        evidence=facts(evidence, meeting) | {"doing": doings},
    )


def _silence(state: RunState, ranks: Sequence[RankState]) -> str:
    """For how long none of them was heard."""
    return duration((state.now_ns - max(rank.sign_ns or 0 for rank in ranks)) / 1e9)


def _all_say_so(evidence: Evidence, meeting: Meeting) -> bool:
    """Whether every rank has told that it waits, and for long: where cores are short an operation may stand still for a
    while. One that was stopped inside the operation has not told so, and is to blame.
    """
    return all(standing.told_ns > evidence.limits.stall.joined_s * 1e9 for standing in meeting.standings)


def _transport(evidence: Evidence, meeting: Meeting) -> Finding:
    return Finding(
        rule=RULE,
        severity=_severity(evidence, meeting),
        subject=f"group {meeting.name}",
        message=f"all {len(meeting.standings)} ranks have joined {operation(meeting)} and it does not complete: "
        f"{waiting_text(meeting)}{deadline_text(evidence)}. It is the network, not a rank",
        advice=TRANSPORT_ADVICE,
        urgent=evidence.urgent,
        evidence=facts(evidence, meeting),
    )


def _severity(evidence: Evidence, meeting: Meeting) -> Severity:
    longest_ns = meeting.waiting[0].age_ns
    left_ns = evidence.left_ns
    urgent = left_ns is not None and left_ns < longest_ns
    if not has_trained(meeting, evidence) and longest_ns < evidence.limits.stall.first_s * 1e9:
        # In the first steps ranks compile and start late, and most likely come.
        return Severity.WARNING
    return Severity.CRITICAL if urgent or longest_ns > evidence.limits.stall.critical_s * 1e9 else Severity.WARNING


def has_trained(meeting: Meeting, evidence: Evidence) -> bool:
    """Whether a rank that waits is beyond the first steps, in which ranks compile."""
    warmup_steps = evidence.limits.judge.warmup_steps
    return any(standing.rank.steps.newest >= warmup_steps for standing in meeting.waiting)


def operation(meeting: Meeting) -> str:
    """The operation that is waited for: `all_reduce #1042 (4.0M)`."""
    group = meeting.waiting[0].group
    seq = meeting.front if group.completed is None else group.completed + 1
    how_much = f" ({size(group.bytes)})" if group.bytes else ""
    where = "" if meeting.default else f" of group {meeting.name}"
    return f"{group.op or 'collective'} #{seq}{how_much}{where}"


def waiting_text(meeting: Meeting) -> str:
    """Those that wait, in one line: `ranks 0-2 wait in sync for 12s`."""
    waiting = meeting.waiting
    phases = {standing.rank.beat.phase for standing in waiting if standing.rank.beat is not None}
    where = f" {in_phase(phases.pop())}" if len(phases) == 1 else ""
    wait = "waits" if len(waiting) == 1 else "wait"
    return f"{_names(waiting)} {wait}{where} for {duration(waiting[0].age_ns / 1e9)}"


def in_phase(phase: int) -> str:
    """Where a rank is, in words: `in data`."""
    return "outside the phases (other)" if PHASES[phase] == "other" else f"in {PHASES[phase]}"


def _elsewhere(meeting: Meeting, also: Sequence[Meeting]) -> str:
    """Those that wait for the same ranks in another group only: ` and rank 2 in all_reduce #7 of group side`."""
    told = {standing.rank.rank for standing in meeting.waiting}
    text = ""
    for other in also:
        if more := [standing for standing in other.waiting if standing.rank.rank not in told]:
            text += f" and {_names(more)} in {operation(other)}"
            told |= {standing.rank.rank for standing in more}
    return text


def deadline_text(evidence: Evidence) -> str:
    """How long until torch ends the job, whichever group's timeout is the first to fire."""
    left_ns = evidence.left_ns
    if left_ns is None:
        return ""
    return f", timeout in {duration(left_ns / 1e9)}" if left_ns > 0 else ", its timeout is over"


def doing(state: RunState, standing: Standing, *, at_end: bool = True) -> str:
    """What a rank does: `rank 3 is in data for 13s, at collate (train.py:88)`; `at_end` = say if its data has ended."""
    rank, beat = standing.rank, standing.rank.beat
    assert beat is not None
    gone = state.condition(rank) not in HERE
    since_ns = 0 if gone else max(0, state.now_ns - (rank.sign_ns or state.now_ns))
    who = f"rank {rank.rank}{f' ({rank.host})' if state.spans_hosts else ''}"
    if is_unheard(state, rank):
        # Between its last sign of life and its silence it may have gone on to another phase.
        text = f"{who} is not heard for {since_ns / 1e9:.1f} s, was {in_phase(beat.phase)} when last heard"
        text += f"; {why}" if (why := why_silent(rank)) else ""
    else:
        is_ = "was" if gone else "is"
        text = f"{who} {is_} {in_phase(beat.phase)} for {duration((beat.phase_ns + since_ns) / 1e9)}"
    if at_end and rank.at_end_of_data:
        text += ", at the end of its data"
    if beat.pause:
        text += f" (paused: {beat.pause})"
    top = _where(rank)
    return f"{text}, at {top}" if top else text


def _where(rank: RankState) -> str:
    """The function that it was in when it was last asked; empty = not known. A stack of another phase is one of another
    moment.
    """
    in_phase = rank.stack is None or rank.beat is None or rank.stack.phase in {-1, rank.beat.phase}
    return top_of_stack(rank.stack) if in_phase else ""


def is_unheard(state: RunState, rank: RankState) -> bool:
    """Whether it has missed some of its beats: then what it said last may be no longer so, and silence is a sign.

    Not of one that has ended, nor, for a moment, of one that is known to be in a function: before its end is seen it is
    silent for about a second.
    """
    condition = state.condition(rank)
    if condition not in HERE or (condition != "silent" and _where(rank) and not what_holds(rank)):
        return False
    return rank.sign_ns is not None and state.unheard_ns(rank.sign_ns) > FRESH_BEATS * state.beat_ns


def facts(evidence: Evidence, meeting: Meeting) -> dict[str, float | int | str]:
    """The numbers, by name and unit."""
    group, left_ns = meeting.waiting[0].group, evidence.left_ns
    told: dict[str, float | int | str] = {
        "group": meeting.name,
        "op": group.op,
        "seq": meeting.front if group.completed is None else group.completed + 1,
        "bytes": group.bytes,
        "waiting_s": round(meeting.waiting[0].age_ns / 1e9, 1),
        "waiting": _names(meeting.waiting),
    }
    if group.timeout_ns:
        told["timeout_s"] = round(group.timeout_ns / 1e9, 1)
    if left_ns is not None:
        told["left_s"] = round(left_ns / 1e9, 1)
    return told


def _ranks(standings: Sequence[Standing]) -> tuple[int, ...]:
    return tuple(sorted(standing.rank.rank for standing in standings))


def _names(standings: Sequence[Standing]) -> str:
    return ranks_text(standing.rank.rank for standing in standings)


STALL: Final = Detector(RULE, stall, by_step=False)
