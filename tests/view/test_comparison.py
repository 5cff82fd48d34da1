"""Comparison of two runs as text and as a JSON object."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.core.compare.bootstrap import Comparison, Difference, Estimate
from ddpwatch.core.compare.random_walk_interval import StepModes
from ddpwatch.core.metrics.aggregate import PARTS
from ddpwatch.core.metrics.hung_steps import HungSteps
from ddpwatch.core.metrics.scaling import Profile, scaling
from ddpwatch.core.state.sanitize import sanitize
from ddpwatch.view.cells import Level
from ddpwatch.view.comparison import Side, comparison_lines, comparison_object, gate_fails, gate_text, verdict_text
from ddpwatch.view.scaling import hung_doubt
from tests.view.pages import HOSTILE, assert_fits, page, texts

ONE = Profile(1, 300, 28e6, 32 / 0.028, 32, 1e6, 27e6, 0.0, 0.0)
FOUR = Profile(4, 300, 40e6, 128 / 0.04, 128, 1e6, 31e6, 3e6, 5e6, (2,))
STUCK = HungSteps(1, 8.0, 0.49, 150, 8.03, 1, 0.0, np.zeros(6))
KILLED = "rank 1 was killed (SIGKILL); rank 0 after it"
VERDICTS = ("slower", "faster", "too small", "inside noise", "unproven")


def difference(name, value, verdict, *, scale=40e6):
    change = Estimate(value, value - 0.01, value + 0.02)
    first = Estimate(scale, scale * 0.99, scale * 1.01)
    return Difference(name, first, Estimate(*(part * (1 + value) for part in (scale, scale, scale))), change, verdict)


def comparison(value=0.08, verdict="slower", b=FOUR, *, by_samples=False, share="higher"):
    parts = tuple(difference(name, 0.0, "inside noise", scale=5e6) for name in PARTS)
    return Comparison(
        FOUR, b, difference("step", value, verdict), difference("share", 0.02, share, scale=0.2),
        difference("samples_per_s", -value, verdict, scale=3200.0),
        difference("samples_per_s_rank", -value, verdict, scale=800.0), parts, by_samples,
    )  # fmt: skip


def sides(**changed):
    a = Side("A", "before.ddpw", "train", 1, FOUR)
    return a, replace(a, **{"letter": "B", "file": "after.ddpw", **changed})


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_shows_figures_intervals_and_verdicts(columns):
    lines = comparison_lines(comparison(), sides(), columns)

    assert_fits(lines, columns)
    found = texts(lines)
    assert found[0].startswith("▲ B is slower: it takes 8.0% more time per step")
    row = next(line for line in found if line.startswith("step"))
    assert "+8.0%" in row
    assert "+7.0 … +10.0" in row
    assert row.endswith("▲ slower")
    assert "waiting for rank 2" in page(lines)
    assert len([line for line in found if "within noise" in line]) == len(PARTS)


def test_a_difference_that_is_proven_and_hardly_anything_is_not_called_noise():
    lines = texts(comparison_lines(comparison(0.008, "too small"), sides(), 120))

    assert lines[0].startswith("· Too small to matter: B takes 0.8% more time per step (95% confidence interval ")
    assert "repeated runs of the same job may differ by 1%." in " ".join(line.strip() for line in lines[:2])
    assert next(line for line in lines if line.startswith("step")).endswith("· too small")


@pytest.mark.parametrize("verdict", ["higher", "lower"])
def test_a_share_that_differs_is_marked_neither_good_nor_bad(verdict):
    found = comparison(share=verdict)

    row = next(line for line in comparison_lines(found, sides(), 120) if line and line[0].text.startswith("all-red"))
    assert row[-1].text.endswith(f" {verdict}")
    assert row[-1].level is Level.PLAIN
    assert comparison_object(found, sides(), None)["figures"]["share"]["verdict"] == verdict


def test_a_baseline_adds_a_sentence_and_a_waterfall_for_both():
    a, b = sides(scaling=scaling(ONE, FOUR))
    a = replace(a, scaling=scaling(ONE, FOUR))

    text = page(comparison_lines(comparison(), (a, b), 100))

    assert text.count("4 ranks run 2.80× as fast as one: 70%") == 2
    assert "A against the baseline" in text
    assert "B against the baseline" in text


def test_losses_that_include_hung_steps_have_a_note():
    stuck = {"scaling": scaling(ONE, FOUR), "hung": STUCK}
    said = "the losses include 8.0 s in hung steps, 49% of the job's time: compute is not necessarily slower"

    assert f"▲ {said}" in texts(comparison_lines(comparison(), sides(**stuck), 120))
    assert "these parts" not in page(
        comparison_lines(comparison(), sides(**stuck | {"hung": replace(STUCK, share=0.03)}), 120)
    )
    gained = scaling(replace(ONE, compute_ns=20e6, step_ns=21e6, samples_per_s=32 / 0.042), FOUR)
    assert hung_doubt(gained, STUCK) == said.partition(":")[0]


def test_a_speedup_by_means_is_shown_with_the_one_by_medians():
    """Only beside medians; beside means it would confuse."""
    uneven = scaling(replace(ONE, median_ns=20e6), replace(FOUR, median_ns=40e6))
    found, means = comparison(), replace(comparison(), kinds=(StepModes(20e6, 60e6, 0.3), None))

    assert "2.80× as fast as one over all time (2.00× by medians): 70%" in page(
        comparison_lines(found, sides(scaling=uneven), 120)
    )
    assert "2.80× as fast as one: 70%" in page(comparison_lines(means, sides(scaling=uneven), 120))


def test_bad_endings_and_hung_steps_are_shown_for_both_runs():
    a, b = sides(bad_end=KILLED)
    a = replace(a, hung=STUCK)

    lines = texts(comparison_lines(comparison(-0.07, "faster"), (a, b), 120))

    assert lines[0].startswith("✓ B is faster")
    assert lines[1:3] == [
        "▲ A hung for 8.0 s at step 150, waiting for rank 1: 49% of its time, which medians do not show.",
        f"✖ B ended badly: {KILLED}.",
    ]


def test_a_run_that_continued_is_not_shown_as_ended():
    reported = sides(bad_end="rank 1 has not joined all_reduce #7", goes_on=True)
    lines = texts(comparison_lines(comparison(), reported, 120))

    assert lines[1] == "✖ B was hung or failing when its recording ended: rank 1 has not joined all_reduce #7."
    assert [line.endswith(" · was still going") for line in lines[3:5]] == [False, True]
    found = comparison_object(comparison(), reported, None)
    assert (found["a"]["goes_on"], found["b"]["goes_on"]) == (False, True)


def test_hung_steps_are_not_hidden_by_means_and_left_out_if_too_short_to_matter():
    means = replace(comparison(), kinds=(StepModes(20e6, 60e6, 0.3), None))

    assert (
        "B hung for 8.0 s at step 150, waiting for rank 1: 49% of its time."
        in texts(comparison_lines(means, sides(hung=STUCK), 120))[1]
    )
    assert "stood still" not in page(comparison_lines(comparison(), sides(hung=replace(STUCK, share=0.009)), 120))


def test_lines_on_what_medians_hide_fit_the_terminal():
    for columns in (60, 80, 120):
        reported = sides(bad_end=sanitize(HOSTILE * 9, 240), hung=replace(STUCK, steps=3, rank=None))
        lines = comparison_lines(comparison(), reported, columns)

        assert_fits(lines, columns)
        assert "3 steps (longest: step 150 took 8.0 s)" in " ".join(texts(lines)).replace("  ", "")


def test_the_attempt_is_shown_beside_the_file():
    text = page(comparison_lines(comparison(), sides(attempt=4, attempts=5), 120))

    assert text.count("attempt ") == 1
    assert "after.ddpw · attempt 4 of 5 · train" in text


def test_different_world_sizes_and_batches_are_remarked():
    eight = replace(FOUR, world_size=8, effective_batch=512)

    text = page(comparison_lines(comparison(b=eight, by_samples=True), sides(), 80))

    assert "The runs have 4 and 8 ranks." in text
    assert "The batches differ: 128 and 512 samples." in text
    assert "samples per second of a rank decide" in text


@pytest.mark.parametrize(
    ("value", "verdict", "text"),
    [
        (0.08, "slower", "failed: at most 5% slower"),
        (0.03, "slower", "passed: at most 5% slower"),
        (-0.1, "faster", "passed: at most 5% slower"),
        (
            0.04,
            "inside noise",
            (
                "inconclusive: at most 5% slower is neither proven nor refuted (95% confidence interval +3.0 to "
                "+6.0%); more steps narrow the interval"
            ),
        ),
        (
            0.08,
            "inside noise",
            (
                "inconclusive: at most 5% slower is neither proven nor refuted (95% confidence interval +7.0 to "
                "+10.0%); more steps narrow the interval"
            ),
        ),
    ],
)
def test_the_gate_passes_only_with_the_whole_interval_and_fails_only_beyond_noise(value, verdict, text):
    found = comparison(value, verdict)

    assert gate_text(found, sides(), 0.05) == text
    assert comparison_object(found, sides(), 0.05)["gate"] == text.split(":")[0]
    assert comparison_object(found, sides(), 0.05)["passed"] is not text.startswith("failed")


def test_a_second_run_that_ended_badly_fails_the_gate_however_fast_it_was():
    fast, slow = comparison(-0.07, "faster"), comparison(0.08)

    assert gate_fails(fast, sides(bad_end=KILLED), 0.05)
    assert gate_text(fast, sides(bad_end=KILLED), 0.05) == f"failed: B ended badly: {KILLED}"
    assert gate_text(slow, sides(bad_end=KILLED), 0.05) == f"failed: at most 5% slower; B ended badly: {KILLED}"
    assert comparison_object(fast, sides(bad_end=KILLED), 0.05)["passed"] is False
    assert comparison_object(fast, sides(bad_end=KILLED), 0.05)["gate"] == "failed"


def test_a_first_run_that_ended_badly_does_not_fail_it():
    a, b = sides()
    a = replace(a, bad_end=KILLED)

    assert not gate_fails(comparison(-0.07, "faster"), (a, b), 0.05)
    assert gate_text(comparison(-0.07, "faster"), (a, b), 0.05) == "passed: at most 5% slower"


def test_a_gate_passed_by_medians_mentions_hung_steps():
    reported, stuck = comparison(0.02, "inside noise"), sides(hung=STUCK)

    assert not gate_fails(reported, stuck, 0.05)
    assert gate_text(reported, stuck, 0.05) == (
        "passed: at most 5% slower; but B hung for 8.0 s at step 150, waiting for rank 1: 49% of its time, which "
        "medians do not show"
    )
    assert gate_text(comparison(), stuck, 0.05) == "failed: at most 5% slower"


def test_a_gate_that_is_refused_is_neither_passed_nor_failed():
    unproven = comparison(0.0, "unproven")

    assert comparison_object(unproven, sides(), 0.05)["passed"] is None
    assert comparison_object(unproven, sides(), 0.05)["gate"] == "inconclusive"
    assert comparison_object(unproven, sides(), None)["gate"] is None
    assert comparison_object(unproven, sides(bad_end=KILLED), 0.05)["passed"] is False


@pytest.mark.parametrize(("most", "text"), [(10.0, "1000"), (1000.0, "100000"), (0.07, "7"), (0.0125, "1.25")])
def test_what_the_gate_allows_is_written_as_people_do(most, text):
    assert gate_text(comparison(-0.1, "faster"), sides(), most) == f"passed: at most {text}% slower"


def test_the_object_has_all_figures():
    found = json.loads(json.dumps(comparison_object(comparison(), sides(), 0.05), allow_nan=False))

    assert found["verdict"] == "slower"
    assert found["passed"] is False
    assert found["figures"]["step"]["a"]["value"] == 40.0
    assert set(found["figures"]) == {"step", "samples_per_s", "samples_per_s_rank", "share", *PARTS}
    assert found["a"]["scaling"] is None
    assert (found["a"]["ended_badly"], found["a"]["stood_still"], found["a"]["attempts"]) == (None, None, 1)


def test_the_object_has_bad_endings_and_hung_steps():
    b = comparison_object(comparison(), sides(bad_end=KILLED, hung=replace(STUCK, share=0.001)), None)["b"]

    assert b["ended_badly"] == KILLED
    assert b["stood_still"] == {"steps": 1, "lost_s": 8.0, "longest_step": 150, "longest_s": 8.03, "rank": 1}


@given(
    st.floats(-0.999, 1e7), st.sampled_from(VERDICTS), st.booleans(), st.integers(60, 200),
    st.sampled_from(["x.ddpw", HOSTILE * 3]),
)  # fmt: skip
def test_whatever_differs_fits(value, verdict, by_samples, columns, name):
    found = comparison(value, verdict, by_samples=by_samples)

    lines = comparison_lines(found, sides(file=name, run=name, scaling=scaling(ONE, FOUR)), columns)
    assert_fits(lines, columns)
    assert verdict_text(found)
    assert "\x1b" not in json.dumps(comparison_object(found, sides(file=name, run=name), None), ensure_ascii=False)
