"""GPUs of a rank: latest reading, some minutes of history, throttled clocks, and meanings of Xid errors."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter, itemgetter
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ddpwatch.core.limits import GpuThrottleLimits, LivenessLimits
from ddpwatch.core.state.sanitize import NAME_CHARS, are_sanitized, sanitize, sanitized
from ddpwatch.wire import MAX_GPUS, MAX_THROTTLE, Count, Figure, GpuMoment, Name, Percent

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.wire import Gpu, Gpus

CURVES: Final = ("util_percent", "memory_util_percent", "used_bytes", "temperature_c", "power_mw", "sm_mhz")
"""Figures whose history is kept."""
_figures: Final = attrgetter(*CURVES)
_RECORD: Final = struct.Struct(f"@q{len(CURVES)}fb7x")
"""One moment in memory: time, figures, throttle bits."""
_MOMENT: Final = np.dtype([("mono_ns", "i8"), *((name, "f4") for name in CURVES), ("held", "i1")], align=True)
assert _MOMENT.itemsize == _RECORD.size
THROTTLE_REASONS: Final = (
    "hw_thermal_slowdown",
    "sw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "hw_slowdown",
    "sw_power_cap",
)
"""Throttle reasons that are kept in the history, worst first; the others are harmless."""
NOT_REPORTED: Final = -1
"""Throttle bits of a moment from a snapshot, which carries none."""
KEPT_MOMENTS: Final = 600
"""Moments kept of each GPU, one a second: ten minutes."""
MANY_RANKS_MOMENTS: Final = 120
"""Moments kept of each GPU in runs of more than `MANY_RANKS` ranks."""
MAX_DEVICES: Final = 16
"""Maximum number of GPUs of one rank; further device names are ignored."""


Moment: TypeAlias = tuple[int, tuple[float | None, ...], int]
"""Rank's clock in nanoseconds, the figures of `CURVES`, and the throttle reasons as bits."""


class GpuReading(Struct, frozen=True, gc=False):
    """Subset of `wire.Gpu` that the history needs: decoding it from a recording is faster."""

    device: Name
    util_percent: Percent | None = None
    memory_util_percent: Percent | None = None
    used_bytes: Figure = None
    temperature_c: Figure = None
    power_mw: Figure = None
    sm_mhz: Figure = None
    throttle: Annotated[list[Name], Meta(max_length=MAX_THROTTLE)] = []


class GpuReadings(Struct, frozen=True, gc=False):
    """Subset of `wire.Gpus` that the history needs."""

    mono_ns: Count
    gpus: Annotated[list[GpuReading], Meta(max_length=MAX_GPUS)] = []


class GpuHistory:
    """Latest moments of one GPU in order of the rank's clock. A figure that was not read is NaN."""

    __slots__ = ("_kept", "_newest_ns", "_records", "count")

    def __init__(self, kept: int = KEPT_MOMENTS) -> None:
        self._kept = kept
        # Longer than needed by an eighth, so that it is shifted only when that is full.
        self._records = bytearray((kept + max(kept // 8, 1)) * _RECORD.size)
        self._newest_ns = -1
        self.count = 0

    def put(self, mono_ns: int, figures: tuple[float | None, ...], held: int = NOT_REPORTED) -> None:
        """Append a moment, with the bits of the throttle reasons. One that is not later than the last is ignored."""
        if mono_ns <= self._newest_ns:
            return
        self._newest_ns = mono_ns
        place = self.count * _RECORD.size
        if place == len(self._records):
            # Into new memory: arrays that views were given keep their values.
            last = self._records[place - (self._kept - 1) * _RECORD.size :]
            self._records = last + bytearray(place - len(last))
            self.count, place = self._kept - 1, len(last)
        try:
            _RECORD.pack_into(self._records, place, mono_ns, *figures, held)
        except struct.error:
            known = (math.nan if figure is None else figure for figure in figures)
            _RECORD.pack_into(self._records, place, mono_ns, *known, held)
        self.count += 1

    def put_before(self, earlier: list[Moment]) -> bool:
        """Prepend earlier moments as far as there is room; returns whether there were any."""
        first_ns = self.times_ns()[0] if self.count else np.iinfo(np.int64).max
        rising = [late for early, late in pairwise([(-1, (), 0), *earlier]) if early[0] < late[0] < first_ns]
        fitting = rising[max(len(rising) - self.room, 0) :]
        if not fitting:
            return False
        longer = GpuHistory(self._kept)
        for moment in fitting:
            longer.put(*moment)
        begin, end = longer.count * _RECORD.size, (longer.count + self.count) * _RECORD.size
        longer._records[begin:end] = self._records[: end - begin]
        self._records, self.count = longer._records, longer.count + self.count
        self._newest_ns = max(self._newest_ns, longer._newest_ns)
        return True

    @property
    def room(self) -> int:
        """How many more moments fit."""
        return max(self._kept - self.count, 0)

    def times_ns(self) -> NDArray[np.int64]:
        """Times of the moments by the rank's monotonic clock, oldest first."""
        return self._column("mono_ns")

    def curve(self, name: str) -> NDArray[np.float32]:
        """One figure at these times."""
        return self._column(name)

    def held(self) -> NDArray[np.int8]:
        """Throttle reasons at these times, as bits in the order of `THROTTLE_REASONS`; `NOT_REPORTED` = not known."""
        return self._column("held")

    def _column(self, name: str) -> NDArray[Any]:
        column: NDArray[Any] = np.frombuffer(self._records, _MOMENT)[name]
        return column[max(0, self.count - self._kept) : self.count]


@dataclass(slots=True)
class RankGpus:
    """GPUs of one rank."""

    kept: int = KEPT_MOMENTS
    latest: Gpus | None = None
    received_ns: int = 0
    """Viewer's clock at the latest reading."""
    histories: dict[str, GpuHistory] = field(default_factory=dict)
    """By torch's device name."""
    ecc_before: dict[str, int] = field(default_factory=dict)
    """Uncorrected ECC errors of each device at its first reading: only later ones are reported."""

    def now(self, now_ns: int) -> list[Gpu]:
        """The latest reading, or nothing if it is stale."""
        if self.latest is None or now_ns - self.received_ns > LivenessLimits.GPU_STALE_NS:
            return []
        return self.latest.gpus

    def update(self, gpus: Gpus, now_ns: int) -> None:
        """Apply a reading, unless it is older than the latest."""
        if self.latest is not None and gpus.mono_ns <= self.latest.mono_ns:
            return
        self.latest, self.received_ns = _sanitized_gpus(gpus), now_ns
        for gpu in self.latest.gpus:
            history = self.histories.get(gpu.device) or self._history(gpu.device)
            if history is None:
                continue
            history.put(gpus.mono_ns, _figures(gpu), _throttle_bits(gpu.throttle))
            errors = gpu.ecc_uncorrected
            # A smaller count means that the counter was reset.
            if errors is not None and errors < self.ecc_before.get(gpu.device, errors + 1):
                self.ecc_before[gpu.device] = errors

    def recall(self, moments: list[GpuMoment]) -> None:
        """Restore the history from a snapshot, for devices of which nothing is known."""
        for name, earlier in _by_device(moments).items():
            history = self._history(name)
            if history is not None and not history.count:
                history.put_before(earlier)

    def recall_earlier(self, readings: list[GpuReadings | GpuMoment]) -> bool:
        """Prepend earlier readings, in order, to the histories; returns whether any became longer."""
        longer = False
        for name, earlier in _by_device(readings).items():
            if history := self.histories.get(name):
                longer |= history.put_before(sorted(earlier, key=itemgetter(0)))
        return longer

    def _history(self, device: str) -> GpuHistory | None:
        """History of a device; None = the rank claims too many devices."""
        if device not in self.histories and len(self.histories) < MAX_DEVICES:
            self.histories[device] = GpuHistory(self.kept)
        return self.histories.get(device)


def _by_device(readings: Sequence[GpuReadings | GpuMoment]) -> dict[str, list[Moment]]:
    by_device: dict[str, list[Moment]] = {}
    for reading in readings:
        if isinstance(reading, GpuMoment):
            by_device.setdefault(reading.device, []).append((reading.mono_ns, _figures(reading), NOT_REPORTED))
            continue
        for gpu in reading.gpus:
            moment = reading.mono_ns, _figures(gpu), _throttle_bits(gpu.throttle)
            by_device.setdefault(gpu.device, []).append(moment)
    return {sanitize(name, NAME_CHARS): moments for name, moments in by_device.items()}


def _throttle_bits(throttle: list[str]) -> int:
    """Bit mask of the `THROTTLE_REASONS` among the reasons."""
    return sum(1 << bit for bit, reason in enumerate(THROTTLE_REASONS) if reason in throttle) if throttle else 0


def _sanitized_gpus(gpus: Gpus) -> Gpus:
    """The same object if its text is plain, as nearly always: each rank sends one every second."""
    kept = sanitized(gpus, NAME_CHARS) if gpus.why else gpus
    if all(map(_is_sanitized_gpu, gpus.gpus)):
        return kept
    return msgspec.structs.replace(kept, gpus=[_sanitized_gpu(gpu) for gpu in gpus.gpus])


def _is_sanitized_gpu(gpu: Gpu) -> bool:
    texts = [gpu.device, gpu.uuid, gpu.name, *gpu.throttle, *[process.name for process in gpu.processes]]
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


REASON_TEXTS: Final = {
    "hw_thermal_slowdown": "hardware thermal slowdown",
    "sw_thermal_slowdown": "thermal slowdown",
    "hw_power_brake_slowdown": "power brake",
    "hw_slowdown": "hardware slowdown",
    "sw_power_cap": "power cap",
}
POWER_CAP: Final = "sw_power_cap"
"""Normal at full load: harmless as long as the clocks are close to those of the other GPUs."""
THERMAL: Final = frozenset({"hw_thermal_slowdown", "sw_thermal_slowdown"})


@dataclass(frozen=True)
class Clock:
    """Clocks of one GPU over some readings."""

    rank: int
    device: str
    name: str
    mhz: float
    """Median; 0 = not known."""
    max_mhz: int
    """0 = not known."""
    reasons: tuple[str, ...]
    """Throttle reasons in most of the readings, worst first."""
    temperature_c: int | None
    readings: int

    @property
    def harsh(self) -> bool:
        """Whether heat or the hardware throttles the GPU, not only the power limit."""
        return any(reason != POWER_CAP for reason in self.reasons)


def latest_clock(rank: RankState, gpu: Gpu, readings: int) -> Clock | None:
    """Clock over the latest readings; None if there are fewer."""
    history = rank.gpus.histories.get(gpu.device)
    if history is None or history.count < readings:
        return None
    return _clock(rank, gpu, slice(-readings, None))


def clocks_between(rank: RankState, first_ns: int, last_ns: int) -> list[Clock]:
    """Clocks of a rank's GPUs in a time span by the rank's clock, without GPUs that have no reading there."""
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


def slowed(clocks: Iterable[Clock], others: Sequence[Clock], fraction: float) -> tuple[Clock, float] | None:
    """The GPU of a rank that is throttled most, and the median clock of its peers; None = none is throttled by heat or
    hardware, and none is below `fraction` of its peers.
    """
    worst: tuple[Clock, float] | None = None
    for clock in clocks:
        baseline_mhz = median_mhz(clock, others)
        below = bool(clock.mhz) and clock.mhz < fraction * baseline_mhz
        if (clock.harsh or below) and (worst is None or clock.mhz < worst[0].mhz):
            worst = clock, baseline_mhz
    return worst


def median_mhz(clock: Clock, others: Sequence[Clock]) -> float:
    """Median clock of the other GPUs with the same name; 0 = there are none."""
    known = [
        other.mhz
        for other in others
        if other.mhz and other.name == clock.name and (other.rank, other.device) != (clock.rank, clock.device)
    ]
    return median(known) if known else 0.0


def evenly_sampled(ranks: Sequence[RankState]) -> Sequence[RankState]:
    """At most `GpuThrottleLimits.MAX_PEERS` of the ranks, evenly spaced."""
    return ranks[:: -(-len(ranks) // GpuThrottleLimits.MAX_PEERS)] if ranks else ranks


def clock_text(clock: Clock, baseline_mhz: float = 0.0) -> str:
    """As in `GPU clock 1110/1980 MHz, thermal slowdown at 89 °C`; without a reason, with the clock of the peers."""
    text = f"GPU clock {clock.mhz:.0f}{f'/{clock.max_mhz}' if clock.max_mhz else ''} MHz" if clock.mhz else ""
    if clock.reasons:
        reasons = reasons_text(clock.reasons, clock.temperature_c)
        return f"{text}, {reasons}" if text else reasons
    return f"{text} vs {baseline_mhz:.0f} MHz on the others" if baseline_mhz else text


def reasons_text(reasons: Iterable[str], temperature_c: int | None = None) -> str:
    """Throttle reasons in words, with the temperature for thermal ones. The general reason is omitted beside a specific
    one.
    """
    present = set(reasons)
    known = [reason for reason in THROTTLE_REASONS if reason in present]
    if known and known[0] != "hw_slowdown":
        known = [reason for reason in known if reason != "hw_slowdown"]
    if "hw_thermal_slowdown" in present:
        known = [reason for reason in known if reason != "sw_thermal_slowdown"]
    heat = f" at {temperature_c} °C" if temperature_c is not None else ""
    return ", ".join(f"{REASON_TEXTS[reason]}{heat if reason in THERMAL else ''}" for reason in known)


def _clock(rank: RankState, gpu: Gpu, span: slice) -> Clock:
    # Lists are faster than arrays for some dozens of readings, and all GPUs of a job may be asked for.
    history = rank.gpus.histories[gpu.device]
    mhz = [value for value in history.curve("sm_mhz")[span].tolist() if not math.isnan(value)]
    heat = [value for value in history.curve("temperature_c")[span].tolist() if not math.isnan(value)]
    held = history.held()[span].tolist()
    reported = [bits for bits in held if bits != NOT_REPORTED]
    enough = len(reported) >= min(GpuThrottleLimits.MIN_REPORTED, len(held)) and any(reported)
    reasons = tuple(
        reason
        for place, reason in enumerate(THROTTLE_REASONS if enough else ())
        if sum((bits >> place) & 1 for bits in reported) > GpuThrottleLimits.MIN_REASON_SHARE * len(reported)
    )
    return Clock(
        rank=rank.rank, device=gpu.device, name=gpu.name, mhz=median(mhz) if mhz else 0.0, max_mhz=gpu.sm_max_mhz or 0,
        reasons=reasons, temperature_c=int(max(heat)) if heat else None, readings=len(held),
    )  # fmt: skip
