"""What happens to the ranks' processes on this node: it is not on the wire, and is told in frames of our own making.

The end of processes of this node, as it happens and with its exit status. Linux only; elsewhere nothing is seen.

Whether the kernel has killed a process for its memory, as far as its control group tells.
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

MOST: Final = 256
"""Each costs a file descriptor; of more, the rest is found ended by who looks."""
_OPEN: Final[Callable[[int], int] | None] = getattr(os, "pidfd_open", None)
_INFO: Final = struct.Struct("QQ11Ii")
"""`struct pidfd_info` of <linux/pidfd.h>: what is asked for comes first, the exit status last."""
_GET_INFO: Final = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
_WITH_EXIT: Final = 1 << 3
_EXIT_FIELD: Final = 49
"""Of /proc/PID/stat, counted from the state."""


class ProcessExit(NamedTuple):
    """One process that has ended."""

    pid: int
    exit_code: int | None
    """Minus the signal if one ended it; None = the system does not tell."""
    at_ns: int


class ExitWatcher:
    """Waits for the end of some processes. Belongs to the thread that made it."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if _OPEN is not None and hasattr(select, "epoll") else None
        self._pids: dict[int, int] = {}
        """By descriptor."""

    def fileno(self) -> int | None:
        """Readable as soon as one of them has ended; None = that cannot be seen here."""
        return None if self._epoll is None else self._epoll.fileno()

    def follow(self, pid: int) -> None:
        """Wait for this one, too. One that cannot be opened is not waited for."""
        if self._epoll is None or _OPEN is None or pid in self._pids.values() or len(self._pids) >= MOST:
            return
        with contextlib.suppress(OSError):
            handle = _OPEN(pid)
            self._pids[handle] = pid
            self._epoll.register(handle, select.EPOLLIN)

    def follows(self, pid: int) -> bool:
        """Whether its end is yet to be seen."""
        return pid in self._pids.values()

    def seen(self, now_ns: int) -> list[ProcessExit]:
        """Those that have ended since the last time."""
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
        """Wait for nobody any more."""
        for handle in self._pids:
            os.close(handle)
        self._pids.clear()
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None


def _exit_code(pid: int, handle: int) -> int | None:
    """From the zombie; from the kernel's memory of it where its parent has taken it in (Linux 6.15)."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        if fields[0] == b"Z":
            return os.waitstatus_to_exitcode(int(fields[_EXIT_FIELD]))
    with contextlib.suppress(ImportError, OSError, ValueError):
        from fcntl import ioctl

        reported = _INFO.unpack(ioctl(handle, _GET_INFO, _INFO.pack(_WITH_EXIT, *(0,) * 13)))
        if reported[0] & _WITH_EXIT:
            return os.waitstatus_to_exitcode(reported[-1])
    return None


PROC: Final = Path("/proc")
CGROUPS: Final = Path("/sys/fs/cgroup")


def events_file(pid: int, *, proc: Path = PROC, cgroups: Path = CGROUPS) -> Path | None:
    """Where the kernel counts what memory limits have done to the control group of a process; None = cannot be told."""
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / str(pid) / "cgroup").read_text(errors="replace").splitlines():
            number, _, path = line.partition("::")
            if number == "0" and ".." not in path:
                return cgroups / path.lstrip("/") / "memory.events"
    return None


def oom_kills(events: Path | None) -> int:
    """How many processes of the group were killed for their memory so far; 0 where nobody counts."""
    if events is not None:
        with contextlib.suppress(OSError, ValueError):
            for line in events.read_text(errors="replace").splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    return int(number)
    return 0


DYING_NS: Final = 2_000_000_000
"""A process that looks dead for so long is, though its end was not seen."""
HELD_BY: Final = {b"T": "signal", b"t": "debugger", b"D": "disk", b"Z": "", b"X": ""}
"""States of a process in which it does not run, by the kernel's letter; of one that is dead nothing is said here."""
FREE: Final = "nothing"


class ProcessExits:
    """Which processes of this node have ended, each told once: as gone, for one that left in order after its goodbye.

    Its own goodbye, if we were there to hear it, has come before and counts. Of those that live it is told whether the
    kernel lets them run, at first and when that changes.
    """

    def __init__(self) -> None:
        self._node = rundir.node_id()
        self._running: list[Endpoint] = []
        self._ended: list[tuple[int, Gone | Bye | Held]] = []
        """When it may be told, and the word on it."""
        self._memory: dict[int, tuple[Path | None, int]] = {}
        """By process, where kills for memory are counted, and how many there had been."""
        self._seen: dict[int, str] = {}
        """By process, what held it when it was last looked at."""
        self._reported: dict[int, str] = {}
        """By process, what was told last."""
        self.ends = ExitWatcher()
        self._exits_seen: dict[int, ProcessExit] = {}
        """By process, how it ended."""
        self._dying_ns: dict[int, int] = {}
        """By process that looks dead and has not been seen to end, since when."""
        self.check_due = False
        """Whether one has ended since the last look."""

    def follow(self, endpoints: Sequence[Endpoint]) -> set[int]:
        """Look after those of this node, from now on; their ranks."""
        here = [endpoint for endpoint in endpoints if endpoint.node == self._node]
        now_ns = time.monotonic_ns()
        for endpoint in here:
            if _left_in_order(endpoint):
                self._ended.append((now_ns, _goodbye_of(endpoint)))
            else:
                self._running.append(endpoint)
                self._watch_memory(endpoint.pid)
                if rundir.alive(endpoint, self._node):
                    self.ends.follow(endpoint.pid)
        # Those that were gone before we came can have nothing on the way to us.
        self.check(now_ns, grace_ns=0)
        return {endpoint.rank for endpoint in here}

    def next(self, now_ns: int) -> Frame | None:
        """The word on one of them, if one is due."""
        if self._ended and now_ns >= self._ended[0][0]:
            _, word = self._ended.pop(0)
            if isinstance(word, Gone) and word.ago_ns:
                word = structs.replace(word, ago_ns=max(1, now_ns - word.ago_ns))
            return Frame(TOPICS[type(word)], encode(word), now_ns)
        return None

    def notice(self, now_ns: int) -> bool:
        """Take in what has ended just now, without a look at the others. Whether one of them was aborted."""
        seen = self.ends.seen(now_ns)
        self._exits_seen |= {each.pid: each for each in seen}
        self.check_due = self.check_due or bool(seen)
        return any(each.exit_code == -signal.SIGABRT for each in seen)

    def check(self, now_ns: int, *, grace_ns: int) -> None:
        """See who has ended; it may be told after the grace."""
        self.check_due = False
        self._exits_seen |= {each.pid: each for each in self.ends.seen(now_ns)}
        # A process is looked at once, even if it stands for many ranks.
        processes = {(endpoint.pid, endpoint.pid_created_s): endpoint for endpoint in self._running}
        living = {process for process, endpoint in processes.items() if self._lives(endpoint, now_ns)}
        alive = {endpoint.rank for endpoint in self._running if (endpoint.pid, endpoint.pid_created_s) in living}
        for endpoint in self._running:
            if endpoint.rank not in alive:
                self._ended += [(now_ns + grace_ns, word) for word in self._exit_message(endpoint)]
        self._running = [endpoint for endpoint in self._running if endpoint.rank in alive]
        self._check_blocked(now_ns)

    def _lives(self, endpoint: Endpoint, now_ns: int) -> bool:
        """One whose end will be seen is given the time for that: its first thread ends before the others."""
        if rundir.alive(endpoint, self._node):
            return True
        pid = endpoint.pid
        return self.ends.follows(pid) and now_ns - self._dying_ns.setdefault(pid, now_ns) < DYING_NS

    def _check_blocked(self, now_ns: int) -> None:
        """Tell whether a process is held. Everybody waits for a disk now and then: that counts when seen twice."""
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

    def _watch_memory(self, pid: int) -> None:
        """While the process lives, its control group can be found; afterwards only what was remembered tells."""
        if pid not in self._memory:
            events = events_file(pid)
            self._memory[pid] = events, oom_kills(events)

    def _exit_message(self, endpoint: Endpoint) -> list[Gone | Bye]:
        """`ago_ns` holds the moment until it is told."""
        seen = self._exits_seen.get(endpoint.pid, ProcessExit(endpoint.pid, None, 0))
        in_order = _left_in_order(endpoint)
        words: list[Gone | Bye] = [_goodbye_of(endpoint)] if in_order else []
        events, before = self._memory.get(endpoint.pid, (None, 0))
        kills = 0 if in_order and not seen.exit_code else max(0, oom_kills(events) - before)
        gone = Gone(rank=endpoint.rank, seq=0, oom_kills=kills, exit_code=seen.exit_code, ago_ns=seen.at_ns)
        return [*words, gone]


def _held(pid: int) -> str:
    """What keeps a process from running, as the kernel has it; empty = that cannot be told."""
    with contextlib.suppress(OSError, IndexError):
        # The second field is the program's name, which may hold anything.
        return HELD_BY.get(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0], FREE)
    return ""


def _left_in_order(endpoint: Endpoint) -> bool:
    """Whether the rank has taken its socket away, as one does who says goodbye, and not somebody the whole run."""
    scheme, _, path = endpoint.address.partition("://")
    return scheme == "ipc" and not Path(path).exists() and Path(path).with_name(rundir.RUN_FILE).exists()


def _goodbye_of(endpoint: Endpoint) -> Bye:
    """Its own, where it has left it to be read; else that it left in order."""
    words = rundir.last_words(Path(endpoint.address.partition("://")[2]))
    with contextlib.suppress(WireError):
        if words and isinstance(bye := decode(words), Bye):
            return structs.replace(bye, rank=endpoint.rank, seq=0)
    text = "It left in order before it could be heard."
    return Bye(rank=endpoint.rank, seq=0, reason="closed", text=text, mono_ns=0)
