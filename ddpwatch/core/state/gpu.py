"""The GPUs of one rank: what was read last, and some minutes of the figures that make a curve.

How fast a GPU is clocked, against what it could do and against the others; worded once for all who tell of it.

What the error numbers of the NVIDIA driver mean, as far as somebody who trains has to know.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from math import isnan
from operator import attrgetter, itemgetter
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.limits import GpuThrottleLimits, LivenessLimits
from ddpwatch.core.state.sanitize import NAME_CHARS, are_sanitized, sanitize, sanitized
from ddpwatch.wire import MAX_GPUS, MAX_THROTTLE, Count, Figure, GpuMoment, Name, Percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.wire import Gpu, Gpus

CURVES: Final = ("util_percent", "memory_util_percent", "used_bytes", "temperature_c", "power_mw", "sm_mhz")
"""The figures that are remembered."""
_figures: Final = attrgetter(*CURVES)
_RECORD: Final = struct.Struct(f"@q{len(CURVES)}fb7x")
"""One moment in memory: when it was, the figures, and what held the clocks down."""
_MOMENT: Final = np.dtype([("mono_ns", "i8"), *((name, "f4") for name in CURVES), ("held", "i1")], align=True)
assert _MOMENT.itemsize == _RECORD.size
THROTTLE_REASONS: Final = (
    "hw_thermal_slowdown",
    "sw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "hw_slowdown",
    "sw_power_cap",
)
"""Reasons of which it is remembered when they held the clocks down, the worst first; the others are no trouble."""
NOT_REPORTED: Final = -1
"""In place of the reasons of a moment that a snapshot brought."""
KEPT_MOMENTS: Final = 600
CROWDED_MOMENTS: Final = 120
"""Kept of each GPU where there are very many ranks."""
MAX_KNOWN: Final = 16
"""GPUs of one rank; a rank that claims more of them, one after the other, is not believed."""


class GpuReading(Struct, frozen=True, gc=False):
    """Of a GPU at one moment, no more than is remembered: a `Gpu` that is read for its curves alone."""

    device: Name
    util_percent: Percent | None = None
    memory_util_percent: Percent | None = None
    used_bytes: Figure = None
    temperature_c: Figure = None
    power_mw: Figure = None
    sm_mhz: Figure = None
    throttle: Annotated[list[Name], Meta(max_length=MAX_THROTTLE)] = []


class GpuReadings(Struct, frozen=True, gc=False):
    """The GPUs of one rank at one moment: a `Gpus` that is read like that."""

    mono_ns: Count
    gpus: Annotated[list[GpuReading], Meta(max_length=MAX_GPUS)] = []


class GpuHistory:
    """The last moments of one GPU, in order of the rank's own clock. A figure that was not read is NaN."""

    __slots__ = ("_kept", "_newest_ns", "_records", "count")

    def __init__(self, kept: int = KEPT_MOMENTS) -> None:
        self._kept = kept
        # A little longer than it must be: shifted only when it is full.
        self._records = bytearray((kept + max(kept // 8, 1)) * _RECORD.size)
        self._newest_ns = -1
        self.count = 0

    def put(self, mono_ns: int, figures: tuple[float | None, ...], held: int = NOT_REPORTED) -> None:
        """Remember a moment, and as bits which of `THROTTLE_REASONS` held the clocks down.

        One that is not later than the last is known already, or came too late.
        """
        if mono_ns <= self._newest_ns:
            return
        self._newest_ns = mono_ns
        place = self.count * _RECORD.size
        if place == len(self._records):
            # Into other memory: whoever draws the old one goes on seeing what it held.
            last = self._records[place - (self._kept - 1) * _RECORD.size :]
            self._records = last + bytearray(place - len(last))
            self.count, place = self._kept - 1, len(last)
        try:
            _RECORD.pack_into(self._records, place, mono_ns, *figures, held)
        except struct.error:
            known = (math.nan if figure is None else figure for figure in figures)
            _RECORD.pack_into(self._records, place, mono_ns, *known, held)
        self.count += 1

    def fill(self, times_ns: list[int], figures: list[tuple[float | None, ...]]) -> None:
        """Remember the latest of these moments, in order; nothing is known yet."""
        rising = all(earlier < later for earlier, later in pairwise(times_ns))
        # Of those before that nothing would be left.
        first = max(len(times_ns) - self._kept, 0) if rising else 0
        for time_ns, values in zip(times_ns[first:], figures[first:], strict=True):
            self.put(time_ns, values)

    def put_before(self, earlier: list[tuple[int, tuple[float | None, ...], int]]) -> bool:
        """Remember moments from before all that is known, in their order, as `put` does; whether there were any."""
        first_ns = self.times_ns()[0] if self.count else np.iinfo(np.int64).max
        rising = [late for early, late in pairwise([(-1, (), 0), *earlier]) if early[0] < late[0] < first_ns]
        fitting = rising[max(len(rising) - self.room, 0) :]
        if not fitting:
            return False
        longer = GpuHistory(self._kept)
        for mono_ns, figures, held in fitting:
            longer.put(mono_ns, figures, held)
        begin, end = longer.count * _RECORD.size, (longer.count + self.count) * _RECORD.size
        longer._records[begin:end] = self._records[: end - begin]
        self._records, self.count = longer._records, longer.count + self.count
        self._newest_ns = max(self._newest_ns, longer._newest_ns)
        return True

    @property
    def room(self) -> int:
        """So many more moments would be kept."""
        return max(self._kept - self.count, 0)

    def times_ns(self) -> NDArray[np.int64]:
        """When the moments were, by the rank's monotonic clock; oldest first."""
        return self._column("mono_ns")

    def curve(self, name: str) -> NDArray[np.float32]:
        """One figure at these times."""
        return self._column(name)

    def held(self) -> NDArray[np.int8]:
        """The reasons at these times, a bit for each of `THROTTLE_REASONS` in its order; `NOT_REPORTED` = not known."""
        return self._column("held")

    def _column(self, name: str) -> NDArray[Any]:
        column: NDArray[Any] = np.frombuffer(self._records, _MOMENT)[name]
        return column[max(0, self.count - self._kept) : self.count]


@dataclass(slots=True)
class RankGpus:
    """What a rank has said of its GPUs."""

    kept: int = KEPT_MOMENTS
    latest: Gpus | None = None
    received_ns: int = 0
    """Viewer's clock when that came."""
    histories: dict[str, GpuHistory] = field(default_factory=dict)
    """By torch's name of the device."""
    ecc_before: dict[str, int] = field(default_factory=dict)
    """Uncorrected errors that a device had when it was first heard of: those are not news."""

    def now(self, now_ns: int) -> list[Gpu]:
        """The GPUs as they were read last; none if that is too long ago."""
        if self.latest is None or now_ns - self.received_ns > LivenessLimits.GPU_STALE_NS:
            return []
        return self.latest.gpus

    def update(self, gpus: Gpus, now_ns: int) -> None:
        """Keep a reading in place of an older one."""
        if self.latest is not None and gpus.mono_ns <= self.latest.mono_ns:
            return
        self.latest, self.received_ns = _sanitized_gpus(gpus), now_ns
        for gpu in self.latest.gpus:
            history = self.histories.get(gpu.device) or self._history(gpu.device)
            if history is None:
                continue
            history.put(gpus.mono_ns, _figures(gpu), throttle_bits(gpu.throttle) if gpu.throttle else 0)
            errors = gpu.ecc_uncorrected
            # A counter that has gone back was reset: what it counts from now on is news.
            if errors is not None and errors < self.ecc_before.get(gpu.device, errors + 1):
                self.ecc_before[gpu.device] = errors

    def recall(self, moments: list[GpuMoment]) -> None:
        """Take the history that a snapshot brings; it comes before anything that is known."""
        by_device: dict[str, list[GpuMoment]] = {}
        for moment in moments:
            by_device.setdefault(moment.device, []).append(moment)
        for name, reported in by_device.items():
            history = self._history(sanitize(name, NAME_CHARS))
            if history is not None and not history.count:
                history.fill([moment.mono_ns for moment in reported], [_figures(moment) for moment in reported])

    def recall_earlier(self, readings: list[GpuReadings | GpuMoment]) -> bool:
        """Take what was read before anything that is known, in order; whether a curve has become longer."""
        by_device: dict[str, list[tuple[int, tuple[float | None, ...], int]]] = {}
        for reading in readings:
            if isinstance(reading, GpuMoment):
                by_device.setdefault(reading.device, []).append((reading.mono_ns, _figures(reading), NOT_REPORTED))
                continue
            for gpu in reading.gpus:
                moment = reading.mono_ns, _figures(gpu), throttle_bits(gpu.throttle) if gpu.throttle else 0
                by_device.setdefault(gpu.device, []).append(moment)
        longer = False
        for name, moments in by_device.items():
            history = self.histories.get(sanitize(name, NAME_CHARS))
            if history is not None:
                longer |= history.put_before(sorted(moments, key=itemgetter(0)))
        return longer

    def _history(self, device: str) -> GpuHistory | None:
        """Of a device; None = there are too many to believe in one more."""
        if device not in self.histories and len(self.histories) < MAX_KNOWN:
            self.histories[device] = GpuHistory(self.kept)
        return self.histories.get(device)


def throttle_bits(throttle: list[str]) -> int:
    """Which of `THROTTLE_REASONS` are among the reasons."""
    return sum(1 << place for place, reason in enumerate(THROTTLE_REASONS) if reason in throttle)


def _sanitized_gpus(gpus: Gpus) -> Gpus:
    """The very same, if it is plain already, as nearly all are: each rank tells of its own every second."""
    kept = sanitized(gpus, NAME_CHARS) if gpus.why else gpus
    if all(map(_is_sanitized_gpu, gpus.gpus)):
        return kept
    return msgspec.structs.replace(kept, gpus=[_sanitized_gpu(gpu) for gpu in gpus.gpus])


def _is_sanitized_gpu(gpu: Gpu) -> bool:
    processes = gpu.processes
    if not (gpu.throttle or gpu.absent or len(processes) > 1):
        # As most are: short even together.
        text = f"{gpu.device}{gpu.uuid}{gpu.name}{processes[0].name if processes else ''}"
        if text.isascii() and text.isprintable() and len(text) <= NAME_CHARS:
            return True
    texts = [gpu.device, gpu.uuid, gpu.name, *gpu.throttle]
    texts += [process.name for process in processes]
    if gpu.absent:
        texts += [*gpu.absent, *gpu.absent.values()]
    return are_sanitized(texts, NAME_CHARS)


def _sanitized_gpu(gpu: Gpu) -> Gpu:
    return msgspec.structs.replace(
        sanitized(gpu, NAME_CHARS),
        throttle=[sanitize(reason, NAME_CHARS) for reason in gpu.throttle],
        processes=[sanitized(process, NAME_CHARS) for process in gpu.processes],
        absent={sanitize(name, NAME_CHARS): sanitize(why, NAME_CHARS) for name, why in gpu.absent.items()},
    )


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
            near_ns = GpuThrottleLimits.NEAR_NS
            begin, end = np.searchsorted(times_ns, [first_ns - near_ns, last_ns + near_ns]).tolist()
        if begin < end:
            found.append(_clock(rank, gpu, slice(begin, end)))
    return found


def slowed(clocks: Iterable[Clock], others: Sequence[Clock], part: float) -> tuple[Clock, float] | None:
    """Of a rank's GPUs the one whose clocks are held down most, and the usual clock of the others like it; None = none
    is held down by heat or hardware, and none is below `part` of the others.
    """
    worst: tuple[Clock, float] | None = None
    for clock in clocks:
        usual = median_mhz(clock, others)
        below = bool(clock.mhz) and clock.mhz < part * usual
        if (clock.harsh or below) and (worst is None or clock.mhz < worst[0].mhz):
            worst = clock, usual
    return worst


def median_mhz(clock: Clock, others: Sequence[Clock]) -> float:
    """The median clock of the other GPUs of its kind; 0 = there are none."""
    known = [
        other.mhz
        for other in others
        if other.mhz and other.name == clock.name and (other.rank, other.device) != (clock.rank, clock.device)
    ]
    return median(known) if known else 0.0


def evenly_sampled(ranks: Sequence[RankState]) -> Sequence[RankState]:
    """Some of many ranks."""
    return ranks[:: -(-len(ranks) // GpuThrottleLimits.MAX_PEERS)] if ranks else ranks


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
    reported = set(reasons)
    known = [reason for reason in THROTTLE_REASONS if reason in reported]
    if known and known[0] != "hw_slowdown":
        known = [reason for reason in known if reason != "hw_slowdown"]
    if "hw_thermal_slowdown" in reported:
        known = [reason for reason in known if reason != "sw_thermal_slowdown"]
    heat = f" at {temperature_c} °C" if temperature_c is not None else ""
    return ", ".join(f"{WORDS[reason]}{heat if reason in THERMAL else ''}" for reason in known)


def _clock(rank: RankState, gpu: Gpu, part: slice) -> Clock:
    # As lists: of some dozens of readings that is much faster than with arrays, and all GPUs of a job may be asked for.
    history = rank.gpus.histories[gpu.device]
    mhz = [value for value in history.curve("sm_mhz")[part].tolist() if not isnan(value)]
    heat = [value for value in history.curve("temperature_c")[part].tolist() if not isnan(value)]
    held = history.held()[part].tolist()
    reported = [bits for bits in held if bits != NOT_REPORTED]
    # Of nearly all nothing holds the clocks down.
    enough = len(reported) >= min(GpuThrottleLimits.MIN_REPORTED, len(held)) and any(reported)
    reasons = tuple(
        reason
        for place, reason in enumerate(THROTTLE_REASONS if enough else ())
        if sum((bits >> place) & 1 for bits in reported) > GpuThrottleLimits.MIN_REASON_SHARE * len(reported)
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


RESET: Final = "Leave the GPU out, reset it (nvidia-smi -r) or restart the host; if it comes back, have it replaced."
FAULT: Final = (
    "An illegal access of a kernel, most often a bug in the script or in a custom kernel: run it with "
    "CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer; if another GPU does not show it, test this one."
)
LINKS: Final = "Look at the links (nvidia-smi nvlink -e); leave the host out until they are mended."
ENDED: Final = "Nothing of its own: a process that used the GPU was ended, or failed before; look for that."
LOOK_UP: Final = "Look up its number in the list of Xid errors of the NVIDIA driver, and the lines in dmesg."

XIDS: Final[dict[int, tuple[str, Severity, str]]] = {
    13: ("a kernel of the application failed", Severity.WARNING, FAULT),
    31: ("a kernel of the application accessed memory that is not its own", Severity.WARNING, FAULT),
    43: ("a process on it has stopped", Severity.INFO, ENDED),
    45: ("cleaned up after a process that has ended", Severity.INFO, ENDED),
    48: ("a memory error that cannot be corrected", Severity.CRITICAL, RESET),
    63: ("bad memory is being taken out of use", Severity.WARNING, RESET),
    64: ("bad memory cannot be taken out of use", Severity.CRITICAL, RESET),
    74: ("an error of NVLink", Severity.CRITICAL, LINKS),
    79: ("it has fallen off the bus", Severity.CRITICAL, RESET),
    94: ("a memory error that hit one process only", Severity.WARNING, RESET),
    95: ("a memory error that may have hit any process", Severity.CRITICAL, RESET),
    119: ("its system processor does not answer", Severity.CRITICAL, RESET),
    120: ("an error of its system processor", Severity.CRITICAL, RESET),
}


def xid_meaning(code: int) -> tuple[str, Severity, str]:
    """In words, how bad it is, and what to do."""
    return XIDS.get(code, ("an error of the driver or the hardware", Severity.WARNING, LOOK_UP))
