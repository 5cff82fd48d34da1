"""Alerts whose trouble has not been seen for a while: still open, lest they flap, and no longer the headline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.alerts import Moment
from ddpwatch.core.judge import JUDGED_STEPS, MOST_STRIDES
from ddpwatch.core.numbers import count
from ddpwatch.core.state import MANY_RANKS
from ddpwatch.core.text import NAME_CHARS, tame
from ddpwatch.core.timeline import NOT_KNOWN
from ddpwatch.core.window import ENOUGH_STEPS, scaled_steps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpwatch.core.alerts import Alert, Finding
    from ddpwatch.core.figures import Figures
    from ddpwatch.core.timeline import Timeline
    from ddpwatch.core.watch import Watch
    from ddpwatch.view.picture import Picture

STRAGGLER: Final = "straggler"
COMM_SHARE: Final = "comm-share"
QUIET_STEPS: Final = 20
"""An alert is not the headline any more when its trouble has stayed away for so many steps …"""
MOST_QUIET_STEPS: Final = 60
"""… or, where it came only now and then, for as many as four times its usual distance, up to this."""
QUIET_GAPS: Final = 4
QUIET_LOOKS: Final = 3
"""And never before the rules have been asked again so many times."""
LOOK_BACK_STEPS: Final = 240
"""Further back than this no slow step is looked for: an open alert has had one since."""
HALF: Final = 0.5
"""A step counts as slow from this part of what a slow one usually takes longer."""

Key = tuple[str, str]


def faded_alerts(
    watch: Watch, alerts: Iterable[Alert], figures: Figures | None, timeline: Timeline | None = None
) -> dict[Key, int]:
    """Of these alerts those that have faded at the figures' last step, each with the step at which it was last seen.

    A rule goes on finding a straggler as long as enough of its slow steps are in the window. The timeline, where there
    is one, tells the slow steps themselves, and so how long ago the last of them was.
    """
    if figures is None or watch.behind:
        return {}
    looks, limits = _looks_steps(watch, figures), watch.limits.comm_share
    slow = _SlowSteps(timeline, figures.last_step) if timeline is not None else None
    faded = {}
    for alert in alerts:
        seen = alert.last.step
        if seen is None:
            continue
        quiet = max(QUIET_STEPS, looks)
        if slow is not None and alert.finding.rule == STRAGGLER:
            latest = slow.latest(alert.finding, figures.step_ns)
            quiet = max(quiet, _usual_gap(alert.finding) * QUIET_GAPS)
            seen = seen if latest is None else min(seen, latest)
        if alert.finding.rule == COMM_SHARE and figures.share <= limits.share * limits.close_part:
            # By the steps that the figure beside it is of, lest the two contradict each other; and not by that figure
            # alone: one that wanders about the limit would take the alert away and bring it back all the time.
            seen = min(
                seen, figures.first_step if slow is None else slow.latest_above(limits.share * limits.close_part)
            )
        if figures.last_step - seen > quiet:
            # It was found when it was opened, though the steps that it was found in were before.
            faded[alert.key] = max(seen, alert.since.step or 0)
    return faded


def last_seen(picture: Picture, alert: Alert) -> Moment | None:
    """When an alert that has faded was last seen; None = it has not faded."""
    step = picture.faded.get(alert.key) if alert.closed is None else None
    if step is None:
        return None
    times_ns = (row.state.unix_ns_of_step(step) for row in picture.rows)
    return Moment(step, 0, next(filter(None, times_ns), 0))


def not_seen(finding: Finding, seen: int) -> str:
    """In place of the message, which speaks as if it were still so."""
    who = f"{tame(finding.subject, NAME_CHARS)}, " if finding.ranks else ""
    what = f"{tame(finding.phase, NAME_CHARS)}, " if finding.phase else ""
    return f"{who}{what}not seen since step {count(seen)}"


def _looks_steps(watch: Watch, figures: Figures) -> int:
    """How many steps some looks of the rules are apart: short steps are judged less often, many ranks still less."""
    judge = watch.limits.judge
    judged = scaled_steps(JUDGED_STEPS, judge.least_s, figures.step_ns)
    stride = judge.stride_steps * judged // JUDGED_STEPS
    if watch.state.world_size > MANY_RANKS:
        stride *= MOST_STRIDES
    return QUIET_LOOKS * stride


def _usual_gap(finding: Finding) -> int:
    """How many steps apart its slow ones are; 1 = it lasts, or it is not told."""
    hits, steps = finding.evidence.get("pattern_steps"), finding.evidence.get("window_steps")
    if not (isinstance(hits, int) and isinstance(steps, int)) or hits < 1:
        return 1
    return min(-(-steps // hits), MOST_QUIET_STEPS // QUIET_GAPS)


class _SlowSteps:
    """The latest steps, and how far each rank's own work was above the middle rank's. Read once for all alerts."""

    def __init__(self, timeline: Timeline, upto: int) -> None:
        self._timeline = timeline
        self._rows = {rank: row for row, rank in enumerate(timeline.ranks)}
        self._steps = timeline.steps(upto, LOOK_BACK_STEPS)
        self._excess = timeline.excess(self._steps)

    def latest_above(self, share: float) -> int:
        """The last one up to which some steps together have spent more than this share in all-reduce; 0 = none."""
        sync_ns, step_ns = (self._timeline.series(name, self._steps) for name in ("sync_ns", "step_ns"))
        ends = np.arange(ENOUGH_STEPS, len(self._steps) + 1)
        spent_ns, took_ns = (np.concatenate(([0.0], np.cumsum(values))) for values in (sync_ns, step_ns))
        spent_ns, took_ns = (sums[ends] - sums[ends - ENOUGH_STEPS] for sums in (spent_ns, took_ns))
        above = ends[spent_ns > share * took_ns]
        return int(self._steps[above[-1] - 1]) if len(above) else 0

    def latest(self, finding: Finding, step_ns: float) -> int | None:
        """The last one in which one of its ranks was about as slow as the finding says; None = cannot be told."""
        rows = [self._rows[rank] for rank in finding.ranks if rank in self._rows]
        excess_ms = finding.evidence.get("excess_ms")
        if not rows or not isinstance(excess_ms, (int, float)) or not len(self._steps):
            return None
        # In per cent of the step that it makes longer, as the timeline has it.
        usual_percent = 100.0 * excess_ms / max(step_ns / 1e6 + excess_ms, 1e-6)
        excess = self._excess[rows]
        slow = ((excess != NOT_KNOWN) & (excess >= HALF * usual_percent)).any(axis=0)
        return int(self._steps[slow][-1]) if slow.any() else int(self._steps[0])
