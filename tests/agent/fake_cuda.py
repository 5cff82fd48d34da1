"""A fake of `torch.cuda` whose time the test controls. A call that must not be made ends the test."""

from __future__ import annotations

import contextlib
import struct
import sys
import threading
from collections import Counter

import torch

from ddpwatch.agent.cuda_calls import CudaCalls
from ddpwatch.agent.cuda_clock import LATER_STEPS, CudaClock
from ddpwatch.agent.fail_open import Switch
from ddpwatch.agent.step_recorder import Recorder, to_step
from ddpwatch.wire import HOST_TIMED, Note

NEVER = float("inf")


class Forbidden(BaseException):
    """No guard of the agent's swallows it."""


class Stream:
    """Work is done in the order in which it was queued; an event is passed when all before it is done."""

    def __init__(self, gpu, device):
        self.gpu = gpu
        self.device = device
        self.free_ns = 0

    def work(self, ns):
        self.free_ns = max(self.gpu.now_ns, self.free_ns) + ns

    def wait(self, other):
        self.free_ns = max(self.free_ns, other.free_ns)


class Event:
    def __init__(self, gpu, enable_timing):
        self.gpu = gpu
        self.enable_timing = enable_timing
        self.device = None
        self.passed_ns = None

    def record(self, stream):
        self.gpu.asked()
        if self.device not in (None, stream.device):
            raise RuntimeError("Event device does not match recording stream's device")
        self.gpu.touched(stream.device)
        self.device = stream.device
        self.passed_ns = max(self.gpu.now_ns, stream.free_ns)

    def query(self):
        self.gpu.asked()
        if self.gpu.device_index != self.device:
            raise Forbidden("a query makes a CUDA context on the current device, which is not the event's")
        self.gpu.touched(self.device)
        if self.gpu.broken == "query":
            raise RuntimeError("CUDA error")
        return self.passed_ns <= self.gpu.now_ns

    def elapsed_time(self, end_event):
        self.gpu.asked()
        assert self.enable_timing
        if self.gpu.broken == "elapsed_time" or max(self.passed_ns, end_event.passed_ns) > self.gpu.now_ns:
            raise ValueError("Both events must be completed before calculating elapsed time.")
        # CUDA gives a float of 32 bits.
        return struct.unpack("f", struct.pack("f", (end_event.passed_ns - self.passed_ns) / 1e6))[0]

    def synchronize(self):
        raise Forbidden("synchronize")


class Gpu:
    """What the clock uses of `torch.cuda`, for two devices, with the time of the host and the streams' work."""

    def __init__(self):
        self.now_ns = 0
        self.streams = [Stream(self, 0), Stream(self, 1)]
        self.device_index = 0
        self.capturing = set()
        self.thread = threading.get_ident()
        self.closed = False
        self.broken = ""
        self.made = 0
        self.calls_made = Counter()
        self.used_devices = {0, 1}
        """Devices on which the process may have a CUDA context."""

    @property
    def stream(self):
        return self.streams[0]

    def asked(self):
        self.calls_made[sys._getframe(1).f_code.co_name] += 1
        if self.capturing:
            raise Forbidden("a CUDA call during a capture")
        self.looked()

    def looked(self):
        self.calls_made[sys._getframe(1).f_code.co_name] += 1
        if threading.get_ident() != self.thread:
            raise Forbidden("a CUDA call on another thread")
        if self.closed:
            raise Forbidden("a CUDA call while the interpreter ends")

    def touched(self, device):
        if device not in self.used_devices:
            raise Forbidden(f"a CUDA call on device {device}, which is another rank's")

    def clock(self):
        return CudaClock(torch.device("cuda", 0), self.calls(), lambda: self.now_ns)

    def calls(self):
        return CudaCalls(
            current_device=self.current_device,
            is_capturing=self.is_current_stream_capturing,
            stream_id=self.current_stream,
            current_stream=self.current_stream,
            device=self.device,
            new_event=self.Event,
            record=Event.record,
            query=Event.query,
            elapsed_ms=Event.elapsed_time,
        )

    def advance(self, ns):
        self.now_ns += ns

    def catch_up(self):
        self.now_ns = max(self.now_ns, *(stream.free_ns for stream in self.streams if stream.free_ns != NEVER))

    # From here on as in torch.cuda.

    def Event(self, enable_timing=False):  # noqa: N802 - torch's name
        self.asked()
        self.made += 1
        return Event(self, enable_timing)

    def current_stream(self, device):
        self.looked()
        return self.streams[device]

    def current_device(self):
        self.looked()
        return self.device_index

    def is_current_stream_capturing(self):
        self.looked()
        if self.broken == "all":
            raise RuntimeError("CUDA error")
        return self.streams[self.device_index] in self.capturing

    @contextlib.contextmanager
    def device(self, device):
        before, self.device_index = self.device_index, device
        yield
        self.device_index = before

    def synchronize(self, device=None):
        raise Forbidden("synchronize")


class Run:
    """A recorder on the fake GPU, and the steps it has reported."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.recorder = Recorder(gpu.clock(), Switch())
        self.clock = self.recorder.clock
        self.reported = []

    def phase(self, phase, *, queue=0, host=0):
        """A phase in which the host queues some work, and needs its own time."""
        self.clock.switch(phase)
        self.gpu.stream.work(queue)
        self.gpu.advance(host)

    def cut(self):
        self.recorder.close_step()
        return self.collect()

    def collect(self):
        for record in self.recorder.steps.drain(10**6):
            step = to_step(record)
            assert step.index == len(self.reported)
            self.reported.append(step)
        return self.reported

    def empty_steps(self, steps=LATER_STEPS):
        """What comes later, once the GPU has caught up."""
        self.gpu.catch_up()
        for _ in range(steps):
            self.cut()
        return self.reported

    @property
    def host_timed(self):
        return sum(step.flags & HOST_TIMED != 0 for step in self.reported)

    def notes(self):
        return [fields["text"] for kind, fields in self.recorder.events.drain(1000) if kind is Note]
