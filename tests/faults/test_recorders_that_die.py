"""A recorder of real ranks that is killed, or whose disk is full, leaves a file that can be read and gone on with."""

import contextlib
import os
import signal
import struct
import subprocess
import sys
import tempfile
from contextlib import closing, contextmanager

import pytest
from torch.nn.parallel import DistributedDataParallel

from ddpwatch import rundir
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from ddpwatch.recording.alerts import reported
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.schema import NoRecording, Unreadable
from ddpwatch.wire import Beat, decode
from tests.builders.training import wait_for
from tests.builders.watched_training import Training, join_group

ENDED_BADLY = 4
S = 1_000_000_000


def trains(rank, store, flag):
    join_group(str(store), rank, 2)
    Training(DistributedDataParallel).steps_until(flag)


def raises_on_flag(rank, store, flag):
    trains(rank, store, flag)
    raise ValueError("the user's own")


DYING = """
import mmap, os, signal, struct, sys
from ddpwatch.cli import main
from ddpwatch.recording.sqlite_store import RecordingFile

with open(sys.argv[1], "r+b") as file:
    stamp = mmap.mmap(file.fileno(), 16)
put = RecordingFile.put

def dying(self, portion):
    if portion.number >= 4 and portion.shards:
        last = max((shard.positions[-1], shard.times_ns[-1]) for shard in portion.shards.values())
        stamp[:] = struct.pack("qq", *last)
        os.kill(os.getpid(), signal.SIGKILL)
    put(self, portion)

RecordingFile.put = dying
sys.exit(main.run(sys.argv[2:]))
"""
"""`ddpwatch` that is killed at the worst moment, when a portion has been collected and nothing of it is on disk, and
leaves in a file the number and the time of the last frame in it.
"""


@contextmanager
def recording(file, *arguments, stamp=None):
    """`ddpwatch record` as a process, killed and reaped at the end; what it says goes into a file."""
    program = ["-m", "ddpwatch"] if stamp is None else ["-c", DYING, str(stamp)]
    with tempfile.TemporaryFile("w+") as said:
        child = subprocess.Popen(
            [sys.executable, *program, "record", "-o", str(file), *arguments], stderr=said, text=True
        )
        try:
            yield child, said
        finally:
            child.kill()
            child.wait()


def written(file):
    """Frames that are on disk by now."""
    try:
        with closing(Recording(file)) as recorded:
            return sum(map(recorded.frames, recorded.attempts))
    except (NoRecording, Unreadable):
        return 0


def received(stamp):
    """Number and time of the last frame that the recorder had when it was killed."""
    return struct.unpack("qq", stamp.read_bytes())


def test_a_real_run_with_a_fault_is_read_back_as_it_was_reported(start, run_dir, tmp_path):
    """The recorder is killed in the middle and another goes on with the file; then a rank raises."""
    file = tmp_path / "run.ddpw"
    start(trains, 0, tmp_path / "store", tmp_path / "never")
    start(raises_on_flag, 1, tmp_path / "store", tmp_path / "flag")
    wait_for(lambda: any(len(run.endpoints) == 2 for run in rundir.scan(run_dir)[0]))

    stamp = tmp_path / "stamp"
    stamp.write_bytes(bytes(16))
    with recording(file, stamp=stamp) as (child, _):
        assert child.wait(60) == -signal.SIGKILL
    with closing(Recording(file)) as recorded:
        (before,) = recorded.attempts
        frames = list(recorded.entries(before))
        assert recorded.damaged == 0
    last, last_ns = received(stamp)
    assert [frame.position for frame in frames] == list(range(len(frames)))
    assert len(frames) <= last, "a portion was lost"
    assert last_ns - frames[-1].at_ns <= S

    with recording(file, "--restart", "0.1") as (child, said):
        wait_for(lambda: written(file) > len(frames) + 20)
        (tmp_path / "flag").touch()
        assert child.wait(60) == ENDED_BADLY
        said.seek(0)
        assert "ended badly: " in said.read()

    with closing(Recording(file)) as recorded:
        (attempt,) = recorded.attempts
        entries = list(recorded.entries(attempt))
        positions = [entry.position for entry in entries]
        places = [Place(endpoint.rank, endpoint.host, endpoint.pid) for endpoint in attempt.run.endpoints]
        monitor = Monitor(RunState(attempt.run.id, attempt.run.name, attempt.run.world_size, places))
        for entry in entries:
            monitor.ingest(entry.payload, entry.at_ns)
        monitor.evaluate_now()
        events = [event for _, event in reported(recorded, attempt)]
    assert entries[: len(frames)] == frames
    assert positions == sorted(set(positions))
    assert sum(isinstance(decode(entry.payload), Beat) for entry in entries) > 20
    failed = [event for event in events if event.alert.finding.rule == "rank-failed"]
    assert failed[0].kind == "opened"
    assert failed[0].alert.finding.ranks == (1,)
    again = {alert.finding.ranks for key, alert in monitor.book.open.items() if key[0] == "rank-failed"}
    assert (1,) in again


@contextmanager
def small_disk(folder, megabytes):
    if os.getuid() != 0:
        pytest.skip("only root may mount a small disk")
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill(filler):
    with filler.open("wb", buffering=0) as full, contextlib.suppress(OSError):
        while True:
            full.write(bytes(4096))


def test_a_disk_that_is_full_is_said_once_and_recording_goes_on_when_there_is_room(start, run_dir, tmp_path):
    with small_disk(tmp_path / "disk", 4) as disk:
        file, filler = disk / "run.ddpw", disk / "filler"
        start(trains, 0, tmp_path / "store", tmp_path / "end")
        start(trains, 1, tmp_path / "store", tmp_path / "end")
        wait_for(lambda: any(len(run.endpoints) == 2 for run in rundir.scan(run_dir)[0]))
        with recording(file) as (child, said):
            wait_for(lambda: written(file) > 10)
            fill(filler)

            def words():
                said.seek(0)
                return said.read()

            wait_for(lambda: "full; retrying" in words())
            stuck = written(file)
            filler.unlink()
            wait_for(lambda: "works again; nothing was lost" in words())
            wait_for(lambda: written(file) > stuck)
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 130
            assert words().count("full; retrying") == 1
        with closing(Recording(file)) as recorded:
            positions = [entry.position for entry in recorded.entries(recorded.attempts[0])]
            assert recorded.damaged == 0
            assert not any(map(recorded.dropped, recorded.attempts))
        assert positions == list(range(len(positions)))
