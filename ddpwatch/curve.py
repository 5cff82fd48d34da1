"""CURVE on TCP: a run's keys, and who is let in. Shared by who listens and who connects; plain TCP does not exist.

Every listener has a pair of its own, whose secret half never leaves its process. All viewers of a run share one pair,
made with the run: who has its secret half, which stands in `run.json` and in tickets, may watch.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import zmq
from zmq.utils import z85

DOMAIN: Final = b"ddpwatch"
ZAP: Final = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a key is known, in the context of the socket that was connected to."""
HANDSHAKE_MS: Final = 10_000
"""Who has not shown a good key by then is sent away. Long enough for a host that is busy, or a viewer of thousands."""
LISTENER_READS_BYTES: Final = 1024
"""No command of a handshake is longer, nor is a subscription."""
LISTENER_PATIENCE_S: Final = 30
"""A viewer that is gone without a word is let go after this; one that only stands still comes back by itself."""
LISTENER_PROBES: Final = 3
"""By the kernel, in that time. Not by libzmq: it may abort the process over a heartbeat for somebody who has left while
their messages wait for room.
"""
VIEWER_PING_MS: Final = 2000
VIEWER_PATIENCE_MS: Final = 6000
CONNECT_MS: Final = 2000
"""A host that was cut off is tried anew this often: left to itself TCP would wait for minutes after a minute's cut."""


def available() -> bool:
    """Whether this libzmq can encrypt. Without it nothing listens on TCP."""
    return bool(zmq.has("curve"))


def new_keys() -> tuple[str, str]:
    """A pair: public, secret."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


@lru_cache(maxsize=4)
def public_of(secret_key: str) -> str:
    """The public half. Raises `ValueError` for what is no key."""
    try:
        return zmq.curve_public(secret_key.encode()).decode()
    except (zmq.ZMQError, ValueError, KeyError):
        raise ValueError("is no CURVE key") from None


def is_secret_key(text: str) -> bool:
    """Whether it can be the secret half of a pair."""
    try:
        public_of(text)
    except ValueError:
        return False
    return True


def listen_with(socket: zmq.Socket[bytes], secret_key: str) -> None:
    """What the socket binds from now on speaks CURVE, and asks a `Gatekeeper` of the same context about every key."""
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret_key.encode())
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.MAXMSGSIZE, LISTENER_READS_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, LISTENER_PATIENCE_S // LISTENER_PROBES)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, LISTENER_PATIENCE_S // LISTENER_PROBES)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, LISTENER_PROBES - 1)
    socket.setsockopt(zmq.TCP_MAXRT, LISTENER_PATIENCE_S * 1000)


def connect(socket: zmq.Socket[bytes], address: str, server_key: str, viewer_secret_key: str) -> None:
    """Connect to who has this public key, as a viewer. Raises `ValueError` for keys that are none."""
    public_key = public_of(viewer_secret_key)
    try:
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    except (zmq.ZMQError, UnicodeEncodeError):
        raise ValueError("is no CURVE key") from None
    socket.setsockopt(zmq.CURVE_SECRETKEY, viewer_secret_key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key.encode())
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, VIEWER_PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, VIEWER_PATIENCE_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    # IPv4 alone where that is what the address is: a host may have no IPv6 at all.
    socket.setsockopt(zmq.IPV6, int(re.fullmatch(r"tcp://[\d.]+:\d+", address) is None))
    socket.connect(address)


def connect_here(socket: zmq.Socket[bytes], address: str) -> None:
    """Connect to a socket file of this host: the directory that it is in says who may."""
    socket.setsockopt(zmq.CURVE_SERVER, 0)  # which also means: no keys
    socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
    socket.connect(address)


class Gatekeeper:
    """Answers libzmq's question about each key that is shown, in the thread that made it. Made before the first bind.

    Who does not know the listener's own public key does not even get as far as this.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], viewer_public_key: str) -> None:
        """Let in who has the secret half of this key, and nobody else."""
        self.socket = context.socket(zmq.REP)
        """Readable when somebody is at the door."""
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP)
        self._known = z85.decode(viewer_public_key.encode())
        self.refused = 0
        """Keys that were shown and are not the viewers'."""

    def answer(self, most: int) -> int:
        """Answer at most so many; how many it were."""
        for answered in range(most):
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return answered
            known = len(request) == 7 and request[5] == b"CURVE" and request[6] == self._known
            self.refused += not known
            verdict = (b"200", b"OK") if known else (b"400", b"unknown key")
            self.socket.send_multipart([b"1.0", request[1], *verdict, b"", b""])
        return most
