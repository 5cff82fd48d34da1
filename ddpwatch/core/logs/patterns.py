"""All lines that are known, from torch 1.13 on, and how to see fast that a line is none of them."""

from __future__ import annotations

from typing import Final

from ddpwatch.core.logs.collectives import COLLECTIVES
from ddpwatch.core.logs.surroundings import CAUSES, REPORTS

SHAPES: Final = (*CAUSES, *COLLECTIVES, *REPORTS)
"""In the order in which they are tried; a line is the first of them that fits."""

GATES: Final = (
    "NCCL", "nccl", "atchdog", "ollective", "imed out", "imeout", "GIL", "Received a ", "remote error detected",
    "data inconsistency", "ging ranks", "launched", "onnection ", "Got completion", "Read error", "Socket closed",
    "Barrier", "exitcode", " closing signal ", "Root Cause (", "Other Failures:", "(local_rank: ", "Signal ",
    "oom_kill", "oom-kill", "CANCELLED", "finished reduction", "Parameter ", "with sizes [", "DDP expects",
    "ut of memory", "CUDA error", "NVRM: Xid", "Fatal Python", "Error", "Exception", "Interrupt", "c10d",
    "dump debug info", "-- Process ", "death signal",
)  # fmt: skip
"""A line without any of these is of no interest. Every shape's hint contains one, so that most lines cost only this."""
