"""Ranks that exited, or sent no more heartbeats, without an exit message: alone, as a host, as secondary failures."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.detectors.context import names_of, ranks_of
from ddpwatch.core.detectors.log_findings import with_log_findings
from ddpwatch.core.diagnosis.exits import FREE, advice_on, how_ended, place_of, why_no_heartbeat, without_order
from ddpwatch.core.limits import RankLostLimits
from ddpwatch.core.state.run import ALIVE
from ddpwatch.core.units import count, duration_text, plural, ranks_text

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from ddpwatch.core.detectors.context import DetectorContext, Evidence
    from ddpwatch.core.diagnosis.exits import End
    from ddpwatch.core.diagnosis.mismatch import OpMismatch
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState

RULE: Final = rules.RANK_LOST
LOST_ADVICE: Final = (
    "Look up its exit code in the launcher's log: -9 killed (OOM killer: `dmesg -T | grep -i kill`, or a scheduler "
    "limit), -6 aborted in C++, as gloo does when ranks call different collectives, -11 crashed. Its own log has its "
    "last lines; follow it with --log."
)
ABORT_ADVICE: Final = (
    "Look for a branch on the rank or on the data around a collective. Its log has the reason for the abort: gloo's "
    "`Received data size doesn't match`, NCCL's watchdog, or a failed check in C++; follow it with --log."
)
OOM_ADVICE: Final = (
    "The memory limit of its cgroup was reached: use fewer DataLoader workers, a smaller batch or prefetch_factor, or "
    "raise the limit (`dmesg -T | grep -i kill` names the killed process)."
)
LOST_TOGETHER_ADVICE: Final = (
    "They were killed together, or one was and the launcher terminated the rest: look for the OOM killer (`dmesg -T | "
    "grep -i kill`), the first exit code in the launcher's log, and a time or memory limit of the scheduler."
)
ASKED_ADVICE: Final = (
    "Something stopped the job from outside: its scheduler (cancelled, out of time, preempted), its launcher, or a "
    "person (Ctrl-C). The launcher's log shows a signal that it received; follow it with --log."
)
FROM_OUTSIDE: Final = frozenset({"terminated", "scheduler", "interrupted"})
"""Causes in logs for the end of a job that no rank began."""
NO_HEARTBEAT_ADVICE: Final = (
    "Check whether the host responds, and the state of the process (ps -o stat,wchan: T is stopped, D is blocked on a "
    "disk or a driver). If it still trains, the network between it and the viewer has failed."
)
LOCKED_ADVICE: Final = (
    "Find the call that holds the GIL (py-spy dump --native --pid, gdb -p), and check whether its host has free CPU "
    "cores (top, vmstat)."
)
HOST_ADVICE: Final = (
    "Check whether the host responds. If it does and the job still trains, only the viewer's connection is lost; the "
    "viewer fetches the missed steps once it is back. If not, its ranks are lost: see the launcher's log."
)
RELAY_ADVICE: Final = (
    "Check whether `ddpwatch relay` is running and its port is reachable: a tunnel (ssh -L) may have closed. The "
    "viewer fetches the missed steps once it is back. A restarted relay has a new ticket."
)
UNREACHABLE_ADVICE: Final = (
    "If the job's own log continues, only the viewer is disconnected: check the network or the tunnel. If not, read "
    "the launcher's log."
)


UNKNOWN_SILENCE: Final = "hung, host down, or network"


def rank_lost(context: DetectorContext) -> list[Finding]:
    """A rank exited without an exit message, or has sent no heartbeat for some seconds.

    Heartbeats come from a separate thread, so a rank that computes or waits still sends them. Ranks that exit within a
    minute after the first, or after one that failed, are secondary failures. Without a heartbeat from any rank, the
    viewer is most likely disconnected; without one from the relay, the relay is. A missing heartbeat of a rank that
    others wait for is reported by `stall`, and later by `timeout`.
    """
    state, mismatch = context.state, context.mismatch
    lost = [end for end in context.endings.first if end.how == "lost"]
    silent = _settled(state, [end for end in context.endings.first if end.how == "silent"])
    aborted = [end for end in lost if end.aborted]
    findings = [_aborted(context, aborted)] if aborted else []
    if mismatch is None or len(mismatch.op_groups) < 2:
        findings += _by_host(state, [end for end in lost if not end.aborted])
    if silent and not _received_since(state, silent[-1].at_ns):
        findings.append(_unreachable(state, silent))
    else:
        awaited = {member.rank.rank for sync_point in context.stuck for member in sync_point.missing}
        if context.gave_up is not None:
            awaited.update(ranks_of(context.gave_up.culprits))
        findings += _by_host(state, silent, awaited)
    later = [end for end, _ in context.endings.later if end.how != "failed"]
    if later:
        findings.append(_secondary(later, context.endings.causes(frozenset({"lost", "silent"}))))
    return with_log_findings(state, RULE, findings + _relay(state, context.limits.rank_lost.silent_s))


def _settled(state: RunState, silent: Sequence[End]) -> list[End]:
    """Silent ranks without those of a host whose other ranks sent their last heartbeat at about the same time, but are
    not silent for long enough yet: in a moment it is known whether the whole host is down.
    """
    known = {end.rank.rank for end in silent}
    last_ns: dict[str, int] = {}
    for end in silent:
        last_ns[end.rank.host] = max(last_ns.get(end.rank.host, 0), end.at_ns)
    unsettled = {
        rank.host
        for rank in state.ranks.values()
        if rank.host in last_ns
        and rank.rank not in known
        and state.condition(rank) == "silent"
        and (rank.last_received_ns or 0) <= last_ns[rank.host] + RankLostLimits.PROOF_NS
    }
    return [end for end in silent if end.rank.host not in unsettled]


def _received_since(state: RunState, since_ns: int) -> bool:
    """Whether a rank sent a heartbeat after the last one of another: then the viewer is not disconnected."""
    return any(
        state.condition(rank) in ALIVE or (rank.last_received_ns is not None and (rank.bye_ns or 0) > since_ns)
        for rank in state.ranks.values()
    )


def _by_host(state: RunState, gone: Sequence[End], reported: Collection[int] = ()) -> list[Finding]:
    """One finding for each host that is gone as a whole, and for each other rank that no other rule has `reported`; one
    for all of these if they are many, or were lost without an order: which was killed, and which followed, is unknown.
    """
    if not gone:
        return []
    by_host: dict[str, list[End]] = {}
    for end in gone:
        by_host.setdefault(end.rank.host, []).append(end)
    on_host = Counter(rank.host for rank in state.ranks.values())
    findings = []
    rest: list[End] = []
    for host, ends in by_host.items():
        if host and len(on_host) > 1 and len(ends) > 1 and len(ends) == on_host[host]:
            findings.append(_whole_host(state, ends))
        else:
            rest += [end for end in ends if end.rank.rank not in reported]
    if len(rest) > RankLostLimits.MAX_SEPARATE:
        label = f"all {len(rest)} ranks" if len(rest) == len(state.ranks) else names_of(rest)
        return [*findings, _several(state, rest, "ranks" if rest[0].how == "lost" else "silent ranks", label)]
    for ends in _without_order(rest):
        if len(ends) > 1 and ends[0].how == "lost":
            findings.append(_several(state, ends, names_of(ends), names_of(ends)))
        else:
            findings += [_single(state, end) for end in ends]
    return findings


def _whole_host(state: RunState, gone: Sequence[End]) -> Finding:
    """All ranks of a host at once: if no process is known to have ended, it is the host or the network."""
    host = gone[0].rank.host
    if gone[0].how == "lost":
        return _several(state, gone, f"host {host}", f"host {host} ({names_of(gone)})")
    message = host_gone(host, [end.rank for end in gone], _silent_for(state, gone[-1]))
    return _finding(state, gone, f"host {host}", message, HOST_ADVICE)


def host_gone(host: str, ranks: Sequence[RankState], silent_for: str) -> str:
    """Text for a host all of whose ranks are silent. A single rank may be stopped as well."""
    label = f"host {host} ({ranks_text(rank.rank for rank in ranks)}) is down or unreachable"
    if len(ranks) == 1:
        return f"{label}, or the rank is stopped: no heartbeat for {silent_for}"
    return f"{label}: no heartbeat from its {len(ranks)} ranks for {silent_for}"


def _without_order(gone: Sequence[End]) -> list[list[End]]:
    """The ends in groups that are too close together to have an order."""
    groups: list[list[End]] = []
    for end in sorted(gone, key=lambda end: (end.at_ns, end.rank.rank)):
        if groups and without_order(end, groups[-1][-1]):
            groups[-1].append(end)
        else:
            groups.append([end])
    return groups


def _single(state: RunState, end: End) -> Finding:
    rank = end.rank
    where = ", ".join(filter(None, (rank.host, f"pid {rank.pid}" if rank.pid else "")))
    label = f"rank {rank.rank}{f' ({where})' if where else ''}"
    received = _last_report(state, rank)
    if rank.last_received_ns is None:
        message = f"{label} exited before its first heartbeat"
    elif end.how == "lost" and rank.oom_kills:
        message = f"{label} exited unexpectedly, its cgroup had an OOM kill; {received}"
    elif end.code is not None:
        message = f"{label} {how_ended(end.code)}, {received}"
    elif end.how == "lost":
        message = f"{label} exited unexpectedly, {received}"
    else:
        why = why_no_heartbeat(rank) or UNKNOWN_SILENCE
        message = f"{label}: no heartbeat for {_silent_for(state, end)} ({why}), {received}"
    return _finding(state, [end], f"rank {rank.rank}", message)


def _aborted(context: DetectorContext, ends: Sequence[End]) -> Finding:
    """Ranks ended by SIGABRT: gloo aborts a rank that receives more than it expects, as in different operations."""
    mismatch = context.mismatch
    each, its = ("each ", "their") if len(ends) > 1 else ("", "its")
    label = f"{names_of(ends)}: {each}aborted by {its} runtime (SIGABRT), {_last_report(context.state, ends[0].rank)}"
    others = [end for op_group in mismatch.op_groups for end in op_group] if mismatch is not None else []
    severity, ranks = Severity.CRITICAL, ranks_of(ends)
    hello = ends[0].rank.hello
    if mismatch is not None and len(mismatch.op_groups) > 1:
        message = f"{label}, because the ranks were in different collectives: see `desync`"
        severity = Severity.INFO
    elif len(others) > 1 and len(others) + len(ends) == len(context.state.ranks) and mismatch is not None:
        message = f"{label}; all others were in {mismatch.ops[0].op} #{mismatch.ops[0].seq} {mismatch.ops[0].shape}, so"
        message += f" most likely {'it was' if len(ends) == 1 else 'they were'} in a different one"
    elif mismatch is not None and hello is not None and hello.backend == "gloo":
        message = f"{label}. Most likely ranks were in different collectives; which of them is wrong is unknown. "
        message += "; ".join(_places(mismatch, others))
        ranks = ()
    else:
        message = f"{label}; see {its} log"
    evidence = _evidence(context.state, ends)
    return Finding(RULE, severity, "aborted", message, ABORT_ADVICE, ranks, evidence=evidence)


def _places(mismatch: OpMismatch, others: Sequence[End]) -> list[str]:
    """Operation and place of the ranks that reported them, all in the same one; then the places of the rest."""
    texts = []
    if others:
        op, place = mismatch.ops[0], place_of(others[0]) or "an unknown place"
        was = "was" if len(others) == 1 else "were"
        texts.append(f"{names_of(others)} {was} in {op.op} #{op.seq} {op.shape}, at {place}")
    by_place: dict[str, list[End]] = {}
    for end in mismatch.unreported:
        by_place.setdefault(place_of(end), []).append(end)
    for place, ends in by_place.items():
        was, its = ("was", "its") if len(ends) == 1 else ("were", "their")
        where = f"at {place}, and {was} " if place else ""
        texts.append(f"{names_of(ends)} {was} {where}terminated before reporting {its} collective")
    return texts


def _last_report(state: RunState, rank: RankState) -> str:
    """The step of its last message, and how far the others are: it may have done more."""
    if rank.step is None:
        return "before its first step"
    front = state.step or 0
    beyond = f", the others are at step {count(front)}" if front > rank.step else ""
    return f"last heartbeat in step {count(rank.step)}{beyond}"


def _several(state: RunState, gone: Sequence[End], subject: str, label: str) -> Finding:
    if gone[0].how == "lost":
        asked = all(end.signaled for end in gone)
        order = ", too close together to know which was first" if len(_without_order(gone)) == 1 and not asked else ""
        codes = {end.code for end in gone}
        how = "exited unexpectedly" if None in codes or len(codes) > 1 else f"each {how_ended(gone[0].code or 0)}"
        message = f"{label}: {how}{order}"
    else:
        message = f"{label}: no heartbeat for {_silent_for(state, gone[-1])} ({UNKNOWN_SILENCE})"
    return _finding(state, gone, subject, message)


def _finding(state: RunState, gone: Sequence[End], subject: str, message: str, advice: str = "") -> Finding:
    # Logs may name what ended ranks that were asked to end.
    verdict = state.logs.verdict if all(end.signaled for end in gone) else None
    outside = verdict.text if verdict is not None and verdict.cause in FROM_OUTSIDE else ""
    if outside:
        message = f"{names_of(gone)}: {how_ended(gone[0].code or 0).removeprefix('was ')}. {outside}"
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject=subject,
        message=message,
        advice=advice or _advice(gone),
        ranks=ranks_of(gone),
        detail=outside,
        evidence=_evidence(state, gone),
    )


def _advice(gone: Sequence[End]) -> str:
    if gone[0].how == "silent":
        return LOCKED_ADVICE if all(end.rank.held_by == FREE for end in gone) else NO_HEARTBEAT_ADVICE
    if any(end.rank.oom_kills for end in gone):
        return OOM_ADVICE
    if all(end.signaled for end in gone):
        return ASKED_ADVICE
    return LOST_ADVICE if len(gone) == 1 else LOST_TOGETHER_ADVICE


def _relay(state: RunState, silent_s: float) -> list[Finding]:
    """One finding for a relay without a heartbeat, instead of one for each of its ranks."""
    no_heartbeat_s = state.no_heartbeat_ns(state.relay_ns) / 1e9
    if state.relay is None or not state.relay_lost or no_heartbeat_s <= silent_s:
        return []
    message = (
        f"no heartbeat from the relay on {state.relay.host} for {duration_text(no_heartbeat_s)}: it is unreachable "
    )
    message += f"or has exited, and the state of its {plural(len(state.ranks), 'rank')} is unknown"
    evidence: Evidence = {"unheard_s": round(no_heartbeat_s, 1), "ranks": len(state.ranks)}
    return [Finding(RULE, Severity.WARNING, "relay", message, RELAY_ADVICE, (), evidence=evidence)]


def _unreachable(state: RunState, silent: Sequence[End]) -> Finding:
    """No rank sends a heartbeat: most likely the viewer is disconnected."""
    message = f"no heartbeat from any rank for {_silent_for(state, silent[-1])}: the viewer cannot reach "
    message += f"{plural(len({end.rank.host for end in silent}), 'host')}, or all ranks have stopped"
    evidence = _evidence(state, silent)
    return Finding(RULE, Severity.WARNING, "job", message, UNREACHABLE_ADVICE, ranks_of(silent), evidence=evidence)


def _secondary(later: Sequence[End], causes: Sequence[End]) -> Finding:
    how = {end.how for end in later}
    stopped = "stopped sending heartbeats"
    words = "exited" if how == {"lost"} else stopped if how == {"silent"} else f"exited or {stopped}"
    kind = "secondary failure" if len(later) == 1 else "secondary failures"
    message = f"{names_of(later)} {words} after {names_of(causes)} ({kind})"
    evidence: Evidence = {"first_rank": causes[0].rank.rank, "ranks": len(later)}
    return Finding(RULE, Severity.INFO, "after", message, advice_on(causes), ranks_of(later), evidence=evidence)


def _evidence(state: RunState, gone: Sequence[End]) -> Evidence:
    evidence: Evidence = {
        "unheard_s": round((state.now_ns - gone[0].at_ns) / 1e9, 1),
        "hosts": ", ".join(sorted({end.rank.host for end in gone if end.rank.host})[:16]),
        "ranks": len(gone),
    }
    if len(gone) == 1:
        evidence["pid"] = gone[0].rank.pid
    if kills := max(end.rank.oom_kills for end in gone):
        evidence["oom_kills"] = kills
    if steps := [end.rank.step for end in gone if end.rank.step is not None]:
        evidence["step"] = max(steps)
    return evidence


def _silent_for(state: RunState, end: End) -> str:
    return duration_text((state.now_ns - end.at_ns) / 1e9)
