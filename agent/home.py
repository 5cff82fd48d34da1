"""Where this rank of this run lives on this host: its directory, its socket, its name."""

from __future__ import annotations

import errno
import os
import platform
import socket as sockets
from time import monotonic, perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
import zmq

from ddpwatch import rundir, wire
from ddpwatch.agent.cores import usable_cores
from ddpwatch.agent.identity import Identity, identify, joined, peers_promised
from ddpwatch.agent.meeting import Meeting, new_run
from ddpwatch.version import VERSION

if TYPE_CHECKING:
    from pathlib import Path

MOST_LOOK_S: Final = 10.0
BIND_TRIES: Final = 5


class Home:
    """Finds out which run this process belongs to, listens there, and keeps `run.json` true.

    A process with no process group yet is a run of its own, unless a launcher promised it peers; once a group
    exists it is `outdated` and the rank moves to the run it shares with them.
    """

    def __init__(self, base: Path, name: str) -> None:
        self._base = base
        self._name = name
        self._node = rundir.node_id()
        self._meeting: Meeting | None = None
        self._run: rundir.RunFile | None = None
        self._endpoint: rundir.Endpoint | None = None
        self._socket_path: Path | None = None
        self._leads = False
        self._written = 0
        self._look_every_s = 0.0
        self._next_look_s = 0.0
        self._cores = usable_cores()
        self.identity: Identity = identify()

    @property
    def outdated(self) -> bool:
        """Whether a process group has come into being since this home was found."""
        return self._meeting is None and joined()

    def find(self) -> bool:
        """Learn the run; False while a launcher's promise of peers has not come true. Never waits for them."""
        if self._run is not None and not self.outdated:
            return True
        # Asked once and first: the group may come into being, or go, at any line below.
        grouped = joined()
        self.identity = identify()
        if not grouped and peers_promised():
            return False
        if grouped:
            self._meeting = Meeting(self.identity, self._name)
            self._run = self._meeting.run
        else:
            self._run = new_run(self.identity, self._name)
        self._endpoint = None
        return True

    def open(self, socket: zmq.Socket[bytes]) -> str:
        """Bind the socket in the run's directory and tell the peers; the address."""
        assert self._run is not None
        rundir.ensure_base(self._base)
        path = rundir.socket_path(self._base, self._run.id, self.identity.rank)
        address = f"ipc://{path}"
        self._socket_path = path
        _bind(socket, address, path.parent)
        if self._endpoint is None:  # and not back after a while without descriptors
            self._endpoint = rundir.Endpoint(
                rank=self.identity.rank,
                host=wire.fit(sockets.gethostname()),
                node=self._node,
                pid=os.getpid(),
                pid_created_s=rundir.created_s(os.getpid()) or 0.0,
                address=address,
            )
            self._leads = self._meeting is None or self._meeting.announce(self._endpoint)
        self._written = 0
        self._look_every_s = self._next_look_s = 0.0
        self.tend()
        if self._leads:
            rundir.prune(self._base)
        return address

    def tend(self) -> None:
        """Write `run.json` anew when more ranks are known or somebody took it away; one rank of each node does.

        Looks at every call while ranks are coming, and ever more rarely while nothing changes.
        """
        if not self._leads or monotonic() < self._next_look_s:
            return
        assert self._run is not None
        assert self._endpoint is not None
        endpoints = [self._endpoint] if self._meeting is None else self._meeting.collect()
        directory = self._base / self._run.id
        if len(endpoints) != self._written or (not (directory / rundir.RUN_FILE).exists() and directory.exists()):
            rundir.write(self._base, msgspec.structs.replace(self._run, endpoints=endpoints))
            self._written = len(endpoints)
            self._look_every_s = 0.0
        else:
            self._look_every_s = min(MOST_LOOK_S, self._look_every_s * 2 + 0.1)
        self._next_look_s = monotonic() + self._look_every_s

    def hello(self, seq: int, description: dict[str, Any]) -> wire.Hello:
        """Who this rank is."""
        assert self._run is not None
        assert self._endpoint is not None
        return wire.Hello(
            rank=self.identity.rank,
            seq=seq,
            wire_version=wire.WIRE_VERSION,
            agent_version=VERSION,
            run_id=self._run.id,
            run_name=self._run.name,
            attempt=self._run.attempt,
            world_size=self.identity.world_size,
            local_rank=self.identity.local_rank or 0,
            host=self._endpoint.host,
            pid=self._endpoint.pid,
            started_unix_ns=int(self._run.started_unix_s * 1e9),
            mono_ns=perf_counter_ns(),
            unix_ns=time_ns(),
            backend=wire.fit(self.identity.backend),
            python=platform.python_version(),
            torch=wire.fit(str(torch.__version__)),
            cores=self._cores,
            **description,
        )

    def leave(self, last_words: bytes = b"") -> None:
        """Take this rank's socket away, and the whole directory with the last of them."""
        if self._socket_path is not None:
            rundir.leave(self._socket_path, last_words)
        self._socket_path = None


def _bind(socket: zmq.Socket[bytes], address: str, directory: Path) -> None:
    for attempt in range(1, BIND_TRIES + 1):
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            # A rank that was the last to leave may take the directory away just now.
            if error.errno != errno.ENOENT or attempt == BIND_TRIES:
                raise
        else:
            return
