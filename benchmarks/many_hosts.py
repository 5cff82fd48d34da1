"""A viewer of a thousand ranks that are all on other hosts: TCP with CURVE on loopback, real frames.

python -m benchmarks.many_hosts [RANKS]
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from contextlib import closing

import psutil

from benchmarks.crowd import crowd
from ddpwatch import rundir
from ddpwatch.session.run_follower import RunFollower

RANKS = 1024
FLUSH_MS = 1000.0
MEASURE_S = 20.0
GIVE_UP_S = 60.0


def view() -> None:
    """Be the viewer of the only run there is. Prints what it took, as JSON."""
    (run,), _ = rundir.scan(rundir.base_path())
    print(json.dumps(measure(run)))


def measure(run: rundir.RunFile) -> dict[str, float]:
    """Cost of a headless viewer, which evaluates the rules as every viewer does."""
    process, crowd = psutil.Process(), psutil.Process(run.endpoints[0].pid)
    spent = [time.process_time(), time.thread_time(), sum(crowd.cpu_times()[:2])]
    began_s = time.monotonic()
    with closing(RunFollower(run)) as follower:
        ranks = follower.monitor.state.ranks.values()
        while not all(rank.snapped for rank in ranks) and time.monotonic() - began_s < GIVE_UP_S:
            follower.advance()
        reported = {"connect_s": time.monotonic() - began_s, "connected": sum(rank.snapped for rank in ranks)}
        now = [time.process_time(), time.thread_time(), sum(crowd.cpu_times()[:2])]
        names = ("connect_cpu_s", "reading_s", "crowd_s")
        reported |= dict(zip(names, map(float.__sub__, now, spent), strict=True))
        reported["steps"] = min(len(rank.steps.indices()) for rank in ranks)
        while not follower.answered or follower.monitor.behind:
            follower.advance()
        began_s, spent_s = time.monotonic(), sum(process.cpu_times()[:2])
        first = sum(rank.sequence.newest for rank in ranks)
        while time.monotonic() - began_s < MEASURE_S:
            follower.advance()
        frames = sum(rank.sequence.newest for rank in ranks) - first
        reported["frames_per_s"] = frames / (time.monotonic() - began_s)
        reported["cpu"] = (sum(process.cpu_times()[:2]) - spent_s) / (time.monotonic() - began_s)
        reported["lost"] = sum(rank.lost for rank in ranks)
        reported["unheard"] = sum(follower.monitor.state.condition(rank) != "ok" for rank in ranks)
    reported["rss"] = process.memory_info().rss
    reported["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return reported


def main() -> None:
    """A crowd, and a viewer in a process of its own."""
    from benchmarks.pairs import row

    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else RANKS
    with crowd(ranks, flush_ms=FLUSH_MS, tcp=True) as child:
        command = [sys.executable, "-m", "benchmarks.many_hosts", "--view"]
        environment = {**os.environ, "DDPWATCH_RUN_DIR": str(child.base)}
        reported = json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)
    row(
        f"{ranks} ranks over TCP with CURVE: all with history",
        f"{reported['connect_s']:.1f} s",
        "5 s",
        reported["connected"] == ranks and reported["connect_s"] <= 5,
        f"{reported['connected']} of them, {reported['steps']} steps each",
    )
    row(
        "  processor time of that: the viewer's",
        f"{reported['connect_cpu_s']:.1f} s",
        "-",
        holds=True,
        noise=f"{reported['reading_s']:.1f} s reading, the rest in ZeroMQ's thread, beside it",
    )
    row("  the crowd's, which real ranks have hosts for", f"{reported['crowd_s']:.1f} s", "-", holds=True)
    row(f"  viewer at {1000 / FLUSH_MS:.0f} Hz, of a core", f"{reported['cpu']:.1%}", "45 %", reported["cpu"] <= 0.45)
    most = f"at most {reported['peak'] >> 20} MiB"
    row("  memory", f"{reported['rss'] >> 20} MiB", "250 MB", reported["rss"] <= 250e6, most)
    row("  messages lost, ranks not heard", f"{reported['lost']}, {reported['unheard']}", "-", holds=True)
    if child.late_turns:
        print(f"      the crowd was late {child.late_turns} times: this machine is too busy for these figures")


if __name__ == "__main__":
    if "--view" in sys.argv:
        view()
    else:
        main()
