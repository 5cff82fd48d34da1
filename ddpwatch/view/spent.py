"""Time and machines spent, in words."""

from __future__ import annotations

from typing import Final

HOUR_S: Final = 3600.0
MINUTE_S: Final = 60.0


def machine_time(seconds: float, what: str) -> str:
    """So many seconds of one machine each, as `2.3 GPU-hours`; short ones in minutes or seconds."""
    if seconds >= 0.1 * HOUR_S:
        return f"{seconds / HOUR_S:,.1f} {what}-hours".replace(",", " ")
    if seconds >= MINUTE_S:
        return f"{seconds / MINUTE_S:.1f} {what}-minutes"
    return f"{seconds:.1f} {what}-seconds"
