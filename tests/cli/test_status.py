"""`ddpwatch status` and `ddpwatch runs` against ranks on real sockets."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddpwatch import rundir
from tests.builders.fake_rank import FakeRun, make_run_file

ESCAPE = "\x1b"


@pytest.fixture
def slow_run(run_dir):
    """Four ranks, 60 steps in; rank 2 is slow in backward."""
    with FakeRun(run_dir, 4, name="resnet50") as run:
        run.train(0, 60, slow_rank=2)
        yield run


def test_status_names_the_slow_rank(ddpwatch, slow_run):
    done = ddpwatch("status", COLUMNS="80")

    assert (done.returncode, done.stderr) == (0, "")
    assert "resnet50 · gloo · 4 ranks on 1 host · step 60 · batch 128" in done.stdout
    assert "all-reduce    24% = wire 5% + waiting 19%  ▲ over 10%" in done.stdout
    assert "▲ straggler   rank 2 slow in backward: 26.0 ms vs 16.0 ms on the others" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("   2 ")]
    assert "▲38.0" in row
    assert row.endswith("▲ slow")
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert ESCAPE not in done.stdout


def test_json_is_one_object(ddpwatch, slow_run):
    done = ddpwatch("status", "resnet50", "--json")
    status = json.loads(done.stdout)

    assert (done.returncode, done.stderr) == (0, "")
    assert status["schema"] == 1
    assert [rank["state"] for rank in status["ranks"]] == ["ok"] * 4
    assert status["ranks"][2]["wait_ms"] == 0.0
    assert status["ranks"][0]["wait_ms"] == 10.0
    (straggler,) = [alert for alert in status["alerts"] if alert["rule"] == "straggler"]
    assert (straggler["ranks"], straggler["phase"], straggler["open"]) == ([2], "backward", True)


def test_a_rank_that_does_not_answer_is_missing_and_the_others_are_shown(ddpwatch, run_dir):
    with FakeRun(run_dir, 2, rank1={"answers": False, "beats": False}) as run:
        run.ranks[0].finish()
        done = ddpwatch("status", "--json", "--timeout", "0.5")

    assert done.returncode == 0
    assert [rank["state"] for rank in json.loads(done.stdout)["ranks"]] == ["ok", "missing"]


def test_following_appends_blocks_and_ends_with_the_run(start_ddpwatch, slow_run):
    child = start_ddpwatch("status", "--every", "0.2")
    first = [child.stdout.readline() for _ in range(5)]
    slow_run.train(60, 60, slow_rank=2)
    while "step 120" not in (line := child.stdout.readline()):
        assert line, "it ended before it showed the new steps"
    for rank in slow_run.ranks:
        rank.say_bye()
    rest = child.stdout.read()

    assert "resnet50" in first[0]
    assert child.wait(30) == 0
    assert "■ ended" in rest
    assert rest.splitlines()[-1] == "run ab12cd34 has ended: all ranks have exited"
    assert child.stderr.read() == ""


def test_following_in_json_prints_one_object_a_line(start_ddpwatch, slow_run):
    child = start_ddpwatch("status", "--every", "0.2", "--json")
    states = [json.loads(child.stdout.readline())["run"]["state"] for _ in range(3)]
    for rank in slow_run.ranks:
        rank.say_bye()
    last = [json.loads(line) for line in child.stdout.read().splitlines()][-1]

    assert states == ["live"] * 3
    assert last["run"]["state"] == "ended"
    assert child.wait(30) == 0
    assert "has ended" in child.stderr.read()


def test_following_ends_when_the_processes_are_gone(start_ddpwatch, run_dir):
    """After `kill -9` no goodbye is sent."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        run = make_run_file(run_dir, 1, pid=victim.pid)
        (run_dir / run.id).mkdir()
        rundir.write(run_dir, run)
        # A rank that is killed leaves its socket behind.
        Path(run.endpoints[0].address.removeprefix("ipc://")).touch()
        child = start_ddpwatch("status", "--every", "0.2", "--timeout", "0.2")
        assert "no heartbeat yet" in child.stdout.readline()
        victim.kill()
        victim.wait(30)
        rest = child.stdout.read()

    assert child.wait(30) == 0
    assert rest.splitlines()[-1] == "run ab12cd34 has ended: its processes are gone"


def test_control_c_is_quiet(start_ddpwatch, slow_run):
    child = start_ddpwatch("status", "--every", "0.2")
    assert child.stdout.readline()
    child.send_signal(signal.SIGINT)

    assert child.wait(30) == 130
    assert child.stderr.read() == ""


def test_a_terminal_gets_color_unless_it_is_unwanted(ddpwatch_on_a_terminal, slow_run):
    exit_code, coloured = ddpwatch_on_a_terminal("status")
    _, plain = ddpwatch_on_a_terminal("status", NO_COLOR="1")

    assert exit_code == 0
    assert f"{ESCAPE}[33m" in coloured
    assert "resnet50" in plain
    assert ESCAPE not in plain


def test_following_on_a_terminal_redraws_in_place(ddpwatch_on_a_terminal, slow_run):
    goodbyes = []

    def say_goodbye_after_three_looks(written):
        if written.count(b"\x1b[H") >= 3 and not goodbyes:
            goodbyes.extend(rank.say_bye() for rank in slow_run.ranks)

    exit_code, written = ddpwatch_on_a_terminal(
        "status", "--every", "0.1", monitor=say_goodbye_after_three_looks, NO_COLOR="1"
    )
    screens = written.split(f"{ESCAPE}[H")

    assert exit_code == 0
    assert len(screens) > 3
    assert written.count(f"{ESCAPE}[2J") == 1, "cleared once, then drawn over"
    assert all(len(screen.splitlines()) <= 30 for screen in screens)
    assert "has ended" in screens[-1]


def test_hostile_names_reach_neither_screen_nor_list(ddpwatch, run_dir):
    with FakeRun(run_dir, 1, name="\x1b]0;owned\x07\x1b[31mevil\u202e") as run:
        run.train(0, 5)
        shown = ddpwatch("status").stdout + ddpwatch("runs").stdout

    assert shown.count("evil") == 2
    assert not {ESCAPE, "\x07", "\u202e"} & set(shown)


def test_runs_are_listed(ddpwatch, slow_run):
    done = ddpwatch("runs")
    heading, line = done.stdout.splitlines()

    assert heading.split() == ["ID", "NAME", "JOB", "ATTEMPT", "RANKS", "HOST", "AGE"]
    assert line.split()[:6] == ["ab12cd34", "resnet50", "job", "0", "4", "node-a"]


def test_runs_as_json(ddpwatch, slow_run):
    (run,) = json.loads(ddpwatch("runs", "--json").stdout)

    assert run.pop("age_s") >= 0
    assert run == {
        "id": slow_run.run_id,
        "name": "resnet50",
        "job": "job",
        "attempt": 0,
        "world_size": 4,
        "ranks_alive": 4,
        "host": "node-a",
        "hosts": 1,
    }


def test_no_runs_is_no_error(ddpwatch):
    assert ddpwatch("runs", "--json").stdout == "[]\n"
    done = ddpwatch("runs")
    assert done.returncode == 0
    assert done.stdout.startswith("no run found in ")
    assert "3. No ddpwatch.agent.install(model) in the script" in done.stdout
