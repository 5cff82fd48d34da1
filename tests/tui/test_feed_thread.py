"""What has come is thread in beside the keyboard, not before it."""

import asyncio
import time

import pytest

from ddpwatch.tui import feed_thread as feed_thread_module
from ddpwatch.tui.feed_thread import FeedThread


class LongEvaluation:
    """A feed that evaluates rules in `advance`, and calls back between them."""

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
def evaluation():
    async def look(came):
        pass

    feed = LongEvaluation()
    thread = FeedThread(feed, look, lambda: True)
    yield feed, thread
    thread.close()


async def test_a_key_that_is_pressed_while_a_large_run_is_evaluated_goes_first(evaluation):
    feed, thread = evaluation
    feed.begins = thread.key_pressed
    await thread.tick()
    assert feed.rested_s[0] >= feed_thread_module.FOR_KEYS_S * 0.9


async def test_keys_without_an_end_do_not_hold_the_evaluation_up_forever(evaluation, monkeypatch):
    feed, thread = evaluation
    monkeypatch.setattr(feed_thread_module, "FOR_KEYS_S", 3600.0)
    feed.begins = thread.key_pressed
    await thread.tick()
    assert len(feed.rested_s) == 1


async def test_what_a_key_has_asked_for_is_not_kept_waiting_by_the_rest(evaluation, monkeypatch):
    feed, thread = evaluation
    monkeypatch.setattr(feed_thread_module, "FOR_KEYS_S", 3600.0)
    monkeypatch.setattr(feed_thread_module, "MAX_FOR_KEYS_S", 3600.0)
    feed.begins = thread.key_pressed
    ticking = asyncio.create_task(thread.tick())
    while not thread._pending:
        await asyncio.sleep(0)
    assert await thread.ask(lambda: "answer") == "answer"
    await ticking
