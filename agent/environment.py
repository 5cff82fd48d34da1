"""Environment variables and command line of a job, published so that it can be run again; secrets are hidden."""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import TYPE_CHECKING, Final

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
