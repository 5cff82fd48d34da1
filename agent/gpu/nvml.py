"""NVML, figure by figure: each is its value, or a reason in plain words why there is none.

Knows nothing else of ddpwatch, so that `ddpwatch doctor` can run this very file where there is no torch: as a program
it prints, in lines of JSON, what can be read on this machine. Every call may hang with the driver; callers have a
thread or a process to lose.
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
MISFIT: Final = "nvidia-ml-py and the driver do not fit each other; run: pip install -U nvidia-ml-py"
NOT_REPORTED: Final = "the driver tells no value"
RETIRED: Final = "the driver answers this question no longer"
NOT_OF_MIG: Final = "not measured for a MIG instance"
TIMEOUT: Final = 10
GPU_IS_LOST: Final = 15
REASONS: Final = {
    1: "NVML was shut down by the script",
    2: "the driver refuses the question",
    3: "not supported by this GPU",
    4: "no permission",
    6: "not found by the driver",
    9: "no NVIDIA driver: it is not loaded",
    TIMEOUT: "the driver did not answer in time",
    12: "no NVIDIA driver: libnvidia-ml.so.1 was not found",
    13: TOO_OLD,
    GPU_IS_LOST: "the GPU is lost",
    16: "the GPU needs a reset",
    17: "the operating system refuses it",
    18: "the NVIDIA driver was updated but not reloaded; reboot, or load its module anew",
    25: TOO_OLD,
    26: RETIRED,
    28: "the driver does not find this GPU",
}
"""By NVML's number of an error."""
THROTTLE: Final = (
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown",
    "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clocks_setting", "board_limit", "reliability",
)  # fmt: skip
"""Why clocks are held down, by number of the bit, in the words of `nvidia-smi` and of NVML."""
NO_VALUE_32: Final = 2**32 - 1
MAX_VALUE: Final = 2**62
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
"""The bit of events that tell of an error."""


@dataclass(frozen=True, slots=True)
class Absent:
    """Why something could not be read."""

    why: str
    code: int = 0
    """NVML's number of the error."""

    @property
    def lost(self) -> bool:
        """Whether the GPU has fallen off the bus."""
        return self.code == GPU_IS_LOST


Values: TypeAlias = "tuple[int, ...] | Absent"


class Nvml:
    """The library, initialised. Use and close it in the thread that opened it."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._processes_fit: bool | None = None

    def ask(self, function: str, *args: Any) -> Any:
        """Call a function of pynvml; `Absent` if there is no such function, or it fails."""
        call = getattr(self._library, function, None)
        if call is None:
            return Absent(OLD_PYNVML)
        try:
            return call(*args)
        except self._library.NVMLError as error:
            return _reason(int(error.value))
        except (UnicodeDecodeError, ValueError) as error:
            return Absent(f"the driver's answer cannot be read ({type(error).__name__})")

    def ask_first(self, *questions: tuple[Any, ...]) -> Any:
        """The answer to the first of some questions that both pynvml and the driver know."""
        answer: Any = Absent(TOO_OLD)
        for question in questions:
            answer = self.ask(*question)
            if not isinstance(answer, Absent) or answer.why not in (TOO_OLD, OLD_PYNVML, RETIRED):
                break
        return answer

    def processes_fit(self) -> bool:
        """Whether pynvml and the driver mean the same by the list of processes.

        Early drivers 535 told one number more of each process, as did pynvml of that time. Each with another of the
        other's makes numbers that look right and are not.
        """
        if self._processes_fit is None:
            reported = getattr(self._library, "c_nvmlProcessInfo_t", None)
            wide = any(name == "usedGpuCcProtectedMemory" for name, *_ in getattr(reported, "_fields_", ()))
            early = self.has("nvmlDeviceGetConfComputeMemSizeInfo") and not self.has(
                "nvmlDeviceGetRunningProcessDetailList"
            )
            self._processes_fit = wide == early
        return self._processes_fit

    def has(self, symbol: str) -> bool:
        """Whether the driver's library has a function."""
        return not isinstance(self.ask("_nvmlGetFunctionPointer", symbol), Absent)

    def close(self) -> None:
        """Give NVML back; another user of it in this process goes on."""
        self.ask("nvmlShutdown")


def open_nvml() -> Nvml | Absent:
    """Load and initialise NVML, or say why that cannot be done."""
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
    """A GPU to ask; `instance` is what has memory and processes of its own: a MIG instance, or the GPU itself."""

    nvml: Nvml
    gpu: Any
    instance: Any
    is_mig: bool = False

    def number(self, function: str, *args: Any) -> Values:
        """One figure of 32 bits, which are all set where the driver has none."""
        return _number(self.nvml.ask(function, self.gpu, *args))


def _number(value: Any) -> Values:
    return value if isinstance(value, Absent) else _sound(int(value), below=NO_VALUE_32)


def _sound(*values: int, below: int = MAX_VALUE) -> Values:
    return values if all(0 <= value < below for value in values) else Absent(NOT_REPORTED)


def utilization(device: Device) -> Values:
    """Percent of the time in which a kernel ran, and in which memory was read or written."""
    if device.is_mig:
        return Absent(NOT_OF_MIG)
    rates = device.nvml.ask("nvmlDeviceGetUtilizationRates", device.gpu)
    return rates if isinstance(rates, Absent) else (min(100, int(rates.gpu)), min(100, int(rates.memory)))


def memory(device: Device) -> Values:
    """Bytes used and in all. What the driver keeps for itself is not counted as used, except by an old one."""
    function = "nvmlDeviceGetMemoryInfo"
    info = device.nvml.ask_first((function, device.instance, MEMORY_V2), (function, device.instance))
    return info if isinstance(info, Absent) else _sound(int(info.used), int(info.total))


def temperature(device: Device) -> Values:
    """Degrees Celsius. The first question is answered by all drivers so far, and is to be replaced by the second."""
    names = "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV"
    return _number(device.nvml.ask_first(*((name, device.gpu, CORE) for name in names)))


def power(device: Device) -> Values:
    """Milliwatts."""
    return device.number("nvmlDeviceGetPowerUsage")


def power_limit(device: Device) -> Values:
    """Milliwatts that the driver allows."""
    return device.number("nvmlDeviceGetEnforcedPowerLimit")


def sm_clock(device: Device) -> Values:
    """MHz."""
    return device.number("nvmlDeviceGetClockInfo", SM)


def memory_clock(device: Device) -> Values:
    """MHz."""
    return device.number("nvmlDeviceGetClockInfo", MEMORY)


def sm_clock_limit(device: Device) -> Values:
    """MHz."""
    return device.number("nvmlDeviceGetMaxClockInfo", SM)


def memory_clock_limit(device: Device) -> Values:
    """MHz."""
    return device.number("nvmlDeviceGetMaxClockInfo", MEMORY)


def pcie(device: Device) -> Values:
    """Bytes a second sent and received. The driver looks at the bus for 20 ms, twice."""
    sent = device.number("nvmlDeviceGetPcieThroughput", SENT)
    received = sent if isinstance(sent, Absent) else device.number("nvmlDeviceGetPcieThroughput", RECEIVED)
    if isinstance(sent, Absent) or isinstance(received, Absent):
        return received
    return sent[0] * 1024, received[0] * 1024


def nvlink(device: Device) -> Values:
    """Bytes sent and received over all links since the driver was loaded."""
    fields = [(NVLINK_SENT, ALL_LINKS), (NVLINK_RECEIVED, ALL_LINKS)]
    found = device.nvml.ask("nvmlDeviceGetFieldValues", device.gpu, fields)
    if isinstance(found, Absent):
        return found
    failed = next((field.nvmlReturn for field in found if field.nvmlReturn), 0)
    return _reason(int(failed)) if failed else _sound(*(int(field.value.ullVal) * 1024 for field in found))


def ecc(device: Device) -> Values:
    """Errors of the memory since the driver was loaded: corrected ones, and others."""
    counts = []
    for kind in (CORRECTED, UNCORRECTED):
        count = device.nvml.ask("nvmlDeviceGetTotalEccErrors", device.gpu, kind, SINCE_LOADED)
        if isinstance(count, Absent):
            return count
        counts.append(int(count))
    return _sound(*counts)


def throttle(device: Device) -> list[str] | Absent:
    """Why clocks are held down; none = they are not. Before driver 535 the question had another name."""
    bits = device.nvml.ask_first(
        ("nvmlDeviceGetCurrentClocksEventReasons", device.gpu),
        ("nvmlDeviceGetCurrentClocksThrottleReasons", device.gpu),
    )
    return bits if isinstance(bits, Absent) else [word for bit, word in enumerate(THROTTLE) if bits >> bit & 1]


def processes(device: Device) -> list[tuple[int, int | None]] | Absent:
    """Processes that compute there, with their bytes."""
    if not device.nvml.processes_fit():
        return Absent(MISFIT)
    found = device.nvml.ask_first(
        ("nvmlDeviceGetComputeRunningProcesses_v3", device.instance),
        ("nvmlDeviceGetComputeRunningProcesses_v2", device.instance),
    )
    if isinstance(found, Absent):
        return found
    return [(int(one.pid), None if one.usedGpuMemory is None else int(one.usedGpuMemory)) for one in found]


MOVING: Final[tuple[tuple[tuple[str, ...], Callable[[Device], Values]], ...]] = (
    (("util_percent", "memory_util_percent"), utilization),
    (("used_bytes", "total_bytes"), memory),
    (("temperature_c",), temperature),
    (("power_mw",), power),
    (("sm_mhz",), sm_clock),
    (("memory_mhz",), memory_clock),
    (("ecc_corrected", "ecc_uncorrected"), ecc),
)
"""Figures to read every time, by their names on the wire."""
STEADY: Final[tuple[tuple[tuple[str, ...], Callable[[Device], Values]], ...]] = (
    (("power_limit_mw",), power_limit),
    (("sm_max_mhz",), sm_clock_limit),
    (("memory_max_mhz",), memory_clock_limit),
)
"""Figures that hardly ever change."""
PCIE: Final = ("pcie_tx_bytes_s", "pcie_rx_bytes_s")
NVLINK: Final = ("nvlink_tx_bytes_s", "nvlink_rx_bytes_s")
FIGURES: Final = (
    *(name for names, _ in (*MOVING, *STEADY) for name in names),
    *PCIE,
    *NVLINK,
    "throttle",
    "processes",
)
"""All that NVML is asked for."""


def readable(device: Device) -> dict[str, str]:
    """By name of each figure why it cannot be read; empty = it can."""
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
    """Print what can be read here: the driver first, then a line for each GPU."""
    nvml = open_nvml()
    if isinstance(nvml, Absent):
        _print({"why": nvml.why})
        return
    driver, count = nvml.ask("nvmlSystemGetDriverVersion"), nvml.ask("nvmlDeviceGetCount")
    if isinstance(count, Absent):
        _print({"why": count.why})
        return
    _print({"driver": "" if isinstance(driver, Absent) else driver, "gpus": count})
    for index in range(count):
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
        if isinstance(handle, Absent):
            _print({"gpu": index, "name": "", "figures": dict.fromkeys(FIGURES, handle.why)})
            continue
        name = nvml.ask("nvmlDeviceGetName", handle)
        mig = nvml.ask("nvmlDeviceGetMigMode", handle)
        device = Device(nvml, handle, handle, is_mig=not isinstance(mig, Absent) and bool(mig[0]))
        _print({"gpu": index, "name": "" if isinstance(name, Absent) else name, "figures": readable(device)})
    nvml.close()


def _print(line: dict[str, Any]) -> None:
    # At once: whoever waits gives up on a driver that hangs, and knows what came before.
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
