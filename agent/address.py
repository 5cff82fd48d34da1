"""Which of this host's addresses a rank listens on over TCP, and on which port. Sends nothing to anybody."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket as sockets
from typing import TYPE_CHECKING, Final

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable

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
