"""How soon the rank that others wait for is named, for every way to hang, on real gloo ranks; how well the timeout is
predicted; and how often a rank is named when nothing hangs.

python -m benchmarks.hangs          # all; some minutes
python -m benchmarks.hangs sleep 4  # one kind, one world
python -m benchmarks.hangs silent   # only what must raise no alarm

Counted from the moment that the wait is abnormal: longer than a second, and than five times what 99 of 100 took.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.pairs import row
from ddpwatch.core.diagnosis.arrivals import p99_wait_ns
from ddpwatch.core.limits import DEFAULTS
from tests.builders.hanging_job import FAULTS, Watched
from tests.builders.zygote import Zygote

if TYPE_CHECKING:
    from collections.abc import Iterator

WORLDS = (2, 4, 8)
BUDGET_S = 3.0
TIMEOUT_S = 20.0
FORECAST_S = 2.0
SILENT_WORLD = 4
SILENT = {
    "all pause": (12.0, "pause of all ranks"),
    "announced": (20.0, "rank 0 evaluates, announced"),
    "compile": (30.0, "one rank compiles, first step"),
    "late": (20.0, "one rank starts late"),
}
"""Pauses that are not hangs: duration in seconds, and description."""
ROUNDS = 3
AFTER_STEPS = 100
"""Number of further steps in which no rank may be named."""


def main() -> None:
    """Every kind in every world, the forecast, then pauses that are not hangs."""
    kinds = [kind for kind in FAULTS if kind not in (*SILENT, "nap")]
    worlds = list(WORLDS)
    everything = len(sys.argv) < 2
    if sys.argv[1:] == ["silent"]:
        kinds = []
    elif len(sys.argv) > 2:
        kinds, worlds = [sys.argv[1]], [int(sys.argv[2])]
    zygote = Zygote()
    try:
        for kind in kinds:
            for world_size in worlds:
                _named(zygote, kind, world_size)
        if everything:
            _forecast(zygote)
        if everything or not kinds:
            _silent(zygote)
    finally:
        zygote.close()


@contextmanager
def _job(
    zygote: Zygote, kind: str, world_size: int, guilty: int, timeout_s: float, pause_s: float = 3.0
) -> Iterator[Watched]:
    with tempfile.TemporaryDirectory(prefix="ddpw-") as folder:
        os.environ["DDPWATCH_RUN_DIR"] = f"{folder}/run"
        with (
            zygote.family({"DDPWATCH_RUN_DIR": f"{folder}/run"}) as start,
            Watched(start, Path(folder), kind, world_size, guilty, timeout_s, pause_s) as job,
        ):
            yield job


def _named(zygote: Zygote, kind: str, world_size: int) -> None:
    guilty = 0 if kind == "save" else world_size - 1
    with _job(zygote, kind, world_size, guilty, 1800.0) as job:
        p99_s = max(p99_wait_ns(rank, DEFAULTS.judge.warmup_steps) or 0.0 for rank in job.ranks) / 1e9
        began_s = time.monotonic()
        job.hang()
        job.until(job.named)
        took_s = time.monotonic() - began_s - max(DEFAULTS.stall.least_s, DEFAULTS.stall.factor * p99_s)
        named = {finding.ranks for finding in job.named()}
    # Of two ranks that disagree neither can be blamed: both are reported, or neither where one was aborted.
    right = named == {(guilty,)} or (world_size == 2 and all(guilty in ranks or not ranks for ranks in named))
    row(f"hang: {kind}, {world_size} ranks, named after", f"{max(took_s, 0.0):.1f} s", f"{BUDGET_S:.0f} s",
        right and took_s <= BUDGET_S, "right" if right else f"WRONG: {named}")  # fmt: skip


def _forecast(zygote: Zygote) -> None:
    with _job(zygote, "stop", 3, 2, TIMEOUT_S) as job:
        job.hang()
        job.until(lambda: any("left_s" in finding.evidence for finding in job.named()))
        reported = next(finding for finding in job.named() if "left_s" in finding.evidence)
        forecast_ns = job.follower.monitor.state.now_ns + int(float(reported.evidence["left_s"]) * 1e9)
        job.until(lambda: any(rank.bye is not None for rank in job.ranks[:2]))
        off_s = (min(rank.bye_ns for rank in job.ranks[:2] if rank.bye_ns) - forecast_ns) / 1e9
    row(f"timeout of {TIMEOUT_S:.0f} s, foretold within", f"{off_s:+.2f} s", f"{FORECAST_S:.0f} s",
        abs(off_s) <= FORECAST_S)  # fmt: skip


def _silent(zygote: Zygote) -> None:
    """Real durations; counted are jobs in which a rank was named, at any moment."""
    jobs = alarms = 0
    for kind, (pause_s, words) in SILENT.items():
        named: list[set[tuple[str, tuple[int, ...]]]] = []
        for _ in range(ROUNDS):
            with _job(zygote, kind, SILENT_WORLD, 0, 1800.0, pause_s) as job:
                steps = max(rank.step or 0 for rank in job.ranks)
                job.hang()
                _go_on(job, steps, pause_s)
                named.append(job.reported)
        false = sum(map(bool, named))
        jobs, alarms = jobs + ROUNDS, alarms + false
        row(f"no hang: {words}, {pause_s:.0f} s, false alarms", f"{false} of {ROUNDS}", "0", not false,
            str([each for each in named if each]) if false else "")  # fmt: skip
    row("no hang: false alarms, all together", f"{alarms} of {jobs}", "0", not alarms)


def _go_on(job: Watched, steps: int, pause_s: float) -> None:
    job.until(lambda: all((rank.step or 0) > steps + AFTER_STEPS for rank in job.ranks), pause_s + 60.0)


if __name__ == "__main__":
    main()
