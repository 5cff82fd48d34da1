"""The clock against a simple model: every nanosecond belongs to one phase of one step."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.agent.clock import CLOCK_PHASES, OTHER, PRESYNC, HostClock
from ddpwatch.agent.fail_open import Switch
from ddpwatch.agent.step_recorder import Recorder, to_step

PHASES = st.integers(0, CLOCK_PHASES - 1)
ADVANCES = st.integers(0, 10**10)
MOVES = st.lists(st.tuples(st.sampled_from(["switch", "cut"]), PHASES, ADVANCES), max_size=60)


@given(MOVES, st.integers(0, 10**18))
def test_each_phase_gets_its_own_time_and_the_steps_leave_no_gap(moves, start):
    now = start

    def read():
        nonlocal now
        now += 1  # time passes even between two readings in a row
        return now

    clock = HostClock(read)
    start = now
    phase, expected, steps, ends = OTHER, [0] * CLOCK_PHASES, [], [start]
    for move, then, advance in moves:
        now += advance
        expected[phase] += advance + 1
        phase = then
        if move == "cut":
            totals, end_ns = clock.cut(then)
            assert totals == expected
            assert sum(totals) == end_ns - ends[-1]
            steps.append(totals)
            ends.append(end_ns)
            expected = [0] * CLOCK_PHASES
        else:
            clock.switch(then)
        assert (clock.phase, clock.since_ns) == (phase, now)
    expected[phase] += 1
    assert clock.cut(clock.phase)[0] == expected
    assert len({id(totals) for totals in steps}) == len(steps)  # a finished step is never written to again


@given(st.lists(st.lists(st.tuples(PHASES, ADVANCES), max_size=12), max_size=6))
def test_the_phases_of_a_published_step_add_up_to_it_exactly(steps):
    now = 0
    recorder = Recorder(HostClock(lambda: now), Switch())
    ends = [0]
    for moves in steps:
        for phase, advance in moves:
            recorder.clock.switch(phase)
            now += advance
        recorder.close_step()
        ends.append(now)
    published = [to_step(record) for record in recorder.steps.drain(100)]
    assert [step.index for step in published] == list(range(len(steps)))
    assert [step.end_ns for step in published] == ends[1:]
    assert [step.step_ns for step in published] == [end - begin for begin, end in pairwise(ends)]
    for step, moves in zip(published, steps, strict=True):
        assert step.presync_ns <= step.sync_ns
        assert step.presync_ns >= sum(advance for phase, advance in moves if phase == PRESYNC)


def test_the_real_clock_never_goes_back():
    clock = HostClock()
    ends = [clock.cut(clock.phase)[1] for _ in range(100)]
    assert ends == sorted(ends)
