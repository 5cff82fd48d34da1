"""GPU state: the latest reading, some minutes of history, bounded whatever a rank sends."""

import numpy as np
import pytest

from ddpwatch import wire
from ddpwatch.core.limits import LivenessLimits
from ddpwatch.core.state.gpu import (
    CROWDED_MOMENTS,
    CURVES,
    KEPT_MOMENTS,
    MAX_DEVICES,
    NOT_REPORTED,
    THROTTLE_REASONS,
    GpuHistory,
)
from ddpwatch.core.state.run import RunState
from tests.builders.fake_rank import make_gpu, make_gpus, make_snap

SECOND = 1_000_000_000


def make_state(world=2):
    return RunState("run", "run", world)


def test_a_reading_is_kept_with_all_its_figures():
    state = make_state()
    state.apply(make_gpus(0, [make_gpu(util_percent=97, power_mw=310_000)], mono_ns=5 * SECOND), 7 * SECOND)
    gpus = state.ranks[0].gpus

    assert (gpus.latest.gpus[0].util_percent, gpus.latest.gpus[0].power_mw, gpus.received_ns) == (
        97,
        310_000,
        7 * SECOND,
    )
    assert gpus.histories["cuda:0"].curve("util_percent").tolist() == [97]
    assert state.ranks[1].gpus.latest is None


def test_an_older_reading_changes_nothing():
    state = make_state()
    for seq, (mono_ns, util) in enumerate([(5, 50), (4, 40), (5, 60), (6, 70)], 1):
        state.apply(make_gpus(0, [make_gpu(util_percent=util)], mono_ns=mono_ns, seq=seq), SECOND)

    assert state.ranks[0].gpus.latest.gpus[0].util_percent == 70
    assert state.ranks[0].gpus.histories["cuda:0"].curve("util_percent").tolist() == [50, 70]


def test_a_figure_that_could_not_be_read_is_a_hole_in_its_curve():
    state = make_state()
    state.apply(make_gpus(0, [make_gpu(power_mw=None, absent={"power_mw": "not supported"})]), SECOND)
    history = state.ranks[0].gpus.histories["cuda:0"]

    assert np.isnan(history.curve("power_mw")).all()
    assert not np.isnan(history.curve("util_percent")).any()


@pytest.mark.parametrize("kept", [1, 2, 8, KEPT_MOMENTS])
def test_of_a_long_run_the_last_moments_are_kept(kept):
    history = GpuHistory(kept)
    for moment in range(3 * kept + 5):
        history.put(moment + 1, (moment,) * len(CURVES))

    assert history.times_ns().tolist() == list(range(2 * kept + 6, 3 * kept + 6))
    assert history.curve("sm_mhz").tolist() == list(range(2 * kept + 5, 3 * kept + 5))


@pytest.mark.parametrize(("world", "kept"), [(256, KEPT_MOMENTS), (257, CROWDED_MOMENTS)])
def test_of_very_many_ranks_fewer_moments_are_kept(world, kept):
    assert make_state(world).ranks[world - 1].gpus.kept == kept


def test_a_late_viewer_gets_the_curves_and_goes_on_from_there():
    moments = [wire.GpuMoment(k * SECOND, "cuda:0", util_percent=k) for k in range(1, 9)]
    snap = make_snap(0, gpus=make_gpus(0, [make_gpu(util_percent=9)], mono_ns=9 * SECOND), gpu_moments=moments)
    state = make_state()
    state.apply(snap, SECOND)
    state.apply(snap, 2 * SECOND)
    state.apply(make_gpus(0, [make_gpu(util_percent=10)], mono_ns=10 * SECOND, seq=snap.seq + 1), 3 * SECOND)

    assert state.ranks[0].gpus.histories["cuda:0"].curve("util_percent").tolist() == list(range(1, 11))


def test_the_number_of_gpus_of_a_rank_is_bounded():
    state = make_state()
    for seq in range(1, 100):
        state.apply(make_gpus(0, [make_gpu(device=f"cuda:{seq}")], mono_ns=seq, seq=seq), SECOND)

    assert len(state.ranks[0].gpus.histories) == MAX_DEVICES


def test_texts_of_gpus_are_sanitized():
    evil = "[red]\x1b[2J\u202e" + "x" * 150
    gpu = make_gpu(
        device=evil, uuid=evil, name=evil, throttle=[evil], absent={evil: evil}, processes=[wire.GpuProcess(1, 2, evil)]
    )
    state = make_state()
    state.apply(make_gpus(0, [gpu], why=evil), SECOND)
    reported = repr(state.ranks[0].gpus)

    assert "\\x1b" not in reported
    assert "\\u202e" not in reported


def test_late_all_reduce_figures_are_added_to_their_step():
    state = make_state()
    steps = [wire.Step(index, (index + 1) * SECOND, 1, 2, 3, 4, 5, 6) for index in range(3)]
    state.apply(wire.Steps(rank=0, seq=1, steps=steps), SECOND)
    comms = [wire.Comm(1, 700, 4096), wire.Comm(99, 1, 1), wire.Comm(2, 2**60, 1)]
    state.apply(wire.Comms(rank=0, seq=2, comms=comms), SECOND)
    rank = state.ranks[0]

    assert rank.steps.column("busy_ns", np.arange(3)).tolist() == [0, 700, 0]
    assert rank.steps.column("comm_bytes", np.arange(3)).tolist() == [0, 4096, 0]
    assert rank.bad == 1


def test_gpus_survive_the_wire_and_absent_figures_take_no_room():
    message = make_gpus(3, [make_gpu(util_percent=0, throttle=["sw_power_cap"])], seq=9)

    assert wire.decode(wire.encode(message)) == message
    assert len(wire.encode(make_gpus(3, [wire.Gpu("cuda:0")], seq=9))) < 80


@pytest.mark.parametrize("kept", [1, 2, 8])
def test_throttle_reasons_stay_with_their_moments(kept):
    history = GpuHistory(kept)
    for moment in range(3 * kept + 5):
        history.put(moment + 1, (moment,) * len(CURVES), moment % 7)

    assert history.held().tolist() == [moment % 7 for moment in history.curve("sm_mhz").astype(int)]


def test_readings_carry_throttle_reasons_and_snapshots_do_not():
    state = make_state()
    moments = [wire.GpuMoment(SECOND, "cuda:0")]
    hot = make_gpu(throttle=["sw_power_cap", "gpu_idle", "hw_thermal_slowdown"])
    state.apply(make_snap(0, gpus=make_gpus(0, [hot], mono_ns=2 * SECOND), gpu_moments=moments), SECOND)
    before, now = state.ranks[0].gpus.histories["cuda:0"].held().tolist()

    assert before == NOT_REPORTED
    assert [reason for place, reason in enumerate(THROTTLE_REASONS) if now >> place & 1] == [
        "hw_thermal_slowdown",
        "sw_power_cap",
    ]


def test_an_old_reading_is_stale():
    state = make_state()
    state.apply(make_gpus(0, mono_ns=5), SECOND)
    gpus = state.ranks[0].gpus

    assert gpus.now(SECOND + LivenessLimits.GPU_STALE_NS) == gpus.latest.gpus
    assert gpus.now(SECOND + LivenessLimits.GPU_STALE_NS + 1) == state.ranks[1].gpus.now(0) == []


@pytest.mark.parametrize("times", [range(12), range(3), (0, 1, 1, 4, 2, 5)])
def test_a_history_in_one_piece_equals_one_put_moment_by_moment(times):
    figures = [
        tuple(None if place == time % 6 else float(time + place) for place in range(len(CURVES))) for time in times
    ]
    at_once, one_by_one = GpuHistory(5), GpuHistory(5)
    at_once.put_before([(time, values, NOT_REPORTED) for time, values in zip(times, figures, strict=True)])
    for time, values in zip(times, figures, strict=True):
        one_by_one.put(time, values)

    assert at_once.times_ns().tolist() == one_by_one.times_ns().tolist()
    assert at_once.held().tolist() == one_by_one.held().tolist()
    for name in CURVES:
        np.testing.assert_array_equal(at_once.curve(name), one_by_one.curve(name))
