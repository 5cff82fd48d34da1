"""Bounds of slow episodes, for steps whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from ddpwatch.core.diagnosis.slow_episode import episode_of

STEPS = 300
RARE = 0.005
HICCUP = 5


def slow_in(*parts, odd=0.0, seed=0):
    """Steps, slow in these ranges at these rates, and at rate `odd` elsewhere."""
    chance = np.random.default_rng(seed)
    slow = chance.random(STEPS) < odd
    for where, share in parts:
        slow[where] = chance.random(len(where)) < share
    return slow


@pytest.mark.parametrize("odd", [0.0, 0.05, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_odd_steps_before_and_after_do_not_count(odd, seed):
    episode = episode_of(slow_in((range(80, 180), 1.0), odd=odd, seed=seed), max(odd, RARE), HICCUP)

    assert abs(episode.first - 80) <= 5
    assert abs(episode.last - 179) <= 5
    assert episode.ended


@pytest.mark.parametrize(("quiet", "ended"), [(0, False), (2, False), (6, True)])
def test_one_that_was_slow_in_all_steps_is_over_after_a_few_others(quiet, ended):
    episode = episode_of(slow_in((range(100, STEPS - quiet), 1.0)), RARE, HICCUP)

    assert (episode.first, episode.last, episode.ended) == (100, STEPS - quiet - 1, ended)


@pytest.mark.parametrize("share", [0.1, 0.26, 0.5])
@pytest.mark.parametrize("seed", range(10))
def test_one_that_is_slow_now_and_then_goes_on_in_its_gaps(share, seed):
    slow = slow_in((range(STEPS), share), seed=seed)
    episode = episode_of(slow, RARE, HICCUP)

    assert not episode.ended
    assert episode.last == np.flatnonzero(slow)[-1]


@pytest.mark.parametrize("seed", range(5))
def test_one_that_was_slow_now_and_then_is_over_after_far_longer_gaps(seed):
    episode = episode_of(slow_in((range(80, 200), 0.26), odd=0.02, seed=seed), 0.02, HICCUP)

    assert episode.ended
    assert abs(episode.last - 199) <= 20


def test_an_odd_step_does_not_reopen_an_ended_episode():
    slow = slow_in((range(80, 180), 1.0))
    slow[-1] = True

    assert (episode_of(slow, RARE, HICCUP).last, episode_of(slow, RARE, HICCUP).ended) == (179, True)


def test_a_hiccup_does_not_reopen_an_ended_episode():
    slow = slow_in((range(80, 180), 1.0), (range(220, 230), 1.0))

    assert (episode_of(slow, RARE, 18).last, episode_of(slow, RARE, 18).ended) == (179, True)
    assert episode_of(slow, RARE, HICCUP).last == 229


@pytest.mark.parametrize("gap", [20, 60, 150])
def test_one_that_is_slow_again_goes_on(gap):
    episode = episode_of(
        slow_in((range(STEPS - gap - 60, STEPS - gap - 10), 1.0), (range(STEPS - 10, STEPS), 1.0)), RARE, HICCUP
    )

    assert (episode.first, episode.last, episode.ended) == (STEPS - gap - 60, STEPS - 1, False)


@pytest.mark.parametrize("start", [0, 3, 102])
def test_with_a_period_only_its_own_steps_count(start):
    slow = np.zeros(STEPS, dtype=np.bool_)
    slow[start % 4 + 40 : 200 : 4] = True
    slow[start % 4 + 205 :: 9] = True
    episode = episode_of(slow, RARE, HICCUP, 4, start)

    assert episode.first == start % 4 + 40
    assert episode.last in range(196, 205)
    assert episode.ended


def test_a_single_slow_step_is_an_episode():
    slow = slow_in((range(120, 121), 1.0))

    assert (episode_of(slow, RARE, HICCUP).first, episode_of(slow, RARE, HICCUP).last) == (120, 120)


def test_an_episode_has_bounds_even_if_odd_steps_are_as_frequent_as_slow_ones():
    slow = slow_in((range(STEPS), 0.5))
    episode = episode_of(slow, 0.9, HICCUP)

    assert 0 <= episode.first <= episode.last < STEPS
