"""Ranks with different sample counts in a step, and ranks whose data ended before that of the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.detectors.stall import MAX_ACTIVITIES, deadline_text, doing, facts, operation, waiting_text
from ddpwatch.core.diagnosis.early_exit import (
    END_OF_DATA,
    ended_in_order,
    exit_code_pending,
    in_sync,
    is_stuck,
    left_the_loop,
    ran_out,
    reports_data_length,
)
from ddpwatch.core.diagnosis.rotation import explained_by
from ddpwatch.core.diagnosis.stacks import top_of_stack
from ddpwatch.core.limits import UnevenBatchLimits, UnevenWorkLimits
from ddpwatch.core.units import count, duration_text, percent, plural, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpwatch.core.detectors.context import DetectorContext, Evidence
    from ddpwatch.core.diagnosis.arrivals import SyncPoint
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.rank import RankState

RULE: Final = rules.UNEVEN_BATCH
SAMPLES_ADVICE: Final = (
    "Gradients are averaged over ranks, so samples of a smaller batch have more weight. Use drop_last=True and a "
    "DistributedSampler, or pad short batches."
)
ENDED_ADVICE: Final = (
    "The all-reduce of the other ranks never completes. Give all ranks the same number of steps (DistributedSampler, "
    "drop_last=True), or train inside model.join(). If its data had not ended, its log shows why it exited."
)


def uneven_batch(context: DetectorContext) -> list[Finding]:
    """Ranks train on different numbers of samples in the same step, so that samples have different weights.

    Compares the batch sizes of all ranks in the same step, if all are known. Critical when the data of a rank has ended
    early: it has left the training loop while the others wait for it in an all-reduce, or lose their connections.
    """
    early = _ended_early(context) or _left_early(context) or _left_behind(context)
    return [*_different_samples(context), *early]


def _different_samples(context: DetectorContext) -> list[Finding]:
    limits = context.limits.uneven_batch
    window = context.window.last(limits.window_steps)
    if len(window.ranks) < 2:
        return []
    samples = window.column("samples")
    known = samples[:, (samples > 0).all(axis=0)]
    uneven = known[:, known.min(axis=0) != known.max(axis=0)]
    steps = uneven.shape[1]
    if steps < limits.steps:
        return []
    typical = [round(float(value)) for value in np.median(uneven, axis=1)]
    # Ties go to the larger count: ranks with fewer samples are the odd ones.
    common = max(Counter(typical).items(), key=lambda item: (item[1], item[0]))[0]
    odd = {rank: value for rank, value in zip(window.ranks, typical, strict=True) if value != common}
    wait = _waiting(window)
    when = "" if steps == known.shape[1] else f" · in {steps} of {plural(known.shape[1], 'step')}"
    if odd:
        verb = "trains" if len(odd) == 1 else "train"
        message = f"{ranks_text(odd)} {verb} on {_span(odd.values())} samples per step, the others on {count(common)}"
    else:
        message = f"samples per step differ between ranks: {_span(uneven.ravel().tolist())}"
    return [
        Finding(
            rule=RULE,
            severity=Severity.WARNING,
            subject="job",
            message=message + when + (f" · ranks wait {percent(wait)} of the time" if wait else ""),
            advice=SAMPLES_ADVICE,
            ranks=tuple(odd),
            cost=wait,
            evidence={
                "samples": common,
                "least_samples": int(uneven.min()),
                "most_samples": int(uneven.max()),
                "uneven_steps": steps,
                "steps": known.shape[1],
            },
        )
    ]


def _waiting(window: Window) -> float | None:
    """Waiting as a fraction of the step, if own work follows the number of samples; else None."""
    if not window.complete:
        return None
    follows = explained_by(window.column("samples"), window.self_ns)
    wait = float(window.job_wait_ns.sum()) / max(float(window.job_step_ns.sum()), 1.0)
    return wait if follows is not None and follows >= UnevenWorkLimits.FOLLOWS_SHARE else None


def _ended_early(context: DetectorContext) -> list[Finding]:
    """Ranks that said goodbye while others wait for them in an all-reduce."""
    state = context.state
    ended = [] if context.all_well else [rank for rank in state.ranks.values() if ended_in_order(rank)]
    if not ended:
        return []
    stuck = [rank for rank in state.ranks.values() if state.condition(rank) == "ok" and is_stuck(rank, ended)]
    if not stuck:
        return []
    done = min(rank.step or 0 for rank in ended)
    waited_s = max(rank.beat.phase_ns for rank in stuck if rank.beat is not None) / 1e9
    early = [rank for rank in ended if (rank.step or 0) <= max(other.step or 0 for other in stuck)]
    has = "has" if len(stuck) == 1 else "have"
    message = (
        f"{_names(early)} exited after {plural(done, 'step')}, before the others: {_names(stuck)} {has} waited in "
    )
    message += f"all-reduce for {duration_text(waited_s)}"
    in_the_middle = any(reports_data_length(rank) and not rank.at_end_of_data for rank in early)
    # With data of unknown length it may have left for another reason, and the others may fail in a moment.
    unknown = not all(map(reports_data_length, early))
    exit_code_matters = in_the_middle or (unknown and exit_code_pending(state, early))
    open_delay_ns = UnevenBatchLimits.LEFT_NS if exit_code_matters else UnevenBatchLimits.STUCK_NS if unknown else 0
    held = next((sync_point for sync_point in context.sync_points if sync_point.waiting), None)
    evidence = facts(context, held) if held is not None else {}
    evidence |= {"steps_done": done, "waiting_ranks": len(stuck), "waiting_s": round(waited_s, 1)}
    return [_end_of_data(context, early, message, evidence, open_delay_ns)]


def _left_early(context: DetectorContext) -> list[Finding]:
    """Ranks whose data has ended while others wait for them in the middle of a step."""
    for sync_point in context.stuck:
        if left := left_the_loop(sync_point) or ran_out(sync_point):
            return [_left_finding(context, sync_point, left)]
    return []


def _left_finding(context: DetectorContext, sync_point: SyncPoint, left: Sequence[RankState]) -> Finding:
    done = min(rank.step or 0 for rank in left)
    has, waits = ("has", "waits") if len(left) == 1 else ("have", "wait")
    gone = [each for each in sync_point.members if each.rank in left]
    others = replace(sync_point, members=tuple(each for each in sync_point.members if each.rank not in left))
    if sync_point.missing:
        where = f"{has} not joined {operation(sync_point)}: {waiting_text(sync_point)}"
    else:
        where = f"{waits} in a barrier: {waiting_text(others)} in {operation(others)}"
    doings = "; ".join(doing(context.state, each, at_end=False) for each in gone[:MAX_ACTIVITIES])
    message = f"{_names(left)} ran out of data after {plural(done, 'step')} and {where}"
    message += f"{deadline_text(context)}. {doings}"
    evidence: Evidence = {"steps_done": done, "waiting_ranks": len(others.waiting)} | facts(context, others)
    finding = _end_of_data(context, left, message, evidence)
    return replace(finding, detail=top_of_stack(gone[0].rank.stack), urgent=context.urgent)


def _left_behind(context: DetectorContext) -> list[Finding]:
    """Ranks that left at the end of their data, so that the others lost their connections and failed."""
    left, failed = context.left_behind.left, context.left_behind.failed
    if not failed:
        return []
    done = min(rank.step or 0 for rank in left)
    waited_ns = max(rank.beat.phase_ns if rank.beat is not None and in_sync(rank) else 0 for rank in failed)
    their = "its connection" if len(failed) == 1 else "their connections"
    message = f"{_names(left)} exited after {plural(done, 'step')}, before the others: {_names(failed)} lost "
    message += f"{their} and failed"
    evidence: Evidence = {"steps_done": done, "failed_ranks": len(failed), "waiting_s": round(waited_ns / 1e9, 1)}
    # With an exit code other than 0 the rank has failed: then it was not the data.
    certain = context.left_behind.at_end or not exit_code_pending(context.state, left)
    return [_end_of_data(context, left, message, evidence, 0 if certain else UnevenBatchLimits.EXIT_CODE_NS)]


def _end_of_data(
    context: DetectorContext, left: Sequence[RankState], message: str, evidence: Evidence, open_delay_ns: float = 0.0
) -> Finding:
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject=END_OF_DATA,
        message=message,
        advice=ENDED_ADVICE,
        ranks=tuple(rank.rank for rank in left),
        phase="sync",
        evidence=evidence,
        lasting=open_delay_ns,
        lingers=context.limits.stall.linger_s * 1e9,
    )


def _names(ranks: Sequence[RankState]) -> str:
    return ranks_text(rank.rank for rank in ranks)


def _span(values: Iterable[int]) -> str:
    ordered = sorted(values)
    least, most = ordered[0], ordered[-1]
    return count(least) if least == most else f"{count(least)} to {count(most)}"
