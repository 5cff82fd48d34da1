"""`ddpwatch compare`: two recordings side by side, and a gate for CI."""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpwatch.cli._recordings import baseline_of, baseline_option, progress_bar, say_attempt, say_damage, select_attempt
from ddpwatch.cli._terminal import show, terminal_size
from ddpwatch.cli.main import ENDED_BADLY
from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from ddpwatch.core.metrics.scaling import Profile
    from ddpwatch.core.metrics.tally import Ledger
    from ddpwatch.view.comparison import Side


def share(value: str) -> float:
    """A part as people write it: 5%. Without the sign it would not be clear whether 0.05 is one."""
    text = value.strip()
    try:
        part = float(text.removesuffix("%")) / 100 if text.endswith("%") else math.nan
    except ValueError:
        part = math.nan
    if not 0.0 <= part <= 1000.0:
        raise click.BadParameter(f"{value!r} is no part such as 5%")
    return part


@click.command("compare")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option(
    "--max-slowdown",
    "most",
    type=share,
    metavar="5%",
    help="End with exit code 4 if B is slower by more than this, or ended badly.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@baseline_option
@click.option("--attempt-a", type=int, metavar="N", help="Which run in A.  [default: the last]")
@click.option("--attempt-b", type=int, metavar="N", help="Which run in B.  [default: the last]")
def command(
    *,
    a: Path,
    b: Path,
    most: float | None,
    as_json: bool,
    baseline: Path | None,
    attempt_a: int | None,
    attempt_b: int | None,
) -> None:
    """Say whether recording B is slower than recording A, and where.

    Figures are medians over the whole run without its first steps; what they would be in another run of the same thing
    is worked out from how they differ within each. A difference that is inside that noise is called so, and fails no
    gate. Where worlds or batches differ, a rank's samples a second are compared instead of steps. That a run ended
    badly, and for how long one stood still, is said besides.
    """
    from ddpwatch.core.compare.bootstrap import compare
    from ddpwatch.view.comparison import comparison_lines, comparison_object, gate_fails, gate_text

    against = baseline_of(baseline)
    (ledger_a, side_a), (ledger_b, side_b) = _read("A", a, attempt_a, against), _read("B", b, attempt_b, against)
    found = compare(ledger_a, ledger_b)
    assert found is not None, "both have steps"
    sides = side_a, side_b
    if as_json:
        click.echo(json.dumps(comparison_object(found, sides, most), indent=2, allow_nan=False))
    else:
        show(comparison_lines(found, sides, terminal_size()[0]))
    if most is None:
        return
    fails = gate_fails(found, sides, most)
    if found.headline.verdict == "unproven" and not fails:
        raise UsageError(f"too few steps for a gate: {side_a.profile.steps} and {side_b.profile.steps}")
    click.echo(f"--max-slowdown {gate_text(found, sides, most)}", err=True)
    if fails:
        raise click.exceptions.Exit(ENDED_BADLY)


def _read(letter: str, path: Path, attempt: int | None, against: Profile | None) -> tuple[Ledger, Side]:
    from ddpwatch.outputs.compare import read_side
    from ddpwatch.recording.reader import Recording

    with closing(Recording(path)) as recorded:
        run = select_attempt(recorded, attempt)
        with progress_bar(f"reading {letter}", recorded.frames(run)) as progress:
            read = read_side(letter, recorded, run, against, progress)
        say_damage(recorded, run)
        say_attempt(recorded, attempt, letter, f"--attempt-{letter.lower()}")
    return read
