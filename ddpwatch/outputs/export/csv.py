"""CSV export: one row for each rank and step, in the order of steps."""

from __future__ import annotations

import csv
from itertools import chain, islice
from typing import IO, TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.metrics.window import PAUSES, SYNC
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.core.units import MAX_UNIX_NS
from ddpwatch.wire import EVALUATED, HOST_TIMED, PAUSED, PHASES, SKIPPED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.step_store import IntArray
    from ddpwatch.outputs.export.logged_values import Logged
    from ddpwatch.outputs.export.step_range import Exported

FLAGS: Final = {"skipped": SKIPPED, "paused": PAUSED, "evaluated": EVALUATED, "host_timed": HOST_TIMED}
COLUMNS: Final = (
    "attempt", "rank", "host", "step", "time", "step_ms", *(f"{phase}_ms" for phase in PHASES), "self_ms", "wire_ms",
    "wait_ms", "samples", "batch", "backwards", *FLAGS, "busy_ms", "comm_bytes",
    *(f"{name.removesuffix('_ns')}_ms" for name in PAUSES),
)  # fmt: skip
LOGGED: Final = "log_"
"""Prefix of columns with logged values, whose names may equal another column or look like a formula."""
FORMULA: Final = ("=", "+", "-", "@", "\t", "\r", "＝", "＋", "－", "＠")
"""Text that begins with one of these is a formula to a spreadsheet."""


def write_csv(exported: Exported, file: IO[str]) -> None:
    """Write the table; unknown values are empty."""
    writer = csv.writer(file, lineterminator="\n")
    names = exported.logged_names()
    windows = exported.windows()
    # A range without steps raises before anything is written.
    first = list(islice(windows, 1))
    writer.writerow([*COLUMNS, *(f"{LOGGED}{name}" for name in names)])
    for window in chain(first, windows):
        columns = [
            _by_step(np.full(window.step_ns.shape, exported.number)),
            _by_step(np.broadcast_to(np.array(window.ranks)[:, None], window.step_ns.shape)),
            [safe(host) for host in window.hosts] * len(window),
            _by_step(np.broadcast_to(window.indices, window.step_ns.shape)),
            _by_step(_times(window, [exported.state.ranks[rank] for rank in window.ranks])),
            *_measured(window),
            *_logged(window, names, exported.logged),
        ]
        writer.writerows(zip(*columns, strict=True))


def safe(text: str) -> str:
    """Sanitized text that no spreadsheet takes for a formula."""
    kept = sanitize(text, NAME_CHARS)
    return f"'{kept}" if kept.startswith(FORMULA) else kept


def _logged(window: Window, names: Sequence[str], logged: Logged) -> list[list[object]]:
    """A column for each name; empty where a rank has not logged it in the step."""
    if not names:
        return []
    rows = [logged.at(rank, step) for step in window.indices.tolist() for rank in window.ranks]
    return [[row.get(name, "") for row in rows] for name in names]


def _measured(window: Window) -> list[list[object]]:
    split = np.broadcast_to(window.complete & ~window.mixed_clocks, window.step_ns.shape)
    flags = window.column("flags")
    return [
        _ms(window.step_ns),
        *(_ms(window.phases_ns[:, place]) for place in range(len(PHASES))),
        _ms(window.self_ns),
        _ms(window.phases_ns[:, SYNC] - window.wait_ns, split),
        _ms(window.wait_ns, split),
        *(_reported_values(window.column(name)) for name in ("samples", "batch", "backwards")),
        *(_by_step((flags & flag != 0).astype(np.int64)) for flag in FLAGS.values()),
        [milliseconds if milliseconds != "0.0" else "" for milliseconds in _ms(window.column("busy_ns"))],
        _reported_values(window.column("comm_bytes")),
        *(_ms(window.pause_ns(name)) for name in PAUSES),
    ]


def _times(window: Window, ranks: list[RankState]) -> NDArray[np.str_]:
    """End of each step by the wall clock of the rank's host; empty if unknown."""
    ends_ns = window.column("end_ns")
    texts = np.full(ends_ns.shape, "", dtype="<U24")
    for row, rank in enumerate(ranks):
        offset_ns = rank.unix_ns_at(0)
        if offset_ns and all(0 < offset_ns + int(end_ns) < MAX_UNIX_NS for end_ns in ends_ns[row, [0, -1]]):
            moments = ((ends_ns[row] + offset_ns) // 1_000_000).astype("datetime64[ms]")
            texts[row] = np.char.add(np.datetime_as_string(moments), "Z")
    return texts


def _ms(values_ns: IntArray, known: NDArray[np.bool_] | None = None) -> list[object]:
    """Milliseconds to the microsecond; empty where a value is not known."""
    texts: list[object] = [str(value) for value in (np.round(values_ns.T.ravel() / 1e3) / 1e3).tolist()]
    if known is None or known.all():
        return texts
    return [text if is_known else "" for text, is_known in zip(texts, known.T.ravel().tolist(), strict=True)]


def _reported_values(values: IntArray) -> list[object]:
    """Counts; 0 stands for an unknown value and becomes empty."""
    return [value or "" for value in values.T.ravel().tolist()]


def _by_step(values: NDArray[np.generic]) -> list[object]:
    """Flatten (rank, step) in the order of rows."""
    ordered: list[object] = values.T.ravel().tolist()
    return ordered
