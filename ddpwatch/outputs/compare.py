"""One side of a comparison, read from its recording: its steps, how it ended, and for how long it stood still.

The run of one process that others are measured against, read from its recording.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.core.metrics.aggregate import profile_of_digest
from ddpwatch.core.metrics.scaling import profile_of, scaling
from ddpwatch.core.metrics.tally import Ledger
from ddpwatch.core.units import plural
from ddpwatch.errors import UsageError
from ddpwatch.recording.alerts import alerts_at_worst
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.steps import StepReader, digest_of
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
    against: Profile | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Ledger, Side]:
    """The attempt as this side; `against` = the run of one process that it is measured against. Refuses one without
    steps.
    """
    readout, ledger = StepReader(recorded, attempt, progress), Ledger()
    # Of the whole run, as a report tells it, and not without its first steps.
    digest, _ = digest_of(ledger.passing(readout.windows()), tuple(readout.state.ranks))
    whole = None if against is None else profile_of_digest(digest)
    outcome = outcome_of(readout.state, alerts_at_worst(recorded, attempt, readout.state))
    badly = bad_end_text(outcome)
    profile, still = profile_of(ledger), digest.standstill()
    if profile is None:
        why = f"{recorded.path} has no step after the first that all ranks have finished"
        how = f"; it ended badly: {badly}" if badly else ""
        raise UsageError(f"{why}: there is nothing to compare{how}")
    return ledger, Side(
        letter,
        recorded.path.name,
        attempt.run.name or attempt.run.id,
        recorded.attempts.index(attempt) + 1,
        profile,
        scaling(against, whole) if against is not None and whole is not None else None,
        attempts=len(recorded.attempts),
        bad_end=badly,
        goes_on=outcome.live,
        still=still,
        still_share=still.lost_s / digest.total_s if still is not None else 0.0,
    )


class NoBaseline(UsageError):
    """A recording cannot be measured against."""


def read_baseline(path: Path, progress: Callable[[int], None] | None = None) -> Profile:
    """The last attempt in the recording that has steps. Refuses a run of several ranks, and one without steps."""
    with closing(Recording(path)) as recorded:
        sizes = {attempt.run.world_size for attempt in recorded.attempts}
        if sizes != {1}:
            raise NoBaseline(
                f"{path} is a run of {plural(max(sizes), 'rank')}: a baseline is the recording of the same training "
                "in one process"
            )
        for attempt in reversed(recorded.attempts):
            readout = StepReader(recorded, attempt, progress)
            profile = profile_of_digest(digest_of(readout.windows(), tuple(readout.state.ranks))[0])
            if profile is not None:
                return profile
    raise NoBaseline(f"{path} has no finished step: a baseline needs some")
