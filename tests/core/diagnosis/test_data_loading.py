"""Advice on a slow DataLoader, from what is measured of it."""

from __future__ import annotations

import pytest

from ddpwatch.core.detectors.data_bound import data_bound
from ddpwatch.core.detectors.straggler import straggler
from ddpwatch.core.diagnosis.data_loading import first_batches, free_cores, loading_advice
from tests.builders.fake_rank import MS, make_step
from tests.builders.synthetic_run import look, make_run, only, run_of, train, with_loader


def advice(used=None, workers=2, starts=(0,), run=None, **settings):
    hello = {name: settings.pop(name) for name in ("cores", "device") if name in settings}
    state = with_loader(run or run_of(data=19, **hello), starts=starts, used=used, workers=workers, **settings)
    return loading_advice(state, look(state).window, 0)


def short_epochs(first=200, later=1):
    return make_run({rank: [make_step(i, data=later if i % 5 else first) for i in range(10, 60)] for rank in range(4)})


@pytest.mark.parametrize(("cores", "suggested"), [(0, 4), (4, 1), (16, 3), (256, 8)])
def test_without_workers_a_number_of_them_that_fits_the_cores(cores, suggested):
    assert advice(workers=0, cores=cores).endswith(f"try num_workers={suggested}.")


def test_busy_workers_and_free_cores_more_workers():
    assert advice(used=(97, 1), cores=32) == (
        "The 2 workers used 97% of a core each, and 20 cores of the host are free: try num_workers=4."
    )


def test_busy_workers_and_unknown_cores_more_workers():
    assert advice(used=(97, 1)) == "The 2 workers used 97% of a core each: try num_workers=4."


def test_busy_workers_and_no_free_core_cheaper_transforms():
    assert "no core is free: try cheaper transforms" in advice(used=(97, 1), cores=8)


def test_workers_that_wait_for_cores_fewer_of_them():
    assert "waited for a CPU core 35% of the time (4 cores for 4 ranks): try fewer" in advice(used=(60, 35), cores=4)


def test_workers_that_wait_for_something_else_storage():
    assert "12% of a core each, so they wait for storage" in advice(used=(12, 1), cores=32)


def test_short_epochs_persistent_workers():
    text = advice(run=short_epochs(), starts=range(10, 60, 5), used=(97, 1), persistent_workers=False)

    assert text == (
        "Most of it is the first batch of each epoch (200 ms, later 1.00 ms), because workers start anew: try "
        "persistent_workers=True."
    )


def test_short_epochs_with_persistent_workers_do_not_ask_for_them():
    text = advice(run=short_epochs(), starts=range(10, 60, 5), persistent_workers=True)

    assert "persistent_workers" not in text
    assert "prefetch_factor" in text


@pytest.mark.parametrize(("device", "pinned", "asked"), [("cuda:0", False, True), ("cuda:0", True, False),
                                                         ("cuda:0", None, False), ("cpu", False, False)])  # fmt: skip
def test_memory_that_is_not_pinned_matters_on_a_gpu_only(device, pinned, asked):
    assert ("pin_memory=True" in advice(device=device, pin_memory=pinned)) is asked


def test_without_measurements_there_is_no_advice():
    assert advice(workers=2) == ""
    state = run_of(data=19)
    assert loading_advice(state, look(state).window, 0) == ""


def test_first_batches_are_compared_with_the_later_ones():
    state = with_loader(short_epochs(), starts=range(10, 60, 5), workers=2)
    first = first_batches(state, look(state).window, 0)

    assert (first.first_ns, first.later_ns) == (200 * MS, 1 * MS)
    assert first.share == pytest.approx(200 / 204)


def test_one_pass_over_the_data_has_no_first_batches_to_compare():
    state = with_loader(short_epochs(), starts=(10,), workers=2)

    assert first_batches(state, look(state).window, 0) is None


def test_free_cores_are_those_of_the_rank_and_of_the_workers_of_its_host():
    state = with_loader(run_of(cores=16, hosts=("node-a", "node-a", "node-b", "node-b")), used=(50, 0), workers=2)

    assert free_cores(state, state.ranks[0]) == pytest.approx(16 - 2 * (0.98 + 1.0))


def test_short_epochs_are_data_bound_though_most_steps_do_not_wait():
    state = with_loader(short_epochs(), starts=range(10, 60, 5), workers=2, persistent_workers=False)
    finding = only(data_bound(look(state)))

    assert finding.message == "all ranks wait for data: 58% of the step, mostly for the first batch of each epoch"
    assert "persistent_workers=True" in finding.advice


def test_one_slow_batch_amid_an_epoch_is_not_data_bound():
    steps = {rank: [make_step(i, data=1 if i % 25 else 2000) for i in range(10, 60)] for rank in range(4)}

    assert data_bound(look(with_loader(make_run(steps), workers=2))) == []


def test_a_straggler_in_data_has_the_same_advice():
    steps = {rank: train(**({"data": 21} if rank == 1 else {"sync": 22})) for rank in range(4)}
    finding = only(straggler(look(with_loader(make_run(steps, cores=32), used=(12, 0), workers=2))))

    assert finding.phase == "data"
    assert "storage" in finding.advice
