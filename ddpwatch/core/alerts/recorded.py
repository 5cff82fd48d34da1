"""In place of the judge, where a run was recorded: the alerts as they were told then, when their time has come, and
between two changes as they read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from ddpwatch.core.alerts.hangs import has_progressed, is_hang, last_common_step
from ddpwatch.core.alerts.model import Alert, AlertBook, AlertEvent, Finding, Moment
from ddpwatch.core.limits import DEFAULTS, JudgeLimits, Limits
from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, sanitize

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpwatch.core.state.run import RunState

MAX_EVIDENCE: Final = 64
MAX_RANKS: Final = 2**20
MOST: Final = 2**62
"""No number of ours is larger than that; and none is not a number."""


class _Texts(Struct, tag="alerts", tag_field="t"):
    """Told apart from the messages of ranks by its tag: who does not know it counts it as not known."""

    alerts: list[Alert]


_decoder: Final = msgspec.json.Decoder(AlertEvent)
_texts_decoder: Final = msgspec.msgpack.Decoder(_Texts)


def read_event(text: bytes) -> AlertEvent | None:
    """A change of an alert as it was written down; None = it cannot be read."""
    try:
        event = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not _is_possible(event.alert):
        return None
    return replace(event, alert=_sanitized(event.alert))


def write_alerts(alerts: list[Alert]) -> bytes:
    """How alerts read, to be kept."""
    return msgspec.msgpack.encode(_Texts(alerts))


def read_alerts(payload: bytes) -> list[Alert]:
    """Those of them that can be read."""
    try:
        alerts = _texts_decoder.decode(payload).alerts
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    return [_sanitized(alert) for alert in alerts if _is_possible(alert)]


class RejoinedAlerts:
    """Troubles that go on after their recorder was killed: the next one closes them at an unknown step, judges anew
    from the histories, and opens at the same step what is the same. That is told as one, from its first beginning.
    """

    def __init__(self) -> None:
        """Nothing was told yet."""
        self._cut: dict[tuple[str, str], Alert] = {}
        self._since: dict[tuple[tuple[str, str], int], Moment] = {}

    def event(self, event: AlertEvent) -> AlertEvent:
        """The next change, in the order in which they were told: one that opens again becomes a change."""
        alert = event.alert
        if event.kind == "opened":
            before = self._cut.pop(alert.key, None)
            if before is not None and before.since.step == alert.since.step:
                self._since[_identity(alert)] = before.since
                return AlertEvent("changed", self.alert(alert))
        joined = self.alert(alert)
        if joined.closed is not None and joined.closed.step is None and joined.since.step is not None:
            self._cut[joined.key] = joined
        return event if joined is alert else replace(event, alert=joined)

    def alert(self, alert: Alert) -> Alert:
        """The same with its first beginning."""
        since = self._since.get(_identity(alert))
        return alert if since is None else replace(alert, since=since)


class RecordedAlerts:
    """Has the surface of a judge, and judges nothing."""

    def __init__(self, events: Iterable[tuple[int, AlertEvent]], limits: Limits = DEFAULTS) -> None:
        """Each change with its time, in order."""
        self.limits = limits
        self.book = AlertBook()
        self.behind = False
        """Never: there is nothing to work out."""
        self.caught_up = True
        self._events: list[tuple[int, AlertEvent]] = []
        self._next = 0
        self._due_ns = 0
        self._found_last: dict[tuple[tuple[str, str], int], Moment] = {}
        self._worded: set[tuple[tuple[str, str], int]] = set()
        """Alerts whose words were kept as they changed."""
        self._joined = RejoinedAlerts()
        self.derives_staleness = False
        """Whether the recording lacks the staleness of its alerts."""
        self.add(events)

    @property
    def due_ns(self) -> int:
        """Before this nothing has to be told: what was told must be told again at its time."""
        reported_ns = self._events[self._next][0] if self._next < len(self._events) else MOST
        return min(reported_ns, self._due_ns) if self.book.open else reported_ns

    @property
    def count(self) -> int:
        """How many changes are known."""
        return len(self._events)

    def add(self, events: Iterable[tuple[int, AlertEvent]]) -> None:
        """What was told after all that is known so far: somebody may still be writing it down."""
        for at_ns, reported in events:
            event = self._joined.event(reported)
            self._events.append((at_ns, event))
            self.derives_staleness |= event.alert.stale is None
            if event.kind == "closed":
                self._found_last[_identity(event.alert)] = event.alert.last

    def evaluate(self, state: RunState, *, last: bool = False, idle: bool = False) -> None:  # noqa: ARG002 - as a judge
        """Tell what was told up to now."""
        self._emit(state.now_ns)
        if not self.book.open or (state.now_ns < self._due_ns and not last):
            return
        self._due_ns = state.now_ns + JudgeLimits.EVALUATION_NS
        now = Moment(state.step, state.now_ns, state.unix_ns)
        for alert in list(self.book.open.values()):
            if alert.finding.ended or has_progressed(state, alert):
                continue
            # Between two changes it was found all along, until shortly before it was closed.
            found = self._found_last.get(_identity(alert), now)
            found = found if found.now_ns < now.now_ns else now
            if is_hang(alert.finding):
                # The step that is under way would hide that they went on.
                found = replace(found, step=alert.last.step)
            if found.now_ns > alert.last.now_ns:
                # Words that were kept once, when it was opened, do not tell in which steps it was so since.
                upto = alert.finding.upto_step if _identity(alert) in self._worded else None
                self.book.revise(replace(alert, finding=replace(alert.finding, upto_step=upto), last=found))
        if state.run_condition() == "ended":
            done = last_common_step(state)
            self.book.at_end(state, replace(now, step=done if done >= 0 else None))

    def refresh(self, payload: bytes, at_ns: int) -> None:
        """Open alerts read like this at that moment; nothing is opened or closed by it."""
        self._emit(at_ns)
        for alert in map(self._joined.alert, read_alerts(payload)):
            known = self.book.open.get(alert.key)
            if known is not None and _identity(known) == _identity(alert):
                self._worded.add(_identity(alert))
                self.book.revise(alert)

    def _emit(self, upto_ns: int) -> None:
        while self._next < len(self._events) and self._events[self._next][0] <= upto_ns:
            event = self._events[self._next][1]
            if event.kind != "opened" and event.alert.key not in self.book.open:
                # It goes on after all, or was closed by the end of the run before its recorder has closed it.
                over = [alert for alert in self.book.closed if _identity(alert) == _identity(event.alert)]
                for alert in over:
                    self.book.closed.remove(alert)
                    # Who judges anew may have missed its worst.
                    self.book.open[alert.key] = alert
            self.book.apply(event)
            self._next += 1


def _identity(alert: Alert) -> tuple[tuple[str, str], int]:
    return alert.key, alert.since.now_ns


def _is_possible(alert: Alert) -> bool:
    """Whether its numbers are such as can be shown."""
    moments = [moment for moment in (alert.since, alert.last, alert.closed, alert.seen) if moment is not None]
    return (
        all(_is_sound(finding) for finding in (alert.finding, alert.worst) if finding is not None)
        and 0 <= alert.waited_ns < MOST
        and all(0 <= time < MOST for moment in moments for time in (moment.now_ns, moment.unix_ns, moment.step or 0))
    )


def _is_sound(finding: Finding) -> bool:
    numbers = [value for value in finding.evidence.values() if not isinstance(value, str)]
    return (
        len(finding.evidence) <= MAX_EVIDENCE
        and len(finding.ranks) <= MAX_RANKS
        and all(0 <= rank < MAX_RANKS for rank in finding.ranks)
        and all(
            -MOST < number < MOST for number in (*numbers, finding.cost or 0.0, finding.lasting, finding.lingers or 0.0)
        )
        and all(
            0 <= number < MOST for number in (finding.from_step or 0, finding.upto_step or 0, finding.again_from or 0)
        )
    )


def _sanitized(alert: Alert) -> Alert:
    """What stands in a file is as foreign as what comes off the wire."""
    finding, worst = _sanitize(alert.finding), None if alert.worst is None else _sanitize(alert.worst)
    if worst is not None and (worst.rule, worst.subject) != (finding.rule, finding.subject):
        # Of another trouble, which nothing of ours writes.
        worst = None
    return replace(alert, finding=finding, worst=worst)


def _sanitize(finding: Finding) -> Finding:
    return replace(
        finding,
        rule=sanitize(finding.rule, NAME_CHARS),
        subject=sanitize(finding.subject, NAME_CHARS),
        message=sanitize(finding.message, NOTE_CHARS),
        advice=sanitize(finding.advice, NOTE_CHARS),
        detail=sanitize(finding.detail, NOTE_CHARS),
        phase=None if finding.phase is None else sanitize(finding.phase, NAME_CHARS),
        pattern=None if finding.pattern is None else sanitize(finding.pattern, NAME_CHARS),
        evidence={
            sanitize(name, NAME_CHARS): sanitize(value, NOTE_CHARS) if isinstance(value, str) else value
            for name, value in finding.evidence.items()
        },
    )
