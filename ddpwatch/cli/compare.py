"""`ddpwatch compare`: compare two recordings, with `--max-slowdown` as a gate for CI."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpwatch.cli._options import number_of
from ddpwatch.cli._recordings import baseline_of, baseline_option, progress_bar, say_attempt, say_damage, select_attempt
from ddpwatch.cli._terminal import show, terminal_size
from ddpwatch.cli.main import ENDED_BADLY
from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from ddpwatch.core.metrics.aggregate import StepSample
    from ddpwatch.core.metrics.scaling import Profile
    from ddpwatch.view.comparison import Side


def fraction(value: str) -> float:
    """Parse a percentage such as 5% into a fraction. The sign is required: 0.05 could be meant either way."""
    text = value.strip()
    parsed = number_of(text.removesuffix("%")) / 100
    if not (text.endswith("%") and 0.0 <= parsed <= 1000.0):
        raise click.BadParameter(f"{value!r} is not a percentage such as 5%")
    return parsed


@click.command("compare")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--max-slowdown",
    type=fraction,
    metavar="5%",
    help="Exit with 4 if B is slower by more than this, or ended badly.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@baseline_option
@click.option("--attempt-a", type=int, metavar="N", help="Attempt in A, from 1.  [default: the last]")
@click.option("--attempt-b", type=int, metavar="N", help="Attempt in B, from 1.  [default: the last]")
def command(
    *,
    a: Path,
    b: Path,
    max_slowdown: float | None,
    as_json: bool,
    baseline: Path | None,
    attempt_a: int | None,
    attempt_b: int | None,
) -> None:
    """Compare recording B with recording A: whether it is slower, by how much, and in which phase.

    Figures are medians over the whole run without its first steps, with confidence intervals from a bootstrap. A
    difference within the noise is reported as such, and does not fail --max-slowdown. If world size or batch size
    differ, samples per second and rank are compared instead of step times. A bad end and hung steps are reported too.
    """
    from ddpwatch.core.compare.bootstrap import compare
    from ddpwatch.view.comparison import comparison_lines, comparison_object, gate_fails, gate_text

    against = baseline_of(baseline)
    (ledger_a, side_a), (ledger_b, side_b) = _read("A", a, attempt_a, against), _read("B", b, attempt_b, against)
    found = compare(ledger_a, ledger_b)
    assert found is not None, "both have steps"
    sides = side_a, side_b
    if as_json:
        click.echo(json.dumps(comparison_object(found, sides, max_slowdown), indent=2, allow_nan=False))
    else:
        show(comparison_lines(found, sides, terminal_size()[0]))
    if max_slowdown is None:
        return
    fails = gate_fails(found, sides, max_slowdown)
    if found.headline.verdict == "unproven" and not fails:
        raise UsageError(
            f"too few steps for --max-slowdown: {side_a.profile.steps} and {side_b.profile.steps}; record longer runs"
        )
    click.echo(f"--max-slowdown {gate_text(found, sides, max_slowdown)}", err=True)
    if fails:
        raise click.exceptions.Exit(ENDED_BADLY)


def _read(letter: str, path: Path, attempt: int | None, against: Profile | None) -> tuple[StepSample, Side]:
    from ddpwatch.outputs.compare import read_side
    from ddpwatch.recording.reader import Recording

    with closing(Recording(path)) as recorded:
        run = select_attempt(recorded, attempt)
        with progress_bar(f"reading {letter}", recorded.frames(run)) as progress:
            read = read_side(letter, recorded, run, against, progress)
        say_damage(recorded, run)
        say_attempt(recorded, attempt, letter, f"--attempt-{letter.lower()}")
    return read
