"""Ranks that leave the others: their goodbye comes first, the complaints of the others next, their exit code last."""

from __future__ import annotations

import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.diagnosis.early_exit import blame_to_come
from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.core.limits import UnevenBatchLimits
from ddpwatch.core.monitor import Monitor
from ddpwatch.view.outcome import root_cause_text
from tests.builders.ended_run import CLOSED, beating, fail, outlived
from tests.builders.fake_rank import make_beat
from tests.builders.synthetic_run import SECOND, make_run, only, train


def left_and_lost(world=2, code_s=1.5, code=3, victims=1, others_s=0.0):
    """As it comes in: the last rank says goodbye, the first ones lose their connections half a second later, and then
    its process ends with a code, or is never seen to. Judged ten times a second, for eight seconds.
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


def left(world):
    """Rank 1 has said goodbye, and how its process ends is not known yet. Nobody tells how much data there is."""
    state = make_run({rank: train(0, 90) for rank in range(world)}, world=world, now_ns=SECOND)
    for rank in range(world):
        state.apply(wire.Held(rank=rank, seq=0, by="nothing"), SECOND)
    state.apply(wire.Bye(rank=1, seq=5, reason="exit", text="", mono_ns=1), SECOND)
    return state


def criticals(monitor):
    reported = [(event.kind, event.alert.finding) for event in monitor.book.drain()]
    return [(kind, finding.rule, finding.ranks) for kind, finding in reported if finding.severity is Severity.CRITICAL]


@pytest.mark.parametrize(("world", "victims", "others_s"), [(2, 1, 0.0), (4, 3, 0.0), (4, 1, 0.7), (4, 1, 3.0)])
@pytest.mark.parametrize("code_s", [0.3, 0.6, 1.5, 5])
def test_who_leaves_with_an_exit_code_is_blamed_and_never_who_lost_the_connection_to_it(
    world, victims, others_s, code_s
):
    monitor = left_and_lost(world, code_s, 3, victims, others_s)

    assert criticals(monitor) == [("opened", "rank-failed", (world - 1,))]
    after = monitor.book.open["rank-failed", "after"].finding
    assert after.ranks == tuple(range(world - 1))
    began = root_cause_text(outcome_of(monitor.state, monitor.book.open.values()))
    assert began.startswith(f"rank {world - 1} ended with exit code 3; rank")


@pytest.mark.parametrize(("code", "how"), [(0, " with exit code 0"), (None, "")])
def test_who_leaves_in_order_in_the_middle_of_its_data_is_named_and_not_said_to_have_failed(code, how):
    monitor = left_and_lost(code=code)

    assert criticals(monitor) == [("opened", "rank-failed", (1,))]
    finding = only([alert.finding for alert in monitor.book.open.values() if alert.finding.rule == "rank-failed"])
    assert finding.message == f"rank 0 lost its connection and failed after rank 1 had ended{how}"
    assert (
        root_cause_text(outcome_of(monitor.state, monitor.book.open.values()))
        == "rank 1 ended before the others; rank 0 after it"
    )


def test_who_complains_later_has_lost_the_one_that_left_and_not_the_first_that_complained():
    monitor = left_and_lost(4, 1.5, 0, victims=1, others_s=0.7)

    assert criticals(monitor) == [("opened", "rank-failed", (3,))]
    finding = only([alert.finding for alert in monitor.book.open.values() if alert.finding.rule == "rank-failed"])
    assert finding.message == "ranks 0-2 lost their connections and failed after rank 3 had ended with exit code 0"
    began = root_cause_text(outcome_of(monitor.state, monitor.book.open.values()))
    assert began == "rank 3 ended before the others; ranks 0-2 after it"


def test_the_end_of_a_run_waits_for_how_one_ended_that_another_complains_of():
    monitor = left_and_lost(code=None)
    state = monitor.state
    assert not blame_to_come(state), "it was waited for long enough"

    state.now_ns = (state.ranks[1].bye_ns or 0) + UnevenBatchLimits.EXIT_CODE_NS - 1
    assert blame_to_come(state)
    state.apply(wire.Gone(rank=1, seq=0), state.now_ns)
    assert not blame_to_come(state)


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


@pytest.mark.parametrize(("code", "rule"), [(0, "uneven-batch"), (3, "rank-failed")])
def test_while_a_process_takes_long_to_end_it_is_not_told_why_it_has_left(code, rule):
    """Of data without a length. On a busy machine torch is taken down for seconds, and the others wait meanwhile."""
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
def test_of_data_without_a_length_whose_end_costs_some_their_connections_while_others_wait_one_alert_is_opened(code):
    """Ranks 0 and 2 lose their connections at once, rank 3 waits, and rank 1 has ended."""
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
