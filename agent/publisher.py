"""The agent's thread: owns every socket and publishes steps, heartbeats, snapshots and stacks over ZeroMQ."""

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
from ddpwatch.agent.gpu.sampler import Telemetry
from ddpwatch.agent.heartbeat import HeartbeatReader
from ddpwatch.agent.registration import RunRegistration
from ddpwatch.agent.request_limits import (
    CHECK_INTERVAL_S,
    FLOODED,
    READ_AHEAD,
    SUBSCRIBE,
    UNSUBSCRIBE,
    FloodBackoff,
    Subscriptions,
)
from ddpwatch.agent.resource_limits import ENOUGH, TOO_FEW, Wake, free
from ddpwatch.agent.stacks import stacks
from ddpwatch.agent.step_recorder import RING_EVENTS, RING_STEPS, to_step
from ddpwatch.agent.tcp_listener import threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from ddpwatch.agent.step_recorder import Recorder

SEND_QUEUE: Final = 256
"""Messages queued per viewer: half a minute for one that stalls. After that it loses messages; memory stays bounded."""
STOP_S: Final = 2.0
"""Seconds that `stop` waits for the thread to end."""
EXIT_S: Final = 15.0
"""Seconds that `stop` waits at the exit of the process."""
GOODBYE_MS: Final = 200
"""Milliseconds that the last messages may take to leave when a viewer is stuck."""
MAX_STEPS_PER_MESSAGE: Final = 2048
"""Steps per message; a frame is limited in size."""
MAX_STEPS_WITH_VALUES: Final = 64
"""Steps per message if the script logged values, which may take 13 KiB per step."""
MAX_STEPS_PER_BEAT: Final = 64
"""Steps that travel inside a heartbeat; more are sent in messages of their own before it."""
STACK_EVERY_S: Final = 1.0
"""Seconds between two stacks sent to each subscriber."""
MAX_STACK_TOPICS: Final = 16
"""Subscriptions to stacks that are served at a time."""

SCARCE: Final = (
    f"Fewer than {TOO_FEW} free file descriptors are left in this process. It cannot be monitored until there are "
    "more: raise `ulimit -n`."
)


class Publisher(threading.Thread):
    """Publishes what the recorder has collected, and answers subscriptions. Viewers cannot send anything else."""

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
        """The goodbye of a failed rank, kept in the run directory for viewers that attach later."""
        self._seq = 0
        self._stack_topics: set[bytes] = set()
        self._next_stack_s = 0.0
        self._subscriptions = Subscriptions()
        self._next_listen_s = 0.0
        self._backoff = FloodBackoff()
        self._steps: deque[wire.Step] = deque(maxlen=wire.MAX_SNAP_STEPS)
        self._recent: dict[type[Any], deque[Any]] = {
            wire.Note: deque(maxlen=64),
            wire.Loader: deque(maxlen=16),
            wire.Checksum: deque(maxlen=64),
            wire.SyncPath: deque(maxlen=wire.MAX_PATHS),
            wire.LoaderWorkers: deque(maxlen=1),
        }
        self.every_hello: tuple[Callable[[], None], ...] = ()
        """Called in this thread each time before a hello is sent."""
        self.telemetry = Telemetry()
        self.nccl_times = NcclTimes()
        self._socket: zmq.Socket[bytes] | None = None
        self.address = ""
        """ZeroMQ address of this rank on its host; empty until it listens."""

    def stop(self, reason: str, text: str = "", *, at_exit: bool = False) -> None:
        """Send what is left and the reason, then end the thread. Waits a bounded time, whatever viewers do.

        At the exit of the process it waits longer for a store that does not answer: Python ends a thread that returns
        from C++ into a dying interpreter in a way that C++ turns into `abort()`, which would fail a training that
        had succeeded.
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
                    self._ending.wait(wire.BEAT_NS / 1e9)
        finally:
            self.telemetry.stop()
            self._heartbeat.close()

    def _has_room(self) -> bool:
        if not self._backoff.is_over(monotonic()):
            return False
        if free() >= ENOUGH:
            return True
        if not self._seq:
            raise RuntimeError(f"fewer than {ENOUGH} free file descriptors; raise `ulimit -n`")
        return False

    def _publish(self) -> None:
        """Listen in the run that was found, until the end, a new process group, a flood or a lack of descriptors."""
        self._recorder.want_buckets = False
        self._stack_topics.clear()
        self._subscriptions.reset()
        self.telemetry.reset()
        for recent in self._recent.values():  # the rank may have been another one in an earlier run
            for k, message in enumerate(recent):
                recent[k] = msgspec.structs.replace(message, rank=self._rank)
        context = zmq.Context(io_threads=1)
        try:
            before = threads()
            socket = context.socket(zmq.XPUB)
            socket.sndhwm = SEND_QUEUE
            socket.rcvhwm = READ_AHEAD
            socket.maxmsgsize = wire.MAX_TOPIC_BYTES + 1
            # A viewer that reconnects asks again for its snapshot, perhaps before the broken connection is dropped.
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
        flush_s = wire.beat_ns(self._registration.identity.world_size) / 1e9
        next_flush_s = next_hello_s = monotonic()
        while self._recorder.switch.on and not self._ending.is_set() and not self._registration.is_outdated:
            now_s = monotonic()
            if now_s >= next_hello_s:
                for call in self.every_hello:
                    call()
                self._send(self._registration.hello(self._next_seq(), self._describe()))
                next_hello_s = now_s + wire.HELLO_NS / 1e9
            if now_s >= next_flush_s:
                if free() < TOO_FEW:
                    self._recorder.note("descriptors", SCARCE)
                    return
                self._flush()
                self._registration.refresh()
                next_flush_s = max(next_flush_s + flush_s, now_s)
                self._subscriptions.flushed()
                self._answer()
            if self._wait(next_flush_s, socket):
                self._listen(socket)
                self._answer()
                self._next_listen_s = monotonic() + CHECK_INTERVAL_S
            tcp_listener = self._registration.tcp_listener
            if self._subscriptions.flooded or (tcp_listener is not None and tcp_listener.flooded):
                self._recorder.note("flooded", FLOODED)
                self._backoff.begin(monotonic())
                return

    def _wait(self, until_s: float, socket: zmq.Socket[bytes]) -> bool:
        """Poll the sockets until one is ready or it is time to flush; whether there are subscriptions to read."""
        poller = zmq.Poller()
        poller.register(self._wake.reader, zmq.POLLIN)
        left_s = max(0.0, until_s - monotonic())
        closed_for_s = self._next_listen_s - monotonic()
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
            reason, text = wire.AGENT_OFF, switch.reason
        elif self._registration.is_outdated:
            reason, text = "closed", "The process group was made: this rank goes on in the run of all ranks."
        else:
            reason, text = self._bye
        failed = reason == "failed"
        if failed:
            # First: reading the flight recorder takes tens of milliseconds, which a launcher may not allow.
            note = wire.Note(
                rank=self._rank, seq=self._next_seq(), kind=wire.FAILING, text=text, step=self._recorder.index,
                mono_ns=perf_counter_ns(),
            )  # fmt: skip
            self._send(note)
        bye = wire.Bye(
            rank=self._rank, seq=self._next_seq(), reason=reason, text=text, mono_ns=perf_counter_ns(),
            collectives=self._heartbeat.collectives.recent() if failed else [],
        )  # fmt: skip
        self._send(bye)
        if failed:
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
        # A viewer that cannot keep up loses messages and sees the gap in `seq`; nothing waits for it.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart((topic, payload), flags=zmq.NOBLOCK, copy=True)

    def _flush(self) -> None:
        """Send everything since the last flush, and a heartbeat."""
        rank = self._rank
        for kind, fields in self._recorder.events.drain(RING_EVENTS):
            kept = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
            # Buckets go to their subscribers only: a number of their own would look like a loss to other viewers.
            message = kind(rank=rank, seq=self._seq if kind is wire.Buckets else self._next_seq(), **kept)
            if kind in self._recent:
                self._recent[kind].append(message)
            self._send(message)
        steps = [to_step(record) for record in self._recorder.steps.drain(RING_STEPS)]
        self._steps.extend(steps)
        per_message = MAX_STEPS_WITH_VALUES if any(step.values for step in steps) else MAX_STEPS_PER_MESSAGE
        while len(steps) > MAX_STEPS_PER_BEAT:
            self._send(wire.Steps(rank=rank, seq=self._next_seq(), steps=steps[:per_message]))
            steps = steps[per_message:]
        seq = self._next_seq()
        gpus = self.telemetry.next_reading(rank, seq)
        topic = wire.TOPICS[wire.Beat if gpus is None else wire.Gpus]
        self._send_frame(topic, wire.encode(self._heartbeat.beat(rank, seq, steps, gpus)))
        if comms := self.nccl_times.poll(self._steps):
            self._send(wire.Comms(rank=rank, seq=self._next_seq(), comms=comms))
        if monotonic() >= self._next_stack_s:
            self._send_stacks(self._stack_topics)

    def _send_stacks(self, topics: Iterable[bytes], collectives: Sequence[wire.Collective] = ()) -> None:
        """Send stacks to their subscribers, outside the numbered stream."""
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
        """Read the subscriptions that have arrived, unless they are a flood."""
        while not self._subscriptions.flooded:
            try:
                message = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._subscriptions.note(message)
            if message[:1] == UNSUBSCRIBE:
                self._stack_topics.discard(message[1:])
            if message[1:] == wire.TOPICS[wire.Buckets] and message[:1] in (SUBSCRIBE, UNSUBSCRIBE):
                self._recorder.want_buckets = message[:1] == SUBSCRIBE

    def _answer(self) -> None:
        """Send a snapshot once to each `snap/<nonce>`; begin to send stacks to each `stack/` and `stacks/` topic."""
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
            # Once, and not every second: reading the whole flight recorder holds the GIL for milliseconds.
            self._send_stacks(following, self._heartbeat.collectives.recent())

    def _snap(self) -> bytes:
        """The history as one frame: all that is kept, or the newest part of it that fits."""
        rank = self._rank
        snap = wire.Snap(
            rank=rank,
            seq=self._seq,
            hello=self._registration.hello(self._seq, self._describe()),
            beat=self._heartbeat.beat(rank, self._seq),
            steps=list(self._steps),
            notes=list(self._recent[wire.Note]),
            loaders=list(self._recent[wire.Loader]),
            checksums=list(self._recent[wire.Checksum]),
            sync_paths=list(self._recent[wire.SyncPath]),
            queued=list(self._heartbeat.queued),
            gpus=self.telemetry.last_reading(rank, self._seq),
            gpu_moments=self.telemetry.moments(),
            workers=next(iter(self._recent[wire.LoaderWorkers]), None),
        )
        payload = wire.encode(snap)
        for field in ("gpu_moments", "steps"):
            while len(payload) > wire.MAX_FRAME_BYTES and (items := getattr(snap, field)):
                snap = msgspec.structs.replace(snap, **{field: items[(len(items) + 1) // 2 :]})
                payload = wire.encode(snap)
        return payload
