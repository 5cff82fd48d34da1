"""Round trip of a recording: frames, alerts, checkpoints, several attempts, the end."""

from __future__ import annotations

import os
import sqlite3
import stat
import time
from collections import Counter
from contextlib import closing
from itertools import pairwise

import msgspec
import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Alert, Finding, Moment, Severity
from ddpwatch.core.alerts.recorded import RecordedAlerts, read_alerts, read_event
from ddpwatch.core.metrics.live_metrics import measure
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import MAX_EXPECTED, RunState
from ddpwatch.core.state.state_checkpoint import CHECKPOINT_STEPS, checkpoint_messages
from ddpwatch.errors import UsageError
from ddpwatch.recording import sqlite_store as retention
from ddpwatch.recording import writer as recorder_module
from ddpwatch.recording.alerts import recalled, reported
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.schema import ALERTS_TOPIC, describe
from ddpwatch.recording.steps import StepReader
from ddpwatch.recording.writer import Recorder
from ddpwatch.session.playback import Playback
from ddpwatch.sources.frames import Frame
from ddpwatch.view.alerts.page import alert_facts
from tests.builders.fake_rank import make_hello, make_step
from tests.builders.kept_runs import SECRET, copied, follow, kept, real_frames, run_file
from tests.builders.training import wait_for
from tests.recordings.make import RUN_ID

OTHER_ID = "0123456789abcdef"
S = 1_000_000_000
PACE = 9 * S // 10
"""Nanoseconds between frames without ticks, as in a real run: less than two portions."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ddpw"


@pytest.fixture
def recorded(path):
    """Opens the recording at each call; all are closed at the end."""
    opened = []

    def open_it():
        opened.append(Recording(path))
        return opened[-1]

    yield open_it
    for each in opened:
        each.close()


def outline(events):
    return [(e.kind, e.alert.finding.rule, e.alert.finding.subject, e.alert.since.step) for e in events]


def beats(count, every_ns, world=4, first_seq=1):
    """Heartbeats of ranks, `every_ns` apart, received slightly later."""
    began_ns = time.monotonic_ns() + S
    frames = []
    for number in range(count):
        for rank in range(world):
            seq, step = first_seq + 2 * number, make_step(number)
            message = wire.Beat(
                rank=rank, seq=seq, mono_ns=seq, step=number, phase=1, phase_ns=1, steps=[step], rss_bytes=os.getpid()
            )
            hello = make_hello(rank, seq + 1, mono_ns=seq, world_size=world, run_id=RUN_ID)
            at_ns = began_ns + number * every_ns
            frames += [Frame(wire.TOPICS[type(each)], wire.encode(each), at_ns) for each in (message, hello)]
    return frames


def test_frames_are_read_back_unchanged_and_in_order(path, recorded):
    frames = real_frames()
    kept(path, frames)

    recording = recorded()
    (attempt,) = recording.attempts
    entries = list(recording.entries(attempt))
    assert [(entry.topic, entry.payload) for entry in entries] == [(frame.topic, frame.payload) for frame in frames]
    assert [entry.at_ns - entries[0].at_ns for entry in entries] == [
        frame.received_ns - frames[0].received_ns for frame in frames
    ]
    assert [entry.position for entry in entries] == list(range(len(frames)))
    assert abs(entries[0].at_ns - time.time_ns()) < 600 * S
    assert recording.frames(attempt) == len(frames)
    assert recording.damaged == 0


@pytest.mark.parametrize("name", ["slow-backward", "hang"])
def test_a_replay_evaluates_like_the_live_run_and_has_its_recorded_alerts(path, recorded, name):
    live = kept(path, real_frames(name))

    recording = recorded()
    (attempt,) = recording.attempts
    evaluated, recalled = (
        Monitor(attempt.new_state()),
        Monitor(attempt.new_state(), engine=RecordedAlerts(reported(recording, attempt))),
    )
    for entry in recording.entries(attempt):
        evaluated.ingest(entry.payload, entry.at_ns)
        recalled.ingest(entry.payload, entry.at_ns)
    for monitor in (evaluated, recalled):
        monitor.tick(attempt.last_ns)
        monitor.evaluate_now()
    with_worst = recalled.book.drain()

    assert live
    # A live run evaluates once all histories have arrived, and rules by time may change a moment later.
    opened = [event for event in outline(live) if event[0] == "opened"]
    assert [event for event in outline(evaluated.book.drain()) if event[0] == "opened"] == opened
    assert outline(with_worst) == outline(live)
    assert [event.alert.finding for event in with_worst] == [event.alert.finding for event in live]
    assert set(recalled.book.open) == {event.alert.key for event in live if event.kind == "opened"} - {
        event.alert.key for event in live if event.kind == "closed"
    }


def test_the_end_is_recorded_with_its_last_alerts_and_the_silence_after_it(path, recorded):
    frames = real_frames()[:200]
    last_ns = frames[-1].received_ns
    with closing(Recorder(path)) as recorder:
        live = follow(recorder, frames, ticks_ns=[last_ns + second * S for second in range(1, 8)])

    recording = recorded()
    (attempt,) = recording.attempts
    events = reported(recording, attempt)
    entries = list(recording.entries(attempt))
    assert recorder.written == len(frames) == len(entries)
    assert attempt.last_ns - entries[-1].at_ns == 7 * S
    assert "rank-lost" in {event.alert.finding.rule for event in live}
    assert outline(event for _, event in events) == outline(live)
    assert max(at_ns for at_ns, _ in events) <= attempt.last_ns
    final = recording.checkpoint(attempt, attempt.last_ns)
    assert final.position == entries[-1].position


def test_a_checkpoint_brings_an_empty_state_to_its_moment(path, recorded):
    frames = [frame for frame in real_frames() if not isinstance(wire.decode(frame.payload), wire.Bye)]
    kept(path, [*frames, *real_frames()[-4:]])

    recording = recorded()
    (attempt,) = recording.attempts
    whole = attempt.new_state()
    for entry in recording.entries(attempt):
        whole.ingest(entry.payload, entry.at_ns)
    checkpoint = recording.checkpoint(attempt, attempt.last_ns)
    state = attempt.new_state()
    checkpoint.apply(state)
    for entry in recording.entries(attempt, after=checkpoint.position):
        state.ingest(entry.payload, entry.at_ns)

    assert state.bad == state.unknown == 0
    for rank, reached in zip(whole.ranks.values(), state.ranks.values(), strict=True):
        assert (reached.hello, reached.beat, reached.bye and reached.bye.reason) == (
            rank.hello, rank.beat, rank.bye and rank.bye.reason,
        )  # fmt: skip
        assert reached.last_received_ns == rank.last_received_ns
        assert reached.steps.latest(CHECKPOINT_STEPS).tolist() == rank.steps.latest(CHECKPOINT_STEPS).tolist()
        assert whole.condition(rank) == state.condition(reached)
    assert measure(state).step_ns == measure(whole).step_ns


def test_an_unexpected_rank_has_its_steps_in_its_message():
    late, beyond = MAX_EXPECTED, MAX_EXPECTED + 8
    state = RunState(RUN_ID, "demo", beyond)
    for frame in real_frames():
        message = wire.decode(frame.payload)
        if isinstance(message, (wire.Snap, wire.Beat, wire.Steps)) and message.rank == 2:
            nested = {"hello": msgspec.structs.replace(message.hello, rank=late)} if hasattr(message, "hello") else {}
            state.apply(msgspec.structs.replace(message, rank=late, **nested), frame.received_ns)
    payloads = [payload for _, payload in checkpoint_messages(state)]
    (snap,) = [wire.decode(payload) for payload in payloads]

    assert snap.rank == late
    assert [step.index for step in snap.steps] == state.ranks[late].steps.indices()[-CHECKPOINT_STEPS:].tolist()
    assert len(snap.steps) == CHECKPOINT_STEPS


def test_the_first_checkpoint_comes_soon_after_the_first_message(path, recorded):
    frames = beats(8, S // 2)
    early = [frame._replace(topic=b"x", payload=b"\xc1", received_ns=frames[0].received_ns - 3 * S) for frame in frames]
    kept(path, [*early, *frames])

    recording = recorded()
    (attempt,) = recording.attempts
    assert recording.checkpoint(attempt, attempt.first_ns + 2 * S) is None
    assert recording.checkpoint(attempt, attempt.first_ns + 5 * S).payloads


def test_the_same_run_continues_its_attempt_and_another_starts_the_next(path, recorded):
    kept(path, beats(4, S // 4))
    before = recorded()
    numbers = [entry.position for entry in before.entries(before.attempts[0])]
    kept(path, beats(4, S // 4, first_seq=100))
    with closing(Recorder(path)) as recorder:
        follow(recorder, beats(4, S // 4), run_file(OTHER_ID))

    recording = recorded()
    first, second = recording.attempts
    entries = [*recording.entries(first), *recording.entries(second)]
    assert (first.run.id, second.run.id) == (RUN_ID, OTHER_ID)
    assert [entry.position for entry in entries][: len(numbers)] == numbers
    assert all(earlier.position < later.position for earlier, later in pairwise(entries))
    assert all(earlier.at_ns <= later.at_ns for earlier, later in pairwise(entries))
    assert len(list(recording.entries(first))) == 2 * len(list(recording.entries(second)))
    with closing(sqlite3.connect(path)) as database:
        portions = [row[0] for row in database.execute("SELECT portion FROM block ORDER BY id")]
    assert portions == sorted(set(portions))


def test_the_next_recorder_closes_alerts_that_the_last_one_left_open(path, recorded):
    first = kept(path)
    until_ns = recorded().attempts[0].last_ns
    kept(path)

    recording = recorded()
    (attempt,) = recording.attempts
    events = recording.events(attempt)
    left = {event.alert.key for event in first} - {event.alert.key for event in first if event.kind == "closed"}
    assert left
    ended = [(at_ns, event.alert) for at_ns, event in events if event.kind == "closed" and event.alert.key in left]
    assert {alert.key for _, alert in ended[: len(left)]} == left
    assert {at_ns for at_ns, _ in ended[: len(left)]} == {until_ns}
    # No rule was evaluated at that moment, so its step is unknown.
    assert {(alert.closed.step, alert.closed.now_ns) for _, alert in ended[: len(left)]} == {(None, until_ns)}
    for key in left:
        kinds = [event.kind for _, event in events if event.alert.key == key and event.kind != "changed"]
        assert kinds == ["opened", "closed", "opened"]
    still_open = [alert.key for alert in recalled(recording, attempt) if alert.closed is None]
    assert left <= set(still_open)
    assert len(still_open) == len(set(still_open))


def test_an_alert_that_continues_after_its_recorder_was_killed_is_one_alert(path, recorded):
    """Killed twice: each next recorder evaluates the histories anew, and opens it at the same step."""
    live = kept(path)
    opened = [event.alert for event in live if event.kind == "opened"]
    for _ in range(2):
        kept(path)

    recording = recorded()
    (attempt,) = recording.attempts
    listed = recalled(recording, attempt)
    assert sorted(alert.key for alert in listed) == sorted(alert.key for alert in opened)
    assert all(alert.closed is None for alert in listed)
    changes = [event for _, event in reported(recording, attempt)]
    assert [event.kind for event in changes if event.kind != "changed"] == ["opened"] * len(opened)
    with closing(Playback(recording)) as playback:
        assert len(playback.opened) == len(opened)
        playback.seek(attempt.last_ns)
        playback.catch_up()
        book = playback.follows.monitor.book
        assert {(alert.key, alert.since) for alert in book.open.values()} == {
            (alert.key, alert.since) for alert in listed
        }
        assert not book.closed
        # Its last text comes from the second recorder.
        assert max(alert.last.now_ns for alert in book.open.values()) > playback.opened[-1].at_ns


def test_an_alert_that_ended_between_two_recorders_has_no_end_step(path, recorded):
    left = {event.alert.key for event in kept(path)}
    kept(path, beats(4, S // 4, first_seq=10_000))

    recording = recorded()
    (attempt,) = recording.attempts
    listed = {alert.key: alert for alert in recalled(recording, attempt)}
    assert left
    assert left <= set(listed)
    for key in left:
        assert listed[key].closed is not None
        assert dict(alert_facts(listed[key]))["closed"].rpartition(", ")[0].endswith("step unknown")


def test_an_existing_empty_file_stays_empty_if_nothing_is_recorded(path):
    path.touch()
    Recorder(path).close()

    assert path.read_bytes() == b""
    path.unlink()
    Recorder(path).close()
    assert not path.exists()


def test_an_unreadable_description_counts_as_damage(path, recorded):
    """The run is known from its frames, but not its recorder's version and thresholds."""
    kept(path)
    assert recorded().damaged == 0
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(
            "UPDATE attempt SET run = CAST(replace(CAST(run AS TEXT), 'pid_created', ?) AS BLOB)", ("pid\x1f",)
        )

    recording = recorded()
    assert recording.attempts[0].run.id == RUN_ID
    assert recording.attempts[0].recorded_by.recorder == ""
    assert recording.damaged == 1


def test_a_clock_set_back_does_not_mix_old_and_new_frames(path, recorded, monkeypatch):
    kept(path, beats(4, S // 4))
    now_ns = time.time_ns()
    monkeypatch.setattr(recorder_module.time, "time_ns", lambda: now_ns - 3600 * S)
    kept(path, beats(4, S // 4, first_seq=100))

    recording = recorded()
    times_ns = [entry.at_ns for entry in recording.entries(recording.attempts[0])]
    assert times_ns == sorted(times_ns)


def test_addresses_and_keys_are_not_recorded(path, recorded):
    """Only listed fields of the run file are recorded."""

    class Locked(msgspec.Struct):
        rank: int
        host: str
        node: str
        pid: int
        pid_created_s: float
        address: str
        public_key: str

    locked = Locked(0, "node-a", "n", 1, 0.0, SECRET, "its-key")
    text = describe(msgspec.structs.replace(run_file(), endpoints=[locked]))
    assert b"node-a" in text
    assert b"its-key" not in text
    assert SECRET.encode() not in text

    kept(path)
    assert SECRET.encode() not in path.read_bytes()
    assert [endpoint.address for endpoint in recorded().attempts[0].run.endpoints] == [""] * 4


def test_a_late_rank_is_added_to_the_description(path, recorded):
    run = run_file()
    with closing(Recorder(path)) as recorder:
        follow(recorder, real_frames(), msgspec.structs.replace(run, endpoints=run.endpoints[:2]))

    (attempt,) = recorded().attempts
    assert [(endpoint.rank, endpoint.host) for endpoint in attempt.run.endpoints] == [(r, "node-a") for r in range(4)]


def test_only_the_owner_may_read_it_and_a_single_file_is_left(path):
    previous = os.umask(0)
    try:
        recorder = Recorder(path)
        follow(recorder, real_frames()[:50])
        wait_for(lambda: recorder.written)
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    finally:
        os.umask(previous)
    recorder.close()

    assert set(modes) == {"run.ddpw", "run.ddpw-wal", "run.ddpw-shm"}
    assert set(modes.values()) == {0o600}
    assert [file.name for file in path.parent.iterdir()] == ["run.ddpw"]


def test_no_file_is_left_if_nothing_was_recorded(path):
    Recorder(path).close()

    assert not list(path.parent.iterdir())


def test_a_dangling_link_stays_if_nothing_was_recorded(path):
    path.symlink_to(path.with_name("elsewhere.ddpw"))
    Recorder(path).close()

    assert [(entry.name, entry.exists()) for entry in path.parent.iterdir()] == [(path.name, False)]


def test_a_second_recorder_is_refused_and_a_reader_is_not(path, recorded):
    with closing(Recorder(path)) as recorder:
        follow(recorder, real_frames())
        wait_for(lambda: recorder.written)
        with pytest.raises(UsageError, match="is being written by process"):
            Recorder(path)
        recording = recorded()
        assert list(recording.entries(recording.attempts[0]))


def test_retention_by_age_keeps_a_readable_rest(path, recorded, monkeypatch):
    monkeypatch.setattr(retention, "CLEAR_S", 0.0)
    kept(path, beats(600, PACE), keep_s=120.0)

    recording = recorded()
    (attempt,) = recording.attempts
    assert 120 * S <= attempt.last_ns - attempt.first_ns < 200 * S
    begin = recording.checkpoint(attempt, attempt.first_ns)
    assert begin is not None
    reader = StepReader(recording, attempt)
    windows = list(reader.windows(unusual=True))
    assert sum(len(window) for window in windows) >= 120
    assert all(rank.hello is not None and rank.lost == 0 for rank in reader.state.ranks.values())


def test_retention_by_size_shrinks_the_file(path, recorded, monkeypatch):
    monkeypatch.setattr(retention, "CLEAR_S", 0.0)
    # Every fifth frame is incompressible noise, which counts as unreadable.
    noise = [os.urandom(2000) if number % 5 == 0 else b"" for number in range(4800)]
    frames = zip(beats(600, PACE), noise, strict=True)
    noisy = [frame._replace(topic=b"x", payload=junk) if junk else frame for frame, junk in frames]
    kept(path, noisy, max_bytes=600_000)

    recording = recorded()
    (attempt,) = recording.attempts
    assert path.stat().st_size < 900_000
    assert recording.checkpoint(attempt, attempt.first_ns) is not None
    assert list(recording.entries(attempt))[-1].payload == noisy[-1].payload
    assert attempt.last_ns - attempt.first_ns > 30 * S


def test_an_expired_attempt_is_removed_with_its_alerts(path, recorded, monkeypatch):
    monkeypatch.setattr(retention, "CLEAR_S", 0.0)
    kept(path)
    with closing(Recorder(path, keep_s=60.0)) as recorder:
        follow(recorder, beats(300, PACE), run_file(OTHER_ID))

    recording = recorded()
    assert [attempt.run.id for attempt in recording.attempts] == [OTHER_ID]
    assert {row.attempt for row in recording.alerts()} <= {recording.attempts[0].id}


def test_a_full_disk_is_reported_once_and_the_gap_is_counted(path, recorded, monkeypatch):
    monkeypatch.setattr(recorder_module, "RETRY_S", 0.02)
    said = []
    frames = beats(100, S)
    with closing(Recorder(path, say=said.append)) as recorder:
        database = recorder._file._database
        follow(recorder, frames[:80])
        wait_for(lambda: not recorder._backlog)
        monkeypatch.setattr(recorder_module, "BACKLOG_BYTES", 20_000)
        database.execute("PRAGMA max_page_count = 1")
        for first in range(80, 640, 20):
            # By portions: a single one would fit into the rest of the last page.
            follow(recorder, frames[first : first + 20])
            wait_for(lambda: recorder.write_error or not recorder._backlog)
        assert recorder.write_error
        assert recorder.dropped_frames
        database.execute("PRAGMA max_page_count = 1000000")
        wait_for(lambda: not recorder.write_error and not recorder._backlog)
        monkeypatch.setattr(recorder_module, "BACKLOG_BYTES", 64 << 20)
        follow(recorder, frames[640:])

    recording = recorded()
    (attempt,) = recording.attempts
    payloads = [entry.payload for entry in recording.entries(attempt)]
    assert len(said) == 2
    assert "full; retrying" in said[0]
    assert f"works again; {recorder.dropped_frames} frames were lost" in said[1]
    assert recorder.written + recorder.dropped_frames == len(frames)
    assert sum(map(recording.dropped, recording.attempts)) == recorder.dropped_frames
    assert len(payloads) == recorder.written
    assert payloads[:80] == [frame.payload for frame in frames[:80]]
    assert payloads[-160:] == [frame.payload for frame in frames[-160:]]
    assert len(recording.attempts) == 1


def test_a_disk_that_stays_full_does_not_block_closing(path, monkeypatch):
    said = []
    frames = beats(20, S)
    recorder = Recorder(path, say=said.append)
    recorder._file._database.execute("PRAGMA max_page_count = 1")
    follow(recorder, frames)
    recorder.close()

    assert recorder.dropped_frames
    assert recorder.written + recorder.dropped_frames == len(frames)
    assert len(said) == 1


def test_a_removed_file_is_reported(path):
    said = []
    with closing(Recorder(path, say=said.append)) as recorder:
        follow(recorder, beats(4, S // 4))
        wait_for(lambda: recorder.written)
        path.unlink()
        follow(recorder, beats(4, S // 4, first_seq=100))
        wait_for(lambda: said)

    assert "No such file" in said[0]


def test_a_portion_that_cannot_be_written_is_counted_and_the_next_is_written(path, monkeypatch):
    said = []
    frames = beats(8, S)
    with closing(Recorder(path, say=said.append)) as recorder:
        put, fails = recorder._file.put, iter([True])

        def put_or_fail(portion):
            if next(fails, False):
                raise ValueError("odd")
            put(portion)

        monkeypatch.setattr(recorder._file, "put", put_or_fail)
        follow(recorder, frames)

    assert recorder.dropped_frames
    assert recorder.written + recorder.dropped_frames == len(frames)
    assert "ValueError: odd" in said[0]


@pytest.mark.parametrize(
    "change",
    [
        {"since": {"step": 1, "now_ns": -1, "unix_ns": 0}},
        {"last": {"step": 1, "now_ns": 1, "unix_ns": 2**63}},
        {"since": {"step": 2**62, "now_ns": 1, "unix_ns": 1}},
        {"finding": {"ranks": [-1]}},
        {"finding": {"cost": 1e300}},
        {"finding": {"evidence": {str(n): n for n in range(100)}}},
        {"finding": {"severity": 17}},
        {"finding": None},
    ],
)
def test_alerts_with_impossible_numbers_are_skipped(path, recorded, change):
    copied(path)
    text = msgspec.json.encode(recorded().alerts()[0].event)
    event = msgspec.json.decode(text)
    assert read_event(text) is not None
    for key, value in change.items():
        alert = event["alert"]
        alert[key] = {**alert[key], **value} if isinstance(value, dict) else value

    assert read_event(msgspec.json.encode(event)) is None


def test_texts_of_alerts_are_recorded_once_per_portion_and_removed_with_it(path, recorded, monkeypatch):
    monkeypatch.setattr(retention, "CLEAR_S", 0.0)
    frames = beats(800, 2 * S // 5)
    moment = Moment(1, frames[0].received_ns, 0)
    with closing(Recorder(path, keep_s=120.0)) as recorder:
        recorder.begin(run_file())
        state = RunState(RUN_ID, "demo", 4)
        for number, frame in enumerate(frames):
            recorder.add([frame], [wire.claimed_rank(frame.payload)])
            state.ingest(frame.payload, frame.received_ns)
            if number % 8 == 7:
                text = f"text {number}"
                findings = [Finding("memory", Severity.INFO, f"rank {rank}", text, "Look.") for rank in range(100)]
                alerts = [Alert(finding, moment, moment) for finding in findings]
                recorder.flush(state, frame.received_ns, alerts)

    recording = recorded()
    (attempt,) = recording.attempts
    texts = [entry for entry in recording.entries(attempt, alerts=True) if entry.topic == ALERTS_TOPIC]
    begin = recording.checkpoint(attempt, attempt.first_ns)
    together = Counter(entry.at_ns for entry in texts for _ in read_alerts(entry.payload))
    assert texts[0].at_ns == begin.at_ns, "what was before it is gone"
    assert together[begin.at_ns] == 100, "all, where one can begin"
    checkpoints = {found.at_ns for found in recording.checkpoints(attempt, -1, 2**60)}
    assert {count for at_ns, count in together.items() if at_ns not in checkpoints} == {recorder_module.MAX_TEXTS}
    # Those written longest ago come first, so that each has its turn.
    some = [alert.key for entry in texts[4:12] for alert in read_alerts(entry.payload)]
    assert len(set(some)) == 100
    assert recording.frames(attempt) == len(list(recording.entries(attempt)))


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"{}", msgspec.msgpack.encode({"t": "alerts", "alerts": [1]})])
def test_malformed_texts_of_alerts_are_ignored(payload):
    assert read_alerts(payload) == []
