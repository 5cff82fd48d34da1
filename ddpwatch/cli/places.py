"""Directories in which demos keep what they need: made, signed, and cleared away when their owner was killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from ddpwatch import rundir

PLACE: Final = "ddpw-demo-"
"""How their names begin."""
OWNER: Final = "owner.json"
"""In it: the process that the directory belongs to, and when that started."""
MOST_OWNER_BYTES: Final = 4096


def make_place(folder: Path | None = None) -> Path:
    """A directory of our own, which says whose it is to a later demo that finds it."""
    place = Path(tempfile.mkdtemp(prefix=PLACE, dir=folder))
    owner = {"pid": os.getpid(), "created_s": rundir.created_s(os.getpid()), "node": rundir.node_id()}
    (place / OWNER).write_text(json.dumps(owner), encoding="utf-8")
    return place


def clear_up(folder: Path | None = None) -> None:
    """Remove the places of demos that were killed. Only our own ones, and only if their owner has surely ended: one
    that is not signed, or was signed on another host, stays.
    """
    for place in (folder or Path(tempfile.gettempdir())).glob(f"{PLACE}*"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if _is_left_over(place):
                shutil.rmtree(place, ignore_errors=True)


def _is_left_over(place: Path) -> bool:
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return False
    with (place / OWNER).open("rb") as file:
        owner = json.loads(file.read(MOST_OWNER_BYTES))
    return owner["node"] == rundir.node_id() and rundir.created_s(int(owner["pid"])) != float(owner["created_s"])
