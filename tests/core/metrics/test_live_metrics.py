"""Figures across ranks: what is compared, what is left out, and what is not guessed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch import wire
from ddpwatch.core.limits import LivenessLimits
from ddpwatch.core.metrics.live_metrics import measure
from ddpwatch.core.metrics.window import WINDOW_STEPS, gather, ranks_to_compare
from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from tests.builders.fake_rank import MS, make_beat, make_step


def make_state(steps_by_rank, world=None, now_ns=1):
    """A run whose ranks have beaten once and finished these steps."""
    world = len(steps_by_rank) if world is None else world
    state = RunState("ab12cd34", "train", world, [Place(rank, "node-a", 1) for rank in range(world)])
    for rank, steps in steps_by_rank.items():
        state.apply(make_beat(rank, seq=1), now_ns)
        state.apply(wire.Steps(rank=rank, seq=2, steps=steps), now_ns)
        for path in {step.sync_path for step in steps} - {0}:
            points = [wire.SyncPoint("all_reduce", "train.py:88", 5)]
            state.apply(wire.SyncPath(rank=rank, seq=3, step=0, path=path, points=points, count=1), now_ns)
    return state


def steps(*indices, **phases):
    return [make_step(index, **phases) for index in indices]


def newest_window(state):
    ranks = ranks_to_compare(state)
    newest = min((rank.steps.newest for rank in ranks), default=-1)
    return gather(state, ranks, upto=newest, steps=WINDOW_STEPS)


def slow_run(world=4, slow=2):
    late = {rank: {"backward": 26} if rank == slow else {"sync": 12} for rank in range(world)}
    return make_state({rank: steps(*range(60), **late[rank]) for rank in range(world)})


def test_the_slow_rank_waits_least_and_works_most():
    figures = measure(slow_run())

    assert [rank.wait_ns for rank in figures.ranks.values()] == [10 * MS, 10 * MS, 0, 10 * MS]
    assert [rank.self_ns for rank in figures.ranks.values()] == [28 * MS, 28 * MS, 38 * MS, 28 * MS]
    assert {40 * MS} == {rank.step_ns for rank in figures.ranks.values()}


def test_the_share_is_wire_plus_waiting():
    figures = measure(slow_run())

    assert figures.share == pytest.approx((3 * 12 + 2) / 4 / 40)
    assert figures.wire_share == pytest.approx(2 / 40)
    assert figures.wire_share + figures.wait_share == pytest.approx(figures.share)


def test_two_ranks_that_are_late_for_one_sync_point_each_are_waited_for_twice():
    path = {"sync": 11, "sync_path": wire.ALL_POINTS}
    figures = measure(make_state({0: steps(1, 2, **path, point1_ns=MS), 1: steps(1, 2, **path, point1_ns=10 * MS)}))

    assert figures.wire_share == pytest.approx(2 / 39)
    assert [rank.wait_ns for rank in figures.ranks.values()] == [9 * MS, 9 * MS]


def test_a_part_that_is_larger_than_the_whole_is_not_believed():
    state = make_state({0: steps(1, 2, sync=1, presync_ns=2 * MS)})

    assert measure(state) is None
    assert state.ranks[0].bad == 2


def test_throughput_and_effective_batch_add_up_all_ranks():
    figures = measure(slow_run())

    assert figures.effective_batch == 128
    assert figures.samples_per_s == pytest.approx(128 / 0.040)
    assert figures.ranks[0].batch == 32


def test_unknown_samples_stay_unknown():
    figures = measure(make_state({0: steps(1, 2), 1: steps(1, 2, samples=0, batch=0)}))

    assert (figures.effective_batch, figures.samples_per_s) == (None, None)
    assert figures.ranks[1].batch is None


def test_a_world_of_one_waits_for_nobody():
    figures = measure(make_state({0: steps(*range(5))}))

    assert figures.complete
    assert figures.ranks[0].wait_ns == 0
    assert figures.wait_share == 0
    assert figures.wire_share == pytest.approx(figures.share) == pytest.approx(2 / 30)


@pytest.mark.parametrize(
    "steps_by_rank",
    [{}, {0: []}, {0: steps(1, 2), 1: []}, {0: steps(1, 2), 1: steps(3, 4)}, {0: steps(0), 1: steps(0)}],
    ids=["nobody", "no steps", "one without steps", "no common step", "only step 0"],
)
def test_without_a_common_step_nothing_is_claimed(steps_by_rank):
    assert measure(make_state(steps_by_rank, world=2)) is None


def test_only_steps_that_all_ranks_have_count():
    figures = measure(make_state({0: steps(1, 2, 3, 5, 6), 1: steps(2, 3, 4, 6, 7)}))

    assert (figures.first_step, figures.last_step, figures.steps) == (2, 6, 3)


def test_the_window_is_the_last_fifty():
    figures = measure(make_state({rank: steps(*range(200)) for rank in range(2)}))

    assert (figures.first_step, figures.last_step, figures.steps) == (150, 199, WINDOW_STEPS)


@pytest.mark.parametrize("flag", [wire.SKIPPED, wire.PAUSED, wire.EVALUATED])
def test_unusual_steps_are_left_out_while_enough_others_are_near(flag):
    ordinary = make_state({0: steps(*range(1, 40)), 1: steps(*range(1, 30)) + steps(*range(30, 40), flags=flag)})

    assert list(range(1, 30)) == newest_window(ordinary).indices.tolist()


def test_a_run_of_unusual_steps_still_has_figures():
    flagged = make_state({0: steps(*range(1, 6)) + steps(*range(6, 40), flags=wire.EVALUATED)})

    assert list(range(1, 40)) == newest_window(flagged).indices.tolist()


def test_with_a_rank_missing_wire_and_waiting_are_unproven():
    figures = measure(make_state({0: steps(1, 2), 1: steps(1, 2)}, world=3))

    assert not figures.complete
    assert (figures.wire_share, figures.wait_share) == (None, None)
    assert (figures.effective_batch, figures.samples_per_s) == (None, None)
    assert [rank.wait_ns for rank in figures.ranks.values()] == [None, None]
    assert figures.share == pytest.approx(2 / 30)


def test_a_rank_that_fell_silent_in_a_hang_still_counts():
    """No rank trained on without it, so the last figures are those of the whole world."""
    state = slow_run()
    for rank in (0, 1, 3):
        state.apply(make_beat(rank, seq=3), LivenessLimits.NO_HEARTBEAT_NS + 1)

    assert state.condition(state.ranks[2]) == "silent"
    assert measure(state).complete


def test_a_rank_that_left_does_not_hold_the_figures_back():
    state = make_state({0: steps(*range(300)), 1: steps(*range(100))})
    state.apply(wire.Bye(rank=1, seq=3, reason="closed", text="", mono_ns=1), 1)
    figures = measure(state)

    assert figures.last_step == 299
    assert list(figures.ranks) == [0]
    assert not figures.complete


def test_an_ended_run_keeps_its_last_figures():
    state = slow_run()
    for rank in range(4):
        state.apply(wire.Bye(rank=rank, seq=3, reason="exit", text="", mono_ns=1), 1)

    assert measure(state).complete
    assert measure(state).last_step == 59


def test_overlap_is_known_only_with_bucket_timing():
    assert measure(slow_run()).overlap is None

    timed = {"sync": 3, "presync_ns": MS, "busy_ns": 8 * MS}
    figures = measure(make_state({0: steps(1, 2, **timed), 1: steps(1, 2, **timed)}))

    assert figures.overlap == pytest.approx(1 - 2 / 8)


def test_bus_bandwidth_is_that_of_the_rank_that_waits_least():
    assert measure(slow_run()).bus_bytes_s is None

    late, early = ({"busy_ns": busy * MS, "comm_bytes": 80_000_000} for busy in (4, 8))
    figures = measure(make_state({0: steps(1, 2, **early), 1: steps(1, 2, **late)}))

    # 2(n-1)/n x bytes / time: 80 MB in 4 ms.
    assert figures.bus_bytes_s == pytest.approx(20e9)


sync_points = st.tuples(st.integers(0, 3 * 28 * MS), st.integers(0, 3 * 28 * MS))
"""Sync at a collective of the script and after backward."""
sync_tables = st.integers(1, 5).flatmap(
    lambda world: st.lists(st.lists(sync_points, min_size=world, max_size=world), min_size=1, max_size=8)
)


@given(sync_tables)
def test_wire_and_waiting_add_up_to_sync_for_every_rank_and_step(by_step):
    """The nanosecond, not about."""
    world = len(by_step[0])
    state = make_state(
        {
            rank: [
                make_step(index + 1, point1_ns=syncs[rank][0], sync_ns=sum(syncs[rank]), sync_path=wire.ALL_POINTS)
                for index, syncs in enumerate(by_step)
            ]
            for rank in range(world)
        }
    )
    window = newest_window(state)

    assert len(by_step) == len(window)
    assert (window.wire_ns + window.wait_ns == window.column("sync_ns")).all()
    assert (window.wait_ns >= 0).all()
    assert window.wire_ns.tolist() == [sum(map(min, zip(*syncs, strict=True))) for syncs in by_step]
    figures = measure(state)
    assert figures.wire_share + figures.wait_share == pytest.approx(figures.share)
    assert (window.straggler_cost_ns >= 0).all()
    assert (window.straggler_cost_ns.sum(axis=0) <= window.step_ns.min(axis=0)).all(), (
        "nobody can waste more than there was"
    )


@settings(max_examples=50)
@given(st.data())
def test_neither_order_nor_duplicates_change_the_figures(data):
    """Messages of two ranks, some lost, some twice, shuffled, against the same ones once and in order."""
    messages = [make_beat(rank, seq=0) for rank in range(2)]
    for rank in range(2):
        numbers = data.draw(st.lists(st.integers(1, 40), min_size=1, unique=True).map(sorted))
        messages += [
            wire.Steps(
                rank=rank, seq=number, steps=steps(2 * number, 2 * number + 1, sync=rank + number, samples=number)
            )
            for number in numbers
        ]
    doubled = messages + data.draw(st.lists(st.sampled_from(messages)))
    shuffled = data.draw(st.permutations(doubled))

    def figures_of(stream):
        state = RunState("ab12cd34", "train", 2)
        for message in stream:
            state.apply(message, 1)
        return measure(state), [rank.lost for rank in state.ranks.values()]

    assert figures_of(messages) == figures_of(shuffled)


def test_after_a_change_only_what_came_since_counts_if_that_is_enough():
    state = make_state({0: steps(*range(1, 101)), 1: [*steps(*range(1, 81)), *steps(*range(81, 101), backward=60)]})

    assert measure(state).ranks[1].backward_ns == measure(state).ranks[0].backward_ns
    assert measure(state, since=81).ranks[1].backward_ns > 2 * measure(state, since=81).ranks[0].backward_ns
    assert (measure(state, since=81).steps, measure(state, since=99).steps, measure(state, since=2).steps) == (
        20,
        10,
        50,
    )
