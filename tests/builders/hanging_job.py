"""A training of real gloo ranks that hangs on request, in one of the ways in which they do."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing, nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddpwatch import rundir
from ddpwatch.session.run_follower import RunFollower
from ddpwatch.sources.live import Live
from tests.builders.training import train_step, wait_for
from tests.builders.watched_training import Training

PACE_S = 0.02
PAUSE_S = 3.0
BATCH = 4
MIN_BATCHES = 5
MAX_BATCHES = 40
HANG_S = 60.0
EVALUATED_STEP = 30
"""By then the waits of some steps are known."""


def stuck_here() -> None:
    time.sleep(HANG_S)


def nap_here(wake: str) -> None:
    while not os.path.exists(wake):
        time.sleep(PACE_S)


class Slow:
    """Takes its time to be saved."""

    def __reduce__(self):
        stuck_here()
        return int, ()


def hold_the_lock() -> None:
    """One call into C that keeps the GIL: no other thread of this process runs."""
    sum(range(10**11))


def compile_here(seconds: float) -> None:
    time.sleep(seconds)


def trains(rank, world_size, store, flag, kind, guilty, timeout_s=1800.0, pause_s=PAUSE_S):
    """Train until the flag is there; from then on the guilty rank misbehaves, for `pause_s` where it comes back."""
    torch.set_num_threads(1)
    if kind == "late" and rank == guilty:
        time.sleep(pause_s)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    side = dist.new_group(list(range(world_size)), timeout=timedelta(seconds=timeout_s))
    training = Training(DistributedDataParallel)
    training.pause_s, training.wake = pause_s, f"{flag}.wake"
    if kind == "compile" and rank == guilty:
        training.model.register_forward_pre_hook(_once(lambda: compile_here(pause_s)))
    # All ranks must see the flag in the same step, or some would be a step ahead.
    begins = torch.zeros(1)
    while True:
        begins[0] = os.path.exists(flag)
        dist.broadcast(begins, 0)
        if begins[0]:
            break
        time.sleep(PACE_S)
        training.steps(1)
    FAULTS[kind](training, side, rank == guilty)
    training.steps_until(str(flag) + ".end")


def _once(act):
    """A forward hook that does something in the first step."""
    todo = [act]
    return lambda *_: todo.pop()() if todo else None


def _sleep(_training, _side, guilty):
    if guilty:
        stuck_here()


def _nap(training, _side, guilty):
    if guilty:
        nap_here(training.wake)


def _stop(_training, _side, guilty):
    if guilty:
        os.kill(os.getpid(), signal.SIGSTOP)


def _lock(_training, _side, guilty):
    if guilty:
        hold_the_lock()


def _kill(_training, _side, guilty):
    if guilty:
        os.kill(os.getpid(), signal.SIGKILL)


def _raise(_training, _side, guilty):
    if guilty:
        raise ValueError("the user's own")


def _save(_training, _side, guilty):
    if guilty:
        torch.save(Slow(), os.devnull)


def _mismatch(_training, _side, guilty):
    if guilty:
        dist.broadcast(torch.zeros(7), 0)


def _skip(_training, side, guilty):
    if not guilty:
        dist.all_reduce(torch.ones(9), group=side)


def _abort(_training, _side, guilty):
    """Gloo aborts a rank that receives more than it expects, which is not the guilty one."""
    if not guilty:
        dist.all_reduce(torch.ones(7))
    dist.all_reduce(torch.ones(70_000))


def _end(_training, _side, guilty):
    if guilty:
        dist.barrier()


def _data(training, _side, guilty):
    """The data of one rank ends early; it has left its loop when the others come to their next step."""
    samples = BATCH * (MIN_BATCHES if guilty else MAX_BATCHES)
    for (batch,) in DataLoader(TensorDataset(torch.ones(samples, 8)), batch_size=BATCH):
        train_step(training.model, training.optimizer, batch, torch.zeros(BATCH, dtype=torch.long))
    if guilty:
        dist.barrier()


def _side_group(_training, side, guilty):
    if guilty:
        stuck_here()
    dist.all_reduce(torch.ones(3), group=side)


def _cross(_training, side, guilty):
    dist.all_reduce(torch.ones(3), group=side if guilty else None)


def _all_pause(training, _side, _guilty):
    time.sleep(training.pause_s)


def _announced(training, _side, guilty):
    with nullcontext() if guilty else training.agent.pause("evaluation of rank 0"):
        if guilty:
            time.sleep(training.pause_s)
        dist.barrier()


def _nothing(_training, _side, _guilty):
    """What there was has been at the start."""


FAULTS = {
    "sleep": _sleep, "nap": _nap, "stop": _stop, "lock": _lock, "kill": _kill, "raise": _raise, "save": _save,
    "mismatch": _mismatch, "skip": _skip, "abort": _abort, "end": _end, "data": _data, "cross": _cross,
    "side group": _side_group, "all pause": _all_pause, "announced": _announced, "compile": _nothing, "late": _nothing,
}  # fmt: skip
NAMING = frozenset({"stall", "desync", "rank-lost", "rank-failed", "uneven-batch", "timeout"})
"""Rules that name a rank for a hang or an end."""


class Recording:
    """A source that remembers what came."""

    def __init__(self, source) -> None:
        self._source, self.items = source, []

    def __getattr__(self, name):
        return getattr(self._source, name)

    def poll(self, timeout_ms):
        self.items.append((self._source.poll(timeout_ms), set(self._source.known), set(self._source.here)))
        return self.items[-1][0]

    def poll_ready(self, _most):
        return []


class Replayed:
    """The same again."""

    def __init__(self, items) -> None:
        self._items = iter(items)
        self.known, self.here, self.refused = set(), set(), {}

    def poll(self, _timeout_ms):
        item, self.known, self.here = next(self._items)
        return item

    def poll_ready(self, _most):
        return []

    def want_buckets(self, wanted):
        pass

    def want_stacks(self, ranks):
        pass

    def close(self):
        pass


class Watched:
    """A job that hangs, and the findings about it."""

    def __init__(self, start, folder, kind, world_size, guilty, timeout_s=1800.0, pause_s=PAUSE_S) -> None:
        self.flag = folder / "flag"
        self.children = [
            start(trains, rank, world_size, folder / "store", self.flag, kind, guilty, timeout_s, pause_s)
            for rank in range(world_size)
        ]
        self._world_size = world_size
        self.reported = set()
        """Every rank that was named, and by which rule."""
        self.together = set()
        """Rules that had named a rank at the same moment."""
        self.follower: RunFollower | None = None

    def __enter__(self):
        wait_for(self._endpoints, 90.0)
        self._run = rundir.scan(rundir.base_path())[0][0]
        source = Recording(Live(self._run))
        self.items = source.items
        self.follower = RunFollower(self._run, source=source)
        self._close = closing(self.follower)
        self.until(lambda: all((rank.step or 0) >= EVALUATED_STEP for rank in self.ranks))
        return self

    def __exit__(self, *_):
        self._close.__exit__(*_)

    @property
    def ranks(self):
        return list(self.follower.monitor.state.ranks.values())

    @property
    def open(self):
        return [alert.finding for alert in self.follower.monitor.book.open.values()]

    def named(self):
        """Findings that name a rank for a hang."""
        return [finding for finding in self.open if finding.rule in NAMING and finding.severity > 0]

    def replayed(self):
        """What a second watch finds in the same frames."""
        with closing(RunFollower(self._run, source=Replayed(self.items))) as follower:
            for _ in self.items:
                follower.advance()
            return [alert.finding for alert in follower.monitor.book.open.values()]

    def hang(self) -> None:
        self.flag.touch()

    def wake(self) -> None:
        """Let one that naps go on."""
        self.flag.with_name("flag.wake").touch()

    def until(self, condition, timeout_s: float = 90.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            self.reported |= {(finding.rule, finding.ranks) for finding in self.named()}
            self.together.add(tuple(sorted(finding.rule for finding in self.named())))
            assert time.monotonic() < deadline_s, f"it never happened; open: {self.open}"
            self.follower.advance()

    @staticmethod
    def _endpoints():
        runs = rundir.scan(rundir.base_path())[0]
        return runs[0].endpoints if runs else []
