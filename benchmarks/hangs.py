"""How soon the rank that others wait for is named, for every way to hang, on real gloo ranks; and how well the timeout
is foretold.

python -m benchmarks.hangs          # all; some minutes
python -m benchmarks.hangs sleep 4  # one kind, one world

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

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS / "ddp"), str(TESTS / "faults"), str(TESTS)]

from hanging import FAULTS, Watched  # noqa: E402
from zygote import Zygote  # noqa: E402

from benchmarks.pairs import row  # noqa: E402
from ddpwatch.core.arrivals import Standing, usual_wait_ns  # noqa: E402
from ddpwatch.core.limits import DEFAULTS  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

WORLDS = (2, 4, 8)
BUDGET_S = 3.0
TIMEOUT_S = 20.0
FORECAST_S = 2.0
QUIET = ("all pause", "announced", "nap")


def main() -> None:
    """Every kind in every world, then the forecast."""
    kinds = [kind for kind in FAULTS if kind not in QUIET]
    worlds = list(WORLDS)
    if len(sys.argv) > 2:
        kinds, worlds = [sys.argv[1]], [int(sys.argv[2])]
    zygote = Zygote()
    try:
        for kind in kinds:
            for world_size in worlds:
                _named(zygote, kind, world_size)
        if len(sys.argv) <= 2:
            _forecast(zygote)
    finally:
        zygote.close()


@contextmanager
def _job(zygote: Zygote, kind: str, world_size: int, guilty: int, timeout_s: float) -> Iterator[Watched]:
    with tempfile.TemporaryDirectory(prefix="ddpw-") as folder:
        os.environ["DDPWATCH_RUN_DIR"] = f"{folder}/run"
        with (
            zygote.family({"DDPWATCH_RUN_DIR": f"{folder}/run"}) as start,
            Watched(start, Path(folder), kind, world_size, guilty, timeout_s) as job,
        ):
            yield job


def _named(zygote: Zygote, kind: str, world_size: int) -> None:
    guilty = 0 if kind == "save" else world_size - 1
    with _job(zygote, kind, world_size, guilty, 1800.0) as job:
        standings = [Standing(rank, rank.beat.groups[0], 0) for rank in job.ranks if rank.beat is not None]
        usual_s = (usual_wait_ns(standings, DEFAULTS.judge.warmup_steps) or 0.0) / 1e9
        began_s = time.monotonic()
        job.hang()
        job.until(job.named)
        took_s = time.monotonic() - began_s - max(DEFAULTS.stall.least_s, DEFAULTS.stall.factor * usual_s)
        named = {finding.ranks for finding in job.named()}
    # Of two ranks that disagree nobody can be blamed: both are told.
    right = named == {(guilty,)} or (world_size == 2 and all(guilty in ranks for ranks in named))
    row(f"hang: {kind}, {world_size} ranks, named after", f"{max(took_s, 0.0):.1f} s", f"{BUDGET_S:.0f} s",
        right and took_s <= BUDGET_S, "right" if right else f"WRONG: {named}")  # fmt: skip


def _forecast(zygote: Zygote) -> None:
    with _job(zygote, "stop", 3, 2, TIMEOUT_S) as job:
        job.hang()
        job.until(lambda: any("left_s" in finding.evidence for finding in job.named()))
        told = next(finding for finding in job.named() if "left_s" in finding.evidence)
        forecast_ns = job.following.watch.state.now_ns + int(float(told.evidence["left_s"]) * 1e9)
        job.until(lambda: any(rank.bye is not None for rank in job.ranks[:2]))
        off_s = (min(rank.bye_ns for rank in job.ranks[:2] if rank.bye_ns) - forecast_ns) / 1e9
    row(f"timeout of {TIMEOUT_S:.0f} s, foretold within", f"{off_s:+.2f} s", f"{FORECAST_S:.0f} s",
        abs(off_s) <= FORECAST_S)  # fmt: skip


if __name__ == "__main__":
    main()
