"""Scan of a recording's alerts: each at its worst, as it was at the end, and the moments at which alerts opened.

Reports, exports and the replay's marks show the same as the summary on a screen at the end of the run.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ddpwatch.core.alerts.hang_alerts import is_over, last_common_step
from ddpwatch.core.alerts.model import Moment, Severity, with_worst
from ddpwatch.core.alerts.recorded import RejoinedAlerts, read_alerts
from ddpwatch.core.alerts.staleness import with_staleness
from ddpwatch.core.limits import DEFAULTS
from ddpwatch.recording.schema import ALERTS

if TYPE_CHECKING:
    from ddpwatch.core.alerts.model import Alert, AlertEvent
    from ddpwatch.core.state.run import RunState
    from ddpwatch.recording.reader import Attempt, Recording


class Opened(NamedTuple):
    """The opening of an alert."""

    at_ns: int
    severity: Severity
    """The worst that the alert reached."""


def opened_alerts(recorded: Recording) -> tuple[Opened, ...]:
    """The openings of all attempts, in order."""
    opened: list[Opened] = []
    # By attempt and alert, the index of its latest opening.
    places: dict[tuple[int, tuple[str, str]], int] = {}
    joined: defaultdict[int, RejoinedAlerts] = defaultdict(RejoinedAlerts)
    for attempt, at_ns, event in recorded.alerts():
        severity, whose = event.alert.finding.severity, (attempt, event.alert.key)
        if joined[attempt].event(event).kind == "opened":
            places[whose] = len(opened)
            opened.append(Opened(at_ns, severity))
        elif (place := places.get(whose)) is not None:
            opened[place] = opened[place]._replace(severity=max(severity, opened[place].severity))
    return tuple(opened)


def alerts_at_worst(recorded: Recording, attempt: Attempt, state: RunState) -> tuple[Alert, ...]:
    """The alerts in the order of opening, each with the text of its worst moment; `state` is the run's final state."""
    return tuple(_settled(alert, state).at_worst for alert in recalled(recorded, attempt))


def reported(
    recorded: Recording, attempt: Attempt, joined: RejoinedAlerts | None = None
) -> list[tuple[int, AlertEvent]]:
    """The changes of an attempt's alerts, each with its time, in order. An alert that continues after its recorder
    restarted has no end there.
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


def recalled(recorded: Recording, attempt: Attempt) -> list[Alert]:
    """Each alert as it was at its end or at the end of the recording, with its worst, in the order of opening."""
    last: dict[tuple[tuple[str, str], int], Alert] = {}
    joined = RejoinedAlerts()
    for _, event in reported(recorded, attempt, joined):
        identity = event.alert.key, event.alert.since.now_ns
        last[identity] = with_worst(last.get(identity), event.alert)
    # All open alerts are written after each checkpoint, and then those that change.
    checkpoint = recorded.checkpoint(attempt, attempt.last_ns)
    from_ns = None if checkpoint is None else checkpoint.at_ns - 1
    refreshed = set()
    for entry in recorded.entries(attempt, from_ns=from_ns, shard=ALERTS):
        for alert in map(joined.alert, read_alerts(entry.payload)):
            identity = alert.key, alert.since.now_ns
            if identity in last and last[identity].closed is None:
                last[identity] = with_worst(last[identity], alert)
                refreshed.add(identity)
    # The text of a change does not say up to which step the finding held afterwards.
    return [
        alert
        if alert.closed is not None or identity in refreshed
        else replace(alert, finding=replace(alert.finding, upto_step=None))
        for identity, alert in last.items()
    ]


def earlier_alerts(recorded: Recording, attempt: Attempt) -> dict[int, list[Alert]]:
    """By number of an earlier attempt, from 1, its alerts as last reported. Reads no frames."""
    numbers = {each.id: number for number, each in enumerate(recorded.attempts, 1)}
    last: dict[int, dict[tuple[tuple[str, str], int], Alert]] = {}
    for row in recorded.alerts():
        number = numbers.get(row.attempt, 0)
        if 0 < number < numbers[attempt.id]:
            alert = row.event.alert
            last.setdefault(number, {})[alert.key, alert.since.now_ns] = alert
    return {number: list(alerts.values()) for number, alerts in last.items()}


def _settled(alert: Alert, state: RunState) -> Alert:
    """The alert at the end of the run: closed, if the run has recovered from its hang before the recorder closed it;
    with its staleness, if the recording lacks it.
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
