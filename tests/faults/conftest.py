"""Processes that may die, one set a test."""

import pytest


@pytest.fixture
def start(_session_zygote, run_dir):
    """`start(function, *args, env={})` runs a function of the test's module in a process of its own."""
    with _session_zygote.family({"DDPWATCH_RUN_DIR": str(run_dir)}) as start:
        yield start
