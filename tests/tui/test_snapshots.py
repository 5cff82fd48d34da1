"""SVG snapshots of the dashboard: a change of the drawing shows as a changed file.

python -m tests.tui.snapshots_update      # write them all again, then look at every one that git shows as changed
"""

from __future__ import annotations

import os
import re
from contextlib import closing
from datetime import timezone
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpwatch.core.limits import DEFAULTS
from ddpwatch.recording.reader import Recording
from ddpwatch.session.playback import Playback
from ddpwatch.tui import replay_app as replay_app_module
from ddpwatch.tui import run_picker as run_picker_module
from ddpwatch.tui.commands import screen_svg
from ddpwatch.tui.feed import Feed
from ddpwatch.tui.replay_feed import ReplayFeed
from tests.builders.kept_runs import tape
from tests.tui.stage import Stage, played, staged

SNAPSHOTS = Path(__file__).parent / "snapshots"
UPDATE = "DDPWATCH_SNAPSHOTS_UPDATE"
SIZES = ((80, 24), (120, 40), (200, 60))
MAX_BYTES = 3_000_000
REPLAY = "replay"
STATES = {
    "healthy": ("healthy", "1"),
    "straggler": ("straggler", "1"),
    "many-alerts": ("many", "5"),
    "run-ended": ("straggler", ""),
    "waiting": (None, ""),
    "no-gpu": ("healthy", "4"),
    "1024-ranks": ("crowd", "1"),
    "gpus": ("gpus", "4"),
    "512-gpus": ("512-gpus", "4"),
    REPLAY: (None, ""),
}
SIZES_OF = {"512-gpus": SIZES[1:2], REPLAY: SIZES[:2]}
"""Not all sizes show something new."""


async def test_a_replay_looks_as_it_did(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_app_module, "local_zone", lambda: timezone.utc)
    tape(tmp_path / "run.ddpw", "slow-backward", "healthy")
    playback = Playback(Recording(tmp_path / "run.ddpw"), playing=False, speed=10.0)
    changed = []
    with closing(ReplayFeed(playback, playback.reel.at(8_000_000_000))) as feed:
        app = replay_app_module.ReplayDashboard(feed)
        async with app.run_test(size=SIZES[0]) as pilot:
            stage = Stage(app, pilot)
            await stage.until(lambda: app.run_view is not None and not playback.filling, "the first run view")
            for columns, rows in SIZES_OF[REPLAY]:
                await stage.resize(columns, rows)
                svg = normalized(screen_svg(app, "ddpwatch"))
                changed += compare(f"{REPLAY}-{columns}x{rows}.svg", svg, tmp_path)
    assert not changed, "looks different; if that is meant: python -m tests.tui.snapshots_update\n" + "\n".join(changed)


@pytest.mark.parametrize("state", [state for state in STATES if state != REPLAY])
async def test_the_screen_looks_as_it_did(state, tmp_path, monkeypatch):
    # Only the wait for a run shows the clock of this machine.
    monkeypatch.setattr(run_picker_module, "time", SimpleNamespace(monotonic=lambda: 7.0, time=lambda: 1_790_000_000.0))
    script, key = STATES[state]
    follower = played(script) if script else None
    feed = Feed(DEFAULTS, follows=follower, find=list)
    changed = []
    async with staged(follower, SIZES[0], feed=feed) as stage:
        if state == "run-ended":
            follower.end_badly("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
            await stage.shows("summary")
        if key:
            await stage.press(key)
        for columns, rows in SIZES_OF.get(state, SIZES):
            await stage.resize(columns, rows)
            svg = normalized(screen_svg(stage.app, "ddpwatch"))
            changed += compare(f"{state}-{columns}x{rows}.svg", svg, tmp_path)
    assert not changed, "looks different; if that is meant: python -m tests.tui.snapshots_update\n" + "\n".join(changed)


def normalized(svg: str) -> str:
    """Without the number that Rich derives from the content, and without blanks at the ends of lines."""
    svg = re.sub(r"terminal-\d+", "t", svg)
    return "\n".join(line.rstrip() for line in svg.splitlines() if line.strip()) + "\n"


def compare(name: str, svg: str, place: Path) -> list[str]:
    """Which two files differ, or nothing."""
    kept = SNAPSHOTS / name
    if os.environ.get(UPDATE):
        kept.write_text(svg, encoding="utf-8")
    if kept.exists() and kept.read_text(encoding="utf-8") == svg:
        return []
    new = place / name
    new.write_text(svg, encoding="utf-8")
    return [f"  was: {kept}\n  is:  {new}"]


def test_there_is_a_snapshot_of_every_state_and_nothing_else_and_they_are_small():
    files = list(SNAPSHOTS.iterdir())
    assert {file.name for file in files} == {
        f"{state}-{columns}x{rows}.svg" for state in STATES for columns, rows in SIZES_OF.get(state, SIZES)
    }
    assert sum(file.stat().st_size for file in files) < MAX_BYTES
