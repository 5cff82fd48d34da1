"""Collectives that a script calls itself, on real ranks: a slow rank is named with its phase, wherever others wait."""

import contextlib
import time
from threading import Thread

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import ddpwatch.agent
from ddpwatch import wire
from ddpwatch.core.metrics.sync_points import GRADIENTS, SyncPointSums
from tests.builders.slow_segments import LIMITS, NAP_S, PHASES, SEGMENT, Naps, named_stragglers, state_of
from tests.builders.synthetic_run import look
from tests.builders.training import bits, make, snapshot, wait_for


class Script:
    """A training loop with one kind of collective of its own."""

    def __init__(self, kind, world_size):
        self.kind, self.world_size = kind, world_size

    def in_forward(self):
        if self.kind == "norm in forward":
            dist.all_reduce(torch.ones(4))

    def loss(self, output, target):
        loss = torch.nn.functional.cross_entropy(output, target)
        if self.kind == "metric before backward":
            dist.all_reduce(loss.detach().clone())
        elif self.kind == "gather in the loss":
            gathered = [torch.empty_like(output) for _ in range(self.world_size)]
            dist.all_gather(gathered, output.detach())
            loss = loss + 0.01 * sum(each.mean() for each in gathered)
        elif self.kind == "functional":
            functional.all_reduce(loss.detach(), "sum", dist.group.WORLD).item()
        elif self.kind == "asynchronous":
            work = dist.all_reduce(loss.detach().clone(), async_op=True)
            work.wait()
        return loss

    def after_step(self, number):
        if self.kind == "metric after":
            dist.all_reduce(torch.ones(1))
        elif self.kind == "barrier":
            dist.barrier()
        elif self.kind == "monitored barrier":
            dist.monitored_barrier()
        elif self.kind == "object gather" and number % 10 == 0:
            dist.all_gather_object([None] * self.world_size, {"loss": 1.0})


KINDS = ("metric before backward", "metric after", "gather in the loss", "norm in forward", "barrier",
         "monitored barrier", "object gather", "functional", "asynchronous")  # fmt: skip


def slow_run(rank, world_size, *, kind, slow=1, watched=True, segments=(None, *PHASES)):
    """One rank sleeps in one phase after the other. Returns its steps, its sync paths and the bits of its model."""
    model, optimizer = make()
    agent = ddpwatch.agent.install(model) if watched else None
    script = Script(kind, world_size)
    naps = Naps(segments, slow=rank == slow)
    model.module.before_forward = lambda: (naps.nap("forward"), script.in_forward())
    model.module.before_backward = lambda: naps.nap("backward")
    optimizer.register_step_pre_hook(lambda *_: naps.nap("optimizer"))
    for batch, target in naps.batches():
        naps.nap("other")
        optimizer.zero_grad()
        script.loss(model(batch), target).backward()
        optimizer.step()
        script.after_step(naps.number)
        naps.next_step()
    if agent is None:
        return bits(model)
    snap = snapshot(agent)
    return snap.steps, snap.sync_paths, bits(model)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_the_slow_rank_is_named_with_its_phase_and_no_other(pool, kind, world_size):
    answers = pool.run(slow_run, world_size, kind=kind)

    named = named_stragglers(answers, (None, *PHASES))
    assert named == {None: []} | {phase: [((1,), phase)] for phase in PHASES}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_lists_its_sync_points_by_call_site(pool, kind):
    answers = pool.run(slow_run, 2, kind=kind, segments=("forward",))

    window = look(state := state_of(answers, 0), limits=LIMITS).window
    sums = SyncPointSums()
    sums.add(window)
    points = sums.figures(state, float(window.job_step_ns.sum()))
    op = {
        "gather in the loss": "all_gather", "barrier": "barrier", "monitored barrier": "monitored_barrier",
        "object gather": "all_gather_object", "functional": "wait", "asynchronous": "wait",
    }.get(kind, "all_reduce")  # fmt: skip
    own = [point for point in points if point.of_script]
    assert [point.op for point in own] == [op], points
    assert own[0].place.startswith("test_sync_points.py:")
    assert {point.op for point in points} >= {GRADIENTS}
    assert sum(point.share for point in points) == pytest.approx(
        float(window.job_sync_ns.sum()) / float(window.job_step_ns.sum()), rel=1e-3
    )


def test_parameters_and_gradients_have_the_same_bits_as_without_the_agent(pool):
    for kind in ("gather in the loss", "norm in forward"):
        watched = pool.run(slow_run, 2, kind=kind, segments=(None,))
        alone = pool.run(slow_run, 2, kind=kind, segments=(None,), watched=False)
        assert [answer[2] for answer in watched] == alone


def rank_zero_logs_more(rank, world_size):
    """Two ranks talk to each other in every step, and the third does not."""
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    pair = dist.new_group([0, 1])
    for _ in range(SEGMENT):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        if rank < 2:
            dist.all_reduce(torch.ones(1), group=pair)
    snap = snapshot(agent)
    return snap.steps, snap.sync_paths, b""


def test_ranks_that_pass_other_points_are_not_blamed_for_them(pool):
    answers = pool.run(rank_zero_logs_more, 3)

    window = look(state_of(answers, 0), limits=LIMITS).window
    assert not window.matched_points.any()
    # Only what happens in backward counts as waiting.
    after_ns = window.after_backward_ns
    assert (window.wait_ns == after_ns - after_ns.min(axis=0) + window.presync_wait_ns).all()


def own_thread(rank, world_size):
    """A thread of the script's own, as a checkpoint writer has one, waits in a collective while training runs."""
    from concurrent.futures import ThreadPoolExecutor

    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    side = dist.new_group()
    with ThreadPoolExecutor(1) as executor:
        for _ in range(SEGMENT):
            saved = executor.submit(lambda: (rank == 1 and time.sleep(NAP_S), dist.barrier(group=side)))
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            saved.result()
    return snapshot(agent)


def test_a_collective_on_another_thread_is_not_a_sync_point_of_the_step(pool):
    for snap in pool.run(own_thread, 2):
        assert not snap.sync_paths
        assert not any(step.sync_path or step.point1_ns for step in snap.steps)


def test_the_heartbeat_of_a_rank_in_a_collective_of_the_script_says_sync(pool):
    assert pool.run(in_a_barrier, 2) == [True, False]


def in_a_barrier(rank, world_size):
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    model(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    store = dist.distributed_c10d._get_default_store()
    seen = []

    def watch():
        with contextlib.suppress(AssertionError):
            seen.append(wait_for(lambda: agent._publisher._heartbeat.phase == wire.PHASES.index("sync")))
        store.set("seen", "1")

    watching = Thread(target=watch)
    if rank == 0:
        watching.start()
    else:
        store.wait(["seen"])
    dist.barrier()
    return bool(seen)
