"""Ranks that wait for a rank that has not joined, or for the network."""

from __future__ import annotations

import msgspec
import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.detectors.desync import desync
from ddpwatch.core.detectors.rank_lost import rank_lost
from ddpwatch.core.detectors.stall import stall
from ddpwatch.core.limits import LivenessLimits
from ddpwatch.core.monitor import MAX_SUSPECTS, Monitor
from ddpwatch.core.state.rank import Place, RankState
from ddpwatch.core.state.run import RunState
from tests.builders.fake_rank import make_beat, make_group, make_hello, make_stack
from tests.builders.hung_run import (
    DATA,
    HALF_HOUR_NS,
    NOW_S,
    SLEEPS,
    SYNC,
    Watched,
    halted,
    missing_in_two_groups,
    one_missing,
    with_timeout,
)
from tests.builders.synthetic_run import SECOND, look, only


def test_the_missing_rank_is_named_with_the_operation_the_wait_and_what_it_does():
    finding = only(stall(look(one_missing())))

    assert finding.message == (
        "rank 2 has not joined all_reduce #42 (4.0 MiB): ranks 0-1, 3 have waited in sync for 12 s. "
        "rank 2 has been in data for 13 s"
    )
    assert (finding.subject, finding.ranks, finding.phase) == ("group 0", (2,), "data")
    assert finding.evidence["seq"] == 42
    assert finding.evidence["waiting_s"] == 12.0
    assert "agent.pause" in finding.advice
    assert finding.detail == ""


def test_the_place_of_the_missing_rank_is_reported_once_its_stack_has_arrived():
    state = one_missing()
    state.apply(make_stack(2, *SLEEPS), state.now_ns)
    finding = only(stall(look(state)))

    assert finding.message.endswith("rank 2 has been in data for 13 s, at nap (train.py:88)")
    assert finding.detail == "nap (train.py:88)"


def test_several_missing_ranks_are_all_named_and_three_of_them_described():
    missing = {rank: make_group(41, size=6) for rank in range(1, 6)}
    finding = only(stall(look(halted({0: make_group(42, 12, size=6), **missing}))))

    assert finding.ranks == (1, 2, 3, 4, 5)
    assert finding.message.startswith(
        "ranks 1-5 have not joined all_reduce #42 (4.0 MiB): rank 0 has waited in sync for 12 s"
    )
    assert finding.message.count(" has been in data ") == 3


def test_a_group_beside_the_jobs_own_is_named():
    side = {rank: make_group(7 - (rank == 2), 9 * (rank != 2), name="side") for rank in range(4)}
    finding = only(stall(look(halted({rank: [make_group(900), side[rank]] for rank in range(4)}))))

    assert finding.subject == "group side"
    assert "all_reduce #7 (4.0 MiB) of group side" in finding.message


def test_the_silence_of_the_missing_rank_is_reported_with_its_seconds():
    finding = only(stall(look(one_missing(heard_s={2: NOW_S - 7}))))

    assert finding.message.endswith("rank 2: no heartbeat for 7 s, last seen in data")
    assert "py-spy" in finding.advice


@pytest.mark.parametrize(
    ("by", "reported"),
    [
        ("signal", "last seen in data; its process was stopped by a signal"),
        ("debugger", "last seen in data; a debugger has stopped its process"),
        ("disk", "last seen in data; its process is blocked in the kernel, on a disk or a driver"),
        ("nonsense", "last seen in data; "),
    ],
)
def test_what_holds_the_process_of_a_silent_rank_is_reported(by, reported):
    state = one_missing(heard_s={2: NOW_S - 7})
    state.apply(wire.Held(rank=2, seq=0, by=by), state.now_ns)
    finding = only(stall(look(state)))

    assert finding.message.endswith(reported.rstrip("; "))
    assert ("kill -CONT" in finding.advice) == (by != "nonsense")


def test_a_silent_rank_whose_process_may_run_holds_the_gil():
    state = one_missing(heard_s={2: NOW_S - 7})
    state.apply(wire.Held(rank=2, seq=0, by="nothing"), state.now_ns)
    finding = only(stall(look(state)))

    assert "its process is alive, but a thread holds the GIL, or it is starved of CPU" in finding.message
    assert "py-spy dump --native" in finding.advice


@pytest.mark.parametrize(
    ("silent_s", "by", "reported"), [(1.1, "nothing", False), (2.1, "nothing", True), (1.1, "signal", True)]
)
def test_a_moment_of_silence_does_not_replace_what_is_known_of_a_rank(silent_s, by, reported):
    """It sleeps in a function and is ended: missed heartbeats are noticed before its end."""
    state = one_missing(heard_s={2: NOW_S - silent_s})
    state.apply(make_stack(2, *SLEEPS), state.now_ns)
    state.apply(wire.Held(rank=2, seq=0, by=by), state.now_ns)
    finding = only(stall(look(state)))

    assert ("no heartbeat for" in finding.message) == reported
    assert finding.message.endswith("at nap (train.py:88)")
    assert ("rank 2 has been in data for 14 s, at nap (train.py:88)" in finding.message) != reported


TWO_HOSTS = ("node-a", "node-a", "node-b", "node-b")


@pytest.mark.parametrize("joined", [41, 42])
def test_a_host_whose_ranks_have_all_fallen_silent_is_reported_as_gone_or_not_reachable(joined):
    groups = {0: make_group(42, 12), 1: make_group(42, 12), 2: make_group(41), 3: make_group(joined)}
    state = halted(groups, heard_s={2: NOW_S - 8, 3: NOW_S - 7}, hosts=TWO_HOSTS)
    finding = only(stall(look(state)))

    assert finding.message.endswith(
        "host node-b (ranks 2-3) is down or unreachable: no heartbeat from its 2 ranks for 7 s"
    )
    assert "whether the host responds" in finding.advice


def test_of_a_host_with_a_single_rank_it_may_be_the_rank_that_is_stopped():
    state = one_missing(heard_s={2: NOW_S - 7}, hosts=("node-a", "node-b", "node-c", "node-d"))

    assert only(stall(look(state))).message.endswith(
        "host node-c (rank 2) is down or unreachable, or the rank is stopped: no heartbeat for 7 s"
    )


@pytest.mark.parametrize(
    "heard_s", [{2: NOW_S - 7}, dict.fromkeys(range(4), NOW_S - 7)], ids=["the other rank of the host", "nobody"]
)
def test_a_host_is_not_gone_while_another_of_its_ranks_is_heard_or_no_rank_is(heard_s):
    assert "down or unreachable" not in only(stall(look(one_missing(heard_s=heard_s, hosts=TWO_HOSTS)))).message


def test_a_process_that_can_be_seen_is_on_a_host_that_can_be_reached():
    state = one_missing(heard_s={2: NOW_S - 7}, hosts=("node-a", "node-b", "node-c", "node-d"))
    state.apply(wire.Held(rank=2, seq=0, by="signal"), state.now_ns)

    assert only(stall(look(state))).message.endswith("its process was stopped by a signal")


def test_a_silent_rank_that_others_wait_for_is_reported_once():
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


def test_a_stack_of_another_phase_is_not_shown():
    state = one_missing()
    state.apply(make_stack(2, *SLEEPS, phase=SYNC), state.now_ns)
    assert only(stall(look(state))).message.endswith("rank 2 has been in data for 13 s")

    state.apply(make_stack(2, *SLEEPS, phase=DATA, mono_ns=2), state.now_ns)
    assert only(stall(look(state))).message.endswith("rank 2 has been in data for 13 s, at nap (train.py:88)")


def test_the_number_of_an_operation_is_written_in_one_piece():
    groups = {rank: make_group(1206 - (rank == 1), 9 * (rank != 1), size=2) for rank in range(2)}

    assert "all_reduce #1206 (4.0 MiB)" in only(stall(look(halted(groups)))).message


def test_an_announced_pause_of_one_of_the_missing_is_reported():
    state = halted({0: make_group(42, 9), 1: make_group(41), 2: make_group(41)}, r1={"pause": "checkpoint"})

    assert "rank 1 has been in data for 13 s (paused: checkpoint)" in only(stall(look(state))).message


def test_a_collective_of_which_nothing_is_recorded_is_still_reported():
    unrecorded = {rank: make_group(42 - (rank == 1), completed=None, size=2) for rank in range(2)}
    finding = only(stall(look(halted(unrecorded, r0={"phase": SYNC, "phase_ns": 9 * SECOND}))))

    assert finding.message.startswith("rank 1 has not joined collective #42: rank 0 has waited in sync for 9 s. ")


@pytest.mark.parametrize(
    ("wait_s", "timeout_s", "severity"),
    [(9, 0, Severity.WARNING), (11, 0, Severity.CRITICAL), (4, 10, Severity.WARNING), (6, 10, Severity.CRITICAL)],
)
def test_a_stall_is_critical_after_ten_seconds_or_half_of_the_timeout(wait_s, timeout_s, severity):
    arrived = make_group(42, wait_s, size=2, timeout_ns=timeout_s * SECOND)

    assert only(stall(look(halted({0: arrived, 1: make_group(41, size=2)})))).severity is severity


def test_where_all_have_arrived_it_is_the_network_and_no_rank():
    finding = only(stall(look(halted({rank: make_group(42, 12) for rank in range(4)}))))

    assert finding.message == (
        "all 4 ranks have joined all_reduce #42 (4.0 MiB), but it has not completed: "
        "ranks 0-3 have waited in sync for 12 s. The likely cause is the network, not a rank"
    )
    assert finding.ranks == ()
    assert "NCCL_DEBUG" in finding.advice


def test_the_network_is_not_blamed_while_a_rank_of_the_group_was_not_heard():
    assert stall(look(halted({rank: make_group(42, 12) for rank in range(3)}))) == []


def test_the_network_is_not_blamed_when_a_rank_was_stopped_inside_the_operation():
    """It has joined, and sent nothing since."""
    groups = {rank: make_group(42, 0.2 if rank == 2 else 12) for rank in range(4)}

    assert stall(look(halted(groups, heard_s={2: NOW_S - 12}))) == []


def test_a_rank_that_is_missing_in_two_groups_is_reported_once():
    two = {rank: [make_group(42, 9), make_group(7, 9, name="side")] for rank in range(3)}
    finding = only(stall(look(halted(two | {3: [make_group(41), make_group(6, name="side")]}))))

    assert (finding.ranks, finding.subject) == ((3,), "group 0")


def test_ranks_that_wait_for_the_same_rank_in_another_group_are_in_the_same_finding():
    finding = only(stall(look(missing_in_two_groups())))

    assert finding.ranks == (3,)
    assert finding.message.startswith(
        "rank 3 has not joined all_reduce #42 (4.0 MiB): ranks 0-1 have waited in sync for 9 s and rank 2 in "
        "all_reduce #7 (4.0 MiB) of group side. rank 3 has been in data"
    )


def test_a_report_of_a_rank_that_was_stopped_just_after_it_is_outdated():
    """It reported a wait for #41, which the others have completed."""
    state = halted({0: make_group(42, 9), 1: make_group(42, 9), 2: make_group(41, 0.2)}, heard_s={2: NOW_S - 8})

    assert only(stall(look(state))).ranks == (2,)


def test_the_time_that_is_left_is_reported_with_the_stall():
    finding = only(stall(look(with_timeout(12, 1800))))

    assert "have waited in sync for 12 s, timeout in 29 min 48 s. " in finding.message
    assert (finding.evidence["timeout_s"], finding.evidence["left_s"]) == (1800.0, 1788.0)


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
    assert finding.message.startswith("rank 1 waits in a different process group than the others: ")
    assert "timeout in 11 s" in finding.message
    assert finding.evidence["left_s"] == 11.0


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


def test_the_missing_rank_is_asked_for_its_stack_and_the_answer_is_reported():
    watched = Watched()
    assert watched.monitor.suspects == frozenset()
    watched.wait(0.25, 3)
    assert watched.monitor.suspects == {1}
    watched.changes()
    watched._send(make_stack(1, *SLEEPS))
    watched.wait(3, 4)

    assert watched.changes() == [("changed", Severity.WARNING)]
    assert "at nap (train.py:88)" in watched.monitor.book.open["stall", "group 0"].finding.message


def test_only_some_of_very_many_missing_ranks_are_asked_for_their_stacks():
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
        (("node-a", "node-a", "node-b"), "", "host node-b is unreachable, or the rank is stopped"),
        (("node-a", "node-b", "node-b"), "", "it is stopped, or a thread holds the GIL"),
        (("node-a", "node-a", "node-b"), "signal", "its process was stopped by a signal"),
    ],
)
def test_a_rank_of_another_host_that_was_never_heard_may_be_out_of_reach(hosts, held_by, reported):
    """Unless another rank of that host is heard, or its process is visible."""
    state = halted({0: make_group(42, 12, size=3), 1: make_group(42, 11, size=3)}, hosts=hosts)
    state.ranks[2] = RankState(2, hosts[2], 1002, held_by=held_by)
    finding = only(stall(look(state)))

    assert finding.message.endswith(f"rank 2 (node-b, pid 1002) does not answer: {reported}")
    assert ("whether the host responds" in finding.advice) == ("unreachable" in reported)


def test_a_rank_that_was_stuck_before_the_viewer_attached_is_named_by_its_silence():
    """It has an agent, because it registered its address, and it does not answer."""
    state = halted({0: make_group(42, 12, size=3), 1: make_group(42, 11, size=3)})
    state.ranks[2] = RankState(2, "node-a", 1002)
    finding = only(stall(look(state)))

    assert finding.ranks == (2,)
    assert finding.message == (
        "rank 2 has most likely not joined all_reduce #42 (4.0 MiB): ranks 0-1 have waited in sync for 12 s. "
        "rank 2 (pid 1002) does not answer: it is stopped, or a thread holds the GIL"
    )


def test_a_rank_without_an_agent_is_not_blamed_for_its_silence():
    state = halted({0: make_group(42, 12, size=2)})
    state.ranks[1] = RankState(1)

    assert stall(look(state)) == []


def test_in_the_first_steps_a_timeout_that_is_near_is_no_more_than_a_warning():
    soon = {rank: make_group(42, 15, timeout_ns=20 * SECOND) for rank in (0, 1, 3)}
    early, late = (only(stall(look(halted({**soon, 2: make_group(41)}, steps=steps)))) for steps in (5, 90))

    assert (early.severity, late.severity) == (Severity.WARNING, Severity.CRITICAL)


def test_a_wait_is_reported_again_when_its_timeout_is_near_and_opens_no_other_alert():
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


SAVING = {"phase": wire.PHASES.index("other"), "activity": "torch.save"}


def test_a_rank_that_saves_alone_is_named_with_it_and_is_not_critical_for_a_minute():
    finding = only(stall(look(one_missing(40.0, r2={**SAVING, "phase_ns": 41 * SECOND}))))

    assert "rank 2 has been in torch.save for 41 s" in finding.message
    assert finding.severity is Severity.WARNING
    assert "async_save" in finding.advice
    assert only(stall(look(one_missing(61.0, r2=SAVING)))).severity is Severity.CRITICAL


def test_a_save_does_not_stop_the_timeout():
    finding = only(stall(look(with_timeout(14, 30, r1=SAVING))))
    assert finding.severity is Severity.WARNING
    finding = only(stall(look(with_timeout(16, 30, r1=SAVING))))

    assert "timeout in 14 s" in finding.message
    assert finding.severity is Severity.CRITICAL


def test_a_save_of_one_missing_rank_does_not_excuse_another():
    groups = {0: make_group(42, 12), 1: make_group(41), 2: make_group(41)}

    assert "rank 1 has been in torch.save" in only(stall(look(halted(groups, r1=SAVING)))).message
