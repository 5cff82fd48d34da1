"""What strangers at the TCP ports cost a training: half-open connections, garbage, handshakes with a wrong key.

python -m benchmarks.strangers
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import socket
import time
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.siege import Target

PAIRS = 12
BLOCK_S = 1.5
HALF_OPEN = 10_000
KNOCKS_PER_S = 2000
BUDGET = 1.004
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(54, b"\0")


def knock(target: Target, at_ranks: Any, made: Any) -> None:
    """Connect at the given rate, in every manner, and keep connections open while there is room."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, HALF_OPEN + 64), most))
    held: list[socket.socket] = []
    garbage = [b"", os.urandom(64), GREETING + os.urandom(200), b"GET / HTTP/1.1\r\n\r\n"]
    began_s = time.monotonic()
    for number in itertools.count():
        stranger = socket.socket()
        stranger.setblocking(False)
        port = target.ports[number % len(target.ports)] if at_ranks.value else target.nobody
        stranger.connect_ex(("127.0.0.1", port))
        with contextlib.suppress(OSError):
            stranger.send(garbage[number % len(garbage)])
        held.append(stranger)
        if len(held) >= HALF_OPEN - 64:
            for old in held[:256]:
                old.close()
            del held[:256]
        made.value += bool(at_ranks.value)
        time.sleep(max(0.0, began_s + number / KNOCKS_PER_S - time.monotonic()))


def main() -> None:
    """Attack a job, compare it with itself and with one that nobody watches."""
    from benchmarks.pairs import noise, row
    from benchmarks.siege import Plan, siege

    found = siege(knock, Plan(PAIRS, BLOCK_S, BLOCK_S))
    spread = noise(found.between)
    row(
        f"two gloo ranks of {median(found.quiet_s) * 1e3:.1f} ms steps, {found.made} strangers knock",
        f"x {found.ratio:.4f}",
        f"x {BUDGET}",
        found.ratio <= BUDGET or found.ratio - 1 <= spread,
        f"noise ± {spread:.4f}",
    )
    as_alone = "yes" if found.same else "NO"
    row("  parameters as without ddpwatch, bit for bit", as_alone, "yes", found.same, f"{found.steps} steps")
    row("  longest wait for a beat", f"{found.gap_s:.2f} s", "1 s", found.gap_s <= 1.0)
    row("  most descriptors taken by strangers", f"{found.descriptors}", "320", found.descriptors <= 320)
    row("  memory of a rank", f"{found.memory_bytes >> 20} MiB", "-", holds=True)


if __name__ == "__main__":
    main()
