"""Whether a slow rank of a real gloo job is named, and its phase with it: every phase, two sizes, two worlds.

Steps are long without using the processor, so that more ranks than cores can be healthy: every rank sleeps in its
forward pass. The guilty one sleeps longer, in its phase, by a part of the healthy step that was measured before.
A run ends when 40 steps have passed since the alert, or after 400.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddpwatch import rundir
from ddpwatch.core.limits import EvaluationLimits
from ddpwatch.core.metrics.window import gather, ranks_to_compare
from ddpwatch.session.run_follower import RunFollower
from ddpwatch.wire import PHASES

WORLDS = (4, 2)
SIZES = (0.5, 0.2)
FAULTY_PHASES = ("data", "forward", "backward", "optimizer", "other")
BASE_S = 0.025
AFTER_STEPS = 40
MAX_STEPS = 400
GIVE_UP_S = 120.0
BATCH = 16
WIDTH = 32


@dataclass(frozen=True)
class Order:
    """One run and its slow rank; none is slow if `guilty` is not one of its ranks."""

    place: str
    guilty: int
    phase: str
    nap_s: float


@dataclass(frozen=True)
class Word:
    """A change of a straggler alert."""

    step: int
    ranks: tuple[int, ...]
    phase: str | None
    why: str
    """The message, and the numbers behind it."""

    def __str__(self) -> str:
        """As it stands in the table."""
        return f"rank {','.join(map(str, self.ranks))} in {self.phase} at {self.step}"


@dataclass(frozen=True)
class Outcome:
    """Findings in one run."""

    words: list[Word]
    steps: int
    step_s: float
    medians: str
    """Of every phase of every rank, at the end."""


class _Nap(torch.autograd.Function):
    """The identity, with a sleep in its forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _sleep(ctx.backward_s)
        return gradients[0], None, None


class _Net(nn.Module):
    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.naps_s = forward_s, backward_s

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(_Nap.apply(self.first(batch).relu(), *self.naps_s))
        return output


def _sleep(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)


def _serve(rank: int, world_size: int, place: str, pipe: Any) -> None:
    """One rank: a process group for all runs, a model and an agent for each."""
    os.environ.update(DDPWATCH_RUN_DIR=f"{place}/run", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/store{world_size}", rank=rank, world_size=world_size)
    with contextlib.suppress(EOFError):
        while True:
            _train(rank, pipe.recv())
            pipe.send(rank)
    dist.destroy_process_group()


def _train(rank: int, order: Order) -> None:
    import ddpwatch.agent

    naps = dict.fromkeys(FAULTY_PHASES, 0.0)
    if rank == order.guilty:
        naps[order.phase] = order.nap_s
    torch.manual_seed(rank)
    model = DistributedDataParallel(_Net(BASE_S + naps["forward"], naps["backward"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if naps["optimizer"]:
        optimizer.register_step_pre_hook(lambda *_: _sleep(naps["optimizer"]))
    samples = MAX_STEPS * 2 * BATCH
    batches = DataLoader(TensorDataset(torch.randn(samples, WIDTH), torch.randint(0, 4, (samples,))), batch_size=BATCH)
    fetch = batches.collate_fn
    batches.collate_fn = lambda items: (_sleep(naps["data"]), fetch(items))[1]
    agent = ddpwatch.agent.install(model, run_name=Path(order.place).name)
    for step, (batch, target) in enumerate(batches):
        if _is_over(Path(order.place), rank, step):
            break
        _sleep(naps["other"])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), target).backward()
        optimizer.step()
    assert agent.active, "the agent has switched itself off; there is nothing to evaluate"
    agent.close()


def _is_over(place: Path, rank: int, step: int) -> bool:
    """Whether the run ends before this step. All ranks agree, because each step syncs them with rank 0."""
    last = place / "last"
    if rank == 0 and (place / "stop").exists() and not last.exists():
        (place / "draft").write_text(str(step + 1))
        (place / "draft").rename(last)
    return last.exists() and step > int(last.read_text())


class World:
    """Some ranks, and the directory in which they are found. To be closed."""

    def __init__(self, world_size: int, place: Path) -> None:
        """Start the processes."""
        self.world_size, self._place, self._runs = world_size, place, 0
        self._seen: set[str] = set()
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, str(place), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def close(self) -> None:
        """End the processes, whatever they do."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join()

    def run(self, guilty: int = -1, phase: str = "", nap_s: float = 0.0) -> Outcome:
        """One run to its end, watched as `ddpwatch watch` does."""
        self._runs += 1
        place = self._place / f"world{self.world_size}-{self._runs}"
        place.mkdir()
        for pipe in self._pipes:
            pipe.send(Order(str(place), guilty, phase, nap_s))
        with contextlib.closing(RunFollower(self._new_run())) as follower:
            outcome = self._follow(follower, guilty, place)
        for pipe in self._pipes:
            assert pipe.poll(GIVE_UP_S), "a rank does not come to the end of its run"
            pipe.recv()
        return outcome

    def _new_run(self) -> rundir.RunFile:
        deadline_s = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):
                for run in rundir.scan(self._place / "run")[0]:
                    if run.id not in self._seen and len(run.endpoints) == self.world_size == run.world_size:
                        self._seen.add(run.id)
                        return run
            assert all(process.is_alive() for process in self._processes), "a rank has died; see above"
            time.sleep(0.05)
        raise SystemExit("the ranks have not come to train")

    def _follow(self, follower: RunFollower, guilty: int, place: Path) -> Outcome:
        words: list[Word] = []
        state, stop_at = follower.monitor.state, MAX_STEPS
        deadline_s = time.monotonic() + GIVE_UP_S
        while not follower.ended:
            assert time.monotonic() < deadline_s, "the run does not end"
            follower.advance()
            for event in follower.monitor.book.drain():
                finding = event.alert.finding
                if finding.rule == "straggler" and event.kind != "closed":
                    why = f"{finding.message}  {finding.evidence}"
                    words.append(Word(event.alert.last.step or 0, finding.ranks, finding.phase, why))
                    if guilty in finding.ranks:
                        stop_at = min(stop_at, words[-1].step + AFTER_STEPS)
            if (state.step or 0) >= stop_at:
                (place / "stop").touch()
        return Outcome(words, state.step or 0, *_figures(follower))


def _figures(follower: RunFollower) -> tuple[float, str]:
    """The median step in seconds, and those of all phases of all ranks in ms, as text."""
    state = follower.monitor.state
    ranks = ranks_to_compare(state)
    window = gather(state, ranks, upto=min(rank.steps.newest for rank in ranks), steps=EvaluationLimits.MAX_STEPS)
    lines = [f"{'':12}" + "".join(f"{phase:>11}" for phase in (*PHASES, "self", "step"))]
    for row, rank in enumerate(window.ranks):
        phases = [*window.phases_ns[row], window.self_ns[row], window.step_ns[row]]
        lines.append(f"      rank {rank}" + "".join(f"{np.median(values) / 1e6:>11.2f}" for values in phases))
    return float(median(window.step_ns.mean(axis=0))) / 1e9, "\n".join(lines)


def _engine(world_size: int, size: float, phase: str, guilty: int, outcome: Outcome) -> bool:
    """Print the line of a faulty run; whether it came out right."""
    words = outcome.words
    right = bool(words) and all(word.ranks == (guilty,) for word in words) and words[-1].phase == phase
    _tell(f"{world_size} ranks, rank {guilty} +{size:.0%} in {phase:<9}", outcome, right=right)
    return right


def _check_healthy(world_size: int, outcome: Outcome) -> bool:
    right = not outcome.words
    _tell(f"{world_size} ranks, all of them healthy  ", outcome, right=right)
    return right


def _tell(what: str, outcome: Outcome, *, right: bool) -> None:
    """One line, and what it stands on where it is wrong."""
    said = "; ".join(map(str, outcome.words)) or "nobody"
    print(
        f"{'right' if right else 'WRONG'}  {what}  blamed: {said:<30}"
        f"  ({outcome.steps} steps of {1000 * outcome.step_s:.1f} ms)",
        flush=True,
    )
    if not right or "--verbose" in sys.argv:
        print(*(f"      {word.why}" for word in outcome.words), outcome.medians, sep="\n", flush=True)


def main() -> None:
    """The whole matrix, and a healthy run of each world."""
    place = Path(tempfile.mkdtemp(prefix="ddpw-"))
    os.environ["DDPWATCH_RUN_DIR"] = str(place / "run")
    verdicts, healthy = [], []
    try:
        for world_size in WORLDS:
            with contextlib.closing(World(world_size, place)) as world:
                calm = world.run()
                healthy.append(_check_healthy(world_size, calm))
                for number, (size, phase) in enumerate((size, phase) for size in SIZES for phase in FAULTY_PHASES):
                    guilty = number % world_size
                    outcome = world.run(guilty, phase, size * calm.step_s)
                    verdicts.append(_engine(world_size, size, phase, guilty, outcome))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    print(f"{sum(verdicts)} of {len(verdicts)} right; {sum(healthy)} of {len(healthy)} healthy runs without blame")


if __name__ == "__main__":
    main()
