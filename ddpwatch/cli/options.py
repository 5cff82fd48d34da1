"""Kinds of option values that several sub-commands take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

import click

UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST_SPAN_S: Final = 365 * 86_400
UNITS_BYTES: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
LARGEST_BYTES: Final = 10**15
QUOTES: Final = "--log takes one file or one pattern, and a pattern in quotes: --log 'logs/**/*.log'"


class CommandWithLogs(click.Command):
    """A command with `--log`: a pattern without quotes, of which the shell makes many arguments, is refused as such."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; what comes too much after `--log` is most likely the rest of a pattern."""
        given = any(each == "--log" or each.startswith("--log=") for each in args)
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            # What is wrong with a value, or has no such option, is of a class of its own.
            if given and type(error) is click.UsageError:
                raise click.UsageError(QUOTES, ctx) from None
            raise
        selector = ctx.params.get("selector")
        if given and selector and not selector.endswith(".json") and Path(selector).is_file():
            raise click.UsageError(QUOTES, ctx)
        return rest


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
    """A span of time as people write it: 60, 60s, 5m, 2h, 7d. From a tenth of a second to a year, in seconds."""
    text = value.strip()
    unit_s = UNITS_S.get(text[-1:])
    try:
        span_s = float(text if unit_s is None else text[:-1]) * (unit_s or 1)
    except ValueError:
        span_s = math.nan
    if not 0.1 <= span_s <= LONGEST_SPAN_S:
        raise click.BadParameter(f"{value!r} is no span of time such as 60, 60s, 5m or 2h")
    return span_s


def size(value: str) -> int:
    """A number of bytes as people write it: 500MB, 2GB, 1.5G."""
    text = value.strip().lower().removesuffix("b").removesuffix("i").rstrip()
    unit = text[-1:] if text[-1:] in UNITS_BYTES else ""
    try:
        size_bytes = float(text.removesuffix(unit)) * UNITS_BYTES[unit]
    except ValueError:
        size_bytes = math.nan
    if not 1 <= size_bytes <= LARGEST_BYTES:
        raise click.BadParameter(f"{value!r} is no size such as 500MB or 2GB")
    return int(size_bytes)
