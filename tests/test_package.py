"""What people install: a wheel and an sdist that hold the agent, and a viewer that works without torch."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
AGENT_FILES = {f"ddpwatch/agent/{path.relative_to(ROOT / 'agent')}" for path in (ROOT / "agent").rglob("*.py")}

INSTALLED = "from importlib import metadata; print(*(each.metadata['Name'] for each in metadata.distributions()))"
NOT_SOURCE = (".*", "*.egg-info", "build", "dist", "__pycache__")


def run(*command, **options) -> str:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Both distributions, built from a copy, because a build writes into its tree."""
    source = tmp_path_factory.mktemp("source") / "ddpwatch"
    target = tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", target, source)
    return target


def test_the_wheel_holds_the_agent_and_its_types(dist):
    (wheel,) = dist.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())

    assert names >= AGENT_FILES
    assert "ddpwatch/py.typed" in names
    assert not any(name.startswith(("agent/", "tests/", "examples/")) for name in names)


def test_the_sdist_holds_the_agent_once(dist):
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert names >= AGENT_FILES
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


@pytest.mark.timeout(240)
def test_the_viewer_runs_where_there_is_no_torch(dist, tmp_path):
    (wheel,) = dist.glob("*.whl")
    # Without a pip of its own, which takes as long as all the rest: ours installs into it.
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--no-compile", wheel)

    assert "Usage: ddpwatch" in run(tmp_path / "venv" / "bin" / "ddpwatch", "--help")
    installed = run(python, "-I", "-c", INSTALLED).split()
    assert "ddpwatch" in installed
    assert "torch" not in installed
    assert "ddpwatch" in run(tmp_path / "venv" / "bin" / "ddpwatch", "doctor", cwd=tmp_path)
