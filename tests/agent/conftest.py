"""A driver for the tests of GPUs: a fake NVML inside this process."""

from __future__ import annotations

import pytest

from ddpwatch.agent.gpu import sampler
from ddpwatch.agent.gpu import xid_events as xids
from tests.builders import fake_nvml
from tests.builders.training import wait_for


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The fake library, loaded; pynvml finds it by its name."""
    return fake_nvml.load(fake_nvml.build(tmp_path_factory.mktemp("nvml")))


@pytest.fixture
def driver(library, tmp_path, monkeypatch):
    """Set the driver's scenario: `driver(8, ...)` is a host with eight GPUs. No call may be left in it at the end."""
    path = tmp_path / "scenario"
    monkeypatch.setenv(fake_nvml.VARIABLE, str(path))
    monkeypatch.setattr(sampler, "EVERY_S", 0.02)
    monkeypatch.setattr(xids, "WAIT_MS", 20)  # the listener for errors ends soon after it is stopped
    made = []

    def make(gpus=1, keys=None):
        made.append(fake_nvml.Scenario(path, gpus))
        made[-1].set(keys or {})
        return made[-1]

    yield make
    if made:
        made[-1].set({name: None for name in made[-1].keys if name.startswith("block.")})
    wait_for(lambda: not library.stand_in_users())


@pytest.fixture
def old_driver(library, driver, tmp_path, monkeypatch):
    """A driver that lacks some functions."""
    import pynvml

    def make(*without):
        old = fake_nvml.load(fake_nvml.build(tmp_path / "old", without))
        monkeypatch.setattr(pynvml, "nvmlLib", old)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        return driver

    return make
