"""Playback at any moment equals the live run, whichever way it was reached."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from dataclasses import replace
from datetime import timedelta, timezone

import msgspec
import numpy as np
import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Alert, AlertEvent, Finding, Moment, Severity
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.state.gpu import CURVES, NOT_REPORTED
from ddpwatch.core.state.run import RunState
from ddpwatch.recording.alerts import Opened
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.schema import ALERTS_TOPIC
from ddpwatch.recording.sqlite_store import Retention
from ddpwatch.recording.time_parser import NoMoment
from ddpwatch.session.playback import Playback
from ddpwatch.session.replay_backfill import backfill_gpus
from ddpwatch.session.run_follower import RunFollower
from ddpwatch.simulator.scenario import Scenario
from ddpwatch.simulator.source import SimulatedSource
from ddpwatch.sources.frames import Frame
from ddpwatch.view.run_view import current_view
from ddpwatch.view.status import status_object
from tests.builders.fake_rank import make_beat, make_gpus, make_hello, make_snap, make_step
from tests.builders.kept_runs import SECOND_NS, UNIX_NS, ReceivedFrames, received, record, recorder_at, run_file, tape
from tests.builders.recordings import frame as made_up_frame
from tests.builders.recordings import measured
from tests.builders.recordings import record as made_up

UTC = timezone.utc


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tapes")


@pytest.fixture(scope="module")
def slow(folder):
    """The file, and the state at the end of the live run."""
    (monitor,) = tape(folder / "slow.ddpw", "slow-backward")
    return folder / "slow.ddpw", monitor


@pytest.fixture(scope="module")
def twice(folder):
    tape(folder / "twice.ddpw", "slow-backward", "healthy")
    return folder / "twice.ddpw"


@pytest.fixture
def checkpoints_often(monkeypatch):
    """Several checkpoints in a run of some seconds."""
    monkeypatch.setattr("ddpwatch.recording.writer.CHECKPOINT_FRAMES", 40)


def opened(path):
    return closing(Playback(Recording(path), playing=False))


def go(playback: Playback, at_ns: int):
    playback.seek(at_ns)
    assert playback.seeking
    assert not playback.catch_up()
    assert not playback.seeking
    return playback.follows.monitor


def seen(monitor) -> dict:
    """What a viewer shows, except times since an alert was last found."""
    reported = status_object(current_view(monitor))
    for alert in reported["alerts"]:
        del alert["last"]
    return reported


def reported(book) -> list:
    alerts = (*book.closed, *book.open.values())
    return [(alert.key, alert.since.step, alert.since.unix_ns, alert.closed is None) for alert in alerts]


@pytest.mark.parametrize("name", ["slow-backward", "healthy", "hang"])
def test_live_and_replay_end_in_the_same_state_with_the_same_alerts(tmp_path, name):
    (live,) = tape(tmp_path / "run.ddpw", name)
    with opened(tmp_path / "run.ddpw") as playback:
        again = go(playback, playback.reel.at(playback.reel.total_ns))
        was, now = seen(live), seen(again)
        assert was["alerts"] or name == "healthy"
        assert now == was
        assert reported(again.book) == reported(live.book)
        assert {again.state.condition(rank) for rank in again.state.ranks.values()} == {
            live.state.condition(rank) for rank in live.state.ranks.values()
        }
        for rank in live.state.ranks:
            before, after = live.state.ranks[rank].steps, again.state.ranks[rank].steps
            indices = after.indices()
            assert after.newest == before.newest
            assert np.array_equal(after.column("backward_ns", indices), before.column("backward_ns", indices))


def words(book) -> list:
    """All texts of the open alerts."""
    return [(alert.key, alert.since.step, alert.finding) for alert in book.open.values()]


@pytest.mark.parametrize("name", ["slow-backward", "hang"])
def test_the_text_of_an_alert_between_two_events_is_that_of_the_live_run(tmp_path, checkpoints_often, name):
    path, frames = tmp_path / "run.ddpw", received(name)
    shown = {}
    with closing(recorder_at(path)) as recorder:
        hand_on = recorder._enqueue

        def look(now_ns, *, anyway=False):
            if anyway:
                shown[UNIX_NS + now_ns] = words(follower.monitor.book)
            hand_on(now_ns, anyway=anyway)

        recorder._enqueue = look
        with closing(RunFollower(run_file(), source=ReceivedFrames(frames), recorder=recorder)) as follower:
            recorder._due_ns = 0
            follower.advance(0)
            while not follower.idle:
                follower.advance(0)
            follower.monitor.evaluate_now()
    with closing(Recording(path)) as recorded:
        (attempt,) = recorded.attempts
        reported_ns = {row.at_ns for row in recorded.alerts()}
        kept = [entry for entry in recorded.entries(attempt, alerts=True) if entry.topic == ALERTS_TOPIC]
        assert len({entry.at_ns for entry in kept} - reported_ns) >= 3, "their texts have changed without an event"
        assert len(kept) <= len(shown)
    with opened(path) as playback:
        moments_ns = [at_ns for at_ns, alerts in shown.items() if alerts]
        assert len(moments_ns) > 5
        # Forward and back, to arrive from checkpoints and frame by frame.
        for at_ns in [*moments_ns, *reversed(moments_ns)]:
            if at_ns >= playback.reel.spans[0].first_ns + SECOND_NS:
                assert words(go(playback, at_ns).book) == shown[at_ns]


@pytest.mark.parametrize("part", [0.3, 0.55, 0.9])
def test_a_moment_is_the_same_by_playing_or_seeking(tmp_path, checkpoints_often, part):
    path = tmp_path / "often.ddpw"
    tape(path, "slow-backward")
    with opened(path) as playback:
        reel = playback.reel
        at_ns = reel.at(int(reel.total_ns * part))
        go(playback, reel.at(0))
        while playback.pace.now_ns < at_ns:
            # As when playing: moment by moment.
            playback.pace.move(min(playback.pace.now_ns + SECOND_NS // 10, at_ns))
            playback.follows.advance(0)
            while not playback.follows.idle:
                playback.follows.advance(0)
        playback.follows.monitor.evaluate_now()
        was, alerts = seen(playback.follows.monitor), reported(playback.follows.monitor.book)
        assert was["step"] > 30
        back = go(playback, reel.at(0))
        assert back.state.now_ns == reel.at(0)
        assert not back.book.open
        assert seen(go(playback, at_ns)) == was
        go(playback, reel.at(reel.total_ns))
        again = go(playback, at_ns)
        assert seen(again) == was
        assert reported(again.book) == alerts
        assert again.state.now_ns == at_ns


def test_a_short_seek_runs_in_portions_and_can_be_replaced(slow, monkeypatch):
    monkeypatch.setattr("ddpwatch.session.run_follower.AT_ONCE", 8)
    with opened(slow[0]) as playback:
        first = go(playback, playback.reel.at(SECOND_NS))
        assert go(playback, playback.reel.at(3 * SECOND_NS)) is first
        playback.seek(playback.reel.at(9 * SECOND_NS))
        assert playback.catch_up(0.0), "all at once"
        assert 0.0 <= playback.progress < 1.0
        assert go(playback, playback.reel.at(2 * SECOND_NS)) is not first
        assert playback.progress is None
        assert playback.pace.now_ns == playback.reel.at(2 * SECOND_NS)


def test_the_batch_size_does_not_change_the_state(slow, monkeypatch):
    def arrived(at_once):
        monkeypatch.setattr("ddpwatch.session.run_follower.AT_ONCE", at_once)
        with opened(slow[0]) as playback:
            monitor = go(playback, playback.reel.at(8 * SECOND_NS))
            alerts = [(alert.key, alert.since, alert.last, alert.finding) for alert in monitor.book.open.values()]
            return status_object(current_view(monitor)), alerts, monitor.state.now_ns

    one_by_one = arrived(0)
    assert one_by_one == arrived(7) == arrived(512)


def test_steps_before_the_checkpoint_are_backfilled(tmp_path, checkpoints_often, monkeypatch):
    monkeypatch.setattr("ddpwatch.core.state.state_checkpoint.CHECKPOINT_STEPS", 8)
    monkeypatch.setattr("ddpwatch.core.state.state_checkpoint.checkpoint_messages.__defaults__", (8,))
    path = tmp_path / "short.ddpw"
    (live,) = tape(path, "slow-backward")
    with opened(path) as playback:
        monitor = go(playback, playback.reel.at(playback.reel.total_ns))
        assert playback.filling
        held = [len(rank.steps.indices()) for rank in monitor.state.ranks.values()]
        portions = 0
        while playback.filling:
            portions += playback.fill(0.001) == "steps"
        assert portions > 1
        assert [len(rank.steps.indices()) for rank in live.state.ranks.values()] != held
        was, now = Timeline(), Timeline()
        was.follow(live.state)
        now.follow(monitor.state)
        assert np.array_equal(now.steps(), was.steps())
        assert np.array_equal(now.series("step_ns", now.steps()), was.series("step_ns", was.steps()))
        assert monitor.state.bad == live.state.bad == 0


@pytest.mark.parametrize("kept", [8, 60])
@pytest.mark.parametrize("name", ["slow-backward", "healthy", "hang"])
def test_figures_need_only_a_partial_backfill(tmp_path, checkpoints_often, monkeypatch, kept, name):
    """Figures equal those of a full backfill, whether the checkpoint has enough steps or not."""
    monkeypatch.setattr("ddpwatch.core.state.state_checkpoint.CHECKPOINT_STEPS", kept)
    monkeypatch.setattr("ddpwatch.core.state.state_checkpoint.checkpoint_messages.__defaults__", (kept,))
    path = tmp_path / "short.ddpw"
    tape(path, name)
    for part in (0.6, 0.85, 1.0):
        with opened(path) as playback:
            monitor = go(playback, playback.reel.at(int(playback.reel.total_ns * part)))
            playback.fill_figures()
            reported = seen(monitor)
            assert playback.filling, "curves of GPUs, at least, are not"
            while playback.filling:
                playback.fill(1.0)
            assert seen(monitor) == reported


def test_backfill_stops_at_the_beginning(slow):
    with opened(slow[0]) as playback:
        go(playback, playback.reel.at(4 * SECOND_NS))
        for _ in range(10_000):
            if not playback.filling:
                break
            playback.fill(0.01)
        assert not playback.filling
        assert not playback.fill(0.01)


def test_an_alert_is_shown_from_its_opening_on(slow):
    with opened(slow[0]) as playback:
        at_ns = playback.opened[0].at_ns
        assert not go(playback, at_ns - 1).book.open
        key = next(iter(go(playback, at_ns).book.open))
        assert key in slow[1].book.open
        go(playback, playback.reel.at(0))
        assert playback.next_alert(1) == at_ns
        assert playback.next_alert(-1) is None
        go(playback, playback.reel.at(playback.reel.total_ns))
        assert playback.next_alert(1) is None
        assert playback.next_alert(-1) == playback.opened[-1].at_ns


def test_an_opening_has_the_worst_severity_of_its_alert(tmp_path):
    path = tmp_path / "run.ddpw"
    made_up(path, measured(Scenario(2, steps=30)), 2)
    reported = Finding("memory", Severity.INFO, "rank 1", "it is so", "do it")
    with closing(sqlite3.connect(path)) as database, database:
        (at_ns,) = database.execute("SELECT min(first_ns) FROM block").fetchone()
        at = Moment(1, at_ns, at_ns)
        for kind, severity in (
            ("opened", Severity.INFO),
            ("changed", Severity.CRITICAL),
            ("changed", Severity.WARNING),
        ):
            event = msgspec.json.encode(AlertEvent(kind, Alert(replace(reported, severity=severity), at, at)))
            database.execute(
                "INSERT INTO alert (attempt, at_ns, kind, event) VALUES (1, ?, ?, ?)", (at_ns, kind, event)
            )
    with opened(path) as playback:
        assert [alert.severity for alert in playback.opened] == [Severity.CRITICAL]


def test_previous_alert_from_the_end_and_while_playing_on(slow):
    now_ns = [0]
    with closing(Playback(Recording(slow[0]), speed=100.0, clock=lambda: now_ns[0])) as playback:
        *_, before, last = sorted({alert.at_ns for alert in playback.opened})
        go(playback, playback.reel.at(0))
        while not playback.at_end:
            now_ns[0] += SECOND_NS // 1000
            playback.follows.advance(0)
        assert playback.pace.playing
        assert playback.next_alert(-1) == last
        go(playback, last)
        now_ns[0] += SECOND_NS // 1000
        assert playback.pace.now_ns > last
        assert playback.next_alert(-1) == before


@pytest.mark.parametrize("speed", [0.5, 1.0, 100.0])
def test_repeated_previous_alert_reaches_the_first_one(slow, speed):
    """More than a second apart, in which it plays past the alert and others right after it."""
    now_ns = [0]
    with closing(Playback(Recording(slow[0]), speed=speed, clock=lambda: now_ns[0])) as playback:
        times_ns = sorted({alert.at_ns for alert in playback.opened})
        go(playback, playback.reel.at(playback.reel.total_ns))
        visited = []
        while (at_ns := playback.next_alert(-1)) is not None and len(visited) <= len(times_ns):
            visited.append(at_ns)
            go(playback, at_ns)
            now_ns[0] += 12 * SECOND_NS // 10
        assert visited == times_ns[::-1]
        # Later it counts as passed.
        now_ns[0] += 3 * SECOND_NS
        assert playback.next_alert(-1) is not None


def begun(folder, later_ns):
    """Two ranks of which the second connects later, and then trains."""
    messages = [
        (make_snap(0, steps=[make_step(index) for index in range(1, 6)]), 0),
        (make_snap(1, steps=[make_step(index) for index in range(1, 8)]), later_ns),
        (make_beat(0), 20 * SECOND_NS),
    ]
    path = folder / f"begun-{later_ns}.ddpw"
    return made_up(path, [made_up_frame(message, at_ns + SECOND_NS) for message, at_ns in messages], 2)


@pytest.mark.parametrize("later_ns", [0, 1, SECOND_NS // 5, 3 * SECOND_NS // 2])
def test_the_first_sight_is_the_first_common_step(folder, later_ns):
    with opened(begun(folder, later_ns)) as playback:
        sight_ns = playback.first_sight_ns
        assert sight_ns == playback.reel.at(later_ns)
        assert go(playback, sight_ns).state.ranks[1].steps.newest == 7


def test_the_first_sight_shows_a_long_wait_for_the_first_step(folder):
    with opened(begun(folder, 15 * SECOND_NS)) as playback:
        assert playback.reel.at(0) < playback.first_sight_ns < playback.reel.at(2 * SECOND_NS)


def test_the_first_sight_is_not_after_an_alert(folder):
    with opened(begun(folder, SECOND_NS)) as playback:
        early_ns, late_ns = playback.reel.at(SECOND_NS // 10), playback.reel.at(2 * SECOND_NS)
        playback.opened = tuple(Opened(at_ns, Severity.WARNING) for at_ns in (early_ns, late_ns))
        assert playback.first_sight_ns == early_ns
        go(playback, early_ns)
        assert playback.next_alert(1) == late_ns


def test_two_attempts_are_one_timeline_without_the_gap(twice):
    with opened(twice) as playback:
        first, second = playback.reel.spans
        assert second.first_ns - first.last_ns > 60 * SECOND_NS
        assert playback.reel.total_ns < 40 * SECOND_NS
        assert go(playback, first.last_ns).state.run_id == "5ec0de5ec0de5ec0"
        assert playback.at_end
        assert playback.place == 0
        monitor = go(playback, second.last_ns)
        assert (playback.place, monitor.state.run_id) == (1, "a9a195ec0de5ec0d")
        assert not [alert for alert in monitor.book.open.values() if alert.finding.rule == "straggler"]
        assert go(playback, (first.last_ns + second.first_ns) // 2).state.now_ns == first.last_ns


def test_a_growing_recording_is_followed_with_its_new_alerts(tmp_path):
    frames, path = received("slow-backward"), tmp_path / "growing.ddpw"
    early = len(frames) // 12
    with closing(recorder_at(path)) as recorder:
        record(recorder, frames[:early])
    with opened(path) as playback:
        monitor = go(playback, playback.reel.at(playback.reel.total_ns))
        assert playback.at_end
        assert not playback.refresh()
        assert not playback.opened
        with closing(recorder_at(path)) as recorder:
            record(recorder, frames[early:])
        assert playback.refresh()
        assert not playback.at_end
        assert playback.opened
        assert go(playback, playback.reel.at(playback.reel.total_ns)) is monitor
        assert monitor.state.step > 100
        assert monitor.book.open


def remove_before(path, at_ns):
    """Apply retention, as a recorder with a limit does."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        Retention(database, keep_s=None, max_bytes=None)._forget_before(at_ns)


@pytest.mark.usefixtures("checkpoints_often")
def test_retention_during_playback_is_not_damage_and_moves_the_start(tmp_path):
    path = tmp_path / "kept.ddpw"
    tape(path, "slow-backward")
    with opened(path) as playback:
        begin_ns, end_ns = playback.reel.spans[0]
        go(playback, begin_ns + SECOND_NS)
        remove_before(path, (begin_ns + end_ns) // 2)
        assert go(playback, end_ns).state.step > 100
        assert playback.recorded.damaged == 0
        assert playback.refresh()
        assert begin_ns + SECOND_NS < playback.reel.spans[0].first_ns < end_ns
        # What is shown stays until the viewer seeks.
        assert not playback.seeking
        assert len(go(playback, begin_ns).state.ranks) == 4
        assert playback.recorded.damaged == 0


@pytest.mark.usefixtures("checkpoints_often")
def test_playing_a_removed_part_continues_at_the_new_start(tmp_path):
    path = tmp_path / "kept.ddpw"
    tape(path, "slow-backward")
    with closing(Playback(Recording(path), clock=lambda: 0)) as playback:
        begin_ns, end_ns = playback.reel.spans[0]
        go(playback, begin_ns)
        remove_before(path, (begin_ns + end_ns) // 2)
        assert playback.refresh()
        assert not playback.catch_up()
        assert playback.pace.now_ns == playback.reel.spans[0].first_ns


@pytest.mark.usefixtures("checkpoints_often")
def test_a_removed_attempt_is_left_for_the_next(tmp_path):
    path = tmp_path / "twice.ddpw"
    tape(path, "slow-backward", "healthy")
    with opened(path) as playback:
        first, second = playback.reel.spans
        go(playback, second.last_ns)
        go(playback, first.last_ns)
        reported = playback.opened
        assert reported
        remove_before(path, second.last_ns)
        assert playback.refresh()
        assert not playback.catch_up()
        assert len(playback.reel.spans) == 1
        assert playback.place == 0
        assert playback.follows.monitor.state.run_id == "a9a195ec0de5ec0d"
        assert playback.opened == reported
        assert playback.recorded.damaged == 0


def test_a_recording_without_an_end_plays_up_to_its_last_frame(tmp_path):
    path = tmp_path / "killed.ddpw"
    tape(path, "slow-backward", upto_s=6.0)
    with closing(sqlite3.connect(path)) as database:
        database.execute("DELETE FROM block WHERE id = (SELECT max(id) FROM block)")
        database.execute("UPDATE alert SET event = x'7b00' WHERE id = 1")
        database.commit()
    with opened(path) as playback:
        monitor = go(playback, playback.reel.at(playback.reel.total_ns))
        # The last moment is only the end of the time that was followed.
        assert monitor.state.run_condition() in {"live", "silent"}
        assert monitor.state.step > 30
        assert playback.at_end


@pytest.mark.parametrize(
    ("text", "passed_s"),
    [("0%", 0), ("50%", None), ("100%", None), ("+2s", 2), ("+0m3s", 3), ("+4", 4), ("14:13:25", 5), ("14:13", 0)],
)
def test_moments_are_parsed(slow, text, passed_s):
    with opened(slow[0]) as playback:
        reel = playback.reel
        moment = playback.moment(text, UTC)
        if passed_s is None:
            assert reel.passed_ns(moment) == int(reel.total_ns * float(text.rstrip(" %")) / 100)
        else:
            assert abs(reel.passed_ns(moment) / 1e9 - passed_s) <= 1.0


def test_a_time_of_day_is_in_the_given_zone(slow):
    with opened(slow[0]) as playback:
        east = timezone(timedelta(hours=5, minutes=30))
        assert playback.moment("19:43:25", east) == playback.moment("2026-09-21 14:13:25", UTC)
        assert playback.moment("2026-09-21T14:13:25", UTC) == UNIX_NS + 5 * SECOND_NS
        # As in the JSON of alerts, and with a zone of its own.
        assert playback.moment("2026-09-21T14:13:25.123Z", east) == UNIX_NS + 5_123_000_000
        assert playback.moment("2026-09-21 19:43:25.5+05:30", UTC) == UNIX_NS + 5_500_000_000
        assert playback.moment("14:13:25.25", UTC) == UNIX_NS + 5_250_000_000
        assert playback.moment("2026-09-21T14:13", UTC) == playback.reel.at(0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "25:00",
        "03:61",
        "+",
        "+9h",
        "140%",
        "2026-02-30 03:00",
        "03:41",
        "-5s",
        "14:13:25.",
        "14:13:25+99:00",
    ],
)
def test_an_invalid_moment_is_refused_with_the_recorded_span(slow, text):
    with (
        opened(slow[0]) as playback,
        pytest.raises(NoMoment, match=r"recording is from 2026-09-21 14:13:2. to 14:13:3"),
    ):
        playback.moment(text, UTC)


def test_playback_can_start_before_an_alert(slow):
    with opened(slow[0]) as playback:
        at_ns = playback.opened[0].at_ns
        assert playback.before_alert(1, SECOND_NS // 2, UTC) == at_ns - SECOND_NS // 2
        # Before that there is nothing to see.
        assert playback.before_alert(1, 3600 * SECOND_NS, UTC) == playback.first_sight_ns > playback.reel.at(0)
        for number in (0, -1, 99):
            with pytest.raises(NoMoment, match=r"only 2 alerts in the recording, from"):
                playback.before_alert(number, 0, UTC)


def test_gpu_charts_reach_back_before_the_checkpoint(folder, checkpoints_often):
    now_ns = [time.monotonic_ns()]
    source = SimulatedSource(2, clock=lambda: now_ns[0], sleep=lambda _s: None)
    frames = []
    for _ in range(160):
        now_ns[0] += SECOND_NS // 4
        while isinstance(item := source.poll(0), Frame):
            frames.append(item)
    path = folder / "gpus.ddpw"
    with closing(recorder_at(path)) as recorder:
        live = record(recorder, frames)

    with opened(path) as playback:
        monitor = go(playback, playback.reel.at(playback.reel.total_ns))
        histories = [rank.gpus.histories for rank in monitor.state.ranks.values()]
        ((_, before),) = histories[0].items()
        assert before.count < 30
        found = []
        while playback.filling:
            found += filter(None, [playback.fill(0.01)])
        assert set(found) <= {"steps", "gpus"}
        assert found[-1] == "gpus"
        for rank, known in zip(live.state.ranks.values(), histories, strict=True):
            for device, history in rank.gpus.histories.items():
                assert history.times_ns().tolist() == known[device].times_ns().tolist()
                for name in CURVES:
                    np.testing.assert_array_equal(history.curve(name), known[device].curve(name))
        assert before.count > 30


def test_gpu_readings_come_from_all_messages_and_malformed_ones_are_skipped(tmp_path):
    """Readings in every kind of message, and malformed payloads under their topic."""
    earlier = [wire.GpuMoment(second * SECOND_NS, "cuda:0", util_percent=second) for second in range(1, 4)]
    hello = make_hello(0, 1, world_size=1)
    frames = [Frame(b"snap/0", wire.encode(make_snap(0, 1, [], hello, gpu_moments=earlier)), SECOND_NS)]
    for second in range(4, 60):
        gpu = wire.Gpu("cuda:0", util_percent=second, throttle=["sw_power_cap"] * (second % 2))
        reported = make_gpus(0, [gpu], seq=second, mono_ns=second * SECOND_NS)
        if second % 3 == 0:
            reported = make_beat(0, second, step=second, mono_ns=second * SECOND_NS, gpus=reported)
        frames.append(Frame(b"gpu", wire.encode(reported), second * SECOND_NS))
        frames.append(Frame(b"gpu", b"no message", second * SECOND_NS))
        frames.append(Frame(b"gpu", wire.encode(make_beat(7, 1)), second * SECOND_NS))
    path = made_up(tmp_path / "gpu.ddpw", frames, 1)
    with closing(Recording(path)) as recorded:
        (attempt,) = recorded.attempts
        state = RunState("x", "x", 1)
        late = make_gpus(0, [wire.Gpu("cuda:0", util_percent=60)], seq=60, mono_ns=60 * SECOND_NS)
        state.apply(late, attempt.last_ns)
        assert any(list(backfill_gpus(recorded, attempt, state, attempt.last_ns + 1)))
        history = state.ranks[0].gpus.histories["cuda:0"]
        assert history.curve("util_percent").tolist() == list(range(1, 61))
        assert history.held().tolist() == [NOT_REPORTED] * 3 + [(1 << 4) * (second % 2) for second in range(4, 60)] + [
            0
        ]
        assert not recorded.damaged
