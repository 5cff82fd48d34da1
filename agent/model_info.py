"""Description of the model, the kind of training it is wrapped for, and notes on obvious mistakes in that.

Wrappers other than DDP are recognized by the names of their classes: none of their packages is imported for it.
"""

from __future__ import annotations

import sys
import zlib
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ddpwatch.agent.environment import command, environment
from ddpwatch.agent.registration import identify
from ddpwatch.agent.torch_private import COMPOSABLE, uncompiled
from ddpwatch.wire import fit, ranges

if TYPE_CHECKING:
    from collections.abc import Iterator

WRAPPERS: Final = (
    ("pipeline", "PipelineEngine", "deepspeed."),
    ("deepspeed", "DeepSpeedEngine", "deepspeed."),
    ("fsdp1", "FullyShardedDataParallel", ""),
    ("replicate", "ReplicateModule", "torch.distributed."),
    ("replicate", "DDP", f"{COMPOSABLE}."),
    ("fsdp2", "FSDPModule", "torch.distributed."),
    ("other-ddp", "DistributedDataParallel", ""),
)
"""Kind, name of the class, and how the name of its module begins. The first that fits counts: engines derive from
others, and `replicate` is built on FSDP2."""
CALLERS: Final = (
    ("pipeline", "torch.distributed.pipelining."),
    ("pipeline", "deepspeed.runtime.pipe."),
    ("deepspeed", "deepspeed.runtime.engine"),
    ("fsdp1", "torch.distributed.fsdp.fully_sharded_data_parallel"),
)
"""Kind, and how the name of the module begins that calls the model: a script may pass the model inside of a wrapper."""
SAME_SAMPLES: Final = frozenset({"tensor-parallel", "ddp-tp", "fsdp2-tp", "pipeline"})
"""Kinds in which several ranks train on the same samples, so that the samples of all ranks do not add up."""
WAITS_IN_PYTHON: Final = frozenset({"fsdp1", "fsdp2", "fsdp2-tp", "deepspeed", "tensor-parallel", "pipeline"})
"""Kinds that wait for other ranks in Python, where each wait is a sync point, and not in C++ after backward as DDP."""
WHOLE_PARAMETERS: Final = frozenset({"ddp", "contains-ddp", "dataparallel", "plain"})
"""Kinds in which a rank holds whole parameters. Elsewhere they differ between ranks, and their memory comes and goes:
no checksums."""
NO_THROUGHPUT: Final = (
    "Ranks of a tensor- or pipeline-parallel group train on the same samples, and ddpwatch does not know the groups: "
    "batch size and throughput are not shown."
)

DATAPARALLEL: Final = (
    "nn.DataParallel drives all GPUs from one process: it copies the model to them in every step and shares one GIL, "
    "so it scales poorly. DistributedDataParallel runs one process per GPU and overlaps the all-reduce with backward; "
    "it is faster even on one host."
)
NOT_WRAPPED: Final = (
    "The model is in no wrapper that ddpwatch knows, although the job has {world_size} ranks. Unless the script "
    "averages gradients itself, each rank trains its own model."
)
_OUTER: Final = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"})
"""Classes of wrappers with the user's model as `module`."""
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
    """The value of `wire.Hello.kind` for a model. Raises `TypeError` if it is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"ddpwatch.agent.install() takes a torch.nn.Module, usually the one wrapped in "
            f"DistributedDataParallel; it got a {type(model).__name__}."
        )
    wrapper = _wrapper(model)
    # FSDP2 shards along one dimension of the mesh, tensor parallelism along another.
    by_wrapper = 1 if wrapper == "fsdp2" else 0
    if not any(_shards(parameter) > by_wrapper for parameter in model.parameters()):
        return wrapper
    if wrapper in ("ddp", "contains-ddp"):
        return "ddp-tp"
    return {"fsdp2": "fsdp2-tp", "plain": "tensor-parallel"}.get(wrapper, wrapper)


def _wrapper(model: nn.Module) -> str:
    """Kind of the wrapper around a model or a part of it, `plain` if there is none."""
    if isinstance(model, DistributedDataParallel):
        return "ddp"
    if ddp_modules(model):
        return "contains-ddp"
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    for kind, name, package in WRAPPERS:
        if any(cls.__name__ == name and cls.__module__.startswith(package) for cls in classes):
            return kind
    # FSDP1 replaces the parameters of a module that is wrapped after `install` with one of this type.
    if any(type(parameter).__name__ == "FlatParameter" for parameter in model.parameters()):
        return "fsdp1"
    return "dataparallel" if DataParallel in classes else "plain"


def _shards(parameter: nn.Parameter) -> int:
    """Dimensions of the device mesh along which a DTensor is sharded; 0 for any other parameter."""
    if type(parameter).__name__ != "DTensor":
        return 0
    placements: Any = getattr(parameter, "placements", ())
    return sum("Shard" in type(placement).__name__ for placement in placements)


def kind_of_callers() -> str:
    """Kind of the wrapper that is calling the model at the moment, or empty."""
    for name in _calling_modules():
        for kind, prefix in CALLERS:
            if name.startswith(prefix):
                return kind
    return ""


def _calling_modules() -> Iterator[str]:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        yield str(frame.f_globals.get("__name__", ""))


def describe(model: nn.Module, kind: str, comm: str, clock: str) -> dict[str, Any]:
    """The fields of `wire.Hello` about the model and how the job was started."""
    ddps = ddp_modules(model)
    parameters = [parameter for parameter in model.parameters() if not is_lazy(parameter)]
    # A rank of FSDP1 holds nothing but its shard, and the size of the whole is not known here. ZeRO-3 leaves the size.
    counts = [] if kind == "fsdp1" else [int(getattr(each, "ds_numel", each.numel())) for each in parameters]
    return {
        "model": fit(_class_name(model)),
        "kind": kind,
        "comm": comm,
        "clock": clock,
        "device": fit(str(parameters[0].device)) if parameters else "",
        "ddp": {name: fit(str(getattr(ddps[0], name, ""))) for name in _DDP_SETTINGS} if ddps else {},
        "parameters": sum(counts),
        "parameter_bytes": sum(
            count * parameter.element_size() for count, parameter in zip(counts, parameters, strict=False)
        ),
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


def _class_name(model: nn.Module) -> str:
    """Name of the user's class, without wrappers around it."""
    inner: Any = model
    while True:
        classes = type(inner).__mro__
        names = {cls.__name__ for cls in classes}
        if (compiled := uncompiled(inner)) is not None:
            inner = compiled
        elif names & _OUTER and isinstance(getattr(inner, "module", None), nn.Module):
            inner = inner.module
        else:
            break
    # `fully_shard` and `replicate` derive a class from one of their own and the user's.
    own = [place for place, cls in enumerate(classes) if cls.__name__ in ("FSDPModule", "DDP")]
    return classes[own[-1] + 1 if own else 0].__name__


def not_wrapped(kind: str) -> str:
    """Text of a note if a model of this kind trains on several ranks without a wrapper, or empty."""
    world_size = identify().world_size
    return NOT_WRAPPED.format(world_size=world_size) if world_size > 1 and kind == "plain" else ""


def remarks(model: nn.Module, kind: str, clock: str) -> list[tuple[str, str]]:
    """Notes on the model for the user: (kind, text)."""
    found = []
    if kind in SAME_SAMPLES:
        found.append(("same-samples", NO_THROUGHPUT))
    if kind == "dataparallel":
        found.append(("dataparallel", DATAPARALLEL))
    if clock == "host" and any(parameter.device.type == "cuda" for parameter in model.parameters()):
        found.append(("host-clock", HOST_CLOCK))
    return found
