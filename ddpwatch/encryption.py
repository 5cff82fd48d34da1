"""CurveZMQ encryption and authentication of TCP connections, for listeners (agent, relay) and viewers.

Every listener has its own key pair, whose secret key never leaves its process. All viewers of a run share one key pair,
created with the run: the secret key in `run.json` and in tickets admits a viewer. Nothing listens on plain TCP.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import zmq
from zmq.utils import z85

DOMAIN: Final = b"ddpwatch"
ZAP: Final = "inproc://zeromq.zap.01"
"""Where libzmq asks whether a key is admitted (ZAP, RFC 27), in the context of the listening socket."""
HANDSHAKE_MS: Final = 10_000
"""A peer without a good key is disconnected after this. Long enough for a busy host, or a viewer of thousands."""
LISTENER_READS_BYTES: Final = 1024
"""Longest message that a listener reads: more than any handshake command or subscription."""
LISTENER_PATIENCE_S: Final = 30
"""A vanished viewer is dropped after this; one that was only suspended reconnects by itself."""
LISTENER_PROBES: Final = 3
"""TCP keepalive probes in that time. Not ZeroMQ heartbeats: libzmq may abort the process over a heartbeat for a peer
that has left while messages for it are queued.
"""
VIEWER_PING_MS: Final = 2000
"""Interval in milliseconds of a viewer's ZeroMQ heartbeats."""
VIEWER_PATIENCE_MS: Final = 6000
"""Milliseconds without an answer to them after which a viewer reconnects."""
CONNECT_MS: Final = 2000
"""Timeout of a connection attempt. TCP's own backoff would wait for minutes after an outage of one minute."""


def available() -> bool:
    """Whether this libzmq supports CURVE. Without it nothing listens on TCP."""
    return bool(zmq.has("curve"))


def new_keys() -> tuple[str, str]:
    """A new key pair: public, secret."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


@lru_cache(maxsize=4)
def public_of(secret_key: str) -> str:
    """The public key of a secret key. Raises `ValueError` for an invalid key."""
    try:
        return zmq.curve_public(secret_key.encode()).decode()
    except (zmq.ZMQError, ValueError, KeyError):
        raise ValueError("is not a CURVE key") from None


def is_secret_key(text: str) -> bool:
    """Whether the text is a valid secret key."""
    try:
        public_of(text)
    except ValueError:
        return False
    return True


def listen_with(socket: zmq.Socket[bytes], secret_key: str) -> None:
    """Make later binds of the socket use CURVE, with a `ZapHandler` of the same context admitting keys."""
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
    """Connect as a viewer to the listener with this public key. Raises `ValueError` for invalid keys."""
    public_key = public_of(viewer_secret_key)
    try:
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
    except (zmq.ZMQError, UnicodeEncodeError):
        raise ValueError("is not a CURVE key") from None
    socket.setsockopt(zmq.CURVE_SECRETKEY, viewer_secret_key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public_key.encode())
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, VIEWER_PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, VIEWER_PATIENCE_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    # Without IPv6 for a numeric IPv4 address: a host may have no IPv6 at all.
    socket.setsockopt(zmq.IPV6, int(re.fullmatch(r"tcp://[\d.]+:\d+", address) is None))
    socket.connect(address)


def connect_ipc(socket: zmq.Socket[bytes], address: str) -> None:
    """Connect to a Unix socket of this host, which the permissions of its directory protect."""
    socket.setsockopt(zmq.CURVE_SERVER, 0)  # also clears the keys
    socket.setsockopt(zmq.HEARTBEAT_IVL, 0)
    socket.connect(address)


class ZapHandler:
    """ZAP handler that admits one viewer key. Created before the first bind, in the thread that answers.

    A peer that does not know the listener's own public key is rejected by libzmq before it gets here.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], viewer_public_key: str) -> None:
        self.socket = context.socket(zmq.REP)
        """Readable when libzmq asks about a key."""
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP)
        self._known = z85.decode(viewer_public_key.encode())
        self.refused = 0
        """Requests with another key than the viewers'."""

    def answer(self, most: int) -> int:
        """Answer at most `most` requests; returns their number."""
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
