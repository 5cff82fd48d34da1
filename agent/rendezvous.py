"""How the ranks of a job agree on a run id and tell each other where they listen.

Through the job's own key-value store, with a client of its own: the store's clients hold a lock while they wait, so
the training's must not be shared. Only requests that the store answers at once: nothing here waits for a peer, and
nothing is a collective.
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

from ddpwatch import curve, rundir
from ddpwatch.rundir import SCHEMA, Endpoint, RunFile
from ddpwatch.wire import fit

if TYPE_CHECKING:
    from ddpwatch.agent.registration import Identity

PATIENCE: Final = timedelta(seconds=10)
MAX_GENERATIONS: Final = 100
"""That are passed on the way to our own."""
_endpoint_decoder: Final = msgspec.json.Decoder(Endpoint)
_run_decoder: Final = msgspec.json.Decoder(RunFile)


def new_run(identity: Identity, name: str) -> RunFile:
    """A run that nobody else knows yet."""
    return RunFile(
        schema=SCHEMA,
        id=secrets.token_hex(4),
        name=fit(name),
        job=fit(identity.job),
        attempt=identity.attempt,
        world_size=identity.world_size,
        started_unix_s=time.time(),
        endpoints=[],
        viewer_secret_key=curve.new_keys()[1] if curve.available() else "",
    )


class Rendezvous:
    """One rank's side of the exchange. Whoever comes first names the run, so no rank depends on another's coming.

    Launchers may keep one store over restarts, in which the ranks of a world that is gone have left their marks: see
    `_generation`. An agent may be closed and installed again: the store counts the meetings of each rank, and the n-th
    ones of a generation belong together.
    """

    def __init__(self, identity: Identity, name: str) -> None:
        self._store: Any = _own_client()
        self._store.set_timeout(PATIENCE)
        self.store_host = _host_of(self._store)
        """Where the job's store is; empty = it is a file."""
        generation = _generation(self._store, identity)
        place = f"ddpwatch/{generation}"
        turn = self._store.add(f"{place}/turn/{identity.rank}", 1)
        self._prefix = f"{place}/{turn}"
        self._world_size = identity.world_size
        self._endpoints: dict[int, Endpoint] = {}
        self._reported = 0
        """Announcements that were there when it was last looked."""
        self._leads = False
        # torchrun does not count restarts because of ranks that come or go, and counts on each node for itself.
        attempt = max(identity.attempt, generation - 1)
        proposal = msgspec.json.encode(new_run(replace(identity, attempt=attempt), name)).decode()
        self.run: RunFile = _run_decoder.decode(self._store.compare_set(f"{self._prefix}/run", "", proposal))
        """The run all ranks are in."""

    @property
    def can_announce(self) -> bool:
        """Whether the store is still at hand."""
        return self._store is not None

    def is_first_called(self, host: str, node: str) -> bool:
        """Whether no other node that came before has the same name for its host."""
        first: bytes = self._store.compare_set(f"{self._prefix}/host/{host}", "", node)
        return first.decode() == node

    def announce(self, endpoint: Endpoint, *, settled: bool) -> bool:
        """Tell the others where this rank listens. True for the first of its node, who looks after the rest.

        May be called again with more to tell. Who is not `settled` wants to hear whether there are other nodes.
        """
        own = str(endpoint.rank).encode()
        first = self._store.compare_set(f"{self._prefix}/node", "", endpoint.node)
        if first.decode() != endpoint.node:
            self._store.set(f"{self._prefix}/many", "yes")
        self._store.set(f"{self._prefix}/rank/{endpoint.rank}", msgspec.json.encode(endpoint).decode())
        self._store.add(f"{self._prefix}/announced", 1)
        self._leads = self._store.compare_set(f"{self._prefix}/leader/{endpoint.node}", "", own.decode()) == own
        if settled and not self._leads:
            self._store = None
        return self._leads

    def spans_hosts(self) -> bool | None:
        """Whether ranks have come from more than one node; None = not so far, and some are still to come."""
        try:
            if self._store is None:
                return False
            if self._store.check([f"{self._prefix}/many"]):
                return True
            if self._store.add(f"{self._prefix}/announced", 0) < self._world_size:
                return None
            # The last of them has told of its node before it was counted.
            if self._store.check([f"{self._prefix}/many"]):
                return True
        except RuntimeError:
            self._store = None
        if not self._leads:
            self._store = None
        return False

    def collect(self) -> list[Endpoint]:
        """Everybody who has announced so far, by rank. Lets go of the store with the last one, or when it is gone."""
        if self._store is not None:
            try:
                self._poll()
            except RuntimeError:
                # The job is ending, or whoever kept the store has left: what is known is what there is.
                self._store = None
        return [self._endpoints[rank] for rank in sorted(self._endpoints)]

    def _poll(self) -> None:
        # One question tells whether there is news; a thousand ranks are not asked for one by one every time.
        reported = self._store.add(f"{self._prefix}/announced", 0)
        if reported == self._reported:
            return
        self._reported = reported
        for rank in range(self._world_size):
            known = self._endpoints.get(rank)
            key = f"{self._prefix}/rank/{rank}"
            if (known is None or not known.tcp_address) and self._store.check([key]):
                self._endpoints[rank] = _endpoint_decoder.decode(self._store.get(key))
        if len(self._endpoints) == self._world_size and self._is_final():
            self._store = None

    def _is_final(self) -> bool:
        """Whether nobody has anything to add: all listen on TCP, or it is clear that none has to."""
        if all(endpoint.tcp_address for endpoint in self._endpoints.values()):
            return True
        return len({endpoint.node for endpoint in self._endpoints.values()}) == 1


def _generation(store: Any, identity: Identity) -> int:
    """Which of the worlds that have met in this store is ours, counted from 1.

    The newest, if it has as many ranks as ours, our launcher was at the same attempt in it, and nobody else was this
    rank; otherwise one of our own making, in which the others find us. No rank waits for another. A rank whose
    forerunner had not come as far as this may find that place free, and be alone in an old run.
    """
    itself = f"{rundir.node_id()}/{os.getpid()}/{rundir.created_s(os.getpid())}"
    # Each launcher of a job counts its restarts for itself, but alike for all that it starts.
    launcher = os.environ.get("GROUP_RANK", "")
    claims = {"world": str(identity.world_size), f"attempt/{launcher}": str(identity.attempt)}
    claims[f"process/{identity.rank}"] = itself
    newest = store.compare_set("ddpwatch/newest", "", "1").decode()
    for _ in range(MAX_GENERATIONS):
        places = [(f"ddpwatch/{newest}/{name}", claim) for name, claim in claims.items()]
        if all(store.compare_set(key, "", claim).decode() == claim for key, claim in places):
            return int(newest)
        newest = store.compare_set("ddpwatch/newest", newest, str(int(newest) + 1)).decode()
    raise RuntimeError("the ranks of this job do not agree on how many they are")


def _host_of(store: Any) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _own_client() -> Any:
    """A second client of the job's store."""
    c10d: Any = dist.distributed_c10d
    store = c10d._get_default_store()
    if hasattr(store, "clone"):
        return store.clone()
    # torch before 2.6: the layers of prefixes cannot be read; generations keep restarts apart.
    base = store
    while hasattr(base, "underlying_store"):
        base = base.underlying_store
    if isinstance(base, c10d.TCPStore):
        return c10d.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False)
    if isinstance(base, c10d.FileStore):
        return c10d.FileStore(base.path, -1)
    raise RuntimeError(f"the job's store is a {type(base).__name__}, which ddpwatch cannot open a second time")
