"""Which of the driver's GPUs is meant by a device of torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddpwatch.agent.gpu import devices
from ddpwatch.agent.gpu.devices import MIXED, UNKNOWN, WHICH_MIG, Card, Instance, Place, TorchDevice, cards, find
from ddpwatch.agent.gpu.nvml import open_nvml
from tests.builders import fake_nvml

MIGS = (Instance("MIG-11aa", 7, 0), Instance("MIG-11bb", 8, 1))
ALIKE = [
    Card("GPU-aa00", "0000:10:00", "H100"),
    Card("GPU-ab11", "0000:20:00", "H100"),
    Card("GPU-bb22", "0000:30:00", "H100"),
]
DIFFERENT = [ALIKE[0], Card("GPU-ab11", "0000:20:00", "T4"), ALIKE[2]]
DIVIDED = [ALIKE[0], Card("GPU-ab11", "0000:20:00", "H100", MIGS, is_mig=True)]
ONE_PART = [Card("GPU-ab11", "0000:20:00", "H100", MIGS[1:], is_mig=True)]
LOST = [ALIKE[0], Card(why="the GPU is lost")]
PCI = "PCI_BUS_ID"


@pytest.mark.parametrize(
    ("device", "known", "visible", "order", "found"),
    [
        pytest.param(TorchDevice(0, uuid="ab11"), ALIKE, None, "", Place(1), id="UUID as torch writes it"),
        pytest.param(TorchDevice(0, uuid="GPU-bb22"), ALIKE, "0", "", Place(2), id="UUID beats a number"),
        pytest.param(TorchDevice(0, bus_id="0000:30:00"), ALIKE, "0", "", Place(2), id="bus beats a number"),
        pytest.param(TorchDevice(0, "ffff", "0000:20:00"), ALIKE, None, "", Place(1), id="unknown UUID, known bus"),
        pytest.param(TorchDevice(0, uuid="ffff"), ALIKE, None, "", UNKNOWN, id="unknown UUID is no number 0"),
        pytest.param(TorchDevice(1), ALIKE, None, "", Place(1), id="number, all visible"),
        pytest.param(TorchDevice(0), ALIKE, "2,0", "", Place(2), id="reordered, first"),
        pytest.param(TorchDevice(1), ALIKE, "2, 0", "", Place(0), id="reordered, second"),
        pytest.param(TorchDevice(2), ALIKE, "2,0", "", UNKNOWN, id="more devices than visible"),
        pytest.param(TorchDevice(0), ALIKE, "7", "", UNKNOWN, id="number too large"),
        pytest.param(TorchDevice(0), ALIKE, "-1", "", UNKNOWN, id="none visible"),
        pytest.param(TorchDevice(0), ALIKE, "", "", UNKNOWN, id="empty"),
        pytest.param(TorchDevice(0), DIFFERENT, "1", "", MIXED, id="numbers by speed"),
        pytest.param(TorchDevice(0), DIFFERENT, "1", PCI, Place(1), id="numbers by bus"),
        pytest.param(TorchDevice(2), DIFFERENT, None, "FASTEST_FIRST", MIXED, id="numbers by speed, all visible"),
        pytest.param(TorchDevice(0), ALIKE, "GPU-bb22", "", Place(2), id="visible by UUID"),
        pytest.param(TorchDevice(1), DIFFERENT, "GPU-b,GPU-ab", "", Place(1), id="visible by the start of a UUID"),
        pytest.param(TorchDevice(0), ALIKE, "GPU-a", "", UNKNOWN, id="start of two UUIDs"),
        pytest.param(TorchDevice(0), DIVIDED, "MIG-11bb", "", Place(1, 1), id="MIG by UUID"),
        pytest.param(TorchDevice(0), DIVIDED, "MIG-11b", "", Place(1, 1), id="MIG by the start of its UUID"),
        pytest.param(TorchDevice(0), DIVIDED, "MIG-11", "", UNKNOWN, id="start of the UUIDs of two MIGs"),
        pytest.param(TorchDevice(0, uuid="ab11"), DIVIDED, "MIG-11aa", "", Place(1, 0), id="MIG, GPU's UUID in torch"),
        pytest.param(TorchDevice(0, uuid="11bb"), DIVIDED, None, "", Place(1, 1), id="MIG's UUID in torch"),
        pytest.param(TorchDevice(0), DIVIDED, "MIG-GPU-ab11/8/1", "", Place(1, 1), id="MIG in the old form"),
        pytest.param(TorchDevice(0), DIVIDED, "MIG-GPU-ab11/9/1", "", UNKNOWN, id="no such MIG"),
        pytest.param(TorchDevice(0, uuid="ab11"), DIVIDED, None, "", WHICH_MIG, id="divided, not said which"),
        pytest.param(TorchDevice(0, uuid="ab11"), ONE_PART, None, "", Place(0, 0), id="container with one MIG"),
        pytest.param(TorchDevice(0), ONE_PART, "0", "", Place(0, 0), id="container with one MIG, by number"),
        pytest.param(TorchDevice(1, uuid="ab11"), LOST, None, "", "the GPU is lost", id="lost, by UUID"),
        pytest.param(TorchDevice(1), LOST, None, "", "the GPU is lost", id="lost, by number"),
        pytest.param(TorchDevice(0, uuid="aa00"), LOST, None, "", Place(0), id="another one is lost"),
        pytest.param(TorchDevice(0), [], None, "", UNKNOWN, id="a driver without GPUs"),
    ],
)  # fmt: skip
def test_a_device_is_found(device, known, visible, order, found):
    assert find(device, known, visible, order) == found


def test_cards_are_as_the_driver_reports(driver):
    driver(3, {
        "gpu1.mig": 1, "gpu1.mig0.uuid": "MIG-1", "gpu1.mig0.gi": 3, "gpu1.mig0.ci": 0,
        "return.gpu2": fake_nvml.IS_LOST,
    })  # fmt: skip
    nvml = open_nvml()
    known = cards(nvml)
    nvml.close()

    assert known[0] == Card(fake_nvml.uuid(0), "0000:10:00", "NVIDIA H100 80GB HBM3")
    assert (known[1].is_mig, known[1].instances) == (True, (Instance("MIG-1", 3, 0),))
    assert known[2] == Card(why="the GPU is lost")


class Spread(nn.Module):
    """A model with tensors on the given devices; only their devices are read."""

    def __init__(self, *places):
        super().__init__()
        self.places = places

    def parameters(self):
        return [SimpleNamespace(device=torch.device(place)) for place in self.places]


def test_the_devices_of_a_model_are_all_that_it_has_parameters_on(monkeypatch):
    reported = {
        0: SimpleNamespace(
            name="H100", uuid="ab11", total_memory=80, pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0
        ),
        1: SimpleNamespace(name="H100", total_memory=80),
    }
    monkeypatch.setattr(devices.torch.cuda, "get_device_properties", reported.__getitem__)

    found = devices.torch_devices(Spread("cuda:1", "cpu", "cuda:0", "cuda:1", "cuda:5"))

    assert found == [
        TorchDevice(1, name="H100", total_bytes=80),
        TorchDevice(0, "ab11", "0000:1b:00", "H100", 80),
        TorchDevice(5),
    ]
    assert [device.index for device in found] == [1, 0, 5]


def test_a_model_on_the_cpu_or_without_parameters_yet_has_no_devices():
    assert devices.torch_devices(nn.Linear(2, 2)) == []
    assert devices.torch_devices(nn.LazyLinear(2)) == []


def test_very_many_devices_are_bounded(monkeypatch):
    assert len(devices.torch_devices(Spread(*(f"cuda:{k}" for k in range(40))))) == 16
