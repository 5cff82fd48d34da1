"""A method of somebody else's class, replaced for a while.

Which objects are ours to follow, without keeping any of them alive.

Keeps torch.compile from compiling ddpwatch.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def run_as_python(function: Callable[..., Any], *, with_all_it_calls: bool = False) -> None:
    """Have the compiler leave this function alone; what it calls is compiled as ever, unless that is hidden too.

    DDP's own seams are not compiled, because they are in torch's files; a wrapper around one would be, and would
    break the graph once more. A function that runs as Python can still be inlined into one that is compiled; then
    `is_compiling()` is a constant in it, and ddpwatch vanishes.
    """
    compiler: Any = torch._C._dynamo.eval_frame
    code: Any = function.__code__
    try:
        skip, default = compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT
        strategy = compiler._FrameExecStrategy(skip, skip if with_all_it_calls else default)
        compiler.set_code_exec_strategy(code, strategy)
    except AttributeError:
        return  # an older torch has no such door: there compile(DDP(...)) breaks its graph twice more


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


class WeakIdSet:
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
