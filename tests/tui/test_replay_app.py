"""The dashboard on a recording: its keys, the line with the position, and damaged or growing recordings."""

from __future__ import annotations

import re
import sqlite3
import time
from contextlib import asynccontextmanager, closing

import pytest

from ddpwatch.recording.reader import Recording
from ddpwatch.session.playback import Playback
from ddpwatch.simulator.scenario import Scenario
from ddpwatch.tui import replay_feed as replay_feed_module
from ddpwatch.tui.replay_app import AT_THE_END, ReplayDashboard
from ddpwatch.tui.replay_feed import ReplayFeed
from ddpwatch.tui.run_picker import RunPicker
from tests.builders.kept_runs import SECOND_NS, tape
from tests.builders.recordings import record_scenario
from tests.tui.stage import Stage, staged


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tape") / "twice.ddpw"
    tape(path, "slow-backward", "healthy")
    return path


class Replayed(Stage):
    """A replay that is up."""

    @property
    def playback(self) -> Playback:
        return self.app.recording.playback

    @property
    def passed_s(self) -> float:
        reel = self.playback.reel
        return reel.passed_ns(self.playback.pace.now_ns) / SECOND_NS

    @property
    def bar(self) -> str:
        return self.lines()[-2]

    async def arrives(self, passed_s: float, within_s: float = 0.01) -> None:
        """Wait until it is there, and drawn."""
        reel = self.playback.reel
        await self.until(
            lambda: (
                not self.playback.seeking
                and self.app.run_view is not None  # none has been worked out since, where cores are short
                and abs(self.passed_s - passed_s) <= within_s
                and abs(reel.passed_ns(self.app.run_view.state.now_ns) / SECOND_NS - passed_s) <= within_s + 0.01
            ),
            f"{passed_s} s",
        )
        await self.settle()


@asynccontextmanager
async def replayed(path, at="50%", size=(120, 40), *, playing=False, speed=1.0):
    from datetime import timezone

    playback = Playback(Recording(path), playing=playing, speed=speed)
    with closing(ReplayFeed(playback, playback.moment(at, timezone.utc))) as feed:
        app = ReplayDashboard(feed)
        async with app.run_test(size=size, notifications=True) as pilot:
            stage = Replayed(app, pilot)
            await stage.until(lambda: app.run_view is not None and stage.pane == "overview", "the first run view")
            await stage.until(lambda: not playback.filling, "older steps")
            # The line of time is longer when nothing stands beside it any more.
            await stage.until(lambda: "reading the past" not in stage.bar, "that no more are looked for")
            yield stage


async def test_every_screen_says_that_it_is_a_replay_and_where(path):
    async with replayed(path, "+7s") as stage:
        for key in "123456":
            await stage.press(key)
            await stage.settle()
            assert "REPLAY" in stage.header
            assert "LIVE" not in stage.text()
            assert "‖ ×1" in stage.bar
            assert "14:13:27" in stage.bar
            assert "attempt 1 of 2" in stage.bar
            assert "▲" in stage.bar
        assert "space play/pause" in stage.lines()[-1]
        await stage.press("question_mark")
        await stage.sees("go to the next or previous alert")


async def test_while_it_is_read_the_screen_says_so_and_not_that_there_is_no_run(path):
    with closing(Playback(Recording(path), playing=False)) as playback:
        picker = RunPicker(ReplayFeed(playback, playback.first_sight_ns).opening)

    (line,) = [line for line in picker._draw_picker(80, 24) if line]
    assert "".join(cell.text for cell in line).strip() == f"Reading {path.name} …"


async def test_space_plays_and_pauses_and_speed_is_chosen(path):
    async with replayed(path, "+2s") as stage:
        began_s = stage.passed_s
        await stage.press("plus", "plus", "plus")
        await stage.sees("‖ ×10")
        await stage.press("minus")
        await stage.sees("‖ ×5")
        assert stage.passed_s == began_s
        # So slow that a busy machine does not come to the end before the next key.
        await stage.press("minus", "minus")
        await stage.sees("‖ ×1")
        await stage.press("space")
        await stage.sees("▶ ×1")
        await stage.until(lambda: stage.passed_s > began_s + 0.5, "time passes")
        await stage.press("space")
        await stage.sees("‖ ×1")
        here_s = stage.passed_s
        await stage.settle()
        assert stage.passed_s == here_s


async def test_jumps_go_on_and_back_and_no_further_than_there_is(path):
    async with replayed(path, "+1s") as stage:
        total_s = stage.playback.reel.total_ns / SECOND_NS
        await stage.press("right_square_bracket")
        await stage.arrives(11)
        await stage.press("left_square_bracket")
        await stage.arrives(1)
        await stage.press("right_curly_bracket")
        await stage.arrives(total_s)
        await stage.press("left_curly_bracket")
        await stage.arrives(0)
        await stage.press("end")
        await stage.arrives(total_s)
        await stage.sees("attempt 2 of 2")
        await stage.press("home")
        first_s = stage.playback.reel.passed_ns(stage.playback.first_sight_ns) / SECOND_NS
        await stage.arrives(first_s)
        await stage.sees("attempt 1 of 2")
        # Where there is something to see, as at the start.
        assert first_s < 2.0
        assert "missing" not in stage.text()


async def test_the_alerts_are_gone_through_one_after_another(path):
    async with replayed(path, "0%") as stage:
        reel = stage.playback.reel
        times_s = [reel.passed_ns(alert.at_ns) / SECOND_NS for alert in stage.playback.opened]
        assert len(times_s) >= 2
        assert "straggler" not in stage.text()
        for at_s in times_s:
            await stage.press("n")
            await stage.arrives(at_s)
            assert stage.app.run_view.alerts
        await stage.press("n")
        await stage.sees("No later alert.")
        for at_s in reversed(times_s[:-1]):
            await stage.press("N")
            await stage.arrives(at_s)
            assert "No later alert." not in stage.text()
        await stage.press("N")
        await stage.sees("No earlier alert.")


async def test_one_step_on_and_back_within_what_is_known_and_beyond(path):
    async with replayed(path, "+7s", playing=True, speed=0.1) as stage:
        last = stage.app.run_view.last_step
        await stage.press("comma")
        await stage.until(lambda: stage.app.run_view.at is not None and stage.app.run_view.at < last + 5, "a step back")
        at = stage.app.run_view.at
        assert not stage.playback.pace.playing
        await stage.press("comma")
        await stage.until(lambda: stage.app.run_view.at == at - 1, "another one")
        assert "REPLAY" in stage.header
        assert "‖ STEP" in stage.header
        newest = stage.app.feed.timeline.newest
        for step in range(at, newest + 4):
            await stage.press("full_stop")
            await stage.until(lambda step=step: stage.app.run_view.last_step == step, f"step {step}")
        assert stage.app.run_view.last_step == newest + 3


async def test_at_the_end_a_step_on_says_that_it_is_the_end(path):
    async with replayed(path, "100%") as stage:
        await stage.press("full_stop")
        await stage.until(lambda: any(AT_THE_END in line for line in stage.lines()), "the word on it")


@pytest.mark.parametrize("at", ["+1s", "+7s", "50%", "100%"])
async def test_the_header_counts_what_the_keys_go_by(path, at):
    """One more for each key on and one less for each key back, over frames with several steps, and with a time
    that is always there.
    """

    def shown():
        assert re.search(r" · \d\d:\d\d:\d\d", stage.header)
        return [int(number) for number in re.findall(r"(?i:step) (\d+)", stage.header)]

    async with replayed(path, at) as stage:
        (step,) = set(shown())
        keys = ["comma"] * 4 if at == "100%" else ["full_stop"] * 12 + ["comma"] * 14
        for key in keys:
            step = max(step + (1 if key == "full_stop" else -1), 1)
            await stage.press(key)
            await stage.until(lambda step=step: set(shown()) == {step}, f"step {step}")
            await stage.settle()
            assert set(shown()) == {step}


async def test_the_header_says_that_it_stands_at_a_step_from_the_first_key_on(path):
    async with replayed(path, "+7s", playing=True, speed=0.1) as stage:
        assert "‖ STEP" not in stage.header
        await stage.press("space")
        await stage.until(lambda: f"‖ STEP {stage.app.run_view.last_step} " in stage.header, "standing still")
        step = stage.app.run_view.last_step
        for _ in range(6):
            step += 1
            await stage.press("full_stop")
            await stage.until(lambda step=step: f"‖ STEP {step} " in stage.header, f"step {step}")
        await stage.press("space")
        await stage.until(lambda: "‖ STEP" not in stage.header, "playing")


async def test_back_beyond_what_is_kept_is_one_step_back(tmp_path):
    scenario = Scenario(2, steps=1500, seed=5)
    async with replayed(record_scenario(tmp_path / "long.ddpw", scenario), "90%") as stage:
        await stage.press(*["shift+left"] * 40)
        oldest = stage.app.feed.oldest
        await stage.until(lambda: stage.app.run_view.at == oldest, "the oldest step")
        for step in range(oldest - 1, oldest - 4, -1):
            await stage.press("comma")
            await stage.until(lambda step=step: f"STEP {step} " in stage.header.upper(), f"step {step}")
            await stage.settle()
            assert stage.app.run_view.last_step == step
        assert stage.app.feed.oldest < oldest


async def test_the_arrows_go_through_the_steps_and_stand_still(path):
    async with replayed(path, "+7s", playing=True, speed=0.1) as stage:
        await stage.press("left")
        await stage.until(lambda: stage.app.run_view.at is not None, "a step back")
        assert not stage.playback.pace.playing
        at = stage.app.run_view.at
        await stage.press("left")
        await stage.until(lambda: stage.app.run_view.at == at - 1, "another one")
        await stage.press("space")
        await stage.until(lambda: stage.playback.pace.playing and stage.app.run_view.at is None, "it plays on")


async def test_a_time_is_typed_and_an_invalid_one_is_refused(path):
    async with replayed(path, "+1s") as stage:
        for text, at_s in (("14:13:29", 9.0), ("+3s", 3.0), ("25%", stage.playback.reel.total_ns / 4e9)):
            await stage.press("g")
            await stage.sees("go to 03:41")
            await stage.press(*(letter if letter.isalnum() else _KEYS[letter] for letter in text), "enter")
            await stage.arrives(at_s)
        await stage.press("g", "s", "o", "o", "n", "enter")
        await stage.sees("'soon' is not a moment")
        # In the field these keys are letters, and lead nowhere.
        await stage.press("home", "g", "end", "g")
        assert stage.app.query_one("#goto").value == "gsoong"
        await stage.press("escape")
        await stage.until(lambda: not stage.app.query_one("#goto").has_class("open"), "it closes")
        assert abs(stage.passed_s - stage.playback.reel.total_ns / 4e9) < 0.01


async def test_a_time_is_typed_with_its_key_in_one_burst(path):
    async with replayed(path, "+1s") as stage:
        await stage.burst("g+3s\r5")
        await stage.arrives(3.0)
        await stage.shows("alerts")
        assert stage.app.query_one("#goto").value == ""


_KEYS = {":": "colon", "+": "plus", "%": "percent_sign"}


async def test_a_click_on_the_line_goes_there(path):
    async with replayed(path, "0%") as stage:
        row = len(stage.lines()) - 2
        first, last = stage.bar.index("●"), stage.bar.rindex("─")
        column = first + (last - first) // 4
        await stage.pilot.click(offset=(column, row))
        part = (column - first + 0.5) / (last + 1 - first)
        await stage.arrives(part * stage.playback.reel.total_ns / SECOND_NS, within_s=0.2)
        assert abs(stage.bar.index("●") - column) <= 1


async def test_it_plays_into_the_next_attempt_by_itself(path, monkeypatch):
    monkeypatch.setattr(replay_feed_module, "REST_S", 0.0)
    async with replayed(path, "+8s", playing=True, speed=20.0) as stage:
        await stage.until(lambda: stage.playback.place == 1, "the next attempt")
        await stage.sees("attempt 2 of 2")
        await stage.until(lambda: stage.app.feed.ended, "the end")
        await stage.sees("■ ENDED", "7 summary")
        assert stage.pane == "overview"
        await stage.press("7")
        await stage.shows("summary")
        await stage.press("space", "home")
        await stage.sees("attempt 1 of 2")
        await stage.shows("overview")
        assert "summary" not in stage.lines()[1]


async def test_eighty_columns_have_room_for_it(path):
    async with replayed(path, "+7s", (80, 24)) as stage:
        assert all(text in stage.bar for text in ("‖ ×1", "14:13:27", "●", "attempt 1 of 2"))
        assert "q quit" in stage.lines()[-1]
        assert len(stage.lines()) == 24


async def test_a_long_way_says_how_far_it_is(path, monkeypatch):
    monkeypatch.setattr("ddpwatch.session.run_follower.AT_ONCE", 8)
    async with replayed(path, "+1s") as stage:
        stage.playback.seek(stage.playback.reel.at(9 * SECOND_NS))
        assert stage.playback.catch_up(0.0)
        line = "".join(cell.text for cell in stage.app._bar(120, 1)[0])
        assert "… " in line
        assert "%" in line
        await stage.arrives(9)
        await stage.until(lambda: "…" not in stage.bar, "the line to say so")


async def test_what_takes_long_to_be_filled_in_says_so_until_it_is_there(path, monkeypatch):
    held = [True]

    def nothing_yet(playback, _budget_s):
        if not held:
            playback._filling = None
        return ""

    monkeypatch.setattr(Playback, "fill", nothing_yet)
    monkeypatch.setattr(replay_feed_module, "LONG_FILL_S", 0.0)
    with closing(Playback(Recording(path), playing=False)) as playback:
        feed = ReplayFeed(playback, playback.reel.at(7 * SECOND_NS))
        async with ReplayDashboard(feed).run_test(size=(120, 40)) as pilot:
            stage = Replayed(pilot.app, pilot)
            await stage.until(lambda: "reading earlier steps" in stage.bar, "the line to say so")
            assert "●" in stage.bar
            held.clear()
            await stage.until(lambda: "reading the past" not in stage.bar, "the line to be quiet again")


async def test_readings_of_gpus_leave_the_chart_of_steps_alone(path, monkeypatch):
    """It would be worked out anew each time, which takes longer than the readings do."""
    found = ["gpus"]
    monkeypatch.setattr(Playback, "fill", lambda *_: found[0])
    with closing(Playback(Recording(path), playing=False)) as playback:
        feed = ReplayFeed(playback, playback.reel.at(7 * SECOND_NS))
        while playback.seeking:
            feed.advance()
        feed.run_view(at=None, paused=False, force=True)
        monkeypatch.setattr(feed, "_fill_due_s", 0.0)
        before = feed.timeline
        assert feed.advance()
        assert feed.timeline is before
        found[0] = "steps"
        assert feed.advance()
        assert feed.timeline is not before
        assert feed.timeline.newest == before.newest


async def test_a_damaged_recording_is_shown_as_far_as_it_can_be_read(path, tmp_path):
    torn = tmp_path / "torn.ddpw"
    torn.write_bytes(path.read_bytes())
    with closing(sqlite3.connect(torn)) as database:
        numbers = [number for (number,) in database.execute("SELECT id FROM block ORDER BY id")]
        database.execute("UPDATE block SET data = x'00112233' WHERE id = ?", (numbers[2],))
        database.execute("UPDATE alert SET event = x'00' WHERE id = 1")
        database.commit()
    async with replayed(torn, "+7s") as stage:
        await stage.sees("+ frames unreadable, maybe alerts", "REPLAY")
        assert stage.app.run_view.last_step > 10


async def test_at_its_end_a_damaged_recording_says_how_much_of_all_of_it_is_missing(path, tmp_path):
    torn = tmp_path / "torn.ddpw"
    torn.write_bytes(path.read_bytes())
    with closing(sqlite3.connect(torn)) as database, database:
        (attempt,) = database.execute("SELECT max(attempt) FROM block").fetchone()
        (block, frames) = database.execute(
            "SELECT id, frames FROM block WHERE attempt = ? AND shard >= 0 ORDER BY id LIMIT 1 OFFSET 2", (attempt,)
        ).fetchone()
        database.execute("UPDATE block SET data = x'00112233' WHERE id = ?", (block,))
    async with replayed(torn, "100%") as stage:
        await stage.sees("■ ENDED", "7 summary")
        await stage.press("7")
        await stage.shows("summary")
        await stage.sees(f"The recording is damaged: 1 part could not be read, {frames} of ", "frames are missing.")
        await stage.sees(f"▲ {frames} frames unreadable")


async def test_what_stands_in_a_recording_is_text_and_nothing_else(path, tmp_path):
    evil = tmp_path / "evil.ddpw"
    evil.write_bytes(path.read_bytes())
    with closing(sqlite3.connect(evil)) as database:
        (text,) = database.execute("SELECT event FROM alert WHERE kind = 'opened'").fetchone()
        changed = bytes(text).replace(b'"message":"', b'"message":"\\u001b[2J[bold red]evil[/] \\u202e')
        database.execute("UPDATE alert SET event = ? WHERE kind = 'opened'", (changed,))
        database.commit()
    async with replayed(evil, "0%") as stage:
        await stage.press("n", "5")
        await stage.sees("[bold red]evil[/]")
        assert "\x1b" not in stage.text()
        assert "\u202e" not in stage.text()


async def test_a_live_run_has_no_line_for_it_and_its_keys_do_not_work():
    from tests.tui.stage import played

    async with staged(played("healthy")) as stage:
        assert not stage.app.query("#replay")
        await stage.press("n", "full_stop", "plus")
        assert "REPLAY" not in stage.text()


@pytest.mark.parametrize("size", [(120, 40), (80, 24)])
async def test_errors_of_a_recording_being_written_are_shown(size):
    from types import SimpleNamespace

    from ddpwatch.core.limits import DEFAULTS
    from ddpwatch.tui.feed import Feed
    from tests.tui.stage import no_runs, played

    recorder = SimpleNamespace(write_error="", dropped_frames=0)
    follower = played("healthy", upto=120)
    feed = Feed(DEFAULTS, follows=follower, find=no_runs, recorder=recorder)
    async with staged(follower, size, feed=feed) as stage:
        assert "◉ REC" in stage.header
        recorder.write_error = "cannot write run.ddpw: database or disk is full"
        follower.go_on(10)
        await stage.sees("▲ REC", "▲ not recorded: cannot write run.ddpw: database or d")
        assert "q quit" in stage.lines()[-1]
        recorder.write_error, recorder.dropped_frames = "", 12
        follower.go_on(10)
        await stage.sees("▲ not recorded: 12 frames")
