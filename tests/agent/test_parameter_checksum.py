"""Checksums are taken at the same steps on all ranks and, on a GPU, reported once their events have completed."""

import weakref
import zlib

import pytest
import torch
from torch import nn

from ddpwatch import wire
from ddpwatch.agent.clock import HostClock
from ddpwatch.agent.fail_open import Switch
from ddpwatch.agent.parameter_checksum import EVERY_STEPS, FIRST_STEP, Checksums
from ddpwatch.agent.step_recorder import Recorder


class Event:
    """A CUDA event that completes when the test decides; waiting for it would fail."""

    def __init__(self, answers):
        self._answers = answers
        self.recorded = False

    def record(self):
        self.recorded = True

    def query(self):
        assert self.recorded
        return self._answers.pop(0)


@pytest.fixture
def recorder():
    return Recorder(HostClock(), Switch())


def reported(recorder):
    return [fields for kind, fields in recorder.events.drain(1000) if kind is wire.Checksum]


def run_until(recorder, index):
    while recorder.index < index:
        recorder.close_step()


def test_each_parameter_has_its_turn_at_fixed_steps(recorder):
    model = nn.Linear(3, 2)
    recorder.checksums = Checksums([weakref.ref(model)])
    run_until(recorder, 4 * EVERY_STEPS)
    weight, bias = (zlib.crc32(parameter.detach().numpy().tobytes()) for parameter in model.parameters())
    assert [(fields["step"], fields["parameter"], fields["crc"]) for fields in reported(recorder)] == [
        (FIRST_STEP, "weight", weight),
        (EVERY_STEPS - 1, "weight", weight),
        (2 * EVERY_STEPS - 1, "bias", bias),
        (3 * EVERY_STEPS - 1, "weight", weight),
        (4 * EVERY_STEPS - 1, "bias", bias),
    ]


def test_large_parameters_are_walked_through_slice_by_slice(recorder):
    model = nn.Linear(1 << 15, 1, bias=False)  # two slices of 64 KiB
    recorder.checksums = Checksums([weakref.ref(model)])
    run_until(recorder, 3 * EVERY_STEPS)
    offsets = [fields["offset"] for fields in reported(recorder)]
    assert offsets[0] == 0
    assert len(set(offsets)) > 1
    assert max(offsets) <= 1 << 14


def test_a_sum_on_a_gpu_is_reported_later_with_the_step_it_was_taken_in(recorder):
    answers = [False, False, True]
    checksums = Checksums([], lambda: Event(answers))
    piece = torch.arange(5, dtype=torch.float32)
    checksums._queue(piece, {"parameter": "weight", "offset": 0, "step": 9})
    piece.zero_()  # the next step changes the parameter; the sum was queued before
    recorder.checksums = checksums
    run_until(recorder, 2)
    assert reported(recorder) == []
    run_until(recorder, 3)
    (fields,) = reported(recorder)
    bits = torch.arange(5, dtype=torch.float32).view(torch.int32).sum(dtype=torch.int64)
    assert (fields["step"], fields["crc"]) == (9, int(bits))
    run_until(recorder, 6)
    assert answers == []
    assert reported(recorder) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_every_width_of_parameter_can_be_summed(recorder, dtype):
    for value in (1, 2):
        checksums = Checksums([], lambda: Event([True]))
        checksums._queue(torch.full((4,), value, dtype=dtype), {"parameter": "weight", "offset": 0, "step": 9})
        checksums.after_step(recorder)
    one, two = (fields["crc"] for fields in reported(recorder))
    assert one != two


def test_models_that_are_gone_or_empty_are_passed_over(recorder):
    model = nn.Linear(3, 2)
    recorder.checksums = Checksums([weakref.ref(model)])
    run_until(recorder, FIRST_STEP + 1)
    assert len(reported(recorder)) == 1
    del model
    run_until(recorder, EVERY_STEPS + 1)
    assert reported(recorder) == []
    recorder.checksums = Checksums([])
    run_until(recorder, 2 * EVERY_STEPS + 1)
    assert reported(recorder) == []
