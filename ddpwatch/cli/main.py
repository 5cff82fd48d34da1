"""The `ddpwatch` command. The one place that prints errors and chooses the exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ddpwatch.errors import INTERRUPTED, DdpwatchError
from ddpwatch.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

COMMANDS: Final = {
    "attach": "Open the dashboard on a run.",
    "replay": "Look at a recorded run in the dashboard.",
    "runs": "List the runs on this host.",
    "status": "Show where a run's time goes, now.",
    "watch": "Follow a run headless: alerts as lines, an exit code.",
    "record": "Keep all that a run tells in one file.",
    "report": "Write a recorded run as one HTML page.",
    "export": "Write a recording as CSV, JSON, or a trace for Perfetto.",
    "compare": "Say whether one recording is slower than another.",
    "ticket": "Write what is needed to watch a run from another host.",
    "relay": "Pass a whole run on at one port.",
    "postmortem": "Say which rank ended a job, and why, from its logs.",
    "stacks": "Print where all ranks are in the script, now.",
    "rules": "Say what is judged, how, and by which limits.",
    "demo": "Train on CPU ranks, and open the dashboard on them.",
    "doctor": "Say what works here, what does not, and why.",
}
"""Sub-command -> its line in `--help`. The module of the same name holds it and is imported only when it runs."""

NOT_KEPT: Final = 1
"""Not all that was to be recorded is in the file."""
ENDED_BADLY: Final = 4
"""The run that was watched ended badly, or had an alert that was to fail the command."""
BROKEN_PIPE: Final = 141
"""As if SIGPIPE had ended the process, like any filter whose reader has gone."""
_DEBUG: Final = "DDPWATCH_DEBUG"
_COMPLETE: Final = "_DDPWATCH_COMPLETE"
_MAX_ERROR_CHARS: Final = 1000


class LazyGroup(click.Group):
    """Knows its sub-commands by name and help line, and imports the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Names, in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """The command, imported now; None if there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"ddpwatch.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - as above
        """Write the list for `--help` without importing what is on it."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, prog_name="ddpwatch", message="%(prog)s %(version)s")
def group() -> None:
    """Watch a PyTorch DistributedDataParallel job while it runs.

    In the training script: `import ddpwatch.agent; ddpwatch.agent.install(model)`.
    """


def main() -> None:
    """Run the command line and end the process."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command. Errors become one line on stderr and an exit code; only DDPWATCH_DEBUG shows a traceback."""
    if _COMPLETE in os.environ:
        group.main(list(arguments), prog_name="ddpwatch", complete_var=_COMPLETE)
    _have_streams()
    try:
        with group.make_context("ddpwatch", list(arguments)) as context:
            group.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return _flushed(error.exit_code)
    except click.ClickException as error:
        return _refuse(error)
    except DdpwatchError as error:
        return _say(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:
        if os.environ.get(_DEBUG):
            raise
        return _fail(error)
    return 0


def _fail(error: Exception) -> int:
    """Say what went wrong that nobody foresaw, or what the machine refused."""
    if isinstance(error, BrokenPipeError):
        return _reader_gone()
    if isinstance(error, OSError):
        _write_no_more()
        what = f"cannot use {error.filename}" if error.filename else "cannot write the output"
        text = f"{what}: {error.strerror or error}"
    else:
        text = f"unexpected {type(error).__name__}: {str(error) or 'no details'}"
    return _say(f"{text} (set {_DEBUG}=1 for the traceback)", 1)


def _flushed(exit_code: int) -> int:
    try:
        sys.stdout.flush()
    except OSError as error:
        return _fail(error)
    return exit_code


def _refuse(error: click.ClickException) -> int:
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f" (see {context.command_path} --help)" if context else ""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        # Asked for nothing: the help is the answer, and it is more than a line.
        error.show()
        return error.exit_code
    return _say(error.format_message() + hint, error.exit_code)


def _say(text: str, exit_code: int) -> int:
    # Names of runs and hosts may be in it; they are as foreign here as on the screen.
    from ddpwatch.core.state.sanitize import sanitize

    with contextlib.suppress(OSError):
        click.echo(f"ddpwatch: {sanitize(text, _MAX_ERROR_CHARS)}", err=True)
    return exit_code


def _reader_gone() -> int:
    _write_no_more()
    return BROKEN_PIPE


def _write_no_more() -> None:
    """Point stdout nowhere, or the interpreter would complain about it while it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _have_streams() -> None:
    """Streams that were closed lead nowhere; one that cannot show a bar gets question marks, not an error."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - for the rest of the process
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - as above
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")
