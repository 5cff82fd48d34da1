"""Xid errors of the NVIDIA driver: the name in NVIDIA's Xid catalog, which can be searched for, severity and advice."""

from __future__ import annotations

from typing import Final

from ddpwatch.core.alerts.model import Severity

RESET: Final = (
    "Exclude the GPU, reset it (nvidia-smi -r) or reboot the host; if the error comes back, have it replaced."
)
FAULT: Final = (
    "Usually an illegal memory access in the script or in a custom kernel: run it with CUDA_LAUNCH_BLOCKING=1 or under "
    "compute-sanitizer; if it does not happen on another GPU, test this one."
)
REMAP: Final = (
    "The GPU replaces the bad memory at its next reset: the job can go on, reset the GPU when it ends (nvidia-smi -r), "
    "and exclude it if there are more."
)
CONTAINED: Final = "Only the process that hit it is lost: restart the job, and exclude the GPU if it happens again."
LINKS: Final = "Check the links (nvidia-smi nvlink -e), and exclude the host until they are fixed."
ENDED: Final = "Not an error by itself: a process that used the GPU was terminated or failed before; look for that."
LOOK_UP: Final = "Look up its number in NVIDIA's Xid documentation, and its lines in dmesg."

XIDS: Final[dict[int, tuple[str, Severity, str]]] = {
    13: ("Graphics Engine Exception", Severity.WARNING, FAULT),
    31: ("GPU memory page fault", Severity.WARNING, FAULT),
    43: ("GPU stopped processing", Severity.INFO, ENDED),
    45: ("Preemptive cleanup, due to previous errors", Severity.INFO, ENDED),
    48: ("Double Bit ECC Error", Severity.CRITICAL, RESET),
    63: ("GPU memory remapping event", Severity.WARNING, REMAP),
    64: ("GPU memory remapping failure", Severity.CRITICAL, RESET),
    74: ("NVLINK Error", Severity.CRITICAL, LINKS),
    79: ("GPU has fallen off the bus", Severity.CRITICAL, RESET),
    94: ("Contained memory error", Severity.WARNING, CONTAINED),
    95: ("Uncontained memory error", Severity.CRITICAL, RESET),
    119: ("GSP RPC Timeout", Severity.CRITICAL, RESET),
    120: ("GSP Error", Severity.CRITICAL, RESET),
}


def xid_meaning(code: int) -> tuple[str, Severity, str]:
    """NVIDIA's name of an Xid error, its severity, and advice."""
    return XIDS.get(code, ("driver or hardware error", Severity.WARNING, LOOK_UP))
