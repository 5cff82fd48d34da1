"""`ddpwatch doctor` says what is there, what is not, and what that means."""

from __future__ import annotations

import json

import pytest
from fake_rank import FakeRun

from ddpwatch.cli import checkup


def checks_of(done):
    return {check["name"]: (check["verdict"], check["text"]) for check in json.loads(done.stdout)["checks"]}


def test_a_usable_machine_is_told_in_words_and_marks(ddpwatch, run_dir):
    done = ddpwatch("doctor")

    assert (done.returncode, done.stderr) == (0, "")
    for name in ("python", "ddpwatch", "torch", "pyzmq", "CURVE", "msgspec", "textual", "psutil", "NVIDIA"):
        assert f" {name} " in done.stdout
    assert f"✔ ok   run directory  {run_dir} is private to you" in done.stdout
    assert "nothing is running" in done.stdout


def test_live_runs_and_garbage_are_named(ddpwatch, run_dir):
    (run_dir / "leftover").write_text("x")
    (run_dir / "broken").mkdir()
    (run_dir / "broken" / "run.json").write_text("{")
    with FakeRun(run_dir, 2):
        done = ddpwatch("doctor")

    assert done.returncode == 0
    assert f"{run_dir / 'leftover'} is no run directory" in done.stdout
    assert f"{run_dir / 'broken' / 'run.json'} cannot be read" in done.stdout
    assert "ab12cd34 (train), 2 of 2 ranks alive" in done.stdout


def test_an_unusable_run_directory_is_bad(ddpwatch, run_dir):
    run_dir.chmod(0o755)
    done = ddpwatch("doctor", "--json")

    assert done.returncode == 1
    assert json.loads(done.stdout)["usable"] is False
    verdict, text = checks_of(done)["run directory"]
    assert verdict == "bad"
    assert "chmod 700" in text


def test_a_run_directory_with_too_long_a_path_is_bad(ddpwatch, run_dir):
    long_path = run_dir / ("x" * 100)
    done = ddpwatch("doctor", "--json", DDPWATCH_RUN_DIR=str(long_path))

    assert done.returncode == 1
    assert "too long for a socket" in checks_of(done)["run directory"][1]


@pytest.mark.parametrize(
    ("version", "verdict", "words"),
    [
        (None, "ok", "fine for watching"),
        ("2.3.1", "warn", "too old"),
        ("2.4.0", "ok", "flight recorder for gloo needs 2.8"),
        ("2.13.0+cpu", "ok", "flight recorder available"),
        ("nonsense", "warn", "too old"),
    ],
)
def test_what_torch_allows_goes_by_its_version(monkeypatch, version, verdict, words):
    monkeypatch.setattr(checkup, "_installed", lambda package: version)
    check = checkup._torch()

    assert check.verdict == verdict
    assert words in check.text


def test_a_missing_package_makes_it_unusable(monkeypatch):
    monkeypatch.setattr(checkup, "_installed", lambda package: None)
    verdicts = {check.name: check.verdict for check in checkup._versions()}

    assert verdicts["msgspec"] == "bad"
    assert verdicts["textual"] == "warn"


def test_without_a_driver_it_says_what_is_shown_instead(monkeypatch):
    import pynvml

    def fail():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    check = checkup._nvidia()

    assert check.verdict == "warn"
    assert check.text == ("no NVIDIA driver found: GPU figures are not available; CPU % and RSS are shown instead")
