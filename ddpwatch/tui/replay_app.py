"""The dashboard on a recording: the same screens, with a line that says where one is, and keys that go elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from ddpwatch.recording.moments import EXAMPLES, NoMoment
from ddpwatch.tui.app import TICK_S, Dashboard
from ddpwatch.tui.keys import REPLAY_BINDINGS, SUMMARY, TABS
from ddpwatch.tui.screens import local_zone
from ddpwatch.tui.themes import DEFAULT
from ddpwatch.tui.widgets import Field, Plain
from ddpwatch.view.replay_bar import PARTS, replay_line

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable
    from pathlib import Path

    from textual.binding import BindingType
    from textual.widget import Widget

    from ddpwatch.tui.replay_feed import ReplayFeed
    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import RunView

SPEEDS: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
SAID_S: Final = 2.5
AT_THE_END: Final = "Nothing was recorded after this."
_TIME_KEYS: Final = frozenset({"go_to", "edge"})
"""Actions of keys that a field to type in, or a page over the screen, has for itself."""


class ReplayDashboard(Dashboard):
    """A recording, from wherever one wants to look at it."""

    BINDINGS: ClassVar[list[BindingType]] = list(REPLAY_BINDINGS)
    # What is said must not hide where one is. The field lies over the last line: if it took one from the screens, they
    # would have to be laid out anew, while somebody waits for where it leads.
    CSS = "ToastRack { margin-bottom: 2; } Screen { layers: default over; } #goto { layer: over; }"

    def __init__(self, feed: ReplayFeed, *, theme: str = DEFAULT, export_to: Path | None = None) -> None:
        """Show the recording. The feed is closed by whoever made it."""
        super().__init__(feed, theme=theme, export_to=export_to)
        self.recording = feed
        self._seek_request = 0
        """Counts the moments that were wanted."""

    def bars(self) -> Iterable[Widget]:
        """Where one is, and a field to say where one wants to be."""
        yield Plain(self._bar, id="replay")
        yield Field(self._moment_typed, asks=f"go to {EXAMPLES}", name="goto")

    def on_mount(self) -> None:
        """Time passes on the line, whatever else is under way."""
        self.set_interval(TICK_S, self._repaint_bar)
        if self.recording.notice:
            self.notify(self.recording.notice, severity="warning", markup=False)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether an action can be taken now."""
        if action in _TIME_KEYS and (len(self.screen_stack) > 1 or isinstance(self.focused, Field)):
            return False
        return super().check_action(action, parameters)

    def say_restarted(self) -> None:
        """It is another attempt from now on."""
        position = self.recording.position
        said = f"This is attempt {position.attempt} of {position.attempts}."
        self.notify(said, timeout=SAID_S, markup=False)

    def _bar(self, columns: int, _rows: int) -> list[Line]:
        return [replay_line(self.recording.position, columns, local_zone())]

    def _repaint_bar(self) -> None:
        if self._still_there:
            self._board.query_one("#replay", Plain).repaint()

    def _see(self, run_view: RunView | None) -> None:
        # The summary is there when the run has ended, and does not push itself forward: one may go on to look around.
        self.end_shown = self.feed.ended
        if self.where == SUMMARY and not self.end_shown:
            self._switch(TABS[0][0])
        super()._see(run_view)

    # --- play, and stand still ---

    def action_pause(self) -> None:
        """Play, or stand still."""
        playing = self._at is not None or not self.recording.playback.pace.playing
        self._play(playing)
        if self._at is not None:
            self.action_live()
        else:
            # Standing still, other steps are counted.
            self._look_again()

    def _play(self, playing: bool) -> None:
        self.recording.playback.pace.playing = playing
        self._repaint_bar()

    def action_faster(self, way: int) -> None:
        """Play at the next higher speed, or with -1 at the next lower one."""
        pace = self.recording.playback.pace
        if way > 0:
            pace.speed = next((speed for speed in SPEEDS if speed > pace.speed), pace.speed)
        else:
            pace.speed = next((speed for speed in reversed(SPEEDS) if speed < pace.speed), pace.speed)
        self._repaint_bar()

    def action_scrub(self, steps: int) -> None:
        """Go through the steps that are known; this stands still."""
        self._play(False)
        super().action_scrub(steps)

    def action_step(self, way: int) -> None:
        """One step on, or with -1 back; beyond the steps that are known, too."""
        self._play(False)
        shown = self._at
        if shown is None and self.run_view is not None:
            shown = self.run_view.last_step
            if way < 0 and shown is not None and not self.run_view.by_steps:
                # The step under way was shown, or at the end how many there were: the last one is before that.
                shown += 1
        step = max(self.feed.timeline.newest, 0) + 1 if shown is None else shown + way
        if step > self.feed.timeline.newest:
            # Who presses the key again before it has come means the one after.
            self._at = step
            self.run_worker(self._step_on(step), group="seek", exclusive=True)
        elif step < self.feed.oldest:
            moment_ns = self.recording.time_of(step)
            self._go(moment_ns if moment_ns is not None else self.recording.playback.pace.now_ns - 1, step)
        else:
            self._at = step
            self._look_again()

    async def _step_on(self, step: int) -> None:
        if not await self._feed_thread.ask(self.recording.step_on, step):
            playback = self.recording.playback
            at_end = playback.at_end and playback.place == len(playback.reel.spans) - 1
            self.notify(AT_THE_END if at_end else "No step has ended there within a minute.", markup=False)
        # Several may have been told at once.
        self._at = step if self.recording.is_before_newest(step) else None
        await self._look_at()

    # --- go somewhere ---

    def action_jump(self, seconds: int) -> None:
        """So many seconds on, or back."""
        reel, pace = self.recording.playback.reel, self.recording.playback.pace
        self._go(reel.at(reel.passed_ns(pace.now_ns) + seconds * 1_000_000_000))

    def action_alert(self, way: int) -> None:
        """Where the next alert was opened, or with -1 the one before."""
        moment_ns = self.recording.playback.next_alert(way)
        if moment_ns is None:
            self.notify("No alert was opened after this." if way > 0 else "No alert was opened before.", markup=False)
        else:
            self._go(moment_ns)

    def action_edge(self, end: int) -> None:
        """The first moment of the recording at which there is something to see, or its end."""
        reel = self.recording.playback.reel
        self._go(reel.at(reel.total_ns) if end else None)

    def action_seek_part(self, part: int) -> None:
        """The place on the line, in parts of `PARTS`."""
        reel = self.recording.playback.reel
        self._go(reel.at(reel.total_ns * part // PARTS))

    def action_go_to(self) -> None:
        """Ask for a moment."""
        self._goto.open()

    @property
    def _goto(self) -> Field:
        return self._board.query_one("#goto", Field)

    def _moment_typed(self, typed: str) -> None:
        """Go there, or say why not."""
        playback = self.recording.playback
        try:
            moment_ns = playback.moment(typed, local_zone(), playback.pace.now_ns)
        except NoMoment as error:
            self.notify(str(error), severity="error", markup=False)
            return
        self._go(moment_ns)
        self._close_go_to()

    def action_leave(self) -> None:
        """Close the field, or what else is open."""
        if self._goto.is_open:
            self._close_go_to()
        else:
            super().action_leave()

    def _close_go_to(self) -> None:
        field = self._goto
        field.value = ""
        field.close()
        self._settle()

    def _go(self, moment_ns: int | None, step: int | None = None) -> None:
        """Of several moments that are wanted, the last; with a step, where that one had ended. None = the first with
        something to see.
        """
        self._seek_request = subscription = self._seek_request + 1
        # On its way before anything else is done for the key.
        coming = self._feed_thread.begin(self.recording.go, moment_ns, lambda: self._seek_request == subscription, step)
        # What was said of the moment before is not true of this one.
        self.clear_notifications()
        self.run_worker(self._arrive(coming, subscription), group="seek", exclusive=True)

    async def _arrive(self, coming: asyncio.Future[RunView | None], subscription: int) -> None:
        run_view = await coming
        if run_view is not None and subscription == self._seek_request and self._still_there:
            self.run_view, self._at = run_view, run_view.at
            self._repaint_bar()
            self._paint()
