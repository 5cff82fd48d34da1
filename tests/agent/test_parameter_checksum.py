"""Checksums are taken at the same steps on all ranks and, on a GPU, reported once their events have completed."""

import weakref
import zlib

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ddpwatch import wire
from ddpwatch.agent.clock import HostClock
from ddpwatch.agent.fail_open import Switch
from ddpwatch.agent.parameter_checksum import EVERY_STEPS, FIRST_STEP, Checksums
from ddpwatch.agent.step_recorder import Recorder
from tests.agent.fake_cuda import Forbidden, Gpu

OWN = 1
"""The rank's device. The current device is another one, as without `torch.cuda.set_device`."""


@pytest.fixture
def gpu():
    gpu = Gpu()
    gpu.used_devices = {OWN}
    return gpu


class OnGpu:
    """A parameter of which torch would say that it is on the rank's device."""

    layout = torch.strided
    device = torch.device("cuda", OWN)

    def __init__(self, data):
        self.data = data
        self.is_contiguous, self.element_size, self.numel = data.is_contiguous, data.element_size, data.numel

    def detach(self):
        return self.data


class Kernels(TorchFunctionMode):
    """Every operation of torch is work of 1 us on the current device; one that is not the rank's own ends the test."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in ("empty", "sum", "copy_"):
            self.gpu.asked()
            self.gpu.touched(self.gpu.device_index)
            self.gpu.streams[self.gpu.device_index].work(1_000)
        return func(*args, **(kwargs or {}))


def checksums_of(gpu, data):
    """Checksums of one parameter on the fake GPU."""
    checksums = Checksums([], gpu.calls())
    checksums._parameter = lambda _turn: ("weight", OnGpu(data), 0)
    return checksums


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


def test_a_sum_on_a_gpu_is_reported_with_the_step_it_was_taken_in_once_it_is_there(recorder, gpu):
    data = torch.arange(5, dtype=torch.float32)
    bits = int(data.view(torch.int32).sum(dtype=torch.int64))
    recorder.checksums = checksums_of(gpu, data)
    gpu.streams[OWN].work(7_000)
    with Kernels(gpu):
        run_until(recorder, FIRST_STEP + 1)
        data.zero_()  # the next step changes the parameter; the sum was queued before
        gpu.advance(7_000)
        run_until(recorder, FIRST_STEP + 3)
        assert reported(recorder) == []
        gpu.advance(3_000)
        run_until(recorder, FIRST_STEP + 6)
    (fields,) = reported(recorder)
    assert (fields["step"], fields["crc"]) == (FIRST_STEP, bits)
    assert (gpu.calls_made["query"], gpu.device_index) == (3, 0)
    assert gpu.calls_made["elapsed_time"] == gpu.calls_made["synchronize"] == 0


@pytest.mark.parametrize("captured", [0, OWN])
@pytest.mark.parametrize("when", ["taken", "read"])
def test_nothing_is_asked_of_cuda_while_a_graph_is_captured(recorder, gpu, captured, when):
    recorder.checksums = checksums_of(gpu, torch.ones(4))
    with Kernels(gpu):
        run_until(recorder, FIRST_STEP + (when == "read"))
        gpu.advance(10_000)
        gpu.capturing = {gpu.streams[captured]}
        run_until(recorder, FIRST_STEP + 3)
        assert reported(recorder) == []
        gpu.capturing = set()
        run_until(recorder, FIRST_STEP + 4)
    assert len(reported(recorder)) == (when == "read")


def test_the_fake_gpu_refuses_what_the_checksum_must_not_do(gpu):
    event = gpu.Event()
    with pytest.raises(Forbidden, match="another rank's"):
        event.record(gpu.current_stream(0))
    with pytest.raises(Forbidden, match="another rank's"), Kernels(gpu):
        torch.ones(3).sum()
    event.record(gpu.current_stream(OWN))
    with pytest.raises(Forbidden, match="current device"):
        event.query()
    gpu.thread = None
    with pytest.raises(Forbidden, match="thread"):
        event.query()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_every_width_of_parameter_can_be_summed(recorder, gpu, dtype):
    for value in (1, 2):
        recorder.index = FIRST_STEP
        recorder.checksums = checksums_of(gpu, torch.full((4,), value, dtype=dtype))
        run_until(recorder, FIRST_STEP + 2)
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
