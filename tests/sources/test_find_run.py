"""Selection of a run, and errors when none or several match."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ddpwatch import rundir
from ddpwatch.errors import NoSuchRun, RunDirRefused, UsageError
from ddpwatch.sources.find_run import alive_ranks, find, live_runs, read_again, skipped_places
from tests.builders.fake_rank import make_run_file


def start(base, run_id, name="train", **changed):
    """Create the files of a live run, without sockets."""
    run = make_run_file(base, 2, run_id=run_id, name=name, **changed)
    (base / run_id).mkdir()
    rundir.write(base, run)
    return run


@pytest.fixture
def dead_pid_file(run_dir):
    """The run file of a process that has since ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        run = start(run_dir, "dead0000dead0000", "gone", pid=process.pid)
        assert alive_ranks(run) == {0, 1}
        process.stdin.close()
        process.wait(30)
    return run


@pytest.mark.parametrize("selector", [None, "ab12cd34", "ab", "ab12cd34ab12cd34", "train"])
def test_the_only_run_is_found_by_id_prefix_name_or_nothing(run_dir, selector):
    run = start(run_dir, "ab12cd34ab12cd34")

    assert find(selector) == run


def test_a_run_is_found_by_the_path_of_its_file_or_directory(run_dir, tmp_path):
    run = start(run_dir, "ab12cd34ab12cd34")
    ticket = tmp_path / "ticket.json"
    ticket.write_bytes((run_dir / run.id / rundir.RUN_FILE).read_bytes())

    assert find(str(run_dir / run.id / rundir.RUN_FILE)) == run
    assert find(str(run_dir / run.id)) == run
    assert find(str(ticket)) == run


def test_a_name_may_have_a_slash_in_it_unless_it_is_a_path(run_dir, tmp_path, monkeypatch):
    run = start(run_dir, "ab12cd34ab12cd34", "meta/llama")
    monkeypatch.chdir(tmp_path)

    assert find("meta/llama") == run
    with pytest.raises(NoSuchRun, match="no run matches 'meta/other'; live runs: ab12cd34"):
        find("meta/other")
    (tmp_path / "meta" / "llama").mkdir(parents=True)
    for path in ("meta/llama", "./meta/llama"):
        with pytest.raises(NoSuchRun, match=r"no run at meta/llama: the directory has no run\.json"):
            find(path)


@pytest.mark.parametrize("selector", [None, "train", "ab"])
def test_several_matches_are_refused(run_dir, selector):
    start(run_dir, "ab12cd34ab12cd34")
    start(run_dir, "ab99cd34ab12cd34")

    with pytest.raises(UsageError) as refused:
        find(selector)
    assert refused.value.exit_code == 2
    assert "ab12cd34 (train)" in str(refused.value)
    assert "ab99cd34 (train)" in str(refused.value)


@pytest.mark.parametrize(
    ("names", "selector", "by"), [(("one", "two"), None, "id or name"), (("one", "two"), "ab", "id or name"),
                                  (("one", "one"), None, "id"), (("one", "one"), "one", "id")],
)  # fmt: skip
def test_several_matches_name_the_distinguishing_selector(run_dir, names, selector, by):
    for number, name in enumerate(names):
        start(run_dir, f"ab{number}2cd34ab12cd34", name)

    with pytest.raises(UsageError, match=f"; choose one by its {by}$"):
        find(selector)


def test_a_whole_id_wins_over_a_name_that_looks_like_it(run_dir):
    run = start(run_dir, "ab12cd34")
    start(run_dir, "cd34ab12", name="ab12cd34")

    assert find("ab12cd34") == run


@pytest.mark.parametrize("selector", ["nope", "", "ab12cd35"])
def test_an_unknown_run_is_answered_with_what_is_running(run_dir, selector):
    start(run_dir, "ab12cd34ab12cd34")

    with pytest.raises(NoSuchRun) as missing:
        find(selector)
    assert missing.value.exit_code == 3
    assert str(missing.value) == f"no run matches {selector!r}; live runs: ab12cd34 (train)"


@pytest.mark.parametrize("selector", [None, "nope"])
def test_no_run_found_names_where_it_looked_and_the_likely_reasons_in_order(run_dir, selector):
    with pytest.raises(NoSuchRun) as missing:
        find(selector)

    unmatched = "" if selector is None else "no run matches 'nope': "
    where = f"no run found in {run_dir} (host {socket.gethostname()}, uid {os.getuid()})"
    assert str(missing.value) == unmatched + where
    host, run_directory, install, exited = missing.value.hints
    assert "Another host or user?" in host
    assert "DDPWATCH_RUN_DIR" in run_directory
    assert "ddpwatch.agent.install(model)" in install
    assert "ddpwatch postmortem LOG" in exited


def test_a_run_directory_that_does_not_exist_yet_holds_nothing(run_dir, monkeypatch):
    monkeypatch.setenv("DDPWATCH_RUN_DIR", str(run_dir / "later"))

    assert live_runs() == []


def test_a_stale_run_is_pruned(run_dir, dead_pid_file):
    alive = start(run_dir, "ab12cd34ab12cd34")

    assert live_runs() == [alive]
    assert not (run_dir / dead_pid_file.id).exists()


def test_a_ticket_of_an_ended_run_is_refused(run_dir, dead_pid_file):
    with pytest.raises(NoSuchRun, match=r"has exited; `ddpwatch postmortem LOG"):
        find(str(run_dir / dead_pid_file.id))


def test_a_missing_or_invalid_ticket_is_refused_by_name(tmp_path):
    (tmp_path / "bad.json").write_text("{}")

    (tmp_path / "empty.json").touch()

    with pytest.raises(NoSuchRun, match="No such file"):
        find(str(tmp_path / "none.json"))
    with pytest.raises(NoSuchRun, match=r"no run at .*: the directory has no run\.json"):
        find(str(tmp_path))
    with pytest.raises(UsageError, match=r"empty\.json is not a ticket: it is empty"):
        find(str(tmp_path / "empty.json"))
    (tmp_path / "slow.ddpw").write_bytes(b"SQLite format 3\0")
    with pytest.raises(UsageError, match=r"slow\.ddpw is a recording: ddpwatch replay .*slow\.ddpw$"):
        find(str(tmp_path / "slow.ddpw"))
    with pytest.raises(UsageError, match=r"bad\.json is not a ticket: it cannot be read"):
        find(str(tmp_path / "bad.json"))


def test_garbage_in_the_run_directory_does_not_hide_the_runs(run_dir):
    run = start(run_dir, "ab12cd34ab12cd34")
    (run_dir / "file").write_text("x")
    for name, text in {
        "bin": b"\x80\x00\xff",
        "json": b"{}",
        "lies": (run_dir / run.id / "run.json").read_bytes(),
    }.items():
        (run_dir / name).mkdir()
        (run_dir / name / rundir.RUN_FILE).write_bytes(text)
    (run_dir / "loop").symlink_to(run_dir)

    assert live_runs() == [run]


def test_newest_runs_come_first(run_dir):
    start(run_dir, "aaaaaaaa", started_unix_s=1.0)
    start(run_dir, "bbbbbbbb", started_unix_s=2.0)

    assert [run.id for run in live_runs()] == ["bbbbbbbb", "aaaaaaaa"]


def test_many_runs_are_not_all_listed(run_dir):
    for number in range(12):
        start(run_dir, f"{number:08x}")

    with pytest.raises(UsageError, match="and 4 more"):
        find(None)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707])
def test_a_run_directory_open_to_others_is_refused(run_dir, mode):
    run_dir.chmod(mode)

    with pytest.raises(RunDirRefused, match="chmod 700"):
        find(None)


@pytest.fixture
def default_places(monkeypatch, tmp_path):
    """The default run directories of a shell with XDG_RUNTIME_DIR, and of a job without it; neither exists yet."""
    monkeypatch.delenv("DDPWATCH_RUN_DIR", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return [tmp_path / "runtime" / "ddpwatch", tmp_path / f"ddpwatch-{os.getuid()}"]


def test_runs_in_all_default_places_are_listed_and_read_again(default_places):
    runs = []
    for number, place in enumerate(default_places):
        place.mkdir(mode=0o700, parents=True)
        runs.append(start(place, f"ab{number}2cd34", started_unix_s=float(number)))

    assert live_runs() == runs[::-1]
    assert [read_again(run) for run in runs] == runs
    assert find("ab12cd34") == runs[1]


def test_stale_runs_are_pruned_in_all_default_places(default_places):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        for number, place in enumerate(default_places):
            place.mkdir(mode=0o700, parents=True)
            start(place, f"dead{number}000", pid=process.pid)

    assert live_runs() == []
    assert [list(place.iterdir()) for place in default_places] == [[], []]


@pytest.mark.parametrize("hostile", [0, 1])
def test_a_default_place_open_to_others_is_skipped_with_a_warning(default_places, hostile):
    for place in default_places:
        place.mkdir(mode=0o700, parents=True)
    start(default_places[hostile], "bad0cd34")
    default_places[hostile].chmod(0o755)
    run = start(default_places[1 - hostile], "ab12cd34")

    assert live_runs() == [run]
    assert read_again(run) == run
    (warning,) = skipped_places()
    assert warning.startswith(f"skipped: the run directory {default_places[hostile]} is open to other users")


def test_only_the_place_that_the_agent_writes_to_is_an_error_if_refused(default_places):
    for place in default_places:
        place.mkdir(mode=0o700, parents=True)
    default_places[1].chmod(0o755)
    with pytest.raises(NoSuchRun) as missing:
        find(None)

    assert all(str(place) in str(missing.value) for place in default_places)
    assert missing.value.hints[0].startswith(f"skipped: the run directory {default_places[1]}")
    default_places[0].chmod(0o755)
    with pytest.raises(RunDirRefused, match=str(default_places[0])):
        find(None)


def test_a_chosen_run_directory_is_the_only_place(default_places, run_dir):
    assert rundir.places() == [run_dir]


def test_without_xdg_runtime_dir_the_usual_one_is_searched_too(default_places, monkeypatch):
    assert Path(f"/run/user/{os.getuid()}/ddpwatch") in rundir.places()
    monkeypatch.delenv("XDG_RUNTIME_DIR")

    assert rundir.places() == [default_places[1], Path(f"/run/user/{os.getuid()}/ddpwatch")]
    assert rundir.base_path() == default_places[1]


def test_a_run_directory_that_is_a_file_is_refused(run_dir, monkeypatch):
    (run_dir / "file").write_text("")
    monkeypatch.setenv("DDPWATCH_RUN_DIR", str(run_dir / "file"))

    with pytest.raises(RunDirRefused):
        live_runs()


def test_ranks_on_another_node_are_assumed_alive(run_dir):
    run = start(run_dir, "ab12cd34ab12cd34")
    elsewhere = [rundir.Endpoint(0, "node-b", "other-node", 1, 0.0, "ipc:///nowhere")]

    assert alive_ranks(rundir.RunFile(1, run.id, "x", "", 0, 1, 0.0, elsewhere)) == {0}
    assert os.getpid() == run.endpoints[0].pid
