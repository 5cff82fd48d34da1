"""Addresses that a user names, as HOST:PORT, and sockets that listen there."""

from __future__ import annotations

import re
import socket
from typing import Final

from ddpwatch.errors import UsageError

_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\[\]:\s/@]+)):(?P<port>[0-9]{1,5})")


def listen(address: str, option: str, backlog: int) -> socket.socket:
    """A socket that listens there. Whatever is wrong with the address is to be corrected by who gave the option."""
    host, port = read_address(address, option)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        raise UsageError(f"{option} {address}: there is no host of that name") from None
    family, kind, protocol, _, place = places[0]
    try:
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _refusal(address, option, error) from None
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        # Here and not in the thread: that a port is in use may come out only now.
        listening.listen(backlog)
    except OSError as error:
        listening.close()
        raise _refusal(address, option, error) from None
    listening.setblocking(False)
    return listening


def read_address(address: str, option: str) -> tuple[str, int]:
    """Host and port. Refuses what is none by the name of the option."""
    found = _ADDRESS.fullmatch(address)
    if found is None or int(found["port"]) > 65535:
        raise UsageError(f"{option} {address}: is no address such as 127.0.0.1:9464 or [::1]:9464")
    return found["v6"] or found["host"], int(found["port"])


def joined(host: str, port: int) -> str:
    """The two as one text, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _refusal(address: str, option: str, error: OSError) -> UsageError:
    reason = (error.strerror or str(error)).lower()
    return UsageError(f"{option} {address}: cannot listen there: {reason}; choose another address or port")
