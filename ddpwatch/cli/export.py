"""`ddpwatch export`: convert a recording to CSV, JSON or a Perfetto trace."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ddpwatch.cli._recordings import progress_bar, say_attempt, say_damage, select_attempt

if TYPE_CHECKING:
    from ddpwatch.outputs.export.step_range import Exported

SUFFIXES: Final = {"csv": ".csv", "json": ".json", "perfetto": ".perfetto.json"}


@click.command("export")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--to", "kind", type=click.Choice(list(SUFFIXES)), required=True, help="Output format.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="File to write; - is stdout, .gz is compressed.  [default: FILE with another suffix]",
)
@click.option("--attempt", type=int, metavar="N", help="Attempt of a restarted job, from 1.  [default: the last]")
@click.option("--steps", metavar="A-B", help="Only these steps: 100-200, 100-, -200, or one step.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def command(*, path: Path, kind: str, output: Path | None, attempt: int | None, steps: str | None, force: bool) -> None:
    """Convert a recording to a format that other programs read. All formats include values logged with agent.log.

    csv: one row per rank and step. Steps that not all ranks have finished, such as the last ones before a crash, are
    left out; their number is printed on stderr.

    json: one object with the run, its manifest, step statistics, ranks and alerts.

    perfetto: a trace for ui.perfetto.dev with one track per rank and its phases, counters for all-reduce and GPUs,
    alerts, and arrows from the last rank to the ranks that waited for it. Ranks are aligned by step, on the clock of
    the lowest rank.
    """
    from ddpwatch.outputs.atomic_files import STDOUT, atomic_output
    from ddpwatch.outputs.export.csv import write_csv
    from ddpwatch.outputs.export.json import write_json
    from ddpwatch.outputs.export.step_range import LAST_STEP, Exported, steps_of
    from ddpwatch.outputs.export.trace import write_trace
    from ddpwatch.recording.reader import Recording

    write = {"csv": write_csv, "json": write_json, "perfetto": write_trace}[kind]
    target = output or path.with_suffix(SUFFIXES[kind])
    span = steps_of(steps) if steps is not None else (0, LAST_STEP)
    with closing(Recording(path)) as recorded:
        run = select_attempt(recorded, attempt)
        # CSV is read twice: the header needs the columns of the whole recording.
        frames = recorded.frames(run) * (2 if kind == "csv" else 1)
        with progress_bar("exporting", frames) as progress, atomic_output(target, path, force=force) as file:
            exported = Exported(recorded, run, span, progress)
            write(exported, file)
        _note_written(exported, target if target != STDOUT else None, attempt)


def _note_written(exported: Exported, target: Path | None, attempt: int | None) -> None:
    """Print on stderr what was written and what was left out."""
    from ddpwatch.core.units import plural

    recorded = exported.recorded
    if target is not None:
        of = f"{plural(exported.count, 'step')} of {plural(exported.state.world_size, 'rank')}"
        click.echo(f"wrote {target}: {of}", err=True)
    if not exported.count:
        click.echo("no step was finished by all ranks", err=True)
    if exported.reader.skipped:
        why = "" if exported.unusual else ", or they include a pause, an evaluation, a skipped update or no GPU times"
        them = "it" if exported.reader.skipped == 1 else "them"
        click.echo(f"{plural(exported.reader.skipped, 'step')} left out: not all ranks finished {them}{why}", err=True)
    if exported.logged.left_out:
        reported = len(exported.logged.series)
        click.echo(
            f"{plural(exported.logged.left_out, 'logged name')} left out: only the first {reported} are exported",
            err=True,
        )
    say_damage(recorded, exported.attempt)
    say_attempt(recorded, attempt)
