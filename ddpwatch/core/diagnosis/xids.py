"""Xid errors of the NVIDIA driver: NVIDIA's name for each, which can be searched for, its severity and advice."""

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
LINKS: Final = "Check the links (nvidia-smi nvlink -e), and exclude the host until they are fixed."
ENDED: Final = "Not an error by itself: a process that used the GPU was terminated or failed before; look for that."
LOOK_UP: Final = "Look up its number in NVIDIA's Xid documentation, and its lines in dmesg."

XIDS: Final[dict[int, tuple[str, Severity, str]]] = {
    13: ("graphics engine exception", Severity.WARNING, FAULT),
    31: ("GPU memory page fault", Severity.WARNING, FAULT),
    43: ("GPU stopped processing", Severity.INFO, ENDED),
    45: ("preemptive cleanup, due to previous errors", Severity.INFO, ENDED),
    48: ("double bit ECC error", Severity.CRITICAL, RESET),
    63: ("ECC page retirement or row remapping recording event", Severity.WARNING, RESET),
    64: ("ECC page retirement or row remapper recording failure", Severity.CRITICAL, RESET),
    74: ("NVLink error", Severity.CRITICAL, LINKS),
    79: ("GPU has fallen off the bus", Severity.CRITICAL, RESET),
    94: ("contained ECC error", Severity.WARNING, RESET),
    95: ("uncontained ECC error", Severity.CRITICAL, RESET),
    119: ("GSP RPC timeout", Severity.CRITICAL, RESET),
    120: ("GSP error", Severity.CRITICAL, RESET),
}


def xid_meaning(code: int) -> tuple[str, Severity, str]:
    """NVIDIA's name of an Xid error, its severity, and advice."""
    return XIDS.get(code, ("driver or hardware error", Severity.WARNING, LOOK_UP))
