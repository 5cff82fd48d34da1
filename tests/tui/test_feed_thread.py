"""What has come is taken in beside the keyboard, not before it."""

import asyncio
import time

import pytest

from ddpwatch.tui import feed_thread as intake
from ddpwatch.tui.feed_thread import FeedThread


class LongJudging:
    """A feed that judges when it is told to advance, and rests where it is asked to."""

    more = ready = False

    def __init__(self) -> None:
        self.rested_s: list[float] = []
        self.begins = lambda: None

    def between_rules(self, between) -> None:
        self._between = between

    def advance(self) -> bool:
        self.begins()
        began_s = time.monotonic()
        self._between()
        self.rested_s.append(time.monotonic() - began_s)
        return True


@pytest.fixture
def judging():
    async def look(came):
        pass

    feed = LongJudging()
    taken = FeedThread(feed, look, lambda: True)
    yield feed, taken
    taken.close()


async def test_a_key_that_is_pressed_while_a_large_run_is_judged_goes_first(judging):
    feed, taken = judging
    feed.begins = taken.key_pressed
    await taken.tick()
    assert feed.rested_s[0] >= intake.FOR_KEYS_S * 0.9


async def test_keys_without_an_end_do_not_hold_the_judging_up_for_ever(judging, monkeypatch):
    feed, taken = judging
    monkeypatch.setattr(intake, "FOR_KEYS_S", 3600.0)
    feed.begins = taken.key_pressed
    await taken.tick()
    assert len(feed.rested_s) == 1


async def test_what_a_key_has_asked_for_is_not_kept_waiting_by_the_rest(judging, monkeypatch):
    feed, taken = judging
    monkeypatch.setattr(intake, "FOR_KEYS_S", 3600.0)
    monkeypatch.setattr(intake, "MAX_FOR_KEYS_S", 3600.0)
    feed.begins = taken.key_pressed
    ticking = asyncio.create_task(taken.tick())
    while not taken._pending:
        await asyncio.sleep(0)
    assert await taken.ask(lambda: "answer") == "answer"
    await ticking
