"""Alerts whose trouble has not been seen for a while: still open, lest they flap, and no longer the headline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core import rules
from ddpwatch.core.alerts.hangs import gone_on, is_suspect
from ddpwatch.core.alerts.model import Moment
from ddpwatch.core.detectors.engine import GRADUAL_NS, looks
from ddpwatch.core.metrics.window import ENOUGH_STEPS, WINDOW_STEPS
from ddpwatch.core.state.run import MANY_RANKS
from ddpwatch.core.state.sanitize import NAME_CHARS, tame
from ddpwatch.core.units import count, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ddpwatch.core.alerts.model import Alert, Finding
    from ddpwatch.core.limits import CommShareLimits
    from ddpwatch.core.metrics.figures import Figures
    from ddpwatch.core.metrics.timeline import Timeline
    from ddpwatch.core.monitor import Watch
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.view.run_view import Picture

QUIET_STEPS: Final = 20
"""An alert is not the headline any more when its trouble has stayed away for so many steps …"""
MOST_QUIET_STEPS: Final = 60
"""… or, where it came only now and then, for as many as four times its usual distance, up to this."""
QUIET_GAPS: Final = 4
QUIET_LOOKS: Final = 3
"""And never before the rules have been asked again so many times …"""
QUIET_NS: Final = 2_000_000_000
"""… or could have been: what they find is told a while after its steps, which are many where steps are short."""
LOOK_BACK_STEPS: Final = 600
"""Further back than this is not looked for when a share has fallen."""

_SHARE: Final = ("sync_ns", "step_ns")
Key = tuple[str, str]


def faded_alerts(
    watch: Watch, alerts: Iterable[Alert], figures: Figures | None, timeline: Timeline | None = None
) -> dict[Key, int]:
    """Of these alerts those that have faded at the figures' last step, each with the step at which it was last seen.

    A rule goes on finding a straggler as long as enough of its slow steps are in the window; it tells, too, which was
    the last of them. The share of the all-reduce is read off the timeline, where there is one.
    """
    if figures is None or watch.behind:
        return {}
    looked, limits = _looks_steps(watch, figures), watch.limits.comm_share
    faded = {}
    for alert in alerts:
        seen = alert.last.step
        if seen is None:
            continue
        quiet = max(QUIET_STEPS, looked)
        if (upto := alert.finding.upto_step) is not None:
            quiet = max(quiet, _usual_gap(alert.finding) * QUIET_GAPS)
            seen = min(seen, upto)
        if alert.finding.rule == rules.COMM_SHARE:
            # By the figure beside it, lest the two contradict each other.
            if timeline is not None:
                fallen = _fallen(timeline, figures.last_step, limits)
            else:
                fallen = figures.first_step if figures.share <= limits.share * limits.close_part else None
            if fallen is not None:
                faded[alert.key] = max(min(seen, fallen), alert.since.step or 0)
                continue
        if alert.finding.ended:
            # Its rule itself has said so.
            quiet = QUIET_STEPS
        if figures.last_step - seen > quiet or gone_on(watch.state, alert):
            # It was found when it was opened, though the steps that it was found in were before.
            faded[alert.key] = max(seen, alert.since.step or 0)
    return faded


def last_seen(picture: Picture, alert: Alert) -> Moment | None:
    """When an alert that has faded was last seen; None = it has not faded."""
    step = picture.faded.get(alert.key) if alert.closed is None else None
    return None if step is None else moment_of_step((row.state for row in picture.rows), step)


def moment_of_step(ranks: Iterable[RankState], step: int) -> Moment:
    """When a step was, by the clock of the first of these ranks that can tell."""
    return Moment(step, 0, next(filter(None, (rank.unix_ns_of_step(step) for rank in ranks)), 0))


def not_seen(finding: Finding, seen: int) -> str:
    """In place of the message, which speaks as if it were still so."""
    # That of a hang is the group that waited, and not for whom.
    subject = ranks_text(finding.ranks) if is_suspect(finding) else tame(finding.subject, NAME_CHARS)
    who = f"{subject}, " if finding.ranks else ""
    what = f"{tame(finding.phase, NAME_CHARS)}, " if finding.phase else ""
    return f"{who}{what}not seen since step {count(seen)}"


def _looks_steps(watch: Watch, figures: Figures) -> int:
    """How many steps some looks of the rules are apart: short steps are judged less often, many ranks still less."""
    world_size = watch.state.world_size
    _, stride = looks(world_size, watch.limits.judge, figures.step_ns)
    quiet_ns = QUIET_NS + (GRADUAL_NS if world_size > MANY_RANKS else 0)
    return max(QUIET_LOOKS * stride, round(quiet_ns / max(figures.step_ns, 1.0)))


def _usual_gap(finding: Finding) -> int:
    """How many steps apart its slow ones are; 1 = it lasts, or it is not told."""
    hits, steps = finding.evidence.get("pattern_steps"), finding.evidence.get("window_steps")
    if not (isinstance(hits, int) and isinstance(steps, int)) or hits < 1:
        return 1
    return min(-(-steps // hits), MOST_QUIET_STEPS // QUIET_GAPS)


def _fallen(timeline: Timeline, upto: int, limits: CommShareLimits) -> int | None:
    """The last step in which the all-reduce took its share; None = it still does.

    It has fallen when the share is clearly below the limit, and risen when it is above: one that wanders about between
    the two would else take the alert away and bring it back all the time.
    """
    steps = timeline.steps(upto, LOOK_BACK_STEPS)
    sync_ns, step_ns = (np.concatenate(([0.0], np.cumsum(timeline.series(name, steps)))) for name in _SHARE)

    def shares(span: int) -> NDArray[np.float64]:
        ends = np.arange(ENOUGH_STEPS, len(steps) + 1)
        begins = np.maximum(ends - span, 0)
        spent_ns, took_ns = (upto_ns[ends] - upto_ns[begins] for upto_ns in (sync_ns, step_ns))
        found: NDArray[np.float64] = spent_ns / np.maximum(took_ns, 1.0)
        return found

    of_figures, low = shares(WINDOW_STEPS), limits.share * limits.close_part
    risen = np.flatnonzero(of_figures > limits.share)
    since = int(risen[-1]) + 1 if len(risen) else 0
    if not (of_figures[since:] <= low).any():
        return None
    fell = since + int(np.argmax(of_figures[since:] <= low))
    # Few steps tell more exactly when that was.
    high = np.flatnonzero(shares(ENOUGH_STEPS)[: fell + 1] > low)
    return int(steps[ENOUGH_STEPS - 1 + (int(high[-1]) if len(high) else 0)])
