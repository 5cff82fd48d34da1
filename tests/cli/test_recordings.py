"""`ddpwatch export`, `ddpwatch compare` and `--baseline` from the command line."""

import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import jsonschema
import pytest

from ddpwatch import wire
from ddpwatch.simulator.scenario import Scenario
from ddpwatch.sources.frames import Frame
from tests.builders.fake_rank import make_hello, make_snap, make_step
from tests.builders.kept_runs import tape
from tests.builders.recordings import frame, make_run, record_hung_steps, record_scenario, write_recording
from tests.builders.scenario_frames import frames

QUIET = {"steps": 80, "drift": 0.0}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """A run of two ranks, the same again, one that is a fifth slower, and one process alone."""
    folder = tmp_path_factory.mktemp("recordings")
    record_scenario(folder / "two.ddpw", Scenario(2, seed=1, **QUIET))
    record_scenario(folder / "again.ddpw", Scenario(2, seed=2, **QUIET))
    record_scenario(folder / "slow.ddpw", Scenario(2, seed=3, step_ms=120.0, **QUIET))
    record_scenario(folder / "one.ddpw", Scenario(1, seed=4, **QUIET))
    hello = make_hello(0, 1, world_size=2)
    write_recording(folder / "empty.ddpw", (make_run(2), [Frame(b"hello", wire.encode(hello), 0)]))
    hello = make_hello(0, 1, world_size=1)
    write_recording(folder / "nothing.ddpw", (make_run(1), [Frame(b"hello", wire.encode(hello), 0)]))
    few = [make_step(index) for index in range(4)]
    snap = make_snap(0, 1, few, make_hello(0, 1, world_size=1))
    write_recording(folder / "few.ddpw", (make_run(1), [Frame(b"snap/0", wire.encode(snap), 0)]))
    snap = make_snap(0, 1, few[:1], make_hello(0, 1, world_size=1))
    write_recording(folder / "first.ddpw", (make_run(1), [Frame(b"snap/0", wire.encode(snap), 0)]))
    reported = list(frames(Scenario(2, seed=5, **QUIET)))
    words = {1: "ValueError: boom", 0: "RuntimeError: Connection closed by peer"}
    byes = [wire.Bye(rank=rank, seq=10**4, reason="failed", text=text, mono_ns=1) for rank, text in words.items()]
    crashed = [*reported, *(frame(bye, reported[-1].received_ns + 10**6) for bye in byes)]
    write_recording(folder / "crash.ddpw", (make_run(2), crashed))
    write_recording(folder / "restart.ddpw", (make_run(2), crashed), (make_run(2, run_id="ab" * 8), reported))
    record_hung_steps(folder / "stuck.ddpw")
    return folder


def refused(result, code):
    """Assert this exit code and one line on stderr that is not a traceback."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("ddpwatch: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_export_writes_beside_the_recording_and_does_not_overwrite(ddpwatch, recordings):
    path = recordings / "two.ddpw"

    assert ddpwatch("export", str(path), "--to", "csv").returncode == 0
    assert len((recordings / "two.csv").read_text().splitlines()) == 1 + 2 * 80
    assert "--force" in refused(ddpwatch("export", str(path), "--to", "csv"), 2)
    again = ddpwatch("export", str(path), "--to", "csv", "--force", "--steps", "10-19")
    assert again.returncode == 0
    assert "10 steps of 2 ranks" in again.stderr
    assert len((recordings / "two.csv").read_text().splitlines()) == 1 + 2 * 10


def test_export_to_stdout_is_nothing_but_the_export(ddpwatch, recordings):
    result = ddpwatch("export", str(recordings / "two.ddpw"), "--to", "json", "-o", "-")

    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["steps"]["count"] == 79


def test_export_says_on_a_terminal_what_it_has_written(ddpwatch_on_a_terminal, recordings, tmp_path):
    code, written = ddpwatch_on_a_terminal(
        "export", str(recordings / "two.ddpw"), "--to", "perfetto", "-o", str(tmp_path / "t.json")
    )

    assert code == 0
    assert "wrote" in written
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


def test_reading_much_shows_how_far_it_is_on_stderr(in_process, recordings, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)

    result = in_process("export", str(recordings / "two.ddpw"), "--to", "csv", "-o", "-")

    assert "exporting" in result.stderr
    assert result.stdout.count("\n") == 1 + 2 * 80


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["export", "{}/none.ddpw", "--to", "csv"], 3, "no such file"),
        (["export", "{}", "--to", "csv"], 2, "a directory"),
        (["export", "{}/two.ddpw", "--to", "xml"], 2, "xml"),
        (["export", "{}/two.ddpw"], 2, "--to"),
        (["export", "{}/two.ddpw", "--to", "csv", "--attempt", "7", "-o", "-"], 2, "no attempt 7"),
        (["export", "{}/two.ddpw", "--to", "csv", "--steps", "9-3", "-o", "-"], 2, "not a range of steps"),
        (["export", "{}/two.ddpw", "--to", "csv", "--steps", "900-", "-o", "-"], 2, "no step of 900- in the recording"),
        (
            ["export", "{}/two.ddpw", "--to", "json", "-o", "{}/no/where.json"],
            2,
            "cannot write {0}/no/where.json: no directory {0}/no",
        ),
        (["report", "{}/two.ddpw", "-o", "{}/no/where.html"], 2, "no directory {}/no"),
        (["export", "{}/two.ddpw", "--to", "json", "-o", "{}/two.ddpw/x"], 2, "no directory {}/two.ddpw"),
        (["export", "{}/two.ddpw", "--to", "csv", "-o", "/proc/x.csv"], 1, "cannot use /proc/x.csv: "),
        (["report", "{}/two.ddpw", "-o", "/proc/x.html"], 1, "cannot use /proc/x.html: "),
        (["compare", "{}/two.ddpw", "{}/none.ddpw"], 3, "no such file"),
        (["compare", "{}/two.ddpw", "{}/empty.ddpw"], 2, "nothing to compare"),
        (["compare", "{}/two.ddpw", "{}/first.ddpw"], 2, "has no step after the first"),
        (["compare", "{}/two.ddpw", "{}/again.ddpw", "--max-slowdown", "0.05"], 2, "such as 5%"),
        (["compare", "{}/two.ddpw", "{}/again.ddpw", "--attempt-b", "2"], 2, "no attempt 2"),
        (["compare", "{}/two.ddpw", "{}/again.ddpw", "--baseline", "{}/two.ddpw"], 2, "in one process"),
        (["compare", "{}/two.ddpw", "{}/again.ddpw", "--baseline", "{}/nothing.ddpw"], 2, "has no finished step"),
        (["status", "--baseline", "{}/two.ddpw"], 2, "in one process"),
        (["report", "{}/two.ddpw", "-o", "{}/r.html", "--baseline", "{}/two.ddpw"], 2, "in one process"),
        (["attach", "--baseline", "{}/none.ddpw"], 3, "no such file"),
    ],
)
def test_an_error_is_one_line(in_process, recordings, arguments, code, says):
    said = refused(in_process(*(argument.format(recordings) for argument in arguments)), code)
    assert says.format(recordings) in said


@pytest.mark.parametrize("kind", ["csv", "json", "perfetto"])
def test_steps_that_are_not_there_are_refused_and_leave_no_file(in_process, recordings, tmp_path, kind):
    out = tmp_path / "out"
    arguments = ["export", str(recordings / "two.ddpw"), "--to", kind, "-o", str(out), "--steps"]

    assert "no step of 900-1000 in the recording, which has 0-79" in refused(in_process(*arguments, "900-1000"), 2)
    assert "no step of 80 in the recording" in refused(in_process(*arguments, "80"), 2)
    assert list(tmp_path.iterdir()) == []
    assert in_process(*arguments, "79-1000").returncode == 0


@pytest.mark.parametrize("what", ["text", "database", "cut"])
def test_a_file_that_is_no_whole_recording_is_refused_or_read_as_far_as_it_goes(in_process, recordings, tmp_path, what):
    path = tmp_path / "bad.ddpw"
    if what == "text":
        path.write_text("no recording at all, and long enough to have been one")
    elif what == "database":
        with closing(sqlite3.connect(path)) as database:
            database.executescript("CREATE TABLE t (x); INSERT INTO t VALUES (1);")
    else:
        whole = (recordings / "two.ddpw").read_bytes()
        path.write_bytes(whole[: len(whole) * 2 // 3])
    for command in (["export", str(path), "--to", "csv", "-o", "-"], ["compare", str(path), str(path)]):
        result = in_process(*command)
        assert result.returncode in {0, 2, 3}
        assert "Traceback" not in result.stderr
        if what != "cut":
            refused(result, 2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Some seconds of four real ranks, with several checkpoints."""
    path = tmp_path_factory.mktemp("whole") / "whole.ddpw"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddpwatch.recording.writer.CHECKPOINT_FRAMES", 100)
        tape(path, "slow-backward")
    return path.read_bytes()


READERS = (
    ["replay", "--json"],
    ["export", "--to", "csv", "-o", "-"],
    ["export", "--to", "json", "-o", "-"],
    ["report"],
)


def read_by_all(in_process, path):
    """Output of each command for the file: replay, csv, json, report, and compare with itself."""
    read = [in_process(name, str(path), *options) for name, *options in READERS]
    return [*read, in_process("compare", str(path), str(path))]


@pytest.mark.parametrize("part", [0.1, 0.25, 0.4, 0.6, 0.8, 0.97])
def test_of_a_file_that_was_cut_off_all_read_the_same(in_process, whole, tmp_path, part):
    path = tmp_path / "cut.ddpw"
    path.write_bytes(whole[: int(part * len(whole))])
    replayed, csv, exported, report, compared = every = read_by_all(in_process, path)

    if replayed.returncode:
        assert {result.returncode for result in every} == {2}, "nothing is left"
        assert [result.stderr for result in every] == 5 * [replayed.stderr]
        return
    step = json.loads(replayed.stdout)["step"]
    assert [result.returncode for result in (csv, exported, report)] == [0, 0, 0]
    line = report.stderr
    assert line.startswith("ddpwatch: cut.ddpw is damaged: ")
    assert f"the last {100 - round(100 * part)}% of the file is cut off" in line
    damage, _, rest = line.partition(";")
    assert damage.endswith("alerts may be missing")
    assert rest == " the rest is shown\n"
    assert all(damage in result.stderr for result in every)
    assert replayed.stderr == f"{damage}; only the part needed for this moment was read\n"
    steps = json.loads(exported.stdout)["steps"]
    # Replay shows the current step, the others show the last step that all ranks have finished.
    assert 0 <= step - steps["last"] <= 5
    assert int(csv.stdout.splitlines()[-1].split(",")[3]) == steps["last"]
    assert steps["count"] > 0
    assert compared.returncode == 0


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE alert SET event = x'007b' WHERE id = 1",
        "UPDATE alert SET event = 'text' WHERE id = 3",
        "UPDATE alert SET event = zeroblob(2000000) WHERE id = 3",
        "DELETE FROM alert WHERE id = 1",
        "DELETE FROM alert WHERE id = 2",
    ],
)
def test_where_the_events_of_an_alert_cannot_be_read_all_say_that_alerts_may_be_missing(
    in_process, whole, tmp_path, statement
):
    path = tmp_path / "hurt.ddpw"
    path.write_bytes(whole)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("INSERT INTO alert SELECT 3, attempt, at_ns, kind, event FROM alert WHERE id = 2")
        assert database.execute(statement).rowcount == 1
    every = read_by_all(in_process, path)

    said = "ddpwatch: hurt.ddpw is damaged: 1 part could not be read, alerts may be missing; "
    assert [result.returncode for result in every] == 5 * [0]
    assert [result.stderr.count(said) for result in every] == [1, 1, 1, 1, 2]
    exported = json.loads(every[2].stdout)
    assert (exported["damaged_parts"], exported["missing_frames"], exported["alerts_may_be_missing"]) == (1, 0, True)
    assert "Others may be missing: the recording is damaged." in (tmp_path / "hurt.html").read_text()


def test_what_is_lost_of_frames_says_nothing_of_alerts_and_what_is_whole_says_nothing(in_process, whole, tmp_path):
    path = tmp_path / "run.ddpw"
    path.write_bytes(whole)
    assert not any("damaged" in result.stderr for result in read_by_all(in_process, path))
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE block SET data = x'00ff' WHERE id = (SELECT max(id) FROM block WHERE shard >= 0)")
    every = read_by_all(in_process, path)

    assert all("frames are missing; " in result.stderr for result in every)
    assert not any("alerts" in result.stderr for result in every)
    exported = json.loads(every[2].stdout)
    assert exported["missing_frames"] > 0
    assert not exported["alerts_may_be_missing"]


def test_a_checkpoint_is_enough_for_the_figures_of_its_steps(in_process, whole, tmp_path):
    path = tmp_path / "thin.ddpw"
    path.write_bytes(whole)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE block SET data = x'00ff' WHERE shard >= 0")
    database.close()
    replayed, csv, exported, report, compared = every = read_by_all(in_process, path)

    assert [result.returncode for result in every] == 5 * [0]
    assert 0 <= json.loads(replayed.stdout)["step"] - json.loads(exported.stdout)["steps"]["last"] <= 5
    assert csv.stdout.count("\n") > 4 * 50
    assert "frames are missing" in report.stderr
    assert compared.stderr.count("is damaged") == 2

    with sqlite3.connect(path) as database:
        database.execute("UPDATE checkpoint SET data = x'00ff'")
    database.close()
    for result in read_by_all(in_process, path):
        assert result.returncode == 2
        assert "is damaged, and " in result.stderr
        assert result.stderr.count("\n") == 1


def test_compare_says_inside_noise_of_the_same_and_passes_the_gate(ddpwatch, recordings):
    result = ddpwatch(
        "compare", str(recordings / "two.ddpw"), str(recordings / "again.ddpw"), "--max-slowdown", "5%", COLUMNS="80"
    )

    assert result.returncode == 0
    assert result.stdout.startswith("· Within noise: ")
    assert result.stderr == "--max-slowdown passed: at most 5% slower\n"
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_compare_fails_the_gate_when_the_second_is_slower(ddpwatch, recordings):
    pair = str(recordings / "two.ddpw"), str(recordings / "slow.ddpw")

    result = ddpwatch("compare", *pair, "--max-slowdown", "5%", "--json", "--baseline", str(recordings / "one.ddpw"))

    assert result.returncode == 4
    assert "failed: at most 5% slower" in result.stderr
    found = json.loads(result.stdout)
    assert found["verdict"] == "slower"
    assert found["slowdown"]["value"] == pytest.approx(0.2, abs=0.02)
    assert (found["passed"], found["gate"]) == (False, "failed")
    assert 0.5 < found["b"]["scaling"]["efficiency"] < found["a"]["scaling"]["efficiency"] < 1.1
    assert ddpwatch("compare", *pair).returncode == 0, "without a gate nothing fails"


@pytest.mark.parametrize(("pair", "code"), [(("two", "crash"), 4), (("crash", "two"), 0)])
def test_compare_reports_a_bad_end_and_only_that_of_the_second_run_fails_the_gate(in_process, recordings, pair, code):
    paths = [str(recordings / f"{name}.ddpw") for name in pair]
    reported = in_process("compare", *paths, "--max-slowdown", "5%")
    found = json.loads(in_process("compare", *paths, "--max-slowdown", "5%", "--json").stdout)

    letter = "AB"[pair.index("crash")]
    assert reported.returncode == code
    assert f"✖ {letter} ended badly: rank 1 failed: ValueError: boom; rank 0 after it.\n" in reported.stdout
    assert ("--max-slowdown failed: B ended badly: rank 1 failed" in reported.stderr) == bool(code)
    assert found[letter.lower()]["ended_badly"] == "rank 1 failed: ValueError: boom; rank 0 after it"
    assert found["passed"] is not bool(code)
    assert in_process("compare", *paths).returncode == 0, "without a gate nothing fails"


def test_compare_reports_the_same_hung_steps_as_an_export(in_process, recordings):
    path = str(recordings / "stuck.ddpw")
    reported = in_process("compare", path, path, "--max-slowdown", "5%")
    found = json.loads(in_process("compare", path, path, "--json").stdout)
    exported = json.loads(in_process("export", path, "--to", "json", "-o", "-").stdout)

    assert reported.returncode == 0
    assert [f"{letter} hung for 6.0 s at step 30, waiting for rank 1" in reported.stdout for letter in "AB"] == [
        True,
        True,
    ]
    assert "passed: at most 5% slower; but B hung for 6.0 s at step 30" in reported.stderr
    assert found["a"]["stood_still"] == exported["steps"]["stood_still"] is not None


def test_compare_says_which_attempt_it_has_taken_and_how_to_take_another(in_process, recordings):
    pair = str(recordings / "two.ddpw"), str(recordings / "restart.ddpw")
    last, first = in_process("compare", *pair), in_process("compare", *pair, "--attempt-b", "1")

    assert last.stderr == "B is attempt 2, the last one; choose another with --attempt-b N\n"
    assert "restart.ddpw · attempt 2 of 2" in last.stdout
    assert "ended badly" not in last.stdout
    assert first.stderr == ""
    assert "B ended badly" in first.stdout


def test_the_report_shows_the_scaling_efficiency(in_process, recordings, tmp_path):
    page = tmp_path / "r.html"

    result = in_process(
        "report", str(recordings / "two.ddpw"), "-o", str(page), "--baseline", str(recordings / "one.ddpw")
    )

    assert (result.returncode, result.stderr) == (0, "")
    text = page.read_text()
    assert "Scaling against one process" in text
    rates = [
        json.loads(in_process("export", str(recordings / name), "--to", "json", "-o", "-").stdout)["steps"][
            "samples_per_s"
        ]
        for name in ("two.ddpw", "one.ddpw")
    ]
    assert f"2 ranks run {rates[0] / rates[1]:.2f}× as fast as one: " in text


def test_the_report_does_not_present_a_hung_step_as_slower_compute(in_process, recordings, tmp_path):
    page, one = tmp_path / "r.html", str(recordings / "one.ddpw")

    assert in_process("report", str(recordings / "stuck.ddpw"), "-o", str(page), "--baseline", one).returncode == 0
    assert "The losses include 6.0 s in hung steps, 29% of the job" in page.read_text()


def test_a_gate_on_too_few_steps_is_refused_and_not_passed(in_process, recordings):
    few = str(recordings / "few.ddpw")

    assert in_process("compare", few, few).returncode == 0
    result = in_process("compare", few, few, "--max-slowdown", "5%")
    assert result.returncode == 2
    assert "too few steps for --max-slowdown" in result.stderr


def test_the_exported_trace_is_valid(ddpwatch, recordings):
    schema = json.loads((Path(__file__).parents[1] / "outputs" / "trace-event.schema.json").read_text())
    result = ddpwatch("export", str(recordings / "one.ddpw"), "--to", "perfetto", "-o", "-", "--steps", "5-9")

    jsonschema.validate(json.loads(result.stdout), schema)
