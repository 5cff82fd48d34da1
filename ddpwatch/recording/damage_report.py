"""Damage of a recording: how much could not be read, and the texts that report it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpwatch.core.units import count, percent, plural

if TYPE_CHECKING:
    from ddpwatch.recording.reader import Attempt, Recording


@dataclass(frozen=True)
class Damage:
    """Extent of a recording's damage."""

    parts: int
    missing: int
    """Number of frames missing because of them; 0 = none or unknown."""
    frames: int
    cut: float = 0.0
    alerts: bool = False
    partly: bool = False
    """Whether only a part of the recording was read, and there may be more damage."""


def damage_text(damage: Damage) -> str:
    """The damage as part of a sentence."""
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
    """The damage as a sentence."""
    extent = ", as far as it was read" if damage.partly else ""
    return f"The recording is damaged: {damage_text(damage)}{extent}."


def damage_mark(damage: Damage) -> str:
    """Short mark such as `312+ frames unreadable, maybe alerts`."""
    number, what = (damage.missing, "frame") if damage.missing else (damage.parts, "part")
    lost = f"{count(number)}+ {what}s" if damage.partly else plural(number, what)
    return f"{lost} unreadable, maybe alerts" if damage.alerts else f"{lost} unreadable"


def damage_of(recorded: Recording, attempt: Attempt, *, partly: bool = False) -> Damage | None:
    """Damage found by reading so far; None = none. `partly` = not all of the attempt was read."""
    if not recorded.damaged:
        return None
    missing, frames = recorded.losses(attempt)
    return Damage(recorded.damaged, missing, frames, recorded.cut, recorded.alerts_hurt, partly)
