"""The list of runs, as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from ddpwatch.core.numbers import duration
from ddpwatch.core.text import NAME_CHARS, tame
from ddpwatch.view.cells import Cell, Level, columns_of, fit, pad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.view.cells import Line


JOB_CHARS: Final = 12
"""Numbers of schedulers fit; what launchers make up by themselves is longer, and its beginning tells it apart."""


@dataclass(frozen=True)
class RunRow:
    """One run on the list."""

    id: str
    name: str
    attempt: int
    world_size: int
    ranks_alive: int
    host: str
    """The host of the lowest rank."""
    hosts: int
    age_s: float
    job: str = ""
    """What its scheduler or launcher calls the job; empty = it does not."""


def runs_table(runs: Sequence[RunRow], columns: int) -> list[Line]:
    """A heading and one line a run. Where no scheduler or launcher has named a job, there is no column for it."""
    table = [("ID", "NAME", "JOB", "ATTEMPT", "RANKS", "HOST", "AGE"), *(_texts(run) for run in runs)]
    if not any(run.job for run in runs):
        table = [row[:2] + row[3:] for row in table]
    titles = table[0]
    widths = [max(columns_of(row[place]) for row in table) for place in range(len(titles))]
    lines: list[Line] = []
    for row in table:
        level = Level.DIM if row is titles else Level.PLAIN
        lines.append(
            fit([Cell(pad(text, width) + "  ", level) for text, width in zip(row, widths, strict=True)], columns)
        )
    return lines


def runs_object(runs: Sequence[RunRow]) -> list[dict[str, Any]]:
    """The list as plain values, ready for JSON."""
    return [{**asdict(run), "age_s": round(run.age_s, 1)} for run in runs]


def _texts(run: RunRow) -> tuple[str, ...]:
    return (
        run.id[:8],
        tame(run.name, NAME_CHARS),
        tame(run.job, JOB_CHARS),
        str(run.attempt),
        alive_text(run),
        hosts_text(run),
        duration(run.age_s),
    )


def alive_text(run: RunRow) -> str:
    """How many ranks there are, and how many of them live where some do not."""
    return f"{run.ranks_alive} of {run.world_size}" if run.ranks_alive < run.world_size else str(run.world_size)


def hosts_text(run: RunRow) -> str:
    """The first host, and how many more there are."""
    return tame(run.host, NAME_CHARS) + (f" +{run.hosts - 1}" if run.hosts > 1 else "")
