"""Where runs leave their address on this host, shared by the agent (which writes) and the viewers (which read).

    <base>/                 0700, ours: $DDPWATCH_RUN_DIR, else $XDG_RUNTIME_DIR/ddpwatch, else <tmp>/ddpwatch-<uid>
      <run id>/             one attempt of one job
        run.json            0600, written whole and renamed into place: who the ranks are and where they listen
        <rank>.sock         the rank's ZeroMQ ipc socket
        <rank>.words        what a rank that failed has said last

A directory that belongs to somebody else, or that others may enter, is refused: its sockets could be anybody's.
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
MAX_RUN_FILE_BYTES: Final = 16 << 20
# sun_path holds 108 bytes with its closing zero.
MAX_SOCKET_PATH_BYTES: Final = 107
# A directory without run.json this old belongs to a run that died before its ranks had met.
SAME_START_S: Final = 0.1
"""Processes of one number whose starts are so close to each other are the same."""
ORPHAN_AGE_S: Final = 600.0


class Endpoint(Struct, frozen=True):
    """Where one rank listens, and the process behind it."""

    rank: Rank
    host: Name
    node: Name
    """Tells hosts and pid namespaces apart, so that `pid` means something."""
    pid: Count
    pid_created_s: float
    """The process's start as `created_s` has it, which tells it from a later one with the same pid."""
    address: Name
    """Where viewers on its own node find it."""
    tcp_address: Name = ""
    """Where those of other hosts do; empty = it does not listen on TCP."""
    server_key: Name = ""
    """The public half of the pair it listens with, in Z85."""


class RelayPoint(Struct, frozen=True):
    """Where a relay listens, through which all ranks of a run are heard."""

    tcp_address: Name
    server_key: Name
    """The public half of the pair it listens with, in Z85."""


class RunFile(Struct, frozen=True):
    """The contents of `run.json`, and of a ticket."""

    schema: Count
    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{8,32}$")]
    name: Name
    job: Name
    """The launcher's name for the job; equal for all its restarts."""
    attempt: Count
    world_size: Annotated[int, Meta(ge=1, lt=2**20)]
    started_unix_s: float
    endpoints: Annotated[list[Endpoint], Meta(max_length=2**20)]
    viewer_secret_key: Name = ""
    """What admits a viewer over TCP, in Z85. Who has it may watch, and nothing else."""
    relay: RelayPoint | None = None
    """In the ticket of a relay: where to listen instead of at the ranks' own addresses. The key is then the relay's."""


@dataclass(frozen=True)
class Garbage:
    """Something in the run directory that is no run."""

    path: Path
    reason: str


_decoder: Final = msgspec.json.Decoder(RunFile)


def base_path() -> Path:
    """The directory that holds this user's runs. Not created, not checked."""
    if chosen := os.environ.get("DDPWATCH_RUN_DIR"):
        return Path(chosen)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "ddpwatch"
    return Path(tempfile.gettempdir()) / f"ddpwatch-{os.getuid()}"


def ensure_base(base: Path) -> None:
    """Create the run directory if it is missing; refuse it unless it is ours alone."""
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirRefused(f"cannot create the run directory {base}: {error.strerror}; set DDPWATCH_RUN_DIR") from None
    check_base(base)


def check_base(base: Path) -> None:
    """Refuse a run directory that is a link, somebody else's, or open to others."""
    try:
        found = base.lstat()
    except OSError as error:
        raise RunDirRefused(f"cannot read the run directory {base}: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode):
        what = "a link, which is not followed" if stat.S_ISLNK(found.st_mode) else "no directory"
        raise RunDirRefused(f"the run directory {base} is {what}; set DDPWATCH_RUN_DIR to a directory")
    if found.st_uid != os.getuid():
        raise RunDirRefused(f"the run directory {base} belongs to uid {found.st_uid}, not to you; set DDPWATCH_RUN_DIR")
    if found.st_mode & 0o077:
        raise RunDirRefused(
            f"others may enter the run directory {base}; take that from them (chmod 700) or set DDPWATCH_RUN_DIR to "
            "a directory of your own"
        )


def socket_path(base: Path, run_id: str, rank: int) -> Path:
    """Where a rank's socket goes. Refuses a path that the kernel would cut."""
    path = base / run_id / f"{rank}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise RunDirRefused(f"the path {path} is too long for a socket; set DDPWATCH_RUN_DIR to a shorter one")
    return path


def node_id() -> str:
    """This host and pid namespace, as a short text that differs elsewhere."""
    parts = [socket.gethostname()]
    for source in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(
                str(Path(source).stat().st_ino) if source.endswith("pid") else Path(source).read_text().strip()[:8]
            )
        except OSError:
            parts.append("-")
    return "/".join(parts)[:200]


def created_s(pid: int) -> float | None:
    """When a process of this node started, in seconds since boot; None if it has ended, reaped or not.

    Not as wall time: that moves when the clock is set, and a live run would look dead.
    """
    try:
        return _created_s(pid)
    except OSError:
        return None


def _created_s(pid: int) -> float | None:
    text = Path(f"/proc/{pid}/stat").read_bytes()
    # From the third field on: the second is the program's name, which may hold anything, brackets too.
    fields = text.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19]) / os.sysconf("SC_CLK_TCK")


def runs_here(node: str, pid: int, pid_created_s: float) -> bool:
    """Whether that very process runs on this node."""
    created = created_s(pid) if node == node_id() else None
    return created is not None and abs(created - pid_created_s) < SAME_START_S


def alive(endpoint: Endpoint, node: str) -> bool:
    """Whether the rank's process still runs. One on another node is believed to: it cannot be seen from here."""
    if endpoint.node != node:
        return True
    try:
        created = _created_s(endpoint.pid)
    except OSError as error:
        # Who has no descriptor left to look with has not seen that it is gone.
        return error.errno in {errno.EMFILE, errno.ENFILE}
    return created is not None and abs(created - endpoint.pid_created_s) < SAME_START_S


def write(base: Path, run: RunFile) -> None:
    """Put `run.json` in place, whole and private."""
    write_private(base / run.id / RUN_FILE, run)


def write_private(target: Path, run: RunFile) -> None:
    """Write the run with its keys, for this user's eyes only, in place of what was there."""
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
        # With the name of the file that is meant: nobody has heard of the draft.
        raise OSError(error.errno, error.strerror, str(target)) from error


def leave(path: Path, last_words: bytes = b"") -> None:
    """Take a rank's socket away, and the whole run with the last of them.

    `last_words` stay as long as the run does, for a viewer that comes too late to hear them.
    """
    with contextlib.suppress(OSError):
        if last_words:
            words = path.with_suffix(WORDS_SUFFIX)
            with os.fdopen(os.open(words, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(last_words)
        path.unlink(missing_ok=True)
        # Piece by piece and not as a tree: a rank that binds its socket just now keeps it, and the directory.
        left = list(path.parent.iterdir())
        if not any(entry.suffix == ".sock" for entry in left):
            for entry in left:
                if entry.suffix == WORDS_SUFFIX:
                    entry.unlink(missing_ok=True)
            (path.parent / RUN_FILE).unlink(missing_ok=True)
            path.parent.rmdir()


def last_words(path: Path) -> bytes:
    """What the rank that had this socket has left to be read; empty = nothing, or nothing that can be."""
    words = path.with_suffix(WORDS_SUFFIX)
    with contextlib.suppress(OSError):
        if stat.S_ISREG(words.lstat().st_mode):
            with words.open("rb") as file:
                return file.read(MAX_WORDS_BYTES)
    return b""


def read(path: Path) -> RunFile:
    """The run described by a `run.json`. Raises `ValueError` with the reason if it is none."""
    # Opening a pipe that nobody writes to would wait for ever.
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError("is no regular file")
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
    """All runs in the directory, newest first, and what else lies there. A missing directory holds nothing.

    What vanishes while this looks was a run that ended, and is passed over.
    """
    runs: list[RunFile] = []
    garbage: list[Garbage] = []
    if _missing(base):
        return runs, garbage
    check_base(base)
    for entry in sorted(base.iterdir()):
        found = _look(entry)
        if isinstance(found, Garbage):
            garbage.append(found)
        elif found is not None:
            runs.append(found)
    runs.sort(key=lambda run: run.started_unix_s, reverse=True)
    return runs, garbage


def _look(entry: Path) -> RunFile | Garbage | None:
    """The run in one entry of the run directory; None if it has not begun, or has just ended."""
    file = entry / RUN_FILE
    if entry.is_symlink() or not entry.is_dir():
        return None if _missing(entry) else Garbage(entry, "is no run directory")
    try:
        run = read(file)
    except FileNotFoundError:
        return Garbage(entry, f"has no {RUN_FILE}") if _age_s(entry) > ORPHAN_AGE_S else None
    except (OSError, ValueError) as error:
        return Garbage(file, str(error))
    return run if run.id == entry.name else Garbage(file, f"says it is run {run.id}")


def prune(base: Path) -> list[str]:
    """Remove what runs left behind whose processes on this node are all gone, and say which."""
    node = node_id()
    runs, garbage = scan(base)
    gone = [run.id for run in runs if _ended(base, run, node)]
    gone += [piece.path.name for piece in garbage if piece.path.parent == base and _is_orphan(piece.path)]
    for name in gone:
        shutil.rmtree(base / name, ignore_errors=True)
    return gone


def _ended(base: Path, run: RunFile, node: str) -> bool:
    """Whether nobody lives in a run's directory any more.

    Ranks of other nodes cannot be seen, but they have their sockets elsewhere, unless several nodes share `base`.
    """
    here = [endpoint for endpoint in run.endpoints if endpoint.node == node]
    if not here or any(alive(endpoint, node) for endpoint in here):
        return False
    elsewhere = {endpoint.rank for endpoint in run.endpoints} - {endpoint.rank for endpoint in here}
    return not any((base / run.id / f"{rank}.sock").exists() for rank in elsewhere)


def _is_orphan(path: Path) -> bool:
    """Whether a directory without run.json is what a dead run left: nothing in it but sockets and drafts."""
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
