"""When the CUDA clock is used, and the agent's hooks, close and exit with it."""

import inspect
import threading

import pytest
import torch
from torch.utils.data import DataLoader

import ddpwatch.agent
from ddpwatch import wire
from ddpwatch.agent.clock import HostClock
from ddpwatch.agent.cuda_calls import CUDA_CALLS
from ddpwatch.agent.cuda_clock import clock_for
from ddpwatch.agent.model_info import HOST_CLOCK, remarks
from tests.agent.fake_cuda import Event, Gpu
from tests.builders.training import Net, snapshot, train_step, wait_for


@pytest.fixture
def gpu():
    return Gpu()


@pytest.fixture
def install(run_dir, gpu, monkeypatch):
    """The real agent with the clock of the fake GPU."""
    monkeypatch.setattr(ddpwatch.agent, "clock_for", lambda _model, _choice: gpu.clock())
    yield ddpwatch.agent.install
    gpu.closed, gpu.thread = False, threading.get_ident()
    ddpwatch.agent._current.close()


def training(gpu, *, forward=5_000, backward=7_000, optimizer=3_000):
    """One step of a real model whose layers and optimizer queue work on the fake GPU in no time."""
    model = Net()
    model.before_forward = lambda: gpu.stream.work(forward)
    model.before_backward = lambda: gpu.stream.work(backward)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    sgd.register_step_pre_hook(lambda *_: gpu.stream.work(optimizer))
    return model, lambda: train_step(model, sgd, torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))


def times(steps):
    return [(step.forward_ns, step.backward_ns, step.optimizer_ns, step.step_ns) for step in steps]


def test_the_real_hooks_put_the_gpus_work_where_it_belongs(install, gpu):
    model, step = training(gpu)
    agent = install(model)
    for _ in range(6):
        step()
        gpu.catch_up()
    snap = snapshot(agent)
    assert times(snap.steps) == [(5_000, 7_000, 3_000, 15_000)] * 4
    assert (snap.hello.clock, snap.notes) == ("cuda", [])


def test_close_reports_the_last_steps_with_the_gpus_times(install, gpu):
    model, step = training(gpu)
    agent = install(model)
    for _ in range(2):
        step()
    gpu.catch_up()
    # Viewers connect only after it listens.
    wait_for(lambda: agent._publisher.address)
    agent.close()
    agent._publisher.join(30)
    assert times(agent._publisher._steps) == [(5_000, 7_000, 3_000, 15_000)] * 2


@pytest.mark.parametrize("where", ["exit", "another thread"])
def test_the_interpreters_exit_and_other_threads_leave_cuda_alone(install, gpu, where):
    model, step = training(gpu)
    agent = install(model)
    for _ in range(2):
        step()
    gpu.catch_up()
    wait_for(lambda: agent._publisher.address)
    if where == "exit":
        gpu.closed = True
        agent.end()
    else:
        gpu.thread = None
        thread = threading.Thread(target=agent.close)
        thread.start()
        thread.join()
    agent._publisher.join(30)  # on a busy machine `close` does not wait for it to the end
    assert times(agent._publisher._steps) == [(0, 0, 0, 0)] * 2  # the host needed no time of the test's
    assert all(step.flags & wire.HOST_TIMED for step in agent._publisher._steps)


def test_a_thread_that_reads_ahead_before_the_first_forward_asks_nothing_of_cuda(install, gpu):
    model, step = training(gpu)
    agent = install(model)
    batches = []
    thread = threading.Thread(target=lambda: batches.extend(DataLoader(range(3))))
    thread.start()
    thread.join()
    step()
    assert (len(batches), agent.active, agent._recorder.loader_samples) == (3, True, 0)


def on_gpu(*devices):
    """A model of which torch would say that its parameters are on these devices."""
    model = Net()
    model.parameters = lambda: iter([type("Parameter", (), {"device": torch.device(device)}) for device in devices])
    return model


def test_a_model_on_the_cpu_has_the_hosts_clock(run_dir):
    assert type(clock_for(Net(), "auto")) is HostClock
    with ddpwatch.agent.install(Net()) as agent:
        assert snapshot(agent).hello.clock == "host"


def test_a_clock_that_does_not_exist_is_refused_and_the_known_ones_are_named(run_dir):
    with pytest.raises(ValueError, match=r"^clock is 'cuda'; it can be one of 'auto', 'host'$"):
        ddpwatch.agent.install(Net(), clock="cuda")


def test_the_clock_is_of_the_first_cuda_device_unless_it_is_declined_or_missing(monkeypatch):
    made = []
    monkeypatch.setattr("ddpwatch.agent.cuda_clock.CudaClock", lambda device: made.append(device) or "the GPU's")
    model = on_gpu("cpu", "cuda:1", "cuda:0")
    assert type(clock_for(model, "auto")) is HostClock  # no CUDA in this build, or switched off
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert type(clock_for(model, "host")) is HostClock
    assert type(clock_for(on_gpu("cpu", "meta"), "auto")) is HostClock
    assert made == []
    assert clock_for(model, "auto") == "the GPU's"
    assert made == [torch.device("cuda", 1)]


@pytest.fixture
def moving(run_dir, gpu, monkeypatch):
    """A real model on the CPU that later seems to have moved to the fake GPU, and one step of its training."""
    monkeypatch.setattr("ddpwatch.agent.agent.CudaClock", lambda _device: gpu.clock())
    monkeypatch.setattr("ddpwatch.agent.agent.CudaClock.name", "cuda", raising=False)
    model, step = training(gpu)

    def move():
        monkeypatch.setattr("ddpwatch.agent.agent.gpu_of", lambda _model: torch.device("cuda", 0))

    yield model, step, move
    gpu.closed, gpu.thread = False, threading.get_ident()
    ddpwatch.agent._current.close()


def test_a_model_that_moves_to_a_gpu_after_install_is_timed_there_from_its_second_step_on(moving, gpu):
    model, step, move = moving
    agent = ddpwatch.agent.install(model)
    move()
    for _ in range(6):
        step()
        gpu.catch_up()
    snap = snapshot(agent)

    assert (snap.hello.clock, snap.notes) == ("cuda", [])
    assert [each.index for each in snap.steps] == [0, 1, 2, 3]
    assert times(snap.steps)[1:] == [(5_000, 7_000, 3_000, 15_000)] * 3


def test_with_the_hosts_clock_by_choice_a_model_that_moves_to_a_gpu_is_noted_once(moving):
    model, step, move = moving
    agent = ddpwatch.agent.install(model, clock="host")
    move()
    for _ in range(3):
        step()
    snap = snapshot(agent)

    assert snap.hello.clock == "host"
    assert [note.text for note in snap.notes] == [HOST_CLOCK]


def test_the_hosts_clock_is_remarked_upon_only_where_it_times_a_gpu():
    assert remarks(on_gpu("cuda:0"), "plain", "host") == [("host-clock", HOST_CLOCK)]
    assert remarks(on_gpu("cuda:0"), "plain", "cuda") == []
    assert remarks(Net(), "plain", "host") == []


def test_torch_has_what_is_used_of_it():
    """The fake GPU has the signatures of the real one; builds without CUDA have the public names, and call the bindings
    under the names that are used here.
    """
    for name in ("Event", "current_stream", "current_device", "device", "is_current_stream_capturing"):
        assert hasattr(Gpu, name)
        assert callable(getattr(torch.cuda, name))
    assert "enable_timing" in inspect.signature(torch.cuda.Event.__new__).parameters
    for name in ("record", "query", "elapsed_time"):
        real, fake = (list(inspect.signature(getattr(owner, name)).parameters) for owner in (torch.cuda.Event, Event))
        assert real == fake
        assert f"super().{name}(" in inspect.getsource(getattr(torch.cuda.Event, name))
    for public, binding in (
        (torch.cuda.current_device, "_cuda_getDevice"),
        (torch.cuda.current_stream, "_cuda_getCurrentStream"),
        (torch.cuda.is_current_stream_capturing, "_cuda_isCurrentStreamCapturing"),
    ):
        assert f"{binding}(" in inspect.getsource(public)
    assert all(map(callable, CUDA_CALLS))
