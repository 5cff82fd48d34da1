"""Moments of a recording as people write them: a time of day, a date with one, an offset, a part of the whole."""

from __future__ import annotations

import re
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from typing import Final, NamedTuple

from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.core.units import moment_of

EXAMPLES: Final = "03:41, 03:41:20.5, 2026-11-16T03:41, +1h30m, +90s, 50%"
MAX_DAYS: Final = 400
"""A recording that claims to be longer is looked through for so many days."""
_CLOCK: Final = re.compile(
    r"(?:(\d{4})-(\d{1,2})-(\d{1,2})[ T]+)?(\d{1,2}):(\d{2})"
    r"(?::(\d{2})(?:[.,](\d{1,9}))?)? ?(Z|[+-]\d{2}:?\d{2})?",
    re.ASCII,
)
_OFFSET: Final = re.compile(r"\+(?:(\d{1,6})d)?(?:(\d{1,6})h)?(?:(\d{1,8})m)?(?:(\d{1,9}(?:\.\d{1,3})?)s?)?", re.ASCII)
_PART: Final = re.compile(r"(\d{1,3}(?:\.\d{1,3})?) ?%", re.ASCII)


class NoMoment(Exception):
    """What was written is no moment of the recording; says why."""


def passed_of(text: str, total_ns: int) -> int | None:
    """How much of the recording lies before an offset or a part of it; None = it is neither."""
    text = text.strip()
    if part := _PART.fullmatch(text):
        if float(part[1]) > 100:
            raise NoMoment(f"{text} is more than all of it")
        return int(total_ns * float(part[1]) / 100)
    offset = _OFFSET.fullmatch(text)
    if offset is None or not any(offset.groups()):
        return None
    days, hours, minutes, seconds = (float(group or 0) for group in offset.groups())
    passed_ns = int((days * 86_400 + hours * 3600 + minutes * 60 + seconds) * 1e9)
    if passed_ns > total_ns:
        raise NoMoment(f"{text} is after its end")
    return passed_ns


def clock_of(text: str, first_ns: int, last_ns: int, zone: tzinfo, near_ns: int | None = None) -> int:
    """The moment at which a clock in that zone showed this: the first one, or the one nearest to `near_ns`.

    A time without seconds means the whole minute, of which the first moment that was recorded is taken. A zone that is
    written behind it goes before the other.
    """
    reported = _read(text)
    first, last = moment_of(first_ns), moment_of(last_ns)
    if first is None or last is None:
        raise NoMoment("the recording does not tell its time; say +90s or 50%")
    zone, day = reported.zone or zone, reported.day
    midnight = datetime.combine(day or first.astimezone(zone).date(), reported.clock, zone)
    fitting = []
    for number in range(1 if day else min((last - first).days + 2, MAX_DAYS)):
        at_ns = int((midnight + timedelta(days=number)).timestamp()) * 1_000_000_000 + reported.fraction_ns
        if at_ns <= last_ns and at_ns + reported.lasting_ns > first_ns:
            fitting.append(max(at_ns, first_ns))
    if not fitting:
        raise NoMoment(f"nothing was recorded at {text.strip()}")
    return min(fitting, key=lambda at_ns: abs(at_ns - (first_ns if near_ns is None else near_ns)))


class _Written(NamedTuple):
    """What was written."""

    day: date | None
    clock: time
    """In whole seconds …"""
    fraction_ns: int
    """… and what is beyond them."""
    lasting_ns: int
    """How long a clock shows this: a minute, a second, a tenth of one, by what was told of it."""
    zone: tzinfo | None


def _read(text: str) -> _Written:
    found = _CLOCK.fullmatch(text.strip())
    if found is None:
        raise NoMoment(f"{sanitize(text, NAME_CHARS)!r} is no moment such as {EXAMPLES}")
    year, month, day, hour, minute, second, fraction, zone = found.groups()
    lasting_ns = 60_000_000_000 if second is None else 10 ** (9 - len(fraction or ""))
    try:
        clock = time(int(hour), int(minute), int(second or 0))
        return _Written(
            None if year is None else date(int(year), int(month), int(day)),
            clock,
            int((fraction or "").ljust(9, "0")),
            lasting_ns,
            None if zone is None else _zone(zone),
        )
    except ValueError:
        raise NoMoment(f"{sanitize(text, NAME_CHARS)} is no time of any day") from None


def _zone(text: str) -> tzinfo:
    """`Z`, or hours and minutes before or after it; raises `ValueError`."""
    if text == "Z":
        return timezone.utc
    ahead = timedelta(hours=int(text[1:3]), minutes=int(text[-2:]))
    return timezone(-ahead if text[0] == "-" else ahead)


def span_text(first_ns: int, last_ns: int, zone: tzinfo) -> str:
    """From when to when, in words."""
    first, last = moment_of(first_ns), moment_of(last_ns)
    if first is None or last is None:
        return "at times that are not known"
    first, last = first.astimezone(zone), last.astimezone(zone)
    same_day = first.date() == last.date()
    return f"from {first:%Y-%m-%d %H:%M:%S} to {last:{'%H:%M:%S' if same_day else '%Y-%m-%d %H:%M:%S'}}"


def time_text(at_ns: int, zone: tzinfo) -> str:
    """When, in words."""
    moment = moment_of(at_ns)
    return "at a time that is not known" if moment is None else f"at {moment.astimezone(zone):%Y-%m-%d %H:%M:%S}"
