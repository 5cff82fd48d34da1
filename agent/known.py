"""Which objects are ours to follow, without keeping any of them alive."""

from __future__ import annotations

import weakref
from typing import Any


class Known:
    """Objects by identity, forgotten when they die. `ids` is a plain set, because hooks ask it several times a step."""

    __slots__ = ("_references", "ids")

    def __init__(self) -> None:
        self.ids: set[int] = set()
        """`id(thing) in known.ids`: whether it is one of them."""
        self._references: dict[int, weakref.ref[Any]] = {}

    def add(self, thing: Any) -> None:
        """Remember a thing for as long as it lives."""
        this = id(thing)

        def forget(_reference: weakref.ref[Any]) -> None:
            self.ids.discard(this)
            self._references.pop(this, None)

        self._references[this] = weakref.ref(thing, forget)
        self.ids.add(this)
