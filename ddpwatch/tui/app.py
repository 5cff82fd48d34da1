"""The dashboard: takes in what has come, ten times a second, and shows it on one of its screens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual import events
from textual.css.query import NoMatches
from textual.widgets import ContentSwitcher

from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.errors import INTERRUPTED
from ddpwatch.tui import screens
from ddpwatch.tui.commands import commands, copy_alert, export_screen
from ddpwatch.tui.driver import ResilientDriver
from ddpwatch.tui.feed_thread import FeedThread
from ddpwatch.tui.gpu_screen import Devices
from ddpwatch.tui.help_screen import Help
from ddpwatch.tui.keys import BINDINGS, SUMMARY, TABS
from ddpwatch.tui.run_picker import Choice, Lobby
from ddpwatch.tui.table_actions import TableActions
from ddpwatch.tui.themes import DEFAULT, THEMES, VARIABLES
from ddpwatch.tui.widgets import Field, Painted
from ddpwatch.view.alerts.panel import stuck_rank

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from textual.app import ComposeResult, SystemCommand
    from textual.binding import BindingType
    from textual.screen import Screen
    from textual.widget import Widget

    from ddpwatch.tui.feed import Feed
    from ddpwatch.tui.rank_table import RankTable
    from ddpwatch.view.run_view import RunView

TICK_S: Final = 0.1
HURRY_S: Final = 0.02
IDLE_S: Final = 1.0
"""What shows the time is repainted so often when nothing comes."""


class Dashboard(TableActions):
    """One run at a time, from the wait for it to its summary."""

    TITLE = "ddpwatch"
    CSS_PATH = "dashboard.tcss"
    BINDINGS: ClassVar[list[BindingType]] = list(BINDINGS)

    def __init__(self, feed: Feed, *, theme: str = DEFAULT, export_to: Path | None = None) -> None:
        """Show what the feed follows. The feed is closed by whoever made it."""
        # Without colours Textual would turn them into greys, which are colours, too: the terminal's own two are meant.
        super().__init__(driver_class=ResilientDriver, ansi_color=True if os.environ.get("NO_COLOR") else None)
        for known in THEMES:
            self.register_theme(known)
        self.theme = theme
        self.feed = feed
        self._export_to = export_to
        self._at: int | None = None
        self._came_from = TABS[0][0]
        self._table: RankTable | None = None
        """The one that was looked at last."""
        self.end_shown = False
        """Whether the run is over, and its summary can be looked at."""
        self._whole: RunView | None = None
        """The run at its end."""
        self._restarts = 0
        self._idle_due_s = 0.0
        self._feed_thread = FeedThread(feed, self._look, lambda: self._still_there)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Colours of our own, for themes that do not set them."""
        return dict(VARIABLES)

    def compose(self) -> ComposeResult:
        """The lines around, and the screens between them."""
        yield Painted(lambda run_view, columns, _: [screens.header(self, run_view, columns)], id="header")
        yield Painted(lambda _run_view, columns, _: [screens.tabs(self, columns)], id="tabs")
        with ContentSwitcher(id="switch", initial="lobby"):
            yield Lobby(self.feed.opening)
            yield screens.Overview(id="overview")
            yield screens.Ranks(id="ranks")
            yield screens.AllReduce(id="allreduce")
            yield Devices(id="devices")
            yield screens.Alerts(id="alerts")
            yield screens.Logs(id="logs")
            yield screens.RankPage(id="rank")
            with screens.Pane(id=SUMMARY):
                page = Painted(lambda run_view, columns, _: screens.summary(self, run_view, columns), id="summary-page")
                page.can_focus = True
                yield page.add_class("box")
        yield from self.bars()
        yield Painted(lambda run_view, columns, _: [screens.keys(self, run_view, columns)], id="keys")
        asks = "rank, host, state or rule; Enter keeps it, Esc clears it"
        yield Field(self._close_filter, asks=asks, name="filter")

    def bars(self) -> Iterable[Widget]:
        """What stands between the screens and the last line."""
        return ()

    def on_mount(self) -> None:
        """Begin to take in. Whoever ends us from outside finds the terminal as it was."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self._hurry = self.set_interval(HURRY_S, self._hurried)
        self.set_interval(TICK_S, self._feed_thread.tick)

    def on_unmount(self) -> None:
        """The feed goes back to whoever made it."""
        self._feed_thread.close()

    # --- what comes in ---

    async def _hurried(self) -> None:
        """Until the first picture: histories come within moments. For a run to start, one waits longer."""
        if self.run_view is not None:
            self._hurry.pause()
        elif self.feed.follows is not None:
            await self._feed_thread.tick()

    async def on_event(self, event: events.Event) -> None:
        """Keys are remembered, so that what they ask for goes first."""
        if isinstance(event, events.Key) and not event.is_forwarded:
            self._feed_thread.key_pressed()
            self.app_focus = True
            if len(self.screen_stack) == 1:
                await self._press(event)
                return
        await super().on_event(event)

    async def _press(self, event: events.Key) -> None:
        """Do what a key asks for before the next one is looked at. Textual would send it through the widgets first, and
        what follows `/` in one burst would be on its way to the table before there is a field.
        """
        if isinstance(self.focused, Field) and await self.focused.put(event):
            return
        if not await self._check_bindings(event.key, priority=True):
            await self._check_bindings(event.key)

    @property
    def _still_there(self) -> bool:
        """While it is being taken down, some of its widgets are gone already."""
        return self.is_running and not self._exit

    async def _look(self, came: bool) -> None:
        now_s = time.monotonic()
        if not self.feed.ready:
            self._wait(came=came, now_s=now_s)
            return
        if self.feed.restarts != self._restarts:
            self._restarts = self.feed.restarts
            self.end_shown, self._at, self.run_view, self._whole = False, None, None, None
            self.say_restarted()
        if self.feed.ended and not self.end_shown:
            # Its summary is of the whole run, wherever one was looking.
            self._at = None
        not_evaluated = self.run_view is None or not self.run_view.evaluated
        if self._at is not None and not self.feed.ended and not (not_evaluated and self.feed.evaluated):
            return  # it stands still, once it is known what was wrong then
        run_view, at = await self._run_view(anyway=self.run_view is None or self._at is not None)
        if at != self._at or not self._still_there or (run_view is None and now_s < self._idle_due_s):
            return
        self._idle_due_s = now_s + IDLE_S
        self._see(run_view or self.run_view)

    def say_restarted(self) -> None:
        """It is another run from now on."""
        self.notify(
            f"The job has restarted: this is its new run, {sanitize(self.feed.name, NAME_CHARS)}.", markup=False
        )

    def _wait(self, *, came: bool, now_s: float) -> None:
        lobby = self._board.query_one(Lobby)
        if self._board.query_one(ContentSwitcher).current != "lobby":
            self._forget()
            self._switch("lobby")
        if came or now_s >= self._idle_due_s:
            self._idle_due_s = now_s + IDLE_S
            back = self.feed.name if self.feed.choosing else ""
            lobby.show(self.feed.choices, self.feed.trouble, self.feed.opening, back)

    def _forget(self) -> None:
        """The run that was shown is let go of."""
        self.run_view, self._at, self.end_shown, self._whole = None, None, False, None
        if self.where not in dict(TABS):
            self.where = TABS[0][0]
        for name in ("#header", "#tabs", "#keys"):
            self._board.query_one(name, Painted).clear()

    def _see(self, run_view: RunView | None) -> None:
        if run_view is None:
            return
        first, self.run_view = self.run_view is None, run_view
        if self.feed.ended and run_view.at is None:
            self._whole = run_view
        if self._at is not None:
            self._at = run_view.at
        if self.feed.ended and not self.end_shown:
            self.end_shown = True
            self._switch(SUMMARY)
        elif first and self._board.query_one(ContentSwitcher).current in {"lobby", SUMMARY}:
            self._switch(self.where if self.where != SUMMARY else TABS[0][0])
        self._paint()

    async def _run_view(self, *, anyway: bool) -> tuple[RunView | None, int | None]:
        """The run as it is to be drawn, and at which step it was wanted: meanwhile it may be another one."""
        at = self._at
        return await self._feed_thread.ask(self.feed.run_view, at=at, paused=at is not None, anyway=anyway), at

    def _look_again(self) -> None:
        """Work the picture out anew: something else is to be seen in it. Of several that are wanted, the last."""
        if self.feed.ready:
            self.run_worker(self._look_at(), group="look", exclusive=True)

    async def _look_at(self) -> None:
        run_view, at = await self._run_view(anyway=True)
        if run_view is not None and at == self._at and self._still_there:
            if at is not None and run_view.at is not None and run_view.at > at:
                # The history goes on while one stands still, and what was shown may be older than all that is left.
                self.notify("Steps before this one are no longer known.", markup=False)
            self.run_view, self._at = run_view, run_view.at
            self._paint()

    def _paint(self) -> None:
        run_view = self.run_view
        if run_view is None:
            return
        for name in ("#header", "#tabs", "#keys"):
            self._board.query_one(name, Painted).paint(run_view)
        try:
            pane = self._board.query_one(f"#{self.where}", screens.Pane)
        except NoMatches:
            return
        # The summary is of the whole run, whichever step is looked at on the other screens.
        pane.paint(self._whole if self._whole is not None and self.where == SUMMARY else run_view)

    # --- where one is ---

    def _switch(self, name: str) -> None:
        if name != "lobby":
            self._table = next(iter(self.tables()), self._table)
            self.where = name
            for table in self.tables():
                table.take_over(self._table)
        self._board.query_one(ContentSwitcher).current = name
        if self.feed.follows is not None:
            # Ranks time their buckets for whoever asks; nobody else has to pay for it.
            self._feed_thread.tell(self.feed.want_buckets, name == "allreduce")
            looked_at = [self._board.query_one(screens.RankPage).rank] if name == "rank" else []
            self._feed_thread.tell(self.feed.request_stacks, frozenset(looked_at))
        if name == "lobby":
            self._board.query_one(Choice).focus()
            return
        # At once, and not when the layout is done: the tab answers the key, and the rest has its lines ready.
        self._paint()
        # At once, for the next key, and again after the layout, when it is known what is shown.
        self._settle()
        self.call_after_refresh(self._settle)

    def _settle(self) -> None:
        """Give the keys to the right widget, unless a field has been opened meanwhile."""
        if isinstance(self._board.focused, Field) and self._board.focused.is_open:
            return
        chosen = self._board.query_one(f"#{self.where}", screens.Pane).chosen()
        if chosen is not None:
            self._board.set_focus(chosen)

    def action_show(self, name: str) -> None:
        """Go to a screen."""
        if self.run_view is not None and (name != SUMMARY or self.end_shown):
            self._switch(name)

    def action_leave(self) -> None:
        """Close the filter, or leave the choice of runs or a rank's page."""
        field = self._filter
        if self.feed.choosing:
            self._feed_thread.tell(self.feed.stay)
        elif field.is_open or (field.value and self.tables()):
            field.value = ""
            self._close_filter()
        elif self.where == "rank":
            self._switch(self._came_from)

    def on_rank_table_opened(self, event: RankTable.Opened) -> None:
        """Show a rank's own page."""
        self.action_open(event.rank)

    def action_open(self, rank: int) -> None:
        """Show a rank's own page, and ask it what it is doing."""
        self._came_from = self.where if self.where != "rank" else self._came_from
        page = self._board.query_one(screens.RankPage)
        page.rank = rank
        page.query_one(Painted).scroll_home(animate=False, immediate=True)
        self._switch("rank")

    def action_open_stuck(self) -> None:
        """Show the page of the rank that the others wait for."""
        rank = stuck_rank(self.run_view) if self.run_view is not None else None
        if rank is not None:
            self.action_open(rank)

    def action_open_rank(self) -> None:
        """As Enter on the table."""
        for table in self._sorted():
            table.action_open()

    async def action_runs(self) -> None:
        """Ask for another run; the one that is shown goes on until there is one."""
        run = self.feed.run
        if run is None or not self.feed.choosable:
            return
        self._board.query_one(Choice).begin(run.id)
        if not await self._feed_thread.ask(self.feed.choose):
            self.notify("There is no other run now.", markup=False)

    def on_choice_chosen(self, event: Choice.Chosen) -> None:
        """Attach to a run from the list."""
        self._feed_thread.tell(self.feed.pick, event.run)
        self._hurry.resume()

    # --- time ---

    def action_pause(self) -> None:
        """Stand still, or go on."""
        if self._at is not None:
            self.action_live()
        elif self.run_view is not None and self.run_view.last_step is not None and self.where != SUMMARY:
            self._at = self.run_view.last_step
            self._look_again()

    def action_scrub(self, steps: int) -> None:
        """Go through time; this stands still, too."""
        if self.run_view is None or self.run_view.last_step is None or (self._at is None and steps > 0):
            return
        if self.where == SUMMARY:
            return  # it is of all steps
        at = (self._at if self._at is not None else self.run_view.last_step) + steps
        self._at = min(max(at, self.feed.oldest), self.feed.timeline.newest)
        self._look_again()

    def action_live(self) -> None:
        """Back to now."""
        self._at = None
        self._look_again()

    # --- the rest ---

    def action_interrupt(self) -> None:
        """Leave as Ctrl-C ends any other command."""
        self.exit(return_code=INTERRUPTED)

    def action_help(self) -> None:
        """Explain everything."""
        self.push_screen(Help(replayed=self.feed.replayed))

    def action_copy(self) -> None:
        """Copy the selected alert."""
        if self.run_view is not None and self.where == "alerts":
            copy_alert(self, self._board.query_one(screens.AlertList).alert(self.run_view))

    def action_export(self) -> None:
        """Write the screen as a picture."""
        export_screen(self, self._export_to)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """What the command palette offers."""
        return commands(self, super().get_system_commands(screen))
