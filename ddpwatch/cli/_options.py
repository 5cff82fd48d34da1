"""Option types and options that several commands share, and the recorder behind `--record`."""

from __future__ import annotations

import contextlib
import math
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from ddpwatch.cli._terminal import say
from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpwatch.recording.writer import Recorder

UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MAX_SPAN_S: Final = 365 * 86_400
"""Longest duration an option accepts, in seconds: a year."""
UNITS_BYTES: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
MAX_BYTES: Final = 10**15
"""Largest size an option accepts, in bytes: 1 PB."""
MIN_BYTES: Final = 10_000_000
"""Smallest `--max`, in bytes: in a smaller file the schema, the manifest and checkpoints would leave little room."""
MIN_KEEP_S: Final = 120
"""Shortest `--keep`, in seconds: a recording is cut at checkpoints, which are a minute apart."""
MAX_NAME_CHARS: Final = 80
"""Max. length, in characters, of a run's name in a file name."""
QUOTES: Final = "--log takes one file or one quoted pattern, such as --log 'logs/**/*.log'; repeat it for more"
RUN_HELP: Final = (
    "RUN is a run id or its first characters, a run's name, a job id, or the path of a ticket, run.json or run "
    "directory. It can be left out if only one run is live."
)

CommandT = TypeVar("CommandT", bound="Callable[..., Any]")


class CommandWithLogs(click.Command):
    """Command with `--log` that explains a pattern without quotes, which the shell expands to several arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; surplus ones after `--log` are most likely the rest of an expanded pattern."""
        given = any(each == "--log" or each.startswith("--log=") for each in args)
        try:
            rest = super().parse_args(ctx, args)
        except click.UsageError as error:
            # A bad value or an unknown option raises a subclass.
            if given and type(error) is click.UsageError:
                raise click.UsageError(QUOTES, ctx) from None
            raise
        selector = ctx.params.get("selector")
        if given and selector and not selector.endswith(".json") and Path(selector).is_file():
            raise click.UsageError(QUOTES, ctx)
        return rest


def number_of(text: str) -> float:
    """Parse a number; NaN, which lies in no range, if the text is not one."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def seconds(value: str) -> float:
    """Parse a number of seconds from 0.1 to a day."""
    span_s = number_of(value)
    if not 0.1 <= span_s <= 86_400:
        raise click.BadParameter(f"{value!r} is not a number of seconds between 0.1 and 86,400")
    return span_s


timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=seconds,
    default=3.0,
    show_default=True,
    metavar="SECONDS",
    help="Max. wait for the ranks.",
)
"""How long a command that looks once waits for the ranks."""


def span(value: str) -> float:
    """Parse a duration such as 60, 60s, 5m, 2h, 7d into seconds, from 0.1 to a year."""
    text = value.strip()
    unit_s = UNITS_S.get(text[-1:])
    span_s = number_of(text) if unit_s is None else number_of(text[:-1]) * unit_s
    if not 0.1 <= span_s <= MAX_SPAN_S:
        raise click.BadParameter(f"{value!r} is not a duration such as 60, 60s, 5m or 2h")
    return span_s


def size(value: str) -> int:
    """Parse a size such as 500MB, 2GB, 1.5G into bytes."""
    text = value.strip().lower().removesuffix("b").removesuffix("i").rstrip()
    unit = text[-1:] if text[-1:] in UNITS_BYTES else ""
    size_bytes = number_of(text.removesuffix(unit)) * UNITS_BYTES[unit]
    if not 1 <= size_bytes <= MAX_BYTES:
        raise click.BadParameter(f"{value!r} is not a size such as 500MB or 2GB")
    return int(size_bytes)


def retention_options(command: CommandT) -> CommandT:
    """Add `--keep` and `--max`, as the parameters `keep_s` and `max_bytes`, to a command that records."""
    command = click.option(
        "--max",
        "max_bytes",
        type=size,
        metavar="SIZE",
        help="Max. size of the file: 500MB, 2GB; at least 10MB. The oldest data is deleted.",
    )(command)
    return click.option(
        "--keep",
        "keep_s",
        type=span,
        metavar="DURATION",
        help="Delete data older than this: 90m, 24h, 7d; at least 2m. Precise to the minute.",
    )(command)


def check_retention(file: str | None, keep_s: float | None, max_bytes: int | None) -> None:
    """Refuse `--keep` and `--max` without a file, or below their minimum."""
    if file is None and (keep_s is not None or max_bytes is not None):
        raise click.UsageError("--keep and --max apply to a recording; add --record FILE")
    if keep_s is not None and keep_s < MIN_KEEP_S:
        raise click.BadParameter(f"--keep must be at least {MIN_KEEP_S // 60}m")
    if max_bytes is not None and max_bytes < MIN_BYTES:
        raise click.BadParameter(f"--max must be at least {MIN_BYTES // 1_000_000}MB")


def safe_file_name(run_name: str) -> str:
    """A run's name as part of a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", run_name).strip("-.")[:MAX_NAME_CHARS] or "run"


def default_file(run_name: str) -> Path:
    """File in the current directory for a recording of this run that begins now."""
    from ddpwatch.recording.schema import SUFFIX

    now = datetime.now(timezone.utc).astimezone()
    return Path(f"{safe_file_name(run_name)}-{now:%Y%m%d-%H%M%S}{SUFFIX}")


@contextlib.contextmanager
def recorder_of(file: str | Path | None, keep_s: float | None, max_bytes: int | None) -> Iterator[Recorder | None]:
    """Open a recorder and close it, with everything on disk, at the end of the block; None without a file."""
    if file is None:
        yield None
        return
    from ddpwatch.recording.writer import Recorder

    if str(file) == "-":
        raise UsageError("a recording cannot go to stdout, because it is written out of order; name a file")
    recorder = Recorder(Path(file), keep_s=keep_s, max_bytes=max_bytes, say=lambda text: say(f"ddpwatch: {text}"))
    with contextlib.closing(recorder):
        yield recorder


def recording_summary(recorder: Recorder) -> str:
    """One line on a closed recording: its frames, its size, and what was lost."""
    from ddpwatch.core.units import plural

    lost = ""
    if recorder.incomplete:
        what = plural(recorder.dropped_frames, "frame") if recorder.dropped_frames else "the end of the run"
        lost = f"{what} could not be written: {recorder.reason}"
    if not recorder.written:
        return f"nothing was recorded in {recorder.path}: {lost}" if lost else "nothing was recorded"
    kept, frames = (
        f"{recorder.path} was removed",
        plural(recorder.written, "more frame" if recorder.goes_on else "frame"),
    )
    with contextlib.suppress(OSError):
        kept = f"{frames} in {recorder.path} ({recorder.path.stat().st_size / 1e6:.1f} MB)"
    return f"{kept}, {lost}" if lost else kept
