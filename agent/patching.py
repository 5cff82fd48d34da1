"""Reversible patches of methods, a weak set of objects, and a way to keep functions out of torch.compile."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from ddpwatch.agent.torch_private import skip_in_compiler

if TYPE_CHECKING:
    from collections.abc import Callable


def run_as_python(function: Callable[..., Any], *, with_all_it_calls: bool = False) -> None:
    """Keep torch.compile from compiling this function, and optionally everything that it calls.

    Methods of DDP are not compiled, because they are in torch's files; a wrapper around one would be, and would break
    the graph once more. The function can still be inlined into a compiled one; then `is_compiling()` is a constant in
    it, and ddpwatch vanishes.
    """
    skip_in_compiler(function.__code__, with_all_it_calls=with_all_it_calls)


class Patch:
    """Wraps a method of a class, or a function of a module.

    Not of an instance, because `copy.deepcopy` and `torch.save` would copy the wrapper.

    `undo` restores the original, unless another patch was put on top: then the wrapper stays, and must do nothing once
    its owner is switched off. `compiled`: torch.compile may compile the method itself, so the wrapper is compiled, too;
    other wrappers run as Python even if a compiled region calls them. What this torch lacks is not wrapped
    (`torch_private` lists what is then missing).
    """

    def __init__(
        self,
        owner: Any,
        name: str,
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
        *,
        compiled: bool = False,
    ) -> None:
        self._owner = owner
        self._name = name
        self._wrapper: Callable[..., Any] | None = None
        if not hasattr(owner, name):
            return
        self._inherited = name not in vars(owner)
        self._original = getattr(owner, name)
        # As it is in the class: a method of torch's bindings would not bind as an attribute read from it.
        self._found = vars(owner).get(name)
        # An inherited method is looked up in the parent at each call, because others may replace it there.
        call = _parents(owner, name) if self._inherited else self._original
        wrapper = functools.wraps(self._original)(wrap(call))
        if not compiled:
            run_as_python(wrapper)
        setattr(owner, name, wrapper)
        self._wrapper = wrapper

    def undo(self) -> None:
        """Restore the original."""
        if self._wrapper is None or vars(self._owner).get(self._name) is not self._wrapper:
            return
        if self._inherited:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._found)


def _parents(owner: Any, name: str) -> Callable[..., Any]:
    def call(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(owner, instance), name)(*args, **kwargs)

    return call


class WeakIdSet:
    """Weak set of objects by identity. `ids` is a plain set, because hooks query it several times per step."""

    __slots__ = ("_references", "ids")

    def __init__(self) -> None:
        self.ids: set[int] = set()
        self._references: dict[int, weakref.ref[Any]] = {}

    def add(self, thing: Any) -> None:
        """Add an object for its lifetime."""
        this = id(thing)

        def forget(_reference: weakref.ref[Any]) -> None:
            self.ids.discard(this)
            self._references.pop(this, None)

        self._references[this] = weakref.ref(thing, forget)
        self.ids.add(this)
