"""Ranks that wait for their DataLoaders."""

from __future__ import annotations

import pytest

from ddpwatch.core.detectors.data_bound import data_bound
from tests.builders.synthetic_run import look, make_run, only, run_of, train


def test_ranks_that_all_wait_for_data_make_the_job_data_bound():
    finding = only(data_bound(look(run_of(data=19))))

    assert finding.message == "all ranks wait for data: 40% of the step"
    assert finding.ranks == ()
    assert finding.phase == "data"
    assert finding.cost == pytest.approx(19 / 48)
    assert finding.evidence["data_ms"] == 19.0
    assert "num_workers" in finding.advice


def test_most_ranks_that_wait_for_data_are_named():
    run = {rank: train(data=19) if rank else train(sync=20) for rank in range(4)}
    finding = only(data_bound(look(make_run(run))))

    assert finding.message == "ranks 1-3 wait for data: 40% of the step"
    assert finding.ranks == (1, 2, 3)


def test_half_of_the_ranks_are_not_most():
    run = {rank: train(data=19) if rank > 1 else train(sync=20) for rank in range(4)}

    assert data_bound(look(make_run(run))) == []


@pytest.mark.parametrize(("data_ns", "found"), [(7_250_000, 0), (7_260_000, 1)], ids=["20%", "more"])
def test_waiting_for_data_must_exceed_its_limit(data_ns, found):
    assert len(data_bound(look(run_of(data_ns=data_ns)))) == found


def test_a_world_of_one_may_wait_for_its_data_too():
    assert only(data_bound(look(run_of(world=1, data=19)))).message.startswith("rank 0 waits for data")
