"""Description of the model and of how the job was started, and notes on obvious mistakes.

The command line and known environment variables help to run the job again; anything that looks like a secret is left
out.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from ddpwatch.agent.registration import identify
from ddpwatch.wire import MAX_ENVIRONMENT, fit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COMMAND_CHARS: Final = 1000
VALUE_CHARS: Final = 80
"""Characters kept of a variable; longer values are mostly paths, whose beginning is enough."""
PATH: Final = "DDPWATCH_DATA"
PATH_CHARS: Final = 200
"""Characters kept of the path to the data, which is set to be shown."""
ENVIRONMENT_CHARS: Final = 2000
"""Characters of all names and values together, because every `Hello` has them."""
HIDDEN: Final = "***"
_NAMES: Final = frozenset(
    {
        "ACCELERATE_MIXED_PRECISION", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING",
        "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "FI_PROVIDER", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE",
        "MASTER_ADDR", "MASTER_PORT", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "NVIDIA_VISIBLE_DEVICES",
        "OMP_NUM_THREADS", "OMP_PROC_BIND", "KMP_AFFINITY", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
        "PYTHONHASHSEED", "SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION",
        "SLURM_NNODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_GPUS_ON_NODE", "WORLD_SIZE", PATH,
    }
)  # fmt: skip
_PREFIXES: Final = ("GLOO_", "NCCL_", "TORCH_", "TORCHELASTIC_")
_SECRET: Final = re.compile(r"key|token|secret|passw|passphrase|credential|auth|cookie|signature", re.IGNORECASE)
_USER_IN_URL: Final = re.compile(r"(\w+://)[^/@\s]+@")


def environment(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Known variables that are set, limited in number and length."""
    kept: dict[str, str] = {}
    left = ENVIRONMENT_CHARS
    for name in sorted(variables):
        if not (name in _NAMES or name.startswith(_PREFIXES)) or _SECRET.search(name):
            continue
        value = fit(_masked_text(variables[name]), PATH_CHARS if name == PATH else VALUE_CHARS)
        left -= len(name) + len(value)
        if left < 0 or len(kept) == MAX_ENVIRONMENT:
            break
        kept[fit(name)] = value
    return kept


def command(arguments: Sequence[str] | None = None) -> str:
    """The script and its arguments as a shell command, with the values of options that look like secrets hidden."""
    shown: list[str] = []
    hides_next = False
    for argument in sys.argv if arguments is None else arguments:
        name, equals, _ = argument.partition("=")
        if hides_next and not argument.startswith("--"):
            shown.append(HIDDEN)
        elif equals and _SECRET.search(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(shlex.quote(_masked_text(argument)))
        hides_next = argument.startswith("-") and not equals and _SECRET.search(argument) is not None
    return fit(" ".join(shown), COMMAND_CHARS)


def _masked_text(text: str) -> str:
    """Hide the user and password in URLs."""
    return _USER_IN_URL.sub(rf"\1{HIDDEN}@", text)


DATAPARALLEL: Final = (
    "nn.DataParallel drives all GPUs from one process: it copies the model to them every step and shares one Python "
    "interpreter, so it scales badly. DistributedDataParallel runs one process a GPU and overlaps the gradient "
    "exchange with backward; it is faster even on one machine."
)
NOT_WRAPPED: Final = (
    "The model is not wrapped in DistributedDataParallel although the job has {world_size} ranks. "
    "Gradients are not averaged, so each rank trains a model of its own."
)
HOST_CLOCK: Final = (
    "Times are taken by the host's clock. On a GPU the host runs ahead, so phases show when work was queued, "
    "not when it ran; step time and throughput are right."
)
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
            f"DistributedDataParallel; it was given a {type(model).__name__}."
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
    while isinstance(inner, DistributedDataParallel | DataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner._orig_mod if hasattr(inner, "_orig_mod") else inner.module
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
    }


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
