"""How the job was started, as far as it helps to run it again: the command line, and variables of known names.

What looks like a secret is left out. Read once, when a model is described.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from typing import TYPE_CHECKING, Final

from ddpwatch.wire import fit
from ddpwatch.wire.fields import MAX_ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

COMMAND_CHARS: Final = 1000
VALUE_CHARS: Final = 80
"""Of one variable: longer values are paths, and their beginning tells enough …"""
PATH: Final = "DDPWATCH_DATA"
PATH_CHARS: Final = 200
"""… but for the one that says where the data are: it is there to be told."""
ENVIRONMENT_CHARS: Final = 2000
"""Of all of them: this goes out with every greeting."""
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
    """The variables that matter and are set; few enough, and short enough, for a greeting."""
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
    """The script and its arguments as one would type them; what options that sound like secrets are given is hidden."""
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
    """Without the user and password of an address."""
    return _USER_IN_URL.sub(rf"\1{HIDDEN}@", text)
