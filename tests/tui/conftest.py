"""Tests of the dashboard may be coroutines: each is run to its end in a loop of its own."""

from __future__ import annotations

import asyncio
import inspect

import pytest
from textual import _wait

# After each key Textual waits until the process has been idle for a while, which one with a thread that takes frames in
# seldom is: each key would take some tenths of a second. Our tests wait for what they look for.
_wait.SLEEP_GRANULARITY = 0.005
_wait.SLEEP_IDLE = 0.002


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True


@pytest.fixture(autouse=True)
def _plain_surroundings(monkeypatch):
    """What a developer's shell may hold must not change what is drawn, and no run of theirs may be found."""
    for name in ("NO_COLOR", "TEXTUAL_THEME", "TEXTUAL_ANIMATIONS", "DDPWATCH_THEME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DDPWATCH_RUN_DIR", "/nonexistent/ddpwatch")
