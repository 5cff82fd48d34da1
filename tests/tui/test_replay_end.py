"""The end of a replay shows what the live dashboard showed when the run ended, however it was reached."""

from __future__ import annotations

import re
import time
from contextlib import closing

import pytest

from ddpwatch import wire
from ddpwatch.core.limits import DEFAULTS
from ddpwatch.recording.reader import Recording
from ddpwatch.session.playback import Playback
from ddpwatch.session.run_follower import RunFollower
from ddpwatch.simulator.scenario import Fault, Scenario
from ddpwatch.sources.frames import Frame
from ddpwatch.tui import replay_feed as replay_feed_module
from ddpwatch.tui.feed import Feed
from ddpwatch.tui.replay_feed import ReplayFeed
from ddpwatch.view.cells import plain
from ddpwatch.view.header import header_line
from ddpwatch.view.summary import summary_lines
from tests.builders.kept_runs import ReceivedFrames, received, record, recorder_at, run_file
from tests.builders.scenario_frames import frames

MAX_S = 60.0
STEPS = 1500
SCENARIO = Scenario(
    4, steps=STEPS, seed=7, evaluate_every=97, faults=(Fault((2,), "backward", 0.3, onset=0, burst=(500, STEPS)),)
)
"""Longer than what is kept of single steps, and slow where a seek to the end does not look."""


def shown(run_view) -> list[str]:
    """The summary, without the keys below it, and the step of the header."""
    lines = [plain(line).rstrip() for line in summary_lines(run_view, 100, 200, duration_s=60)]
    step = re.search(r" step ([\d,]+) ", plain(header_line(run_view, 160)))
    return [f"step {step[1]}", *(line for line in lines if not line.startswith(("1-6", "home", "r ", "q ")))]


@pytest.fixture(scope="module")
def lived(tmp_path_factory):
    """The file, and what was shown when it was live."""
    path = tmp_path_factory.mktemp("lived") / "run.ddpw"
    reported = list(frames(SCENARIO))
    last_ns, number = reported[-1].received_ns, 10 * STEPS
    byes = [wire.Bye(rank=rank, seq=number, reason="exit", text="", mono_ns=1) for rank in range(4)]
    reported += [Frame(b"event", wire.encode(bye), last_ns) for bye in byes]
    with closing(recorder_at(path)) as recorder:
        follower = RunFollower(run_file(), source=ReceivedFrames(reported), recorder=recorder)
        recorder._due_ns = 0
        with closing(Feed(DEFAULTS, follows=follower, find=None, recorder=recorder)) as feed:
            while not feed.ended:
                feed.advance()
                while recorder._backlog:
                    time.sleep(0.001)
                feed.run_view(at=None, paused=False, force=True)
            return path, shown(feed.run_view(at=None, paused=False, force=True))


def until(feed: ReplayFeed, condition) -> None:
    deadline_s = time.monotonic() + MAX_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        feed.advance()


def test_a_seek_to_the_end_shows_in_the_end_what_live_showed(lived):
    path, was = lived
    assert was[0] == "step 1,500"
    assert any("median of the whole run" in line for line in was)
    assert any("rank 2" in line and "of the whole run" in line for line in was)
    with closing(Playback(Recording(path), playing=False)) as playback:
        feed = ReplayFeed(playback, playback.reel.spans[-1].last_ns)
        until(feed, lambda: feed.ended)
        early = shown(feed.run_view(at=None, paused=False, force=True))
        assert early[0] == was[0]
        assert any("reading the others" in line for line in early), "it shows only a part, and says so"
        until(feed, lambda: playback.whole.done)
        assert shown(feed.run_view(at=None, paused=False)) == was, "there is news, which shows"


def test_it_is_read_once_and_gone_on_with_where_one_has_left(lived, monkeypatch):
    monkeypatch.setattr(replay_feed_module, "FILL_S", 0.001)
    path, was = lived
    with closing(Playback(Recording(path), playing=False)) as playback:
        end_ns = playback.reel.spans[-1].last_ns
        feed = ReplayFeed(playback, end_ns)
        until(feed, lambda: 0.1 < playback.whole.part < 1)
        whole = playback.whole
        feed.seek(playback.reel.spans[0].first_ns)
        until(feed, lambda: not playback.seeking)
        part = whole.part
        for _ in range(5):
            feed.advance()
        assert whole.part == part, "the end is not shown"
        feed.seek(end_ns)
        until(feed, lambda: playback.whole.done)
        assert playback.whole is whole
        assert shown(feed.run_view(at=None, paused=False, force=True)) == was


def test_standing_before_the_end_it_is_known_what_was_recorded_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_feed_module, "REFRESH_S", 0.0)
    reported, path = received("slow-backward"), tmp_path / "growing.ddpw"
    early = len(reported) // 12
    with closing(recorder_at(path)) as recorder:
        record(recorder, reported[:early])
    with closing(Playback(Recording(path), playing=False)) as playback:
        feed = ReplayFeed(playback, playback.reel.at(playback.reel.total_ns // 2))
        until(feed, lambda: not playback.seeking)
        before = feed.position
        with closing(recorder_at(path)) as recorder:
            record(recorder, reported[early:])
        until(feed, lambda: feed.position.total_s > 2 * before.total_s)
        assert feed.position.at_ns == before.at_ns
        assert feed.position.marks
        assert not before.marks


def test_paused_before_the_end_the_last_finished_step_is_shown(lived):
    path, _ = lived
    with closing(Playback(Recording(path), playing=False)) as playback:
        feed = ReplayFeed(playback, playback.reel.at(playback.reel.total_ns // 2))
        until(feed, lambda: not playback.seeking)
        drawn = feed.run_view(at=None, paused=False, force=True)
        assert drawn.by_steps
        assert f" step {drawn.last_step} " in plain(header_line(drawn, 160))
        playback.pace.playing = True
        drawn = feed.run_view(at=None, paused=False, force=True)
        assert f" step {drawn.totals.step} " in plain(header_line(drawn, 160))
