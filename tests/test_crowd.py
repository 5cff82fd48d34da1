"""The crowd that viewers are measured against: real sockets, and a stream that a viewer has nothing to say against."""

import os
import re
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil

from benchmarks.crowd import crowd
from benchmarks.relay import PAPER_RANKS
from benchmarks.relay import RANKS as RELAYED
from ddpwatch import rundir, wire
from ddpwatch.core.state.run import RunState
from ddpwatch.sources.frames import Frame
from ddpwatch.sources.live import Live
from tests.builders.training import wait_for

ROOT = Path(__file__).parent.parent
RANKS = 80
"""Some of them are waited for, the others look when it is their turn."""


def follow(run, until, timeout_s: float = 60.0) -> RunState:
    """The run as a viewer knows it, as soon as the condition holds."""
    state = RunState(run.id, run.name, run.world_size)
    deadline_s = time.monotonic() + timeout_s
    with closing(Live(run)) as live:
        while not until(state):
            assert time.monotonic() < deadline_s
            item = live.poll()
            if isinstance(item, Frame):
                state.ingest(item.payload, item.received_ns)
    return state


def test_a_late_viewer_gets_history_and_a_stream_without_a_gap(monkeypatch):
    snapped_at = {}

    def has_seen_enough(state: RunState) -> bool:
        for rank in state.ranks.values():
            if rank.snapped:
                snapped_at.setdefault(rank.rank, rank.steps.newest)
        return all(rank.steps.newest >= snapped_at.get(rank.rank, 1 << 60) + 20 for rank in state.ranks.values())

    with crowd(RANKS, steps_per_s=20.0, slow=3) as child:
        monkeypatch.setenv("DDPWATCH_RUN_DIR", str(child.base))
        (run,), _ = rundir.scan(child.base)
        state = follow(run, has_seen_enough)

    assert state.bad == state.unknown == 0
    for rank in state.ranks.values():
        assert rank.lost == 0
        assert rank.pid == child.pid
        assert (np.diff(rank.steps.indices()) == 1).all()
        assert len(rank.steps.indices()) == wire.MAX_SNAP_STEPS
        # Its clock is that of this host, so that the age of what is on a screen can be computed.
        ended_ns = int(rank.steps.column("end_ns", rank.steps.indices()[-1:])[0])
        assert 0 < time.monotonic_ns() - ended_ns < 60e9
    indices = state.ranks[0].steps.indices()[-20:]
    backward_ns = {rank: np.median(state.ranks[rank].steps.column("backward_ns", indices)) for rank in state.ranks}
    assert max(backward_ns, key=backward_ns.get) == 3
    assert child.late_turns is not None
    assert not child.base.exists()
    assert not psutil.pid_exists(child.pid)


def test_it_ends_after_its_time_and_says_goodbye(run_dir):
    child = subprocess.Popen([sys.executable, "-m", "benchmarks.crowd", "--ranks=5", "--for=3"], cwd=ROOT)
    try:
        run = wait_for(lambda: next(iter(rundir.scan(run_dir)[0]), None))
        state = follow(run, lambda state: all(rank.bye is not None for rank in state.ranks.values()))
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait()

    assert {rank.bye.reason for rank in state.ranks.values()} == {"exit"}
    assert not list(run_dir.iterdir())


def test_it_ends_with_the_process_that_has_started_it(run_dir):
    start = (
        "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:], stdout=2).pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-m", "benchmarks.crowd", "--ranks=2", "--for=60"]
    parent = subprocess.Popen([sys.executable, "-c", start, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        pid = int(parent.stdout.readline())
        wait_for(lambda: rundir.scan(run_dir)[0])
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()

    try:
        wait_for(lambda: not os.path.exists(f"/proc/{pid}") or rundir.created_s(pid) is None)
    finally:
        if rundir.created_s(pid) is not None:
            os.kill(pid, 9)
    assert not list(run_dir.iterdir())


def test_what_the_documentation_says_of_more_ranks_follows_from_what_was_measured():
    table = (ROOT / "docs" / "multi-node.md").read_text().partition("<!-- scale -->")[2].partition("<!-- /scale -->")[0]
    head, _, *rows = [[cell.strip() for cell in line.split("|")[2:4]] for line in table.strip().splitlines()]
    measured, paper = (int(cell.split()[0]) for cell in head)
    assert (measured, paper) == (RELAYED, PAPER_RANKS)
    for known, reported in rows:
        if "for each more" in known:
            size_mb, more_kb = map(float, re.findall(r"[\d.]+", known))
            expected, half_a_digit = size_mb / 1e3 + more_kb / 1e6 * (paper - measured), 0.05 + 0.0005 * paper / 1e3
        else:
            figure, digits = re.match(r"\d+(?:\.(\d+))?", known)[0], known.partition(".")[2][:2].rstrip("% sMB")
            expected = float(figure) * paper / measured
            half_a_digit = 0.5 * paper / measured * 10.0 ** -len(digits) + 0.5
        assert abs(float(re.match(r"[\d.]+", reported)[0]) - expected) <= half_a_digit, (known, reported)
