"""`ddpwatch report`: an HTML page, or one line with the error."""

from __future__ import annotations

import errno
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from ddpwatch.core.limits import limits_from
from ddpwatch.outputs.report.page import MARK
from ddpwatch.recording.writer import Recorder
from ddpwatch.simulator.scenario import Scenario
from tests.builders.fake_rank import make_hello
from tests.builders.recordings import frame, make_run, measured, record
from tests.cli.cli_child import ROOT

RUN = Scenario(2, steps=60)
LAST_TAKEN = "this is attempt 2, the last one; choose another with --attempt N\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "run.ddpw"
    record(path, measured(RUN), 2)
    return record(path, measured(RUN), 2, run=make_run(2, name="again", run_id="5ec0de5ec0de5ec1"))


@pytest.fixture
def recording(made, tmp_path):
    return shutil.copy(made, tmp_path / "run.ddpw")


def refusal(result):
    """The one line on stderr."""
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("ddpwatch: ")
    return line


def test_it_writes_the_last_attempt_beside_the_recording_and_says_where(ddpwatch, recording, tmp_path):
    result = ddpwatch("report", str(recording))

    assert (result.returncode, result.stderr) == (0, LAST_TAKEN)
    assert result.stdout.strip() == str(tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text()
    assert "attempt 2 of 2" in text
    assert "<h1>again</h1>" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.ddpw", "run.html"]


def test_an_attempt_can_be_chosen_and_an_own_report_is_overwritten(in_process, recording, tmp_path):
    target = tmp_path / "mine.html"
    target.write_text(f"<html>{MARK}")
    result = in_process("report", str(recording), "-o", str(target), "--attempt", "1")

    assert (result.returncode, result.stderr) == (0, "")
    assert "<h1>train</h1>" in target.read_text()


def test_it_goes_to_stdout_if_asked_and_no_file_is_left(in_process, recording, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = in_process("report", str(recording), "-o", "-")

    assert (result.returncode, result.stderr) == (0, LAST_TAKEN)
    assert MARK in result.stdout
    assert result.stdout.rstrip().endswith("</html>")
    assert [path.name for path in tmp_path.iterdir()] == ["run.ddpw"]


def test_thresholds_and_the_path_of_the_data_are_in_the_manifest(in_process, tmp_path):
    path = tmp_path / "set.ddpw"
    limits = limits_from({"straggler": {"share": 0.03}}, "here")
    with closing(Recorder(path)) as recorder:
        recorder.begin(make_run(1), limits)
        recorder.add([frame(make_hello(0, 1, world_size=1, environment={"DDPWATCH_DATA": "/data/<images>"}))], [0])
    page = in_process("report", str(path), "-o", "-").stdout
    assert "straggler.share=0.03" in page
    assert "<dt>path</dt><dd>/data/&lt;images&gt;</dd>" in page
    reported = json.loads(in_process("export", str(path), "--to", "json", "-o", "-").stdout)["manifest"]
    assert reported["limits"] == {"straggler": {"share": 0.03}}
    assert reported["data_path"] == ["/data/<images>"]
    assert reported["environment"] == {"DDPWATCH_DATA": "/data/<images>"}

    # As older versions wrote it.
    with sqlite3.connect(path) as database:
        database.execute("UPDATE attempt SET run = json_remove(run, '$.limits', '$.recorder')")
    database.close()
    assert "<dt>thresholds</dt><dd>not reported</dd>" in in_process("report", str(path), "-o", "-").stdout


def test_what_is_no_report_is_overwritten_only_by_force(in_process, recording, tmp_path):
    target = tmp_path / "thesis.html"
    target.write_text("years of work")

    result = in_process("report", str(recording), "-o", str(target))
    assert result.returncode == 2
    assert "--force overwrites it" in refusal(result)
    assert target.read_text() == "years of work"
    assert in_process("report", str(recording), "-o", str(target), "--force").returncode == 0
    assert MARK in target.read_text()


def test_help_and_readme_say_which_steps_a_table_of_steps_lacks(in_process):
    reported = " ".join(in_process("export", "--help").stdout.split())

    assert "one row per rank and step. Steps that not all ranks have finished, such as the last ones before" in reported
    assert "a row for each rank and step that all ranks have" in (ROOT / "docs" / "recordings.md").read_text()


@pytest.mark.parametrize("command", [("report",), ("export", "--to", "json")])
def test_in_a_read_only_directory_the_error_explains_what_to_do(in_process, recording, tmp_path, monkeypatch, command):
    def locked(path, mode="r", *rest, **named):
        if path.suffix == ".part":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, mode, *rest, **named)

    # Whoever runs the tests may be allowed to write everywhere.
    opened = Path.open
    monkeypatch.setattr(Path, "open", locked)
    result = in_process(*command, str(recording), "--attempt", "1")

    assert result.returncode == 2
    assert refusal(result).endswith(f": {tmp_path} is not writable; choose another place with -o")


def test_the_recording_itself_is_never_overwritten(in_process, recording):
    result = in_process("report", str(recording), "-o", str(recording), "--force")

    assert result.returncode == 2
    assert "is the recording itself" in refusal(result)


def not_ours(path):
    with closing(sqlite3.connect(path)) as database:
        database.executescript("CREATE TABLE x (y)")


def newer(path):
    with closing(sqlite3.connect(path)) as database:
        database.executescript("PRAGMA application_id = 0x64647077; PRAGMA user_version = 99; CREATE TABLE x (y)")


BAD = {
    "missing": (lambda path: None, 3, "no such file"),
    "empty": (lambda path: path.write_bytes(b""), 3, "is empty"),
    "a directory": (lambda path: path.mkdir(), 2, "is a directory"),
    "a text": (lambda path: path.write_text("hello"), 2, "is not a ddpwatch recording"),
    "of another program": (not_ours, 2, "another program"),
    "newer": (newer, 2, "newer ddpwatch"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_is_no_recording_is_refused_in_a_line_and_nothing_is_written(in_process, tmp_path, what):
    make, code, words = BAD[what]
    path = tmp_path / "x.ddpw"
    make(path)
    result = in_process("report", str(path))

    assert result.returncode == code
    assert words in refusal(result)
    assert not (tmp_path / "x.html").exists()


def test_a_damaged_recording_is_reported_as_far_as_it_can_be_read(in_process, recording, tmp_path):
    with sqlite3.connect(recording) as database:
        (frames,) = database.execute("SELECT frames FROM block WHERE id = (SELECT max(id) FROM block)").fetchone()
        database.execute("UPDATE block SET data = x'00ff00ff' WHERE id = (SELECT max(id) FROM block)")
    database.close()
    result = in_process("report", str(recording), "--attempt", "2")

    assert result.returncode == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"ddpwatch: run.ddpw is damaged: 1 part could not be read, {frames} of ")
    assert line.endswith(" frames are missing; the rest is shown")
    reported = line.removeprefix("ddpwatch: run.ddpw is damaged: ").removesuffix("; the rest is shown")
    assert f"The recording is damaged: {reported}." in (tmp_path / "run.html").read_text()


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_truncated_recording_is_read_as_far_as_possible_or_refused_in_one_line(in_process, recording, tmp_path, part):
    data = recording.read_bytes()
    recording.write_bytes(data[: int(len(data) * part)])
    result = in_process("report", str(recording))

    assert result.returncode in {0, 2, 3}
    assert len(result.stderr.replace(LAST_TAKEN, "").splitlines()) <= 1
    assert (tmp_path / "run.html").exists() == (result.returncode == 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--attempt", "3"], "no attempt 3 in"),
        (["-o", "."], "is a directory"),
        (["-o", "no/such/x.html"], "no directory"),
        (["--baseline", "."], "is a directory"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(in_process, recording, arguments, words):
    result = in_process("report", str(recording), *arguments)

    assert result.returncode == 2
    assert words in refusal(result)


def test_without_plotly_it_says_what_to_install(started_ddpwatch, recording, tmp_path):
    (tmp_path / "plotly.py").write_text("raise ImportError('none here')")
    result = started_ddpwatch("report", str(recording), PYTHONPATH=f"{tmp_path}:{ROOT}")

    assert result.returncode == 1
    assert refusal(result) == "ddpwatch: a report needs plotly: pip install plotly"


def test_on_a_terminal_it_shows_how_far_it_is(ddpwatch_on_a_terminal, recording):
    code, written = ddpwatch_on_a_terminal("report", str(recording))

    assert code == 0
    assert "reading" in written
    assert "100%" in written
