"""Private names of torch: every one that the agent uses, what it is for, and what is missing without it.

No other file of the agent has a private name of torch in it. A name that the torch at hand lacks costs one measurement
and never the others. As a program it prints what is missing as JSON, for `ddpwatch doctor`.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import dataloader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class PrivateName(NamedTuple):
    """A private name of torch. It was found in torch 2.4.1, 2.13.0 and 2.15.0 unless `since` or `build` excludes it."""

    name: str
    """Path of the name. An attribute of instances follows their class."""
    use: str
    without: str
    """What is missing where torch lacks the name."""
    since: tuple[int, int] = (2, 4)
    """Oldest torch known to have it."""
    build: str = ""
    """Which builds of torch have it: `distributed`, `cuda`, or all."""


_DDP: Final = "torch.nn.parallel.DistributedDataParallel"
_C10D: Final = "torch._C._distributed_c10d"
_ITERATOR: Final = "torch.utils.data.dataloader._BaseDataLoaderIter"
_NO_FORWARD: Final = "DDP's communication before forward counts as forward"
_NO_GRAPH: Final = "torch.compile(DDP(model)) breaks its graph twice more"
_NO_HANGS: Final = "hangs show neither the operation nor the ranks that have not joined it"
_NO_SAVES: Final = "torch.save counts as other, or is timed only where a script calls it by that name"
_SLOWER: Final = "the public function is called, which takes longer"

NAMES: Final = (
    PrivateName(f"{_DDP}._pre_forward", "begins forward, after DDP's own communication", _NO_FORWARD),
    PrivateName(f"{_DDP}._post_forward", "ends forward, and hooks the outputs for backward", _NO_FORWARD),
    PrivateName(
        "torch.nn.parallel.distributed._to_kwargs", "begins the copy of the inputs to the GPU",
        "the copy of the inputs to the GPU counts as sync",
    ),
    PrivateName(
        f"{_DDP}._register_builtin_comm_hook", "learns of DDP's built-in communication hooks",
        "a built-in communication hook is reported as none", build="distributed",
    ),
    PrivateName(
        f"{_DDP}._comm_hooks", "keeps ddpwatch's own hook out of torch.save",
        'install(comm="buckets") measures no buckets',
    ),
    PrivateName(
        "torch.autograd.Variable._execution_engine.queue_callback", "ends backward, and brackets DDP's wait",
        "backward and DDP's all-reduce count as other",
    ),
    PrivateName(
        "torch._C._current_autograd_node", "recognizes autograd's threads, and backward inside of backward",
        "with reentrant checkpointing, or collectives in backward on a GPU, sync counts as backward",
    ),
    PrivateName(
        "torch._C._is_tracing", "leaves calls inside of torch.jit.trace alone",
        "torch.jit.trace of a watched model prints a warning",
    ),
    PrivateName("torch.Tensor._backward_hooks", "hooks an output without a handle", _SLOWER),
    PrivateName("torch._C._functions.AccumulateGrad._register_hook_dict", "the same", _SLOWER),
    PrivateName(_ITERATOR, "times the DataLoader", "waits for the DataLoader count as other"),
    PrivateName(f"{_ITERATOR}._num_yielded", "recognizes the first batch of an epoch", "epochs are not counted"),
    PrivateName(f"{_ITERATOR}._index_sampler", "describes the sampler", "a wrong sampler is not found"),
    PrivateName(f"{_ITERATOR}._num_workers", "describes the DataLoader", "the number of workers is unknown"),
    PrivateName(f"{_ITERATOR}._pin_memory", "the same", "advice on a slow DataLoader is less exact"),
    PrivateName("torch.serialization._save", "times torch.save", _NO_SAVES),
    PrivateName("torch.serialization._legacy_save", "times torch.save in the old format", _NO_SAVES),
    PrivateName("torch.serialization._open_zipfile_writer_file", "times the end of torch.save", _NO_SAVES),
    PrivateName("torch.serialization._open_zipfile_writer_buffer", "the same", _NO_SAVES),
    PrivateName(
        "torch.distributed.checkpoint.state_dict_saver._save_state_dict", "times torch.distributed.checkpoint.save",
        "torch.distributed.checkpoint.save counts as other", build="distributed",
    ),
    PrivateName(
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup", "times FSDP2's waits on a GPU",
        "FSDP2's waits on a GPU count as forward and backward", since=(2, 6), build="distributed",
    ),
    PrivateName(
        "torch.distributed._composable", "names replicate, and FSDP2 before 2.6",
        "replicate is named by the script's line", build="distributed",
    ),
    PrivateName(
        "torch._C._dynamo.eval_frame.set_code_exec_strategy", "keeps wrappers out of compiled graphs", _NO_GRAPH,
        since=(2, 7),
    ),
    PrivateName("torch._C._dynamo.eval_frame._FrameExecStrategy", "the same", _NO_GRAPH, since=(2, 7)),
    PrivateName("torch._C._dynamo.eval_frame._FrameAction", "the same", _NO_GRAPH, since=(2, 7)),
    PrivateName(
        "torch.distributed.distributed_c10d._world", "lists the process groups", _NO_HANGS, build="distributed"
    ),
    PrivateName(
        f"{_C10D}.ProcessGroup._get_sequence_number_for_group", "counts collectives", _NO_HANGS, build="distributed"
    ),
    PrivateName(
        f"{_C10D}._dump_fr_trace", "reads the flight recorder of gloo",
        "hangs with gloo show neither the operation nor whether a rank waits in it", since=(2, 8), build="distributed",
    ),
    PrivateName(
        f"{_C10D}._dump_nccl_trace", "reads the flight recorder of NCCL",
        'hangs with NCCL show less, and install(comm="timing") does nothing', build="cuda",
    ),
    PrivateName(
        f"{_C10D}.ProcessGroup._enable_collectives_timing", "lets NCCL time its all-reduces",
        'install(comm="timing") does nothing', build="cuda",
    ),
    PrivateName(
        f"{_C10D}.ProcessGroup._device_types", "finds the backend of a group",
        "a hang with NCCL shows neither the timeout nor the watchdog's error", build="distributed",
    ),
    PrivateName(
        f"{_C10D}.ProcessGroup._get_backend", "finds the backend of a group",
        'a hang shows no timeout, and install(comm="buckets") measures no buckets', build="distributed",
    ),
    PrivateName(
        f"{_C10D}.Backend.Options._timeout", "reads the timeout of a group",
        "a hang may show no timeout", since=(2, 13), build="distributed",
    ),
    PrivateName(
        f"{_C10D}.ProcessGroup._end_coalescing", "times blocking collectives on a GPU",
        "coalesced collectives on a GPU are no sync points", build="cuda",
    ),
    PrivateName(
        f"{_C10D}.ProcessGroup._allgather_base", "the same",
        "all_gather_into_tensor on a GPU is no sync point", build="cuda",
    ),
    PrivateName(
        f"{_C10D}.ProcessGroup._reduce_scatter_base", "the same",
        "reduce_scatter_tensor on a GPU is no sync point", build="cuda",
    ),
    PrivateName(
        "torch.distributed._functional_collectives.wait_tensor", "times functional collectives and DTensor",
        "functional collectives are no sync points", build="distributed",
    ),
    PrivateName(
        "torch.distributed.distributed_c10d._get_default_store", "lets the ranks of a job find each other",
        "the store is taken from torch's table of process groups", build="distributed",
    ),
    PrivateName("torch._C._cuda_getDevice", "reads the current device", _SLOWER, build="cuda"),
    PrivateName("torch._C._cuda_isCurrentStreamCapturing", "recognizes graph capture", _SLOWER, build="cuda"),
    PrivateName("torch._C._cuda_getCurrentStream", "identifies the current stream", _SLOWER, build="cuda"),
    PrivateName("torch._C._CudaEventBase", "records and reads CUDA events", _SLOWER, build="cuda"),
)  # fmt: skip
"""All but two that most modules do not have: `_orig_mod` of a compiled module, and `_ddp_params_and_buffers_to_ignore`,
by which a script sets parameters apart."""

_core: Any = torch._C

# DDP. The methods are wrapped by name.

PRE_FORWARD: Final = "_pre_forward"
POST_FORWARD: Final = "_post_forward"
COPY_INPUTS: Final = "_to_kwargs"
REGISTER_BUILT_IN_HOOK: Final = "_register_builtin_comm_hook"


def comm_hooks(ddp: Any) -> list[tuple[Any, Any]] | None:
    """The list in which DDP keeps communication hooks with their states."""
    found: list[tuple[Any, Any]] | None = getattr(ddp, "_comm_hooks", None)
    return found


def ignored_parameters(module: Any) -> frozenset[str]:
    """Names of the parameters that the script makes DDP ignore."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def uncompiled(module: Any) -> Any:
    """The module inside of `torch.compile(module)`; None if it is not compiled."""
    return getattr(module, "_orig_mod", None)


# Autograd.

_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
HAS_CALLBACKS: Final = hasattr(_engine, "queue_callback")
"""Whether autograd can call a function at the end of a backward pass."""
current_autograd_node: Final[Callable[[], Any]] = getattr(_core, "_current_autograd_node", lambda: None)
"""The node whose backward runs on this thread, if any."""
is_tracing: Final[Callable[[], bool]] = getattr(_core, "_is_tracing", lambda: False)
"""Whether torch.jit.trace is running."""
_HAS_HOOK_DICT: Final = hasattr(_core._functions.AccumulateGrad, "_register_hook_dict")


def queue_callback(callback: Callable[[], Any]) -> None:
    """Call a function at the end of the backward pass that is running on this thread."""
    _engine.queue_callback(callback)


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
    """`tensor.register_hook` without the unused handle, which takes a fifth of the time.

    Torch never uses the key -1, so hooks of the user do not collide with it.
    """
    if not _HAS_HOOK_DICT or tensor._backward_hooks is not None or type(tensor) is not Tensor:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # torch does not type it
        return
    hooks: Any = OrderedDict()
    tensor._backward_hooks = hooks
    node: Any = tensor.grad_fn
    node._register_hook_dict(tensor)
    hooks[-1] = hook


# DataLoader.

LOADER_ITERATOR: Final[Any] = getattr(dataloader, "_BaseDataLoaderIter", None)
"""Base class of the DataLoader's iterators."""


def batches_yielded(iterator: Any) -> int:
    """Batches that an iterator of a DataLoader has yielded; -1 if unknown."""
    return int(getattr(iterator, "_num_yielded", -1))


def index_sampler(iterator: Any) -> Any:
    """The sampler of an iterator of a DataLoader, by batch or by sample."""
    return getattr(iterator, "_index_sampler", None)


def loader_workers(iterator: Any) -> int:
    """Number of worker processes of an iterator of a DataLoader; 0 if unknown."""
    return int(getattr(iterator, "_num_workers", 0))


def loader_setting(iterator: Any, name: str) -> Any:
    """A setting of a DataLoader by its iterator, such as `pin_memory`, or its `workers`; None = unknown."""
    return getattr(iterator, f"_{name}", None)


# Saves.

HAS_SAVE: Final = hasattr(torch.serialization, "_save")
"""Whether torch.save can be timed where a script has imported it before."""
SAVES: Final = (
    # What torch.save calls, because a script may have imported torch.save itself.
    ("torch.serialization", "", "_save", "torch.save"),
    ("torch.serialization", "", "_legacy_save", "torch.save"),
    ("torch.serialization", "_open_zipfile_writer_file", "__exit__", "torch.save"),
    ("torch.serialization", "_open_zipfile_writer_buffer", "__exit__", "torch.save"),
    # Likewise what torch.distributed.checkpoint.save calls. An asynchronous save blocks only while it copies.
    ("torch.distributed.checkpoint.state_dict_saver", "", "_save_state_dict", "torch.distributed.checkpoint.save"),
    ("torch.distributed.checkpoint.state_dict_saver", "", "async_save", "torch.distributed.checkpoint.async_save"),
    ("torch.distributed.checkpoint", "", "async_save", "torch.distributed.checkpoint.async_save"),
    ("safetensors.torch", "", "save_file", "safetensors.torch.save_file"),
    ("safetensors.torch", "", "_flatten", "safetensors.torch.save_file"),
    ("safetensors.torch", "", "serialize_file", "safetensors.torch.save_file"),
)
"""Functions that save: module, class if any, name, and what a script calls."""


# torch.compile.


def skip_in_compiler(code: Any, *, with_all_it_calls: bool) -> None:
    """Keep torch.compile from compiling this code object, and optionally everything that it calls."""
    compiler: Any = _core._dynamo.eval_frame
    with contextlib.suppress(AttributeError):
        skip, default = compiler._FrameAction.SKIP, compiler._FrameAction.DEFAULT
        strategy = compiler._FrameExecStrategy(skip, skip if with_all_it_calls else default)
        compiler.set_code_exec_strategy(code, strategy)


# Process groups.

LAUNCHES: Final = (
    "allreduce", "allreduce_coalesced", "allgather", "_allgather_base", "allgather_into_tensor_coalesced", "broadcast",
    "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "gather", "scatter",
    "alltoall", "alltoall_base", "barrier", "_end_coalescing",
)  # fmt: skip
"""Methods of `ProcessGroup` that start a collective."""
FSDP_MODULES: Final = (
    "torch.distributed.fsdp._fully_shard._fsdp_param_group",  # from 2.6 on
    "torch.distributed._composable.fsdp._fsdp_param_group",
)
"""Where FSDP2's parameter groups are. Without one, its waits on a GPU count as forward and backward."""
COMPOSABLE: Final = "torch.distributed._composable"
"""Package of `replicate`, and of FSDP2 before 2.6."""
FUNCTIONAL_COLLECTIVES: Final = "torch.distributed._functional_collectives"
"""Module of functional collectives, which scripts import through DTensor and FSDP2."""


def world() -> Any:
    """Torch's tables of process groups."""
    return getattr(getattr(dist, "distributed_c10d", None), "_world", None)


def default_store() -> Any:
    """The store through which the ranks of the job found each other."""
    get: Any = getattr(dist.distributed_c10d, "_get_default_store", None)
    if get is not None:
        return get()
    tables = world()
    return tables.pg_map[tables.default_pg][1]


def sequence_number(group: Any) -> int | None:
    """Collectives started in a group; None if the backend does not count them."""
    try:
        return max(0, int(group._get_sequence_number_for_group()))
    except (AttributeError, RuntimeError):
        return None


def backend_for(group: Any, device: torch.device) -> Any:
    """The backend of a process group for a device."""
    return group._get_backend(device)


def backend_of(group: Any) -> Any:
    """The backend of a process group: the one for GPUs if there are several."""
    devices = getattr(group, "_device_types", None) or [torch.device("cpu")]
    return backend_for(group, next((device for device in devices if device.type == "cuda"), devices[0]))


def timeout_s(group: Any) -> float:
    """Timeout of a process group in seconds. Raises if torch has no such figure."""
    return float(backend_of(group).options._timeout.total_seconds())


def nccl_recorder() -> Callable[..., bytes] | None:
    """Torch's flight recorder of NCCL, which builds without NCCL lack."""
    found: Callable[..., bytes] | None = getattr(_c10d(), "_dump_nccl_trace", None)
    return found


def flight_recorders() -> list[Callable[..., bytes]]:
    """Torch's flight recorders, one for NCCL and one for gloo and others; not every build has both."""
    both = nccl_recorder(), getattr(_c10d(), "_dump_fr_trace", None)
    return [dump for dump in both if dump is not None]


def enable_timing(group: Any) -> bool:
    """Let NCCL time the operations of a group; False if this torch cannot."""
    if not hasattr(group, "_enable_collectives_timing"):
        return False
    group._enable_collectives_timing()
    return True


def _c10d() -> Any:
    return getattr(_core, "_distributed_c10d", None)


# CUDA. Without the Python around the bindings a call takes a fraction of the time.

cuda_device: Final[Callable[[], int]] = getattr(_core, "_cuda_getDevice", torch.cuda.current_device)
cuda_is_capturing: Final[Callable[[], bool]] = getattr(
    _core, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)
cuda_stream_id: Final[Callable[[int], Any]] = getattr(_core, "_cuda_getCurrentStream", torch.cuda.current_stream)
_event_base: Any = getattr(_core, "_CudaEventBase", None)
# Builds without CUDA have a base without methods.
CUDA_EVENT: Final[Any] = _event_base if hasattr(_event_base, "record") else torch.cuda.Event
"""Class whose methods record and read an event; the base of `torch.cuda.Event` if that has them."""


# What is missing.


class MissingName(NamedTuple):
    """A private name that the torch at hand does not have."""

    name: str
    without: str
    since: str
    """Oldest torch that has it."""
    expected: bool
    """Whether this version of torch should have it."""


def missing_names(names: Iterable[PrivateName] = NAMES) -> list[MissingName]:
    """The names that this torch lacks, without those that its build lacks by design."""
    builds = {"": True, "distributed": dist.is_available(), "cuda": bool(torch.version.cuda or torch.version.hip)}
    number = re.match(r"(\d+)\.(\d+)", torch.__version__)
    version = (int(number[1]), int(number[2])) if number else (0, 0)
    return [
        MissingName(each.name, each.without, ".".join(map(str, each.since)), expected=version >= each.since)
        for each in names
        if builds[each.build] and not _exists(each.name)
    ]


_IMPORTED_LATE: Final = (
    FUNCTIONAL_COLLECTIVES, "torch.distributed.checkpoint.state_dict_saver", FSDP_MODULES[0], COMPOSABLE
)  # fmt: skip
"""Modules that a script may never import."""


def _exists(path: str) -> bool:
    if any(path.startswith(module) and module not in sys.modules for module in _IMPORTED_LATE):
        return True  # not imported for this question, because that takes 0.1 s
    found: Any = torch
    for part in path.split(".")[1:]:
        # What `__init__` assigns is an attribute of instances only.
        init = getattr(getattr(found, "__init__", None), "__code__", None)
        if not hasattr(found, part):
            return init is not None and part in init.co_names
        found = getattr(found, part)
    return True


if __name__ == "__main__":
    json.dump([each._asdict() for each in missing_names()], sys.stdout)
