"""Whether all ranks train on as many samples, and whether one has run out of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core import rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.detectors.context import Detector
from ddpwatch.core.detectors.stall import MAX_ACTIVITIES, deadline_text, doing, facts, operation, waiting_text
from ddpwatch.core.diagnosis.early_exit import (
    END_OF_DATA,
    ended_in_order,
    in_sync,
    is_stuck,
    left_the_loop,
    ran_out,
    tells_its_data,
    word_to_come,
)
from ddpwatch.core.diagnosis.stacks import top_of_stack
from ddpwatch.core.limits import UnevenBatchLimits
from ddpwatch.core.units import count, duration, plural, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpwatch.core.detectors.context import DetectorContext
    from ddpwatch.core.diagnosis.arrivals import SyncPoint
    from ddpwatch.core.state.rank import RankState

RULE: Final = rules.UNEVEN_BATCH
SAMPLES_ADVICE: Final = (
    "DDP averages over ranks, not over samples: those of a small batch count more. Use drop_last=True and a "
    "DistributedSampler, or pad the short batches."
)
ENDED_ADVICE: Final = (
    "They wait in an all-reduce that never completes. Give all ranks as many steps (DistributedSampler, "
    "drop_last=True), or train inside model.join(). If it was not the data that ended, its log says why it left."
)


def uneven_batch(context: DetectorContext) -> list[Finding]:
    """Ranks train on different numbers of samples in the same step, so that samples do not count alike.

    Compared are the samples that each rank took in at the same step, where all ranks can tell. It is critical when a
    rank's data has ended early: it has left while the others wait for it in an all-reduce, or lose their connections.
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
    # Of equally many the larger: those with less are the odd ones.
    usual = max(Counter(typical).items(), key=lambda item: (item[1], item[0]))[0]
    odd = {rank: value for rank, value in zip(window.ranks, typical, strict=True) if value != usual}
    when = "" if steps == known.shape[1] else f" in {steps} of {plural(known.shape[1], 'step')}"
    if odd:
        verb = "trains" if len(odd) == 1 else "train"
        message = f"{ranks_text(odd)} {verb} on {_span(odd.values())} samples a step, the others on {count(usual)}"
    else:
        message = f"the ranks train on different numbers of samples: {_span(uneven.ravel().tolist())} a step"
    return [
        Finding(
            rule=RULE,
            severity=Severity.WARNING,
            subject="job",
            message=message + when,
            advice=SAMPLES_ADVICE,
            ranks=tuple(odd),
            evidence={
                "samples": usual,
                "least_samples": int(uneven.min()),
                "most_samples": int(uneven.max()),
                "uneven_steps": steps,
                "steps": known.shape[1],
            },
        )
    ]


def _ended_early(context: DetectorContext) -> list[Finding]:
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
    has = "has" if len(early) == 1 else "have"
    in_the_middle = any(tells_its_data(rank) and not rank.at_end_of_data for rank in early)
    # Whose data is of unknown length may as well have left for another reason, and take the others along in a moment.
    unknown = not all(map(tells_its_data, early))
    awaited = in_the_middle or (unknown and word_to_come(state, early))
    lasting_ns = UnevenBatchLimits.LEFT_NS if awaited else UnevenBatchLimits.STUCK_NS if unknown else 0
    held = next((sync_point for sync_point in context.sync_points if sync_point.waiting), None)
    return [
        Finding(
            rule=RULE,
            severity=Severity.CRITICAL,
            subject=END_OF_DATA,
            message=f"{ranks_text(rank.rank for rank in early)} {has} ended after {plural(done, 'step')} while the"
            f" others go on: {ranks_text(rank.rank for rank in stuck)} in all-reduce for {duration(waited_s)}",
            advice=ENDED_ADVICE,
            ranks=tuple(rank.rank for rank in early),
            phase="sync",
            evidence=(facts(context, held) if held is not None else {})
            | {"steps_done": done, "waiting_ranks": len(stuck), "waiting_s": round(waited_s, 1)},
            lasting=lasting_ns,
            lingers=context.limits.stall.linger_s * 1e9,
        )
    ]


def _left_early(context: DetectorContext) -> list[Finding]:
    """Ranks whose data has ended, and that others wait for in the middle of a step."""
    for sync_point in context.stuck:
        if left := left_the_loop(sync_point) or ran_out(sync_point):
            return [_left_finding(context, sync_point, left)]
    return []


def _left_finding(context: DetectorContext, sync_point: SyncPoint, left: Sequence[RankState]) -> Finding:
    done = min(rank.step or 0 for rank in left)
    has, its = ("has", "its") if len(left) == 1 else ("have", "their")
    gone = [each for each in sync_point.members if each.rank in left]
    others = replace(sync_point, members=tuple(each for each in sync_point.members if each.rank not in left))
    if sync_point.missing:
        where = f"{has} not joined {operation(sync_point)}: {waiting_text(sync_point)}"
    else:
        where = f"{'waits' if len(left) == 1 else 'wait'} in a barrier: {waiting_text(others)} in {operation(others)}"
    doings = "; ".join(doing(context.state, each, at_end=False) for each in gone[:MAX_ACTIVITIES])
    return Finding(
        rule=RULE,
        severity=Severity.CRITICAL,
        subject=END_OF_DATA,
        message=f"{ranks_text(rank.rank for rank in left)} {has} come to the end of {its} data after "
        f"{plural(done, 'step')}, and {where}{deadline_text(context)}. {doings}",
        advice=ENDED_ADVICE,
        ranks=tuple(rank.rank for rank in left),
        phase="sync",
        detail=top_of_stack(gone[0].rank.stack),
        urgent=context.urgent,
        lingers=context.limits.stall.linger_s * 1e9,
        evidence={"steps_done": done, "waiting_ranks": len(others.waiting)} | facts(context, others),
    )


def _left_behind(context: DetectorContext) -> list[Finding]:
    """Ranks that ended at the end of their data, which has cost the others their connections."""
    left, failed = context.left_behind.left, context.left_behind.failed
    if not failed:
        return []
    done = min(rank.step or 0 for rank in left)
    waited_ns = max(rank.beat.phase_ns if rank.beat is not None and in_sync(rank) else 0 for rank in failed)
    return [
        Finding(
            rule=RULE,
            severity=Severity.CRITICAL,
            subject=END_OF_DATA,
            message=f"{ranks_text(rank.rank for rank in left)} {'has' if len(left) == 1 else 'have'} ended after "
            f"{plural(done, 'step')} while the others go on: {ranks_text(rank.rank for rank in failed)} lost "
            f"{'its connection' if len(failed) == 1 else 'their connections'} and failed",
            advice=ENDED_ADVICE,
            ranks=tuple(rank.rank for rank in left),
            phase="sync",
            evidence={"steps_done": done, "failed_ranks": len(failed), "waiting_s": round(waited_ns / 1e9, 1)},
            # One that left with an exit code other than 0 has failed, and not its data.
            lasting=0
            if context.left_behind.at_end or not word_to_come(context.state, left)
            else UnevenBatchLimits.EXIT_CODE_NS,
            lingers=context.limits.stall.linger_s * 1e9,
        )
    ]


def _span(values: Iterable[int]) -> str:
    ordered = sorted(values)
    least, most = ordered[0], ordered[-1]
    return count(least) if least == most else f"{count(least)} to {count(most)}"


# By time: where the data of a rank has ended, no step is finished any more.
UNEVEN_BATCH: Final = Detector(RULE, uneven_batch, by_step=False)
