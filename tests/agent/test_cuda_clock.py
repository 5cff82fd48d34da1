"""The CUDA clock on a fake GPU: when work ran, when steps are reported, and which calls are never made."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.agent.clock import BACKWARD, DATA, FORWARD, OPTIMIZER, OTHER, PRESYNC, SYNC
from ddpwatch.agent.cuda_clock import LATER_STEPS, MAX_EVENTS, MAX_PENDING
from ddpwatch.agent.step_recorder import HOST_TIMED_TEXT
from tests.agent.fake_cuda import NEVER, Gpu, Run, Stream


@pytest.fixture
def run():
    return Run(Gpu())


def test_a_step_shows_when_work_ran_and_ends_when_the_host_cut_it(run):
    run.phase(FORWARD, queue=5_000, host=100)
    run.phase(BACKWARD, queue=7_000, host=100)
    run.phase(OPTIMIZER, queue=3_000, host=100)
    run.cut()
    step = run.empty_steps()[0]
    assert (step.forward_ns, step.backward_ns, step.optimizer_ns) == (5_000, 7_000, 3_000)
    assert (step.step_ns, step.end_ns) == (15_000, 300)
    assert run.host_timed == 0
    assert run.notes() == []


def test_the_phase_under_way_and_its_beginning_are_the_hosts(run):
    run.phase(FORWARD, queue=9_000, host=20)
    run.phase(BACKWARD, host=5)
    assert (run.clock.phase, run.clock.since_ns) == (BACKWARD, 20)


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("switch"), st.integers(0, PRESYNC)),
        st.tuples(st.just("cut"), st.just(0)),
        st.tuples(st.sampled_from(["advance", "work"]), st.integers(0, 50_000)),
        st.tuples(st.sampled_from(["stream", "join"]), st.integers(0, 2)),
    ),
    max_size=120,
)


@given(MOVES)
def test_every_nanosecond_of_the_gpu_belongs_to_one_phase_of_one_step(moves):
    """Against a simple model: a phase lasts from the latest stamp passed so far to its own end, on any stream."""
    gpu = Gpu()
    run = Run(gpu)
    streams = [gpu.stream, Stream(gpu, 0), Stream(gpu, 0)]
    phase, reached_ns, expected = OTHER, 0, [[0] * (PRESYNC + 1)]
    for move, value in [*moves, ("cut", 0)]:
        if move in ("switch", "cut"):
            passed_ns = max(gpu.now_ns, gpu.stream.free_ns)
            expected[-1][phase] += max(0, passed_ns - reached_ns)
            reached_ns = max(reached_ns, passed_ns)
            if move == "cut":
                run.cut()
                expected.append([0] * (PRESYNC + 1))
            else:
                run.clock.switch(value)
                phase = value
        elif move == "advance":
            gpu.advance(value)
        elif move == "work":
            gpu.stream.work(value)
        elif move == "stream":
            gpu.streams[0] = streams[value]
        else:
            gpu.stream.wait(streams[value])
    expected.pop()
    gpu.now_ns = max(gpu.now_ns, *(stream.free_ns for stream in streams))
    reported = run.empty_steps()[: len(expected)]
    found = [
        (
            step.data_ns,
            step.forward_ns,
            step.backward_ns,
            step.sync_ns,
            step.optimizer_ns,
            step.other_ns - step.save_ns - step.eval_ns,
            step.save_ns,
            step.eval_ns,
            step.presync_ns,
        )
        for step in reported
    ]
    assert found == [(*ns[:SYNC], ns[SYNC] + ns[PRESYNC], *ns[SYNC + 1 :]) for ns in expected]
    assert sum(step.step_ns for step in reported) == reached_ns
    assert run.host_timed == 0


@given(st.lists(st.lists(st.integers(0, 10**11), min_size=1, max_size=9), min_size=1, max_size=5))
def test_long_steps_are_no_less_exact_for_having_many_phases(steps):
    gpu = Gpu()
    run = Run(gpu)
    for works_ns in steps:
        for ns in works_ns:
            run.phase(FORWARD, queue=ns)
            run.clock.switch(OTHER)
        run.cut()
    for step, works_ns in zip(run.empty_steps(), steps, strict=False):
        phases_ns = step.data_ns, step.forward_ns, step.backward_ns, step.sync_ns, step.optimizer_ns, step.other_ns
        assert min(phases_ns) >= 0
        assert step.step_ns == sum(phases_ns)
        assert step.step_ns == pytest.approx(sum(works_ns), rel=2**-23, abs=1)  # one rounding to 32 bits


@pytest.mark.parametrize(("all_reduce_ns", "exposed_ns"), [(9_000, 3_000), (6_000, 0), (1_000, 0), (26_000, 20_000)])
def test_of_an_all_reduce_only_what_backward_did_not_hide_is_sync(run, all_reduce_ns, exposed_ns):
    comm = Stream(run.gpu, 0)
    run.phase(BACKWARD, queue=4_000, host=10)
    comm.wait(run.gpu.stream)  # the first bucket is ready, and backward goes on
    comm.work(all_reduce_ns)
    run.gpu.stream.work(6_000)
    run.clock.switch(SYNC)
    run.gpu.stream.wait(comm)
    run.clock.switch(OTHER)
    run.cut()
    step = run.empty_steps()[0]
    assert (step.backward_ns, step.sync_ns) == (10_000, exposed_ns)
    assert step.step_ns == 10_000 + exposed_ns


@pytest.mark.parametrize(("queued_ns", "idle_ns"), [(0, 80_000), (50_000, 30_000), (80_000, 0), (200_000, 0)])
def test_waiting_for_data_counts_from_when_the_gpu_has_run_dry(run, queued_ns, idle_ns):
    run.phase(FORWARD, queue=queued_ns)
    run.phase(DATA, host=80_000)
    run.phase(OTHER)
    run.cut()
    step = run.empty_steps()[0]
    assert (step.forward_ns, step.data_ns, step.other_ns) == (queued_ns, idle_ns, 0)


def test_a_step_is_reported_when_two_more_were_cut_and_its_last_event_has_completed(run):
    run.phase(FORWARD, queue=1_000)
    assert [len(run.cut()) for _ in range(5)] == [0] * 5
    run.gpu.advance(1_000)
    assert len(run.cut()) == 6 - LATER_STEPS


def test_an_event_on_a_slower_stream_is_waited_for_although_the_last_one_has_completed(run):
    fast, slow = run.gpu.stream, Stream(run.gpu, 0)
    run.gpu.streams[0] = slow
    run.phase(FORWARD, queue=9_000)
    run.clock.switch(OTHER)
    run.gpu.streams[0] = fast
    run.gpu.advance(1_000)
    assert [len(run.cut()) for _ in range(4)] == [0] * 4
    run.gpu.advance(8_000)
    reported = run.cut()
    # The first step reaches as far as the slow stream; what lies below that is not counted again.
    assert [step.step_ns for step in reported] == [9_000, 0, 0]
    run.gpu.advance(500)
    run.cut()
    assert sum(step.step_ns for step in run.empty_steps()) == 9_500


def test_what_a_step_took_from_the_next_one_is_forgotten_when_that_one_has_the_hosts_times(run):
    fast, slow = run.gpu.stream, Stream(run.gpu, 0)
    run.gpu.streams[0] = slow
    run.phase(FORWARD, queue=9_000)
    run.phase(OTHER)
    run.gpu.streams[0] = fast
    run.cut()
    run.gpu.capturing = {fast}
    run.phase(OTHER)
    run.gpu.capturing = set()
    run.cut()
    run.phase(FORWARD, queue=600)
    run.phase(OTHER)
    run.cut()
    run.gpu.advance(9_000)
    assert [step.forward_ns for step in run.empty_steps()] == [9_000, 0, 600]


def test_steps_of_a_gpu_that_never_answers_are_reported_in_order_with_the_hosts_times(run):
    run.gpu.stream.free_ns = NEVER
    for k in range(3 * MAX_PENDING):
        run.phase(FORWARD, host=k)
        assert len(run.cut()) == max(0, k + 1 - MAX_PENDING)
    assert [step.forward_ns for step in run.reported] == list(range(2 * MAX_PENDING))
    assert run.host_timed == 2 * MAX_PENDING
    assert run.gpu.made <= 2 * MAX_PENDING + 4
    assert run.notes() == [HOST_TIMED_TEXT]
    run.gpu.stream.free_ns = 0
    for _ in range(2 * MAX_PENDING):
        run.phase(FORWARD, queue=700)
        run.cut()
    assert run.empty_steps()[-LATER_STEPS - 1].forward_ns == 700
    assert run.notes() == []


def test_the_note_is_two_plain_sentences():
    assert HOST_TIMED_TEXT.count(". ") == 1
    assert HOST_TIMED_TEXT.endswith(".")


def test_a_step_with_more_stamps_than_there_are_events_has_the_hosts_times_and_others_their_own(run):
    for _ in range(3):
        run.phase(FORWARD, queue=700)
        run.phase(OTHER)
        run.cut()
        run.empty_steps()
        for _ in range(MAX_EVENTS):
            run.phase(BACKWARD, queue=1, host=2)
        run.phase(OTHER)
        run.cut()
        run.empty_steps()
        assert run.gpu.made == MAX_EVENTS
    assert [step.backward_ns for step in run.reported if step.backward_ns] == [2 * MAX_EVENTS] * 3
    assert [step.forward_ns for step in run.reported if step.forward_ns] == [700] * 3


def test_a_step_that_never_ends_keeps_no_more_than_its_share(run):
    for _ in range(3 * MAX_EVENTS):
        run.phase(BACKWARD)
    assert run.gpu.made == len(run.clock._events) == MAX_EVENTS


@pytest.mark.parametrize("broken", ["elapsed_time", "query"])
def test_an_error_of_cudas_while_reading_costs_the_gpus_times_and_no_step(run, broken):
    run.phase(FORWARD, queue=500, host=20)
    run.cut()
    run.gpu.catch_up()
    run.gpu.broken = broken
    reported = run.empty_steps()
    assert (reported[0].forward_ns, run.host_timed) == (20, 1)
    run.gpu.broken = ""
    assert len(run.empty_steps(3)) == 4
    assert run.host_timed == 1


def test_another_current_device_does_not_matter(run):
    run.phase(FORWARD, queue=500)
    run.gpu.device_index = 1
    run.phase(BACKWARD, queue=600)
    run.clock.switch(OTHER)
    run.cut()
    step = run.empty_steps()[0]
    assert (step.forward_ns, step.backward_ns, run.host_timed) == (500, 600, 0)


@pytest.mark.parametrize(("current", "captured"), [(0, 0), (1, 0), (1, 1)])
def test_nothing_is_asked_in_a_capture_and_its_step_has_the_hosts_times(run, current, captured):
    for _ in range(4):
        run.phase(FORWARD, queue=100)
        run.phase(OTHER)
        run.cut()
    run.gpu.catch_up()
    run.gpu.device_index = current
    run.gpu.capturing = {run.gpu.streams[captured]}
    run.phase(FORWARD, host=30)
    run.phase(BACKWARD, host=40)
    run.gpu.capturing = set()
    run.phase(OTHER, queue=900)
    run.cut()
    run.phase(FORWARD, queue=100)
    run.phase(OTHER)
    run.cut()
    reported = run.empty_steps()
    assert [(step.forward_ns, step.backward_ns) for step in reported] == [(100, 0)] * 4 + [(30, 40), (100, 0)]
    assert run.host_timed == 1


def test_a_whole_step_in_a_capture_leaves_the_next_one_without_a_beginning_and_no_other(run):
    run.phase(FORWARD, queue=100)
    run.phase(OTHER)
    run.cut()
    run.gpu.catch_up()
    run.gpu.capturing = {run.gpu.stream}
    run.phase(FORWARD, host=30)
    run.phase(OTHER)
    run.cut()
    run.gpu.capturing = set()
    run.phase(FORWARD, queue=600, host=40)
    run.phase(OTHER)
    run.cut()
    run.phase(FORWARD, queue=100)
    run.phase(OTHER)
    run.cut()
    assert [step.forward_ns for step in run.empty_steps()] == [100, 30, 40, 100]
    assert run.host_timed == 2
    assert run.notes() == [HOST_TIMED_TEXT]


USUAL = (DATA, OTHER, PRESYNC, FORWARD, OTHER, BACKWARD, SYNC, OTHER, OPTIMIZER)
"""Phases of a usual step; `other` begins again with the next one."""


def usual_step(run, then=OTHER):
    for phase in USUAL:
        run.phase(phase, queue=3, host=4)
    run.recorder.close_step(then=then)


def test_a_usual_step_has_one_event_and_one_capture_check_for_each_stamp_and_one_query(run):
    for _ in range(5):
        usual_step(run)
    run.gpu.calls_made.clear()
    usual_step(run)
    stamps = len(USUAL) + 1
    assert {name: calls for name, calls in run.gpu.calls_made.items() if name != "asked"} == {
        "is_current_stream_capturing": stamps,
        "current_device": stamps + 1,
        "current_stream": stamps,
        "record": stamps,
        "query": 1,
        "elapsed_time": stamps,
    }


def test_each_further_stream_of_a_step_costs_one_query_and_one_stream_object(run):
    other = Stream(run.gpu, 0)
    for _ in range(5):
        usual_step(run)
    own = run.gpu.streams[0]
    run.gpu.streams[0] = other
    run.phase(FORWARD, queue=3)
    run.gpu.streams[0] = own
    run.gpu.calls_made.clear()
    usual_step(run)
    assert run.gpu.calls_made["current_stream"] == len(USUAL) + 2
    usual_step(run)
    run.gpu.calls_made.clear()
    usual_step(run)
    assert run.gpu.calls_made["query"] == 3  # the last events of both stretches before it, and the end


def test_the_phase_that_a_cut_begins_goes_on_in_the_next_step(run):
    run.phase(OPTIMIZER, queue=300)
    run.recorder.close_step(then=BACKWARD)
    run.gpu.stream.work(500)
    run.phase(OTHER)
    run.cut()
    first, second = run.empty_steps()[:2]
    assert (first.optimizer_ns, first.step_ns) == (300, 300)
    assert (second.backward_ns, second.step_ns) == (500, 500)


def test_events_are_used_again_for_ten_thousand_steps(run):
    for _ in range(10_000):
        for phase in (DATA, OTHER, PRESYNC, FORWARD, OTHER, BACKWARD, SYNC, OTHER, OPTIMIZER, OTHER):
            run.phase(phase, queue=3, host=4)
        run.cut()
    assert len(run.reported) == 10_000 - LATER_STEPS
    assert run.gpu.made <= 11 * (LATER_STEPS + 2)
    assert run.host_timed == 0


def test_at_the_end_finished_gpu_work_has_the_gpus_times_and_the_rest_the_hosts(run):
    for queued_ns in (500, 600, 10_000):
        run.phase(FORWARD, queue=queued_ns, host=20)
        run.phase(OTHER)
        run.cut()
    run.gpu.advance(1_100)
    run.recorder.finish(ask=True)
    assert [step.forward_ns for step in run.collect()] == [500, 600, 20]
    run.recorder.finish(ask=True)
    assert len(run.collect()) == 3
    assert run.notes() == []
    assert not run.clock._free
    assert not run.clock._events


@pytest.mark.parametrize("how", ["closed", "capturing", "thread", "broken"])
def test_at_the_end_no_step_is_lost_where_cuda_may_not_be_asked(run, how):
    for _ in range(2):
        run.phase(FORWARD, queue=500, host=20)
        run.phase(OTHER)
        run.cut()
    run.gpu.catch_up()
    events = run.gpu.made
    if how == "closed":
        run.gpu.closed = True
    elif how == "capturing":
        run.gpu.capturing = {run.gpu.stream}
    elif how == "thread":
        run.gpu.thread = None
    else:
        run.gpu.broken = "all"
    run.recorder.finish(ask=how in ("capturing", "broken"))
    assert [step.forward_ns for step in run.collect()] == [20, 20]
    assert len(run.clock._free) + len(run.clock._events) == events  # to let go of one would be a CUDA call
