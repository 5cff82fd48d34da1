"""What strangers at the TCP ports cost a training: half-open connections, garbage, handshakes with a wrong key.

Two real gloo ranks listen on loopback, a viewer watches. A process knocks all the time: in turn at the ranks' ports and
at one that nobody serves, so that what it takes from the machine itself is in both. Parameters are compared with those
of a job without ddpwatch.

python -m benchmarks.strangers
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
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PAIRS = 12
BLOCK_S = 1.5
WARM_UP_STEPS = 20
HALF_OPEN = 10_000
KNOCKS_PER_S = 2000
BUDGET = 1.004
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(54, b"\0")


def _train(place: str, rank: int, steps: Any, block: Any) -> str:
    """Steps in blocks until told to end, or as many as were taken before; a digest of the parameters."""
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


def _watched(rank: int, place: str, at_ranks: Any, results: Any) -> None:
    import ddpwatch.agent

    os.environ.update(DDPWATCH_RUN_DIR=f"{place}/run", DDPWATCH_BIND="tcp", DDPWATCH_HOST="127.0.0.1")

    def block(model: nn.Module, step: Any, count: list[int]) -> None:
        agent: Any = ddpwatch.agent.install(model)
        more, switch = torch.ones(1), torch.zeros(1)
        while not agent._publisher.address:
            time.sleep(0.01)
        for number in itertools.count():
            attacked = number % 2 == 0
            switch[0] = float(attacked)
            if rank == 0:
                at_ranks.value = attacked
            times_s = []
            more[0] = 1.0
            began_s = time.monotonic()
            while more[0]:
                times_s.append(step())
                count[0] += 1
                more[0] = float(rank != 0 or time.monotonic() - began_s < BLOCK_S)
                dist.all_reduce(more, dist.ReduceOp.MIN)
            if rank == 0:
                results.put(("block", attacked, median(times_s)))
            if number == 2 * PAIRS:
                break
        assert agent.active, "the agent has switched itself off"
        results.put(("memory", rank, psutil.Process().memory_info().rss))
        agent.close()

    count = [0]
    digest = _train(f"{place}/store", rank, count, block)
    results.put(("digest", count[0], digest))


def _alone(rank: int, place: str, steps: int, results: Any) -> None:
    def block(_: nn.Module, step: Any, count: int) -> None:
        for _ in range(count):
            step()

    results.put(("digest", steps, _train(f"{place}/alone", rank, steps, block)))


def _knock(ports: list[int], nobody: int, at_ranks: Any, made: Any) -> None:
    """Come as fast as told, in every manner, and keep what was opened for as long as there is room for it."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, HALF_OPEN + 64), most))
    held: list[socket.socket] = []
    garbage = [b"", os.urandom(64), GREETING + os.urandom(200), b"GET / HTTP/1.1\r\n\r\n"]
    began_s = time.monotonic()
    for number in itertools.count():
        stranger = socket.socket()
        stranger.setblocking(False)
        port = ports[number % len(ports)] if at_ranks.value else nobody
        stranger.connect_ex(("127.0.0.1", port))
        with contextlib.suppress(OSError):
            stranger.send(garbage[number % len(garbage)])
        held.append(stranger)
        if len(held) >= HALF_OPEN - 64:
            for old in held[:256]:
                old.close()
            del held[:256]
        made.value += bool(at_ranks.value)
        time.sleep(max(0.0, began_s + number / KNOCKS_PER_S - time.monotonic()))


def _watch(place: str, over: threading.Event, seen: dict[str, float], ready: threading.Event) -> None:
    """A viewer over TCP, which notes the longest time without a beat of rank 0, and the ranks' descriptors."""
    import msgspec

    from ddpwatch import rundir, wire
    from ddpwatch.sources.frames import Frame
    from ddpwatch.sources.live import Live

    runs: list[rundir.RunFile] = []
    while not (runs and len(runs[0].endpoints) == 2):
        time.sleep(0.1)
        runs = rundir.scan(Path(place) / "run")[0] if Path(place, "run").exists() else []
    seen["ports"] = 0
    endpoints = [msgspec.structs.replace(each, node="elsewhere") for each in runs[0].endpoints]
    live = Live(msgspec.structs.replace(runs[0], endpoints=endpoints))
    seen["pids"] = [each.pid for each in endpoints]  # type: ignore[assignment]
    seen["at"] = [int(each.tcp_address.rpartition(":")[2]) for each in endpoints]  # type: ignore[assignment]
    seen["key"] = runs[0].viewer_secret_key  # type: ignore[assignment]
    ready.set()
    last_s = 0.0
    while not over.is_set():
        item = live.poll(50)
        if isinstance(item, Frame) and item.topic == b"beat":
            beat = wire.decode(item.payload)
            if beat.rank == 0:
                now_s = time.monotonic()
                seen["gap"] = max(seen.get("gap", 0.0), now_s - last_s if last_s else 0.0)
                last_s = now_s
        with contextlib.suppress(psutil.Error):
            files = psutil.Process(endpoints[0].pid).num_fds()
            seen["files"] = max(seen.get("files", 0.0), files)
            seen.setdefault("files_before", files)
    live.close()


def main() -> None:
    """Attack a job, compare it with itself and with one that nobody watches."""
    from benchmarks.pairs import noise, row

    place = tempfile.mkdtemp(prefix="ddpw-")
    context = multiprocessing.get_context("spawn")
    results, at_ranks, made = context.Queue(), context.Value("b", 0), context.Value("l", 0)
    ranks = [context.Process(target=_watched, args=(rank, place, at_ranks, results), daemon=True) for rank in range(2)]
    over, ready = threading.Event(), threading.Event()
    seen: dict[str, Any] = {}
    viewer = threading.Thread(target=_watch, args=(place, over, seen, ready), daemon=True)
    stranger = None
    try:
        for process in ranks:
            process.start()
        viewer.start()
        assert ready.wait(120), "the ranks do not listen"
        with socket.create_server(("127.0.0.1", 0), backlog=8) as nobody:
            address = nobody.getsockname()[1]
            stranger = context.Process(target=_knock, args=(seen["at"], address, at_ranks, made), daemon=True)
            stranger.start()
            told = [results.get(timeout=300) for _ in range(2 * PAIRS + 1 + 2 + 2)]
    finally:
        over.set()
        viewer.join(10)
        for process in [*ranks, *([stranger] if stranger is not None else [])]:
            process.kill()
            if process.pid:
                process.join(10)
    blocks = [time_s for kind, _, time_s in told if kind == "block"][1:]  # the first one also has the start in it
    quiet, attacked = blocks[0::2], blocks[1::2]
    ratios = [b / a for a, b in zip(quiet, attacked, strict=True)]
    between = [b / a - 1 for a, b in itertools.pairwise(quiet)]
    digests = {(count, digest) for kind, count, digest in told if kind == "digest"}
    ((steps, digest),) = digests
    quiet_ranks = [context.Process(target=_alone, args=(rank, place, steps, results), daemon=True) for rank in range(2)]
    for process in quiet_ranks:
        process.start()
    same = all(results.get(timeout=300) == ("digest", steps, digest) for _ in quiet_ranks)
    for process in quiet_ranks:
        process.join(30)
    shutil.rmtree(place, ignore_errors=True)
    ratio, spread = median(ratios), noise(between)
    row(
        f"two gloo ranks of {median(quiet) * 1e3:.1f} ms steps, {made.value} strangers knock",
        f"x {ratio:.4f}",
        f"x {BUDGET}",
        ratio <= BUDGET or ratio - 1 <= spread,
        f"noise ± {spread:.4f}",
    )
    row("  parameters as without ddpwatch, bit for bit", "yes" if same else "NO", "yes", same, f"{steps} steps")
    row("  longest wait for a beat", f"{seen['gap']:.2f} s", "1 s", seen["gap"] <= 1.0)
    taken = seen["files"] - seen["files_before"]
    row("  most descriptors taken by strangers", f"{taken:.0f}", "320", taken <= 320)
    memory = max(size for kind, _, size in told if kind == "memory")
    row("  memory of a rank", f"{memory >> 20} MiB", "-", holds=True)


if __name__ == "__main__":
    main()
