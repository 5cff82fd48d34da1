"""`ddpwatch report`: write a recording as one HTML page."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpwatch.cli._recordings import baseline_of, baseline_option, progress_bar, say_attempt, say_damage, select_attempt
from ddpwatch.errors import UsageError
from ddpwatch.outputs.atomic_files import STDOUT, atomic_output

if TYPE_CHECKING:
    from ddpwatch.core.metrics.scaling import Profile
    from ddpwatch.outputs.report.data import Report, Scaling


@click.command("report")
@click.argument("file", metavar="FILE")
@click.option(
    "-o", "--output", metavar="HTML", help="File to write; - is stdout.  [default: FILE with the suffix .html]"
)
@click.option(
    "--attempt",
    type=click.IntRange(min=1),
    metavar="N",
    help="Attempt of a restarted job, from 1.  [default: the last]",
)
@baseline_option
@click.option("--force", is_flag=True, help="Overwrite a file that is not a report.")
def command(*, file: str, output: str | None, attempt: int | None, baseline: Path | None, force: bool) -> None:
    """Write a recording as one HTML page that needs no network. Needs plotly: pip install plotly.

    The page has a verdict in one sentence, where the time went, what each rank cost, all alerts, and the settings and
    versions to reproduce the run.
    """
    from ddpwatch.outputs.report.data import gather
    from ddpwatch.outputs.report.page import page, plotly_script
    from ddpwatch.recording.reader import Recording

    source = Path(file)
    target = Path(output) if output is not None else source.with_suffix(".html")
    plotly_script()
    against = baseline_of(baseline)
    with contextlib.closing(Recording(source)) as recorded:
        this = select_attempt(recorded, attempt)
        frames = recorded.frames(this)
        _refuse(target, source, force=force)
        with progress_bar("reading", frames) as progress:
            report = gather(recorded, this, progress)
        if against is not None:
            report = replace(report, scaling=_scaling(report, against))
        with atomic_output(target, source, force=True) as out:
            out.write(page(report))
        say_damage(recorded, this)
        say_attempt(recorded, attempt)
    if target != STDOUT:
        click.echo(str(target))


def _scaling(report: Report, baseline: Profile) -> Scaling | None:
    """Scaling efficiency against the baseline, from the same steps as the report's other figures; None without any."""
    from ddpwatch.core.metrics.scaling import scaling_of
    from ddpwatch.outputs.report.data import Scaling
    from ddpwatch.view.scaling import hung_doubt, part_words, scaling_doubt, scaling_sentence

    found = scaling_of(baseline, report.aggregate)
    if found is None:
        return None
    losses = tuple((part_words(found, name, gained=share < 0), share) for name, share in found.parts.items())
    lines = (scaling_sentence(found), scaling_doubt(found), hung_doubt(found, report.aggregate.hung_steps()))
    return Scaling(tuple(f"{line[0].upper()}{line[1:]}." for line in lines if line), found.efficiency, losses)


def _refuse(target: Path, source: Path, *, force: bool) -> None:
    """Refuse a target that cannot be written, or that is neither a report nor forced."""
    from ddpwatch.outputs.report.page import MARK

    if target == STDOUT:
        return
    if target.is_dir():
        raise UsageError(f"{target} is a directory; name a file in it")
    if not target.parent.is_dir():
        raise UsageError(f"no directory {target.parent}; create it or choose another with -o")
    if not target.exists():
        return
    if target.samefile(source):
        raise UsageError(f"{target} is the recording itself; write the report to another file")
    if force or not target.is_file():
        return
    with target.open("rb") as old:
        if MARK.encode() not in old.read(4096):
            raise UsageError(f"{target} exists and is not a ddpwatch report; --force overwrites it")
