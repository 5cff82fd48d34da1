"""The comparison as people read it, and as programs do."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import HOSTILE, assert_fits, page, texts

from ddpwatch.core.comparison import Comparison, Difference, Estimate
from ddpwatch.core.kinds import Kinds
from ddpwatch.core.ledger import PARTS
from ddpwatch.core.scaling import Profile, scaling
from ddpwatch.view.cells import Level
from ddpwatch.view.comparison import Side, comparison_lines, comparison_object, gate_text, verdict_text

ONE = Profile(1, 300, 28e6, 32 / 0.028, 32, 1e6, 27e6, 0.0, 0.0)
FOUR = Profile(4, 300, 40e6, 128 / 0.04, 128, 1e6, 31e6, 3e6, 5e6, (2,))
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
def test_the_table_tells_figures_intervals_and_verdicts(columns):
    lines = comparison_lines(comparison(), sides(), columns)

    assert_fits(lines, columns)
    found = texts(lines)
    assert found[0].startswith("▲ B is slower: it takes 8.0 % more time for a step")
    row = next(line for line in found if line.startswith("step"))
    assert "+8.0 %" in row
    assert "+7.0 … +10.0" in row
    assert row.endswith("▲ slower")
    assert "waiting for rank 2" in page(lines)
    assert len([line for line in found if "inside noise" in line]) == len(PARTS)


def test_a_difference_that_is_proven_and_hardly_anything_is_not_called_noise():
    lines = texts(comparison_lines(comparison(0.008, "too small"), sides(), 120))

    assert lines[0].startswith("· Too small to matter: B takes 0.8 % more time for a step, between ")
    assert "two runs of the same thing may differ by 1 % for no reason" in " ".join(line.strip() for line in lines[:2])
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

    assert text.count("4 ranks run 2.80× as fast as one: 70 %") == 2
    assert "A against one process" in text
    assert "B against one process" in text


def test_a_speed_up_that_the_table_does_not_show_is_told_with_the_one_that_it_does():
    """The table has medians; where it has means, they would only confuse."""
    uneven = scaling(replace(ONE, median_ns=20e6), replace(FOUR, median_ns=40e6))
    found, means = comparison(), replace(comparison(), kinds=(Kinds(20e6, 60e6, 0.3), None))

    assert "2.80× as fast as one over all time (2.00× by medians): 70 %" in page(
        comparison_lines(found, sides(scaling=uneven), 120)
    )
    assert "2.80× as fast as one: 70 %" in page(comparison_lines(means, sides(scaling=uneven), 120))


def test_other_worlds_and_batches_are_said():
    eight = replace(FOUR, world_size=8, effective_batch=512)

    text = page(comparison_lines(comparison(b=eight, by_samples=True), sides(), 80))

    assert "The runs have 4 and 8 ranks." in text
    assert "The batches differ: 128 and 512 samples." in text
    assert "samples a second decide" in text


@pytest.mark.parametrize(
    ("value", "verdict", "text"),
    [
        (0.08, "slower", "failed: at most 5 % slower"),
        (0.03, "slower", "passed: at most 5 % slower"),
        (
            0.08,
            "inside noise",
            (
                "not decided, and so not failed: at most 5 % slower; it looks 8.0 % slower, but by chance alone it may "
                "be anything between +7.0 and +10.0 %. Longer recordings tell more"
            ),
        ),
        (-0.1, "faster", "passed: at most 5 % slower"),
    ],
)
def test_the_gate_fails_only_beyond_noise_and_says_why_it_did_not(value, verdict, text):
    assert gate_text(comparison(value, verdict), 0.05) == text


@pytest.mark.parametrize(("most", "text"), [(10.0, "1000"), (1000.0, "100000"), (0.07, "7"), (0.0125, "1.25")])
def test_what_the_gate_allows_is_written_as_people_do(most, text):
    assert gate_text(comparison(0.0, "inside noise"), most) == f"passed: at most {text} % slower"


def test_the_object_has_all_figures():
    found = json.loads(json.dumps(comparison_object(comparison(), sides(), 0.05), allow_nan=False))

    assert found["verdict"] == "slower"
    assert found["passed"] is False
    assert found["figures"]["step"]["a"]["value"] == 40.0
    assert set(found["figures"]) == {"step", "samples_per_s", "samples_per_s_rank", "share", *PARTS}
    assert found["a"]["scaling"] is None


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
