"""What keys do to the tables of the dashboard: sort, reverse and filter them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from textual import on
from textual.app import App
from textual.widgets import Input

from ddpwatch.tui.gpu_screen import DeviceList
from ddpwatch.tui.keys import TABS
from ddpwatch.tui.rank_table import RankTable
from ddpwatch.tui.widgets import Field
from ddpwatch.view.columns import Ordering
from ddpwatch.view.ranks.columns import SORT_KEYS

if TYPE_CHECKING:
    from collections.abc import Callable

    from textual.screen import Screen

    from ddpwatch.view.run_view import RunView


class TableActions(App[None]):
    """The tables of the current screen, and one filter for all of them."""

    run_view: RunView | None = None
    """What is drawn; None = there is no run yet."""
    where = TABS[0][0]
    """The current screen."""

    @property
    def _board(self) -> Screen[Any]:
        """The dashboard's own screen, also while another one lies over it."""
        return self.screen_stack[0]

    def _paint(self) -> None:
        """Draw the current screen."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Focus the right widget of the current screen."""
        raise NotImplementedError

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
