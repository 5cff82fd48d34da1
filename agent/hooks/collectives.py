"""Collective hooks: the time the training thread is blocked in a collective outside DDP is a sync point of the step.

Scripts average losses and metrics, gather embeddings, call barriers. All of these end in `Work.wait` of torch's
bindings, whichever way the script imported the function, and DDP's own reducer waits in C++ and does not pass here.
"""

from __future__ import annotations

import sys
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import distributed
from torch.compiler import is_compiling

from ddpwatch.agent.clock import BACKWARD, PRESYNC, SYNC, SYNC_POINTS
from ddpwatch.agent.fail_open import guarded
from ddpwatch.agent.patching import Patch
from ddpwatch.agent.torch_private import FUNCTIONAL_COLLECTIVES, LAUNCHES, current_autograd_node
from ddpwatch.wire import MAX_POINTS

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from ddpwatch.agent.hooks.forward import ForwardHooks
    from ddpwatch.agent.step_recorder import Recorder

MAX_DEPTH: Final = 64
"""Frames searched for the script's own line."""
MAX_SITES: Final = 4096
"""Call sites kept; a script that compiles code in every step would otherwise fill the memory."""
ROOTED: Final = frozenset(
    {
        "broadcast", "broadcast_object_list", "reduce", "gather", "gather_object", "scatter", "scatter_object_list",
        "send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv",
    }
)  # fmt: skip
"""Operations that a rank may leave before others have joined: their least wait is not the network's time."""
_TORCH: Final = f"{Path(torch.__file__).parent}/"
_DISTRIBUTED: Final = f"{_TORCH}distributed/"
_NAMELESS: Final = (f"{_DISTRIBUTED}c10d_logger.py", f"{_DISTRIBUTED}{FUNCTIONAL_COLLECTIVES.rpartition('.')[2]}.py")
"""Files whose functions are not operations that a script calls."""
_OWN: Final = f"{Path(__file__).parents[1]}/"
_PACKAGES: Final = ("/site-packages/", "/dist-packages/")


class Site(NamedTuple):
    """A place in the script that calls a collective."""

    op: str
    """Outermost function of torch.distributed, such as `all_gather_object`; `wait` for work that was started before."""
    place: str
    """File and line, such as `train.py:88`."""
    code: bytes
    """The operation as bytes, for the checksum by which ranks are matched."""
    splits: bool
    """Whether all ranks leave together, so that the least wait is the network's time."""


class CollectiveHooks:
    """Wraps what blocks in a collective, and counts the training thread's time in it as `sync`.

    Inside DDP's own communication, in a nested call and on other threads the wrappers do nothing. An autograd thread
    counts while the training thread waits for it in `backward()`.
    """

    def __init__(self, recorder: Recorder, forward: ForwardHooks) -> None:
        self.switch = recorder.switch
        self._recorder = recorder
        self._forward = forward
        self._inside = False
        self._phase_before = 0
        self._sites: dict[tuple[Any, int], Site] = {}
        self._library_files: dict[str, bool] = {}
        """Files of torch and ddpwatch, and whether functions in them name the operation."""
        self._patches: list[Patch] = []
        self._launches = False
        if not distributed.is_available():
            return
        functional: Any = sys.modules.get(FUNCTIONAL_COLLECTIVES)
        self._patches.append(Patch(distributed.Work, "wait", self._around))
        # Blocks in C++ without a Work.
        self._patches.append(Patch(distributed.ProcessGroup, "monitored_barrier", self._around))
        # Functional collectives, and with them DTensor, wait for a tensor instead of a Work.
        if functional is not None:
            self._patches.append(Patch(functional, "wait_tensor", self._around))

    def watch_launches(self) -> None:
        """Wrap the start of collectives as well: on a GPU, a blocking one may run on the current stream without a Work
        to wait for.
        """
        if self._launches or not self._patches:
            return
        self._launches = True
        self._patches += [Patch(distributed.ProcessGroup, name, self._around_launch) for name in LAUNCHES]

    def remove(self) -> None:
        """Remove every wrapper."""
        for patch in self._patches:
            patch.undo()

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._entered():
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._left(sys._getframe(1))

        return wait

    def _around_launch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._entered():
                return original(*args, **kwargs)
            work = None
            try:
                work = original(*args, **kwargs)
            finally:
                # With a Work the wait for it is the sync point.
                self._left(sys._getframe(1) if work is None else None)
            return work

        return launch

    @guarded
    def _entered(self) -> bool:
        recorder = self._recorder
        phase = recorder.clock.phase
        if self._inside or phase == SYNC or phase >= PRESYNC:
            return False
        if get_ident() != (self._forward.thread_id or recorder.thread) and (
            phase != BACKWARD or current_autograd_node() is None
        ):
            return False
        self._inside = True
        self._phase_before = phase
        recorder.clock.switch(SYNC_POINTS + min(recorder.sync_points, MAX_POINTS))
        return True

    @guarded
    def _left(self, caller: FrameType | None) -> None:
        self._inside = False
        self._recorder.clock.switch(self._phase_before)
        if caller is not None:
            self._recorder.add_sync_point(self._site(caller), self._phase_before)

    def _site(self, frame: FrameType) -> Site:
        """Where the script called the collective that `frame` waits for."""
        op = "wait"
        outer: FrameType | None = frame
        while outer is not None:
            code = outer.f_code
            names_op = self._library_files.get(code.co_filename)
            if names_op is None:
                file = code.co_filename
                if not file.startswith((_TORCH, _OWN)):
                    break
                names_op = self._library_files[file] = file.startswith(_DISTRIBUTED) and file not in _NAMELESS
            if names_op:
                op = code.co_name
            outer = outer.f_back
        if outer is None:
            outer = frame
        key = outer.f_code, outer.f_lasti
        site = self._sites.get(key)
        if site is None or site.op != op:
            if len(self._sites) >= MAX_SITES:
                self._sites.clear()
            site = self._sites[key] = Site(op, _place(outer), op.encode(), op not in ROOTED)
        return site


def _place(frame: FrameType) -> str:
    """File and line of the script; of an installed package if no frame is the script's."""
    found, candidate, depth = frame, frame.f_back, 0
    while any(part in found.f_code.co_filename for part in _PACKAGES) and candidate is not None and depth < MAX_DEPTH:
        if not any(part in candidate.f_code.co_filename for part in _PACKAGES):
            found = candidate
            break
        candidate, depth = candidate.f_back, depth + 1
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno}"
