"""How a job was started: what helps to run it again is reported, and no secret."""

import pytest

from ddpwatch import wire
from ddpwatch.agent.environment import COMMAND_CHARS, ENVIRONMENT_CHARS, command, environment


def test_variables_that_change_how_a_job_runs_are_reported_and_no_others():
    reported = environment({"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "HOME": "/home/me", "HISTFILE": "x"})

    assert reported == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}


def test_the_path_to_the_data_is_reported_in_full_if_it_is_set():
    assert environment({"DDPWATCH_DATA": "/data/" + "x" * 150}) == {"DDPWATCH_DATA": "/data/" + "x" * 150}


@pytest.mark.parametrize("name", ["TORCH_API_KEY", "NCCL_TOKEN", "TORCH_SECRET", "GLOO_PASSWORD", "TORCH_auth"])
def test_a_variable_whose_name_sounds_like_a_secret_is_not_sent(name):
    assert environment({name: "hunter2"}) == {}


def test_the_environment_is_bounded_and_fits_onto_the_wire():
    reported = environment({f"NCCL_{number}": "\udcff" * 500 for number in range(500)})

    assert 0 < sum(len(name) + len(value) for name, value in reported.items()) <= ENVIRONMENT_CHARS
    hello = wire.Hello(
        rank=0, seq=1, wire_version=1, agent_version="", run_id="", run_name="", attempt=0, world_size=1, local_rank=0,
        host="", pid=1, started_unix_ns=0, mono_ns=0, environment=reported, command=command(["x" * 9999]),
    )  # fmt: skip
    assert wire.decode(wire.encode(hello)) == hello
    assert len(hello.command) == COMMAND_CHARS


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["train.py", "--data", "/my data", "--lr=0.1"], "train.py --data '/my data' --lr=0.1"),
        (["train.py", "--api-key", "hunter2", "--lr", "1"], "train.py --api-key *** --lr 1"),
        (["train.py", "--hf_token=hunter2"], "train.py --hf_token=***"),
        (["train.py", "wandb.api_key=hunter2"], "train.py wandb.api_key=***"),
        (["train.py", "--token", "--fast"], "train.py --token --fast"),
        (["train.py", "https://me:hunter2@host/x"], "train.py 'https://***@host/x'"),
    ],
)
def test_the_command_line_is_reported_without_its_secrets(arguments, shown):
    assert command(arguments) == shown
