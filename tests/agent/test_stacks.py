"""Where the threads of a process are: real threads in real waits."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager

import pytest

from ddpwatch import wire
from ddpwatch.agent.stacks import stacks


@contextmanager
def thread_in(enter, name="loader"):
    """A thread that is inside of `enter` when the block runs, and ends with it."""
    inside, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=enter, args=(inside, leave), name=name, daemon=True)
    thread.start()
    try:
        assert inside.wait(30)
        yield thread
    finally:
        leave.set()
        thread.join(30)
    assert not thread.is_alive()


def waits_for_its_data(inside, leave):
    inside.set()
    leave.wait(60)


def deep_down(inside, leave, depth=200):
    if depth:
        deep_down(inside, leave, depth - 1)
    else:
        waits_for_its_data(inside, leave)


def functions(stack):
    return [frame.function for frame in stack.frames]


def test_a_thread_that_waits_is_found_in_the_function_that_waits():
    with thread_in(waits_for_its_data) as thread:
        (stack,) = stacks(thread.ident, everything=False)

    assert (stack.name, stack.training) == ("loader", True)
    assert functions(stack)[-1].endswith("_bootstrap"), "the innermost call comes first"
    own = next(frame for frame in stack.frames if frame.function == "waits_for_its_data")
    assert own.file.endswith("test_stacks.py")
    # At the event's flag or in its wait, whichever it had come to.
    first = waits_for_its_data.__code__.co_firstlineno
    assert own.line in (first + 1, first + 2)


def test_of_a_deep_recursion_the_innermost_calls_are_sent():
    with thread_in(deep_down) as thread:
        (stack,) = stacks(thread.ident, everything=False)

    assert len(stack.frames) == wire.MAX_FRAMES
    assert "waits_for_its_data" in functions(stack)
    assert functions(stack)[-1] == "deep_down"


def test_all_threads_are_reported_on_request_the_training_one_first_and_the_callers_not():
    with thread_in(waits_for_its_data, "trains") as training, thread_in(waits_for_its_data, "loader"):
        reported = stacks(training.ident, everything=True)
        alone = stacks(training.ident, everything=False)

    assert [stack.name for stack in alone] == ["trains"]
    assert (reported[0].name, reported[0].training) == ("trains", True)
    assert "loader" in [stack.name for stack in reported]
    assert threading.current_thread().name not in [stack.name for stack in reported]
    assert [stack.training for stack in reported].count(True) == 1


def test_a_caller_that_trains_itself_is_marked():
    (stack,) = stacks(threading.get_ident(), everything=False)

    assert "test_a_caller_that_trains_itself_is_marked" in functions(stack)


def test_a_script_that_an_exception_has_ended_has_the_stack_where_it_was_raised(monkeypatch):
    """And not where it is being printed, or the interpreter waits for its threads."""

    def fails():
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own") as caught:
        fails()
    monkeypatch.setattr(sys, "last_exc", caught.value, raising=False)
    with thread_in(waits_for_its_data) as thread:
        (stack,) = stacks(thread.ident, everything=False)

    assert functions(stack)[0].endswith("fails")
    assert stack.frames[0].line == fails.__code__.co_firstlineno + 1


def test_very_many_threads_are_bounded_and_the_training_one_is_among_them():
    inside, leave = threading.Semaphore(0), threading.Event()

    def waits():
        inside.release()
        leave.wait(60)

    threads = [threading.Thread(target=waits, daemon=True) for _ in range(wire.MAX_THREADS + 8)]
    try:
        for thread in threads:
            thread.start()
            assert inside.acquire(timeout=30)
        reported = stacks(threads[-1].ident, everything=True)
    finally:
        leave.set()
        for thread in threads:
            thread.join(30)

    assert len(reported) == wire.MAX_THREADS
    assert reported[0].training


@pytest.mark.parametrize("name", ["x" * 500, "\ud800", "\x1b[31m"], ids=["long", "no Unicode", "escape"])
def test_a_name_is_fit_for_the_wire(name):
    with thread_in(waits_for_its_data, name) as thread:
        threads = stacks(thread.ident, everything=False)
    message = wire.Stack(rank=0, seq=1, step=0, mono_ns=1, threads=threads)

    assert wire.decode(wire.encode(message)) == message


def test_a_thread_that_does_not_exist_has_no_stack():
    assert stacks(-1, everything=False) == []
