"""The screens before there is a run to show: waiting for one, and choosing among several.

The list of runs, as a table.

Runs on this host as rows of a list.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.core.units import duration, plural
from ddpwatch.sources.runs import alive_ranks
from ddpwatch.view.cells import Cell, Level, columns_of, fit, line_columns, pad
from ddpwatch.view.layout import capped, paragraph, wrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.rundir import RunFile
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
    table = [("ID", "NAME", "JOB", "ATTEMPT", "RANKS", "HOST", "AGE"), *(_run_texts(run) for run in runs)]
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


def _run_texts(run: RunRow) -> tuple[str, ...]:
    return (
        run.id[:8],
        sanitize(run.name, NAME_CHARS),
        sanitize(run.job, JOB_CHARS),
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
    return sanitize(run.host, NAME_CHARS) + (f" +{run.hosts - 1}" if run.hosts > 1 else "")


MAX_BLOCK_COLUMNS: Final = 72
MIN_NAME_COLUMNS: Final = 12
MAX_NAME_COLUMNS: Final = 60
PATH_CHARS: Final = 400
SELECTED: Final = "▌ "
SPINNER: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TURNS_PER_S: Final = 4
_KEY_COLUMNS: Final = 17
_SCRIPT: Final = (
    ("    ", "model = DistributedDataParallel(model)", Level.DIM),
    ("  + ", "import ddpwatch.agent", Level.STRONG),
    ("  + ", "ddpwatch.agent.install(model)", Level.STRONG),
)
_HINTS: Final = (
    ("ddpwatch demo", "in another terminal: a small training to look at"),
    ("ddpwatch doctor", "why a job that runs is not seen"),
    ("q", "quits"),
)


def waiting_lines(columns: int, rows: int, *, base: str, seconds: float) -> list[Line]:
    """What is being waited for and how to make it come, in the middle of the window.

    `base` is the directory that is looked into; `seconds` is how long it has been so far, and turns the spinner.
    """
    block = min(columns, MAX_BLOCK_COLUMNS)
    turn = SPINNER[int(max(seconds, 0.0) * TURNS_PER_S) % len(SPINNER)]
    lines: list[Line] = [
        [Cell(f"{turn} ", Level.OK), Cell("Waiting for a training run", Level.STRONG), _since(seconds)],
        [],
        *(
            [Cell(line)]
            for line in wrap("No run of yours is on this host. Add two lines to the training script:", block)
        ),
        [],
        *_script(block),
        [],
        *([Cell(line)] for line in wrap("The dashboard attaches by itself as soon as its ranks start.", block)),
        [],
        *_looked_at(base, block),
        *_hints(block),
    ]
    return _centred(capped([fit(line, block) for line in lines], rows), columns, rows)


def picker_lines(runs: Sequence[RunRow], columns: int, rows: int, *, selected: int, back: str = "") -> list[Line]:
    """The live runs to choose from, the selected one marked and always in sight; `back` is the run one comes from."""
    selected = min(max(selected, 0), max(len(runs) - 1, 0))
    title: list[Line] = [[Cell(f"{plural(len(runs), 'live run')}. Which one?", Level.STRONG)], []]
    room = max(rows - len(title) - 2, 1)
    if len(runs) > room:
        # Two lines tell how many are above and below.
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
    return _centred(capped([fit(line, columns) for line in lines], rows), columns, rows, block)


def _since(seconds: float) -> Cell:
    return Cell(f"  {duration(seconds)}", Level.DIM)


def _looked_at(base: str, columns: int) -> list[Line]:
    """The path is wrapped and never cut: it is there to be copied."""
    path = sanitize(base, PATH_CHARS)
    lines: list[Line] = [[Cell("Looking into", Level.DIM)]]
    if columns_of(path) + 13 <= columns:
        lines[0].append(Cell(f" {path}"))
    else:
        lines += [[Cell(f"  {piece}")] for piece in wrap(path, columns - 2)]
    return [*lines, []]


def _script(columns: int) -> list[Line]:
    """Code is wrapped and never cut, either."""
    return [
        [Cell(lead if place == 0 else " " * len(lead), Level.OK), Cell(piece, level)]
        for lead, code, level in _SCRIPT
        for place, piece in enumerate(wrap(code, columns - len(lead)))
    ]


def _hints(columns: int) -> list[Line]:
    lines: list[Line] = []
    for key, text in _HINTS:
        lines += paragraph(text, columns, Level.DIM, lead=[Cell(pad(key, _KEY_COLUMNS), Level.KEY)])
    return lines


def _texts(run: RunRow) -> tuple[str, ...]:
    age = duration(run.age_s) + (f", restart {run.attempt}" if run.attempt else "")
    return sanitize(run.name, NAME_CHARS), sanitize(run.id[:8], NAME_CHARS), alive_text(run), age, hosts_text(run)


def _row(texts: Sequence[str], widths: Sequence[int], level: Level) -> Line:
    """As many of the texts as there are widths for."""
    return [Cell(pad(text, width) + "  ", level) for text, width in zip(texts, widths, strict=False)]


def _centred(lines: list[Line], columns: int, rows: int, block: int | None = None) -> list[Line]:
    """The lines as one block in the middle, a little above it: that is where the eye looks."""
    width = block or max((line_columns(line) for line in lines), default=0)
    left = max((columns - width) // 2, 0)
    above = max((rows - len(lines)) * 2 // 5, 0)
    return [*([] for _ in range(above)), *([Cell(" " * left), *line] if line and left else line for line in lines)]


def row_of(run: RunFile, now_unix_s: float) -> RunRow:
    """One run, as it is now."""
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
