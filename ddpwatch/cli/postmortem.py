"""`ddpwatch postmortem`: find in the logs of a job which rank ended it, and why."""

from __future__ import annotations

import glob
import json
import os
import textwrap
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from ddpwatch.cli._terminal import show, terminal_size
from ddpwatch.errors import UsageError
from ddpwatch.view.cells import Cell, Level, clip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.logs.diagnose import LogDiagnosis
    from ddpwatch.core.logs.verdict import Verdict
    from ddpwatch.view.cells import Line

NOTHING_FOUND: Final = 1
"""Exit code: no log explains the failure."""
NOTHING_TEXT: Final = (
    "these logs do not show why the job ended; add the logs of all ranks and of the launcher, including stderr, "
    "and the kernel log (dmesg) if a process was killed"
)
_NAME_CHARS: Final = 300
"""Max. length, in characters, of a note on a file that cannot be read."""
MAX_FILES: Final = 100_000
"""Max. number of files read from a directory; a job has fewer logs."""


class Reading(NamedTuple):
    """Diagnosis of the logs, with the number of files and lines read."""

    diagnosis: LogDiagnosis
    files: int
    lines: int
    errors: list[str]


@click.command("postmortem")
@click.argument("logs", metavar="LOG...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def command(*, logs: Sequence[str], as_json: bool) -> None:
    """Find in the logs of a job which rank failed first, and why.

    LOG is a file, a directory, or a quoted pattern such as 'logs/**/stderr.log': the output of the ranks and of
    torchrun, in one file or one per rank; the output of dmesg helps too. Exits with 1 if the logs do not show a cause.
    """
    from ddpwatch.core.logs.diagnose_failures import UNEXPLAINED_EXIT

    reading = _read(_files(logs))
    verdict = reading.diagnosis.verdict()
    if as_json:
        click.echo(json.dumps(_object(verdict, reading), indent=2))
    else:
        show(_lines(verdict, reading, terminal_size()[0]))
    if verdict is None or verdict.cause == UNEXPLAINED_EXIT:
        click.get_current_context().exit(NOTHING_FOUND)


def _files(logs: Sequence[str]) -> list[str]:
    """Files of the arguments, each once; refuses a name or pattern that matches none."""
    files: dict[str, None] = {}
    for name in logs:
        if os.path.isdir(name):  # noqa: PTH112
            # As a launcher leaves them; links to directories are not followed.
            below = (f"{where}/{file}" for where, _, names in os.walk(name) for file in sorted(names))
            found = list(islice(below, MAX_FILES))
            if not found:
                raise UsageError(f"{name} is an empty directory; name the job's log files")
        else:
            # A file's name may hold characters that are special in a pattern.
            found = [name] if os.path.lexists(name) else sorted(glob.glob(name, recursive=True))  # noqa: PTH207
        if not found:
            raise UsageError(f"no file matches {name}; name the job's log files, or a quoted pattern")
        files |= dict.fromkeys(found)
    return [*files]


def _read(files: Sequence[str]) -> Reading:
    """Read and match every line; refuses if none of the files can be read."""
    from ddpwatch.core.logs.diagnose import LogDiagnosis
    from ddpwatch.core.logs.parser import parse_line
    from ddpwatch.core.state.sanitize import sanitize
    from ddpwatch.sources.log_tail import Tail

    diagnosis = LogDiagnosis()
    errors: list[str] = []
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
                    if (mark := parse_line(text)) is not None:
                        diagnosis.add(name, number, mark)
        if not tail.errors:
            diagnosis.read(name)
        errors += [sanitize(error, _NAME_CHARS) for error in tail.errors]
    if errors and len(errors) == len(files):
        raise UsageError(f"{errors[0]}; name log files that can be read")
    return Reading(diagnosis, len(files) - len(errors), lines, errors)


def _object(verdict: Verdict | None, reading: Reading) -> dict[str, object]:
    import msgspec

    return {
        "verdict": msgspec.to_builtins(verdict) if verdict is not None else None,
        "files": reading.files,
        "lines": reading.lines,
        "recognised": reading.diagnosis.marks,
        "troubles": reading.errors,
    }


def _lines(verdict: Verdict | None, reading: Reading, columns: int) -> list[Line]:
    from ddpwatch.core.logs.diagnose_failures import UNEXPLAINED_EXIT
    from ddpwatch.core.units import plural, ranks_text

    lines: list[Line] = []
    if verdict is None:
        lines += [[Cell(text, Level.WARN)] for text in textwrap.wrap(NOTHING_TEXT, max(40, columns))]
    else:
        lines += [[Cell(text, Level.STRONG)] for text in textwrap.wrap(verdict.text, max(40, columns))]
        if not verdict.certain and verdict.cause != UNEXPLAINED_EXIT:
            lines.append([Cell("This is the most likely cause; the logs do not prove it.", Level.WARN)])
        for each in verdict.evidence:
            whose = f" ({ranks_text([each.rank])})" if each.rank is not None else ""
            lines += [[], [Cell(f"{each.source}:{each.line}{whose}", Level.DIM)]]
            lines.append([Cell(f"  {clip(each.text, max(40, columns - 2))}")])
        if verdict.victims:
            lines += [[], [Cell(f"Secondary failures: {ranks_text(verdict.victims)}.")]]
    read = f"Read {plural(reading.lines, 'line')} of {plural(reading.files, 'file')}"
    lines += [[], [Cell(f"{read}; recognized {reading.diagnosis.marks}.", Level.DIM)]]
    return lines + [[Cell(error, Level.WARN)] for error in reading.errors]
