"""The rows of the rank table: each rank with its figures, and the worst that is said of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpwatch.core import rules
from ddpwatch.core.still import still
from ddpwatch.view.columns import Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ddpwatch.core.alerts import Alert, Finding
    from ddpwatch.core.figures import Figures
    from ddpwatch.core.state import RunState


def worst_of(alerts: Iterable[Alert]) -> dict[int, Finding]:
    """By rank, the first finding that names it; the alerts are sorted, the most urgent first."""
    worst: dict[int, Finding] = {}
    for alert in alerts:
        for rank in alert.finding.ranks:
            worst.setdefault(rank, alert.finding)
    return worst


def rows_of(
    state: RunState,
    figures: Figures | None,
    worst: Mapping[int, Finding],
    *,
    then: bool = False,
    stands_still: bool = False,
) -> tuple[Row, ...]:
    """One a rank, in their order. `then` = the figures are of a step long past; `stands_still` = what the ranks say of
    themselves stays as it is now.
    """
    measured = figures.ranks if figures else {}
    rows: list[Row] = []
    for number, heard in state.ranks.items():
        rank = still(heard) if stands_still else heard
        finding = worst.get(number)
        stands_out = finding is not None and finding.rule == rules.STRAGGLER
        # By position, in the order of the fields: there may be thousands.
        rows.append(Row(rank, state.condition(rank), measured.get(number), stands_out, finding, then))
    return tuple(rows)
