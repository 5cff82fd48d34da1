"""GPU readings by the real pynvml from a fake driver that answers by a scenario."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager

import psutil
import pytest

from ddpwatch import wire
from ddpwatch.agent.gpu import sampler as reading
from ddpwatch.agent.gpu.allocator import TorchMemory
from ddpwatch.agent.gpu.devices import TorchDevice, cards
from ddpwatch.agent.gpu.nvml import FIGURES, REASONS, open_nvml
from ddpwatch.agent.gpu.sampler import DeviceReader, Sampler
from tests.builders import fake_nvml
from tests.builders.fake_nvml import GIB
from tests.builders.training import wait_for

OF_TORCH = {"allocated_bytes", "reserved_bytes", "peak_bytes"}
AT_FIRST = OF_TORCH | {"nvlink_tx_bytes_s", "nvlink_rx_bytes_s"}
FUNCTIONS = {
    "nvmlDeviceGetUtilizationRates": {"util_percent", "memory_util_percent"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlDeviceGetPowerUsage": {"power_mw"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_mw"},
    "nvmlDeviceGetClockInfo": {"sm_mhz", "memory_mhz"},
    "nvmlDeviceGetMaxClockInfo": {"sm_max_mhz", "memory_max_mhz"},
    "nvmlDeviceGetPcieThroughput": {"pcie_tx_bytes_s", "pcie_rx_bytes_s"},
    "nvmlDeviceGetFieldValues": {"nvlink_tx_bytes_s", "nvlink_rx_bytes_s"},
    "nvmlDeviceGetTotalEccErrors": {"ecc_corrected", "ecc_uncorrected"},
}


def torch_device(gpu):
    return TorchDevice(gpu, uuid=fake_nvml.uuid(gpu).removeprefix("GPU-"), name="as torch has it")


@contextmanager
def sampling(*gpus):
    sampler = Sampler([gpu if isinstance(gpu, TorchDevice) else torch_device(gpu) for gpu in gpus], TorchMemory())
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()
        sampler.join(30)
    assert not sampler.is_alive()


def next_reading(sampler, condition=lambda gpus: True):
    """The first reading that was begun from now on and is as wanted."""
    before = sampler.latest

    def found():
        latest = sampler.latest
        return latest if latest is not None and latest is not before and condition(latest.gpus) else None

    return wait_for(found)


@contextmanager
def one_reader(gpu=0, **keys):
    nvml = open_nvml()
    try:
        yield DeviceReader(torch_device(gpu), nvml, cards(nvml), **keys)
    finally:
        nvml.close()


def read(reader):
    return reader.read(TorchMemory(), None)


def test_of_eight_gpus_everything_is_what_the_driver_says(driver):
    driver(8)
    with sampling(*range(8)) as sampler:
        reported = next_reading(sampler, lambda gpus: all(gpu.pcie_tx_bytes_s is not None for gpu in gpus[:1]))

    assert reported.why == ""
    for k, gpu in enumerate(reported.gpus):
        assert (gpu.device, gpu.uuid, gpu.name) == (f"cuda:{k}", fake_nvml.uuid(k), "NVIDIA H100 80GB HBM3")
        assert (gpu.util_percent, gpu.memory_util_percent) == (90 + k, 40 + k)
        assert (gpu.used_bytes, gpu.total_bytes, gpu.own_bytes) == ((10 + k) * GIB, 80 * GIB, (1 + k) * GIB)
        assert (gpu.temperature_c, gpu.power_mw, gpu.power_limit_mw) == (60 + k, 300_000 + k, 700_000)
        assert (gpu.sm_mhz, gpu.sm_max_mhz, gpu.memory_mhz, gpu.memory_max_mhz) == (1900 + k, 1980, 2600 + k, 2619)
        assert (gpu.ecc_corrected, gpu.ecc_uncorrected, gpu.throttle, gpu.xids) == (k, 0, [], [])
        assert [process.pid for process in gpu.processes] == [os.getpid()]
        assert gpu.processes[0].name == psutil.Process().name()
        assert not gpu.lost
        assert set(gpu.absent) <= AT_FIRST | {"pcie_tx_bytes_s", "pcie_rx_bytes_s"}
    message = wire.Gpus(rank=0, seq=1, mono_ns=reported.mono_ns, gpus=reported.gpus)
    assert wire.decode(wire.encode(message)) == message


def test_a_reading_follows_the_driver_and_limits_are_asked_for_once_a_minute(driver, monkeypatch):
    scenario = driver(1)
    now_s = [1000.0]
    monkeypatch.setattr(reading, "monotonic", lambda: now_s[0])
    with one_reader() as reader:
        read(reader)
        scenario.set({"gpu0.util": 3, "gpu0.power": 99, "gpu0.power_limit": 500_000})
        now_s[0] += 59
        soon = read(reader)
        now_s[0] += 1
        later = read(reader)

    assert (soon.util_percent, soon.power_mw, soon.power_limit_mw) == (3, 99, 700_000)
    assert (later.power_limit_mw, later.sm_max_mhz) == (500_000, 1980)


@pytest.mark.parametrize("code", [13, 26])
def test_a_driver_that_has_given_up_the_old_question_for_the_temperature_is_asked_the_new_one(driver, code):
    driver(1, {"return.nvmlDeviceGetTemperature": code, "gpu0.temperature": 71})
    with one_reader() as reader:
        gpu = read(reader)

    assert gpu.temperature_c == 71
    assert "temperature_c" not in gpu.absent


@pytest.mark.parametrize("code", [3, 4, 13, 999])
def test_a_figure_that_fails_is_absent_with_its_reason_and_all_else_is_there(driver, code):
    scenario = driver(1)
    for function, names in FUNCTIONS.items():
        both = f"return.{function}", f"return.{function}V"  # where there is a newer question, too
        scenario.set(dict.fromkeys(both, code))
        with one_reader() as reader:
            gpu = read(reader)
        scenario.set(dict.fromkeys(both))

        why = REASONS.get(code, "the driver fails with error 999")
        assert {name: gpu.absent.get(name) for name in names} == dict.fromkeys(names, why)
        assert all(getattr(gpu, name) is None for name in names)
        assert set(gpu.absent) - names <= AT_FIRST | {"xids"}, function


def test_a_gpu_without_any_figure_has_a_reason_for_each(driver):
    driver(1, {f"return.{function}": 3 for function in FUNCTIONS} | {
        "gpu0.used": None, "gpu0.total": None, "gpu0.processes": None, "gpu0.throttle": None, "gpu0.event_types": None,
    })  # fmt: skip
    with sampling(0) as sampler:
        reported = next_reading(sampler, lambda gpus: "xids" in gpus[0].absent)

    (gpu,) = reported.gpus
    assert set(gpu.absent) == {*FIGURES, "own_bytes", "xids"} | OF_TORCH
    assert {gpu.absent[name] for name in FIGURES} == {"not supported by this GPU"}
    assert not gpu.lost


def test_values_that_mean_no_value_are_not_shown(driver):
    driver(
        1,
        {
            "gpu0.power": 2**32 - 1,
            "gpu0.used": 2**64 - 1,
            "gpu0.util": 4_000_000_000,
            "gpu0.processes": f"{os.getpid()}:-",
        },
    )
    with one_reader() as reader:
        gpu = read(reader)

    assert (gpu.power_mw, gpu.used_bytes, gpu.own_bytes, gpu.util_percent) == (None, None, None, 100)
    assert {gpu.absent[name] for name in ("power_mw", "used_bytes", "own_bytes")} == {"the driver reports no value"}


def test_an_old_driver_is_asked_in_the_old_way(old_driver):
    old_driver(
        "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetFieldValues", "nvmlDeviceGetMigMode",
    )(1, {"gpu0.throttle": 0x4})  # fmt: skip
    with one_reader() as reader:
        gpu = read(reader)

    assert gpu.throttle == ["sw_power_cap"]
    assert gpu.used_bytes == 10 * GIB + GIB // 2, "an old driver counts its own memory as used"
    gone = {"ecc_corrected", "ecc_uncorrected", "nvlink_tx_bytes_s", "nvlink_rx_bytes_s", "processes", "own_bytes"}
    assert {gpu.absent[name] for name in gone} == {"the driver is too old for it"}
    assert (gpu.util_percent, gpu.temperature_c) == (90, 60)


def test_processes_are_not_believed_where_pynvml_and_the_driver_mean_different_things(old_driver):
    old_driver("nvmlDeviceGetRunningProcessDetailList")(1)
    with one_reader() as reader:
        gpu = read(reader)

    assert (gpu.processes, gpu.own_bytes) == ([], None)
    assert gpu.absent["processes"] == gpu.absent["own_bytes"]
    assert "pip install -U nvidia-ml-py" in gpu.absent["processes"]
    assert gpu.used_bytes == 10 * GIB


def test_reasons_to_throttle_have_the_names_of_nvidia_smi(driver):
    scenario = driver(1, {"gpu0.throttle": 0x7FF})
    with one_reader() as reader:
        everything = read(reader).throttle
        scenario.set({"gpu0.throttle": 0x4 | 0x40})
        some = read(reader).throttle

    assert some == ["sw_power_cap", "hw_thermal_slowdown"]
    assert everything[0] == "gpu_idle"
    assert len(set(everything)) == 11


def test_a_gpu_that_is_lost_while_it_is_read_is_reported_as_lost_and_the_other_goes_on(driver):
    scenario = driver(2)
    with sampling(0, 1) as sampler:
        next_reading(sampler)
        scenario.set({"return.gpu1": fake_nvml.IS_LOST})
        reported = next_reading(sampler, lambda gpus: gpus[1].lost)
        scenario.set({"return.gpu1": None, "gpu1.sm_max": 1000})
        back = next_reading(sampler, lambda gpus: not gpus[1].lost)

    fine, lost = reported.gpus
    assert (fine.lost, fine.util_percent) == (False, 90)
    assert (lost.device, lost.uuid, lost.name) == ("cuda:1", fake_nvml.uuid(1), "NVIDIA H100 80GB HBM3")
    assert lost.util_percent is lost.sm_max_mhz is lost.used_bytes is None
    assert {lost.absent[name] for name in FIGURES} == {"the GPU is lost"}
    assert back.gpus[1].sm_max_mhz == 1000, "limits are read again"


def test_a_gpu_that_was_lost_before_the_training_is_reported_as_lost(driver):
    driver(2, {"return.gpu1": fake_nvml.IS_LOST})
    with sampling(1) as sampler:
        (gpu,) = next_reading(sampler).gpus

    assert gpu.lost
    assert gpu.name == "as torch has it"
    assert gpu.absent["power_mw"] == "the GPU is lost"


def test_xid_errors_are_received_of_the_ranks_own_gpus_only(driver):
    scenario = driver(3)
    with sampling(1, 2) as sampler:
        next_reading(sampler)
        scenario.set({"events": "0:8:31,1:8:79,1:8:48,2:1:5"})
        reported = next_reading(sampler, lambda gpus: len(gpus[0].xids) == 2)

    assert [gpu.xids for gpu in reported.gpus] == [[79, 48], []]
    assert not any("xids" in gpu.absent for gpu in reported.gpus)


def test_of_a_mig_instance_the_xid_errors_of_its_neighbors_are_not_reported(driver, monkeypatch):
    scenario = driver(1, {
        "gpu0.mig": 2,
        "gpu0.mig0.uuid": "MIG-aaaa", "gpu0.mig0.gi": 1, "gpu0.mig0.ci": 0,
        "gpu0.mig1.uuid": "MIG-bbbb", "gpu0.mig1.gi": 2, "gpu0.mig1.ci": 0,
    })  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-bbbb")
    with sampling(TorchDevice(0)) as sampler:
        next_reading(sampler)
        scenario.set({"events": "0:8:31:1,0:8:43:2,0:8:79"})
        reported = next_reading(sampler, lambda gpus: 79 in gpus[0].xids)

    assert reported.gpus[0].xids == [43, 79], "its own, and that of the whole GPU"


def test_where_xid_errors_cannot_be_received_there_is_a_reason(driver):
    driver(2, {"gpu0.event_types": 1})
    with sampling(0, 1) as sampler:
        reported = next_reading(sampler, lambda gpus: "xids" in gpus[0].absent)

    assert reported.gpus[0].absent["xids"] == "not supported by this GPU"
    assert "xids" not in reported.gpus[1].absent


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (fake_nvml.DRIVER_NOT_LOADED, "no NVIDIA driver: it is not loaded"),
        (fake_nvml.MISMATCH, "the NVIDIA driver was updated but not reloaded; reboot, or reload its kernel module"),
        (fake_nvml.NO_PERMISSION, "no permission"),
    ],
)
def test_without_a_driver_there_is_one_reason_for_all_and_what_torch_knows(driver, code, why):
    driver(1, {"return.nvmlInitWithFlags": code})
    with sampling(TorchDevice(0, name="H100", total_bytes=80 * GIB)) as sampler:
        reported = next_reading(sampler)

    (gpu,) = reported.gpus
    assert reported.why == why
    assert (gpu.name, gpu.total_bytes, gpu.util_percent) == ("H100", 80 * GIB, None)
    assert set(gpu.absent.values()) == {why, TorchMemory().why}


def test_while_a_call_hangs_there_is_no_reading_and_stopping_does_not_wait(driver, library):
    scenario = driver(1, {"block.nvmlDeviceGetTemperature": 60_000})
    with sampling(0) as sampler:
        wait_for(library.stand_in_users)
        sampler.stop()
        assert sampler.is_alive()
        assert sampler.latest is None
        scenario.set({"block.nvmlDeviceGetTemperature": None})


def test_the_threads_are_daemons_and_nvml_is_given_back(driver, library):
    driver(1)
    with sampling(0) as sampler:
        next_reading(sampler)
        names = {thread.name: thread.daemon for thread in threading.enumerate() if thread.name.startswith("ddpwatch-")}
        assert names == {"ddpwatch-gpu": True, "ddpwatch-xid": True}
        assert library.stand_in_users() >= 1

    wait_for(lambda: library.stand_in_users() == 0)


def test_nvlink_is_the_difference_of_two_readings(driver):
    scenario = driver(1, {"gpu0.nvlink_tx": 1000, "gpu0.nvlink_rx": 5000})
    with one_reader() as reader:
        first = read(reader)
        scenario.set({"gpu0.nvlink_tx": 1000 + 2_000_000, "gpu0.nvlink_rx": 5000 + 1_000_000})
        second = read(reader)
        scenario.set({"gpu0.nvlink_tx": 0, "gpu0.nvlink_rx": 0})
        reset = read(reader)

    assert first.nvlink_tx_bytes_s is None
    assert first.absent["nvlink_tx_bytes_s"] == "available from the second reading on"
    assert second.nvlink_tx_bytes_s > 0
    assert abs(second.nvlink_tx_bytes_s - 2 * second.nvlink_rx_bytes_s) <= 2
    assert (reset.nvlink_tx_bytes_s, reset.nvlink_rx_bytes_s) == (0, 0), "counters that restart are not traffic"


def test_the_bus_is_looked_at_every_five_seconds_and_devices_take_turns(driver, monkeypatch):
    scenario = driver(2)
    now_s = [1000.0]
    monkeypatch.setattr(reading, "monotonic", lambda: now_s[0])
    with one_reader() as first, one_reader(1, turn=1) as second:
        assert read(first).pcie_tx_bytes_s == 1000 * 1024
        assert read(second).absent["pcie_tx_bytes_s"] == "not read yet"
        scenario.set({"gpu0.pcie_tx": 7, "gpu0.pcie_rx": 8})
        now_s[0] += 1
        assert read(second).pcie_rx_bytes_s == 2001 * 1024
        now_s[0] += 3.9
        assert read(first).pcie_tx_bytes_s == 1000 * 1024
        now_s[0] += 0.2
        gpu = read(first)
        assert (gpu.pcie_tx_bytes_s, gpu.pcie_rx_bytes_s) == (7 * 1024, 8 * 1024)


def test_processes_are_bounded_the_own_one_comes_first_then_the_largest(driver):
    others = ",".join(f"{2**22 + k}:{k}" for k in range(60))
    driver(1, {"gpu0.processes": f"{others},{os.getpid()}:5", f"process.{2**22 + 59}": "/opt/bin/other"})
    with one_reader() as reader:
        gpu = read(reader)

    assert len(gpu.processes) == wire.MAX_GPU_PROCESSES
    assert [process.bytes for process in gpu.processes[:3]] == [5, 59, 58]
    assert gpu.processes[1].name == "other"
    assert gpu.own_bytes == 5


def test_a_process_that_the_driver_does_not_name_has_no_share(driver):
    driver(1, {"gpu0.processes": f"{2**22}:77"})
    with one_reader() as reader:
        gpu = read(reader)

    assert gpu.own_bytes is None
    assert "container" in gpu.absent["own_bytes"]


def test_of_a_mig_instance_memory_and_processes_are_its_own_and_the_rest_is_its_gpus(driver, monkeypatch):
    driver(2, {
        "gpu1.mig": 2,
        "gpu1.mig0.uuid": "MIG-aaaa", "gpu1.mig0.gi": 1, "gpu1.mig0.ci": 0,
        "gpu1.mig1.uuid": "MIG-bbbb", "gpu1.mig1.gi": 2, "gpu1.mig1.ci": 0,
        "gpu1.mig1.used": 3 * GIB, "gpu1.mig1.total": 10 * GIB, "gpu1.mig1.processes": f"{os.getpid()}:{2 * GIB}",
    })  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-bbbb")
    with sampling(TorchDevice(0, uuid=fake_nvml.uuid(1).removeprefix("GPU-"))) as sampler:
        (gpu,) = next_reading(sampler).gpus

    assert gpu.uuid == "MIG-bbbb"
    assert (gpu.used_bytes, gpu.total_bytes, gpu.own_bytes) == (3 * GIB, 10 * GIB, 2 * GIB)
    assert (gpu.temperature_c, gpu.power_mw, gpu.sm_mhz) == (61, 300_001, 1901)
    assert gpu.absent["util_percent"] == "not measured for a MIG instance"


def test_devices_in_another_order_are_found_by_their_identity(driver, monkeypatch):
    driver(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    with sampling(TorchDevice(0, uuid=fake_nvml.uuid(3)), TorchDevice(1)) as sampler:
        first, second = next_reading(sampler).gpus

    assert (first.device, first.uuid, first.temperature_c) == ("cuda:0", fake_nvml.uuid(3), 63)
    assert (second.device, second.uuid, second.temperature_c) == ("cuda:1", fake_nvml.uuid(1), 61)


def test_a_device_that_is_used_later_is_read_from_then_on(driver):
    driver(2)
    with sampling(0) as sampler:
        next_reading(sampler)
        sampler.devices = (torch_device(0), torch_device(1))
        reported = next_reading(sampler, lambda gpus: len(gpus) == 2)

    assert [gpu.temperature_c for gpu in reported.gpus] == [60, 61]


def test_an_error_of_its_own_ends_the_reading_and_is_reported(driver, monkeypatch):
    driver(1)
    monkeypatch.setattr(DeviceReader, "read", lambda *args: 1 / 0)
    with sampling(0) as sampler:
        reported = wait_for(lambda: sampler.latest)

    assert (reported.gpus, reported.why) == ([], "reading the GPUs failed (ZeroDivisionError)")
