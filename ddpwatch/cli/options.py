"""Kinds of option values that several sub-commands take."""

from __future__ import annotations

import math

import click


def seconds(value: str) -> float:
    """A span of time from a tenth of a second to a day; refuses nan and infinity by name."""
    try:
        span_s = float(value)
    except ValueError:
        span_s = math.nan
    if not 0.1 <= span_s <= 86_400:
        raise click.BadParameter(f"{value!r} is no number of seconds between 0.1 and 86400")
    return span_s
