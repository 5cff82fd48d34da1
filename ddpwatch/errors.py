"""What can go wrong in front of a user, each with its exit code.

DdpwatchError          1   one clear line on stderr, never a traceback
UsageError           2   an argument or a setting makes no sense
RunDirRefused        1   the run directory is not private to this user, or cannot be used
NoSuchRun            3   nothing of that name is running
AccessRefused        1   the ranks of the run do not accept the ticket's key
WireError            -   a frame could not be read; counted, never shown as an error
BadFrame               malformed, or a value out of its range
UnknownMessage         well-formed, of a kind this version does not know

130 = interrupted by Ctrl-C, wherever that is pressed.
"""

from typing import Final

INTERRUPTED: Final = 130


class DdpwatchError(Exception):
    """Base of everything a user may be shown. The text is one sentence that says what to do."""

    exit_code = 1


class UsageError(DdpwatchError):
    """An argument or a setting makes no sense."""

    exit_code = 2


class RunDirRefused(DdpwatchError):
    """The run directory is not private to this user, or cannot be created."""


class NoSuchRun(DdpwatchError):
    """No run of that name or id is known here."""

    exit_code = 3


class AccessRefused(DdpwatchError):
    """The ranks do not let this viewer in."""


class WireError(DdpwatchError):
    """A frame from outside could not be used."""


class BadFrame(WireError):
    """A frame is malformed, too long, or holds a value out of its range."""


class UnknownMessage(WireError):
    """A frame is well-formed but of a kind that this version does not know."""
