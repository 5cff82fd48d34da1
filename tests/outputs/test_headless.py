"""Following a run to its end: when evaluation begins, what counts as the end, and how alerts are counted."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Alert, AlertEvent, Finding, Moment, Severity
from ddpwatch.core.limits import DEFAULTS
from ddpwatch.outputs.headless import AlertCounts, watch_until_end
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.writer import Recorder
from ddpwatch.session import run_follower as watching
from ddpwatch.session.run_follower import NO_MESSAGE_NS, RunFollower
from ddpwatch.sources.frames import Frame, Tick
from tests.builders.fake_rank import FakeRun, make_hello, make_run_file, make_snap

GIVE_UP_S = 30
SECOND = 1_000_000_000
PEER_LOST = "RuntimeError: Connection reset by peer"


class Scripted:
    """Scripted source of frames and ticks at given times. Ranks in `here` run on this host."""

    def __init__(self, world, here=()):
        self.known, self.here, self.refused = set(range(world)), set(here), {}
        self._items = []

    def say(self, at_s, *messages):
        for message in messages:
            topic = wire.TOPICS.get(type(message), b"snap")
            self._items.append(Frame(topic, wire.encode(message), int(at_s * SECOND)))

    def say_nothing(self, from_s, until_s):
        self._items += [Tick(int(from_s * SECOND) + tenth * SECOND // 10) for tenth in range((until_s - from_s) * 10)]

    def poll(self, timeout_ms):
        return self._items.pop(0)

    def poll_ready(self, most):
        return []

    def want_buckets(self, wanted):
        pass

    def want_stacks(self, ranks):
        pass

    def close(self):
        pass

    @property
    def reported(self):
        return not self._items


@pytest.fixture
def nodes(run_dir):
    """Run file of three ranks on three hosts."""
    file = make_run_file(run_dir, 3)
    spread = [msgspec.structs.replace(each, host=f"node{each.rank + 1}") for each in file.endpoints]
    return msgspec.structs.replace(file, endpoints=spread)


def trains(source, *ranks, at_s=1.0):
    """Send the snapshots of these ranks."""
    hellos = {rank: make_hello(rank, world_size=3, host=f"node{rank + 1}") for rank in ranks}
    source.say(at_s, *(make_snap(rank, 1, hello=hello) for rank, hello in hellos.items()))


def fails(source, at_s, *ranks):
    source.say(at_s, *(wire.Bye(rank=rank, seq=9, reason="failed", text=PEER_LOST, mono_ns=9) for rank in ranks))


def ends_after_s(run, source):
    """Time, in seconds on the viewer's clock, at which the run counts as ended; None if it does not."""
    with closing(RunFollower(run, source=source)) as follower:
        while not source.reported:
            now_ns = follower.advance()
            if follower.ended:
                return now_ns / SECOND
    return None


def advance_until(follower, condition):
    deadline_s = time.monotonic() + GIVE_UP_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        follower.advance()


def make_event(kind, severity, subject="rank 1"):
    at = Moment(1, 1, 0)
    finding = Finding("straggler", severity, subject, "message", "advice")
    return AlertEvent(kind, Alert(finding, at, at, at if kind == "closed" else None))


def test_nothing_is_evaluated_before_all_snapshots_have_arrived(run_dir):
    """The first snapshot alone would be evaluated without the ranks to compare it with."""
    with FakeRun(run_dir, 4) as run:
        run.train(0, 60, slow_rank=2)
        with closing(RunFollower(run.file)) as follower:
            ranks = follower.monitor.state.ranks.values()
            while not follower.answered:
                assert not follower.monitor.book.open
                follower.advance()
            assert all(rank.snapped for rank in ranks)
            follower.monitor.evaluate_now()

    (straggler,) = [alert for (rule, _), alert in follower.monitor.book.open.items() if rule == "straggler"]
    assert straggler.finding.ranks == (2,)


def test_a_rank_that_never_answers_delays_evaluation_for_a_limited_time(run_dir):
    mute = {"answers": False, "beats": False}
    with FakeRun(run_dir, 2, rank1=mute) as run, closing(RunFollower(run.file, history_s=0.3)) as follower:
        advance_until(follower, lambda: follower.answered)
        assert not follower.monitor.state.ranks[1].snapped


def test_an_unreachable_rank_is_not_waited_for(run_dir):
    with FakeRun(run_dir, 2) as run:
        here, there = run.file.endpoints
        there = msgspec.structs.replace(there, address="tcp://127.0.0.1:1", node="elsewhere")
        file = msgspec.structs.replace(run.file, endpoints=[here, there])
        with closing(RunFollower(file, history_s=3600.0)) as follower:
            advance_until(follower, lambda: follower.answered)
            assert not follower.ended
            run.ranks[0].say_bye()
            advance_until(follower, lambda: follower.ended)
            assert not follower.said_goodbye


def test_a_run_on_other_hosts_only_is_not_taken_for_ended(run_dir):
    with FakeRun(run_dir, 1, rank0={"answers": False, "beats": False}) as run:
        elsewhere = [msgspec.structs.replace(endpoint, node="elsewhere") for endpoint in run.file.endpoints]
        with closing(RunFollower(msgspec.structs.replace(run.file, endpoints=elsewhere), history_s=0.1)) as follower:
            advance_until(follower, lambda: follower.answered)
            assert not follower.ended


def test_a_rank_that_exited_before_the_viewer_started_has_ended_and_delays_nothing(run_dir):
    with FakeRun(run_dir, 2) as run:
        Path(run.file.endpoints[1].address.removeprefix("ipc://")).unlink()
        with closing(RunFollower(run.file, history_s=3600.0)) as follower:
            advance_until(follower, lambda: follower.answered)
            state = follower.monitor.state
            assert state.condition(state.ranks[1]) == "ended"
            run.ranks[0].say_bye()
            advance_until(follower, lambda: follower.ended)
            assert follower.said_goodbye
            follower.monitor.evaluate_now()
            assert not [rule for rule, _ in follower.monitor.book.open if rule.startswith("rank-")]


def test_a_run_on_other_hosts_ends_when_some_ranks_failed_and_the_others_send_no_heartbeat_for_long(nodes):
    """The host of rank 2 is lost, so no goodbye arrives."""
    source = Scripted(3)
    trains(source, 0, 1, 2)
    fails(source, 2, 0, 1)
    source.say_nothing(2, 60)

    ended_s = ends_after_s(nodes, source)

    assert ended_s == pytest.approx(2 + NO_MESSAGE_NS / SECOND, abs=0.2)


def test_a_rank_that_never_sent_anything_delays_the_end_for_a_limited_time(nodes):
    source = Scripted(3)
    trains(source, 0, 1)
    fails(source, 2, 0, 1)
    source.say_nothing(2, 60)

    assert ends_after_s(nodes, source)


def test_any_message_postpones_the_end_of_a_run_on_other_hosts(nodes):
    source = Scripted(3)
    trains(source, 0, 1, 2)
    fails(source, 2, 0)
    source.say_nothing(2, 30)
    fails(source, 30, 1)
    source.say_nothing(30, 50)

    assert ends_after_s(nodes, source) is None


def test_a_viewer_that_receives_nothing_from_any_rank_does_not_take_that_for_the_end(nodes):
    source = Scripted(3)
    trains(source, 0, 1, 2)
    source.say_nothing(2, 120)

    assert ends_after_s(nodes, source) is None


def test_a_viewer_whose_relay_sends_no_heartbeat_does_not_take_that_for_the_end(nodes):
    source = Scripted(3)
    source.say(1, wire.Relay(rank=0, seq=0, host="node1", ended=False))
    trains(source, 0, 1, 2)
    fails(source, 2, 0)
    source.say_nothing(2, 120)

    assert ends_after_s(nodes, source) is None


def test_on_a_host_of_the_job_missing_heartbeats_of_others_are_reported_before_the_end(nodes, monkeypatch):
    """The host of rank 2 was lost and the others failed after it: that is the root cause."""
    source, reported = Scripted(3, here=(0,)), []
    trains(source, 0, 1, 2)
    fails(source, 2, 0, 1)
    source.say_nothing(2, 10)
    monkeypatch.setattr(watching, "Live", lambda run: source)

    ending = watch_until_end(nodes, DEFAULTS, reported.append)

    assert ending.outcome.bad == {0: "failed", 1: "failed", 2: "silent"}
    lost = [event.alert.finding for event in reported if event.alert.finding.rule == "rank-lost"]
    assert [finding.ranks for finding in lost] == [(2,)]
    assert not [event for event in reported if "No other rank is gone" in event.alert.finding.advice]


def test_time_in_which_the_viewer_was_stalled_does_not_count_as_missing_heartbeats(nodes):
    source = Scripted(3)
    trains(source, 0, 1, 2)
    fails(source, 2, 0)
    source._items.append(Tick(60 * SECOND, 58 * SECOND))
    source.say_nothing(60, 85)

    assert ends_after_s(nodes, source) is None


def test_time_in_which_the_viewer_was_stalled_does_not_shorten_the_wait_for_snapshots(nodes):
    source = Scripted(3)
    trains(source, 0, 1)
    source._items += [Tick(2 * SECOND), Tick(60 * SECOND, 58 * SECOND)]
    source.say_nothing(60, 61)
    trains(source, 2, at_s=61)
    with closing(RunFollower(nodes, source=source)) as follower:
        while not source.reported:
            assert not follower.answered
            follower.advance()
        assert follower.answered


def test_the_end_of_ranks_without_a_heartbeat_is_reported_with_the_failures(nodes, monkeypatch):
    source = Scripted(3)
    trains(source, 0, 1, 2)
    fails(source, 2, 0, 1)
    source.say_nothing(2, 60)
    monkeypatch.setattr(watching, "Live", lambda run: source)

    ending = watch_until_end(nodes, DEFAULTS, lambda _: None)

    assert (ending.said_goodbye, ending.outcome.bad) == (False, {0: "failed", 1: "failed", 2: "silent"})


def test_the_last_failure_is_reported_before_the_end(run_dir):
    reported = []
    with FakeRun(run_dir, 2) as run:

        def fail():
            for rank in run.ranks:
                assert rank.followed.wait(GIVE_UP_S)
            for rank in run.ranks:
                rank.say_bye("failed")

        failing = threading.Thread(target=fail, daemon=True)
        failing.start()
        soon_enough_ns = time.monotonic_ns() + int(GIVE_UP_S * 1e9)
        ending = watch_until_end(run.file, DEFAULTS, reported.append, until_ns=soon_enough_ns)
        failing.join(GIVE_UP_S)

    assert (ending.said_goodbye, ending.outcome.bad) == (True, {0: "failed", 1: "failed"})
    assert "rank-failed" in {event.alert.finding.rule for event in reported}


def test_a_recording_subscribes_to_gradient_buckets(run_dir, tmp_path):
    """Ranks send them only on demand, and a report needs some."""
    buckets = wire.Buckets(rank=0, seq=0, step=3, buckets=[wire.Bucket(index=0, bytes=1, ready_ns=1, done_ns=2)])
    asked, received = threading.Event(), threading.Event()

    class Hearing(Recorder):
        def add(self, frames, ranks):
            super().add(frames, ranks)
            if any(frame.topic == b"bucket" for frame in frames):
                received.set()

    with FakeRun(run_dir, 1) as run, closing(Hearing(tmp_path / "run.ddpw")) as recorder:
        (rank,) = run.ranks
        plain = rank._subscription

        def subscription(socket, message):
            if message == b"\x01bucket":
                asked.set()
            plain(socket, message)

        def train():
            assert asked.wait(GIVE_UP_S)
            rank.send_raw(b"bucket", wire.encode(buckets))
            run.train(0, 1)
            assert received.wait(GIVE_UP_S)
            rank.say_bye()

        rank._subscription = subscription
        training = threading.Thread(target=train, daemon=True)
        training.start()
        soon_enough_ns = time.monotonic_ns() + int(GIVE_UP_S * 1e9)
        watch_until_end(run.file, DEFAULTS, lambda _: None, until_ns=soon_enough_ns, recorder=recorder)
        training.join(GIVE_UP_S)

    with closing(Recording(tmp_path / "run.ddpw")) as recorded:
        (attempt,) = recorded.attempts
        assert wire.encode(buckets) in [entry.payload for entry in recorded.entries(attempt)]


@pytest.mark.parametrize(
    ("changes", "counts", "worst"),
    [
        ([], {}, None),
        ([("opened", Severity.WARNING)], {Severity.WARNING: 1}, Severity.WARNING),
        ([("opened", Severity.WARNING), ("changed", Severity.CRITICAL)], {Severity.CRITICAL: 1}, Severity.CRITICAL),
        (
            [("opened", Severity.CRITICAL), ("closed", Severity.INFO), ("opened", Severity.INFO)],
            {Severity.CRITICAL: 1, Severity.INFO: 1},
            Severity.CRITICAL,
        ),
    ],
)
def test_alerts_are_counted_by_their_worst_severity(changes, counts, worst):
    alerts = AlertCounts()
    for kind, severity in changes:
        alerts.count(make_event(kind, severity))

    assert (dict(alerts.by_severity()), alerts.worst) == (counts, worst)


def test_alerts_of_different_subjects_are_different_alerts():
    alerts = AlertCounts()
    for subject in ("rank 1", "rank 2"):
        alerts.count(make_event("opened", Severity.WARNING, subject))

    assert alerts.by_severity()[Severity.WARNING] == 2
