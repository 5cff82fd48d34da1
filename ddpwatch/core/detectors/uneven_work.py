"""Waiting for a slowest rank that changes from step to step, because the inputs of the ranks differ in size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.diagnosis.rotation import explained_by, rotation
from ddpwatch.core.limits import UnevenWorkLimits
from ddpwatch.core.metrics.hung_steps import without_hung_steps
from ddpwatch.core.metrics.window import scaled_steps
from ddpwatch.core.units import percent, plural

if TYPE_CHECKING:
    from ddpwatch.core.detectors.context import DetectorContext
    from ddpwatch.core.metrics.window import Window

RULE: Final = rules.UNEVEN_WORK
ADVICE: Final = (
    "Give all ranks inputs of about the same size in a step: batches by token count, a sampler that groups similar "
    "lengths (group_by_length=True in Hugging Face's TrainingArguments), bucketing by image size, or padding to equal "
    "lengths."
)


def uneven_work(context: DetectorContext) -> list[Finding]:
    """Inputs of uneven size, such as sequences or images, make another rank the slowest in each step: all wait for it.

    Found when ranks wait for a large part of the step, no rank is waited for much more than the others, the last one
    to arrive changes about as often as by chance, and input sizes explain most of the difference between ranks within
    steps. No rank is at fault. Waiting for varying ranks without such a difference is reported by comm-share.
    """
    limits = context.limits.uneven_work
    window = context.window
    if not len(window) or not window.complete:
        return []
    steps = scaled_steps(limits.window_steps, context.limits.judge.least_s, window.median_step_ns)
    window = without_hung_steps(window.last(steps))
    found = rotation(window)
    if found is None or found.wait < limits.share or _uneven_samples(context, window):
        return []
    if not follows_inputs(window):
        return []
    sizes = window.column("input_elements")
    follows = explained_by(sizes, window.self_ns) or 0.0
    return [
        Finding(
            rule=RULE,
            severity=Severity.WARNING,
            subject="job",
            message=f"the slowest rank changes from step to step: ranks wait {percent(found.wait)} of the time · "
            f"{percent(follows)} of the difference follows input size · last {plural(len(window), 'step')}",
            advice=ADVICE,
            cost=found.wait,
            evidence={
                "waiting_percent": round(found.wait * 100, 2),
                "changes_percent": round(found.changes * 100, 1),
                "follows_size_percent": round(follows * 100, 1),
                "min_elements": int(sizes.min()),
                "max_elements": int(sizes.max()),
                "steps": len(window),
            },
        )
    ]


def follows_inputs(window: Window) -> bool:
    """Whether input sizes explain most of the difference in own work between ranks."""
    follows = explained_by(window.column("input_elements"), window.self_ns)
    return follows is not None and follows >= UnevenWorkLimits.FOLLOWS_SHARE


def _uneven_samples(context: DetectorContext, window: Window) -> bool:
    """Whether batches differ in their number of samples: `uneven-batch` reports that, with its cost."""
    limits = context.limits.uneven_batch
    samples = window.last(limits.window_steps).column("samples")
    known = (samples > 0).all(axis=0)
    return int(np.count_nonzero(known & (samples != samples[:1]).any(axis=0))) >= limits.steps
