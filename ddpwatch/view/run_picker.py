"""List of the runs on this host: as a table, as the screen to choose one from, and the screen while there is none."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.core.units import duration, duration_text, plural
from ddpwatch.sources.find_run import NO_RUN_CHECKS, alive_ranks
from ddpwatch.view.cells import Cell, Level, columns_of, fit, line_columns, pad
from ddpwatch.view.layout import capped, paragraph, wrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.rundir import RunFile
    from ddpwatch.view.cells import Line

JOB_CHARS: Final = 12
"""Max. length of a job's name, in characters: a scheduler's number fits, and the start of a launcher's id is unique."""
MAX_BLOCK_COLUMNS: Final = 72
"""Max. width of the text shown before a run is found, in terminal cells."""
# Bounds of the width of a run's name, in terminal cells.
MIN_NAME_COLUMNS: Final = 12
MAX_NAME_COLUMNS: Final = 60
PATH_CHARS: Final = 400
"""Max. length of a run directory's path, in characters."""
SELECTED: Final = "▌ "
SPINNER: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TURNS_PER_S: Final = 4
"""Frames of the spinner per second."""
_KEY_COLUMNS: Final = 17
"""Width of the commands before their hints, in terminal cells."""
_SCRIPT: Final = (
    ("    ", "model = DistributedDataParallel(model)", Level.DIM),
    ("  + ", "import ddpwatch.agent", Level.STRONG),
    ("  + ", "ddpwatch.agent.install(model)", Level.STRONG),
)
_HINTS: Final = (
    ("ddpwatch demo", "in another terminal: a small training run to watch"),
    ("ddpwatch doctor", "check what can be measured here, and why not"),
    ("q", "quit"),
)


@dataclass(frozen=True)
class RunRow:
    """One run of the list."""

    id: str
    name: str
    attempt: int
    world_size: int
    ranks_alive: int
    host: str
    """Host of the lowest rank."""
    hosts: int
    age_s: float
    job: str = ""
    """The scheduler's or launcher's name of the job; empty = none."""


def row_of(run: RunFile, now_unix_s: float) -> RunRow:
    """Row of a run, with its ranks counted now."""
    return RunRow(
        id=run.id,
        name=run.name,
        attempt=run.attempt,
        world_size=run.world_size,
        ranks_alive=len(alive_ranks(run)),
        host=min(run.endpoints, key=lambda endpoint: endpoint.rank).host,
        hosts=len({endpoint.host for endpoint in run.endpoints}),
        age_s=max(0.0, now_unix_s - run.started_unix_s),
        job=run.job,
    )


def runs_table(runs: Sequence[RunRow], columns: int) -> list[Line]:
    """Table with one line per run; without the column JOB if no run has one."""
    table = [("ID", "NAME", "JOB", "ATTEMPT", "RANKS", "HOST", "AGE"), *(_run_texts(run) for run in runs)]
    if not any(run.job for run in runs):
        table = [row[:2] + row[3:] for row in table]
    titles = table[0]
    widths = [max(columns_of(row[place]) for row in table) for place in range(len(titles))]
    return [fit(_row(row, widths, Level.DIM if row is titles else Level.PLAIN), columns) for row in table]


def runs_object(runs: Sequence[RunRow]) -> list[dict[str, Any]]:
    """The list as JSON objects."""
    return [{**asdict(run), "age_s": round(run.age_s, 1)} for run in runs]


def _run_texts(run: RunRow) -> tuple[str, ...]:
    return (
        run.id[:8],
        sanitize(run.name, NAME_CHARS),
        sanitize(run.job, JOB_CHARS),
        str(run.attempt),
        _alive_text(run),
        _hosts_text(run),
        duration(run.age_s),
    )


def _alive_text(run: RunRow) -> str:
    return f"{run.ranks_alive} of {run.world_size}" if run.ranks_alive < run.world_size else str(run.world_size)


def _hosts_text(run: RunRow) -> str:
    return sanitize(run.host, NAME_CHARS) + (f" +{run.hosts - 1}" if run.hosts > 1 else "")


def waiting_lines(columns: int, rows: int, *, places: Sequence[str], seconds: float) -> list[Line]:
    """Screen before a run is found: how to start one, and the `places` that are searched.

    `seconds` is the time waited so far, which also turns the spinner.
    """
    block = min(columns, MAX_BLOCK_COLUMNS)
    turn = SPINNER[int(max(seconds, 0.0) * TURNS_PER_S) % len(SPINNER)]
    waiting = [Cell(f"{turn} ", Level.OK), Cell("Waiting for a training run", Level.STRONG)]
    lines: list[Line] = [
        [*waiting, Cell(f"  {duration_text(seconds)}", Level.DIM)],
        [],
        *paragraph("No run found yet. To watch one, add two lines to the training script:", block),
        [],
        # Code and path are wrapped, never cut: they are there to be copied.
        *(line for lead, code, level in _SCRIPT for line in paragraph(code, block, level, lead=[Cell(lead, Level.OK)])),
        [],
        *paragraph("The dashboard attaches as soon as its ranks start.", block),
        [],
        *_run_directories(places, block),
        *paragraph("Is the job running, but not found? Check in this order:", block),
        *(line for text in NO_RUN_CHECKS for line in paragraph(text[3:], block, lead=[Cell(text[:3], Level.KEY)])),
        [],
    ]
    for key, text in _HINTS:
        lines += paragraph(text, block, Level.DIM, lead=[Cell(pad(key, _KEY_COLUMNS), Level.KEY)])
    return _centered(capped([fit(line, block) for line in lines], rows), columns, rows)


def picker_lines(runs: Sequence[RunRow], columns: int, rows: int, *, selected: int, back: str = "") -> list[Line]:
    """Screen to choose one of the live runs, scrolled to the selected one; `back` is the run shown before."""
    selected = min(max(selected, 0), max(len(runs) - 1, 0))
    title: list[Line] = [[Cell(f"{plural(len(runs), 'live run')}. Choose one:", Level.STRONG)], []]
    room = max(rows - len(title) - 2, 1)
    if len(runs) > room:
        # Two lines show how many are above and below.
        room = max(room - 1, 1)
    first = min(max(selected - room // 2, 0), max(len(runs) - room, 0))
    shown = list(enumerate(runs))[first : first + room]
    cells = [("NAME", "ID", "RANKS", "RUNNING FOR", "HOST"), *(_texts(run) for _, run in shown)]
    widths = [max(columns_of(row[place]) for row in cells) for place in range(len(cells[0]))]
    widths[0] = min(widths[0], MAX_NAME_COLUMNS)
    while len(widths) > 1 and len(SELECTED) + sum(widths[1:]) + 2 * len(widths) + MIN_NAME_COLUMNS > columns:
        widths.pop()
    widths[0] = min(widths[0], max(columns - len(SELECTED) - sum(widths[1:]) - 2 * len(widths), MIN_NAME_COLUMNS))
    lines: list[Line] = [*title, [Cell(" " * len(SELECTED)), *_row(cells[0], widths, Level.DIM)]]
    for (place, _), texts in zip(shown, cells[1:], strict=True):
        chosen = place == selected
        mark = Cell(SELECTED if chosen else " " * len(SELECTED), Level.KEY)
        lines.append([mark, *_row(texts, widths, Level.STRONG if chosen else Level.PLAIN)])
    if rest := len(runs) - first - len(shown):
        lines.append([Cell(f"  … {rest} more below", Level.DIM)])
    if first:
        lines.insert(len(title) + 1, [Cell(f"  … {first} more above", Level.DIM)])
    keys = [Cell("↑ ↓", Level.KEY), Cell(" choose   "), Cell("enter", Level.KEY), Cell(" attach   ")]
    keys += [Cell("q", Level.KEY), Cell(" quit")]
    if back:
        keys += [Cell("   "), Cell("esc", Level.KEY), Cell(f" back to {sanitize(back, NAME_CHARS)}")]
    lines += [[], fit(keys, columns)]
    block = max(line_columns(line) for line in lines)
    return _centered(capped([fit(line, columns) for line in lines], rows), columns, rows, block)


def _run_directories(places: Sequence[str], columns: int) -> list[Line]:
    paths = [sanitize(place, PATH_CHARS) for place in places]
    label = "Looking in "
    if max(map(columns_of, paths)) + len(label) <= columns:
        leads = [label, *[" " * len(label)] * (len(paths) - 1)]
        return [[Cell(lead, Level.DIM), Cell(path)] for lead, path in zip(leads, paths, strict=True)]
    return [[Cell(label, Level.DIM)], *([Cell(f"  {piece}")] for path in paths for piece in wrap(path, columns - 2))]


def _texts(run: RunRow) -> tuple[str, ...]:
    age = duration(run.age_s) + (f", restart {run.attempt}" if run.attempt else "")
    return sanitize(run.name, NAME_CHARS), sanitize(run.id[:8], NAME_CHARS), _alive_text(run), age, _hosts_text(run)


def _row(texts: Sequence[str], widths: Sequence[int], level: Level) -> Line:
    """Padded texts, as many as there are widths."""
    return [Cell(pad(text, width) + "  ", level) for text, width in zip(texts, widths, strict=False)]


def _centered(lines: list[Line], columns: int, rows: int, block: int | None = None) -> list[Line]:
    """Center the lines as one block, vertically a little above the middle."""
    width = block or max((line_columns(line) for line in lines), default=0)
    left = max((columns - width) // 2, 0)
    above = max((rows - len(lines)) * 2 // 5, 0)
    return [*([] for _ in range(above)), *([Cell(" " * left), *line] if line and left else line for line in lines)]
