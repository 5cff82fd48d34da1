"""`ddpwatch postmortem`: verdict, evidence, and exit code."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from ddpwatch.cli.postmortem import command
from ddpwatch.errors import UsageError
from tests.builders.job_logs import torchrun_report

OOM = "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 2 has a total"
PEER = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:14503"


@pytest.fixture
def logs(tmp_path):
    """A file for each of four ranks, the third of which ran out of memory."""
    for rank in range(4):
        last = OOM if rank == 2 else f"[rank{rank}]: {PEER}"
        (tmp_path / f"{rank}.log").write_text(f"[rank{rank}]: step 1\n[rank{rank}]: Traceback\n{last}")
    return tmp_path


def test_the_verdict_comes_first_then_its_evidence_then_the_secondary_failures(ddpwatch, logs):
    done = ddpwatch("postmortem", str(logs / "*.log"), COLUMNS="200")

    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Rank 2 ran out of GPU memory, allocating 2.0 GiB.")
    assert lines[2].endswith("2.log:3 (rank 2)")
    assert "CUDA out of memory" in lines[3]
    assert "Secondary failures: ranks 0-1, 3." in lines
    assert lines[-1] == "Read 12 lines of 4 files; recognized 4."


def test_machines_get_the_same(logs):
    done = CliRunner().invoke(command, ["--json", str(logs / "*.log")])
    reported = json.loads(done.stdout)

    assert done.exit_code == 0
    assert {key: reported["verdict"][key] for key in ("culprits", "cause", "victims", "certain")} == {
        "culprits": [2],
        "cause": "cuda-oom",
        "victims": [0, 1, 3],
        "certain": True,
    }
    assert reported["verdict"]["evidence"][0]["line"] == 3
    assert (reported["files"], reported["lines"], reported["recognised"], reported["troubles"]) == (4, 12, 4, [])


def test_an_exit_without_its_error_is_reported_as_not_proven_and_exits_with_1(tmp_path):
    (tmp_path / "torchrun.log").write_text(torchrun_report((0, 1, 10), (1, -15, 11)))
    done = CliRunner().invoke(command, [str(tmp_path)])

    assert done.exit_code == 1
    assert "Rank 0 exited first (code 1)" in done.stdout
    assert "most likely cause" not in done.stdout


def test_logs_without_a_verdict_are_reported_and_exit_with_1(tmp_path):
    (tmp_path / "a.log").write_text("step 1\nstep 2\n")
    done = CliRunner().invoke(command, [str(tmp_path / "a.log")])

    assert done.exit_code == 1
    assert "these logs do not show why the job ended; add the logs of all ranks" in " ".join(done.stdout.split())
    assert done.stdout.endswith("Read 2 lines of 1 file; recognized 0.\n")
    done = CliRunner().invoke(command, ["--json", str(tmp_path / "a.log")])
    assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (1, None)


@pytest.mark.parametrize("names", [["none.log"], ["*.nothing"], ["2.log", "none.log"]])
def test_a_name_without_a_file_is_a_usage_error_of_one_line(ddpwatch, logs, names):
    done = ddpwatch("postmortem", *(str(logs / name) for name in names))

    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"no file matches {logs / names[-1]}; name the job's log files" in done.stderr


def test_no_argument_is_a_usage_error(ddpwatch):
    done = ddpwatch("postmortem")

    assert (done.returncode, done.stdout) == (2, "")


def test_a_directory_means_all_files_below_it(logs, tmp_path):
    reported = CliRunner().invoke(command, [str(logs)])
    assert reported.exit_code == 0
    assert reported.stdout == CliRunner().invoke(command, [f"{logs}/*"]).stdout

    (tmp_path / "empty").mkdir()
    refused = CliRunner().invoke(command, [str(tmp_path / "empty")])
    assert isinstance(refused.exception, UsageError)
    assert str(refused.exception).endswith("is an empty directory; name the job's log files")


def test_a_directory_among_the_files_of_a_pattern_is_reported(logs):
    (logs / "folder").mkdir()
    done = CliRunner().invoke(command, [str(logs / "*")])
    assert done.exit_code == 0
    assert "folder is a directory" in done.stdout


def test_hostile_logs_cannot_speak_to_the_terminal(tmp_path):
    log = tmp_path / "a\x1b[31m.log"
    log.write_bytes(b"\xff\x00\x1b]0;title\x07[rank1]: ValueError: \x1b[2Jgone\xe2\x80\xae" + b"x" * 100_000 + b"\n")
    done = CliRunner().invoke(command, [str(log)])

    assert done.exit_code == 0
    assert "Rank 1 raised ValueError: gone" in done.stdout
    assert all(line.isprintable() and len(line) <= 600 for line in done.stdout.splitlines())


def test_a_doubtful_verdict_says_so(tmp_path):
    (tmp_path / "a.log").write_text(f"[rank0]: {PEER}\n")
    done = CliRunner().invoke(command, [str(tmp_path / "a.log")])

    assert done.exit_code == 0
    assert "the logs do not prove it" in done.stdout
