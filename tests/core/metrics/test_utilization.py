"""Utilization over a run counts every reading once."""

from __future__ import annotations

import pytest

from ddpwatch.core.metrics.utilization import COLUMNS, Utilization
from ddpwatch.core.state.run import RunState
from tests.builders.fake_rank import make_beat, make_gpu, make_gpus, make_hello

SECOND_NS = 10**9


def received(seconds, looks=(), every_s=0, **gpu):
    """A rank whose GPU is read once a second; `looks` = after which readings it is sampled."""
    state, loads = RunState("ab12cd34", "train", 1), Utilization(every_s * SECOND_NS)
    state.apply(make_hello(seq=1, world_size=1), SECOND_NS)
    for second in range(1, seconds + 1):
        now_ns = second * SECOND_NS
        changed = {name: value(second) if callable(value) else value for name, value in gpu.items()}
        state.apply(make_gpus(seq=2 * second, mono_ns=now_ns, gpus=[make_gpu(**changed)]), now_ns)
        state.apply(make_beat(seq=2 * second + 1, mono_ns=now_ns, cpu_percent=float(second)), now_ns)
        if second in looks:
            loads.sample(state)
    loads.sample(state)
    loads.sample(state, last=True)
    return loads


def test_every_reading_counts_once_however_often_it_is_sampled():
    loads = received(90, looks=range(0, 90, 30), util_percent=lambda second: 100 if second <= 45 else 50)
    load = loads.gpus[0, "cuda:0"]

    assert load.counts["util_percent"] == 90
    assert load.mean("util_percent") == pytest.approx(75.0)
    assert load.most["util_percent"] == 100
    mean, least, most = loads.curve("util_percent")
    assert (mean[0], least[0], most[0], mean[-1]) == (100, 100, 100, 50)


def test_an_early_sample_is_skipped_and_nothing_is_lost():
    loads = received(90, looks=range(91), every_s=40)

    assert loads.gpus[0, "cuda:0"].counts["util_percent"] == 90
    assert loads.ranks[0].counts["cpu_percent"] == 4


def test_a_long_run_has_no_more_columns_than_a_chart():
    loads = received(COLUMNS * 3, looks=range(0, COLUMNS * 3, 50))

    assert loads.over_time.used <= COLUMNS
    assert loads.curve("power_mw")[0][-1] == pytest.approx(400_000)


def test_throttle_reasons_are_counted_by_moment():
    loads = received(40, throttle=lambda second: ["hw_thermal_slowdown"] if second > 30 else [])

    assert loads.gpus[0, "cuda:0"].held_share == pytest.approx(0.25)


def test_a_figure_that_is_not_read_is_not_zero():
    loads = received(5, power_mw=None)

    assert loads.gpus[0, "cuda:0"].mean("power_mw") is None
    assert not (loads.curve("power_mw")[0] > 0).any()


def test_cpu_and_memory_of_a_rank_are_kept_where_there_is_no_gpu():
    loads = received(10, looks=range(11))

    assert loads.ranks[0].most["cpu_percent"] == 10
    assert loads.ranks[0].mean("rss_bytes") == 812 << 20
