"""Ranks that are gone without a word, which of them was first, and whether it was a whole host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from ddpwatch.core.alerts import Finding, Severity
from ddpwatch.core.detectors.detector import Detector
from ddpwatch.core.numbers import count, duration, plural, ranks_text

if TYPE_CHECKING:
    from ddpwatch.core.evidence import Evidence
    from ddpwatch.core.rank import RankState
    from ddpwatch.core.state import RunState

RULE: Final = "rank-lost"
BEAT_NS: Final = 250_000_000
"""Signs of life come so often: two ends that are closer than this have no order."""
FOLLOWS_NS: Final = 60_000_000_000
"""A launcher ends the others within this time after the first."""
MOST_ALONE: Final = 3
"""More ranks than this are told together."""
LOST_ADVICE: Final = (
    "Something killed it: look for the OOM killer (dmesg -T | grep -i kill), for the exit code in the launcher's log, "
    "and for a time or memory limit of the scheduler."
)
SILENT_ADVICE: Final = (
    "See whether the host answers and what the process does (ps -o stat,wchan: T is stopped, D waits for a disk or a "
    "driver). If it trains on, the network between it and the viewer is what has failed."
)
UNREACHABLE_ADVICE: Final = (
    "If the job's own log goes on, only the viewer is cut off: check the network or the tunnel. If not, look at the "
    "launcher's log."
)


@dataclass(frozen=True)
class _Gone:
    """A rank that is no longer heard."""

    rank: RankState
    how: Literal["lost", "silent"]
    last_ns: int
    """Viewer's clock at its last sign of life; where there was none, when its end was found."""


def rank_lost(evidence: Evidence) -> list[Finding]:
    """A rank is gone without a word: its process has ended, or it has sent nothing for some seconds.

    Signs of life come from a thread of their own, so a rank that merely computes or waits is still heard. Ranks that
    go within a minute after the first, or after one that failed, are taken for its consequence. When no rank at all
    is heard, it is the viewer that cannot reach them.
    """
    state = evidence.state
    gone = _gone(state, evidence.limits.rank_lost.silent_s)
    first, later, cause = _in_order(state, gone)
    lost = [one for one in first if one.how == "lost"]
    silent = [one for one in first if one.how == "silent"]
    findings = _by_host(state, lost)
    if silent and not any(state.condition(rank) in {"ok", "paused"} for rank in state.ranks.values()):
        findings.append(_unreachable(state, silent))
    else:
        findings += _by_host(state, silent)
    if later and cause is not None:
        findings.append(_consequence(later, cause))
    return findings


def _gone(state: RunState, silent_s: float) -> list[_Gone]:
    """In the order in which they were last heard."""
    found = []
    for rank in state.ranks.values():
        how = state.condition(rank)
        if how == "lost":
            found.append(_Gone(rank, "lost", rank.gone_ns or 0 if rank.sign_ns is None else rank.sign_ns))
        elif how == "silent" and rank.sign_ns is not None and state.now_ns - rank.sign_ns > silent_s * 1e9:
            found.append(_Gone(rank, "silent", rank.sign_ns))
    return sorted(found, key=lambda one: (one.last_ns, one.rank.rank))


def _in_order(state: RunState, gone: list[_Gone]) -> tuple[list[_Gone], list[_Gone], RankState | None]:
    """Those that went by themselves, those that followed, and whom they followed."""
    causes = [
        (rank.sign_ns, rank)
        for rank in state.ranks.values()
        if rank.sign_ns is not None and state.condition(rank) == "failed"
    ]
    causes.sort(key=lambda cause: (cause[0], cause[1].rank))
    first: list[_Gone] = []
    later: list[_Gone] = []
    followed = None
    for one in gone:
        before = [rank for at_ns, rank in causes if at_ns + BEAT_NS < one.last_ns <= at_ns + FOLLOWS_NS]
        if before:
            later.append(one)
            followed = followed or before[0]
        else:
            first.append(one)
            if one.how == "lost":
                causes.append((one.last_ns, one.rank))
    return first, later, followed


def _by_host(state: RunState, gone: list[_Gone]) -> list[Finding]:
    """One finding for each host that is gone as a whole, and for each other rank, unless there are many."""
    by_host: dict[str, list[_Gone]] = {}
    for one in gone:
        by_host.setdefault(one.rank.host, []).append(one)
    on_host: dict[str, int] = {}
    for rank in state.ranks.values():
        on_host[rank.host] = on_host.get(rank.host, 0) + 1
    findings = []
    rest: list[_Gone] = []
    for host, ones in by_host.items():
        if host and len(on_host) > 1 and len(ones) > 1 and len(ones) == on_host[host]:
            findings.append(_several(state, ones, f"host {host}", f"host {host} ({_names(ones)})"))
        else:
            rest += ones
    if len(rest) > MOST_ALONE:
        everybody = len(rest) == len(state.ranks)
        return [*findings, _several(state, rest, "ranks", f"all {len(rest)} ranks" if everybody else _names(rest))]
    return findings + [_single(state, one) for one in rest]


def _single(state: RunState, one: _Gone) -> Finding:
    rank = one.rank
    where = ", ".join(part for part in (rank.host, f"pid {rank.pid}" if rank.pid else "") if part)
    who = f"rank {rank.rank}{f' ({where})' if where else ''}"
    at = f"at step {count(rank.step)}" if rank.step is not None else "before its first step"
    if one.how == "lost":
        message = f"{who}: its process has ended without a word {at}"
    else:
        message = f"{who} has sent nothing for {_silence(state, one)} (frozen, host gone, or network), last heard {at}"
    return _finding(state, [one], f"rank {rank.rank}", message)


def _several(state: RunState, gone: list[_Gone], subject: str, who: str) -> Finding:
    if gone[0].how == "lost":
        message = f"{who}: their processes have ended without a word"
    else:
        message = f"{who}: nothing was sent for {_silence(state, gone[-1])} (frozen, host gone, or network)"
    return _finding(state, gone, subject, message)


def _finding(state: RunState, gone: list[_Gone], subject: str, message: str) -> Finding:
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject=subject,
        message=message,
        advice=LOST_ADVICE if gone[0].how == "lost" else SILENT_ADVICE,
        ranks=tuple(sorted(one.rank.rank for one in gone)),
        evidence=_evidence(state, gone),
    )


def _unreachable(state: RunState, silent: list[_Gone]) -> Finding:
    return Finding(
        rule=RULE,
        severity=Severity.WARNING,
        subject="job",
        message=f"nothing is heard of any rank for {_silence(state, silent[-1])}: the viewer cannot reach "
        f"{plural(len({one.rank.host for one in silent}), 'host')}, or all have stopped",
        advice=UNREACHABLE_ADVICE,
        ranks=tuple(sorted(one.rank.rank for one in silent)),
        evidence=_evidence(state, silent),
    )


def _consequence(later: list[_Gone], cause: RankState) -> Finding:
    how = {one.how for one in later}
    words = "ended" if how == {"lost"} else "fell silent" if how == {"silent"} else "ended or fell silent"
    return Finding(
        rule=RULE,
        severity=Severity.INFO,
        subject="after",
        message=f"{_names(later)} {words} after rank {cause.rank}",
        advice=f"Find out what ended rank {cause.rank}: the launcher ends the others when one is gone.",
        ranks=tuple(sorted(one.rank.rank for one in later)),
        evidence={"first_rank": cause.rank, "ranks": len(later)},
    )


def _evidence(state: RunState, gone: list[_Gone]) -> dict[str, float | int | str]:
    evidence: dict[str, float | int | str] = {
        "unheard_s": round((state.now_ns - gone[0].last_ns) / 1e9, 1),
        "hosts": ", ".join(sorted({one.rank.host for one in gone if one.rank.host})[:16]),
        "ranks": len(gone),
    }
    if len(gone) == 1:
        evidence["pid"] = gone[0].rank.pid
    steps = [one.rank.step for one in gone if one.rank.step is not None]
    if steps:
        evidence["step"] = max(steps)
    return evidence


def _names(gone: list[_Gone]) -> str:
    return ranks_text(one.rank.rank for one in gone)


def _silence(state: RunState, one: _Gone) -> str:
    return duration((state.now_ns - one.last_ns) / 1e9)


RANK_LOST: Final = Detector(RULE, rank_lost, by_step=False)
