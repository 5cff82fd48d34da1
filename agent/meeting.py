"""How the ranks of a job agree on a run id and tell each other where they listen.

Through the job's own key-value store, with a client of its own: the store's clients hold a lock while they wait, so
the training's must not be shared. Every question is a `check` before a `get`: nothing here waits for a peer, and
nothing is a collective.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist

from ddpwatch.rundir import SCHEMA, Endpoint, RunFile
from ddpwatch.wire import fit

if TYPE_CHECKING:
    from ddpwatch.agent.identity import Identity

_endpoint_decoder = msgspec.json.Decoder(Endpoint)
_run_decoder = msgspec.json.Decoder(RunFile)


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
    )


class Meeting:
    """One rank's side of the exchange. `turn` tells the `turn`-th installation in a process from an earlier one."""

    def __init__(self, identity: Identity, name: str, turn: int) -> None:
        self._identity = identity
        self._prefix = f"ddpwatch/{turn}"
        self._store: Any = _own_client()
        self._missing = set(range(identity.world_size))
        self._endpoints: dict[int, Endpoint] = {}
        if identity.rank == 0:
            self._store.set(f"{self._prefix}/run", msgspec.json.encode(new_run(identity, name)).decode())

    def run(self) -> RunFile | None:
        """The run all ranks are in; None until rank 0 has said so."""
        text = self._get(f"{self._prefix}/run")
        return None if text is None else _run_decoder.decode(text)

    def announce(self, endpoint: Endpoint) -> None:
        """Tell the others where this rank listens."""
        self._store.set(f"{self._prefix}/rank/{endpoint.rank}", msgspec.json.encode(endpoint).decode())

    def collect(self) -> list[Endpoint]:
        """Everybody who has announced so far, by rank."""
        for rank in sorted(self._missing):
            text = self._get(f"{self._prefix}/rank/{rank}")
            if text is not None:
                self._endpoints[rank] = _endpoint_decoder.decode(text)
                self._missing.discard(rank)
        return [self._endpoints[rank] for rank in sorted(self._endpoints)]

    @property
    def complete(self) -> bool:
        """Whether every rank has announced."""
        return not self._missing

    def _get(self, key: str) -> bytes | None:
        if not self._store.check([key]):
            return None
        value: bytes = self._store.get(key)
        return value


def _own_client() -> Any:
    """A second client of the job's store."""
    c10d: Any = dist.distributed_c10d
    store = c10d._get_default_store()
    if hasattr(store, "clone"):
        return store.clone()
    # torch before 2.6: the layers of prefixes cannot be read, so the job's attempt must keep restarts apart.
    base = store
    while hasattr(base, "underlying_store"):
        base = base.underlying_store
    if isinstance(base, c10d.TCPStore):
        return c10d.TCPStore(base.host, base.port, is_master=False, wait_for_workers=False)
    if isinstance(base, c10d.FileStore):
        return c10d.FileStore(base.path, -1)
    raise RuntimeError(f"the job's store is a {type(base).__name__}, which ddpwatch cannot open a second time")
