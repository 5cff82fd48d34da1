"""Compares checksums of parameter slices between replicas."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, TypeAlias

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.model_kinds import REPLICAS
from ddpwatch.core.units import count, plural, ranks_text

if TYPE_CHECKING:
    from ddpwatch.core.detectors.context import DetectorContext, Evidence
    from ddpwatch.core.state.run import RunState

RULE: Final = rules.DRIFT
ADVICE: Final = (
    "Look for code that changes parameters on one rank only: load_state_dict, in-place changes, weight averaging, "
    "other optimizer settings, skipped steps; or a faulty GPU. DDP averages gradients and never repairs parameters."
)

Key: TypeAlias = tuple[int, str, int]
"""Step, parameter, offset."""


def drift(context: DetectorContext) -> list[Finding]:
    """The model replicas differ: the ranks train different models, and the result depends on which one is saved.

    Compares checksums that all ranks take of the same slice of the same parameter after the same step; in DDP they must
    be equal bit by bit. In other kinds of training ranks have parameters or shards of their own, and none are compared.
    The alert stays open until the same slice is equal again: nothing in DDP repairs a difference.
    """
    checks = _common(context.state)
    newest: dict[tuple[str, int], Key] = {}
    for key in sorted(checks)[-context.limits.drift.NEWEST_CHECKS :]:
        newest[key[1:]] = key
    differing = sorted(key for key in newest.values() if len(set(checks[key].values())) > 1)
    if not differing:
        return []
    key = differing[-1]
    step, parameter, offset = key
    ranks, majority = _odd(checks[key])
    differ = "differs from the others" if len(ranks) == 1 else "differ from the others" if majority else "differ"
    earlier = len({name for _, name, _ in differing}) - 1
    message = f"{ranks_text(ranks)} {differ} in parameter {parameter} after step {count(step)}"
    message += f", and in {plural(earlier, 'parameter')} before" if earlier else ""
    evidence: Evidence = {
        "step": step,
        "parameter": parameter,
        "offset_elements": offset,
        "ranks_compared": len(checks[key]),
        "versions": len(set(checks[key].values())),
        "differing_slices": len(differing),
        "slices_compared": len(newest),
    }
    return [Finding(RULE, Severity.CRITICAL, "replicas", message, ADVICE, ranks, evidence=evidence)]


def _common(state: RunState) -> dict[Key, dict[int, int]]:
    """Checksums by slice and rank, of slices that at least two ranks report."""
    checks: dict[Key, dict[int, int]] = {}
    for rank in state.ranks.values():
        if rank.hello is not None and rank.hello.kind not in REPLICAS:
            continue
        for key, checksum in rank.checksums.items():
            checks.setdefault(key, {})[rank.rank] = checksum.crc
    return {key: crcs for key, crcs in checks.items() if len(crcs) > 1}


def _odd(crcs: dict[int, int]) -> tuple[tuple[int, ...], bool]:
    """Ranks that differ from the majority, and whether there is one; without a majority all ranks."""
    crc, votes = Counter(crcs.values()).most_common(1)[0]
    if votes * 2 <= len(crcs):
        return tuple(crcs), False
    return tuple(rank for rank, value in crcs.items() if value != crc), True
