"""Two runs side by side: of synthetic ones it is known whether they differ."""

import numpy as np
import pytest

from ddpwatch.core.compare import bootstrap as comparison
from ddpwatch.core.compare.bootstrap import compare
from ddpwatch.core.compare.random_walk_interval import step_modes
from ddpwatch.core.metrics.aggregate import StepSample
from ddpwatch.simulator.scenario import Fault, Scenario
from tests.builders.windows import window_from_phases

SEEDS = 20
ALIKE = ("inside noise", "too small")


def sample(seed=0, *, samples=32, world_size=2, first=20, **changed):
    scenario = Scenario(world_size, seed=seed, **{"steps": 120, "drift": 0.0005, **changed})
    return StepSample([window_from_phases(scenario.phases_ns(), samples=samples, first=first)])


@pytest.fixture(scope="module")
def pairs():
    """Runs of the same thing, two by two."""
    return [(sample(2 * seed), sample(2 * seed + 1)) for seed in range(SEEDS)]


def test_equal_runs_do_not_differ(pairs):
    """In 95 of 100 pairs; `benchmarks/comparison.py` looks at more of them."""
    found = [compare(a, b) for a, b in pairs]

    assert sum(one.steps.verdict in ALIKE for one in found) >= 0.95 * SEEDS
    others = [difference.verdict in ALIKE for one in found for difference in (*one.parts, one.share)]
    assert sum(others) >= 0.95 * len(others)
    assert not any(one.fails(0.05) for one in found)


def test_a_run_that_is_five_per_cent_slower_is_found(pairs):
    for place, (a, _) in enumerate(pairs[:8]):
        found = compare(a, sample(2 * place + 1, step_ms=105.0))

        assert found.steps.verdict == "slower"
        assert found.steps.change.value == pytest.approx(0.05, abs=0.015)
        assert found.each.verdict == "slower", "fewer samples a second is slower, too"
        assert found.fails(0.02)
        assert not found.fails(0.10)


def test_the_figure_of_a_long_run_is_that_of_all_its_steps():
    long = sample(1, steps=4000, noise=0.2)
    step_ns = np.sum([long.steps()[name] for name in comparison.PARTS], axis=0)
    found = compare(long, long)

    assert len(step_ns) > 2 * comparison.MAX_ROWS
    assert found.steps.a.value == pytest.approx(float(np.median(step_ns)), rel=1e-9)
    assert found.steps.a.low < found.steps.a.value < found.steps.a.high


USUAL_MS = 19.6


def shared(seed, longer=1.0, steps=290):
    """A run among others on its machine: alike for some dozens of steps, long steps further off than short ones."""
    chance = np.random.default_rng([11, seed])
    level = chance.normal(0.0, 1.0, steps)
    for step in range(1, steps):
        level[step] = 0.95 * level[step - 1] + np.sqrt(1.0 - 0.95**2) * level[step]
    mixed = np.sqrt(0.3) * level + np.sqrt(0.7) * chance.normal(0.0, 1.0, steps)
    rows = np.zeros((2, 6, steps), dtype=np.int64)
    rows[:, 1] = longer * (USUAL_MS - 3.2 + 3.2 * np.exp(0.5 * mixed)) * 1e6
    return StepSample([window_from_phases(rows)])


def test_noisy_runs_differ_where_they_do_and_are_as_certain_as_they_are():
    """The usual step is known: most intervals hold it, and hardly any is as wide as single steps differ."""
    seeds = range(50)
    equal = [compare(shared(2 * seed), shared(2 * seed + 1)).steps for seed in seeds]
    slower = [compare(shared(2 * seed), shared(2 * seed + 1, 1.2)) for seed in seeds]

    assert sum(steps.verdict in ALIKE for steps in equal) >= 0.92 * len(seeds)
    assert sum(found.steps.verdict == "slower" for found in slower) >= 0.96 * len(seeds)
    assert sum(found.fails(0.05) for found in slower) >= 0.96 * len(seeds)
    intervals = [each for steps in equal for each in (steps.a, steps.b)]
    assert np.mean([each.low <= USUAL_MS * 1e6 <= each.high for each in intervals]) >= 0.85
    assert np.quantile([(each.high - each.low) / 2 for each in intervals], 0.9) < 0.12 * USUAL_MS * 1e6


@pytest.mark.parametrize(("longer", "verdict"), [(1.006, "too small"), (0.994, "too small"), (1.02, "slower")])
def test_what_is_proven_and_hardly_anything_is_called_so_and_not_noise(longer, verdict):
    """Of very even steps: the interval shows that they differ, and by how little."""
    steps = compare(sample(1, drift=0.0), sample(2, drift=0.0, step_ms=100.0 * longer)).steps

    assert steps.change.value == pytest.approx(longer - 1.0, abs=0.003)
    assert not steps.change.low <= 0.0 <= steps.change.high
    assert steps.verdict == verdict


def test_a_gate_that_allows_less_than_what_matters_goes_by_the_interval():
    a, b = sample(1, drift=0.0), sample(2, drift=0.0, step_ms=100.6)
    slower, faster = compare(a, b), compare(b, a)

    assert slower.steps.verdict == faster.steps.verdict == "too small"
    assert slower.fails(0.002)
    assert not slower.fails(0.01)
    assert not faster.fails(0.0)
    assert not compare(a, a).fails(0.0)


def test_a_faster_run_is_called_faster_and_fails_no_gate():
    found = compare(sample(1), sample(2, step_ms=90.0))

    assert found.steps.verdict == found.throughput.verdict == "faster"
    assert found.slowdown.value == pytest.approx(-0.1, abs=0.02)
    assert not found.fails(0.0)


def test_the_phase_that_has_become_longer_is_the_one_that_is_slower():
    slow = sample(2, faults=(Fault((0, 1), "data", 0.1, onset=0),))

    verdicts = {difference.name: difference.verdict for difference in compare(sample(1), slow).parts}
    assert verdicts.pop("data") == "slower"
    assert set(verdicts.values()) == {"inside noise"}


def test_a_share_is_lower_or_higher_and_not_faster_or_slower():
    """Forward takes longer on all ranks: the all-reduce is a smaller part of a step, and nothing is faster for it."""
    usual, slow = sample(1), sample(2, faults=(Fault((0, 1), "forward", 0.5, onset=0),))
    found, back = compare(usual, slow), compare(slow, usual)

    assert found.share.change.value < 0.0
    assert (found.steps.verdict, found.share.verdict) == ("slower", "lower")
    assert (back.steps.verdict, back.share.verdict) == ("faster", "higher")
    assert compare(usual, sample(3)).share.verdict == "inside noise"


def test_a_run_that_is_slow_but_for_its_beginning_is_slow():
    slow = sample(2, faults=(Fault((1,), "backward", 0.2, onset=20),))

    assert compare(sample(1), slow).fails(0.05)


def test_the_same_runs_compare_the_same_every_time():
    assert compare(sample(1), sample(2)) == compare(sample(1), sample(2))


def test_a_run_compared_with_itself_does_not_differ():
    found = compare(sample(1), sample(1))

    assert found.steps.change.value == 0.0
    assert found.steps.verdict == "inside noise"


def figures(found):
    return (found.steps, found.throughput, found.each, found.share, *found.parts)


def test_the_interval_of_a_run_is_its_own_and_not_that_of_its_side():
    a, b = shared(1), shared(2, steps=200)

    first, second = compare(a, b), compare(b, a)
    assert [each.a for each in figures(first)] == [each.b for each in figures(second)]
    assert [each.b for each in figures(first)] == [each.a for each in figures(second)]
    assert all(each.a == each.b for each in figures(compare(a, a)))


def test_two_runs_have_chances_of_their_own_although_they_are_drawn_alike():
    """Variances of what is independent add up: the difference of two alike is wider than each by the root of two."""
    for seed in range(8):
        steps = compare(shared(seed), shared(seed)).steps
        wider = (steps.change.high - steps.change.low) * steps.a.value / (steps.a.high - steps.a.low)

        assert 1.2 < wider < 1.7


def test_the_interval_of_a_run_hardly_hangs_on_what_was_drawn(monkeypatch):
    """The walk that some draws take makes their ends far ones: there must be enough of them."""
    run, widths = shared(3), []
    for seed in range(8):
        monkeypatch.setattr(comparison, "SEED", seed)
        own = compare(run, run).steps.a
        widths.append(own.high - own.low)

    assert np.std(widths) < 0.07 * np.mean(widths)


def test_where_batches_differ_samples_decide_and_not_steps():
    """Twice the batch in 1.6 times the time is faster."""
    found = compare(sample(1), sample(2, step_ms=160.0, samples=64))

    assert found.by_samples
    assert found.steps.verdict == "slower"
    assert found.headline.verdict == "faster"
    assert found.slowdown.value == pytest.approx(-0.2, abs=0.02)
    assert found.slowdown.low <= found.slowdown.value <= found.slowdown.high


def test_where_worlds_differ_a_ranks_samples_decide():
    found = compare(sample(1), sample(2, world_size=4, step_ms=110.0))

    assert found.headline.name == "samples_per_s_rank"
    assert found.throughput.verdict == "faster"
    assert found.headline.verdict == "slower"


def test_without_samples_steps_are_compared():
    found = compare(sample(1, samples=0), sample(2, samples=0, step_ms=110.0))

    assert found.throughput.verdict == "unproven"
    assert found.throughput.a is None
    assert not found.by_samples
    assert found.fails(0.05)


def test_too_few_steps_prove_nothing():
    found = compare(sample(1), sample(2, steps=5, step_ms=200.0))

    assert found.steps.verdict == "unproven"
    assert not found.fails(0.05)
    assert compare(sample(1, steps=2, first=0), sample(2, steps=2, first=0)).headline.verdict == "unproven"


def test_a_run_without_steps_cannot_be_compared():
    assert compare(StepSample(), sample(1)) is None
    assert compare(sample(1), sample(2, steps=1, first=0)) is None, "the first step is none that is measured"


def test_a_long_run_is_compared_as_a_whole():
    """Slow in its second half only: neither the first steps nor the last ones speak for it."""
    rows = Scenario(2, steps=6000, drift=0.0).phases_ns()
    rows[:, :, 3600:] = rows[:, :, 3600:] * 3 // 2

    found = compare(sample(1, drift=0.0), StepSample([window_from_phases(rows)]))

    assert found.steps.change.value == pytest.approx(0.2, abs=0.02)
    assert found.steps.change.low <= 0.1
    assert found.steps.change.high >= 0.3
    assert np.isfinite(found.steps.change.high)


def two_kinds(seed, *, every, factor, steps=400):
    """Each so-manieth step takes longer on all ranks."""
    rows = Scenario(2, steps=steps, seed=seed, drift=0.0).phases_ns()
    rows[:, :, ::every] = (rows[:, :, ::every] * factor).astype(np.int64)
    return StepSample([window_from_phases(rows)])


def test_steps_of_two_kinds_are_compared_by_means_so_that_long_ones_that_are_fewer_count():
    """The usual step is the same; the run takes a quarter longer."""
    found = compare(sample(1, drift=0.0), two_kinds(2, every=4, factor=2.0))

    assert found.by_means
    assert found.kinds[0] is None
    assert found.kinds[1].long_share == pytest.approx(0.25, abs=0.02)
    assert found.kinds[1].long_ns == pytest.approx(2 * found.kinds[1].short_ns, rel=0.05)
    assert found.steps.change.value == pytest.approx(0.25, abs=0.02)
    assert found.steps.verdict == "slower"
    assert found.throughput.change.value == pytest.approx(-0.2, abs=0.02)
    assert found.fails(0.05)


def test_a_few_more_long_steps_are_not_twice_the_time():
    """A median would jump from the short ones to the long ones."""
    for seed in range(4):
        chance = np.random.default_rng(seed)
        runs = []
        for share in (0.48, 0.52):
            rows = Scenario(2, steps=400, seed=seed, drift=0.0).phases_ns()
            long = chance.random(400) < share
            rows[:, :, long] *= 2
            runs.append(StepSample([window_from_phases(rows)]))
        found = compare(*runs)

        assert found.by_means
        assert abs(found.steps.change.value) < 0.15
        assert -1.0 < found.steps.change.low <= found.steps.change.value <= found.steps.change.high < 1.0
        assert not found.fails(0.2)


def test_a_run_that_is_slow_for_two_thirds_of_its_time_is_slow():
    """A rank that is now slow and now not, for many steps each: the run does not drift, it goes back and forth."""
    rows = Scenario(2, steps=600, seed=3, drift=0.0).phases_ns()
    rows[:, :, np.arange(600) % 100 >= 35] *= 2

    found = compare(sample(1, steps=600, drift=0.0), StepSample([window_from_phases(rows)]))

    assert found.by_means
    assert found.steps.change.value == pytest.approx(0.65, abs=0.05)
    assert found.fails(0.05)
    assert (
        compare(StepSample([window_from_phases(rows)]), StepSample([window_from_phases(rows)])).steps.verdict
        == "inside noise"
    )


def test_steps_of_one_kind_are_not_taken_for_two(pairs):
    assert not any(compare(a, b).by_means for a, b in pairs)
    chance = np.random.default_rng(0)
    bell, long_tail = chance.normal(100.0, 10.0, 500), 80.0 + chance.exponential(30.0, 500)
    rising, hiccups = np.linspace(100.0, 150.0, 500), np.where(np.arange(500) % 100 == 7, 900.0, bell)
    for steps in (bell, long_tail, rising, hiccups, np.full(500, 5.0), bell[:10], np.empty(0)):
        assert step_modes(steps) is None
