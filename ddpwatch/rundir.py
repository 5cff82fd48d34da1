"""The run directory: where the agent registers a run on this host, and where viewers find it.

    <base>/                 0700, ours: $DDPWATCH_RUN_DIR, else $XDG_RUNTIME_DIR/ddpwatch, else <tmp>/ddpwatch-<uid>.
                            The agent writes to the first of these, viewers look in all of `places`.
      <run id>/             one attempt of one job
        run.json            0600, replaced atomically: the ranks and where they listen
        <rank>.sock         the rank's ZeroMQ ipc socket
        <rank>.words        the last message of a rank that failed

A directory that belongs to another user, or that others may enter, is refused: its sockets could be anybody's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from ddpwatch.errors import RunDirRefused
from ddpwatch.wire import Count, Name, Rank

SCHEMA: Final = 1
RUN_FILE: Final = "run.json"
WORDS_SUFFIX: Final = ".words"
MAX_WORDS_BYTES: Final = 1 << 16
"""Bytes read of a rank's last message."""
MAX_RUN_FILE_BYTES: Final = 16 << 20
"""Bytes of `run.json`; a longer one is refused."""
MAX_SOCKET_PATH_BYTES: Final = 107
"""`sun_path` holds 108 bytes, including the terminating zero."""
SAME_START_S: Final = 0.1
"""Start times of one pid that differ by less are of the same process."""
ORPHAN_AGE_S: Final = 600.0
"""A directory of this age without run.json belongs to a run that died before its rendezvous."""


class Endpoint(Struct, frozen=True):
    """Where one rank listens, and the process behind it."""

    rank: Rank
    host: Name
    node: Name
    """Host and pid namespace that `pid` belongs to, as `node_id` returns it."""
    pid: Count
    pid_created_s: float
    """Start time of the process as `created_s` returns it: distinguishes it from a later one with the same pid."""
    address: Name
    """For viewers on its own node."""
    tcp_address: Name = ""
    """For viewers on other hosts; empty = it does not listen on TCP."""
    server_key: Name = ""
    """Its public CURVE key, in Z85."""


class RelayPoint(Struct, frozen=True):
    """Where a relay listens that forwards all ranks of a run."""

    tcp_address: Name
    server_key: Name
    """Its public CURVE key, in Z85."""


class RunFile(Struct, frozen=True):
    """The contents of `run.json`, and of a ticket."""

    schema: Count
    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{8,32}$")]
    name: Name
    job: Name
    """The launcher's job id; equal for all restarts of the job."""
    attempt: Count
    world_size: Annotated[int, Meta(ge=1, lt=2**20)]
    started_unix_s: float
    endpoints: Annotated[list[Endpoint], Meta(max_length=2**20)]
    viewer_secret_key: Name = ""
    """Secret CURVE key that admits a viewer over TCP, in Z85. It permits reading only."""
    relay: RelayPoint | None = None
    """In a relay's ticket: where to connect instead of to the ranks. The viewer key is then the relay's."""


@dataclass(frozen=True)
class Garbage:
    """An entry of the run directory that is not a readable run."""

    path: Path
    reason: str


_decoder: Final = msgspec.json.Decoder(RunFile)


def base_path() -> Path:
    """The run directory that an agent with this environment writes to. Neither created nor checked."""
    return places()[0]


def places() -> list[Path]:
    """The directories in which viewers look for runs, `base_path` first. Neither created nor checked.

    Without DDPWATCH_RUN_DIR these are all defaults of this user: a job under Slurm, cron or sudo often has no
    XDG_RUNTIME_DIR while the user's shell has one, or the reverse.
    """
    if chosen := os.environ.get("DDPWATCH_RUN_DIR"):
        return [Path(chosen)]
    uid = os.getuid()
    runtime = Path("/run/user", str(uid), "ddpwatch")
    temporary = Path(tempfile.gettempdir()) / f"ddpwatch-{uid}"
    if given := os.environ.get("XDG_RUNTIME_DIR"):
        return list(dict.fromkeys([Path(given) / "ddpwatch", runtime, temporary]))
    return [temporary, runtime]


def refusal(base: Path) -> str:
    """Why a run directory is refused, as `check_base` says it; empty = it is accepted, or does not exist."""
    try:
        if not _missing(base):
            check_base(base)
    except RunDirRefused as error:
        return str(error)
    return ""


def ensure_base(base: Path) -> None:
    """Create the run directory if it is missing, then `check_base` it."""
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirRefused(f"cannot create the run directory {base}: {error.strerror}; set DDPWATCH_RUN_DIR") from None
    check_base(base)


def check_base(base: Path) -> None:
    """Refuse a run directory that is a link, another user's, or accessible to others."""
    try:
        found = base.lstat()
    except OSError as error:
        raise RunDirRefused(f"cannot read the run directory {base}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a directory"
        raise RunDirRefused(f"the run directory {base} is {what}; set DDPWATCH_RUN_DIR to a directory of your own")
    if found.st_uid != os.getuid():
        raise RunDirRefused(f"the run directory {base} belongs to uid {found.st_uid}, not to you; set DDPWATCH_RUN_DIR")
    if found.st_mode & 0o077:
        raise RunDirRefused(
            f"the run directory {base} is open to other users; run `chmod 700 {base}`, or set DDPWATCH_RUN_DIR to "
            "a directory of your own"
        )


def socket_path(base: Path, run_id: str, rank: int) -> Path:
    """Path of a rank's socket. Refuses a path that the kernel would truncate."""
    path = base / run_id / f"{rank}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise RunDirRefused(f"the path {path} is too long for a Unix socket; set DDPWATCH_RUN_DIR to a shorter path")
    return path


def node_id() -> str:
    """Identifies this host, its boot and the pid namespace."""
    boot = namespace = "-"
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    with contextlib.suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").stat().st_ino)
    return f"{socket.gethostname()}/{boot}/{namespace}"[:200]


def created_s(pid: int) -> float | None:
    """Start time of a process of this node, in seconds since boot; None if it has ended, reaped or not.

    Not as wall time, which jumps when the clock is set: a live run would look dead.
    """
    try:
        return _created_s(pid)
    except OSError:
        return None


def _created_s(pid: int) -> float | None:
    text = Path(f"/proc/{pid}/stat").read_bytes()
    # Split after the second field, the program's name, which may hold anything, including parentheses.
    fields = text.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19]) / os.sysconf("SC_CLK_TCK")


def runs_here(node: str, pid: int, pid_created_s: float) -> bool:
    """Whether the process with this pid and start time runs on this node."""
    created = created_s(pid) if node == node_id() else None
    return created is not None and abs(created - pid_created_s) < SAME_START_S


def alive(endpoint: Endpoint, node: str) -> bool:
    """Whether the rank's process runs. One on another node cannot be checked and counts as running."""
    if endpoint.node != node:
        return True
    try:
        created = _created_s(endpoint.pid)
    except OSError as error:
        # Out of file descriptors: that proves nothing about the process.
        return error.errno in {errno.EMFILE, errno.ENFILE}
    return created is not None and abs(created - endpoint.pid_created_s) < SAME_START_S


def write(base: Path, run: RunFile) -> None:
    """Write `run.json`."""
    write_private(base / run.id / RUN_FILE, run)


def write_private(target: Path, run: RunFile) -> None:
    """Atomically replace a file by the run with its keys, readable for this user only."""
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(run))
        draft.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        if error.errno is None:
            raise
        # Name the target: the draft means nothing to a user.
        raise OSError(error.errno, error.strerror, str(target)) from error


def leave(path: Path, last_words: bytes = b"") -> None:
    """Remove a rank's socket, and the directory of the run with the last socket.

    `last_words`, the rank's last message, stays as long as the run does, for viewers that connect too late to get it.
    """
    with contextlib.suppress(OSError):
        if last_words:
            words = path.with_suffix(WORDS_SUFFIX)
            with os.fdopen(os.open(words, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(last_words)
        path.unlink(missing_ok=True)
        # File by file, not as a tree: a rank that binds its socket at this moment keeps it, and the directory.
        left = list(path.parent.iterdir())
        if not any(entry.suffix == ".sock" for entry in left):
            for entry in left:
                if entry.suffix == WORDS_SUFFIX:
                    entry.unlink(missing_ok=True)
            (path.parent / RUN_FILE).unlink(missing_ok=True)
            path.parent.rmdir()


def last_words(path: Path) -> bytes:
    """The last message that the rank with this socket left in a file; empty = none that can be read."""
    words = path.with_suffix(WORDS_SUFFIX)
    with contextlib.suppress(OSError):
        if stat.S_ISREG(words.lstat().st_mode):
            with words.open("rb") as file:
                return file.read(MAX_WORDS_BYTES)
    return b""


def read(path: Path) -> RunFile:
    """Read a `run.json`. Raises `ValueError` with the reason if it is invalid."""
    # Opening a pipe without a writer would block forever.
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("is not a regular file")
    with path.open("rb") as file:
        text = file.read(MAX_RUN_FILE_BYTES + 1)
    if len(text) > MAX_RUN_FILE_BYTES:
        raise ValueError("is too large")
    if not text.strip():
        raise ValueError("is empty")
    try:
        run = _decoder.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"cannot be read: {error}") from None
    if run.schema > SCHEMA:
        raise ValueError(f"was written by a newer ddpwatch (schema {run.schema})")
    return run


def scan(base: Path) -> tuple[list[RunFile], list[Garbage]]:
    """All runs in the directory, newest first, and all other entries. Empty if there is no directory.

    Entries that vanish during the scan were runs that ended, and are skipped.
    """
    if _missing(base):
        return [], []
    check_base(base)
    found = [_scan_entry(entry) for entry in sorted(base.iterdir())]
    runs = [run for run in found if isinstance(run, RunFile)]
    runs.sort(key=lambda run: run.started_unix_s, reverse=True)
    return runs, [garbage for garbage in found if isinstance(garbage, Garbage)]


def _scan_entry(entry: Path) -> RunFile | Garbage | None:
    """The run in one entry of the run directory; None if it is starting, or has just ended."""
    file = entry / RUN_FILE
    if entry.is_symlink() or not entry.is_dir():
        return None if _missing(entry) else Garbage(entry, "is not a run directory")
    try:
        run = read(file)
    except FileNotFoundError:
        return Garbage(entry, f"has no {RUN_FILE}") if _age_s(entry) > ORPHAN_AGE_S else None
    except (OSError, ValueError) as error:
        return Garbage(file, str(error))
    return run if run.id == entry.name else Garbage(file, f"belongs to run {run.id}")


def prune(base: Path) -> list[str]:
    """Remove the directories of runs whose processes on this node have all ended; returns their names."""
    node = node_id()
    runs, garbage = scan(base)
    gone = [run.id for run in runs if _ended(base, run, node)]
    gone += [piece.path.name for piece in garbage if piece.path.parent == base and _is_orphan(piece.path)]
    for name in gone:
        shutil.rmtree(base / name, ignore_errors=True)
    return gone


def _ended(base: Path, run: RunFile, node: str) -> bool:
    """Whether no rank uses a run's directory.

    Ranks on other nodes cannot be checked, but their sockets are elsewhere, unless several nodes share `base`.
    """
    here = [endpoint for endpoint in run.endpoints if endpoint.node == node]
    if not here or any(alive(endpoint, node) for endpoint in here):
        return False
    elsewhere = {endpoint.rank for endpoint in run.endpoints} - {endpoint.rank for endpoint in here}
    return not any((base / run.id / f"{rank}.sock").exists() for rank in elsewhere)


def _is_orphan(path: Path) -> bool:
    """Whether a directory without run.json was left by a dead run: it holds only sockets, words and drafts."""
    if path.is_symlink():
        return False
    try:
        return all(
            entry.suffix in (".sock", WORDS_SUFFIX) or entry.name.startswith(f".{RUN_FILE}") for entry in path.iterdir()
        )
    except OSError:
        return False


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _missing(path: Path) -> bool:
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
