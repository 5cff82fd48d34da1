"""Verdict on a recorded run, and its manifest."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.core.state.run import RunState
from ddpwatch.view import verdict as sentences
from ddpwatch.view.cells import Level
from ddpwatch.view.charts.phase_bar import MAX_BARS, rank_bars
from ddpwatch.view.job_manifest import manifest, manifest_object, missing_facts
from ddpwatch.view.layout import machine_time
from ddpwatch.view.verdict import of_what, when_text
from ddpwatch.wire import PHASES
from tests.builders.fake_rank import make_beat, make_hello, make_step
from tests.builders.recordings import straggler
from tests.builders.windows import FAST, SLOW, aggregate_of, window

CALM = (1, 8, 16, 2, 2, 1)
SLOW_WIRE = (1, 8, 16, 12, 2, 1)


def verdict(state, aggregate, alerts):
    return sentences.verdict(state, outcome_of(state, alerts), aggregate, alerts)


def ended(world=4, **byes):
    """Run whose ranks have said goodbye; `r2="..."` = rank 2 failed with this text."""
    state = RunState("ab12cd34", "train", world)
    for rank in range(world):
        state.apply(make_hello(rank, 1, world_size=world), 10**9)
        state.apply(make_beat(rank, 2), 10**9)
        text = byes.get(f"r{rank}")
        bye = wire.Bye(rank=rank, seq=3, reason="failed" if text else "exit", text=text or "", mono_ns=9)
        state.apply(bye, 2 * 10**9)
    return state


def test_a_slow_rank_is_named_with_its_phase_its_steps_and_its_cost():
    aggregate = aggregate_of(window([FAST, FAST, SLOW, FAST], 1, 900))
    said = verdict(ended(), aggregate, [straggler(2, since=120, closed=900)])

    assert (
        said.text
        == "Rank 2 slowed the job down: slow in backward in steps 120 to 900, 25% of the whole run's time lost."
    )
    assert said.level is Level.WARN


def test_the_odd_steps_of_a_long_run_are_not_attributed_to_a_short_episode():
    odd = [window([FAST, FAST, SLOW, FAST] if turn % 5 == 0 else [CALM] * 4, 1 + 10 * turn, 10) for turn in range(40)]
    aggregate = aggregate_of(*odd)
    (cost,) = aggregate.costs()

    assert when_text(cost, [straggler(2, since=101, closed=110)], aggregate) == "at times"
    assert when_text(cost, [straggler(2, since=1, closed=400)], aggregate).startswith("in steps 1 to")


def test_one_that_had_ended_and_began_again_was_slow_at_times():
    aggregate = aggregate_of(window([FAST, FAST, SLOW, FAST], 101, 800))
    (cost,) = aggregate.costs()
    again = replace(straggler(2, since=120, closed=900), recurred=True)

    assert when_text(cost, [again], aggregate) == "at times in steps 120 to 900"


@pytest.mark.parametrize(("again", "said"), [(20, "in steps 1 to 200"), (200, "at times in steps 1 to 1,000")])
def test_hiccups_of_long_after_do_not_make_a_trouble_longer(again, said):
    slow = [FAST, FAST, SLOW, FAST]
    aggregate = aggregate_of(window(slow, 1, 200), window([CALM] * 4, 201, 600), window(slow, 801, again))
    (cost,) = aggregate.costs()
    spans = ((1, 200), (801, 800 + again))
    alerts = [straggler(2, since=first, closed=last, from_step=first, upto_step=last) for first, last in spans]

    assert when_text(cost, alerts, aggregate) == said


def test_a_rank_that_was_slow_in_two_phases_is_shown_with_both():
    late = [FAST[0] + 10, FAST[1], FAST[2], FAST[3] - 10, *FAST[4:]]
    aggregate = aggregate_of(window([FAST, FAST, late, FAST], 1, 100), window([FAST, FAST, SLOW, FAST], 101, 100))

    assert verdict(ended(), aggregate, []).text.startswith("Rank 2 slowed the job down: slow in data and backward, ")


def test_if_earlier_steps_are_deleted_the_verdict_names_the_steps_it_covers():
    kept, early = aggregate_of(window([CALM] * 4, 2594, 400)), straggler(2, since=500, closed=700)
    said = verdict(ended(), kept, [early])

    assert said.text == "Healthy from step 2,594 on, where the recording begins: no problem was found."
    assert said.besides == ("1 alert from before step 2,594 is listed below.",)
    assert of_what(kept, [early]) == "steps 2,594 to 2,993"
    slow = aggregate_of(window([FAST, FAST, SLOW, FAST], 2594, 400))
    assert verdict(ended(), slow, []).text.endswith("25% of the time of steps 2,594 to 2,993 lost.")


def test_without_only_the_first_steps_it_counts_as_the_whole_run():
    nearly = aggregate_of(window([CALM] * 4, 4, 400))

    assert verdict(ended(), nearly, []).text == "Healthy: no problem was found."
    assert of_what(nearly, []) == "the whole run"
    unknown = straggler(2, since=1, closed=1)
    unknown = replace(unknown, last=replace(unknown.last, step=None))
    assert of_what(nearly, [unknown]) == "the whole run"
    assert of_what(nearly, [straggler(2, since=1, closed=1)]) == "steps 4 to 403"


def test_an_alert_that_is_open_to_the_end_does_not_make_the_slow_steps_more():
    aggregate = aggregate_of(window([FAST, FAST, SLOW, FAST], 101, 200), window([CALM] * 4, 301, 200))
    said = verdict(ended(), aggregate, [straggler(2, since=109)])

    assert "slow in backward in steps 109 to 300," in said.text


@pytest.mark.parametrize("last", range(296, 304))
def test_the_last_slow_step_is_exact_or_marked_as_approximate(last):
    slow, calm = window([FAST, FAST, SLOW, FAST], 101, last - 100), window([CALM] * 4, last + 1, 900)
    aggregate = aggregate_of(window([CALM] * 4, 1, 100), slow, calm)
    assert aggregate.over_time.width > 4

    # The finding continues for a while after the episode: odd steps count, too.
    (cost, *_) = aggregate.costs()
    said = when_text(cost, [straggler(2, since=109, from_step=101, upto_step=360)], aggregate)
    near = re.fullmatch(r"in steps 101 to (about )?(\d+)", said)
    assert abs(int(near[2]) - last) < aggregate.over_time.width / 2
    assert near[1] or int(near[2]) == last
    exact = when_text(cost, [straggler(2, since=109, from_step=101, upto_step=last)], aggregate)
    assert near[1] or exact == f"in steps 101 to {last}"


def test_steps_deleted_from_the_recording_are_not_named():
    aggregate = aggregate_of(window([FAST, FAST, SLOW, FAST], 501, 100), window([CALM] * 4, 601, 100))
    over = straggler(2, since=20, closed=90, from_step=10, upto_step=80)
    open_still = straggler(2, since=320, from_step=310, upto_step=600)

    assert "slow in backward in steps 501 to 600," in verdict(ended(), aggregate, [over, open_still]).text
    assert "slow in backward, " in verdict(ended(), aggregate, [over]).text


def frozen(step, seconds=8, culprit=2, phase="other"):
    """One hung step in which the others wait for a rank; without a rank all of them are idle."""
    rows = [dict(zip(PHASES, CALM, strict=True)) for _ in range(4)]
    for rank, row in enumerate(rows):
        row[phase if culprit in {rank, None} else "sync"] += 1000 * seconds
    return window([tuple(row.values()) for row in rows], step, 1)


COST = "which cost 50% of the whole run's time in total."
LOST = "50% of the whole run's time lost"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([frozen(101)], f"for 8.0 s at step 101, waiting for rank 2, {COST}"),
        ([frozen(101, phase="data")], f"for 8.0 s at step 101, waiting for rank 2 (in data), {COST}"),
        (
            [frozen(101, 3), frozen(102, 5)],
            f"for 8.0 s in 2 steps (longest: step 102 took 5.0 s), waiting for rank 2, {COST}",
        ),
        ([frozen(101, culprit=None)], f"for 8.0 s at step 101, not because of a single rank: {LOST}."),
    ],
)
def test_a_job_with_a_hung_step_is_reported_as_such_and_no_rank_as_slow(parts, said):
    aggregate = aggregate_of(window([CALM] * 4, 1, 100), *parts, window([CALM] * 4, 104, 167))

    assert verdict(ended(), aggregate, []).text == f"The job hung {said}"


def test_ranks_that_hung_one_after_another_are_each_named():
    aggregate = aggregate_of(
        window([CALM] * 4, 1, 100), frozen(101, 5), frozen(102, 3, 1), window([CALM] * 4, 104, 167)
    )
    each = "rank 2 hung for 5.0 s at step 101, 31%; rank 1 hung for 3.0 s at step 102, 19%."

    assert verdict(ended(), aggregate, []).text == f"2 ranks slowed the job down, {LOST}: {each}"


def test_a_rank_that_was_slow_and_once_hung_is_shown_with_both():
    aggregate = aggregate_of(window([FAST, FAST, SLOW, FAST], 1, 600), frozen(601, 4))
    said = verdict(ended(), aggregate, [straggler(2, since=1, closed=600)])

    assert "slow in backward in steps 1 to 600, hung for 4.0 s at step 601, " in said.text


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ({"exit_code": -9}, "rank 2 was killed (SIGKILL) without reporting an error."),
        ({"exit_code": -11}, "rank 2 crashed (SIGSEGV) without reporting an error."),
        ({"exit_code": 3}, "rank 2 exited with code 3 without reporting an error."),
        ({"exit_code": -9, "oom_kills": 1}, "rank 2 was killed by the kernel's OOM killer."),
        ({}, "rank 2 exited without reporting an error, most likely killed."),
    ],
)
def test_the_end_of_a_process_is_shown_as_far_as_the_viewer_knows_it(gone, said):
    state = RunState("ab12cd34", "train", 4)
    for rank in range(4):
        state.apply(make_hello(rank, 1, world_size=4), 10**9)
        state.apply(make_beat(rank, 2), 10**9)
    state.apply(wire.Gone(rank=2, seq=0, ago_ns=1, **gone), 2 * 10**9)
    for rank in (0, 1, 3):
        state.apply(wire.Bye(rank=rank, seq=3, reason="exit", text="", mono_ns=9), 3 * 10**9)

    assert verdict(state, aggregate_of(window([FAST] * 4)), []).text == f"Ended badly: {said}"


def test_an_exit_code_after_a_goodbye_is_no_exception():
    state = ended()
    state.apply(wire.Gone(rank=1, seq=0, exit_code=3), 3 * 10**9)

    said = verdict(state, aggregate_of(window([FAST] * 4)), [])
    assert said.text == "Ended badly: rank 1 failed with exit code 3, without an exception."


def test_a_slow_rank_is_named_also_where_no_alert_was_recorded():
    said = verdict(ended(), aggregate_of(window([FAST, FAST, SLOW, FAST])), [])

    assert said.text == "Rank 2 slowed the job down: slow in backward, 25% of the whole run's time lost."


def test_if_ranks_are_late_in_turn_none_is_blamed():
    turns = [window([SLOW if rank == turn % 4 else FAST for rank in range(4)], 1 + 10 * turn, 10) for turn in range(8)]
    said = verdict(ended(), aggregate_of(*turns), [])

    assert said.text.startswith("24% of the time was exposed communication, mostly waiting")


def taking_turns(fast=FAST, slow=SLOW, world=4):
    """Run in which ranks are late in turn, each enough for an alert."""
    turns = [
        window([slow if rank == turn % world else fast for rank in range(world)], 1 + 10 * turn, 10)
        for turn in range(2 * world)
    ]
    return aggregate_of(*turns), [straggler(rank, since=1, closed=90) for rank in range(world)]


def test_if_all_ranks_are_slow_at_times_none_in_particular_is_named():
    said = verdict(ended(), *taking_turns())

    lost = "25% of the whole run's time lost in total, rank 0 most, 6%"
    assert said.text == f"No rank in particular was slow: all 4 ranks were slow at times, {lost}."
    assert not said.besides


def test_the_wire_comes_first_where_it_cost_more_than_those_that_were_slow_at_times():
    said = verdict(ended(), *taking_turns((1, 8, 16, 62, 2, 1), (1, 8, 26, 52, 2, 1)))

    assert said.text.startswith("The network slowed the job down: 66% of the time was exposed communication, 58% wire")
    assert said.besides[0].startswith("No rank in particular was slow: all 4 ranks were slow at times, 11%")


def test_the_wire_comes_after_a_rank_that_cost_more_and_before_one_that_cost_less():
    slow, wire = (1, 8, 26, 12, 2, 1), (1, 8, 16, 22, 2, 1)
    said = verdict(ended(), aggregate_of(window([wire, wire, slow, wire])), [])
    assert said.text.startswith("The network slowed the job down: 39% of the time")
    assert said.besides == ("Rank 2 slowed the job down: slow in backward, 20% of the whole run's time lost.",)

    said = verdict(ended(), aggregate_of(window([FAST, FAST, SLOW, FAST])), [])
    assert said.text.startswith("Rank 2 slowed the job down")
    assert not said.besides


def test_one_that_cost_far_more_is_named_also_where_all_were_slow_at_times():
    aggregate, alerts = taking_turns()
    aggregate.add(window([FAST, FAST, SLOW, FAST], 101, 400))

    assert verdict(ended(), aggregate, alerts).text.startswith("Rank 2 slowed the job down: slow in backward")


def test_a_run_in_which_nothing_is_wrong_is_healthy():
    said = verdict(ended(), aggregate_of(window([CALM] * 4)), [])

    assert (said.level, said.text) == (Level.OK, "Healthy: no problem was found.")


def test_a_wire_that_takes_long_is_the_network():
    said = verdict(ended(), aggregate_of(window([FAST] * 4)), [])

    parts = "30% wire and 0% waiting for slower ranks"
    assert said.text == f"The network slowed the job down: 30% of the time was exposed communication, {parts}."


def test_an_exception_comes_before_everything_else():
    said = verdict(ended(r2="ValueError: no\nsuch file"), aggregate_of(window([FAST, FAST, SLOW, FAST])), [])

    assert said.text == "Ended badly: rank 2 failed with ValueError: no · such file."
    assert said.level is Level.BAD
    assert said.besides == ("Rank 2 slowed the job down: slow in backward, 25% of the whole run's time lost.",)


def test_the_rank_waited_for_is_the_root_cause_not_the_first_to_end():
    state = RunState("ab12cd34", "train", 3)
    for rank in range(3):
        state.apply(make_hello(rank, 1, world_size=3), 10**9)
        state.apply(make_beat(rank, 2), 10**9)
    for rank in range(3):
        state.apply(wire.Gone(rank=rank, seq=0, exit_code=-15, ago_ns=1), (2 + rank) * 10**9)
    words = "rank 1 has not joined all_reduce #7"
    stuck = straggler(1, rule="stall", severity=Severity.CRITICAL, message=words, cost=None)
    said = verdict(state, aggregate_of(window([CALM] * 3)), [stuck])

    assert said.text == "Ended badly: rank 1 did not join a collective; ranks 0, 2 after it."
    assert said.besides[0] == f"Hung at the end: {words}."


def test_a_run_that_hung_when_the_recording_ended_names_the_hang():
    stuck = straggler(1, rule="stall", severity=Severity.CRITICAL, message="rank 1 has not joined all_reduce #7")
    said = verdict(ended(), aggregate_of(window([CALM] * 4)), [stuck])

    assert said.text == "Hung at the end: rank 1 has not joined all_reduce #7."


def test_another_warning_is_shown_if_there_is_nothing_else():
    said = verdict(ended(), aggregate_of(window([CALM] * 4)), [straggler(1, rule="memory", message="it grows")])

    assert said.text == "Worth a look, memory: it grows."


def test_without_steps_nothing_is_proven():
    assert verdict(ended(), aggregate_of(), []).text.startswith("Inconclusive: ")


def test_many_ranks_are_folded_to_the_worst_a_typical_one_and_the_hosts():
    world = 64
    hosts = tuple(f"node-{rank // 8}" for rank in range(world))
    bars = rank_bars(
        aggregate_of(window([SLOW if rank == 37 else FAST for rank in range(world)], hosts=hosts), ranks=world)
    )

    assert len(bars) <= MAX_BARS
    assert bars[0].label == "rank 37"
    assert bars[8].label.startswith("median: rank ")
    assert bars[9].label == "node-4, mean of 8"


def test_the_parts_of_a_bar_add_up_to_the_step():
    bars = rank_bars(aggregate_of(window([FAST, FAST, SLOW, FAST])))

    assert [bar.step_ns for bar in bars] == pytest.approx([40e6] * 4)
    assert bars[2].parts_ns["waiting"] == 0
    assert bars[0].parts_ns["wire"] == pytest.approx(2e6)


def test_the_manifest_distinguishes_ranks_that_differ():
    state = RunState("ab12cd34", "train", 2)
    state.apply(make_hello(0, world_size=2, torch="2.13", command="train.py --lr 1", environment={"OMP": "1"}), 1)
    state.apply(make_hello(1, world_size=2, torch="2.12", environment={"OMP": "1"}), 1)
    groups = dict(manifest(state))

    assert dict(groups["Versions"])["torch"] == "2.13 (rank 0); 2.12 (rank 1)"
    assert groups["Environment"] == [("OMP", "1")]
    assert groups["Started as"] == [("command", "train.py --lr 1")]


def test_the_report_and_json_have_the_same_manifest():
    state = RunState("ab12cd34", "train", 2)
    for rank in range(2):
        reported = {"cores": 4 + rank, "command": "train.py --lr 1", "parameters": 9610, "device": f"cuda:{rank}"}
        environment = {"OMP_NUM_THREADS": "1", "DDPWATCH_DATA": "/data"}
        state.apply(
            make_hello(rank, world_size=2, torch="2.13", ddp={"x": "1"}, environment=environment, **reported), 1
        )
        loader = {"step": 0, "epoch": 0, "sampler": "DistributedSampler", "distributed": True}
        state.apply(wire.Loader(rank=rank, seq=2, batch_size=16, length=300, **loader), 2)
    found = manifest_object(state)

    assert found["command"] == ["train.py --lr 1"]
    assert found["environment"] == {"DDPWATCH_DATA": "/data", "OMP_NUM_THREADS": "1"}
    assert found["ddp"] == {"x": "1"}
    assert (found["sampler"], found["batch_size"], found["workers"]) == (["DistributedSampler"], [16], [0])
    assert (found["cores"], found["batches"], found["parameters"]) == ([4, 5], [300], 9610)
    assert (found["device"], found["torch"], found["parameter_bytes"]) == (["cuda"], ["2.13"], None)
    assert json.loads(json.dumps(found)) == found
    groups = dict(manifest(state))
    shown = {text for pairs in groups.values() for _, text in pairs}
    assert {"train.py --lr 1", "DistributedSampler", "16", "0", "4 (rank 0); 5 (rank 1)", "9,610", "cuda"} <= shown


def test_a_variable_with_a_file_per_rank_is_only_shown_to_differ():
    state = RunState("ab12cd34", "train", 4)
    for rank in range(4):
        own = {"TORCHELASTIC_ERROR_FILE": f"/tmp/torchelastic_5t01nbnu/none_ftqiz8cb/attempt_0/{rank}/error.json"}
        common = {"NCCL_TOPO_FILE": "/etc/" + "topology/" * 20, "OMP_NUM_THREADS": str(1 + rank // 3)}
        state.apply(make_hello(rank, world_size=4, environment={**own, **common}), 1)
    reported = dict(dict(manifest(state))["Environment"])

    assert reported["TORCHELASTIC_ERROR_FILE"] == "differs between ranks"
    assert reported["OMP_NUM_THREADS"] == "1 (ranks 0-2); 2 (rank 3)"
    assert reported["NCCL_TOPO_FILE"].startswith("/etc/topology/")


def test_missing_messages_are_reported():
    state = RunState("ab12cd34", "train", 2)
    state.apply(make_hello(0, 1, world_size=2), 1)
    state.apply(make_beat(0, 5, dropped=3), 2)
    state.ingest(b"nonsense", 3)

    said = " ".join(missing_facts(state))
    assert "No message arrived from rank 1." in said
    assert "3 messages did not arrive" in said
    assert "3 steps were overwritten" in said
    assert "1 message or step could not be used" in said


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5.0 GPU-seconds"), (90, "1.5 GPU-minutes"), (7200, "2.0 GPU-hours"), (3.6e7, "10,000.0 GPU-hours")],
)
def test_machine_time_is_shown_in_the_unit_that_fits(seconds, text):
    assert machine_time(seconds, "GPU") == text


@pytest.mark.parametrize(("steps", "evaluated"), [(1, False), (2, False), (14, False), (19, False), (20, True)])
def test_with_too_few_steps_for_any_rule_the_verdict_is_unproven(steps, evaluated):
    """It reports neither a slow network nor a healthy run."""
    slow, calm = aggregate_of(window([SLOW_WIRE] * 4, 1, steps)), aggregate_of(window([CALM] * 4, 1, steps))
    few = f"Inconclusive: too few steps ({steps} measured)."

    assert verdict(ended(), slow, []).text.startswith("The network slowed the job down" if evaluated else few)
    assert verdict(ended(), calm, []).text.startswith("Healthy" if evaluated else few)
    assert verdict(ended(), calm, []).level is (Level.OK if evaluated else Level.WARN)


def test_a_bad_end_is_reported_even_with_few_steps():
    said = verdict(ended(r2="ValueError: boom"), aggregate_of(window([CALM] * 4, 1, 3)), [])

    assert said.text.startswith("Ended badly: rank 2 failed with ValueError: boom")
    assert said.besides == ("Inconclusive: too few steps (3 measured).",)


def test_few_steps_of_a_long_run_are_as_few():
    assert "too few steps" in verdict(ended(), aggregate_of(window([CALM] * 4, 5000, 9)), []).text
    assert "Healthy" in verdict(ended(), aggregate_of(window([CALM] * 4, 5000, 10)), []).text


@pytest.mark.parametrize(
    ("done", "why"),
    [
        (0, "no step that all ranks have finished is in the recording"),
        (1, "only the first step is in the recording, which is not measured"),
        (3, "none of the steps in the recording could be measured"),
    ],
)
def test_the_reason_for_no_measured_steps_is_shown(done, why):
    state = ended()
    for rank in range(4 if done else 0):
        state.apply(wire.Steps(rank=rank, seq=4, steps=[make_step(index) for index in range(done)]), 2 * 10**9)

    assert verdict(state, aggregate_of(), []).text == f"Inconclusive: {why}."
