"""Minimal /metrics server with limits on size, time and connections, and the parsing of HOST:PORT addresses.

One thread serves all connections. Each has a limit of bytes and seconds for its request and its response; when too many
are open, the oldest is closed, so that slow clients keep nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
import threading
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeAlias

from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MAX_CONNECTIONS: Final = 32
"""Maximum number of open connections; one more closes the oldest."""
MAX_HEAD_BYTES: Final = 8192
"""Maximum length, in bytes, of the head of a request."""
CONNECTION_S: Final = 5.0
"""Time limit, in seconds, of a connection."""
CLOSING_S: Final = 5.0
"""Maximum wait, in seconds, for the thread to end."""
RECHECK_S: Final = 0.1
"""Pause, in seconds, before connections are accepted again when file descriptors ran out."""
Answer: TypeAlias = "tuple[str, bytes] | None"
"""Content type and body; None for 404."""
_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\[\]:\s/@]+)):(?P<port>[0-9]{1,5})")


def listen(address: str, option: str, backlog: int) -> socket.socket:
    """Listening socket at `address`; errors name the command line option."""
    host, port = read_address(address, option)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UsageError(f"{option} {address}: unknown host") from None
    family, kind, protocol, _, place = places[0]
    with contextlib.ExitStack() as on_error:
        try:
            listening = on_error.enter_context(socket.socket(family, kind, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(place)
            # Here and not in the thread: a port in use may show only now.
            listening.listen(backlog)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UsageError(f"{option} {address}: cannot listen: {reason}; choose another address or port") from None
        listening.setblocking(False)
        on_error.pop_all()
        return listening


def read_address(address: str, option: str) -> tuple[str, int]:
    """Parse HOST:PORT; errors name the command line option."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > 65535:
        raise UsageError(f"{option} {address}: not an address such as 127.0.0.1:9464 or [::1]:9464")
    return found["v6"] or found["host"], int(found["port"])


def join_address(host: str, port: int) -> str:
    """Format HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class HttpServer:
    """HTTP server in a thread of its own, with an asyncio loop."""

    def __init__(self, address: str, answer: Callable[[str], Awaitable[Answer]]) -> None:
        """Listen at `HOST:PORT`. `answer` is called in the thread's event loop with the requested path."""
        self._socket = listen(address, "--prometheus", MAX_CONNECTIONS)
        host, port = self._socket.getsockname()[:2]
        self.address = join_address(host, port)
        self.public = not ipaddress.ip_address(host.partition("%")[0]).is_loopback
        self._answer = answer
        self._open: dict[asyncio.Task[None], None] = {}
        """Open connections, the oldest first."""
        self._loop = asyncio.new_event_loop()
        # Errors of single connections are not printed.
        self._loop.set_exception_handler(lambda *_: None)
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="ddpwatch metrics", daemon=True)
        self._thread.start()

    def call(self, action: Callable[[], object]) -> None:
        """Run `action` in the server's thread; does nothing once closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action)

    def close(self) -> None:
        """Close all connections and stop."""
        self.call(self._stop.set)
        self._thread.join(CLOSING_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._listen())
        finally:
            self._loop.close()
            self._socket.close()

    async def _listen(self) -> None:
        self._await_next()
        await self._stop.wait()
        self._loop.remove_reader(self._socket)
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            # Connections are closed one turn after their task.
            await asyncio.sleep(0)

    def _await_next(self) -> None:
        if not self._stop.is_set():
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            # No file descriptor is left; accept again once some are released.
            self._loop.remove_reader(self._socket)
            self._loop.call_later(RECHECK_S, self._await_next)
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._serve(connection))
        self._open[task] = None
        # Not in the task itself: a task canceled before it begins closes nothing.
        task.add_done_callback(partial(self._let_go, connection))
        if len(self._open) > MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            # Removed at once: the next connection must find another one to close.
            del self._open[oldest]
            oldest.cancel()

    def _let_go(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)
        connection.close()

    async def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(asyncio.TimeoutError, OSError):
            await asyncio.wait_for(self._converse(connection), CONNECTION_S)

    async def _converse(self, connection: socket.socket) -> None:
        """Read one request and send one response."""
        head = b""
        while b"\r\n\r\n" not in head:
            part = await self._loop.sock_recv(connection, MAX_HEAD_BYTES)
            if not part:
                return
            head += part
            if len(head) > MAX_HEAD_BYTES:
                await self._loop.sock_sendall(connection, _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))
                return
        await self._loop.sock_sendall(connection, await self._respond(head))

    async def _respond(self, head: bytes) -> bytes:
        words = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _response(HTTPStatus.BAD_REQUEST)
        method, target, _ = words
        if method not in {"GET", "HEAD"}:
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, headers="Allow: GET, HEAD\r\n")
        found = await self._answer(target.partition("?")[0])
        if found is None:
            return _response(HTTPStatus.NOT_FOUND)
        return _response(HTTPStatus.OK, *found, bodiless=method == "HEAD")


def _response(
    status: HTTPStatus, content_type: str = "text/plain; charset=utf-8", body: bytes | None = None, *,
    headers: str = "", bodiless: bool = False,
) -> bytes:  # fmt: skip
    body = f"{status.phrase}\n".encode() if body is None else body
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        f"X-Content-Type-Options: nosniff\r\n{headers}Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if bodiless else body)
