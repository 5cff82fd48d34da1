"""`ddpwatch replay` without a terminal and with one, and `ddpwatch attach --record`: real processes."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest

from ddpwatch.cli import main
from ddpwatch.recording.reader import Recording
from ddpwatch.session.playback import Playback
from tests.builders.fake_rank import FakeRun, make_beat, make_hello, make_snap, make_step
from tests.builders.kept_runs import tape
from tests.builders.recordings import frame, record
from tests.builders.terminal import Terminal
from tests.cli.cli_child import GIVE_UP_S, child_environment


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tape") / "slow.ddpw"
    tape(path, "slow-backward", "healthy")
    return path


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def ddpwatch(capsys, *arguments):
    code = main.run(["replay", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_without_a_terminal_the_status_is_printed_as_it_was_at_a_moment_or_at_the_end(path, capsys):
    code, out, err = ddpwatch(capsys, path, "--at", "14:13:30")
    assert (code, err) == (0, "")
    assert "recorded status at 2026-09-21 14:13:30, attempt 1 of 2" in out
    assert "rank 2 slow in backward" in out
    code, out, _ = ddpwatch(capsys, path)
    assert code == 0
    assert "attempt 2 of 2" in out
    assert "ended" in out


def test_at_the_end_of_a_run_with_short_steps_there_are_figures_though_a_rank_was_behind(tmp_path, capsys):
    """The last checkpoint has fewer steps per rank than the killed rank is behind."""
    world, ends = 2, (1535, 1600)
    reported = [
        frame(make_snap(rank, 1, [make_step(0)], make_hello(rank, 1, world_size=world))) for rank in range(world)
    ]
    reported += [
        frame(make_beat(rank, 10 + index, step=index + 1, steps=[make_step(index)]), index * 2_000_000)
        for index in range(1, max(ends))
        for rank in range(world)
        if index < ends[rank]
    ]
    file = record(tmp_path / "short.ddpw", reported, world, finished=True)
    code, out, _ = ddpwatch(capsys, file)

    assert code == 0
    assert "medians of 50 steps" in out
    assert "unknown" not in out


def test_without_a_terminal_it_does_not_read_steps_for_charts_that_are_not_printed(path, capsys, monkeypatch):
    whole = Playback.fill_figures

    def fill_all(playback):
        whole(playback)
        while playback.filling:
            playback.fill(1.0)

    monkeypatch.setattr(Playback, "fill_figures", fill_all)
    filled = ddpwatch(capsys, path)
    monkeypatch.setattr(Playback, "fill_figures", whole)
    for reader in ("backfill_steps", "backfill_gpus"):
        monkeypatch.setattr(f"ddpwatch.session.playback.{reader}", untouched)

    assert ddpwatch(capsys, path) == filled


def untouched(*_):
    raise AssertionError("it was read")
    yield


def test_an_alert_whose_frames_are_deleted_is_reported(path, tmp_path, capsys):
    """As after `--keep`: frames are deleted, alerts stay."""
    kept = tmp_path / "kept.ddpw"
    kept.write_bytes(path.read_bytes())
    code, _, err = ddpwatch(capsys, kept, "--json", "--from-alert", "1")
    assert (code, err) == (0, "")
    with closing(sqlite3.connect(kept)) as database, database:
        (at_ns,) = database.execute("SELECT min(at_ns) FROM alert WHERE kind = 'opened'").fetchone()
        for table, column in (("block", "last_ns"), ("checkpoint", "at_ns")):
            database.execute(f"DELETE FROM {table} WHERE {column} <= ?", (at_ns + 2_000_000_000,))

    code, out, err = ddpwatch(capsys, kept, "--json", "--from-alert", "1")
    assert code == 0
    assert json.loads(out)["ranks"]
    assert err == "ddpwatch: The frames of alert 1 were deleted by --keep or --max; this is the first moment left.\n"


def test_json_is_the_object_of_the_status(path, capsys):
    code, out, _ = ddpwatch(capsys, path, "--json", "--from-alert", "2")
    reported = json.loads(out)
    assert code == 0
    assert reported["schema"] == 1
    assert reported["run"]["id"] == "5ec0de5ec0de5ec0"
    assert len(reported["ranks"]) == 4
    # At the moment it was opened, not some seconds before.
    assert any(alert["since"] == max(each["since"] for each in reported["alerts"]) for alert in reported["alerts"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--at", "03:41"), "--at 03:41: nothing was recorded at 03:41; the recording is from 2026-09-21 14:13:20 to"),
        (("--at", "soon"), "'soon' is not a moment such as 03:41"),
        (("--from-alert", "9"), "--from-alert 9: only 3 alerts in the recording, from 2026-09-21 14:13:20 to"),
        (("--speed", "nan"), "--speed nan is not between 0.01 and 1000"),
        (("--speed", "0"), "--speed 0 is not between"),
        (("--at", "50%", "--from-alert", "1"), "use one of them"),
        (("--theme", "nosuch"), "unknown theme 'nosuch'; choose from: "),
    ],
)
def test_what_makes_no_sense_is_one_line(path, capsys, arguments, said):
    code, out, err = ddpwatch(capsys, path, *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_what_is_no_recording_is_one_line(tmp_path, capsys):
    (tmp_path / "text").write_text("hello, this is no recording")
    (tmp_path / "empty").touch()
    for name, code in (("text", 2), ("empty", 3), ("nothing", 3), (".", 2)):
        found, out, err = ddpwatch(capsys, tmp_path / name)
        assert (found, out) == (code, ""), name
        assert len(err.splitlines()) == 1


def test_on_a_terminal_it_is_played_and_left(path):
    command = [sys.executable, "-m", "ddpwatch", "replay", str(path), "--at", "+7s", "--speed", "0.1"]
    with Terminal(command, 80, 24, env=child_environment(TZ="UTC")) as terminal:
        terminal.wait_for("REPLAY", GIVE_UP_S)
        terminal.wait_for("▶ ×0.1", GIVE_UP_S)
        terminal.send("space")
        terminal.wait_for("‖ ×0.1", GIVE_UP_S)
        terminal.send("end")
        terminal.wait_for("■ ENDED", GIVE_UP_S)
        terminal.send("q")
        assert terminal.wait_for_end(GIVE_UP_S) == 0


def test_attach_records_what_it_shows_and_the_restart_into_the_same_file(run_dir, tmp_path):
    file = tmp_path / "seen.ddpw"
    command = [sys.executable, "-m", "ddpwatch", "attach", "--record", str(file), "--max", "1GB"]
    with Terminal(command, 120, 40, env=child_environment(DDPWATCH_RUN_DIR=str(run_dir))) as terminal:
        with FakeRun(run_dir, 2) as run:
            run.train(0, 80, slow_rank=1)
            terminal.wait_for("◉ REC", GIVE_UP_S)
            terminal.wait_for("straggler: rank 1", GIVE_UP_S)
            for rank in run.ranks:
                rank.say_bye()
            terminal.wait_for("■ ENDED", GIVE_UP_S)
        with FakeRun(run_dir, 2, run_id="ffffcd34ab12cd34") as again:
            again.train(0, 30)
            terminal.wait_for("● LIVE", GIVE_UP_S)
            terminal.wait_for("step 30", GIVE_UP_S)
            terminal.send("q")
            assert terminal.wait_for_end(GIVE_UP_S) == 0
    with closing(Recording(file)) as recorded:
        assert [attempt.run.id for attempt in recorded.attempts] == ["ab12cd34ab12cd34", "ffffcd34ab12cd34"]
        assert any(row.event.alert.finding.rule == "straggler" for row in recorded.alerts())
    reported = subprocess.run(
        [sys.executable, "-m", "ddpwatch", "replay", str(file), "--json"],
        capture_output=True, check=True, timeout=GIVE_UP_S, env=child_environment(),
    )  # fmt: skip
    assert json.loads(reported.stdout)["step"] == 30


def test_keep_and_max_need_a_recording(capsys):
    assert main.run(["attach", "--keep", "1h"]) == 2
    assert "--record FILE" in capsys.readouterr().err
