"""The agent's thread: it owns every socket, and is the only one that talks to the outside."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from math import ceil
from time import monotonic, perf_counter_ns
from typing import TYPE_CHECKING, Any, Final

import msgspec
import zmq

from ddpwatch import wire
from ddpwatch.agent.gpu.nccl_timing import NcclTimes
from ddpwatch.agent.gpu.sampler import GpuFeed, Telemetry
from ddpwatch.agent.heartbeat import HeartbeatReader
from ddpwatch.agent.process_limits import ENOUGH, TOO_FEW, Wake, free
from ddpwatch.agent.registration import RunRegistration
from ddpwatch.agent.stacks import stacks
from ddpwatch.agent.step_recorder import RING_EVENTS, RING_STEPS, to_step
from ddpwatch.agent.subscriptions import CHECK_INTERVAL_S, FLOODED, READ_AHEAD, FloodBackoff, Subscriptions
from ddpwatch.agent.tcp_listener import threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from ddpwatch.agent.step_recorder import Recorder

FLUSH_S: Final = 0.25
FLUSH_MANY_S: Final = 1.0
MANY_RANKS: Final = 256
HELLO_EVERY_S: Final = 5.0
# Half a minute for a viewer that stands still; after that it loses messages, and memory stays bounded.
SEND_QUEUE: Final = 256
STOP_S: Final = 2.0
EXIT_S: Final = 15.0
# How long the last words may take to leave when a viewer is stuck.
GOODBYE_MS: Final = 200
# The steps of one message: their own figures may take 13 KiB each, and a frame has a limit.
MAX_STEPS_PER_MESSAGE: Final = 2048
MAX_STEPS_WITH_VALUES: Final = 64
MAX_STEPS_PER_BEAT: Final = 64
STACK_EVERY_S: Final = 1.0
MAX_STACK_TOPICS: Final = 16
_ANSWERED: Final = (wire.SNAP_PREFIX, wire.STACK_PREFIX, wire.STACKS_PREFIX)

SCARCE: Final = (
    f"Fewer than {TOO_FEW} free file descriptors are left in this process. It cannot be watched until there are more; "
    "raise `ulimit -n`."
)

_MESSAGES: Final[dict[str, type[Any]]] = {
    "note": wire.Note,
    "loader": wire.Loader,
    "checksum": wire.Checksum,
    "buckets": wire.Buckets,
}


class Publisher(threading.Thread):
    """Drains the ring, beats, and answers subscriptions for snapshots. Reads nothing else from anybody.

    A viewer can only subscribe; there is no message that it could send.
    """

    def __init__(self, recorder: Recorder, describe: Callable[[], dict[str, Any]], base: Path, name: str) -> None:
        super().__init__(name="ddpwatch", daemon=True)
        self._recorder = recorder
        self._describe = describe
        self._registration = RunRegistration(base, name, recorder.note)
        # Not `_stop`: threading.Thread has a method of that name.
        self._ending = threading.Event()
        self._wake = Wake()
        self._bye = ("closed", "")
        self._last_words = b""
        """What a viewer that comes later should read."""
        self._seq = 0
        self._stack_topics: set[bytes] = set()
        """Who wants to know what the threads do."""
        self._next_stack_s = 0.0
        self._subscriptions = Subscriptions()
        self._listen_again_s = 0.0
        self._backoff = FloodBackoff()
        self._steps: deque[wire.Step] = deque(maxlen=wire.MAX_SNAP_STEPS)
        self._recent: dict[str, deque[Any]] = {
            "note": deque(maxlen=64),
            "loader": deque(maxlen=16),
            "checksum": deque(maxlen=64),
        }
        self.telemetry = Telemetry()
        """The GPUs; the training thread says which."""
        self._gpus = GpuFeed(self.telemetry)
        self.nccl_times = NcclTimes()
        """Does nothing until it is enabled."""
        self._socket: zmq.Socket[bytes] | None = None
        self.address = ""
        """Where viewers find this rank; empty until it listens."""

    def stop(self, reason: str, text: str = "", *, at_exit: bool = False) -> None:
        """Send what is left, say why, and end. Waits a moment at the most: training does not hang on a viewer.

        At the exit of the process it waits longer for a store that does not answer: Python ends a thread that comes
        back from C++ into a dying interpreter in a way that C++ turns into `abort()`, and a training that had succeeded
        would fail.
        """
        self._bye = (reason, text)
        self._ending.set()
        self._wake.call()
        if self.ident is None:
            self._wake.close()
        elif threading.current_thread() is not self:
            self.join(EXIT_S if at_exit else STOP_S)

    def run(self) -> None:
        """Serve until stopped or switched off."""
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - the training must go on whatever happens here
            self._recorder.switch.trip("publisher", error)
        finally:
            self._wake.close()

    def _serve(self) -> None:
        self._heartbeat = HeartbeatReader(self._recorder)
        try:
            while not self._ending.is_set() and self._recorder.switch.on:
                if self._registration.find() and self._has_room():
                    self._publish()
                else:
                    self._ending.wait(FLUSH_S)
                    self._subscriptions.flushed()
        finally:
            self.telemetry.stop()
            self._heartbeat.close()

    def _has_room(self) -> bool:
        if not self._backoff.open(monotonic()):
            return False
        if free() >= ENOUGH:
            return True
        if not self._seq:
            raise RuntimeError(f"fewer than {ENOUGH} free file descriptors; raise `ulimit -n`")
        return False

    def _publish(self) -> None:
        """Listen at the home that was found: until the end, until the ranks meet elsewhere, or while there is room."""
        self._recorder.want_buckets = False
        self._stack_topics.clear()
        self._subscriptions.reset()
        self._gpus.reset()
        for recent in self._recent.values():  # kept by a home where this process had another rank
            for k, message in enumerate(recent):
                recent[k] = msgspec.structs.replace(message, rank=self._rank)
        context = zmq.Context(io_threads=1)
        try:
            before = threads()
            socket = context.socket(zmq.XPUB)
            socket.sndhwm = SEND_QUEUE
            socket.rcvhwm = READ_AHEAD
            socket.maxmsgsize = wire.MAX_TOPIC_BYTES + 1
            # A viewer whose connection has broken asks anew for what it missed, perhaps before the old one is given up.
            socket.setsockopt(zmq.XPUB_VERBOSE, 1)
            self.address = self._registration.open(context, socket, threads() - before)
            self._socket = socket
            try:
                self._loop(socket)
                self._flush()
                if self._ending.is_set() or self._registration.is_outdated or not self._recorder.switch.on:
                    self._send_bye()
            except Exception as error:  # noqa: BLE001 - viewers should hear of it too
                self._recorder.switch.trip("publisher", error)
                self._send_bye()
        finally:
            self.address = ""
            self._socket = None
            self._registration.shut()
            # Returns when the socket is closed and its file gone; only then may the directory go.
            context.destroy(linger=GOODBYE_MS)
            self._registration.leave(self._last_words)

    def _loop(self, socket: zmq.Socket[bytes]) -> None:
        flush_s = FLUSH_MANY_S if self._registration.identity.world_size > MANY_RANKS else FLUSH_S
        next_flush_s = next_hello_s = monotonic()
        while self._recorder.switch.on and not self._ending.is_set() and not self._registration.is_outdated:
            now_s = monotonic()
            if now_s >= next_hello_s:
                self._send(self._hello(self._next_seq()))
                next_hello_s = now_s + HELLO_EVERY_S
            if now_s >= next_flush_s:
                if free() < TOO_FEW:
                    self._recorder.note("descriptors", SCARCE)
                    return
                self._flush()
                self._registration.refresh()
                next_flush_s = max(next_flush_s + flush_s, now_s)
                self._subscriptions.flushed()
                self._listen_again_s = 0.0
                self._answer()
            if self._wait(next_flush_s, socket):
                self._listen(socket)
                self._answer()
                self._listen_again_s = monotonic() + CHECK_INTERVAL_S if self._subscriptions.patient else next_flush_s
            tcp_listener = self._registration.tcp_listener
            if self._subscriptions.too_many or (tcp_listener is not None and tcp_listener.flooded):
                self._recorder.note("flooded", FLOODED)
                self._backoff.begin(monotonic())
                return

    def _wait(self, until_s: float, socket: zmq.Socket[bytes]) -> bool:
        """Wait for viewers, for those who want to be, or until it is time; whether the socket has something to say."""
        poller = zmq.Poller()
        poller.register(self._wake.reader, zmq.POLLIN)
        left_s = max(0.0, until_s - monotonic())
        closed_for_s = self._listen_again_s - monotonic()
        if closed_for_s > 0:
            left_s = min(left_s, closed_for_s)
        else:
            poller.register(socket, zmq.POLLIN)
        tcp_listener = self._registration.tcp_listener
        if tcp_listener is not None:
            for watched in tcp_listener.watched():
                poller.register(watched, zmq.POLLIN)
            left_s = min(left_s, tcp_listener.closed_for_s or left_s)
        ready = [which for which, _ in poller.poll(ceil(left_s * 1000))]
        if tcp_listener is not None and ready:
            tcp_listener.handle_ready(ready)
        return any(which is socket for which in ready)

    def _send_bye(self) -> None:
        switch = self._recorder.switch
        if not switch.on:
            reason, text = "off", switch.reason
        elif self._registration.is_outdated:
            reason, text = "closed", "The process group was made: this rank goes on in the run of all ranks."
        else:
            reason, text = self._bye
        if reason == "failed":
            # At once: to read the recorder takes tens of milliseconds, and a launcher may not leave us as many.
            note = wire.Note(
                rank=self._rank, seq=self._next_seq(), kind=wire.FAILING, text=text, step=self._recorder.index,
                mono_ns=perf_counter_ns(),
            )  # fmt: skip
            self._send(note)
        bye = wire.Bye(
            rank=self._rank, seq=self._next_seq(), reason=reason, text=text, mono_ns=perf_counter_ns(),
            collectives=self._heartbeat.collectives.recent() if reason == "failed" else [],
        )  # fmt: skip
        self._send(bye)
        if reason == "failed":
            self._last_words = wire.encode(bye)

    @property
    def _rank(self) -> int:
        return self._registration.identity.rank

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _send(self, message: wire.Message) -> None:
        self._send_frame(wire.TOPICS[type(message)], wire.encode(message))

    def _send_frame(self, topic: bytes, payload: bytes) -> None:
        assert self._socket is not None
        # A viewer that cannot keep up loses messages; it sees the gap in `seq`. Nothing waits for it.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart((topic, payload), flags=zmq.NOBLOCK, copy=True)

    def _hello(self, seq: int) -> wire.Hello:
        return self._registration.hello(seq, self._describe())

    def _flush(self) -> None:
        """Everything that has happened since the last time, and a beat."""
        rank = self._rank
        for tag, fields in self._recorder.events.drain(RING_EVENTS):
            kind = _MESSAGES[tag]
            kept = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
            # Buckets go to their subscribers only: a number of their own would be a gap to everybody else.
            message = kind(rank=rank, seq=self._seq if kind is wire.Buckets else self._next_seq(), **kept)
            if tag in self._recent:
                self._recent[tag].append(message)
            self._send(message)
        steps = [to_step(record) for record in self._recorder.steps.drain(RING_STEPS)]
        self._steps.extend(steps)
        most = MAX_STEPS_WITH_VALUES if any(step.values for step in steps) else MAX_STEPS_PER_MESSAGE
        while len(steps) > MAX_STEPS_PER_BEAT:
            self._send(wire.Steps(rank=rank, seq=self._next_seq(), steps=steps[:most]))
            steps = steps[most:]
        self._send_beat(steps)
        if comms := self.nccl_times.poll(self._steps):
            self._send(wire.Comms(rank=rank, seq=self._next_seq(), comms=comms))
        if monotonic() >= self._next_stack_s:
            self._send_stacks(self._stack_topics)

    def _send_beat(self, steps: Sequence[wire.Step]) -> None:
        seq = self._next_seq()
        gpus = self._gpus.next_reading(self._rank, seq)
        topic = wire.TOPICS[wire.Beat if gpus is None else wire.Gpus]
        self._send_frame(topic, wire.encode(self._heartbeat.beat(self._rank, seq, steps, gpus)))

    def _send_stacks(self, topics: Iterable[bytes], collectives: Sequence[wire.Collective] = ()) -> None:
        """Outside the numbered stream: only those who ask hear it."""
        self._next_stack_s = monotonic() + STACK_EVERY_S
        for topic in topics:
            everything = topic.startswith(wire.STACKS_PREFIX)
            phase = self._heartbeat.phase
            threads = stacks(self._recorder.thread, everything=everything)
            message = wire.Stack(
                rank=self._rank, seq=self._seq, step=self._recorder.index, mono_ns=perf_counter_ns(),
                threads=threads, collectives=list(collectives), phase=phase if phase == self._heartbeat.phase else -1,
            )  # fmt: skip
            payload = wire.encode(message)
            if len(payload) > wire.MAX_FRAME_BYTES:
                payload = wire.encode(msgspec.structs.replace(message, threads=threads[:1]))
            self._send_frame(topic, payload)

    def _listen(self, socket: zmq.Socket[bytes]) -> None:
        """Take note of all subscriptions that have come, up to where it is clear that they are too many."""
        while not self._subscriptions.too_many:
            try:
                asked = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._subscriptions.note(asked)
            subscribed, topic = asked[:1] == b"\x01", asked[1:]
            if topic == wire.TOPICS[wire.Buckets]:
                self._recorder.want_buckets = subscribed
            elif topic.startswith(_ANSWERED) and len(topic) <= wire.MAX_TOPIC_BYTES:
                if subscribed:
                    self._subscriptions.waiting.append(topic)
                else:
                    self._stack_topics.discard(topic)

    def _answer(self) -> None:
        """Each `snap/<nonce>` gets the history, once; who asks for stacks is told from now on."""
        due = self._subscriptions.due()
        asking = [topic for topic in due if topic.startswith(wire.SNAP_PREFIX)]
        if asking:
            self._flush()
            payload = self._snap()
            for topic in asking:
                self._send_frame(topic, payload)
        room = MAX_STACK_TOPICS - len(self._stack_topics)
        if following := [topic for topic in due if not topic.startswith(wire.SNAP_PREFIX)][:room]:
            self._stack_topics.update(following)
            self._send_stacks(following)
            # Once, and not every second: to read the whole recorder holds Python's lock for milliseconds.
            self._send_stacks(following, self._heartbeat.collectives.recent())

    def _snap(self) -> bytes:
        """The history as one frame: all that is kept, or the latest of it that fits."""
        rank = self._rank
        snap = wire.Snap(
            rank=rank,
            seq=self._seq,
            hello=self._hello(self._seq),
            beat=self._heartbeat.beat(rank, self._seq),
            steps=list(self._steps),
            notes=list(self._recent["note"]),
            loaders=list(self._recent["loader"]),
            checksums=list(self._recent["checksum"]),
            gpus=self._gpus.latest(rank, self._seq),
            gpu_moments=self._gpus.moments(),
        )
        payload = wire.encode(snap)
        while len(payload) > wire.MAX_FRAME_BYTES and snap.gpu_moments:
            moments = snap.gpu_moments[(len(snap.gpu_moments) + 1) // 2 :]
            snap = msgspec.structs.replace(snap, gpu_moments=moments)
            payload = wire.encode(snap)
        while len(payload) > wire.MAX_FRAME_BYTES and snap.steps:
            snap = msgspec.structs.replace(snap, steps=snap.steps[(len(snap.steps) + 1) // 2 :])
            payload = wire.encode(snap)
        return payload
