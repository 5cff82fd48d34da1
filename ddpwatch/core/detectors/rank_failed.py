"""Ranks that an exception has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core.alerts import Finding, Severity
from ddpwatch.core.detectors.detector import Detector
from ddpwatch.core.numbers import plural, ranks_text

if TYPE_CHECKING:
    from ddpwatch.core.evidence import Evidence
    from ddpwatch.core.rank import RankState

RULE: Final = "rank-failed"
MESSAGE_CHARS: Final = 300
MOST_TOLD: Final = 8
"""Ranks that get an alert of their own."""
ADVICE: Final = (
    "Read its whole traceback in the launcher's log. If it complains about a connection or a timeout, another rank was "
    "first: look for one that ended earlier or does not arrive."
)


def rank_failed(evidence: Evidence) -> list[Finding]:
    """A rank was ended by an exception that nothing in the script has caught. The others fail or hang without it.

    The rank tells so itself in its last message, with the exception and the last lines of its traceback.
    """
    failed = {
        rank.rank: (rank, rank.bye.text)
        for rank in evidence.state.ranks.values()
        if rank.bye is not None and rank.bye.reason == "failed"
    }
    told = [_finding(rank, text) for rank, text in list(failed.values())[:MOST_TOLD]]
    if len(failed) > MOST_TOLD:
        told.append(_more(list(failed)[MOST_TOLD:]))
    return told


def _more(ranks: list[int]) -> Finding:
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject="more",
        message=f"{plural(len(ranks), 'more rank')} ended by an exception: {ranks_text(ranks)}",
        advice=ADVICE,
        ranks=tuple(ranks),
        evidence={"ranks": len(ranks)},
    )


def _finding(rank: RankState, text: str) -> Finding:
    told = text if len(text) <= MESSAGE_CHARS else text[: MESSAGE_CHARS - 1] + "…"
    evidence: dict[str, float | int | str] = {"text": text, "host": rank.host, "pid": rank.pid}
    if rank.step is not None:
        evidence["step"] = rank.step
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject=f"rank {rank.rank}",
        message=f"rank {rank.rank} was ended by {told or 'an exception'}",
        advice=ADVICE,
        ranks=(rank.rank,),
        evidence=evidence,
    )


RANK_FAILED: Final = Detector(RULE, rank_failed, by_step=False)
