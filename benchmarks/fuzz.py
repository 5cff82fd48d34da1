"""A million frames and handshakes that nobody should send, against live agents, while they train.

Two real gloo ranks on loopback. Somebody with access to their socket files speaks raw ZMTP, somebody with the run's key
sends hostile topics over CURVE, and strangers send handshakes that are almost right.

python -m benchmarks.fuzz [cost | volume] [FRAMES]

`cost`: what such an attack costs the training; ranks soon send such viewers away. `volume`: with the limits on viewers
lifted, so that ranks take all of it. Nothing is timed then, only what comes of it is looked at.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import sys
import time
from collections import deque
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import zmq

from benchmarks import garbage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.siege import Outcome, Target

FRAMES = 1_000_000
PAIRS = 16
BLOCK_S = 3.0
VOLUME_PAIRS = 4
MAX_VOLUME_PAIRS = 24
VOLUME_S = 10.0
VOLUME_QUIET_S = 0.5
TURN_S = 0.01
INTRUDERS = 3
"""At each rank."""
RAW_PER_TURN = 20
"""Of each of them: more than an agent reads."""
KEYED_PER_TURN = 4
HANDSHAKES_PER_TURN = 3
HELD_STRANGERS = 512
BUDGET = 1.004
MAX_GROWN_BYTES = 30 << 20
MAX_GAP_S = 5.0
MAX_SPENT = 0.004
"""Of a core, as without an attack."""


class Intruder:
    """An attacker with access to the ranks' directory that speaks malformed ZMTP.

    Does not leave by itself: at a socket file, libzmq may abort the process whose peer goes while its frames wait.
    """

    def __init__(self, path: str, seed: int) -> None:
        self._path = path
        self._frames: Iterator[bytes] = garbage.from_viewers(random.Random(seed))
        self._socket: socket.socket | None = None
        self._unsent = b""

    def turn(self, *, attack: bool) -> int:
        """Send some frames, or make them and throw them away; how many have left."""
        frames = list(itertools.islice(self._frames, RAW_PER_TURN))
        text = b"".join(frames)
        if not attack:
            return 0
        try:
            connection = self._socket or self._connect()
            with contextlib.suppress(BlockingIOError):
                if not connection.recv(1 << 16):
                    raise ConnectionResetError
            if self._unsent:
                self._unsent = self._unsent[connection.send(self._unsent) :]
            if self._unsent:
                return 0
            self._unsent = text[connection.send(text) :]
        except BlockingIOError:
            return 0
        except OSError:
            self._drop()
            return 0
        return len(frames)

    def _connect(self) -> socket.socket:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(0.2)
        self._socket.connect(self._path)
        garbage.shake_hands(self._socket)
        self._socket.setblocking(False)
        return self._socket

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._unsent = None, b""


class Traitor:
    """Somebody with the run's key, over TCP."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], target: Target, seed: int) -> None:
        from ddpwatch import encryption

        self._chance = random.Random(seed)
        self._sockets = []
        for port, key in zip(target.ports, target.server_keys, strict=True):
            made = context.socket(zmq.XSUB)
            made.setsockopt(zmq.LINGER, 0)
            made.setsockopt(zmq.SNDHWM, 64)
            made.setsockopt(zmq.RCVHWM, 16)
            made.setsockopt(zmq.RECONNECT_IVL, 100)
            encryption.connect(made, f"tcp://127.0.0.1:{port}", key, target.viewer_secret_key)
            self._sockets.append(made)

    def turn(self, *, attack: bool) -> int:
        """Send some subscriptions to each rank; how many have left."""
        sent = 0
        for made in self._sockets:
            with contextlib.suppress(zmq.Again):
                for _ in range(16):
                    made.recv(zmq.NOBLOCK)
            for _ in range(KEYED_PER_TURN // len(self._sockets)):
                name = garbage.topic(self._chance) + bytes(self._chance.choice((0, 0, 0, 900)))
                if attack:
                    with contextlib.suppress(zmq.Again):
                        made.send(b"\x01" + name, zmq.NOBLOCK)
                        made.send(b"\x00" + name, zmq.NOBLOCK)
                        sent += 2
        return sent


class Strangers:
    """Attackers without a key that try the handshake."""

    def __init__(self, target: Target, hello: bytes, seed: int) -> None:
        self._target = target
        self._hello = hello
        self._chance = random.Random(seed)
        self._held: deque[tuple[socket.socket, list[bytes]]] = deque()
        self._count = 0

    def turn(self, *, attack: bool) -> int:
        """Connect a few more and let the earlier ones go on; returns the number of messages sent."""
        for _ in range(HANDSHAKES_PER_TURN):
            self._count += 1
            port = self._target.ports[self._count % 2] if attack else self._target.nobody
            stranger = socket.socket()
            stranger.setblocking(False)
            stranger.connect_ex(("127.0.0.1", port))
            self._held.append((stranger, garbage.from_strangers(self._chance, self._hello)))
        sent = 0
        for stranger, messages in list(self._held)[-4 * HANDSHAKES_PER_TURN :]:
            with contextlib.suppress(OSError):
                while messages:
                    stranger.send(messages[0])
                    messages.pop(0)
                    sent += 1
        while len(self._held) > HELD_STRANGERS:
            self._held.popleft()[0].close()
        return sent if attack else 0


def hello_for(server_key: str, viewer_secret_key: str) -> bytes:
    """A CURVE HELLO that a rank with this key takes for good: made by libzmq for a socket that only listens."""
    from ddpwatch import encryption

    with zmq.Context() as context, context.socket(zmq.SUB) as client, socket.create_server(("127.0.0.1", 0)) as server:
        client.linger = 0
        encryption.connect(client, f"tcp://127.0.0.1:{server.getsockname()[1]}", server_key, viewer_secret_key)
        peer, _ = server.accept()
        with peer:
            peer.settimeout(5)
            peer.sendall(garbage.greeting(b"CURVE", server=True))
            text = b""
            while len(text) < 64 + 202:
                text += peer.recv(4096)
    return text[64:]


def attack(target: Target, at_ranks: Any, made: Any) -> None:
    """All of them at once, at an even pace, for as long as this process lives."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hello = hello_for(target.server_keys[0], target.viewer_secret_key)
    parties = [
        *(Intruder(path, seed) for seed, path in enumerate(target.files * INTRUDERS)),
        Traitor(context, target, 100),
        Strangers(target, hello, 101),
    ]
    began_s = time.monotonic()
    for number in itertools.count():
        now = bool(at_ranks.value)
        made.value += sum(party.turn(attack=now) for party in parties)
        time.sleep(max(0.0, began_s + number * TURN_S - time.monotonic()))


def cost() -> None:
    """The step under attack against the step in between, and what ddpwatch itself takes."""
    from benchmarks.pairs import noise, row
    from benchmarks.siege import Plan, siege

    found = siege(attack, Plan(PAIRS, BLOCK_S, BLOCK_S))
    spread = noise(found.between)
    row(
        f"two gloo ranks of {median(found.quiet_s) * 1e3:.1f} ms steps, garbage",
        f"x {found.ratio:.4f}",
        f"x {BUDGET}",
        found.ratio <= BUDGET or found.ratio - 1 <= spread,
        f"noise ± {spread:.4f}",
    )
    spent, quiet = mean(found.spent_attacked), mean(found.spent_quiet)
    most = f"at most {max(found.spent_attacked):.1%} in a block; {quiet:.2%} between attacks"
    row(
        "  ddpwatch's threads in a rank, of a core, attacked",
        f"{spent:.2%}",
        f"{MAX_SPENT:.1%}",
        spent <= MAX_SPENT,
        most,
    )
    row("  frames and handshakes that have left", f"{found.made}", "-", holds=True)
    _unharmed(found)
    # Viewers are sent away with the attackers; the rank itself goes on counting.
    row(
        "  longest wait of a viewer for a beat",
        f"{found.gap_s:.1f} s",
        f"{MAX_GAP_S:.0f} s",
        found.gap_s <= MAX_GAP_S,
    )


def volume(frames: int) -> None:
    """That many frames, all of them taken."""
    from benchmarks.pairs import row
    from benchmarks.siege import Plan, siege

    plan = Plan(VOLUME_PAIRS, VOLUME_S, VOLUME_QUIET_S, wanted=frames, most_pairs=MAX_VOLUME_PAIRS, lifted=True)
    found = siege(attack, plan)
    row("frames and handshakes that have left, limits lifted", f"{found.made}", f"{frames}", found.made >= frames)
    _unharmed(found)


def _unharmed(found: Outcome) -> None:
    from benchmarks.pairs import row

    as_alone = "yes" if found.same else "NO"
    row("  parameters as without ddpwatch, bit for bit", as_alone, "yes", found.same, f"{found.steps} steps")
    row(
        "  memory of a rank has grown by",
        f"{found.grown_bytes / (1 << 20):.1f} MiB",
        f"{MAX_GROWN_BYTES >> 20} MiB",
        found.grown_bytes <= MAX_GROWN_BYTES,
        f"to {found.memory_bytes >> 20} MiB",
    )
    print(f"      the ranks have reported: {', '.join(found.notes) or 'nothing'}")


def main() -> None:
    """Attack a job, compare it with itself and with one that nobody watches."""
    words = [word for word in sys.argv[1:] if not word.isdigit()] or ["cost", "volume"]
    numbers = [int(word) for word in sys.argv[1:] if word.isdigit()] or [FRAMES]
    if "cost" in words:
        cost()
    if "volume" in words:
        volume(numbers[0])


if __name__ == "__main__":
    main()
