"""Rules about what is trained on, and whether the replicas stay equal."""

from __future__ import annotations

import msgspec
import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.detectors.drift import drift
from ddpwatch.core.detectors.same_data import same_data
from ddpwatch.core.detectors.uneven_batch import uneven_batch
from ddpwatch.core.limits import DEFAULTS, SameDataLimits
from ddpwatch.wire import PHASES
from tests.builders.fake_rank import make_beat, make_step
from tests.builders.synthetic_run import SECOND, look, make_run, only, train

SYNC, FORWARD = PHASES.index("sync"), PHASES.index("forward")


# samples


def samples(*counts):
    return make_run({rank: train(samples=number) for rank, number in enumerate(counts)})


def test_a_rank_with_fewer_samples_is_named():
    finding = only(uneven_batch(look(samples(32, 32, 32, 24))))

    assert finding.message == "rank 3 trains on 24 samples a step, the others on 32"
    assert finding.ranks == (3,)
    assert finding.severity is Severity.WARNING
    assert (finding.evidence["samples"], finding.evidence["least_samples"], finding.evidence["steps"]) == (32, 24, 20)
    assert "drop_last" in finding.advice


def test_several_ranks_with_other_samples_are_named_with_their_span():
    finding = only(uneven_batch(look(samples(32, 32, 32, 24, 16))))

    assert finding.message == "ranks 3-4 train on 16 to 24 samples a step, the others on 32"


def test_of_two_ranks_the_one_with_less_is_named():
    assert only(uneven_batch(look(samples(24, 32)))).ranks == (0,)


@pytest.mark.parametrize(("uneven_steps", "found"), [(2, 0), (3, 1)])
def test_a_few_uneven_steps_are_enough_and_fewer_are_not(uneven_steps, found):
    short = [make_step(index, samples=24 if index >= 60 - uneven_steps else 32) for index in range(10, 60)]
    findings = uneven_batch(look(make_run({0: train(), 1: train(), 2: short})))

    assert len(findings) == found
    assert all(finding.message.endswith("on 32 in 3 of 20 steps") for finding in findings)


def test_batches_that_vary_everywhere_name_no_rank():
    varied = {rank: [make_step(i, samples=30 + (i + rank) % 3) for i in range(10, 60)] for rank in range(3)}
    finding = only(uneven_batch(look(make_run(varied))))

    assert finding.ranks == ()
    assert finding.message == "the ranks train on different numbers of samples: 30 to 32 a step"


def test_samples_that_a_rank_cannot_tell_are_not_compared():
    assert uneven_batch(look(samples(32, 0, 24))) == []
    assert uneven_batch(look(samples(32, 32))) == []
    assert uneven_batch(look(samples(32))) == []


# data that ends early


def ended_run(reason="exit", phase=SYNC, phase_ns=2 * SECOND, step=90, **hello):
    """Rank 1 has said goodbye after 90 steps; the others beat on."""
    state = make_run({rank: train(0, 90) for rank in range(3)}, **hello)
    state.apply(wire.Bye(rank=1, seq=4, reason=reason, text="", mono_ns=1), 1)
    for rank in (0, 2):
        state.apply(make_beat(rank, seq=4, step=step, phase=phase, phase_ns=phase_ns), 1)
    return state


@pytest.mark.parametrize("reason", ["exit", "closed"])
def test_a_rank_that_ended_while_the_others_wait_for_it_is_critical(reason):
    finding = only(uneven_batch(look(ended_run(reason))))

    assert finding.message == (
        "rank 1 has ended after 90 steps while the others go on: ranks 0, 2 in all-reduce for 2s"
    )
    assert finding.severity is Severity.CRITICAL
    assert finding.ranks == (1,)
    assert finding.evidence == {"steps_done": 90, "waiting_ranks": 2, "waiting_s": 2.0}
    assert "join()" in finding.advice


@pytest.mark.parametrize(
    "changed",
    [
        {"phase": FORWARD},
        {"phase_ns": SECOND},
        {"reason": "failed"},
        {"reason": "off"},
        {"kind": "plain"},
    ],
    ids=["they work", "they have waited for a second only", "it failed", "its agent is off", "there is no DDP"],
)
def test_a_rank_that_ended_is_not_blamed_without_reason(changed):
    assert uneven_batch(look(ended_run(**changed))) == []


def test_a_rank_behind_the_ended_one_does_not_wait_for_it():
    state = make_run({0: train(0, 90), 1: train(0, 60)})
    state.apply(wire.Bye(rank=0, seq=4, reason="exit", text="", mono_ns=1), 1)
    state.apply(make_beat(1, seq=4, step=60, phase=SYNC, phase_ns=9 * SECOND), 1)

    assert uneven_batch(look(state)) == []


def test_when_all_have_ended_nobody_waits():
    state = ended_run()
    for rank in (0, 2):
        state.apply(wire.Bye(rank=rank, seq=5, reason="exit", text="", mono_ns=1), 1)

    assert uneven_batch(look(state)) == []


# fingerprints


def batches(print_of, world=4, count=50):
    """Ranks that take a fingerprint in every 8th step."""
    run = {
        rank: [make_step(i, fingerprint=0 if i % 8 else print_of(rank, i)) for i in range(10, 10 + count)]
        for rank in range(world)
    }
    return make_run(run)


def own(rank, index):
    return 1000 * index + rank


def test_ranks_that_all_have_the_same_batches_are_told():
    finding = only(same_data(look(batches(lambda rank, index: index))))

    assert finding.message == "all ranks train on the same samples: equal batches in 6 of 6 steps looked at"
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
    """A mask that comes first in the batch, or a benchmark on one made-up batch."""
    assert not only(same_data(look(batches(lambda rank, index: 7)))).proven


# samplers


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


def test_a_sampler_that_is_never_told_the_epoch_is_found():
    finding = only(same_data(look(loaders(healthy(), (0, 0, 0), (20, 1, 0), (40, 2, 0)))))

    assert finding.message == "set_epoch was never called: every epoch has the same order (seen in 3 passes)"
    assert finding.subject == "set_epoch"
    assert finding.severity is Severity.WARNING
    assert finding.ranks == ()


def test_a_rank_that_is_never_told_the_epoch_is_named_when_others_are():
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
def test_a_sampler_that_is_told_or_need_not_be_is_fine(passes, fields):
    assert same_data(look(loaders(healthy(), *passes, **fields))) == []


def test_another_loader_of_the_script_does_not_hide_the_one_in_use():
    state = loaders(healthy(), (0, 0, 3), (5, 1, 4), batch_size=8)

    assert only(same_data(look(loaders(state, (10, 0, 0), (40, 1, 0), batch_size=32)))).subject == "set_epoch"


PLAIN_SAMPLER = {"sampler": "RandomSampler", "distributed": False, "replicas": 0}


def test_a_sampler_that_is_not_distributed_is_worth_a_word():
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


def test_equal_batches_make_the_word_on_the_sampler_needless():
    state = loaders(batches(lambda rank, index: index), (0, 0, -1), **PLAIN_SAMPLER)

    assert only(same_data(look(state))).subject == "batches"


def test_the_sampler_in_use_counts_not_an_earlier_one():
    state = loaders(healthy(), (0, 0, -1), **PLAIN_SAMPLER)

    assert same_data(look(loaders(state, (20, 0, 0)))) == []


# checksums


def checked(crcs_by_step, world=4, parameter="fc.weight", **hello):
    """Replicas with these checksums; None = that rank has taken none."""
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

    assert only(drift(look(state))).message.endswith("in parameter fc.bias after step 199, and in 1 more before")


def test_processes_that_train_models_of_their_own_may_differ():
    assert drift(look(checked({9: [5, 6, 7, 8]}, kind="plain"))) == []


def test_a_check_that_only_one_rank_has_taken_yet_hides_nothing():
    assert only(drift(look(checked({9: [5, 5, 5, 6], 199: [7, None, None, None]})))).evidence["step"] == 9
