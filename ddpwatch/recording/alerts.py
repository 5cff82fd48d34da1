"""The alerts of an attempt as reports and exports tell them: each at its worst, and since when it was not seen.

The same as the summary on a screen tells at the end of a run, and of its replay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddpwatch.core.alerts.hangs import is_over, last_common_step
from ddpwatch.core.alerts.model import Moment, with_worst
from ddpwatch.core.alerts.recorded import RejoinedAlerts, read_alerts
from ddpwatch.core.alerts.staleness import with_staleness
from ddpwatch.core.limits import DEFAULTS
from ddpwatch.recording.schema import ALERTS

if TYPE_CHECKING:
    from ddpwatch.core.alerts.model import Alert, AlertEvent
    from ddpwatch.core.state.run import RunState
    from ddpwatch.recording.reader import Attempt, Recorded


def troubles(recorded: Recorded, attempt: Attempt, state: RunState) -> tuple[Alert, ...]:
    """The alerts of an attempt in the order in which they opened, each in the words of its worst moment; `state` is how
    the attempt ended.
    """
    return tuple(_settled(alert, state).at_worst for alert in recalled(recorded, attempt))


def reported(
    recorded: Recorded, attempt: Attempt, joined: RejoinedAlerts | None = None
) -> list[tuple[int, AlertEvent]]:
    """The changes of alerts while this attempt was recorded, each with its time, in order. A trouble that goes on has
    not ended where its recorder did.
    """
    joined = RejoinedAlerts() if joined is None else joined
    changes: list[tuple[int, AlertEvent]] = []
    for at_ns, event in recorded.events(attempt):
        change = joined.event(event)
        if change.kind != event.kind:
            identity = change.alert.key, change.alert.since
            ends = [
                n for n, (_, c) in enumerate(changes) if (c.alert.key, c.alert.since) == identity and c.alert.closed
            ]
            del changes[ends[-1]]
        changes.append((at_ns, change))
    return changes


def recalled(recorded: Recorded, attempt: Attempt) -> list[Alert]:
    """Each trouble as it was at its end, or at the end of the recording, and at its worst, in the order in which they
    opened.
    """
    last: dict[tuple[tuple[str, str], int], Alert] = {}
    joined = RejoinedAlerts()
    for _, event in reported(recorded, attempt, joined):
        identity = event.alert.key, event.alert.since.now_ns
        last[identity] = with_worst(last.get(identity), event.alert)
    # All that is open is kept after each checkpoint, and then what has changed.
    checkpoint = recorded.checkpoint(attempt, attempt.last_ns)
    from_ns = None if checkpoint is None else checkpoint.at_ns - 1
    worded = set()
    for entry in recorded.entries(attempt, from_ns=from_ns, shard=ALERTS):
        for alert in map(joined.alert, read_alerts(entry.payload)):
            identity = alert.key, alert.since.now_ns
            if identity in last and last[identity].closed is None:
                last[identity] = with_worst(last[identity], alert)
                worded.add(identity)
    # Words that were told when it changed do not tell in which steps it was so since.
    return [
        alert if alert.closed is not None or identity in worded else _until_unknown(alert)
        for identity, alert in last.items()
    ]


def _until_unknown(alert: Alert) -> Alert:
    return replace(alert, finding=replace(alert.finding, upto_step=None))


def told_before(recorded: Recorded, attempt: Attempt) -> dict[int, list[Alert]]:
    """By number, counted from 1, the alerts of the attempts before this one, as they were told last. No frame of theirs
    is read.
    """
    numbers = {each.id: number for number, each in enumerate(recorded.attempts, 1)}
    last: dict[int, dict[tuple[tuple[str, str], int], Alert]] = {}
    for row in recorded.alerts():
        number = numbers.get(row.attempt, 0)
        if 0 < number < numbers[attempt.id]:
            alert = row.event.alert
            last.setdefault(number, {})[alert.key, alert.since.now_ns] = alert
    return {number: list(alerts.values()) for number, alerts in last.items()}


def _settled(alert: Alert, state: RunState) -> Alert:
    """As it was at the end. Closed, if the run has come out of the hang that it tells of before its recorder has closed
    it; with its staleness, if the recording lacks it.
    """
    if alert.closed is not None:
        return alert
    now = Moment(state.step, state.now_ns, state.unix_ns)
    if is_over(state, alert):
        done = last_common_step(state)
        return replace(alert, closed=replace(now, step=done if done >= 0 else None), stale=False, seen=None)
    if alert.stale is None:
        # Its rule found it up to the end; the finding has the steps.
        (found,) = with_staleness(state, DEFAULTS, [replace(alert, last=now)])
        alert = replace(alert, stale=found.stale, seen=found.seen)
    return alert
