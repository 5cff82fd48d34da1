"""Which ranks the table shows, and in which order."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ddpwatch.view.columns import LEFT, RIGHT, badge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.view.columns import Row

BY_RANK_UP_TO: Final = 16
"""So many ranks keep their places; of more, those that need a look come first."""
_RANK: Final = re.compile(r"r?\d+")
"""A word that means one rank, and not every rank or host that has the digit in it."""
_BY_TITLE: Final = {column.title: column for column in (*LEFT, *RIGHT)}
SORTABLE: Final = tuple(_BY_TITLE)


@dataclass(frozen=True)
class Ordering:
    """How the person wants to see the ranks."""

    column: str = ""
    """Title of the column that is sorted by; empty = by rank, or what needs a look first where there are many."""
    backwards: bool = False
    wanted: str = ""
    """Only ranks whose number, host, state or finding holds all these words."""
    follow_worst: bool = False
    """The rank that needs a look most is at the top, with the cursor on it."""

    def by(self, column: str) -> Ordering:
        """Sorted by a column; once more by the same one turns it round."""
        return replace(self, column=column, backwards=column == self.column and not self.backwards, follow_worst=False)

    def by_next(self, titles: Sequence[str]) -> Ordering:
        """Sorted by the column after this one among `titles`; after the last, by none."""
        order = ["", *titles]
        place = order.index(self.column) if self.column in order else 0
        return replace(self, column=order[(place + 1) % len(order)], backwards=False, follow_worst=False)

    def turned(self) -> Ordering:
        """The other way round."""
        return replace(self, backwards=not self.backwards, follow_worst=False)

    def following(self) -> Ordering:
        """The worst on top, or as it was before that."""
        return replace(self, follow_worst=not self.follow_worst)

    @property
    def marked(self) -> str:
        """The column that the heading marks; empty = none is sorted by."""
        return "" if self.follow_worst else self.column

    def unfollowed(self) -> Ordering:
        """With a cursor that stays where it is put."""
        return replace(self, follow_worst=False) if self.follow_worst else self


def arrange(rows: Sequence[Row], urgent: Sequence[Row], ordering: Ordering) -> Sequence[Row]:
    """The rows that are wanted, in their order. `urgent` are the same, those that need a look first."""
    worst_first = ordering.follow_worst or (not ordering.column and len(rows) > BY_RANK_UP_TO)
    shown: Sequence[Row] = urgent if worst_first else rows
    if words := ordering.wanted.casefold().split():
        shown = [row for row in shown if _has(row, words)]
    if ordering.column and not ordering.follow_worst:
        return sorted(shown, key=_BY_TITLE[ordering.column].order, reverse=ordering.backwards)
    if ordering.backwards and not ordering.follow_worst:
        return shown[::-1]
    # Those that the others wait for in a hang come first, in sight of whoever opens a small window.
    return shown if worst_first else sorted(shown, key=lambda row: not row.waited_for)


def _has(row: Row, words: Sequence[str]) -> bool:
    number = str(row.state.rank)
    text = f"{row.state.host} {row.condition} {badge(row).text} {row.finding.rule if row.finding else ''}".casefold()
    return all(word.removeprefix("r") == number if _RANK.fullmatch(word) else word in text for word in words)
