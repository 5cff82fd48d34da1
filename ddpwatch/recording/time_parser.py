"""Parser of moments in a recording: a time of day, a date with a time, an offset, or a percentage."""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from typing import Final, NamedTuple

from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.core.units import moment_of

EXAMPLES: Final = "03:41, 03:41:20.5, 2026-11-16T03:41, +1h30m, +90s, 50%"
MAX_DAYS: Final = 400
"""Max days of a recording in which a time of day is searched."""
_CLOCK: Final = re.compile(
    r"(?:(\d{4})-(\d{1,2})-(\d{1,2})[ T]+)?(\d{1,2}):(\d{2})"
    r"(?::(\d{2})(?:[.,](\d{1,9}))?)? ?(Z|[+-]\d{2}:?\d{2})?",
    re.ASCII,
)
_OFFSET: Final = re.compile(r"\+(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,8})m)?(?:(\d{1,9}(?:\.\d{1,3})?)s?)?", re.ASCII)
_PART: Final = re.compile(r"(\d{1,3}(?:\.\d{1,3})?) ?%", re.ASCII)


class NoMoment(Exception):
    """A text that is not a moment of the recording; the message gives the reason."""


def parse_offset(text: str, total_ns: int) -> int | None:
    """Parse an offset or percentage into nanoseconds from the start; None = it is neither."""
    text = text.strip()
    if part := _PART.fullmatch(text):
        if float(part[1]) > 100:
            raise NoMoment(f"{text} is more than 100%")
        return int(total_ns * float(part[1]) / 100)
    offset = _OFFSET.fullmatch(text)
    if offset is None or not any(offset.groups()):
        return None
    days, hours, minutes, seconds = (float(group or 0) for group in offset.groups())
    passed_ns = int((days * 86_400 + hours * 3600 + minutes * 60 + seconds) * 1e9)
    if passed_ns > total_ns:
        raise NoMoment(f"{text} is after the end")
    return passed_ns


def parse_clock(text: str, first_ns: int, last_ns: int, zone: tzinfo, near_ns: int | None = None) -> int:
    """Parse a time of day into the first such moment of the recording, or the one nearest to `near_ns`.

    A time without seconds means the first recorded moment of that minute. A zone in the text overrides `zone`.
    """
    written = _parse(text)
    first, last = moment_of(first_ns), moment_of(last_ns)
    if first is None or last is None:
        raise NoMoment("the recording has no times of day; use +90s or 50%")
    zone, day = written.zone or zone, written.day
    midnight = datetime.combine(day or first.astimezone(zone).date(), written.clock, zone)
    fitting = []
    for number in range(1 if day else min((last - first).days + 2, MAX_DAYS)):
        at_ns = int((midnight + timedelta(days=number)).timestamp()) * 1_000_000_000 + written.fraction_ns
        if at_ns <= last_ns and at_ns + written.lasting_ns > first_ns:
            fitting.append(max(at_ns, first_ns))
    if not fitting:
        raise NoMoment(f"nothing was recorded at {text.strip()}")
    return min(fitting, key=lambda at_ns: abs(at_ns - (first_ns if near_ns is None else near_ns)))


class _Clock(NamedTuple):
    day: date | None
    clock: time
    fraction_ns: int
    lasting_ns: int
    """Precision of the text in nanoseconds: a minute, a second, or a fraction of one."""
    zone: tzinfo | None


def _parse(text: str) -> _Clock:
    found = _CLOCK.fullmatch(text.strip())
    if found is None:
        raise NoMoment(f"{sanitize(text, NAME_CHARS)!r} is not a moment such as {EXAMPLES}")
    year, month, day, hour, minute, second, fraction, zone = found.groups()
    lasting_ns = 60_000_000_000 if second is None else 10 ** (9 - len(fraction or ""))
    try:
        clock = time(int(hour), int(minute), int(second or 0))
        return _Clock(
            None if year is None else date(int(year), int(month), int(day)),
            clock,
            int((fraction or "").ljust(9, "0")),
            lasting_ns,
            None if zone is None else _zone(zone),
        )
    except ValueError:
        raise NoMoment(f"{sanitize(text, NAME_CHARS)} is not a time of day") from None


def _zone(text: str) -> tzinfo:
    """Parse `Z` or an offset such as +01:00; raises `ValueError`."""
    if text == "Z":
        return timezone.utc
    ahead = timedelta(hours=int(text[1:3]), minutes=int(text[-2:]))
    return timezone(-ahead if text[0] == "-" else ahead)


def span_text(first_ns: int, last_ns: int, zone: tzinfo) -> str:
    """First and last time as part of a sentence."""
    first, last = moment_of(first_ns), moment_of(last_ns)
    if first is None or last is None:
        return "from an unknown time"
    first, last = first.astimezone(zone), last.astimezone(zone)
    same_day = first.date() == last.date()
    return f"from {first:%Y-%m-%d %H:%M:%S} to {last:{'%H:%M:%S' if same_day else '%Y-%m-%d %H:%M:%S'}}"


def time_text(at_ns: int, zone: tzinfo) -> str:
    """A time as part of a sentence."""
    moment = moment_of(at_ns)
    return "at an unknown time" if moment is None else f"at {moment.astimezone(zone):%Y-%m-%d %H:%M:%S}"
