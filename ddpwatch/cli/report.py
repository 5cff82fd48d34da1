"""`ddpwatch report`: a recorded run as one HTML page."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from ddpwatch.cli._recordings import baseline_of, baseline_option, progress_bar, say_attempt, say_damage, select_attempt

if TYPE_CHECKING:
    from pathlib import Path

    from ddpwatch.core.metrics.scaling import Profile
    from ddpwatch.outputs.report.data import Report, Scaling


@click.command("report")
@click.argument("file", metavar="FILE")
@click.option("-o", "--output", metavar="HTML", help="Where to write it; - is stdout.  [default: beside FILE]")
@click.option("--attempt", type=click.IntRange(min=1), help="Which run of the recording, from 1.  [default: last]")
@baseline_option
@click.option("--force", is_flag=True, help="Overwrite a file that is no report.")
def command(*, file: str, output: str | None, attempt: int | None, baseline: Path | None, force: bool) -> None:
    """Write a recorded run as one HTML page that needs no network.

    It says in a sentence how the run went, then where the time went, who cost how much, what was found, and what one
    needs to run it again.
    """
    from dataclasses import replace
    from pathlib import Path

    from ddpwatch.outputs.files import STDOUT, atomic_output
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
    """How well the job scales, by the steps that its other figures stand on; None = it has none that tell."""
    from ddpwatch.core.metrics.aggregate import profile_of_digest
    from ddpwatch.core.metrics.scaling import scaling
    from ddpwatch.outputs.report.data import Scaling
    from ddpwatch.view.scaling import part_words, scaling_doubt, scaling_sentence, standstill_doubt

    run = profile_of_digest(report.digest)
    if run is None:
        return None
    found = scaling(baseline, run)
    losses = tuple((part_words(found, name, gained=share < 0), share) for name, share in found.parts.items())
    still, total_s = report.digest.standstill(), report.digest.total_s
    stood = standstill_doubt(found, still, still.lost_s / total_s if still is not None else 0.0)
    lines = (scaling_sentence(found), scaling_doubt(found), stood)
    return Scaling(tuple(f"{line[0].upper()}{line[1:]}." for line in lines if line), found.efficiency, losses)


def _refuse(target: Path, source: Path, *, force: bool) -> None:
    """Overwrite nothing that somebody may miss."""
    from ddpwatch.errors import UsageError
    from ddpwatch.outputs.files import STDOUT
    from ddpwatch.outputs.report.page import MARK

    if target == STDOUT:
        return
    if target.is_dir():
        raise UsageError(f"{target} is a directory; name a file in it")
    if not target.parent.is_dir():
        raise UsageError(f"there is no directory {target.parent}")
    if not target.exists():
        return
    if target.samefile(source):
        raise UsageError(f"{target} is the recording itself; write the report to another file")
    if force or not target.is_file():
        return
    with target.open("rb") as old:
        if MARK.encode() not in old.read(4096):
            raise UsageError(f"{target} is there and no report of ddpwatch; --force overwrites it")
