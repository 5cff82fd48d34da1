"""Registration of a rank: its identity in the job, its run directory and sockets, and `run.json`."""

from __future__ import annotations

import errno
import os
import platform
import socket as sockets
import sys
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter_ns, time_ns
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch
import torch.distributed as dist
import zmq

from ddpwatch import encryption, rundir, wire
from ddpwatch.agent.rendezvous import Rendezvous, new_run
from ddpwatch.agent.resource_limits import usable_cores
from ddpwatch.agent.tcp_listener import NoAddressError, TcpListener, listen
from ddpwatch.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

UNNAMED: Final = "none"
"""Job name that torchrun uses when it was given none."""


@dataclass(frozen=True)
class Identity:
    """Rank and size by the process group, or by the launcher's environment before there is one."""

    rank: int
    world_size: int
    local_rank: int | None
    """None = unknown."""
    attempt: int
    job: str
    backend: str


def joined() -> bool:
    """Whether the job's process group exists."""
    return dist.is_available() and dist.is_initialized()


def identify() -> Identity:
    """The current identity of this process."""
    rank, world_size, backend = _in_group()
    return Identity(
        rank=rank,
        world_size=world_size,
        local_rank=_number("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
        attempt=_number("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT") or 0,
        job=_job_name(),
        backend=backend,
    )


def _job_name() -> str:
    """Job number of the scheduler, or else the launcher's name for the job; empty = neither."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{part}", "") for part in ("JOB_ID", "TASK_ID"))
    if array and task:
        return f"{array}_{task}"  # as squeue prints it
    named = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return os.environ.get("SLURM_JOB_ID") or ("" if named == UNNAMED else named)


def _in_group() -> tuple[int, int, str]:
    if joined():
        try:
            return dist.get_rank(), dist.get_world_size(), str(dist.get_backend())
        except (ValueError, AssertionError):
            pass  # the training thread has destroyed the group meanwhile
    return 0, 1, ""


def _expects_peers() -> bool:
    """Whether the launcher's environment promises several ranks."""
    return (_number("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE") or 1) > 1


def _expects_hosts() -> bool | None:
    """Whether the launcher's environment promises ranks on several hosts; None = unknown."""
    mpi = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    for everywhere, here in (("WORLD_SIZE", "LOCAL_WORLD_SIZE"), mpi):
        world_size, local_size = _number(everywhere), _number(here)
        if world_size and local_size:
            return world_size > local_size
    nodes = _number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    return None if nodes is None or _number("SLURM_PROCID") is None else nodes > 1


def script_name() -> str:
    """Default name of the run: `DDPWATCH_RUN_NAME`, or the script's file name."""
    stem = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-c", "-m") else ""
    return os.environ.get("DDPWATCH_RUN_NAME") or stem or "python"


def _number(*names: str) -> int | None:
    for name in names:
        text = os.environ.get(name, "")
        if text.isdecimal():
            return int(text)
    return None


BIND: Final = "DDPWATCH_BIND"
NO_CURVE: Final = "libzmq was built without CURVE"
MAX_REFRESH_S: Final = 10.0
"""Upper bound in seconds of the exponential backoff between checks of `run.json`."""
BIND_TRIES: Final = 5
"""Attempts to bind a socket whose directory is removed at the same moment."""


class RunRegistration:
    """Finds the run of this process, binds its sockets, and keeps `run.json` up to date.

    Without a process group a process is a run of its own, unless the launcher promises peers. Once a group exists, the
    registration is outdated and the rank moves to the run that it shares with them.
    """

    def __init__(self, base: Path, name: str, note: Callable[[str, str], None]) -> None:
        self._base = base
        self._name = name
        self._note = note
        self.tcp_listener: TcpListener | None = None
        """The port for viewers on other hosts, if there is one."""
        self._keys: tuple[str, str] | None = None
        """CURVE keys of the port, public and secret; the secret one is never shared."""
        self._tcp_decided = False
        """Whether it is known that this rank listens on TCP, or that it need not."""
        self._node = rundir.node_id()
        self._rendezvous: Rendezvous | None = None
        self._run: rundir.RunFile | None = None
        self._endpoint: rundir.Endpoint | None = None
        self._socket_path: Path | None = None
        self._leads = False
        """Whether this rank writes `run.json` for its node."""
        self._written: list[rundir.Endpoint] = []
        self._refresh_every_s = 0.0
        self._next_refresh_s = 0.0
        self._cores = usable_cores()
        self.identity: Identity = identify()

    @property
    def is_outdated(self) -> bool:
        """Whether a process group was created after this run was found."""
        return self._rendezvous is None and joined()

    def find(self) -> bool:
        """Determine the run; False while the peers that a launcher promised are missing. Never waits for them."""
        if self._run is not None and not self.is_outdated:
            return True
        # Asked once, and first: the training thread may create or destroy the group at any moment.
        grouped = joined()
        self.identity = identify()
        if not grouped and _expects_peers():
            return False
        if grouped:
            self._rendezvous = Rendezvous(self.identity, self._name)
            self._run = self._rendezvous.run
        else:
            self._run = new_run(self.identity, self._name)
        self._endpoint = self._keys = None
        return True

    def open(
        self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], new_threads: Iterable[str] = ()
    ) -> str:
        """Bind the socket in the run's directory, and on TCP if the job has several hosts; announce it to the peers.

        Returns its address on this host. `new_threads` were started for the socket.
        """
        assert self._run is not None
        rundir.ensure_base(self._base)
        path = rundir.socket_path(self._base, self._run.id, self.identity.rank)
        address = f"ipc://{path}"
        self._socket_path = path
        _bind(socket, address, path.parent)
        self._opening = (context, socket, frozenset(new_threads))
        wants_tcp = self._wants_tcp()
        self._tcp_decided = wants_tcp is not None
        remote = self._open_tcp() if wants_tcp else ("", "")
        if self._endpoint is None:
            self._endpoint = rundir.Endpoint(
                rank=self.identity.rank,
                host=self._host_name(remote[0]),
                node=self._node,
                pid=os.getpid(),
                pid_created_s=rundir.created_s(os.getpid()) or 0.0,
                address=address,
            )
            self._announce(remote)
        elif remote[0] != self._endpoint.tcp_address:  # it listens again, after descriptors were scarce
            self._announce(remote)
        self._written = []
        self._refresh_every_s = self._next_refresh_s = 0.0
        self.refresh()
        if self._leads:
            rundir.prune(self._base)
        return address

    def refresh(self) -> None:
        """Rewrite `run.json` when more ranks are known or the file is gone; one rank per node does it.

        Checks at every call while ranks arrive, and with exponential backoff while nothing changes.
        """
        if self.tcp_listener is not None:
            self.tcp_listener.check_load()
        if (self._tcp_decided and not self._leads) or monotonic() < self._next_refresh_s:
            return
        assert self._run is not None
        assert self._endpoint is not None
        if not self._tcp_decided:
            self._decide_tcp()
        endpoints = [self._endpoint] if self._rendezvous is None else self._rendezvous.collect() if self._leads else []
        directory = self._base / self._run.id
        gone = self._leads and not (directory / rundir.RUN_FILE).exists() and directory.exists()
        if endpoints != self._written or gone:
            rundir.write(self._base, msgspec.structs.replace(self._run, endpoints=endpoints))
            self._written = endpoints
            self._refresh_every_s = 0.0
        else:
            self._refresh_every_s = min(MAX_REFRESH_S, self._refresh_every_s * 2 + 0.1)
        self._next_refresh_s = monotonic() + self._refresh_every_s

    def _wants_tcp(self) -> bool | None:
        """Whether this rank should listen on TCP; None = that depends on where its peers are."""
        setting = os.environ.get(BIND, "").lower()
        if setting in {"tcp", "ipc"}:
            return setting == "tcp"
        if setting and self._endpoint is None:
            self._note("tcp", f"{BIND}={setting[:40]} is neither tcp nor ipc, and counts as if it were not set.")
        if self._endpoint is not None and self._endpoint.tcp_address:
            return True
        return False if self._rendezvous is None or self.identity.world_size == 1 else _expects_hosts()

    def _decide_tcp(self) -> None:
        """Listen on TCP as soon as a rank on another node is known."""
        assert self._rendezvous is not None
        spans = self._rendezvous.spans_hosts()
        self._tcp_decided = spans is not None
        if spans:
            self._announce(self._open_tcp())

    def _open_tcp(self) -> tuple[str, str]:
        """Listen on TCP, too: the address and the public key, or empty and a note with the reason."""
        assert self._run is not None
        try:
            listener, address = self._listen()
        except NoAddressError as error:
            self._note("tcp", f"This rank can be watched on its own host only, not over TCP: {error}.")
            return "", ""
        context, socket, threads = self._opening
        viewers = encryption.public_of(self._run.viewer_secret_key)
        self._keys = self._keys or encryption.new_keys()
        self.tcp_listener = TcpListener(context, socket, listener, self._keys[1], viewers, threads, self._note)
        return address, self._keys[0]

    def _listen(self) -> tuple[sockets.socket, str]:
        assert self._run is not None
        if not self._run.viewer_secret_key or not encryption.available():
            raise NoAddressError(NO_CURVE)
        store_host = "" if self._rendezvous is None else self._rendezvous.store_host
        place = self.identity.rank if self.identity.local_rank is None else self.identity.local_rank
        before = self._endpoint.tcp_address.rpartition(":")[2] if self._endpoint is not None else ""
        return listen(store_host, place, lambda text: self._note("tcp", text), port=int(before or 0))

    def _announce(self, remote: tuple[str, str]) -> None:
        assert self._endpoint is not None
        self._endpoint = msgspec.structs.replace(self._endpoint, tcp_address=remote[0], server_key=remote[1])
        if self._rendezvous is None:
            self._leads = True
        else:
            self._leads = self._rendezvous.announce(self._endpoint, tcp_decided=self._tcp_decided)

    def _host_name(self, remote: str) -> str:
        """This host's name, with its address or node id if another node of the job has the same name."""
        name = wire.fit(sockets.gethostname(), 120)
        if self._rendezvous is None or self._rendezvous.claim_host_name(name, self._node):
            return name
        own = remote.partition("://")[2].rpartition(":")[0] or self._node.rpartition("/")[2]
        return wire.fit(f"{name} ({own})")

    def hello(self, seq: int, description: dict[str, Any]) -> wire.Hello:
        """The message that describes this rank."""
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

    def shut(self) -> None:
        """Close the TCP port, before the socket is closed."""
        if self.tcp_listener is not None:
            self.tcp_listener.close()
            self.tcp_listener = None

    def leave(self, last_words: bytes = b"") -> None:
        """Remove this rank's socket file, and the directory with the last one; after the sockets are closed."""
        if self._socket_path is not None:
            rundir.leave(self._socket_path, last_words)
        self._socket_path = None


def _bind(socket: zmq.Socket[bytes], address: str, directory: Path) -> None:
    for attempt in range(1, BIND_TRIES + 1):
        directory.mkdir(mode=0o700, exist_ok=True)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            # The last rank to leave may remove the directory at this moment.
            if error.errno != errno.ENOENT or attempt == BIND_TRIES:
                raise
        else:
            return
