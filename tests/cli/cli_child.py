"""The environment of a `ddpwatch` that a test starts."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
GIVE_UP_S = 60


def child_environment(**changed):
    """This process's environment without what would change the output."""
    kept = {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "DDPWATCH_DEBUG"}}
    return {**kept, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", **changed}
