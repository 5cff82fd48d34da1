"""Ranks missing from a collective, by the last enqueued work of each rank when NCCL timed out.

The rank that times out first has waited longest, so it arrived first. The culprit is the rank with the lowest enqueued
work, or the rank that wrote nothing while the others timed out.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from ddpwatch.core.logs.prefixes import DEFAULT_GROUP
from ddpwatch.core.logs.rank_attribution import is_symptom
from ddpwatch.core.logs.verdict import Verdict, evidence_of
from ddpwatch.core.units import duration_text, ranks_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ddpwatch.core.logs.rank_attribution import AttributedLines, Entry
    from ddpwatch.core.logs.verdict import Evidence

DIFFERENT_PATHS: Final = "they took different code paths in the script"
NETWORK_OR_SIZES: Final = "the network between them failed, or they called it with different sizes"
_PROGRESS_KINDS: Final = ("nccl-progress", "dump-signal", "nccl-ras")


class Progress(NamedTuple):
    """Last enqueued work of each rank of a process group."""

    group: str
    enqueued: dict[int, int]
    """Rank -> number of its last enqueued work."""
    stuck_at: int | None
    """The first work that a rank timed out on."""
    entries: list[Entry]
    """The lines these numbers are from, one for each rank."""

    @property
    def lowest(self) -> tuple[int, ...]:
        """Ranks with the lowest enqueued work; empty if all are equal."""
        least = min(self.enqueued.values())
        behind = tuple(sorted(rank for rank, work in self.enqueued.items() if work == least))
        return behind if len(behind) < len(self.enqueued) else ()

    @property
    def proves(self) -> bool:
        """Whether the lowest ranks had not enqueued the work that the others timed out on."""
        return bool(self.lowest) and self.stuck_at is not None and min(self.enqueued.values()) < self.stuck_at

    @property
    def gap(self) -> int:
        """Difference between the highest and the lowest enqueued work."""
        return max(self.enqueued.values()) - min(self.enqueued.values())


def by_progress(case: AttributedLines) -> Verdict | None:
    """Name the ranks that were behind or silent when NCCL timed out; None if nothing timed out."""
    found = sorted(_progress(case), key=lambda each: (each.proves, each.gap, each.group == DEFAULT_GROUP), reverse=True)
    best = found[0] if found else None
    if best is not None and (best.proves or best.group == "RAS") and best.lowest:
        return _behind(case, best, certain=len(best.lowest) * 2 <= len(best.enqueued))
    waited = _timed_out(case)
    if not waited:
        return None
    silent = ranks_without_lines(case, [best] if best else [])
    if silent:
        return _never_came(case, waited, silent)
    if best is not None and best.lowest:
        return _behind(case, best, certain=False)
    return _all_there(case, waited)


def _progress(case: AttributedLines) -> list[Progress]:
    groups: dict[str, list[Entry]] = {}
    for entry in case.of(*_PROGRESS_KINDS):
        name = "RAS" if entry.mark.kind == "nccl-ras" else entry.mark.group
        groups.setdefault(name, []).append(entry)
    found = []
    for name, entries in groups.items():
        # Some versions also log progress periodically while all is well.
        failing = any(entry.mark.severity != "info" for entry in entries) or name == "RAS"
        latest: dict[int, tuple[int, Entry]] = {}
        for entry in entries:
            work = _work(entry)
            if entry.rank is not None and work is not None and work >= latest.get(entry.rank, (-1, entry))[0]:
                latest[entry.rank] = (work, entry)
        if failing and len(latest) > 1:
            waits = [seq for entry in entries if (seq := entry.mark.number("seq")) is not None]
            enqueued = {rank: work for rank, (work, _) in latest.items()}
            ordered = [entry for _, entry in sorted(latest.values(), key=lambda pair: pair[0])]
            found.append(Progress(name, enqueued, min(waits, default=None), ordered))
    return found


def _work(entry: Entry) -> int | None:
    if entry.mark.kind == "nccl-ras":
        return entry.mark.number("launched") or 0
    return entry.mark.number("enqueued")


def _timed_out(case: AttributedLines) -> dict[int, Entry]:
    """Rank -> the line that names the work it timed out on."""
    waited: dict[int, Entry] = {}
    for entry in case.of("nccl-timeout", "nccl-progress", "desync-timeout"):
        if entry.rank is not None and "seq" in entry.mark.fields:
            waited.setdefault(entry.rank, entry)
    return waited


def ranks_without_lines(case: AttributedLines, reported: Iterable[Progress] = ()) -> tuple[int, ...]:
    """Ranks that wrote nothing while most others reported symptoms; none if most are silent: their logs are missing."""
    ranks = case.ranks() | case.quiet
    world = set(range(max(ranks) + 1)) if ranks else set()
    seen = {entry.rank for entry in case.entries if is_symptom(entry.mark)}
    seen |= {rank for progress in reported for rank in progress.enqueued}
    silent = world - seen
    return tuple(sorted(silent)) if len(silent) * 2 < len(world) else ()


def _behind(case: AttributedLines, progress: Progress, *, certain: bool) -> Verdict:
    behind = progress.lowest
    least, most = min(progress.enqueued.values()), max(progress.enqueued.values())
    many = len(behind) > 1
    where = f" of {progress.group}" if progress.group not in {"", DEFAULT_GROUP, "RAS"} else ""
    text = (
        f"{ranks_text(behind).capitalize()} did not join: {'their' if many else 'its'} last collective{where} was "
        f"#{least}, while others had enqueued up to #{most}."
    )
    text += (
        f" The others waited for {'them' if many else 'it'} at #{progress.stuck_at}: look at what "
        f"{'they were' if many else 'it was'} doing, not at the rank that timed out first."
        if progress.proves
        else " It had enqueued what the others waited for, so the cause may also be the network or a mismatch."
    )
    timeouts = [entry for entry in case.of("nccl-timeout") if entry.rank not in behind]
    return Verdict(behind, "behind", text, case.secondary(behind), evidence_of(progress.entries, timeouts), certain)


def _never_came(case: AttributedLines, waited: dict[int, Entry], silent: tuple[int, ...]) -> Verdict:
    lines = list(waited.values())
    text = (
        f"{ranks_text(waited).capitalize()} timed out{_for_what(lines)}, and {ranks_text(silent)} logged nothing about "
        f"it: most likely {'they' if len(silent) > 1 else 'it'} never joined."
    )
    return Verdict(silent, "silent", text, case.secondary(silent), evidence_of(lines), certain=False)


def _all_there(case: AttributedLines, waited: dict[int, Entry]) -> Verdict:
    lines = list(waited.values())
    everybody = tuple(sorted(waited))
    works = {rank: entry.mark.number("seq") or 0 for rank, entry in waited.items()}
    evidence = evidence_of(lines)
    if len(waited) == 1:
        text = (
            f"{ranks_text(everybody).capitalize()} timed out{_for_what(lines)}, which names no rank. Pass the logs of "
            "all ranks: the one with the lowest last enqueued work did not join."
        )
        return Verdict((), "timeout", text, everybody, evidence)
    if len(set(works.values())) > 1:
        least = min(works.values())
        behind = tuple(rank for rank in everybody if works[rank] == least)
        text = (
            f"{ranks_text(behind).capitalize()} timed out at collective #{least}, the others at a later one up to "
            f"#{max(works.values())}: most likely {ranks_text(behind)} {'were' if len(behind) > 1 else 'was'} behind."
        )
        return Verdict(behind, "behind", text, case.secondary(behind), evidence)
    ops = {rank: entry.mark.word("op") for rank, entry in waited.items() if entry.mark.word("op")}
    if len(set(ops.values())) > 1:
        return _different_ops(case, ops, evidence)
    text = (
        f"{ranks_text(everybody).capitalize()} all timed out in the same collective{_for_what(lines)}: "
        f"{NETWORK_OR_SIZES}."
    )
    return Verdict((), "transport", text, everybody, evidence)


def _different_ops(case: AttributedLines, ops: dict[int, str], evidence: tuple[Evidence, ...]) -> Verdict:
    votes = Counter(ops.values()).most_common()
    odd = tuple(sorted(rank for rank, op in ops.items() if op != votes[0][0])) if votes[0][1] > votes[1][1] else ()
    each = "; ".join(f"{op} on {ranks_text(r for r, o in ops.items() if o == op)}" for op, _ in votes)
    text = f"The ranks called different collectives at the same sequence number: {each}; {DIFFERENT_PATHS}."
    return Verdict(odd, "mismatch", text, case.secondary(odd), evidence, certain=True)


def _for_what(lines: list[Entry]) -> str:
    mark = next((entry.mark for entry in lines if entry.mark.word("op")), lines[0].mark)
    seq, op, elapsed_ms = mark.number("seq"), mark.word("op"), mark.number("elapsed_ms")
    after = f" after {duration_text(elapsed_ms / 1000)}" if elapsed_ms else ""
    return f" at #{seq}{f' ({op})' if op else ''}{after}"
