"""Xids, uncorrectable memory errors and lost GPUs, as the driver reports them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.diagnosis.xids import RESET, xid_meaning
from ddpwatch.core.units import plural, ranks_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.detectors.context import DetectorContext, Evidence
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.wire import Gpu

RULE: Final = rules.GPU_ERROR
LOST: Final = "GPU is lost: the driver cannot read it"


def gpu_error(context: DetectorContext) -> list[Finding]:
    """The driver reports a GPU error: an Xid, uncorrectable ECC errors, or a lost GPU.

    An Xid is the error number of the NVIDIA driver, shown with NVIDIA's name for it. Xids that only follow from the end
    of a process are information. ECC errors count if they are newer than the first reading
    that was received; the GPU screen shows all since the driver was loaded.
    """
    by_gpu: dict[str, list[tuple[RankState, Gpu]]] = {}
    for rank in context.state.ranks.values():
        for gpu in rank.gpus.latest.gpus if rank.gpus.latest else ():
            if gpu.xids or gpu.lost or new_ecc_errors(rank, gpu):
                # Ranks that share a GPU all report it.
                by_gpu.setdefault(f"{rank.host} {gpu.uuid or f'{rank.rank} {gpu.device}'}", []).append((rank, gpu))
    findings = [_finding(users) for users in by_gpu.values()]
    findings.sort(key=lambda finding: -finding.severity)
    most = context.limits.gpu_error.MAX_SEPARATE
    return findings if len(findings) <= most else [*findings[: most - 1], _together(findings[most - 1 :])]


def new_ecc_errors(rank: RankState, gpu: Gpu) -> int:
    """Uncorrectable memory errors since the first reading that was received."""
    if gpu.ecc_uncorrected is None:
        return 0
    return gpu.ecc_uncorrected - rank.gpus.ecc_before.get(gpu.device, gpu.ecc_uncorrected)


def _finding(users: Sequence[tuple[RankState, Gpu]]) -> Finding:
    ranks = tuple(sorted({rank.rank for rank, _ in users}))
    # The most complete of the reports.
    rank, gpu = max(users, key=lambda user: (user[1].lost, len(user[1].xids), new_ecc_errors(*user)))
    reported: list[tuple[Severity, str, str]] = []
    for code in dict.fromkeys(reversed(gpu.xids)):
        words, severity, advice = xid_meaning(code)
        reported.append((severity, f"Xid {code}, {words}", advice))
    if errors := new_ecc_errors(rank, gpu):
        reported.append((Severity.CRITICAL, f"{plural(errors, 'new uncorrectable ECC error')}", RESET))
    if gpu.lost:
        reported.append((Severity.CRITICAL, LOST, RESET))
    severity, worst, advice = max(reported, key=lambda part: part[0])
    more = len(reported) - 1
    subject = f"{ranks_text(ranks)} · {gpu.device}"
    message = f"{subject}: {worst}{f' · and {more} more' if more else ''}"
    xids, lost = ", ".join(map(str, gpu.xids)) or "none", "yes" if gpu.lost else "no"
    evidence: Evidence = {"xids": xids, "new_uncorrected_errors": errors, "lost": lost}
    return Finding(RULE, severity, subject, message, advice, ranks, evidence=evidence)


def _together(findings: Sequence[Finding]) -> Finding:
    ranks = tuple(sorted({rank for finding in findings for rank in finding.ranks}))
    worst = findings[0]
    message = f"{plural(len(findings), 'more GPU')} with errors ({ranks_text(ranks)}), such as {worst.message}"
    return Finding(RULE, worst.severity, "GPUs", message, worst.advice, ranks, evidence={"gpus": len(findings)})
