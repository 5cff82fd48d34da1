"""Garbage collections, checkpoint saves and evaluations on real ranks: measured, named, and without a trace."""

import gc
import io
import sys
import threading
import time
import types
from unittest import mock

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import save as imported_before
from torch.utils.data import DataLoader, Dataset

import ddpwatch.agent
from ddpwatch.core.detectors.pauses import pauses
from ddpwatch.core.detectors.straggler import straggler
from ddpwatch.core.limits import DEFAULTS
from tests.builders.synthetic_run import look, make_run
from tests.builders.training import bits, loader, make, snapshot, train_step, wait_for

STEPS = 80
BATCH = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
TARGET = torch.arange(16) % 4
PAUSE_S = 0.06
LIMITS = msgspec.structs.replace(DEFAULTS, judge=msgspec.structs.replace(DEFAULTS.judge, least_s=0.001, warmup_steps=2))


class Slow(io.BytesIO):
    """A file on a slow disk."""

    def write(self, data):
        if len(data) > 1000:
            time.sleep(PAUSE_S)
        return super().write(data)


def collecting(rank, world_size, *, watched=True):
    """Rank 1 has a large heap, and collects in every third step."""
    model, optimizer = make()
    agent = ddpwatch.agent.install(model) if watched else None
    heap = [[number] for number in range(300_000)] if rank == 1 else []
    for step in range(STEPS):
        # On a busy machine a collection would last many times as long as a step, as a hang does.
        time.sleep(0.01)
        train_step(model, optimizer, BATCH, TARGET)
        if rank == 1 and step % 3 == 0:
            gc.collect()
    del heap
    return (snapshot(agent).steps if agent else None), bits(model)


def saving(rank, world_size, *, save, every=10, watched=True):
    """Rank 0 saves in every tenth step."""
    model, optimizer = make()
    agent = ddpwatch.agent.install(model) if watched else None
    for step in range(STEPS):
        train_step(model, optimizer, BATCH, TARGET)
        if rank == 0 and step % every == 0:
            (imported_before if save == "imported" else torch.save)(model.state_dict() | {"x": torch.ones(999)}, Slow())
    return (snapshot(agent).steps if agent else None), bits(model)


def named(findings):
    return [(finding.ranks, finding.message) for finding in findings if finding.proven and finding.opens]


def test_a_rank_that_collects_garbage_is_named_with_it(pool):
    answers = pool.run(collecting, 2)

    steps = [each for each, _ in answers]
    assert all(step.gc_full_ns for step in steps[1] if step.index % 3 == 1 and step.index < STEPS)
    assert all(step.gc_full_ns <= step.gc_ns <= step.self_ns for each in steps for step in each)
    context = look(make_run(dict(enumerate(steps))), limits=LIMITS)
    slow = named(straggler(context))
    assert [(ranks, "garbage collection, " in text) for ranks, text in slow] == [((1,), True)]
    assert [ranks for ranks, _ in named(pauses(context))] == [(1,)]


@pytest.mark.parametrize("save", ["torch.save", "imported"])
def test_a_rank_that_saves_is_named_with_it(pool, save):
    answers = pool.run(saving, 2, save=save)

    steps = [each for each, _ in answers]
    saved = [step for step in steps[0] if step.save_ns]
    assert {step.index % 10 for step in saved} == {1}
    assert all(0.8 * PAUSE_S * 1e9 < step.save_ns <= step.other_ns for step in saved)
    assert not any(step.save_ns for step in steps[1])
    context = look(make_run(dict(enumerate(steps))), limits=LIMITS)
    assert all("checkpoint save, " in text for _, text in named(straggler(context)))
    found = [(ranks, text) for ranks, text in named(pauses(context)) if "save" in text]
    assert [ranks for ranks, _ in found] == [(0,)]


def test_the_bits_are_the_same_as_without_the_agent(pool):
    for scenario, arguments in ((collecting, {}), (saving, {"save": "torch.save"})):
        watched = pool.run(scenario, 2, **arguments)
        alone = pool.run(scenario, 2, watched=False, **arguments)
        assert [each for _, each in watched] == [each for _, each in alone]


def saves_of_all_kinds(rank, world_size, *, path):
    """A sharded checkpoint, imported after the agent was installed, a save in another thread, and one that fails."""
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    train_step(model, optimizer, BATCH, TARGET)
    from torch.distributed import checkpoint

    agent._pauses.wrap_imported()
    checkpoint.save({"model": model.state_dict()}, checkpoint_id=path)
    train_step(model, optimizer, BATCH, TARGET)
    thread = threading.Thread(target=torch.save, args=({"x": torch.ones(999)}, Slow()))
    thread.start()
    thread.join()
    train_step(model, optimizer, BATCH, TARGET)
    with pytest.raises(AttributeError):
        torch.save({"x": lambda: None}, io.BytesIO())
    train_step(model, optimizer, BATCH, TARGET)
    torch.save({"x": torch.ones(9)}, io.BytesIO(), _use_new_zipfile_serialization=False)
    train_step(model, optimizer, BATCH, TARGET)
    steps = snapshot(agent).steps
    agent.close()
    left = [each for each in gc.callbacks if "ddpwatch" in repr(each)]
    return steps, left, torch.serialization._save.__module__, agent._recorder.save_name


def test_saves_of_every_kind_are_counted_on_the_training_thread(pool, tmp_path):
    for steps, left, owner, name in pool.run(saves_of_all_kinds, 2, path=str(tmp_path / "checkpoint")):
        _first, sharded, threaded, failed, legacy = steps
        assert 0 < sharded.save_ns <= sharded.other_ns
        assert sharded.sync_path  # its collectives are sync points, and no part of the save
        assert not threaded.save_ns
        assert failed.save_ns
        assert legacy.save_ns
        assert left == []
        assert owner == "torch.serialization"
        assert name == "torch.save"


def safetensors(rank, world_size):
    """A module of that name, of which a function was imported before it was wrapped."""
    module = types.ModuleType("safetensors.torch")
    module.serialize_file = lambda: time.sleep(PAUSE_S)
    module.save_file = lambda: module.serialize_file()  # noqa: PLW0108 - looked up when it is called
    imported = module.save_file
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    train_step(model, optimizer, BATCH, TARGET)
    with mock.patch.dict(sys.modules, {"safetensors.torch": module}):
        agent._pauses.wrap_imported()
        for save in (module.save_file, imported):
            save()
            train_step(model, optimizer, BATCH, TARGET)
        steps = snapshot(agent).steps
        agent.close()
    return [step.save_ns for step in steps], module.save_file is imported


def test_safetensors_are_saves_too(pool):
    for saved_ns, restored in pool.run(safetensors, 2):
        assert [save_ns > 0.8 * PAUSE_S * 1e9 for save_ns in saved_ns] == [False, True, True]
        assert restored


def long_save(rank, world_size):
    """What the heartbeat of a rank says while it saves, while it evaluates, and before and after that."""
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    train_step(model, optimizer, BATCH, TARGET)
    said = []

    class Disk(io.BytesIO):
        def write(self, data):
            if not said[1:]:
                said.append(beat())
            return super().write(data)

    def beat():
        heartbeat = wait_for(lambda: getattr(agent._publisher, "_heartbeat", None))
        message = heartbeat.beat(rank, 1)
        return message.phase, message.activity

    said.append(beat())
    torch.save(model.state_dict(), Disk())
    said.append(beat())
    model.eval()
    with torch.no_grad():
        model(BATCH)
    said.append(beat())
    model.train()
    train_step(model, optimizer, BATCH, TARGET)
    said.append(beat())
    return said


def test_the_heartbeat_names_what_a_rank_does(pool):
    other = 5
    for said in pool.run(long_save, 2):
        assert said == [(other, ""), (other, "torch.save"), (other, ""), (other, "evaluation"), (other, "")]


def evaluating(rank, world_size):
    """Rank 0 evaluates the inner model alone after every tenth step."""
    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    held_out = loader(1, 0, batches=2)
    for step in range(30):
        train_step(model, optimizer, BATCH, TARGET)
        if rank == 0 and step % 10 == 0:
            model.eval()
            with torch.no_grad():
                for batch, _ in held_out:
                    model.module(batch)
                    time.sleep(PAUSE_S / 2)
            model.train()
    return snapshot(agent).steps


def test_an_evaluation_is_part_of_other(pool):
    evaluated, idle = pool.run(evaluating, 2)

    marked = [step for step in evaluated if step.eval_ns]
    assert [step.index for step in marked] == [1, 11, 21]
    assert all(0.8 * PAUSE_S * 1e9 < step.eval_ns <= step.other_ns for step in marked)
    assert not any(step.eval_ns for step in idle)


class Busy(Dataset):
    """Samples that take some CPU time."""

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        until_s = time.thread_time() + 0.002
        while time.thread_time() < until_s:
            pass
        return torch.ones(8), torch.tensor(1)


def with_workers(rank, world_size):
    """Two worker processes per rank; the agent's thread measures them twice."""
    import multiprocessing

    model, optimizer = make()
    agent = ddpwatch.agent.install(model)
    daemon = multiprocessing.current_process()._config
    daemon["daemon"] = False  # the pool's ranks are daemons, which may not have children
    try:
        batches = iter(DataLoader(Busy(), batch_size=4, num_workers=2, prefetch_factor=3, persistent_workers=True))
        for number in range(60):
            train_step(model, optimizer, *next(batches))
            if number in (5, 59):
                agent._loaders.measure_workers()
        snap = snapshot(agent)
        del batches
    finally:
        daemon["daemon"] = True
    dist.barrier()
    return snap


def test_the_settings_of_a_loader_and_the_cpu_of_its_workers_are_reported(pool):
    for snap in pool.run(with_workers, 2):
        reported = snap.loaders[0]
        assert (reported.workers, reported.prefetch_factor, reported.persistent_workers) == (2, 3, True)
        assert reported.pin_memory is False
        assert snap.workers.workers == 2
        assert 0 < snap.workers.cpu_percent <= 101
