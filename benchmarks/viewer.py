"""What the dashboard costs and how fast it is: the real program on a real terminal, real sockets, real frames.

python -m benchmarks.viewer            # everything; some minutes
python -m benchmarks.viewer load idle  # only these
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from contextlib import closing

import msgspec
import psutil

from benchmarks import repaint
from benchmarks.crowd import crowd
from benchmarks.pairs import row
from ddpwatch import rundir, wire
from ddpwatch.sources.frames import Frame
from ddpwatch.sources.live import Live
from tests.builders.terminal import Terminal

SIZE = (120, 40)
MANY = 1024
LOAD_S = 60.0
MEASURE_S = 20.0
REPAINTS_S = 10.0
FIXED_ROUNDS = 500_000
STEP = re.compile(r" step ([\d ]+\d)")


def attach(base: object) -> Terminal:
    """The dashboard, just started."""
    return Terminal([sys.executable, "-m", "ddpwatch", "attach"], *SIZE, env={"DDPWATCH_RUN_DIR": str(base)})


def load() -> None:
    """Many ranks, each four times a second: processor, memory, and the keyboard meanwhile."""
    with crowd(MANY, slow=3) as child, attach(child.base) as terminal:
        terminal.wait_for("slow backward", 60)
        _repaints(terminal)
        terminal.only_listen()
        process = psutil.Process(terminal.pid)
        spent_s, began_s, bytes_before = _cpu_s(process), time.monotonic(), terminal.bytes_read
        first_bytes = process.memory_info().rss
        time.sleep(LOAD_S)
        took_s = time.monotonic() - began_s
        share = (_cpu_s(process) - spent_s) / took_s
        rss = process.memory_info().rss
        row(f"viewer, {MANY} ranks at 4 Hz, of a core", f"{share:.1%}", "35 %", share <= 0.35)
        row(f"viewer, {MANY} ranks, memory", f"{rss >> 20} MiB", "200 MB", rss <= 200e6)
        row("  of that since the first snapshot", f"{(rss - first_bytes) >> 20} MiB", "-", holds=True)
        row(
            "  written to the terminal",
            f"{(terminal.bytes_read - bytes_before) / took_s / 1e3:.1f} kB/s",
            "-",
            holds=True,
        )
        _keys(terminal)


def _repaints(terminal: Terminal) -> None:
    """Repaints per second: each has another step in its header, because steps are shorter."""
    began_s, seen = time.monotonic(), set()
    while (took_s := time.monotonic() - began_s) < REPAINTS_S:
        seen.add(_step(terminal))
        time.sleep(0.03)
    per_s = len(seen) / took_s
    row(f"viewer, {MANY} ranks, new snapshots a second", f"{per_s:.1f}", "4", per_s >= 4)


def _keys(terminal: Terminal) -> None:
    waits_s, floor_s = [], []
    for press in range(100):
        key, shown = ("2", b"[2 ranks]") if press % 2 == 0 else ("1", b"[1 overview]")
        terminal.only_listen()
        began_s = time.monotonic()
        terminal.send(key)
        waits_s.append(terminal.wait_for_bytes(shown, 10) - began_s)
        # At all phases of the dashboard's own clock.
        time.sleep(0.05 + 0.0037 * (press % 50))
        floor_s.append(_fixed_work_s())
    waits_s.sort()
    floor_s.sort()
    p99_s = waits_s[98]
    row(
        f"key -> reaction, {MANY} ranks, p99 of 100",
        f"{p99_s * 1e3:.0f} ms",
        "100 ms",
        p99_s <= 0.1,
        f"median {waits_s[50] * 1e3:.0f} ms; a fixed loop {floor_s[50] * 1e3:.0f} ms, p99 {floor_s[98] * 1e3:.0f} ms",
    )


def _fixed_work_s() -> float:
    """How long always the same work took by the clock: what a shared machine adds to it, it adds to a key as well."""
    began_s, number = time.monotonic(), 0
    for each in range(FIXED_ROUNDS):
        number += each & 7
    return time.monotonic() - began_s


def shown() -> None:
    """From the end of a step to its number on the screen."""
    with crowd(64, slow=3) as child, attach(child.base) as terminal:
        terminal.wait_for("slow backward", 30)
        ends_ns: dict[int, int] = {}
        waits_s: list[float] = []
        (run,), _ = rundir.scan(child.base)
        until_s = time.monotonic() + MEASURE_S
        # One rank is enough to know when steps end, and leaves the processor to the others.
        with closing(Live(msgspec.structs.replace(run, endpoints=run.endpoints[:1], world_size=1))) as live:
            seen = _step(terminal)
            while time.monotonic() < until_s:
                item = live.poll(2)
                if isinstance(item, Frame) and isinstance(message := wire.decode(item.payload), wire.Beat):
                    for index, end_ns, *_ in wire.unpack_steps(message.table):
                        # The header shows how many steps the furthest rank has done.
                        ends_ns[index] = min(ends_ns.get(index, end_ns), end_ns)
                now_ns, step_now = time.monotonic_ns(), _step(terminal)
                waits_s += [(now_ns - ends_ns[index]) / 1e9 for index in range(seen, step_now) if index in ends_ns]
                seen = max(seen, step_now)
    waits_s.sort()
    p99_s = waits_s[int(len(waits_s) * 0.99)]
    row(
        f"step end -> on screen, 64 ranks, p99 of {len(waits_s)} steps",
        f"{p99_s * 1e3:.0f} ms",
        "600 ms",
        p99_s <= 0.6,
        f"median {waits_s[len(waits_s) // 2] * 1e3:.0f} ms",
    )


def _step(terminal: Terminal) -> int:
    found = STEP.search(terminal.text())
    return int(found[1].replace(" ", "")) if found else 0


def start() -> None:
    """From the shell to a whole screen with its history."""
    took_s = []
    with crowd(8, slow=3) as child:
        for _ in range(7):
            began_s = time.monotonic()
            with attach(child.base) as terminal:
                # The last line of the heat map, with history in it, is drawn after all else.
                took_s.append(terminal.wait_for(re.compile(r"r7 [·░▒▓█]{20}.*│"), 30) - began_s)
    took_s.sort()
    row(
        "attach -> whole screen with history, 8 ranks, median of 7",
        f"{took_s[3]:.2f} s",
        "1.5 s",
        took_s[3] <= 1.5,
        f"{took_s[0]:.2f} to {took_s[-1]:.2f} s",
    )


def idle() -> None:
    """Nothing changes: no run at all, and one that has ended."""
    with tempfile.TemporaryDirectory(prefix="ddpw-") as base, attach(f"{base}/run") as terminal:
        terminal.wait_for("Waiting for a training run", 30)
        _rest("waiting for a run", terminal)
    with crowd(8, slow=3, seconds=15) as child, attach(child.base) as terminal:
        terminal.wait_for("slow backward", 30)
        terminal.wait_for("ENDED", 60)
        _rest("8 ranks that have ended", terminal)


def _rest(what: str, terminal: Terminal) -> None:
    process = psutil.Process(terminal.pid)
    time.sleep(2.0)
    spent_s, bytes_before = _cpu_s(process), terminal.bytes_read
    time.sleep(MEASURE_S)
    share = (_cpu_s(process) - spent_s) / MEASURE_S
    sent = (terminal.bytes_read - bytes_before) / MEASURE_S
    row(f"idle, {what}, of a core", f"{share:.1%}", "3 %", share <= 0.03, f"{sent:.0f} bytes/s to the terminal")


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


PARTS = {"start": start, "idle": idle, "shown": shown, "load": load, "repaint": repaint.main, "growth": repaint.growth}


if __name__ == "__main__":
    for name in sys.argv[1:] or PARTS:
        PARTS[name]()
