"""The way to the terminal, which may be gone before we are: a window that is closed, a connection that breaks."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any, cast

from textual.drivers.linux_driver import LinuxDriver

if TYPE_CHECKING:
    from textual.app import App


class ResilientFile:
    """A file that takes whatever is written to it, also when nobody reads it any more."""

    def __init__(self, file: IO[str]) -> None:
        """Write to this file as long as it can be written to."""
        self._file = file
        self._gone = False

    def write(self, text: str) -> None:
        """Write it, if that is possible."""
        if not self._gone:
            try:
                self._file.write(text)
            except (OSError, ValueError):
                self._gone = True

    def flush(self) -> None:
        """See that it gets there, if that is possible."""
        if not self._gone:
            try:
                self._file.flush()
            except (OSError, ValueError):
                self._gone = True

    def fileno(self) -> int:
        """Of the file behind it."""
        return self._file.fileno()

    def isatty(self) -> bool:
        """Whether that is a terminal."""
        return self._file.isatty()


class ResilientDriver(LinuxDriver):
    """Textual's own. There the thread that writes would end with the terminal, and whoever has something to write, or
    wants to leave, would wait for it for ever.
    """

    def __init__(
        self, app: App[None], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None
    ) -> None:
        """Write to the terminal as long as there is one."""
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        self._file = cast("Any", ResilientFile(cast("IO[str]", self._file)))
