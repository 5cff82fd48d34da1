"""What a killed demo leaves behind is removed by the next one, and nothing else is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ddpwatch import rundir
from ddpwatch.cli import _demo_processes
from ddpwatch.cli._demo_processes import DEMO_DIR_PREFIX, OWNER, remove_stale_dirs


@pytest.fixture
def ended():
    """A process that has ended: its pid and when it started."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = {"pid": child.pid, "created_s": rundir.created_s(child.pid), "node": rundir.node_id()}
    child.kill()
    child.communicate()
    return owner


def living():
    return {"pid": os.getpid(), "created_s": rundir.created_s(os.getpid()), "node": rundir.node_id()}


def make_demo_dir(folder, owner, name="abc"):
    place = folder / f"{DEMO_DIR_PREFIX}{name}"
    (place / "run").mkdir(parents=True)
    (place / "log").write_text("a line")
    if owner is not None:
        (place / OWNER).write_text(owner if isinstance(owner, str) else json.dumps(owner))
    return place


def test_the_place_of_an_owner_that_has_ended_is_removed(tmp_path, ended):
    place = make_demo_dir(tmp_path, ended)
    remove_stale_dirs(tmp_path)

    assert not place.exists()


def test_a_later_process_with_the_same_pid_is_not_the_owner(tmp_path):
    place = make_demo_dir(tmp_path, {**living(), "created_s": living()["created_s"] - 1})
    remove_stale_dirs(tmp_path)

    assert not place.exists()


def test_the_place_of_a_live_process_stays(tmp_path):
    place = make_demo_dir(tmp_path, living())
    remove_stale_dirs(tmp_path)

    assert (place / "log").exists()


@pytest.mark.parametrize("owner", [None, "", "{", "[]", "{}", '{"pid": "x", "created_s": 1, "node": "y"}'])
def test_one_whose_owner_is_not_known_stays(tmp_path, owner):
    place = make_demo_dir(tmp_path, owner)
    remove_stale_dirs(tmp_path)

    assert (place / "log").exists()


def test_one_of_another_host_stays(tmp_path, ended):
    place = make_demo_dir(tmp_path, {**ended, "node": "elsewhere"})
    remove_stale_dirs(tmp_path)

    assert (place / "log").exists()


def test_a_link_is_not_followed(tmp_path, ended):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    kept = make_demo_dir(elsewhere, ended)
    (tmp_path / f"{DEMO_DIR_PREFIX}link").symlink_to(kept)
    remove_stale_dirs(tmp_path)

    assert (kept / "log").exists()


def test_one_of_another_user_stays(tmp_path, ended, monkeypatch):
    place = make_demo_dir(tmp_path, ended)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    remove_stale_dirs(tmp_path)

    assert (place / "log").exists()


def test_a_place_is_signed_as_soon_as_it_is_made(tmp_path):
    place = _demo_processes.make_demo_dir(tmp_path)

    assert json.loads((place / OWNER).read_text()) == living()
    remove_stale_dirs(tmp_path)
    assert place.exists()
