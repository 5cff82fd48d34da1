"""How many frames of a damaged recording are missing, told from the numbers of those that are there."""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class Block(NamedTuple):
    """What a block says of its frames, of which only `sound` ones can be read: their data has a checksum. The numbers
    beside it have none.
    """

    portion: int
    last: int
    """Position of its last frame."""
    frames: int
    sound: bool


def missing_frames(blocks: Iterable[Block], checkpoints: Sequence[int]) -> tuple[int, int]:
    """Frames that are missing between the first and the last that are known of, and those that are there. Blocks come
    in the order of their portions; `checkpoints` are positions of the last frame before each of them.

    What was before the first checkpoint may have been let go on purpose.
    """
    portions = [list(together) for _, together in groupby(blocks, lambda block: block.portion)]
    sound = [[block for block in portion if block.sound] for portion in portions]
    lasts = [max(block.last for block in kept) for kept in sound if kept]
    believed = iter(_rising([*lasts, max(checkpoints, default=max(lasts, default=0))]))
    reached = min(checkpoints, default=None)
    early = -1 if reached is None else reached
    missing = sum(block.frames for portion in portions for block in portion if not block.sound and block.last <= early)
    there = hurt = read = 0
    for portion, kept in zip(portions, sound, strict=True):
        hurt += sum(block.frames for block in portion if not block.sound and block.last > early)
        if not kept:
            continue
        read += sum(block.frames for block in kept)
        if not next(believed):
            continue
        last = max(block.last for block in kept)
        if reached is None or last - read < reached:
            # Before a first checkpoint, or with none: nothing tells from where on they should be there.
            missing += hurt
        else:
            missing += max(last - reached - read, 0)
        reached, there, hurt, read = max(last, reached or 0), there + read, 0, 0
    furthest = max(checkpoints, default=-1)
    after = max(furthest - reached, 0) if reached is not None else 0
    return missing + (max(after - read, 0) if after else hurt), there + read


def _rising(numbers: Sequence[int]) -> list[bool]:
    """Which of these are in the longest part of them that never falls: one that was changed by damage is not."""
    ends: list[int] = []
    places: list[int] = []
    before: list[int] = []
    for place, number in enumerate(numbers):
        length = bisect_right(ends, number)
        before.append(places[length - 1] if length else -1)
        ends[length : length + 1] = [number]
        places[length : length + 1] = [place]
    rising = [False] * len(numbers)
    place = places[-1] if places else -1
    while place >= 0:
        rising[place] = True
        place = before[place]
    return rising
