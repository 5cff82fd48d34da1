"""Stacks of many ranks: identical ones are grouped, and ranks without an answer are named."""

from hypothesis import given
from hypothesis import strategies as st

from ddpwatch import wire
from ddpwatch.core.state.run import RunState
from ddpwatch.view.stacks import stacks_lines, stacks_object
from tests.builders.fake_rank import make_beat, make_snap, make_stack
from tests.view.pages import HOSTILE, assert_fits, page, texts, widths

BACKWARD = (("run_backward", "/x/site-packages/torch/autograd/graph.py", 9), ("main", "/home/me/train.py", 60))
READING = (("read_shard", "/home/me/data.py", 12), ("main", "/home/me/train.py", 55))


def received(stacks, world=4):
    state = RunState("ab12cd34", "train", world)
    for rank in range(world):
        # The heartbeat is of another moment.
        state.apply(make_snap(rank, seq=1, beat=make_beat(rank, 1, phase=wire.PHASES.index("forward"))), 1)
        phase = wire.PHASES.index("data" if stacks.get(rank) == READING else "sync")
        if rank in stacks:
            state.apply(make_stack(rank, *stacks[rank], phase=phase), 1)
    return list(state.ranks.values())


def test_ranks_at_the_same_place_are_grouped():
    lines = texts(stacks_lines(received({0: BACKWARD, 1: BACKWARD, 2: READING, 3: BACKWARD}), 120))

    assert [line for line in lines if line.startswith("rank")] == [
        "ranks 0-1, 3 · MainThread, in sync",
        "rank 2 · MainThread, in data",
    ]
    assert any("▸ read_shard" in line and line.endswith("/home/me/data.py:12") for line in lines)
    assert any("    run_backward" in line and line.endswith(" graph.py:9") for line in lines)


def test_ranks_without_an_answer_are_named():
    assert page(stacks_lines(received({0: BACKWARD}, world=3), 120)).endswith(
        "ranks 1-2: no answer: stopped, exited, or something holds the GIL"
    )
    assert [reported["threads"] is None for reported in stacks_object(received({0: BACKWARD}, world=2))] == [
        False,
        True,
    ]


def test_the_reason_for_no_answer_is_shown_if_the_process_can_be_inspected():
    ranks = received({0: BACKWARD}, world=3)
    ranks[1].held_by, ranks[2].held_by = "signal", "nothing"
    reported = page(stacks_lines(ranks, 160))

    assert "rank 1: no answer: its process was stopped by a signal" in reported
    assert "rank 2: no answer: its process is alive, but a thread holds the GIL" in reported


def test_the_phase_of_another_moment_is_not_shown():
    """The stack does not report its phase; the heartbeat is in forward."""
    state = RunState("ab12cd34", "train", 1)
    state.apply(make_snap(0, seq=1, beat=make_beat(0, 1, phase=wire.PHASES.index("forward"))), 1)
    state.apply(make_stack(0, *BACKWARD), 1)

    assert texts(stacks_lines(list(state.ranks.values()), 120))[0] == "rank 0 · MainThread"
    assert stacks_object(list(state.ranks.values()))[0]["phase"] is None


@given(columns=widths, count=st.integers(0, 40))
def test_it_fits_whatever_the_stacks_hold(columns, count):
    assert_fits(stacks_lines(received({0: [(HOSTILE[:80], HOSTILE[:80], 7)] * count}, world=1), columns), columns)
