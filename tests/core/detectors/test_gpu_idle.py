"""GPUs that are idle while their ranks train."""

from __future__ import annotations

from ddpwatch.core.detectors.gpu_idle import gpu_idle
from tests.builders.fake_rank import make_beat
from tests.builders.gpu_run import read_gpus
from tests.builders.synthetic_run import SECOND, look, make_run, only, run_of, train

LOW = {"util_percent": 12}


def idle_run(count=4, **phases):
    """Ranks whose GPUs are idle."""
    return read_gpus(run_of(**phases), **{f"r{rank}": LOW for rank in range(count)})


def test_idle_gpus_of_all_ranks_are_reported_once_with_what_takes_the_time():
    found = only(gpu_idle(look(idle_run(data=90))))

    assert found.message == "all ranks: GPU utilization 12% · 76% of the step waiting for data"
    assert (found.subject, found.phase, found.ranks) == ("job", "data", ())


def test_one_idle_gpu_is_reported_by_its_rank():
    found = only(gpu_idle(look(idle_run(1))))

    assert found.message.startswith("rank 0: GPU utilization 12% · ")
    assert found.ranks == (0,)


def test_a_gpu_that_was_busy_a_moment_ago_or_is_now_is_not_idle():
    assert gpu_idle(look(read_gpus(run_of(), r0=[LOW, {}], r1=[{}, LOW]))) == []


def test_a_rank_that_does_not_train_has_no_finding():
    paused, hung, young = idle_run(), idle_run(), read_gpus(make_run({0: train(0, 8), 1: train(0, 8)}), r0=LOW, r1=LOW)
    for rank in paused.ranks:
        paused.apply(make_beat(rank, seq=60, mono_ns=3 * SECOND, pause="evaluation"), paused.now_ns)
        hung.apply(make_beat(rank, seq=60, mono_ns=60 * SECOND, phase_ns=50 * SECOND), hung.now_ns)

    for state in (paused, hung, young):
        assert gpu_idle(look(state)) == []
