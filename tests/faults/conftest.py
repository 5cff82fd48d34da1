"""Processes that may die, one set a test."""

import pytest


@pytest.fixture
def start(_session_zygote, run_dir):
    """`start(function, *args, env={})` runs a function of the test's module in a process of its own."""
    children = []

    def start(function, *args, env=None):
        children.append(_session_zygote.start(function, *args, env={"DDPWATCH_RUN_DIR": str(run_dir), **(env or {})}))
        return children[-1]

    yield start
    while children:
        children.pop().discard()
