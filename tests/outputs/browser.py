"""Headless Chromium controlled over a pipe (DevTools protocol): its requests, console messages and rendering."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
GIVE_UP_S = 60


def find_chromium() -> str | None:
    """Path of the browser; None if it is not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors do not collide with 3 and 4, which the child gets."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]


class Page:
    """One tab, with the URLs it requested (`requests`) and its console messages (`complaints`)."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.loaded = False
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters):
        return self._browser.call(method, parameters, self._session)

    def resize(self, width: int, height: int = 900, *, mobile: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def prefer(self, scheme: str) -> None:
        """Set the preferred color scheme, light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, address: str) -> None:
        self.loaded = False
        self.call("Page.navigate", url=address)
        self._browser.wait(lambda: self.loaded)

    def value(self, expression: str):
        """Evaluate a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def run_view(self, *, whole: bool = True) -> bytes:
        """Take a PNG screenshot of the page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def pdf(self) -> bytes:
        answer = self.call("Page.printToPDF", printBackground=True, preferCSSPageSize=True)
        return base64.b64decode(answer["data"])

    def take(self, method: str, parameters: dict) -> None:
        """Handle an event of the tab."""
        match method:
            case "Page.loadEventFired":
                self.loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.consoleAPICalled" if parameters["type"] in {"error", "warning", "assert"}:
                self.complaints.append(json.dumps(parameters["args"]))
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in {"error", "warning"}:
                self.complaints.append(parameters["entry"]["text"])


class Browser:
    """Chromium with a fresh profile; `close` ends all of its processes."""

    def __init__(self) -> None:
        chromium = find_chromium()
        assert chromium is not None
        self._profile = tempfile.TemporaryDirectory(prefix="ddpw-chromium-", ignore_cleanup_errors=True)
        theirs_read, self._write = _pipe()
        self._read, theirs_write = _pipe()
        # A proxy that does not exist: every request to the network fails and is recorded.
        flags = [
            "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "--no-first-run",
            "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions",
            "--proxy-server=127.0.0.1:9", "--hide-scrollbars", "--force-device-scale-factor=1",
        ]  # fmt: skip
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # required when running as root

        def hand_over() -> None:
            # It reads from 3 and writes to 4; all other descriptors are closed on exec.
            os.dup2(theirs_read, 3)
            os.dup2(theirs_write, 4)

        self._child = subprocess.Popen(
            [chromium, *flags],
            preexec_fn=hand_over,  # noqa: PLW1509 - two system calls, which take no lock
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_read)
        os.close(theirs_write)
        self._number = 0
        self._answers: dict[int, dict] = {}
        self._pages: dict[str, Page] = {}
        self._unread = b""

    def page(self) -> Page:
        """Open an empty tab."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        self._pages[session] = page = Page(self, session)
        return page

    def call(self, method: str, parameters: dict, session: str | None = None) -> dict:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        self.wait(lambda: number in self._answers)
        answer = self._answers.pop(number)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def wait(self, happened) -> None:
        """Read messages until the condition holds."""
        deadline_s = time.monotonic() + GIVE_UP_S
        while not happened():
            ready, _, _ = select.select([self._read], [], [], max(deadline_s - time.monotonic(), 0))
            assert ready, "Chromium does not answer"
            data = os.read(self._read, 1 << 20)
            assert data, "Chromium has ended"
            *messages, self._unread = (self._unread + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers[message["id"]] = message
                elif (page := self._pages.get(message.get("sessionId"))) is not None:
                    page.take(message["method"], message["params"])

    def close(self) -> None:
        # A session of its own, so that its child processes are killed with it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()
