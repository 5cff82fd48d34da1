"""`ddpwatch watch --json` as a process, whose words are taken as they come."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING

from tests.builders.training import wait_for

if TYPE_CHECKING:
    from tests.builders.forked_cli import Forker


class Watcher:
    """Use it in a `with` block; at its end the process is killed and reaped, whatever it does."""

    def __init__(self, forker: Forker, run_dir, *arguments: str) -> None:
        self.changes: list[dict] = []
        """All objects that it has printed so far."""
        self.stderr = ""
        """What it has said beside; known when it has ended."""
        self._process = forker.start(["watch", "--json", *arguments], {**os.environ, "DDPWATCH_RUN_DIR": str(run_dir)})
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()
        self._listener.start()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._listener.join()
        self._process.close()

    def wait_for(self, condition, timeout_s: float = 60.0) -> dict:
        """The first change for which the condition holds, as soon as it is printed."""

        def look():
            found = next(filter(condition, list(self.changes)), None)
            assert found or self._reader.is_alive(), f"it has ended, and has said only {self.changes}"
            return found

        return wait_for(look, timeout_s)

    def finish(self) -> int:
        """Its exit code, when it has ended by itself and all its words are there."""
        code = self._process.wait(60)
        self._reader.join(60)
        self._listener.join(60)
        return code

    def of(self, rule: str) -> list[dict]:
        """The changes of a rule's alerts."""
        return [change for change in list(self.changes) if change["rule"] == rule]

    def _read(self) -> None:
        for line in self._process.stdout:
            self.changes.append(json.loads(line))

    def _listen(self) -> None:
        self.stderr = self._process.stderr.read()
