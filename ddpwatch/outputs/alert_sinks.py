"""Alert sinks: each alert event goes to a shell command (`--exec`) or a webhook.

A sink has one thread and a bounded queue, so that a slow or dead receiver never delays watching. A failure is reported
once for each reason, counted, and ends nothing. Secrets in an address appear in no message.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import unquote, urlsplit, urlunsplit

from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from email.message import Message
    from typing import IO

QUEUE_EVENTS: Final = 256
"""Maximum number of queued events; further ones are dropped and counted."""
LAST_CHANCE_S: Final = 10.0
"""Time, in seconds, to deliver what is queued at the end."""
COMMAND_TIMEOUT_S: float = 30.0
"""Time limit, in seconds, of a command; then it is killed."""
WEB_TIMEOUT_S: float = 5.0
"""Time limit, in seconds, of one attempt of a web request."""
WEB_BACKOFFS_S: tuple[float, ...] = (1.0, 2.0)
"""Backoff, in seconds, between attempts; there is one attempt more than pauses."""
_MAX_REASONS: Final = 32
"""Maximum number of different reasons for failures that are printed."""
_ABORT_S: Final = 1.0
"""Maximum wait, in seconds, for the thread after its delivery was canceled."""


class Receiver(Protocol):
    """Destination of alert events. `deliver` and `abort` are called from different threads."""

    name: str

    def deliver(self, event: dict[str, Any]) -> str | None:
        """Deliver one event; returns the reason of a failure, None on success."""

    def abort(self) -> None:
        """Cancel a delivery in progress and fail every later one."""


class Sink:
    """A receiver with its queue and its thread."""

    def __init__(self, receiver: Receiver, say: Callable[[str], None]) -> None:
        """Start the thread; it calls `say` with one line for each new reason of failure."""
        self.name = receiver.name
        self._receiver, self._say = receiver, say
        self._offered = 0
        self._delivered = 0
        self._reasons: set[str] = set()
        self._given_up = False
        # One more than the events: the end marker must always fit.
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(QUEUE_EVENTS + 1)
        self._thread = threading.Thread(target=self._run, name=f"ddpwatch {self.name}", daemon=True)
        self._thread.start()

    def put(self, event: dict[str, Any]) -> None:
        """Queue one event without blocking."""
        self._offered += 1
        if self._queue.qsize() < QUEUE_EVENTS:
            self._queue.put_nowait(event)

    def close(self, patience_s: float) -> int:
        """Deliver what is queued within `patience_s` and stop; returns the number of undelivered events."""
        self._queue.put_nowait(None)
        self._thread.join(max(0.0, patience_s))
        if self._thread.is_alive():
            self.give_up()
            self._thread.join(_ABORT_S)
        return self._offered - self._delivered

    def give_up(self) -> None:
        """Cancel the delivery in progress and all later ones; failures are only counted from here on."""
        self._given_up = True
        self._receiver.abort()

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                reason = self._receiver.deliver(event)
            except Exception as error:  # noqa: BLE001 - one event that cannot be sent must not end the thread
                # Not its text, which may contain the address.
                reason = f"unexpected {type(error).__name__}"
            if reason is None:
                self._delivered += 1
            elif not self._given_up and reason not in self._reasons and len(self._reasons) < _MAX_REASONS:
                self._reasons.add(reason)
                self._say(f"{self.name} failed: {reason}")


def close_all(sinks: Sequence[Sink], patience_s: float) -> dict[str, int]:
    """Close all sinks within `patience_s` in total; returns the undelivered events of each that has some."""
    deadline_s = time.monotonic() + patience_s
    try:
        left = {sink.name: sink.close(deadline_s - time.monotonic()) for sink in sinks}
    except BaseException:
        # A second Ctrl-C: no child process may stay behind.
        for sink in sinks:
            sink.give_up()
        raise
    return {name: count for name, count in left.items() if count}


class Command:
    """Shell command that gets the event as JSON on stdin and the main facts in its environment.

    Its output goes to stderr, because stdout is for alerts.
    """

    name = "--exec"

    def __init__(self, command: str) -> None:
        """Run `command` for every event."""
        self._command = command
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._aborted = False

    def deliver(self, event: dict[str, Any]) -> str | None:
        """Run the command and wait; on timeout its process group is killed."""
        facts = {f"DDPWATCH_{name.upper()}": str(event[name]) for name in ("rule", "severity", "event")}
        with self._lock:
            if self._aborted:
                return "stopped"
            self._child = child = subprocess.Popen(  # noqa: S602 - the user's own command line
                self._command,
                shell=True,
                env={**os.environ, **facts},
                stdin=subprocess.PIPE,
                stdout=2,
                # Its own process group: Ctrl-C does not reach it, and a kill reaches all of its children.
                start_new_session=True,
            )
        try:
            child.communicate(json.dumps(event).encode() + b"\n", timeout=COMMAND_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            _kill_group(child)
            return f"killed after {COMMAND_TIMEOUT_S:g} s"
        finally:
            if child.poll() is None:
                _kill_group(child)
            if child.stdin:
                with contextlib.suppress(OSError):
                    child.stdin.close()
        if child.returncode < 0:
            return f"killed by signal {-child.returncode}"
        return f"exit code {child.returncode}" if child.returncode else None

    def abort(self) -> None:
        """Kill a running command and start none after it."""
        with self._lock:
            self._aborted = True
            if self._child is not None and self._child.poll() is None:
                _kill_group(self._child)


class Webhook:
    """HTTP endpoint that gets each event as a POST with a JSON body. Redirects are not followed."""

    def __init__(self, url: str) -> None:
        """Raise UsageError unless `url` is an http or https address."""
        self._url, self.name, self._headers = _read_address(url)
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._stop = threading.Event()

    def deliver(self, event: dict[str, Any]) -> str | None:
        """Post the event, with retries after a backoff."""
        body = json.dumps(event).encode()
        tries, reason = 0, ""
        for pause_s in (*WEB_BACKOFFS_S, None):
            if self._stop.is_set():
                return reason or "stopped"
            found = self._post(body)
            tries += 1
            if found is None:
                return None
            reason = found
            if pause_s is not None and self._stop.wait(pause_s):
                break
        return f"{reason} ({tries} {'try' if tries == 1 else 'tries'})"

    def abort(self) -> None:
        """Stop retrying. A request in progress ends with its timeout or with the process."""
        self._stop.set()

    def _post(self, body: bytes) -> str | None:
        request = urllib.request.Request(self._url, body, self._headers, method="POST")  # noqa: S310 - http(s) only, checked when read
        try:
            with self._opener.open(request, timeout=WEB_TIMEOUT_S):
                return None
        except urllib.error.HTTPError as error:
            with error:
                return f"HTTP status {error.code}"
        except urllib.error.URLError as error:
            return _reason(error.reason)
        except (OSError, http.client.HTTPException) as error:
            return _reason(error)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a redirected POST becomes a GET without a body, perhaps to another host."""

    def redirect_request(
        self,
        req: urllib.request.Request,  # noqa: ARG002 - urllib's signature
        fp: IO[bytes],  # noqa: ARG002
        code: int,  # noqa: ARG002
        msg: str,  # noqa: ARG002
        headers: Message,  # noqa: ARG002
        newurl: str,  # noqa: ARG002
    ) -> None:
        return None


def _read_address(url: str) -> tuple[str, str, dict[str, str]]:
    """URL to post to, its name for messages, and headers. Secrets are in the URL and the headers only."""
    refusal = UsageError("--webhook: not an http:// or https:// URL")
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise refusal
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise refusal from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise refusal
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    place = host if port is None else f"{host}:{port}"
    headers = {"Content-Type": "application/json", "User-Agent": "ddpwatch"}
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
    # The name has no path: chat services keep their secret there.
    return urlunsplit((parts.scheme, place, parts.path, parts.query, "")), f"webhook {parts.scheme}://{place}", headers


def _reason(error: object) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    # Not its text, which may come from the server or contain the address.
    return f"invalid response ({type(error).__name__})"


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kill the process group of a child and reap the child."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
