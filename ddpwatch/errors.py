"""Errors that a user may see, each with the exit code of its command."""

from typing import Final

INTERRUPTED: Final = 130
"""Exit code after Ctrl-C."""


class DdpwatchError(Exception):
    """Base of all errors: shown as one line on stderr, without a traceback. The text says what to do."""

    exit_code = 1


class UsageError(DdpwatchError):
    """An argument or a setting is invalid."""

    exit_code = 2


class RunDirRefused(DdpwatchError):
    """The run directory is not private to this user, or cannot be created."""


class NoSuchRun(DdpwatchError):
    """No run of that name or id is known here."""

    exit_code = 3


class AccessRefused(DdpwatchError):
    """The ranks of the run do not accept the ticket's key."""


class WireError(DdpwatchError):
    """A frame could not be decoded. Counted, never shown as an error."""


class BadFrame(WireError):
    """A frame is malformed, too long, or holds a value out of its range."""


class UnknownMessage(WireError):
    """A well-formed frame holds a message type that this version does not know."""
