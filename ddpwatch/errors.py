"""Errors that a user may see, each with the exit code of its command."""

from collections.abc import Sequence
from typing import Final

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C."""


def choices_text(name: str, known: Sequence[str]) -> str:
    """How an error about an unknown name ends: with the closest known name, or with all of them."""
    # Not at the top: the agent imports this module into the training process.
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"choose from: {', '.join(known)}"


class DdpwatchError(Exception):
    """Base of all errors: shown on stderr without a traceback, as one line that says what to do, and one per hint."""

    exit_code = 1

    def __init__(self, text: str = "", hints: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.hints = hints


class UsageError(DdpwatchError):
    """An argument or a setting is invalid."""

    exit_code = 2


class RunDirRefused(DdpwatchError):
    """The run directory is not private to this user, or cannot be created."""


class NoSuchRun(DdpwatchError):
    """No live run matches, or the run has exited."""

    exit_code = 3


class AccessRefused(DdpwatchError):
    """The ranks of the run do not accept the ticket's key."""


class WireError(DdpwatchError):
    """A frame could not be decoded. Counted, never shown as an error."""


class BadFrame(WireError):
    """A frame is malformed, too long, or holds a value out of its range."""


class UnknownMessage(WireError):
    """A well-formed frame holds a message type that this version does not know."""
