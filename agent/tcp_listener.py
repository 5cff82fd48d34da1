"""The TCP port of a rank: which address it listens on, CURVE encryption, and a limit on strangers' connections.

A connection without the run's key costs the training process a descriptor and time of libzmq's I/O thread until it is
refused. When either exceeds its limit, a socket filter makes the kernel drop new packets for a while; that costs this
process nothing, and established connections stay.
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

from ddpwatch import encryption
from ddpwatch.agent.resource_limits import ENOUGH, free

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

WINDOW_S: Final = encryption.HANDSHAKE_MS / 1000
"""Seconds that a handshake may take; what strangers hold is freed after it."""
MAX_DESCRIPTORS: Final = 256
"""Descriptors that connections may take in a window, or half of the free ones if that is less."""
MAX_CPU_S: Final = 0.25
"""CPU seconds that libzmq's I/O thread may use in a window."""
CHECK_INTERVAL_S: Final = 0.01
"""Seconds between checks of the load while connections arrive."""
CLOSED_S: Final = WINDOW_S
"""Seconds that the port stays closed at first. Not shorter than a handshake: the same strangers would still hold on."""
MAX_CLOSED_S: Final = 40.0
"""Upper bound in seconds of that time, which doubles with each closing (exponential backoff)."""
MAX_KEY_CHECKS: Final = 64
"""Keys that are checked before other sockets are served."""
_TASKS: Final = "/proc/self/task"
_IO_THREAD: Final = "ZMQbg/IO"
_SO_ATTACH_FILTER: Final = 26
"""SO_ATTACH_FILTER of <asm-generic/socket.h>, which Python does not name."""
# Programs of classic BPF; their input begins with the TCP header.
_DROP_ALL: Final = (struct.pack("HBBI", 0x06, 0, 0, 0),)
# Drops resets, also on connections accepted from this port: when a reset arrives while messages of the same viewer wait
# for room with a heartbeat behind them, libzmq 4.3.5 aborts the process (`!_io_error`, stream_engine_base.cpp).
# A connection that was reset times out instead.
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
    """Thread ids of this process."""
    return set(os.listdir(_TASKS))  # noqa: PTH208 - only names are needed


class TcpListener:
    """TCP port of the agent's XPUB socket. Used by the agent's thread only."""

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
        """Bind the socket to the listener with this key. libzmq's I/O thread is one of `new_threads`."""
        self._note = note
        self._listener = listener
        self._gatekeeper = encryption.ZapHandler(context, viewer_public_key)
        encryption.listen_with(socket, secret_key)
        self._filter(_DROP_RESETS)
        self._bound_fd = os.dup(listener.fileno())
        socket.setsockopt(zmq.USE_FD, self._bound_fd)
        socket.bind(f"tcp://127.0.0.1:{listener.getsockname()[1]}")  # USE_FD decides the address, not this
        socket.setsockopt(zmq.USE_FD, -1)
        _tcp_listeners.add(self)
        self._candidates = list(new_threads)
        self._cpu_clock: int | None = None
        self._reported_refusals = 0
        self._closed_s = CLOSED_S
        self._reopen_s = 0.0
        """When the port opens again; 0 = it is open."""
        self.flooded = False
        """Whether libzmq's thread is too busy although the port is closed: the cause is a viewer that has the key."""
        self._next_check_s = 0.0
        self._begin_window()

    def watched(self) -> list[Any]:
        """Sockets to poll in addition to the XPUB socket."""
        resting = self._reopen_s or time.monotonic() < self._next_check_s
        return [self._gatekeeper.socket] if resting else [self._gatekeeper.socket, self._listener.fileno()]

    @property
    def closed_for_s(self) -> float:
        """Seconds until new connections are polled again; 0 = they are, or the port is closed."""
        return 0.0 if self._reopen_s else max(0.0, self._next_check_s - time.monotonic())

    def handle_ready(self, ready: Iterable[Any]) -> None:
        """Check the keys of new connections, and the load that connections cause."""
        for which in ready:
            if which is self._gatekeeper.socket:
                self._gatekeeper.answer(MAX_KEY_CHECKS)
                self._note_refused()
            elif which == self._listener.fileno():
                self._next_check_s = time.monotonic() + CHECK_INTERVAL_S
                self.check_load()

    def check_load(self) -> None:
        """Close or reopen the port by the load. Called at new connections and at each flush."""
        now_s = time.monotonic()
        if self._reopen_s:
            windows = max(1.0, (now_s - self._since_s) / WINDOW_S)
            self.flooded = self._cpu_s() - self._cpu_mark_s > MAX_CPU_S * windows
            if now_s >= self._reopen_s:
                self._filter(_DROP_RESETS)
                self._reopen_s = 0.0
                self._begin_window()
            return
        left = free()
        if left < ENOUGH or self._free - left > self._max_taken or self._cpu_s() - self._cpu_mark_s > MAX_CPU_S:
            self._shut(now_s)
        elif now_s - self._since_s >= WINDOW_S:
            self._closed_s = CLOSED_S
            self._begin_window()

    def close(self) -> None:
        """Release the port. libzmq has its own descriptor of it, and closes that."""
        _tcp_listeners.discard(self)
        self._listener.close()

    def close_in_child(self) -> None:
        """Release the port in a forked child, which would keep it taken after the training has ended."""
        self._listener.close()
        os.close(self._bound_fd)

    def _begin_window(self) -> None:
        self._since_s = time.monotonic()
        self._free = free()
        self._max_taken = min(MAX_DESCRIPTORS, (self._free - ENOUGH) // 2)
        self._cpu_mark_s = self._cpu_s()

    def _shut(self, now_s: float) -> None:
        if not self._filter(_DROP_ALL):
            # No filter: if descriptors become scarce, the publisher stops listening altogether.
            self._begin_window()
            return
        if self._closed_s == CLOSED_S:
            self._note("strangers", CROWDED)
        self._reopen_s = now_s + self._closed_s
        self._since_s, self._cpu_mark_s = now_s, self._cpu_s()
        self._closed_s = min(2 * self._closed_s, MAX_CLOSED_S)

    def _filter(self, program: Sequence[bytes]) -> bool:
        """Attach a BPF program to the listening socket; False = the system has none."""
        code = ctypes.create_string_buffer(b"".join(program))
        sock_fprog = struct.pack("HL", len(program), ctypes.addressof(code))
        try:
            self._listener.setsockopt(sockets.SOL_SOCKET, _SO_ATTACH_FILTER, sock_fprog)
        except OSError:
            return False
        return True

    def _note_refused(self) -> None:
        """Note the first refusal, and each tenfold increase."""
        refused = self._gatekeeper.refused
        if refused >= max(1, 10 * self._reported_refusals):
            self._reported_refusals = refused
            times = "once" if refused == 1 else f"{refused} times"
            self._note("refused", f"Somebody without the key of this run was refused at its TCP port, {times} so far.")

    def _cpu_s(self) -> float:
        if self._cpu_clock is None:
            # Not in the constructor: a thread that has just started may not have its name yet.
            self._cpu_clock = _io_thread_clock(self._candidates)
        if self._cpu_clock is None:
            return 0.0
        try:
            return time.clock_gettime(self._cpu_clock)
        except OSError:
            return 0.0


_tcp_listeners: weakref.WeakSet[TcpListener] = weakref.WeakSet()


def _close_in_child() -> None:
    for tcp_listener in list(_tcp_listeners):
        tcp_listener.close_in_child()
    _tcp_listeners.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _io_thread_clock(new_threads: Iterable[str]) -> int | None:
    """Clock id of the CPU time of libzmq's I/O thread; None = it is not among these threads."""
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
"""Connections that the kernel queues until libzmq accepts them."""
_PORTS: Final = range(1, 1 << 16)
# Addresses reserved for documentation: the route to them is the default route.
_OUTSIDE: Final = ("192.0.2.1", "2001:db8::1")
_FAMILIES: Final = {4: sockets.AF_INET, 6: sockets.AF_INET6}


class NoAddressError(Exception):
    """The rank cannot listen on TCP as it is configured. The text has the reason."""


def listen(store_host: str, place: int, say: Callable[[str], None], *, port: int = 0) -> tuple[sockets.socket, str]:
    """A listening socket, and the address to announce for it.

    `place` is the rank's index on its node, `port` the one it had before. If a fixed port is taken, any other one is
    used and a note is made: that works inside the cluster, but not behind a firewall. A configured interface that does
    not exist is an error.
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
    """The address to announce, and the address to bind."""
    if chosen := os.environ.get(HOST):
        return chosen, _resolved(chosen)
    if interface := os.environ.get(IFACE):
        found = _of_interface(interface)
        if not found:
            there = ", ".join(sorted(psutil.net_if_addrs()))[:200]
            raise NoAddressError(f"{IFACE}={interface[:40]} has no address here; there are: {there}")
        return found, found
    for target in (store_host, *_OUTSIDE):
        if (found := _source_address(target)) and not ipaddress.ip_address(found).is_loopback:
            return found, found
    found = next(filter(None, map(_of_interface, sorted(psutil.net_if_addrs()))), "127.0.0.1")
    return found, found


def _resolved(name: str) -> str:
    """The address of this host that a name resolves to; all interfaces if the name is not of this host."""
    try:
        addresses = [str(each[4][0]) for each in sockets.getaddrinfo(name, None, type=sockets.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise NoAddressError(f"{HOST}={name[:80]} cannot be resolved: {error}") from None
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    # The whole loopback network belongs to this host; psutil lists one address of it.
    here = [address for address in addresses if address in own or ipaddress.ip_address(address).is_loopback]
    return here[0] if here else "::" if ":" in addresses[0] else "0.0.0.0"  # noqa: S104 - the user has named the host


def _source_address(host: str) -> str:
    """This host's address on the route to another; empty = no route. Connects a UDP socket, which sends nothing."""
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
        # For a restart of the job on the same port; it does not allow two listeners at once.
        listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener
