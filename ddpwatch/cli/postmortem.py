"""`ddpwatch postmortem`: why a job ended, from its logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.logs.diagnose import LogDiagnosis
    from ddpwatch.core.logs.verdict import Verdict
    from ddpwatch.view.cells import Line

NOTHING_FOUND: Final = 1
NOTHING_TEXT: Final = (
    "nothing in these logs says why; give the logs of all ranks and of the launcher, with stderr, "
    "and the kernel's log (dmesg) if a process was killed"
)
_NAME_CHARS: Final = 300
MAX_FILES: Final = 100_000
"""Of a directory; the logs of a job are fewer."""


class Reading(NamedTuple):
    """What was read."""

    book: LogDiagnosis
    files: int
    lines: int
    troubles: list[str]


@click.command("postmortem")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def command(*, logs: Sequence[str], as_json: bool) -> None:
    """Say which rank ended a job, and why, from its logs.

    LOG is a file, a directory or a pattern such as 'logs/**/stderr.log': the output of the ranks and of torchrun, all
    of it in one file or a file for each rank; dmesg's helps, too. The exit code is 1 if the logs do not tell.
    """
    import json

    from ddpwatch.cli._terminal import show, terminal_size

    reading = _read(_files(logs))
    verdict = reading.book.verdict()
    if as_json:
        click.echo(json.dumps(_object(verdict, reading), indent=2))
    else:
        show(_lines(verdict, reading, terminal_size()[0]))
    if verdict is None:
        click.get_current_context().exit(NOTHING_FOUND)


def _files(logs: Sequence[str]) -> list[str]:
    """The files that are meant; refuses a name or pattern that matches none."""
    import glob
    import os

    from ddpwatch.errors import UsageError

    files: dict[str, None] = {}
    for name in logs:
        if os.path.isdir(name):  # noqa: PTH112
            found = _below(name)
            if not found:
                raise UsageError(f"{name} is a directory with no file in it; name the job's log files")
        else:
            # A name may hold characters that mean something in a pattern.
            found = [name] if os.path.lexists(name) else sorted(glob.glob(name, recursive=True))  # noqa: PTH207
        if not found:
            raise UsageError(f"there is no file {name}; name the job's log files, or a pattern in quotes")
        files |= dict.fromkeys(found)
    return [*files]


def _below(directory: str) -> list[str]:
    """The files in a directory and below it, as a launcher leaves them; links are not followed out of it."""
    import os
    from itertools import islice

    files = (f"{where}/{name}" for where, _, names in os.walk(directory) for name in sorted(names))
    return list(islice(files, MAX_FILES))


def _read(files: Sequence[str]) -> Reading:
    """Recognise every line; refuses if none of the files can be read."""
    import glob

    from ddpwatch.core.logs.diagnose import LogDiagnosis
    from ddpwatch.core.logs.parser import recognise
    from ddpwatch.core.state.sanitize import sanitize
    from ddpwatch.errors import UsageError
    from ddpwatch.sources.log_tail import Tail

    book = LogDiagnosis()
    troubles: list[str] = []
    lines = 0
    for name in files:
        tail = Tail([glob.escape(name)])
        ended = False
        while not ended:
            chunks = tail.poll()
            ended = tail.caught_up
            for chunk in (*chunks, *(tail.finish() if ended else ())):
                lines += len(chunk.texts)
                for number, text in enumerate(chunk.texts, chunk.first_line):
                    if (mark := recognise(text)) is not None:
                        book.add(name, number, mark)
        if not tail.troubles:
            book.read(name)
        troubles += [sanitize(trouble, _NAME_CHARS) for trouble in tail.troubles]
    if troubles and len(troubles) == len(files):
        raise UsageError(f"{troubles[0]}; name log files that can be read")
    return Reading(book, len(files) - len(troubles), lines, troubles)


def _object(verdict: Verdict | None, reading: Reading) -> dict[str, object]:
    import msgspec

    return {
        "verdict": msgspec.to_builtins(verdict) if verdict is not None else None,
        "files": reading.files,
        "lines": reading.lines,
        "recognised": reading.book.marks,
        "troubles": reading.troubles,
    }


def _lines(verdict: Verdict | None, reading: Reading, columns: int) -> list[Line]:
    import textwrap

    from ddpwatch.core.units import plural, ranks_text
    from ddpwatch.view.cells import Cell, Level, clip

    lines: list[Line] = []
    if verdict is None:
        lines += [[Cell(text, Level.WARN)] for text in textwrap.wrap(NOTHING_TEXT, max(40, columns))]
    else:
        lines += [[Cell(text, Level.STRONG)] for text in textwrap.wrap(verdict.text, max(40, columns))]
        if not verdict.certain:
            lines.append([Cell("This is the likeliest reading of the logs; they do not prove it.", Level.WARN)])
        for each in verdict.evidence:
            whose = f" ({ranks_text([each.rank])})" if each.rank is not None else ""
            lines += [[], [Cell(f"{each.source}:{each.line}{whose}", Level.DIM)]]
            lines.append([Cell(f"  {clip(each.text, max(40, columns - 2))}")])
        if verdict.victims:
            lines += [[], [Cell(f"Consequences: {ranks_text(verdict.victims)}.")]]
    read = f"{plural(reading.lines, 'line')} of {plural(reading.files, 'file')} read, {reading.book.marks} recognised."
    lines += [[], [Cell(read, Level.DIM)], *([Cell(trouble, Level.WARN)] for trouble in reading.troubles)]
    return lines
