"""Kinds of option values that several sub-commands take.

Recording as an option of other commands: where to, how much is kept, and the words on it.
"""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpwatch.recording.writer import Recorder

UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
LONGEST_SPAN_S: Final = 365 * 86_400
UNITS_BYTES: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
LARGEST_BYTES: Final = 10**15
QUOTES: Final = "--log takes one file or one pattern, and a pattern in quotes: --log 'logs/**/*.log'"


class CommandWithLogs(click.Command):
    """A command with `--log`: a pattern without quotes, of which the shell makes many arguments, is refused as such."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; what comes too much after `--log` is most likely the rest of a pattern."""
        given = any(each == "--log" or each.startswith("--log=") for each in args)
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            # What is wrong with a value, or has no such option, is of a class of its own.
            if given and type(error) is click.UsageError:
                raise click.UsageError(QUOTES, ctx) from None
            raise
        selector = ctx.params.get("selector")
        if given and selector and not selector.endswith(".json") and Path(selector).is_file():
            raise click.UsageError(QUOTES, ctx)
        return rest


def seconds(value: str) -> float:
    """A span of time from a tenth of a second to a day; refuses nan and infinity by name."""
    try:
        span_s = float(value)
    except ValueError:
        span_s = math.nan
    if not 0.1 <= span_s <= 86_400:
        raise click.BadParameter(f"{value!r} is no number of seconds between 0.1 and 86400")
    return span_s


def span(value: str) -> float:
    """A span of time as people write it: 60, 60s, 5m, 2h, 7d. From a tenth of a second to a year, in seconds."""
    text = value.strip()
    unit_s = UNITS_S.get(text[-1:])
    try:
        span_s = float(text if unit_s is None else text[:-1]) * (unit_s or 1)
    except ValueError:
        span_s = math.nan
    if not 0.1 <= span_s <= LONGEST_SPAN_S:
        raise click.BadParameter(f"{value!r} is no span of time such as 60, 60s, 5m or 2h")
    return span_s


def size(value: str) -> int:
    """A number of bytes as people write it: 500MB, 2GB, 1.5G."""
    text = value.strip().lower().removesuffix("b").removesuffix("i").rstrip()
    unit = text[-1:] if text[-1:] in UNITS_BYTES else ""
    try:
        size_bytes = float(text.removesuffix(unit)) * UNITS_BYTES[unit]
    except ValueError:
        size_bytes = math.nan
    if not 1 <= size_bytes <= LARGEST_BYTES:
        raise click.BadParameter(f"{value!r} is no size such as 500MB or 2GB")
    return int(size_bytes)


MIN_BYTES: Final = 10_000_000
"""Below that the file's own book-keeping would not leave room for much else."""
MIN_KEEP_S: Final = 120
"""A recording is cut at checkpoints, which come once a minute: a shorter span would not be kept to."""
MAX_NAME_CHARS: Final = 80

CommandT = TypeVar("CommandT", bound="Callable[..., Any]")


def retention_options(command: CommandT) -> CommandT:
    """`--keep` and `--max`, for every command that records; they arrive as `keep_s` and `max_bytes`."""
    command = click.option(
        "--max",
        "max_bytes",
        type=size,
        metavar="SIZE",
        help="Let the oldest go when the file is larger: 500MB, 2GB; at least 10MB.",
    )(command)
    return click.option(
        "--keep",
        "keep_s",
        type=span,
        metavar="SPAN",
        help="Let go of what is older than this, to the minute: 90m, 24h, 7d; at least 2m.",
    )(command)


def check_retention(file: str | None, keep_s: float | None, max_bytes: int | None) -> None:
    """Refuse limits that make no sense."""
    if file is None and (keep_s is not None or max_bytes is not None):
        raise click.UsageError("--keep and --max are for a recording; name its file with --record FILE")
    if keep_s is not None and keep_s < MIN_KEEP_S:
        raise click.BadParameter(f"--keep is at least {MIN_KEEP_S // 60}m")
    if max_bytes is not None and max_bytes < MIN_BYTES:
        raise click.BadParameter(f"--max is at least {MIN_BYTES // 1_000_000}MB")


def safe_file_name(run_name: str) -> str:
    """A run's name as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", run_name).strip("-.")[:MAX_NAME_CHARS] or "run"


def default_file(run_name: str) -> Path:
    """A name in the current directory for a recording of this run that begins now."""
    from datetime import datetime, timezone

    now = datetime.now(timezone.utc).astimezone()
    from ddpwatch.recording.schema import SUFFIX

    return Path(f"{safe_file_name(run_name)}-{now:%Y%m%d-%H%M%S}{SUFFIX}")


@contextlib.contextmanager
def recorder_of(file: str | Path | None, keep_s: float | None, max_bytes: int | None) -> Iterator[Recorder | None]:
    """A recorder for the length of the block, which ends with all on disk; None where no file is named."""
    if file is None:
        yield None
        return
    from ddpwatch.cli._runs import say
    from ddpwatch.errors import UsageError
    from ddpwatch.recording.writer import Recorder

    if str(file) == "-":
        raise UsageError("a recording is a file that is written here and there, and cannot go to stdout; name a file")
    recorder = Recorder(Path(file), keep_s=keep_s, max_bytes=max_bytes, say=lambda text: say(f"ddpwatch: {text}"))
    try:
        yield recorder
    finally:
        recorder.close()


def recording_summary(recorder: Recorder) -> str:
    """What has become of a recording that was closed."""
    from ddpwatch.core.units import plural

    lost = ""
    if recorder.incomplete:
        what = plural(recorder.dropped_frames, "frame") if recorder.dropped_frames else "the end of it"
        lost = f"{what} could not be kept: {recorder.reason}"
    if not recorder.written:
        return f"nothing was recorded in {recorder.path}: {lost}" if lost else "nothing was recorded"
    kept, frames = f"{recorder.path} is gone", plural(recorder.written, "more frame" if recorder.goes_on else "frame")
    with contextlib.suppress(OSError):
        kept = f"{frames} in {recorder.path} ({recorder.path.stat().st_size / 1e6:.1f} MB)"
    return f"{kept}, {lost}" if lost else kept
