"""Fixtures for all tests. Its place also makes `fake_rank` importable from every folder below."""

from __future__ import annotations

import pytest
from fake_rank import short_directory
from pool import Pool


@pytest.fixture
def run_dir(monkeypatch):
    """An empty run directory that every ddpwatch in this test uses, child processes included."""
    with short_directory() as path:
        monkeypatch.setenv("DDPWATCH_RUN_DIR", str(path))
        yield path


@pytest.fixture(scope="session")
def _session_pool():
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def pool(_session_pool, run_dir):
    """Real ranks, started once for the whole session."""
    _session_pool.env = {"DDPWATCH_RUN_DIR": str(run_dir)}
    return _session_pool
