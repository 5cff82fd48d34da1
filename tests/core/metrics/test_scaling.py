"""Scaling against a baseline: the losses add up, and those of synthetic runs are known."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.core.metrics.aggregate import Aggregate, StepSample
from ddpwatch.core.metrics.live_metrics import figures_of
from ddpwatch.core.metrics.scaling import Profile, scaling, scaling_of
from ddpwatch.simulator.scenario import Fault, Scenario
from ddpwatch.view.scaling import scaling_object, scaling_sentence, waterfall, whole_percents
from tests.builders.windows import aggregate_of, window_from_phases

MS = 1e6


def profile(world_size, *, data=1.0, compute=80.0, wire=0.0, wait=0.0, batch=None, waited_for=()):
    """A run in ms."""
    step_ns = (data + compute + wire + wait) * MS
    batch = 32 * world_size if batch is None else batch
    rate = batch / step_ns * 1e9 if batch else None
    parts = (data * MS, compute * MS, wire * MS, wait * MS)
    return Profile(world_size, 100, step_ns, rate, batch or None, *parts, waited_for)


parts_ms = st.floats(0.0, 1e4)
profiles = st.builds(
    lambda world, data, compute, wire, wait, batch: profile(
        world, data=data, compute=compute + 0.01, wire=wire, wait=wait, batch=batch
    ),
    st.integers(1, 1024), parts_ms, parts_ms, parts_ms, parts_ms, st.sampled_from([0, 1, 32, 1000]),
)  # fmt: skip


@given(profiles, profiles)
def test_the_parts_add_up_to_what_is_lost(baseline, run):
    result = scaling(baseline, run)

    assert sum(result.parts.values()) == pytest.approx(1 - result.efficiency, abs=1e-9 * max(1.0, result.efficiency))
    shown = whole_percents(result)
    assert sum(shown.values()) == 100 - round(result.efficiency * 100)
    assert all(abs(shown[name] - result.parts[name] * 100) <= 1 + 1e-6 for name in shown)


@given(profiles, profiles, st.sampled_from([40, 80, 120]))
def test_whatever_is_lost_can_be_drawn(baseline, run, columns):
    result = scaling(baseline, run)

    assert all(sum(len(cell.text) for cell in line) <= columns for line in waterfall(result, columns))
    assert scaling_sentence(result)
    assert set(scaling_object(result)["parts"]) == {"wire", "waiting", "data", "compute"}


def test_four_ranks_in_one_sentence():
    one = profile(1, data=2.0, compute=81.0)
    four = profile(4, data=4.0, compute=81.0, wire=9.0, wait=6.0, waited_for=(3,))

    result = scaling(one, four)

    assert result.speedup == pytest.approx(3.32)
    assert scaling_sentence(result) == (
        "4 ranks run 3.32× as fast as one: 83% efficiency; 9% wire, 6% waiting for rank 3, 2% data"
    )


def test_a_gain_is_called_one():
    result = scaling(profile(1, compute=99.0), profile(4, compute=79.0, wire=12.0, wait=8.0))

    assert result.efficiency == pytest.approx(1.0)
    assert scaling_sentence(result) == (
        "4 ranks run 4.00× as fast as one: 100% efficiency; 12% wire, 8% waiting, 20% gained in compute"
    )


def test_smaller_batches_that_cost_more_for_each_sample_are_slower_compute():
    """Strong scaling: the batch of the whole job stays, and a quarter of it takes more than a quarter of the time."""
    one, four = profile(1, data=0.0, compute=80.0, batch=128), profile(4, data=0.0, compute=25.0, batch=128)

    result = scaling(one, four)

    assert result.speedup == pytest.approx(3.2)
    assert result.parts["compute"] == pytest.approx(0.2)


def test_without_samples_steps_are_compared_and_that_is_said():
    one, four = profile(1, compute=79.0, batch=0), profile(4, compute=79.0, wire=20.0, batch=0)

    result = scaling(one, four)

    assert result.by_steps
    assert result.speedup == pytest.approx(3.2)
    assert scaling_sentence(result).endswith("20% wire; batch sizes are unknown and assumed equal")


def test_the_parts_of_a_made_up_run_are_found_again():
    """A healthy job spends 5% on the wire; its rank 3 takes a fifth of a step longer in backward."""
    quiet = {"noise": 0.002, "spikes": 0.0, "drift": 0.0, "step_ms": 50.0}
    one = Scenario(
        1, profile={"data": 0.05, "forward": 0.27, "backward": 0.5, "optimizer": 0.08, "other": 0.1}, **quiet
    )
    alone = one.phases_ns()
    alone[:, 3] = 0
    slow = Scenario(4, faults=(Fault((3,), "backward", 0.2, onset=0),), **quiet).phases_ns()

    result = scaling(
        StepSample([window_from_phases(alone)]).profile(), StepSample([window_from_phases(slow)]).profile()
    )

    # A step is 1.2 long: 0.05 of it wire, three of four ranks wait for 0.2, and one is slower by as much.
    assert result.run.waited_for == (3,)
    assert result.parts["wire"] == pytest.approx(0.05 / 1.2, abs=0.01)
    assert result.parts["waiting"] == pytest.approx(0.15 / 1.2, abs=0.015)
    assert result.efficiency == pytest.approx(1.0 / 1.2, abs=0.01)
    assert "waiting for rank 3" in scaling_sentence(result)


def test_figures_of_now_tell_what_windows_tell():
    steps = Scenario(4, faults=(Fault((2,), "data", 0.3, onset=0),), spikes=0.0).phases_ns()
    last = window_from_phases(steps[:, :, -50:])

    now, whole = figures_of(last).aggregate.profile(), StepSample([last]).profile()

    assert now.waited_for == whole.waited_for == (2,)
    assert now.shares == pytest.approx(whole.shares, abs=0.02)
    assert now.samples_per_s == pytest.approx(whole.samples_per_s)


def test_the_parts_are_the_shares_and_the_speed_is_the_throughput_of_the_run():
    """Some odd steps move totals and not medians: both must come from the same."""
    one, four = Scenario(1).phases_ns(), Scenario(4, faults=(Fault((2,), "backward", 0.3, onset=0),)).phases_ns()
    one[:, 3] = 0
    one[:, 2, ::7] *= 3
    four[:, 2, ::5] *= 2
    four[:2, 3, ::9] *= 9
    alone, run = (aggregate_of(window_from_phases(steps), ranks=len(steps)) for steps in (one, four))
    figures = run

    result = scaling(alone.profile(), run.profile())

    assert result.parts["wire"] == pytest.approx(figures.shares().wire)
    assert result.parts["waiting"] == pytest.approx(figures.shares().wait)
    assert result.speedup == pytest.approx(figures.samples_per_s / alone.samples_per_s)
    assert result.run.waited_for == figures.waited_for()
    assert sum(result.parts.values()) == pytest.approx(1 - result.efficiency)

    seen = scaling_of(alone.profile(), Aggregate.of(window_from_phases(four)))
    assert seen.parts == pytest.approx(result.parts)
    assert seen.speedup == pytest.approx(result.speedup)
    assert seen.run.waited_for == result.run.waited_for

    last = window_from_phases(four[:, :, -50:])
    now = figures_of(last).aggregate.profile()
    assert now.shares["wire"] == pytest.approx(figures_of(last).wire_share)
    assert now.shares["waiting"] == pytest.approx(figures_of(last).wait_share)
    assert now.shares == pytest.approx(StepSample([last]).profile().shares)
    assert now.samples_per_s == pytest.approx(StepSample([last]).profile().samples_per_s)


def test_where_medians_give_another_speedup_both_are_shown():
    """Long steps of the baseline make it slower as a whole, and not in its median step, which tables show."""
    one, four = Scenario(1).phases_ns(), Scenario(4).phases_ns()
    one[:, 3] = 0
    even, of_four = aggregate_of(window_from_phases(one), ranks=1), aggregate_of(window_from_phases(four), ranks=4)
    one[:, 2, ::7] *= 5
    uneven = aggregate_of(window_from_phases(one), ranks=1)
    last = figures_of(window_from_phases(four[:, :, -50:]))

    result = scaling(uneven.profile(), of_four.profile())
    usual = 4 * uneven.step_ns() / of_four.step_ns()
    assert result.median_speedup == pytest.approx(usual, rel=0.01)
    assert result.medians_differ
    assert f"{result.speedup:.2f}× as fast as one over all time ({usual:.2f}× by medians): " in scaling_sentence(result)
    assert "medians" not in scaling_sentence(result, by_means=True)
    assert scaling_object(result)["median_speedup"] == pytest.approx(usual, rel=0.01)
    assert sum(result.parts.values()) == pytest.approx(1 - result.efficiency)
    seen, now = (
        scaling_of(uneven.profile(), Aggregate.of(window_from_phases(four))),
        scaling_of(uneven.profile(), last.aggregate),
    )
    assert seen.median_speedup == pytest.approx(usual, rel=0.01)
    # What one has who divides the throughput on the screen by that of the baseline.
    assert now.median_speedup == pytest.approx(last.samples_per_s * uneven.step_ns() / 32e9, rel=0.01)

    alike = scaling(even.profile(), of_four.profile())
    assert not alike.medians_differ
    assert "medians" not in scaling_sentence(alike)
    assert scaling_object(scaling(profile(1), profile(4)))["median_speedup"] is None


def test_nobody_is_named_where_ranks_take_turns_in_being_late():
    steps = Scenario(4, noise=0.1, spikes=0.0).phases_ns()

    found = StepSample([window_from_phases(steps)]).profile()

    assert found.wait_ns > 0.01 * found.step_ns
    assert found.waited_for == ()


def test_some_odd_steps_of_one_rank_blame_nobody_in_a_comparison():
    steps = Scenario(4, noise=0.05, spikes=0.0).phases_ns()
    steps[1, 1, 50:53] += int(500 * MS)
    steps[[0, 2, 3], 3, 50:53] += int(500 * MS)
    window = window_from_phases(steps)

    assert Aggregate.of(window).waited_for() == (1,)
    assert StepSample([window]).profile().waited_for == ()


def test_two_slow_ranks_are_both_named():
    steps = Scenario(8, faults=(Fault((4, 5), "forward", 0.3, onset=0),)).phases_ns()

    assert StepSample([window_from_phases(steps)]).profile().waited_for == (4, 5)


def test_a_run_with_a_rank_missing_has_no_profile():
    steps = Scenario(3).phases_ns()
    alone = window_from_phases(steps, world_size=4)

    assert StepSample([alone]).profile() is None
    assert figures_of(alone).aggregate.profile() is None
    assert StepSample([]).profile() is None


def test_the_first_steps_are_left_out_unless_there_are_no_others_and_the_very_first_always():
    steps = Scenario(2, steps=100, spikes=0.0, noise=0.001, drift=0.0).phases_ns()
    steps[:, 1, :10] *= 50

    sample = StepSample([window_from_phases(steps, first=0)])
    few = StepSample([window_from_phases(steps[:, :, :3], first=0)])
    one = StepSample([window_from_phases(steps[:, :, :1], first=0)])

    assert len(sample.steps()["index"]) == 90
    assert few.steps()["index"].tolist() == [1, 2]
    assert one.steps()["index"].tolist() == []
    assert one.profile() is None


def test_a_long_run_takes_no_more_memory_than_a_short_one():
    steps = Scenario(2, steps=100).phases_ns()
    sample = StepSample((window_from_phases(steps, first=100 * place) for place in range(100)), max_rows=1000)

    kept = sample.steps()["index"]

    assert sample.seen == 10_000
    assert 300 < len(kept) <= 1000
    assert (np.diff(kept) > 0).all()
    assert kept[0] < 500
    assert kept[-1] > 9500


def test_a_baseline_of_several_ranks_is_said():
    result = scaling(profile(2), replace(profile(4, wire=9.0), steps=7))

    assert scaling_sentence(result) == "4 ranks run 1.80× as fast as 2: 90% efficiency; 10% wire"


def test_one_rank_has_no_share_and_is_a_baseline_all_the_same():
    alone = aggregate_of(window_from_phases(Scenario(1).phases_ns()), ranks=1)
    figures = alone

    assert figures.shares() == (None, None, None)
    assert "sync" in figures.mean_parts_ns()
    assert sum(figures.mean_parts_ns().values()) == pytest.approx(alone.phases_ns().sum())
    assert alone.profile().world_size == 1
