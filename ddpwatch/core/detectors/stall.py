"""Ranks that wait in a collective for a rank that has not joined it, or for the network."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.detectors.context import names_of, ranks_of
from ddpwatch.core.detectors.rank_lost import HOST_ADVICE, host_gone
from ddpwatch.core.diagnosis.arrivals import HERE
from ddpwatch.core.diagnosis.early_exit import ran_out
from ddpwatch.core.diagnosis.exits import FREE, what_holds, why_no_heartbeat
from ddpwatch.core.diagnosis.stacks import top_of_stack
from ddpwatch.core.limits import StallLimits
from ddpwatch.core.units import duration_text, ranks_text, size_text
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import DetectorContext, Evidence
    from ddpwatch.core.diagnosis.arrivals import GroupMember, SyncPoint
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.wire import Beat

RULE: Final = rules.STALL
MAX_ACTIVITIES: Final = 3
"""Missing ranks whose activity is listed."""
MISSING_ADVICE: Final = (
    "Look at the stack of the missing rank, on its page or with `ddpwatch stacks`. Common causes: its data has ended, "
    "its DataLoader hangs, slow work that only it does (announce that with agent.pause), a debugger, or a branch that "
    "skips the collective."
)
BUSY_ADVICE: Final = (
    "It works alone while the others wait, and the timeout goes on: save in the background "
    "(torch.distributed.checkpoint.async_save) or split the evaluation over the ranks; if it has to take this long, "
    "raise `timeout` of init_process_group. Its stack shows whether it still gets on."
)
HELD_ADVICE: Final = (
    "Resume it: `kill -CONT PID`, or detach the debugger; if it is blocked on a disk, check the mount (dmesg, df)."
)
NO_HEARTBEAT_ADVICE: Final = (
    "The missing rank sends no heartbeat either: it is stopped, its host is down, or a thread holds the GIL. Look at "
    "the process (ps -o stat,wchan; py-spy dump --pid)."
)
LOCKED_ADVICE: Final = (
    "The missing rank sends no heartbeat although its process is alive: find the call that holds the GIL (py-spy dump "
    "--native --pid, gdb -p), and check whether its host has free CPU cores (top)."
)
TRANSPORT_ADVICE: Final = (
    "Every rank has joined, so check the network: run with NCCL_DEBUG=WARN, look for Xid errors (dmesg) and link "
    "errors (ibstat, ethtool -S), and check NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME."
)


def stall(context: DetectorContext) -> list[Finding]:
    """Ranks wait in a collective for longer than ever before, and one rank has not joined it: the job hangs.

    Every rank counts the collectives it joins in each process group: the others wait for the rank with the lowest
    count, whichever rank fails first. If all ranks have joined, the network is the likely cause. A wait is abnormal
    above one second and five times the 99th percentile of earlier waits, unless `agent.pause` announces it; that a
    rank saves a checkpoint or evaluates alone is named, and critical after a minute only. A rank without data is
    reported by `uneven-batch`, and a wait that has timed out by `timeout`.
    """
    if context.gave_up is not None and context.gave_up.culprits:
        return []  # reported by `timeout`
    findings = []
    by_missing: dict[tuple[int, ...], list[SyncPoint]] = {}
    for sync_point in context.stuck:
        if sync_point.missing:
            by_missing.setdefault(ranks_of(sync_point.missing), []).append(sync_point)
    for sync_point in context.stuck:
        if sync_point.crossed or ran_out(sync_point):
            continue  # reported by `desync` or `uneven-batch`
        if sync_point.missing:
            # The same ranks may be missing in more than one group.
            if groups := by_missing.pop(ranks_of(sync_point.missing), []):
                findings.append(_missing(context, sync_point, [each for each in groups if each is not sync_point]))
        elif never_received := _never_received(context.state, sync_point):
            findings.append(_without_report(context, sync_point, never_received))
        elif sync_point.all_present and len(sync_point.op_groups) <= 1 and _all_wait(context, sync_point):
            findings.append(_transport(context, sync_point))
    return findings


def _never_received(state: RunState, sync_point: SyncPoint) -> list[RankState]:
    """Ranks with an agent of which this viewer has never received a message: they were stuck when it attached."""
    if sync_point.all_present or not sync_point.default:
        return []
    never = [rank for rank in state.ranks.values() if rank.pid and rank.last_received_ns is None]
    return [rank for rank in never if state.condition(rank) in {"missing", "silent"}]


def _without_report(context: DetectorContext, sync_point: SyncPoint, never_received: Sequence[RankState]) -> Finding:
    names = ranks_text(rank.rank for rank in never_received)
    does, has = ("does", "has") if len(never_received) == 1 else ("do", "have")
    hosts = [f"{rank.host}, " if context.state.spans_hosts else "" for rank in never_received[:MAX_ACTIVITIES]]
    where = ", ".join(f"{host}pid {rank.pid}" for host, rank in zip(hosts, never_received, strict=False))
    unreachable = _unreachable(context.state, never_received)
    held = next(filter(None, map(why_no_heartbeat, never_received)), "it is stopped, or a thread holds the GIL")
    doings = f"{names} ({where}) {does} not answer: {unreachable or held}"
    message = f"{names} {has} most likely not joined {operation(sync_point)}: {waiting_text(sync_point)}"
    message += f"{deadline_text(context)}. {doings}"
    advice = HOST_ADVICE if unreachable else _no_heartbeat_advice(never_received)
    return _finding(context, sync_point, message, advice, tuple(rank.rank for rank in never_received), doings)


def _unreachable(state: RunState, never_received: Sequence[RankState]) -> str:
    """Text that the hosts of these ranks are unreachable; empty = one sent a message, or its process is visible."""
    hosts = {rank.host for rank in never_received}
    known = {rank.host for rank in state.ranks.values() if rank.last_received_ns is not None or rank.held_by}
    if not state.spans_hosts or "" in hosts or hosts & known:
        return ""
    named = sorted(hosts)[:MAX_ACTIVITIES]
    more = f" and {len(hosts) - len(named)} more" if len(hosts) > len(named) else ""
    where = f"host{'s' if len(hosts) > 1 else ''} {', '.join(named)}{more}"
    is_ = "is" if len(hosts) == 1 else "are"
    return f"{where} {is_} unreachable, or the rank{' is' if len(never_received) == 1 else 's are'} stopped"


def _gone_hosts(state: RunState, missing: Sequence[GroupMember]) -> dict[str, list[RankState]]:
    """Hosts of the missing ranks, with their ranks, if all of these are silent while others are not, and none of
    their processes is visible from here; otherwise empty.
    """
    hosts = {member.rank.host for member in missing}
    if "" in hosts or not state.spans_hosts or state.run_condition() != "live":
        return {}
    ranks = {host: [rank for rank in state.ranks.values() if rank.host == host] for host in sorted(hosts)}
    silent = all(state.condition(rank) == "silent" and not rank.held_by for each in ranks.values() for rank in each)
    return ranks if silent else {}


def _no_heartbeat_advice(ranks: Sequence[RankState]) -> str:
    """Advice on ranks without a heartbeat, by what is known of their processes."""
    if any(map(what_holds, ranks)):
        return HELD_ADVICE
    return LOCKED_ADVICE if any(rank.held_by == FREE for rank in ranks) else NO_HEARTBEAT_ADVICE


def _missing(context: DetectorContext, sync_point: SyncPoint, also: Sequence[SyncPoint]) -> Finding:
    """One finding for a group and for all others, `also`, in which the same ranks are missing."""
    state, missing = context.state, sync_point.missing
    has = "has" if len(missing) == 1 else "have"
    gone = _gone_hosts(state, missing)
    doings = "; ".join(
        [host_gone(host, ranks, _silent_for(state, ranks)) for host, ranks in list(gone.items())[:MAX_ACTIVITIES]]
        or [doing(state, member) for member in missing[:MAX_ACTIVITIES]]
    )
    silent = all(misses_heartbeats(state, member.rank) for member in missing)
    beat = missing[0].rank.beat
    advice = HOST_ADVICE if gone else BUSY_ADVICE if sync_point.awaits_activity else MISSING_ADVICE
    if silent and not gone:
        advice = _no_heartbeat_advice([member.rank for member in missing])
    message = f"{names_of(missing)} {has} not joined {operation(sync_point)}: {waiting_text(sync_point)}"
    message += f"{_elsewhere(sync_point, also)}{deadline_text(context)}. {doings}"
    return replace(
        _finding(context, sync_point, message, advice, ranks_of(missing), doings),
        phase=PHASES[beat.phase] if beat is not None else None,
        detail=top_of_stack(missing[0].rank.stack) or ("silent" if silent else ""),
    )


def _silent_for(state: RunState, ranks: Sequence[RankState]) -> str:
    return duration_text((state.now_ns - max(rank.last_received_ns or 0 for rank in ranks)) / 1e9)


def _all_wait(context: DetectorContext, sync_point: SyncPoint) -> bool:
    """Whether every rank reports a long wait. CPU starvation may stall an operation for a while, and a rank that was
    stopped inside the operation reports no wait: it is to blame.
    """
    return all(member.reported_ns > context.limits.stall.joined_s * 1e9 for member in sync_point.members)


def _transport(context: DetectorContext, sync_point: SyncPoint) -> Finding:
    message = f"all {len(sync_point.members)} ranks have joined {operation(sync_point)}, but it has not completed: "
    message += f"{waiting_text(sync_point)}{deadline_text(context)}. The likely cause is the network, not a rank"
    return _finding(context, sync_point, message, TRANSPORT_ADVICE)


def _finding(
    context: DetectorContext,
    sync_point: SyncPoint,
    message: str,
    advice: str,
    ranks: tuple[int, ...] = (),
    doings: str = "",
) -> Finding:
    return Finding(
        rule=RULE,
        severity=_severity(context, sync_point),
        subject=f"group {sync_point.name}",
        message=message,
        advice=advice,
        ranks=ranks,
        urgent=context.urgent,
        evidence=facts(context, sync_point) | ({"doing": doings} if doings else {}),
    )


def _severity(context: DetectorContext, sync_point: SyncPoint) -> Severity:
    limits, waited_ns, left_ns = context.limits.stall, sync_point.waiting[0].age_ns, context.timeout_in_ns
    if not has_trained(sync_point, context) and waited_ns < limits.first_s * 1e9:
        # In the first steps ranks compile and start late: most likely they will arrive.
        return Severity.WARNING
    half_over = left_ns is not None and left_ns < waited_ns
    critical_s = limits.busy_s if sync_point.awaits_activity else limits.critical_s
    return Severity.CRITICAL if half_over or waited_ns > critical_s * 1e9 else Severity.WARNING


def has_trained(sync_point: SyncPoint, context: DetectorContext) -> bool:
    """Whether a rank that waits is beyond the first steps, in which ranks compile."""
    warmup_steps = context.limits.judge.warmup_steps
    return any(member.rank.steps.newest >= warmup_steps for member in sync_point.waiting)


def operation(sync_point: SyncPoint) -> str:
    """The awaited operation as text: `all_reduce #1042 (4.0 MiB)`."""
    group = sync_point.waiting[0].group
    seq = sync_point.front if group.completed is None else group.completed + 1
    how_much = f" ({size_text(group.bytes)})" if group.bytes else ""
    where = "" if sync_point.default else f" of group {sync_point.name}"
    return f"{group.op or 'collective'} #{seq}{how_much}{where}"


def waiting_text(sync_point: SyncPoint) -> str:
    """The waiting ranks as text: `ranks 0-2 have waited in sync for 12 s`."""
    waiting = sync_point.waiting
    phases = {member.rank.beat.phase for member in waiting if member.rank.beat is not None}
    where = f" {in_phase(phases.pop())}" if len(phases) == 1 else ""
    has = "has" if len(waiting) == 1 else "have"
    return f"{names_of(waiting)} {has} waited{where} for {duration_text(waiting[0].age_ns / 1e9)}"


def in_phase(phase: int) -> str:
    """The phase as text: `in data`."""
    return "between phases (other)" if PHASES[phase] == "other" else f"in {PHASES[phase]}"


def _elsewhere(sync_point: SyncPoint, also: Sequence[SyncPoint]) -> str:
    """Ranks that wait only in other groups for the same ranks: ` and rank 2 in all_reduce #7 of group side`."""
    reported = {member.rank.rank for member in sync_point.waiting}
    text = ""
    for other in also:
        if more := [member for member in other.waiting if member.rank.rank not in reported]:
            text += f" and {names_of(more)} in {operation(other)}"
            reported |= {member.rank.rank for member in more}
    return text


def deadline_text(context: DetectorContext) -> str:
    """Time until the first timeout of a group ends the job, as text."""
    left_ns = context.timeout_in_ns
    if left_ns is None:
        return ""
    return f", timeout in {duration_text(left_ns / 1e9)}" if left_ns > 0 else ", the timeout has expired"


def doing(state: RunState, member: GroupMember, *, at_end: bool = True) -> str:
    """Activity of a rank: `rank 3 has been in data for 13 s, at collate (train.py:88)`; `at_end` = and the end of its
    data.
    """
    rank, beat = member.rank, member.rank.beat
    assert beat is not None
    gone = state.condition(rank) not in HERE
    since_ns = 0 if gone else max(0, state.now_ns - (rank.last_received_ns or state.now_ns))
    label = f"rank {rank.rank}{f' ({rank.host})' if state.spans_hosts else ''}"
    if misses_heartbeats(state, rank):
        # It may have entered another phase after its last heartbeat.
        text = f"{label}: no heartbeat for {duration_text(since_ns / 1e9)}, last seen {_place(beat)}"
        text += f"; {why}" if (why := why_no_heartbeat(rank)) else ""
    else:
        has = "had" if gone else "has"
        text = f"{label} {has} been {_place(beat)} for {duration_text((beat.phase_ns + since_ns) / 1e9)}"
    if at_end and rank.at_end_of_data:
        text += ", at the end of its data"
    if beat.pause:
        text += f" (paused: {beat.pause})"
    top = _where(rank)
    return f"{text}, at {top}" if top else text


def _place(beat: Beat) -> str:
    """Its activity or phase as text."""
    return f"in {beat.activity}" if beat.activity else in_phase(beat.phase)


def _where(rank: RankState) -> str:
    """Top function of its last stack; empty = unknown. A stack of another phase is outdated."""
    current = rank.stack is None or rank.beat is None or rank.stack.phase in {-1, rank.beat.phase}
    return top_of_stack(rank.stack) if current else ""


def misses_heartbeats(state: RunState, rank: RankState) -> bool:
    """Whether it has missed heartbeats, so that its last report may be outdated.

    Not if it has ended, nor as long as its stack is known and it is not silent: before its end is seen it sends nothing
    for about a second.
    """
    condition = state.condition(rank)
    if condition not in HERE or (condition != "silent" and _where(rank) and not what_holds(rank)):
        return False
    last_ns = rank.last_received_ns
    return last_ns is not None and state.no_heartbeat_ns(last_ns) > StallLimits.FRESH_BEATS * state.beat_ns


def facts(context: DetectorContext, sync_point: SyncPoint) -> Evidence:
    """Evidence for a wait in a collective."""
    group, left_ns = sync_point.waiting[0].group, context.timeout_in_ns
    evidence: Evidence = {
        "group": sync_point.name,
        "op": group.op,
        "seq": sync_point.front if group.completed is None else group.completed + 1,
        "bytes": group.bytes,
        "waiting_s": round(sync_point.waiting[0].age_ns / 1e9, 1),
        "waiting": names_of(sync_point.waiting),
    }
    if group.timeout_ns:
        evidence["timeout_s"] = round(group.timeout_ns / 1e9, 1)
    if left_ns is not None:
        evidence["left_s"] = round(left_ns / 1e9, 1)
    return evidence
