"""The alerts of an attempt as reports and exports tell them: each at its worst, and since when it was not seen.

The same as the summary on a screen tells at the end of a run, and of its replay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpwatch.core.alerts.hangs import done_by_all, is_over
from ddpwatch.core.alerts.model import Moment
from ddpwatch.core.alerts.staleness import with_staleness
from ddpwatch.core.limits import DEFAULTS
from ddpwatch.recording.health import event_of
from ddpwatch.recording.steps import recalled

if TYPE_CHECKING:
    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.core.state.run import RunState
    from ddpwatch.recording.reader import Attempt, Recorded


def troubles(recorded: Recorded, attempt: Attempt, state: RunState) -> tuple[Alert, ...]:
    """The alerts of an attempt in the order in which they opened, each in the words of its worst moment; `state` is how
    the attempt ended.
    """
    return tuple(_settled(alert, state).at_worst for alert in recalled(recorded, attempt))


def told_before(recorded: Recorded, attempt: Attempt) -> dict[int, list[Alert]]:
    """By number, counted from 1, the alerts of the attempts before this one, as they were told last. No frame of theirs
    is read.
    """
    numbers = {each.id: number for number, each in enumerate(recorded.attempts, 1)}
    last: dict[int, dict[tuple[tuple[str, str], int], Alert]] = {}
    for row in recorded.alerts():
        number = numbers.get(row.attempt, 0)
        if 0 < number < numbers[attempt.id] and (event := event_of(recorded, row)) is not None:
            last.setdefault(number, {})[event.alert.key, event.alert.since.now_ns] = event.alert
    return {number: list(alerts.values()) for number, alerts in last.items()}


def _settled(alert: Alert, state: RunState) -> Alert:
    """As it was at the end. Closed, if the run has come out of the hang that it tells of before its recorder has closed
    it; with its staleness, if the recording lacks it.
    """
    if alert.closed is not None:
        return alert
    now = Moment(state.step, state.now_ns, state.unix_ns)
    if is_over(state, alert):
        done = done_by_all(state)
        return replace(alert, closed=replace(now, step=done if done >= 0 else None), stale=False, seen=None)
    if alert.stale is None:
        # Its rule found it up to the end; the finding has the steps.
        (found,) = with_staleness(state, DEFAULTS, [replace(alert, last=now)])
        alert = replace(alert, stale=found.stale, seen=found.seen)
    return alert
