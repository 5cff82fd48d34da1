"""What is told of GPUs. A figure that could not be read is None, and `absent` has its name and the reason."""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

from msgspec import Meta, Struct

from ddpwatch.wire.fields import Count, Name

MAX_GPUS: Final = 16
"""Of one rank."""
MAX_GPU_PROCESSES: Final = 32
MAX_THROTTLE: Final = 16
MAX_XIDS: Final = 16
MAX_GPU_MOMENTS: Final = 600

Percent: TypeAlias = Annotated[int, Meta(ge=0, le=100)]
Figure: TypeAlias = Annotated[int, Meta(ge=0, le=2**62)] | None


class GpuProcess(Struct, array_like=True, frozen=True, gc=False):
    """A process that holds memory of a GPU."""

    pid: Count
    bytes: Figure = None
    name: Name = ""


class Gpu(Struct, frozen=True, gc=False, omit_defaults=True):
    """One GPU of one rank at one moment."""

    device: Name
    """As torch names it: `cuda:0`."""
    uuid: Name = ""
    """Of the GPU, or of the MIG instance: the same GPU has the same one for every rank that uses it."""
    name: Name = ""
    util_percent: Percent | None = None
    """Share of the last second or so in which a kernel ran; a rank that waits inside a collective is at 100, too."""
    memory_util_percent: Percent | None = None
    """Share of it in which memory was read or written."""
    used_bytes: Figure = None
    total_bytes: Figure = None
    own_bytes: Figure = None
    """Of it, what this rank's process holds."""
    temperature_c: Figure = None
    power_mw: Figure = None
    power_limit_mw: Figure = None
    sm_mhz: Figure = None
    sm_max_mhz: Figure = None
    memory_mhz: Figure = None
    memory_max_mhz: Figure = None
    throttle: Annotated[list[Name], Meta(max_length=MAX_THROTTLE)] = []
    """Why clocks are held down, in the words of `nvidia-smi`: `sw_power_cap`, `hw_thermal_slowdown` and so on."""
    pcie_tx_bytes_s: Figure = None
    pcie_rx_bytes_s: Figure = None
    nvlink_tx_bytes_s: Figure = None
    nvlink_rx_bytes_s: Figure = None
    ecc_corrected: Figure = None
    """Errors of the memory since the driver was loaded; corrected ones harm nobody."""
    ecc_uncorrected: Figure = None
    xids: Annotated[list[Count], Meta(max_length=MAX_XIDS)] = []
    """Errors that the driver has told since the agent began, the latest last."""
    allocated_bytes: Figure = None
    """By torch's tensors; what torch has reserved and does not use is in the next one."""
    reserved_bytes: Figure = None
    peak_bytes: Figure = None
    """The most that was allocated since the script last reset it."""
    processes: Annotated[list[GpuProcess], Meta(max_length=MAX_GPU_PROCESSES)] = []
    lost: bool = False
    """It has fallen off the bus: nothing of it can be read any more."""
    absent: dict[Name, Name] = {}
    """By name of a figure that could not be read, why: `power_mw` -> `not supported by this GPU`."""


class GpuMoment(Struct, array_like=True, frozen=True, gc=False):
    """What is remembered of a GPU for a viewer that comes later."""

    mono_ns: Count
    device: Name
    util_percent: Percent | None = None
    memory_util_percent: Percent | None = None
    used_bytes: Figure = None
    temperature_c: Figure = None
    power_mw: Figure = None
    sm_mhz: Figure = None
