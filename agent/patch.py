"""A method of somebody else's class, replaced for a while."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ddpwatch.agent.compiler import run_as_python

if TYPE_CHECKING:
    from collections.abc import Callable


class Patch:
    """Puts a wrapper around one method of a class, so that nothing is written onto any instance.

    What hangs on an instance is copied by `copy.deepcopy` and written by `torch.save`; a class is neither.
    `undo` puts the original back, unless somebody has patched on top since: then the wrapper stays, and it must do
    nothing by itself once its owner is switched off.

    `compiled`: the method may be the very one that torch.compile is asked to compile; the wrapper must not be in its
    way. Wrappers of other methods run as Python even where a compiled region calls them.
    """

    def __init__(
        self,
        owner: type,
        name: str,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
        *,
        compiled: bool = False,
    ) -> None:
        self._owner = owner
        self._name = name
        self._inherited = name not in vars(owner)
        self._original = getattr(owner, name)
        # Of an inherited method whatever stands in the parent at the time of the call, should others replace it there.
        call = _parents(owner, name) if self._inherited else self._original
        self._wrapper = functools.wraps(self._original)(wrap(call))
        if not compiled:
            run_as_python(self._wrapper)
        setattr(owner, name, self._wrapper)

    def undo(self) -> None:
        """Put the original back."""
        if vars(self._owner).get(self._name) is not self._wrapper:
            return
        if self._inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)


def _parents(owner: type, name: str) -> Callable[..., Any]:
    def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, instance), name)(*args, **kwargs)

    return call
