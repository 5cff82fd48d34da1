"""Builds the stand-in for `libnvidia-ml.so.1` and writes the file it answers from."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_nvml.c")
SONAME = "libnvidia-ml.so.1"
VARIABLE = "NVML_STAND_IN"
GIB = 1 << 30

XID, DOUBLE_BIT, SINGLE_BIT = 8, 2, 1
NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, IS_LOST, MISMATCH, UNKNOWN = 3, 4, 9, 15, 18, 999


def build(folder: Path, without: tuple[str, ...] = ()) -> Path:
    """Compile it into a folder, which may then stand in LD_LIBRARY_PATH; without some functions if it shall be old."""
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / SONAME
    absent = [f"-D{name}=absent_{name}" for name in without]
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread", f"-Wl,-soname,{SONAME}", *absent]
    subprocess.run(["cc", *flags, "-o", str(library), str(SOURCE)], check=True)
    return library


def load(library: Path) -> ctypes.CDLL:
    """Into this process, where pynvml then finds it: a library of that name is loaded already."""
    return ctypes.CDLL(str(library))


def uuid(gpu: int) -> str:
    return f"GPU-{gpu:08x}-0000-4000-8000-000000000000"


def bus(gpu: int) -> str:
    return f"00000000:{0x10 + gpu:02X}:00.0"


def gpu_keys(gpu: int, **changes) -> dict[str, object]:
    """All figures of a healthy GPU, different for each; a change to None leaves a figure out."""
    figures = {
        "uuid": uuid(gpu), "bus": bus(gpu), "name": "NVIDIA H100 80GB HBM3",
        "util": 90 + gpu % 10, "memory_util": 40 + gpu % 10,
        "used": (10 + gpu) * GIB, "reserved": GIB // 2, "total": 80 * GIB,
        "temperature": 60 + gpu, "power": 300_000 + gpu, "power_limit": 700_000,
        "sm": 1900 + gpu, "sm_max": 1980, "memory_clock": 2600 + gpu, "memory_clock_max": 2619, "throttle": 0,
        "pcie_tx": 1000 + gpu, "pcie_rx": 2000 + gpu, "nvlink_tx": 0, "nvlink_rx": 0,
        "ecc_corrected": gpu, "ecc_uncorrected": 0,
        "processes": f"{os.getpid()}:{(1 + gpu) * GIB}", "event_types": XID | DOUBLE_BIT | SINGLE_BIT,
    }  # fmt: skip
    return {f"gpu{gpu}.{name}": value for name, value in (figures | changes).items() if value is not None}


class Scenario:
    """What the driver answers. `set` changes it while somebody asks."""

    def __init__(self, path: Path, gpus: int = 0) -> None:
        self.path = path
        self.keys: dict[str, object] = {"driver": "550.54.15", "count": gpus}
        for gpu in range(gpus):
            self.keys |= gpu_keys(gpu)
        self.set({})

    def set(self, keys: dict[str, object]) -> None:
        """Change some keys; None takes one away."""
        self.keys = {name: value for name, value in (self.keys | keys).items() if value is not None}
        # Written beside it and moved: a reader sees the old one or the new one.
        fresh = self.path.with_suffix(".new")
        fresh.write_text("".join(f"{name}={value}\n" for name, value in self.keys.items()))
        fresh.replace(self.path)
