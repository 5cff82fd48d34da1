"""History of alerts: their findings at earlier steps. An alert itself holds only its latest and its worst finding."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ddpwatch.core.state.step_store import CAPACITY_STEPS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpwatch.core.alerts.model import Alert, Finding, Identity, Moment

KEPT_STEPS: Final = CAPACITY_STEPS
"""Steps of history of an alert: as many as the step stores hold."""
NOTE_STEPS: Final = 5
"""Of this many consecutive steps only the last finding is kept, which bounds memory."""
KEPT_CLOSED: Final = 64
"""Closed alerts with a history; of older ones the worst finding remains."""


class AlertHistory:
    """Findings of each alert by time, in the order in which they are noted."""

    def __init__(self) -> None:
        self._notes: dict[Identity, deque[tuple[Moment, Finding]]] = {}
        self._over: deque[Identity] = deque()

    def note(self, alert: Alert) -> None:
        """Add the latest finding of an open alert."""
        notes = self._notes.setdefault(alert.identity, deque())
        step = alert.last.step or 0
        # Equal findings share one object.
        finding = notes[-1][1] if notes and notes[-1][1] == alert.finding else alert.finding
        # The first one stays: the alert was opened with it.
        if len(notes) > 1 and step - (notes[-2][0].step or 0) < NOTE_STEPS:
            notes.pop()
        notes.append((alert.last, finding))
        while len(notes) > 1 and (notes[1][0].step or 0) <= step - KEPT_STEPS:
            notes.popleft()

    def close(self, alert: Alert) -> None:
        """Mark an alert as closed, and forget those that closed long ago."""
        self._over.append(alert.identity)
        while len(self._over) > KEPT_CLOSED:
            self._notes.pop(self._over.popleft(), None)

    def at(self, alerts: Iterable[Alert], step: int) -> list[Alert]:
        """Those of the alerts that were open at a step, with their finding of then, or their first one."""
        return [
            self._then(alert, step)
            for alert in alerts
            if (alert.since.step or 0) <= step and (alert.closed is None or _end_step(alert, alert.closed) > step)
        ]

    def _then(self, alert: Alert, step: int) -> Alert:
        notes = self._notes.get(alert.identity)
        if not notes:
            return alert
        last, finding = next((note for note in reversed(notes) if (note[0].step or 0) <= step), notes[0])
        return replace(alert, last=last, finding=finding, closed=None, worst=None, stale=None, seen=None)


def _end_step(alert: Alert, closed: Moment) -> int:
    """The step at which it closed; where that is not known, at which it was last found."""
    return (alert.last.step if closed.step is None else closed.step) or 0
