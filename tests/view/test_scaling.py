"""Scaling efficiency on all screens: cards, all-reduce, summary, and `status`."""

import json
from dataclasses import replace

from hypothesis import given

from ddpwatch.core.metrics.scaling import Profile, scaling
from ddpwatch.view.allreduce import share_lines
from ddpwatch.view.overview import compact, throughput_card
from ddpwatch.view.scaling import scaling_doubt
from ddpwatch.view.status import status_object, status_screen
from ddpwatch.view.summary import summary_lines
from tests.view.pages import assert_fits, make_monitor, make_run_view, page, run_views, texts, widths

ONE = Profile(1, 100, 28e6, 32 / 0.028, 32, 1e6, 27e6, 0.0, 0.0)
"""One process that takes 28 ms for what four do in 40."""
SENTENCE = "4 ranks run 2.80× as fast as one: 70% efficiency; "


def against_one():
    return make_run_view(make_monitor(), baseline=ONE)


def test_the_throughput_card_shows_the_measured_efficiency():
    assert texts(throughput_card(against_one(), 26))[1] == "800/rank · 70% of 4×"
    assert "70% of 4×" in " ".join(texts(compact(against_one(), 100)))


def test_without_a_baseline_no_figure_looks_like_scaling():
    drawn = make_run_view(make_monitor())

    assert "×" not in " ".join([*texts(throughput_card(drawn, 40)), *texts(compact(drawn, 120))])
    assert "own work" in texts(throughput_card(drawn, 40))[1]
    assert "own work" not in " ".join(texts(throughput_card(against_one(), 40)))


def test_the_pages_show_the_losses():
    drawn = against_one()

    assert SENTENCE in page(share_lines(drawn, 120, 20))
    assert SENTENCE in page(summary_lines(drawn, 120, 40, duration_s=1.0))
    assert "waiting for rank 2" in page(summary_lines(drawn, 120, 40, duration_s=1.0))


def test_the_summary_covers_all_steps_that_were_seen():
    """Like the figures above it; other screens show it for the last steps."""
    drawn = against_one()
    drawn = replace(drawn, whole_scaling=scaling(ONE, replace(drawn.scaling.run, samples_per_s=2 * ONE.samples_per_s)))

    assert "4 ranks run 2.00× as fast as one" in page(summary_lines(drawn, 120, 40, duration_s=1.0))
    assert SENTENCE in page(share_lines(drawn, 120, 20))


def test_an_implausible_figure_and_an_uneven_baseline_are_doubted_beside_it_everywhere():
    slow = replace(ONE, step_ns=131e6, samples_per_s=32 / 0.131, compute_ns=130e6, median_ns=46e6, p99_ns=900e6)
    drawn = make_run_view(make_monitor(), baseline=slow)
    doubt = "more than 100% is implausible; the baseline was disturbed, most likely: its steps are uneven"

    assert doubt in scaling_doubt(drawn.scaling)
    assert scaling_doubt(drawn.scaling).endswith("(mean 131 ms, median 46.0 ms, p99 900 ms). Record it again")
    assert doubt in page(share_lines(drawn, 200, 20))
    assert doubt in page(summary_lines(drawn, 200, 40, duration_s=1.0))
    assert doubt in page(status_screen(drawn, 200))
    # By the median of its steps the baseline would be plausible.
    assert scaling_doubt(scaling(replace(ONE, median_ns=10e6, p99_ns=90e6), drawn.scaling.run)).startswith("the base")
    assert not scaling_doubt(scaling(replace(ONE, median_ns=27e6, p99_ns=90e6), drawn.scaling.run))
    assert not scaling_doubt(scaling(ONE, drawn.scaling.run))


def test_status_shows_it_in_lines_and_in_json():
    drawn = make_run_view(make_monitor(), baseline=ONE)

    for columns in (80, 120):
        lines = status_screen(drawn, columns)
        assert_fits(lines, columns)
        assert SENTENCE in page(lines)
    low = status_screen(drawn, 80, 10)
    assert len(low) <= 10
    assert SENTENCE in page(low)
    reported = json.loads(json.dumps(status_object(drawn), allow_nan=False))["scaling"]
    assert reported["efficiency"] == 0.7
    assert reported["speedup"] == 2.8
    assert abs(sum(reported["parts"].values()) + reported["efficiency"] - 1) < 1e-3
    assert reported["waited_for"] == [2]


def test_both_speedups_are_shown_in_full_on_a_narrow_screen():
    """Beside figures that are medians; the losses are not cut off."""
    uneven = replace(ONE, median_ns=20e6)
    drawn = make_run_view(make_monitor(), baseline=uneven)

    for lines in (share_lines(drawn, 80, 20), status_screen(drawn, 80), summary_lines(drawn, 80, 40, duration_s=1.0)):
        text = " ".join(page(lines).split())
        assert "2.80× as fast as one over all time (2.00× by medians): 70% efficiency; " in text
        assert "waiting for rank 2" in text.partition("by medians")[2]


def test_there_is_no_scaling_while_a_rank_is_missing():
    drawn = make_run_view(make_monitor(received=3), baseline=ONE)

    assert drawn.scaling is None
    assert "scaling" not in page(summary_lines(drawn, 120, 40, duration_s=1.0))


@given(run_views(), widths)
def test_whatever_the_run_is_it_fits(drawn, columns):
    again = make_run_view(drawn.monitor, baseline=ONE)

    for line in throughput_card(again, columns):
        assert_fits([line], max(columns, 60))
    assert_fits(share_lines(again, columns, 20), columns, 20)
