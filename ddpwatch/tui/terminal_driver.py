"""A terminal driver that survives the loss of the terminal: a closed window, a broken connection."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any, cast

from textual.drivers.linux_driver import LinuxDriver

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.app import App


class ResilientFile:
    """A file that ignores errors once it cannot be written to."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._gone = False

    def write(self, text: str) -> None:
        """Write the text if that is still possible."""
        self._try(lambda: self._file.write(text))

    def flush(self) -> None:
        """Flush if that is still possible."""
        self._try(self._file.flush)

    def _try(self, call: Callable[[], object]) -> None:
        if not self._gone:
            try:
                call()
            except (OSError, ValueError):
                self._gone = True

    def fileno(self) -> int:
        """The descriptor of the file."""
        return self._file.fileno()

    def isatty(self) -> bool:
        """Whether the file is a terminal."""
        return self._file.isatty()


class ResilientDriver(LinuxDriver):
    """Textual's driver on a resilient file. Its own writer thread ends with the terminal, and then every write and the
    exit of the app wait for it forever.
    """

    def __init__(
        self, app: App[None], *, debug: bool = False, mouse: bool = True, size: tuple[int, int] | None = None
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        self._file = cast("Any", ResilientFile(cast("IO[str]", self._file)))
