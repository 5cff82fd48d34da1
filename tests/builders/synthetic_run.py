"""RunStates of synthetic steps, and what a detector is given to evaluate them."""

from __future__ import annotations

from dataclasses import replace

from ddpwatch import wire
from ddpwatch.core.detectors.context import DetectorContext
from ddpwatch.core.detectors.engine import RULE_COLUMNS
from ddpwatch.core.limits import DEFAULTS
from ddpwatch.core.metrics.baseline import History
from ddpwatch.core.metrics.window import WINDOW_STEPS, compared_ranks, gather
from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from tests.builders.fake_rank import make_beat, make_hello, make_step

SECOND = 1_000_000_000
APART_STEPS = 300


def make_run(steps_by_rank, world=None, now_ns=1, hosts=(), **hello):
    """A run whose ranks have sent a hello, one heartbeat and these steps."""
    world = len(steps_by_rank) if world is None else world
    state = RunState("ab12cd34", "train", world, [Place(rank, "node-a", 1000 + rank) for rank in range(world)])
    for rank, steps in steps_by_rank.items():
        host = hosts[rank] if hosts else "node-a"
        state.apply(make_hello(rank, 1, world_size=world, host=host, **hello), now_ns)
        state.apply(make_beat(rank, seq=2, step=len(steps)), now_ns)
        state.apply(wire.Steps(rank=rank, seq=3, steps=list(steps)), now_ns)
    return state


def with_sync_points(state, *points, count=None):
    """The run with descriptions of its sync points outside DDP, each as operation, place and phase."""
    described = [wire.SyncPoint(op, place, wire.PHASES.index(phase)) for op, place, phase in points]
    for number, rank in state.ranks.items():
        paths = set(rank.steps.column("sync_path", rank.steps.indices()).tolist()) - {0}
        for seq, path in enumerate(sorted(paths), start=rank.sequence.newest + 1):
            message = wire.SyncPath(
                rank=number, seq=seq, step=0, path=path, points=described, count=count or len(described)
            )
            state.apply(message, 1)
    return state


def with_loader(state, *, starts=(0,), used=None, **settings):
    """The run with a DataLoader of these settings on each rank, and workers that used a core and waited for one for
    these percentages of the time.
    """
    for number, rank in state.ranks.items():
        for epoch, step in enumerate(starts):
            message = wire.Loader(
                rank=number,
                seq=rank.sequence.newest + 1,
                step=step,
                epoch=epoch,
                sampler="S",
                distributed=True,
                **settings,
            )
            state.apply(message, 1)
        if used is not None:
            cpu, queued = used
            message = wire.LoaderWorkers(
                rank=number, seq=rank.sequence.newest + 1, step=0, mono_ns=1, workers=settings["workers"],
                cpu_percent=cpu, queued_percent=queued,
            )  # fmt: skip
            state.apply(message, 1)
    return state


def collecting(every, world=4):
    """Ranks with a full collection of 40 ms in every n-th step, each in steps of its own; the others wait."""
    steps = {rank: [] for rank in range(world)}
    for index in range(10, 60):
        busy = {rank for rank, n in every.items() if (index + rank) % n == 0}
        for rank, made in steps.items():
            paused = {"other": 41, "gc_ns": 40_000_000, "gc_full_ns": 40_000_000}
            made.append(make_step(index, **(paused if rank in busy else {"sync": 42} if busy else {})))
    return make_run(steps)


def saving(ranks, every=10, name="save_ns"):
    """Ranks that save, or pause otherwise, for 300 ms in every n-th step; the others wait."""
    steps = {rank: [] for rank in range(4)}
    for index in range(10, 110):
        for rank, made in steps.items():
            pause = {"other": 301, name: 300_000_000} if rank in ranks else {"sync": 302}
            made.append(make_step(index, **(pause if index % every == 0 else {})))
    return make_run(steps)


def train(first=10, count=50, **phases):
    return [make_step(index, **phases) for index in range(first, first + count)]


def run_of(world=4, hosts=(), device="", cores=0, **phases):
    """A run whose ranks have all trained the same 50 steps."""
    steps = {rank: train(**phases) for rank in range(world)}
    return make_run(steps, hosts=hosts, device=device, cores=cores)


def look(state, history=None, limits=DEFAULTS):
    """What a rule is given: the newest steps that all ranks have."""
    lineup = compared_ranks(state)
    newest = min((rank.steps.newest for rank in lineup.compared), default=-1)
    first = limits.judge.warmup_steps
    window = gather(state, lineup.compared, upto=newest, steps=WINDOW_STEPS, first=first, columns=RULE_COLUMNS)
    return DetectorContext(state, window, history or History(), limits, lineup.out_of_step)


def remember(*runs):
    """A history with a block of each of these runs, long enough ago and apart to be a steady state."""
    history = History()
    for number, state in enumerate(runs):
        history.add(look(state).window)
        history.blocks[-1] = replace(history.blocks[-1], last_step=number * APART_STEPS)
    return history


def only(findings):
    assert len(findings) == 1, findings
    return findings[0]
