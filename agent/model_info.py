"""Description of the model, and notes on obvious mistakes in how it is wrapped."""

from __future__ import annotations

import zlib
from typing import Any, Final

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ddpwatch.agent.environment import command, environment
from ddpwatch.agent.registration import identify
from ddpwatch.agent.torch_private import uncompiled
from ddpwatch.wire import fit, ranges

DATAPARALLEL: Final = (
    "nn.DataParallel drives all GPUs from one process: it copies the model to them in every step and shares one GIL, "
    "so it scales poorly. DistributedDataParallel runs one process per GPU and overlaps the all-reduce with backward; "
    "it is faster even on one host."
)
NOT_WRAPPED: Final = (
    "The model is not wrapped in DistributedDataParallel although the job has {world_size} ranks. "
    "Gradients are not averaged, so each rank trains its own model."
)
HOST_CLOCK: Final = (
    "Phases are timed on the CPU. CUDA is asynchronous, so they show when work was enqueued, not when it ran; step "
    "time and throughput are correct."
)
MAX_RANGES_CHARS: Final = 60
"""Characters of a list of ranks, at most."""
_DDP_SETTINGS: Final = (
    "bucket_bytes_cap",
    "broadcast_buffers",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
)


def ddp_modules(model: nn.Module) -> list[DistributedDataParallel]:
    """Every DDP module in a model, including the model itself."""
    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def kind_of(model: object) -> str:
    """`ddp`, `contains-ddp`, `dataparallel` or `plain`. Raises `TypeError` if it is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"ddpwatch.agent.install() takes a torch.nn.Module, usually the one wrapped in "
            f"DistributedDataParallel; it got a {type(model).__name__}."
        )
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    if ddp_modules(model):
        return "contains-ddp"
    return "dataparallel" if any(isinstance(module, DataParallel) for module in model.modules()) else "plain"


def describe(model: nn.Module, kind: str, comm: str, clock: str) -> dict[str, Any]:
    """The fields of `wire.Hello` about the model and how the job was started."""
    ddps = ddp_modules(model)
    inner: Any = model
    while isinstance(inner, DistributedDataParallel | DataParallel) or uncompiled(inner) is not None:
        inner = inner.module if uncompiled(inner) is None else uncompiled(inner)
    parameters = [parameter for parameter in model.parameters() if not is_lazy(parameter)]
    return {
        "model": fit(type(inner).__name__),
        "kind": kind,
        "comm": comm,
        "clock": clock,
        "device": fit(str(parameters[0].device)) if parameters else "",
        "ddp": {name: fit(str(getattr(ddps[0], name, ""))) for name in _DDP_SETTINGS} if ddps else {},
        "parameters": sum(parameter.numel() for parameter in parameters),
        "parameter_bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        "command": command(),
        "environment": environment(),
        "replicas": replicas_of(ddps[0]) if ddps else "",
    }


def replicas_of(ddp: DistributedDataParallel) -> str:
    """`wire.Hello.replicas` of a model: the ranks that DDP keeps equal to this one."""
    try:
        ranks = dist.get_process_group_ranks(ddp.process_group)
        world_size = dist.get_world_size()
    except (KeyError, ValueError, RuntimeError):
        return ""  # a process group that torch does not know, or that was destroyed
    if len(ranks) == world_size:
        return ""
    return ranges(ranks, MAX_RANGES_CHARS) or f"{len(ranks)} ranks, {zlib.crc32(repr(sorted(ranks)).encode()):08x}"


def not_wrapped(model: nn.Module) -> str:
    """Text of a note if this model trains on several ranks without DDP, or empty."""
    world_size = identify().world_size
    return NOT_WRAPPED.format(world_size=world_size) if world_size > 1 and kind_of(model) == "plain" else ""


def remarks(model: nn.Module, kind: str, clock: str) -> list[tuple[str, str]]:
    """Notes on the model for the user: (kind, text)."""
    found = []
    if kind == "dataparallel":
        found.append(("dataparallel", DATAPARALLEL))
    if clock == "host" and any(parameter.device.type == "cuda" for parameter in model.parameters()):
        found.append(("host-clock", HOST_CLOCK))
    return found
