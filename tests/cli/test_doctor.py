"""`ddpwatch doctor`: what is available, what is not, and what that means."""

from __future__ import annotations

import json
import os

import pytest

from ddpwatch.cli import _doctor_checks as checkup
from tests.builders import fake_nvml
from tests.builders.fake_rank import FakeRun


def checks_of(done):
    return {check["name"]: (check["verdict"], check["text"]) for check in json.loads(done.stdout)["checks"]}


def test_a_usable_machine_is_reported_with_words_and_marks(ddpwatch, run_dir):
    done = ddpwatch("doctor")

    assert (done.returncode, done.stderr) == (0, "")
    for name in ("python", "ddpwatch", "torch", "pyzmq", "CURVE", "msgspec", "textual", "psutil", "NVIDIA"):
        assert f" {name} " in done.stdout
    assert f"✔ ok   run directory  {run_dir} is private to you" in done.stdout
    assert f"- info live run       no run found in {run_dir}" in done.stdout


def test_all_places_that_are_searched_are_named(ddpwatch, run_dir):
    for name in ("runtime/ddpwatch", f"ddpwatch-{os.getuid()}"):
        (run_dir / name).mkdir(mode=0o700, parents=True)
    (run_dir / f"ddpwatch-{os.getuid()}").chmod(0o755)
    places = {"DDPWATCH_RUN_DIR": "", "XDG_RUNTIME_DIR": str(run_dir / "runtime"), "TMPDIR": str(run_dir)}
    checks = checks_of(ddpwatch("doctor", "--json", **places))

    assert checks["run directory"][0] == "ok"
    assert checks["also searched"] == ("info", f"/run/user/{os.getuid()}/ddpwatch")
    assert checks["not searched"][0] == "warn"
    assert f"{run_dir}/ddpwatch-{os.getuid()} is open to other users" in checks["not searched"][1]


def test_live_runs_and_garbage_are_named(ddpwatch, run_dir):
    (run_dir / "leftover").write_text("x")
    (run_dir / "broken").mkdir()
    (run_dir / "broken" / "run.json").write_text("{")
    with FakeRun(run_dir, 2):
        done = ddpwatch("doctor")

    assert done.returncode == 0
    assert f"{run_dir / 'leftover'} is not a run directory" in done.stdout
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
    assert "too long for a Unix socket" in checks_of(done)["run directory"][1]


@pytest.mark.parametrize(
    ("version", "verdict", "words"),
    [
        (None, "ok", "only training needs it"),
        ("2.3.1", "warn", "too old"),
        ("2.4.0", "ok", "gloo's flight recorder needs 2.8"),
        ("2.13.0+cpu", "ok", "flight recorder available"),
        ("nonsense", "warn", "too old"),
    ],
)
def test_what_torch_allows_goes_by_its_version(monkeypatch, version, verdict, words):
    monkeypatch.setattr(checkup, "_installed", lambda package: version)
    check = checkup._torch()

    assert check.verdict == verdict
    assert words in check.text


def torch_names(monkeypatch, answer):
    """The checks of torch's private names if the child process prints this."""
    monkeypatch.setattr(checkup, "_installed", lambda package: "2.13.0")
    monkeypatch.setattr(checkup, "RUN_FILE", f"print({answer!r})")
    return [(check.verdict, check.text) for check in checkup._torch_names()]


def test_the_torch_at_hand_has_all_private_names():
    verdicts = [check.verdict for check in checkup._torch_names()]

    assert set(verdicts) <= {"ok", "info"}


def test_missing_private_names_of_torch_are_grouped_by_what_is_missing(monkeypatch):
    missing = [
        {"name": "torch._a", "without": "hangs show less", "since": "2.8", "expected": False},
        {"name": "torch._b", "without": "hangs show less", "since": "2.8", "expected": False},
        {"name": "torch._c", "without": "epochs are not counted", "since": "2.4", "expected": True},
    ]

    assert torch_names(monkeypatch, json.dumps(missing)) == [
        ("info", "hangs show less; missing: torch._a, torch._b, which torch 2.8 has"),
        ("warn", "epochs are not counted; missing: torch._c"),
    ]


def test_a_torch_that_cannot_be_imported_is_reported(monkeypatch):
    assert torch_names(monkeypatch, "") == [
        ("warn", "importing torch failed: what ddpwatch can measure with it is unknown")
    ]


def test_a_missing_package_makes_it_unusable(monkeypatch):
    monkeypatch.setattr(checkup, "_installed", lambda package: None)
    verdicts = {check.name: check.verdict for check in checkup._versions()}

    assert verdicts["msgspec"] == "bad"
    assert verdicts["textual"] == "warn"


@pytest.fixture(scope="module")
def driver_folder(tmp_path_factory):
    """Directory for LD_LIBRARY_PATH with a fake driver that has no functions for ECC."""
    folder = tmp_path_factory.mktemp("nvml")
    fake_nvml.build(folder, without=("nvmlDeviceGetTotalEccErrors",))
    return folder


@pytest.fixture
def scenario(driver_folder, tmp_path, monkeypatch):
    """Answers of the driver to child processes."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver_folder))
    monkeypatch.setenv(fake_nvml.VARIABLE, str(tmp_path / "scenario"))
    return fake_nvml.Scenario(tmp_path / "scenario", 5)


def gpus_of(checks):
    return {check.name: (check.verdict, check.text) for check in checks}


def test_without_a_driver_it_says_what_is_shown_instead():
    (check,) = checkup._nvidia()

    assert check.verdict == "warn"
    assert check.text.startswith("no NVIDIA driver: libnvidia-ml.so.1 was not found: no GPU figures")
    assert check.text.endswith("CPU % and resident memory are shown instead")


def test_unreadable_gpu_figures_are_listed_with_the_reason_and_equal_gpus_grouped(scenario):
    scenario.set({"return.gpu1.nvmlDeviceGetPowerUsage": fake_nvml.NO_PERMISSION, "return.gpu4": fake_nvml.IS_LOST})
    scenario.set({"gpu3.event_types": 1})
    reported = gpus_of(checkup._nvidia())

    old = "no corrected errors, uncorrected errors (the driver is too old for it)"
    assert reported == {
        "NVIDIA": ("ok", "driver 550.54.15, GPUs: 5"),
        "GPU 0,2": ("warn", f"NVIDIA H100 80GB HBM3: {old}"),
        "GPU 1": ("warn", f"NVIDIA H100 80GB HBM3: no power (no permission); {old}"),
        "GPU 3": ("warn", f"NVIDIA H100 80GB HBM3: {old}; no Xid errors (not supported by this GPU)"),
        "GPU 4": ("warn", "of unknown name: no figure is readable (the GPU is lost)"),
    }


def test_a_driver_that_hangs_does_not_hang_the_doctor(scenario, monkeypatch):
    scenario.set({"block.nvmlDeviceGetTemperature": 60_000})
    # Until it has reported what it can, which takes longer on a slow machine.
    timeout_s = 1.0
    while "driver" not in (reported := checkup._ask_driver(timeout_s))[0]:
        timeout_s *= 2
    monkeypatch.setattr(checkup, "_ask_driver", lambda: reported)

    assert list(gpus_of(checkup._nvidia())) == ["NVIDIA", "GPU"]
    assert "did not answer within" in reported[-1]["why"]


def test_names_from_the_driver_are_sanitized(scenario):
    scenario.set({"gpu0.name": "[red]\x1b[31m" + "x" * 60, "count": 1})
    reported = gpus_of(checkup._nvidia())

    assert "\x1b" not in reported["GPU 0"][1]
    assert "[red]" in reported["GPU 0"][1]
