"""A thousand ranks on other hosts through one relay: what the relay takes, what its viewer takes, and both by size.

python -m benchmarks.relay [RANKS]

TCP with CURVE on loopback on both sides, real frames, the command `ddpwatch relay` itself. Measured at half the ranks,
too: the difference is what one more rank costs, from which larger runs can be estimated.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from benchmarks.crowd import crowd
from benchmarks.many_hosts import measure
from ddpwatch import encryption, rundir
from ddpwatch.errors import AccessRefused
from ddpwatch.outputs.relay import Relay
from ddpwatch.sources.connections import probe

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS = 1024
PAPER_RANKS = 16_384
FLUSH_MS = 1000.0
SETTLE_S = 5.0
MEASURE_S = 15.0
START_S = 60.0
LATE = "the crowd was late: this machine is too busy for these figures"


def view(ticket: Path) -> None:
    """Be a viewer with this ticket. Prints what it took, as JSON."""
    print(json.dumps(measure(rundir.read(ticket))))


def connect() -> None:
    """Be a relay until frames of every rank of the only run have arrived; prints the time and CPU time, as JSON."""
    (run,), _ = rundir.scan(rundir.base_path())
    began_s, spent_s = time.monotonic(), time.process_time()
    with closing(Relay(run, "127.0.0.1:0", None, lambda: None)) as relaying:
        received_ns = relaying._received_ns
        received_ns.update(dict.fromkeys(received_ns, 0))
        while not all(received_ns.values()) and time.monotonic() - began_s < START_S:
            relaying.turn()
        reported = {"heard_s": time.monotonic() - began_s, "heard_cpu_s": time.process_time() - spent_s}
        reported["heard"] = sum(map(bool, received_ns.values()))
    print(json.dumps(reported))


@contextmanager
def relay(base: Path, ticket: Path) -> Iterator[psutil.Process]:
    """The command itself, on the only run in the directory."""
    options = ["--bind=127.0.0.1:0", f"--ticket={ticket}"]
    environment = {**os.environ, "DDPWATCH_RUN_DIR": str(base)}
    child = subprocess.Popen(
        [sys.executable, "-m", "ddpwatch", "relay", *options], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        deadline_s = time.monotonic() + START_S
        while not ticket.exists():
            assert child.poll() is None, f"the relay has ended with code {child.returncode}"
            assert time.monotonic() < deadline_s, "no relay"
            time.sleep(0.01)
        yield psutil.Process(child.pid)
    finally:
        child.terminate()
        child.wait()


def through(ranks: int) -> dict[str, Any]:
    """A crowd, a relay and a viewer, each in a process of its own."""
    with tempfile.TemporaryDirectory() as place, crowd(ranks, flush_ms=FLUSH_MS, tcp=True) as child:
        ticket = Path(place) / "run.ticket"
        environment = {**os.environ, "DDPWATCH_RUN_DIR": str(child.base)}
        command = [sys.executable, "-m", "benchmarks.relay", "--connect"]
        reported: dict[str, Any] = json.loads(
            subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
        )
        with relay(child.base, ticket) as process:
            time.sleep(SETTLE_S)
            reported["alone"] = sum(_threads(process, MEASURE_S))
            reported["alone_rss"] = process.memory_info().rss
            viewer = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.relay", "--view", str(ticket)], stdout=subprocess.PIPE, text=True
            )
            try:
                time.sleep(2 * SETTLE_S)
                threads = _threads(process, MEASURE_S)
                reported["relay"], reported["busiest"] = sum(threads), threads[0]
                said, _ = viewer.communicate()
            finally:
                viewer.kill()
                viewer.wait()
            reported["viewer"] = json.loads(said)
            reported["rss"] = process.memory_info().rss
            reported["files"] = process.num_fds()
            reported["ticket_bytes"] = ticket.stat().st_size
            reported["refusals_s"] = _refusals_s(rundir.read(ticket))
        reported["direct_refusals_s"] = _refusals_s(rundir.scan(child.base)[0][0])
    reported["late"] = child.late_turns
    return reported


def _threads(process: psutil.Process, span_s: float) -> list[float]:
    """Of a core, each of its threads, the busiest first: that one says where it ends."""

    def spent_s() -> dict[int, float]:
        return {each.id: each.user_time + each.system_time for each in process.threads()}

    began_s, before_s = time.monotonic(), spent_s()
    time.sleep(span_s)
    took_s = time.monotonic() - began_s
    return sorted(((each_s - before_s.get(number, 0.0)) / took_s for number, each_s in spent_s().items()), reverse=True)


def _refusals_s(run: rundir.RunFile) -> float:
    """The longest of three kinds of refusal: a wrong key, none, and that of a listener with another key."""
    other = encryption.new_keys()[0]
    endpoints = [msgspec.structs.replace(each, server_key=other) for each in run.endpoints]
    point = None if run.relay is None else msgspec.structs.replace(run.relay, server_key=other)
    longest_s = 0.0
    for wrong in (
        msgspec.structs.replace(run, viewer_secret_key=encryption.new_keys()[1]),
        msgspec.structs.replace(run, viewer_secret_key=""),
        msgspec.structs.replace(run, endpoints=endpoints, relay=point),
    ):
        began_s = time.monotonic()
        try:
            probe(wrong)
        except AccessRefused:
            longest_s = max(longest_s, time.monotonic() - began_s)
        else:
            raise AssertionError("a stranger was let in")
    return longest_s


def main() -> None:
    """Both sizes, and what lies between them."""
    from benchmarks.pairs import row

    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else RANKS
    half, whole = through(ranks // 2), through(ranks)
    seen = whole["viewer"]
    per_s = seen["frames_per_s"]
    row(
        f"{ranks} ranks through a relay: all with history",
        f"{seen['connect_s']:.1f} s",
        "5 s",
        seen["connected"] == ranks and seen["connect_s"] <= 5,
        f"{seen['connected']} of them, {seen['steps']} steps each",
    )
    row(f"  relay at {1000 / FLUSH_MS:.0f} Hz, of a core", f"{whole['relay']:.1%}", "-", holds=True)
    row("  relay without a viewer", f"{whole['alone']:.1%}", "-", holds=True)
    busiest = f"{whole['busiest'] / per_s * 1e6:.0f} us in its busiest thread"
    row("  relay, a frame to one viewer", f"{whole['relay'] / per_s * 1e6:.0f} us", "-", holds=True, noise=busiest)
    cpu = f"{whole['heard_cpu_s'] / ranks * 1e3:.2f} ms of CPU each"
    heard_s = whole["heard_s"]
    row("  relay, until it hears all ranks", f"{heard_s:.1f} s", "-", whole["heard"] == ranks, cpu)
    memory = f"{_slope(half, whole, ranks, 'alone_rss') / 1024:.0f} KiB a rank, {whole['rss'] >> 20} MiB with a viewer"
    row("  relay, memory", f"{whole['alone_rss'] >> 20} MiB", "-", holds=True, noise=memory)
    row("  viewer, of a core", f"{seen['cpu']:.1%}", "45 %", seen["cpu"] <= 0.45)
    row("  viewer, a frame", f"{seen['cpu'] / per_s * 1e6:.0f} us", "-", holds=True, noise=f"{per_s:.0f} frames/s")
    memory = f"{(seen['rss'] - half['viewer']['rss']) / (ranks - ranks // 2) / 1024:.0f} KiB a rank"
    row("  viewer, memory", f"{seen['rss'] >> 20} MiB", "250 MB", seen["rss"] <= 250e6, memory)
    row("  viewer, history of a rank", f"{seen['connect_cpu_s'] / ranks * 1e3:.1f} ms", "-", holds=True, noise="of CPU")
    row("  ticket, a rank", f"{whole['ticket_bytes'] / ranks:.0f} bytes", "-", holds=True)
    row(
        "  messages lost, ranks not heard",
        f"{seen['lost']}, {seen['unheard']}",
        "0, 0",
        not seen["lost"] + seen["unheard"],
    )
    refusal_s = whole["refusals_s"]
    row(
        "a stranger at the relay is refused in",
        f"{refusal_s:.2f} s",
        "1 s",
        refusal_s <= 1,
        "the slowest of three ways",
    )
    refusal_s = whole["direct_refusals_s"]
    row("a stranger at a rank", f"{refusal_s:.2f} s", "1 s", refusal_s <= 1)
    _on_paper(half, whole, ranks)
    if half["late"] or whole["late"]:
        print(f"      {LATE}")


def _on_paper(half: dict[str, Any], whole: dict[str, Any], ranks: int) -> None:
    """What these figures come to for many more ranks, if each costs what it costs here. Nothing of that was run.

    Printed as the table of the README.
    """
    seen = whole["viewer"]
    more = PAPER_RANKS - ranks
    viewer_bytes = (seen["rss"] - half["viewer"]["rss"]) / (ranks - ranks // 2)
    relay_bytes = _slope(half, whole, ranks, "alone_rss")
    rows = [
        ("frames a second", f"{seen['frames_per_s']:.0f}", seen["frames_per_s"], "{:.0f}"),
        ("relay with one viewer, of a core", f"{whole['relay']:.1%}", whole["relay"], "{:.0%}"),
        ("its busiest thread", f"{whole['busiest']:.1%}", whole["busiest"], "{:.0%}"),
        ("relay, CPU until it hears all ranks", f"{whole['heard_cpu_s']:.1f} s", whole["heard_cpu_s"], "{:.0f} s"),
        ("viewer, of a core", f"{seen['cpu']:.1%}", seen["cpu"], "{:.0%}"),
        ("viewer, CPU for all histories", f"{seen['connect_cpu_s']:.1f} s", seen["connect_cpu_s"], "{:.0f} s"),
        ("ticket", f"{whole['ticket_bytes'] / 1e6:.2f} MB", whole["ticket_bytes"] / 1e6, "{:.1f} MB"),
    ]
    print(f"\n| | {ranks} ranks, measured | {PAPER_RANKS} ranks, on paper |\n|---|---|---|")
    for what, measured, figure, form in rows:
        print(f"| {what} | {measured} | {form.format(figure * PAPER_RANKS / ranks)} |")
    for what, size, slope in (("relay", whole["alone_rss"], relay_bytes), ("viewer", seen["rss"], viewer_bytes)):
        measured = f"{size / 1e6:.0f} MB, {slope / 1e3:.0f} kB for each more"
        print(f"| {what}, memory | {measured} | {(size + slope * more) / 1e9:.1f} GB |")


def _slope(half: dict[str, Any], whole: dict[str, Any], ranks: int, name: str) -> float:
    """What one more rank takes."""
    return (whole[name] - half[name]) / (ranks - ranks // 2)


if __name__ == "__main__":
    if "--connect" in sys.argv:
        connect()
    elif "--view" in sys.argv:
        view(Path(sys.argv[-1]))
    else:
        main()
