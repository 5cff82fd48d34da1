"""What could not be read of a recording, for whoever tells of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpwatch.core.recalled import read_event
from ddpwatch.view.damage import Damage

if TYPE_CHECKING:
    from ddpwatch.core.alerts import AlertEvent
    from ddpwatch.sources.recorded import AlertRow, Attempt, Recorded


def event_of(recorded: Recorded, row: AlertRow) -> AlertEvent | None:
    """A change of an alert as it was told; None = it cannot be read, which counts as damage."""
    event = read_event(row.event)
    if event is None:
        recorded.give_up(row)
    return event


def damage_of(recorded: Recorded, attempt: Attempt, *, partly: bool = False) -> Damage | None:
    """To be asked after reading, which finds it; `partly` = not all of the attempt was read. None = none was found."""
    if not recorded.damaged:
        return None
    missing, frames = recorded.losses(attempt)
    return Damage(recorded.damaged, missing, frames, recorded.cut, recorded.alerts_hurt, partly)


def look_at_alerts(recorded: Recorded) -> None:
    """Find out what is wrong with them, for who has no other use for them."""
    for row in recorded.alerts():
        event_of(recorded, row)
