"""Timeouts of process groups: near, fired, and the rank that was waited for."""

from __future__ import annotations

import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.desync import desync
from ddpwatch.core.detectors.rank_failed import rank_failed
from ddpwatch.core.detectors.rank_lost import rank_lost
from ddpwatch.core.detectors.stall import stall
from ddpwatch.core.detectors.timeout import timeout
from ddpwatch.core.state.rank import RankState
from ddpwatch.core.state.run import RunState
from tests.builders.fake_rank import make_beat, make_group, make_stack
from tests.builders.hung_run import (
    DATA,
    GLOO,
    HALF_HOUR_NS,
    NOW_S,
    PEER,
    SLEEPS,
    Watched,
    failed,
    halted,
    missing_in_two_groups,
    one_missing,
    with_timeout,
)
from tests.builders.synthetic_run import SECOND, look, only


def test_a_rank_that_has_ended_is_described_by_its_activity_and_not_as_silent():
    state = failed(one_missing(), {0: GLOO, 1: GLOO, 3: GLOO})
    state.apply(make_stack(2, *SLEEPS), state.now_ns)
    state.apply(wire.Held(rank=2, seq=0, by="nothing"), state.now_ns)
    state.apply(wire.Gone(rank=2, seq=0, exit_code=-15), state.now_ns + SECOND)
    state.tick(state.now_ns + 9 * SECOND)

    assert only(timeout(look(state))).message.endswith(
        "rank 2 had not joined a collective: ranks 0-1, 3 timed out. "
        "rank 2 had been in data for 13 s, at nap (train.py:88)"
    )


def test_a_timeout_names_a_rank_that_was_missing_in_two_groups_once():
    finding = only(timeout(look(failed(missing_in_two_groups(), {0: GLOO, 1: GLOO}))))

    assert finding.ranks == (3,)
    assert finding.message.count("rank 3 has been in data") == 1
    assert finding.evidence["culprits"] == 1


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
    """Rank 1 has announced a pause, which torch does not know of."""
    return with_timeout(wait_s, 1800, r1={"pause": "evaluation"})


def test_a_timeout_that_is_near_names_the_missing_rank_where_no_other_rule_does():
    assert stall(look(in_a_pause())) == []
    finding = only(timeout(look(in_a_pause())))

    assert finding.message == ("rank 1 has not joined all_reduce #42 (4.0 MiB): torch aborts the job in 15 s")
    assert (finding.ranks, finding.subject, finding.severity) == ((1,), "group 0", Severity.CRITICAL)


def test_a_timeout_that_is_near_although_all_have_joined_is_reported_with_the_network():
    arrived = make_group(42, 1785, size=2, timeout_ns=HALF_HOUR_NS)
    evidence = look(halted({0: arrived, 1: arrived}))
    finding = only(stall(evidence))

    assert "timeout in 15 s" in finding.message
    assert (finding.urgent, finding.ranks) == (True, ())
    assert timeout(evidence) == []


def test_a_timeout_that_is_near_is_reported_where_a_rank_of_the_group_was_not_heard():
    arrived = make_group(42, 1785, size=3, timeout_ns=HALF_HOUR_NS)
    evidence = look(halted({0: arrived, 1: arrived}))

    assert stall(evidence) == []
    assert only(timeout(evidence)).message.endswith("; all ranks with a heartbeat have joined it")


def test_a_rank_that_has_been_silent_until_the_others_gave_up_is_reported_once():
    """The finding on the others is an info, and does not mention connections."""
    evidence = look(failed(one_missing(heard_s={2: NOW_S - 20}), {0: GLOO, 1: GLOO, 3: GLOO}))

    assert only(timeout(evidence)).ranks == (2,)
    assert "rank 2: no heartbeat for 20 s" in only(timeout(evidence)).message
    assert rank_lost(evidence) == []
    note = only(rank_failed(evidence))
    assert note.severity is Severity.INFO
    assert note.message == "ranks 0-1, 3 failed because rank 2 stopped sending heartbeats: timed out in a collective"


@pytest.mark.parametrize("ended", [(1,), (1, 2), (0, 1, 2)])
def test_a_timeout_that_has_fired_in_one_group_names_the_rank_missing_in_the_other(ended):
    """By the last heartbeats no rank waits: a rank that fails has left its operation."""
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
        "rank 1 had not joined what the others waited for in group side; rank 1 timed out"
    )


def test_a_timeout_of_ranks_that_waited_for_each_other_in_different_groups_blames_no_rank():
    state = halted({0: [make_group(41), make_group(7, name="side")], 1: [make_group(42), make_group(6, name="side")]})
    finding = only(timeout(look(failed(state, {0: GLOO, 1: GLOO}))))

    assert finding.ranks == ()
    assert finding.message.endswith("the ranks waited for each other in different process groups")


def test_a_viewer_that_attaches_after_the_timeout_names_the_ranks_that_have_not_timed_out():
    state = halted({rank: make_group(41) for rank in range(4)})
    for rank in (0, 1, 3):
        state.ranks[rank] = RankState(rank)
        state.apply(wire.Bye(rank=rank, seq=0, reason="failed", text=GLOO, mono_ns=1), state.now_ns)
    finding = only(timeout(look(state)))

    assert finding.ranks == ()
    assert finding.message == (
        "ranks 0-1, 3 timed out in a collective; which rank had not joined it was not observed, "
        "but rank 2 has not timed out"
    )


def test_a_timeout_that_is_near_blames_no_rank_that_waits_in_another_group():
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
    assert "timeout in 5 s" in finding.message, "of the group that waits for it"
    assert timeout(look(state)) == []


def test_the_countdown_goes_on_without_beats_and_ends_at_any_moment():
    state, paused = with_timeout(1785, 1800), in_a_pause()
    for each in (state, paused):
        each.tick(each.now_ns + SECOND)
    assert "timeout in 14 s" in only(stall(look(state))).message
    assert "in 14 s" in only(timeout(look(paused))).message

    for each in (state, paused):
        each.tick(each.now_ns + 20 * SECOND)
    assert "the timeout has expired" in only(stall(look(state))).message
    assert "at any moment" in only(timeout(look(paused))).message


@pytest.mark.parametrize("text", [GLOO, "DistBackendError: Watchdog caught collective operation timeout: WorkNCCL"])
def test_a_timeout_that_has_fired_names_the_rank_that_had_not_joined_and_not_the_one_that_complains(text):
    state = with_timeout(19, 20)
    state.apply(wire.Bye(rank=0, seq=5, reason="failed", text=text, mono_ns=9), state.now_ns)
    finding = only(timeout(look(state)))

    assert finding.message == ("rank 1 had not joined a collective: rank 0 timed out. rank 1 has been in data for 13 s")
    assert (finding.ranks, finding.severity) == ((1,), Severity.CRITICAL)
    assert stall(look(state)) == [], "it is told once, although rank 2 still waits"


def operations_at_the_end(*seqs):
    """Last operations of a rank, the last of them not completed."""
    return [
        wire.Collective(group="0", seq=seq, op="all_reduce", shape="[8] Float", done=seq < seqs[-1]) for seq in seqs
    ]


def test_a_viewer_that_attaches_after_the_timeout_names_the_same_rank_by_last_messages():
    """One viewer was always attached; the other knows only the living rank and the last messages of the others."""
    there, later = one_missing(), one_missing()
    for rank in (0, 1, 3):
        later.ranks[rank] = RankState(rank)
        bye = wire.Bye(
            rank=rank, seq=0, reason="failed", text=GLOO, mono_ns=1, collectives=operations_at_the_end(41, 42)
        )
        there.apply(bye, there.now_ns)
        later.apply(bye, later.now_ns)
    first, second = only(timeout(look(there))), only(timeout(look(later)))

    assert first.message == second.message
    assert first.ranks == second.ranks == (2,)
    assert second.evidence["rests_on"] == "last messages of ranks 0-1, 3; heartbeats of rank 2"


def test_last_messages_count_where_the_last_heartbeats_were_lost():
    state = halted({rank: make_group(40) for rank in range(3)})
    for rank, seq in enumerate((42, 41, 42)):
        bye = wire.Bye(
            rank=rank, seq=0, reason="failed", text=PEER if rank == 1 else GLOO, mono_ns=1,
            collectives=operations_at_the_end(seq),
        )  # fmt: skip
        state.apply(bye, state.now_ns)

    assert only(timeout(look(state))).ranks == (1,)


def test_with_last_messages_only_the_rank_that_joined_the_fewest_is_named():
    state = RunState("ab12cd34", "train", 2)
    for rank, seq in enumerate((42, 41)):
        bye = wire.Bye(rank=rank, seq=0, reason="failed", text=GLOO, mono_ns=1, collectives=operations_at_the_end(seq))
        state.apply(bye, SECOND)

    assert only(timeout(look(state))).message == (
        "rank 1 had not joined what the others waited for in group 0; ranks 0-1 timed out"
    )


def gave_up_in(*ops, seen=True, words=True):
    """Ranks that timed out under the same number, each in another operation, by heartbeats or last messages."""
    state = RunState("ab12cd34", "train", len(ops))
    if seen:
        state = halted({rank: make_group(126, 19, op=op, size=len(ops)) for rank, op in enumerate(ops)})
    for rank, op in enumerate(ops):
        # Gloo counts a failed operation as completed.
        last = [
            wire.Collective(group="0", seq=seq, op=op if seq == 126 else "all_reduce", shape="[16] Float", done=True)
            for seq in (125, 126)
        ]
        bye = wire.Bye(rank=rank, seq=7, reason="failed", text=GLOO, mono_ns=1, collectives=last if words else [])
        state.apply(bye, state.now_ns or SECOND)
    return look(state)


@pytest.mark.parametrize(("seen", "words"), [(True, True), (True, False), (False, True)])
def test_a_timeout_after_a_desync_names_the_same_rank(seen, words):
    """Also for a viewer that attaches afterwards and has only last messages."""
    evidence = gave_up_in("all_reduce", "broadcast", "all_reduce", "all_reduce", seen=seen, words=words)
    finding = only(timeout(evidence))

    shape = "[1048576] Float" if seen else "[16] Float"
    assert finding.message == (
        "rank 1 was in a different collective at #126: "
        f"all_reduce {shape} on ranks 0, 2-3 vs broadcast {shape} on rank 1; ranks 0-3 timed out"
    )
    assert (finding.ranks, finding.severity) == ((1,), Severity.CRITICAL)
    assert "branch on the rank" in finding.advice
    assert desync(evidence) == stall(evidence) == rank_lost(evidence) == [], "it is told once"
    assert only(rank_failed(evidence)).advice == "They were in different collectives: see the `timeout` alert."


@pytest.mark.parametrize("seen", [True, False])
def test_a_timeout_after_a_desync_of_two_names_both(seen):
    finding = only(timeout(gave_up_in("all_reduce", "broadcast", seen=seen)))

    assert finding.ranks == (0, 1)
    assert "the ranks were in different collectives at #126: all_reduce " in finding.message


def test_the_minority_is_not_blamed_while_other_ranks_have_not_reported():
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
    """Whatever their operations: one rank was in none of them."""
    ops = ("all_reduce", "broadcast", "all_reduce")
    state = halted({rank: make_group(126, 19, op=op) for rank, op in enumerate(ops)} | {3: make_group(125)})

    assert only(timeout(look(failed(state, dict.fromkeys(range(3), GLOO))))).ranks == (3,)


def test_a_timeout_of_which_nothing_was_seen_before_names_no_rank():
    state = halted({0: make_group(42), 1: make_group(42)})
    state.apply(wire.Bye(rank=0, seq=5, reason="failed", text=GLOO, mono_ns=9), state.now_ns)
    finding = only(timeout(look(state)))

    assert finding.ranks == ()
    assert "was not observed" in finding.message


@pytest.mark.parametrize(("reason", "text"), [("failed", "ValueError: bad"), ("exit", GLOO), ("failed", "")])
def test_another_end_is_no_timeout(reason, text):
    state = with_timeout(12, 1800)
    state.apply(wire.Bye(rank=0, seq=5, reason=reason, text=text, mono_ns=9), state.now_ns)

    assert timeout(look(state)) == []


def test_what_the_backends_watchdog_has_found_is_reported_before_the_process_ends():
    arrived = make_group(42, 700, size=2, error="TIMEOUT")
    finding = only(timeout(look(halted({0: arrived, 1: make_group(41, size=2)}))))

    assert finding.message.startswith("rank 1 had not joined a collective: rank 0 timed out. ")
    assert finding.ranks == (1,)


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
