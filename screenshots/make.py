"""Write the pictures in this folder: `make screenshots`. Each as SVG and as PNG, from recorded and from simulated runs.

Recorded: real jobs of four CPU ranks, one of them slow in backward or stuck. Simulated runs are labeled on the picture.
demo.svg is animated and has no PNG.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import shutil
import subprocess
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import resvg_py
from rich.color import Color
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from ddpwatch import rundir
from ddpwatch.cli._terminal import STYLES
from ddpwatch.core.limits import DEFAULTS
from ddpwatch.outputs.report.data import gather
from ddpwatch.outputs.report.page import page
from ddpwatch.recording.reader import Recording as RecordedFile
from ddpwatch.recording.writer import Recorder
from ddpwatch.session.playback import Playback
from ddpwatch.session.run_follower import RunFollower
from ddpwatch.simulator.source import SimulatedSource
from ddpwatch.sources.frames import Frame, Tick
from ddpwatch.tui.app import Dashboard
from ddpwatch.tui.commands import clean_svg, screen_svg
from ddpwatch.tui.feed import Feed
from ddpwatch.tui.replay_app import ReplayDashboard
from ddpwatch.tui.replay_feed import ReplayFeed
from ddpwatch.view.run_view import current_view
from ddpwatch.view.status import status_screen
from screenshots.animation import Shot, animate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.view.cells import Line

HERE = Path(__file__).parent
RECORDING = HERE.parent / "tests" / "recordings" / "slow-backward.msgpack.gz"
HANG = RECORDING.with_name("hang.msgpack.gz")
SMALL, USUAL, LARGE = (80, 24), (120, 40), (200, 60)
ANIMATED = (100, 30)
"""Terminal of the animation: its text is readable at the width of a README."""
STRAGGLER_S = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
"""Seconds into `RECORDING` that the animation shows: the first steps, and rank 2 being named."""
HANG_S = (6.0, 6.5, 7.0, 7.5, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0)
"""Seconds into `HANG` that it shows after that: the last steps, and the countdown."""
SHOT_S = 1.0
"""Duration of each of its shots, in seconds: long enough to find what has changed."""
LAST_SHOT_S = 5.0
"""The same for the last shot of each run: long enough to read the alert."""
FONT = "DejaVu Sans Mono"
ZOOM = 1.0
SECOND_NS = 1_000_000_000
PLAYED_S = 8
REPORTED_S = 150
REPORT_SIZE = 1160, 2600
UNIX_NS = 1_700_000_000 * SECOND_NS
# The sixteen colors of the terminal in pictures of `status`, from black to white: those of the dashboard's default
# theme, so that each phase has the same color in all pictures. Those of rich have an orange as bright yellow.
NORMAL = ("#12151b", "#ff6b61", "#7fbf6a", "#e5a53a", "#5c8fe6", "#c678dd", "#56b6c2", "#dfe3ea")
BRIGHT = ("#8b93a1", "#ff6b61", "#7fbf6a", "#f0d98c", "#5c8fe6", "#c678dd", "#56b6c2", "#ffffff")


class Recording:
    """A source that plays a recording at once, up to a part of it."""

    def __init__(self, part: float, recording: Path) -> None:
        """All of it, or `part` of its frames."""
        frames = msgspec.msgpack.decode(gzip.decompress(recording.read_bytes()))
        self._frames = [Frame(*frame) for frame in frames[: int(len(frames) * part)]]
        self._last_ns = self._frames[-1].received_ns
        self.until_ns = self._last_ns
        """Time up to which it is played."""
        self.known: set[int] = {0, 1, 2, 3}
        self.here: set[int] = set()
        self.refused: dict[int, str] = {}

    def poll(self, _timeout_ms: int) -> Frame | Tick:
        """The next frame; after the last one the time stands still."""
        return Tick(self.until_ns) if self.played else self._frames.pop(0)

    @property
    def played(self) -> bool:
        """Whether all frames up to `until_ns` were returned."""
        return not self._frames or self._frames[0].received_ns > self.until_ns

    def poll_ready(self, _most: int) -> list[Frame]:
        """One by one, as they came then."""
        return []

    def want_buckets(self, wanted: bool) -> None:
        """It holds none."""

    def want_stacks(self, ranks: frozenset[int]) -> None:
        """Nor any of these."""

    def close(self) -> None:
        """There is nothing to let go of."""


def recorded(part: float = 0.8, name: str = "demo", recording: Path = RECORDING) -> Feed:
    """A recorded run."""
    return _feed(name, Recording(part, recording))


def _feed(name: str, source: Recording) -> Feed:
    run = rundir.RunFile(rundir.SCHEMA, "5ec0de5ec0de5ec0", name, "", 0, 4, 1.7e9, [])
    return Feed(DEFAULTS, follows=RunFollower(run, DEFAULTS, source=source), find=list)


def simulated(ranks: int, played_s: int = PLAYED_S) -> Feed:
    """A made-up run, so long into what can be seen."""
    now_ns = [SECOND_NS]
    source = SimulatedSource(
        ranks, clock=lambda: now_ns[0], sleep=lambda _s: None, unix=lambda: 1_700_000_000 * SECOND_NS
    )
    follower = RunFollower(source.run, DEFAULTS, source=source)
    follower.want_buckets(True)
    for _ in range(played_s * 4):
        now_ns[0] += SECOND_NS // 4
        follower.advance(0)
        while not follower.idle:
            follower.advance(0)
    return Feed(DEFAULTS, follows=follower, simulated=True)


async def dashboard(
    name: str, feed: Feed, size: tuple[int, int], keys: Sequence[str] = (), *, ended: bool = False
) -> None:
    """One screen of the dashboard, after some keys, and after the end of the run."""
    app = Dashboard(feed)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        while feed.follows is not None and (app.run_view is None or not feed.follows.idle or ended > feed.ended):
            await pilot.pause(0.1)
        for key in keys:
            await pilot.press(key)
            await pilot.pause()
        await pilot.pause(0.5)
        _save(f"{name}-{size[0]}x{size[1]}", screen_svg(app, "ddpwatch"))


async def demo() -> None:
    """The animation: a straggler is named, then a hang with its countdown. Both were recorded from real jobs."""
    straggler = await _shots("demo", RECORDING, STRAGGLER_S)
    hang = await _shots("train", HANG, HANG_S)
    svg = animate([*straggler, *hang], poster=len(straggler) - 1)
    (HERE / "demo.svg").write_text(svg, encoding="utf-8")


async def _shots(name: str, recording: Path, moments_s: Sequence[float]) -> list[Shot]:
    """The overview of a recorded run at these moments."""
    source = Recording(1.0, recording)
    source.until_ns = 0
    app = Dashboard(_feed(name, source))
    shots = []
    async with app.run_test(size=ANIMATED) as pilot:
        for moment_s in moments_s:
            source.until_ns = int(moment_s * SECOND_NS)
            while not source.played:
                await pilot.pause(0.1)
            # Longer than the dashboard waits between two views while it receives nothing.
            await pilot.pause(1.5)
            shots.append(Shot(screen_svg(app, "ddpwatch"), SHOT_S))
    shots[-1] = shots[-1]._replace(seconds=LAST_SHOT_S)
    return shots


def report() -> None:
    """A report as a browser shows its first pages; there is none where no browser is."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "run.ddpw", Path(folder) / "report.html"
        _record(source, 16, REPORTED_S)
        with closing(RecordedFile(source)) as recorded_run:
            reported = gather(recorded_run, recorded_run.attempts[-1])
        # A date that does not change with each picture.
        reported = replace(reported, began_ns=UNIX_NS, ended_ns=UNIX_NS + reported.ended_ns - reported.began_ns)
        target.write_text(page(reported), encoding="utf-8")
        flags = ["--headless=new", "--hide-scrollbars", "--disable-gpu", f"--user-data-dir={folder}/profile"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")
        picture = HERE / "report.png"
        size = "--window-size={},{}".format(*REPORT_SIZE)
        command = [chromium, *flags, size, f"--screenshot={picture}", target.as_uri()]
        subprocess.run(command, check=True, capture_output=True)  # noqa: S603 - our own words


def _record(path: Path, ranks: int, played_s: int) -> None:
    """A made-up run as a recording."""
    now_ns = [SECOND_NS]
    source = SimulatedSource(ranks, clock=lambda: now_ns[0], sleep=lambda _s: None, unix=lambda: UNIX_NS)
    with closing(Recorder(path)) as recorder:
        follower = RunFollower(source.run, DEFAULTS, source=source, recorder=recorder)
        follower.want_buckets(True)
        for _ in range(played_s * 4):
            now_ns[0] += SECOND_NS // 4
            follower.advance(0)
            while not follower.idle:
                follower.advance(0)
            follower.drain()


async def replay() -> None:
    """The same run, recorded into a file and looked at again, with the line that says where one is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ddpw"
        recorder = Recorder(path)
        recorder._unix_ns = 1_700_000_000 * SECOND_NS  # noqa: SLF001 - the same picture every time
        run = rundir.RunFile(rundir.SCHEMA, "5ec0de5ec0de5ec0", "demo", "", 0, 4, 1.7e9, [])
        with closing(RunFollower(run, DEFAULTS, source=Recording(1.0, RECORDING), recorder=recorder)) as follower:
            follower.advance(0)
            while not follower.idle:
                follower.advance(0)
                follower.drain()
        recorder.close()
        playback = Playback(RecordedFile(path), playing=False, speed=10.0)
        with closing(ReplayFeed(playback, playback.reel.at(9 * SECOND_NS))) as feed:
            app = ReplayDashboard(feed)
            async with app.run_test(size=USUAL) as pilot:
                while app.run_view is None or playback.filling:
                    await pilot.pause(0.1)
                await pilot.pause(0.5)
                _save(f"replay-{USUAL[0]}x{USUAL[1]}", screen_svg(app, "ddpwatch"))


def status(size: tuple[int, int]) -> None:
    """`ddpwatch status` of the recorded run."""
    columns, rows = size
    follows = recorded().follows
    assert follows is not None
    follows.advance(0)
    while not follows.idle:
        follows.advance(0)
    follows.monitor.evaluate_now()
    lines = status_screen(current_view(follows.monitor), columns, rows - 1)
    console = Console(width=columns, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for line in lines:
        console.print(_text(line), no_wrap=True, overflow="crop")
    name = f"status-{columns}x{rows}"
    normal, bright = ([tuple(Color.parse(color).get_truecolor()) for color in colors] for colors in (NORMAL, BRIGHT))
    theme = TerminalTheme(normal[0], normal[-1], normal, bright)
    _save(name, clean_svg(console.export_svg(title="ddpwatch status", theme=theme, unique_id=name)))


def _text(line: Line) -> Text:
    text = Text()
    for cell in line:
        text.append(cell.text, _rich_style(STYLES[cell.level]))
    return text


def _rich_style(style: dict[str, Any]) -> str:
    words = [word for word in ("bold", "dim") if style.get(word)]
    return " ".join([*words, *([style["fg"]] if "fg" in style else [])])


def _save(name: str, svg: str) -> None:
    (HERE / f"{name}.svg").write_text(svg, encoding="utf-8")
    png = resvg_py.svg_to_bytes(svg_string=svg, zoom=ZOOM, font_family=FONT, sans_serif_family="DejaVu Sans")
    (HERE / f"{name}.png").write_bytes(bytes(png))


async def everything() -> None:
    """All screens in a telling state."""
    await demo()
    for size in (SMALL, USUAL, LARGE):
        await dashboard("overview", recorded(), size)
    await dashboard("overview-256-ranks", simulated(256), USUAL)
    await dashboard("ranks", simulated(256), USUAL, ["2"])
    await dashboard("all-reduce", simulated(8), USUAL, ["3"])
    await dashboard("devices", recorded(), USUAL, ["4"])
    await dashboard("gpus", simulated(16, 60), USUAL, ["4"])
    await dashboard("alerts", simulated(64, 110), USUAL, ["5"])
    await dashboard("rank", recorded(), USUAL, ["down", "down", "enter"])
    for size in (SMALL, USUAL):
        await dashboard("hang", recorded(1.0, "train", HANG), size)
    await dashboard("hang-rank", recorded(1.0, "train", HANG), USUAL, ["x"])
    await replay()
    await dashboard("help", recorded(), USUAL, ["question_mark"])
    await dashboard("summary", recorded(1.0), USUAL, ended=True)
    await dashboard("waiting", Feed(DEFAULTS, find=list), SMALL)
    report()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as nowhere:
        # The waiting screen names the directory that it looks into: not one of this machine.
        os.environ["DDPWATCH_RUN_DIR"] = "/run/user/1000/ddpwatch"
        os.chdir(nowhere)
        asyncio.run(everything())
        for size in (SMALL, USUAL):
            status(size)
