"""A relay in a thread of its own, on a free port of loopback, and a tunnel as `ssh -L` makes one."""

from __future__ import annotations

import contextlib
import socket
import threading
from contextlib import closing

from ddpwatch.outputs.relay import Relay


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


class Tunnel:
    """A port here whose bytes go to another one there, until it is cut. Use it in a `with` block."""

    def __init__(self) -> None:
        self.target = 0
        """The port there."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join(10)
        self.cut()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for end in self._ends:
            end.close()

    def cut(self) -> None:
        """End the connections that are there; new ones are let through."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self.target))
                self._ends += [here, there]
                for pair in ((here, there), (there, here)):
                    self._threads.append(threading.Thread(target=self._pump, args=pair, daemon=True))
                    self._threads[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                target.sendall(part)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
