"""What every source yields: a frame as it came off the wire, or a tick to say that none came.

A source does not read payloads. So a recorder can write the very bytes, and a replay can yield them again.
"""

from __future__ import annotations

from typing import NamedTuple


class Frame(NamedTuple):
    """One message, unread."""

    topic: bytes
    payload: bytes
    received_ns: int
    """Viewer's monotonic clock."""


class Tick(NamedTuple):
    """Nothing came for a while."""

    now_ns: int
    """Viewer's monotonic clock."""
    viewer_stall_ns: int = 0
    """Up to now the viewer has not looked for so long, because it was stopped or got no core: what has come meanwhile
    is yet to be read."""
