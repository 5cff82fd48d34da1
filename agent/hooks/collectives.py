"""Collective hooks: the time the training thread is blocked in a collective outside DDP is a sync point of the step.

Scripts average losses and metrics, gather embeddings, call barriers. All of these end in `Work.wait` of torch's
bindings, whichever way the script imported the function, and DDP's own reducer waits in C++ and does not pass here.
FSDP, DeepSpeed and pipelines do pass; they have many waits in a step, which are sync points by what they wait for.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import distributed
from torch.compiler import is_compiling

from ddpwatch.agent.clock import BACKWARD, PRESYNC, SYNC, SYNC_POINTS
from ddpwatch.agent.fail_open import guarded
from ddpwatch.agent.patching import Patch
from ddpwatch.agent.torch_private import (
    COMPOSABLE,
    FSDP_MODULES,
    FUNCTIONAL_COLLECTIVES,
    LAUNCHES,
    current_autograd_node,
)
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
WAIT: Final = "wait"
"""Operation of a wait for work that was started before."""
FSDP_WAITS: Final = {"wait_for_unshard": "all_gather", "finalize_backward": "reduce_scatter"}
"""Methods of FSDP2's parameter groups that make the current stream wait, and what for."""
_TORCH: Final = f"{Path(torch.__file__).parent}/"
_DISTRIBUTED: Final = f"{_TORCH}distributed/"
_NAMELESS: Final = (f"{_DISTRIBUTED}c10d_logger.py", f"{_DISTRIBUTED}{FUNCTIONAL_COLLECTIVES.rpartition('.')[2]}.py")
"""Files whose functions are not operations that a script calls."""
_COMPOSABLE: Final = f"{_DISTRIBUTED}{COMPOSABLE.rpartition('.')[2]}/"
_FSDP: Final = (f"{_DISTRIBUTED}fsdp/", f"{_COMPOSABLE}fsdp/")
_FRAMEWORKS: Final = (
    *((directory, "FSDP") for directory in _FSDP),
    (_COMPOSABLE, "replicate"),
    (f"{_DISTRIBUTED}pipelining/", "pipeline"),
    (f"{_DISTRIBUTED}tensor/", "DTensor"),
)
"""Directories of torch that call collectives on their own, and the name shown in place of a line of the script."""
_DEEPSPEED: Final = "/deepspeed/runtime/"
_READABLE: Final = (("all_gather", "parameter all-gather"), ("reduce_scatter", "gradient reduce-scatter"))
"""Part of an operation's name, and what FSDP uses it for."""
_OWN: Final = f"{Path(__file__).parents[1]}/"
_PACKAGES: Final = ("/site-packages/", "/dist-packages/")


class Site(NamedTuple):
    """A place in the script that calls a collective."""

    op: str
    """Outermost function of torch.distributed, such as `all_gather_object`; `wait` for work that was started before."""
    place: str
    """File and line, such as `train.py:88`; or the framework that calls it, such as `FSDP`."""
    code: bytes
    """The operation as bytes, for the checksum by which ranks are matched."""
    splits: bool
    """Whether all ranks leave together, so that the least wait is the network's time."""
    merges: bool = False
    """Whether all its calls in one phase of a step are one sync point: those of a framework, which are many."""


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
        self._sites: dict[tuple[Any, int, str, str], Site] = {}
        self._library_files: dict[str, str | None] = {}
        """Files of torch and ddpwatch, and whose functions they hold: an operation's (empty), a framework's, or neither
        (None)."""
        self._patches: list[Patch] = []
        self._launches = self._fsdp = False
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

    def watch_fsdp(self) -> None:
        """Wrap FSDP2's own waits as well: on a GPU it waits for events of its streams, and for no Work."""
        if self._fsdp:
            return
        self._fsdp = True
        groups: Any = next((sys.modules[name] for name in FSDP_MODULES if name in sys.modules), None)
        group = getattr(groups, "FSDPParamGroup", None)
        for name, op in FSDP_WAITS.items():
            if hasattr(group, name):
                self._patches.append(Patch(group, name, partial(self._around, op=op)))

    def remove(self) -> None:
        """Remove every wrapper."""
        for patch in self._patches:
            patch.undo()

    def _around(self, original: Callable[..., Any], op: str = WAIT) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._entered(sys._getframe(1), op):
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                self._left(None)

        return wait

    def _around_launch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            # FSDP starts its collectives on streams of their own, which overlap computation.
            if is_compiling() or _is_of_fsdp(sys._getframe(1)) or not self._entered(None):
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
    def _entered(self, caller: FrameType | None, op: str = WAIT) -> bool:
        """Begin a sync point. Without a caller it is known only at its end whether it is one."""
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
        number = recorder.sync_points if caller is None else recorder.add_sync_point(self._site(caller, op), phase)
        recorder.clock.switch(SYNC_POINTS + min(number, MAX_POINTS))
        return True

    @guarded
    def _left(self, caller: FrameType | None) -> None:
        self._inside = False
        self._recorder.clock.switch(self._phase_before)
        if caller is not None:
            self._recorder.add_sync_point(self._site(caller), self._phase_before)

    def _site(self, frame: FrameType, op: str = WAIT) -> Site:
        """Where the script, or a framework, called the collective that `frame` waits for."""
        framework = ""
        outer: FrameType | None = frame
        while outer is not None:
            code = outer.f_code
            try:
                named = self._library_files[code.co_filename]
            except KeyError:
                file = code.co_filename
                if not file.startswith((_TORCH, _OWN)):
                    break
                names_op = file.startswith(_DISTRIBUTED) and file not in _NAMELESS
                named = self._library_files[file] = _framework(file) if names_op else None
            if named is not None and not framework:
                framework = named
                if not framework or op == WAIT:
                    op = code.co_name
            outer = outer.f_back
        if outer is None:
            outer = frame
        key = outer.f_code, outer.f_lasti, op, framework
        site = self._sites.get(key)
        if site is None:
            if len(self._sites) >= MAX_SITES:
                self._sites.clear()
            site = self._sites[key] = _new_site(op, framework, outer)
        return site


def _framework(file: str) -> str:
    """Framework that a file of torch.distributed belongs to, or empty."""
    return next((name for directory, name in _FRAMEWORKS if file.startswith(directory)), "")


def _new_site(op: str, framework: str, frame: FrameType) -> Site:
    place = framework or _place(frame)
    splits = op not in ROOTED and framework != "pipeline"
    if framework == "FSDP":
        op = next((name for part, name in _READABLE if part in op), op)
    return Site(op, place, op.encode(), splits, merges=":" not in place)


def _is_of_fsdp(frame: FrameType | None) -> bool:
    """Whether FSDP calls torch.distributed here."""
    while frame is not None and (file := frame.f_code.co_filename).startswith(_DISTRIBUTED):
        if file.startswith(_FSDP):
            return True
        frame = frame.f_back
    return False


def _place(frame: FrameType) -> str:
    """File and line of the script, of an installed package if no frame is the script's; or `DeepSpeed`."""
    found, candidate, depth = frame, frame.f_back, 0
    if _DEEPSPEED in frame.f_code.co_filename:
        return "DeepSpeed"
    while any(part in found.f_code.co_filename for part in _PACKAGES) and candidate is not None and depth < MAX_DEPTH:
        if _DEEPSPEED in candidate.f_code.co_filename:
            return "DeepSpeed"
        if not any(part in candidate.f_code.co_filename for part in _PACKAGES):
            found = candidate
            break
        candidate, depth = candidate.f_back, depth + 1
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno}"
