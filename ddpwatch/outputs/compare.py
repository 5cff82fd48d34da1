"""One side of a comparison, and the one-process baseline of a scaling, each read from a recording."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.core.metrics.aggregate import RunAggregate, StepSample
from ddpwatch.core.metrics.scaling import scaling_of
from ddpwatch.core.units import plural
from ddpwatch.errors import UsageError
from ddpwatch.recording.alerts import alerts_at_worst
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.steps import StepReader
from ddpwatch.view.comparison import Side
from ddpwatch.view.verdict import bad_end_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpwatch.core.metrics.scaling import Profile
    from ddpwatch.recording.reader import Attempt


def read_side(
    letter: str,
    recorded: Recording,
    attempt: Attempt,
    baseline: Profile | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[StepSample, Side]:
    """Read an attempt as one side, with its scaling against `baseline`; raises UsageError if it has no steps."""
    reader, sample = StepReader(recorded, attempt, progress), StepSample()
    # Over all steps, as in a report; the sample leaves out the first ones.
    whole = RunAggregate.of_run(sample.passing(reader.windows()), tuple(reader.state.ranks))
    outcome = outcome_of(reader.state, alerts_at_worst(recorded, attempt, reader.state))
    bad_end = bad_end_text(outcome)
    profile = sample.profile()
    if profile is None:
        why = f"{recorded.path} has no step after the first that all ranks finished"
        how = f"; it ended badly: {bad_end}" if bad_end else ""
        raise UsageError(f"{why}: nothing to compare{how}")
    return sample, Side(
        letter,
        recorded.path.name,
        attempt.run.name or attempt.run.id,
        recorded.attempts.index(attempt) + 1,
        profile,
        scaling_of(baseline, whole),
        attempts=len(recorded.attempts),
        bad_end=bad_end,
        goes_on=outcome.live,
        hung=whole.hung_steps(),
    )


def read_baseline(path: Path, progress: Callable[[int], None] | None = None) -> Profile:
    """Profile of the last attempt with steps; raises UsageError if there is none, or for a run of several ranks."""
    with closing(Recording(path)) as recorded:
        sizes = {attempt.run.world_size for attempt in recorded.attempts}
        if sizes != {1}:
            raise UsageError(
                f"{path} is a run of {plural(max(sizes), 'rank')}; --baseline needs a recording of the same training "
                "in one process"
            )
        for attempt in reversed(recorded.attempts):
            reader = StepReader(recorded, attempt, progress)
            profile = RunAggregate.of_run(reader.windows(), tuple(reader.state.ranks)).profile()
            if profile is not None:
                return profile
    raise UsageError(f"{path} has no finished step; --baseline needs a recording with steps")
