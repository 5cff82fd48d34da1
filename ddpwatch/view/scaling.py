"""Scaling efficiency in words: how much of so many ranks is used, and where the rest goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ddpwatch.core.limits import ScalingLimits
from ddpwatch.core.metrics.scaling import LOSSES
from ddpwatch.core.units import finite, ms, percent, plural, ranks_text, rounded_to_total
from ddpwatch.view.cells import Cell, Level, fit
from ddpwatch.view.outcome import seconds_text

if TYPE_CHECKING:
    from ddpwatch.core.metrics.hung_steps import HungSteps
    from ddpwatch.core.metrics.scaling import Scaling
    from ddpwatch.view.cells import Line

LEVELS: Final = {
    "wire": Level.WIRE,
    "waiting": Level.WAITING,
    "data": Level.DATA,
    "compute": Level.BACKWARD,
}
GOOD: Final = 0.9
"""From this efficiency on nothing is marked."""
_DIGITS: Final = 4
_NAME_COLUMNS: Final = 18


def whole_percents(scaling: Scaling) -> dict[str, int]:
    """What is lost to each part in whole per cent, such that they and the efficiency add up to 100 on the screen."""
    shown = rounded_to_total([scaling.parts[name] for name in LOSSES], 100 - round(scaling.efficiency * 100))
    return dict(zip(LOSSES, shown, strict=True))


def part_words(scaling: Scaling, name: str, *, gained: bool = False) -> str:
    """What a part is called, with the ranks that are waited for."""
    if name == "waiting" and scaling.run.waited_for and not gained:
        return f"waiting for {ranks_text(scaling.run.waited_for)}"
    return "slower compute" if name == "compute" and not gained else name


def scaling_sentence(scaling: Scaling, *, by_means: bool = False) -> str:
    """`4 ranks run 3.33× as fast as one: 83 %; 9 % wire, 6 % waiting for rank 3, 2 % data`.

    Where the figures around it are medians and come to another speed-up, that is said; not if they are means.
    """
    run, before = scaling.run.world_size, scaling.baseline.world_size
    verb = "runs" if run == 1 else "run"
    text = f"{plural(run, 'rank')} {verb} {speedup_text(scaling.speedup)} as fast as {'one' if before == 1 else before}"
    if scaling.median_speedup is not None and scaling.medians_differ and not by_means:
        text += f" over all time ({speedup_text(scaling.median_speedup)} by medians)"
    text += f": {percent(scaling.efficiency)}"
    shown = whole_percents(scaling)
    lost = [f"{shown[name]} % {part_words(scaling, name)}" for name in _largest_first(shown) if shown[name] > 0]
    won = [
        f"{-shown[name]} % gained in {part_words(scaling, name, gained=True)}"
        for name in reversed(_largest_first(shown))
        if shown[name] < 0
    ]
    if lost or won:
        text += "; " + ", ".join([*lost, *won])
    return f"{text}; batches are not told and taken as equal" if scaling.by_steps else text


def scaling_doubt(scaling: Scaling) -> str:
    """Why the figure is not to be believed, and what to do; empty = nothing speaks against it."""
    baseline = scaling.baseline
    implausible = scaling.efficiency > ScalingLimits.MAX_EFFICIENCY
    if not implausible and not baseline.is_uneven:
        return ""
    steps = ""
    if baseline.median_ns is not None and baseline.p99_ns is not None:
        mean = f"mean {ms(baseline.step_ns)} ms, " if baseline.is_uneven else ""
        steps = f" ({mean}median {ms(baseline.median_ns)} ms, p99 {ms(baseline.p99_ns)} ms)"
    how = "its steps are uneven" if baseline.is_uneven else "it was slower than a rank of this run"
    lead = "more than 100 % is implausible; the baseline was disturbed" if implausible else "the baseline was disturbed"
    return f"{lead}, most likely: {how}{steps}. Record it again"


def hung_doubt(scaling: Scaling, hung: HungSteps | None) -> str:
    """That the parts hold the time lost in hung steps; empty = there is hardly any. The rank that was waited for spent
    it in a phase of its own, so that it looks like slower work.
    """
    if hung is None or hung.share < ScalingLimits.MIN_DIFFERENCE:
        return ""
    lost, share = seconds_text(hung.lost_s), percent(hung.share)
    held = f"these parts hold the {lost} that the job stood still, {share} of its time"
    return f"{held}: compute need not be slower" if whole_percents(scaling)["compute"] > 0 else held


def speedup_text(speedup: float) -> str:
    """`3.33×`."""
    return f"{speedup:.2f}×" if speedup < 9.995 else f"{speedup:.1f}×" if speedup < 99.95 else f"{speedup:.0f}×"


def scaling_mark(scaling: Scaling) -> Cell:
    """For a card: `83 % of 4×`."""
    of = f"{percent(scaling.efficiency)} of {scaling.run.world_size}×"
    return Cell(of, Level.PLAIN if scaling.efficiency >= GOOD else Level.WARN)


def waterfall(scaling: Scaling, columns: int) -> list[Line]:
    """From all of the ranks' time down to what is used, a line for each part that is lost or gained."""
    shown = whole_percents(scaling)
    name_columns = max(_NAME_COLUMNS, *(len(part_words(scaling, name)) + 2 for name in LOSSES))
    bar_columns = max(columns - name_columns - 12, 8)
    used = scaling.efficiency
    begin = max(1.0, used)
    lines = [_fall("ideal", "", 0.0, min(1.0 / begin, 1.0), Level.DIM, name_columns, bar_columns, 100)]
    level = 1.0
    for name in _largest_first(shown):
        if not shown[name]:
            continue
        lost = scaling.parts[name]
        low, high = sorted((level, level - lost))
        words = part_words(scaling, name, gained=lost < 0)
        lines.append(
            _fall(
                words,
                "−" if lost > 0 else "+",
                max(low, 0.0) / begin,
                max(high, 0.0) / begin,
                LEVELS[name],
                name_columns,
                bar_columns,
                abs(shown[name]),
            )
        )
        level -= lost
    lines.append(_fall("used", "", 0.0, used / begin, Level.OK, name_columns, bar_columns, round(used * 100)))
    return [fit(line, columns) for line in lines]


def scaling_object(scaling: Scaling | None) -> dict[str, Any] | None:
    """As plain values, ready for JSON; None where there is no baseline, or nothing can be said yet."""
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


def _fall(
    words: str, sign: str, low: float, high: float, level: Level, name_columns: int, bar_columns: int, value: int
) -> Line:
    """A bar from `low` to `high`, after as much blank; one that is lost or gained can always be seen."""
    before = round(low * bar_columns)
    filled = max(round(high * bar_columns) - before, 1 if value else 0)
    before = min(before, bar_columns - filled)
    return [
        Cell(f"  {words:<{name_columns}}", Level.DIM if not sign else Level.PLAIN),
        Cell(f"{sign}{value:>3} %  " if sign else f" {value:>3} %  ", Level.STRONG),
        Cell(" " * before + "█" * filled, level),
    ]
