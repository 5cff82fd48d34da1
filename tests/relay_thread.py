"""A relay in a thread of its own, on a free port of loopback."""

from __future__ import annotations

import contextlib
import threading
from contextlib import closing

from ddpwatch.outputs.relaying import Relay


class RelayThread:
    """Serves a run until it ends, or is stopped."""

    def __init__(self, run, *, bind: str = "127.0.0.1:0", advertise: str | None = None) -> None:
        self.refused = self.passed = 0
        self.ended = ""
        self.bound_port = 0
        self.tickets = []
        """What was written, the latest last."""
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(run, bind, advertise), daemon=True)
        self._thread.start()
        assert self._ready.wait(10), "no relay"

    @property
    def ticket(self):
        return self.tickets[-1]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _serve(self, run, bind, advertise) -> None:
        with closing(Relay(run, bind, advertise, lambda: self.tickets.append(relay.ticket))) as relay:
            self.tickets.append(relay.ticket)
            self.bound_port = relay._listener.getsockname()[1]
            self._ready.set()
            while not relay.ended and not self._stop.is_set():
                relay.turn()
                self.refused, self.passed, self.ended = relay.refused, relay.passed, relay.ended


@contextlib.contextmanager
def relayed(run, **options):
    """A relay for the length of the block."""
    relay = RelayThread(run, **options)
    try:
        yield relay
    finally:
        relay.stop()
