"""What reading GPUs costs in a training process: eight of them, once a second, from a driver that answers at once.

The stand-in for NVML takes a part of it that a real driver spends in the kernel; what is measured is processor time of
the whole process while nothing else runs in it.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from benchmarks.pairs import row
from tests.builders import fake_nvml

GPUS = 8
SECONDS = 10.0
BUDGET = 0.01


def main() -> None:
    """Sample for a while and compare with a while of doing nothing."""
    from ddpwatch.agent.gpu.allocator import TorchMemory
    from ddpwatch.agent.gpu.devices import TorchDevice
    from ddpwatch.agent.gpu.sampler import Sampler

    with tempfile.TemporaryDirectory(prefix="ddpw-") as folder:
        fake_nvml.load(fake_nvml.build(Path(folder)))
        os.environ[fake_nvml.VARIABLE] = f"{folder}/scenario"
        fake_nvml.Scenario(Path(folder, "scenario"), GPUS)
        idle = _share()
        sampler = Sampler([TorchDevice(k, uuid=fake_nvml.uuid(k)) for k in range(GPUS)], TorchMemory())
        sampler.start()
        while sampler.latest is None:  # what is done once is not counted
            time.sleep(0.05)
        first_ns = sampler.latest.mono_ns
        share = _share() - idle
        latest = sampler.latest
        assert len(latest.gpus) == GPUS
        assert latest.gpus[0].util_percent is not None
        each_s = (latest.mono_ns - first_ns) / 1e9
        sampler.stop()
        sampler.join()
        note = f"readings over {each_s:.0f} s; with waiting for Xid errors"
        row(f"reading {GPUS} GPUs once a second, of a core", f"{share:.2%}", f"{BUDGET:.0%}", share <= BUDGET, note)


def _share() -> float:
    began_s, cpu_s = time.monotonic(), time.process_time()
    time.sleep(SECONDS)
    return (time.process_time() - cpu_s) / (time.monotonic() - began_s)


if __name__ == "__main__":
    main()
