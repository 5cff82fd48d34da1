"""Memory that keeps growing, on the host and on the GPU."""

from __future__ import annotations

import msgspec
import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.memory import memory
from ddpwatch.core.limits import DEFAULTS, MemoryLimits
from ddpwatch.core.state.run import RunState
from tests.builders.fake_rank import make_beat
from tests.builders.gpu_run import read_gpus
from tests.builders.synthetic_run import SECOND, look, only, run_of


def filling(first, last, readings, **changed):
    """Readings whose memory in use grows from one fraction of the GPU to another."""
    total = 80 << 30
    parts = (first + (last - first) * place / (readings - 1) for place in range(readings))
    return [{"used_bytes": int(part * total), "total_bytes": total, **changed} for part in parts]


def test_a_gpu_that_is_nearly_full_and_grows_is_reported():
    found = only(memory(look(read_gpus(run_of(), 90, r1=filling(0.90, 0.97, 90)))))

    assert found.message.startswith("rank 1 · cuda:0: 97% of GPU memory in use and growing by ")
    assert "torch reserves" not in found.message


def test_what_torch_holds_and_cannot_use_is_reported_as_a_hint():
    pieces = {"reserved_bytes": 70 << 30, "allocated_bytes": 40 << 30}
    found = only(memory(look(read_gpus(run_of(), 90, r1=filling(0.90, 0.97, 90, **pieces)))))

    assert found.message.endswith(" · torch reserves 70 GiB and uses 40 GiB of it")
    assert "expandable_segments" in found.advice


@pytest.mark.parametrize(
    ("first", "last", "readings"), [(0.97, 0.97, 90), (0.5, 0.9, 90), (0.9, 0.97, 20)], ids=["full", "half", "short"]
)
def test_memory_that_is_only_full_or_only_grows_is_fine(first, last, readings):
    assert memory(look(read_gpus(run_of(), readings, r1=filling(first, last, readings)))) == []


def test_memory_that_was_filled_once_and_stays_is_fine():
    used = [*filling(0.1, 0.97, 10), *filling(0.97, 0.97, 80)]

    assert memory(look(read_gpus(run_of(), 90, r1=used))) == []


MIB, GIB = 1 << 20, 1 << 30


def used(bytes_at, world=1, samples=61, ranks=None):
    """Ranks that report their memory every ten seconds; `bytes_at` takes the rank and a time from 0 to 1."""
    state = RunState("ab12cd34", "train", world)
    for number in range(samples):
        for rank in range(world) if ranks is None else ranks:
            rss_bytes = int(bytes_at(rank, number / (samples - 1)))
            state.apply(make_beat(rank, seq=number + 1, rss_bytes=rss_bytes), (number + 1) * 10 * SECOND)
    return state


def leak(rank, at):
    return GIB + at * 900 * MIB


def test_memory_that_keeps_growing_is_reported_with_its_rate():
    finding = only(memory(look(used(lambda rank, at: leak(rank, at) if rank == 1 else GIB, world=3))))

    assert finding.message == "rank 1: host memory keeps growing: 1.1 GiB to 1.7 GiB in 10 min · 5.3 GiB per hour"
    assert (finding.ranks, finding.subject, finding.severity) == ((1,), "rank 1", Severity.WARNING)
    assert finding.evidence["bytes_per_hour"] == pytest.approx(5400 * MIB, rel=0.01)
    assert ".item()" in finding.advice


@pytest.mark.parametrize(("world", "subjects"), [(3, ["rank 0", "rank 1", "rank 2"]), (4, ["ranks"])])
def test_many_ranks_that_grow_are_reported_together(world, subjects):
    findings = memory(look(used(leak, world=world)))

    assert [finding.subject for finding in findings] == subjects
    assert sorted(rank for finding in findings for rank in finding.ranks) == list(range(world))


@pytest.mark.parametrize(
    "bytes_at",
    [
        lambda rank, at: GIB,
        lambda rank, at: 2 * GIB - leak(rank, at) / 4,
        lambda rank, at: GIB + min(at, 0.3) * 3 * GIB + (at * 7919 % 1) * MIB,
        lambda rank, at: GIB + (at > 0.5) * GIB,
        lambda rank, at: GIB + (at * 6 % 1) * GIB,
        lambda rank, at: GIB + (at if at < 0.9 else 0) * GIB,
    ],
    ids=["steady", "shrinking", "loaded and then steady", "one jump", "saw teeth", "freed at the end"],
)
def test_memory_that_does_not_keep_growing_is_fine(bytes_at):
    assert memory(look(used(bytes_at))) == []


@pytest.mark.parametrize(("samples", "found"), [(30, 0), (31, 1)], ids=["290 s", "300 s"])
def test_memory_must_be_watched_for_long_enough(samples, found):
    assert len(memory(look(used(leak, samples=samples)))) == found


@pytest.mark.parametrize(("growth_bytes", "found"), [(600 * MIB, 1), (601 * MIB, 0)])
def test_the_growth_must_reach_its_limit(growth_bytes, found):
    limits = msgspec.structs.replace(DEFAULTS, memory=MemoryLimits(growth_bytes=growth_bytes))
    # The medians of the first and the last third of 61 samples are 41/60 of the time apart.
    state = used(lambda rank, at: GIB + at * 600.001 * MIB * 60 / 41)

    assert len(memory(look(state, limits=limits))) == found


def test_an_hour_of_samples_is_evaluated_like_a_few_minutes():
    finding = only(memory(look(used(leak, samples=360))))

    assert finding.message == "rank 0: host memory keeps growing: 1.2 GiB to 1.7 GiB in 59 min 50 s · 903 MiB per hour"
    assert memory(look(used(lambda rank, at: GIB, samples=360))) == []


def test_growth_that_is_little_for_a_large_process_is_fine():
    assert memory(look(used(lambda rank, at: 100 * GIB + at * GIB))) == []


def test_memory_of_a_rank_that_has_ended_is_ignored():
    state = used(leak)
    state.apply(wire.Bye(rank=0, seq=100, reason="exit", text="", mono_ns=1), state.now_ns)

    assert memory(look(state)) == []
