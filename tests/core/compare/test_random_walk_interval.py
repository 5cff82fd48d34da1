"""The random-walk term, on synthetic parts with and without a walk."""

from itertools import pairwise

import numpy as np
import pytest

from ddpwatch.core.compare.random_walk_interval import MAX_PARTS, RandomWalk

RESAMPLES = 400
STEPS = 400
CHANCE = 1.0
"""Standard deviation of a whole run's figure from noise."""


def added(parts, variance=CHANCE**2, seed=0):
    return RandomWalk(STEPS, RESAMPLES, np.random.default_rng(seed)).of(np.asarray(parts, dtype=float), variance)


def reach(resamples):
    """Half width of the 95% interval."""
    low, high = np.quantile(resamples, [0.025, 0.975])
    return (high - low) / 2


def by_chance(seed):
    return 100.0 + np.random.default_rng([1, seed]).normal(0.0, CHANCE * np.sqrt(MAX_PARTS), MAX_PARTS)


def test_noise_adds_less_than_the_noise_of_one_part():
    reaches = [reach(added(by_chance(seed))) for seed in range(40)]

    assert np.median(reaches) < 2 * CHANCE
    assert np.quantile(reaches, 0.9) < 2 * CHANCE * np.sqrt(MAX_PARTS)


def test_a_random_walk_adds_its_own_variance():
    """The mean of a walk over its run has a third of the variance of its end."""
    far = 40.0
    reaches = []
    for seed in range(40):
        walk = np.random.default_rng([2, seed]).normal(0.0, far / np.sqrt(MAX_PARTS), MAX_PARTS).cumsum()
        # A walk also widens the bootstrap of long blocks.
        reaches.append(reach(added(walk, variance=CHANCE**2 + far**2 / 48)))

    assert 0.5 < np.median(reaches) / (1.96 * far / np.sqrt(3)) < 2.0


def test_the_order_of_the_parts_decides_between_noise_and_walk():
    """Alternating deviations are noise, rising ones are a walk."""
    rising = np.sort(by_chance(3))
    mixed = rising[[0, 8, 4, 12, 2, 10, 6, 14, 15, 7, 11, 3, 13, 5, 9, 1]]

    assert reach(added(rising)) > 2 * reach(added(mixed))


def test_the_added_variance_grows_smoothly():
    """Noise and a walk are not separated by a threshold."""
    parts = by_chance(4) - 100.0

    reaches = [reach(added(100.0 + parts * size)) for size in np.linspace(0.5, 2.0, 31)]

    assert max(after - before for before, after in pairwise(reaches)) < 1.5 * CHANCE


def test_an_outlying_beginning_is_not_a_walk():
    parts = by_chance(5)
    parts[:2] -= 1000.0

    assert reach(added(parts)) < 20 * CHANCE


@pytest.mark.parametrize("parts", [np.full(MAX_PARTS, 7.0), np.full(MAX_PARTS, np.nan)])
def test_constant_or_unknown_parts_add_nothing(parts):
    assert not added(parts, variance=0.0).any()


def test_an_unknown_part_is_ignored():
    parts = by_chance(6)
    parts[3] = np.nan

    assert np.isfinite(added(parts)).all()


def test_a_run_of_a_few_steps_has_no_parts():
    random_walk = RandomWalk(3, RESAMPLES, np.random.default_rng(0))

    assert random_walk.parts == 0
    assert not random_walk.of(np.empty(0), 1.0).any()
