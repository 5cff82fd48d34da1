"""What signs of life cost in a training process, and whether they go on through a hang: real gloo ranks."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from benchmarks.pairs import row
from tests.builders.hanging_job import Watched
from tests.builders.zygote import Zygote

BUDGET = 0.003
STEADY_S = 20.0
HANG_S = 60.0
MAX_GAP_S = 2.0


def main() -> None:
    """Train for a while, then hang for a minute."""
    zygote = Zygote()
    try:
        with tempfile.TemporaryDirectory(prefix="ddpw-") as folder:
            os.environ["DDPWATCH_RUN_DIR"] = f"{folder}/run"
            with (
                zygote.family({"DDPWATCH_RUN_DIR": f"{folder}/run"}) as start,
                Watched(start, Path(folder), "sleep", 2, 1) as job,
            ):
                _measure(job, "training", STEADY_S)
                job.hang()
                job.until(job.named)
                gap_s = _measure(job, "hanging", HANG_S)
                row(f"beats through a hang of {HANG_S:.0f} s, longest gap", f"{gap_s:.2f} s", f"{MAX_GAP_S:.0f} s",
                    gap_s <= MAX_GAP_S)  # fmt: skip
    finally:
        zygote.close()


def _measure(job: Watched, what: str, seconds: float) -> float:
    """The agent's own processor time by its own account; returns the longest time without a beat of rank 0."""
    before = job.ranks[0].beat
    until_s = time.monotonic() + seconds
    gap_ns, received_ns = 0, job.ranks[0].last_received_ns or 0
    while time.monotonic() < until_s:
        now_ns = job.follower.advance()
        last_received_ns = job.ranks[0].last_received_ns or 0
        if last_received_ns != received_ns:
            received_ns = last_received_ns
        gap_ns = max(gap_ns, now_ns - received_ns)
    after = job.ranks[0].beat
    assert before is not None
    assert after is not None
    share = (after.agent_cpu_ns - before.agent_cpu_ns) / (after.mono_ns - before.mono_ns)
    row(f"agent's thread while {what}, of a core", f"{share:.2%}", f"{BUDGET:.1%}", share <= BUDGET)
    return gap_ns / 1e9


if __name__ == "__main__":
    main()
