"""Entry point of `ddpwatch`: imports the sub-command that is called, prints errors, chooses the exit code."""

from __future__ import annotations

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
    "replay": "Open the dashboard on a recording.",
    "runs": "List the live runs on this host.",
    "status": "Print where a run's time goes now.",
    "watch": "Follow a run and print its alerts, without a dashboard.",
    "record": "Record a run into one file.",
    "report": "Write a recording as one HTML page.",
    "export": "Convert a recording to CSV, JSON or a Perfetto trace.",
    "compare": "Compare two recordings: is one slower?",
    "ticket": "Write the addresses and key to watch a run from another host.",
    "relay": "Forward a whole run through one TCP port.",
    "postmortem": "Find in a job's logs which rank failed first, and why.",
    "stacks": "Print the Python stacks of the ranks.",
    "rules": "Explain the alert rules and their thresholds.",
    "demo": "Try it: a small CPU training job, or a simulated one.",
    "doctor": "Check this machine: what works, what does not, and why.",
}
"""Sub-command -> its line in `--help`. The module of the same name defines it."""

NOT_KEPT: Final = 1
"""Exit code: the recording is incomplete."""
ENDED_BADLY: Final = 4
"""Exit code: the run ended badly, or `--fail-on` or `--max-slowdown` matched."""
BROKEN_PIPE: Final = 141
"""Exit code: the reader of stdout has gone. A shell shows the same for a process that SIGPIPE ended."""
_DEBUG: Final = "DDPWATCH_DEBUG"
_COMPLETE: Final = "_DDPWATCH_COMPLETE"


class LazyGroup(click.Group):
    """Group that imports a sub-command only when it is called, so that `--help` stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """Import the command; None = no command has this name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"ddpwatch.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - as above
        """Write the list for `--help` without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


EXIT_CODES: Final = (
    "Exit codes: 0 success; 1 error, incomplete recording, or a negative result of postmortem or doctor; 2 invalid "
    "argument, setting or file; 3 no such run or recording; 4 the run ended badly, or --fail-on or --max-slowdown "
    "matched; 130 Ctrl-C; 141 broken pipe."
)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(VERSION, prog_name="ddpwatch", message="%(prog)s %(version)s")
def group() -> None:
    """Terminal dashboard for PyTorch DistributedDataParallel (DDP) training.

    Add to the training script: `import ddpwatch.agent; ddpwatch.agent.install(model)`. Then run `ddpwatch attach`.
    """


def main() -> None:
    """Run the command line and end the process."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Errors go to stderr; DDPWATCH_DEBUG shows the traceback."""
    if _COMPLETE in os.environ:
        group.main(list(arguments), prog_name="ddpwatch", complete_var=_COMPLETE)
    _prepare_streams()
    exit_code = 0
    try:
        try:
            with group.make_context("ddpwatch", list(arguments)) as context:
                group.invoke(context)
        except click.exceptions.Exit as error:
            exit_code = error.exit_code
        sys.stdout.flush()
    except click.ClickException as error:
        return _refuse(error)
    except DdpwatchError as error:
        return _say(str(error), error.exit_code, error.hints)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:
        if os.environ.get(_DEBUG):
            raise
        return _fail(error)
    return exit_code


def _fail(error: Exception) -> int:
    """Report an error of the operating system, or one that nobody foresaw."""
    if isinstance(error, OSError):
        _silence_stdout()
        if isinstance(error, BrokenPipeError):
            return BROKEN_PIPE
        what = f"cannot use {error.filename}" if error.filename else "cannot write the output"
        text = f"{what}: {error.strerror or error}"
    else:
        text = f"unexpected {type(error).__name__}: {str(error) or 'no details'}"
    return _say(f"{text} (set {_DEBUG}=1 for the traceback)", 1)


def _refuse(error: click.ClickException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return error.exit_code
    context = error.ctx if isinstance(error, click.UsageError) else None
    hint = f" (see {context.command_path} --help)" if context else ""
    return _say(error.format_message() + hint, error.exit_code)


def _say(text: str, exit_code: int, hints: Sequence[str] = ()) -> int:
    from ddpwatch.cli._terminal import say

    say(f"ddpwatch: {text}")
    for hint in hints:
        say(f"  {hint}")
    return exit_code


def _silence_stdout() -> None:
    """Redirect stdout to /dev/null: flushing a broken one, the interpreter would print an error while it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _prepare_streams() -> None:
    """Replace closed streams by /dev/null, and let an encoding without block characters print question marks."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - for the rest of the process
        if reconfigure := getattr(getattr(sys, name), "reconfigure", None):
            reconfigure(errors="replace")
