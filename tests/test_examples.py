"""The examples run with the commands in their docstrings."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import ddpwatch.agent
from tests.builders.launchers import torchrun
from tests.builders.training import medians_ns, snapshot, wait_for

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_to_its_end(name, zygote, run_dir):
    arguments = ["--standalone", "--nproc-per-node=2", str(ROOT / "examples" / name)]
    env = {"EPOCHS": "1", "STEPS": "10", "DDPWATCH_RUN_DIR": str(run_dir)}
    code, printed = torchrun(zygote, arguments, env)

    assert code == 0, printed
    assert "\nddpwatch" not in f"\n{printed}", "the agent had something to complain about"
    assert not list(run_dir.iterdir()), "the run left something behind"


SYNC_POINTS = {
    "metric-before": ("all_reduce", "forward"), "metric-after": ("all_reduce", "data"),
    "contrastive": ("all_gather", "forward"), "norm": ("all_reduce", "forward"), "barrier": ("barrier", "backward"),
    "objects": ("all_gather_object", "other"), "checkpointing": (None, "backward"),
}  # fmt: skip
"""Patterns of examples/sync_points.py: the collective that the script calls, and a phase to be slow in."""


def patterned_run(rank, world_size, *, pattern, phase):
    example = runpy.run_path(str(ROOT / "examples" / "sync_points.py"))
    assert set(example["PATTERNS"]) == set(SYNC_POINTS)
    example["train"](pattern, example["Slowness"](1, phase), 12)
    return snapshot(ddpwatch.agent._current), example["SLOW_S"] * 1e9


@pytest.mark.parametrize("pattern", SYNC_POINTS)
def test_a_pattern_of_sync_points_shows_its_collective_and_the_wait_for_the_slow_rank(pool, pattern):
    op, phase = SYNC_POINTS[pattern]
    (innocent, slow_ns), (guilty, _) = pool.run(patterned_run, 2, pattern=pattern, phase=phase)

    assert {point.op for path in innocent.sync_paths for point in path.points} == ({op} if op else set())
    innocent_ns, guilty_ns = (
        medians_ns([step for step in snap.steps if step.index >= 2]) for snap in (innocent, guilty)
    )
    assert guilty_ns[phase] - innocent_ns[phase] > slow_ns / 2
    assert innocent_ns["sync"] - guilty_ns["sync"] > slow_ns / 2


def test_the_demo_shows_its_slow_rank_and_leaves_nothing_behind(run_dir):
    result = subprocess.run(
        [sys.executable, "-m", "ddpwatch", "demo", "--ranks", "2", "--for", "9"],
        env={**os.environ, "TMPDIR": str(run_dir)}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip

    assert result.returncode == 0, result.stderr
    named = [line for line in result.stdout.splitlines() if line.startswith(("▲ straggler", "✖ straggler"))]
    assert any("rank 1 slow in data" in line for line in named), result.stdout
    assert result.stdout.rstrip().endswith("all ranks have exited")
    assert not list(run_dir.glob("ddpw-demo-*"))
    assert not _processes_of(run_dir)


def test_ctrl_c_is_the_way_to_end_the_demo_and_no_failure(run_dir):
    demo = subprocess.Popen(
        [sys.executable, "-m", "ddpwatch", "demo", "--ranks", "2"],
        env={**os.environ, "TMPDIR": str(run_dir)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        wait_for(lambda: list(run_dir.glob("ddpw-demo-*/run/*/run.json")), timeout_s=90)
        demo.send_signal(signal.SIGINT)
        said = demo.communicate(timeout=60)[1]
    finally:
        demo.kill()

    assert demo.returncode == 0
    assert said.endswith("the demo and its ranks have stopped\n")
    assert not list(run_dir.glob("ddpw-demo-*"))
    assert not _processes_of(run_dir)


def _processes_of(place: Path) -> list[int]:
    """Ranks of a demo that has its store in `place`."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(place) in word for word in process.info["cmdline"] or [])
    ]
