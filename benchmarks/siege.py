"""A training under attack, measured against itself: what benchmarks of strangers and of garbage have in common.

Two real gloo ranks listen on loopback, a viewer watches over TCP. A process attacks all the time: in turn the ranks and
a port that no process serves, so that what it takes from the machine itself is in both. Parameters are compared with
those of a job without ddpwatch.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
import os
import shutil
import socket
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable

CORES = sorted(os.sched_getaffinity(0))
RANKS_CORES = CORES[: max(1, len(CORES) // 2)]
OTHERS_CORES = CORES[len(CORES) // 2 :]
"""Ranks and attackers have cores of their own: attackers are on other machines, and what those pay is not asked."""
SETTLE_S = 0.3
"""At the beginning of a block, in which what the one before has left is worked off."""
PATIENCE_S = 120.0
"""For the next word of a rank."""


@dataclass(frozen=True)
class Plan:
    """How long it goes on."""

    pairs: int
    attacked_s: float
    quiet_s: float
    wanted: int = 0
    """Not less than this many attacks; `pairs` are the fewest then, and `most_pairs` the most."""
    most_pairs: int = 0
    lifted: bool = False
    """Whether the ranks take all that viewers send, with none of their limits."""


@dataclass(frozen=True)
class Target:
    """What an attacker knows."""

    ports: list[int]
    """Of the ranks."""
    nobody: int
    """A port where connections are not taken."""
    files: list[str]
    """Socket files of the ranks: access to their directory replaces the key."""
    server_keys: list[str]
    viewer_secret_key: str


@dataclass
class Outcome:
    """What has become of it."""

    quiet_s: list[float] = field(default_factory=list)
    """Median steps of the blocks without attack, and of those with one that follow them."""
    attacked_s: list[float] = field(default_factory=list)
    steps: int = 0
    same: bool = False
    """Whether the parameters are those of the same training without ddpwatch."""
    made: int = 0
    spent_quiet: list[float] = field(default_factory=list)
    """Of a core, by ddpwatch's threads in rank 0: its own and ZeroMQ's, in the same blocks."""
    spent_attacked: list[float] = field(default_factory=list)
    gap_s: float = 0.0
    """Longest time without a beat of rank 0, as a viewer saw it."""
    descriptors: int = 0
    """Most that were taken of rank 0."""
    memory_bytes: int = 0
    """Of the larger rank, at the end."""
    grown_bytes: int = 0
    """Of the rank that has grown most, from before the first attack to the highest afterwards."""
    notes: list[str] = field(default_factory=list)
    """Notes of the ranks about it, by kind."""

    @property
    def ratio(self) -> float:
        """How many times longer a step takes under attack."""
        return median(b / a for a, b in zip(self.quiet_s, self.attacked_s, strict=True))

    @property
    def between(self) -> list[float]:
        """How blocks without attack differ from each other."""
        return [b / a - 1 for a, b in itertools.pairwise(self.quiet_s)]


def siege(attack: Callable[[Target, Any, Any], None], plan: Plan) -> Outcome:
    """Have a process `attack(target, at_ranks, made)` while `at_ranks` is true, and nobody otherwise."""
    began_s = time.monotonic()
    place = tempfile.mkdtemp(prefix="ddpw-")
    context = multiprocessing.get_context("spawn")
    results, at_ranks, made = context.Queue(), context.Value("b", 0), context.Value("l", 0)
    arguments = (place, plan, at_ranks, made, results)
    ranks = [context.Process(target=_watched, args=(rank, *arguments), daemon=True) for rank in range(2)]
    outcome, over, ready = Outcome(), threading.Event(), threading.Event()
    targets: list[Target] = []
    viewer = threading.Thread(target=_watch, args=(place, over, ready, targets, outcome), daemon=True)
    processes = list(ranks)
    try:
        for process in ranks:
            process.start()
        viewer.start()
        assert ready.wait(120), "the ranks do not listen"
        with socket.create_server(("127.0.0.1", 0), backlog=8) as nobody:
            psutil.Process().cpu_affinity(OTHERS_CORES)
            target = Target(**{**vars(targets[0]), "nobody": nobody.getsockname()[1]})
            processes.append(context.Process(target=attack, args=(target, at_ranks, made), daemon=True))
            processes[-1].start()
            digests = _gather(results, outcome)
    finally:
        over.set()
        viewer.join(10)
        for process in processes:
            process.kill()
            if process.pid:
                process.join(10)
    outcome.made = made.value
    ((outcome.steps, digest),) = digests
    alone = [context.Process(target=_alone, args=(rank, place, outcome.steps, results), daemon=True) for rank in (0, 1)]
    for process in alone:
        process.start()
    # They may take as long as the others did.
    took_s = time.monotonic() - began_s + PATIENCE_S
    outcome.same = all(results.get(timeout=took_s) == ("digest", outcome.steps, digest) for _ in alone)
    for process in alone:
        process.join(30)
    shutil.rmtree(place, ignore_errors=True)
    return outcome


def _gather(results: Any, outcome: Outcome) -> set[tuple[int, str]]:
    """What the ranks report until both have ended."""
    digests: list[tuple[int, str]] = []
    while len(digests) < 2:
        kind, *values = results.get(timeout=PATIENCE_S)
        if kind == "block":
            (outcome.attacked_s if values[0] else outcome.quiet_s).append(values[1])
            (outcome.spent_attacked if values[0] else outcome.spent_quiet).append(values[2])
        elif kind == "memory":
            before, after, highest = values
            outcome.memory_bytes = max(outcome.memory_bytes, after)
            outcome.grown_bytes = max(outcome.grown_bytes, highest - before)
        else:
            digests.append((values[0], values[1]))
    return set(digests)


def _train(place: str, rank: int, steps: Any, block: Any) -> str:
    """Train in blocks of steps until stopped, or for a given number; returns a digest of the parameters."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    batch = torch.randn(384, 256)

    def step() -> float:
        began_s = time.perf_counter()
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        return time.perf_counter() - began_s

    block(model, step, steps)
    dist.barrier()
    parts = [parameter.detach().numpy().tobytes() for parameter in model.parameters()]
    dist.destroy_process_group()
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _watched(rank: int, place: str, plan: Plan, at_ranks: Any, made: Any, results: Any) -> None:
    """Two blocks without attack, of which the first also has the start in it; then in turn with and without."""
    import ddpwatch.agent
    from ddpwatch.agent import request_limits as subscriptions

    os.environ.update(DDPWATCH_RUN_DIR=f"{place}/run", DDPWATCH_BIND="tcp", DDPWATCH_HOST="127.0.0.1")
    if plan.lifted:
        subscriptions.MAX_MESSAGES = 1 << 30  # type: ignore[misc]
        subscriptions.MAX_BACKOFF_S = subscriptions.BACKOFF_S  # type: ignore[misc]
    process = psutil.Process()
    process.cpu_affinity(RANKS_CORES)

    def block(model: nn.Module, step: Any, count: list[int]) -> None:
        agent: Any = ddpwatch.agent.install(model)
        more = torch.ones(1)
        while not agent._publisher.address:
            time.sleep(0.01)
        sizes: list[int] = []
        for number in itertools.count():
            attacked = number > 0 and number % 2 == 0
            if rank == 0:
                at_ranks.value = attacked
            times_s = []
            length_s = plan.attacked_s if attacked else plan.quiet_s
            more[0] = 1.0
            spent_s = _spent_s(agent._publisher.native_id)
            began_s = time.monotonic()
            while more[0]:
                time_s = step()
                count[0] += 1
                if time.monotonic() - began_s > SETTLE_S:
                    times_s.append(time_s)
                more[0] = float(rank != 0 or time.monotonic() - began_s < length_s)
                dist.all_reduce(more, dist.ReduceOp.MIN)
            took_s = time.monotonic() - began_s
            spent = (_spent_s(agent._publisher.native_id) - spent_s) / took_s
            sizes.append(process.memory_info().rss)
            if rank == 0 and number > 0:
                results.put(("block", attacked, median(times_s), spent))
            pairs = number // 2
            enough = (pairs >= plan.pairs and made.value >= plan.wanted) or pairs >= (plan.most_pairs or plan.pairs)
            more[0] = float(not (attacked and enough))
            dist.broadcast(more, 0)
            if not more[0]:
                break
        assert agent.active, "the agent has switched itself off"
        results.put(("memory", sizes[1], sizes[-1], max(sizes[2:])))
        agent.close()

    count = [0]
    digest = _train(f"{place}/store", rank, count, block)
    results.put(("digest", count[0], digest))


def _spent_s(agent: int) -> float:
    """What the agent's thread and ZeroMQ's have worked in this process, those that have ended left out."""
    spent_ns = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if int(task.name) == agent or (task / "comm").read_text().startswith("ZMQbg"):
                spent_ns += int((task / "schedstat").read_text().split()[0])
    return spent_ns / 1e9


def _alone(rank: int, place: str, steps: int, results: Any) -> None:
    def block(_: nn.Module, step: Any, count: int) -> None:
        for _ in range(count):
            step()

    results.put(("digest", steps, _train(f"{place}/alone", rank, steps, block)))


def _watch(place: str, over: threading.Event, ready: threading.Event, targets: list[Target], outcome: Outcome) -> None:
    """A viewer over TCP, which notes the longest time without a beat of rank 0, and the rank's descriptors."""
    import msgspec

    from ddpwatch import rundir, wire
    from ddpwatch.sources.frames import Frame
    from ddpwatch.sources.live import Live

    runs: list[rundir.RunFile] = []
    while not (runs and len(runs[0].endpoints) == 2):
        time.sleep(0.1)
        runs = rundir.scan(Path(place) / "run")[0] if Path(place, "run").exists() else []
    endpoints = [msgspec.structs.replace(each, node="elsewhere") for each in runs[0].endpoints]
    live = Live(msgspec.structs.replace(runs[0], endpoints=endpoints))
    ports = [int(each.tcp_address.rpartition(":")[2]) for each in endpoints]
    files = [each.address.removeprefix("ipc://") for each in endpoints]
    keys = [each.server_key for each in endpoints]
    targets.append(Target(ports, 0, files, keys, runs[0].viewer_secret_key))
    ready.set()
    process = psutil.Process(endpoints[0].pid)
    last_s, before, kinds = 0.0, 0, set()
    look_s = 0.0
    while not over.is_set():
        item = live.poll(50)
        now_s = time.monotonic()
        if isinstance(item, Frame) and item.payload:
            message = wire.decode(item.payload)
            if isinstance(message, wire.Note):
                kinds.add(message.kind)
            if isinstance(message, (wire.Beat, wire.Snap)) and message.rank == 0:
                outcome.gap_s = max(outcome.gap_s, now_s - last_s if last_s else 0.0)
                last_s = now_s
        if now_s >= look_s:
            look_s = now_s + 0.05
            with contextlib.suppress(psutil.Error):
                held = process.num_fds()
                before = before or held
                outcome.descriptors = max(outcome.descriptors, held - before)
    outcome.notes = sorted(kinds)
    live.close()
