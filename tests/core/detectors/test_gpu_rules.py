"""What is found about GPUs: clocks that are held down, errors, idleness, memory, and what a straggler's clocks say."""

from __future__ import annotations

import pytest

from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.gpu_error import gpu_error
from ddpwatch.core.detectors.gpu_idle import gpu_idle
from ddpwatch.core.detectors.gpu_throttle import gpu_throttle
from ddpwatch.core.detectors.memory import memory
from ddpwatch.core.detectors.straggler import straggler
from ddpwatch.core.state.gpu import reasons_text
from tests.builders.fake_rank import make_beat, make_gpu, make_gpus
from tests.builders.synthetic_run import look, make_run, only, train

SECOND = 1_000_000_000
HOT = {"sm_mhz": 1110, "temperature_c": 89, "throttle": ["hw_slowdown", "sw_thermal_slowdown"]}
CAPPED = {"sm_mhz": 1600, "throttle": ["sw_power_cap"]}
LOW = {"util_percent": 12}


def read_gpus(state, readings=30, begin_ns=0, **changed_by_rank):
    """Let every rank tell of its GPU once a second; `r3=HOT` changes that of rank 3, for a list of readings each."""
    for second in range(readings):
        mono_ns = begin_ns + (second + 1) * SECOND
        for rank in state.ranks:
            changes = changed_by_rank.get(f"r{rank}", {})
            changes = changes[second % len(changes)] if isinstance(changes, list) else changes
            changes = changes if isinstance(changes, tuple) else (changes,)
            gpus = [
                make_gpu(**{"device": f"cuda:{place}", "uuid": f"GPU-{rank}-{place}", **change})
                for place, change in enumerate(changes)
            ]
            state.apply(make_gpus(rank, gpus, seq=10 + second, mono_ns=mono_ns), mono_ns)
    for rank in state.ranks:
        state.apply(make_beat(rank, seq=10 + readings, mono_ns=2 * SECOND, step=60, phase=1), state.now_ns)
    return state


def run_of(world=4, hosts=(), **phases):
    return make_run({rank: train(**phases) for rank in range(world)}, hosts=hosts)


# --- gpu-throttle ---


def test_a_hot_gpu_is_told_with_its_clocks_its_reason_and_its_heat():
    found = only(gpu_throttle(look(read_gpus(run_of(), r3=HOT))))

    assert found.message == "rank 3 · cuda:0: clocks 1110 of 1980 MHz, thermal slowdown at 89 °C"
    assert (found.severity, found.ranks) == (Severity.WARNING, (3,))
    assert found.evidence["clock_mhz"] == 1110
    assert "fans" in found.advice


@pytest.mark.parametrize(("hot", "reported"), [(19, False), (21, True)])
def test_it_must_hold_for_most_of_enough_readings(hot, reported):
    state = read_gpus(run_of(), readings=hot, r3=HOT)

    assert bool(gpu_throttle(look(state))) == reported


def test_what_holds_now_and_then_is_no_trouble():
    state = read_gpus(run_of(), r3=[{}, {}, HOT])

    assert gpu_throttle(look(state)) == []


def test_a_power_cap_of_all_alike_is_good_to_know_and_told_once():
    found = only(gpu_throttle(look(read_gpus(run_of(), r0=CAPPED, r1=CAPPED, r2=CAPPED, r3=CAPPED))))

    assert found.severity is Severity.INFO
    assert found.message == "4 of 4 GPUs at the power cap, none far below the others: clocks 1600 of 1980 MHz"
    assert found.ranks == ()


def test_a_power_cap_that_holds_one_gpu_below_the_others_is_a_warning():
    slow = {**CAPPED, "sm_mhz": 1200}
    found = only(gpu_throttle(look(read_gpus(run_of(), r1=slow))))

    assert found.severity is Severity.WARNING
    assert found.message == "rank 1 · cuda:0: clocks 1200 of 1980 MHz, power cap"
    assert "-pl" in found.advice


def test_gpus_of_another_kind_are_no_measure():
    other = {**CAPPED, "sm_mhz": 1200, "name": "Smaller 24GB"}

    assert only(gpu_throttle(look(read_gpus(run_of(), r1=other)))).severity is Severity.INFO


def test_most_gpus_of_a_host_are_told_as_the_host():
    state = read_gpus(run_of(hosts=("a", "a", "b", "b")), r2=HOT, r3={**HOT, "sm_mhz": 900})
    found = only(gpu_throttle(look(state)))

    assert found.subject == "host b"
    assert found.message.startswith("host b, 2 GPUs (ranks 2-3), at worst clocks 900 of 1980 MHz, thermal slowdown")


def test_many_single_gpus_are_told_together():
    hosts = tuple(f"h{rank // 4}" for rank in range(20))
    hot = {f"r{rank}": HOT for rank in range(0, 20, 4)}
    found = only(gpu_throttle(look(read_gpus(run_of(20, hosts), **hot))))

    assert found.subject == "GPUs"
    assert found.ranks == (0, 4, 8, 12, 16)


def test_a_reading_of_long_ago_tells_nothing_of_now():
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


# --- gpu-error ---


@pytest.mark.parametrize(
    ("code", "severity", "word"),
    [
        (13, Severity.WARNING, "kernel"),
        (43, Severity.INFO, "stopped"),
        (48, Severity.CRITICAL, "memory error"),
        (74, Severity.CRITICAL, "NVLink"),
        (79, Severity.CRITICAL, "off the bus"),
        (119, Severity.CRITICAL, "does not answer"),
        (999, Severity.WARNING, "driver"),
    ],
)
def test_an_xid_is_told_in_words(code, severity, word):
    found = only(gpu_error(look(read_gpus(run_of(), readings=1, r2={"xids": [code]}))))

    assert found.message.startswith(f"rank 2 · cuda:0: Xid {code}, ")
    assert word in found.message
    assert found.severity is severity


def test_of_several_errors_the_worst_is_told_first():
    found = only(gpu_error(look(read_gpus(run_of(), readings=1, r2={"xids": [31, 79, 45, 45]}))))

    assert "Xid 79" in found.message
    assert found.message.endswith("and 2 more")


def test_new_memory_errors_are_told_and_old_ones_are_not():
    old = read_gpus(run_of(), readings=2, r1={"ecc_uncorrected": 7})
    new = read_gpus(run_of(), readings=2, r1=[{"ecc_uncorrected": 7}, {"ecc_uncorrected": 9}])

    assert gpu_error(look(old)) == []
    found = only(gpu_error(look(new)))
    assert "2 new memory errors that could not be corrected" in found.message
    assert found.severity is Severity.CRITICAL


def test_a_lost_gpu_is_critical():
    found = only(gpu_error(look(read_gpus(run_of(), readings=1, r0={"lost": True}))))

    assert found.message == "rank 0 · cuda:0: it is lost, nothing can be read from it any more"
    assert found.severity is Severity.CRITICAL


def test_ranks_that_share_a_gpu_tell_of_one_error():
    shared = {"uuid": "GPU-x", "xids": [79]}
    found = only(gpu_error(look(read_gpus(run_of(), readings=1, r0=shared, r1=shared))))

    assert found.ranks == (0, 1)


def test_errors_of_very_many_gpus_are_few_findings():
    state = read_gpus(run_of(24), readings=1, **{f"r{rank}": {"xids": [79]} for rank in range(24)})
    found = gpu_error(look(state))

    assert len(found) == 8
    assert sum(len(finding.ranks) for finding in found) == 24


# --- gpu-idle ---


def idle_run(count=4, **phases):
    """Ranks whose GPUs have little to do."""
    return read_gpus(run_of(**phases), **{f"r{rank}": LOW for rank in range(count)})


def test_idle_gpus_of_all_ranks_are_told_once_with_what_takes_the_time():
    found = only(gpu_idle(look(idle_run(data=90))))

    assert found.message == "GPUs of all ranks work 12 % of the time: 76 % of the step goes by waiting for data"
    assert (found.subject, found.phase, found.ranks) == ("job", "data", ())


def test_one_idle_gpu_is_told_by_its_rank():
    found = only(gpu_idle(look(idle_run(1))))

    assert found.message.startswith("the GPU of rank 0 works 12 % of the time: ")
    assert found.ranks == (0,)


def test_a_gpu_that_was_busy_a_moment_ago_or_is_now_is_not_idle():
    assert gpu_idle(look(read_gpus(run_of(), r0=[LOW, {}], r1=[{}, LOW]))) == []


def test_nothing_is_said_while_a_rank_does_not_train():
    paused, hung, young = idle_run(), idle_run(), read_gpus(make_run({0: train(0, 8), 1: train(0, 8)}), r0=LOW, r1=LOW)
    for rank in paused.ranks:
        paused.apply(make_beat(rank, seq=60, mono_ns=3 * SECOND, pause="evaluation"), paused.now_ns)
        hung.apply(make_beat(rank, seq=60, mono_ns=60 * SECOND, phase_ns=50 * SECOND), hung.now_ns)

    for state in (paused, hung, young):
        assert gpu_idle(look(state)) == []


def test_without_readings_nothing_is_said_of_gpus():
    state = run_of()

    for rule in (gpu_throttle, gpu_error, gpu_idle):
        assert rule(look(state)) == []


# --- memory ---


def filling(first, last, readings, **changed):
    """Memory in use that grows from one part of the GPU to another."""
    total = 80 << 30
    parts = (first + (last - first) * place / (readings - 1) for place in range(readings))
    return [{"used_bytes": int(part * total), "total_bytes": total, **changed} for part in parts]


def test_a_gpu_that_is_nearly_full_and_grows_is_told():
    found = only(memory(look(read_gpus(run_of(), 90, r1=filling(0.90, 0.97, 90)))))

    assert found.message.startswith("rank 1 · cuda:0: 97 % of the GPU's memory in use and growing, ")
    assert "torch holds" not in found.message


def test_what_torch_holds_and_cannot_use_is_told_as_a_hint():
    pieces = {"reserved_bytes": 70 << 30, "allocated_bytes": 40 << 30}
    found = only(memory(look(read_gpus(run_of(), 90, r1=filling(0.90, 0.97, 90, **pieces)))))

    assert found.message.endswith(" · torch holds 70G and uses 40G of it")
    assert "expandable_segments" in found.advice


@pytest.mark.parametrize(
    ("first", "last", "readings"), [(0.97, 0.97, 90), (0.5, 0.9, 90), (0.9, 0.97, 20)], ids=["full", "half", "short"]
)
def test_memory_that_is_full_or_grows_alone_is_no_trouble(first, last, readings):
    assert memory(look(read_gpus(run_of(), readings, r1=filling(first, last, readings)))) == []


def test_memory_that_was_filled_once_and_stays_is_no_trouble():
    used = [*filling(0.1, 0.97, 10), *filling(0.97, 0.97, 80)]

    assert memory(look(read_gpus(run_of(), 90, r1=used))) == []


# --- straggler ---


def slow_run(phase="backward", gpus=True, begin_ns=0, **changed):
    """Rank 3 is slow in a phase for as long as its steps go: 80 of 60 ms."""
    steps = {rank: train(10, 80, **({phase: 46} if rank == 3 else {"sync": 32})) for rank in range(4)}
    state = make_run(steps)
    return read_gpus(state, 10, begin_ns=begin_ns, **changed) if gpus else state


def test_a_straggler_with_a_hot_gpu_says_so():
    found = only(straggler(look(slow_run(r3=HOT))))

    assert found.message.startswith("rank 3 is slow in backward: 46.0 ms, others 16.0 ± 0.00 · costs the job ")
    assert found.message.endswith(" · clocks 1110 of 1980 MHz, thermal slowdown at 89 °C")
    assert "gpu-throttle" in found.advice
    assert found.evidence["clocks"].startswith("clocks 1110")


def test_a_straggler_with_low_clocks_and_no_reason_says_what_the_others_have():
    found = only(straggler(look(slow_run(r3={"sm_mhz": 1200}))))

    assert found.message.endswith(" · clocks 1200 of 1980 MHz, others 1980")


@pytest.mark.parametrize(
    ("phase", "changed"),
    [
        ("data", {"r3": HOT}),
        ("backward", {}),
        ("backward", {"r0": HOT}),
        ("backward", {"r3": CAPPED | {"sm_mhz": 1900}}),
    ],
    ids=["waits for data", "healthy", "another is hot", "power cap"],
)
def test_clocks_are_not_blamed_where_they_explain_nothing(phase, changed):
    assert "clocks" not in only(straggler(look(slow_run(phase, **changed)))).message


def test_clocks_of_another_time_are_not_blamed():
    assert "clocks" not in only(straggler(look(slow_run(begin_ns=600 * SECOND, r3=HOT)))).message


def test_a_straggler_without_gpu_readings_is_told_as_ever():
    found = only(straggler(look(slow_run(gpus=False))))

    assert "clocks" not in found.message
    assert "clocks" not in found.evidence
