"""Time that was lost: steps that took far longer than the others, and the hang that the run has not come out of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ddpwatch.core.hangs import last_hang
from ddpwatch.core.numbers import count, duration, finite, plural, ranks_text
from ddpwatch.core.spread import MEDIAN, Spread
from ddpwatch.core.standstills import FAR_NS, Standstills, guilty_of
from ddpwatch.view.alertpage import all_alerts

if TYPE_CHECKING:
    from ddpwatch.core.hangs import Hang
    from ddpwatch.core.standstills import Standstill
    from ddpwatch.view.picture import Picture

TENTHS_BELOW_S: Final = 120.0
"""Of longer times nobody asks for the tenth of a second."""
_S_DIGITS: Final = 3


def lost_text(picture: Picture) -> str:
    """The time in which nothing went on, and why; empty = there was none."""
    return "; ".join(filter(None, (hang_text(last_hang(picture.state, all_alerts(picture))), stumbles_text(picture))))


def hang_text(hang: Hang | None) -> str:
    """The hang at the end, in a few words; empty = there was none."""
    if hang is None:
        return ""
    who = f", for {ranks_text(hang.ranks)}" if hang.ranks else ""
    return f"{hang.seconds:.1f} s in a hang that no step has come after{who}"


def stumbles_text(picture: Picture) -> str:
    """The time that was lost to such steps, how many there were, and the longest; empty = there were none.

    Of the steps that are kept: of a long run these are the last ones.
    """
    timeline = picture.timeline
    steps = timeline.steps(picture.last_step)
    step_ns, spread, found = timeline.series("step_ns", steps), Spread(), Standstills()
    long = step_ns > FAR_NS
    if not long.any():
        # As a rule: nobody need be looked for among thousands of ranks.
        return ""
    spread.take(step_ns)
    found.take(steps[long], step_ns[long], guilty_of(timeline.ranks, timeline.excess(steps[long])))
    still = found.found(spread.quantile(MEDIAN))
    if still is None:
        return ""
    which = f"{plural(still.steps, 'step')} of the last {count(len(steps))}"
    return f"{seconds_text(still.lost_s)} in {which} that stood still: {longest_text(still)}"


def longest_text(still: Standstill) -> str:
    """The longest of such steps, and for whom it took so long; where it is the only one, that is all of them."""
    who = "" if still.rank is None else f", for rank {still.rank}"
    return f"{'the longest: ' if still.steps > 1 else ''}{_step_text(still)}{who}"


def still_text(still: Standstill) -> str:
    """For how long it stood still, and when: `stood still for 8.0 s at step 100`."""
    lost = f"stood still for {seconds_text(still.lost_s)}"
    if still.steps == 1:
        return f"{lost} at step {count(still.longest_step)}"
    return f"{lost} in {plural(still.steps, 'step')} (the longest: {_step_text(still)})"


def still_object(still: Standstill | None) -> dict[str, Any] | None:
    """The steps in which the job stood still, and for whom in the longest of them; null = it never did."""
    if still is None:
        return None
    return {
        "steps": still.steps,
        "lost_s": finite(still.lost_s, _S_DIGITS),
        "longest_step": still.longest_step,
        "longest_s": finite(still.longest_s, _S_DIGITS),
        "rank": still.rank,
    }


def seconds_text(seconds: float) -> str:
    """A time that is lost."""
    return f"{seconds:.1f} s" if seconds < TENTHS_BELOW_S else duration(seconds)


def _step_text(still: Standstill) -> str:
    return f"step {count(still.longest_step)} took {seconds_text(still.longest_s)}"
