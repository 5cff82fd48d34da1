"""Communication hooks: the user's are timed and otherwise left alone, ddpwatch's own exists only on request."""

import io

import pytest
import torch
import torch.distributed as dist
import zmq
from torch import nn

import ddpwatch.agent
from ddpwatch import wire
from tests.builders.training import bits, make, snapshot, train_step, wait_for

BATCH = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
TARGET = torch.arange(16) % 4
PARAMETER_BYTES = 4 * (8 * 32 + 32 + 32 * 4 + 4)


def train(model, optimizer, steps=8):
    for _ in range(steps):
        train_step(model, optimizer, BATCH, TARGET)


def hook_named(name):
    """A new (state, hook) of torch's for each model."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if name == "fp16":
        return None, default_hooks.fp16_compress_hook
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3, random_seed=1)
    return state, powerSGD_hook.powerSGD_hook


def with_users_hook(rank, world_size, *, name, when):
    """The same training with the hook only, and with hook and agent; `when` the hook is registered."""
    results = []
    for watched in (False, True):
        model, optimizer = make(lr=0.01)
        state, hook = hook_named(name)
        if when == "before":
            model.register_comm_hook(state, hook)
        agent = ddpwatch.agent.install(model) if watched else None
        if when == "after":
            model.register_comm_hook(state, hook)
        train(model, optimizer)
        results.append(bits(model))
    snap = snapshot(agent)
    stored_hook, stored_state = model._comm_hooks[-1]
    assert stored_hook is hook
    assert stored_state is state
    assert len(model._comm_hooks) == 1
    return results, snap, agent.active


@pytest.mark.parametrize("name", ["fp16", "powersgd"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_users_hook_computes_the_same_bits_and_is_timed(pool, name, when):
    for (without, with_agent), snap, active in pool.run(with_users_hook, 2, name=name, when=when):
        assert with_agent == without
        assert active
        assert snap.hello.comm == "hook"
        assert all(step.busy_ns > 0 for step in snap.steps)
        assert {step.comm_bytes for step in snap.steps} == {PARAMETER_BYTES}


def saved(rank, world_size):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 4))
    ddpwatch.agent.install(model)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), 2)
    # Refused, but kept in the list by torch.
    with pytest.raises(RuntimeError) as caught:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    file = io.BytesIO()
    torch.save(model, file)
    return str(caught.value), file.getvalue()


def test_a_model_with_a_users_hook_can_be_saved_and_a_second_hook_is_refused_by_torch(pool):
    for refusal, saved_bytes in pool.run(saved, 2):
        assert "can only be called once" in refusal
        assert b"fp16_compress_hook" in saved_bytes
        assert b"ddpwatch" not in saved_bytes


def broken_hook(state, bucket):
    raise LookupError(f"no route for bucket {bucket.index()}")


class Callable:
    def __call__(self, state, bucket):
        raise NotImplementedError


def refusals(rank, world_size):
    """What torch says to bad hooks, without and with an agent."""

    def bad_annotation(state, bucket: int): ...

    def bad_name(state, buckets): ...

    said = []
    for watched in (False, True):
        model, optimizer = make()
        agent = ddpwatch.agent.install(model) if watched else None
        errors = []
        for hook in (bad_annotation, bad_name, Callable(), "no function"):
            with pytest.raises(Exception) as caught:  # noqa: PT011 - compared below
                model.register_comm_hook(None, hook)
            errors.append((type(caught.value).__name__, str(caught.value)))
        model.register_comm_hook(None, broken_hook)
        with pytest.raises(LookupError) as caught:
            train_step(model, optimizer, BATCH, TARGET)
        errors.append(("LookupError", str(caught.value)))
        said.append(errors)
    return said, agent.active


def test_errors_about_hooks_and_from_hooks_are_the_same_as_without_ddpwatch(pool):
    for (without, with_agent), active in pool.run(refusals, 2):
        assert with_agent == without
        assert {name for name, _ in without} >= {"TypeError", "ValueError", "KeyError", "AttributeError"}
        assert without[-1] == ("LookupError", "no route for bucket 0")
        assert active


def own_buckets(rank, world_size):
    torch.manual_seed(1)
    # The first bucket is full at 1 MiB, whatever bucket_cap_mb says.
    layers = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 768), nn.Linear(768, 4))
    model = nn.parallel.DistributedDataParallel(layers)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    agent = ddpwatch.agent.install(model, comm="buckets")
    train(model, optimizer, 5)
    wanted = [agent._recorder.want_buckets]
    quiet = snapshot(agent)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        socket.connect(agent._publisher.address)
        socket.subscribe(b"bucket")
        wait_for(lambda: agent._recorder.want_buckets)
        train(model, optimizer, 3)
        assert socket.poll(30_000)
        messages = [wire.decode(socket.recv_multipart()[1])]
        while len(messages) < 3 and socket.poll(30_000):
            messages.append(wire.decode(socket.recv_multipart()[1]))
    wait_for(lambda: not agent._recorder.want_buckets)
    reported = []
    agent._recorder.event = lambda tag, **_fields: reported.append(tag)
    train(model, optimizer, 1)
    return size, [*wanted, *reported], quiet, messages, model._comm_hooks


def test_own_bucket_times_are_taken_and_sent_only_while_a_viewer_subscribes(pool):
    for size, wanted, quiet, messages, comm_hooks in pool.run(own_buckets, 2):
        assert wanted == [False]
        assert quiet.hello.comm == "buckets"
        assert all(step.busy_ns > 0 for step in quiet.steps)
        assert {step.comm_bytes for step in quiet.steps} == {size}
        assert [message.step for message in messages] == [5, 6, 7]
        for message in messages:
            assert len(message.buckets) > 1
            assert [bucket.index for bucket in message.buckets] == list(range(len(message.buckets)))
            assert sum(bucket.bytes for bucket in message.buckets) == size
            assert all(0 < bucket.ready_ns <= bucket.done_ns for bucket in message.buckets)
        assert comm_hooks == []


def late_user_hook(rank, world_size):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model, optimizer = make()
    agent = ddpwatch.agent.install(model, comm="buckets")
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(model, optimizer, 2)
    return snapshot(agent)


def test_ddpwatchs_own_hook_steps_back_for_one_registered_before_the_first_forward(pool):
    for snap in pool.run(late_user_hook, 2):
        assert snap.hello.comm == "hook"
        assert snap.notes == []
        assert all(step.busy_ns > 0 for step in snap.steps)


def built_in(rank, world_size, *, reported):
    """A hook that lives in C++; `reported` whether ddpwatch saw it registered or it was there before the import."""
    model, optimizer = make()
    if reported:
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    else:
        dist._register_builtin_comm_hook(model.reducer, dist.BuiltinCommHookType.ALLREDUCE)
    agent = ddpwatch.agent.install(model, comm="buckets")
    train(model, optimizer, 2)
    return snapshot(agent), agent.active, model._comm_hooks


@pytest.mark.parametrize("reported", [True, False])
def test_a_built_in_hook_has_no_bucket_times_and_that_is_said(pool, reported):
    for snap, active, comm_hooks in pool.run(built_in, 2, reported=reported):
        assert [note.kind for note in snap.notes] == ["comm"]
        assert snap.hello.comm == "passive"
        assert [(step.backwards, step.busy_ns) for step in snap.steps] == [(1, 0)] * 2
        assert active
        assert comm_hooks == []


def again(rank, world_size):
    model, optimizer = make()
    first = ddpwatch.agent.install(model, comm="buckets")
    train(model, optimizer, 2)
    first.close()
    train(model, optimizer, 1)
    second = ddpwatch.agent.install(model)
    train(model, optimizer, 2)
    return snapshot(second)


def test_own_hook_outlives_its_agent_harmlessly_and_the_next_agent_knows_it(pool):
    for snap in pool.run(again, 2):
        assert snap.hello.comm == "buckets"
        assert [step.busy_ns > 0 for step in snap.steps] == [True] * 2


def asked_later(rank, world_size):
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    ddpwatch.agent.install(model, comm="buckets")
    train(model, optimizer, 2)
    return snapshot(agent).hello.comm


def test_buckets_asked_for_by_a_second_install_are_timed(pool):
    assert pool.run(asked_later, 2) == ["buckets"] * 2


def abandoned(rank, world_size, *, comm):
    """Rank 1 leaves after three steps; rank 0 returns what its next one raises."""
    model, optimizer = make()
    ddpwatch.agent.install(model, comm=comm)
    for index in range(4):
        if index == 3 and rank == 1:
            return None
        try:
            train_step(model, optimizer, BATCH, TARGET)
        except RuntimeError as error:
            return index, str(error)
    return "trained on alone"


@pytest.mark.parametrize("comm", ["auto", "buckets"])
def test_a_failed_all_reduce_fails_the_training_as_it_would_without_ddpwatch(pool, comm):
    (index, text), _ = pool.run(abandoned, 2, comm=comm)

    assert index == 3
    assert "gloo" in text
