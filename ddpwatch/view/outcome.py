"""How a run has ended: what explains it, who went by themselves, and who only followed.

Time that was lost: steps that took far longer than the others, and the hang that the run has not come out of.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from ddpwatch.core import rules
from ddpwatch.core.alerts.hangs import last_hang
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.diagnosis.early_exit import left_before
from ddpwatch.core.diagnosis.exits import (
    endings,
    how_ended,
    is_complaint,
    is_innocent,
    is_interrupt,
    is_timeout,
    why_failed,
)
from ddpwatch.core.metrics.histogram import MEDIAN, Spread
from ddpwatch.core.metrics.hung_steps import FAR_NS, Standstills, guilty_of
from ddpwatch.core.state.rank import PARTS
from ddpwatch.core.state.sanitize import NOTE_CHARS, tame
from ddpwatch.core.units import count, duration, finite, plural, ranks_text
from ddpwatch.view.alerts.page import all_alerts
from ddpwatch.view.cells import Cell, Level, fit
from ddpwatch.view.layout import paragraph

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpwatch.core.alerts.hangs import Hang
    from ddpwatch.core.alerts.model import Alert, Finding
    from ddpwatch.core.diagnosis.exits import End
    from ddpwatch.core.metrics.hung_steps import Standstill
    from ddpwatch.core.state.run import RunState
    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import Picture

FAILED_SHOWN: Final = 3
FAILED_CHARS: Final = 300
SAID_CHARS: Final = 120
VICTIM_LINES: Final = 2
"""Of what a rank says that has waited for another, or lost it: it tells nothing of what began it."""
_PLACE: Final = re.compile(r"\[\S{1,200}\.(?:cc|cpp|h|hpp):\d{1,7}\] ?")
"""A line of gloo's or torch's own source, which takes more room than what is said there."""
EXPLAINING: Final = (rules.DESYNC, rules.UNEVEN_BATCH, rules.TIMEOUT, rules.STALL)
"""Rules that say why ranks waited for each other in vain, the one that says most first."""


def ending_lines(picture: Picture, columns: int) -> list[Line]:
    """Well or badly, and whose fault: those who went by themselves in full, those who only followed in a line."""
    state = picture.state
    by_condition: dict[str, list[int]] = {}
    for rank in state.ranks.values():
        by_condition.setdefault(state.condition(rank), []).append(rank.rank)
    ended = by_condition.get("ended", [])
    if not by_condition.keys() & {"failed", "lost", "silent"}:
        return _good_ending(state, ended, columns)
    ends = endings(state, picture.limits.rank_lost.silent_s)
    followers = {end.rank.rank for end, _ in ends.later}
    failed, lost, silent = (
        [rank for rank in by_condition.get(how, []) if rank not in followers] for how in ("failed", "lost", "silent")
    )
    lines: list[Line] = [fit([Cell("✖ ", Level.BAD), Cell("The run has ended badly", Level.BAD)], columns)]
    judged = _judged(all_alerts(picture))
    if judged is not None:
        # Who fails first is often one of those that waited: what was found out comes before what they say.
        lines += paragraph(tame(judged.finding.message, NOTE_CHARS), columns, Level.STRONG, lead=[Cell("  ")])
    kinds = _by_kind(state, failed)
    for alike in kinds[:FAILED_SHOWN]:
        lines += _failed(alike, _words(state, alike[0]), columns)
    # Those for whom the others waited have ended after them, and followed nobody.
    named = followers & set(judged.finding.ranks) if judged is not None else set()
    causes = ranks_text(cause.rank.rank for cause in ends.causes())
    blame = "which need not be to blame" if any(map(is_innocent, ends.causes())) else "most likely because of that"
    words = {number: _how_lost(state.ranks[number].exit_code) for number in lost}
    for ranks, text, level in (
        (sorted(rank for alike in kinds[FAILED_SHOWN:] for rank in alike), "failed, too", Level.PLAIN),
        *((_alike(words, text), text, Level.PLAIN) for text in dict.fromkeys(words.values())),
        (silent, "no longer heard", Level.PLAIN),
        (sorted(named), "ended after that", Level.PLAIN),
        (sorted(followers - named), f"ended after {causes}, {blame}", Level.DIM),
        (ended, "said goodbye", Level.DIM),
    ):
        if ranks:
            lines += paragraph(f"{ranks_text(ranks)}: {text}", columns, level, lead=[Cell("  ")])
    return lines


def _by_kind(state: RunState, failed: Sequence[int]) -> list[list[int]]:
    """Ranks that failed, those together that have waited in vain, that have lost another, or that say the same."""
    kinds: dict[str, list[int]] = {}
    for number in failed:
        text = _words(state, number)
        kind = "waited" if is_timeout(text) else "lost another" if is_complaint(text) else text.split(PARTS)[0]
        kinds.setdefault(kind, []).append(number)
    return list(kinds.values())


def _words(state: RunState, number: int) -> str:
    return why_failed(state.ranks[number])


def _failed(ranks: Sequence[int], text: str, columns: int) -> list[Line]:
    """What the first of them says."""
    who, told = ranks_text(ranks), tame(text, FAILED_CHARS)
    if not is_complaint(text):
        return paragraph(told, columns, lead=[Cell(f"  {who} failed: ", Level.BAD)])
    told = _PLACE.sub("", told, count=1)
    lead = Cell(f"  {who} gave up waiting: ") if is_timeout(text) else Cell(f"  {who} failed: ", Level.BAD)
    lines = paragraph(told, columns, lead=[lead])
    if len(lines) <= VICTIM_LINES:
        return lines
    *kept, last = lines[:VICTIM_LINES]
    return [*kept, fit([*last, Cell(" …")], columns)]


def who_began(state: RunState, alerts: Iterable[Alert], silent_s: float) -> str:
    """A bad end in part of a line, who began it first: `rank 2 was killed (SIGKILL); ranks 0-1, 3 after it`.

    Empty = that is not known, or nobody has ended but those who began it, unless somebody else has ended them.
    """
    bad = {rank.rank for rank in state.ranks.values() if state.condition(rank) in {"failed", "lost", "silent"}}
    judged = _judged(alerts)
    found = endings(state, silent_s)
    if judged is None and found.first and (how := _from_outside(found.first)):
        too = (end for end, _ in found.later if all(map(is_interrupt, (*found.first, end))))
        first = {end.rank.rank for end in (*found.first, *too)}
        then = f"; {ranks_text(bad - first)} after {'it' if len(first) == 1 else 'them'}" if bad - first else ""
        return f"{ranks_text(first)} {'was' if len(first) == 1 else 'were'} {how}{then}"
    unheard = [rank.rank for rank in state.ranks.values() if state.condition(rank) == "missing"]
    if judged is None and unheard and found.first and all(end.complains_of_peer for end in found.first):
        # One that ends in its first moments has not come to tell so.
        its, was = "its" if len(bad) == 1 else "their", "was" if len(unheard) == 1 else "were"
        return f"{ranks_text(bad)} lost {its} connection to another; {ranks_text(unheard)} {was} never heard"
    ends = found.causes()
    left = _left_by(state) if judged is None else []
    if judged is not None and judged.finding.ranks:
        first, how = set(judged.finding.ranks), _what_it_did(judged.finding)
    elif left:
        first, how = set(left), "ended before the others"
    elif judged is None and len(ends) == 1 and not is_innocent(ends[0]):
        first, how = {ends[0].rank.rank}, _how_it_ended(ends[0])
    else:
        return ""
    others = bad - first
    if not others:
        return ""
    if len(first) > 1 and how.startswith("was "):
        how = how.replace("was", "were", 1)
    return f"{ranks_text(first)} {how}; {ranks_text(others)} after {'it' if len(first) == 1 else 'them'}"


def _from_outside(ends: Sequence[End]) -> str:
    """How somebody has ended them who is no rank; empty = not all of them."""
    if all(map(is_interrupt, ends)):
        return "interrupted from the keyboard"
    codes = {end.code for end in ends}
    return how_ended(codes.pop() or 0).removeprefix("was ") if len(codes) == 1 and ends[0].asked else ""


def _left_by(state: RunState) -> list[int]:
    """Those that had said goodbye before all that failed lost their connections; empty = some failed by themselves."""
    failed = [rank for rank in state.ranks.values() if state.condition(rank) in {"failed", "lost", "silent"}]
    words = [rank.bye.text if rank.bye is not None else "" for rank in failed]
    if not all(is_complaint(text) and not is_timeout(text) for text in words):
        return []
    return [rank.rank for rank in left_before(state, min((rank.bye_ns or 0 for rank in failed), default=0))]


def _what_it_did(finding: Finding) -> str:
    """What the rank did that an alert names."""
    if finding.rule == rules.UNEVEN_BATCH:
        return "left the others"
    # Of ranks that were in different operations the evidence tells who was in which.
    out_of_line = finding.rule == rules.DESYNC or "camps" in finding.evidence
    return "was out of line" if out_of_line else "did not join a collective"


def _how_it_ended(end: End) -> str:
    if end.how == "failed":
        said = end.rank.bye.text.split(PARTS)[0] if end.rank.bye is not None else ""
        if said:
            return f"failed: {tame(said, SAID_CHARS).rstrip('.')}"
        return how_ended(end.rank.exit_code) if end.rank.exit_code else "failed"
    if end.how == "silent":
        return "fell silent"
    if end.rank.oom_kills:
        return "was killed by the kernel, for its memory"
    return "was lost" if end.code is None else how_ended(end.code)


def _judged(alerts: Iterable[Alert]) -> Alert | None:
    """What explains the end, among the alerts that were open then; None = nothing but the ends themselves."""
    found = {alert.finding.rule: alert for alert in alerts if alert.closed is None and _explains(alert.finding)}
    return next((found[rule] for rule in EXPLAINING if rule in found), None)


def how_told(alerts: Iterable[Alert]) -> str:
    """A bad end by nothing but the alerts that were open then, as part of a sentence; empty = none tells of one."""
    told = [alert for alert in alerts if alert.closed is None]
    ends = [alert.finding for alert in told if alert.finding.rule in rules.EXITS]
    judged = _judged(told)
    # A short wait at the end of a run is no bad end.
    if judged is not None and (ends or judged.finding.severity is Severity.CRITICAL):
        return judged.finding.message
    return next((finding.message for finding in ends if finding.severity is Severity.CRITICAL), "")


def _explains(finding: Finding) -> bool:
    """A wait for somebody is not critical in its first seconds, and no less true."""
    waits = finding.rule == rules.STALL and finding.severity is Severity.WARNING and bool(finding.ranks)
    return waits or finding.severity is Severity.CRITICAL


def _alike(words: dict[int, str], text: str) -> list[int]:
    return [number for number, told in words.items() if told == text]


def _how_lost(code: int | None) -> str:
    return "ended without a word: killed, most likely" if code is None else f"{how_ended(code)} without a word"


def _good_ending(state: RunState, ended: list[int], columns: int) -> list[Line]:
    off = [number for number in ended if (bye := state.ranks[number].bye) and bye.reason == "off"]
    if off:
        text = f"ddpwatch switched itself off on {ranks_text(off)}; how the training ended is not known."
        return paragraph(text, columns, Level.WARN, lead=[Cell("▲ ", Level.WARN)])
    who = "all ranks" if len(ended) == state.world_size else plural(len(ended), "rank")
    text = f"The run has ended well: {who} said goodbye."
    return paragraph(text, columns, Level.STRONG, lead=[Cell("■ ", Level.OK)])


TENTHS_BELOW_S: Final = 120.0
"""Of longer times nobody asks for the tenth of a second."""
_S_DIGITS: Final = 3


def lost_text(picture: Picture) -> str:
    """The time in which nothing went on, and why; empty = there was none."""
    return "; ".join(filter(None, (hang_text(last_hang(picture.state, all_alerts(picture))), stumbles_text(picture))))


def hang_text(hang: Hang | None) -> str:
    """The hang at the end, in a few words; empty = there was none."""
    if hang is None:
        return ""
    who = f", for {ranks_text(hang.ranks)}" if hang.ranks else ""
    return f"{hang.seconds:.1f} s in a hang that no step has come after{who}"


def stumbles_text(picture: Picture) -> str:
    """The time that was lost to such steps, how many there were, and the longest; empty = there were none.

    Of the steps that are kept: of a long run these are the last ones.
    """
    timeline = picture.timeline
    steps = timeline.steps(picture.last_step)
    step_ns, spread, found = timeline.series("step_ns", steps), Spread(), Standstills()
    long = step_ns > FAR_NS
    if not long.any():
        # As a rule: nobody need be looked for among thousands of ranks.
        return ""
    spread.take(step_ns)
    found.take(steps[long], step_ns[long], guilty_of(timeline.ranks, timeline.excess(steps[long])))
    still = found.found(spread.quantile(MEDIAN))
    if still is None:
        return ""
    which = f"{plural(still.steps, 'step')} of the last {count(len(steps))}"
    return f"{seconds_text(still.lost_s)} in {which} that stood still: {longest_text(still)}"


def longest_text(still: Standstill) -> str:
    """The longest of such steps, and for whom it took so long; where it is the only one, that is all of them."""
    who = "" if still.rank is None else f", for rank {still.rank}"
    return f"{'the longest: ' if still.steps > 1 else ''}{_step_text(still)}{who}"


def still_text(still: Standstill) -> str:
    """For how long it stood still, and when: `stood still for 8.0 s at step 100`."""
    lost = f"stood still for {seconds_text(still.lost_s)}"
    if still.steps == 1:
        return f"{lost} at step {count(still.longest_step)}"
    return f"{lost} in {plural(still.steps, 'step')} (the longest: {_step_text(still)})"


def still_object(still: Standstill | None) -> dict[str, Any] | None:
    """The steps in which the job stood still, and for whom in the longest of them; null = it never did."""
    if still is None:
        return None
    return {
        "steps": still.steps,
        "lost_s": finite(still.lost_s, _S_DIGITS),
        "longest_step": still.longest_step,
        "longest_s": finite(still.longest_s, _S_DIGITS),
        "rank": still.rank,
    }


def seconds_text(seconds: float) -> str:
    """A time that is lost."""
    return f"{seconds:.1f} s" if seconds < TENTHS_BELOW_S else duration(seconds)


def _step_text(still: Standstill) -> str:
    return f"step {count(still.longest_step)} took {seconds_text(still.longest_s)}"
