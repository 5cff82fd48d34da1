"""An error anywhere in ddpwatch switches ddpwatch off, says so once, and leaves the training as it was."""

import errno
import os
import re
from unittest import mock

import pytest

import ddpwatch.agent
from ddpwatch.agent.hooks.forward import ForwardHooks
from tests.faults.errors_planted import SITES, planted, train, untouched, watched


@pytest.fixture(scope="module")
def expected(_session_pool):
    return _session_pool.run(untouched, 2)


def check(results, expected, named):
    """All ranks trained as if ddpwatch were not there, and each said in one line what is wrong."""
    for rank, result in enumerate(results):
        assert result["bits"] == expected[rank]
        assert re.fullmatch(r"ddpwatch[^\n]*: switched off, training goes on \([^\n]*\)\n", result["said"])
        assert named in result["said"]
        assert not result["active"]
        assert result["still"], "hooks work on although the agent is off"


@pytest.mark.parametrize("site", SITES)
def test_an_error_in_one_place_costs_the_display_and_nothing_else(pool, expected, site):
    results = pool.run(planted, 2, site=site)

    check(results, expected, "planted")


def test_the_line_names_the_hook_that_failed(pool, expected):
    results = pool.run(planted, 2, site="BackwardHooks._computed")

    check(results, expected, "BackwardHooks._computed: RuntimeError: planted")


def interrupted(rank, world_size):
    """Ctrl-C that arrives while a hook runs."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with (
        mock.patch.object(ForwardHooks, "_watch_output", interrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        train(rank, world_size, ddpwatch.agent.install)
    return ddpwatch.agent._current.active


def test_a_keyboard_interrupt_inside_a_hook_is_the_users_and_passes(pool):
    assert pool.run(interrupted, 2) == [True, True]


@pytest.mark.parametrize("obstacle", ["a file in its place", "open to others", "too long for a Unix socket"])
def test_a_run_directory_that_cannot_be_used_is_named_and_training_goes_on(pool, expected, run_dir, obstacle):
    base = run_dir / ("x" * 100 if obstacle == "too long for a Unix socket" else "x")
    if obstacle == "a file in its place":
        base.write_text("mine")
    if obstacle == "open to others":
        base.mkdir(mode=0o755)

    results = pool.run(watched, 2, env={"DDPWATCH_RUN_DIR": str(base)})

    check(results, expected, str(base))
    assert not base.is_dir() or not list(base.iterdir())


def on_a_full_disk(rank, world_size):
    really_open = os.open

    def open_(path, flags, *rest, **named):
        if "run.json" in str(path) and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really_open(path, flags, *rest, **named)

    with mock.patch.object(os, "open", open_):
        return watched(rank, world_size)


def test_a_full_disk_is_said_and_training_goes_on(pool, run_dir):
    check(pool.run(on_a_full_disk, 1), pool.run(untouched, 1), "No space left on device")
    assert not list(run_dir.iterdir())
