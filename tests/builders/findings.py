"""Findings of one rule, and an alert book that keeps them."""

from __future__ import annotations

from ddpwatch.core.alerts.model import AlertBook, Finding, Moment, Severity

MS = 1_000_000
STEP_MS = 100
CLOSE_DELAY_STEPS = 20


def finding(subject="rank 1", **changed):
    fields = {"severity": Severity.WARNING, "ranks": (1,), "phase": "forward", "cost": 0.1}
    fields |= {"rule": "straggler", "message": "it is slow", "advice": "Look at it."}
    return Finding(subject=subject, **{**fields, **changed})


def at(step):
    return Moment(step, step * STEP_MS * MS, 0)


class Book:
    """An alert book with one rule."""

    def __init__(self, *, by_step=True):
        self.book = AlertBook()
        self.by_step = by_step
        self.close_delay = CLOSE_DELAY_STEPS if by_step else CLOSE_DELAY_STEPS * STEP_MS * MS

    def evaluate(self, step, *findings, rule="straggler"):
        """Kinds of the events when this is found at a step."""
        self.book.update(rule, findings, at(step), close_delay=self.close_delay, by_step=self.by_step)
        return [event.kind for event in self.book.drain()]


def criticals(monitor):
    reported = [(event.kind, event.alert.finding) for event in monitor.book.drain()]
    return [(kind, finding.rule, finding.ranks) for kind, finding in reported if finding.severity is Severity.CRITICAL]
