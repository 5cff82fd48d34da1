"""Stalled runs in the cards, and the cost of hung steps after the run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ddpwatch.core.metrics.aggregate import RunAggregate
from ddpwatch.core.metrics.hung_steps import HungSteps
from ddpwatch.core.metrics.window import aligned_window
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.view.cells import Level
from ddpwatch.view.outcome_text import hung_text, longest_text, lost_time_text
from ddpwatch.view.overview import allreduce_card, compact, step_card, throughput_card
from ddpwatch.view.summary import summary_lines
from tests.builders.fake_rank import MS, make_beat, make_snap, make_step
from tests.view.pages import make_run_view, page, texts

STEPS = 60
LAST_END_NS = STEPS * 30 * MS
SECOND_NS = 1_000_000_000


def make_monitor(frozen_at=None, frozen_ms=8000):
    """Four ranks; in one step rank 1 takes some seconds for its own work and the others wait for it."""
    state = RunState("ab12cd34ab12cd34", "train", 4)
    for rank in range(4):
        done = [
            make_step(index, **({"other" if rank == 1 else "sync": frozen_ms} if index == frozen_at else {}))
            for index in range(STEPS)
        ]
        state.apply(make_snap(rank, 5, done), now_ns=1)
    return Monitor(state)


def frozen_once():
    return HungSteps(1, 8.0, 0.8, 30, 8.0, 1, 8e9, np.zeros(6))


def beat_again(monitor, after_s, now_ns=2):
    for rank in range(4):
        monitor.state.apply(make_beat(rank, 6, step=STEPS, mono_ns=LAST_END_NS + int(after_s * SECOND_NS)), now_ns)


@pytest.mark.parametrize(
    ("after_s", "reported"), [(0.5, ""), (3.0, ""), (12.2, "no step for 12 s"), (75, "1 min 15 s")]
)
def test_cards_show_the_time_since_the_last_step(after_s, reported):
    monitor = make_monitor()
    beat_again(monitor, after_s)
    seen = make_run_view(monitor)

    for card in (step_card, throughput_card):
        assert ("no step for" in page(card(seen, 30))) == bool(reported)
        assert reported in page(card(seen, 30))
        assert (card(seen, 30)[0][0].level is Level.DIM) == bool(reported)
    assert (allreduce_card(seen, 30)[0][0].level is Level.DIM) == bool(reported)
    assert reported in texts(compact(seen, 80))[0]


def test_time_goes_on_without_a_word_from_anybody():
    monitor = make_monitor()
    beat_again(monitor, 0.1)
    monitor.tick(6 * SECOND_NS)

    assert 6.0 <= make_run_view(monitor).stalled_s < 7.0


def test_a_job_of_long_steps_is_not_called_still_after_seconds():
    state = RunState("ab12cd34ab12cd34", "train", 1)
    done = [make_step(index, forward=9000, end_ns=(index + 1) * 9 * SECOND_NS) for index in range(30)]
    state.apply(make_snap(0, 5, done, beat=make_beat(0, 5, mono_ns=(30 * 9 + 20) * SECOND_NS)), 1)

    assert make_run_view(Monitor(state)).stalled_s is None


def test_looking_back_there_is_no_stall():
    monitor = make_monitor()
    beat_again(monitor, 30.0)

    assert make_run_view(monitor, at=40).stalled_s is None


def test_the_summary_shows_the_time_lost_in_hung_steps_in_one_line():
    seen = make_run_view(make_monitor(frozen_at=30))

    text = lost_time_text(seen)
    assert text == "8.0 s in 1 step of the last 59 that hung: step 30 took 8.0 s, waiting for rank 1"
    assert [line for line in texts(summary_lines(seen, 120, 100, duration_s=9.0)) if line == f"lost         {text}"]


def test_the_report_shows_the_same_hung_steps_as_the_summary():
    monitor = make_monitor(frozen_at=30)
    ranks = list(monitor.state.ranks.values())
    aggregate = RunAggregate([rank.rank for rank in ranks])
    aggregate.add(aligned_window(monitor.state, ranks, np.arange(1, STEPS)))

    assert longest_text(aggregate.hung_steps()) in lost_time_text(make_run_view(monitor))
    assert hung_text(aggregate.hung_steps()) == "hung for 8.0 s at step 30"


def test_the_longest_of_several_hung_steps_is_shown():
    still = replace(frozen_once(), steps=3, lost_s=4000.0)

    assert hung_text(still) == "hung for 1 h 6 min in 3 steps (longest: step 30 took 8.0 s)"
    assert longest_text(still) == "longest: step 30 took 8.0 s, waiting for rank 1"


def test_steps_that_are_only_a_little_longer_are_no_loss():
    assert lost_time_text(make_run_view(make_monitor())) == ""
    assert lost_time_text(make_run_view(make_monitor(frozen_at=30, frozen_ms=500))) == ""
    assert lost_time_text(make_run_view(Monitor(RunState("ab12cd34ab12cd34", "train", 2)))) == ""
