"""Equal batches, samplers that are not distributed, epochs that are not set."""

from __future__ import annotations

import msgspec
import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.same_data import same_data
from ddpwatch.core.limits import DEFAULTS, SameDataLimits
from tests.builders.fake_rank import make_step
from tests.builders.synthetic_run import look, make_run, only, train


def batches(print_of, world=4, count=50, **hello):
    """Ranks with a fingerprint in every 8th step."""
    run = {
        rank: [make_step(i, fingerprint=0 if i % 8 else print_of(rank, i)) for i in range(10, 10 + count)]
        for rank in range(world)
    }
    return make_run(run, **hello)


def own(rank, index):
    return 1000 * index + rank


def test_ranks_that_all_have_the_same_batches_are_reported():
    finding = only(same_data(look(batches(lambda rank, index: index))))

    assert finding.message == "all ranks train on the same samples: equal batches in 6 of 6 sampled steps"
    assert finding.ranks == (0, 1, 2, 3)
    assert finding.severity is Severity.WARNING
    assert "DistributedSampler" in finding.advice


def test_two_ranks_with_the_same_batches_are_named():
    finding = only(same_data(look(batches(lambda rank, index: own(min(rank, 2), index)))))

    assert finding.message.startswith("ranks 2-3 train on the same samples:")
    assert finding.ranks == (2, 3)


def test_groups_that_share_among_themselves_are_counted():
    finding = only(same_data(look(batches(lambda rank, index: own(rank // 2, index)))))

    assert "in 2 groups" in finding.message


def test_different_batches_and_a_chance_hit_are_fine():
    assert same_data(look(batches(own))) == []
    assert same_data(look(batches(lambda rank, index: 7 if index in {16, 24} else own(rank, index)))) == []


def test_as_many_equal_batches_as_the_limit_says_are_enough():
    state = batches(lambda rank, index: index if index in {16, 24} else own(rank, index))
    limits = msgspec.structs.replace(DEFAULTS, same_data=SameDataLimits(steps=2))

    assert only(same_data(look(state, limits=limits))).evidence["equal_steps"] == 2


def test_a_rank_without_fingerprints_proves_nothing():
    assert same_data(look(batches(lambda rank, index: index if rank else 0))) == []


def test_batches_that_never_change_are_a_suspicion_only():
    """A mask that is first in the batch, or a benchmark on one synthetic batch."""
    assert not only(same_data(look(batches(lambda rank, index: 7)))).proven


def loaders(state, *passes, ranks=None, **fields):
    """Passes over the data as (step, epoch, sampler_epoch)."""
    for rank in list(state.ranks) if ranks is None else ranks:
        for number, (step, epoch, sampler_epoch) in enumerate(passes):
            loader = {
                "sampler": "DistributedSampler",
                "distributed": True,
                "replicas": state.world_size,
                "shuffle": True,
                **fields,
            }
            message = wire.Loader(
                rank=rank, seq=10 + 2 * step + number, step=step, epoch=epoch, sampler_epoch=sampler_epoch, **loader
            )
            state.apply(message, 1)
    return state


def healthy(world=2, **hello):
    return make_run({rank: train() for rank in range(world)}, **hello)


def test_a_sampler_without_set_epoch_is_found():
    finding = only(same_data(look(loaders(healthy(), (0, 0, 0), (20, 1, 0), (40, 2, 0)))))

    assert finding.message == "set_epoch() was never called: every epoch has the same order (3 epochs observed)"
    assert finding.subject == "set_epoch"
    assert finding.severity is Severity.WARNING
    assert finding.ranks == ()


def test_a_rank_without_set_epoch_is_named_when_the_others_have_it():
    state = loaders(healthy(), (0, 0, 0), (20, 1, 0), ranks=[1])

    assert only(same_data(look(loaders(state, (0, 0, 0), (20, 1, 1), ranks=[0])))).ranks == (1,)


@pytest.mark.parametrize(
    ("passes", "fields"),
    [
        ([(0, 0, 0)], {}),
        ([(0, 0, 0), (20, 1, 1)], {}),
        ([(0, 0, 0), (0, 1, 0)], {}),
        ([(0, 0, 0), (0, 1, 0), (20, 2, 1)], {}),
        ([(0, 0, 0), (20, 0, 0)], {}),
        ([(0, 0, -1), (20, 1, -1)], {}),
        ([(0, 0, 0), (20, 1, 0)], {"shuffle": False}),
    ],
    ids=[
        "the first epoch",
        "told each time",
        "a look before the first",
        "a look, then told",
        "made anew each time",
        "without epochs",
        "not shuffled",
    ],
)
def test_a_sampler_with_set_epoch_or_without_need_of_it_is_fine(passes, fields):
    assert same_data(look(loaders(healthy(), *passes, **fields))) == []


def test_another_loader_of_the_script_does_not_hide_the_one_in_use():
    state = loaders(healthy(), (0, 0, 3), (5, 1, 4), batch_size=8)

    assert only(same_data(look(loaders(state, (10, 0, 0), (40, 1, 0), batch_size=32)))).subject == "set_epoch"


PLAIN_SAMPLER = {"sampler": "RandomSampler", "distributed": False, "replicas": 0}


def test_a_sampler_that_is_not_distributed_is_an_info():
    finding = only(same_data(look(loaders(healthy(), (0, 0, -1), **PLAIN_SAMPLER))))

    assert finding.message.startswith("sampler RandomSampler is not distributed")
    assert (finding.severity, finding.subject) == (Severity.INFO, "sampler")


@pytest.mark.parametrize(
    ("state", "changed"),
    [
        (healthy(), {"replicas": 2}),
        (healthy(), {"sampler": "MySampler"}),
        (healthy(world=1), {}),
        (healthy(kind="plain"), {}),
    ],
    ids=["sharded", "the user's own", "a world of one", "no DDP"],
)
def test_a_sampler_that_may_be_right_is_not_mentioned(state, changed):
    assert same_data(look(loaders(state, (0, 0, -1), **{**PLAIN_SAMPLER, **changed}))) == []


def test_equal_batches_are_found_in_fsdp_and_are_right_in_a_model_parallel_group():
    assert only(same_data(look(batches(lambda rank, index: index, kind="fsdp2")))).subject == "batches"
    assert same_data(look(batches(lambda rank, index: index, kind="fsdp2-tp"))) == []


def test_equal_batches_make_the_info_on_the_sampler_needless():
    state = loaders(batches(lambda rank, index: index), (0, 0, -1), **PLAIN_SAMPLER)

    assert only(same_data(look(state))).subject == "batches"


def test_the_sampler_in_use_counts_not_an_earlier_one():
    state = loaders(healthy(), (0, 0, -1), **PLAIN_SAMPLER)

    assert same_data(look(loaders(state, (20, 0, 0)))) == []
