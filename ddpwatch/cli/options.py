"""Kinds of option values that several sub-commands take."""

from __future__ import annotations

import math
from typing import Final

import click

UNITS_S: Final = {"s": 1, "m": 60, "h": 3600}
LONGEST_SPAN_S: Final = 365 * 86_400


def seconds(value: str) -> float:
    """A span of time from a tenth of a second to a day; refuses nan and infinity by name."""
    try:
        span_s = float(value)
    except ValueError:
        span_s = math.nan
    if not 0.1 <= span_s <= 86_400:
        raise click.BadParameter(f"{value!r} is no number of seconds between 0.1 and 86400")
    return span_s


def span(value: str) -> float:
    """A span of time as people write it: 60, 60s, 5m, 2h. From a tenth of a second to a year, in seconds."""
    text = value.strip()
    unit_s = UNITS_S.get(text[-1:])
    try:
        span_s = float(text if unit_s is None else text[:-1]) * (unit_s or 1)
    except ValueError:
        span_s = math.nan
    if not 0.1 <= span_s <= LONGEST_SPAN_S:
        raise click.BadParameter(f"{value!r} is no span of time such as 60, 60s, 5m or 2h")
    return span_s
