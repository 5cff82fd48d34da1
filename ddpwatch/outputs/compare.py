"""One side of a comparison, read from its recording: its steps, how it ended, and for how long it stood still.

The run of one process that others are measured against, read from its recording.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.core.metrics.aggregate import RunAggregate, StepSample
from ddpwatch.core.metrics.scaling import scaling_of
from ddpwatch.core.units import plural
from ddpwatch.errors import UsageError
from ddpwatch.recording.alerts import troubles
from ddpwatch.recording.reader import Recorded
from ddpwatch.recording.steps import Readout
from ddpwatch.view.comparison import Side
from ddpwatch.view.verdict import bad_end_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpwatch.core.metrics.scaling import Profile
    from ddpwatch.recording.reader import Attempt


def read_side(
    letter: str,
    recorded: Recorded,
    attempt: Attempt,
    against: Profile | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[StepSample, Side]:
    """The attempt as this side; `against` = the run of one process that it is measured against. Refuses one without
    steps.
    """
    readout, sample = Readout(recorded, attempt, progress), StepSample()
    # Of the whole run, as a report has it, and not without its first steps.
    whole = RunAggregate.of_run(sample.passing(readout.windows()), tuple(readout.state.ranks))
    outcome = outcome_of(readout.state, troubles(recorded, attempt, readout.state))
    badly = bad_end_text(outcome)
    profile = sample.profile()
    if profile is None:
        why = f"{recorded.path} has no step after the first that all ranks have finished"
        how = f"; it ended badly: {badly}" if badly else ""
        raise UsageError(f"{why}: there is nothing to compare{how}")
    return sample, Side(
        letter,
        recorded.path.name,
        attempt.run.name or attempt.run.id,
        recorded.attempts.index(attempt) + 1,
        profile,
        scaling_of(against, whole),
        attempts=len(recorded.attempts),
        bad_end=badly,
        goes_on=outcome.live,
        hung=whole.hung_steps(),
    )


class NoBaseline(UsageError):
    """A recording cannot be measured against."""


def read_baseline(path: Path, progress: Callable[[int], None] | None = None) -> Profile:
    """The last attempt in the recording that has steps. Refuses a run of several ranks, and one without steps."""
    with closing(Recorded(path)) as recorded:
        sizes = {attempt.run.world_size for attempt in recorded.attempts}
        if sizes != {1}:
            raise NoBaseline(
                f"{path} is a run of {plural(max(sizes), 'rank')}: a baseline is the recording of the same training "
                "in one process"
            )
        for attempt in reversed(recorded.attempts):
            readout = Readout(recorded, attempt, progress)
            profile = RunAggregate.of_run(readout.windows(), tuple(readout.state.ranks)).profile()
            if profile is not None:
                return profile
    raise NoBaseline(f"{path} has no finished step: a baseline needs some")
