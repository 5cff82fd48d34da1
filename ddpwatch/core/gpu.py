"""The GPUs of one rank: what was read last, and some minutes of the figures that make a curve."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np
from msgspec import Meta, Struct

from ddpwatch.core.text import NAME_CHARS, are_tame, tame, tamed
from ddpwatch.wire import MAX_GPUS, MAX_THROTTLE, Count, Figure, GpuMoment, Name, Percent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ddpwatch.wire import Gpu, Gpus

CURVES: Final = ("util_percent", "memory_util_percent", "used_bytes", "temperature_c", "power_mw", "sm_mhz")
"""The figures that are remembered."""
_figures: Final = attrgetter(*CURVES)
_RECORD: Final = struct.Struct(f"@q{len(CURVES)}fb7x")
"""One moment in memory: when it was, the figures, and what held the clocks down."""
_MOMENT: Final = np.dtype([("mono_ns", "i8"), *((name, "f4") for name in CURVES), ("held", "i1")], align=True)
assert _MOMENT.itemsize == _RECORD.size
HOLDING: Final = (
    "hw_thermal_slowdown",
    "sw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "hw_slowdown",
    "sw_power_cap",
)
"""Reasons of which it is remembered when they held the clocks down, the worst first; the others are no trouble."""
NOT_TOLD: Final = -1
"""In place of the reasons of a moment that a snapshot brought."""
KEPT_MOMENTS: Final = 600
STALE_NS: Final = 10_000_000_000
"""Readings come once a second; one that is older does not tell of now."""
CROWDED_MOMENTS: Final = 120
"""Kept of each GPU where there are very many ranks."""
MOST_KNOWN: Final = 16
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

    def put(self, mono_ns: int, figures: tuple[float | None, ...], held: int = NOT_TOLD) -> None:
        """Remember a moment, and as bits which of `HOLDING` held the clocks down.

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
        """The reasons at these times, a bit for each of `HOLDING` in its order; `NOT_TOLD` = not known."""
        return self._column("held")

    def _column(self, name: str) -> NDArray[Any]:
        column: NDArray[Any] = np.frombuffer(self._records, _MOMENT)[name]
        return column[max(0, self.count - self._kept) : self.count]


@dataclass(slots=True)
class RankGpus:
    """What a rank has said of its GPUs."""

    kept: int = KEPT_MOMENTS
    latest: Gpus | None = None
    heard_ns: int = 0
    """Viewer's clock when that came."""
    histories: dict[str, GpuHistory] = field(default_factory=dict)
    """By torch's name of the device."""
    ecc_before: dict[str, int] = field(default_factory=dict)
    """Uncorrected errors that a device had when it was first heard of: those are not news."""

    def now(self, now_ns: int) -> list[Gpu]:
        """The GPUs as they were read last; none if that is too long ago."""
        if self.latest is None or now_ns - self.heard_ns > STALE_NS:
            return []
        return self.latest.gpus

    def take(self, gpus: Gpus, now_ns: int) -> None:
        """Keep a reading in place of an older one."""
        if self.latest is not None and gpus.mono_ns <= self.latest.mono_ns:
            return
        self.latest, self.heard_ns = _tamed_gpus(gpus), now_ns
        for gpu in self.latest.gpus:
            history = self.histories.get(gpu.device) or self._history(gpu.device)
            if history is None:
                continue
            history.put(gpus.mono_ns, _figures(gpu), held_bits(gpu.throttle) if gpu.throttle else 0)
            errors = gpu.ecc_uncorrected
            # A counter that has gone back was reset: what it counts from now on is news.
            if errors is not None and errors < self.ecc_before.get(gpu.device, errors + 1):
                self.ecc_before[gpu.device] = errors

    def recall(self, moments: list[GpuMoment]) -> None:
        """Take the history that a snapshot brings; it comes before anything that is known."""
        by_device: dict[str, list[GpuMoment]] = {}
        for moment in moments:
            by_device.setdefault(moment.device, []).append(moment)
        for name, told in by_device.items():
            history = self._history(tame(name, NAME_CHARS))
            if history is not None and not history.count:
                history.fill([moment.mono_ns for moment in told], [_figures(moment) for moment in told])

    def recall_earlier(self, readings: list[GpuReadings | GpuMoment]) -> bool:
        """Take what was read before anything that is known, in order; whether a curve has become longer."""
        by_device: dict[str, list[tuple[int, tuple[float | None, ...], int]]] = {}
        for reading in readings:
            if isinstance(reading, GpuMoment):
                by_device.setdefault(reading.device, []).append((reading.mono_ns, _figures(reading), NOT_TOLD))
                continue
            for gpu in reading.gpus:
                moment = reading.mono_ns, _figures(gpu), held_bits(gpu.throttle) if gpu.throttle else 0
                by_device.setdefault(gpu.device, []).append(moment)
        longer = False
        for name, moments in by_device.items():
            history = self.histories.get(tame(name, NAME_CHARS))
            if history is not None:
                longer |= history.put_before(sorted(moments, key=itemgetter(0)))
        return longer

    def _history(self, device: str) -> GpuHistory | None:
        """Of a device; None = there are too many to believe in one more."""
        if device not in self.histories and len(self.histories) < MOST_KNOWN:
            self.histories[device] = GpuHistory(self.kept)
        return self.histories.get(device)


def held_bits(throttle: list[str]) -> int:
    """Which of `HOLDING` are among the reasons."""
    return sum(1 << place for place, reason in enumerate(HOLDING) if reason in throttle)


def _tamed_gpus(gpus: Gpus) -> Gpus:
    """The very same, if it is plain already, as nearly all are: each rank tells of its own every second."""
    kept = tamed(gpus, NAME_CHARS) if gpus.why else gpus
    if all(map(_is_tame_gpu, gpus.gpus)):
        return kept
    return msgspec.structs.replace(kept, gpus=[_tamed_gpu(gpu) for gpu in gpus.gpus])


def _is_tame_gpu(gpu: Gpu) -> bool:
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
    return are_tame(texts, NAME_CHARS)


def _tamed_gpu(gpu: Gpu) -> Gpu:
    return msgspec.structs.replace(
        tamed(gpu, NAME_CHARS),
        throttle=[tame(reason, NAME_CHARS) for reason in gpu.throttle],
        processes=[tamed(process, NAME_CHARS) for process in gpu.processes],
        absent={tame(name, NAME_CHARS): tame(why, NAME_CHARS) for name, why in gpu.absent.items()},
    )
