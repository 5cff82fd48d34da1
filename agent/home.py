"""Where this rank of this run lives on this host: its directory, its socket, its name."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import socket as sockets
from itertools import count
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psutil
import torch

from ddpwatch import rundir, wire
from ddpwatch.agent.identity import Identity, identify, joined, peers_expected
from ddpwatch.agent.meeting import Meeting, new_run
from ddpwatch.version import VERSION

if TYPE_CHECKING:
    from pathlib import Path

    import zmq

_turns: Final = count()


class Home:
    """Finds out which run this process belongs to, listens there, and keeps `run.json` true.

    A process with no process group yet is a run of its own, unless a launcher promised it peers; once a group
    exists it is `outdated` and the rank moves to the run it shares with them.
    """

    def __init__(self, base: Path, name: str) -> None:
        self._base = base
        self._name = name
        self._turn = next(_turns)
        self._node = rundir.node_id()
        self._process = psutil.Process()
        self._meeting: Meeting | None = None
        self._run: rundir.RunFile | None = None
        self._endpoint: rundir.Endpoint | None = None
        self._written = -1
        self.identity: Identity = identify()

    @property
    def outdated(self) -> bool:
        """Whether a process group has come into being since this home was found."""
        return self._meeting is None and joined()

    def find(self) -> bool:
        """Learn the run; False while the peers that are expected have not met. Never waits."""
        self.leave()
        self.identity = identify()
        if peers_expected():
            return False
        if joined():
            if self._meeting is None:
                self._meeting = Meeting(self.identity, self._name, self._turn)
            self._run = self._meeting.run()
        else:
            self._run = new_run(self.identity, self._name)
        return self._run is not None

    def open(self, socket: zmq.Socket[bytes]) -> str:
        """Bind the socket in the run's directory and tell the peers; the address."""
        assert self._run is not None
        rundir.ensure_base(self._base)
        rundir.prune(self._base)
        path = rundir.socket_path(self._base, self._run.id, self.identity.rank)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        address = f"ipc://{path}"
        socket.bind(address)
        self._endpoint = rundir.Endpoint(
            rank=self.identity.rank,
            host=wire.fit(sockets.gethostname()),
            node=self._node,
            pid=os.getpid(),
            pid_created_s=self._process.create_time(),
            address=address,
        )
        if self._meeting is not None:
            self._meeting.announce(self._endpoint)
        self.tend()
        return address

    def tend(self) -> None:
        """Write `run.json` anew when more ranks are known; the lowest rank of each node does."""
        assert self._run is not None
        assert self._endpoint is not None
        if self._written == self.identity.world_size or self.identity.local_rank not in (None, 0):
            return
        endpoints = [self._endpoint] if self._meeting is None else self._meeting.collect()
        here = [endpoint.rank for endpoint in endpoints if endpoint.node == self._node]
        if len(endpoints) != self._written and here and here[0] == self.identity.rank:
            rundir.write(self._base, msgspec.structs.replace(self._run, endpoints=endpoints))
            self._written = len(endpoints)

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
            backend=wire.fit(self.identity.backend),
            python=platform.python_version(),
            torch=wire.fit(str(torch.__version__)),
            **description,
        )

    def leave(self) -> None:
        """Take this rank's socket away, and the whole directory with the last of them."""
        if self._run is None or self._endpoint is None:
            return
        directory = self._base / self._run.id
        rundir.socket_path(self._base, self._run.id, self.identity.rank).unlink(missing_ok=True)
        self._endpoint = None
        self._written = -1
        with contextlib.suppress(OSError):
            if not any(entry.suffix == ".sock" for entry in directory.iterdir()):
                shutil.rmtree(directory)
