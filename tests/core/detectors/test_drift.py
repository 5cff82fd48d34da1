"""Checksums of replicas."""

from __future__ import annotations

import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.drift import drift
from ddpwatch.core.model_kinds import NAMES, REPLICAS
from tests.builders.fake_rank import make_hello
from tests.builders.synthetic_run import look, make_run, only, train


def checked(crcs_by_step, world=4, parameter="fc.weight", **hello):
    """Replicas with these checksums; None = no checksum of that rank."""
    state = make_run({rank: train() for rank in range(world)}, **hello)
    check(state, crcs_by_step, parameter)
    return state


def check(state, crcs_by_step, parameter):
    for step, crcs in crcs_by_step.items():
        for rank, crc in enumerate(crcs):
            if crc is not None:
                message = wire.Checksum(rank=rank, seq=100 + step, step=step, parameter=parameter, offset=0, crc=crc)
                state.apply(message, 1)


def test_a_replica_that_differs_is_named_with_parameter_and_step():
    finding = only(drift(look(checked({9: [5, 5, 5, 5], 199: [6, 6, 7, 6]}))))

    assert finding.message == "rank 2 differs from the others in parameter fc.weight after step 199"
    assert finding.ranks == (2,)
    assert finding.severity is Severity.CRITICAL
    assert (finding.evidence["step"], finding.evidence["parameter"]) == (199, "fc.weight")
    assert "load_state_dict" in finding.advice


@pytest.mark.parametrize(
    ("crcs", "ranks"),
    [([5, 6], (0, 1)), ([5, 5, 6, 6], (0, 1, 2, 3)), ([5, 6, 7, 5, 5], (1, 2)), ([5, None, 6], (0, 2))],
    ids=["two", "half and half", "two odd ones", "one has not told"],
)
def test_without_a_majority_all_that_differ_are_named(crcs, ranks):
    assert only(drift(look(checked({199: crcs}, world=len(crcs))))).ranks == ranks


def test_equal_replicas_and_lonely_checksums_are_fine():
    assert drift(look(checked({9: [5, 5, 5, 5], 199: [6, 6, 6, 6]}))) == []
    assert drift(look(checked({9: [5, None, None, None], 199: [None, 6, None, None]}))) == []
    assert drift(look(checked({9: [5]}, world=1))) == []


def test_a_slice_that_is_found_equal_again_has_healed():
    assert drift(look(checked({9: [5, 5, 5, 6], 199: [7, 7, 7, 7]}))) == []


def test_another_slice_that_is_equal_heals_nothing():
    state = checked({9: [5, 5, 5, 6]})
    check(state, {199: [7, 7, 7, 7]}, "fc.bias")
    finding = only(drift(look(state)))

    assert finding.evidence["step"] == 9
    assert (finding.evidence["differing_slices"], finding.evidence["slices_compared"]) == (1, 2)


def test_several_parameters_that_differ_are_one_finding():
    state = checked({9: [5, 5, 5, 6]})
    check(state, {199: [7, 7, 7, 8]}, "fc.bias")

    assert only(drift(look(state))).message.endswith("in parameter fc.bias after step 199, and in 1 parameter before")


@pytest.mark.parametrize("kind", sorted({*NAMES} - REPLICAS))
def test_ranks_with_models_or_shards_of_their_own_may_differ(kind):
    assert drift(look(checked({9: [5, 6, 7, 8]}, kind=kind))) == []


def grouped(crcs, groups):
    """Four replicas of as many models as there are groups."""
    state = make_run({rank: train() for rank in range(len(groups))})
    for rank, group in enumerate(groups):
        state.apply(make_hello(rank, 4, mono_ns=2, world_size=len(groups), replicas=group), 1)
    check(state, {9: crcs, 199: crcs}, "fc.weight")
    return look(state)


def test_only_ranks_of_the_models_process_group_are_replicas():
    groups = ["0-1", "0-1", "2-3", "2-3"]
    assert drift(grouped([5, 5, 6, 6], groups)) == []
    finding = only(drift(grouped([5, 5, 6, 7], groups)))
    assert (finding.ranks, finding.subject, finding.evidence["ranks_compared"]) == ((2, 3), "replicas on 2-3", 2)
    assert [each.ranks for each in drift(grouped([4, 5, 6, 7], groups))] == [(0, 1), (2, 3)]


def test_one_rank_of_a_larger_process_group_differs_from_the_others_of_it():
    groups = ["0-2"] * 3 + ["3-5"] * 3
    message = only(drift(grouped([5, 5, 5, 6, 6, 7], groups))).message
    assert message == "rank 5 differs from the others of its process group in parameter fc.weight after step 199"


def test_a_check_that_only_one_rank_has_taken_yet_hides_nothing():
    assert only(drift(look(checked({9: [5, 5, 5, 6], 199: [7, None, None, None]})))).evidence["step"] == 9
