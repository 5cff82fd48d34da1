"""How fast a GPU is clocked, against what it could do and against the others; worded once for all who tell of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.gpu import HOLDING, NOT_TOLD

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpwatch.core.rank import RankState
    from ddpwatch.wire import Gpu

WORDS: Final = {
    "hw_thermal_slowdown": "hardware thermal slowdown",
    "sw_thermal_slowdown": "thermal slowdown",
    "hw_power_brake_slowdown": "power brake",
    "hw_slowdown": "hardware slowdown",
    "sw_power_cap": "power cap",
}
POWER_CAP: Final = "sw_power_cap"
"""Normal at full load: it is no trouble as long as the clocks are about those of the others."""
THERMAL: Final = frozenset({"hw_thermal_slowdown", "sw_thermal_slowdown"})
LEAST_PART: Final = 0.5
"""A reason that held the clocks in no more than this part of the readings is not named."""
LEAST_TOLD: Final = 5
"""Readings that must have told their reasons: a snapshot brings none."""
NEAR_NS: Final = 5_000_000_000
"""Where no reading falls into a span of time, one so close to it stands for it."""
MOST_PEERS: Final = 64
"""So many others are compared with, evenly spread; of thousands all would take too long."""


@dataclass(frozen=True)
class Clock:
    """One GPU over some of its readings."""

    rank: int
    device: str
    name: str
    mhz: float
    """The median; 0 = not known."""
    max_mhz: int
    """0 = not known."""
    reasons: tuple[str, ...]
    """What held the clocks down in most of the readings, the worst first."""
    temperature_c: int | None
    readings: int

    @property
    def harsh(self) -> bool:
        """Whether heat or the hardware holds the clocks down, and not the power limit alone."""
        return any(reason != POWER_CAP for reason in self.reasons)


def latest_clock(rank: RankState, gpu: Gpu, readings: int) -> Clock | None:
    """Over the last readings; None before there are as many."""
    history = rank.gpus.histories.get(gpu.device)
    if history is None or history.count < readings:
        return None
    return _clock(rank, gpu, slice(-readings, None))


def clocks_between(rank: RankState, first_ns: int, last_ns: int) -> list[Clock]:
    """Of all its GPUs in a span of time by its own clock; none of those that were not read then."""
    found = []
    for gpu in rank.gpus.latest.gpus if rank.gpus.latest else ():
        history = rank.gpus.histories.get(gpu.device)
        times_ns = history.times_ns() if history is not None else np.zeros(0, np.int64)
        begin, end = np.searchsorted(times_ns, [first_ns, last_ns + 1]).tolist()
        if begin == end:
            begin, end = np.searchsorted(times_ns, [first_ns - NEAR_NS, last_ns + NEAR_NS]).tolist()
        if begin < end:
            found.append(_clock(rank, gpu, slice(begin, end)))
    return found


def slowed(clocks: Iterable[Clock], others: Sequence[Clock], part: float) -> tuple[Clock, float] | None:
    """Of a rank's GPUs the one whose clocks are held down most, and the usual clock of the others like it; None = none
    is held down by heat or hardware, and none is below `part` of the others.
    """
    worst: tuple[Clock, float] | None = None
    for clock in clocks:
        usual = usual_mhz(clock, others)
        below = bool(clock.mhz) and clock.mhz < part * usual
        if (clock.harsh or below) and (worst is None or clock.mhz < worst[0].mhz):
            worst = clock, usual
    return worst


def usual_mhz(clock: Clock, others: Sequence[Clock]) -> float:
    """The median clock of the other GPUs of its kind; 0 = there are none."""
    known = [
        other.mhz
        for other in others
        if other.mhz and other.name == clock.name and (other.rank, other.device) != (clock.rank, clock.device)
    ]
    return median(known) if known else 0.0


def evenly(ranks: Sequence[RankState]) -> Sequence[RankState]:
    """Some of many ranks."""
    return ranks[:: -(-len(ranks) // MOST_PEERS)] if ranks else ranks


def clock_text(clock: Clock, usual: float = 0.0) -> str:
    """As in `clocks 1110 of 1980 MHz, thermal slowdown at 89 °C`. Without a reason it says what the others have."""
    text = f"clocks {clock.mhz:.0f}{f' of {clock.max_mhz}' if clock.max_mhz else ''} MHz" if clock.mhz else ""
    if clock.reasons:
        reasons = reasons_text(clock.reasons, clock.temperature_c)
        return f"{text}, {reasons}" if text else reasons
    return f"{text}, others {usual:.0f}" if usual else text


def reasons_text(reasons: Iterable[str], temperature_c: int | None = None) -> str:
    """What holds the clocks down, in plain words, with the heat if it is that. The general word is left out where a
    closer one is told.
    """
    told = set(reasons)
    known = [reason for reason in HOLDING if reason in told]
    if known and known[0] != "hw_slowdown":
        known = [reason for reason in known if reason != "hw_slowdown"]
    if "hw_thermal_slowdown" in told:
        known = [reason for reason in known if reason != "sw_thermal_slowdown"]
    heat = f" at {temperature_c} °C" if temperature_c is not None else ""
    return ", ".join(f"{WORDS[reason]}{heat if reason in THERMAL else ''}" for reason in known)


def _clock(rank: RankState, gpu: Gpu, part: slice) -> Clock:
    # As lists: of some dozens of readings that is much faster than with arrays, and all GPUs of a job may be asked for.
    history = rank.gpus.histories[gpu.device]
    mhz = [value for value in history.curve("sm_mhz")[part].tolist() if not isnan(value)]
    heat = [value for value in history.curve("temperature_c")[part].tolist() if not isnan(value)]
    held = history.held()[part].tolist()
    told = [bits for bits in held if bits != NOT_TOLD]
    # Of nearly all nothing holds the clocks down.
    enough = len(told) >= min(LEAST_TOLD, len(held)) and any(told)
    reasons = tuple(
        reason
        for place, reason in enumerate(HOLDING if enough else ())
        if sum((bits >> place) & 1 for bits in told) > LEAST_PART * len(told)
    )
    return Clock(
        rank=rank.rank,
        device=gpu.device,
        name=gpu.name,
        mhz=median(mhz) if mhz else 0.0,
        max_mhz=gpu.sm_max_mhz or 0,
        reasons=reasons,
        temperature_c=int(max(heat)) if heat else None,
        readings=len(held),
    )
