"""Run the benchmarks one after another, each in a process of its own, and print one table."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import psutil

BENCHMARKS = (
    "training_thread",
    "cuda_clock",
    "buckets",
    "two_ranks",
    "agent_memory",
    "start_up",
    "detection",
    "comparison",
    "core_speed",
    "log_parser",
    "hangs",
    "beats",
    "gpu_sampler",
    "real_faults",
    "scrape",
    "viewer",
    "recording",
    "replay",
    "many_hosts",
    "relay",
    "strangers",
    "fuzz",
)


def main() -> None:
    """Print the machine, then every figure beside its budget."""
    chosen = sys.argv[1:] or BENCHMARKS
    print(f"{_processor()} · {psutil.cpu_count()} cores · Python {platform.python_version()} · {_torch()}")
    print("Figures are medians of interleaved pairs; `noise` is what the same method may find between equal blocks.\n")
    for name in chosen:
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _torch() -> str:
    import importlib.metadata

    return f"torch {importlib.metadata.version('torch')}"


main()
