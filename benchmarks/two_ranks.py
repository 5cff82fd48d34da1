"""The step time of a real job of two gloo ranks, with and without ddpwatch, a viewer attached."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import shutil
import tempfile
import threading
from statistics import median
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PAIRS = 80
STEPS = 20
BUDGET = 1.004


def _rank(rank: int, place: str, results: Any) -> None:
    import ddpwatch.agent

    os.environ.update(DDPWATCH_RUN_DIR=f"{place}/run", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(384, 256)

    def block() -> float:
        times_ns = []
        for index in range(STEPS + 5):
            began_ns = perf_counter_ns()
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            if index >= 5:
                times_ns.append(perf_counter_ns() - began_ns)
        return median(times_ns)

    block()
    rows = []
    for _ in range(PAIRS):
        agent = ddpwatch.agent.install(model)
        with_it = block()
        assert agent.active, "the agent has switched itself off; there is nothing to measure"
        agent.close()
        rows.append((with_it, block(), block()))
    if rank == 0:
        results.put(rows)
    dist.destroy_process_group()


def _watch(place: str, over: threading.Event) -> None:
    """Attach to every run that appears, as a person with a terminal would."""
    from ddpwatch import rundir
    from ddpwatch.sources.live import Live

    base = rundir.Path(place) / "run"
    seen: dict[str, Live] = {}
    while not over.wait(0.1):
        with contextlib.suppress(OSError):
            for run in rundir.scan(base)[0]:
                if run.id not in seen:
                    seen[run.id] = Live(run)
        for source in seen.values():
            while type(source.poll(0)).__name__ == "Frame":
                pass
    for source in seen.values():
        source.close()


def _first_result(results: Any, ranks: list[Any]) -> list[tuple[float, float, float]]:
    while True:
        try:
            return results.get(timeout=1)  # type: ignore[no-any-return]
        except queue.Empty:
            if not all(process.is_alive() for process in ranks):
                raise SystemExit("a rank of the two-rank benchmark has died; see above") from None


def main() -> None:
    """Ratios of neighbouring blocks."""
    from benchmarks.pairs import noise, row

    place = tempfile.mkdtemp(prefix="ddpw-")
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, place, results), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    over = threading.Event()
    viewer = threading.Thread(target=_watch, args=(place, over))
    viewer.start()
    try:
        rows = _first_result(results, ranks)
    finally:
        over.set()
        viewer.join()
        for process in ranks:
            process.join(20)
            process.kill()
        shutil.rmtree(place, ignore_errors=True)
    ratio = median(on / off for on, off, _ in rows)
    spread = noise([a / b - 1 for _, a, b in rows])
    base_ms = median(off for _, off, _ in rows) / 1e6
    row(
        f"two gloo ranks, steps of {base_ms:.1f} ms, viewer attached",
        f"x {ratio:.4f}",
        f"x {BUDGET}",
        ratio <= BUDGET or ratio - 1 <= spread,
        f"noise ± {spread:.4f}",
    )


if __name__ == "__main__":
    main()
