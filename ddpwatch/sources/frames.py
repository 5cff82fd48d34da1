"""Frame and Tick: what every source yields.

A source does not decode payloads, so that a recorder can write the original bytes and a replay can yield them again.
"""

from __future__ import annotations

from typing import Final, NamedTuple

TICK_MS: Final = 100
"""Milliseconds without a frame after which a source yields a tick."""


class Frame(NamedTuple):
    """One message, not decoded."""

    topic: bytes
    payload: bytes
    received_ns: int
    """Viewer's monotonic clock, in nanoseconds."""


class Tick(NamedTuple):
    """No frame arrived before the timeout."""

    now_ns: int
    """Viewer's monotonic clock, in nanoseconds."""
    viewer_stall_ns: int = 0
    """Nanoseconds since the last poll if the viewer was stopped or had no CPU; frames of that time are unread."""
