"""Formats numbers, times and ranks for people, short enough for tables."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final

from ddpwatch.wire import ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_RANK_CHARS: Final = 16
"""Characters per rank in a list of ranks; always enough, so that no list is cut."""
MAX_UNIX_NS: Final = 2**62
"""In the year 2116. Later times are invalid."""
_UNITS: Final = {"d": "d", "h": "h", "m": "min", "s": "s"}
UNPROVEN: Final = "–"
"""Stands for a figure that is not known."""


def ms(ns: float | None) -> str:
    """Milliseconds with three significant digits in at most four characters; very long times in seconds or hours."""
    if ns is None:
        return UNPROVEN
    value = ns / 1e6
    if value < 9.995:
        return f"{value:.2f}"
    if value < 99.95:
        return f"{value:.1f}"
    if value < 9999.5:
        return f"{value:.0f}"
    seconds = value / 1e3
    return f"{seconds:.0f}s" if seconds < 999.5 else f"{seconds / 3600:.1f}h" if seconds < 35_000 else ">9h"


def ms_text(ns: float) -> str:
    """A time for sentences, with its unit: 50.1 ms, 12 s."""
    text = ms(ns)
    return f"{text[:-1]} {text[-1]}" if text[-1] in "sh" else f"{text} ms"


def duration(seconds: float) -> str:
    """A duration in its two largest units, for narrow table cells: 29m 51s."""
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours:02d}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {whole % 60:02d}s" if minutes else f"{whole}s"


def duration_text(seconds: float) -> str:
    """A duration for everything but narrow table cells: 9 s, 10 min, 29 min 51 s."""
    parts = [f"{int(part[:-1])} {_UNITS[part[-1]]}" for part in duration(seconds).split()]
    return parts[0] if len(parts) == 1 or parts[1].startswith("0 ") else " ".join(parts)


def count(number: float) -> str:
    """A whole number in groups of three: 12,431."""
    return f"{round(number):,}"


def percent(share: float | None) -> str:
    """A fraction as a whole percentage."""
    return UNPROVEN if share is None else f"{round(share * 100)}%"


def rounded_to_total(shares: Sequence[float], total: int) -> list[int]:
    """Fractions as whole percentages that add up to `total` (largest remainder method), each off by less than one."""
    shown = [math.floor(share * 100) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda place: shown[place] - shares[place] * 100)
    for place in by_remainder[: max(total - sum(shown), 0)]:
        shown[place] += 1
    return shown


def wire_and_waiting(share: float, wire: float) -> tuple[int, int]:
    """The two parts of an all-reduce share as whole percentages that add up to the rounded share."""
    shown_wire, shown_waiting = rounded_to_total((min(wire, share), max(share - wire, 0.0)), round(share * 100))
    return shown_wire, shown_waiting


def size(count_bytes: float) -> str:
    """Bytes with a binary unit, in at most five characters, for tables: 812M, 1.4G."""
    value = float(count_bytes)
    for unit in ("B", "K", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.1f}{unit}" if value < 9.95 and unit not in "BK" else f"{value:.0f}{unit}"
        value /= 1024
    return f"{value:.0f}P" if value < 9999 else ">9999P"


def size_text(count_bytes: float) -> str:
    """Bytes for sentences, with the whole unit: 812 MiB, 1.4 GiB."""
    text = size(count_bytes)
    return f"{text[:-1]} {text[-1]}{'' if text[-1] == 'B' else 'iB'}"


def finite(value: float, digits: int) -> float | None:
    """The value rounded; None for NaN and infinity, which JSON cannot express."""
    return round(value, digits) if math.isfinite(value) else None


def plural(number: int, noun: str) -> str:
    """A count with its noun: 1 rank, 4 ranks."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"


def ordinal(number: int) -> str:
    """As in `every 3rd step`."""
    teens = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks in words: `rank 3`, `ranks 0-3, 7`."""
    several = set(ranks)
    text = ranges(several, max_chars=len(several) * MAX_RANK_CHARS).replace(",", ", ")
    return f"{'rank' if len(several) == 1 else 'ranks'} {text}"


def moment_of(unix_ns: int) -> datetime | None:
    """A Unix time in nanoseconds as a UTC datetime; None if it is unknown (0) or out of range."""
    return datetime.fromtimestamp(unix_ns // 1_000_000 / 1000, timezone.utc) if 0 < unix_ns < MAX_UNIX_NS else None
