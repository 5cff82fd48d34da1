"""How soon a long recording is on the screen, and how soon another moment of it: the real program on a real terminal.

python -m benchmarks.replay           # 64 ranks, 100 MB
python -m benchmarks.replay 1000      # 1 GB; some minutes, nearly all of them to make it
"""

from __future__ import annotations

import re
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.pairs import row
from ddpwatch.core.alerts.model import Alert, AlertEvent, Finding, Moment, Severity
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.schema import Columns, Entry, pack, pack_messages, unpack, unpack_messages
from ddpwatch.recording.writer import Recorder
from ddpwatch.session.playback import Playback
from ddpwatch.simulator.source import SimulatedSource
from ddpwatch.sources.frames import Frame
from ddpwatch.view.run_view import run_view
from tests.builders.terminal import Terminal

RANKS = 64
MEGABYTES = 100
SIZE = (120, 40)
CHUNK_NS = 250_000_000
BASE_NS = 120_000_000_000
BACKLOG = 4
SEEKS = 40
REST_S = 1.0
CLOCK = re.compile(r" · ((?:\d+d )?\d\d:\d\d:\d\d)")


def make(path: Path, most_bytes: int) -> float:
    """Write some minutes of a simulated run with the real recorder, repeatedly; returns their length in seconds."""
    now_ns = [time.monotonic_ns()]
    source = SimulatedSource(RANKS, clock=lambda: now_ns[0], sleep=lambda _s: None)
    run = source.run
    state = RunState(run.id, run.name, run.world_size, [Place(one.rank, one.host, one.pid) for one in run.endpoints])
    recorder = Recorder(path)
    recorder.begin(run)
    began_ns = now_ns[0]
    while now_ns[0] < began_ns + BASE_NS:
        now_ns[0] += CHUNK_NS
        while isinstance(item := source.poll(0), Frame):
            recorder.add([item], [state.ingest(item.payload, item.received_ns)])
        if now_ns[0] == began_ns + BASE_NS // 2:
            recorder.add_events(_alert(state), now_ns[0])
        recorder.flush(state, now_ns[0])
        while len(recorder._backlog) > BACKLOG:
            time.sleep(0.001)
    recorder.close()
    copies = max(most_bytes // _size(path), 1)
    with closing(sqlite3.connect(path)) as database:
        _copy(database, copies)
    return copies * BASE_NS / 1e9


def _copy(database: sqlite3.Connection, copies: int) -> None:
    """The same minutes again, later: each copy begins with a checkpoint, so it makes no difference to seeking."""
    query = "SELECT portion, shard, first_ns, last_ns, position, frames, data FROM block ORDER BY id"
    blocks = database.execute(query).fetchall()
    kept = [unpack(block[-1]) for block in blocks]
    frames, portions = sum(block[5] for block in blocks), len({block[0] for block in blocks})
    checkpoints = database.execute("SELECT at_ns, position, data FROM checkpoint").fetchall()
    alerts = database.execute("SELECT at_ns, kind, event FROM alert ORDER BY id").fetchall()
    for copy in range(1, copies):
        later_ns, behind = copy * BASE_NS, copy * frames
        for (portion, shard, first_ns, last_ns, position, count, _), entries in zip(blocks, kept, strict=True):
            values = (portion + copy * portions, shard, first_ns + later_ns, last_ns + later_ns, position + behind)
            database.execute(
                "INSERT INTO block (attempt, portion, shard, first_ns, last_ns, position, frames, data) "
                "VALUES (1, ?, ?, ?, ?, ?, ?, ?)",
                (*values, count, pack(_later(entries, later_ns, behind))),
            )
        for at_ns, position, data in checkpoints:
            messages = [(reported_ns + later_ns, payload) for reported_ns, payload in unpack_messages(data)]
            database.execute(
                "INSERT INTO checkpoint (attempt, at_ns, position, data) VALUES (1, ?, ?, ?)",
                (at_ns + later_ns, position + behind, pack_messages(messages)),
            )
        database.executemany(
            "INSERT INTO alert (attempt, at_ns, kind, event) VALUES (1, ?, ?, ?)",
            [(at_ns + later_ns, kind, event) for at_ns, kind, event in alerts],
        )
        database.execute("UPDATE span SET until_ns = until_ns + ?", (BASE_NS,))
        database.commit()


def _later(entries: list[Entry], later_ns: int, behind: int) -> Columns:
    moved = Columns()
    moved.positions.extend(entry.position + behind for entry in entries)
    moved.times_ns.extend(entry.at_ns + later_ns for entry in entries)
    moved.topics.extend(entry.topic for entry in entries)
    moved.payloads.extend(entry.payload for entry in entries)
    return moved


def _alert(state: RunState) -> list[AlertEvent]:
    """One that opens, and is over at once."""
    at = Moment(state.step, state.now_ns, state.unix_ns)
    alert = Alert(Finding("straggler", Severity.WARNING, "rank 1", "rank 1 is slow", "Look.", (1,)), at, at)
    return [AlertEvent("opened", alert), AlertEvent("closed", replace(alert, closed=at))]


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))


def replay(path: Path, *arguments: str) -> Terminal:
    """The dashboard on the recording, just started."""
    return Terminal([sys.executable, "-m", "ddpwatch", "replay", str(path), *arguments], *SIZE)


def start(path: Path, *arguments: str) -> float:
    """From the shell to a screen with ranks and figures, the median of three."""
    took_s = []
    for _ in range(3):
        began_s = time.monotonic()
        with replay(path, *arguments) as terminal:
            took_s.append(terminal.wait_for(_is_drawn, 30) - began_s)
    return median(took_s)


def _is_drawn(screen: str) -> bool:
    return "REPLAY" in screen and "samples/s" in screen


def seeks(path: Path) -> list[float]:
    """From a key to the screen of the other moment, all over the recording."""
    waits_s = []
    with replay(path, "--at", "50%") as terminal:
        terminal.wait_for(_is_drawn, 30)
        terminal.send("space")
        terminal.wait_for("‖ ×", 10)
        time.sleep(REST_S)
        for number in range(SEEKS):
            before = _clock(terminal.text())
            terminal.send("g")
            terminal.wait_for("go to 03:41", 10)
            # No round parts: the copies begin at such, and would show the same clock.
            terminal.send(f"{(number * 37) % 94 + 1 + number * 0.13:.2f}%")
            terminal.wait_for(re.compile(r"^ [\d.]+%$", re.MULTILINE), 10)
            began_s = time.monotonic()
            terminal.send("enter")
            shown_s = terminal.wait_for(lambda screen, before=before: _clock(screen) not in {"", before}, 30)
            waits_s.append(shown_s - began_s)
            # So that the older steps have come, and at all phases of the dashboard's own clock.
            time.sleep(REST_S + 0.0037 * number)
    return sorted(waits_s)


def _clock(screen: str) -> str:
    """For how long the run has been going, as the header shows."""
    found = CLOCK.search(screen)
    return found[1] if found and "samples/s" in screen else ""


def work(path: Path) -> list[float]:
    """CPU time from the seek to the run view, without drawing: other programs do not change it."""
    took_s = []
    with closing(Playback(Recording(path), playing=False)) as playback:
        for number in range(SEEKS):
            began_s = time.process_time()
            playback.seek(playback.reel.at(playback.reel.total_ns * ((number * 37) % 97 + 1) // 100))
            playback.catch_up()
            assert playback.follows is not None
            timeline = Timeline()
            timeline.follow(playback.follows.monitor.state)
            run_view(playback.follows.monitor, timeline, replayed=True)
            took_s.append(time.process_time() - began_s)
    return sorted(took_s)


def main() -> None:
    """Make it, open it, go through it."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else MEGABYTES
    with tempfile.TemporaryDirectory(prefix="ddpw-") as folder:
        path = Path(folder) / "long.ddpw"
        began_s = time.monotonic()
        span_s = make(path, megabytes * 1_000_000)
        made = f"{_size(path) / 1e6:.0f} MB, {RANKS} ranks, {span_s / 3600:.1f} h"
        row(f"recording made: {made}", f"{time.monotonic() - began_s:.0f} s", "-", holds=True)
        for name, arguments in (("at its beginning", ()), ("at 90 %", ("--at", "90%"))):
            took_s = start(path, *arguments)
            row(f"replay -> first screen {name}, median of 3", f"{took_s:.2f} s", "2 s", took_s <= 2.0)
        worked_s = work(path)
        row(
            f"seek, processor time up to the snapshot, p90 of {SEEKS}",
            f"{worked_s[int(SEEKS * 0.9)] * 1e3:.0f} ms",
            "-",
            holds=True,
            noise=f"median {median(worked_s) * 1e3:.0f}, most {worked_s[-1] * 1e3:.0f} ms",
        )
        waits_s = seeks(path)
        p90_s = waits_s[int(SEEKS * 0.9)]
        row(
            f"seek -> screen of the other moment, p90 of {SEEKS}",
            f"{p90_s * 1e3:.0f} ms",
            "300 ms",
            p90_s <= 0.3,
            f"median {median(waits_s) * 1e3:.0f}, most {waits_s[-1] * 1e3:.0f} ms",
        )


if __name__ == "__main__":
    main()
