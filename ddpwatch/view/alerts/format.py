"""Alerts as JSON values, whose keys are a stable interface, and as lines of text; marks and levels of severities."""

from __future__ import annotations

from datetime import timezone
from typing import TYPE_CHECKING, Any, Final

from ddpwatch.core.alerts.hang_alerts import is_suspect
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, sanitize
from ddpwatch.core.units import count, finite, moment_of, ranks_text
from ddpwatch.view.cells import Cell, Level
from ddpwatch.wire import PHASES

if TYPE_CHECKING:
    from datetime import tzinfo

    from ddpwatch.core.alerts.model import Alert, AlertEvent
    from ddpwatch.view.cells import Line

SCHEMA: Final = 1
MARKS: Final = {
    Severity.INFO: Cell("·", Level.PLAIN),
    Severity.WARNING: Cell("▲", Level.WARN),
    Severity.CRITICAL: Cell("✖", Level.BAD),
}
STALE: Final = "△"
"""Mark of a stale alert."""
# Decimal places in JSON: costs are fractions, of which 4 places are hundredths of a percent.
_COST_DIGITS: Final = 4
_EVIDENCE_DIGITS: Final = 6


def mark_of(alert: Alert) -> Cell:
    """Mark and level of an alert: by its severity; dim if it is stale."""
    return Cell(STALE, Level.DIM) if alert.stale else MARKS[alert.finding.severity]


def message_of(alert: Alert) -> str:
    """The message; of a stale alert, since when it was not seen, as the message has the present tense."""
    finding = alert.finding
    if alert.seen is None:
        return sanitize(finding.message, NOTE_CHARS)
    # The subject of a hang is the group that waited, not the ranks it waited for.
    subject = ranks_text(finding.ranks) if is_suspect(finding) else sanitize(finding.subject, NAME_CHARS)
    parts = [subject] if finding.ranks else []
    parts += [sanitize(finding.phase, NAME_CHARS)] if finding.phase else []
    return ", ".join([*parts, f"not seen since step {count(alert.seen.step or 0)}"])


def alert_object(alert: Alert) -> dict[str, Any]:
    """The alert as values for JSON. Unknown = None; all keys are always present. `since` is when the episode began,
    `opened` when its alert was, `from_step` and `upto_step` where the rule observed it.
    """
    finding = alert.finding
    return {
        "rule": finding.rule,
        "severity": finding.severity.word,
        "ranks": list(finding.ranks),
        "phase": finding.phase,
        "phases": [sanitize(phase, NAME_CHARS) for phase in (alert.phases or (finding.phase,)) if phase][: len(PHASES)],
        "message": sanitize(finding.message, NOTE_CHARS),
        "advice": sanitize(finding.advice, NOTE_CHARS),
        "cost": None if finding.cost is None else finite(finding.cost, _COST_DIGITS),
        "evidence": {name: _plain_value(value) for name, value in finding.evidence.items()},
        "since": iso(alert.began.unix_ns),
        "since_step": alert.since.step,
        "opened": iso(alert.since.unix_ns),
        "from_step": finding.from_step,
        "upto_step": finding.upto_step,
        "last": iso(alert.last.unix_ns),
        "open": alert.closed is None,
    }


def event_object(event: AlertEvent, *, run_id: str, run_name: str) -> dict[str, Any]:
    """An event as values for JSON, with its run."""
    return {
        "schema": SCHEMA,
        "event": event.kind,
        "run": {"id": sanitize(run_id, NAME_CHARS), "name": sanitize(run_name, NAME_CHARS)},
        **alert_object(event.alert),
    }


def event_lines(event: AlertEvent, zone: tzinfo = timezone.utc) -> list[Line]:
    """An event in one line that begins with the time of day in `zone`; an opened alert has its advice in a second."""
    alert, kind, finding = event.alert, event.kind, event.alert.finding
    mark, level, _ = MARKS[finding.severity]
    at = {"opened": alert.since, "changed": alert.last, "closed": alert.closed or alert.last}[kind]
    moment = moment_of(at.unix_ns)
    lines: list[Line] = [
        [
            Cell(f"{moment.astimezone(zone):%H:%M:%S}" if moment else "--:--:--", Level.DIM),
            Cell(f" {mark} {finding.severity.word}", Level.DIM if kind == "closed" else level),
            Cell(f" {kind} "),
            Cell(finding.rule, Level.STRONG),
            Cell(f": {sanitize(finding.message, NOTE_CHARS)}"),
        ]
    ]
    if kind == "opened" and finding.advice:
        lines.append([Cell(f"           {sanitize(finding.advice, NOTE_CHARS)}", Level.DIM)])
    return lines


def _plain_value(value: float | int | str) -> float | int | str | None:  # noqa: PYI041 - counts stay whole numbers
    if isinstance(value, float):
        return finite(value, _EVIDENCE_DIGITS)
    return sanitize(value, NOTE_CHARS) if isinstance(value, str) else value


def iso(unix_ns: int) -> str | None:
    """ISO 8601 in UTC with milliseconds; None = not known."""
    moment = moment_of(unix_ns)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03d}Z" if moment else None
