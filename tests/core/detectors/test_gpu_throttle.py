"""Clocks that are held down: heat, power cap, whole hosts."""

from __future__ import annotations

import pytest

from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.gpu_error import gpu_error
from ddpwatch.core.detectors.gpu_idle import gpu_idle
from ddpwatch.core.detectors.gpu_throttle import gpu_throttle
from ddpwatch.core.state.gpu import reasons_text
from tests.builders.fake_rank import make_beat
from tests.builders.gpu_run import CAPPED, HOT, read_gpus
from tests.builders.synthetic_run import SECOND, look, only, run_of


def test_a_hot_gpu_is_reported_with_its_clocks_its_reason_and_its_heat():
    found = only(gpu_throttle(look(read_gpus(run_of(), r3=HOT))))

    assert found.message == "rank 3 · cuda:0 throttled: GPU clock 1110/1980 MHz, thermal slowdown at 89 °C"
    assert (found.severity, found.ranks) == (Severity.WARNING, (3,))
    assert found.evidence["clock_mhz"] == 1110
    assert "fans" in found.advice


@pytest.mark.parametrize(("hot", "reported"), [(19, False), (21, True)])
def test_it_must_hold_for_most_of_enough_readings(hot, reported):
    state = read_gpus(run_of(), readings=hot, r3=HOT)

    assert bool(gpu_throttle(look(state))) == reported


def test_a_reason_that_holds_now_and_then_is_ignored():
    state = read_gpus(run_of(), r3=[{}, {}, HOT])

    assert gpu_throttle(look(state)) == []


def test_a_power_cap_of_all_gpus_is_one_info():
    found = only(gpu_throttle(look(read_gpus(run_of(), r0=CAPPED, r1=CAPPED, r2=CAPPED, r3=CAPPED))))

    assert found.severity is Severity.INFO
    assert found.message == "4 of 4 GPUs at the power cap, none far below the others: GPU clock 1600/1980 MHz"
    assert found.ranks == ()


def test_a_power_cap_that_holds_one_gpu_below_the_others_is_a_warning():
    slow = {**CAPPED, "sm_mhz": 1200}
    found = only(gpu_throttle(look(read_gpus(run_of(), r1=slow))))

    assert found.severity is Severity.WARNING
    assert found.message == "rank 1 · cuda:0 throttled: GPU clock 1200/1980 MHz, power cap"
    assert "-pl" in found.advice


def test_gpus_of_another_kind_are_no_measure():
    other = {**CAPPED, "sm_mhz": 1200, "name": "Smaller 24GB"}

    assert only(gpu_throttle(look(read_gpus(run_of(), r1=other)))).severity is Severity.INFO


def test_most_gpus_of_a_host_are_reported_as_the_host():
    state = read_gpus(run_of(hosts=("a", "a", "b", "b")), r2=HOT, r3={**HOT, "sm_mhz": 900})
    found = only(gpu_throttle(look(state)))

    assert found.subject == "host b"
    assert found.message.startswith(
        "host b, 2 GPUs (ranks 2-3) throttled, worst: GPU clock 900/1980 MHz, thermal slowdown"
    )


def test_many_single_gpus_are_reported_together():
    hosts = tuple(f"h{rank // 4}" for rank in range(20))
    hot = {f"r{rank}": HOT for rank in range(0, 20, 4)}
    found = only(gpu_throttle(look(read_gpus(run_of(20, hosts), **hot))))

    assert found.subject == "GPUs"
    assert found.ranks == (0, 4, 8, 12, 16)


def test_a_stale_reading_is_ignored():
    state = read_gpus(run_of(), r3=HOT)
    for rank in state.ranks:
        state.apply(make_beat(rank, seq=60, mono_ns=3 * SECOND), state.now_ns + 30 * SECOND)

    assert gpu_throttle(look(state)) == []


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        (["hw_slowdown"], "hardware slowdown"),
        (["hw_slowdown", "hw_thermal_slowdown"], "hardware thermal slowdown"),
        (["hw_slowdown", "hw_power_brake_slowdown"], "power brake"),
        (["sw_power_cap", "hw_slowdown", "sw_thermal_slowdown"], "thermal slowdown, power cap"),
        (["sw_power_cap", "gpu_idle"], "power cap"),
        (["applications_clocks_setting"], ""),
    ],
)
def test_reasons_in_plain_words(reasons, words):
    assert reasons_text(reasons) == words


def test_without_readings_no_gpu_rule_finds_anything():
    state = run_of()

    for rule in (gpu_throttle, gpu_error, gpu_idle):
        assert rule(look(state)) == []
