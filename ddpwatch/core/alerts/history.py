"""How alerts read at the steps before, for who looks back: an alert itself holds only what was found last."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ddpwatch.core.state.step_store import CAPACITY_STEPS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpwatch.core.alerts.model import Alert, Finding, Moment

KEPT_STEPS: Final = CAPACITY_STEPS
"""Nobody looks back further than the history of steps goes."""
NOTE_STEPS: Final = 5
"""Of so many steps only what was found last is noted: that bounds what is kept, however often rules are asked."""
KEPT_CLOSED: Final = 64
"""So many alerts that are over can still be read as they were; of older ones the words of their worst moment remain."""

_Identity = tuple[tuple[str, str], int]


class AlertHistory:
    """What was found about each alert, and when. Notes are added in the order of time."""

    def __init__(self) -> None:
        """Begin with none."""
        self._notes: dict[_Identity, deque[tuple[Moment, Finding]]] = {}
        self._over: deque[_Identity] = deque()

    def note(self, alert: Alert) -> None:
        """An open alert reads like this by now."""
        notes = self._notes.setdefault(_identity(alert), deque())
        step = alert.last.step or 0
        # The same words are kept once.
        finding = notes[-1][1] if notes and notes[-1][1] == alert.finding else alert.finding
        # The first one stays: it is how the alert was opened.
        if len(notes) > 1 and step - (notes[-2][0].step or 0) < NOTE_STEPS:
            notes.pop()
        notes.append((alert.last, finding))
        while len(notes) > 1 and (notes[1][0].step or 0) <= step - KEPT_STEPS:
            notes.popleft()

    def close(self, alert: Alert) -> None:
        """An alert is over; the notes about those that have long been are let go."""
        self._over.append(_identity(alert))
        while len(self._over) > KEPT_CLOSED:
            self._notes.pop(self._over.popleft(), None)

    def at(self, alerts: Iterable[Alert], step: int) -> list[Alert]:
        """Of these the ones that were open at a step, as they read then; the first note goes for before."""
        return [
            self._then(alert, step)
            for alert in alerts
            if (alert.since.step or 0) <= step and (alert.closed is None or _end_step(alert, alert.closed) > step)
        ]

    def _then(self, alert: Alert, step: int) -> Alert:
        notes = self._notes.get(_identity(alert))
        if not notes:
            return alert
        last, finding = next((note for note in reversed(notes) if (note[0].step or 0) <= step), notes[0])
        return replace(alert, last=last, finding=finding, closed=None, worst=None, stale=None, seen=None)


def _end_step(alert: Alert, closed: Moment) -> int:
    """Where nobody knows at which step it was closed, when it was last found."""
    step = alert.last.step if closed.step is None else closed.step
    return step or 0


def _identity(alert: Alert) -> _Identity:
    return alert.key, alert.since.now_ns
