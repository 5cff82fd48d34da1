"""A viewer with the run's key that floods a rank and disconnects at once must not crash the rank.

libzmq 4.3.5 aborts its process when it finds a heartbeat in what a peer has left behind, if that peer's connection was
reset while its messages waited for room.
"""

import contextlib
import select
import socket as sockets
import struct
import time

import psutil
import zmq

from ddpwatch import encryption
from ddpwatch.agent.request_limits import CHECK_INTERVAL_S, READ_AHEAD
from tests.builders.training import wait_for
from tests.builders.watched_training import Training
from tests.faults.viewer import Viewer, find_run, hasty

TCP = {"DDPWATCH_BIND": "tcp", "DDPWATCH_HOST": "127.0.0.1"}
FLOOD = 3 * READ_AHEAD
HEARTBEATS = 10
ATTEMPTS = 8
RESET = struct.pack("ii", 1, 0)
"""Linger for no time: the connection is not closed but reset."""


def trains_with_little_patience(stop):
    encryption.LISTENER_PATIENCE_S = encryption.LISTENER_PROBES
    Training().steps_until(stop)


class Leaver:
    """A viewer behind a proxy that collects its bytes, sends them at once, and then resets the connection."""

    def __init__(self, run) -> None:
        self._outside = sockets.create_server(("127.0.0.1", 0))
        self._context = zmq.Context()
        self._viewer = hasty(self._context, run, f"tcp://127.0.0.1:{self._outside.getsockname()[1]}")
        self._near, _ = self._outside.accept()
        self._far = sockets.create_connection(("127.0.0.1", int(run.endpoints[0].tcp_address.rpartition(":")[2])))

    def __enter__(self):
        self._viewer.send(b"\x01beat")
        # Until it is accepted and receives something.
        while not self._viewer.poll(0):
            self._pass_on()
        return self

    def _pass_on(self) -> None:
        for ready in select.select([self._near, self._far], [], [], 0.01)[0]:
            other = self._far if ready is self._near else self._near
            if not (text := ready.recv(1 << 16)):
                raise ConnectionResetError
            other.sendall(text)

    def leave(self) -> None:
        """Send a flood of subscriptions, each with heartbeats behind it, as one piece; then reset the connection."""
        for number in range(FLOOD):
            self._viewer.send(b"\x01%d" % number)
        kept = b""
        while kept.count(b"\x07MESSAGE") < FLOOD + HEARTBEATS:
            kept += self._near.recv(1 << 16)
        # The agent looks, and then not for a moment.
        self._far.sendall(kept)
        time.sleep(CHECK_INTERVAL_S / 8)
        self._far.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, RESET)
        self._far.close()

    def __exit__(self, *_) -> None:
        self._far.close()
        self._near.close()
        self._outside.close()
        self._context.destroy(linger=0)


def connections_of(pid) -> int:
    """How many of the rank's TCP connections are not yet over, as it sees them."""
    return sum(each.status == psutil.CONN_ESTABLISHED for each in psutil.Process(pid).net_connections("tcp"))


def test_a_viewer_that_floods_and_leaves_does_not_crash_the_rank_and_is_dropped(start, run_dir, tmp_path):
    child = start(trains_with_little_patience, tmp_path / "stop", env=TCP)
    run = find_run(run_dir)
    for _ in range(ATTEMPTS):
        # A rank that is gone refuses, and its exit code says more.
        with contextlib.suppress(ConnectionError), Leaver(run) as leaver:
            leaver.leave()
        if child.ended():
            break
    else:
        assert wait_for(lambda: not connections_of(child.pid))
        with Viewer(run.endpoints[0].address) as viewer:
            viewer.read(viewer.trained(2))
    (tmp_path / "stop").touch()

    assert child.wait() == 0
