"""The dashboard on a recording: the same screens, with a line that shows the position, and keys to seek."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from ddpwatch.recording.time_parser import EXAMPLES, NoMoment
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

NOTICE_S: Final = 2.5
"""Seconds for which a notice is shown."""
AT_THE_END: Final = "This is the end of the recording."
_TIME_KEYS: Final = frozenset({"go_to", "edge"})
"""Actions whose keys a field to type in, or a page over the screen, uses itself."""


class ReplayDashboard(Dashboard):
    """Shows a recording at any moment."""

    BINDINGS: ClassVar[list[BindingType]] = list(REPLAY_BINDINGS)
    # Notifications must not hide the position. The field lies over the last line: if it took a line from the screens,
    # they would need a new layout while the user waits.
    CSS = "ToastRack { margin-bottom: 2; } Screen { layers: default over; } #goto { layer: over; }"

    def __init__(self, feed: ReplayFeed, *, theme: str = DEFAULT, export_to: Path | None = None) -> None:
        """Show the recording; the caller closes the feed."""
        super().__init__(feed, theme=theme, export_to=export_to)
        self.recording = feed
        self._seek_request = 0
        """Number of the last request to seek."""

    def bars(self) -> Iterable[Widget]:
        """The position, and a field to seek to another one."""
        yield Plain(self._bar, id="replay")
        yield Field(self._moment_typed, placeholder=f"go to {EXAMPLES}", name="goto")

    def on_mount(self) -> None:
        """Start the clock of the position."""
        self.set_interval(TICK_S, self._repaint_bar)
        if self.recording.notice:
            self.notify(self.recording.notice, severity="warning", markup=False)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether an action is available."""
        if action in _TIME_KEYS and (len(self.screen_stack) > 1 or isinstance(self.focused, Field)):
            return False
        return super().check_action(action, parameters)

    def notify_restart(self) -> None:
        """Say which attempt of the job this is."""
        position = self.recording.position
        text = f"This is attempt {position.attempt} of {position.attempts}."
        self.notify(text, timeout=NOTICE_S, markup=False)

    def _bar(self, columns: int, _rows: int) -> list[Line]:
        return [replay_line(self.recording.position, columns, local_zone())]

    def _repaint_bar(self) -> None:
        if self._still_there:
            self._board.query_one("#replay", Plain).repaint()

    def _show(self, run_view: RunView | None) -> None:
        # At the end there is a summary, but it does not take over the screen, as it does live.
        self.end_shown = self.feed.ended
        if self.where == SUMMARY and not self.end_shown:
            self._switch(TABS[0][0])
        super()._show(run_view)

    # --- play and pause ---

    def action_pause(self) -> None:
        """Play or pause."""
        playing = self._at is not None or not self.recording.playback.pace.playing
        self._play(playing)
        if self._at is not None:
            self.action_live()
        else:
            # A paused run view counts other steps.
            self._reload()

    def _play(self, playing: bool) -> None:
        self.recording.playback.pace.playing = playing
        self._repaint_bar()

    def action_faster(self, way: int) -> None:
        """Play at the next higher speed, or with -1 at the next lower one."""
        self.recording.playback.change_speed(way)
        self._repaint_bar()

    def action_scrub(self, steps: int) -> None:
        """Go through the known steps, which pauses."""
        self._play(False)
        super().action_scrub(steps)

    def action_step(self, way: int) -> None:
        """Go one step on, or with -1 back, also beyond the known steps."""
        self._play(False)
        shown = self._at
        if shown is None and self.run_view is not None:
            shown = self.run_view.last_step
            if way < 0 and shown is not None and not self.run_view.by_steps:
                # What is shown is the step under way, or at the end the number of steps: one more than the last step.
                shown += 1
        step = max(self.feed.timeline.newest, 0) + 1 if shown is None else shown + way
        if step > self.feed.timeline.newest:
            # Pressed again before the step has come, the key means the step after.
            self._at = step
            self.run_worker(self._play_to_step(step), group="seek", exclusive=True)
        elif step < self.feed.oldest:
            moment_ns = self.recording.time_of(step)
            self._go(moment_ns if moment_ns is not None else self.recording.playback.pace.now_ns - 1, step)
        else:
            self._at = step
            self._reload()

    async def _play_to_step(self, step: int) -> None:
        if not await self._feed_thread.ask(self.recording.play_to_step, step):
            playback = self.recording.playback
            at_end = playback.at_end and playback.place == len(playback.reel.spans) - 1
            self.notify(AT_THE_END if at_end else "No step ends within a minute of this time.", markup=False)
        # Several steps may have come at once.
        self._at = step if self.recording.has_later_steps(step) else None
        await self._load()

    # --- seek ---

    def action_jump(self, seconds: int) -> None:
        """Go forward or back by seconds."""
        reel, pace = self.recording.playback.reel, self.recording.playback.pace
        self._go(reel.at(reel.passed_ns(pace.now_ns) + seconds * 1_000_000_000))

    def action_alert(self, way: int) -> None:
        """Go to where the next alert was opened, or with -1 the one before."""
        moment_ns = self.recording.playback.next_alert(way)
        if moment_ns is None:
            self.notify("No later alert." if way > 0 else "No earlier alert.", markup=False)
        else:
            self._go(moment_ns)

    def action_edge(self, end: int) -> None:
        """Go to the first moment with something to show, or to the end."""
        reel = self.recording.playback.reel
        self._go(reel.at(reel.total_ns) if end else None)

    def action_seek_part(self, part: int) -> None:
        """Go to a place on the line, in units of 1/`PARTS`."""
        reel = self.recording.playback.reel
        self._go(reel.at(reel.total_ns * part // PARTS))

    def action_go_to(self) -> None:
        """Open the field for a moment."""
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
        """Close the field, or whatever else is open."""
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
        """Seek to a moment, None = the first with something to show; with a step, to the end of that step. Of several
        requests only the last one counts.
        """
        self._seek_request = request = self._seek_request + 1
        # Submitted before anything else is done for the key.
        coming = self._feed_thread.begin(
            self.recording.seek_view, moment_ns, lambda: self._seek_request == request, step
        )
        # Notifications belong to the moment before.
        self.clear_notifications()
        self.run_worker(self._arrive(coming, request), group="seek", exclusive=True)

    async def _arrive(self, coming: asyncio.Future[RunView | None], request: int) -> None:
        run_view = await coming
        if run_view is not None and request == self._seek_request and self._still_there:
            self.run_view, self._at = run_view, run_view.at
            self._repaint_bar()
            self._paint()
