"""Ranks ended by an exception: first failures, secondary failures, interrupts, exit codes."""

from __future__ import annotations

import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.rank_failed import rank_failed
from ddpwatch.core.detectors.rank_lost import rank_lost
from ddpwatch.core.diagnosis.early_exit import root_cause_pending
from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.core.limits import RankFailedLimits, UnevenBatchLimits
from ddpwatch.core.monitor import Monitor
from ddpwatch.view.outcome_text import root_cause_text
from tests.builders.ended_run import CLOSED, beating, ended_with, fail, outlived
from tests.builders.fake_rank import make_beat, make_group
from tests.builders.findings import criticals
from tests.builders.hung_run import DATA, GLOO, NOW_S, PEER, failed, halted, one_missing
from tests.builders.synthetic_run import SECOND, look, make_run, only, train


def left_and_lost(world=2, code_s=1.5, code=3, victims=1, others_s=0.0):
    """The last rank says goodbye, the first ones lose their connections half a second later, and then its process ends
    with an exit code, or its end is never observed. Evaluated ten times a second, for eight seconds.
    """
    state = make_run({rank: train(0, 90) for rank in range(world)}, world=world, now_ns=SECOND)
    monitor, last = Monitor(state), world - 1
    for rank in range(world):
        state.apply(wire.Held(rank=rank, seq=0, by="nothing"), SECOND)
        loader = wire.Loader(rank=rank, seq=4, step=0, epoch=0, sampler="S", distributed=True, length=400)
        state.apply(loader, SECOND)
    state.apply(wire.Bye(rank=last, seq=5, reason="exit", text="", mono_ns=1), SECOND)
    for tenth in range(1, 81):
        now_ns = SECOND + tenth * SECOND // 10
        state.tick(now_ns)
        for rank in range(last):
            fails_s = 0.5 if rank < victims else 0.5 + others_s
            if state.ranks[rank].bye is None and tenth >= 10 * fails_s:
                state.apply(wire.Bye(rank=rank, seq=5 + tenth, reason="failed", text=CLOSED, mono_ns=1), now_ns)
            elif state.ranks[rank].bye is None:
                state.apply(make_beat(rank, seq=5 + tenth, step=90), now_ns)
        if code is not None and tenth == 10 * code_s:
            state.apply(wire.Gone(rank=last, seq=0, exit_code=code, ago_ns=1), now_ns)
        monitor.evaluate_now()
    return monitor


@pytest.mark.parametrize(("world", "victims", "others_s"), [(2, 1, 0.0), (4, 3, 0.0), (4, 1, 0.7), (4, 1, 3.0)])
@pytest.mark.parametrize("code_s", [0.3, 0.6, 1.5, 5])
def test_a_rank_that_leaves_with_an_exit_code_is_blamed_and_never_the_ranks_that_lose_it(
    world, victims, others_s, code_s
):
    monitor = left_and_lost(world, code_s, 3, victims, others_s)

    assert criticals(monitor) == [("opened", "rank-failed", (world - 1,))]
    after = monitor.book.open["rank-failed", "after"].finding
    assert after.ranks == tuple(range(world - 1))
    began = root_cause_text(outcome_of(monitor.state, monitor.book.open.values()))
    assert began.startswith(f"rank {world - 1} exited with code 3; rank")


@pytest.mark.parametrize(("code", "how"), [(0, " with code 0"), (None, "")])
def test_a_rank_that_leaves_in_order_in_the_middle_of_its_data_is_named_but_has_not_failed(code, how):
    monitor = left_and_lost(code=code)

    assert criticals(monitor) == [("opened", "rank-failed", (1,))]
    finding = only([alert.finding for alert in monitor.book.open.values() if alert.finding.rule == "rank-failed"])
    assert finding.message == f"rank 1 exited{how} before the others: rank 0 lost its connection and failed"
    assert (
        root_cause_text(outcome_of(monitor.state, monitor.book.open.values()))
        == "rank 1 exited before the others; rank 0 after it"
    )


def test_a_later_complaint_is_about_the_rank_that_left_and_not_about_the_first_complaint():
    monitor = left_and_lost(4, 1.5, 0, victims=1, others_s=0.7)

    assert criticals(monitor) == [("opened", "rank-failed", (3,))]
    finding = only([alert.finding for alert in monitor.book.open.values() if alert.finding.rule == "rank-failed"])
    assert finding.message == "rank 3 exited with code 0 before the others: ranks 0-2 lost their connections and failed"
    began = root_cause_text(outcome_of(monitor.state, monitor.book.open.values()))
    assert began == "rank 3 exited before the others; ranks 0-2 after it"


def test_the_end_of_a_run_waits_for_how_one_ended_that_another_complains_of():
    monitor = left_and_lost(code=None)
    state = monitor.state
    assert not root_cause_pending(state), "it was waited for long enough"

    state.now_ns = (state.ranks[1].bye_ns or 0) + UnevenBatchLimits.EXIT_CODE_NS - 1
    assert root_cause_pending(state)
    state.apply(wire.Gone(rank=1, seq=0), state.now_ns)
    assert not root_cause_pending(state)


def test_a_complaint_is_critical_after_a_moment_while_the_others_live():
    state = beating({})
    monitor = Monitor(state)
    fail(state, 2, CLOSED)
    monitor.evaluate_now()
    assert criticals(monitor) == []

    for _ in range(5):
        outlived(state)
        monitor.evaluate_now()
    assert criticals(monitor) == [("opened", "rank-failed", (2,))]


def test_an_exit_with_a_code_in_the_middle_of_the_data_opens_one_critical_alert():
    """Goodbye, the others wait, they lose their connections, and the launcher reports the exit code."""
    state = make_run({rank: train(0, 90) for rank in range(3)}, world=3, now_ns=SECOND)
    monitor = Monitor(state)
    for rank in range(3):
        state.apply(wire.Loader(rank=rank, seq=9, step=0, epoch=0, sampler="S", distributed=True, length=400), SECOND)
    state.apply(wire.Bye(rank=2, seq=10, reason="exit", text="", mono_ns=1), SECOND)
    for quarter in range(5, 14):
        for rank in range(2):
            waits = {"phase": wire.PHASES.index("sync"), "phase_ns": (quarter - 4) * SECOND // 4}
            state.apply(make_beat(rank, seq=10 + quarter, step=90, **waits), quarter * SECOND // 4)
        monitor.evaluate_now()
    for rank in range(2):
        state.apply(wire.Bye(rank=rank, seq=30, reason="failed", text=CLOSED, mono_ns=1), 4 * SECOND)
    monitor.evaluate_now()
    state.tick(6 * SECOND)
    state.apply(wire.Gone(rank=2, seq=0, exit_code=3, ago_ns=1), 6 * SECOND)
    monitor.evaluate_now()

    reported = [(event.kind, event.alert.finding) for event in monitor.book.drain()]
    bad = [
        (kind, finding.subject, finding.message) for kind, finding in reported if finding.severity is Severity.CRITICAL
    ]
    assert bad == [
        ("opened", "rank 2", "rank 2 exited before the others: ranks 0-1 lost their connections and failed"),
        ("changed", "rank 2", "rank 2 exited with code 3, without an exception (sys.exit)"),
    ]


def test_a_failed_rank_is_reported_with_its_exception():
    finding = only(rank_failed(look(fail(beating({}), 1, "ValueError: no such class 12\n  File train.py"))))

    assert finding.message == "rank 1 raised ValueError: no such class 12 · File train.py"
    assert finding.severity is Severity.CRITICAL
    assert finding.ranks == (1,)
    assert finding.evidence["step"] == 90


def test_a_long_exception_is_cut_in_the_message_and_whole_in_the_evidence():
    finding = only(rank_failed(look(fail(beating({}), 1, "x" * 900))))

    assert len(finding.message) == len("rank 1 raised ") + 300
    assert finding.message.endswith("x…")
    assert finding.evidence["text"] == "x" * 900


def test_every_failed_rank_has_a_finding_and_one_without_a_text_too():
    findings = rank_failed(look(fail(fail(beating({}), 1, "", at_s=100), 3, at_s=100)))

    assert [finding.subject for finding in findings] == ["rank 1", "rank 3"]
    assert findings[0].message == "rank 1 raised an exception"


PEER_ERRORS = [
    CLOSED,
    "RuntimeError: [pair.cc:589] Read error [10.0.0.9]:25266: Connection reset by peer",
    "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    "DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a network error",
    "DistBackendError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
    "DistBackendError: [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
    "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
    "BrokenPipeError: [Errno 32] Broken pipe",
]


@pytest.mark.parametrize("text", PEER_ERRORS, ids=lambda text: text[:40])
@pytest.mark.parametrize("later_s", [0.02, 1, 1800])
def test_ranks_that_fail_because_another_was_lost_are_secondary(text, later_s):
    state = beating({1: 80.0}, now_s=80.1)
    state.apply(wire.Gone(rank=1, seq=0), int(81.5 * SECOND))
    for rank in (0, 2, 3):
        state = fail(state, rank, text, at_s=80 + later_s)
    after = only(rank_failed(look(state)))

    assert only(rank_lost(look(state))).ranks == (1,)
    why = "timed out in a collective" if "imed out" in text or "timeout" in text else "connection lost"
    assert after.message == f"ranks 0, 2-3 failed because rank 1 was lost: {why}"
    assert (after.severity, after.subject, after.ranks) == (Severity.INFO, "after", (0, 2, 3))
    assert after.evidence["text"] == text


@pytest.mark.parametrize("text", ["ValueError: no such class 12", "torch.OutOfMemoryError: CUDA out of memory.", ""])
def test_what_is_no_complaint_of_a_peer_ends_a_rank_by_itself(text):
    """It is the first failure even if the complaints of the others arrived a little earlier."""
    state = beating({})
    for rank, words, at_s in ((0, CLOSED, 100.0), (3, CLOSED, 100.1), (1, text, 100.2)):
        state = fail(state, rank, words, at_s=at_s)
    first, after = rank_failed(look(state))

    assert (first.ranks, first.severity) == ((1,), Severity.CRITICAL)
    assert (after.ranks, after.severity) == ((0, 3), Severity.INFO)
    assert after.message == "ranks 0, 3 failed because rank 1 failed: connection lost"


def test_a_failure_is_not_reported_before_the_rank_that_may_have_caused_it_was_heard():
    state = beating({1: 99.9}, now_s=100)
    for rank in (0, 2, 3):
        state.apply(wire.Bye(rank=rank, seq=5, reason="failed", text=CLOSED, mono_ns=1), state.now_ns)
    assert rank_failed(look(state)) == []

    lives = only(rank_failed(look(outlived(state))))
    assert (lives.subject, lives.severity, lives.ranks) == ("connections", Severity.CRITICAL, (0, 2, 3))
    assert lives.message.endswith("too close together to know which was first")


def test_one_rank_that_complains_of_a_peer_while_all_others_live_is_critical():
    finding = only(rank_failed(look(fail(beating({}), 2, CLOSED))))

    assert (finding.ranks, finding.severity) == ((2,), Severity.CRITICAL)
    assert "another rank" in finding.advice


def test_a_failure_clearly_after_another_is_secondary():
    state = fail(fail(beating({}, now_s=100), 1, "ValueError: bad", at_s=100), 3, "KeyError: 7", at_s=101)
    first, after = rank_failed(look(state))

    assert first.ranks == (1,)
    assert after.message == "rank 3 failed after rank 1 failed"


def test_ranks_that_fail_alike_at_once_are_each_reported():
    state = beating({})
    for rank in range(4):
        state = fail(state, rank, "FileNotFoundError: train.csv", at_s=100 + rank / 20)

    assert [finding.severity for finding in rank_failed(look(state))] == [Severity.CRITICAL] * 4


def test_of_very_many_failed_ranks_the_rest_share_one_finding():
    state = beating({}, world=12)
    for rank in range(12):
        fail(state, rank, at_s=100 + rank / 100)

    *single, rest = rank_failed(look(state))

    assert [found.ranks for found in single] == [(rank,) for rank in range(RankFailedLimits.MAX_SEPARATE)]
    assert (rest.subject, rest.ranks, rest.evidence) == ("more", (8, 9, 10, 11), {"ranks": 4})
    assert rest.message == "ranks 8-11 raised exceptions, too (4 more ranks)"


@pytest.mark.parametrize("reason", ["exit", "closed", "off"])
def test_a_rank_that_ended_in_order_has_not_failed(reason):
    state = beating({})
    state.apply(wire.Bye(rank=1, seq=5, reason=reason, text="", mono_ns=1), state.now_ns)

    assert rank_failed(look(state)) == []


def test_a_keyboard_interrupt_is_one_alert_about_all_ranks():
    state = beating({})
    monitor = Monitor(state)
    words = "KeyboardInterrupt\n/home/me/train.py:88 in fit"
    for rank, text, at_s in ((1, words, 100.0), (0, words, 100.1), (3, CLOSED, 100.3), (2, words, 101.5)):
        state = fail(state, rank, text, at_s=at_s)
        monitor.evaluate_now()
    reported = [event.alert.finding for event in monitor.book.drain() if event.kind == "opened"]
    bad = [finding.subject for finding in reported if finding.severity is Severity.CRITICAL]

    assert bad == ["interrupted"]
    finding = monitor.book.open["rank-failed", "interrupted"].finding
    assert finding.message == "ranks 0-2 were interrupted (Ctrl-C, SIGINT)"
    assert monitor.book.open["rank-failed", "after"].finding.ranks == (3,)
    began = root_cause_text(outcome_of(state, monitor.book.open.values()))
    assert began == "ranks 0-2 were interrupted (Ctrl-C, SIGINT); rank 3 after them"


def test_an_interrupt_that_followed_the_failure_of_another_is_secondary():
    state = fail(beating({}), 1, "ValueError: bad", at_s=100)
    for rank in (0, 2, 3):
        state = fail(state, rank, "KeyboardInterrupt", at_s=101)
    first, after = rank_failed(look(state))

    assert (first.ranks, after.ranks) == ((1,), (0, 2, 3))


def test_a_rank_that_left_with_an_exit_code_has_failed():
    state = beating({})
    state.apply(wire.Bye(rank=1, seq=5, reason="exit", text="", mono_ns=1), state.now_ns)
    assert rank_failed(look(outlived(state))) == []

    finding = only(rank_failed(look(ended_with(state, {1: 3}))))
    assert finding.message == "rank 1 exited with code 3, without an exception (sys.exit)"


def test_an_announced_goodbye_that_never_arrived_counts():
    state = beating(dict.fromkeys(range(4), 99.9), now_s=100)
    note = wire.Note(
        rank=2, seq=5, kind=wire.FAILING, text="ValueError: bad\n/home/me/train.py:9 in fit", step=90, mono_ns=1
    )
    state.apply(note, state.now_ns)
    assert rank_failed(look(outlived(state))) == [], "it may come yet"

    finding = only(rank_failed(look(ended_with(state, {2: -15}))))
    assert finding.message == "rank 2 raised ValueError: bad · /home/me/train.py:9 in fit"


def test_a_rank_that_has_just_fallen_silent_is_named_with_those_that_lost_their_connections():
    """Its node was killed: the others fail at once, and it is not silent for long enough to be lost."""
    state = beating({2: 97.5}, world=3, hosts=("node1", "node2", "node3"))
    for rank in (0, 1):
        bye = wire.Bye(rank=rank, seq=5, reason="failed", text="Connection reset by peer", mono_ns=1)
        state.apply(bye, int(97.7 * SECOND))
    finding = only(rank_failed(look(state)))

    assert finding.message == "rank 2 (node3) stopped sending heartbeats: ranks 0-1 lost their connections and failed"
    assert finding.advice == "Look at rank 2 first, and check whether its host responds."
    assert finding.ranks == (2,)
    assert rank_lost(look(state)) == []

    state.tick(int(103 * SECOND))
    assert only(rank_failed(look(state))).message == (
        "ranks 0-1 failed because rank 2 stopped sending heartbeats: connection lost"
    )
    assert only(rank_lost(look(state))).ranks == (2,)


@pytest.mark.parametrize("ago_ns", [0, 1])
def test_ranks_that_gave_up_on_a_silent_rank_have_one_alert_also_when_it_dies_at_last(ago_ns):
    """A launcher kills it half a minute later, observed or not."""
    monitor = Monitor(failed(one_missing(heard_s={2: NOW_S - 20}), {0: GLOO, 1: GLOO, 3: GLOO}))
    monitor.evaluate_now()
    monitor.state.tick(monitor.state.now_ns + 35 * SECOND)
    monitor.state.apply(wire.Gone(rank=2, seq=0, exit_code=-9, ago_ns=ago_ns), monitor.state.now_ns)
    monitor.evaluate_now()

    opened = [event.alert for event in monitor.book.drain() if event.kind == "opened"]
    assert [alert.key for alert in opened if alert.finding.rule == "rank-failed"] == [("rank-failed", "gave up")]


def test_a_connection_that_is_lost_because_others_gave_up_waiting_is_no_failure_of_the_network():
    state = failed(one_missing(), {0: PEER, 1: GLOO, 3: GLOO})
    state.tick(state.now_ns + SECOND)
    state.apply(make_beat(2, seq=8, phase=DATA, groups=[make_group(41)]), state.now_ns)
    finding = only(rank_failed(look(state)))

    assert finding.severity is Severity.INFO
    assert finding.message == ("ranks 1, 3 timed out in a collective and failed; rank 0 lost its connection to them")


def test_connections_lost_after_a_rank_has_ended_in_order_name_that_rank():
    state = one_missing(world=3)
    state.apply(wire.Bye(rank=2, seq=6, reason="exit", text="", mono_ns=1), state.now_ns)
    failed(state, {0: PEER, 1: PEER})
    finding = only(rank_failed(look(state)))

    assert (finding.severity, finding.ranks) == (Severity.CRITICAL, (2,)), "it is the one to look at"
    assert finding.message == "rank 2 exited before the others: ranks 0-1 lost their connections and failed"
    assert "sys.exit" in finding.advice


def test_ranks_that_timed_out_are_not_sent_to_a_culprit_that_is_unknown():
    state = halted({0: make_group(42, size=2), 1: make_group(42, size=2)})

    assert "names" not in only(rank_failed(look(failed(state, {0: GLOO, 1: GLOO})))).advice


def test_ranks_that_gave_up_waiting_are_no_failure_of_the_network():
    state = one_missing(world=3)
    for rank in (0, 1):
        state.apply(wire.Bye(rank=rank, seq=5, reason="failed", text=GLOO, mono_ns=1), state.now_ns)
    state.tick(state.now_ns + SECOND)
    state.apply(make_beat(2, seq=5, phase=DATA, groups=[make_group(41)]), state.now_ns)
    finding = only(rank_failed(look(state)))

    assert (finding.subject, finding.severity) == ("gave up", Severity.INFO)
    assert finding.message == "ranks 0-1 timed out in a collective and failed"
