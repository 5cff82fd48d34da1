"""Text and waterfall chart of the scaling efficiency: the part of the ranks' time that is used, and the losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ddpwatch.core.limits import ScalingLimits
from ddpwatch.core.metrics.scaling import LOSSES
from ddpwatch.core.units import finite, ms, percent, plural, ranks_text, rounded_to_total
from ddpwatch.view.cells import Cell, Level, fit
from ddpwatch.view.outcome_text import seconds_text

if TYPE_CHECKING:
    from ddpwatch.core.metrics.hung_steps import HungSteps
    from ddpwatch.core.metrics.scaling import Scaling
    from ddpwatch.view.cells import Line

LEVELS: Final = {"wire": Level.WIRE, "waiting": Level.WAITING, "data": Level.DATA, "compute": Level.BACKWARD}
_DIGITS: Final = 4
"""Decimal places in JSON."""
_NAME_COLUMNS: Final = 18
"""Min. width of the names of losses, in terminal cells."""


def whole_percents(scaling: Scaling) -> dict[str, int]:
    """Losses in whole percent, rounded such that they and the efficiency add up to 100."""
    shown = rounded_to_total([scaling.parts[name] for name in LOSSES], 100 - round(scaling.efficiency * 100))
    return dict(zip(LOSSES, shown, strict=True))


def part_words(scaling: Scaling, name: str, *, gained: bool = False) -> str:
    """Name of a loss, with the ranks that are waited for."""
    if name == "waiting" and scaling.run.waited_for and not gained:
        return f"waiting for {ranks_text(scaling.run.waited_for)}"
    return "slower compute" if name == "compute" and not gained else name


def scaling_sentence(scaling: Scaling, *, by_means: bool = False) -> str:
    """`4 ranks run 3.33× as fast as one: 83% efficiency; 9% wire, 6% waiting for rank 3, 2% data`.

    Adds the speedup by medians if it differs; not with `by_means`, where the figures beside it are means.
    """
    run, before = scaling.run.world_size, scaling.baseline.world_size
    verb, than = "runs" if run == 1 else "run", "one" if before == 1 else before
    text = f"{plural(run, 'rank')} {verb} {_speedup_text(scaling.speedup)} as fast as {than}"
    if scaling.median_speedup is not None and scaling.medians_differ and not by_means:
        text += f" over all time ({_speedup_text(scaling.median_speedup)} by medians)"
    text += f": {percent(scaling.efficiency)} efficiency"
    shown = whole_percents(scaling)
    lost = [f"{shown[name]}% {part_words(scaling, name)}" for name in _largest_first(shown) if shown[name] > 0]
    gains = [name for name in reversed(_largest_first(shown)) if shown[name] < 0]
    won = [f"{-shown[name]}% gained in {part_words(scaling, name, gained=True)}" for name in gains]
    if lost or won:
        text += "; " + ", ".join([*lost, *won])
    return f"{text}; batch sizes are unknown and assumed equal" if scaling.by_steps else text


def scaling_doubt(scaling: Scaling) -> str:
    """Why the efficiency is doubtful, and what to do; empty = it is not."""
    baseline = scaling.baseline
    implausible = scaling.efficiency > ScalingLimits.MAX_EFFICIENCY
    if not implausible and not baseline.is_uneven:
        return ""
    steps = ""
    if baseline.median_ns is not None and baseline.p99_ns is not None:
        mean = f"mean {ms(baseline.step_ns)} ms, " if baseline.is_uneven else ""
        steps = f" ({mean}median {ms(baseline.median_ns)} ms, p99 {ms(baseline.p99_ns)} ms)"
    how = "its steps are uneven" if baseline.is_uneven else "it was slower than a rank of this run"
    lead = "more than 100% is implausible; the baseline was disturbed" if implausible else "the baseline was disturbed"
    return f"{lead}, most likely: {how}{steps}. Record it again"


def hung_doubt(scaling: Scaling, hung: HungSteps | None) -> str:
    """Note that the losses include hung steps; empty = these are too short to matter.

    The rank that the others waited for spent that time in a phase of its own, where it looks like slower compute.
    """
    if hung is None or hung.share < ScalingLimits.MIN_DIFFERENCE:
        return ""
    lost, share = seconds_text(hung.lost_s), percent(hung.share)
    held = f"the losses include {lost} in hung steps, {share} of the job's time"
    return f"{held}: compute is not necessarily slower" if whole_percents(scaling)["compute"] > 0 else held


def _speedup_text(speedup: float) -> str:
    return f"{speedup:.2f}×" if speedup < 9.995 else f"{speedup:.1f}×" if speedup < 99.95 else f"{speedup:.0f}×"


def scaling_mark(scaling: Scaling) -> Cell:
    """Efficiency for a card: `83% of 4×`."""
    of = f"{percent(scaling.efficiency)} of {scaling.run.world_size}×"
    return Cell(of, Level.PLAIN if scaling.efficiency >= ScalingLimits.GOOD_EFFICIENCY else Level.WARN)


def waterfall(scaling: Scaling, columns: int) -> list[Line]:
    """Waterfall chart from the ideal down to the efficiency, with a line for each loss or gain."""
    shown, used = whole_percents(scaling), scaling.efficiency
    name_columns = max(_NAME_COLUMNS, *(len(part_words(scaling, name)) + 2 for name in LOSSES))
    bar_columns = max(columns - name_columns - 12, 8)
    full = max(1.0, used)

    def line(name: str, sign: str, percent: int, low: float, high: float, level: Level) -> Line:
        before = round(max(low, 0.0) / full * bar_columns)
        # A loss or gain has at least one column.
        filled = max(round(max(high, 0.0) / full * bar_columns) - before, 1 if percent else 0)
        before = min(before, bar_columns - filled)
        return [
            Cell(f"  {name:<{name_columns}}", Level.PLAIN if sign else Level.DIM),
            Cell(f"{sign or ' '}{percent:>3}%  ", Level.STRONG),
            Cell(" " * before + "█" * filled, level),
        ]

    lines = [line("ideal", "", 100, 0.0, 1.0, Level.DIM)]
    left = 1.0
    for name in filter(shown.get, _largest_first(shown)):
        lost = scaling.parts[name]
        words, sign = part_words(scaling, name, gained=lost < 0), "−" if lost > 0 else "+"
        low, high = sorted((left, left - lost))
        lines.append(line(words, sign, abs(shown[name]), low, high, LEVELS[name]))
        left -= lost
    lines.append(line("used", "", round(used * 100), 0.0, used, Level.OK))
    return [fit(line, columns) for line in lines]


def scaling_object(scaling: Scaling | None) -> dict[str, Any] | None:
    """Scaling as a JSON object; None = no baseline, or no figures yet."""
    if scaling is None:
        return None
    by_medians = scaling.median_speedup
    return {
        "baseline_ranks": scaling.baseline.world_size,
        "ranks": scaling.run.world_size,
        "speedup": finite(scaling.speedup, _DIGITS),
        "median_speedup": None if by_medians is None else finite(by_medians, _DIGITS),
        "efficiency": finite(scaling.efficiency, _DIGITS),
        "parts": {name: finite(share, _DIGITS) for name, share in scaling.parts.items()},
        "waited_for": list(scaling.run.waited_for),
        "by_steps": scaling.by_steps,
    }


def _largest_first(shown: dict[str, int]) -> list[str]:
    return sorted(shown, key=lambda name: -shown[name])
