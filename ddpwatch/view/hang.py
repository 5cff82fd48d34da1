"""A hang on top of everything: who has not arrived, who waits, what the missing rank is doing, and how long is left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rules
from ddpwatch.core.hangs import tells_of_a_hang
from ddpwatch.core.numbers import duration
from ddpwatch.core.text import NOTE_CHARS, tame
from ddpwatch.view.cells import Cell, Level, columns_of, fit, line_columns
from ddpwatch.view.prose import bar, wrap

if TYPE_CHECKING:
    from ddpwatch.core.alerts import Alert
    from ddpwatch.view.cells import Line
    from ddpwatch.view.picture import Picture

BAR_COLUMNS: Final = 24
MOST_ROWS: Final = 7
LOOKS: Final = 2
"""A hang that was not found in so many looks is over; rules are asked as often as ranks tell."""
ORDER: Final = (rules.UNEVEN_BATCH, rules.DESYNC, rules.STALL, rules.TIMEOUT)
"""What says most about who it is comes first."""


def hang_of(picture: Picture) -> Alert | None:
    """The alert on a hang that goes on; None = there is none, the run has ended, or an earlier step is looked at.

    One that is over stays open for a while, lest it flaps; what is on top is what is wrong now.
    """
    if picture.at is not None or picture.condition == "ended":
        return None
    since_ns = picture.now.now_ns - LOOKS * picture.state.beat_ns
    found = [alert for alert in picture.alerts if tells_of_a_hang(alert.finding) and alert.last.now_ns >= since_ns]
    return min(found, key=lambda alert: ORDER.index(alert.finding.rule), default=None)


def stuck_rank(picture: Picture) -> int | None:
    """The first rank that the others wait for in a hang; None = there is no hang, or nobody to blame."""
    hang = hang_of(picture)
    return hang.finding.ranks[0] if hang is not None and hang.finding.ranks else None


def hang_lines(picture: Picture, columns: int) -> list[Line]:
    """The hang in a few lines; none if there is none. In place of the alert, whose words these are."""
    alert = hang_of(picture)
    if alert is None:
        return []
    finding, facts = alert.finding, alert.finding.evidence
    headline, _, doing = tame(finding.message, NOTE_CHARS).partition(". ")
    headline = headline.partition(", timeout in ")[0]  # which the clock tells
    lines: list[Line] = [
        [Cell("✖ " if not place else "  ", Level.BAD), Cell(text, Level.STRONG)]
        for place, text in enumerate(wrap(headline, max(columns - 2, 10)))
    ]
    lines += [[Cell("  "), Cell(text, Level.WARN)] for text in (wrap(doing, max(columns - 2, 10)) if doing else [])]
    lines = lines[: MOST_ROWS - 1]
    key: Line = (
        [Cell("   "), Cell("x", Level.KEY, "open_stuck"), Cell(" its stack", Level.DIM)] if finding.ranks else []
    )
    lines.append([*_clock(facts, columns - line_columns(key)), *key])
    return [fit(line, columns) for line in lines]


def _clock(facts: dict[str, float | int | str], columns: int) -> Line:
    """How long they have waited, of how long they may."""
    waited_s = float(facts.get("waiting_s", 0.0))
    timeout_s = float(facts.get("timeout_s", 0.0))
    if not timeout_s:
        return [Cell(f"  waiting for {duration(waited_s)}; how long torch waits is not known", Level.DIM)]
    left_s = float(facts.get("left_s", timeout_s - waited_s))
    line = [Cell("  ")]
    if columns >= 2 * BAR_COLUMNS:
        line += [Cell(bar(1.0 - left_s / timeout_s, BAR_COLUMNS), Level.BAD), Cell("▏ ", Level.DIM)]
    if left_s <= 0:
        return [*line, Cell("the timeout is over", Level.BAD)]
    line += [Cell(f"{duration(left_s)} left", Level.BAD), Cell(f" of {duration(timeout_s)}")]
    what = " until torch ends the job"
    return [*line, Cell(what)] if line_columns(line) + columns_of(what) <= columns else line
