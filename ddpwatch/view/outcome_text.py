"""Text on how a run ended: in full for the summary, the root cause in part of a line, and the time lost in hangs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from ddpwatch.core.diagnosis.exits import how_ended, is_complaint, is_innocent, is_timeout, why_failed
from ddpwatch.core.state.rank import PARTS
from ddpwatch.core.state.sanitize import NOTE_CHARS, sanitize
from ddpwatch.core.units import count, duration_text, finite, plural, ranks_text
from ddpwatch.view.cells import Cell, Level, fit
from ddpwatch.view.layout import paragraph

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.alerts.hang_alerts import Hang
    from ddpwatch.core.diagnosis.exits import End
    from ddpwatch.core.diagnosis.outcome import Outcome, Reason
    from ddpwatch.core.metrics.hung_steps import HungSteps
    from ddpwatch.core.state.run import RunState
    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import RunView

FAILED_SHOWN: Final = 3
"""Max. number of failures shown with their exception."""
# Max. length of an exception, in characters, as a paragraph of its own and within a sentence.
FAILED_CHARS: Final = 300
SAID_CHARS: Final = 120
UNREPORTED: Final = "without reporting an error"
"""Text on a process that exited or was killed before its agent could report the reason."""
OOM_KILLED: Final = "was killed by the kernel's OOM killer"
VICTIM_LINES: Final = 2
"""Max. number of lines of an exception in a rank that waited for another or lost it, which is not the root cause."""
TENTHS_BELOW_S: Final = 120.0
"""Lost times below this, in seconds, are shown with tenths of a second."""
_S_DIGITS: Final = 3
"""Decimal places of seconds in JSON."""
_PLACE: Final = re.compile(r"\[\S{1,200}\.(?:cc|cpp|h|hpp):\d{1,7}\] ?")
"""Place in the source of gloo or torch, which is longer than the message after it."""
_WHAT_IT_DID: Final[dict[Reason, str]] = {
    "interrupted": "was interrupted (Ctrl-C, SIGINT)",
    "left": "left the job early",
    "mismatch": "ran a mismatched collective",
    "not joined": "did not join a collective",
    "ended first": "exited before the others",
}


def ending_lines(state: RunState, outcome: Outcome, columns: int) -> list[Line]:
    """How the run ended, with first failures in full and secondary failures in one line."""
    if outcome.ending != "badly":
        return _good_ending(state, outcome, columns)
    exits = outcome.exits
    secondary = {end.rank.rank for end, _ in exits.later}
    failed, lost, silent = (
        [rank for rank, condition in outcome.bad.items() if condition == how and rank not in secondary]
        for how in ("failed", "lost", "silent")
    )
    lines: list[Line] = [fit([Cell("✖ ", Level.BAD), Cell("The run has ended badly", Level.BAD)], columns)]
    alert = outcome.explained_by if outcome.bad else outcome.reported_by
    if alert is not None:
        # A rank that fails first is often one that waited: the diagnosis comes before its exception.
        lines += paragraph(sanitize(alert.finding.message, NOTE_CHARS), columns, Level.STRONG, lead=[Cell("  ")])
    kinds = _by_kind(state, failed)
    for alike in kinds[:FAILED_SHOWN]:
        lines += _failed(alike, why_failed(state.ranks[alike[0]]), columns)
    # The ranks that the others waited for ended after them, but not because of them.
    named = secondary & set(alert.finding.ranks) if alert is not None else set()
    causes = ranks_text(cause.rank.rank for cause in exits.causes())
    innocent = any(map(is_innocent, exits.causes()))
    later = f"exited after {causes}" + (
        ", which need not be the root cause" if innocent else ": secondary failure, most likely"
    )
    lost_how: dict[str, list[int]] = {}
    for rank in lost:
        code = state.ranks[rank].exit_code
        how = f"exited {UNREPORTED}: most likely killed" if code is None else f"{how_ended(code)} {UNREPORTED}"
        lost_how.setdefault(how, []).append(rank)
    for ranks, text, level in (
        (sorted(rank for alike in kinds[FAILED_SHOWN:] for rank in alike), "also failed", Level.PLAIN),
        *((ranks, text, Level.PLAIN) for text, ranks in lost_how.items()),
        (silent, "no heartbeat", Level.PLAIN),
        (sorted(named), "exited after that", Level.PLAIN),
        (sorted(secondary - named), later, Level.DIM),
        (outcome.left, "exited cleanly", Level.DIM),
    ):
        if ranks:
            lines += paragraph(f"{ranks_text(ranks)}: {text}", columns, level, lead=[Cell("  ")])
    return lines


def _by_kind(state: RunState, failed: Sequence[int]) -> list[list[int]]:
    """Group failed ranks: those that timed out, those that lost a connection, and those with the same exception."""
    kinds: dict[str, list[int]] = {}
    for rank in failed:
        text = why_failed(state.ranks[rank])
        kind = "waited" if is_timeout(text) else "lost another" if is_complaint(text) else text.split(PARTS)[0]
        kinds.setdefault(kind, []).append(rank)
    return list(kinds.values())


def _failed(ranks: Sequence[int], text: str, columns: int) -> list[Line]:
    names, reported = ranks_text(ranks), sanitize(text, FAILED_CHARS)
    lead = Cell(f"  {names} timed out waiting: ") if is_timeout(text) else Cell(f"  {names} failed: ", Level.BAD)
    if not is_complaint(text):
        return paragraph(reported, columns, lead=[lead])
    lines = paragraph(_PLACE.sub("", reported, count=1), columns, lead=[lead])
    if len(lines) <= VICTIM_LINES:
        return lines
    *kept, last = lines[:VICTIM_LINES]
    return [*kept, fit([*last, Cell(" …")], columns)]


def root_cause_text(outcome: Outcome) -> str:
    """The root cause in part of a line: `rank 2 was killed (SIGKILL); ranks 0-1, 3 after it`; empty = not known."""
    cause = outcome.root_cause
    if cause is None:
        return ""
    names, others = ranks_text(cause.ranks), ranks_text(cause.secondary)
    one = len(cause.ranks) == 1
    if cause.reason == "no heartbeat":
        its = "its" if len(cause.secondary) == 1 else "their"
        return f"{others} lost {its} connection to another rank; no message ever came from {names}"
    if cause.end is not None and cause.reason in {"signal", "own end"}:
        what = _how_it_ended(cause.end) if cause.reason == "own end" else how_ended(cause.end.code or 0)
    else:
        what = _WHAT_IT_DID[cause.reason]
    if not one and what.startswith("was "):
        what = what.replace("was", "were", 1)
    return f"{names} {what}" + (f"; {others} after {'it' if one else 'them'}" if cause.secondary else "")


def bad_ranks_text(outcome: Outcome) -> str:
    """The ranks that ended badly and how, without the reason: `ranks 0-1 failed, rank 2 lost`."""
    by_condition: dict[str, list[int]] = {}
    for rank, condition in outcome.bad.items():
        by_condition.setdefault("without heartbeat" if condition == "silent" else condition, []).append(rank)
    return ", ".join(f"{ranks_text(ranks)} {word}" for word, ranks in by_condition.items())


def _how_it_ended(end: End) -> str:
    if end.how == "failed":
        said = end.rank.bye.text.split(PARTS)[0] if end.rank.bye is not None else ""
        if said:
            return f"failed: {sanitize(said, SAID_CHARS).rstrip('.')}"
        return how_ended(end.rank.exit_code) if end.rank.exit_code else "failed"
    if end.how == "silent":
        return "stopped sending heartbeats"
    if end.rank.oom_kills:
        return OOM_KILLED
    return "was lost" if end.code is None else how_ended(end.code)


def _good_ending(state: RunState, outcome: Outcome, columns: int) -> list[Line]:
    if outcome.switched_off:
        off = ranks_text(outcome.switched_off)
        text = f"ddpwatch switched itself off on {off}; how the training ended is unknown."
        return paragraph(text, columns, Level.WARN, lead=[Cell("▲ ", Level.WARN)])
    left = "all ranks" if len(outcome.left) == state.world_size else plural(len(outcome.left), "rank")
    text = f"The run has ended: {left} exited cleanly." if outcome.left else "The run has ended."
    return paragraph(text, columns, Level.STRONG, lead=[Cell("■ ", Level.OK)])


def lost_text(run_view: RunView, hang: Hang | None) -> str:
    """Time lost in the hang at the end and in hung steps; empty = none."""
    in_steps = lost_time_text(run_view)
    if hang is None:
        return in_steps
    ranks = f", waiting for {ranks_text(hang.ranks)}" if hang.ranks else ""
    in_hang = f"{hang.seconds:.1f} s in the hang at the end{ranks}"
    return f"{in_hang}; {in_steps}" if in_steps else in_hang


def lost_time_text(run_view: RunView) -> str:
    """Time lost in hung steps, their number and the longest, among the steps that the timeline keeps; empty = none."""
    steps = run_view.timeline.steps(run_view.last_step)
    hung = run_view.timeline.hung_steps(steps)
    if hung is None:
        return ""
    which = f"{plural(hung.steps, 'step')} of the last {count(len(steps))}"
    return f"{seconds_text(hung.lost_s)} in {which} that hung: {longest_text(hung)}"


def longest_text(hung: HungSteps) -> str:
    """The longest hung step, and the rank that the others waited for in it."""
    rank = "" if hung.rank is None else f", waiting for rank {hung.rank}"
    return f"{'longest: ' if hung.steps > 1 else ''}{_step_text(hung)}{rank}"


def hung_text(hung: HungSteps) -> str:
    """Time lost in hung steps, as in `hung for 8.0 s at step 100`."""
    lost = f"hung for {seconds_text(hung.lost_s)}"
    if hung.steps == 1:
        return f"{lost} at step {count(hung.longest_step)}"
    return f"{lost} in {plural(hung.steps, 'step')} (longest: {_step_text(hung)})"


def hung_object(hung: HungSteps | None) -> dict[str, Any] | None:
    """Hung steps as a JSON object; None = there were none."""
    if hung is None:
        return None
    return {
        "steps": hung.steps,
        "lost_s": finite(hung.lost_s, _S_DIGITS),
        "longest_step": hung.longest_step,
        "longest_s": finite(hung.longest_s, _S_DIGITS),
        "rank": hung.rank,
    }


def seconds_text(seconds: float) -> str:
    """Format a lost time."""
    return f"{seconds:.1f} s" if seconds < TENTHS_BELOW_S else duration_text(seconds)


def _step_text(hung: HungSteps) -> str:
    return f"step {count(hung.longest_step)} took {seconds_text(hung.longest_s)}"
