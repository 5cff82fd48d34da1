"""Ranks as they are at one moment, for who looks at them for longer than until the next message."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from ddpwatch.core.gpu import RankGpus
    from ddpwatch.core.rank import RankState

ThingT = TypeVar("ThingT")


def still(rank: RankState) -> RankState:
    """A copy that stays as it is, whatever is heard of the rank later. What is only ever replaced as a whole, and steps
    that have ended, are shared: of thousands of ranks there are such copies with every key.
    """
    kept = _shared(rank)
    kept.steps, kept.sequence, kept.queueing = _shared(rank.steps), _shared(rank.sequence), rank.queueing.copy()
    kept.notes, kept.loaders, kept.resident = dict(rank.notes), dict(rank.loaders), rank.resident.copy()
    kept.gpus = _still_gpus(rank.gpus)
    return kept


def _still_gpus(gpus: RankGpus) -> RankGpus:
    kept = _shared(gpus)
    kept.histories = {device: _shared(history) for device, history in gpus.histories.items()}
    return kept


def _shared(thing: ThingT) -> ThingT:
    """Another one that holds the same things. Python's own way to copy takes ten times as long."""
    kept = object.__new__(type(thing))
    for name in type(thing).__slots__:  # type: ignore[attr-defined]
        setattr(kept, name, getattr(thing, name))
    return kept
