"""Scheduler noise from the time that training threads wait for a core."""

from __future__ import annotations

import pytest

from ddpwatch.core.diagnosis.scheduler_noise import SchedulerNoise, scheduler_noise
from ddpwatch.core.state.rank import CPU_SAMPLE_NS
from tests.builders.fake_rank import make_beat
from tests.builders.synthetic_run import SECOND, make_run, train


def noise_of(*shares_by_rank):
    """Noise of ranks whose time without a core has these shares in successive intervals."""
    state = make_run({rank: train(0, 60) for rank in range(len(shares_by_rank))}, mono_ns=1)
    for rank, shares in enumerate(shares_by_rank):
        queued_ns = 1
        for number, share in enumerate((0.0, *shares)):
            queued_ns += int(share * CPU_SAMPLE_NS)
            beat = make_beat(rank, seq=10 + number, mono_ns=(1 + number) * CPU_SAMPLE_NS, queued_ns=queued_ns)
            state.apply(beat, 1)
        state.ranks[rank].add_steps(train(60, 1, end_ns=100 * SECOND))
    return scheduler_noise(list(state.ranks.values()), 60)


def test_a_kernel_that_reports_nothing_adds_no_noise():
    state = make_run({0: train(), 1: train()})

    assert scheduler_noise(list(state.ranks.values()), 59) == SchedulerNoise(0.0, 0.0)


def test_starvation_that_moves_between_ranks_is_noise():
    noise = noise_of([0.4, 0.0] * 20, [0.0, 0.4] * 20)

    assert noise.mean == pytest.approx(0.2, abs=0.01)
    assert noise.spread == pytest.approx(0.2, abs=0.02)


def test_one_rank_that_is_starved_all_the_time_is_not_noise():
    assert noise_of([0.3] * 60, [0.0] * 60).spread < 0.03


def test_that_it_is_starved_all_the_time_takes_a_while_to_know():
    assert noise_of([0.3] * 3, [0.0] * 3).spread > 0.1


def test_what_is_known_at_the_start_is_the_share_since_the_process_began():
    state = make_run({0: train(), 1: train()}, mono_ns=SECOND, unix_ns=10 * SECOND, started_unix_ns=8 * SECOND)
    for rank in range(2):
        state.apply(make_beat(rank, seq=10, mono_ns=SECOND + 1, queued_ns=SECOND), 1)
    noise = scheduler_noise(list(state.ranks.values()), 59)

    assert (noise.mean, noise.spread) == pytest.approx((0.5, 0.5))


def test_it_averages_out_over_many_correlation_times_only():
    noise = SchedulerNoise(mean=0.2, spread=0.1)

    assert noise.sigma(0, 2 * SECOND) == noise.spread
    assert noise.sigma(0, 8 * SECOND) == pytest.approx(noise.spread / 2)
    assert noise.spread < noise.sigma(0, CPU_SAMPLE_NS // 4) <= noise.sigma(0, 1.0) == pytest.approx(0.4)
