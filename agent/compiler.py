"""Keeps torch.compile from compiling ddpwatch."""

from __future__ import annotations

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
