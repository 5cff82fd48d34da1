"""What the commands that read recordings have in common: baseline, attempt, damage and progress bar."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpwatch.core.metrics.scaling import Profile
    from ddpwatch.recording.reader import Attempt, Recording

baseline_option: Final = click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Recording of the same training in one process: show the scaling efficiency against it.",
)


def baseline_of(path: Path | None) -> Profile | None:
    """Profile of the run that scaling is computed against; None without `--baseline`."""
    if path is None:
        return None
    from ddpwatch.outputs.compare import read_baseline

    return read_baseline(path)


def select_attempt(recorded: Recording, number: int | None) -> Attempt:
    """The attempt of this number, from 1; None = the last. Refuses one that does not exist or has no frames."""
    from ddpwatch.recording.schema import NoRecording

    attempts = recorded.attempts
    number = len(attempts) if number is None else number
    if not 1 <= number <= len(attempts):
        there = "it has only attempt 1" if len(attempts) == 1 else f"it has attempts 1 to {len(attempts)}"
        raise UsageError(f"no attempt {number} in {recorded.path}: {there}")
    if recorded.is_empty(attempts[number - 1]):
        raise NoRecording(f"{recorded.path} holds no frames of attempt {number}")
    return attempts[number - 1]


def say_attempt(recorded: Recording, asked: int | None, which: str = "this", option: str = "--attempt") -> None:
    """Print on stderr which attempt was read, if there are several and the user chose none."""
    attempts = len(recorded.attempts)
    if asked is None and attempts > 1:
        click.echo(f"{which} is attempt {attempts}, the last one; choose another with {option} N", err=True)


def say_damage(recorded: Recording, attempt: Attempt, *, partly: bool = False) -> None:
    """Print on stderr what could not be read. Call it after reading, which finds the damage.

    `partly` = only the frames that one moment needs were read.
    """
    from ddpwatch.recording.damage_report import damage_of, damage_text
    from ddpwatch.recording.sqlite_open import lacks_wal

    name = recorded.path.name
    if lacks_wal(recorded.path):
        text = f"{name} was not closed by its recorder, and {name}-wal is missing: the newest data may be lost"
        click.echo(f"ddpwatch: {text}", err=True)
    recorded.alerts()  # reading them finds their damage
    if (damage := damage_of(recorded, attempt, partly=partly)) is not None:
        rest = "only the part needed for this moment was read" if partly else "the rest is shown"
        click.echo(f"ddpwatch: {name} is damaged: {damage_text(damage)}; {rest}", err=True)


@contextmanager
def progress_bar(label: str, frames: int) -> Iterator[Callable[[int], None] | None]:
    """Show a progress bar on stderr and yield its update function; None without a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=max(frames, 1), label=label, file=sys.stderr) as bar:
        yield bar.update
