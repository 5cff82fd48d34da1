"""The alerts of an attempt as reports and exports tell them: each at its worst, and since when it was not seen.

The same as the summary on a screen tells at the end of a run, and of its replay.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ddpwatch.core.alerts.hangs import done_by_all, is_over
from ddpwatch.core.alerts.model import Moment
from ddpwatch.core.alerts.recorded import Recalled
from ddpwatch.core.alerts.staleness import faded_alerts, moment_of_step
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.monitor import Watch
from ddpwatch.recording.health import event_of
from ddpwatch.recording.steps import recalled

if TYPE_CHECKING:
    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.core.state.run import RunState
    from ddpwatch.recording.reader import Attempt, Recorded


@dataclass(frozen=True)
class Troubles:
    """The alerts of an attempt in the order in which they opened."""

    alerts: tuple[Alert, ...] = ()
    """In the words of their worst moments."""
    seen: dict[tuple[str, str], Moment] = field(default_factory=dict)
    """By key, those that were open at the end and whose trouble was not seen any more, each with its last time."""


def troubles(recorded: Recorded, attempt: Attempt, state: RunState) -> Troubles:
    """What was found in an attempt; `state` is how it ended."""
    found = [_settled(alert, state) for alert in recalled(recorded, attempt)]
    return Troubles(tuple(alert.at_worst for alert in found), _seen(found, state))


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
    """Closed at the end, if the run has come out of the hang that it tells of before its recorder has closed it."""
    if alert.closed is not None or not is_over(state, alert):
        return alert
    done = done_by_all(state)
    return replace(alert, closed=Moment(done if done >= 0 else None, state.now_ns, state.unix_ns))


def _seen(found: list[Alert], state: RunState) -> dict[tuple[str, str], Moment]:
    judge, timeline = Recalled(()), Timeline()
    now = Moment(state.step, state.now_ns, state.unix_ns)
    for alert in found:
        if alert.closed is None:
            # It was found up to the end, by its rule: in which steps is told by the words.
            judge.book.reads(replace(alert, last=now))
    if not judge.book.open:
        return {}
    watch = Watch(state, judge=judge)
    timeline.follow(state)
    faded = faded_alerts(watch, judge.book.open.values(), watch.figures(), timeline)
    return {key: moment_of_step(state.ranks.values(), step) for key, step in faded.items()}
