"""Different sample counts, and data that ends early on some ranks."""

from __future__ import annotations

import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.desync import desync
from ddpwatch.core.detectors.stall import stall
from ddpwatch.core.detectors.uneven_batch import uneven_batch
from ddpwatch.core.monitor import Monitor
from tests.builders.ended_run import CLOSED
from tests.builders.fake_rank import make_beat, make_group, make_step
from tests.builders.findings import criticals
from tests.builders.hung_run import DATA, HALF_HOUR_NS, SYNC, Watched, halted
from tests.builders.synthetic_run import SECOND, look, make_run, only, train

FORWARD = wire.PHASES.index("forward")


def samples(*counts):
    return make_run({rank: train(samples=number) for rank, number in enumerate(counts)})


def test_a_rank_with_fewer_samples_is_named():
    finding = only(uneven_batch(look(samples(32, 32, 32, 24))))

    assert finding.message == "rank 3 trains on 24 samples per step, the others on 32"
    assert finding.ranks == (3,)
    assert finding.severity is Severity.WARNING
    assert (finding.evidence["samples"], finding.evidence["least_samples"], finding.evidence["steps"]) == (32, 24, 20)
    assert "drop_last" in finding.advice


def test_several_ranks_with_other_samples_are_named_with_their_span():
    finding = only(uneven_batch(look(samples(32, 32, 32, 24, 16))))

    assert finding.message == "ranks 3-4 train on 16 to 24 samples per step, the others on 32"


def test_of_two_ranks_the_one_with_less_is_named():
    assert only(uneven_batch(look(samples(24, 32)))).ranks == (0,)


@pytest.mark.parametrize(("uneven_steps", "found"), [(2, 0), (3, 1)])
def test_a_few_uneven_steps_are_enough_and_fewer_are_not(uneven_steps, found):
    short = [make_step(index, samples=24 if index >= 60 - uneven_steps else 32) for index in range(10, 60)]
    findings = uneven_batch(look(make_run({0: train(), 1: train(), 2: short})))

    assert len(findings) == found
    assert all(finding.message.endswith("on 32 · in 3 of 20 steps") for finding in findings)


def test_batches_that_vary_everywhere_name_no_rank():
    varied = {rank: [make_step(i, samples=30 + (i + rank) % 3) for i in range(10, 60)] for rank in range(3)}
    finding = only(uneven_batch(look(make_run(varied))))

    assert finding.ranks == ()
    assert finding.message == "samples per step differ between ranks: 30 to 32"


def test_unknown_sample_counts_are_not_compared():
    assert uneven_batch(look(samples(32, 0, 24))) == []
    assert uneven_batch(look(samples(32, 32))) == []
    assert uneven_batch(look(samples(32))) == []


def ended_run(reason="exit", phase=SYNC, phase_ns=2 * SECOND, step=90, **hello):
    """Rank 1 has said goodbye after 90 steps; the others send heartbeats."""
    state = make_run({rank: train(0, 90) for rank in range(3)}, **hello)
    state.apply(wire.Bye(rank=1, seq=4, reason=reason, text="", mono_ns=1), 1)
    for rank in (0, 2):
        state.apply(make_beat(rank, seq=4, step=step, phase=phase, phase_ns=phase_ns), 1)
    return state


@pytest.mark.parametrize("reason", ["exit", "closed"])
def test_a_rank_that_ended_while_the_others_wait_for_it_is_critical(reason):
    finding = only(uneven_batch(look(ended_run(reason))))

    assert finding.message == (
        "rank 1 exited after 90 steps, before the others: ranks 0, 2 have waited in all-reduce for 2 s"
    )
    assert finding.severity is Severity.CRITICAL
    assert finding.ranks == (1,)
    assert finding.evidence == {"steps_done": 90, "waiting_ranks": 2, "waiting_s": 2.0}
    assert "join()" in finding.advice


@pytest.mark.parametrize(
    "changed",
    [
        {"phase": FORWARD},
        {"phase_ns": SECOND},
        {"reason": "failed"},
        {"reason": "off"},
        {"kind": "plain"},
    ],
    ids=["they work", "they have waited for a second only", "it failed", "its agent is off", "there is no DDP"],
)
def test_a_rank_that_ended_is_not_blamed_without_reason(changed):
    assert uneven_batch(look(ended_run(**changed))) == []


def test_a_rank_behind_the_ended_one_does_not_wait_for_it():
    state = make_run({0: train(0, 90), 1: train(0, 60)})
    state.apply(wire.Bye(rank=0, seq=4, reason="exit", text="", mono_ns=1), 1)
    state.apply(make_beat(1, seq=4, step=60, phase=SYNC, phase_ns=9 * SECOND), 1)

    assert uneven_batch(look(state)) == []


def test_when_all_have_ended_no_rank_waits():
    state = ended_run()
    for rank in (0, 2):
        state.apply(wire.Bye(rank=rank, seq=5, reason="exit", text="", mono_ns=1), 1)

    assert uneven_batch(look(state)) == []


def left(world):
    """Rank 1 has said goodbye; its exit code and the length of the data are unknown."""
    state = make_run({rank: train(0, 90) for rank in range(world)}, world=world, now_ns=SECOND)
    for rank in range(world):
        state.apply(wire.Held(rank=rank, seq=0, by="nothing"), SECOND)
    state.apply(wire.Bye(rank=1, seq=5, reason="exit", text="", mono_ns=1), SECOND)
    return state


@pytest.mark.parametrize(("code", "rule"), [(0, "uneven-batch"), (3, "rank-failed")])
def test_no_reason_is_reported_while_the_process_has_not_ended(code, rule):
    """Data of unknown length. On a busy machine torch takes seconds to shut down, while the others wait."""
    state = left(world=2)
    monitor = Monitor(state)
    for tenth in range(1, 60):
        now_ns = SECOND + tenth * SECOND // 10
        state.tick(now_ns)
        waits = {"phase": wire.PHASES.index("sync"), "phase_ns": tenth * SECOND // 10}
        state.apply(make_beat(0, seq=5 + tenth, step=90, **waits), now_ns)
        if tenth == 45:
            assert criticals(monitor) == []
            state.apply(wire.Gone(rank=1, seq=0, exit_code=code, ago_ns=1), now_ns)
        monitor.evaluate_now()

    assert criticals(monitor) == [("opened", rule, (1,))]


@pytest.mark.parametrize("code", [0, None])
def test_data_of_unknown_length_that_ends_early_opens_one_alert_while_some_fail_and_others_wait(code):
    """Rank 1 has ended; ranks 0 and 2 lose their connections at once, rank 3 waits."""
    state = left(world=4)
    monitor = Monitor(state)
    for tenth in range(1, 100):
        now_ns = SECOND + tenth * SECOND // 10
        state.tick(now_ns)
        for rank in (0, 2, 3):
            if state.ranks[rank].bye is None and tenth >= (35 if rank == 3 else 4 + rank):
                state.apply(wire.Bye(rank=rank, seq=5 + tenth, reason="failed", text=CLOSED, mono_ns=1), now_ns)
            elif state.ranks[rank].bye is None:
                waits = {"phase": wire.PHASES.index("sync"), "phase_ns": tenth * SECOND // 10}
                state.apply(make_beat(rank, seq=5 + tenth, step=90, **waits), now_ns)
        if tenth == 15 and code is not None:
            state.apply(wire.Gone(rank=1, seq=0, exit_code=code, ago_ns=1), now_ns)
        monitor.evaluate_now()

    assert criticals(monitor) == [("opened", "uneven-batch", (1,))]


def ended_with_its_data(quarters, world=3, left=10):
    """The data of the last rank ends, and it exits; the others wait for `quarters` of a second with `left` batches left
    (None = unknown), lose their connections one after another, and are evaluated four times a second.
    """
    state = make_run({rank: train(0, 90) for rank in range(world)}, world=world, now_ns=SECOND)
    monitor = Monitor(state)
    batches = len(state.ranks[0].steps.indices())
    for rank in range(world if left is not None else 0):
        length = batches + (left if rank < world - 1 else 0)
        loader = wire.Loader(rank=rank, seq=4, step=0, epoch=0, sampler="S", distributed=True, length=length)
        state.apply(loader, SECOND)
    state.apply(wire.Bye(rank=world - 1, seq=5, reason="exit", text="", mono_ns=1), SECOND)
    for quarter in range(1, quarters + 1):
        for rank in range(world - 1):
            waits = {"phase": wire.PHASES.index("sync"), "phase_ns": quarter * SECOND // 4}
            state.apply(make_beat(rank, seq=4 + quarter, step=90, **waits), SECOND + quarter * SECOND // 4)
        monitor.evaluate_now()
    for rank in range(world - 1):
        now_ns = state.now_ns + rank * SECOND // 2
        state.apply(wire.Bye(rank=rank, seq=5 + quarters, reason="failed", text=CLOSED, mono_ns=1), now_ns)
        monitor.evaluate_now()
    for quarter in range(12):
        state.tick(now_ns + quarter * SECOND // 4)
        monitor.evaluate_now()
    return monitor


@pytest.mark.parametrize(("world", "names"), [(2, "rank 0"), (3, "ranks 0-1")])
@pytest.mark.parametrize("quarters", [2, 8])
def test_an_end_at_the_end_of_the_data_opens_one_alert_and_those_that_fail_without_it_are_secondary(
    quarters, world, names
):
    monitor = ended_with_its_data(quarters, world)
    reported = [(event.kind, event.alert.finding) for event in monitor.book.drain()]

    bad = [(kind, finding.rule, finding.ranks) for kind, finding in reported if finding.severity > Severity.INFO]
    assert bad == [("opened", "uneven-batch", (world - 1,))]
    end, after = sorted((alert.finding for alert in monitor.book.open.values()), key=lambda finding: -finding.severity)
    their = "its connection" if world == 2 else "their connections"
    assert end.message == (
        f"rank {world - 1} exited after 90 steps, before the others: {names} lost {their} and failed"
    )
    assert after.message == (f"{names} failed because rank {world - 1} exited at the end of its data: connection lost")
    assert (after.rule, after.severity) == ("rank-failed", Severity.INFO)
    assert after.evidence["text"] == CLOSED


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("quarters", "rule"), [(2, "rank-failed"), (3, "rank-failed"), (5, "uneven-batch"), (20, "uneven-batch")]
)
def test_data_of_unknown_length_opens_one_alert_whether_the_others_fail_at_once_or_wait(quarters, rule, world):
    monitor = ended_with_its_data(quarters, world, left=None)
    reported = [(event.kind, event.alert.finding) for event in monitor.book.drain()]
    bad = [(kind, finding.rule, finding.ranks) for kind, finding in reported if finding.severity > Severity.INFO]

    assert [each for each in bad if each[0] == "opened"] == bad
    assert [each[1] for each in bad] == [rule], bad
    open_now = {alert.finding.rule for alert in monitor.book.open.values() if alert.finding.severity > Severity.INFO}
    assert open_now == {rule}


def test_where_all_are_at_the_end_of_their_data_it_is_not_the_data_that_has_ended_early():
    """The others do something else, such as an evaluation."""
    monitor = ended_with_its_data(2, left=0)

    assert {alert.finding.rule for alert in monitor.book.open.values()} == {"rank-failed"}


def in_a_barrier(length):
    """Rank 1 waits in a barrier and the others in an all-reduce, 90 steps into a pass of `length` batches."""
    groups = {rank: make_group(42, 9, op="all_reduce", size=3) for rank in range(3)}
    # It has waited longest: it joined while the others were still in their step.
    groups[1] = make_group(42, 9.5, op="barrier", size=3)
    state = halted(groups, r1={"phase": DATA})
    batches = len(state.ranks[1].steps.indices())
    loader = wire.Loader(
        rank=1, seq=9, step=0, epoch=0, sampler="DistributedSampler", distributed=True, length=batches + length
    )
    state.apply(loader, state.now_ns)
    return state


def test_a_rank_that_waits_in_a_barrier_at_the_end_of_its_data_has_left_its_loop():
    state = in_a_barrier(0)
    finding = only(uneven_batch(look(state)))

    assert finding.message == (
        "rank 1 ran out of data after 90 steps and waits in a barrier: "
        "ranks 0, 2 have waited in sync for 9 s in all_reduce #42 (4.0 MiB). rank 1 has been in data for 9 s"
    )
    assert (finding.ranks, finding.severity) == ((1,), Severity.CRITICAL)
    assert desync(look(state)) == [], "it is told once"


def test_a_rank_that_waits_in_a_barrier_in_the_middle_of_its_data_has_not():
    state = in_a_barrier(5)

    assert uneven_batch(look(state)) == []
    assert only(desync(look(state))).ranks == (1,)


def ran_out(length_of_others, epoch_of_others=0):
    """Rank 1 has trained on all its batches and has not joined; the others wait in a longer pass."""
    groups = {rank: make_group(41) if rank == 1 else make_group(42, 9, timeout_ns=HALF_HOUR_NS) for rank in range(3)}
    state = halted(groups, r1={"phase": DATA})
    batches = len(state.ranks[1].steps.indices())
    for rank in range(3):
        more, epoch = (0, 0) if rank == 1 else (length_of_others, epoch_of_others)
        loader = wire.Loader(
            rank=rank, seq=9, step=0, epoch=epoch, sampler="S", distributed=True, length=batches + more
        )  # fmt: skip
        state.apply(loader, state.now_ns)
    return look(state)


def test_a_rank_whose_data_has_ended_and_that_does_something_else_is_reported_with_the_operation():
    evidence = ran_out(5)
    finding = only(uneven_batch(evidence))

    assert finding.message.startswith(
        "rank 1 ran out of data after 90 steps and has not joined all_reduce #42 (4.0 MiB): ranks 0, 2"
    )
    assert "timeout in" in finding.message
    assert finding.message.endswith(". rank 1 has been in data for 13 s"), "that its data has ended is reported once"
    assert (finding.ranks, finding.evidence["op"]) == ((1,), "all_reduce")
    assert stall(evidence) == [], "it is told once"


@pytest.mark.parametrize(("length", "epoch"), [(0, 0), (5, 1)])
def test_a_rank_that_evaluates_at_the_end_of_a_pass_as_long_as_that_of_the_others_has_not_run_out(length, epoch):
    """The others are at the end too, or in the next pass."""
    assert uneven_batch(ran_out(length, epoch)) == []


def of_two(left_of_rank_0):
    """Rank 1 waits in a barrier at the end of its data, rank 0 in an all-reduce with batches left."""
    groups = {rank: make_group(42, 9, op="barrier" if rank else "all_reduce", size=2) for rank in range(2)}
    state = halted(groups, r1={"phase": DATA})
    batches = len(state.ranks[1].steps.indices())
    for rank, more in enumerate((left_of_rank_0, 0)):
        loader = wire.Loader(rank=rank, seq=9, step=0, epoch=0, sampler="S", distributed=True, length=batches + more)
        state.apply(loader, state.now_ns)
    return look(state)


def test_of_two_ranks_the_one_whose_data_has_ended_is_named_where_the_other_has_data_left():
    evidence = of_two(left_of_rank_0=5)
    finding = only(uneven_batch(evidence))

    assert finding.ranks == (1,)
    assert (finding.evidence["op"], finding.evidence["waiting"]) == ("all_reduce", "rank 0")
    assert desync(evidence) == stall(evidence) == [], "it is told once"


def test_of_two_ranks_at_the_end_of_their_data_neither_has_run_out_before_the_other():
    evidence = of_two(left_of_rank_0=0)

    assert uneven_batch(evidence) == []
    assert only(desync(evidence)).ranks == (0, 1)


def test_one_end_of_data_is_reported_once():
    """A rank has ended, and another has left its loop."""
    groups = {rank: make_group(42, 9, op="barrier" if rank == 1 else "all_reduce") for rank in range(4)}
    state = halted(groups, r1={"phase": DATA})
    state.apply(wire.Bye(rank=3, seq=5, reason="exit", text="", mono_ns=9), state.now_ns)

    assert only(uneven_batch(look(state))).ranks == (3,)


def test_where_most_ranks_wait_in_a_barrier_none_has_left_the_loop():
    groups = {rank: make_group(42, 9, op="all_reduce" if rank == 1 else "barrier", size=3) for rank in range(3)}
    out = {f"r{rank}": {"phase": DATA} for rank in (0, 2)}
    state = halted(groups, **out)

    assert uneven_batch(look(state)) == []
    assert only(desync(look(state))).ranks == (1,)


def test_an_end_of_data_opens_one_alert_asks_for_the_stack_and_goes_when_the_ranks_go_on():
    watched = Watched()
    for rank in range(3):
        length = 90 if rank == 1 else 95
        watched._send(wire.Loader(rank=rank, seq=3, step=0, epoch=0, sampler="S", distributed=True, length=length))
    watched.seq = 3
    watched.wait(0.25, 12)
    assert set(watched.monitor.book.open) == {("uneven-batch", "end of data")}
    assert watched.monitor.suspects == {1}

    watched.go_on(4)
    assert watched.monitor.book.open == {}, "not as long as samples that differ"
