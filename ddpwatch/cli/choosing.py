"""The run that a command was told to take, with a word on a ticket that others may read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpwatch.rundir import RunFile


def find_run(selector: str | None) -> RunFile:
    """As `sources.runs.find` does. That a ticket lies open is said, and it is used all the same."""
    from ddpwatch.cli.headless import say
    from ddpwatch.sources.runs import find, lies_open

    run = find(selector)
    if selector is not None and run.viewer_secret_key and lies_open(selector):
        say(f"ddpwatch: warning: {selector} is a key that others may read; take it from them (chmod 600)")
    return run
