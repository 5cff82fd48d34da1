"""All recognised lines of some logs, each with the rank it belongs to, as far as the lines together tell."""

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
"""A torchrun report tells a rank and, at most so many lines further on, how it ended."""
MOST_RANKS: Final = 65_536
"""Beyond, a number in a log is no rank."""
SYMPTOMS: Final = frozenset(
    {
        "nccl-timeout", "nccl-async-error", "watchdog-abort", "nccl-aborted", "dump-signal", "remote-error",
        "gloo-timeout", "gloo-closed", "barrier-reached", "barrier-timeout", "store-timeout", "store-gone",
        "store-unreachable", "nccl-error", "nccl-peer", "nccl-init", "heartbeat",
    }
)  # fmt: skip
"""What a rank writes when it has waited for another in vain, or has lost it."""
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
    """A recognised line and where it stands."""

    source: str
    line: int
    mark: Mark
    rank: int | None
    """The mark's own, or what the other lines tell about it."""
    sure: bool
    """Whether that is a global rank beyond doubt."""


@dataclass
class Case:
    """What is known of the ranks."""

    entries: list[Entry] = field(default_factory=list)
    """By source and line."""
    exits: dict[int, Entry] = field(default_factory=dict)
    """Rank -> the line with its exit code."""
    first_failed: set[int] = field(default_factory=set)
    """Those that a launcher saw end first, one for each host."""
    ranks_by_pid: dict[int, int] = field(default_factory=dict)
    """The ranks whose process ids a launcher tells."""
    quiet: frozenset[int] = frozenset()
    """Ranks that have a file as the others do, in which nothing is recognised."""

    def of(self, *kinds: str) -> list[Entry]:
        """The lines of these kinds."""
        return [entry for entry in self.entries if entry.mark.kind in kinds]

    def ranks(self) -> set[int]:
        """Every rank that is written about."""
        return {entry.rank for entry in self.entries if entry.rank is not None} | set(self.exits)

    def complainers(self) -> set[int]:
        """Ranks that wrote of having waited in vain, or of having lost another."""
        return {entry.rank for entry in self.entries if is_symptom(entry.mark) and entry.rank is not None}

    def sufferers(self) -> set[int]:
        """Those, and whom the launcher or their own watchdog ended."""
        return self.complainers() | {rank for rank in self.exits if self.exit_code(rank) != 0}

    def exit_code(self, rank: int) -> int | None:
        """How the rank's process ended, if a launcher has told."""
        return self.exits[rank].mark.number("exit_code") if rank in self.exits else None

    def suffered_before(self, entry: Entry) -> bool:
        """Whether the same rank had waited in vain before it wrote this line, as far as that is in the same file."""
        return entry.rank is not None and entry.line > self._first_symptoms.get((entry.source, entry.rank), entry.line)

    def outlived(self, entry: Entry) -> bool:
        """Whether the rank went on after it wrote this line, and later waited in vain for another. Files have no common
        order; but one that has waited in vain was not ended by what it wrote elsewhere.
        """
        waits = self._last_waits.get(entry.rank, {}) if entry.rank is not None else {}
        return any(source != entry.source or line > entry.line for source, line in waits.items())

    def was_ended(self, entry: Entry) -> bool:
        """Whether the launcher had been told to end when this line was written, as far as that is in the same file."""
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
        """By rank and file, the last line that tells of it."""
        found: dict[int | None, dict[str, int]] = {}
        for entry in self.of("nccl-timeout", "gloo-timeout"):
            found.setdefault(entry.rank, {})[entry.source] = entry.line
        return found


def is_error(mark: Mark) -> bool:
    """Whether the line is the last of a traceback, or says what one would."""
    return mark.severity == "error" and mark.kind not in _NOT_WRITTEN_BY_A_RANK


def is_symptom(mark: Mark) -> bool:
    """Whether whoever wrote the line was waiting for somebody else, or has lost him."""
    return mark.kind in SYMPTOMS or mark.kind == "peer-error" or (mark.kind == "nccl-progress" and "seq" in mark.fields)


def case_of(found: Iterable[tuple[str, int, Mark]], sources: Iterable[str] = ()) -> Case:
    """Put the lines in order and find out whose they are. Of all files that were read, `sources` has the names."""
    entries = [Entry(source, line, mark, _possible(mark.rank), mark.rank_sure) for source, line, mark in found]
    entries.sort(key=lambda entry: (entry.source, entry.line))
    case = Case(_with_ranks_of_files(_with_ranks_of_children(entries)))
    case.ranks_by_pid = _read_reports(case)
    case.entries = [_of_process(entry, case.ranks_by_pid) for entry in case.entries]
    case.quiet = _quiet_ranks(case.entries, sources)
    _read_failures(case)
    _read_children(case)
    return case


def _possible(rank: int | None) -> int | None:
    return rank if rank is not None and rank < MOST_RANKS else None


def _with_ranks_of_children(entries: Sequence[Entry]) -> list[Entry]:
    """What torch.multiprocessing passes on: an exception of its own, the number of the child, and that one's exception.
    Ranks are numbered as children are.
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
    """Lines that name nobody belong to the rank whose file it is, where each rank has its own."""
    named: dict[str, set[int]] = {entry.source: set() for entry in entries}
    for entry in entries:
        if entry.rank is not None and entry.mark.kind not in _NOT_WRITTEN_BY_A_RANK:
            named[entry.source].add(entry.rank)
    owners = [next(iter(ranks)) for ranks in named.values() if len(ranks) == 1]
    one_each = len(owners) > 1 and len(set(owners)) == len(owners) and all(len(ranks) < 2 for ranks in named.values())
    of_file: dict[str, tuple[int, bool]] = {}
    for source, ranks in named.items():
        if one_each and ranks:
            of_file[source] = next(iter(ranks)), True
        elif not ranks and (told := _OF_ONE_RANK.search(source)):
            of_file[source] = int(told[1] or told[2]), False
    return [
        entry._replace(rank=of_file[entry.source][0], sure=of_file[entry.source][1])
        if entry.rank is None and entry.source in of_file and entry.mark.kind not in _NOT_WRITTEN_BY_A_RANK
        else entry
        for entry in entries
    ]


def _quiet_ranks(entries: Sequence[Entry], sources: Iterable[str]) -> frozenset[int]:
    """By the names of the files of which nothing was recognised, where those of two others have their ranks in the same
    place.
    """
    of_file: dict[str, set[int]] = {}
    for entry in entries:
        ranks = of_file.setdefault(entry.source, set())
        if entry.rank is not None and entry.mark.kind not in _NOT_WRITTEN_BY_A_RANK:
            ranks.add(entry.rank)
    places: Counter[tuple[str, str]] = Counter()
    for source, ranks in of_file.items():
        if len(ranks) == 1:
            places.update(place for place, number in _numbers(source) if number in ranks)
    told = (pair for source in sources if source not in of_file for pair in _numbers(source))
    return frozenset(number for place, number in told if places[place] > 1 and number < MOST_RANKS)


def _numbers(source: str) -> Iterator[tuple[tuple[str, str], int]]:
    """Each number in a name, with what is before and after it."""
    for found in _NUMBER.finditer(source):
        yield (source[: found.start()], source[found.end() :]), int(found[0])


def _read_reports(case: Case) -> dict[int, int]:
    """Read the blocks of torchrun's reports into the case; the ranks by process id."""
    ranks_by_pid: dict[int, int] = {}
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
                    ranks_by_pid[pid] = block.rank
                if in_root:
                    case.first_failed.add(block.rank)
            block = None
    return ranks_by_pid


def _of_process(entry: Entry, ranks_by_pid: dict[int, int]) -> Entry:
    if entry.mark.kind not in _NOT_WRITTEN_BY_A_RANK:
        return entry
    if (rank := ranks_by_pid.get(entry.mark.number("pid") or -1)) is not None:
        return entry._replace(rank=rank, sure=True)
    if entry.mark.kind == "torchrun-failure":
        return entry._replace(rank=entry.mark.number("local_rank"), sure=False)
    return entry


def _read_failures(case: Case) -> None:
    """What torchrun says before its report, for logs that end there."""
    for entry in case.of("torchrun-failure"):
        if entry.rank is not None:
            case.exits.setdefault(entry.rank, entry)
            case.first_failed.add(entry.rank)


def _read_children(case: Case) -> None:
    """What torch.multiprocessing says of the child that it saw end first."""
    for entry in case.of("spawn-child", "spawn-exit"):
        if entry.rank is None:
            continue
        case.first_failed.add(entry.rank)
        if entry.mark.kind == "spawn-exit":
            case.exits.setdefault(entry.rank, entry._replace(mark=_with_exit_code(entry.mark)))


def _with_exit_code(mark: Mark) -> Mark:
    """A signal as the code that other launchers tell."""
    number = mark.number("signal_number")
    if (name := mark.word("signal")) in signal.Signals.__members__:
        number = signal.Signals[name].value
    return mark if number is None else msgspec.structs.replace(mark, fields=mark.fields | {"exit_code": -number})
