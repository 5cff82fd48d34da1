"""The rank that has not arrived is named while the job hangs: real gloo ranks, real sockets."""

import re

import pytest

from ddpwatch import wire
from tests.builders.hanging_job import Watched
from tests.builders.torch_features import needs_gloo_recorder

GUILTY = {"save": 0}
BY_RULE = {
    "sleep": "stall", "stop": "stall", "lock": "stall", "save": "stall", "side group": "stall", "skip": "desync",
    "mismatch": "desync", "end": "desync", "cross": "desync", "data": "uneven-batch", "kill": "rank-lost",
    "raise": "rank-failed",
}  # fmt: skip
RECORDED = {"side group", "skip", "mismatch", "end", "cross", "data"}
"""Kinds of hangs in which only the flight recorder shows which rank is missing."""
KINDS = [pytest.param(kind, marks=needs_gloo_recorder if kind in RECORDED else ()) for kind in BY_RULE]


@pytest.fixture
def hanging(start, run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("DDPWATCH_RUN_DIR", str(run_dir))

    def begin(kind, world_size=3, **settings):
        return Watched(start, tmp_path, kind, world_size, GUILTY.get(kind, world_size - 1), **settings)

    return begin


@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_that_others_wait_for_is_named(hanging, kind):
    guilty = GUILTY.get(kind, 2)
    with hanging(kind) as job:
        assert job.named() == []
        job.hang()
        job.until(job.named)
        first = job.named()
        assert {(finding.rule, finding.ranks) for finding in first} == {(BY_RULE[kind], (guilty,))}, first
        if kind == "save":
            assert "rank 0 has been in torch.save for" in first[0].message
        assert {(finding.rule, finding.ranks) for finding in job.replayed()} == {
            (finding.rule, finding.ranks) for finding in job.open
        }


@needs_gloo_recorder
def test_the_function_that_a_sleeping_rank_is_in_is_shown_and_the_alert_goes_when_it_goes_on(hanging):
    with hanging("nap", timeout_s=600.0) as job:
        job.hang()
        job.until(lambda: any("nap_here (hanging_job.py:" in finding.message for finding in job.named()))

        (reported,) = job.named()
        # The others are in the broadcast of buffers before the forward pass, or in the all-reduce after it.
        assert re.match(r"rank 2 has not joined (all_reduce|broadcast) #\d", reported.message)
        assert "ranks 0-1 have waited in sync for" in reported.message
        assert reported.evidence["timeout_s"] == 600.0
        assert reported.evidence["left_s"] < 600.0
        assert wire.PHASES[job.ranks[2].stack.phase] == "other", "of the moment of the stack itself"
        job.wake()
        job.until(lambda: not job.named())


@pytest.mark.parametrize("kind", ["all pause", "announced", "compile"])
def test_a_pause_of_all_ranks_one_that_is_announced_and_a_first_step_that_takes_long_are_no_stall(hanging, kind):
    with hanging(kind) as job:
        steps = max(rank.step for rank in job.ranks)
        job.hang()
        job.until(lambda: all(rank.step > steps + 20 for rank in job.ranks))

        assert job.reported == set()


@needs_gloo_recorder
def test_the_forecast_of_the_timeout_is_right_and_names_the_missing_rank(hanging):
    """Two ranks give up when the forecast time is over; neither of them is the one that is named."""
    with hanging("stop", timeout_s=6.0) as job:
        job.hang()
        job.until(lambda: any(finding.urgent for finding in job.named()))
        (soon,) = job.named()
        assert (soon.rule, soon.ranks) == ("stall", (2,))
        forecast_ns = job.follower.monitor.state.now_ns + int(soon.evidence["left_s"] * 1e9)
        job.until(lambda: all(rank.bye is not None for rank in job.ranks[:2]))

        early_ns = [forecast_ns - rank.bye_ns for rank in job.ranks[:2]]
        assert max(map(abs, early_ns)) < 6e9 / 3, early_ns
        job.until(lambda: any("timed out" in finding.message for finding in job.named()))
        assert {finding.ranks for finding in job.named()} == {(2,)}
        job.until(lambda: [finding.rule for finding in job.named()] == ["timeout"])
        assert job.together <= {(), ("stall",), ("timeout",)}, "one cause, one alert at a time"
