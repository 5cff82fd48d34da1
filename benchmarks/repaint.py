"""What a repaint costs by the number of ranks, and whether memory grows: in one process, without a terminal."""

from __future__ import annotations

import asyncio
import gc
import time
from statistics import median

import psutil

from benchmarks.pairs import row
from ddpwatch.core.limits import DEFAULTS
from ddpwatch.session.run_follower import RunFollower
from ddpwatch.simulator.source import SimulatedSource
from ddpwatch.tui.app import Dashboard
from ddpwatch.tui.feed import Feed

SIZE = (120, 40)
FEW, MANY = 64, 8192
ROUNDS = 40
GROWTH_RANKS = 1024
GROWTH_S = 600
WARM_S = 120
SPEED = 1.0


def _app(ranks: int) -> Dashboard:
    source = SimulatedSource(ranks)
    return Dashboard(
        Feed(DEFAULTS, follows=RunFollower(source.run, DEFAULTS, source=source, history_s=60.0), simulated=True)
    )


async def _cost_s(ranks: int) -> tuple[float, float]:
    """Median CPU time of drawing a run view, and of computing one."""
    app = _app(ranks)
    async with app.run_test(size=SIZE) as pilot:
        while app.run_view is None or app.run_view.figures is None:
            await pilot.pause(0.05)
        # From here on only we say when something happens; and garbage is looked for as in a dashboard's own process.
        app.feed.advance = lambda: False  # type: ignore[method-assign]
        gc.collect()
        gc.freeze()
        gc.disable()
        painting, looking = [], []
        for turn in range(ROUNDS):
            began_s = time.thread_time()
            app._at = app.feed.timeline.newest - turn % 7
            run_view = app.feed.run_view(at=app._at, paused=True, force=True)
            looked_s = time.thread_time()
            app.run_view = run_view
            app._paint()
            await pilot.pause()
            painting.append(time.thread_time() - looked_s)
            looking.append(looked_s - began_s)
        gc.enable()
        gc.unfreeze()
        return median(painting), median(looking)


def main() -> None:
    """Few ranks and many."""
    few, many = asyncio.run(_cost_s(FEW)), asyncio.run(_cost_s(MANY))
    ratio = many[0] / few[0]
    row(
        f"repaint, {FEW} -> {MANY} ranks",
        f"x{ratio:.2f}",
        "x1.5",
        ratio <= 1.5,
        f"{few[0] * 1e3:.1f} -> {many[0] * 1e3:.1f} ms; a new snapshot {few[1] * 1e3:.1f} -> {many[1] * 1e3:.1f} ms",
    )


def growth() -> None:
    """Ten minutes of many ranks, as fast as they can be taken in, with a run view every second."""
    clock_ns = [time.monotonic_ns()]
    source = SimulatedSource(GROWTH_RANKS, clock=lambda: clock_ns[0], sleep=lambda _s: None)
    follower = RunFollower(source.run, DEFAULTS, source=source)
    feed = Feed(DEFAULTS, follows=follower, simulated=True)
    began_ns = clock_ns[0]
    process = psutil.Process()
    warm_bytes = 0
    for second in range(GROWTH_S):
        clock_ns[0] = began_ns + second * 1_000_000_000
        while True:
            follower.advance(0)
            if follower.idle:
                break
        if follower.answered:
            feed.run_view(at=None, paused=False, force=True)
        if second == WARM_S:
            gc.collect()
            warm_bytes = process.memory_info().rss
    gc.collect()
    grown = process.memory_info().rss - warm_bytes
    row(
        f"viewer, {GROWTH_RANKS} ranks, memory after {GROWTH_S} s against {WARM_S} s",
        f"{grown / (1 << 20):+.1f} MiB",
        "no growth",
        grown <= 8 << 20,
        f"{warm_bytes >> 20} MiB at first",
    )
