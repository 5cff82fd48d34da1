"""Alerts and the alert book: opened once, kept up to date, closed with hysteresis so that they do not flap."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ddpwatch.core.alerts.hang_alerts import is_hang, is_over, waited_s
from ddpwatch.core.alerts.history import AlertHistory
from ddpwatch.core.limits import AlertLimits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpwatch.core.state.run import RunState

KEPT_CLOSED: Final = 1000
"""Closed alerts that are kept."""
KEPT_EVENTS: Final = 10_000
"""Events that are kept until they are drained."""

Key: TypeAlias = tuple[str, str]
"""Rule and subject: at most one alert is open for each."""
Identity: TypeAlias = tuple[Key, int]
"""Key and time of opening, which make an alert unique in a run."""
EventKind: TypeAlias = Literal["opened", "changed", "closed"]
_Kind: TypeAlias = tuple[str | None, str | None]
"""Phase and pattern."""


class Severity(IntEnum):
    """Severity of a finding, in rising order."""

    INFO = 0
    WARNING = 1
    CRITICAL = 2

    @property
    def word(self) -> str:
        """As users write it."""
        return self.name.lower()


@dataclass(frozen=True)
class Moment:
    """A point in time by step and by clocks."""

    step: int | None
    """The last aligned step; None before there was one."""
    now_ns: int
    """Viewer's monotonic clock, as it came in with events and ticks."""
    unix_ns: int
    """Wall clock of the ranks; 0 = not known."""


@dataclass(frozen=True)
class Finding:
    """What one evaluation of a rule found."""

    rule: str
    severity: Severity
    subject: str
    """What it is about; a rule has one alert for each subject."""
    message: str
    """One line of what is wrong, with numbers."""
    advice: str
    """What to do next."""
    ranks: tuple[int, ...] = ()
    phase: str | None = None
    pattern: str | None = None
    """How it recurs, in words; None = it is continuous, or has no period."""
    detail: str = ""
    """What becomes known later, such as where a rank is stuck. Its arrival is a change of the alert."""
    cost: float | None = None
    """Fraction of the job's time that it costs; None = not known."""
    evidence: dict[str, float | int | str] = field(default_factory=dict)
    """The numbers behind the message, by name and unit."""
    proven: bool = True
    """False = inconclusive, within the noise. Such a finding opens no alert."""
    opens: bool = True
    """False = too weak to open an alert, strong enough to keep one open."""
    urgent: bool = False
    """Little time is left. Becoming urgent is a change of the alert."""
    lasting: float = 0.0
    """Open delay: it must be found for this many steps, or nanoseconds for rules that go by time."""
    lingers: float | None = None
    """Close delay in steps, or nanoseconds; None = that of its rule."""
    ends_wait: bool = False
    """It reports how a wait ended: alerts on that wait that are not found at that time close."""
    from_step: int | None = None
    upto_step: int | None = None
    """First and last step in which it was observed; None = not known."""
    ended: bool = False
    """It was so in these steps, and has ended. For an open alert this only sets the end: it counts as not found."""
    again_from: int | None = None
    """The steps from this one on suffice to find it; None = not known. If an episode ended later, it is not another."""


@dataclass(frozen=True)
class Alert:
    """One episode from its opening to its end."""

    finding: Finding
    """The latest one."""
    since: Moment
    last: Moment
    """When it was last found."""
    closed: Moment | None = None
    waited_ns: int = 0
    """How long ranks had waited, by their own reports, when it was opened: a viewer may attach late."""
    worst: Finding | None = None
    """The worst finding: by severity, then cost, then the latest; None = `finding`, or not recorded."""
    phases: tuple[str, ...] = ()
    """The phases that it was reported in, in order, if there was more than one."""
    recurred: bool = False
    """Whether it had ended and has begun again."""
    stale: bool | None = None
    """Whether it is open and was not observed lately, see `staleness`; None = not evaluated, as in old recordings."""
    seen: Moment | None = None
    """When a stale alert was last observed, by the clock of the ranks; `now_ns` is 0."""

    @property
    def at_worst(self) -> Alert:
        """The alert with its worst finding, over the steps of both: what is remembered of it after its end."""
        if self.worst is None:
            return self
        finding = _spanning(self.worst, self.finding)
        if self.worst.from_step is not None:
            # Its beginning was known by then; later an odd step before it may have counted.
            finding = replace(finding, from_step=self.worst.from_step)
        if self.finding.ended:
            finding = _up_to(finding, self.finding)
        return replace(self, finding=finding, worst=None)

    @property
    def began(self) -> Moment:
        """When the episode began, as far as is known; the step is that of the opening."""
        since = self.since
        return Moment(since.step, max(0, since.now_ns - self.waited_ns), max(0, since.unix_ns - self.waited_ns))

    @property
    def key(self) -> Key:
        """Rule and subject."""
        return self.finding.rule, self.finding.subject

    @property
    def identity(self) -> Identity:
        """Unlike the key, it differs from that of an earlier alert on the same subject."""
        return self.key, self.since.now_ns


@dataclass(frozen=True)
class AlertEvent:
    """A change of an alert that is worth reporting."""

    kind: EventKind
    alert: Alert


class AlertBook:
    """All alerts of a run. Memory is bounded by rules and ranks."""

    def __init__(self) -> None:
        self.open: dict[Key, Alert] = {}
        self.closed: deque[Alert] = deque(maxlen=KEPT_CLOSED)
        self.unproven: dict[str, list[Finding]] = {}
        """By rule, findings that are inconclusive."""
        self._events: deque[AlertEvent] = deque(maxlen=KEPT_EVENTS)
        self._reported: dict[Key, Finding] = {}
        """Findings of the last events."""
        self._held: dict[Key, tuple[_Kind, int]] = {}
        """A new phase and pattern that are not confirmed yet, and the number of evaluations in a row with them."""
        self._pending: dict[Key, Moment] = {}
        """First found then, and still within the open delay."""
        self._history = AlertHistory()

    @property
    def news(self) -> bool:
        """Whether there are events to drain."""
        return bool(self._events)

    def at(self, step: int) -> list[Alert]:
        """Alerts that were open at a step, with their finding of then."""
        return self._history.at((*self.closed, *self.open.values()), step)

    def revise(self, alert: Alert) -> None:
        """Set an open alert, and keep its worst finding."""
        self.open[alert.key] = with_worst(self.open.get(alert.key), alert)
        self._history.note(alert)

    def drain(self) -> list[AlertEvent]:
        """Events since the last call, in order."""
        events = list(self._events)
        self._events.clear()
        return events

    def apply(self, event: AlertEvent) -> None:
        """Take over a recorded event as it was."""
        alert = event.alert
        self._events.append(event)
        if event.kind == "closed":
            self._file(with_worst(self.open.pop(alert.key, None), alert).at_worst)
        else:
            self.revise(alert)

    def update(self, rule: str, findings: Iterable[Finding], at: Moment, *, close_delay: float, by_step: bool) -> None:
        """Take the findings of a rule. An alert that is not found for `close_delay` steps, or nanoseconds, closes."""
        found = self._found(rule, findings, at)
        for key in [key for key in self._pending if key[0] == rule and key not in found]:
            del self._pending[key]
        for key, finding in found.items():
            if key in self.open:
                self._refresh(key, finding, at)
            elif _between(self._pending.setdefault(key, at), at, by_step=by_step) >= finding.lasting:
                del self._pending[key]
                self.revise(Alert(finding, at, at, waited_ns=int(waited_s(finding) * 1e9), stale=False))
                self._emit("opened", key)
        for key, alert in list(self.open.items()):
            delay = close_delay if alert.finding.lingers is None else alert.finding.lingers
            if key[0] == rule and key not in found and _between(alert.last, at, by_step=by_step) >= delay:
                self._close(key, at)

    def _found(self, rule: str, findings: Iterable[Finding], at: Moment) -> dict[Key, Finding]:
        """Findings that open an alert or keep one open. Keeps inconclusive ones apart, and notes ends of alerts."""
        found = {}
        self.unproven.pop(rule, None)
        for finding in findings:
            key = finding.rule, finding.subject
            if not finding.proven:
                self.unproven.setdefault(rule, []).append(finding)
            elif key in self.open and _had_ended(self.open[key].finding, finding):
                continue
            elif finding.ended and key in self.open:
                alert = self.open[key]
                # If it had ended before, it has come and gone once more.
                last = at if alert.finding.ended else alert.last
                self.revise(replace(alert, finding=_up_to(alert.finding, finding), last=last))
            elif finding.opens or key in self.open:
                found[key] = finding
        return found

    def hand_over(self, at: Moment) -> None:
        """After all rules were evaluated, close alerts on a wait whose end another reports: one alert per cause."""
        for heir in [alert for alert in self.open.values() if alert.finding.ends_wait and alert.last == at]:
            for key, alert in list(self.open.items()):
                if key != heir.key and is_hang(alert.finding) and alert.last.now_ns < at.now_ns:
                    self._close(key, at)

    def at_end(self, state: RunState, at: Moment) -> None:
        """Close alerts on hangs that the run came out of before it ended, without their close delay."""
        for key, alert in list(self.open.items()):
            if is_over(state, alert):
                self._close(key, at)

    def _close(self, key: Key, at: Moment) -> None:
        self.open[key] = replace(self.open[key].at_worst, closed=at, stale=False, seen=None)
        self._emit("closed", key)
        self._file(self.open.pop(key))
        self._reported.pop(key, None)
        self._held.pop(key, None)

    def _file(self, alert: Alert) -> None:
        self.closed.append(alert)
        self._history.close(alert)

    def _refresh(self, key: Key, finding: Finding, at: Moment) -> None:
        reported, alert = self._reported[key], self.open[key]
        alert = replace(alert, last=at, recurred=alert.recurred or alert.finding.ended)
        kind = _kind(finding, reported)
        if kind != (reported.phase, reported.pattern):
            held, evaluations = self._held.get(key, (kind, 0))
            evaluations = evaluations + 1 if held == kind else 1
            self._held[key] = kind, evaluations
            if evaluations < AlertLimits.CONFIRMING_EVALUATIONS:
                # The message names the phase: until the new one is confirmed, the old finding stands as a whole.
                self.revise(replace(alert, finding=replace(_spanning(alert.finding, finding), ended=False)))
                return
        self._held.pop(key, None)
        phases = alert.phases
        if finding.phase and reported.phase and finding.phase != reported.phase:
            phases = tuple(dict.fromkeys((*(phases or (reported.phase,)), finding.phase)))
        finding = _spanning(finding, alert.finding)
        self.revise(replace(alert, finding=finding, phases=phases))
        if _is_significant_change(reported, finding):
            self._emit("changed", key)

    def _emit(self, kind: EventKind, key: Key) -> None:
        self._reported[key] = self.open[key].finding
        self._events.append(AlertEvent(kind, self.open[key]))


def with_worst(before: Alert | None, alert: Alert) -> Alert:
    """The alert with its worst finding, by this and by what was known of it `before`."""
    found = [alert.finding] if alert.worst is None else [alert.worst, alert.finding]
    if before is not None and before.since.now_ns == alert.since.now_ns:
        found.insert(0, before.worst or before.finding)
        if alert.stale is None:
            alert = replace(alert, stale=before.stale, seen=before.seen)
    worst = max(reversed(found), key=lambda finding: (finding.severity, finding.cost or 0.0))
    return replace(alert, worst=None if worst is alert.finding else worst)


def _spanning(finding: Finding, other: Finding) -> Finding:
    """The finding, over the steps of both."""
    spans = [(each.from_step, each.upto_step) for each in (finding, other)]
    known = [(first, last) for first, last in spans if first is not None and last is not None]
    if not known or spans[0] == spans[1]:
        return finding
    return replace(finding, from_step=min(first for first, _ in known), upto_step=max(last for _, last in known))


def _up_to(finding: Finding, ended: Finding) -> Finding:
    """The finding, up to where it ended: odd steps after that do not count."""
    return replace(finding, upto_step=ended.upto_step, ended=True)


def _had_ended(known: Finding, finding: Finding) -> bool:
    """Whether it is found only by steps of an episode known to have ended, and some odd steps since: the fewer of its
    steps are left in the window, the less the odd ones stand out.
    """
    if finding.again_from is None:
        return known.ended and finding.ended
    return known.ended and finding.again_from <= (known.upto_step or 0)


def _between(earlier: Moment, later: Moment, *, by_step: bool) -> float:
    if by_step:
        return (later.step or 0) - (earlier.step or 0)
    return later.now_ns - earlier.now_ns


def _kind(finding: Finding, reported: Finding) -> _Kind:
    """Its phase and pattern. No pattern for a while does not contradict the reported one."""
    return finding.phase, finding.pattern or reported.pattern


def _is_significant_change(reported: Finding, finding: Finding) -> bool:
    return (
        finding.ranks != reported.ranks
        or finding.severity > reported.severity
        or bool(finding.detail and not reported.detail)
        or (finding.urgent and not reported.urgent)
        or _kind(finding, reported) != (reported.phase, reported.pattern)
        or (finding.cost or 0.0) > AlertLimits.COST_FACTOR * max(reported.cost or 0.0, AlertLimits.MIN_COST)
    )
