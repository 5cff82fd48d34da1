"""Recorded alerts: their encoding, and a stand-in for the rule engine that replays them at their times."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from ddpwatch.core.alerts.hang_alerts import has_progressed, is_hang, last_common_step
from ddpwatch.core.alerts.model import Alert, AlertBook, AlertEvent, Finding, Moment
from ddpwatch.core.limits import DEFAULTS, EvaluationLimits, Limits
from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, sanitize

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpwatch.core.alerts.model import Identity, Key
    from ddpwatch.core.state.run import RunState

MAX_EVIDENCE: Final = 64
"""Entries of evidence in one alert."""
MAX_RANKS: Final = 2**20
"""Upper bound of rank numbers, and of ranks in one alert, as in `wire.Rank`."""
MAX_NUMBER: Final = 2**62
"""Exclusive bound of every number in an alert; NaN fails the comparison, too."""


class _Texts(Struct, tag="alerts", tag_field="t"):
    """Open alerts at a moment. The tag sets it apart from messages of ranks; older readers count it as unknown."""

    alerts: list[Alert]


_decoder: Final = msgspec.json.Decoder(AlertEvent)
_texts_decoder: Final = msgspec.msgpack.Decoder(_Texts)


def read_event(text: bytes) -> AlertEvent | None:
    """Decode a recorded event; None = it cannot be read."""
    try:
        event = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return replace(event, alert=_sanitized(event.alert)) if _is_possible(event.alert) else None


def write_alerts(alerts: list[Alert]) -> bytes:
    """Encode open alerts for the recording."""
    return msgspec.msgpack.encode(_Texts(alerts))


def read_alerts(payload: bytes) -> list[Alert]:
    """Decode open alerts, without those that cannot be read."""
    try:
        alerts = _texts_decoder.decode(payload).alerts
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    return [_sanitized(alert) for alert in alerts if _is_possible(alert)]


class RejoinedAlerts:
    """Joins alerts that were cut because their recorder was killed.

    The next recorder closes them at an unknown step, evaluates the step histories anew, and opens the same alerts at
    the same steps. They become one alert with the first beginning.
    """

    def __init__(self) -> None:
        self._cut: dict[Key, Alert] = {}
        self._since: dict[Identity, Moment] = {}

    def event(self, event: AlertEvent) -> AlertEvent:
        """The next event, in recorded order; the second opening of a cut alert becomes a change."""
        alert = event.alert
        if event.kind == "opened":
            before = self._cut.pop(alert.key, None)
            if before is not None and before.since.step == alert.since.step:
                self._since[alert.identity] = before.since
                return AlertEvent("changed", self.alert(alert))
        joined = self.alert(alert)
        if joined.closed is not None and joined.closed.step is None and joined.since.step is not None:
            self._cut[joined.key] = joined
        return event if joined is alert else replace(event, alert=joined)

    def alert(self, alert: Alert) -> Alert:
        """The alert with its first beginning."""
        since = self._since.get(alert.identity)
        return alert if since is None else replace(alert, since=since)


class RecordedAlerts:
    """Rule engine of a replay: applies recorded events at their times, in order, instead of evaluating rules."""

    def __init__(self, events: Iterable[tuple[int, AlertEvent]], limits: Limits = DEFAULTS) -> None:
        self.limits = limits
        self.book = AlertBook()
        self.behind = False
        self.caught_up = True
        self._events: list[tuple[int, AlertEvent]] = []
        self._next = 0
        self._due_ns = 0
        self._found_last: dict[Identity, Moment] = {}
        """When alerts that closed later were last found."""
        self._worded: set[Identity] = set()
        """Alerts whose findings between events were recorded, too."""
        self._joined = RejoinedAlerts()
        self.derives_staleness = False
        """Whether the recording lacks the staleness of its alerts."""
        self.add(events)

    @property
    def due_ns(self) -> int:
        """Time of the next event or evaluation."""
        reported_ns = self._events[self._next][0] if self._next < len(self._events) else MAX_NUMBER
        return min(reported_ns, self._due_ns) if self.book.open else reported_ns

    @property
    def count(self) -> int:
        """Number of events known so far."""
        return len(self._events)

    def add(self, events: Iterable[tuple[int, AlertEvent]]) -> None:
        """Append later events: the recording may still be growing."""
        for at_ns, reported in events:
            event = self._joined.event(reported)
            self._events.append((at_ns, event))
            self.derives_staleness |= event.alert.stale is None
            if event.kind == "closed":
                self._found_last[event.alert.identity] = event.alert.last

    def evaluate(self, state: RunState, *, last: bool = False, idle: bool = False) -> None:  # noqa: ARG002 - as RuleEngine
        """Apply the events up to now, and keep open alerts as found until shortly before they closed."""
        self._emit(state.now_ns)
        if not self.book.open or (state.now_ns < self._due_ns and not last):
            return
        self._due_ns = state.now_ns + EvaluationLimits.INTERVAL_NS
        now = Moment(state.step, state.now_ns, state.unix_ns)
        for alert in list(self.book.open.values()):
            if alert.finding.ended or has_progressed(state, alert):
                continue
            found = min(now, self._found_last.get(alert.identity, now), key=lambda moment: moment.now_ns)
            if is_hang(alert.finding):
                # With the step that is under way, later progress would not show.
                found = replace(found, step=alert.last.step)
            if found.now_ns > alert.last.now_ns:
                # A finding that was recorded at the opening only does not have the steps since.
                upto = alert.finding.upto_step if alert.identity in self._worded else None
                self.book.revise(replace(alert, finding=replace(alert.finding, upto_step=upto), last=found))
        if state.run_condition() == "ended":
            done = last_common_step(state)
            self.book.at_end(state, replace(now, step=done if done >= 0 else None))

    def refresh(self, payload: bytes, at_ns: int) -> None:
        """Take the findings of open alerts as recorded at a moment; none is opened or closed by it."""
        self._emit(at_ns)
        for alert in map(self._joined.alert, read_alerts(payload)):
            known = self.book.open.get(alert.key)
            if known is not None and known.identity == alert.identity:
                self._worded.add(alert.identity)
                self.book.revise(alert)

    def _emit(self, upto_ns: int) -> None:
        while self._next < len(self._events) and self._events[self._next][0] <= upto_ns:
            event = self._events[self._next][1]
            if event.kind != "opened" and event.alert.key not in self.book.open:
                # It goes on after all, or the end of the run closed it before its recorder did. Reopened, it keeps its
                # worst finding, which a second evaluation may have missed.
                over = [alert for alert in self.book.closed if alert.identity == event.alert.identity]
                for alert in over:
                    self.book.closed.remove(alert)
                    self.book.open[alert.key] = alert
            self.book.apply(event)
            self._next += 1


def _is_possible(alert: Alert) -> bool:
    """Whether its numbers are within bounds."""
    moments = [moment for moment in (alert.since, alert.last, alert.closed, alert.seen) if moment is not None]
    return (
        all(_is_sound(finding) for finding in (alert.finding, alert.worst) if finding is not None)
        and 0 <= alert.waited_ns < MAX_NUMBER
        and all(
            0 <= time < MAX_NUMBER for moment in moments for time in (moment.now_ns, moment.unix_ns, moment.step or 0)
        )
    )


def _is_sound(finding: Finding) -> bool:
    numbers = [value for value in finding.evidence.values() if not isinstance(value, str)]
    delays = finding.lasting, finding.lingers or 0.0
    return (
        len(finding.evidence) <= MAX_EVIDENCE
        and len(finding.ranks) <= MAX_RANKS
        and all(0 <= rank < MAX_RANKS for rank in finding.ranks)
        and all(-MAX_NUMBER < number < MAX_NUMBER for number in (*numbers, finding.cost or 0.0, *delays))
        and all(0 <= (step or 0) < MAX_NUMBER for step in (finding.from_step, finding.upto_step, finding.again_from))
    )


def _sanitized(alert: Alert) -> Alert:
    """A file is as untrusted as the wire."""
    finding, worst = _sanitize(alert.finding), None if alert.worst is None else _sanitize(alert.worst)
    if worst is not None and (worst.rule, worst.subject) != (finding.rule, finding.subject):
        worst = None  # of another alert, which no recorder writes
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
