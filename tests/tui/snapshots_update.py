"""Write the SVG snapshots of the dashboard again: `python -m tests.tui.snapshots_update`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    """The tests themselves write them, so that both draw in the same way."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "test_snapshots.py")]
    environment = {**os.environ, "DDPWATCH_SNAPSHOTS_UPDATE": "1"}
    return subprocess.run(command, env=environment, cwd=HERE.parents[1], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
