"""FSDP on real ranks: recognized, measured at its own sync points, and a slow rank is named with its phase."""

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

import ddpwatch.agent
from ddpwatch.core.metrics.sync_points import SyncPointSums
from tests.builders.slow_segments import LIMITS, PHASES, SEGMENT, Naps, named_stragglers, state_of
from tests.builders.synthetic_run import look
from tests.builders.training import Net, snapshot

if not hasattr(fsdp, "fully_shard"):
    pytest.skip("needs torch 2.6", allow_module_level=True)
ALL_GATHER = "parameter all-gather, FSDP"
REDUCE_SCATTER = "gradient reduce-scatter, FSDP"


def sharded(kind, world_size):
    """A model that is sharded layer by layer, the same on all ranks."""
    torch.manual_seed(1)
    model = Net()
    if kind == "fsdp1":
        layers = {model.first, model.last}
        return fsdp.FullyShardedDataParallel(
            model, auto_wrap_policy=lambda module, recurse, **_: recurse or module in layers,
            device_id=torch.device("cpu"), use_orig_params=True,
        )  # fmt: skip
    replicas = 2 if kind == "hsdp" else 1
    mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=("replicas", "shards"))
    mesh = mesh if kind == "hsdp" else mesh["shards"]
    for module in (model.first, model.last, model):
        fsdp.fully_shard(module, mesh=mesh)
    return model


def slow_run(rank, world_size, *, kind, slow=1, watched=True, segments=(None, *PHASES), as_on_gpu=False):
    """One rank sleeps in one phase after the other. Returns its steps, its sync paths and the bits of its model."""
    model = sharded(kind, world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    agent = ddpwatch.agent.install(model) if watched else None
    if as_on_gpu:
        agent._collectives.watch_fsdp()
        agent._collectives.watch_launches()
    naps = Naps(segments, slow=rank == slow)
    net = model.module if kind == "fsdp1" else model
    net.before_forward = lambda: naps.nap("forward")
    net.before_backward = lambda: naps.nap("backward")
    optimizer.register_step_pre_hook(lambda *_: naps.nap("optimizer"))
    for batch, target in naps.batches():
        naps.nap("other")
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), target).backward()
        optimizer.step()
        naps.next_step()
    whole = bits_of_shards(model)
    if agent is None:
        return whole
    snap = snapshot(agent)
    return snap.steps, snap.sync_paths, whole


def bits_of_shards(model):
    """Parameters and gradients of this rank, to the last bit."""
    pairs = [(each, each.grad) for each in model.parameters()]
    tensors = [tensor for pair in pairs for tensor in pair if tensor is not None]
    local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in local)


@pytest.mark.parametrize(("kind", "world_size"), [("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4), ("fsdp1", 2), ("fsdp1", 4)])
def test_the_slow_rank_is_named_with_its_phase_and_no_other(pool, kind, world_size):
    answers = pool.run(slow_run, world_size, kind=kind)

    named = named_stragglers(answers, (None, *PHASES))
    assert named == {None: []} | {phase: [((1,), phase)] for phase in PHASES}
    steps, _, _ = answers[0]
    assert len(steps) == SEGMENT * (len(PHASES) + 1)
    assert all(step.backwards == 1 and step.samples == 8 for step in steps)


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_waits_are_sync_points_by_what_fsdp_waits_for(pool, kind):
    answers = pool.run(slow_run, 2, kind=kind, segments=("forward",))

    window = look(state := state_of(answers, 0), limits=LIMITS).window
    sums = SyncPointSums()
    sums.add(window)
    points = sums.figures(state, float(window.job_step_ns.sum()))
    assert {point.label for point in points} == {ALL_GATHER, REDUCE_SCATTER}
    assert {point.phase for point in points if point.label == REDUCE_SCATTER} == {"backward"}
    assert not any(point.of_script for point in points)
    assert sum(point.share for point in points) == pytest.approx(
        float(window.job_sync_ns.sum()) / float(window.job_step_ns.sum()), rel=1e-3
    )


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_parameters_and_gradients_have_the_same_bits_as_without_the_agent(pool, kind):
    watched = pool.run(slow_run, 2, kind=kind, segments=(None,))
    alone = pool.run(slow_run, 2, kind=kind, segments=(None,), watched=False)
    assert [answer[2] for answer in watched] == alone


def test_the_wrappers_for_fsdp_on_a_gpu_measure_the_same_and_change_no_bit(pool):
    answers = pool.run(slow_run, 2, kind="fsdp2", segments=("forward",), as_on_gpu=True)
    alone = pool.run(slow_run, 2, kind="fsdp2", segments=("forward",), watched=False)

    assert [answer[2] for answer in answers] == alone
    assert named_stragglers(answers, ("forward",)) == {"forward": [((1,), "forward")]}
    for _, (path, *_), _ in answers:
        assert {(point.op, point.place) for point in path.points} == {
            ("parameter all-gather", "FSDP"),
            ("gradient reduce-scatter", "FSDP"),
        }
