"""The run directory: private or refused, checked for garbage, and cleaned without touching live runs."""

import os
import resource
import socket
import stat
import subprocess
import sys
import threading
import time

import pytest

from ddpwatch import rundir
from ddpwatch.errors import RunDirRefused
from tests.builders.fake_rank import make_run_file

DEAD, LIVE = "dead00000000", "11fe00000000"


@pytest.fixture
def gone():
    """The pid and start of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pid, created_s = process.pid, rundir.created_s(process.pid)
        process.communicate(b"\n")
    return {"pid": pid, "pid_created_s": created_s}


def put(base, run_id, world=2, **endpoint):
    """A run in the directory; by default its ranks are this process."""
    run = make_run_file(base, world, run_id=run_id)
    endpoints = [replace(each, **endpoint) for each in run.endpoints]
    run = replace(run, endpoints=endpoints)
    (base / run_id).mkdir(mode=0o700)
    rundir.write(base, run)
    return run


def replace(struct, **changed):
    return type(struct)(**{name: changed.get(name, getattr(struct, name)) for name in struct.__struct_fields__})


def test_a_written_run_file_is_read_back_and_private(run_dir):
    run = put(run_dir, LIVE)

    assert rundir.scan(run_dir) == ([run], [])
    assert stat.S_IMODE((run_dir / LIVE / "run.json").stat().st_mode) == 0o600
    assert [path.name for path in (run_dir / LIVE).iterdir()] == ["run.json"], "no draft stays behind"


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(run_dir, monkeypatch):
    run = put(run_dir, LIVE)
    monkeypatch.setattr(rundir.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        rundir.write(run_dir, run)

    assert [path.name for path in (run_dir / LIVE).iterdir()] == ["run.json"]
    assert rundir.scan(run_dir)[0] == [run]


def test_runs_are_listed_newest_first(run_dir):
    for run_id, started in (("aaaaaaaa", 1.0), ("bbbbbbbb", 3.0), ("cccccccc", 2.0)):
        rundir.write(run_dir, replace(put(run_dir, run_id), started_unix_s=started))

    assert [run.id for run in rundir.scan(run_dir)[0]] == ["bbbbbbbb", "cccccccc", "aaaaaaaa"]


def test_a_directory_that_does_not_exist_holds_no_runs(run_dir):
    assert rundir.scan(run_dir / "none") == ([], [])
    assert rundir.prune(run_dir / "none") == []


def test_a_new_base_is_private_whatever_the_umask(run_dir):
    before = os.umask(0)
    try:
        rundir.ensure_base(run_dir / "a" / "b")
    finally:
        os.umask(before)

    assert stat.S_IMODE((run_dir / "a" / "b").stat().st_mode) == 0o700


@pytest.mark.parametrize("kind", ["symlink", "file", "open to others", "somebody else's", "missing"])
def test_a_base_that_is_not_ours_alone_is_refused(run_dir, kind):
    base = run_dir / "base"
    if kind == "symlink":
        (run_dir / "real").mkdir(mode=0o700)
        base.symlink_to(run_dir / "real")
    if kind == "file":
        base.write_text("")
    if kind == "open to others":
        base.mkdir(mode=0o755)
    if kind == "somebody else's":
        base.mkdir(mode=0o700)
        if os.getuid():
            pytest.skip("only root can give a directory away")
        os.chown(base, 12345, 12345)

    with pytest.raises(RunDirRefused, match=str(base)):
        rundir.check_base(base)
    if kind != "missing":
        for act in (rundir.ensure_base, rundir.scan, rundir.prune):
            with pytest.raises(RunDirRefused, match=str(base)):
                act(base)


def test_a_base_that_cannot_be_made_is_refused_in_words(run_dir):
    (run_dir / "file").write_text("")

    with pytest.raises(RunDirRefused, match="set DDPWATCH_RUN_DIR"):
        rundir.ensure_base(run_dir / "file" / "base")
    assert rundir.scan(run_dir / "file" / "base") == ([], [])


def test_a_path_too_long_for_a_socket_is_refused_by_its_bytes(run_dir):
    room = rundir.MAX_SOCKET_PATH_BYTES - len(f"{run_dir}//{LIVE}/0.sock")
    fits = rundir.socket_path(run_dir / ("x" * room), LIVE, 0)

    assert len(os.fsencode(fits)) == rundir.MAX_SOCKET_PATH_BYTES
    fits.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(fits))
    for name in ("x" * (room + 1), "é" * (room // 2 + 1)):
        with pytest.raises(RunDirRefused, match="shorter"):
            rundir.socket_path(run_dir / name, LIVE, 0)


def test_garbage_is_named_and_skipped_and_stays(run_dir):
    run = put(run_dir, LIVE)
    (run_dir / "notes.txt").write_text("mine")
    (run_dir / "link").symlink_to(run_dir / LIVE)
    (run_dir / "dangling").symlink_to(run_dir / "nothing")
    texts = {
        "aaaaaaa1": b"{",
        "aaaaaaa2": b'{"schema": 1}',
        "aaaaaaa3": b"\xff\xfe\x00",
        "aaaaaaa4": b'{"schema": 99, "id": "aaaaaaa4", "name": "", "job": "", "attempt": 0, "world_size": 1, '
        b'"started_unix_s": 0, "endpoints": []}',
        "aaaaaaa5": (run_dir / LIVE / "run.json").read_bytes(),
        "aaaaaaa6": b" " * (17 << 20),
        "aaaaaaa7": b'{"x":' + b"[" * 100_000,
    }
    for name, text in texts.items():
        (run_dir / name).mkdir()
        (run_dir / name / "run.json").write_bytes(text)
    (run_dir / "aaaaaaa8" / "run.json").mkdir(parents=True)
    (run_dir / "aaaaaaa9").mkdir()
    os.mkfifo(run_dir / "aaaaaaa9" / "run.json")  # opening it would wait for a writer
    before = sorted(run_dir.iterdir())

    runs, garbage = rundir.scan(run_dir)

    assert runs == [run]
    reasons = {piece.path.relative_to(run_dir).parts[0]: piece.reason for piece in garbage}
    assert reasons.keys() == {path.name for path in before} - {LIVE}
    assert "newer ddpwatch" in reasons["aaaaaaa4"]
    assert reasons["aaaaaaa5"] == f"belongs to run {LIVE}"
    assert reasons["aaaaaaa6"] == "is too large"
    assert reasons["aaaaaaa8"] == reasons["aaaaaaa9"] == "is not a regular file"
    assert rundir.prune(run_dir) == []
    assert sorted(run_dir.iterdir()) == before


def test_prune_removes_dead_runs_and_keeps_live_ones(run_dir, gone):
    put(run_dir, DEAD, **gone)
    live = put(run_dir, LIVE)

    assert rundir.prune(run_dir) == [DEAD]
    assert rundir.scan(run_dir) == ([live], [])
    assert [path.name for path in run_dir.iterdir()] == [LIVE]


def test_one_living_rank_keeps_the_run(run_dir, gone):
    run = put(run_dir, LIVE)
    rundir.write(run_dir, replace(run, endpoints=[replace(run.endpoints[0], **gone), run.endpoints[1]]))

    assert rundir.prune(run_dir) == []


def test_a_reused_pid_is_recognized_by_the_start_of_the_process(run_dir):
    node = rundir.node_id()
    (own, _) = make_run_file(run_dir, 2).endpoints

    assert rundir.alive(own, node)
    assert not rundir.alive(replace(own, pid_created_s=own.pid_created_s - 1), node)
    put(run_dir, DEAD, pid_created_s=own.pid_created_s - 1)
    assert rundir.prune(run_dir) == [DEAD]


def test_the_start_of_a_process_does_not_depend_on_the_clock_on_the_wall(run_dir):
    """It would move when the clock is set, and a live run would look dead."""
    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)

    assert 0 < rundir.created_s(os.getpid()) <= uptime_s


def test_a_process_with_brackets_in_its_name_is_read_right():
    name = "a) Z 0 (b"
    code = f"import ctypes; ctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        created_s = rundir.created_s(process.pid)
        process.communicate(b"\n")

    assert created_s >= rundir.created_s(os.getpid())


def test_a_viewer_without_descriptors_calls_no_rank_dead(run_dir):
    own = make_run_file(run_dir, 1).endpoints[0]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    node = rundir.node_id()
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        lives = rundir.alive(own, node)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert lives


def test_sockets_of_ranks_on_other_nodes_keep_a_run(run_dir, gone):
    """Each node has a directory of its own, unless they share one over the network."""
    run = put(run_dir, DEAD, **gone)
    rundir.write(run_dir, replace(run, endpoints=[run.endpoints[0], replace(run.endpoints[1], node="elsewhere")]))
    (run_dir / DEAD / "1.sock").touch()
    assert rundir.prune(run_dir) == []

    (run_dir / DEAD / "1.sock").unlink()
    assert rundir.prune(run_dir) == [DEAD]


def test_a_run_with_no_rank_on_this_node_is_not_ours_to_remove(run_dir, gone):
    put(run_dir, DEAD, **gone, node="elsewhere")

    assert rundir.prune(run_dir) == []


def test_a_directory_without_a_file_is_a_beginning_when_young_and_an_orphan_when_old(run_dir):
    for name in ("beginning", "orphan", "not-ours"):
        (run_dir / name).mkdir()
        (run_dir / name / "0.sock").touch()
    (run_dir / "not-ours" / "thesis.tex").touch()
    old = time.time() - 2 * rundir.ORPHAN_AGE_S
    for name in ("orphan", "not-ours"):
        os.utime(run_dir / name, (old, old))

    assert [piece.path.name for piece in rundir.scan(run_dir)[1]] == ["not-ours", "orphan"]
    assert rundir.prune(run_dir) == ["orphan"]
    assert sorted(path.name for path in run_dir.iterdir()) == ["beginning", "not-ours"]


def test_the_last_rank_to_leave_removes_the_directory(run_dir):
    put(run_dir, LIVE)
    paths = [rundir.socket_path(run_dir, LIVE, rank) for rank in range(2)]
    for path in paths:
        path.touch()

    rundir.leave(paths[0])
    assert [path.name for path in sorted((run_dir / LIVE).iterdir())] == ["1.sock", "run.json"]
    rundir.leave(paths[1])
    assert not list(run_dir.iterdir())
    rundir.leave(paths[1])  # somebody else was faster


def test_scanning_and_pruning_tolerate_concurrent_pruning(run_dir, gone):
    """All ranks of a new run find the same stale ones at the same moment."""
    failures = []

    def tidy():
        try:
            while not done.is_set():
                rundir.prune(run_dir)
                rundir.scan(run_dir)
        except Exception as error:
            failures.append(error)

    done = threading.Event()
    threads = [threading.Thread(target=tidy) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for k in range(100):
            (run_dir / f"{k:08x}").mkdir()
            run = make_run_file(run_dir, 1, run_id=f"{k:08x}")
            endpoints = [replace(run.endpoints[0], **gone)]
            rundir.write(run_dir, replace(run, endpoints=endpoints))
    finally:
        done.set()
        for thread in threads:
            thread.join()

    assert not failures
    rundir.prune(run_dir)
    assert not list(run_dir.iterdir())


def test_last_words_stay_as_long_as_the_run_and_go_with_it(tmp_path):
    run = tmp_path / "run"
    run.mkdir(0o700)
    first, second = run / "0.sock", run / "1.sock"
    for path in (first, second, run / rundir.RUN_FILE):
        path.touch()

    rundir.leave(first, b"goodbye")
    assert rundir.last_words(first) == b"goodbye"
    assert stat.S_IMODE((run / "0.words").stat().st_mode) == 0o600
    assert rundir.last_words(second) == b""
    rundir.leave(second)
    assert not run.exists()


def test_last_words_that_are_no_file_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "0.words")

    assert rundir.last_words(tmp_path / "0.sock") == b""
