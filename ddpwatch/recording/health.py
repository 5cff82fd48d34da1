"""What could not be read of a recording, for whoever tells of it.

What is wrong with a recording, in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpwatch.core.alerts.recorded import read_event
from ddpwatch.core.units import count, percent, plural

if TYPE_CHECKING:
    from ddpwatch.core.alerts.model import AlertEvent
    from ddpwatch.recording.reader import AlertRow, Attempt, Recorded


@dataclass(frozen=True)
class Damage:
    """How much of a recording could not be read."""

    parts: int
    missing: int
    """Frames that are missing because of that; 0 = none, or it cannot be told."""
    frames: int
    """Frames that are there."""
    cut: float = 0.0
    """Part of the file that is cut off."""
    alerts: bool = False
    """Whether alerts may be missing, too."""
    partly: bool = False
    """Whether not all of the recording was tried, and there may be more."""


def damage_text(damage: Damage) -> str:
    """As part of a sentence."""
    words = [f"{plural(damage.parts, 'part')} could not be read"]
    if missing := damage.missing:
        words.append(
            f"{count(missing)} of {plural(missing + damage.frames, 'frame')} {'is' if missing == 1 else 'are'} missing"
        )
    if damage.cut:
        words.append(f"the last {percent(damage.cut) if damage.cut >= 0.01 else 'bit'} of the file is cut off")
    if damage.alerts:
        words.append("alerts may be missing")
    return ", ".join(words)


def damage_sentence(damage: Damage) -> str:
    """The same as a whole one."""
    extent = ", as far as it was read" if damage.partly else ""
    return f"The recording is damaged: {damage_text(damage)}{extent}."


def damage_mark(damage: Damage) -> str:
    """In a few words: `312+ frames unreadable, maybe alerts`."""
    number, what = (damage.missing, "frame") if damage.missing else (damage.parts, "part")
    lost = f"{count(number)}+ {what}s" if damage.partly else plural(number, what)
    return f"{lost} unreadable, maybe alerts" if damage.alerts else f"{lost} unreadable"


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
