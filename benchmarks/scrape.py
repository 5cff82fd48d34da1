"""What metrics for Prometheus cost with 1024 ranks: reading them, rendering them, and each further scrape."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from statistics import median
from time import thread_time_ns
from typing import TYPE_CHECKING

from prometheus_client import generate_latest

from benchmarks.core_speed import chunks
from benchmarks.pairs import row
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.outputs.prometheus.exporter import Collector, Exporter
from ddpwatch.outputs.prometheus.metrics import read, sample_run

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS = 1024
MAX_BY_ITSELF = 256
FED_S = 8
REPEATS = 15
MEASURE_S = 10.0
SELDOM, OFTEN = 3, 20
"""Scrapes in a second: with both the run is read once in each."""
TURN_S = 0.02
READ_BUDGET_MS = 60.0
RENDER_BUDGET_MS = 80.0
FURTHER_BUDGET_MS = 2.0
SCRAPER = """
import sys, time, urllib.request
rate, seconds, address = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
began_s, count = time.monotonic(), 0
while time.monotonic() < began_s + seconds:
    urllib.request.urlopen(f"http://{address}/metrics").read()
    count += 1
    time.sleep(max(0.0, began_s + count / rate - time.monotonic()))
print(count)
"""


def fed(ranks: int) -> Monitor:
    """A run of some seconds."""
    monitor = Monitor(RunState("0", "simulated", ranks))
    for chunk in chunks(ranks, FED_S):
        for payload, now_ns in chunk:
            monitor.ingest(payload, now_ns)
    return monitor


def took_ms(action: Callable[[], object]) -> float:
    """CPU time, median over repetitions."""
    times_ns = []
    for _ in range(REPEATS):
        began_ns = thread_time_ns()
        action()
        times_ns.append(thread_time_ns() - began_ns)
    return median(times_ns) / 1e6


def scraped_at(monitor: Monitor, per_s: float) -> tuple[float, int]:
    """CPU time of a process that watches and is scraped so often by another one, and how often that was."""
    with closing(Exporter("127.0.0.1:0")) as exporter:
        command = [sys.executable, "-c", SCRAPER, str(per_s), str(MEASURE_S), exporter.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as scraper:
            began_s = time.process_time()
            while scraper.poll() is None:
                exporter.update(monitor, (), time.monotonic_ns())
                time.sleep(TURN_S)
            assert scraper.returncode == 0
            assert scraper.stdout is not None
            return time.process_time() - began_s, int(scraper.stdout.read())


def main() -> None:
    """The two halves of a scrape, and whether more of them in a second cost more."""
    monitor = fed(RANKS)
    for ranks in (RANKS, MAX_BY_ITSELF):
        one = monitor if ranks == RANKS else fed(ranks)
        reading_ms = took_ms(lambda monitor=one: read(sample_run(monitor, Counter())))
        snapshot = read(sample_run(one, Counter()))
        rendering_ms = took_ms(lambda snapshot=snapshot: generate_latest(Collector(snapshot)))
        size = len(generate_latest(Collector(snapshot)))
        series = sum(len(series) for _, series in snapshot)
        row(f"metrics, {ranks} ranks, read, at most once a second, CPU", f"{reading_ms:.1f} ms",
            f"{READ_BUDGET_MS:.0f} ms", reading_ms <= READ_BUDGET_MS)  # fmt: skip
        row(f"metrics, {ranks} ranks, rendered, at most once a second, CPU", f"{rendering_ms:.1f} ms",
            f"{RENDER_BUDGET_MS:.0f} ms", rendering_ms <= RENDER_BUDGET_MS,
            f"{series} series, {size / 1e3:.0f} kB")  # fmt: skip
    seldom_s, seldom = scraped_at(monitor, SELDOM)
    often_s, often = scraped_at(monitor, OFTEN)
    further_ms = (often_s - seldom_s) / (often - seldom) * 1e3
    row(f"metrics, {RANKS} ranks, each further scrape, CPU", f"{further_ms:.2f} ms",
        f"{FURTHER_BUDGET_MS:.0f} ms", further_ms <= FURTHER_BUDGET_MS,
        f"{seldom} scrapes {seldom_s:.2f} s, {often} scrapes {often_s:.2f} s")  # fmt: skip


if __name__ == "__main__":
    main()
