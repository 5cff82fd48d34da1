"""The numbers and structures that are used are those of NVIDIA's own binding, in the agent and in the stand-in."""

from __future__ import annotations

import ctypes
import re

import pynvml
import pytest

from ddpwatch.agent.gpu import nvml
from ddpwatch.agent.gpu import xid_events as xids

STRUCTURES = {
    "memory": pynvml.c_nvmlMemory_t,
    "memory_v2": pynvml.c_nvmlMemory_v2_t,
    "process": pynvml.c_nvmlProcessInfo_v3_t,
    "utilization": pynvml.c_nvmlUtilization_t,
    "event": pynvml.c_nvmlEventData_t,
    "pci": pynvml.nvmlPciInfo_t,
    "field": pynvml.c_nvmlFieldValue_t,
    "temperature": getattr(pynvml, "c_nvmlTemperature_v1_t", None),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_the_stand_in_has_the_structures_of_the_real_library(library, name):
    real = STRUCTURES[name]
    if real is None:
        pytest.skip("this nvidia-ml-py does not know it yet")
    layout = [ctypes.sizeof(real), *(getattr(real, field).offset for field, *_ in real._fields_)]

    assert list((ctypes.c_uint * len(layout)).in_dll(library, f"stand_in_{name}")) == layout


def test_constants_have_the_values_of_the_real_binding():
    assert pynvml.nvmlMemory_v2 == nvml.MEMORY_V2
    assert (nvml.CORE, nvml.SM, nvml.MEMORY) == (
        pynvml.NVML_TEMPERATURE_GPU,
        pynvml.NVML_CLOCK_SM,
        pynvml.NVML_CLOCK_MEM,
    )
    assert (nvml.SENT, nvml.RECEIVED) == (pynvml.NVML_PCIE_UTIL_TX_BYTES, pynvml.NVML_PCIE_UTIL_RX_BYTES)
    assert (nvml.CORRECTED, nvml.UNCORRECTED, nvml.SINCE_LOADED) == (
        pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        pynvml.NVML_VOLATILE_ECC,
    )
    assert (nvml.NVLINK_SENT, nvml.NVLINK_RECEIVED) == (
        pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
        pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
    )
    assert pynvml.nvmlEventTypeXidCriticalError == nvml.XID
    assert (nvml.TIMEOUT, nvml.GPU_IS_LOST) == (pynvml.NVML_ERROR_TIMEOUT, pynvml.NVML_ERROR_GPU_IS_LOST)
    assert pynvml.c_uint(-1).value == xids.WHOLE_GPU


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (1, "UNINITIALIZED"), (2, "INVALID_ARGUMENT"), (3, "NOT_SUPPORTED"), (4, "NO_PERMISSION"), (6, "NOT_FOUND"),
        (9, "DRIVER_NOT_LOADED"), (10, "TIMEOUT"), (12, "LIBRARY_NOT_FOUND"), (13, "FUNCTION_NOT_FOUND"),
        (15, "GPU_IS_LOST"), (16, "RESET_REQUIRED"), (17, "OPERATING_SYSTEM"), (18, "LIB_RM_VERSION_MISMATCH"),
        (25, "ARGUMENT_VERSION_MISMATCH"), (26, "DEPRECATED"), (28, "GPU_NOT_FOUND"),
    ],
)  # fmt: skip
def test_each_error_that_has_words_is_the_one_they_are_about(code, name):
    assert getattr(pynvml, f"NVML_ERROR_{name}") == code
    assert code in nvml.REASONS


def test_every_reason_is_of_a_known_error():
    assert len(nvml.REASONS) == 16


def test_each_reason_to_throttle_has_the_bit_of_its_name():
    """`hw_thermal_slowdown` is `nvmlClocksThrottleReasonHwThermalSlowdown`; one word differs by an s."""
    start = "nvmlClocksThrottleReason"
    known = {
        re.sub("(?<!^)(?=[A-Z])", "_", name.removeprefix(start)).lower(): value
        for name, value in vars(pynvml).items()
        if name.startswith(start)
    }
    known["display_clocks_setting"] = known["display_clock_setting"]

    assert {name: known.get(name) for name in nvml.THROTTLE} == {name: 1 << k for k, name in enumerate(nvml.THROTTLE)}
