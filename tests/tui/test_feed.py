"""Where the dashboard's data comes from: real sockets of ranks that are played, and run directories as they are."""

from __future__ import annotations

import os
import time
from contextlib import closing

import msgspec
import pytest

from ddpwatch import rundir, wire
from ddpwatch.core.limits import DEFAULTS
from ddpwatch.core.metrics.scaling import Profile
from ddpwatch.errors import RunDirRefused
from ddpwatch.tui import feed as feed_module
from ddpwatch.tui.feed import Feed
from tests.builders.fake_rank import FakeRun, make_run_file, make_step
from tests.tui.stage import Played, no_runs, played, recorded, staged

OTHER_ID = "ffffcd34ab12cd34"
THIRD_ID = "eeeecd34ab12cd34"
MAX_S = 20.0
NOW_S = 1_800_000_000.0


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(feed_module, "SEARCH_S", 0.02)


def advance_until(feed: Feed, condition) -> None:
    deadline_s = time.monotonic() + MAX_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        feed.advance()
        time.sleep(0.005)


def test_it_waits_and_attaches_by_itself_to_the_only_run(run_dir):
    with closing(Feed(DEFAULTS)) as feed:
        feed.advance()
        assert (feed.ready, feed.choices, feed.search_error) == (False, [], "")
        assert feed.run_view(at=None, paused=False, force=True) is None
        with FakeRun(run_dir, 2) as run:
            run.train(0, 40)
            advance_until(feed, lambda: feed.ready)
            # A late viewer has the history at once.
            drawn = feed.run_view(at=None, paused=False)
            assert drawn.last_step == 39
            assert drawn.state.name == "train"
            assert feed.run_view(at=None, paused=False) is None, "nothing has come since"
            run.train(40, 5)
            ranks = feed.follows.monitor.state.ranks.values()
            advance_until(feed, lambda: all(rank.steps.newest == 44 for rank in ranks))
            assert feed.run_view(at=None, paused=False, force=True).last_step == 44


def test_a_few_frames_are_worth_a_look_and_not_only_silence(run_dir, monkeypatch):
    monkeypatch.setattr(feed_module, "SILENCE_S", 3600.0)
    with closing(Feed(DEFAULTS)) as feed, FakeRun(run_dir, 2) as run:
        run.train(0, 40)
        advance_until(feed, lambda: feed.ready)
        feed.run_view(at=None, paused=False)
        run.train(40, 5)

        def is_shown():
            drawn = feed.run_view(at=None, paused=False)
            return drawn is not None and drawn.last_step == 44

        advance_until(feed, is_shown)


def test_where_a_walk_over_all_ranks_takes_long_the_run_view_is_refreshed_until_the_next_one(run_dir, monkeypatch):
    for name, value in {"WALK_SHARE": 1e-9, "MAX_WALK_S": 3600.0, "MIN_VIEW_S": 0.0, "REFRESH_S": 0.0}.items():
        monkeypatch.setattr(feed_module, name, value)
    with closing(Feed(DEFAULTS)) as feed, FakeRun(run_dir, 2) as run:
        run.train(0, 40)
        advance_until(feed, lambda: feed.ready)
        first = feed.run_view(at=None, paused=False)
        run.train(40, 5)
        ranks = feed.follows.monitor.state.ranks.values()
        advance_until(feed, lambda: all(rank.step == 45 for rank in ranks))
        feed._changed = True
        second = feed.run_view(at=None, paused=False)
        assert second.figures is first.figures
        assert (first.totals.step, second.totals.step) == (40, 45)
        assert feed.run_view(at=None, paused=False) is None, "nothing has come since"
        assert feed.run_view(at=None, paused=False, force=True).last_step == 44, "it is forced"
        assert feed.run_view(at=30, paused=True, force=True).last_step == 30
        feed._changed = True
        assert feed.run_view(at=None, paused=False).last_step == 44, "the last one is of another step"
        feed._walk_due_s, feed._changed = 0.0, True
        assert feed.run_view(at=None, paused=False).figures is not first.figures, "it is time"


def test_several_runs_are_offered_and_the_last_one_left_is_taken(run_dir):
    with closing(Feed(DEFAULTS)) as feed, FakeRun(run_dir, 1):
        with FakeRun(run_dir, 1, run_id=OTHER_ID, name="other"):
            advance_until(feed, lambda: len(feed.choices) == 2)
            assert feed.follows is None
        for file in (run_dir / OTHER_ID).iterdir():
            file.unlink()
        advance_until(feed, lambda: feed.ready)
        assert feed.run.name == "train"
        assert feed.choices == []


def test_a_run_that_ended_stays_and_the_same_job_started_again_is_followed_but_no_other(run_dir):
    with closing(Feed(DEFAULTS)) as feed:
        with FakeRun(run_dir, 2) as run:
            run.train(0, 30)
            advance_until(feed, lambda: feed.ready)
            for rank in run.ranks:
                rank.say_bye()
            advance_until(feed, lambda: feed.ended)
        first = feed.follows
        foreign = make_run_file(run_dir, 2, run_id=OTHER_ID, name="other", job="another")
        feed._find = lambda: [run.file, foreign]
        for _ in range(5):
            feed._search_due_s = 0.0
            feed.advance()
        assert feed.follows is first
        assert feed.restarts == 0
        assert feed.run_view(at=None, paused=False, force=True).last_step == 29
        with FakeRun(run_dir, 2, run_id=THIRD_ID) as again:
            again.train(0, 5)
            feed._find = lambda: [foreign, run.file, again.file]
            advance_until(feed, lambda: feed.ready and feed.follows is not first)
            assert (feed.run.id, feed.restarts, feed.ended) == (THIRD_ID, 1, False)
            assert feed.run_view(at=None, paused=False, force=True).last_step == 4


@pytest.mark.parametrize(
    ("name", "started_s", "followed"),
    [
        ("train", -3600.0, True),
        ("train-2026-11-02", 0.0, True),
        ("train_2", 0.0, True),
        ("train-2026-11-02", -3600.0, False),
        ("trained", 0.0, False),
        ("2026-11-02", 0.0, False),
    ],
)
def test_the_same_job_is_one_with_its_name_or_one_that_came_later_and_differs_in_numbers(name, started_s, followed):
    with closing(Feed(DEFAULTS, find=list)) as feed:
        feed.run, feed.ended, feed._ended_unix_s = _file("train", 0.0), True, NOW_S
        other = _file(name, NOW_S + started_s, OTHER_ID)
        feed.attach = lambda run: setattr(feed, "run", run)
        feed._find = lambda: [feed.run, other]
        feed.advance()

        assert (feed.run is other) is followed
        # A run that has started since and may be another job is listed.
        assert [run.name for run in feed.newer] == ([] if followed or started_s else [name])


def test_two_jobs_without_letters_in_their_names_are_not_the_same():
    assert not feed_module._alike("1", "2")
    assert not feed_module._alike("", "")


def _file(name: str, started_s: float, run_id: str = "ab12cd34ab12cd34") -> rundir.RunFile:
    return rundir.RunFile(1, run_id, name, "", 0, 1, started_s, [])


def test_there_is_a_way_back_to_the_other_runs_only_where_there_are_some(run_dir):
    with FakeRun(run_dir, 1) as run, closing(Feed(DEFAULTS)) as feed:
        advance_until(feed, lambda: feed.ready)
        first = feed.follows
        assert feed.choose() is False
        assert feed.follows is first
        with FakeRun(run_dir, 1, run_id=OTHER_ID, name="other"):
            assert feed.choose() is True
            assert (feed.ready, feed.choosing, len(feed.choices)) == (False, True, 2)
            # It goes on being followed, so that there is a way back to it.
            run.train(0, 20)
            advance_until(feed, lambda: feed.follows.monitor.state.step == 20)
            feed.stay()
            assert (feed.ready, feed.choices, feed.follows) == (True, [], first)
            assert feed.choose() is True
            feed.pick(run.file)
            assert (feed.ready, feed.follows) == (True, first)
            assert feed.choose() is True
        feed._find = lambda: [run.file]
        advance_until(feed, lambda: not feed.choosing)
        assert feed.follows is first
        assert not first.monitor.state.ranks[0].bye
        assert rundir.alive(run.file.endpoints[0], rundir.node_id())


@pytest.mark.parametrize("settings", [{"find": None}, {"find": no_runs, "simulated": True}])
def test_of_a_run_that_stands_alone_there_is_no_way_to_others(settings):
    with closing(Feed(DEFAULTS, follows=played("healthy"), **settings)) as feed:
        assert not feed.choosable
        assert feed.choose() is False
        assert feed.ready


def test_an_error_of_the_run_directory_is_shown_until_it_is_gone(run_dir):
    def refuse():
        raise RunDirRefused("cannot read the run directory: Permission denied")

    with closing(Feed(DEFAULTS, find=refuse)) as feed:
        assert feed.advance(), "there is something new to see"
        assert "Permission denied" in feed.search_error
        feed._find, feed._search_due_s = (list), 0.0
        assert feed.advance()
        assert feed.search_error == ""


def test_a_simulated_run_looks_for_no_other_after_its_end():
    def never():
        raise AssertionError("it looked")

    feed = Feed(DEFAULTS, follows=played("healthy"), find=never, simulated=True)
    feed.follows.end_well()
    feed.advance()
    assert feed.ended
    feed.advance()
    assert feed.run_view(at=None, paused=False, force=True).simulated


def test_with_a_baseline_every_run_view_has_the_scaling():
    one = Profile(1, 100, 10e6, 1000.0, 10, 1e6, 9e6, 0.0, 0.0)
    feed = Feed(DEFAULTS, follows=recorded("slow-backward"), find=list, baseline=one)
    advance_until(feed, lambda: feed.ended)
    scaling = feed.run_view(at=None, paused=False, force=True).scaling

    assert scaling.baseline is one
    assert scaling.run.waited_for == (2,)


def test_closing_lets_go_and_may_be_repeated():
    follower = played("healthy")
    feed = Feed(DEFAULTS, follows=follower)
    feed.close()
    feed.close()

    assert follower.closed
    assert not feed.ready


def test_a_recording_of_real_ranks_plays_to_its_end_and_names_the_slow_one():
    feed = Feed(DEFAULTS, follows=recorded("slow-backward"), find=list)
    advance_until(feed, lambda: feed.ended)
    drawn = feed.run_view(at=None, paused=False, force=True)

    assert {alert.finding.ranks for alert in drawn.alerts if alert.finding.rule == "straggler"} == {(2,)}
    assert drawn.state.run_condition() == "ended"


async def test_the_waiting_screen_says_what_to_add_and_gives_way_to_a_run(run_dir):
    with closing(Feed(DEFAULTS)) as feed:
        async with staged(feed=feed) as stage:
            await stage.sees("import ddpwatch", "install", str(run_dir))
            assert stage.pane == "lobby"
            await stage.press("1", "5", "space", "left", "l", "s", "w", "slash", "c", "enter", "escape")
            await stage.settle()
            assert stage.pane == "lobby"
            with FakeRun(run_dir, 2) as run:
                run.train(0, 40)
                await stage.shows("overview")
                await stage.sees("● LIVE", "train", "step 40")
                assert run.ranks[0].followed.wait(10)


async def test_the_picker_shows_all_runs_and_enter_takes_the_second(run_dir):
    with (
        FakeRun(run_dir, 1, name="first") as first,
        FakeRun(run_dir, 1, run_id=OTHER_ID, name="[bold]second") as second,
        closing(Feed(DEFAULTS, find=lambda: [first.file, second.file])) as feed,
    ):
        second.train(0, 20)
        async with staged(feed=feed) as stage:
            await stage.sees("2 live runs", "first", "[bold]second")
            await stage.press("down", "enter")
            await stage.shows("overview")
            await stage.sees("[bold]second")
            assert feed.run.id == OTHER_ID


async def test_r_goes_back_to_the_choice_with_the_run_selected_that_one_comes_from(run_dir):
    with (
        FakeRun(run_dir, 1, name="first") as first,
        FakeRun(run_dir, 1, run_id=OTHER_ID, name="second") as second,
        closing(Feed(DEFAULTS, find=lambda: [first.file, second.file])) as feed,
    ):
        first.train(0, 20)
        second.train(0, 30)
        async with staged(feed=feed) as stage:
            await stage.sees("2 live runs")
            await stage.press("down", "enter")
            await stage.shows("overview")
            await stage.sees("r runs")
            await stage.press("enter")
            await stage.shows("rank")
            await stage.press("space", "r")
            await stage.shows("lobby")
            await stage.sees("2 live runs", "▌ second")
            # Nothing of the run that was let go of is left.
            assert not stage.header.strip()
            await stage.press("up", "enter")
            await stage.shows("overview")
            await stage.sees("first", "step 20", "● LIVE")


async def test_esc_goes_back_from_the_choice_to_the_run_or_its_summary(run_dir):
    with (
        FakeRun(run_dir, 1, name="first") as first,
        FakeRun(run_dir, 1, run_id=OTHER_ID, name="second") as second,
        FakeRun(run_dir, 1, run_id="00" * 8, name="third") as third,
        closing(Feed(DEFAULTS, find=lambda: [first.file, second.file, third.file])) as feed,
    ):
        second.train(0, 30)
        async with staged(feed=feed) as stage:
            await stage.sees("3 live runs")
            await stage.misses("esc")
            await stage.press("down", "enter")
            await stage.shows("overview")
            follows = feed.follows
            await stage.press("2", "r")
            await stage.shows("lobby")
            await stage.sees("▌ second", "esc back to second")
            await stage.press("escape")
            await stage.shows("ranks")
            await stage.sees("second", "step 30", "● LIVE")
            second.ranks[0].say_bye()
            await stage.shows("summary")
            feed._find = lambda: [first.file, third.file]
            await stage.press("r")
            await stage.shows("lobby")
            await stage.sees("2 live runs", "esc back to second")
            await stage.press("escape")
            await stage.shows("summary")
            await stage.sees("The run has ended", "■ ENDED")
            assert feed.follows is follows


async def test_r_stays_where_there_is_no_other_run(run_dir):
    with FakeRun(run_dir, 1) as run, closing(Feed(DEFAULTS)) as feed:
        run.train(0, 20)
        async with staged(feed=feed) as stage:
            await stage.shows("overview")
            await stage.press("r")
            await stage.sees("No other run was found.")
            assert stage.pane == "overview"


async def test_the_summary_names_a_run_that_has_started_since(run_dir):
    with closing(Feed(DEFAULTS)) as feed, FakeRun(run_dir, 1) as run:
        run.train(0, 40)
        async with staged(feed=feed) as stage:
            await stage.shows("overview")
            run.ranks[0].say_bye()
            await stage.shows("summary")
            with FakeRun(run_dir, 1, run_id=OTHER_ID, name="[b]else") as other:
                other.train(0, 7)
                started = msgspec.structs.replace(other.file, started_unix_s=time.time())
                feed._find = lambda: [started]
                await stage.sees("Another run has started since: [b]else. Press r to choose it.")
                await stage.press("r")
                await stage.shows("overview")
                await stage.sees("[b]else", "step 7")


async def test_looking_back_when_the_run_ends_shows_the_summary_of_the_whole_run():
    follower = played("straggler")
    async with staged(follower) as stage:
        await stage.press("shift+left")
        await stage.sees("‖ STEP 139")
        follower.end_well()
        await stage.shows("summary")
        await stage.sees("■ ENDED", "The run has ended")
        await stage.misses("STEP 139", "space", "l live", "← →")
        page = stage.text().splitlines()[2:-1]
        await stage.press("shift+left", "space", "1", "shift+left")
        await stage.sees("‖ STEP 139", "l the end")
        # Whichever step is looked at on the other screens, the summary stays what it was.
        await stage.press("7")
        await stage.shows("summary")
        await stage.sees("The run has ended")
        assert stage.text().splitlines()[2:-1] == page
        await stage.press("l")
        await stage.sees("■ ENDED")


async def test_the_waiting_screen_shows_trouble_in_words(tmp_path, monkeypatch):
    monkeypatch.setenv("DDPWATCH_RUN_DIR", str(tmp_path))

    def refuse():
        raise RunDirRefused("cannot read the run directory [/x]: Permission denied")

    async with staged(feed=Feed(DEFAULTS, find=refuse)) as stage:
        await stage.sees("cannot read the run directory [/x]: Permission denied")


async def test_after_a_restart_the_dashboard_shows_the_new_run(run_dir):
    with closing(Feed(DEFAULTS)) as feed, FakeRun(run_dir, 2) as run:
        run.train(0, 40)
        async with staged(feed=feed) as stage:
            await stage.shows("overview")
            for rank in run.ranks:
                rank.say_bye()
            await stage.shows("summary")
            await stage.sees("The run has ended")
            with FakeRun(run_dir, 2, run_id=OTHER_ID) as again:
                again.train(0, 7)
                feed._find = lambda: [again.file]
                await stage.shows("overview")
                await stage.sees("● LIVE", "step 7", "The job has restarted")
                await stage.misses("7 summary")


async def test_a_rank_times_buckets_only_while_their_screen_is_shown(run_dir, monkeypatch):
    with closing(Feed(DEFAULTS)) as feed, FakeRun(run_dir, 2) as run:
        run.train(0, 40)
        async with staged(feed=feed) as stage:
            await stage.shows("overview")
            received = []
            original = run.ranks[0]._subscription
            monkeypatch.setattr(
                run.ranks[0],
                "_subscription",
                lambda socket, message: (received.append(message), original(socket, message)),
            )
            await stage.press("3")
            await stage.until(lambda: b"\x01bucket" in received, "a subscription")
            await stage.press("1")
            await stage.until(lambda: b"\x00bucket" in received, "its end")


async def test_leaving_lets_the_ranks_go_on(run_dir):
    with FakeRun(run_dir, 2) as run:
        run.train(0, 20)
        with closing(Feed(DEFAULTS)) as feed:
            async with staged(feed=feed) as stage:
                await stage.shows("overview")
                await stage.press("q")
                await stage.until(lambda: not stage.app.is_running, "the end")
        run.train(20, 5)
        assert rundir.alive(run.file.endpoints[0], rundir.node_id())
        assert run.file.endpoints[0].pid == os.getpid()


def test_the_played_follower_has_the_surface_of_a_real_one():
    from ddpwatch.session.run_follower import RunFollower

    public = {name for name in dir(RunFollower) if not name.startswith("_")}
    assert public <= set(dir(Played))


def test_one_can_look_back_no_further_than_what_the_rank_that_is_ahead_still_has():
    follower = played("long", upto=700)
    feed = Feed(DEFAULTS, follows=follower)
    assert feed.run_view(at=0, paused=True, force=True).figures is not None
    ahead = [make_step(700 + index) for index in range(40)]
    follower.monitor.state.apply(wire.Steps(rank=1, seq=10**6, steps=ahead), follower.monitor.state.now_ns)

    assert feed.run_view(at=0, paused=True, force=True).figures is not None
