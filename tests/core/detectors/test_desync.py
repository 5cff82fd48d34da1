"""Ranks in different operations: waiting, crossed between groups, or after an abort."""

from __future__ import annotations

import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.desync import desync
from ddpwatch.core.detectors.rank_failed import rank_failed
from ddpwatch.core.detectors.rank_lost import rank_lost
from ddpwatch.core.detectors.stall import stall
from tests.builders.ended_run import LARGE, LOST, SMALL, beating, broken, ended_with, outlived
from tests.builders.fake_rank import make_group, make_stack
from tests.builders.hung_run import crossed, halted
from tests.builders.synthetic_run import SECOND, look, only


def test_after_an_abort_the_minority_is_blamed_and_not_the_aborted_rank():
    evidence = broken(0, {1: LARGE, 2: SMALL, 3: SMALL})
    reported, lost = only(desync(evidence)), only(rank_lost(evidence))

    assert reported.ranks == (1,)
    assert reported.message.startswith(
        "rank 1 was in a different collective when the connections broke: all_reduce #66 [1000] Float on ranks 0, 2-3 "
        "vs all_reduce #66 [9000] Float on rank 1. "
    )
    assert "/home/me/train.py:88 in fit" in reported.message
    assert (lost.severity, "see `desync`" in lost.message) == (Severity.INFO, True)


def test_after_an_abort_with_equal_groups_no_rank_is_blamed():
    reported = only(desync(broken(0, {1: LARGE, 2: SMALL, 3: LARGE})))

    assert reported.ranks == (0, 1, 2, 3)
    assert "which of them is wrong is unknown" in reported.message


def test_an_abort_without_enough_evidence_blames_no_rank():
    evidence = broken(0, {1: LARGE})
    lost, after = rank_lost(evidence)

    assert desync(evidence) == []
    assert (lost.ranks, lost.severity) == ((), Severity.CRITICAL)
    assert "which of them is wrong is unknown. rank 1 was in all_reduce #66 [9000] Float" in lost.message
    assert "because" not in only(rank_failed(evidence)).message
    assert "may not be the root cause" in after.advice


def asked(ops, before_s=0.0):
    """Rank 0 is aborted, observed; the launcher ends the others, which reported their operations when asked to end."""
    state = beating(dict.fromkeys(range(4), 99.9), now_s=100)
    for rank, op in ops.items():
        stack = make_stack(rank, ("fit", "/home/me/train.py", 88), collectives=[op])
        state.apply(stack, int(state.now_ns - before_s * SECOND))
    for rank, code in {0: -6, 1: -15, 2: -15, 3: -15}.items():
        state.apply(wire.Gone(rank=rank, seq=0, exit_code=code, ago_ns=1), state.now_ns)
    return look(outlived(state))


def test_ranks_that_the_launcher_ended_reported_their_operation_when_they_were_asked_to_end():
    evidence = asked({1: LARGE, 2: SMALL, 3: SMALL})
    reported = only(desync(evidence))

    assert reported.ranks == (1,)
    assert "all_reduce #66 [1000] Float on ranks 0, 2-3 vs all_reduce #66 [9000] Float on rank 1" in reported.message
    assert "rank 1 was at fit (train.py:88)" in reported.message
    assert not [finding for finding in rank_lost(evidence) if finding.severity is Severity.CRITICAL]


def test_a_report_from_before_the_abort_is_no_evidence():
    evidence = asked({1: LARGE, 2: SMALL, 3: SMALL}, before_s=5.0)

    assert desync(evidence) == []
    assert rank_lost(evidence)[0].message.endswith(
        "which of them is wrong is unknown. ranks 1-3 were terminated before reporting their collective"
    )


def test_ranks_without_a_report_are_mentioned_and_count_for_neither_group():
    evidence = asked({1: LARGE, 2: SMALL})
    reported = only(desync(evidence))
    assert reported.ranks == (0, 1, 2)
    assert "which of them is wrong is unknown" in reported.message

    lost = rank_lost(asked({1: LARGE}))[0]
    assert lost.ranks == ()
    assert lost.message.endswith("at fit (train.py:88); ranks 2-3 were terminated before reporting their collective")


def test_ranks_at_the_same_place_in_the_script_were_in_the_same_operation():
    state = beating(dict.fromkeys(range(5), 99.9), world=5, now_s=100)
    places = {1: 140, 2: 104, 3: 104, 4: 104}
    for rank, op in {1: [LARGE], 2: [SMALL], 3: [], 4: []}.items():
        stack = make_stack(rank, ("fit", "/home/me/train.py", places[rank]), collectives=op)
        state.apply(stack, state.now_ns)
    for rank in range(5):
        state.apply(wire.Gone(rank=rank, seq=0, exit_code=-15 if rank else -6, ago_ns=1), state.now_ns)
    reported = only(desync(look(outlived(state))))

    assert reported.ranks == (1,)
    assert "[1000] Float on ranks 0, 2-4 vs" in reported.message


def test_a_viewer_that_missed_the_end_of_a_rank_blames_no_other_rank_for_it():
    """Rank 0 was aborted and is in the group of rank 1: equal groups. Without its exit code its group is unknown."""
    evidence = broken(0, {1: SMALL, 2: LARGE, 3: LARGE})
    assert only(desync(evidence)).ranks == (0, 1, 2, 3)
    state = evidence.state
    state.ranks[0].exit_code = None
    reported = only(desync(look(state)))

    assert reported.ranks == (1, 2, 3)
    assert "which of them is wrong is unknown; how rank 0 ended was not observed" in reported.message
    assert rank_lost(look(state)) == [], "it is told once"


def test_ranks_that_lost_one_that_was_killed_are_not_compared():
    state = beating(dict.fromkeys(range(3), 99.9), world=3, now_s=100)
    for rank, op in {0: SMALL, 2: LARGE}.items():
        bye = wire.Bye(rank=rank, seq=5, reason="failed", text=LOST, mono_ns=1, collectives=[op])
        state.apply(bye, state.now_ns)
    evidence = look(ended_with(state, {1: -9}))

    assert desync(evidence) == []
    assert only(rank_lost(evidence)).ranks == (1,)


def disagree(*ops, **options):
    """Ranks that wait under the same sequence number, each in its own operation: `op` or `op shape`."""
    shapes = [(*op.split(" ", 1), "[8] Float")[:2] for op in ops]
    groups = [make_group(42, 9, op=op, shape=shape, size=len(ops), **options) for op, shape in shapes]
    return look(halted(dict(enumerate(groups))))


def test_the_minority_is_blamed_for_another_operation():
    evidence = disagree("all_reduce", "all_reduce", "broadcast", "all_reduce")
    finding = only(desync(evidence))

    assert finding.ranks == (2,)
    assert finding.message.startswith(
        "rank 2 called a different collective at #42: all_reduce [8] Float on ranks 0-1, 3 "
        "vs broadcast [8] Float on rank 2; they have waited for 9 s. "
    )
    assert (finding.severity, finding.subject) == (Severity.CRITICAL, "group 0")
    assert stall(evidence) == [], "it is told once"


def test_another_size_is_another_operation():
    assert only(desync(disagree("all_reduce [8] Float", "all_reduce [8] Float", "all_reduce [9] Float"))).ranks == (2,)


def test_all_ranks_that_differ_from_the_majority_are_blamed():
    assert only(desync(disagree("all_reduce", "broadcast", "all_reduce", "barrier"))).ranks == (1, 3)


@pytest.mark.parametrize("ops", [("all_reduce", "barrier"), ("all_reduce", "barrier", "barrier", "all_reduce")])
def test_two_equal_groups_are_both_reported_and_no_rank_is_blamed(ops):
    finding = only(desync(disagree(*ops)))

    assert finding.ranks == tuple(range(len(ops)))
    assert finding.message.startswith("the ranks called different collectives at #42")


def test_equal_operations_are_no_desync_nor_is_one_that_is_not_reported_yet():
    assert desync(disagree("all_reduce", "all_reduce")) == []
    unreported = make_group(42, 9, op="", shape="", size=2)
    assert desync(look(halted({0: make_group(42, 9, size=2), 1: unreported}))) == []


@pytest.mark.parametrize("wait_s", [9, 0.8])
def test_crossed_groups_are_reported_once_and_no_rank_is_blamed(wait_s):
    """Also if only one of the waits is abnormal."""
    state = crossed(wait_s)
    finding = only(desync(look(state)))

    assert stall(look(state)) == []
    assert finding.ranks == (0, 1)
    assert finding.message.startswith(
        "the ranks wait for each other in different process groups: "
        "all_reduce #42 (4.0 MiB) on rank 1 vs all_reduce #7 (4.0 MiB) of group side on rank 0; "
        "they have waited for 9 s. "
    )


def test_ranks_that_disagree_on_an_earlier_operation_are_reported_although_another_got_beyond_it():
    """Rank 2 waits for the next operation: a broadcast completes early on its root."""
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
    assert finding.message.startswith("the ranks called different collectives at #86: broadcast")


def test_no_rank_is_out_of_line_before_every_rank_has_reported_its_operation():
    def state(wait_s):
        ops = {0: "all_reduce", 1: "", 2: "broadcast"}
        return halted({rank: make_group(42, wait_s, op=op, size=3) for rank, op in ops.items()})

    assert desync(look(state(2))) == []
    assert only(desync(look(state(4)))).ranks == (0, 2)
