"""Processes that may die, one set a test."""

import pytest
from zygote import Zygote


@pytest.fixture(scope="session")
def _session_zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def start(_session_zygote, run_dir):
    """`start(function, *args, env={})` runs a function of the test's module in a process of its own."""

    def start(function, *args, env=None):
        return _session_zygote.start(function, *args, env={"DDPWATCH_RUN_DIR": str(run_dir), **(env or {})})

    yield start
    _session_zygote.discard_children()
