"""Fixtures for all tests, the order in which workers take them, and settings of the processes they start."""

from __future__ import annotations

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from tests.builders.fake_rank import short_directory
from tests.builders.forked_cli import Forker
from tests.builders.rank_pool import Pool
from tests.builders.zygote import Zygote

# How long an example takes says how busy the machine is; the time of a whole test is limited by pytest-timeout.
EXAMPLES = {"busy": 20, "thorough": 200}
for name, count in EXAMPLES.items():
    settings.register_profile(name, deadline=None, max_examples=count, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "busy"))

TOGETHER = {
    "ranks": ("tests/ddp/", "tests/test_examples.py", "tests/tui/test_in_terminal.py"),
    "hangs": ("tests/faults/test_hangs.py", "tests/faults/test_watch_of_dying_ranks.py", "tests/faults/test_tcp.py"),
    "faults": ("tests/faults/",),
}
"""Files that one worker runs, the first match. More than three jobs of real ranks at once would disturb what the first
group measures; the two groups of faults take about equally long.
"""
REAL = (
    "tests/ddp/", "tests/faults/", "tests/test_crowd.py", "tests/test_examples.py", "tests/test_package.py",
    "tests/test_terminal.py", "tests/tui/test_in_terminal.py", "tests/outputs/test_report_in_browser.py",
    "tests/cli/test_record.py", "tests/cli/test_relay.py", "tests/cli/test_watch.py", "tests/outputs/test_relay.py",
)  # fmt: skip
"""What `make test-fast` leaves out, with all that uses one of these fixtures: ranks with torch, terminals, a browser,
network namespaces, a build, and commands that follow a run over seconds.
"""
REAL_FIXTURES = frozenset({"_session_zygote", "ddpwatch_on_a_terminal"})


def pytest_configure():
    """What all processes have that the tests start."""
    # A shell has what it starts in the background ignore Ctrl-C, and so would they.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Nothing multiplies matrices with numpy, but each process that imports it would start threads for that: a quarter
    # of what the start of a command takes.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Each group of `TOGETHER` goes to one worker, every other file to whichever is free.

    Marks of `xdist_group` would say the same, but xdist 3.8 does not see them under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    # In the order of `pytest_collection_modifyitems`, and not by how many tests a file has.
    config.option.loadscopereorder = False

    class RanksTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return _together(nodeid) or nodeid.partition("::")[0]

    return RanksTogether(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected is kept: looking through it for garbage would be a third of this time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # Dashboards and synthetic runs are many small things that are dropped as a whole: seldom is often enough.
        gc.set_threshold(10_000)


def pytest_collection_modifyitems(items):
    """What takes longest comes first, so that no worker is left alone with it at the end.

    Then what mostly waits for a screen, while there is less to compute than there are cores; small files come last.
    """
    items.sort(key=lambda item: (_together(item.nodeid) is None, not item.nodeid.startswith("tests/tui/")))
    for item in items:
        if item.nodeid.startswith(REAL) or not REAL_FIXTURES.isdisjoint(item.fixturenames):
            item.add_marker("real")


def _together(nodeid):
    path = nodeid.partition("::")[0]
    return next((name for name, places in TOGETHER.items() if path.startswith(places)), None)


@pytest.fixture
def run_dir(monkeypatch):
    """An empty run directory that every ddpwatch in this test uses, child processes included."""
    with short_directory() as path:
        monkeypatch.setenv("DDPWATCH_RUN_DIR", str(path))
        yield path


@pytest.fixture(scope="session")
def _session_forker():
    forker = Forker()
    yield forker
    forker.close()


@pytest.fixture
def forker(_session_forker):
    """What forks processes that have the command line, started once for the whole session."""
    return _session_forker


@pytest.fixture(scope="session")
def _session_zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture
def zygote(_session_zygote):
    """What forks processes that have torch, started once for the whole session."""
    return _session_zygote


@pytest.fixture(scope="session")
def _session_pool(_session_zygote):
    pool = Pool(_session_zygote)
    yield pool
    pool.close()


@pytest.fixture
def pool(_session_pool, run_dir):
    """Real ranks, started once for the whole session."""
    _session_pool.env = {"DDPWATCH_RUN_DIR": str(run_dir)}
    return _session_pool
