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

    Compares checksums that the ranks of the model's process group take of the same slice of the same parameter after
    the same step; in DDP they must be equal bit by bit. In other kinds of training ranks have parameters or shards of
    their own, and none are compared. The alert stays open until the same slice is equal again: nothing in DDP repairs a
    difference.
    """
    found = (_difference(group, checks, context) for group, checks in _by_group(context.state).items())
    return [finding for finding in found if finding is not None]


def _difference(group: str, checks: dict[Key, dict[int, int]], context: DetectorContext) -> Finding | None:
    """The newest difference between ranks that hold replicas of one model, if there is any."""
    newest: dict[tuple[str, int], Key] = {}
    for key in sorted(checks)[-context.limits.drift.NEWEST_CHECKS :]:
        newest[key[1:]] = key
    differing = sorted(key for key in newest.values() if len(set(checks[key].values())) > 1)
    if not differing:
        return None
    key = differing[-1]
    step, parameter, offset = key
    ranks, majority = _odd(checks[key])
    others = "the others of its process group" if group else "the others"
    differ = f"differs from {others}" if len(ranks) == 1 else "differ from the others" if majority else "differ"
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
    subject = f"replicas on {group}" if group else "replicas"
    return Finding(RULE, Severity.CRITICAL, subject, message, ADVICE, ranks, evidence=evidence)


def _by_group(state: RunState) -> dict[str, dict[Key, dict[int, int]]]:
    """Checksums by slice and rank, of slices that at least two ranks report, for each group of ranks with replicas."""
    groups: dict[str, dict[Key, dict[int, int]]] = {}
    for rank in state.ranks.values():
        if rank.hello is not None and rank.hello.kind not in REPLICAS:
            continue
        checks = groups.setdefault(rank.hello.replicas if rank.hello is not None else "", {})
        for key, checksum in rank.checksums.items():
            checks.setdefault(key, {})[rank.rank] = checksum.crc
    return {group: {key: crcs for key, crcs in checks.items() if len(crcs) > 1} for group, checks in groups.items()}


def _odd(crcs: dict[int, int]) -> tuple[tuple[int, ...], bool]:
    """Ranks that differ from the majority, and whether there is one; without a majority all ranks."""
    crc, votes = Counter(crcs.values()).most_common(1)[0]
    if votes * 2 <= len(crcs):
        return tuple(crcs), False
    return tuple(rank for rank, value in crcs.items() if value != crc), True
