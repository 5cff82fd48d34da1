"""A recording as a source: recorded times at any pace, with a simulated clock."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.recording.reader import Recorded
from ddpwatch.recording.replay import Pace, Reel, Replay, Span
from ddpwatch.sources.frames import Frame, Tick
from tests.builders.kept_runs import SECOND_NS, UNIX_NS, received, record, recorder_at, tape


class Clock:
    """Clock that advances only by `sleep`."""

    def __init__(self) -> None:
        self.now_ns = 5 * SECOND_NS

    def __call__(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tape") / "slow.ddpw"
    tape(path, "slow-backward")
    return path


def replay(recorded: Recorded, clock: Clock, *, at_s: float = 0.0, speed: float = 1.0, playing: bool = True) -> Replay:
    attempt = recorded.attempts[0]
    pace = Pace(attempt.first_ns + int(at_s * SECOND_NS), speed, playing=playing, clock=clock)
    start = recorded.restore(attempt, pace.now_ns, attempt.new_state())
    return Replay(recorded, attempt, pace, start=start, end_ns=attempt.last_ns, sleep=clock.sleep)


def test_the_pace_follows_speed_pause_and_hold(clock):
    pace = Pace(1000 * SECOND_NS, 10.0, clock=clock)
    clock.sleep(2)
    assert pace.now_ns == 1020 * SECOND_NS
    pace.speed = 0.5
    clock.sleep(2)
    assert pace.now_ns == 1021 * SECOND_NS
    pace.playing = False
    clock.sleep(60)
    assert pace.now_ns == 1021 * SECOND_NS
    pace.playing = True
    pace.hold(True)
    pace.move(7 * SECOND_NS)
    clock.sleep(60)
    assert (pace.now_ns, pace.playing, pace.running) == (7 * SECOND_NS, True, False)
    pace.hold(False)
    clock.sleep(2)
    assert pace.now_ns == 8 * SECOND_NS


@pytest.mark.parametrize("speed", [0.5, 1.0, 40.0])
def test_frames_come_when_due_with_their_recorded_times(path, clock, speed):
    with closing(Recorded(path)) as recorded:
        source = replay(recorded, clock, speed=speed)
        began_ns, first_ns = clock.now_ns, recorded.attempts[0].first_ns
        frames, ticks = [], 0
        while len(frames) < 300:
            item = source.poll()
            if isinstance(item, Tick):
                ticks += 1
                assert item.now_ns <= source.pace.now_ns
            else:
                frames.append(item)
                assert item.received_ns <= source.pace.now_ns
                passed_ns = (clock.now_ns - began_ns) * speed
                assert passed_ns - (item.received_ns - first_ns) < 0.1 * SECOND_NS * speed + 10
        assert ticks > 10
        assert all(earlier.received_ns <= later.received_ns for earlier, later in pairwise(frames))
        kept = [entry for entry in recorded.entries(recorded.attempts[0]) if entry.position > source._after][:300]
        assert [(frame.topic, frame.payload) for frame in frames] == [(entry.topic, entry.payload) for entry in kept]


def test_time_waits_for_a_slow_viewer(path, clock):
    with closing(Recorded(path)) as recorded:
        source = replay(recorded, clock)
        while isinstance(source.poll(0), Frame):
            pass
        clock.sleep(3600)
        late = source.poll(0)
        assert isinstance(late, Frame)
        assert source.pace.now_ns - late.received_ns < SECOND_NS
        assert not source.at_end


def test_time_stops_at_the_end(path, clock):
    with closing(Recorded(path)) as recorded:
        source = replay(recorded, clock, at_s=8.0)
        last_ns = recorded.attempts[0].last_ns
        assert not source.at_end
        while not source.at_end:
            source.poll()
        clock.sleep(60)
        assert source.poll(0) == Tick(last_ns)
        assert source.pace.now_ns == last_ns


def test_a_growing_recording_continues_where_it_ended(tmp_path, clock):
    frames = received("slow-backward")
    half, path = len(frames) // 2, tmp_path / "growing.ddpw"
    with closing(recorder_at(path)) as recorder:
        record(recorder, frames[:half])
    with closing(Recorded(path)) as recorded:
        source = replay(recorded, clock)
        seen = []
        while not source.at_end:
            seen.append(source.poll())
        with closing(recorder_at(path)) as recorder:
            record(recorder, frames[half:])
        recorded.refresh()
        (attempt,) = recorded.attempts
        source.extend(attempt, attempt.last_ns)
        assert not source.at_end
        while not source.at_end:
            seen.append(source.poll())
        payloads = [item.payload for item in seen if isinstance(item, Frame)]
        # All of them once; the first is in the checkpoint.
        assert payloads == [frame.payload for frame in frames][-len(payloads) :]
        assert len(payloads) >= len(frames) - 1


def test_damaged_parts_are_skipped(path, tmp_path, clock):
    torn = tmp_path / "torn.ddpw"
    torn.write_bytes(path.read_bytes())
    with closing(sqlite3.connect(torn)) as database:
        numbers = [number for (number,) in database.execute("SELECT id FROM block ORDER BY id")]
        database.execute("UPDATE block SET data = x'00112233' WHERE id IN (?, ?)", (numbers[3], numbers[5]))
        database.execute("UPDATE checkpoint SET data = x'28b52ffd'")
        database.commit()
    with closing(Recorded(torn)) as recorded:
        source = replay(recorded, clock, speed=20.0)
        frames = 0
        while not source.at_end:
            frames += isinstance(source.poll(), Frame)
        assert frames > 100
        assert recorded.damaged >= 2


def test_long_silence_is_skipped_with_few_queries(tmp_path, clock):
    path = tmp_path / "gap.ddpw"
    frames = received("slow-backward", upto_s=3.0)
    week_ns = 7 * 86_400 * SECOND_NS
    later = [frame._replace(received_ns=frame.received_ns + week_ns) for frame in frames]
    with closing(recorder_at(path)) as recorder:
        record(recorder, frames + later)
    with closing(Recorded(path)) as recorded:
        source = replay(recorded, clock, at_s=1.0, playing=False)
        asked = []
        entries = recorded.entries
        recorded.entries = lambda attempt, **limits: asked.append(limits) or entries(attempt, **limits)
        source.pace.move(UNIX_NS + week_ns // 2)
        while isinstance(source.poll(0), Frame):
            pass
        assert source.next_ns >= UNIX_NS + week_ns
        assert len(asked) < 40


spans = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=5)


@given(spans, st.integers(-(10**6), 10**7))
def test_moments_and_offsets_of_a_reel_map_one_to_one(gaps, passed_ns):
    at_ns, made = 0, []
    for gap, length in gaps:
        made.append(Span(at_ns + gap + 1, at_ns + gap + 1 + length))
        at_ns = made[-1].last_ns
    reel = Reel(made)
    inside = min(max(passed_ns, 0), reel.total_ns)
    moment = reel.at(passed_ns)
    assert reel.passed_ns(moment) == inside
    assert reel.clamp(moment) == moment
    assert made[reel.place(moment)].first_ns <= moment <= made[reel.place(moment)].last_ns
