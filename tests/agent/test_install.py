"""`install` in a process without peers: what it takes, what it returns, and what is left after `close`."""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules.module import Module

import ddpwatch.agent
from ddpwatch import wire
from ddpwatch.agent.hooks.backward import MANY_BACKWARDS
from ddpwatch.agent.publisher import Publisher
from tests.builders.fake_rank import short_directory, steps_of
from tests.builders.training import Net, snapshot, train_step, wait_for

BATCH = torch.randn(16, 8, generator=torch.Generator().manual_seed(5))
TARGET = torch.arange(16) % 4


@pytest.fixture
def install(run_dir):
    def call(*args, **kwargs):
        return ddpwatch.agent.install(*args, **kwargs)

    yield call
    if ddpwatch.agent._current is not None:
        ddpwatch.agent._current.close()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def beat(agent):
    return snapshot(agent).beat


def test_a_plain_module_is_measured(install):
    model = Net()
    agent = install(model)
    optimizer = sgd(model)
    for _ in range(3):
        train_step(model, optimizer, BATCH, TARGET)
    snap = snapshot(agent)
    assert (snap.hello.kind, snap.hello.model, snap.hello.world_size) == ("plain", "Net", 1)
    assert [(step.samples, step.backwards) for step in snap.steps] == [(16, 1)] * 3
    assert all(step.forward_ns and step.backward_ns and step.optimizer_ns for step in snap.steps)
    assert snap.notes == []


def test_a_model_whose_parameters_do_not_exist_yet_is_measured(install):
    model = nn.Sequential(nn.LazyLinear(4))
    agent = install(model)
    model(BATCH)
    optimizer = sgd(model)
    for _ in range(11):
        train_step(model, optimizer, BATCH, TARGET)
    snap = snapshot(agent)
    assert [step.backwards for step in snap.steps] == [1] * 11
    assert len(snap.checksums) == 1


def test_data_parallel_is_measured_and_noted_in_two_sentences(install):
    model = nn.DataParallel(Net())
    agent = install(model)
    train_step(model, sgd(model), BATCH, TARGET)
    snap = snapshot(agent)
    assert (snap.hello.kind, snap.hello.model) == ("dataparallel", "Net")
    (note,) = snap.notes
    assert note.kind == "dataparallel"
    assert note.text.count(". ") == 1
    assert note.text.endswith(".")
    assert [step.backwards for step in snap.steps] == [1]


@pytest.mark.parametrize("thing", [3, None, print, "model", nn.Linear])
def test_anything_but_a_module_is_refused_in_a_clear_sentence(install, thing):
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module.* it got a \w+\.$"):
        install(thing)
    assert ddpwatch.agent._current is None or not ddpwatch.agent._current.active


def test_an_unknown_comm_is_refused_and_the_known_ones_are_named(install):
    with pytest.raises(ValueError, match=r"'nonsense'.*'auto', 'buckets'"):
        install(Net(), comm="nonsense")


@pytest.mark.parametrize("arguments", [{"optimizer": 3}, {"run_name": 5}])
def test_arguments_of_the_wrong_type_are_refused(install, arguments):
    (name,) = arguments
    with pytest.raises(TypeError, match=f"^{name} is of type int; it can be "):
        install(Net(), **arguments)


def test_install_again_returns_the_same_agent_which_watches_both(install):
    first, second = Net(), nn.Linear(8, 4)
    agent = install(first)
    assert install(first) is agent
    assert install(second) is agent
    train_step(second, sgd(second), BATCH, TARGET)
    assert [step.backwards for step in snapshot(agent).steps] == [1]


def test_the_agent_is_a_context_manager_and_lets_an_exception_pass(install):
    agent = install(Net())
    with pytest.raises(ZeroDivisionError), agent:
        _ = agent.active / 0
    assert not agent.active


def test_close_twice_is_the_same_as_once_and_a_new_agent_measures_again(install):
    model = Net()
    agent = install(model)
    agent.close()
    agent.close()
    assert not agent.active
    train_step(model, sgd(model), BATCH, TARGET)
    assert agent._recorder.index == 0
    again = install(model)
    assert again is not agent
    train_step(model, sgd(model), BATCH, TARGET)
    assert [step.backwards for step in snapshot(again).steps] == [1]


def test_an_agent_that_switched_itself_off_gives_way_to_a_new_one(install, capfd):
    model = Net()
    agent = install(model)
    agent._recorder.close_step = None
    train_step(model, sgd(model), BATCH, TARGET)
    assert not agent.active
    assert "training goes on" in capfd.readouterr().err
    again = install(model)
    train_step(model, sgd(model), BATCH, TARGET)
    assert [step.backwards for step in snapshot(again).steps] == [1]
    again.close()
    assert Net.__call__ is Module.__call__


def test_a_model_that_cannot_be_watched_leaves_no_wrapper_in_place(install, capfd):
    class Closed(type):
        def __setattr__(cls, name, value):
            raise TypeError("read-only")

    class Odd(nn.Linear, metaclass=Closed):
        pass

    before = dict(vars(nn.parallel.DistributedDataParallel))
    agent = install(Odd(8, 4))
    assert isinstance(agent, ddpwatch.agent.NoAgent)
    assert "training goes on" in capfd.readouterr().err
    assert dict(vars(nn.parallel.DistributedDataParallel)) == before


def test_pauses_are_reported_while_they_last_and_nested_ones_end_in_order(install):
    model = Net()
    agent = install(model)
    optimizer = sgd(model)
    train_step(model, optimizer, BATCH, TARGET)
    seen = []
    with agent.pause("checkpoint"):
        seen.append(beat(agent).pause)
        with agent.pause("upload"):
            seen.append(beat(agent).pause)
            train_step(model, optimizer, BATCH, TARGET)
        seen.append(beat(agent).pause)
    seen.append(beat(agent).pause)
    for _ in range(2):
        train_step(model, optimizer, BATCH, TARGET)
    snap = snapshot(agent)
    assert seen == ["checkpoint", "upload", "checkpoint", ""]
    assert [(note.kind, note.text) for note in snap.notes] == [
        ("pause", "checkpoint"),
        ("pause", "upload"),
        ("resume", "upload"),
        ("resume", "checkpoint"),
    ]
    assert [step.flags & wire.PAUSED for step in snap.steps] == [0, wire.PAUSED, wire.PAUSED, 0]


@pytest.mark.parametrize("why", ["", None, "x" * 5000, "\udc80"])
def test_any_reason_will_do_for_a_pause(install, why):
    agent = install(Net())
    with agent.pause(why):
        assert beat(agent).pause
    assert agent.active


def test_a_loop_without_an_optimizer_ends_its_steps_by_hand(install):
    model = Net()
    agent = install(model)
    for _ in range(3):
        nn.functional.cross_entropy(model(BATCH), TARGET).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.01 * parameter.grad)
                parameter.grad = None
        agent.step()
    train_step(model, sgd(model), BATCH, TARGET)  # from the first call on, only the script ends steps
    assert [(step.samples, step.backwards) for step in snapshot(agent).steps] == [(16, 1)] * 3


def test_a_loop_whose_steps_never_end_is_noted_once(install):
    model = nn.Linear(2, 1)
    agent = install(model)
    batch = torch.ones(1, 2)
    for _ in range(MANY_BACKWARDS - 1):
        model(batch).sum().backward()
    assert snapshot(agent).notes == []
    for _ in range(10):
        model(batch).sum().backward()
    (note,) = snapshot(agent).notes
    assert note.kind == "no-steps"
    assert "agent.step()" in note.text


def test_tracing_a_watched_model_does_not_count_as_training_and_warns_of_nothing(install):
    model = nn.Linear(8, 4)
    agent = install(model)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*jit.trace")  # by some versions of torch
        traced = torch.jit.trace(model, BATCH.repeat(2, 1))
    assert torch.equal(traced(BATCH), model(BATCH))
    assert agent.active
    train_step(model, sgd(model), BATCH, TARGET)
    (step,) = snapshot(agent).steps
    assert (step.samples, step.backwards) == (16, 1)  # the training's batch, not the larger one of the tracing


def test_logged_numbers_stand_beside_their_step_and_tensors_are_refused(install):
    model = Net()
    agent = install(model)
    optimizer = sgd(model)
    agent.log(loss=1.5, epoch=2)
    agent.log(loss=torch.tensor(3.0), rate=0.1)
    train_step(model, optimizer, BATCH, TARGET)
    train_step(model, optimizer, BATCH, TARGET)
    snap = snapshot(agent)
    assert [step.values for step in snap.steps] == [{"loss": 1.5, "epoch": 2.0, "rate": 0.1}, None]
    (note,) = snap.notes
    assert note.kind == "log"
    assert note.text.endswith("not shown: loss")


def test_steps_go_out_packed_unless_something_was_logged_in_one_of_them(install, monkeypatch):
    reported = []
    monkeypatch.setattr(Publisher, "_send_frame", lambda self, topic, payload: reported.append(wire.decode(payload)))
    model = Net()
    agent = install(model)
    optimizer = sgd(model)
    train_step(model, optimizer, BATCH, TARGET)
    wait_for(lambda: any(message.table for message in reported if isinstance(message, wire.Beat)))
    agent.log(loss=1.5)
    train_step(model, optimizer, BATCH, TARGET)
    beats = wait_for(lambda: [message for message in reported if isinstance(message, wire.Beat) and message.steps])

    assert [step.values for step in beats[0].steps] == [{"loss": 1.5}]
    assert not any(beat.table and beat.steps for beat in reported if isinstance(beat, wire.Beat))
    done = [step for beat in reported if isinstance(beat, wire.Beat) for step in steps_of(beat)]
    assert [step.index for step in done] == [0, 1]


@pytest.mark.parametrize("values", [{"x": 10**400}, {"x" * 5000: 1.0}, {"\udc80": 1.0}, {"x": float("nan")}])
def test_no_value_given_to_log_switches_the_agent_off(install, values):
    model = Net()
    agent = install(model)
    agent.log(**values)
    train_step(model, sgd(model), BATCH, TARGET)
    assert len(snapshot(agent).steps) == 1
    assert agent.active


DISABLED = """
import torch, ddpwatch.agent
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.data.dataloader import _BaseDataLoaderIter
owners = (DistributedDataParallel, _BaseDataLoaderIter, torch.amp.GradScaler, torch.nn.Linear)
watched = [vars(owner) for owner in owners]
before = [dict(names) for names in watched]
with ddpwatch.agent.install(torch.nn.Linear(2, 2), comm="buckets") as agent:
    assert type(agent) is ddpwatch.agent.NoAgent
    assert not agent.active
    agent.step()
    agent.log(x=1)
    with agent.pause("x"):
        pass
    assert [dict(names) for names in watched] == before
    codes = [value.__code__ for value in before[0].values() if hasattr(value, "__code__")]
    ours = ddpwatch.agent.__file__.removesuffix("__init__.py")
    assert codes and not any(code.co_filename.startswith(ours) for code in codes)
    assert not _global_optimizer_pre_hooks and not _global_optimizer_post_hooks
    import threading
    assert threading.active_count() == 1
print("fine")
"""


# Forks, because torch is slow to import: each still imports the agent for the first time, and so does what follows.
FIRST_IMPORTS = """
import os, sys, torch, torch.nn.parallel, torch.utils.data
script, *words = sys.argv[1:]
for word in words:
    os.environ["DDPWATCH_DISABLE"] = word
    before = set(sys.modules)
    child = os.fork()
    if not child:
        import ddpwatch.agent
        print(*set(sys.modules) - before, flush=True)
        os._exit(ddpwatch.agent._disabled)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
assert "ddpwatch.agent" not in sys.modules
exec(script)
"""
WORDS = ["", "0", "false", "No", "off", "1"]


@pytest.fixture(scope="module")
def first_imports():
    """For each of `WORDS`, the modules that the agent brought along, and whether it is disabled; then `DISABLED`."""
    with short_directory() as path:
        done = subprocess.run(
            [sys.executable, "-c", FIRST_IMPORTS, DISABLED, *WORDS],
            env={**os.environ, "DDPWATCH_RUN_DIR": str(path)}, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert not any(path.iterdir())
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_disabled_by_the_environment_nothing_is_patched_and_a_word_that_says_no_disables_nothing(first_imports):
    assert first_imports[1::2] == ["0", "0", "0", "0", "0", "1"]
    assert first_imports[-1] == "fine"


def test_it_loads_nothing_of_the_viewer(first_imports):
    # torch brings numpy along where it is installed; the agent adds none of these itself.
    loaded = first_imports[0].split()
    assert not {name.partition(".")[0] for name in loaded} & {"textual", "rich", "click", "numpy"}
    ours = {name.split(".")[1] for name in loaded if name.startswith("ddpwatch.")}
    assert ours == {"agent", "wire", "rundir", "encryption", "errors", "version"}


def test_the_agents_thread_ends_with_close(install):
    agent = install(Net())
    wait_for(lambda: agent._publisher.address)
    agent.close()
    assert not agent._publisher.is_alive()


def test_what_others_put_into_torchs_module_class_still_sees_the_models_call(install):
    model = nn.Linear(8, 4)
    install(model)
    graph = torch.fx.symbolic_trace(nn.Sequential(model, nn.ReLU())).graph  # replaces Module.__call__ meanwhile
    assert [node.op for node in graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
