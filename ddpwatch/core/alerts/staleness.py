"""Staleness of open alerts: not observed lately, but still within the close delay that keeps them from flapping.

Evaluated after the rules and recorded with the alert; the same function derives it for recordings without it and for
earlier steps.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.hang_alerts import has_progressed
from ddpwatch.core.alerts.model import Moment
from ddpwatch.core.detectors.engine import evaluation_steps
from ddpwatch.core.limits import AlertLimits, EvaluationLimits, WindowLimits
from ddpwatch.core.metrics.window import WINDOW_STEPS, gather, ranks_to_compare
from ddpwatch.core.state.step_store import TIMES
from ddpwatch.wire import MANY_RANKS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ddpwatch.core.alerts.model import Alert, Finding
    from ddpwatch.core.limits import Limits
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.run import RunState


def with_staleness(state: RunState, limits: Limits, alerts: Iterable[Alert], upto: int | None = None) -> list[Alert]:
    """Open alerts with their staleness at the latest step, or at step `upto`.

    A rule finds a straggler as long as enough of its slow steps are in the window; the finding has the last of them. An
    all-reduce share is stale by the figure that is shown beside it.
    """
    steps = _Steps(state, limits, upto)
    return [_evaluated(state, alert, steps) for alert in alerts]


def _evaluated(state: RunState, alert: Alert, steps: _Steps) -> Alert:
    step = _last_seen(state, alert, steps) if steps.last >= 0 and alert.last.step is not None else None
    if step is None:
        return alert if alert.stale is False else replace(alert, stale=False, seen=None)
    # It was observed when it was opened, though its steps were before.
    step = max(step, alert.since.step or 0)
    if alert.stale and alert.seen is not None and alert.seen.step == step:
        return alert
    unix_ns = next(filter(None, (rank.unix_ns_of_step(step) for rank in state.ranks.values())), 0)
    return replace(alert, stale=True, seen=Moment(step, 0, unix_ns))


def _last_seen(state: RunState, alert: Alert, steps: _Steps) -> int | None:
    """The last step in which a stale alert was observed; None = the alert is not stale."""
    finding, seen = alert.finding, alert.last.step or 0
    if finding.upto_step is not None:
        seen = min(seen, finding.upto_step)
    if finding.rule == rules.COMM_SHARE and (fell := steps.share_fell(alert)) is not None:
        return min(seen, fell)
    if has_progressed(state, alert):
        return seen
    quiet = steps.last - seen
    if quiet <= AlertLimits.STALE_STEPS:
        return None
    # An end that the rule reports needs no further evaluations.
    return seen if finding.ended or quiet > max(steps.between_evaluations, _gaps(finding)) else None


def _gaps(finding: Finding) -> int:
    """Steps between slow ones while the episode goes on; 0 = it is continuous, or not known."""
    hits, steps = finding.evidence.get("pattern_steps"), finding.evidence.get("window_steps")
    if finding.upto_step is None or not (isinstance(hits, int) and isinstance(steps, int)) or hits < 1:
        return 0
    return min(-(-steps // hits), AlertLimits.STALE_MAX_STEPS // AlertLimits.STALE_GAPS) * AlertLimits.STALE_GAPS


class _Steps:
    """The latest steps of all ranks, gathered only if an alert may be stale."""

    def __init__(self, state: RunState, limits: Limits, upto: int | None) -> None:
        self._state, self._limits = state, limits
        self._ranks = ranks_to_compare(state)
        newest = min((rank.steps.newest for rank in self._ranks), default=-1)
        self.last = newest if upto is None else min(upto, newest)

    @cached_property
    def between_evaluations(self) -> int:
        """Steps between some evaluations of the rules: rare where steps are short, and rarer with many ranks."""
        step_ns = float(np.median(self._window.job_step_ns)) if len(self._window) else 1e9
        world_size = self._state.world_size
        _, stride = evaluation_steps(world_size, self._limits.judge, step_ns)
        quiet_ns = AlertLimits.STALE_NS + (EvaluationLimits.GRADUAL_NS if world_size > MANY_RANKS else 0)
        return max(AlertLimits.STALE_EVALUATIONS * stride, round(quiet_ns / max(step_ns, 1.0)))

    def share_fell(self, alert: Alert) -> int | None:
        """The last step in which the all-reduce took its share; None = it still does.

        With hysteresis: it has fallen when the share is clearly below the limit, and risen when it is above. A share
        between the two leaves the alert as it was.
        """
        limits = self._limits.comm_share
        share, low = _shares(self._window, WINDOW_STEPS)[-1:], limits.share * limits.close_part
        if (share > limits.share).any():
            return None
        if alert.stale and alert.seen is not None:
            return alert.seen.step
        if alert.stale is False and not (share <= low).any():
            return None
        window = self._gathered(AlertLimits.LOOK_BACK_STEPS)
        of_figures = _shares(window, WINDOW_STEPS)
        risen = np.flatnonzero(of_figures > limits.share)
        since = int(risen[-1]) + 1 if len(risen) else 0
        if not (of_figures[since:] <= low).any():
            return None
        fell = since + int(np.argmax(of_figures[since:] <= low))
        # A shorter span locates the step more exactly.
        high = np.flatnonzero(_shares(window, WindowLimits.MIN_STEPS)[: fell + 1] > low)
        return int(window.indices[WindowLimits.MIN_STEPS - 1 + (int(high[-1]) if len(high) else 0)])

    @cached_property
    def _window(self) -> Window:
        return self._gathered(WINDOW_STEPS)

    def _gathered(self, steps: int) -> Window:
        return gather(self._state, self._ranks, upto=self.last, steps=steps, columns=TIMES)


def _shares(window: Window, span: int) -> NDArray[np.float64]:
    """All-reduce share over the `span` steps up to each step that has at least `WindowLimits.MIN_STEPS` of them."""
    ends = np.arange(WindowLimits.MIN_STEPS, len(window) + 1)
    begins = np.maximum(ends - span, 0)
    spent_ns, took_ns = (
        total[ends] - total[begins]
        for column in (window.job_sync_ns, window.job_step_ns)
        for total in [np.concatenate(([0.0], np.cumsum(column)))]
    )
    found: NDArray[np.float64] = spent_ns / np.maximum(took_ns, 1.0)
    return found
