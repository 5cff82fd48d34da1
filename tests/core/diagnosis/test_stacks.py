"""A rank's stack in a few words, and its bounds."""

from __future__ import annotations

import pytest

from ddpwatch import wire
from ddpwatch.core.diagnosis.stacks import top_of_stack, training_thread
from ddpwatch.core.state.run import RunState
from tests.builders.fake_rank import make_beat, make_stack

OWN = ("collate", "/srv/job/train.py", 88)
MAIN = ("main", "/srv/job/train.py", 12)
HOSTILE = "\x1b[31m[red]x[/red]\u202e\n" + "y" * 175


def reported(*messages):
    """What the first rank is seen to do after these messages."""
    state = RunState("ab12cd34", "train", 1)
    for message in messages:
        state.ingest(wire.encode(message), 1)
    assert state.bad == 0
    return state.ranks[0].stack


@pytest.mark.parametrize(
    "file",
    [
        "/usr/lib/python3.11/threading.py",
        "/opt/env/lib64/site-packages/torch/utils/data/dataloader.py",
        "/usr/local/dist-packages/torch/serialization.py",
        "<frozen importlib._bootstrap>",
    ],
)
def test_the_scripts_own_line_goes_before_that_of_a_library(file):
    assert top_of_stack(make_stack(0, ("wait", file, 5), OWN, MAIN)) == "wait in collate (train.py:88)"


def test_the_innermost_call_is_enough_where_it_is_the_scripts_own():
    assert top_of_stack(make_stack(0, OWN, MAIN)) == "collate (train.py:88)"


def test_if_all_is_library_the_innermost_call_is_shown():
    frames = [("wait", "/usr/lib/python3.11/threading.py", 5), ("run", "/usr/lib/python3.11/runpy.py", 9)]

    assert top_of_stack(make_stack(0, *frames)) == "wait (threading.py:5)"


def test_other_threads_do_not_speak_for_the_training():
    other = wire.ThreadStack("loader", False, [wire.StackFrame(*MAIN)])
    training = wire.ThreadStack("MainThread", True, [wire.StackFrame(*OWN)])

    assert top_of_stack(make_stack(threads=[other, training])) == "collate (train.py:88)"
    assert training_thread(make_stack(threads=[other])) is None


@pytest.mark.parametrize("stack", [None, make_stack(threads=[]), make_stack()], ids=["none", "no thread", "no frames"])
def test_where_nothing_is_known_nothing_is_said(stack):
    assert top_of_stack(stack) == ""


def test_the_latest_stack_counts_and_one_that_comes_late_changes_nothing():
    first, second = make_stack(0, MAIN, mono_ns=5), make_stack(0, OWN, mono_ns=9)

    assert reported(first, second) == second
    assert reported(second, first) == second
    assert reported() is None


def test_a_stack_stands_outside_the_numbered_stream():
    state = RunState("ab12cd34", "train", 1)
    for message in (make_beat(0, seq=5), make_stack(0, OWN, seq=5), make_beat(0, seq=6)):
        state.apply(message, 1)

    assert state.ranks[0].lost == 0
    assert state.ranks[0].beat.seq == 6
    assert state.ranks[0].stack is not None


def test_hostile_stacks_are_sanitized():
    collective = wire.Collective(HOSTILE, 7, HOSTILE, HOSTILE, False)
    threads = [wire.ThreadStack(HOSTILE, True, [wire.StackFrame(HOSTILE, HOSTILE, 1)])]
    stack = reported(make_stack(threads=threads, collectives=[collective]))
    (frame,) = stack.threads[0].frames
    (kept,) = stack.collectives

    for text in (stack.threads[0].name, frame.function, frame.file, kept.group, kept.op, kept.shape):
        assert text.isprintable()
        assert len(text) <= 160
    assert (kept.seq, kept.done) == (7, False)
    assert frame.function.startswith("[red]x[/red]")
    assert top_of_stack(stack).isprintable()


@pytest.mark.parametrize(
    "changed",
    [
        {"threads": [wire.ThreadStack("t", True, [wire.StackFrame(*OWN)] * (wire.MAX_FRAMES + 1))]},
        {"threads": [wire.ThreadStack("t", False, [])] * (wire.MAX_THREADS + 1)},
        {"collectives": [wire.Collective("0", 1, "barrier", "", True)] * (wire.MAX_COLLECTIVES + 1)},
        {"threads": [wire.ThreadStack("t", True, [wire.StackFrame("f", "x" * 201, 1)])]},
        {"threads": [wire.ThreadStack("t", True, [wire.StackFrame("f", "x", -1)])]},
    ],
    ids=["frames", "threads", "collectives", "a long name", "a line below 0"],
)
def test_a_stack_beyond_its_limits_is_refused(changed):
    state = RunState("ab12cd34", "train", 1)
    state.ingest(wire.encode(make_stack(**changed)), 1)

    assert (state.ranks[0].bad, state.ranks[0].stack) == (1, None)


def test_the_largest_stack_that_may_be_fits_into_a_frame():
    frames = [wire.StackFrame("\u4e00" * 200, "\u4e00" * 200, 2**62)] * wire.MAX_FRAMES
    collectives = [wire.Collective("\u4e00" * 200, 2**62, "\u4e00" * 200, "\u4e00" * 200, True)] * wire.MAX_COLLECTIVES
    threads = [wire.ThreadStack("\u4e00" * 200, True, frames)]

    assert len(wire.encode(make_stack(threads=threads, collectives=collectives))) < wire.MAX_FRAME_BYTES
