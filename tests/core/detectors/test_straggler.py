"""The straggler rule on synthetic runs whose truth is known: rank, phase, and no alert in healthy runs."""

from __future__ import annotations

import random
import re
from itertools import product

import msgspec
import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.context import DetectorContext
from ddpwatch.core.detectors.straggler import ADVICE, ANYWHERE, COMPUTING_ON_CPU, straggler
from ddpwatch.core.limits import DEFAULTS, StragglerLimits
from ddpwatch.core.metrics.baseline import History
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.core.state.step_store import COLUMN
from ddpwatch.simulator.scenario import Fault, Scenario
from tests.builders.fake_rank import MS, make_step
from tests.builders.gpu_run import CAPPED, HOT, read_gpus
from tests.builders.scenario_frames import frames
from tests.builders.synthetic_run import SECOND, look, make_run, only, train
from tests.builders.windows import window

OWN_PHASES = [phase for phase in wire.PHASES if phase != "sync"]
SIZE = 0.3
NOISE = 0.03
ONSET = 40
FOUND_AFTER = 15
"""Steps after the last slow one: the evaluation interval of short steps."""
STEPS = 180
PATTERNS = {"lasting": {}, "every 2nd": {"every": 2}, "every 4th": {"every": 4}, "bursts of 30": {"burst": (30, 30)}}


def slow(*ranks, phase="forward", size=SIZE, **changed):
    return Fault(ranks, phase, size, **{"onset": ONSET, **changed})


def evaluated(world, *faults, deaf_to=(), reported=None, **changed):
    """A monitor that has ingested the whole run at once, without the ranks in `deaf_to`. `reported` has functions, by
    type of message, that return changed fields.
    """
    scenario = Scenario(world, **{"steps": STEPS, "noise": NOISE, "seed": 1, "faults": faults, **changed})
    monitor = Monitor(RunState("ab12cd34", "train", world))
    for frame in frames(scenario, flush_steps=20):
        message = wire.decode(frame.payload)
        if message.rank not in deaf_to:
            besides = (reported or {}).get(type(message), lambda _: {})(message)
            monitor.ingest(wire.encode(msgspec.structs.replace(message, **besides)), 1)
    monitor.evaluate_now()
    return monitor


def short_of_cores(shares):
    """Time that the training threads waited for a core so far, as the kernel reports it."""
    return {wire.Beat: lambda beat: {"queued_ns": int(shares.get(beat.rank, 0.01) * beat.mono_ns) + 1}}


def blamed(monitor):
    """Open alerts of the rule by subject."""
    return {alert.finding.subject: alert for key, alert in monitor.book.open.items() if key[0] == "straggler"}


def ever_blamed(monitor):
    return {event.alert.finding.subject for event in monitor.book.drain() if event.alert.finding.rule == "straggler"}


def only_alert(monitor):
    alerts = blamed(monitor)
    assert len(alerts) == 1, alerts
    return next(iter(alerts.values()))


# Every phase with every pattern, and every world with both: not all three with each other, which the benchmark does.
CASES = [
    pytest.param(phase, pattern, (2, 4, 16)[number % 3], id=f"{phase}-{name}")
    for number, (phase, (name, pattern)) in enumerate(product(OWN_PHASES, PATTERNS.items()))
]


@pytest.mark.parametrize(("phase", "pattern", "world"), CASES)
def test_the_slow_rank_and_its_phase_are_found_and_no_other_rank_is_blamed(phase, pattern, world):
    culprit = world - 1
    monitor = evaluated(world, slow(culprit, phase=phase, **pattern))
    alert = only_alert(monitor)

    assert (alert.finding.subject, alert.finding.ranks) == (f"rank {culprit}", (culprit,))
    assert alert.finding.phase == phase
    assert alert.since.step >= ONSET
    assert alert.finding.advice == ADVICE[phase]
    assert ever_blamed(monitor) == {f"rank {culprit}"}


@pytest.mark.parametrize("culprit", range(4))
def test_it_does_not_matter_which_rank_it_is(culprit):
    assert only_alert(evaluated(4, slow(culprit))).finding.ranks == (culprit,)


@pytest.mark.parametrize("seed", range(5))
def test_it_does_not_matter_which_noise_there_was(seed):
    finding = only_alert(evaluated(4, slow(2, phase="backward"), seed=seed)).finding

    assert (finding.ranks, finding.phase) == ((2,), "backward")


def test_one_of_two_ranks_that_is_slow_by_another_amount_in_most_steps_is_usually_found():
    named = []
    for seed in range(20):
        chance = random.Random(seed)
        steps = {rank: [] for rank in range(2)}
        for rank, index in product(steps, range(10, 210)):
            late_ms = chance.expovariate(1) * 500 if rank == 1 and chance.random() < 0.65 else 0
            steps[rank].append(make_step(index, forward_ns=int((chance.gauss(100, 2) + late_ms) * MS)))
        findings = straggler(look(make_run(steps)))
        named += [(finding.ranks, finding.phase) for finding in findings if finding.proven]

    assert set(named) == {((1,), "forward")}
    assert len(named) >= 16


def test_two_stragglers_at_once_are_both_found_each_in_its_phase():
    alerts = blamed(evaluated(8, slow(2, phase="forward"), slow(5, phase="data", size=0.4)))

    assert {subject: alert.finding.phase for subject, alert in alerts.items()} == {
        "rank 2": "forward",
        "rank 5": "data",
    }


def test_of_two_that_are_equally_slow_the_job_would_gain_nothing_from_one_alone():
    alerts = blamed(evaluated(8, slow(2), slow(5)))

    assert set(alerts) == {"rank 2", "rank 5"}
    assert all(alert.finding.cost < 0.1 for alert in alerts.values())


def test_a_slow_host_is_one_alert():
    monitor = evaluated(16, slow(*range(8)))
    alert = only_alert(monitor)

    assert alert.finding.subject == "host node-0"
    assert alert.finding.ranks == tuple(range(8))
    assert alert.finding.phase == "forward"
    assert "node-0" in alert.finding.message
    assert ever_blamed(monitor) == {"host node-0"}


def test_many_slow_ranks_of_all_hosts_are_reported_together():
    ranks = range(0, 64, 5)
    monitor = evaluated(64, slow(*ranks))
    alert = only_alert(monitor)

    assert len(ranks) > StragglerLimits.MAX_SEPARATE
    assert alert.finding.subject == "ranks"
    assert alert.finding.ranks == tuple(ranks)
    assert alert.finding.phase == "forward"
    assert alert.finding.message.startswith("13 of 64 ranks slow, worst rank ")
    assert ever_blamed(monitor) == {"ranks"}


def test_a_few_slow_ranks_have_an_alert_each():
    ranks = range(0, 64, 8)
    monitor = evaluated(64, slow(*ranks))

    assert len(ranks) == StragglerLimits.MAX_SEPARATE
    assert set(blamed(monitor)) == {f"rank {rank}" for rank in ranks}


@pytest.mark.parametrize(
    ("world", "slow_ranks"),
    [
        (16, 9),
        (16, 10),
        (16, 16),
        (4, 3),
    ],
)
def test_where_more_than_half_are_slow_no_rank_is_blamed(world, slow_ranks):
    monitor = evaluated(world, slow(*range(slow_ranks)))

    assert ever_blamed(monitor) == set()


@pytest.mark.parametrize("world", [2, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_where_all_are_alike_no_rank_is_blamed(world, seed):
    monitor = evaluated(world, seed=seed, noise=0.05)

    assert ever_blamed(monitor) == set()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world", [2, 4, 8])
def test_what_is_inside_the_noise_is_suspected_at_most(world, seed):
    monitor = evaluated(world, slow(1, size=0.06), noise=0.3, seed=seed)

    assert ever_blamed(monitor) == set()
    assert all(not finding.proven for finding in monitor.book.unproven.get("straggler", []))


def test_an_excess_below_the_threshold_is_ignored_however_clear_it_is():
    monitor = evaluated(4, slow(1, size=0.03), noise=0.002)

    assert ever_blamed(monitor) == set()


def test_evaluations_and_pauses_of_all_ranks_blame_no_rank():
    monitor = evaluated(4, evaluate_every=20)

    assert ever_blamed(monitor) == set()


def test_between_evaluations_the_slow_rank_is_still_found():
    assert only_alert(evaluated(4, slow(1), evaluate_every=20)).finding.ranks == (1,)


def test_with_a_rank_unheard_the_others_are_evaluated_without_a_cost():
    alert = only_alert(evaluated(4, slow(1), deaf_to={3}))

    assert (alert.finding.ranks, alert.finding.phase, alert.finding.cost) == ((1,), "forward", None)
    assert "costs" not in alert.finding.message
    assert alert.finding.severity == Severity.WARNING


def test_with_most_ranks_unheard_no_rank_is_blamed():
    monitor = evaluated(8, slow(1), deaf_to=set(range(3, 8)))

    assert ever_blamed(monitor) == set()


def test_the_cost_is_what_the_job_would_save():
    # Of a step of 1.3 the job would save 0.3, less what the next-slowest of three takes longer by chance.
    assert only_alert(evaluated(4, slow(1))).finding.cost == pytest.approx(0.3 / 1.3, abs=0.03)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("steps_since", [18, 21, 25, 40, 90, 200])
def test_the_cost_is_that_of_the_steps_since_the_onset(world, steps_since):
    """Also at first, when most steps of the window are from before."""
    alert = only_alert(evaluated(world, slow(1, onset=120), steps=120 + steps_since, spikes=0.0))

    assert alert.finding.pattern is None
    assert alert.finding.cost == pytest.approx(0.3 / 1.3, abs=0.03)


@pytest.mark.parametrize("pattern", [{}, {"every": 3}], ids=["lasting", "every 3rd"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_bounds_of_the_episode_are_reported_and_single_odd_steps_after_it_change_nothing(pattern, seed):
    """It is found until then; the alert is open for longer."""
    first, last, reported = 60, 139, {}
    fault = Fault((1,), "forward", 0.5, onset=first, burst=(80, 10_000), **pattern)
    scenario = Scenario(4, steps=320, noise=NOISE, seed=seed, spikes=0.02, faults=(fault,))
    monitor = Monitor(RunState("ab12cd34", "train", 4))
    for frame in frames(scenario, flush_steps=5):
        monitor.ingest(frame.payload, frame.received_ns)
        for alert in blamed(monitor).values():
            reported[monitor.state.step] = alert
    monitor.evaluate_now()

    assert {alert.finding.subject for alert in reported.values()} == {"rank 1"}
    assert {alert.finding.from_step for alert in reported.values()} <= {*range(first - 1, first + 10)}
    after = {(alert.finding.upto_step, alert.last.step) for step, alert in reported.items() if step >= last + 30}
    assert len(after) == 1
    upto, found = after.pop()
    assert upto in range(last - 3, last + 1)
    assert found <= last + FOUND_AFTER


SHORT_MS, EPISODE = 5.0, (149, 248)


def odd_steps_after_an_episode(seed, **pattern):
    """A run of short steps, with windows of hundreds, on a busy machine: all ranks have odd steps. Yields each state of
    the alert with the step of the run.
    """
    first, last = EPISODE
    fault = Fault((2,), "data", 1.0, onset=first, burst=(last - first + 1, 10_000), **pattern)
    scenario = Scenario(4, steps=900, step_ms=SHORT_MS, noise=0.1, seed=seed, spikes=0.06, faults=(fault,))
    monitor = Monitor(RunState("ab12cd34", "train", 4))
    for frame in frames(scenario, flush_steps=15):
        monitor.ingest(frame.payload, frame.received_ns)
        for alert in blamed(monitor).values():
            yield monitor.state.step, alert


@pytest.mark.parametrize("seed", range(4))
def test_a_straggler_that_has_ended_is_not_found_by_the_odd_steps_that_any_rank_has(seed):
    first, last = EPISODE
    reported = [alert for _, alert in odd_steps_after_an_episode(seed)]
    end = [alert for alert in reported if alert.finding.ended]

    assert len({alert.since.step for alert in reported}) == 1
    assert max(alert.last.step for alert in reported) <= last + FOUND_AFTER
    assert {alert.finding.upto_step for alert in end} <= {*range(last - 2, last + 3)}
    assert {alert.finding.from_step for alert in end} <= {*range(first - 20, first + 3)}


@pytest.mark.parametrize("seed", range(4))
def test_the_fraction_of_slow_steps_leaves_out_steps_after_the_end(seed):
    ended = [alert.finding for _, alert in odd_steps_after_an_episode(seed) if alert.finding.ended]

    assert len({finding.message for finding in ended}) == 1
    assert "of the steps" not in ended[0].message


@pytest.mark.parametrize("seed", range(4))
def test_one_that_was_slow_now_and_then_has_ended_when_its_gaps_are_far_longer_than_before(seed):
    _, last = EPISODE
    reported = [alert for _, alert in odd_steps_after_an_episode(seed, every=4)]
    ended = [alert.finding for alert in reported if alert.finding.ended]

    assert max(alert.last.step for alert in reported if not alert.finding.ended) <= last + 60
    assert {finding.upto_step for finding in ended} <= {*range(last - 4, last + 16)}
    assert len({finding.message for finding in ended}) == 1


def test_an_episode_between_two_evaluations_has_its_own_fraction_of_slow_steps():
    """With many ranks, evaluations of short steps are far apart."""
    window = made_window(300, slow=(1, range(190, 250)))
    (finding,) = straggler(DetectorContext(evaluated(4).state, window, History(), DEFAULTS))

    assert finding.ended
    assert finding.opens
    assert finding.upto_step == 249
    assert finding.cost == pytest.approx(0.5, abs=0.02)


def test_one_that_has_ended_a_while_ago_opens_nothing():
    window = made_window(300, slow=(1, range(60, 160)))
    (finding,) = straggler(DetectorContext(evaluated(4).state, window, History(), DEFAULTS))

    assert finding.ended
    assert not finding.opens


def made_window(steps, slow):
    """Short steps of four ranks, one of which takes twice as long in some of them."""
    row, where = slow
    made = window([(1, 1, 1, 2, 0, 0)] * 4, first=0, steps=steps)
    made.table[row, COLUMN["data_ns"], where] += 5 * MS
    made.table[[each for each in range(4) if each != row], COLUMN["sync_ns"], where.start : where.stop] += 5 * MS
    return made


@pytest.mark.parametrize(
    ("burst", "step_ms"),
    [
        ((30, 60), SHORT_MS),
        ((10, 40), SHORT_MS),
        ((25, 120), SHORT_MS),
        ((25, 120), 100.0),
    ],
)
def test_bursts_with_odd_steps_between_are_one_alert(burst, step_ms):
    monitor = evaluated(4, slow(2, size=0.5, burst=burst), steps=900, step_ms=step_ms, spikes=0.02, seed=2)
    kinds = [event.kind for event in monitor.book.drain() if event.alert.finding.subject == "rank 2"]

    assert kinds.count("opened") == 1
    assert "closed" not in kinds


def test_a_rank_that_is_slow_again_costs_what_it_does_this_time():
    alert = only_alert(evaluated(4, slow(1, onset=60, burst=(60, 30)), steps=180, spikes=0.0))

    assert alert.finding.cost == pytest.approx(0.3 / 1.3, abs=0.04)


def test_a_rank_that_costs_more_than_half_of_the_time_is_critical():
    assert only_alert(evaluated(4, slow(1, size=0.3))).finding.severity == Severity.WARNING
    assert only_alert(evaluated(4, slow(1, size=2.5))).finding.severity == Severity.CRITICAL


@pytest.mark.parametrize("phase", OWN_PHASES)
def test_the_message_has_the_numbers_and_the_advice_fits_the_phase(phase):
    finding = only_alert(evaluated(4, slow(1, phase=phase))).finding
    words = {
        "data": "DataLoader",
        "forward": "GPU clock",
        "backward": "GPU clock",
        "optimizer": "optimizer.step()",
        "other": "between phases",
    }

    assert finding.message.startswith(f"rank 1 slow in {phase}")
    mine_ms, others_ms = map(float, re.search(r": ([\d.]+) ms vs ([\d.]+) ms", finding.message).groups())
    assert mine_ms - others_ms == pytest.approx(30, rel=0.1)
    assert (mine_ms, others_ms) == pytest.approx(
        (finding.evidence["phase_ms"], finding.evidence["others_phase_ms"]), rel=0.02
    )
    assert re.search(r"costs \d+% throughput", finding.message)
    assert words[phase] in finding.advice


def test_cpu_starvation_is_reported_with_advice():
    finding = only_alert(evaluated(4, slow(1), reported=short_of_cores({1: 0.25}))).finding
    assert finding.message.endswith("· CPU starvation: 25% of the time without a core, 1% on the others")
    assert finding.evidence["cores"] in finding.message
    assert "OMP_NUM_THREADS" in finding.advice


@pytest.mark.parametrize("shares", [{1: 0.02}, dict.fromkeys(range(4), 0.25)], ids=["hardly", "all of them"])
def test_cpu_starvation_that_explains_nothing_is_not_reported(shares):
    finding = only_alert(evaluated(4, slow(1), reported=short_of_cores(shares))).finding
    assert "core" not in finding.message
    assert finding.advice == ADVICE["forward"]


def test_a_rank_that_is_slow_in_varying_phases_is_reported_by_all_its_work():
    by_turns = (slow(1, phase=phase, every=3, onset=ONSET + turn) for turn, phase in enumerate(OWN_PHASES[:3]))
    finding = only_alert(evaluated(4, *by_turns)).finding

    mine_ms, others_ms = map(
        float, re.search(r": ([\d.]+) ms of its own work vs ([\d.]+) ms", finding.message).groups()
    )
    assert finding.message.startswith(f"rank 1 slow, mostly in {finding.phase}: ")
    assert mine_ms - others_ms == pytest.approx(30, rel=0.1)
    assert mine_ms == pytest.approx(finding.evidence["self_ms"], rel=0.02)
    assert finding.advice == ANYWHERE


def test_the_advice_on_a_cpu_run_does_not_mention_gpus():
    on_cpu = {wire.Hello: lambda hello: {"device": "cpu"}}
    assert only_alert(evaluated(4, slow(1), reported=on_cpu)).finding.advice == COMPUTING_ON_CPU


@pytest.mark.parametrize(
    ("every", "words"),
    [
        (2, "every 2nd step"),
        (3, "every 3rd step"),
        (4, "every 4th step"),
    ],
)
def test_the_message_has_the_pattern(every, words):
    finding = only_alert(evaluated(4, slow(1, every=every))).finding

    assert f" {words}: " in finding.message
    assert finding.evidence["pattern"] == words


@pytest.mark.parametrize("every", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_pattern_is_reported_with_the_opening_or_once_as_a_change(every, seed):
    events = [
        event for event in evaluated(4, slow(1, every=every), seed=seed).book.drain()
        if event.alert.finding.rule == "straggler"
    ]  # fmt: skip
    words = {2: "every 2nd step", 3: "every 3rd step", 4: "every 4th step"}[every]
    reported = [words in event.alert.finding.message for event in events]

    assert any(reported[:2])
    assert len([event for event in events if event.kind == "changed"]) <= 2


@pytest.mark.parametrize("every", [2, 3, 4])
def test_a_clear_pattern_is_reported_with_the_opening(every):
    opened = next(
        event for event in evaluated(4, slow(1, every=every), noise=0.01, spikes=0.0).book.drain()
        if event.alert.finding.rule == "straggler"
    )  # fmt: skip

    assert f" every {every}" in opened.alert.finding.message
    assert opened.alert.finding.pattern


def test_bursts_have_no_pattern_and_their_changes_are_not_reported():
    monitor = evaluated(4, slow(1, burst=(30, 60)), steps=400)
    events = [event for event in monitor.book.drain() if event.alert.finding.rule == "straggler"]

    assert all(event.alert.finding.pattern is None for event in events)
    assert len(events) <= 3


def test_the_message_of_a_lasting_straggler_has_no_pattern():
    finding = only_alert(evaluated(4, slow(1))).finding

    assert "every" not in finding.message
    assert finding.evidence["pattern"] == "lasting"


def test_the_alert_is_closed_after_the_episode_has_ended():
    monitor = evaluated(4, slow(1, burst=(60, 10**6)), steps=320)

    assert blamed(monitor) == {}
    assert [(event.kind, event.alert.finding.subject) for event in monitor.book.drain() if event.kind != "changed"
            and event.alert.finding.rule == "straggler"] == [("opened", "rank 1"), ("closed", "rank 1")]  # fmt: skip


def test_bursts_are_one_alert_and_not_one_each():
    monitor = evaluated(4, slow(1, burst=(30, 60)), steps=400)
    kinds = [event.kind for event in monitor.book.drain() if event.alert.finding.rule == "straggler"]

    assert kinds.count("opened") == 1
    assert "closed" not in kinds


def test_a_single_hiccup_blames_no_rank():
    monitor = evaluated(4, slow(1, size=3.0, burst=(2, 10**6)))

    assert ever_blamed(monitor) == set()


@pytest.mark.parametrize("stuck_steps", [0, 1])
def test_a_step_in_which_a_slow_rank_was_stuck_is_not_what_it_costs(stuck_steps):
    """It is reported as a hung step. Steps of 100 ms, every 4th 30 ms longer, and one 6 s."""
    stuck = [slow(2, size=60.0, onset=150, burst=(stuck_steps, STEPS))] if stuck_steps else []
    (alert,) = blamed(evaluated(4, slow(2, every=4), *stuck)).values()

    assert 0.05 < alert.finding.cost < 0.09
    assert alert.finding.severity is Severity.WARNING


def test_a_rank_that_is_stuck_in_every_fourth_step_costs_what_that_takes():
    (alert,) = blamed(evaluated(4, slow(2, size=60.0, every=4))).values()

    assert alert.finding.cost > 0.8
    assert alert.finding.severity is Severity.CRITICAL


def slow_run(phase="backward", gpus=True, begin_ns=0, **changed):
    """Rank 3 is slow in a phase of all its steps."""
    steps = {rank: train(10, 80, **({phase: 46} if rank == 3 else {"sync": 32})) for rank in range(4)}
    state = make_run(steps)
    return read_gpus(state, 10, begin_ns=begin_ns, **changed) if gpus else state


def test_a_straggler_with_a_hot_gpu_says_so():
    found = only(straggler(look(slow_run(r3=HOT))))

    assert found.message.startswith("rank 3 slow in backward: 46.0 ms vs 16.0 ms on the others · costs ")
    assert found.message.endswith(" · GPU clock 1110/1980 MHz, thermal slowdown at 89 °C")
    assert "gpu-throttle" in found.advice
    assert found.evidence["clocks"].startswith("GPU clock 1110")


def test_a_straggler_with_low_clocks_and_no_reason_says_what_the_others_have():
    found = only(straggler(look(slow_run(r3={"sm_mhz": 1200}))))

    assert found.message.endswith(" · GPU clock 1200/1980 MHz vs 1980 MHz on the others")


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
    assert "GPU clock" not in only(straggler(look(slow_run(phase, **changed)))).message


def test_clocks_of_another_time_are_not_blamed():
    assert "GPU clock" not in only(straggler(look(slow_run(begin_ns=600 * SECOND, r3=HOT)))).message


def test_a_straggler_is_reported_without_gpu_readings():
    found = only(straggler(look(slow_run(gpus=False))))

    assert "GPU clock" not in found.message
    assert "clocks" not in found.evidence
