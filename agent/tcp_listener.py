"""The TCP port of a rank: encrypted, for those with the run's key, and shut for a while when strangers crowd at it.

A stranger who gets a connection costs the training process a descriptor and some time of libzmq's thread until it is
sent away. So both are watched. When they go beyond their share, the kernel is told to drop whatever knocks: that takes
nothing from this process, and connections that are there stay.

Which of this host's addresses a rank listens on over TCP, and on which port. Sends nothing to anybody.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket as sockets
import struct
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

import psutil
import zmq

from ddpwatch import curve
from ddpwatch.agent.process_limits import ENOUGH, free

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

WINDOW_S: Final = curve.HANDSHAKE_MS / 1000
"""As long as a handshake may take: what was taken by strangers is given back after it."""
MAX_DESCRIPTORS: Final = 256
"""So many may be taken in a window, or half of those that are free."""
MAX_CPU_S: Final = 0.25
"""So much time may libzmq's thread use in a window."""
CHECK_INTERVAL_S: Final = 0.01
CLOSED_S: Final = WINDOW_S
"""Not shorter: those who are in would be there still, and as many come again."""
MAX_CLOSED_S: Final = 40.0
ASKED_AT_ONCE: Final = 64
_TASKS: Final = "/proc/self/task"
_IO_THREAD: Final = "ZMQbg/IO"
_SO_ATTACH_FILTER: Final = 26
# Programs of classic BPF; what they see begins with the header of TCP. One lets nothing through.
_DROP_ALL: Final = (struct.pack("HBBI", 0x06, 0, 0, 0),)
# The other lets everything through but resets, also on the connections that are made through this door: when one comes
# while messages of the same viewer wait for room, and a heartbeat is behind them, libzmq 4.3.5 aborts the process
# (`!_io_error`, stream_engine_base.cpp). A connection that was reset is given up for its silence instead.
_DROP_RESETS: Final = (
    struct.pack("HBBI", 0x30, 0, 0, 13),  # load the flags
    struct.pack("HBBI", 0x45, 0, 1, 0x04),  # is RST among them?
    struct.pack("HBBI", 0x06, 0, 0, 0),
    struct.pack("HBBI", 0x06, 0, 0, 0xFFFFFFFF),
)

CROWDED: Final = (
    "Connections came to this rank's TCP port faster than viewers make them. Nobody new is let in there for a while; "
    "those who watch, and viewers on this host, are not touched."
)


def threads() -> set[str]:
    """The threads of this process, by number."""
    return set(os.listdir(_TASKS))  # noqa: PTH208 - names are all that is wanted


class TcpListener:
    """Belongs to the agent's thread, like the socket it is a door of."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        listener: sockets.socket,
        secret_key: str,
        viewer_public_key: str,
        new_threads: Iterable[str],
        note: Callable[[str, str], None],
    ) -> None:
        """Have the socket listen there, too, with this key. `new_threads` has libzmq's; `note` tells viewers."""
        self._note = note
        self._listener = listener
        self._keeper = curve.Gatekeeper(context, viewer_public_key)
        curve.listen_with(socket, secret_key)
        self._filter(_DROP_RESETS)
        given = os.dup(listener.fileno())
        socket.setsockopt(zmq.USE_FD, given)
        socket.bind(f"tcp://127.0.0.1:{listener.getsockname()[1]}")  # the descriptor says where, not this
        socket.setsockopt(zmq.USE_FD, -1)
        _tcp_listeners.add(self)
        self._given = given
        self._candidates = list(new_threads)
        self._clock: int | None = None
        self._reported = 0
        self._closed_s = CLOSED_S
        self._open_again_s = 0.0
        """0 = it is open."""
        self.flooded = False
        """Whether libzmq works too much though nobody new is let in: it is for somebody who has the key."""
        self._next_check_s = 0.0
        self._begin_window()

    def watched(self) -> list[Any]:
        """What to wait for beside the socket itself."""
        resting = self._open_again_s or time.monotonic() < self._next_check_s
        return [self._keeper.socket] if resting else [self._keeper.socket, self._listener.fileno()]

    @property
    def closed_for_s(self) -> float:
        """In so many seconds the wait for newcomers goes on; 0 = it does."""
        return 0.0 if self._open_again_s else max(0.0, self._next_check_s - time.monotonic())

    def handle_ready(self, ready: Iterable[Any]) -> None:
        """Answer for those who show a key, and see whether there are too many who come."""
        for which in ready:
            if which is self._keeper.socket:
                self._keeper.answer(ASKED_AT_ONCE)
                self._note_refused()
            elif which == self._listener.fileno():
                self._next_check_s = time.monotonic() + CHECK_INTERVAL_S
                self.check_load()

    def check_load(self) -> None:
        """Shut or open it, as things are. Called often while somebody comes, and now and then in any case."""
        now_s = time.monotonic()
        if self._open_again_s:
            share = max(1.0, (now_s - self._since_s) / WINDOW_S)
            self.flooded = self._cpu_s() - self._cpu_mark_s > MAX_CPU_S * share
            if now_s >= self._open_again_s:
                self._filter(_DROP_RESETS)
                self._open_again_s = 0.0
                self._begin_window()
            return
        left = free()
        if left < ENOUGH or self._free - left > self._share or self._cpu_s() - self._cpu_mark_s > MAX_CPU_S:
            self._shut(now_s)
        elif now_s - self._since_s >= WINDOW_S:
            self._closed_s = CLOSED_S
            self._begin_window()

    def close(self) -> None:
        """Let go of the port. The socket has its own descriptor of it, and closes that."""
        _tcp_listeners.discard(self)
        self._listener.close()

    def close_in_child(self) -> None:
        """In a forked child: a port that it holds would stay taken when the training has ended."""
        self._listener.close()
        os.close(self._given)

    def _begin_window(self) -> None:
        self._since_s = time.monotonic()
        self._free = free()
        self._share = min(MAX_DESCRIPTORS, (self._free - ENOUGH) // 2)
        self._cpu_mark_s = self._cpu_s()

    def _shut(self, now_s: float) -> None:
        if not self._filter(_DROP_ALL):
            # When descriptors become scarce the publisher goes away as a whole.
            self._begin_window()
            return
        if self._closed_s == CLOSED_S:
            self._note("strangers", CROWDED)
        self._open_again_s = now_s + self._closed_s
        self._since_s, self._cpu_mark_s = now_s, self._cpu_s()
        self._closed_s = min(2 * self._closed_s, MAX_CLOSED_S)

    def _filter(self, program: Sequence[bytes]) -> bool:
        """What the kernel lets through from now on; False = there are no such filters here."""
        code = ctypes.create_string_buffer(b"".join(program))
        reported = struct.pack("HL", len(program), ctypes.addressof(code))
        try:
            self._listener.setsockopt(sockets.SOL_SOCKET, _SO_ATTACH_FILTER, reported)
        except OSError:
            return False
        return True

    def _note_refused(self) -> None:
        """At the first, and whenever there are ten times as many."""
        refused = self._keeper.refused
        if refused >= max(1, 10 * self._reported):
            self._reported = refused
            times = "once" if refused == 1 else f"{refused} times"
            self._note("refused", f"Somebody without the key of this run was refused at its TCP port, {times} so far.")

    def _cpu_s(self) -> float:
        if self._clock is None:
            # A thread that has just begun may not have its name yet.
            self._clock = _cpu_clock(self._candidates)
        if self._clock is None:
            return 0.0
        try:
            return time.clock_gettime(self._clock)
        except OSError:
            return 0.0


_tcp_listeners: weakref.WeakSet[TcpListener] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for tcp_listener in list(_tcp_listeners):
        tcp_listener.close_in_child()
    _tcp_listeners.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _cpu_clock(new_threads: Iterable[str]) -> int | None:
    """The clock that tells how long libzmq's own thread has worked; None = it is not among these."""
    for number in new_threads:
        try:
            with open(f"{_TASKS}/{number}/comm") as file:  # noqa: PTH123 - one read
                if file.read().startswith(_IO_THREAD):
                    return (~int(number) << 3) | 6  # as pthread_getcpuclockid makes it
        except OSError:
            continue
    return None


HOST: Final = "DDPWATCH_HOST"
IFACE: Final = "DDPWATCH_IFACE"
PORT_BASE: Final = "DDPWATCH_PORT_BASE"
BACKLOG: Final = 64
_PORTS: Final = range(1, 1 << 16)
# Addresses of documentation, which nobody has: the way there is that of everything outside.
_OUTSIDE: Final = ("192.0.2.1", "2001:db8::1")
_FAMILIES: Final = {4: sockets.AF_INET, 6: sockets.AF_INET6}


class NoAddressError(Exception):
    """The rank cannot listen on TCP as it was told to. The text says why."""


def listen(store_host: str, place: int, say: Callable[[str], None], *, port: int = 0) -> tuple[sockets.socket, str]:
    """A listening socket, and the address that others find it at.

    `place` is the rank's among those of its node, `port` the one it had before.
    A fixed port that is taken is said, and any other one is used: inside the cluster that does, behind a firewall it
    does not. A wish for an interface that is not there is not replaced by another one.
    """
    announced, bound = _choose(store_host)
    wanted = port or _wanted_port(place)
    try:
        listener = _bind(bound, wanted)
    except OSError as error:
        if not wanted:
            raise NoAddressError(f"cannot listen on {bound}: {error.strerror}") from None
        try:
            listener = _bind(bound, 0)
        except OSError as again:
            raise NoAddressError(f"cannot listen on {bound}: {again.strerror}") from None
        say(
            f"Port {wanted} cannot be used on {bound}: {error.strerror}. This rank listens on port "
            f"{listener.getsockname()[1]} instead, which a firewall may not let through."
        )
    port = listener.getsockname()[1]
    return listener, f"tcp://[{announced}]:{port}" if ":" in announced else f"tcp://{announced}:{port}"


def _wanted_port(place: int) -> int:
    text = os.environ.get(PORT_BASE, "")
    if not text:
        return 0
    port = int(text) + place if text.isdecimal() else 0
    if port not in _PORTS:
        raise NoAddressError(f"{PORT_BASE}={text[:40]} leaves no port for this rank")
    return port


def _choose(store_host: str) -> tuple[str, str]:
    """What is announced, and the address that is bound."""
    if chosen := os.environ.get(HOST):
        return chosen, _resolved(chosen)
    if interface := os.environ.get(IFACE):
        found = _of_interface(interface)
        if not found:
            there = ", ".join(sorted(psutil.net_if_addrs()))[:200]
            raise NoAddressError(f"{IFACE}={interface[:40]} has no address here; there are: {there}")
        return found, found
    for target in (store_host, *_OUTSIDE):
        if (found := _way_to(target)) and not ipaddress.ip_address(found).is_loopback:
            return found, found
    found = next(filter(None, map(_of_interface, sorted(psutil.net_if_addrs()))), "127.0.0.1")
    return found, found


def _resolved(name: str) -> str:
    """The address of this host that a name stands for; that of all interfaces if it is known to others only."""
    try:
        addresses = [str(each[4][0]) for each in sockets.getaddrinfo(name, None, type=sockets.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise NoAddressError(f"{HOST}={name[:80]} cannot be resolved: {error}") from None
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    # A whole network is this host's on lo; psutil names one address of it.
    here = [address for address in addresses if address in own or ipaddress.ip_address(address).is_loopback]
    return here[0] if here else "::" if ":" in addresses[0] else "0.0.0.0"  # noqa: S104 - the user has named the host


def _way_to(host: str) -> str:
    """This host's address on the way there; empty = there is none. A UDP socket is connected, nothing is sent."""
    with contextlib.suppress(OSError, UnicodeError):
        for family, _, _, _, address in sockets.getaddrinfo(host, 9, type=sockets.SOCK_DGRAM) if host else ():
            with contextlib.suppress(OSError), sockets.socket(family, sockets.SOCK_DGRAM) as probe:
                probe.connect(address)
                found = str(probe.getsockname()[0])
                if not _is_link_local(found):
                    return found
    return ""


def _of_interface(name: str) -> str:
    entries = psutil.net_if_addrs().get(name, ())
    for family in (sockets.AF_INET, sockets.AF_INET6):
        for entry in entries:
            if entry.family == family and not _is_link_local(entry.address):
                return str(entry.address)
    return ""


def _is_link_local(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_link_local


def _bind(address: str, port: int) -> sockets.socket:
    listener = sockets.socket(_FAMILIES[ipaddress.ip_address(address).version], sockets.SOCK_STREAM)
    try:
        # For a restart of the job on the same port; two listeners at once it does not allow.
        listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
