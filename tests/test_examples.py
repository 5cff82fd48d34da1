"""The scripts that people copy, run as they are told to run them."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_trains_to_its_end(name, run_dir):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(ROOT / "examples" / name)]
    result = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "EPOCHS": "1", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip

    assert result.returncode == 0, result.stderr
    assert "ddpwatch" not in result.stderr, "the agent had something to complain about"
    assert not list(run_dir.iterdir()), "the run left something behind"


def test_the_demo_shows_its_slow_rank_and_leaves_nothing_behind(run_dir):
    result = subprocess.run(
        [sys.executable, "-m", "ddpwatch", "demo", "--ranks", "2", "--for", "4"],
        env={**os.environ, "TMPDIR": str(run_dir)}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip

    assert result.returncode == 0, result.stderr
    assert "rank 1" in next(line for line in result.stdout.splitlines() if line.startswith("slowest rank"))
    assert result.stdout.rstrip().endswith("said goodbye")
    assert not list(run_dir.glob("ddpw-demo-*"))
    assert not [process for process in psutil.process_iter(["cmdline"]) if "ddpwatch.demo.job" in _words(process)]


def _words(process: psutil.Process) -> list[str]:
    return process.info["cmdline"] or []
