"""Whether a run that was recorded came to a bad end, in the words of its verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpwatch.core.numbers import ranks_text
from ddpwatch.core.text import tame
from ddpwatch.view.ending import how_told
from ddpwatch.view.verdict import WHY_CHARS, how_badly

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.alerts import Alert
    from ddpwatch.core.state import RunState


def bad_end(state: RunState, alerts: Sequence[Alert]) -> str:
    """How the run ended, as part of a sentence, if that was badly, or in a hang that it was not seen to come out of;
    else nothing. `alerts` are all of it, open and closed.
    """
    by_condition: dict[str, list[int]] = {}
    for rank in state.ranks.values():
        by_condition.setdefault(state.condition(rank), []).append(rank.rank)
    how = how_badly(state, alerts)
    # A wait that was told last is no hang once all ranks have said goodbye.
    if not how and by_condition.keys() != {"ended"}:
        how = tame(how_told(alerts), WHY_CHARS)
    if not how:
        # The recording may end before it is known who was first.
        found = ((word, by_condition[word]) for word in ("failed", "lost") if word in by_condition)
        how = ", ".join(f"{ranks_text(ranks)} {word}" for word, ranks in found)
    return how.removesuffix(".")
