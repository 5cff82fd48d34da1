"""What people install: a wheel and an sdist that hold the agent, and a viewer that works without torch."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
AGENT_FILES = {f"ddpwatch/agent/{path.relative_to(ROOT / 'agent')}" for path in (ROOT / "agent").rglob("*.py")}

INSTALLED = "from importlib import metadata; print(*(each.metadata['Name'] for each in metadata.distributions()))"
HOME = "https://github.com/ddpwatch/ddpwatch"
TARGET = re.compile(r'\]\(([^)\s]+)|\b(?:src|href)="([^"]+)"')
"""Target of an image or a link, in Markdown or in HTML."""
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
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
    assert {"CHANGELOG.md", "CITATION.cff", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md"} <= names
    assert {"Makefile", "requirements-dev.txt", "docs/shell-completion.md"} <= names
    assert {"tests/conftest.py", "tests/recordings/hang.msgpack.gz", "examples/train.py"} <= names
    assert not any(name.startswith("agent/") or name.endswith(".pyc") for name in names)


def test_the_metadata_point_to_the_repository_and_name_the_tested_pythons(dist):
    metadata = wheel_metadata(dist)

    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert all(urls[name].startswith(HOME) for name in set(urls) - {"Documentation"})
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "straggler" in metadata["Keywords"]
    assert "Programming Language :: Python :: 3.10" in metadata.get_all("Classifier")


def test_the_description_has_no_relative_link_or_image(dist):
    metadata = wheel_metadata(dist)
    description = metadata.get_payload(decode=True).decode()
    readme = (ROOT / "README.md").read_text()
    targets = [markdown or html for markdown, html in TARGET.findall(FENCED.sub("", description))]

    assert metadata["Description-Content-Type"] == "text/markdown"
    assert [target for target in targets if "/screenshots/" in target]
    assert not [target for target in targets if not target.startswith(("https://", "#"))]
    assert FENCED.findall(description) == FENCED.findall(readme)


def test_the_description_shows_files_that_exist_at_the_tag_of_the_release(dist):
    metadata = wheel_metadata(dist)
    description = metadata.get_payload(decode=True).decode()
    tag = f"v{metadata['Version']}"
    raw = HOME.replace("github.com", "raw.githubusercontent.com")
    paths = re.findall(rf"(?:{re.escape(raw)}/|{re.escape(HOME)}/blob/){re.escape(tag)}/([^)#\"]+)", description)

    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]


def wheel_metadata(dist):
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


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
