"""Prometheus exporter of a run (`--prometheus`).

The watching thread takes a snapshot on demand, at most once a second, and swaps it in as a whole; the server's thread
renders it once and serves the text. So the threads share no mutable state, a run that is not scraped pays nothing, and
frequent scrapes cost no more than sending.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from ddpwatch.errors import DdpwatchError
from ddpwatch.outputs.prometheus.metrics import BUILD_INFO, read, sample_run
from ddpwatch.outputs.prometheus.server import HttpServer
from ddpwatch.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client import Metric as Family

    from ddpwatch.core.alerts.model import AlertEvent
    from ddpwatch.core.monitor import Monitor
    from ddpwatch.outputs.prometheus.metrics import Snapshot

SNAPSHOT_NS: Final = 1_000_000_000
"""Time, in nanoseconds, for which a snapshot is served again."""
PATIENCE_S: Final = 1.0
"""Maximum wait, in seconds, for the watching thread; then the previous snapshot is served."""
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PATH: Final = "/metrics"


class Collector:
    """Adapter of a snapshot to the collector interface of prometheus_client."""

    def __init__(self, snapshot: Snapshot) -> None:
        """Adapt `snapshot`."""
        self.snapshot = snapshot

    def collect(self) -> Iterator[Family]:
        """Yield one metric family for each metric that has a series."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for metric, series in self.snapshot:
            kind = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in series.items():
                family.add_metric(labels, value)
            yield family


class Exporter:
    """Serves a run's metrics at an address until it is closed."""

    def __init__(self, address: str) -> None:
        """Listen. Raises for an unusable address and without prometheus_client."""
        try:
            from prometheus_client import generate_latest
        except ImportError:
            raise DdpwatchError(
                "--prometheus needs the package prometheus-client: pip install 'ddpwatch[prometheus]'"
            ) from None
        self._generate = generate_latest
        # Without a run there is only ddpwatch's own version.
        self._snapshot: Snapshot = ((BUILD_INFO, {(VERSION,): 1.0}),)
        self._rendered: Snapshot | None = None
        self._text = b""
        self._opened: Counter[str] = Counter()
        self._reported: frozenset[int] = frozenset()
        self._wanted = True
        self._taken_ns: int | None = None
        self._fresh = asyncio.Event()
        self._server = HttpServer(address, self._answer)
        self.address = self._server.address
        """Listening address, as in `127.0.0.1:9464`."""
        self.public = self._server.public
        """Whether other hosts can reach it."""

    def update(self, monitor: Monitor, events: Iterable[AlertEvent], now_ns: int) -> None:
        """Count alert events, and take a snapshot if one is wanted and due."""
        self._opened.update(event.alert.finding.rule for event in events if event.kind == "opened")
        if not self._wanted or (self._taken_ns is not None and now_ns - self._taken_ns < SNAPSHOT_NS):
            return
        sample = sample_run(monitor, self._opened, self._reported)
        self._reported = frozenset(rank.rank for rank in sample.ranks)
        self._snapshot = read(sample)
        self._taken_ns, self._wanted = now_ns, False
        self._server.call(self._fresh.set)

    def close(self) -> None:
        """Stop the server."""
        self._server.close()

    async def _answer(self, path: str) -> tuple[str, bytes] | None:
        if path == "/":
            return "text/plain; charset=utf-8", f"ddpwatch {VERSION}: metrics are at {PATH}\n".encode()
        if path != PATH:
            return None
        if self._taken_ns is not None and time.monotonic_ns() - self._taken_ns >= SNAPSHOT_NS:
            if not self._wanted:
                self._fresh.clear()
                self._wanted = True
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._fresh.wait(), PATIENCE_S)
        return CONTENT_TYPE, self._render()

    def _render(self) -> bytes:
        snapshot = self._snapshot
        if snapshot is not self._rendered:
            self._text, self._rendered = self._generate(Collector(snapshot)), snapshot
        return self._text
