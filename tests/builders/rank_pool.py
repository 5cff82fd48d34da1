"""Real gloo ranks that are started once and run one scenario after another.

A scenario is a plain function `scenario(rank, world_size, **arguments)` in a test module; every rank calls it inside a
fresh process group and what it returns comes back to the test. Starting torch takes seconds, a scenario a fraction
of one, so the processes are forked from one that has it, and kept; one that hangs or dies is killed and replaced.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import TYPE_CHECKING

from tests.builders.fake_rank import short_directory

if TYPE_CHECKING:
    from tests.builders.zygote import Zygote

GLOO_SETTLES_S = 0.01
"""Seconds for gloo's threads to free the callbacks and tensors of the last step, which takes the GIL. Before torch 2.8,
a group that is destroyed holds the GIL while it waits for these threads.
"""


class ScenarioFailed(Exception):
    """A rank raised, died or did not answer; the text holds its traceback."""


class Rank:
    """One process that receives over a pipe what to run."""

    def __init__(self, zygote: Zygote) -> None:
        with short_directory() as place, Listener(str(place / "rank"), "AF_UNIX") as listener:
            self._process = zygote.start(serve, listener.address)
            self._pipe = listener.accept()

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return not self._process.ended()

    def send(self, *order) -> None:
        self._pipe.send(order)

    def answer(self, timeout_s: float):
        if not self._pipe.poll(timeout_s):
            raise ScenarioFailed(f"rank process {self.pid} did not answer within {timeout_s} s")
        try:
            done, value = self._pipe.recv()
        except EOFError:
            raise ScenarioFailed(f"rank process {self.pid} died:\n{self._process.output()}") from None
        if not done:
            raise ScenarioFailed(value)
        return value

    def kill(self) -> None:
        self._process.discard()
        self._pipe.close()


class Pool:
    """As many ranks as the largest scenario needed so far."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._ranks: list[Rank] = []
        self.env: dict[str, str] = {}
        """Environment of every scenario."""

    def run(self, scenario, world_size: int, *, timeout_s: float = 60.0, env: dict | None = None, **arguments) -> list:
        """What each rank returned, by rank."""
        return self.start(scenario, world_size, env=env, **arguments).finish(timeout_s)

    def start(self, scenario, world_size: int, *, env: dict | None = None, **arguments) -> Running:
        """Begin a scenario and return at once."""
        while len(self._ranks) < world_size:
            self._ranks.append(Rank(self._zygote))
        handle, store = tempfile.mkstemp(prefix="ddpw-store-")
        os.close(handle)
        Path(store).unlink()
        for rank in range(world_size):
            self._ranks[rank].send(scenario, rank, world_size, store, {**self.env, **(env or {})}, arguments)
        return Running(self, world_size, Path(store))

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks = []


class Running:
    """A scenario under way."""

    def __init__(self, pool: Pool, world_size: int, store: Path) -> None:
        self._pool = pool
        self._store = store
        self.ranks = pool._ranks[:world_size]

    def finish(self, timeout_s: float = 60.0) -> list:
        failures, values = [], []
        for rank in self.ranks:
            try:
                values.append(rank.answer(timeout_s))
            except ScenarioFailed as failure:
                failures.append(str(failure))
                timeout_s = 5.0
        self._store.unlink(missing_ok=True)
        if failures:
            # What state the processes are in is anybody's guess.
            self._pool.close()
            raise ScenarioFailed("\n".join(failures))
        return values


def serve(address: str) -> None:
    """Answer orders until nobody gives any more."""
    import torch
    import torch.distributed as dist

    import ddpwatch.agent

    pipe = Client(address)
    while True:
        try:
            scenario, rank, world_size, store, env, arguments = pipe.recv()
        except EOFError:
            return
        before = dict(os.environ)
        try:
            os.environ.update(env)
            torch.manual_seed(0)
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world_size),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=60),
            )
            answer = (True, scenario(rank, world_size, **arguments))
        except BaseException:
            answer = (False, f"rank {rank}:\n{traceback.format_exc()}")
        finally:
            if ddpwatch.agent._current is not None:
                ddpwatch.agent._current.close()
            if dist.is_initialized():
                time.sleep(GLOO_SETTLES_S)
                dist.destroy_process_group()
            os.environ.clear()
            os.environ.update(before)
        pipe.send(answer)
