"""Whom the others wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpwatch.core import rules

if TYPE_CHECKING:
    from ddpwatch.view.picture import Picture


def waited_for(picture: Picture) -> tuple[tuple[int, ...], float | None]:
    """The ranks that the others wait for and what they cost of the job's time; none where none stands out.

    An alert says it best; without one, a rank that costs as much as the rule allows.
    """
    for alert in picture.fresh:
        if alert.finding.rule == rules.STRAGGLER and alert.finding.ranks:
            return alert.finding.ranks, alert.finding.cost
    ranks = picture.figures.ranks.values() if picture.figures else ()
    costs = {rank.rank: rank.imposed_share for rank in ranks if rank.imposed_share is not None}
    worst = max(costs, key=costs.__getitem__, default=None)
    if worst is None or costs[worst] < picture.limits.straggler.share:
        return (), None
    return (worst,), costs[worst]
