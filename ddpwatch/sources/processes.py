"""Exits and stops of the ranks' processes on this node: pidfd, /proc and cgroup, as synthetic frames.

`ExitWatcher` waits for exits and reads their status (Linux only), the cgroup functions count OOM kills, and
`ProcessExits` makes `Gone`, `Bye` and `Held` messages of both, because none of it is on the wire.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import structs

from ddpwatch import rundir
from ddpwatch.errors import WireError
from ddpwatch.sources.frames import Frame
from ddpwatch.wire import TOPICS, Bye, Gone, Held, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.rundir import Endpoint

MAX_PIDFDS: Final = 256
"""Max processes with a pidfd, which costs a file descriptor each; the exit of others is found by polling."""
_OPEN: Final[Callable[[int], int] | None] = getattr(os, "pidfd_open", None)
_INFO: Final = struct.Struct("QQ11Ii")
"""`struct pidfd_info` of <linux/pidfd.h>: the request mask comes first, the exit status last."""
# PIDFD_GET_INFO and PIDFD_INFO_EXIT of the same header.
_GET_INFO: Final = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_WITH_EXIT: Final = 1 << 3
_EXIT_FIELD: Final = 49
"""Index of the exit code in /proc/PID/stat, counted from the state."""


class ProcessExit(NamedTuple):
    """Exit of one process."""

    pid: int
    exit_code: int | None
    """Minus the signal number if a signal ended it; None = unknown."""
    at_ns: int


class ExitWatcher:
    """Waits for processes to exit, by pidfd and epoll. Belongs to the thread that created it."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if _OPEN is not None and hasattr(select, "epoll") else None
        self._pids: dict[int, int] = {}

    def fileno(self) -> int | None:
        """Descriptor that is readable once a process has exited; None = not supported here."""
        return None if self._epoll is None else self._epoll.fileno()

    def follow(self, pid: int) -> None:
        """Wait for this process too. One that cannot be opened is skipped."""
        if self._epoll is None or _OPEN is None or pid in self._pids.values() or len(self._pids) >= MAX_PIDFDS:
            return
        with contextlib.suppress(OSError):
            handle = _OPEN(pid)
            self._pids[handle] = pid
            self._epoll.register(handle, select.EPOLLIN)

    def follows(self, pid: int) -> bool:
        """Whether its exit is still awaited."""
        return pid in self._pids.values()

    def seen(self, now_ns: int) -> list[ProcessExit]:
        """Exits since the last call."""
        if self._epoll is None or not self._pids:
            return []
        ended = []
        for handle, _ in self._epoll.poll(0):
            pid = self._pids.pop(handle)
            ended.append(ProcessExit(pid, _exit_code(pid, handle), now_ns))
            self._epoll.unregister(handle)
            os.close(handle)
        return ended

    def close(self) -> None:
        """Stop waiting."""
        for handle in self._pids:
            os.close(handle)
        self._pids.clear()
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None


def _exit_code(pid: int, handle: int) -> int | None:
    """Exit code from the zombie, or from the kernel's pidfd info if its parent has reaped it (Linux 6.15)."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if fields[0] == b"Z":
            return os.waitstatus_to_exitcode(int(fields[_EXIT_FIELD]))
    with contextlib.suppress(ImportError, OSError, ValueError):
        from fcntl import ioctl

        info = _INFO.unpack(ioctl(handle, _GET_INFO, _INFO.pack(_WITH_EXIT, *(0,) * 13)))
        if info[0] & _WITH_EXIT:
            return os.waitstatus_to_exitcode(info[-1])
    return None


PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")


def events_file(pid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> Path | None:
    """Path of `memory.events` of a process's cgroup; None = unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / str(pid) / "cgroup").read_text(errors="replace").splitlines():
            number, _, path = line.partition("::")
            if number == "0" and ".." not in path:
                return cgroups / path.lstrip("/") / "memory.events"
    return None


def oom_kills(events: Path | None) -> int:
    """Number of OOM kills in the cgroup so far; 0 = none or not counted."""
    if events is not None:
        with contextlib.suppress(OSError, ValueError):
            for line in events.read_text(errors="replace").splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return 0


DYING_NS: Final = 2_000_000_000
"""Nanoseconds after which a process that looks dead counts as ended, even if its exit was not seen."""
HELD_BY: Final = {b"T": "signal", b"t": "debugger", b"D": "disk", b"Z": "", b"X": ""}
"""Reason why a process does not run, by the state letter of /proc/PID/stat; empty for dead ones."""
FREE: Final = "nothing"


class ProcessExits:
    """Messages about processes of this node: `Gone` once per exit, after a `Bye` if it left in order.

    The rank's own goodbye, if received, has come before and takes precedence. For live processes, `Held` reports
    whether the kernel lets them run, at first and on each change.
    """

    def __init__(self) -> None:
        self._node = rundir.node_id()
        self._running: list[Endpoint] = []
        self._ended: list[tuple[int, Gone | Bye | Held]] = []
        """Pending messages, each with the monotonic nanoseconds from which on it may be sent."""
        self._memory: dict[int, tuple[Path | None, int]] = {}
        """By pid, the file that counts OOM kills, and the count when it was first read."""
        self._seen: dict[int, str] = {}
        """By pid, what held the process at the last check."""
        self._reported: dict[int, str] = {}
        self.ends = ExitWatcher()
        self._exits_seen: dict[int, ProcessExit] = {}
        self._dying_ns: dict[int, int] = {}
        """By pid of a process that looks dead without a seen exit, monotonic nanoseconds since when."""
        self.check_due = False

    def follow(self, endpoints: Sequence[Endpoint]) -> set[int]:
        """Watch the processes of this node from now on; returns their ranks."""
        here = [endpoint for endpoint in endpoints if endpoint.node == self._node]
        now_ns = time.monotonic_ns()
        for endpoint in here:
            if _left_in_order(endpoint):
                self._ended.append((now_ns, _goodbye_of(endpoint)))
            else:
                self._running.append(endpoint)
                if endpoint.pid not in self._memory:
                    # The cgroup can be found only while the process lives.
                    events = events_file(endpoint.pid)
                    self._memory[endpoint.pid] = events, oom_kills(events)
                if rundir.alive(endpoint, self._node):
                    self.ends.follow(endpoint.pid)
        # Processes that ended before we connected have nothing in flight to us.
        self.check(now_ns, grace_ns=0)
        return {endpoint.rank for endpoint in here}

    def next(self, now_ns: int) -> Frame | None:
        """The next message that is due, as a frame."""
        if self._ended and now_ns >= self._ended[0][0]:
            _, word = self._ended.pop(0)
            if isinstance(word, Gone) and word.ago_ns:
                word = structs.replace(word, ago_ns=max(1, now_ns - word.ago_ns))
            return Frame(TOPICS[type(word)], encode(word), now_ns)
        return None

    def notice(self, now_ns: int) -> bool:
        """Collect new exits without checking other processes. Returns whether one of them was aborted."""
        seen = self.ends.seen(now_ns)
        self._exits_seen |= {each.pid: each for each in seen}
        self.check_due = self.check_due or bool(seen)
        return any(each.exit_code == -signal.SIGABRT for each in seen)

    def check(self, now_ns: int, *, grace_ns: int) -> None:
        """Check all processes; exits are reported after the grace period."""
        self.check_due = False
        self._exits_seen |= {each.pid: each for each in self.ends.seen(now_ns)}
        # A process is checked once, even if it has many ranks.
        processes = {(endpoint.pid, endpoint.pid_created_s): endpoint for endpoint in self._running}
        living = {process for process, endpoint in processes.items() if self._lives(endpoint, now_ns)}
        alive = {endpoint.rank for endpoint in self._running if (endpoint.pid, endpoint.pid_created_s) in living}
        for endpoint in self._running:
            if endpoint.rank not in alive:
                self._ended += [(now_ns + grace_ns, message) for message in self._exit_messages(endpoint)]
        self._running = [endpoint for endpoint in self._running if endpoint.rank in alive]
        self._check_blocked(now_ns)

    def _lives(self, endpoint: Endpoint, now_ns: int) -> bool:
        """Whether a process runs. One with an awaited exit gets `DYING_NS`: its main thread ends before the others."""
        if rundir.alive(endpoint, self._node):
            return True
        pid = endpoint.pid
        return self.ends.follows(pid) and now_ns - self._dying_ns.setdefault(pid, now_ns) < DYING_NS

    def _check_blocked(self, now_ns: int) -> None:
        """Report held processes. Brief disk waits are normal, so that state must be seen twice."""
        ranks: dict[int, list[int]] = {}
        for endpoint in self._running:
            ranks.setdefault(endpoint.pid, []).append(endpoint.rank)
        for pid, of_it in ranks.items():
            holds = _held(pid)
            steady = holds != "disk" or self._seen.get(pid) == "disk"
            self._seen[pid] = holds
            if steady and holds and holds != self._reported.get(pid):
                self._reported[pid] = holds
                self._ended += [(now_ns, Held(rank=rank, seq=0, by=holds)) for rank in of_it]

    def _exit_messages(self, endpoint: Endpoint) -> list[Gone | Bye]:
        """Messages about an exit. Until they are sent, `ago_ns` holds its monotonic time."""
        seen = self._exits_seen.get(endpoint.pid, ProcessExit(endpoint.pid, None, 0))
        in_order = _left_in_order(endpoint)
        messages: list[Gone | Bye] = [_goodbye_of(endpoint)] if in_order else []
        events, before = self._memory.get(endpoint.pid, (None, 0))
        kills = 0 if in_order and not seen.exit_code else max(0, oom_kills(events) - before)
        gone = Gone(rank=endpoint.rank, seq=0, oom_kills=kills, exit_code=seen.exit_code, ago_ns=seen.at_ns)
        return [*messages, gone]


def _held(pid: int) -> str:
    """What keeps a process from running, by /proc; empty = unknown."""
    with contextlib.suppress(OSError, IndexError):
        # The second field is the program's name, which may contain anything.
        return HELD_BY.get(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0], FREE)
    return ""


def _left_in_order(endpoint: Endpoint) -> bool:
    """Whether the rank removed its own socket, as on a goodbye; a removed run directory does not count."""
    scheme, _, path = endpoint.address.partition("://")
    return scheme == "ipc" and not Path(path).exists() and Path(path).with_name(rundir.RUN_FILE).exists()


def _goodbye_of(endpoint: Endpoint) -> Bye:
    """The goodbye that the rank left on disk, or else a generic one."""
    messages = rundir.last_words(Path(endpoint.address.partition("://")[2]))
    with contextlib.suppress(WireError):
        if messages and isinstance(bye := decode(messages), Bye):
            return structs.replace(bye, rank=endpoint.rank, seq=0)
    text = "It exited cleanly before its goodbye was received."
    return Bye(rank=endpoint.rank, seq=0, reason="closed", text=text, mono_ns=0)
