"""NVML readings: each figure is its value, or a reason in plain words why there is none.

Imports nothing else of ddpwatch, so that `ddpwatch doctor` can run this file where there is no torch: as a program it
prints, in lines of JSON, what can be read on this machine. Any call may hang in the driver, so callers use a thread or
a process that they can afford to lose.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

TOO_OLD: Final = "the driver is too old for it"
OLD_PYNVML: Final = "the installed nvidia-ml-py is too old for it"
MISFIT: Final = "nvidia-ml-py and the driver are incompatible; run: pip install -U nvidia-ml-py"
NOT_REPORTED: Final = "the driver reports no value"
RETIRED: Final = "not supported by this driver version"
NOT_OF_MIG: Final = "not measured for a MIG instance"
TIMEOUT: Final = 10
GPU_IS_LOST: Final = 15
REASONS: Final = {
    1: "NVML was shut down by the script",
    2: "the driver rejects the query",
    3: "not supported by this GPU",
    4: "no permission",
    6: "not found by the driver",
    9: "no NVIDIA driver: it is not loaded",
    TIMEOUT: "the driver did not respond in time",
    12: "no NVIDIA driver: libnvidia-ml.so.1 was not found",
    13: TOO_OLD,
    GPU_IS_LOST: "the GPU is lost",
    16: "the GPU needs a reset",
    17: "the operating system denies it",
    18: "the NVIDIA driver was updated but not reloaded; reboot, or reload its kernel module",
    25: TOO_OLD,
    26: RETIRED,
    28: "the driver does not find this GPU",
}
"""Reason by NVML error code."""
THROTTLE: Final = (
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown",
    "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clocks_setting", "board_limit", "reliability",
)  # fmt: skip
"""Clock throttle reasons by bit, as `nvidia-smi` and NVML name them."""
MAX_VALUE: Final = 2**62
"""Upper bound of a figure on the wire."""
# Values of nvml.h. `MEMORY_V2` combines the version of nvmlMemory_v2_t and its size in bytes.
NO_VALUE_32: Final = 2**32 - 1
MEMORY_V2: Final = 0x02000028
CORE: Final = 0
SM: Final = 1
MEMORY: Final = 2
SENT: Final = 0
RECEIVED: Final = 1
CORRECTED: Final = 0
UNCORRECTED: Final = 1
SINCE_LOADED: Final = 0
NVLINK_SENT: Final = 138
NVLINK_RECEIVED: Final = 139
ALL_LINKS: Final = 2**32 - 1
XID: Final = 8
"""Event type of Xid errors."""


@dataclass(frozen=True, slots=True)
class Absent:
    """The reason why something could not be read."""

    why: str
    code: int = 0
    """NVML error code."""

    @property
    def lost(self) -> bool:
        """Whether the GPU has fallen off the bus."""
        return self.code == GPU_IS_LOST


Values: TypeAlias = "tuple[int, ...] | Absent"
Reader: TypeAlias = "Callable[[Device], Values]"


class Nvml:
    """The initialized library. Use and close it in the thread that opened it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._processes_fit: bool | None = None

    def ask(self, function: str, *args: Any) -> Any:
        """Call a function of pynvml; `Absent` if it does not exist or fails."""
        call = getattr(self._library, function, None)
        if call is None:
            return Absent(OLD_PYNVML)
        try:
            return call(*args)
        except self._library.NVMLError as error:
            return _reason(int(error.value))
        except (UnicodeDecodeError, ValueError) as error:
            return Absent(f"the driver's response cannot be read ({type(error).__name__})")

    def ask_or(self, default: Any, function: str, *args: Any) -> Any:
        """Call a function of pynvml; the default if that is not possible."""
        answer = self.ask(function, *args)
        return default if isinstance(answer, Absent) else answer

    def ask_first(self, *calls: tuple[Any, ...]) -> Any:
        """The result of the first call that both pynvml and the driver support."""
        answer: Any = Absent(TOO_OLD)
        for call in calls:
            answer = self.ask(*call)
            if not isinstance(answer, Absent) or answer.why not in (TOO_OLD, OLD_PYNVML, RETIRED):
                break
        return answer

    def processes_fit(self) -> bool:
        """Whether pynvml and the driver have the same layout of the process list.

        Early drivers 535 had one more number per process, as did pynvml of that time. A mismatch gives numbers that
        look right and are wrong.
        """
        if self._processes_fit is None:
            struct = getattr(self._library, "c_nvmlProcessInfo_t", None)
            wide = any(name == "usedGpuCcProtectedMemory" for name, *_ in getattr(struct, "_fields_", ()))
            newer = self._has("nvmlDeviceGetRunningProcessDetailList")
            self._processes_fit = wide == (self._has("nvmlDeviceGetConfComputeMemSizeInfo") and not newer)
        return self._processes_fit

    def _has(self, symbol: str) -> bool:
        return not isinstance(self.ask("_nvmlGetFunctionPointer", symbol), Absent)

    def close(self) -> None:
        """Release NVML; other users of it in this process are not affected."""
        self.ask("nvmlShutdown")


def open_nvml() -> Nvml | Absent:
    """Load and initialize NVML, or return the reason why that is not possible."""
    try:
        import pynvml
    except ImportError:
        return Absent("pynvml is missing; run: pip install nvidia-ml-py")
    nvml = Nvml(pynvml)
    failed = nvml.ask("nvmlInit")
    return failed if isinstance(failed, Absent) else nvml


def _reason(code: int) -> Absent:
    return Absent(REASONS.get(code, f"the driver fails with error {code}"), code)


@dataclass(frozen=True, slots=True)
class Device:
    """Handles of a GPU; `instance` has the memory and the processes: a MIG instance, or the GPU itself."""

    nvml: Nvml
    gpu: Any
    instance: Any
    is_mig: bool = False


def _number(value: Any, below: int = NO_VALUE_32) -> Values:
    """One figure; the driver sets all 32 bits if it has none."""
    return value if isinstance(value, Absent) else _sound(int(value), below=below)


def _sound(*values: int, below: int = MAX_VALUE) -> Values:
    return values if all(0 <= value < below for value in values) else Absent(NOT_REPORTED)


def _ask_each(device: Device, function: str, *arguments: tuple[int, ...], below: int = NO_VALUE_32) -> Values:
    """The figures of one function for several arguments, or the first failure."""
    found: tuple[int, ...] = ()
    for args in arguments:
        value = _number(device.nvml.ask(function, device.gpu, *args), below)
        if isinstance(value, Absent):
            return value
        found += value
    return found


def _single(function: str, *args: int) -> Reader:
    return lambda device: _ask_each(device, function, args)


def utilization(device: Device) -> Values:
    """Percent of time in which a kernel ran, and in which memory was read or written."""
    if device.is_mig:
        return Absent(NOT_OF_MIG)
    rates = device.nvml.ask("nvmlDeviceGetUtilizationRates", device.gpu)
    return rates if isinstance(rates, Absent) else (min(100, int(rates.gpu)), min(100, int(rates.memory)))


def memory(device: Device) -> Values:
    """Bytes used and in total. Only old drivers count what they reserve for themselves as used."""
    function = "nvmlDeviceGetMemoryInfo"
    info = device.nvml.ask_first((function, device.instance, MEMORY_V2), (function, device.instance))
    return info if isinstance(info, Absent) else _sound(int(info.used), int(info.total))


def temperature(device: Device) -> Values:
    """Degrees Celsius. All drivers so far have the first function; NVIDIA plans to replace it by the second."""
    names = "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"
    return _number(device.nvml.ask_first(*((name, device.gpu, CORE) for name in names)))


def pcie(device: Device) -> Values:
    """Bytes per second sent and received. The driver samples the bus for 20 ms, twice."""
    rates = _ask_each(device, "nvmlDeviceGetPcieThroughput", (SENT,), (RECEIVED,))
    return rates if isinstance(rates, Absent) else tuple(rate * 1024 for rate in rates)


def nvlink(device: Device) -> Values:
    """Bytes sent and received over all links since the driver was loaded."""
    fields = [(NVLINK_SENT, ALL_LINKS), (NVLINK_RECEIVED, ALL_LINKS)]
    found = device.nvml.ask("nvmlDeviceGetFieldValues", device.gpu, fields)
    if isinstance(found, Absent):
        return found
    failed = next((field.nvmlReturn for field in found if field.nvmlReturn), 0)
    return _reason(int(failed)) if failed else _sound(*(int(field.value.ullVal) * 1024 for field in found))


def ecc(device: Device) -> Values:
    """Memory errors since the driver was loaded, corrected and uncorrected."""
    kinds = (CORRECTED, SINCE_LOADED), (UNCORRECTED, SINCE_LOADED)
    return _ask_each(device, "nvmlDeviceGetTotalEccErrors", *kinds, below=MAX_VALUE)


def throttle(device: Device) -> list[str] | Absent:
    """Reasons for throttled clocks, if any. Before driver 535 the function had another name."""
    bits = device.nvml.ask_first(
        ("nvmlDeviceGetCurrentClocksEventReasons", device.gpu),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", device.gpu),
    )
    return bits if isinstance(bits, Absent) else [word for bit, word in enumerate(THROTTLE) if bits >> bit & 1]


def processes(device: Device) -> list[tuple[int, int | None]] | Absent:
    """Compute processes on the device, with their bytes."""
    if not device.nvml.processes_fit():
        return Absent(MISFIT)
    found = device.nvml.ask_first(
        ("nvmlDeviceGetComputeRunningProcesses_v3", device.instance),
        ("nvmlDeviceGetComputeRunningProcesses_v2", device.instance),
    )
    if isinstance(found, Absent):
        return found
    return [(int(one.pid), None if one.usedGpuMemory is None else int(one.usedGpuMemory)) for one in found]


MOVING: Final[tuple[tuple[tuple[str, ...], Reader], ...]] = (
    (("util_percent", "memory_util_percent"), utilization),
    (("used_bytes", "total_bytes"), memory),
    (("temperature_c",), temperature),
    (("power_mw",), _single("nvmlDeviceGetPowerUsage")),
    (("sm_mhz",), _single("nvmlDeviceGetClockInfo", SM)),
    (("memory_mhz",), _single("nvmlDeviceGetClockInfo", MEMORY)),
    (("ecc_corrected", "ecc_uncorrected"), ecc),
)
"""Readers of the figures that change, with their names on the wire."""
STEADY: Final[tuple[tuple[tuple[str, ...], Reader], ...]] = (
    (("power_limit_mw",), _single("nvmlDeviceGetEnforcedPowerLimit")),
    (("sm_max_mhz",), _single("nvmlDeviceGetMaxClockInfo", SM)),
    (("memory_max_mhz",), _single("nvmlDeviceGetMaxClockInfo", MEMORY)),
)
"""Readers of the figures that hardly ever change."""
PCIE: Final = ("pcie_tx_bytes_s", "pcie_rx_bytes_s")
NVLINK: Final = ("nvlink_tx_bytes_s", "nvlink_rx_bytes_s")
FIGURES: Final = (
    *(name for names, _ in (*MOVING, *STEADY) for name in names),
    *PCIE,
    *NVLINK,
    "throttle",
    "processes",
)
"""Names of all figures that NVML is asked for."""


def readable(device: Device) -> dict[str, str]:
    """Reason by name of each figure why it cannot be read; empty = it can."""
    found: dict[str, str] = {}
    for names, read in (*MOVING, *STEADY, (PCIE, pcie), (NVLINK, nvlink)):
        values = read(device)
        found |= dict.fromkeys(names, values.why if isinstance(values, Absent) else "")
    for name, answer in (("throttle", throttle(device)), ("processes", processes(device))):
        found[name] = answer.why if isinstance(answer, Absent) else ""
    events = device.nvml.ask("nvmlDeviceGetSupportedEventTypes", device.gpu)
    events = events if isinstance(events, Absent) or events & XID else Absent(REASONS[3])
    found["xids"] = events.why if isinstance(events, Absent) else ""
    return found


def main() -> None:
    """Print what can be read here: the driver first, then one line per GPU."""
    nvml = open_nvml()
    if isinstance(nvml, Absent):
        _print({"why": nvml.why})
        return
    driver, count = nvml.ask_or("", "nvmlSystemGetDriverVersion"), nvml.ask("nvmlDeviceGetCount")
    if isinstance(count, Absent):
        _print({"why": count.why})
        return
    _print({"driver": driver, "gpus": count})
    for index in range(count):
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
        if isinstance(handle, Absent):
            _print({"gpu": index, "name": "", "figures": dict.fromkeys(FIGURES, handle.why)})
            continue
        is_mig = bool(nvml.ask_or((0,), "nvmlDeviceGetMigMode", handle)[0])
        name = nvml.ask_or("", "nvmlDeviceGetName", handle)
        _print({"gpu": index, "name": name, "figures": readable(Device(nvml, handle, handle, is_mig=is_mig))})
    nvml.close()


def _print(line: dict[str, Any]) -> None:
    # Flushed at once, so that a reader that gives up on a hanging driver has what came before.
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
