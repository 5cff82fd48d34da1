"""Windows: their sums, which steps they hold, and which ranks are excluded by name."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch import wire
from ddpwatch.core.limits import WindowLimits
from ddpwatch.core.metrics.live_metrics import measure
from ddpwatch.core.metrics.window import (
    BY_STEP,
    WINDOW_STEPS,
    add_straggler_cost,
    aligned_window,
    gather,
    ranks_to_compare,
    scaled_steps,
)
from ddpwatch.core.state.step_store import CAPACITY_STEPS
from tests.builders.fake_rank import MS, make_step
from tests.builders.synthetic_run import look, make_run, train


def window_of(steps_by_rank, world=None, upto=None, steps=WINDOW_STEPS, first=1):
    state = make_run(steps_by_rank, world=world)
    ranks = ranks_to_compare(state)
    newest = min((rank.steps.newest for rank in ranks), default=-1)
    return gather(state, ranks, upto=newest if upto is None else upto, steps=steps, first=first)


durations = st.one_of(st.integers(0, 50), st.integers(0, 100 * MS))


@st.composite
def some_steps(draw, count):
    made = []
    for index in range(1, count + 1):
        sync_ns = draw(durations)
        phases = {f"{phase}_ns": draw(durations) for phase in wire.PHASES if phase != "sync"}
        parts = sorted(draw(st.lists(st.integers(0, sync_ns), min_size=3, max_size=3)))
        points = {"presync_ns": parts[0], "point1_ns": parts[1] - parts[0], "more_points_ns": parts[2] - parts[1]}
        paths = st.sampled_from([wire.ALL_POINTS, wire.ALL_POINTS << 8, (wire.ALL_POINTS << 8) | 1])
        made.append(make_step(index, sync_ns=sync_ns, sync_path=draw(paths), **points, **phases))
    return made


@st.composite
def any_ranks(draw):
    world, count = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    return {rank: draw(some_steps(count)) for rank in range(world)}


@settings(max_examples=50)
@given(any_ranks())
def test_wire_and_waiting_are_all_of_sync_and_neither_is_negative(steps_by_rank):
    window = window_of(steps_by_rank)

    assert np.abs(window.wire_ns + window.wait_ns.mean(axis=0) - window.column("sync_ns").mean(axis=0)).max() <= 0.5
    assert (window.wire_ns >= 0).all()
    assert (window.wait_ns >= 0).all()
    assert (window.wait_ns <= window.column("sync_ns")).all()
    assert (window.self_ns + window.column("sync_ns") == window.step_ns).all()


@settings(max_examples=50)
@given(any_ranks(), st.integers(1, 8))
def test_the_latest_steps_have_the_figures_that_they_had_among_the_others(steps_by_rank, count):
    whole, untouched = window_of(steps_by_rank), window_of(steps_by_rank)
    for name in BY_STEP:
        getattr(whole, name)

    latest, worked_out_anew = whole.last(count), untouched.last(count)

    assert len(latest) == len(latest.step_ns[0]) == min(count, len(whole))
    for name in BY_STEP:
        np.testing.assert_array_equal(getattr(latest, name), getattr(worked_out_anew, name))


@settings(max_examples=50)
@given(any_ranks())
def test_all_ranks_together_cost_the_job_no_more_than_it_took(steps_by_rank):
    window = window_of(steps_by_rank)

    assert (window.straggler_cost_ns >= 0).all()
    assert (window.straggler_cost_ns.sum(axis=0) <= window.step_ns.min(axis=0)).all()


def test_ranks_that_passed_other_operations_are_not_compared_at_them():
    phases = {"sync": 12, "point1_ns": 10 * MS}
    same, other = wire.ALL_POINTS | 1 << 8, wire.ALL_POINTS | 1 << 9
    late = {0: dict(phases, sync_path=same), 1: {"sync": 2, "sync_path": same}}
    assert window_of({rank: train(1, 20, **each) for rank, each in late.items()}).straggler_cost_ns[1, 0] == 10 * MS

    late[1]["sync_path"] = other
    unmatched = window_of({rank: train(1, 20, **each) for rank, each in late.items()})
    assert not unmatched.straggler_cost_ns.any()
    assert unmatched.wait_ns.max() == 0
    assert (unmatched.wire_ns == 7 * MS).all()


def test_a_rank_that_may_leave_early_is_not_the_last_to_arrive():
    """The root of a broadcast or a gather."""
    path = wire.ALL_POINTS & ~1 | 1 << 8
    late = {0: {"sync": 2}, 1: {"sync": 12, "point1_ns": 10 * MS}}
    window = window_of({rank: train(1, 20, sync_path=path, **each) for rank, each in late.items()})

    assert not window.straggler_cost_ns.any()


def test_before_forward_ranks_wait_as_long_as_the_root_comes_later():
    """Rank 0 broadcasts the buffers, and leaves before the others have them."""
    ranks = {rank: {"sync": 5, "presync_ns": 3 * MS * (rank > 0)} for rank in range(3)}
    healthy = window_of({rank: train(1, 20, **each) for rank, each in ranks.items()})
    assert healthy.wait_ns.max() == 3 * MS  # after backward, where rank 0 is the one that waits
    assert not healthy.presync_wait_ns.any()

    ranks[0] = {"sync": 5, "other": 8}
    for rank in (1, 2):
        ranks[rank] = {"sync": 12, "presync_ns": 9 * MS}
    late = window_of({rank: train(1, 20, **each) for rank, each in ranks.items()})
    assert late.presync_wait_ns[:, 0].tolist() == [0, 7 * MS, 7 * MS]
    assert late.straggler_cost_ns[0, 0] >= 7 * MS


def test_at_each_sync_point_only_the_last_to_arrive_has_a_cost():
    late = {0: {"sync": 12}, 1: {"sync": 2, "backward": 26}, 2: {"sync": 9, "backward": 19}}
    window = window_of({rank: train(1, 20, **phases) for rank, phases in late.items()})

    # Were rank 1 as fast as the next-slowest, which waits 9 ms, the job would save 7.
    assert window.straggler_cost_ns[:, 0].tolist() == [0, 7 * MS, 0]


@given(st.integers(2, 6).flatmap(lambda ranks: st.lists(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))))
def test_straggler_cost_is_the_gap_between_the_two_shortest_waits(by_step):
    sync_ns = np.array(by_step, dtype=np.int64).reshape(len(by_step), -1).T if by_step else np.zeros((2, 0), np.int64)
    cost_ns = np.ones_like(sync_ns)
    before = sync_ns.copy()
    add_straggler_cost(cost_ns, sync_ns)

    for step, waits_ns in enumerate(by_step):
        least, follower = sorted(waits_ns)[:2]
        expected = [1] * len(waits_ns)
        expected[waits_ns.index(least)] += follower - least
        assert cost_ns[:, step].tolist() == expected
    assert (sync_ns == before).all()


def test_a_single_rank_has_no_straggler_cost():
    window = window_of({0: train(1, 20)})

    assert not window.straggler_cost_ns.any()
    assert not window.wait_ns.any()


@pytest.mark.parametrize("flag", [wire.SKIPPED, wire.PAUSED, wire.EVALUATED, wire.HOST_TIMED])
def test_a_step_that_was_unusual_on_one_rank_is_left_out_for_all(flag):
    def steps(rank):
        return [make_step(index, flags=flag if rank == 1 and index % 4 == 0 else 0) for index in range(1, 41)]

    window = window_of({rank: steps(rank) for rank in range(3)})

    assert window.indices.tolist() == [index for index in range(1, 41) if index % 4]


def test_unusual_steps_are_better_than_too_few():
    def steps(usual):
        return [make_step(index, flags=0 if index <= usual else wire.PAUSED) for index in range(1, 41)]

    enough = WindowLimits.MIN_STEPS
    assert len(window_of({0: steps(enough), 1: steps(enough)})) == enough
    assert len(window_of({0: steps(enough - 1), 1: steps(enough)})) == 40


def test_steps_that_some_ranks_timed_on_the_host_are_never_compared_even_if_there_are_no_others():
    def steps(host_timed):
        return [make_step(index, flags=wire.HOST_TIMED if index in host_timed else 0) for index in range(1, 41)]

    assert len(window_of({0: steps(()), 1: steps(range(41)), 2: steps(())})) == 0
    assert len(window_of({0: steps(range(41)), 1: steps(range(41))})) == 40
    odd, all_but_two = range(1, 41, 2), range(3, 41)
    assert window_of({0: steps(odd), 1: steps(range(41))}).indices.tolist() == list(odd)
    assert window_of({0: steps(()), 1: steps(all_but_two)}).indices.tolist() == [1, 2]


def test_ranks_of_a_step_with_different_clocks_have_no_waiting_and_no_straggler():
    """Exports hold such steps."""
    steps = {rank: train(1, 6, sync=20 - 15 * rank, presync_ns=2 * MS) for rank in range(2)}
    steps[1] = [msgspec.structs.replace(step, flags=wire.HOST_TIMED * (step.index == 3)) for step in steps[1]]
    state = make_run(steps)
    window = aligned_window(state, ranks_to_compare(state), np.arange(1, 6))

    waits = [1, 2, 4, 5]
    assert window.indices[window.wait_ns.any(axis=0)].tolist() == waits
    assert window.indices[window.straggler_cost_ns.any(axis=0)].tolist() == waits
    assert window.wire_ns[2] == window.job_sync_ns[2]


def test_a_pause_does_not_empty_the_window():
    steps = [make_step(index, flags=wire.PAUSED if 60 <= index < 100 else 0) for index in range(100)]

    assert window_of({0: steps, 1: steps}).indices.tolist() == list(range(10, 60))


def test_only_steps_that_all_ranks_have_are_in_the_window():
    gaps = [step for step in train(1, 40) if step.index % 10]
    window = window_of({0: train(1, 40), 1: gaps, 2: train(1, 35)})

    assert window.indices.tolist() == [index for index in range(1, 36) if index % 10]


@pytest.mark.parametrize(("first", "upto"), [(10, 30), (0, 30), (25, 39), (38, 39)])
def test_a_window_keeps_its_bounds_and_never_holds_step_0(first, upto):
    window = window_of({rank: train(0, 40) for rank in range(2)}, first=first, upto=upto)

    assert window.indices.tolist() == list(range(max(first, 1), upto + 1))


def test_the_last_steps_of_a_window_are_a_window():
    steps_by_rank = {0: train(1, 40), 1: train(1, 40, forward=11), 2: train(1, 40, forward=9000)}
    window = window_of(steps_by_rank)
    last = window.last(7)

    assert last.indices.tolist() == list(range(34, 41))
    assert (last.ranks, last.hosts, last.world_size, last.implausible) == (
        window.ranks, window.hosts, window.world_size, window.implausible,
    )  # fmt: skip
    assert (last.step_ns == window.step_ns[:, -7:]).all()


def healthy_but(rank, steps, world=4):
    return {number: steps if number == rank else train(1, 60, sync=2 + number) for number in range(world)}


@pytest.mark.parametrize("forward", [40 * WindowLimits.IMPLAUSIBLE_FACTOR, 10**9])
@pytest.mark.parametrize("liar", [0, 3])
def test_an_implausible_rank_is_named_and_the_figures_of_others_do_not_change(liar, forward):
    window = window_of(healthy_but(liar, train(1, 60, forward=int(forward))))
    honest = [rank for rank in range(4) if rank != liar]
    without = window_of({rank: steps for rank, steps in healthy_but(liar, []).items() if rank != liar}, world=4)

    assert window.implausible == (liar,)
    assert list(window.ranks) == honest
    assert len(window.hosts) == 3
    assert not window.complete
    assert (window.indices == without.indices).all()
    assert (window.table == without.table).all()


def test_a_rank_that_claims_to_take_no_time_is_implausible():
    nothing = dict.fromkeys(wire.PHASES, 0)

    assert window_of(healthy_but(2, train(1, 60, **nothing))).implausible == (2,)


def test_of_two_ranks_neither_is_implausible():
    window = window_of({0: train(1, 60), 1: train(1, 60, forward=10**6)})

    assert (window.ranks, window.implausible) == ((0, 1), ())


def test_a_straggler_is_slow_but_plausible():
    late = {0: {"sync": 102}, 1: {"backward": 116}, 2: {"sync": 102}}

    assert window_of({rank: train(1, 60, **phases) for rank, phases in late.items()}).implausible == ()


@pytest.mark.parametrize("ahead", [CAPACITY_STEPS, 10**6])
def test_a_rank_far_ahead_is_left_out_and_the_figures_of_others_do_not_change(ahead):
    window = window_of(healthy_but(3, train(60 + ahead, 60)))
    without = window_of({rank: steps for rank, steps in healthy_but(3, []).items() if rank != 3}, world=4)

    assert window.ranks == (0, 1, 2)
    assert (window.table == without.table).all()


@pytest.mark.parametrize("done", [0, 5], ids=["not one step", "few steps"])
def test_a_rank_far_behind_is_left_out_and_the_figures_of_others_do_not_change(done):
    steps_by_rank = {rank: train(CAPACITY_STEPS + 100, 60) for rank in range(3)}
    window = window_of({**steps_by_rank, 3: train(1, done)})

    assert window.ranks == (0, 1, 2)
    assert len(window) == WINDOW_STEPS


def test_a_window_without_ranks_or_steps_is_empty_and_has_no_figures():
    nobody, nothing = make_run({}, world=4), make_run({rank: [] for rank in range(4)})

    assert [len(look(state).window) for state in (nobody, nothing)] == [0, 0]
    assert [measure(state) for state in (nobody, nothing)] == [None, None]
    assert look(nothing).window.straggler_cost_ns.shape == (4, 0)


def test_short_steps_scale_the_window_up_to_a_bound():
    assert scaled_steps(100, 5.0, 100 * MS) == 100
    assert scaled_steps(100, 5.0, 25 * MS) == 200
    assert scaled_steps(100, 5.0, 1.0) == CAPACITY_STEPS // 2
    assert scaled_steps(100, 5.0, 0.0) == 100


def test_the_largest_valid_numbers_do_not_overflow():
    most = 2**55
    window = window_of(
        {rank: [make_step(index, forward_ns=most - 10**9) for index in range(1, 300)] for rank in (0, 1)}
    )

    assert (window.step_ns > 0).all()
    assert np.isfinite(measure(make_run({0: [make_step(1, forward_ns=most - 10**9)]})).step_ns)
