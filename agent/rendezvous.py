"""Rendezvous of a job's ranks: they agree on a run id and exchange addresses through the job's key-value store.

With a store client of its own: a client holds a lock while it waits, so the training's must not be shared. Only
requests that the store answers at once: nothing here waits for a peer, and nothing is a collective.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch.distributed as dist

from ddpwatch import encryption, rundir
from ddpwatch.agent.torch_private import default_store
from ddpwatch.rundir import SCHEMA, Endpoint, RunFile
from ddpwatch.wire import fit

if TYPE_CHECKING:
    from ddpwatch.agent.registration import Identity

TIMEOUT: Final = timedelta(seconds=10)
MAX_GENERATIONS: Final = 100
"""Earlier generations to skip before giving up."""
_endpoint_decoder: Final = msgspec.json.Decoder(Endpoint)
_run_decoder: Final = msgspec.json.Decoder(RunFile)


def new_run(identity: Identity, name: str) -> RunFile:
    """A run with a new id and key."""
    return RunFile(
        schema=SCHEMA,
        id=secrets.token_hex(4),
        name=fit(name),
        job=fit(identity.job),
        attempt=identity.attempt,
        world_size=identity.world_size,
        started_unix_s=time.time(),
        endpoints=[],
        viewer_secret_key=encryption.new_keys()[1] if encryption.available() else "",
    )


class Rendezvous:
    """One rank's side of the exchange. The first rank to arrive names the run, so no rank depends on another.

    A launcher may keep one store over restarts, with entries of earlier attempts in it: see `_generation`. An agent may
    be closed and installed again: the store counts the turns of each rank, and equal turns of a generation belong
    together.
    """

    def __init__(self, identity: Identity, name: str) -> None:
        self._store: Any = _own_client()
        self._store.set_timeout(TIMEOUT)
        self.store_host = str(getattr(_base_of(self._store), "host", ""))
        """Host of the job's store; empty = it is a file."""
        generation = _generation(self._store, identity)
        place = f"ddpwatch/{generation}"
        turn = self._store.add(f"{place}/turn/{identity.rank}", 1)
        self._prefix = f"{place}/{turn}"
        self._world_size = identity.world_size
        self._endpoints: dict[int, Endpoint] = {}
        self._announced = 0
        """Announcements in the store at the last poll."""
        self._leads = False
        # torchrun does not count restarts for ranks that join or leave, and counts on each node separately.
        attempt = max(identity.attempt, generation - 1)
        proposal = msgspec.json.encode(new_run(replace(identity, attempt=attempt), name)).decode()
        self.run: RunFile = _run_decoder.decode(self._store.compare_set(f"{self._prefix}/run", "", proposal))
        """The run of all ranks."""

    def claim_host_name(self, host: str, node: str) -> bool:
        """Claim a host name for a node; False if another node has claimed it before."""
        first: bytes = self._store.compare_set(f"{self._prefix}/host/{host}", "", node)
        return first.decode() == node

    def announce(self, endpoint: Endpoint, *, tcp_decided: bool) -> bool:
        """Publish this rank's endpoint, again after a change. True for the first rank of its node, which collects all.

        The store stays open until it is decided whether the rank listens on TCP.
        """
        if self._store is None:
            return self._leads
        own = str(endpoint.rank).encode()
        first = self._store.compare_set(f"{self._prefix}/node", "", endpoint.node)
        if first.decode() != endpoint.node:
            self._store.set(f"{self._prefix}/many", "yes")
        self._store.set(f"{self._prefix}/rank/{endpoint.rank}", msgspec.json.encode(endpoint).decode())
        self._store.add(f"{self._prefix}/announced", 1)
        self._leads = self._store.compare_set(f"{self._prefix}/leader/{endpoint.node}", "", own.decode()) == own
        if tcp_decided and not self._leads:
            self._store = None
        return self._leads

    def spans_hosts(self) -> bool | None:
        """Whether ranks are on more than one node; None = not so far, and some have not announced yet."""
        try:
            if self._store is None:
                return False
            if self._store.check([f"{self._prefix}/many"]):
                return True
            if self._store.add(f"{self._prefix}/announced", 0) < self._world_size:
                return None
            # Again: the last rank has published its node before it was counted.
            if self._store.check([f"{self._prefix}/many"]):
                return True
        except RuntimeError:
            self._store = None
        if not self._leads:
            self._store = None
        return False

    def collect(self) -> list[Endpoint]:
        """All endpoints announced so far, by rank. Closes the store once all are known, or when it is gone."""
        if self._store is not None:
            try:
                self._poll()
            except RuntimeError:
                # The job is ending, or the process that hosts the store has left.
                self._store = None
        return [self._endpoints[rank] for rank in sorted(self._endpoints)]

    def _poll(self) -> None:
        # One request shows whether there is news, instead of one for each of a thousand ranks.
        announced = self._store.add(f"{self._prefix}/announced", 0)
        if announced == self._announced:
            return
        self._announced = announced
        for rank in range(self._world_size):
            known = self._endpoints.get(rank)
            key = f"{self._prefix}/rank/{rank}"
            if (known is None or not known.tcp_address) and self._store.check([key]):
                self._endpoints[rank] = _endpoint_decoder.decode(self._store.get(key))
        if len(self._endpoints) == self._world_size and self._is_final():
            self._store = None

    def _is_final(self) -> bool:
        """Whether no endpoint will change: all have TCP addresses, or all are on one node."""
        if all(endpoint.tcp_address for endpoint in self._endpoints.values()):
            return True
        return len({endpoint.node for endpoint in self._endpoints.values()}) == 1


def _generation(store: Any, identity: Identity) -> int:
    """Number of this job attempt among all that have used the store, from 1.

    It is the newest one if that has the same world size, the same attempt of our launcher and no other process as this
    rank; otherwise a new one, which the peers then find. No rank waits for another. If the previous process of this
    rank had not reached this point, the rank may find its place free and be alone in an old run.
    """
    process = f"{rundir.node_id()}/{os.getpid()}/{rundir.created_s(os.getpid())}"
    # Each launcher of a job counts its restarts separately, but equally for all ranks that it starts.
    launcher = os.environ.get("GROUP_RANK", "")
    claims = {
        "world": str(identity.world_size),
        f"attempt/{launcher}": str(identity.attempt),
        f"process/{identity.rank}": process,
    }
    newest = store.compare_set("ddpwatch/newest", "", "1").decode()
    for _ in range(MAX_GENERATIONS):
        places = [(f"ddpwatch/{newest}/{name}", claim) for name, claim in claims.items()]
        if all(store.compare_set(key, "", claim).decode() == claim for key, claim in places):
            return int(newest)
        newest = store.compare_set("ddpwatch/newest", newest, str(int(newest) + 1)).decode()
    raise RuntimeError("the ranks of this job do not agree on how many they are")


def _base_of(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _own_client() -> Any:
    """A second client of the job's store."""
    torch_distributed: Any = dist
    store = default_store()
    if hasattr(store, "clone"):
        return store.clone()
    # torch before 2.6: prefixes of the store cannot be read; generations keep restarts apart.
    base = _base_of(store)
    if isinstance(base, torch_distributed.TCPStore):
        return torch_distributed.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False)
    if isinstance(base, torch_distributed.FileStore):
        return torch_distributed.FileStore(base.path, -1)
    raise RuntimeError(f"the job's store is a {type(base).__name__}, which ddpwatch cannot open a second time")
