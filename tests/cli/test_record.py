"""`ddpwatch record` and `watch --record`: files, lines, exit codes, restarts and signals."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from ddpwatch.recording.alerts import reported
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.schema import NoRecording, Unreadable
from ddpwatch.recording.sqlite_store import RecordingFile
from ddpwatch.recording.writer import Recorder
from ddpwatch.wire import Bye, decode
from tests.builders.fake_rank import FakeRun
from tests.builders.training import wait_for
from tests.cli.cli_child import GIVE_UP_S, child_environment

OTHER_ID = "0123456789abcdef"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run.ddpw"


def wait_until_followed(run):
    for rank in run.ranks:
        assert rank.followed.wait(GIVE_UP_S)


def say_goodbye(run, reason="closed"):
    for rank in run.ranks:
        rank.say_bye(reason)


def finish(child):
    out, err = child.communicate(timeout=GIVE_UP_S)
    return child.returncode, out, err


def messages(recording, attempt):
    return [decode(entry.payload) for entry in recording.entries(attempt)]


def written(file):
    """Number of frames on disk."""
    try:
        with closing(Recording(file)) as recording:
            return recording.frames(recording.attempts[0])
    except (NoRecording, Unreadable):
        return 0


def test_a_run_is_recorded_to_its_last_word(start_ddpwatch, run_dir, file):
    with FakeRun(run_dir, 4, name="resnet50") as run:
        run.train(0, 60, slow_rank=2)
        child = start_ddpwatch("record", "-o", str(file))
        wait_until_followed(run)
        run.train(60, 20, slow_rank=2)
        say_goodbye(run)
        exit_code, out, err = finish(child)

    assert (exit_code, out) == (0, "")
    begun, ended, kept = err.splitlines()
    assert begun == f"recording run ab12cd34 (resnet50) into {file}"
    assert re.search(r"has ended: all ranks have exited; \d alerts? opened: \d warning", ended)
    assert re.fullmatch(rf"\d+ frames in {file} \(\d\.\d MB\)", kept)
    assert file.stat().st_mode & 0o077 == 0
    with closing(Recording(file)) as recording:
        (attempt,) = recording.attempts
        received = messages(recording, attempt)
        assert {message.rank for message in received if isinstance(message, Bye)} == {0, 1, 2, 3}
        assert "straggler" in {event.alert.finding.rule for _, event in reported(recording, attempt)}
        assert recording.damaged == 0


def test_watch_records_the_alerts_it_prints(start_ddpwatch, run_dir, file):
    with FakeRun(run_dir, 4) as run:
        run.train(0, 60, slow_rank=2)
        child = start_ddpwatch("watch", "--json", "--record", str(file), "--keep", "24h", "--max", "2GB")
        wait_until_followed(run)
        say_goodbye(run)
        exit_code, out, err = finish(child)

    changes = [json.loads(line) for line in out.splitlines()]
    assert exit_code == 0
    assert f"frames in {file}" in err
    with closing(Recording(file)) as recording:
        events = [event for _, event in reported(recording, recording.attempts[0])]
    assert changes
    assert [(event.kind, event.alert.finding.message) for event in events] == [
        (change["event"], change["message"]) for change in changes
    ]


def test_without_a_file_it_chooses_one_by_the_name_of_the_run_and_says_so(run_dir, tmp_path):
    with FakeRun(run_dir, 1, name="../evil \x1b[31m/net 50") as run:
        child = subprocess.Popen(
            [sys.executable, "-m", "ddpwatch", "record"],
            env=child_environment(),
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        try:
            wait_until_followed(run)
            say_goodbye(run)
            _, err = child.communicate(timeout=GIVE_UP_S)
        finally:
            child.kill()
            child.wait()

    (file,) = tmp_path.iterdir()
    assert child.returncode == 0
    assert re.fullmatch(r"evil-31m-net-50-\d{8}-\d{6}\.ddpw", file.name)
    assert f"into {file.name}\n" in err
    assert "\x1b" not in err


def test_a_job_that_ends_badly_and_is_started_again_goes_into_the_same_file(start_ddpwatch, run_dir, file):
    with FakeRun(run_dir, 2) as run:
        child = start_ddpwatch("record", "-o", str(file))
        wait_until_followed(run)
        say_goodbye(run, "failed")
        while "to be restarted" not in child.stderr.readline():
            pass
        with FakeRun(run_dir, 2, run_id=OTHER_ID) as again:
            wait_until_followed(again)
            say_goodbye(again)
            exit_code, _, err = finish(child)

    assert exit_code == 0
    assert "recording run 01234567 (train)" in err
    with closing(Recording(file)) as recording:
        assert [attempt.run.id for attempt in recording.attempts] == [run.run_id, OTHER_ID]
        assert all(messages(recording, attempt) for attempt in recording.attempts)


def test_a_job_that_is_not_started_again_ended_badly(start_ddpwatch, run_dir, file):
    with FakeRun(run_dir, 2) as run:
        child = start_ddpwatch("record", "-o", str(file), "--restart", "0.1")
        wait_until_followed(run)
        say_goodbye(run, "failed")
        exit_code, _, err = finish(child)

    assert exit_code == 4
    assert "ended badly: ranks 0-1 failed; " in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_control_c_and_a_plain_kill_leave_a_whole_file(start_ddpwatch, run_dir, file, number):
    with FakeRun(run_dir, 2) as run:
        child = start_ddpwatch("record", "-o", str(file))
        wait_for(lambda: written(file))
        child.send_signal(number)
        exit_code, _, err = finish(child)
        assert "is still running; stopped watching" in err
        assert re.search(rf"^\d+ frames in {file}", err, re.MULTILINE)
        before = written(file)
        child = start_ddpwatch("record", "-o", str(file))
        wait_for(lambda: written(file) > before)
        child.send_signal(number)
        assert re.search(rf"^\d+ more frames? in {file}", finish(child)[2], re.MULTILINE)

    assert exit_code == 130
    assert [entry.name for entry in file.parent.iterdir()] == [file.name]
    with closing(Recording(file)) as recording:
        assert recording.attempts[0].run.id == run.run_id


def test_the_help_shows_the_default_name_of_the_file(in_process):
    assert "RUN-DATE-TIME.ddpw" in in_process("record", "--help").stdout


def test_where_no_run_starts_no_file_is_left(ddpwatch, file):
    done = ddpwatch("record", "-o", str(file), "--for", "0.2")

    assert done.returncode == 3
    assert "gave up waiting: no run found in " in done.stderr
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["record", "-o", "{folder}"], "is a directory"),
        (["record", "-o", "{folder}/nosuch/x.ddpw"], "cannot create"),
        (["record", "-o", "{folder}/text"], "is not a ddpwatch recording"),
        (["record", "-o", "{folder}/fifo"], "is not a regular file"),
        (["record", "-o", "{folder}/busy"], "is being written by process {pid}"),
        (["watch", "--record", "{folder}/busy"], "is being written by process {pid}"),
        (["record", "-o", "-"], "cannot go to stdout"),
        (["watch", "--record", "-"], "cannot go to stdout"),
        (["record", "-o", "{folder}/x", "--max", "1MB"], "--max must be at least 10MB"),
        (["record", "-o", "{folder}/x", "--max", "much"], "'much' is not a size such as 500MB or 2GB"),
        (["record", "-o", "{folder}/x", "--keep", "long"], "not a duration"),
        (["record", "-o", "{folder}/x", "--keep", "5s"], "--keep must be at least 2m"),
        (["watch", "--record", "{folder}/x", "--keep", "119"], "--keep must be at least 2m"),
        (["watch", "--keep", "24h"], "add --record FILE"),
    ],
)
def test_an_error_is_one_line_before_any_run_is_waited_for(ddpwatch, tmp_path, arguments, words):
    (tmp_path / "text").write_text("text")
    os.mkfifo(tmp_path / "fifo")
    with closing(Recorder(tmp_path / "busy")):
        done = ddpwatch(*(argument.format(folder=tmp_path) for argument in arguments))

    assert (done.returncode, done.stdout) == (2, "")
    assert words.format(pid=os.getpid()) in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "x").exists()


@pytest.fixture
def full_disk(monkeypatch):
    """Refuse each write, from the first on or after a number of them."""

    def full_after(portions):
        put = RecordingFile.put
        left = iter(range(portions))

        def put_or_refuse(shelf, portion):
            if next(left, None) is None:
                raise sqlite3.OperationalError("database or disk is full")
            put(shelf, portion)

        monkeypatch.setattr(RecordingFile, "put", put_or_refuse)

    return full_after


@contextmanager
def ending(run, reason="closed", when=lambda: True):
    """End the ranks once they are followed and a condition holds."""

    def leave():
        wait_until_followed(run)
        wait_for(when)
        run.train(60, 5)
        say_goodbye(run, reason)

    with ThreadPoolExecutor(1) as thread:
        left = thread.submit(leave)
        yield
        left.result()


@pytest.mark.parametrize("command", [["record", "-o"], ["watch", "--record"]])
@pytest.mark.parametrize("portions", [0, 1])
def test_a_disk_that_stays_full_is_the_last_word_and_an_exit_code(
    in_process, run_dir, file, full_disk, command, portions
):
    full_disk(portions)
    with FakeRun(run_dir, 2, name="resnet50") as run:
        run.train(0, 60)
        with ending(run, when=lambda: written(file) > 0 or not portions):
            result = in_process(*command, str(file))

    assert result.returncode == 1
    *_, last = result.stderr.splitlines()
    assert re.search(r"\d+ frames? could not be written: database or disk is full$", last), result.stderr
    assert last.startswith(f"nothing was recorded in {file}: " if not portions else "")
    assert file.exists() == bool(portions)


def test_a_run_that_ended_badly_goes_before_a_full_disk(in_process, run_dir, file, full_disk):
    full_disk(0)
    with FakeRun(run_dir, 2, name="resnet50") as run:
        run.train(0, 60)
        with ending(run, "failed"):
            result = in_process("record", "-o", str(file), "--restart", "1s")

    assert result.returncode == 4
    assert "could not be written: database or disk is full" in result.stderr.splitlines()[-1]
