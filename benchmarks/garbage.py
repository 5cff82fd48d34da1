"""Bytes that an agent should never see, in endless variety and always the same: ZMTP as it is not meant.

For the benchmark that attacks a training with them, and the test that does so in short.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    import socket
    from collections.abc import Iterator

MORE, LONG, COMMAND = 1, 2, 4
KNOWN = (b"hello", b"step", b"beat", b"gpu", b"event", b"bucket", b"snap/", b"stack/", b"stacks/", b"")
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
LONGEST = 64
"""Of a message that the ranks' own sockets take."""
GIVEN_BACK = 0.97
"""Fraction of subscribed topics that are unsubscribed again."""


def greeting(mechanism: bytes = b"NULL", *, minor: int = 1, server: bool = False) -> bytes:
    """The first 64 bytes of a peer."""
    return SIGNATURE + bytes([3, minor]) + mechanism.ljust(20, b"\0") + bytes([server]) + bytes(31)


def frame(body: bytes, flags: int = 0) -> bytes:
    """A message or command as it travels."""
    if len(body) > 255 or flags & LONG:
        return struct.pack(">BQ", flags | LONG, len(body)) + body
    return bytes([flags, len(body)]) + body


def command(name: bytes, data: bytes = b"") -> bytes:
    """A command of the protocol."""
    return frame(bytes([len(name)]) + name + data, COMMAND)


def ready(socket_type: bytes) -> bytes:
    """What ends the handshake without encryption."""
    name = b"Socket-Type"
    return command(b"READY", bytes([len(name)]) + name + struct.pack(">I", len(socket_type)) + socket_type)


def shake_hands(connection: socket.socket) -> None:
    """Become a viewer that needs no key. What came before the other side is done would count as part of this."""
    connection.sendall(greeting() + ready(b"XSUB"))
    expected = len(greeting() + ready(b"XPUB"))
    while expected > 0:
        text = connection.recv(expected)
        if not text:
            raise ConnectionResetError
        expected -= len(text)


def mutated(chance: random.Random, text: bytes) -> bytes:
    """Some bytes turned, cut, doubled or put in."""
    changed = bytearray(text)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        kind = chance.randrange(5)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del changed[at : at + chance.randint(1, 16)]
        elif kind == 2:
            changed[at:at] = chance.randbytes(chance.randint(1, 16))
        elif kind == 3:
            changed[at:at] = changed[max(0, at - 16) : at]
        elif at < len(changed):
            changed[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
    return bytes(changed)


def topic(chance: random.Random) -> bytes:
    """A topic that is not published, or one that begins like those that cost something."""
    return (chance.choice(KNOWN) + chance.randbytes(chance.randrange(LONGEST)))[: LONGEST - 1]


def from_viewers(chance: random.Random) -> Iterator[bytes]:
    """Frames of an accepted peer: mostly well-formed, or the connection would end at once."""
    kinds, weights = list(_FROM_VIEWERS), list(_FROM_VIEWERS.values())
    while True:
        yield from chance.choices(kinds, weights)[0](chance, topic(chance))


def _subscribe(chance: random.Random, name: bytes) -> list[bytes]:
    """Most topics are unsubscribed soon: a peer that collects them is disconnected, and little else would be tried."""
    return [frame(b"\x01" + name), *([frame(b"\x00" + name)] if chance.random() < GIVEN_BACK else [])]


def _subscribe_by_command(chance: random.Random, name: bytes) -> list[bytes]:
    name = name[: LONGEST - 12]
    back = [command(b"CANCEL", name)] if chance.random() < GIVEN_BACK else []
    return [command(b"SUBSCRIBE", name), *back]


def _cancel(_: random.Random, name: bytes) -> list[bytes]:
    return [frame(b"\x00" + name)]


def _message(chance: random.Random, name: bytes) -> list[bytes]:
    return [frame(name, chance.choice((0, 0, MORE)))]


def _known_topic(chance: random.Random, _: bytes) -> list[bytes]:
    return [frame(chance.choice((b"\x00", b"\x01")) + chance.choice(KNOWN))]


def _heartbeat(chance: random.Random, name: bytes) -> list[bytes]:
    return [command(chance.choice((b"PING", b"PONG")), struct.pack(">H", chance.randrange(1 << 16)) + name[:16])]


def _unknown_command(chance: random.Random, name: bytes) -> list[bytes]:
    return [command(chance.randbytes(chance.randint(1, 8)), name[:32])]


def _breaker(chance: random.Random, _: bytes) -> list[bytes]:
    return [breaker(chance)]


_FROM_VIEWERS = {
    _subscribe: 300,
    _subscribe_by_command: 150,
    _cancel: 150,
    _message: 200,
    _known_topic: 100,
    _heartbeat: 80,
    _unknown_command: 20,
    _breaker: 0.5,
}
"""With how often each of them is chosen."""


def breaker(chance: random.Random) -> bytes:
    """What no connection survives, or should."""
    return chance.choice(
        (
            frame(bytes(4000)),
            struct.pack(">BQ", LONG, 1 << 62),
            struct.pack(">BQ", LONG | COMMAND, (1 << 64) - 1),
            b"\xff\xff",
            command(b"ERROR", b"\xff" + bytes(3)),
            chance.randbytes(64),
        )
    )


def from_strangers(chance: random.Random, hello: bytes) -> list[bytes]:
    """Messages of a peer without a key, in order; `hello` is a correct one."""
    first = greeting(chance.choice((b"CURVE", b"CURVE", b"NULL", b"PLAIN")), minor=chance.randrange(3))
    second = chance.choice((hello, hello, ready(b"SUB"), command(b"HELLO", chance.randbytes(194))))
    third = chance.choice((command(b"INITIATE", chance.randbytes(chance.choice((257, 500)))), ready(b"SUB"), b""))
    messages = [first, second, third]
    if chance.random() < 0.8:
        at = chance.randrange(3)
        messages[at] = mutated(chance, messages[at])
    return [message for message in messages if message]
