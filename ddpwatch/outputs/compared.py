"""One side of a comparison, read from its recording: its steps, how it ended, and for how long it stood still."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpwatch.core.ledger import Ledger
from ddpwatch.core.overall import profile_of_digest
from ddpwatch.core.scaling import profile_of, scaling
from ddpwatch.errors import UsageError
from ddpwatch.outputs.readout import Readout, digest_of
from ddpwatch.outputs.troubles import troubles
from ddpwatch.view.alerts import most_urgent_first
from ddpwatch.view.badend import bad_end
from ddpwatch.view.comparison import Side

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.core.scaling import Profile
    from ddpwatch.sources.recorded import Attempt, Recorded


def read_side(
    letter: str,
    recorded: Recorded,
    attempt: Attempt,
    against: Profile | None = None,
    progress: Callable[[int], None] | None = None,
) -> tuple[Ledger, Side]:
    """The attempt as this side; `against` = the run of one process that it is measured against. Refuses one without
    steps.
    """
    readout, ledger = Readout(recorded, attempt, progress), Ledger()
    # Of the whole run, as a report tells it, and not without its first steps.
    digest, _ = digest_of(ledger.passing(readout.windows()), tuple(readout.state.ranks))
    whole = None if against is None else profile_of_digest(digest)
    badly = bad_end(readout.state, most_urgent_first(troubles(recorded, attempt, readout.state).alerts))
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
        goes_on=readout.state.run_condition() == "live",
        still=still,
        still_share=still.lost_s / digest.total_s if still is not None else 0.0,
    )
