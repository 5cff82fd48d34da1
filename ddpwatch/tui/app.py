"""The dashboard: processes what has been received ten times a second, and shows it on one of its screens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from textual import events, on
from textual.app import App
from textual.css.query import NoMatches
from textual.widgets import ContentSwitcher, Input

from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.errors import INTERRUPTED
from ddpwatch.tui import screens
from ddpwatch.tui.commands import commands, copy_alert, export_screen
from ddpwatch.tui.feed_thread import FeedThread
from ddpwatch.tui.gpu_screen import DeviceList, Devices
from ddpwatch.tui.help_screen import Help
from ddpwatch.tui.keys import BINDINGS, SUMMARY, TABS, keys_of
from ddpwatch.tui.rank_table import RankTable
from ddpwatch.tui.run_picker import LOBBY, RunPicker
from ddpwatch.tui.terminal_driver import ResilientDriver
from ddpwatch.tui.themes import DEFAULT, THEMES, VARIABLES
from ddpwatch.tui.widgets import Field, Painted
from ddpwatch.view.alerts.panel import stuck_rank
from ddpwatch.view.cells import Cell, Level, fit
from ddpwatch.view.columns import Ordering
from ddpwatch.view.header import header_line, key_line, recording_mark, tab_line
from ddpwatch.view.logs import log_lines
from ddpwatch.view.ranks.columns import SORT_KEYS
from ddpwatch.view.ranks.detail import rank_page
from ddpwatch.view.summary import summary_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from textual.app import ComposeResult, SystemCommand
    from textual.binding import BindingType
    from textual.screen import Screen
    from textual.widget import Widget

    from ddpwatch.tui.feed import Feed
    from ddpwatch.view.cells import Line
    from ddpwatch.view.run_view import RunView

TICK_S: Final = 0.1
"""Seconds between ticks of the feed thread."""
FAST_TICK_S: Final = 0.02
"""Seconds between ticks until the first run view."""
IDLE_S: Final = 1.0
"""Seconds between repaints while nothing is received: some texts show the time."""


class Dashboard(App[None]):
    """Shows one run at a time, from the wait for it to its summary."""

    TITLE = "ddpwatch"
    CSS_PATH = "dashboard.tcss"
    BINDINGS: ClassVar[list[BindingType]] = list(BINDINGS)

    def __init__(self, feed: Feed, *, theme: str = DEFAULT, export_to: Path | None = None) -> None:
        """Show what the feed follows; the caller closes the feed."""
        # Textual would turn colors into grays; NO_COLOR asks for the terminal's own two.
        super().__init__(driver_class=ResilientDriver, ansi_color=True if os.environ.get("NO_COLOR") else None)
        for known in THEMES:
            self.register_theme(known)
        self.theme = theme
        self.feed = feed
        self.run_view: RunView | None = None
        """What is drawn; None = no run yet."""
        self.where = TABS[0][0]
        """The current screen."""
        self._export_to = export_to
        self._at: int | None = None
        self._came_from = TABS[0][0]
        self._rank = 0
        """The rank of the rank page."""
        self._table: RankTable | None = None
        """The rank table shown last."""
        self.end_shown = False
        """Whether the run has ended, so that there is a summary."""
        self._final: RunView | None = None
        """The run view at the end of the run."""
        self._restarts = 0
        self._idle_due_s = 0.0
        self._feed_thread = FeedThread(feed, self._update, lambda: self._still_there)

    def get_theme_variable_defaults(self) -> dict[str, str]:
        """Colors for themes that do not set ours."""
        return dict(VARIABLES)

    @property
    def _board(self) -> Screen[Any]:
        """The dashboard's own screen, also while another one lies over it."""
        return self.screen_stack[0]

    def compose(self) -> ComposeResult:
        """The screens, and the lines above and below them."""
        yield Painted(self._header, id="header")
        yield Painted(self._tabs, id="tabs")
        with ContentSwitcher(id="switch", initial=LOBBY):
            yield RunPicker(self.feed.opening)
            yield screens.Overview(id="overview")
            yield screens.Ranks(id="ranks")
            yield screens.AllReduce(id="allreduce")
            yield Devices(id="devices")
            yield screens.Alerts(id="alerts")
            with screens.Pane(id="logs"):
                yield Painted(log_lines, title="logs", id="log-lines", classes="box fixed")
            with screens.Pane(id="rank"):
                yield Painted(self._rank_page, id="rank-page", classes="box", focus=True)
            with screens.Pane(id=SUMMARY):
                yield Painted(self._summary, id="summary-page", classes="box", focus=True)
        yield from self.bars()
        yield Painted(self._keys, id="keys")
        placeholder = "rank, host, state or rule; enter applies, esc clears"
        yield Field(self._close_filter, placeholder=placeholder, name="filter")

    def bars(self) -> Iterable[Widget]:
        """Lines between the screens and the last line."""
        return ()

    # --- drawings that depend on the app ---

    def _header(self, run_view: RunView, columns: int, _rows: int) -> list[Line]:
        mark = recording_mark(self.feed.not_recorded) if self.feed.recorder is not None else ()
        return [header_line(run_view, columns, mark)]

    def _tabs(self, _run_view: RunView, columns: int, _rows: int) -> list[Line]:
        shown = [*TABS, *([(SUMMARY, SUMMARY)] if self.end_shown else [])]
        line = tab_line(shown, self.where, columns)
        wanted = self._filter.value if self.tables() else ""
        if wanted:
            line = [*line, Cell(f"  filter: {sanitize(wanted, NAME_CHARS)} · esc clears it", Level.WARN, "leave")]
        return [fit(line, columns)]

    def _keys(self, run_view: RunView, columns: int, _rows: int) -> list[Line]:
        listed = keys_of(
            self.where,
            paused=run_view.paused,
            gpus=run_view.totals.gpus is not None,
            replayed=run_view.replayed,
            ended=self.end_shown,
            runs=self.feed.choosable,
        )
        return [key_line(listed, columns, self.feed.not_recorded)]

    def _rank_page(self, run_view: RunView, columns: int, _rows: int) -> list[Line]:
        return rank_page(run_view, self._rank, columns, screens.WHOLE)

    def _summary(self, run_view: RunView, columns: int, _rows: int) -> list[Line]:
        running_s = run_view.totals.running_s or 0.0
        newer = [run.name or run.id for run in self.feed.newer]
        runs = self.feed.choosable
        return summary_lines(run_view, columns, screens.WHOLE, duration_s=running_s, newer=newer, runs=runs)

    # --- input ---

    def on_mount(self) -> None:
        """Start the ticks, and restore the terminal on a signal."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self._fast_ticks = self.set_interval(FAST_TICK_S, self._tick_fast)
        self.set_interval(TICK_S, self._feed_thread.tick)

    def on_unmount(self) -> None:
        """End the thread of the feed."""
        self._feed_thread.close()

    async def _tick_fast(self) -> None:
        """Tick faster until the first run view, once a run is found: its history arrives within moments."""
        if self.run_view is not None:
            self._fast_ticks.pause()
        elif self.feed.follows is not None:
            await self._feed_thread.tick()

    async def on_event(self, event: events.Event) -> None:
        """Note keys, so that the response to them goes first."""
        if isinstance(event, events.Key) and not event.is_forwarded:
            self._feed_thread.key_pressed()
            self.app_focus = True
            if len(self.screen_stack) == 1:
                await self._press(event)
                return
        await super().on_event(event)

    async def _press(self, event: events.Key) -> None:
        """Act on a key before the next one is read. Textual would pass it through the widgets first, and the keys that
        follow `/` in one burst would be on their way to the table before the field is open.
        """
        if isinstance(self.focused, Field) and await self.focused.put(event):
            return
        if not await self._check_bindings(event.key, priority=True):
            await self._check_bindings(event.key)

    @property
    def _still_there(self) -> bool:
        """Whether all widgets exist, which they do not during shutdown."""
        return self.is_running and not self._exit

    async def _update(self, came: bool) -> None:
        now_s = time.monotonic()
        if not self.feed.ready:
            self._wait(came=came, now_s=now_s)
            return
        if self.feed.restarts != self._restarts:
            self._restarts = self.feed.restarts
            self._reset()
            self.notify_restart()
        if self.feed.ended and not self.end_shown:
            # The summary is of the whole run, whichever step was shown.
            self._at = None
        not_evaluated = self.run_view is None or not self.run_view.evaluated
        if self._at is not None and not self.feed.ended and not (not_evaluated and self.feed.evaluated):
            return  # paused, and the alerts of that step are known
        run_view, at = await self._run_view(force=self.run_view is None or self._at is not None)
        if at != self._at or not self._still_there or (run_view is None and now_s < self._idle_due_s):
            return
        self._idle_due_s = now_s + IDLE_S
        self._show(run_view or self.run_view)

    def notify_restart(self) -> None:
        """Say that this is another run of the job."""
        self.notify(f"The job has restarted; attached to its new run, {self.feed.name}.", markup=False)

    def _wait(self, *, came: bool, now_s: float) -> None:
        if self._board.query_one(ContentSwitcher).current != LOBBY:
            self._reset()
            if self.where not in dict(TABS):
                self.where = TABS[0][0]
            for line in self._lines():
                line.clear()
            self._switch(LOBBY)
        if came or now_s >= self._idle_due_s:
            self._idle_due_s = now_s + IDLE_S
            back = self.feed.name if self.feed.choosing else ""
            self._board.query_one(RunPicker).show(self.feed.choices, self.feed.search_error, self.feed.opening, back)

    def _reset(self) -> None:
        self.run_view, self._at, self.end_shown, self._final = None, None, False, None

    def _show(self, run_view: RunView | None) -> None:
        if run_view is None:
            return
        first, self.run_view = self.run_view is None, run_view
        if self.feed.ended and run_view.at is None:
            self._final = run_view
        if self._at is not None:
            self._at = run_view.at
        if self.feed.ended and not self.end_shown:
            self.end_shown = True
            self._switch(SUMMARY)
        elif first and self._board.query_one(ContentSwitcher).current in {LOBBY, SUMMARY}:
            self._switch(self.where if self.where != SUMMARY else TABS[0][0])
        self._paint()

    async def _run_view(self, *, force: bool) -> tuple[RunView | None, int | None]:
        """The run view, and the step it was requested for, which may have changed meanwhile."""
        at = self._at
        return await self._feed_thread.ask(self.feed.run_view, at=at, paused=at is not None, force=force), at

    def _reload(self) -> None:
        """Compute the run view again. Of several requests only the last one counts."""
        if self.feed.ready:
            self.run_worker(self._load(), group="look", exclusive=True)

    async def _load(self) -> None:
        run_view, at = await self._run_view(force=True)
        if run_view is not None and at == self._at and self._still_there:
            if at is not None and run_view.at is not None and run_view.at > at:
                # The history is bounded: a paused step may be older than all that is left.
                self.notify("Earlier steps are not in memory.", markup=False)
            self.run_view, self._at = run_view, run_view.at
            self._paint()

    def _paint(self) -> None:
        run_view = self.run_view
        if run_view is None:
            return
        for line in self._lines():
            line.paint(run_view)
        try:
            pane = self._board.query_one(f"#{self.where}", screens.Pane)
        except NoMatches:
            return
        # The summary is of the whole run, whichever step the other screens show.
        pane.paint(self._final if self._final is not None and self.where == SUMMARY else run_view)

    def _lines(self) -> list[Painted]:
        """The lines above and below the screens."""
        return [self._board.query_one(name, Painted) for name in ("#header", "#tabs", "#keys")]

    # --- screens ---

    def _switch(self, name: str) -> None:
        if name != LOBBY:
            self._table = next(iter(self.tables()), self._table)
            self.where = name
            for table in self.tables():
                table.take_over(self._table)
        self._board.query_one(ContentSwitcher).current = name
        if self.feed.follows is not None:
            # Ranks time their buckets only while somebody subscribes, because it costs them time.
            self._feed_thread.submit(self.feed.want_buckets, name == "allreduce")
            ranks = frozenset({self._rank} if name == "rank" else ())
            self._feed_thread.submit(self.feed.request_stacks, ranks)
        if name == LOBBY:
            self._board.query_one(RunPicker).focus()
            return
        # Before the layout is done: the tab responds to the key, and the rest has its lines ready.
        self._paint()
        # For the next key, and again after the layout, when it is known which widgets are shown.
        self._settle()
        self.call_after_refresh(self._settle)

    def _settle(self) -> None:
        """Focus the right widget, unless a field has been opened meanwhile."""
        if isinstance(self._board.focused, Field) and self._board.focused.is_open:
            return
        chosen = self._board.query_one(f"#{self.where}", screens.Pane).focus_target()
        if chosen is not None:
            self._board.set_focus(chosen)

    def action_show(self, name: str) -> None:
        """Go to a screen."""
        if self.run_view is not None and (name != SUMMARY or self.end_shown):
            self._switch(name)

    def action_leave(self) -> None:
        """Close the filter, the choice of runs or a rank's page."""
        field = self._filter
        if self.feed.choosing:
            self._feed_thread.submit(self.feed.stay)
        elif field.is_open or (field.value and self.tables()):
            field.value = ""
            self._close_filter()
        elif self.where == "rank":
            self._switch(self._came_from)

    def on_rank_table_opened(self, event: RankTable.Opened) -> None:
        """Show a rank's own page."""
        self.action_open(event.rank)

    def action_open(self, rank: int) -> None:
        """Show a rank's own page, and ask the rank for its stack."""
        self._came_from = self.where if self.where != "rank" else self._came_from
        self._rank = rank
        self._board.query_one("#rank-page").scroll_home(animate=False, immediate=True)
        self._switch("rank")

    def action_open_stuck(self) -> None:
        """Show the page of the rank that the others wait for."""
        rank = stuck_rank(self.run_view) if self.run_view is not None else None
        if rank is not None:
            self.action_open(rank)

    def action_open_rank(self) -> None:
        """Do the same as Enter on the table."""
        for table in self._sorted():
            table.action_open()

    async def action_runs(self) -> None:
        """Choose another run; the current one is followed until then."""
        run = self.feed.run
        if run is None or not self.feed.choosable:
            return
        self._board.query_one(RunPicker).begin(run.id)
        if not await self._feed_thread.ask(self.feed.choose):
            self.notify("No other run was found.", markup=False)

    def on_run_picker_chosen(self, event: RunPicker.Chosen) -> None:
        """Attach to a run from the list."""
        self._feed_thread.submit(self.feed.pick, event.run)
        self._fast_ticks.resume()

    # --- tables ---

    def tables(self) -> list[RankTable]:
        """The rank tables of the current screen."""
        return list(self._board.query(f"#{self.where} RankTable").results(RankTable))

    def _sorted(self) -> list[RankTable | DeviceList]:
        return [*self.tables(), *self._board.query(f"#{self.where} DeviceList").results(DeviceList)]

    def _reorder(self, change: Callable[[Ordering], Ordering]) -> None:
        """Change the order of all rank tables alike, or of the list of GPUs."""
        for table in self._sorted() if self.where == "devices" else self._board.query(RankTable):
            table.ordering = change(table.ordering)
        self._paint()

    def action_sort(self, column: str) -> None:
        """Sort by a column; a second time reverses it."""
        self._reorder(lambda ordering: ordering.by(column))

    def action_sort_next(self) -> None:
        """Sort by the next column."""
        # A table that was not drawn yet has no columns.
        titles = next((table.titles for table in self._sorted() if table.titles), tuple(SORT_KEYS))
        self._reorder(lambda ordering: ordering.by_next(titles))

    def action_sort_turn(self) -> None:
        """Reverse the order."""
        self._reorder(Ordering.turned)

    def action_follow_worst(self) -> None:
        """Keep the worst rank on top, or stop that."""
        self._reorder(Ordering.following)

    @property
    def _filter(self) -> Field:
        return self._board.query_one("#filter", Field)

    def action_filter(self) -> None:
        """Open the filter."""
        if self.run_view is not None and self.tables():
            self._filter.open()

    @on(Input.Changed, "#filter")
    def filter_changed(self, event: Input.Changed) -> None:
        """Filter while the user types."""
        self._reorder(lambda ordering: replace(ordering, wanted=event.value))

    def _close_filter(self, _kept: str = "") -> None:
        self._filter.close()
        self._paint()
        self._settle()

    # --- time ---

    def action_pause(self) -> None:
        """Pause, or resume."""
        if self._at is not None:
            self.action_live()
        elif self.run_view is not None and self.run_view.last_step is not None and self.where != SUMMARY:
            self._at = self.run_view.last_step
            self._reload()

    def action_scrub(self, steps: int) -> None:
        """Go through time, which pauses."""
        if self.run_view is None or self.run_view.last_step is None or self.where == SUMMARY:
            return
        if self._at is None and steps > 0:
            return
        at = (self._at if self._at is not None else self.run_view.last_step) + steps
        self._at = min(max(at, self.feed.oldest), self.feed.timeline.newest)
        self._reload()

    def action_live(self) -> None:
        """Show the latest step again."""
        self._at = None
        self._reload()

    # --- the rest ---

    def action_interrupt(self) -> None:
        """Exit like any other command on Ctrl-C."""
        self.exit(return_code=INTERRUPTED)

    def action_help(self) -> None:
        """Show the help."""
        self.push_screen(Help(replayed=self.feed.replayed))

    def action_copy(self) -> None:
        """Copy the selected alert."""
        if self.run_view is not None and self.where == "alerts":
            copy_alert(self, self._board.query_one(screens.AlertList).alert(self.run_view))

    def action_export(self) -> None:
        """Write the screen as an SVG file."""
        export_screen(self, self._export_to)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """The commands of the command palette."""
        return commands(self, super().get_system_commands(screen))
