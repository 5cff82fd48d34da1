"""Ranks that hang: who is named, in which words, and who is not."""

from __future__ import annotations

import msgspec
import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.detectors.desync import desync
from ddpwatch.core.detectors.rank_failed import rank_failed
from ddpwatch.core.detectors.rank_lost import rank_lost
from ddpwatch.core.detectors.stall import stall
from ddpwatch.core.detectors.timeout import timeout
from ddpwatch.core.detectors.uneven_batch import uneven_batch
from ddpwatch.core.limits import LivenessLimits
from ddpwatch.core.monitor import MAX_SUSPECTS, Monitor
from ddpwatch.core.state.rank import Place, RankState
from ddpwatch.core.state.run import RunState
from tests.builders.fake_rank import make_beat, make_group, make_hello, make_stack
from tests.builders.hung_run import DATA, GLOO, NOW_S, SYNC, crossed, failed, halted, one_missing
from tests.builders.synthetic_run import SECOND, look, only, train

HALF_HOUR_NS = 1800 * SECOND
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:36507"
SLEEPS = [("nap", "/srv/job/train.py", 88), ("main", "/srv/job/train.py", 12)]

# a rank that has not arrived


def test_the_missing_rank_is_named_with_the_operation_the_wait_and_what_it_does():
    finding = only(stall(look(one_missing())))

    assert finding.message == (
        "rank 2 has not joined all_reduce #42 (4.0M): ranks 0-1, 3 wait in sync for 12s. rank 2 is in data for 13s"
    )
    assert (finding.subject, finding.ranks, finding.phase) == ("group 0", (2,), "data")
    assert finding.evidence["seq"] == 42
    assert finding.evidence["waiting_s"] == 12.0
    assert "agent.pause" in finding.advice
    assert finding.detail == ""


def test_where_the_missing_rank_is_stuck_is_told_once_its_stack_has_come():
    state = one_missing()
    state.apply(make_stack(2, *SLEEPS), state.now_ns)
    finding = only(stall(look(state)))

    assert finding.message.endswith("rank 2 is in data for 13s, at nap (train.py:88)")
    assert finding.detail == "nap (train.py:88)"


def test_several_missing_ranks_are_all_named_and_three_of_them_described():
    missing = {rank: make_group(41, size=6) for rank in range(1, 6)}
    finding = only(stall(look(halted({0: make_group(42, 12, size=6), **missing}))))

    assert finding.ranks == (1, 2, 3, 4, 5)
    assert finding.message.startswith("ranks 1-5 have not joined all_reduce #42 (4.0M): rank 0 waits in sync for 12s")
    assert finding.message.count(" is in data ") == 3


def test_a_group_beside_the_jobs_own_is_named():
    side = {rank: make_group(7 - (rank == 2), 9 * (rank != 2), name="side") for rank in range(4)}
    finding = only(stall(look(halted({rank: [make_group(900), side[rank]] for rank in range(4)}))))

    assert finding.subject == "group side"
    assert "all_reduce #7 (4.0M) of group side" in finding.message


def test_the_silence_of_the_missing_rank_is_told_with_its_seconds():
    finding = only(stall(look(one_missing(heard_s={2: NOW_S - 7}))))

    assert finding.message.endswith("rank 2 is not heard for 7.0 s, was in data when last heard")
    assert "py-spy" in finding.advice


@pytest.mark.parametrize(
    ("by", "reported"),
    [
        ("signal", "was in data when last heard; its process was stopped by a signal"),
        ("debugger", "was in data when last heard; a debugger has stopped its process"),
        ("disk", "was in data when last heard; its process waits in the kernel, for a disk or a driver"),
        ("nonsense", "was in data when last heard; "),
    ],
)
def test_what_holds_the_process_of_a_silent_rank_is_told(by, reported):
    state = one_missing(heard_s={2: NOW_S - 7})
    state.apply(wire.Held(rank=2, seq=0, by=by), state.now_ns)
    finding = only(stall(look(state)))

    assert finding.message.endswith(reported.rstrip("; "))
    assert ("kill -CONT" in finding.advice) == (by != "nonsense")


def test_a_rank_that_is_not_heard_though_its_process_may_run_is_said_to_hold_pythons_lock():
    state = one_missing(heard_s={2: NOW_S - 7})
    state.apply(wire.Held(rank=2, seq=0, by="nothing"), state.now_ns)
    finding = only(stall(look(state)))

    assert "its process lives, but something in it holds Python's lock, or it gets no core" in finding.message
    assert "py-spy dump --native" in finding.advice


@pytest.mark.parametrize(
    ("silent_s", "by", "reported"), [(1.1, "nothing", False), (2.1, "nothing", True), (1.1, "signal", True)]
)
def test_a_moment_of_silence_does_not_replace_what_is_known_of_a_rank(silent_s, by, reported):
    """It sleeps in a function, and is ended: that it is no longer heard comes before its end does."""
    state = one_missing(heard_s={2: NOW_S - silent_s})
    state.apply(make_stack(2, *SLEEPS), state.now_ns)
    state.apply(wire.Held(rank=2, seq=0, by=by), state.now_ns)
    finding = only(stall(look(state)))

    assert ("is not heard for" in finding.message) == reported
    assert finding.message.endswith("at nap (train.py:88)")
    assert ("rank 2 is in data for 14s, at nap (train.py:88)" in finding.message) != reported


def test_of_a_rank_that_has_ended_it_is_told_what_it_did_and_not_that_it_is_silent():
    state = failed(one_missing(), {0: GLOO, 1: GLOO, 3: GLOO})
    state.apply(make_stack(2, *SLEEPS), state.now_ns)
    state.apply(wire.Held(rank=2, seq=0, by="nothing"), state.now_ns)
    state.apply(wire.Gone(rank=2, seq=0, exit_code=-15), state.now_ns + SECOND)
    state.tick(state.now_ns + 9 * SECOND)

    assert only(timeout(look(state))).message.endswith(
        "rank 2 had not joined it. rank 2 was in data for 13s, at nap (train.py:88)"
    )


TWO_HOSTS = ("node-a", "node-a", "node-b", "node-b")


@pytest.mark.parametrize("joined", [41, 42])
def test_a_host_whose_ranks_have_all_fallen_silent_is_told_as_gone_or_not_reachable(joined):
    groups = {0: make_group(42, 12), 1: make_group(42, 12), 2: make_group(41), 3: make_group(joined)}
    state = halted(groups, heard_s={2: NOW_S - 8, 3: NOW_S - 7}, hosts=TWO_HOSTS)
    finding = only(stall(look(state)))

    assert finding.message.endswith(
        "host node-b (ranks 2-3): gone or not reachable, all 2 ranks have been silent for 7s"
    )
    assert "whether the host answers" in finding.advice


def test_of_a_host_with_a_single_rank_it_may_be_the_rank_that_is_stopped():
    state = one_missing(heard_s={2: NOW_S - 7}, hosts=("node-a", "node-b", "node-c", "node-d"))

    assert only(stall(look(state))).message.endswith(
        "host node-c (rank 2): gone or not reachable, or the rank is stopped; silent for 7s"
    )


@pytest.mark.parametrize(
    "heard_s", [{2: NOW_S - 7}, dict.fromkeys(range(4), NOW_S - 7)], ids=["the other rank of the host", "nobody"]
)
def test_a_host_is_not_told_as_gone_while_another_rank_of_it_is_heard_or_while_nobody_is(heard_s):
    assert "gone or not reachable" not in only(stall(look(one_missing(heard_s=heard_s, hosts=TWO_HOSTS)))).message


def test_a_process_that_can_be_seen_is_on_a_host_that_can_be_reached():
    state = one_missing(heard_s={2: NOW_S - 7}, hosts=("node-a", "node-b", "node-c", "node-d"))
    state.apply(wire.Held(rank=2, seq=0, by="signal"), state.now_ns)

    assert only(stall(look(state))).message.endswith("its process was stopped by a signal")


def test_a_silent_rank_that_others_wait_for_is_told_once():
    state = one_missing(heard_s={2: NOW_S - 7})

    assert only(stall(look(state))).ranks == (2,)
    assert rank_lost(look(state)) == []


def test_a_rank_that_was_stopped_before_the_viewer_came_is_silent_and_not_missing():
    state = RunState("ab12cd34", "train", 4, [Place(3, "node-a", 1003)])
    assert state.condition(state.ranks[3]) == "missing"
    state.apply(wire.Held(rank=3, seq=0, by="signal"), state.now_ns)
    assert state.condition(state.ranks[3]) == "missing", "it has not had the time to answer"
    state.tick(state.now_ns + LivenessLimits.NO_HEARTBEAT_NS)

    assert state.condition(state.ranks[3]) == "silent"


def test_a_stack_of_another_phase_is_not_told_beside_the_phase_of_now():
    state = one_missing()
    state.apply(make_stack(2, *SLEEPS, phase=SYNC), state.now_ns)
    assert only(stall(look(state))).message.endswith("rank 2 is in data for 13s")

    state.apply(make_stack(2, *SLEEPS, phase=DATA, mono_ns=2), state.now_ns)
    assert only(stall(look(state))).message.endswith("rank 2 is in data for 13s, at nap (train.py:88)")


def test_the_number_of_an_operation_is_written_in_one_piece():
    groups = {rank: make_group(1206 - (rank == 1), 9 * (rank != 1), size=2) for rank in range(2)}

    assert "all_reduce #1206 (4.0M)" in only(stall(look(halted(groups)))).message


def test_an_announced_pause_of_one_of_the_missing_is_told():
    state = halted({0: make_group(42, 9), 1: make_group(41), 2: make_group(41)}, r1={"pause": "checkpoint"})

    assert "rank 1 is in data for 13s (paused: checkpoint)" in only(stall(look(state))).message


def test_a_collective_of_which_nothing_is_recorded_is_still_told():
    unrecorded = {rank: make_group(42 - (rank == 1), completed=None, size=2) for rank in range(2)}
    finding = only(stall(look(halted(unrecorded, r0={"phase": SYNC, "phase_ns": 9 * SECOND}))))

    assert finding.message.startswith("rank 1 has not joined collective #42: rank 0 waits in sync for 9s. ")


@pytest.mark.parametrize(
    ("wait_s", "timeout_s", "severity"),
    [(9, 0, Severity.WARNING), (11, 0, Severity.CRITICAL), (4, 10, Severity.WARNING), (6, 10, Severity.CRITICAL)],
)
def test_a_stall_is_critical_after_ten_seconds_or_half_of_the_timeout(wait_s, timeout_s, severity):
    arrived = make_group(42, wait_s, size=2, timeout_ns=timeout_s * SECOND)

    assert only(stall(look(halted({0: arrived, 1: make_group(41, size=2)})))).severity is severity


# the network


def test_where_all_have_arrived_it_is_the_network_and_no_rank():
    finding = only(stall(look(halted({rank: make_group(42, 12) for rank in range(4)}))))

    assert finding.message == (
        "all 4 ranks have joined all_reduce #42 (4.0M) and it does not complete: ranks 0-3 wait in sync for 12s. "
        "It is the network, not a rank"
    )
    assert finding.ranks == ()
    assert "NCCL_DEBUG" in finding.advice


def test_the_network_is_not_blamed_while_a_rank_of_the_group_was_not_heard():
    assert stall(look(halted({rank: make_group(42, 12) for rank in range(3)}))) == []


def test_the_network_is_not_blamed_when_a_rank_was_stopped_inside_the_operation():
    """It has joined, and said nothing since."""
    groups = {rank: make_group(42, 0.2 if rank == 2 else 12) for rank in range(4)}

    assert stall(look(halted(groups, heard_s={2: NOW_S - 12}))) == []


# ranks that disagree


def disagree(*ops, **options):
    """Ranks that wait under the same number, each in its own operation: `op` or `op shape`."""
    shapes = [(*op.split(" ", 1), "[8] Float")[:2] for op in ops]
    groups = [make_group(42, 9, op=op, shape=shape, size=len(ops), **options) for op, shape in shapes]
    return look(halted(dict(enumerate(groups))))


def test_the_few_are_blamed_for_another_operation():
    evidence = disagree("all_reduce", "all_reduce", "broadcast", "all_reduce")
    finding = only(desync(evidence))

    assert finding.ranks == (2,)
    assert finding.message.startswith(
        "rank 2 is out of line at #42: all_reduce [8] Float on ranks 0-1, 3 against broadcast [8] Float on rank 2, "
        "for 9s. "
    )
    assert (finding.severity, finding.subject) == (Severity.CRITICAL, "group 0")
    assert stall(evidence) == [], "it is told once"


def test_another_size_is_another_operation():
    assert only(desync(disagree("all_reduce [8] Float", "all_reduce [8] Float", "all_reduce [9] Float"))).ranks == (2,)


def test_all_that_differ_from_the_most_are_blamed():
    assert only(desync(disagree("all_reduce", "broadcast", "all_reduce", "barrier"))).ranks == (1, 3)


@pytest.mark.parametrize("ops", [("all_reduce", "barrier"), ("all_reduce", "barrier", "barrier", "all_reduce")])
def test_of_two_equal_camps_all_are_told_and_nobody_is_blamed(ops):
    finding = only(desync(disagree(*ops)))

    assert finding.ranks == tuple(range(len(ops)))
    assert finding.message.startswith("the ranks disagree at #42")


def test_ranks_that_agree_are_no_desync_and_neither_is_one_that_has_not_told_its_operation():
    assert desync(disagree("all_reduce", "all_reduce")) == []
    unreported = make_group(42, 9, op="", shape="", size=2)
    assert desync(look(halted({0: make_group(42, 9, size=2), 1: unreported}))) == []


@pytest.mark.parametrize("wait_s", [9, 0.8])
def test_ranks_that_wait_for_each_other_in_different_groups_are_told_once_and_nobody_is_blamed(wait_s):
    """Also while only one of the waits is abnormal."""
    state = crossed(wait_s)
    finding = only(desync(look(state)))

    assert stall(look(state)) == []
    assert finding.ranks == (0, 1)
    assert finding.message.startswith(
        "the ranks wait for each other in different groups: "
        "all_reduce #42 (4.0M) on rank 1 against all_reduce #7 (4.0M) of group side on rank 0, for 9s. "
    )


def test_a_rank_that_is_missing_in_two_groups_is_told_once():
    two = {rank: [make_group(42, 9), make_group(7, 9, name="side")] for rank in range(3)}
    finding = only(stall(look(halted(two | {3: [make_group(41), make_group(6, name="side")]}))))

    assert (finding.ranks, finding.subject) == ((3,), "group 0")


def aligned_window():
    """Rank 3 has come neither to the job's own group nor to one of ranks 2 and 3, in which rank 2 waits."""
    side = {"name": "side", "size": 2}
    return halted(
        {
            0: make_group(42, 9),
            1: make_group(42, 9),
            2: [make_group(41), make_group(7, 9, **side)],
            3: [make_group(41), make_group(6, **side)],
        }
    )


def test_those_that_wait_for_the_same_rank_in_another_group_are_told_with_it():
    finding = only(stall(look(aligned_window())))

    assert finding.ranks == (3,)
    assert finding.message.startswith(
        "rank 3 has not joined all_reduce #42 (4.0M): ranks 0-1 wait in sync for 9s and rank 2 in "
        "all_reduce #7 (4.0M) of group side. rank 3 is in data"
    )


def test_a_timeout_names_a_rank_that_was_missing_in_two_groups_once():
    finding = only(timeout(look(failed(aligned_window(), {0: GLOO, 1: GLOO}))))

    assert finding.ranks == (3,)
    assert finding.message.count("rank 3 is in data") == 1
    assert finding.evidence["culprits"] == 1


def in_a_barrier(length):
    """Rank 1 waits in a barrier and the others in an all-reduce, 90 steps into a pass of so many batches."""
    groups = {rank: make_group(42, 9, op="all_reduce", size=3) for rank in range(3)}
    # It has waited for longest: it came while the others were still in their step.
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
        "rank 1 has come to the end of its data after 90 steps, and waits in a barrier: "
        "ranks 0, 2 wait in sync for 9s in all_reduce #42 (4.0M). rank 1 is in data for 9s"
    )
    assert (finding.ranks, finding.severity) == ((1,), Severity.CRITICAL)
    assert desync(look(state)) == [], "it is told once"


def test_a_rank_that_waits_in_a_barrier_in_the_middle_of_its_data_has_not():
    state = in_a_barrier(5)

    assert uneven_batch(look(state)) == []
    assert only(desync(look(state))).ranks == (1,)


def ran_out(length_of_others, epoch_of_others=0):
    """Rank 1 has trained on all its batches and has not joined; the others wait in a pass of so many batches more."""
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


def test_a_rank_whose_data_has_ended_and_that_does_something_else_is_told_with_the_operation():
    evidence = ran_out(5)
    finding = only(uneven_batch(evidence))

    assert finding.message.startswith(
        "rank 1 has come to the end of its data after 90 steps, and has not joined all_reduce #42 (4.0M): ranks 0, 2"
    )
    assert "timeout in" in finding.message
    assert finding.message.endswith(". rank 1 is in data for 13s"), "that its data has ended is told once"
    assert (finding.ranks, finding.evidence["op"]) == ((1,), "all_reduce")
    assert stall(evidence) == [], "it is told once"


@pytest.mark.parametrize(("length", "epoch"), [(0, 0), (5, 1)])
def test_a_rank_that_evaluates_at_the_end_of_a_pass_as_long_as_that_of_the_others_has_not_run_out(length, epoch):
    """The others are at the end as well, or in the next pass."""
    assert uneven_batch(ran_out(length, epoch)) == []


def of_two(left_of_rank_0):
    """Rank 1 waits in a barrier at the end of its data, rank 0 in an all-reduce with so many batches left."""
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


def test_one_end_of_data_is_told_once():
    """A rank has ended, and another has left its loop."""
    groups = {rank: make_group(42, 9, op="barrier" if rank == 1 else "all_reduce") for rank in range(4)}
    state = halted(groups, r1={"phase": DATA})
    state.apply(wire.Bye(rank=3, seq=5, reason="exit", text="", mono_ns=9), state.now_ns)

    assert only(uneven_batch(look(state))).ranks == (3,)


def test_ranks_that_disagree_on_an_earlier_operation_are_told_although_another_got_beyond_it():
    """What rank 2 waits for is the next one: it has been given a broadcast that its root alone completes."""
    state = halted(
        {
            0: make_group(86, 9, op="broadcast", size=3),
            1: make_group(86, 9, op="all_reduce", size=3),
            2: make_group(87, 9, size=3),
        }
    )

    assert stall(look(state)) == []
    finding = only(desync(look(state)))
    assert finding.ranks == (0, 1)
    assert finding.message.startswith("the ranks disagree at #86: broadcast")


def test_the_word_of_a_rank_that_was_stopped_just_after_it_is_not_believed():
    """It had told that it waits for #41, and the others have completed that."""
    state = halted({0: make_group(42, 9), 1: make_group(42, 9), 2: make_group(41, 0.2)}, heard_s={2: NOW_S - 8})

    assert only(stall(look(state))).ranks == (2,)


# the timeout


def with_timeout(wait_s, timeout_s, **options):
    arrived = make_group(42, wait_s, size=3, timeout_ns=timeout_s * SECOND)
    return halted({0: arrived, 1: make_group(41, size=3), 2: arrived}, **options)


def test_the_time_that_is_left_is_told_with_the_stall():
    finding = only(stall(look(with_timeout(12, 1800))))

    assert "wait in sync for 12s, timeout in 29m 48s. " in finding.message
    assert (finding.evidence["timeout_s"], finding.evidence["left_s"]) == (1800.0, 1788.0)


@pytest.mark.parametrize(
    ("wait_s", "timeout_s", "reported"),
    [(1739, 1800, False), (1741, 1800, True), (9, 20, False), (11, 20, True), (12, 0, False)],
    ids=["over a minute", "a minute", "the first half", "the second half", "not known"],
)
def test_a_timeout_is_urgent_in_its_last_minute_but_not_in_its_first_half(wait_s, timeout_s, reported):
    evidence = look(with_timeout(wait_s, timeout_s))

    assert only(stall(evidence)).urgent == reported
    assert timeout(evidence) == [], "the stall tells of it, with the time that is left"


def in_a_pause(wait_s=1785):
    """Rank 1 has announced that it takes its time, which torch knows nothing of."""
    return with_timeout(wait_s, 1800, r1={"pause": "evaluation"})


def test_a_timeout_that_is_near_names_the_missing_rank_where_no_other_rule_does():
    assert stall(look(in_a_pause())) == []
    finding = only(timeout(look(in_a_pause())))

    assert finding.message == (
        "torch ends the job in 15s unless all_reduce #42 (4.0M) completes, rank 1 not having joined it"
    )
    assert (finding.ranks, finding.subject, finding.severity) == ((1,), "group 0", Severity.CRITICAL)


def test_a_timeout_that_is_near_although_all_have_joined_is_told_with_the_network():
    arrived = make_group(42, 1785, size=2, timeout_ns=HALF_HOUR_NS)
    evidence = look(halted({0: arrived, 1: arrived}))
    finding = only(stall(evidence))

    assert "timeout in 15s" in finding.message
    assert (finding.urgent, finding.ranks) == (True, ())
    assert timeout(evidence) == []


def test_a_timeout_that_is_near_is_told_where_a_rank_of_the_group_was_not_heard():
    arrived = make_group(42, 1785, size=3, timeout_ns=HALF_HOUR_NS)
    evidence = look(halted({0: arrived, 1: arrived}))

    assert stall(evidence) == []
    assert only(timeout(evidence)).message.endswith("although all ranks that are heard have joined it")


def test_the_countdown_is_that_of_the_group_whose_timeout_fires_first():
    side = {"name": "side", "timeout_ns": HALF_HOUR_NS}
    state = halted(
        {
            0: [make_group(41), make_group(7, 9, **side)],
            1: [make_group(42, 9, timeout_ns=20 * SECOND), make_group(6, **side)],
            2: [make_group(41), make_group(7, 9, **side)],
        }
    )
    finding = only(desync(look(state)))

    assert stall(look(state)) == []
    assert (finding.ranks, finding.subject) == ((1,), "crossed groups")
    assert finding.message.startswith("rank 1 is out of line: the ranks wait for each other in different groups: ")
    assert "timeout in 11s" in finding.message
    assert finding.evidence["left_s"] == 11.0


def test_a_rank_that_has_been_silent_until_the_others_gave_up_is_told_once():
    """What is said of the others is no more than a note, and speaks of no connection."""
    evidence = look(failed(one_missing(heard_s={2: NOW_S - 20}), {0: GLOO, 1: GLOO, 3: GLOO}))

    assert only(timeout(evidence)).ranks == (2,)
    assert "rank 2 is not heard for 20.0 s" in only(timeout(evidence)).message
    assert rank_lost(evidence) == []
    note = only(rank_failed(evidence))
    assert note.severity is Severity.INFO
    assert note.message == "ranks 0-1, 3 failed after rank 2 fell silent, because of it: they waited in vain"


@pytest.mark.parametrize("ago_ns", [0, 1])
def test_ranks_that_gave_up_on_a_silent_rank_have_one_alert_also_when_it_dies_at_last(ago_ns):
    """A launcher kills it half a minute later; whether that is seen as it happens or not."""
    monitor = Monitor(failed(one_missing(heard_s={2: NOW_S - 20}), {0: GLOO, 1: GLOO, 3: GLOO}))
    monitor.evaluate_now()
    monitor.state.tick(monitor.state.now_ns + 35 * SECOND)
    monitor.state.apply(wire.Gone(rank=2, seq=0, exit_code=-9, ago_ns=ago_ns), monitor.state.now_ns)
    monitor.evaluate_now()

    opened = [event.alert for event in monitor.book.drain() if event.kind == "opened"]
    assert [alert.key for alert in opened if alert.finding.rule == "rank-failed"] == [("rank-failed", "gave up")]


@pytest.mark.parametrize("ended", [(1,), (1, 2), (0, 1, 2)])
def test_a_timeout_that_has_fired_in_one_group_names_who_was_missing_in_the_other(ended):
    """By their last beats nobody waits any more: who fails has left its operation."""
    state = halted(
        {
            0: [make_group(41), make_group(7, name="side")],
            1: [make_group(42), make_group(6, name="side")],
            2: [make_group(41), make_group(7, name="side")],
        }
    )
    failed(state, {rank: GLOO if rank == 1 else PEER for rank in ended})
    finding = only(timeout(look(state)))

    assert finding.ranks == (1,)
    assert finding.message.startswith(
        "rank 1 gave up waiting in a collective; rank 1 had not joined what the others waited for in group side"
    )


def test_a_timeout_of_ranks_that_waited_for_each_other_in_different_groups_blames_nobody():
    state = halted({0: [make_group(41), make_group(7, name="side")], 1: [make_group(42), make_group(6, name="side")]})
    finding = only(timeout(look(failed(state, {0: GLOO, 1: GLOO}))))

    assert finding.ranks == ()
    assert finding.message.endswith("the ranks waited for each other in different groups")


def test_a_viewer_that_comes_after_the_timeout_tells_who_has_not_given_up():
    state = halted({rank: make_group(41) for rank in range(4)})
    for rank in (0, 1, 3):
        state.ranks[rank] = RankState(rank)
        state.apply(wire.Bye(rank=rank, seq=0, reason="failed", text=GLOO, mono_ns=1), state.now_ns)
    finding = only(timeout(look(state)))

    assert finding.ranks == ()
    assert finding.message == (
        "ranks 0-1, 3 gave up waiting in a collective; who had not joined it was not seen, but rank 2 has not given up"
    )


def test_a_connection_that_is_lost_because_others_gave_up_waiting_is_no_failure_of_the_network():
    state = failed(one_missing(), {0: PEER, 1: GLOO, 3: GLOO})
    state.tick(state.now_ns + SECOND)
    state.apply(make_beat(2, seq=8, phase=DATA, groups=[make_group(41)]), state.now_ns)
    finding = only(rank_failed(look(state)))

    assert finding.severity is Severity.INFO
    assert finding.message == (
        "ranks 1, 3 gave up waiting in a collective and failed; rank 0 lost the connection to them"
    )


def test_connections_lost_after_a_rank_has_ended_in_order_are_told_as_such():
    state = one_missing(world=3)
    state.apply(wire.Bye(rank=2, seq=6, reason="exit", text="", mono_ns=1), state.now_ns)
    failed(state, {0: PEER, 1: PEER})
    finding = only(rank_failed(look(state)))

    assert (finding.severity, finding.ranks) == (Severity.CRITICAL, (2,)), "it is the one to look at"
    assert finding.message == "ranks 0-1 lost their connections and failed after rank 2 had ended"
    assert "sys.exit" in finding.advice


def test_a_timeout_that_is_near_blames_nobody_who_waits_in_another_group():
    near = {"timeout_ns": 20 * SECOND, "size": 2}
    state = halted(
        {
            0: [make_group(42, 15, name="left", **near)],
            1: [make_group(41, name="left", size=2), make_group(7, 15, name="right", size=2)],
            2: [make_group(6, name="right", size=2)],
        }
    )
    finding = only(stall(look(state)))

    assert (finding.ranks, finding.subject) == ((2,), "group right")
    assert "timeout in 5s" in finding.message, "of the group that waits for it"
    assert timeout(look(state)) == []


def test_the_countdown_goes_on_without_beats_and_ends_at_any_moment():
    state, paused = with_timeout(1785, 1800), in_a_pause()
    for each in (state, paused):
        each.tick(each.now_ns + SECOND)
    assert "timeout in 14s" in only(stall(look(state))).message
    assert "in 14s" in only(timeout(look(paused))).message

    for each in (state, paused):
        each.tick(each.now_ns + 20 * SECOND)
    assert "its timeout is over" in only(stall(look(state))).message
    assert "at any moment" in only(timeout(look(paused))).message


@pytest.mark.parametrize("text", [GLOO, "DistBackendError: Watchdog caught collective operation timeout: WorkNCCL"])
def test_a_timeout_that_has_fired_names_who_had_not_joined_and_not_who_complains(text):
    state = with_timeout(19, 20)
    state.apply(wire.Bye(rank=0, seq=5, reason="failed", text=text, mono_ns=9), state.now_ns)
    finding = only(timeout(look(state)))

    assert finding.message == (
        "rank 0 gave up waiting in a collective; rank 1 had not joined it. rank 1 is in data for 13s"
    )
    assert (finding.ranks, finding.severity) == ((1,), Severity.CRITICAL)
    assert stall(look(state)) == [], "it is told once, although rank 2 still waits"


def told_at_the_end(*seqs):
    """The last operations of a rank, the last of them not done."""
    return [
        wire.Collective(group="0", seq=seq, op="all_reduce", shape="[8] Float", done=seq < seqs[-1]) for seq in seqs
    ]


def test_a_viewer_that_comes_after_the_timeout_names_the_same_rank_by_what_the_others_left_as_last_words():
    """One was there all the time; the other knows only the rank that lives, and what the dead have written down."""
    there, later = one_missing(), one_missing()
    for rank in (0, 1, 3):
        later.ranks[rank] = RankState(rank)
        bye = wire.Bye(rank=rank, seq=0, reason="failed", text=GLOO, mono_ns=1, collectives=told_at_the_end(41, 42))
        there.apply(bye, there.now_ns)
        later.apply(bye, later.now_ns)
    first, second = only(timeout(look(there))), only(timeout(look(later)))

    assert first.message == second.message
    assert first.ranks == second.ranks == (2,)
    assert second.evidence["rests_on"] == "last words of ranks 0-1, 3; signs of life of rank 2"


def test_last_words_count_where_the_last_signs_of_life_were_lost():
    state = halted({rank: make_group(40) for rank in range(3)})
    for rank, seq in enumerate((42, 41, 42)):
        bye = wire.Bye(
            rank=rank, seq=0, reason="failed", text=PEER if rank == 1 else GLOO, mono_ns=1,
            collectives=told_at_the_end(seq),
        )  # fmt: skip
        state.apply(bye, state.now_ns)

    assert only(timeout(look(state))).ranks == (1,)


def test_of_ranks_that_nothing_but_last_words_are_known_of_the_one_that_got_least_far_is_named():
    state = RunState("ab12cd34", "train", 2)
    for rank, seq in enumerate((42, 41)):
        bye = wire.Bye(rank=rank, seq=0, reason="failed", text=GLOO, mono_ns=1, collectives=told_at_the_end(seq))
        state.apply(bye, SECOND)

    assert only(timeout(look(state))).message == (
        "ranks 0-1 gave up waiting in a collective; rank 1 had not joined what the others waited for in group 0"
    )


def gave_up_in(*ops, seen=True, words=True):
    """Ranks that have given up under the same number, each in its own operation, as their beats or last words tell."""
    state = RunState("ab12cd34", "train", len(ops))
    if seen:
        state = halted({rank: make_group(126, 19, op=op, size=len(ops)) for rank, op in enumerate(ops)})
    for rank, op in enumerate(ops):
        # Gloo calls an operation done that has failed.
        last = [
            wire.Collective(group="0", seq=seq, op=op if seq == 126 else "all_reduce", shape="[16] Float", done=True)
            for seq in (125, 126)
        ]
        bye = wire.Bye(rank=rank, seq=7, reason="failed", text=GLOO, mono_ns=1, collectives=last if words else [])
        state.apply(bye, state.now_ns or SECOND)
    return look(state)


@pytest.mark.parametrize(("seen", "words"), [(True, True), (True, False), (False, True)])
def test_a_timeout_after_a_desync_names_whom_the_desync_has_named(seen, words):
    """Also to who comes afterwards and has nothing but last words."""
    evidence = gave_up_in("all_reduce", "broadcast", "all_reduce", "all_reduce", seen=seen, words=words)
    finding = only(timeout(evidence))

    shape = "[1048576] Float" if seen else "[16] Float"
    assert finding.message == (
        "ranks 0-3 gave up waiting in a collective; rank 1 was out of line at #126: "
        f"all_reduce {shape} on ranks 0, 2-3 against broadcast {shape} on rank 1"
    )
    assert (finding.ranks, finding.severity) == ((1,), Severity.CRITICAL)
    assert "branch on the rank" in finding.advice
    assert desync(evidence) == stall(evidence) == rank_lost(evidence) == [], "it is told once"
    assert only(rank_failed(evidence)).advice == "They were in different operations, which `timeout` tells."


@pytest.mark.parametrize("seen", [True, False])
def test_a_timeout_after_a_desync_of_two_names_both(seen):
    finding = only(timeout(gave_up_in("all_reduce", "broadcast", seen=seen)))

    assert finding.ranks == (0, 1)
    assert "; the ranks disagreed at #126: all_reduce " in finding.message


def test_of_ranks_that_disagreed_the_few_are_not_blamed_while_others_have_said_nothing():
    state = gave_up_in("all_reduce", "broadcast", "all_reduce", seen=False).state
    state.ranks[3] = RankState(3)

    assert only(timeout(look(state))).ranks == (0, 1, 2)


def test_a_desync_is_a_matter_of_the_timeout_once_the_first_rank_has_given_up():
    state = halted({rank: make_group(126, 19, op="broadcast" if rank == 1 else "all_reduce") for rank in range(4)})
    assert only(desync(look(state))).ranks == (1,)
    failed(state, {0: GLOO, 2: GLOO})

    assert only(timeout(look(state))).ranks == (1,)
    assert desync(look(state)) == [], "of those that are left, nobody is the fewer"


def test_ranks_that_gave_up_on_one_that_never_came_were_not_out_of_line():
    """Whatever they were in: there is somebody who was in none of it."""
    ops = ("all_reduce", "broadcast", "all_reduce")
    state = halted({rank: make_group(126, 19, op=op) for rank, op in enumerate(ops)} | {3: make_group(125)})

    assert only(timeout(look(failed(state, dict.fromkeys(range(3), GLOO))))).ranks == (3,)


def test_whom_nobody_has_seen_to_be_missing_the_note_on_who_gave_up_does_not_say_is_named():
    state = halted({0: make_group(42, size=2), 1: make_group(42, size=2)})

    assert "names" not in only(rank_failed(look(failed(state, {0: GLOO, 1: GLOO})))).advice


def test_a_timeout_of_which_nothing_was_seen_before_names_nobody():
    state = halted({0: make_group(42), 1: make_group(42)})
    state.apply(wire.Bye(rank=0, seq=5, reason="failed", text=GLOO, mono_ns=9), state.now_ns)
    finding = only(timeout(look(state)))

    assert finding.ranks == ()
    assert "was not seen" in finding.message


@pytest.mark.parametrize(("reason", "text"), [("failed", "ValueError: bad"), ("exit", GLOO), ("failed", "")])
def test_another_end_is_no_timeout(reason, text):
    state = with_timeout(12, 1800)
    state.apply(wire.Bye(rank=0, seq=5, reason=reason, text=text, mono_ns=9), state.now_ns)

    assert timeout(look(state)) == []


def test_what_the_backends_watchdog_has_found_is_told_before_the_process_ends():
    arrived = make_group(42, 700, size=2, error="TIMEOUT")
    finding = only(timeout(look(halted({0: arrived, 1: make_group(41, size=2)}))))

    assert finding.message.startswith("rank 0 gave up waiting in a collective; rank 1 had not joined it. ")
    assert finding.ranks == (1,)


# text from outside


HOSTILE = "\x1b[31m[red]x[/red]\x1b]0;title\x07\u202e\n" + "y" * 170


def test_hostile_names_of_groups_operations_and_stacks_are_tame_in_every_finding():
    texts = {"name": HOSTILE, "shape": HOSTILE, "timeout_ns": 20 * SECOND, "error": HOSTILE}
    groups = [make_group(42, 15, op=HOSTILE, **texts), make_group(41, **texts)]
    disagreeing = [make_group(42, 15, op=HOSTILE, **texts), make_group(42, 15, op="x", **texts)]
    findings = []
    for pause, (first, second) in (("", groups), ("", disagreeing), (HOSTILE, groups)):
        state = halted({0: first, 1: second, 2: first}, r1={"pause": pause}, r2={"pause": HOSTILE})
        for rank in range(3):
            state.apply(make_stack(rank, *[(HOSTILE, HOSTILE, 2**62)] * wire.MAX_FRAMES), state.now_ns)
        findings += [finding for detector in DETECTORS for finding in detector.find(look(state))]

    assert {"stall", "desync", "timeout"} <= {finding.rule for finding in findings}
    for finding in findings:
        texts = [finding.subject, finding.message, finding.detail, *map(str, finding.evidence.values())]
        assert all(text.isprintable() for text in texts)
        assert max(map(len, texts)) < 2000
    assert any("[red]x[/red]" in finding.message for finding in findings), "brackets are letters like others"


@pytest.mark.parametrize("field", ["name", "op", "shape", "members", "error"])
def test_a_name_beyond_its_limit_is_refused_with_its_frame(field):
    state = RunState("ab12cd34", "train", 1)
    group = msgspec.structs.replace(make_group(42, 1), **{field: "x" * 201})
    state.ingest(wire.encode(make_beat(0, groups=[group])), 1)

    assert (state.ranks[0].bad, state.ranks[0].beat) == (1, None)


# from the first wait to the last


class Watched:
    """Three ranks that have trained, watched beat by beat."""

    def __init__(self) -> None:
        self.monitor = Monitor(RunState("ab12cd34", "train", 3))
        self.now_ns, self.seq = SECOND, 2
        for rank in range(3):
            self._send(make_hello(rank, 1, world_size=3))
            self._send(wire.Steps(rank=rank, seq=2, steps=train(0, 90)))

    def beat(self, *groups, **reported) -> None:
        """A quarter of a second later all ranks tell of their group."""
        self.now_ns += SECOND // 4
        self.seq += 1
        for rank, group in enumerate(groups):
            phase = SYNC if group.age_ns else DATA
            self._send(make_beat(rank, seq=self.seq, phase=phase, groups=[group], **{"step": 90, **reported}))
        self.monitor.tick(self.now_ns)

    def wait(self, first_s, last_s) -> None:
        """Rank 1 does not come, and the others have waited from the first to the last second."""
        for quarter in range(int(first_s * 4), int(last_s * 4)):
            arrived = make_group(42, quarter / 4, size=3)
            self.beat(arrived, make_group(41, size=3), arrived)

    def go_on(self, seconds) -> None:
        for number in range(seconds * 4):
            self.beat(*[make_group(43 + number, size=3)] * 3)

    def go_on_to(self, step) -> None:
        """A quarter of a second later all ranks have done the steps before this one."""
        self.beat(*[make_group(43, size=3)] * 3, step=step, steps=train(90, step - 90))

    def end(self, reason) -> None:
        """All ranks say goodbye, a quarter of a second later."""
        self.now_ns += SECOND // 4
        for rank in range(3):
            self._send(wire.Bye(rank=rank, seq=self.seq + 1, reason=reason, text="", mono_ns=9))
        self.monitor.evaluate_now()

    def changes(self):
        return [(event.kind, event.alert.finding.severity) for event in self.monitor.book.drain()
                if event.alert.finding.rule == "stall"]  # fmt: skip

    def _send(self, message) -> None:
        self.monitor.ingest(wire.encode(message), self.now_ns)


def test_a_stall_opens_becomes_critical_and_closes_when_the_ranks_go_on():
    watched = Watched()
    watched.wait(0.25, 1)
    assert watched.changes() == []
    watched.wait(1, 5)
    assert watched.changes() == [("opened", Severity.WARNING)]
    watched.wait(5, 12)
    assert watched.changes() == [("changed", Severity.CRITICAL)]
    watched.go_on(1)
    assert watched.changes() == []
    watched.go_on(3)
    assert [kind for kind, _ in watched.changes()] == ["closed"]
    assert watched.monitor.suspects == frozenset()


@pytest.mark.parametrize("reason", ["exit", "failed"])
def test_a_stall_that_the_ranks_have_come_out_of_is_closed_by_the_end_and_does_not_linger(reason):
    watched = Watched()
    watched.wait(0.25, 4)
    assert watched.changes() == [("opened", Severity.WARNING)]
    watched.go_on_to(93)
    assert watched.changes() == []
    watched.end(reason)
    assert [kind for kind, _ in watched.changes()] == ["closed"]


def test_a_stall_that_the_ranks_were_ended_in_stays_open():
    watched = Watched()
    watched.wait(0.25, 4)
    watched.changes()
    watched.end("failed")
    assert watched.changes() == []
    assert any(alert.finding.rule == "stall" for alert in watched.monitor.book.open.values())


def test_the_missing_rank_is_asked_for_its_stack_and_the_answer_is_told():
    watched = Watched()
    assert watched.monitor.suspects == frozenset()
    watched.wait(0.25, 3)
    assert watched.monitor.suspects == {1}
    watched.changes()
    watched._send(make_stack(1, *SLEEPS))
    watched.wait(3, 4)

    assert watched.changes() == [("changed", Severity.WARNING)]
    assert "at nap (train.py:88)" in watched.monitor.book.open["stall", "group 0"].finding.message


@pytest.mark.parametrize("data", [None, 90], ids=["stall", "uneven-batch"])
def test_when_the_timeout_fires_its_alert_takes_the_place_of_the_one_on_the_wait_in_the_same_look(data):
    watched = Watched()
    for rank in range(3 if data else 0):
        length = data if rank == 1 else data + 5
        watched._send(wire.Loader(rank=rank, seq=3, step=0, epoch=0, sampler="S", distributed=True, length=length))
        watched.seq = 3
    watched.wait(0.25, 12)
    assert {alert.finding.rule for alert in watched.monitor.book.open.values()} == {"uneven-batch" if data else "stall"}
    for rank in (0, 2):
        watched._send(wire.Bye(rank=rank, seq=watched.seq + 1, reason="failed", text=GLOO, mono_ns=1))
    open_at_once = set()
    for _ in range(12):
        watched.now_ns += SECOND // 4
        watched.seq += 1
        watched._send(make_beat(1, seq=watched.seq, step=90, phase=DATA, groups=[make_group(41, size=3)]))
        watched.monitor.tick(watched.now_ns)
        reported = [alert.finding for alert in watched.monitor.book.open.values()]
        open_at_once.add(tuple(sorted(each.rule for each in reported if each.severity > Severity.INFO)))

    assert open_at_once == {("timeout",)}


def test_of_very_many_missing_ranks_some_are_asked_for_their_stacks():
    monitor = Monitor(RunState("ab12cd34", "train", 40))
    for rank in range(40):
        group = make_group(41 + (rank == 39), 200 * (rank == 39), size=40)
        for message in (make_hello(rank, 1, world_size=40), make_beat(rank, seq=2, groups=[group])):
            monitor.ingest(wire.encode(message), SECOND)
    monitor.evaluate_now()

    assert monitor.book.open["stall", "group 0"].finding.ranks == tuple(range(39))
    assert monitor.suspects == frozenset(range(MAX_SUSPECTS))


@pytest.mark.parametrize(
    ("hosts", "held_by", "reported"),
    [
        (("node-a", "node-a", "node-b"), "", "host node-b cannot be reached, or the rank is stopped"),
        (("node-a", "node-b", "node-b"), "", "stopped, or something holds Python's lock"),
        (("node-a", "node-a", "node-b"), "signal", "its process was stopped by a signal"),
    ],
)
def test_a_rank_of_another_host_that_was_never_heard_may_be_out_of_reach(hosts, held_by, reported):
    """Unless another rank of that host is heard, or its process can be seen."""
    state = halted({0: make_group(42, 12, size=3), 1: make_group(42, 11, size=3)}, hosts=hosts)
    state.ranks[2] = RankState(2, hosts[2], 1002, held_by=held_by)
    finding = only(stall(look(state)))

    assert finding.message.endswith(f"rank 2 (node-b, pid 1002) does not answer: {reported}")
    assert ("whether the host answers" in finding.advice) == ("reached" in reported)


def test_a_rank_that_was_stuck_before_anybody_looked_is_named_by_its_silence():
    """It has an agent, because it told where it listens; and it has not answered."""
    state = halted({0: make_group(42, 12, size=3), 1: make_group(42, 11, size=3)})
    state.ranks[2] = RankState(2, "node-a", 1002)
    finding = only(stall(look(state)))

    assert finding.ranks == (2,)
    assert finding.message == (
        "rank 2 has most likely not joined all_reduce #42 (4.0M): ranks 0-1 wait in sync for 12s. "
        "rank 2 (pid 1002) does not answer: stopped, or something holds Python's lock"
    )


def test_a_rank_without_an_agent_is_not_blamed_for_its_silence():
    state = halted({0: make_group(42, 12, size=2)})
    state.ranks[1] = RankState(1)

    assert stall(look(state)) == []


def test_where_most_wait_in_a_barrier_nobody_has_left_the_loop():
    groups = {rank: make_group(42, 9, op="all_reduce" if rank == 1 else "barrier", size=3) for rank in range(3)}
    out = {f"r{rank}": {"phase": DATA} for rank in (0, 2)}
    state = halted(groups, **out)

    assert uneven_batch(look(state)) == []
    assert only(desync(look(state))).ranks == (1,)


def test_ranks_that_gave_up_waiting_are_no_failure_of_the_network():
    state = one_missing(world=3)
    for rank in (0, 1):
        state.apply(wire.Bye(rank=rank, seq=5, reason="failed", text=GLOO, mono_ns=1), state.now_ns)
    state.tick(state.now_ns + SECOND)
    state.apply(make_beat(2, seq=5, phase=DATA, groups=[make_group(41)]), state.now_ns)
    finding = only(rank_failed(look(state)))

    assert (finding.subject, finding.severity) == ("gave up", Severity.INFO)
    assert finding.message == "ranks 0-1 gave up waiting in a collective and failed"


def test_in_the_first_steps_a_timeout_that_is_near_is_no_more_than_a_warning():
    soon = {rank: make_group(42, 15, timeout_ns=20 * SECOND) for rank in (0, 1, 3)}
    early, late = (only(stall(look(halted({**soon, 2: make_group(41)}, steps=steps)))) for steps in (5, 90))

    assert (early.severity, late.severity) == (Severity.WARNING, Severity.CRITICAL)


def test_before_every_rank_has_told_what_it_waits_for_nobody_is_called_out_of_line():
    def state(wait_s):
        ops = {0: "all_reduce", 1: "", 2: "broadcast"}
        return halted({rank: make_group(42, wait_s, op=op, size=3) for rank, op in ops.items()})

    assert desync(look(state(2))) == []
    assert only(desync(look(state(4)))).ranks == (0, 2)


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


def test_a_wait_is_told_again_when_its_timeout_is_near_and_opens_no_other_alert():
    watched = Watched()
    for second in (2, 12, 30, 33):
        arrived = make_group(42, second, size=3, timeout_ns=60 * SECOND)
        for _ in range(4):
            watched.beat(arrived, make_group(41, size=3), arrived)

    assert set(watched.monitor.book.open) == {("stall", "group 0")}
    assert watched.changes() == [
        ("opened", Severity.WARNING),
        ("changed", Severity.CRITICAL),
        ("changed", Severity.CRITICAL),
    ]
