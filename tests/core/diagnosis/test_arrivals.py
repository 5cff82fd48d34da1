"""Missing and waiting ranks of a collective: by group, by sequence number, and by what the ranks report."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch import wire
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.detectors.desync import desync
from ddpwatch.core.detectors.stall import stall
from ddpwatch.core.diagnosis.arrivals import minority_of, stuck, sync_points
from ddpwatch.core.limits import DEFAULTS, StallLimits
from tests.builders.fake_rank import MS, make_beat, make_group
from tests.builders.hung_run import NOW_S, SYNC, crossed, halted, one_missing
from tests.builders.synthetic_run import SECOND, look, make_run, train

GAVE_UP = "Timed out waiting 20000ms for recv operation to complete"


def found(state, limits=DEFAULTS):
    """By name of a group that is stuck, the ranks that are missing in it."""
    return {
        sync_point.name: [each.rank.rank for each in sync_point.missing]
        for sync_point in stuck(sync_points(state), limits)
    }


def waiting(sync_point):
    return [member.rank.rank for member in sync_point.waiting]


# missing ranks


def test_the_rank_that_joined_the_fewest_is_missing_and_the_longest_wait_comes_first():
    state = halted({0: make_group(42, 3), 1: make_group(42, 5), 2: make_group(41), 3: make_group(42, 4)})
    (sync_point,) = stuck(sync_points(state), DEFAULTS)

    assert found(state) == {"0": [2]}
    assert waiting(sync_point) == [1, 3, 0]
    assert (sync_point.front, sync_point.default, sync_point.all_present) == (42, True, True)


def test_several_may_be_missing_at_different_places():
    assert found(halted({0: make_group(42, 9), 1: make_group(40), 2: make_group(41)})) == {"0": [1, 2]}


def test_of_ranks_that_have_joined_ahead_one_that_waits_itself_is_not_missing():
    ahead = {0: make_group(44, 9, completed=41), 1: make_group(43, 8, completed=41), 2: make_group(41)}
    (sync_point,) = stuck(sync_points(halted(ahead)), DEFAULTS)

    assert found(halted(ahead)) == {"0": [2]}
    assert waiting(sync_point) == [0, 1]


def test_ranks_that_ended_or_never_sent_a_heartbeat_are_no_members():
    state = halted({0: make_group(42, 9), 1: make_group(42, 9), 2: None})
    (sync_point,) = sync_points(state)

    assert len(sync_point.members) == 2
    assert not sync_point.all_present
    assert not sync_point.missing


def test_without_a_waiting_rank_there_is_no_sync_point():
    """Heartbeats are of different moments: sequence numbers alone prove nothing."""
    assert sync_points(halted({0: make_group(42), 1: make_group(1000)})) == []


# several groups


def test_each_group_is_counted_by_itself_and_the_default_group_comes_first():
    side = {rank: make_group(7, 9 if rank else 0, name="side") for rank in range(3)}
    side[0] = make_group(6, name="side")
    (sync_point,) = stuck(sync_points(halted({rank: [make_group(900), side[rank]] for rank in range(3)})), DEFAULTS)

    assert (sync_point.name, sync_point.default) == ("side", False)
    assert [each.rank.rank for each in sync_point.missing] == [0]


def test_a_group_that_waits_for_ranks_which_wait_in_another_is_no_root_cause():
    state = halted(
        {
            0: [make_group(42, 9, name="left", size=2)],
            1: [make_group(41, name="left", size=2), make_group(7, 9, name="right", size=2)],
            2: [make_group(6, name="right", size=2)],
        }
    )

    assert len(sync_points(state)) == 2
    assert found(state) == {"right": [2]}


def test_missing_ranks_that_wait_in_another_group_are_excused():
    """Rank 2 has joined neither the side group, where rank 1 waits for it, nor the default group."""
    state = halted(
        {
            0: [make_group(42, 9)],
            1: [make_group(41), make_group(7, 9, name="side", size=2)],
            2: [make_group(41), make_group(6, name="side", size=2)],
            3: [make_group(42, 9)],
        }
    )

    assert found(state) == {"0": [2], "side": [2]}


def test_of_groups_that_wait_for_each_other_the_minority_is_named():
    side = {rank: make_group(7, 9, name="side") if rank == 3 else make_group(6, name="side") for rank in range(4)}
    own = {rank: make_group(41) if rank == 3 else make_group(42, 9) for rank in range(4)}

    state = halted({rank: [own[rank], side[rank]] for rank in range(4)})
    assert found(state) == {"0": [3], "side": [0, 1, 2]}
    assert [each.rank.rank for each in minority_of(stuck(sync_points(state), DEFAULTS))] == [3]


def test_groups_of_equal_size_that_wait_for_each_other_are_all_crossed():
    held = stuck(sync_points(crossed()), DEFAULTS)

    assert [(sync_point.name, sync_point.crossed) for sync_point in held] == [("0", True), ("side", True)]


def test_two_groups_that_are_stuck_independently_are_both_root_causes():
    ranks = {
        0: [make_group(42, 9), make_group(3, name="a")],
        1: [make_group(41), make_group(3, name="a")],
        2: [make_group(42), make_group(8, 9, name="b")],
        3: [make_group(42), make_group(7, name="b")],
    }

    assert found(halted(ranks)) == {"0": [1], "b": [3]}


# ranks that may wait without having reported it


def crossing(*own_s, wait_s=1.1, **options):
    """The last rank waits in a side group for `wait_s`, the others in the default group for `own_s`; 0 = they have not
    reported that they joined.
    """
    sides = [(42 if wait_s else 41, wait_s, 6, 0) for wait_s in own_s]
    groups = [
        [make_group(own, own_wait_s, size=3), make_group(side, side_wait_s, name="side", size=3)]
        for own, own_wait_s, side, side_wait_s in [*sides, (41, 0, 7, wait_s)]
    ]
    return halted(dict(enumerate(groups)), **options)


@pytest.mark.parametrize("own_s", [(0.001, 1.0), (0.3, 1.0), (0.3, 0.2)])
def test_a_group_is_withheld_while_a_missing_rank_has_just_joined_another(own_s):
    """It may have been there for a little longer than it reports, as the rank that waits for it has."""
    assert found(crossing(*own_s)) == {}
    assert [each.rank.rank for each in minority_of(stuck(sync_points(crossing(0.8, 1.0)), DEFAULTS))] == [2]


def test_an_operation_of_another_group_that_is_seen_for_the_first_time_counts_as_well():
    """Its age is 0 at first."""
    state = crossing(1.0, 1.0)
    own, side = state.ranks[0].beat.groups
    beat = make_beat(0, seq=5, step=90, groups=[msgspec.structs.replace(own, age_ns=0), side])
    state.apply(beat, state.now_ns)

    assert found(state) == {}


@pytest.mark.parametrize("wait_s", [2.1, 9])
def test_a_missing_rank_that_joined_another_group_long_after_the_wait_began_is_named(wait_s):
    """It goes on training there, or came late to where the others wait for each other."""
    assert found(crossing(0.3, 0.3, wait_s=wait_s)) == {"side": [0, 1]}


def test_a_missing_rank_that_reports_no_wait_is_named_at_once():
    assert found(crossing(0, 1.0)) == {"side": [0]}
    assert found(one_missing(1.1)) == {"0": [2]}


@pytest.mark.parametrize(("ago_s", "reported"), [(0.4, True), (0.6, False), (1.9, False), (2.1, True)])
def test_a_missing_rank_with_a_late_heartbeat_is_withheld_until_it_comes_or_the_rank_is_silent(ago_s, reported):
    """It may have joined the other group since; its next heartbeat decides."""
    state = crossing(0, 1.0, wait_s=1.9, heard_s={0: NOW_S - ago_s})

    assert bool(found(state)) == reported


def test_its_next_heartbeat_decides_where_it_waits():
    state = crossing(0, 1.0, heard_s={0: NOW_S - 0.9})
    assert found(state) == {}
    state.apply(make_beat(0, seq=5, step=90, groups=crossing(1.2, 1.0).ranks[0].beat.groups), state.now_ns)

    assert [each.rank.rank for each in minority_of(stuck(sync_points(state), DEFAULTS))] == [2]


def test_the_heartbeat_of_the_rank_out_of_line_may_be_late_too():
    """Waiting in the side group and being in no group are different episodes."""
    side = make_group(6, name="side", size=3)
    own = {rank: [make_group(42, 1.2, size=3), side] for rank in range(2)}

    assert found(halted(own | {2: [make_group(41, size=3), side]}, heard_s={2: NOW_S - 0.9})) == {}


def test_of_several_missing_ranks_those_with_a_late_heartbeat_may_have_joined_since():
    groups = {0: make_group(42, 1.1, size=3), 1: make_group(41, size=3), 2: make_group(41, size=3)}

    assert found(halted(groups)) == {"0": [1, 2]}
    assert found(halted(groups, heard_s={1: NOW_S - 0.9})) == {}


def test_the_only_missing_rank_of_the_only_group_can_be_nowhere_else():
    assert found(one_missing(1.1, heard_s={2: NOW_S - 0.9})) == {"0": [2]}


def test_no_heartbeat_is_awaited_from_a_stopped_process():
    state = crossing(0, 1.0, heard_s={0: NOW_S - 0.9})
    state.apply(wire.Held(rank=0, seq=0, by="nothing"), state.now_ns)
    assert found(state) == {}
    state.apply(wire.Held(rank=0, seq=0, by="signal"), state.now_ns)

    assert found(state) == {"side": [0]}


def test_a_rank_that_reported_no_wait_late_in_a_long_wait_is_named():
    assert found(crossing(0, 1.0, wait_s=9, heard_s={0: NOW_S - 0.9})) == {"side": [0]}


# what is normal


def test_a_rank_that_has_announced_a_pause_may_be_missing():
    assert found(one_missing(r2={"pause": "checkpoint"})) == {}
    assert found(one_missing(r1={"pause": "checkpoint"})) == {"0": [2]}


def test_of_two_missing_ranks_one_that_has_announced_nothing_is_enough():
    state = halted({0: make_group(42, 9), 1: make_group(41), 2: make_group(41)}, r1={"pause": "checkpoint"})

    assert found(state) == {"0": [1, 2]}


def test_where_all_that_wait_have_announced_a_pause_the_wait_is_expected():
    paused = {f"r{rank}": {"pause": "evaluation of rank 2"} for rank in (0, 1, 3)}

    assert found(one_missing(**paused)) == {}


@pytest.mark.parametrize(("wait_s", "reported"), [(0.9, False), (1.0, False), (1.1, True)])
def test_a_wait_of_a_second_is_normal(wait_s, reported):
    assert bool(found(one_missing(wait_s))) == reported


@pytest.mark.parametrize(("wait_s", "reported"), [(1.9, False), (2.1, True)])
def test_a_wait_of_five_times_the_baseline_is_normal(wait_s, reported):
    assert bool(found(one_missing(wait_s, sync=400))) == reported


def test_the_baseline_is_the_99th_percentile_without_the_first_steps():
    first = [*train(0, 10, sync=9000), *train(10, 300)]
    first[150] = msgspec.structs.replace(first[150], sync_ns=9000 * MS)
    state = make_run({0: first, 1: first}, now_ns=SECOND)
    for rank, group in enumerate((make_group(42, 3, size=2), make_group(41, size=2))):
        state.apply(make_beat(rank, seq=4, step=310, groups=[group]), SECOND)

    assert found(state) == {"0": [1]}


@pytest.mark.parametrize(
    ("wait_s", "timeout_s", "reported"),
    [(119, 0, False), (121, 0, True), (119, 1800, False), (9, 20, False), (11, 20, True)],
)
def test_in_the_first_steps_there_is_patience_until_half_of_the_timeout(wait_s, timeout_s, reported):
    assert bool(found(one_missing_at_the_start(wait_s, timeout_s))) == reported


def one_missing_at_the_start(wait_s, timeout_s):
    arrived = make_group(1, wait_s, timeout_ns=timeout_s * SECOND)
    return halted({0: arrived, 1: arrived, 2: make_group(0, completed=None)}, steps=0)


def test_the_thresholds_can_be_configured():
    limits = msgspec.structs.replace(DEFAULTS, stall=StallLimits(least_s=20.0))

    assert found(one_missing(12), limits) == {}
    assert found(one_missing(21), limits)


# where the waits come from


def test_without_recorded_operations_the_phase_stands_in():
    unrecorded = {rank: make_group(41 if rank == 2 else 42, completed=None) for rank in range(4)}
    in_sync = {f"r{rank}": {"phase": SYNC, "phase_ns": 12 * SECOND} for rank in (0, 1, 3)}
    (sync_point,) = stuck(sync_points(halted(unrecorded, **in_sync)), DEFAULTS)

    assert [each.rank.rank for each in sync_point.missing] == [2]
    assert sync_point.waiting[0].age_ns == 12 * SECOND
    assert sync_point.timeout_in_ns is None
    assert sync_points(halted(unrecorded)) == [], "nobody is in sync"


def test_the_phase_stands_in_for_the_default_group_only():
    unrecorded = [make_group(42, completed=None), make_group(3, completed=None, name="side")]
    state = halted({0: unrecorded, 1: unrecorded}, r0={"phase": SYNC, "phase_ns": 12 * SECOND})

    assert [sync_point.name for sync_point in sync_points(state)] == ["0"]


def test_the_deadline_is_that_of_the_first_to_give_up():
    arrived = {0: make_group(42, 5, timeout_ns=60 * SECOND), 1: make_group(42, 9, timeout_ns=60 * SECOND)}
    arrived |= {2: make_group(41), 3: make_group(42, 11)}
    (sync_point,) = sync_points(halted(arrived))

    assert sync_point.timeout_in_ns == 51 * SECOND


def test_between_heartbeats_the_wait_grows_by_the_viewers_clock():
    state = halted({0: make_group(42, 5, timeout_ns=60 * SECOND), 1: make_group(41)})
    state.tick(state.now_ns + 2 * SECOND)
    (sync_point,) = sync_points(state)

    assert (sync_point.waiting[0].age_ns, sync_point.timeout_in_ns) == (7 * SECOND, 53 * SECOND)


def test_a_deadline_that_has_passed_is_negative():
    state = halted({0: make_group(42, 70, timeout_ns=60 * SECOND), 1: make_group(41)})

    assert sync_points(state)[0].timeout_in_ns == -10 * SECOND


def test_a_viewer_that_was_stopped_does_not_take_its_own_pause_for_a_wait():
    """At the last heartbeat every rank had an operation in flight, as in any training."""
    state = halted({0: make_group(42, 0.01), 1: make_group(42, 0.01), 2: make_group(41)})
    state.tick(state.now_ns + 600 * SECOND)

    assert found(state) == {}


@pytest.mark.parametrize("ranks", [[], [5], [0, 1, 2, 3, 8], range(0, 400, 2)], ids=str)
def test_members_are_listed_briefly_or_not_at_all(ranks):
    text = wire.ranges(ranks)

    assert len(text) <= 200
    assert text == {0: "", 1: "5", 5: "0-3,8"}.get(len(ranks), "")


# arbitrary reports

counts = st.integers(0, 3)
ages_ns = st.sampled_from([0, 1, SECOND // 2, 3 * SECOND, 30 * SECOND, 2**62])
wild_groups = st.builds(
    wire.Group,
    name=st.sampled_from(["0", "a", ""]),
    size=counts,
    enqueued=counts,
    completed=st.none() | counts,
    op=st.sampled_from(["", "all_reduce", "barrier"]),
    bytes=st.sampled_from([0, 2**62]),
    shape=st.sampled_from(["", "[8] Float"]),
    age_ns=ages_ns,
    timeout_ns=ages_ns,
    error=st.sampled_from(["", "TIMEOUT"]),
)
wild_beats = st.tuples(
    st.lists(wild_groups, max_size=3),
    st.integers(0, 5),
    ages_ns,
    st.sampled_from(["", "checkpoint"]),
    st.sampled_from(["", "", "exit", "failed"]),
)


@settings(max_examples=100)
@given(st.lists(wild_beats, min_size=1, max_size=4), st.booleans(), st.integers(0, 20))
def test_no_rule_raises_and_findings_can_be_shown_whatever_ranks_report_of_their_groups(beats, trained, later_s):
    state = halted({rank: groups for rank, (groups, *_) in enumerate(beats)}, steps=90 if trained else 0)
    for rank, (groups, phase, phase_ns, pause, reason) in enumerate(beats):
        fields = {"phase": phase, "phase_ns": phase_ns, "pause": pause, "groups": groups}
        state.apply(make_beat(rank, seq=5, step=90, **fields), state.now_ns)
        if reason:
            state.apply(wire.Bye(rank=rank, seq=6, reason=reason, text=GAVE_UP, mono_ns=9), state.now_ns)
    state.tick(state.now_ns + later_s * SECOND)
    for detector in DETECTORS:
        findings = detector.find(look(state))
        assert len({finding.subject for finding in findings}) == len(findings)
        for finding in findings:
            assert finding.message.isprintable()
            assert finding.evidence
            assert set(finding.ranks) <= set(state.ranks)


# the short waits of every step


def test_short_waits_make_no_sync_point():
    state = halted({0: make_group(42, 0.05), 1: make_group(41)})

    assert sync_points(state, SECOND // 10) == []
    assert [waiting(sync_point) for sync_point in sync_points(state)] == [[0]]
    assert [waiting(sync_point) for sync_point in sync_points(state, SECOND // 20)] == [[0]]


def test_a_short_wait_of_a_rank_without_a_heartbeat_since_makes_one():
    state = halted({0: make_group(42, 0.05), 1: make_group(41)}, heard_s={0: NOW_S - 2})

    assert [waiting(sync_point) for sync_point in sync_points(state, SECOND // 10)] == [[0]]


def test_a_lower_threshold_includes_shorter_waits():
    state = halted({0: make_group(42, 0.05), 1: make_group(41)}, sync=0)
    impatient = msgspec.structs.replace(DEFAULTS, stall=StallLimits(least_s=0.02))

    assert [each.ranks for each in stall(look(state, limits=impatient))] == [(1,)]
    assert stall(look(state)) == []


def test_a_group_that_only_waits_for_crossed_ranks_is_not_in_the_cycle():
    """Ranks 0 and 1 cross their two groups; 2 and 3 wait for them in the default group, and no rank for 2 and 3."""
    job = [make_group(86, 3, size=4), make_group(85, 0, size=4)]
    first, second = {"name": "a", "size": 2, "members": "0-1"}, {"name": "b", "size": 2, "members": "0-1"}
    state = halted(
        {
            0: [job[1], make_group(1, 3, **first), make_group(0, 0, **second)],
            1: [job[1], make_group(0, 0, **first), make_group(1, 3, **second)],
            2: job[0],
            3: job[0],
        }
    )
    cycle = stuck(sync_points(state), DEFAULTS)

    assert {sync_point.name for sync_point in cycle} == {"a", "b"}
    assert all(sync_point.crossed for sync_point in cycle)
    (finding,) = desync(look(state))
    assert finding.ranks == (0, 1)
