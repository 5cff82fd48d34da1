"""Root cause of a failed job from its logs: rules tried in order, from the most to the least conclusive.

`LogDiagnosis` collects the recognized lines of all files, in any order. The rules here read what torch, the store and
gloo report themselves; the others are in `diagnose_failures` and `diagnose_missing`.
"""

from __future__ import annotations

import contextlib
import signal
from bisect import insort
from collections import Counter
from typing import TYPE_CHECKING, Final

from ddpwatch.core.logs.diagnose_failures import UNNAMED, by_failure
from ddpwatch.core.logs.diagnose_missing_ranks import (
    DIFFERENT_PATHS,
    NETWORK_OR_SIZES,
    by_progress,
    ranks_without_lines,
)
from ddpwatch.core.logs.rank_attribution import attribute_lines
from ddpwatch.core.logs.verdict import Verdict, evidence_of
from ddpwatch.core.state.sanitize import sanitize
from ddpwatch.core.units import ranks_text

if TYPE_CHECKING:
    from ddpwatch.core.logs.pattern import Mark
    from ddpwatch.core.logs.rank_attribution import AttributedLines, Entry

ENDS: Final = 8
"""Lines kept from either end of a file, for each kind and rank."""
MAX_KINDS: Final = 20_000
"""Max combinations of file, rank and kind that are kept; further lines are only counted."""
SOURCE_CHARS: Final = 300
"""Characters of a log file's name."""
_HOW: Final = {
    "never-joined": "never joined any collective",
    "not-joined": "did not join the collective that the others waited in",
    "stuck": "joined the collective but did not complete it",
}


def by_mismatch(case: AttributedLines) -> Verdict | None:
    """Ranks that called different collectives, by the check that torch does with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    lines = case.of("collective-mismatch")
    if not lines:
        return _by_size(case)
    votes = Counter(other for entry in lines if (other := entry.mark.number("other_rank")) is not None).most_common(2)
    odd: tuple[int, ...] = ()
    if votes and votes[0][1] > 1 and (len(votes) == 1 or votes[0][1] > votes[1][1]):
        odd = (votes[0][0],)
    found = "The ranks called different collectives"
    if odd:
        found = f"{ranks_text(odd).capitalize()} called a different collective than the others"
    text = f"{found}, as reported by torch: {DIFFERENT_PATHS}."
    return Verdict(odd, "mismatch", text, case.secondary(odd), evidence_of(lines), certain=True)


def _by_size(case: AttributedLines) -> Verdict | None:
    """Collectives of different sizes, by gloo's message before it aborts."""
    lines = case.of("gloo-mismatch")
    if not lines:
        return None
    where = sorted({entry.rank for entry in lines if entry.rank is not None})
    on = f" on {ranks_text(where)}" if where else ""
    text = (
        f"The ranks called different collectives: gloo{on} received data of an unexpected size and aborted the "
        "process. These logs do not show which rank took a different code path."
    )
    return Verdict((), "mismatch", text, case.secondary(), evidence_of(lines), certain=True)


def by_desync_report(case: AttributedLines) -> Verdict | None:
    """Ranks named by torch's desync report."""
    lines = case.of("desync-report")
    absent = [entry for entry in lines if entry.mark.word("detail") != "stuck"]
    chosen = absent or lines
    named = {rank for entry in chosen for rank in entry.mark.ranks()}
    waiting = {entry.rank for entry in case.of("desync-timeout", "nccl-timeout") if entry.rank is not None}
    if not named:
        return None
    culprits = tuple(sorted(named))
    if not absent and waiting <= named and len(named) > 1:
        text = (
            f"{ranks_text(named).capitalize()} all joined collective #{chosen[0].mark.number('seq')}, but none "
            f"completed it: {NETWORK_OR_SIZES}."
        )
        return Verdict((), "transport", text, culprits, evidence_of(lines))
    how = _HOW.get(chosen[0].mark.word("detail"), _HOW["not-joined"])
    seq = chosen[0].mark.number("next_seq") or chosen[0].mark.number("seq")
    text = f"{ranks_text(named).capitalize()} {how}{f' (#{seq})' if seq else ''}, according to torch's desync report."
    evidence = evidence_of(chosen, lines, case.of("desync-timeout"))
    return Verdict(culprits, "absent", text, case.secondary(culprits), evidence, certain=True)


def by_barrier(case: AttributedLines) -> Verdict | None:
    """Ranks named by a monitored barrier."""
    lines = case.of("monitored-barrier")
    culprits = tuple(sorted({rank for entry in lines for rank in entry.mark.ranks()}))
    if not culprits:
        return None
    timeout_ms = lines[0].mark.number("timeout_ms") or 0
    text = f"{ranks_text(culprits).capitalize()} did not reach a monitored barrier within {timeout_ms / 1000:g} s."
    return Verdict(culprits, "absent", text, case.secondary(culprits), evidence_of(lines), certain=True)


def by_heartbeat(case: AttributedLines) -> Verdict | None:
    """Ranks whose NCCL watchdog hung, because something holds CUDA, NCCL or the GIL."""
    held = case.of("gil-held")
    lines = held or [entry for entry in case.of("heartbeat") if entry.mark.word("detail") == "stuck"]
    if not lines:
        return None
    culprits = tuple(sorted({entry.rank for entry in lines if entry.rank is not None}))
    name = ranks_text(culprits).capitalize() if culprits else UNNAMED
    what = "a thread holds the GIL" if held else "a CUDA or NCCL call does not return"
    text = f"{name}: the NCCL watchdog itself hung; most likely {what}."
    return Verdict(culprits, "watchdog-stuck", text, case.secondary(culprits), evidence_of(lines))


def by_what_is_left(case: AttributedLines) -> Verdict | None:
    """Fallback: symptoms that name no rank, with what they mean and what they leave open."""
    for cause, kinds, text in _LEFT:
        lines = case.of(*kinds)
        if lines:
            message = text.format(_peers(lines) or _signals(lines))
            silent = ranks_without_lines(case) if cause in {"peer-died", "gloo-timeout"} else ()
            if cause == "gloo-timeout" and not silent:
                silent = _rank_left_running(case)
            if silent:
                message += (
                    f" Most likely it was {ranks_text(silent)}: all others report the failure."
                    if len(silent) == 1
                    else f" {ranks_text(silent).capitalize()} report no failure."
                )
            # A rank without a symptom may be the root cause, even if the launcher ended it with the others.
            return Verdict((), cause, message, tuple(sorted(case.with_symptoms())), evidence_of(lines))
    return _aborted(case) or _terminated(case)


def _rank_left_running(case: AttributedLines) -> tuple[int, ...]:
    """The only rank without a symptom, if the launcher had to terminate it; of two ranks it is half."""
    silent = case.ranks() - case.with_symptoms()
    terminated = {rank for rank in silent if case.exit_code(rank) in (-signal.SIGTERM, 128 + signal.SIGTERM)}
    return tuple(terminated) if len(silent) == 1 else ()


def _aborted(case: AttributedLines) -> Verdict | None:
    ended = [entry for entry in case.exits.values() if case.exit_code(entry.rank or 0) in (-6, 134)]
    if not ended:
        return None
    first = sorted(entry.rank for entry in ended if entry.rank in case.first_failed)
    subject = f"{ranks_text(first).capitalize()} exited first: it" if len(first) == 1 else "A process"
    text = (
        f"{subject} was aborted by its runtime (SIGABRT). NCCL's watchdog does that after a timeout, gloo when ranks "
        "call different collectives: usually a secondary failure. Its own output is not in these logs; pass the logs "
        "of all ranks."
    )
    return Verdict((), "aborted", text, case.secondary(), evidence_of(ended))


def _terminated(case: AttributedLines) -> Verdict | None:
    lines = case.of("cancelled", "torchrun-closing")
    if not lines:
        return None
    text = "The job was terminated from outside, by its scheduler or its launcher; these logs do not show why."
    return Verdict((), "terminated", text, tuple(sorted(case.with_symptoms())), evidence_of(lines))


_LEFT: Final[tuple[tuple[str, tuple[str, ...], str], ...]] = (
    ("scheduler", ("scheduler-end",), "The scheduler ended the job: time limit, preemption or node failure."),
    ("interrupted", ("interrupt",), "The job was interrupted (Ctrl-C, SIGINT)."),
    ("gloo-timeout", ("gloo-timeout", "barrier-timeout", "barrier-reached"), (
        "A gloo collective timed out. Its messages name no rank: the ranks that report it only waited."
    )),
    ("terminated", ("launcher-signal",), (
        "The launcher was terminated from outside{} and terminated the ranks: by a scheduler (cancelled, out of time, "
        "preempted) or a person. Later errors of the ranks are secondary failures."
    )),
    ("peer-died", ("gloo-closed", "peer-error"), (
        "A rank exited, and the others lost their connections to it; these logs do not show which one. Its exit code "
        "is in the launcher's log."
    )),
    ("store-gone", ("store-gone",), (
        "The connection to the store was lost: rank 0 exited, or its host is down. Its log shows why."
    )),
    ("nccl-error", ("nccl-async-error", "nccl-error", "nccl-peer", "nccl-warn"), (
        "NCCL reports a network or GPU error{}; these logs do not show the root cause. Set NCCL_DEBUG=WARN and look at "
        "the host it names."
    )),
    ("rendezvous", ("store-join", "store-unreachable"), (
        "The rendezvous failed: some ranks never reached the store. Check that all of them were started, and that they "
        "can reach the address of rank 0."
    )),
    ("timeout", ("nccl-timeout", "nccl-aborted", "watchdog-abort", "dump-signal", "remote-error", "heartbeat"), (
        "An NCCL collective timed out, and these logs do not show the progress of each rank. Pass the logs of all "
        "ranks."
    )),
    ("rendezvous", ("store-timeout", "nccl-init"), (
        "A rank timed out waiting at the store for a key that another rank never set: that one never joined, or had "
        "exited."
    )),
)  # fmt: skip
"""Cause, kinds of lines that show it, and text; from the most to the least specific."""


def _peers(lines: list[Entry]) -> str:
    hosts = sorted({entry.mark.word("peer_host") for entry in lines} - {""})
    return f" ({', '.join(hosts[:4])})" if hosts else ""


def _signals(lines: list[Entry]) -> str:
    signals = [word for entry in lines if (word := entry.mark.word("signal"))]
    if not signals:
        return ""
    with contextlib.suppress(ValueError):
        return f" by {signal.Signals(int(signals[0])).name}"
    return f" by {signals[0]}"


_RULES: Final = (
    by_mismatch, by_failure, by_desync_report, by_barrier, by_progress, by_heartbeat, by_what_is_left,
)  # fmt: skip
"""Rules in order: those that explain the other findings come first."""


class LogDiagnosis:
    """Bounded store of recognized lines, and the verdict on them."""

    def __init__(self) -> None:
        self.marks = 0
        """Number of marks added, kept or not."""
        self._sources: set[str] = set()
        self._kept: dict[tuple[str, str, int | None, str], list[tuple[int, int, Mark]]] = {}

    def read(self, source: str) -> None:
        """Register a file that was read, even if no line of it was recognized."""
        if len(self._sources) < MAX_KINDS:
            self._sources.add(source)

    def add(self, source: str, line: int, mark: Mark) -> None:
        """Add one recognized line."""
        self.marks += 1
        key = (source, mark.kind, mark.rank, mark.group)
        if key not in self._kept and len(self._kept) >= MAX_KINDS:
            return
        kept = self._kept.setdefault(key, [])
        # The count breaks ties between equal line numbers, because marks cannot be compared.
        insort(kept, (line, self.marks, mark))
        if len(kept) > 2 * ENDS:
            del kept[ENDS]

    def verdict(self) -> Verdict | None:
        """Root cause with its ranks; None if no line reports a failure."""
        found = (
            (sanitize(source, SOURCE_CHARS), line, mark)
            for (source, *_), kept in self._kept.items()
            for line, _, mark in kept
        )
        case = attribute_lines(found, [sanitize(source, SOURCE_CHARS) for source in self._sources])
        return next((verdict for rule in _RULES if (verdict := rule(case)) is not None), None)
