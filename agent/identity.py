"""Who this process is in its job."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch.distributed as dist

UNNAMED: Final = "none"
"""What torchrun calls every job that it was given no name for."""


@dataclass(frozen=True)
class Identity:
    """Rank and size as the process group has them, or as the launcher's environment promises them."""

    rank: int
    world_size: int
    local_rank: int | None
    """None = the launcher does not say."""
    attempt: int
    job: str
    backend: str


def joined() -> bool:
    """Whether the job's process group exists."""
    return dist.is_available() and dist.is_initialized()


def identify() -> Identity:
    """This process as it is known now."""
    rank, world_size, backend = _in_group()
    return Identity(
        rank=rank,
        world_size=world_size,
        local_rank=_number("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
        attempt=_number("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT") or 0,
        job=job_name(),
        backend=backend,
    )


def job_name() -> str:
    """The number that the scheduler has given the job, or else what the launcher calls it; empty = neither."""
    array, task = (os.environ.get(f"SLURM_ARRAY_{part}", "") for part in ("JOB_ID", "TASK_ID"))
    if array and task:
        return f"{array}_{task}"  # as squeue has it
    named = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return os.environ.get("SLURM_JOB_ID") or ("" if named == UNNAMED else named)


def _in_group() -> tuple[int, int, str]:
    if joined():
        try:
            return dist.get_rank(), dist.get_world_size(), str(dist.get_backend())
        except (ValueError, AssertionError):
            pass  # the training thread has destroyed the group since the question
    return 0, 1, ""


def peers_promised() -> bool:
    """Whether a launcher says that it started several ranks."""
    return (_number("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE") or 1) > 1


def hosts_promised() -> bool | None:
    """Whether a launcher says that it started ranks on several hosts; None = it does not say."""
    mpi = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    for everywhere, here in (("WORLD_SIZE", "LOCAL_WORLD_SIZE"), mpi):
        world_size, local_size = _number(everywhere), _number(here)
        if world_size and local_size:
            return world_size > local_size
    nodes = _number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
    return None if nodes is None or _number("SLURM_PROCID") is None else nodes > 1


def script_name() -> str:
    """What people call the run unless they say otherwise."""
    stem = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] not in ("", "-c", "-m") else ""
    return os.environ.get("DDPWATCH_RUN_NAME") or stem or "python"


def _number(*names: str) -> int | None:
    for name in names:
        text = os.environ.get(name, "")
        if text.isdecimal():
            return int(text)
    return None
