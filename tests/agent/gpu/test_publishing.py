"""GPUs on the wire: a reading is sent once, a late viewer gets the history, and no heartbeat waits for a driver."""

from __future__ import annotations

import os
import threading

import pytest
import zmq

import ddpwatch.agent
from ddpwatch import wire
from ddpwatch.agent.gpu import sampler
from ddpwatch.agent.gpu.devices import TorchDevice
from tests.builders import fake_nvml
from tests.builders.training import Net, snapshot, wait_for


@pytest.fixture
def install(run_dir, monkeypatch):
    """An agent whose model seems to be on the given number of GPUs."""

    def call(gpus=0):
        devices = [TorchDevice(k, uuid=fake_nvml.uuid(k)) for k in range(gpus)]
        monkeypatch.setattr(sampler, "torch_devices", lambda model: devices)
        model = Net()
        agent = ddpwatch.agent.install(model)
        agent._publisher.telemetry.watch(model)
        return agent

    yield call
    if ddpwatch.agent._current is not None:
        ddpwatch.agent._current.close()


class RunFollower:
    """All live messages of a rank."""

    def __init__(self, agent):
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(wait_for(lambda: agent._publisher.address))
        for topic in wire.LIVE_TOPICS:
            self._socket.subscribe(topic)
        self.received = []
        self.readings = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._context.destroy(linger=0)

    def of(self, kind):
        while self._socket.poll(0):
            topic, payload = self._socket.recv_multipart()
            self.received.append(wire.decode(payload))
            if topic == wire.TOPICS[wire.Gpus]:
                self.readings.append(self.received[-1].gpus)
        return [message for message in self.received if isinstance(message, kind)]

    def gpus(self):
        """GPU readings received: a heartbeat with one has its own topic."""
        beats = self.of(wire.Beat)
        assert self.readings == [beat.gpus for beat in beats if beat.gpus is not None]
        return self.readings


def test_a_model_on_the_cpu_is_reported_once_with_the_reason_and_nothing_runs(install):
    agent = install()
    with RunFollower(agent) as follower:
        wait_for(lambda: len(follower.of(wire.Beat)) >= 3)
        assert len(follower.gpus()) <= 1
    snap = snapshot(agent)

    assert (snap.gpus.gpus, snap.gpus.why, snap.gpu_moments) == ([], "the model is on the CPU", [])
    assert agent._publisher.telemetry._sampler is None
    assert not any(thread.name.startswith("ddpwatch-") for thread in threading.enumerate())
    assert 1 <= snap.hello.cores <= len(os.sched_getaffinity(0))


def test_each_reading_is_sent_once_in_the_numbered_stream_and_kept_for_late_viewers(install, driver):
    scenario = driver(2)
    agent = install(2)
    with RunFollower(agent) as follower:
        wait_for(lambda: len(follower.gpus()) >= 2)
        scenario.set({"gpu1.temperature": 88})
        wait_for(lambda: follower.gpus()[-1].gpus[1].temperature_c == 88)
    reported = [message for message in follower.readings if message.gpus]
    snap = snapshot(agent)
    agent.close()

    assert [(gpu.device, gpu.util_percent) for gpu in reported[-1].gpus] == [("cuda:0", 90), ("cuda:1", 91)]
    assert len({message.mono_ns for message in reported}) == len(reported)
    numbers = [message.seq for message in follower.received]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert snap.gpus.mono_ns >= reported[-1].mono_ns
    moments = [moment for moment in snap.gpu_moments if moment.device == "cuda:1"]
    assert {message.mono_ns for message in reported} <= {moment.mono_ns for moment in moments}
    assert moments == sorted(moments, key=lambda moment: moment.mono_ns)
    assert moments[-1].temperature_c == 88
    assert (moments[0].util_percent, moments[0].power_mw, moments[0].sm_mhz) == (91, 300_001, 1901)


def test_beats_go_on_while_the_driver_hangs_and_the_last_reading_is_not_sent_again(install, driver, library):
    scenario = driver(1)
    agent = install(1)
    with RunFollower(agent) as follower:
        wait_for(follower.gpus)
        scenario.set({"block.nvmlDeviceGetPowerUsage": 60_000})
        source = agent._publisher.telemetry._sampler
        # Readings that were complete before it began to hang may still be under way.
        wait_for(lambda: _unchanged(source, follower))
        sent = len(follower.gpus())
        beats = len(follower.of(wire.Beat))
        wait_for(lambda: len(follower.of(wire.Beat)) >= beats + 4)
        assert len(follower.gpus()) == sent
        scenario.set({"block.nvmlDeviceGetPowerUsage": None})
        wait_for(lambda: len(follower.gpus()) > sent)
    agent.close()
    source.join(30)
    assert not source.is_alive()


def _unchanged(source, follower):
    """Whether two beats have come with no reading between them."""
    latest, beats = source.latest, len(follower.of(wire.Beat))
    wait_for(lambda: len(follower.of(wire.Beat)) >= beats + 2)
    return source.latest is latest


def test_a_driver_that_never_answers_is_a_reason_until_it_does(install, driver, monkeypatch):
    monkeypatch.setattr(sampler, "PATIENCE_S", 0.1)
    scenario = driver(1, {"block.nvmlInitWithFlags": 60_000})
    agent = install(1)
    with RunFollower(agent) as follower:
        wait_for(lambda: [each for each in follower.gpus() if each.why == sampler.NO_ANSWER])
        scenario.set({"block.nvmlInitWithFlags": None})
        wait_for(lambda: follower.gpus()[-1].gpus)
    agent.close()

    assert [each.why for each in follower.readings].count(sampler.NO_ANSWER) == 1


def test_close_does_not_wait_for_a_driver_that_hangs(install, driver, library):
    scenario = driver(1, {"block.nvmlInitWithFlags": 60_000})
    agent = install(1)
    source = wait_for(lambda: agent._publisher.telemetry._sampler)
    agent.close()

    assert not agent._publisher.is_alive()
    assert source.is_alive()
    scenario.set({"block.nvmlInitWithFlags": None})
    source.join(30)
    assert not source.is_alive()


def test_of_a_snapshot_that_is_too_large_the_past_of_gpus_goes_first(install):
    agent = install()
    publisher = agent._publisher
    wait_for(lambda: publisher.address)
    names = [f"cuda:{k}" + "x" * 150 for k in range(16)]
    publisher.telemetry._moments.extend([[wire.GpuMoment(at, name) for name in names] for at in range(600)])
    publisher._steps.extend(_step(k) for k in range(600))
    snap = snapshot(agent)

    assert len(snap.steps) == 600
    assert 0 < len(snap.gpu_moments) < 600 * 16
    assert snap.gpu_moments[-1].mono_ns == 599


def _step(index):
    return wire.Step(index, 1, 0, 0, 0, 0, 0, 0)


def test_a_thread_that_cannot_be_started_is_a_reason(install, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(sampler.Sampler, "start", refuse)
    agent = install(1)

    wait_for(lambda: (reading := agent._publisher.telemetry._sent) and reading.why == sampler.NO_THREAD)
    assert agent.active


def test_times_that_nccl_has_later_are_sent_as_comms(install, monkeypatch):
    agent = install()
    reported = [[wire.Comm(3, 5, 7)]]
    monkeypatch.setattr(agent._publisher.nccl_times, "poll", lambda steps: reported.pop() if reported else [])
    with RunFollower(agent) as follower:
        wait_for(lambda: follower.of(wire.Beat))
        reported.append([wire.Comm(4, 5, 7)])
        (message,) = wait_for(lambda: [each for each in follower.of(wire.Comms) if each.comms[0].index == 4])

    assert message.comms == [wire.Comm(4, 5, 7)]


def test_devices_of_a_second_model_are_added_and_torch_is_asked_of_all(monkeypatch):
    of_model = {}
    monkeypatch.setattr(sampler, "torch_devices", lambda model: of_model[model])
    first, second = Net(), Net()
    of_model[first], of_model[second] = [TorchDevice(1)], [TorchDevice(1), TorchDevice(0)]
    gpus = sampler.Telemetry()
    gpus.watch(first)
    gpus.watch(second)

    assert [device.index for device in gpus._devices] == [1, 0]
    assert gpus.memory._indices == (1, 0)


def test_a_model_on_another_kind_of_device_has_a_reason():
    gpus = sampler.Telemetry()
    gpus.watch(Net().to("meta"))

    assert gpus._latest().why == "the model is on meta; only NVIDIA GPUs are read"
    assert gpus._latest() is gpus._latest()
