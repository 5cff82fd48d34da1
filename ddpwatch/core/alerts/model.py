"""Alerts: opened once, kept up to date, closed when the trouble has stayed away. They do not flap."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ddpwatch.core.alerts.hangs import is_hang, is_over, waited_s
from ddpwatch.core.alerts.history import AlertHistory
from ddpwatch.core.limits import AlertLimits

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpwatch.core.state.run import RunState

KEPT_CLOSED: Final = 1000
KEPT_EVENTS: Final = 10_000


class Severity(IntEnum):
    """How bad it is."""

    INFO = 0
    WARNING = 1
    CRITICAL = 2

    @property
    def word(self) -> str:
        """As users write it."""
        return self.name.lower()


@dataclass(frozen=True)
class Moment:
    """When something was judged."""

    step: int | None
    """The last aligned step; None before there was one."""
    now_ns: int
    """Viewer's monotonic clock, as it came in with events and ticks."""
    unix_ns: int
    """Wall clock of the ranks, for people; 0 = not known."""


@dataclass(frozen=True)
class Finding:
    """What one rule has found this time."""

    rule: str
    severity: Severity
    subject: str
    """Who or what it is about; a rule and a subject have one alert."""
    message: str
    """One line of what is wrong, with numbers."""
    advice: str
    """What to do next."""
    ranks: tuple[int, ...] = ()
    phase: str | None = None
    pattern: str | None = None
    """How it recurs, in words; None = it lasts, or recurs in no order."""
    detail: str = ""
    """What is found out later, such as where a rank is stuck; told when it comes."""
    cost: float | None = None
    """Part of the job's time that is lost by it; None = cannot be told."""
    evidence: dict[str, float | int | str] = field(default_factory=dict)
    """The numbers behind the message, by name and unit."""
    proven: bool = True
    """False = it looks like that but is inside the noise. Such a finding opens no alert."""
    opens: bool = True
    """False = too little to open an alert, and enough to keep one open."""
    urgent: bool = False
    """There is little time left; told when that comes."""
    lasting: float = 0.0
    """Opens an alert when it was found all along for so many steps, or nanoseconds where a rule goes by time."""
    lingers: float | None = None
    """Its alert closes so long after it was last found; None = as its rule has it."""
    ends_wait: bool = False
    """It tells how a wait has ended: the alerts on the wait that are no longer found close with it."""
    from_step: int | None = None
    upto_step: int | None = None
    """In which steps it was so, as far as was looked; None = the rule cannot tell."""
    ended: bool = False
    """It was so in these steps and is so no longer. Of an alert that is open this tells the end and nothing else: the
    alert counts as not found."""
    again_from: int | None = None
    """Enough to be found by comes from this step on; None = that is not told. One that had ended after it has not
    begun again."""


@dataclass(frozen=True)
class Alert:
    """One trouble from its beginning to its end."""

    finding: Finding
    """The latest one."""
    since: Moment
    last: Moment
    """When it was last found."""
    closed: Moment | None = None
    waited_ns: int = 0
    """For so long ranks had waited, by their own word, when it was opened: who attaches late opens it late."""
    worst: Finding | None = None
    """As it was when it was worst: the most severe, then the dearest, of these the latest; None = that is the latest
    of all, or was not told."""
    phases: tuple[str, ...] = ()
    """The phases that it was told in one after the other, where there was more than one."""
    recurred: bool = False
    """Whether it had ended and has begun again."""
    stale: bool | None = None
    """Whether it is open and its trouble has not been seen for a while, see `staleness`; None = not evaluated, as in
    recordings from before this field."""
    seen: Moment | None = None
    """When the trouble of a stale alert was last seen, by the clock of the ranks; `now_ns` is 0."""

    @property
    def at_worst(self) -> Alert:
        """The same in the words of its worst moment, which is what is remembered of it: not how it faded."""
        if self.worst is None:
            return self
        finding = _spanning(self.worst, self.finding)
        if self.worst.from_step is not None:
            # When it began was known by then: while it fades, an odd step before may count.
            finding = replace(finding, from_step=self.worst.from_step)
        if self.finding.ended:
            finding = _up_to(finding, self.finding)
        return replace(self, finding=finding, worst=None)

    @property
    def began(self) -> Moment:
        """When the trouble began, as far as is known; the step is the one at which it was opened."""
        since = self.since
        unix_ns = max(0, since.unix_ns - self.waited_ns)
        return Moment(since.step, max(0, since.now_ns - self.waited_ns), unix_ns)

    @property
    def key(self) -> tuple[str, str]:
        """What makes it the same trouble."""
        return self.finding.rule, self.finding.subject


EventKind: TypeAlias = Literal["opened", "changed", "closed"]
_Kind: TypeAlias = tuple[str | None, str | None]


@dataclass(frozen=True)
class AlertEvent:
    """A change that somebody may want to be told."""

    kind: EventKind
    alert: Alert


class AlertBook:
    """All alerts of a run. Memory is bounded by rules and ranks."""

    def __init__(self) -> None:
        """Begin with none."""
        self.open: dict[tuple[str, str], Alert] = {}
        self.closed: deque[Alert] = deque(maxlen=KEPT_CLOSED)
        self.unproven: dict[str, list[Finding]] = {}
        """By rule, what it suspects and cannot show."""
        self._events: deque[AlertEvent] = deque(maxlen=KEPT_EVENTS)
        self._reported: dict[tuple[str, str], Finding] = {}
        self._held: dict[tuple[str, str], tuple[_Kind, int]] = {}
        """A phase and pattern that are not believed yet, and how often in a row they were found."""
        self._pending: dict[tuple[str, str], Moment] = {}
        """Found since then, and not for long enough to be opened."""
        self._history = AlertHistory()

    @property
    def news(self) -> bool:
        """Whether something has happened since it was last drained."""
        return bool(self._events)

    def at(self, step: int) -> list[Alert]:
        """Those that were open at a step, as they read then."""
        return self._history.at((*self.closed, *self.open.values()), step)

    def revise(self, alert: Alert) -> None:
        """An open alert is as this says; how it was at its worst stays known."""
        self.open[alert.key] = with_worst(self.open.get(alert.key), alert)
        self._history.note(alert)

    def drain(self) -> list[AlertEvent]:
        """What has happened since the last time, in order."""
        events = list(self._events)
        self._events.clear()
        return events

    def apply(self, event: AlertEvent) -> None:
        """Take over a change that was told before, as it was."""
        alert = event.alert
        self._events.append(event)
        if event.kind == "closed":
            self._file(with_worst(self.open.pop(alert.key, None), alert).at_worst)
        else:
            self.revise(alert)

    def update(self, rule: str, findings: Iterable[Finding], at: Moment, *, close_delay: float, by_step: bool) -> None:
        """Take what a rule has found. What it no longer finds is closed after `close_delay` steps, or nanoseconds."""
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
            stays = close_delay if alert.finding.lingers is None else alert.finding.lingers
            if key[0] == rule and key not in found and _between(alert.last, at, by_step=by_step) >= stays:
                self._close(key, at)

    def _found(self, rule: str, findings: Iterable[Finding], at: Moment) -> dict[tuple[str, str], Finding]:
        """What opens an alert or keeps one open. Of the others what is suspected is kept, and what has ended is told of
        its alert.
        """
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
                # Where that was known, it has come and gone once more.
                last = at if alert.finding.ended else alert.last
                self.revise(replace(alert, finding=_up_to(alert.finding, finding), last=last))
            elif finding.opens or key in self.open:
                found[key] = finding
        return found

    def hand_over(self, at: Moment) -> None:
        """Close what another alert goes on with: two would be open for one cause until the first has lingered. After
        all rules have been asked at that moment.
        """
        for heir in [alert for alert in self.open.values() if alert.finding.ends_wait and alert.last == at]:
            for key, alert in list(self.open.items()):
                if key != heir.key and is_hang(alert.finding) and alert.last.now_ns < at.now_ns:
                    self._close(key, at)

    def at_end(self, state: RunState, at: Moment) -> None:
        """The run has ended: close what tells of a hang that it has come out of, which would linger for nothing."""
        for key, alert in list(self.open.items()):
            if is_over(state, alert):
                self._close(key, at)

    def _close(self, key: tuple[str, str], at: Moment) -> None:
        self.open[key] = replace(self.open[key].at_worst, closed=at, stale=False, seen=None)
        self._emit("closed", key)
        self._file(self.open.pop(key))
        self._reported.pop(key, None)
        self._held.pop(key, None)

    def _file(self, alert: Alert) -> None:
        self.closed.append(alert)
        self._history.close(alert)

    def _refresh(self, key: tuple[str, str], finding: Finding, at: Moment) -> None:
        reported, alert = self._reported[key], self.open[key]
        alert = replace(alert, last=at, recurred=alert.recurred or alert.finding.ended)
        kind = _kind(finding, reported)
        if kind != (reported.phase, reported.pattern):
            held, looks = self._held.get(key, (kind, 0))
            looks = looks + 1 if held == kind else 1
            self._held[key] = kind, looks
            if looks < AlertLimits.CONFIRMING_EVALUATIONS:
                # The message names them: until the new ones are believed, the old ones stand as a whole.
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

    def _emit(self, kind: EventKind, key: tuple[str, str]) -> None:
        self._reported[key] = self.open[key].finding
        self._events.append(AlertEvent(kind, self.open[key]))


def with_worst(before: Alert | None, alert: Alert) -> Alert:
    """An alert as it reads now, with how it was at its worst by this and by what was known of it before."""
    found = [alert.finding] if alert.worst is None else [alert.worst, alert.finding]
    if before is not None and before.since.now_ns == alert.since.now_ns:
        found.insert(0, before.worst or before.finding)
        if alert.stale is None:
            alert = replace(alert, stale=before.stale, seen=before.seen)
    worst = max(reversed(found), key=lambda finding: (finding.severity, finding.cost or 0.0))
    return replace(alert, worst=None if worst is alert.finding else worst)


def _spanning(finding: Finding, other: Finding) -> Finding:
    """The finding, told of the steps of both."""
    spans = [(each.from_step, each.upto_step) for each in (finding, other)]
    known = [(first, last) for first, last in spans if first is not None and last is not None]
    if not known or spans[0] == spans[1]:
        return finding
    return replace(finding, from_step=min(first for first, _ in known), upto_step=max(last for _, last in known))


def _up_to(finding: Finding, ended: Finding) -> Finding:
    """The finding, told up to where it ended: odd steps after that do not count any more."""
    return replace(finding, upto_step=ended.upto_step, ended=True)


def _had_ended(known: Finding, finding: Finding) -> bool:
    """Whether it is found by what is known to have ended, and by some odd steps since: the less of it is left among the
    steps that are looked at, the less these stand out from it.
    """
    if finding.again_from is None:
        return known.ended and finding.ended
    return known.ended and finding.again_from <= (known.upto_step or 0)


def _between(earlier: Moment, later: Moment, *, by_step: bool) -> float:
    if by_step:
        return (later.step or 0) - (earlier.step or 0)
    return later.now_ns - earlier.now_ns


def _kind(finding: Finding, reported: Finding) -> _Kind:
    """Its phase and pattern. One that shows no pattern for a while does not contradict the one that was told."""
    return finding.phase, finding.pattern or reported.pattern


def _is_significant_change(reported: Finding, finding: Finding) -> bool:
    if (
        finding.ranks != reported.ranks
        or finding.severity > reported.severity
        or (finding.detail and not reported.detail)
    ):
        return True
    if finding.urgent and not reported.urgent:
        return True
    if _kind(finding, reported) != (reported.phase, reported.pattern):
        return True
    return (finding.cost or 0.0) > AlertLimits.COST_FACTOR * max(reported.cost or 0.0, AlertLimits.MIN_COST)
