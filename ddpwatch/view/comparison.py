"""Comparison of two runs: verdict in a sentence, table with confidence intervals, gate for CI, and JSON object."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from ddpwatch.core.limits import CompareLimits
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.core.units import UNPROVEN, count, finite, ms, percent, plural, ranks_text
from ddpwatch.view.cells import Cell, Level, fit, pad
from ddpwatch.view.layout import heading, paragraph
from ddpwatch.view.outcome_text import hung_object, hung_text
from ddpwatch.view.scaling import hung_doubt, scaling_doubt, scaling_object, scaling_sentence, waterfall

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpwatch.core.compare.bootstrap import Comparison, Difference, Estimate, Verdict
    from ddpwatch.core.metrics.hung_steps import HungSteps
    from ddpwatch.core.metrics.scaling import Profile, Scaling
    from ddpwatch.view.cells import Line

GateResult: TypeAlias = Literal["passed", "failed", "inconclusive"]
SCHEMA: Final = 1
MIN_COLUMNS: Final = 60
"""Min. width of the table, in terminal cells; a narrower terminal wraps it."""
WIDE_COLUMNS: Final = 100
"""Min. width, in columns, for the confidence interval of each figure."""
NAMES: Final = {
    "step": "step",
    "samples_per_s": "samples/s",
    "samples_per_s_rank": "  per rank",
    "share": "all-reduce",
    "wait": "waiting",
}
"""Names in the table that differ from the figure's own."""
MARKS: Final[dict[Verdict, Cell]] = {
    "slower": Cell("▲ slower", Level.WARN),
    "faster": Cell("✓ faster", Level.OK),
    "higher": Cell("↑ higher", Level.PLAIN),
    "lower": Cell("↓ lower", Level.PLAIN),
    "too small": Cell("· too small", Level.DIM),
    "inside noise": Cell("· within noise", Level.DIM),
    "unproven": Cell(f"{UNPROVEN} inconclusive", Level.DIM),
}
# Widths of columns, in terminal cells.
_NAME_COLUMNS: Final = 12
_CHANGE_COLUMNS: Final = 9
_INTERVAL_COLUMNS: Final = 20
_DIGITS: Final = 6
"""Decimal places in JSON."""


@dataclass(frozen=True)
class Side:
    """One of the two runs."""

    letter: str
    file: str
    run: str
    attempt: int
    profile: Profile
    scaling: Scaling | None = None
    """Scaling against the baseline, if there is one."""
    attempts: int = 1
    """Number of attempts in the recording."""
    bad_end: str = ""
    """How the run ended badly, or the hang it is in, as part of a sentence; empty = neither."""
    goes_on: bool = False
    """Whether the run continued when its recording ended."""
    hung: HungSteps | None = None
    """Hung steps; None = there were none."""


def comparison_lines(found: Comparison, sides: tuple[Side, Side], columns: int) -> list[Line]:
    """Verdict, bad endings and hung steps, the two runs, the table, remarks, and the scaling of each."""
    columns = max(columns, MIN_COLUMNS)
    lines = [*_verdict(found, columns), *_hidden(found, sides, columns), [], *map(_side, sides), []]
    lines += [_header(columns), *(_row(found, difference, columns) for difference in _figures(found))]
    lines += [heading("where a step goes", columns, "ms per rank; change relative to A's step")]
    lines += [_row(found, difference, columns) for difference in found.parts]
    if remarks := list(_remarks(found)):
        lines.append([])
    for remark in remarks:
        lines += paragraph(remark, columns, lead=[Cell("▲ ", Level.WARN)])
    for side in sides:
        if side.scaling is not None:
            lines += [[], heading(f"{side.letter} against the baseline", columns)]
            lines += paragraph(scaling_sentence(side.scaling, by_means=found.by_means), columns, lead=[Cell("  ")])
            for doubt in (scaling_doubt(side.scaling), hung_doubt(side.scaling, side.hung)):
                if doubt:
                    lines += paragraph(doubt, columns, lead=[Cell("▲ ", Level.WARN)])
            lines += waterfall(side.scaling, columns)
    return [fit(line, columns) for line in lines]


def verdict_text(found: Comparison) -> str:
    """Verdict in a sentence."""
    slowdown, verdict = found.slowdown, found.headline.verdict
    if slowdown is None or verdict == "unproven":
        return f"Inconclusive: too few steps ({count(found.a.steps)} and {count(found.b.steps)})."
    what = "per sample of a rank" if found.by_samples else "per step"
    change = f"{_percent(slowdown.value)} time {what} (95% confidence interval {_interval(slowdown)})"
    if verdict == "inside noise":
        return f"Within noise: B takes {change}; repeated runs of the same job differ by as much."
    if verdict == "too small":
        least = f"{found.headline.smallest * 100:.6g}%"
        return f"Too small to matter: B takes {change}; repeated runs of the same job may differ by {least}."
    return f"B is {verdict}: it takes {change}."


def gate_fails(found: Comparison, sides: tuple[Side, Side], max_slowdown: float) -> bool:
    """Whether B is slower than allowed, or ended badly."""
    return gate_result(found, sides, max_slowdown) == "failed"


def gate_result(found: Comparison, sides: tuple[Side, Side], max_slowdown: float) -> GateResult:
    """Result of the gate: passed only if the whole confidence interval is within the bound."""
    if found.fails(max_slowdown) or sides[1].bad_end:
        return "failed"
    return "passed" if _within(found, max_slowdown) else "inconclusive"


def gate_text(found: Comparison, sides: tuple[Side, Side], max_slowdown: float) -> str:
    """Result of the gate in a sentence, with hung steps if medians hide them and the gate has not failed."""
    text, (_, b), fails = _speed_text(found, max_slowdown), sides, found.fails(max_slowdown)
    if badly := _badly_text(b):
        return f"{text}; {badly}" if fails else f"failed: {badly}"
    hung = _hung_text(found, b)
    return f"{text}; but {hung}" if hung and not found.by_means and not fails else text


def _within(found: Comparison, max_slowdown: float) -> bool:
    """Whether the slowdown's confidence interval is known and does not exceed the bound."""
    return found.headline.verdict != "unproven" and found.slowdown is not None and found.slowdown.high <= max_slowdown


def _speed_text(found: Comparison, max_slowdown: float) -> str:
    allowed = f"at most {max_slowdown * 100:.6g}% slower"
    if found.fails(max_slowdown):
        return f"failed: {allowed}"
    if _within(found, max_slowdown):
        return f"passed: {allowed}"
    interval = "" if found.slowdown is None else f" (95% confidence interval {_interval(found.slowdown)})"
    return f"inconclusive: {allowed} is neither proven nor refuted{interval}; more steps narrow the interval"


def comparison_object(found: Comparison, sides: tuple[Side, Side], max_slowdown: float | None) -> dict[str, Any]:
    """The comparison as a JSON object. Times are in ms, changes are fractions of A; unknown values are None."""
    figures = [*_figures(found), *found.parts]
    return {
        "schema": SCHEMA,
        **{side.letter.lower(): _side_object(side) for side in sides},
        "verdict": found.headline.verdict,
        "decided_by": found.headline.name,
        "by": "means" if found.by_means else "medians",
        "slowdown": _estimate(found.slowdown),
        "max_slowdown": max_slowdown,
        "passed": _passed(found, sides, max_slowdown),
        "gate": None if max_slowdown is None else gate_result(found, sides, max_slowdown),
        "figures": {difference.name: _difference(difference) for difference in figures},
    }


def _passed(found: Comparison, sides: tuple[Side, Side], max_slowdown: float | None) -> bool | None:
    """False = the gate has failed, True = it has not; None = without a gate, or with too few steps."""
    if max_slowdown is None:
        return None
    fails = gate_fails(found, sides, max_slowdown)
    return None if found.headline.verdict == "unproven" and not fails else not fails


def _figures(found: Comparison) -> tuple[Difference, ...]:
    return found.steps, found.throughput, found.each, found.share


def _verdict(found: Comparison, columns: int) -> list[Line]:
    mark, level, _ = MARKS[found.headline.verdict]
    return paragraph(verdict_text(found), columns, Level.STRONG, lead=[Cell(f"{mark[0]} ", level)])


def _hidden(found: Comparison, sides: tuple[Side, Side], columns: int) -> list[Line]:
    """What medians do not show: bad endings and hung steps."""
    lines: list[Line] = []
    for side in sides:
        if badly := _badly_text(side):
            lines += paragraph(f"{badly}{'' if badly.endswith('…') else '.'}", columns, lead=[Cell("✖ ", Level.BAD)])
        if hung := _hung_text(found, side):
            lines += paragraph(f"{hung}.", columns, lead=[Cell("▲ ", Level.WARN)])
    return lines


def _badly_text(side: Side) -> str:
    how = "was hung or failing when its recording ended" if side.goes_on else "ended badly"
    return f"{side.letter} {how}: {side.bad_end}" if side.bad_end else ""


def _hung_text(found: Comparison, side: Side) -> str:
    """Text on hung steps; empty = none, or too short to matter."""
    if side.hung is None or side.hung.share < CompareLimits.MIN_CHANGE:
        return ""
    rank = f", waiting for rank {side.hung.rank}" if side.hung.steps == 1 and side.hung.rank is not None else ""
    hidden = "" if found.by_means else ", which medians do not show"
    return f"{side.letter} {hung_text(side.hung)}{rank}: {percent(side.hung.share)} of its time{hidden}"


def _side(side: Side) -> Line:
    profile = side.profile
    attempt = f" · attempt {side.attempt} of {side.attempts}" if side.attempts > 1 else ""
    batch = f" · batch {count(profile.effective_batch)}" if profile.effective_batch else ""
    waited = f" · waiting for {ranks_text(profile.waited_for)}" if profile.waited_for else ""
    return [
        Cell(f"{side.letter}  ", Level.STRONG),
        Cell(sanitize(side.file, NAME_CHARS)),
        Cell(
            f"{attempt} · {sanitize(side.run, NAME_CHARS)} · {plural(profile.world_size, 'rank')}{batch} · "
            f"{plural(profile.steps, 'step')}{waited}{' · was still going' if side.goes_on else ''}",
            Level.DIM,
        ),
    ]


def _value_columns(columns: int) -> int:
    return 18 if columns >= WIDE_COLUMNS else 9


def _header(columns: int) -> Line:
    value = _value_columns(columns)
    text = " " * _NAME_COLUMNS + pad("A", value, right=True) + pad("B", value, right=True)
    text += pad("change", _CHANGE_COLUMNS, right=True) + pad("95% interval", _INTERVAL_COLUMNS, right=True)
    return [Cell(f"{text}  verdict", Level.DIM)]


def _row(found: Comparison, difference: Difference, columns: int) -> Line:
    value, change = _value_columns(columns), difference.change
    decides = difference.name == found.headline.name
    changed = interval = UNPROVEN
    if change is not None:
        changed = f"{_signed(change.value)}{' pt' if difference.name == 'share' else '%'}"
        interval = f"{_signed(change.low)} … {_signed(change.high)}"
    return [
        Cell(pad(NAMES.get(difference.name, difference.name), _NAME_COLUMNS), Level.STRONG if decides else Level.PLAIN),
        Cell(pad(_figure(difference, difference.a, columns), value, right=True)),
        Cell(pad(_figure(difference, difference.b, columns), value, right=True), Level.STRONG),
        Cell(pad(changed, _CHANGE_COLUMNS, right=True)),
        Cell(pad(interval, _INTERVAL_COLUMNS, right=True), Level.DIM),
        Cell("  "),
        MARKS[difference.verdict],
    ]


def _figure(difference: Difference, estimate: Estimate | None, columns: int) -> str:
    if estimate is None:
        return UNPROVEN
    write = {"share": _share, "samples_per_s": count, "samples_per_s_rank": count}.get(difference.name, ms)
    around = (estimate.high - estimate.low) / 2
    return f"{write(estimate.value)} ± {write(around)}" if columns >= WIDE_COLUMNS else write(estimate.value)


def _share(share: float) -> str:
    return f"{share * 100:.1f}%"


def _signed(part: float) -> str:
    """Format a fraction as percent with its sign, in at most six characters."""
    percent = part * 100
    if abs(percent) >= 9999.5:
        return ">9999" if percent > 0 else "<-9999"
    text = f"{percent:+.0f}" if abs(percent) >= 99.95 else f"{percent:+.1f}"
    return "0.0" if text in {"+0.0", "-0.0"} else text.replace("-", "−")


def _percent(part: float) -> str:
    return f"{_signed(abs(part)).removeprefix('+')}% {'more' if part >= 0 else 'less'}"


def _interval(estimate: Estimate) -> str:
    return f"{_signed(estimate.low)} to {_signed(estimate.high)}%"


def _remarks(found: Comparison) -> Iterator[str]:
    a, b = found.a, found.b
    if a.world_size != b.world_size:
        yield f"The runs have {count(a.world_size)} and {plural(b.world_size, 'rank')}."
    if None in (a.effective_batch, b.effective_batch):
        yield "The batch size of a run is unknown: steps are compared as if batches were equal."
    elif a.effective_batch != b.effective_batch:
        yield f"The batches differ: {count(a.effective_batch or 0)} and {count(b.effective_batch or 0)} samples."
    for letter, kinds in zip("AB", found.kinds, strict=True):
        if kinds is not None:
            long, short = f"{kinds.long_share * 100:.0f}% take about {ms(kinds.long_ns)} ms", ms(kinds.short_ns)
            yield f"The steps of {letter} are of two kinds: {long}, the others about {short} ms."
    if found.by_means:
        yield "Therefore means are compared, not medians."
    if found.by_samples:
        yield "Therefore samples per second of a rank decide, not the step time."


def _side_object(side: Side) -> dict[str, Any]:
    profile = side.profile
    return {
        "file": sanitize(side.file, NAME_CHARS),
        "run": sanitize(side.run, NAME_CHARS),
        "attempt": side.attempt,
        "attempts": side.attempts,
        "world_size": profile.world_size,
        "effective_batch": profile.effective_batch,
        "steps": profile.steps,
        "waited_for": list(profile.waited_for),
        "ended_badly": side.bad_end or None,
        "goes_on": side.goes_on,
        "stood_still": hung_object(side.hung),
        "scaling": scaling_object(side.scaling),
    }


def _difference(difference: Difference) -> dict[str, Any]:
    rates = difference.name.startswith("samples") or difference.name == "share"
    scale = 1.0 if rates else 1e-6
    return {
        "a": _estimate(difference.a, scale),
        "b": _estimate(difference.b, scale),
        "change": _estimate(difference.change),
        "verdict": difference.verdict,
    }


def _estimate(estimate: Estimate | None, scale: float = 1.0) -> dict[str, float | None] | None:
    if estimate is None:
        return None
    return {name: finite(getattr(estimate, name) * scale, _DIGITS) for name in ("value", "low", "high")}
