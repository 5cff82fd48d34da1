"""Attribution of recognized log lines to ranks, by prefixes, file names, process ids and launcher reports."""

from __future__ import annotations

import re
import signal
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ddpwatch.core.logs.pattern import Mark

BLOCK_LINES: Final = 8
"""Max lines in a torchrun report between a rank's number and its exit code."""
MAX_RANKS: Final = 65_536
"""Numbers from this on are not taken for ranks."""
SYMPTOMS: Final = frozenset(
    {
        "nccl-timeout", "nccl-async-error", "watchdog-abort", "nccl-aborted", "dump-signal", "remote-error",
        "gloo-timeout", "gloo-closed", "barrier-reached", "barrier-timeout", "store-timeout", "store-gone",
        "store-unreachable", "nccl-error", "nccl-peer", "nccl-init", "heartbeat",
    }
)  # fmt: skip
"""Kinds of lines that a rank writes after it timed out waiting for another rank, or lost its connection to one."""
_NOT_WRITTEN_BY_A_RANK: Final = frozenset(
    {
        "torchrun-failure", "torchrun-closing", "torchrun-root", "torchrun-others", "torchrun-rank", "torchrun-report",
        "exit-code", "exit-signal", "spawn-child", "spawn-exit", "xid", "oom-killer", "cancelled", "scheduler-end",
        "launcher-signal",
    }
)  # fmt: skip
_OF_ONE_RANK: Final = re.compile(r"rank[_-]?(\d{1,5})(?!\d)[^/]*\Z|/attempt_\d+/(\d{1,5})/std(?:out|err)\.log\Z")

_NUMBER: Final = re.compile(r"(?<!\d)\d{1,5}(?!\d)", re.ASCII)


class Entry(NamedTuple):
    """A recognized line with its file, its line number and its rank."""

    source: str
    line: int
    mark: Mark
    rank: int | None
    """The rank in the line itself, or the one inferred from other lines; None = unknown."""
    sure: bool
    """Whether that is certainly a global rank."""


@dataclass
class AttributedLines:
    """All recognized lines of a job, with the exits and ranks derived from them."""

    entries: list[Entry] = field(default_factory=list)
    """Sorted by source and line."""
    exits: dict[int, Entry] = field(default_factory=dict)
    """Rank -> the line with its exit code."""
    first_failed: set[int] = field(default_factory=set)
    """Ranks that a launcher saw fail first, one for each host."""
    ranks_by_pid: dict[int, int] = field(default_factory=dict)
    """Process id -> rank, from launcher reports."""
    quiet: frozenset[int] = frozenset()
    """Ranks that have a log file in which no line was recognized."""

    def of(self, *kinds: str) -> list[Entry]:
        """Entries of these kinds."""
        return [entry for entry in self.entries if entry.mark.kind in kinds]

    def ranks(self) -> set[int]:
        """Every rank that an entry or an exit code belongs to."""
        return {entry.rank for entry in self.entries if entry.rank is not None} | set(self.exits)

    def with_symptoms(self) -> set[int]:
        """Ranks that wrote a symptom: a timeout, or a lost connection to another rank."""
        return {entry.rank for entry in self.entries if is_symptom(entry.mark) and entry.rank is not None}

    def secondary(self, culprits: Iterable[int] = ()) -> tuple[int, ...]:
        """Ranks with secondary failures: those with symptoms or an exit code of an error, without the culprits."""
        failed = {rank for rank in self.exits if self.exit_code(rank) != 0}
        return tuple(sorted((self.with_symptoms() | failed) - set(culprits)))

    def exit_code(self, rank: int) -> int | None:
        """Exit code of the rank's process; None if no launcher reported it."""
        return self.exits[rank].mark.number("exit_code") if rank in self.exits else None

    def had_symptom_before(self, entry: Entry) -> bool:
        """Whether the rank wrote a symptom earlier in the same file."""
        return entry.rank is not None and entry.line > self._first_symptoms.get((entry.source, entry.rank), entry.line)

    def outlived(self, entry: Entry) -> bool:
        """Whether the rank survived this line and timed out on a collective later. Files have no common
        order, but a rank that timed out was not ended by a line in another file.
        """
        waits = self._last_waits.get(entry.rank, {}) if entry.rank is not None else {}
        return any(source != entry.source or line > entry.line for source, line in waits.items())

    def was_ended(self, entry: Entry) -> bool:
        """Whether the launcher received a signal before this line was written, by the same file."""
        return entry.line > self._signals.get(entry.source, entry.line)

    @cached_property
    def _signals(self) -> dict[str, int]:
        return {entry.source: entry.line for entry in reversed(self.of("launcher-signal"))}

    @cached_property
    def _first_symptoms(self) -> dict[tuple[str, int | None], int]:
        return {
            (entry.source, entry.rank): entry.line for entry in reversed(self.entries) if entry.mark.kind in SYMPTOMS
        }

    @cached_property
    def _last_waits(self) -> dict[int | None, dict[str, int]]:
        """By rank and file, the line number of its last timeout."""
        found: dict[int | None, dict[str, int]] = {}
        for entry in self.of("nccl-timeout", "gloo-timeout"):
            found.setdefault(entry.rank, {})[entry.source] = entry.line
        return found


def is_error(mark: Mark) -> bool:
    """Whether the line ends a traceback, or reports an equivalent error, and was written by a rank."""
    return mark.severity == "error" and mark.kind not in _NOT_WRITTEN_BY_A_RANK


def is_symptom(mark: Mark) -> bool:
    """Whether the line's writer timed out waiting for another rank, or lost it."""
    return mark.kind in SYMPTOMS or mark.kind == "peer-error" or (mark.kind == "nccl-progress" and "seq" in mark.fields)


def attribute_lines(found: Iterable[tuple[str, int, Mark]], sources: Iterable[str] = ()) -> AttributedLines:
    """Sort the lines and attribute each to a rank. `sources` names all files that were read."""
    entries = [Entry(source, line, mark, _possible(mark.rank), mark.rank_sure) for source, line, mark in found]
    entries.sort(key=lambda entry: (entry.source, entry.line))
    case = AttributedLines(_with_ranks_of_files(_with_ranks_of_children(entries)))
    _read_reports(case)
    case.entries = [_of_process(entry, case.ranks_by_pid) for entry in case.entries]
    case.quiet = _quiet_ranks(case.entries, sources)
    _read_first_failures(case)
    return case


def _possible(rank: int | None) -> int | None:
    return rank if rank is not None and rank < MAX_RANKS else None


def _with_ranks_of_children(entries: Sequence[Entry]) -> list[Entry]:
    """Attribute exceptions that torch.multiprocessing forwards: its own exception, the child's number, the child's
    exception. Ranks are numbered as children are.
    """
    found: list[Entry] = []
    child: Entry | None = None
    for entry in entries:
        if entry.mark.kind == "spawn-child":
            child = entry
            if found and _announces(found[-1], entry):
                found.pop()
        elif child is not None and entry.source == child.source and entry.rank is None and is_error(entry.mark):
            found.append(entry._replace(rank=child.rank, sure=True))
            child = None
            continue
        found.append(entry)
    return found


def _announces(entry: Entry, child: Entry) -> bool:
    near = entry.source == child.source and child.line - entry.line <= BLOCK_LINES
    return near and entry.mark.word("exception").endswith("ProcessRaisedException")


def _with_ranks_of_files(entries: Sequence[Entry]) -> list[Entry]:
    """Attribute lines without a rank to the owner of the file, where each rank has its own file."""
    named = _writers_by_file(entries)
    owners = [next(iter(ranks)) for ranks in named.values() if len(ranks) == 1]
    one_each = len(owners) > 1 and len(set(owners)) == len(owners) and all(len(ranks) < 2 for ranks in named.values())
    of_file: dict[str, tuple[int, bool]] = {}
    for source, ranks in named.items():
        if one_each and ranks:
            of_file[source] = next(iter(ranks)), True
        elif not ranks and (match := _OF_ONE_RANK.search(source)):
            of_file[source] = int(match[1] or match[2]), False
    return [
        entry._replace(rank=of_file[entry.source][0], sure=of_file[entry.source][1])
        if entry.rank is None and entry.source in of_file and entry.mark.kind not in _NOT_WRITTEN_BY_A_RANK
        else entry
        for entry in entries
    ]


def _quiet_ranks(entries: Sequence[Entry], sources: Iterable[str]) -> frozenset[int]:
    """Ranks of files without a recognized line. The rank is the number in the file's name, if at least two other files
    have their rank at the same place.
    """
    of_file = _writers_by_file(entries)
    places: Counter[tuple[str, str]] = Counter()
    for source, ranks in of_file.items():
        if len(ranks) == 1:
            places.update(place for place, number in _numbers(source) if number in ranks)
    candidates = (pair for source in sources if source not in of_file for pair in _numbers(source))
    return frozenset(number for place, number in candidates if places[place] > 1 and number < MAX_RANKS)


def _writers_by_file(entries: Sequence[Entry]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {entry.source: set() for entry in entries}
    for entry in entries:
        if entry.rank is not None and entry.mark.kind not in _NOT_WRITTEN_BY_A_RANK:
            found[entry.source].add(entry.rank)
    return found


def _numbers(source: str) -> Iterator[tuple[tuple[str, str], int]]:
    """Each number in a file name, with the text before and after it as the key of its place."""
    for found in _NUMBER.finditer(source):
        yield (source[: found.start()], source[found.end() :]), int(found[0])


def _read_reports(case: AttributedLines) -> None:
    """Read exit codes, first failures and process ids from torchrun's reports."""
    block: Entry | None = None
    in_root = False
    for entry in case.entries:
        kind = entry.mark.kind
        if kind in {"torchrun-root", "torchrun-others"}:
            in_root = kind == "torchrun-root"
        elif kind == "torchrun-rank":
            block = entry
        elif kind == "exit-code" and block is not None and block.rank is not None:
            if entry.source == block.source and entry.line - block.line <= BLOCK_LINES:
                case.exits[block.rank] = entry._replace(rank=block.rank, sure=True)
                if (pid := entry.mark.number("pid")) is not None:
                    case.ranks_by_pid[pid] = block.rank
                if in_root:
                    case.first_failed.add(block.rank)
            block = None


def _of_process(entry: Entry, ranks_by_pid: dict[int, int]) -> Entry:
    if entry.mark.kind not in _NOT_WRITTEN_BY_A_RANK:
        return entry
    if (rank := ranks_by_pid.get(entry.mark.number("pid") or -1)) is not None:
        return entry._replace(rank=rank, sure=True)
    if entry.mark.kind == "torchrun-failure":
        return entry._replace(rank=entry.mark.number("local_rank"), sure=False)
    return entry


def _read_first_failures(case: AttributedLines) -> None:
    """Read the failures that torchrun logs before its report, for logs that end there, and the first failed child
    that torch.multiprocessing reports.
    """
    for kind in ("torchrun-failure", "spawn-child", "spawn-exit"):
        for entry in case.of(kind):
            if entry.rank is None:
                continue
            case.first_failed.add(entry.rank)
            if kind != "spawn-child":
                case.exits.setdefault(entry.rank, entry._replace(mark=_with_exit_code(entry.mark)))


def _with_exit_code(mark: Mark) -> Mark:
    """Add the exit code -N for a child that signal N ended, as other launchers report it."""
    number = mark.number("signal_number")
    if (name := mark.word("signal")) in signal.Signals.__members__:
        number = signal.Signals[name].value
    return mark if number is None else msgspec.structs.replace(mark, fields=mark.fields | {"exit_code": -number})
