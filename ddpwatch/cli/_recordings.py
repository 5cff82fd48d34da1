"""What the sub-commands that read recordings have in common: the baseline, the attempt, and how far reading has got."""

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
    help="A recording of the same training in one process: tell how well the ranks scale against it.",
)


def baseline_of(path: Path | None) -> Profile | None:
    """The run that scaling is told against; None = none was named."""
    if path is None:
        return None
    from ddpwatch.outputs.compare import read_baseline

    return read_baseline(path)


def select_attempt(recorded: Recording, number: int | None) -> Attempt:
    """The attempt of this number, counted from 1; the last, if none is said. Refuses one that is not there, or that
    nothing is there of.
    """
    from ddpwatch.recording.schema import NoRecording

    attempts = recorded.attempts
    number = len(attempts) if number is None else number
    if 1 <= number <= len(attempts) and recorded.is_empty(attempts[number - 1]):
        raise NoRecording(f"of attempt {number} nothing was recorded in {recorded.path}")
    if not 1 <= number <= len(attempts):
        there = "there is only attempt 1" if len(attempts) == 1 else f"there are attempts 1 to {len(attempts)}"
        raise UsageError(f"no attempt {number} in {recorded.path}: {there}")
    return attempts[number - 1]


def say_attempt(recorded: Recording, asked: int | None, which: str = "this", option: str = "--attempt") -> None:
    """A line on stderr if there are several attempts and none was asked for: the last was taken."""
    attempts = len(recorded.attempts)
    if asked is None and attempts > 1:
        click.echo(f"{which} is attempt {attempts}, the last; {option} N takes another", err=True)


def say_damage(recorded: Recording, attempt: Attempt, *, partly: bool = False) -> None:
    """A line on stderr if something could not be read, or is not there. To be called after reading, which finds it;
    `partly` = no more was read than one moment needs.
    """
    from ddpwatch.recording.database import lacks_wal
    from ddpwatch.recording.health import damage_of, damage_text

    name = recorded.path.name
    if lacks_wal(recorded.path):
        text = f"{name} was not closed by its recorder, and {name}-wal is not beside it: its newest part may be missing"
        click.echo(f"ddpwatch: {text}", err=True)
    recorded.alerts()  # finds what is wrong with them
    if (damage := damage_of(recorded, attempt, partly=partly)) is not None:
        rest = "no more of it was read than this moment needs" if partly else "the rest is told"
        click.echo(f"ddpwatch: {name} is damaged: {damage_text(damage)}; {rest}", err=True)


@contextmanager
def progress_bar(label: str, frames: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on stderr, where a person looks; else None."""
    if not sys.stderr.isatty():
        yield None
        return
    with click.progressbar(length=max(frames, 1), label=label, file=sys.stderr) as bar:
        yield bar.update
