"""A program in a real terminal of a chosen size: what it draws is read all the time and kept as a screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import threading
import time
from typing import TYPE_CHECKING

import pyte

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# pyte would print the letter of these: keyboard protocols and requests that begin with <, = or >, and device strings.
_FOREIGN = re.compile(rb"\x1b\[[<=>][0-9;]*[ -/]*[@-~]|\x1bP[^\x1b]*\x1b\\")
_UNFINISHED = re.compile(rb"\x1b(\[[0-?]*[ -/]*|P[^\x1b]*\x1b?)?\Z")
_LONGEST_TAIL_BYTES = 4096
_MAX_OUTPUT_BYTES = 1 << 20
END_S = 5.0
"""Time to end in order, after SIGTERM."""

KEYS = {
    "up": "\x1b[A",
    "down": "\x1b[B",
    "right": "\x1b[C",
    "left": "\x1b[D",
    "home": "\x1b[H",
    "end": "\x1b[F",
    "pageup": "\x1b[5~",
    "pagedown": "\x1b[6~",
    "enter": "\r",
    "tab": "\t",
    "space": " ",
    "escape": "\x1b",
    "backspace": "\x7f",
    "ctrl+c": "\x03",
}
"""Keys by name, as xterm sends them."""


class Terminal:
    """Use it in a `with` block; at its end the program is ended and reaped, whatever it does."""

    def __init__(
        self,
        command: Sequence[str],
        columns: int = 120,
        rows: int = 40,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> None:
        """Start the command with the terminal as its controlling one. `env` is added to the environment."""
        self.bytes_read = 0
        """What the program has written so far."""
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._tail = b""
        self._read_s = 0.0
        """When the last of what is on the screen was read: drawing it takes pyte a while."""
        self._output: bytes | None = None
        """What has come since it only listens; None = it draws."""
        self._changed = threading.Condition()
        self._ended = False
        # The size is the terminal's, and not that of the one we were started in.
        inherited = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
        self._main, secondary = pty.openpty()
        self._stop, self._stop_writer = os.pipe()
        try:
            self._set_size(columns, rows)
            self._process = subprocess.Popen(
                # A shell that opens the terminal by name has it as its controlling one, and hands it on.
                ["/bin/sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(secondary), *command],
                stdin=secondary,
                stdout=secondary,
                stderr=secondary,
                env={**inherited, "TERM": "xterm-256color", **(env or {})},
                cwd=cwd,
                start_new_session=True,
            )
        except BaseException:
            for handle in (self._main, self._stop, self._stop_writer):
                os.close(handle)
            raise
        finally:
            os.close(secondary)
        self.started_s = time.monotonic()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The program's process."""
        return self._process.pid

    def lines(self) -> list[str]:
        """The screen now, one text per row, without the spaces at the end."""
        with self._changed:
            return [line.rstrip() for line in self._screen.display]

    def text(self) -> str:
        """The screen now, as one text."""
        return "\n".join(self.lines())

    def style_at(self, column: int, row: int) -> pyte.screens.Char:
        """One character of the screen with its colours and attributes; both numbers count from 0."""
        with self._changed:
            return self._screen.buffer[row][column]

    def send(self, *keys: str) -> None:
        """Type keys: names of `KEYS`, or text as it is."""
        data = "".join(KEYS.get(key, key) for key in keys).encode()
        while data:
            data = data[os.write(self._main, data) :]

    def wait_for(self, wanted: str | re.Pattern[str] | Callable[[str], object], timeout_s: float = 30.0) -> float:
        """Return as soon as a text, a pattern or a condition is on the screen.

        Returns when what made it so was read, on the monotonic clock; if it was there before, now. Fails with the
        screen as it is when it does not come in time, or when the program has ended without it.
        """
        shows = _condition(wanted)
        began_s = time.monotonic()
        deadline_s = began_s + timeout_s
        with self._changed:
            while not shows("\n".join(line.rstrip() for line in self._screen.display)):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._ended:
                    why = "the program has ended" if self._ended else f"nothing within {timeout_s} s"
                    screen = "\n".join(self._screen.display)
                    raise AssertionError(f"waited for {wanted!r}: {why}; the screen:\n{screen}")
                self._changed.wait(left_s)
            return max(began_s, self._read_s)

    def only_listen(self) -> None:
        """From now on draw nothing: that takes pyte longer than any terminal, and a core. Forget earlier output."""
        with self._changed:
            self._output = b""

    def wait_for_bytes(self, wanted: bytes, timeout_s: float = 30.0) -> float:
        """When these were read, on the monotonic clock, of what came since it only listens."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            assert self._output is not None
            while wanted not in self._output:
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, f"waited for {wanted!r}: nothing within {timeout_s} s"
                assert not self._ended, f"waited for {wanted!r}: the program has ended"
                self._changed.wait(left_s)
            return self._read_s

    def resize(self, columns: int, rows: int) -> None:
        """Change the terminal's size; the kernel signals the program."""
        with self._changed:
            self._screen.resize(rows, columns)
        self._set_size(columns, rows)

    def wait_for_end(self, timeout_s: float = 30.0) -> int:
        """The exit code, when the program has ended by itself and all that it wrote is on the screen."""
        code = self._process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def close(self) -> int:
        """End the program, if it still runs: SIGTERM, then SIGKILL. Returns its exit code; may be called again."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        # What it has started may have the terminal still. Its group has no other members, and is gone if it is empty.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if self._main >= 0:
            os.write(self._stop_writer, b"x")
            self._reader.join()
            for handle in (self._main, self._stop, self._stop_writer):
                os.close(handle)
            self._main = -1
        return code

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        while True:
            ready, _, _ = select.select([self._main, self._stop], [], [])
            try:
                data = os.read(self._main, 65536) if self._main in ready else b""
            except OSError:
                # On Linux this means that the other end is closed.
                data = b""
            read_s = time.monotonic()
            with self._changed:
                self.bytes_read += len(data)
                if data:
                    self._read_s = read_s
                    if self._output is None:
                        self._feed(data)
                    else:
                        self._output = (self._output + data)[-_MAX_OUTPUT_BYTES:]
                else:
                    self._ended = True
                self._changed.notify_all()
            if not data:
                return

    def _feed(self, data: bytes) -> None:
        data = self._tail + data
        unfinished = _UNFINISHED.search(data[-_LONGEST_TAIL_BYTES:])
        cut = len(data) - len(unfinished[0]) if unfinished else len(data)
        self._tail = data[cut:]
        self._stream.feed(_FOREIGN.sub(b"", data[:cut]))


def _condition(wanted: str | re.Pattern[str] | Callable[[str], object]) -> Callable[[str], object]:
    if isinstance(wanted, str):
        return lambda screen: wanted in screen
    if isinstance(wanted, re.Pattern):
        return wanted.search
    return wanted
