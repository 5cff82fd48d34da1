"""Meaning, severity and advice of the Xid errors of NVIDIA's driver."""

from __future__ import annotations

from typing import Final

from ddpwatch.core.alerts.model import Severity

RESET: Final = "Leave the GPU out, reset it (nvidia-smi -r) or restart the host; if it comes back, have it replaced."
FAULT: Final = (
    "An illegal access of a kernel, most often a bug in the script or in a custom kernel: run it with "
    "CUDA_LAUNCH_BLOCKING=1 or under compute-sanitizer; if another GPU does not show it, test this one."
)
LINKS: Final = "Look at the links (nvidia-smi nvlink -e); leave the host out until they are mended."
ENDED: Final = "Nothing of its own: a process that used the GPU was ended, or failed before; look for that."
LOOK_UP: Final = "Look up its number in the list of Xid errors of the NVIDIA driver, and the lines in dmesg."

XIDS: Final[dict[int, tuple[str, Severity, str]]] = {
    13: ("a kernel of the application failed", Severity.WARNING, FAULT),
    31: ("a kernel of the application accessed memory that is not its own", Severity.WARNING, FAULT),
    43: ("a process on it has stopped", Severity.INFO, ENDED),
    45: ("cleaned up after a process that has ended", Severity.INFO, ENDED),
    48: ("a memory error that cannot be corrected", Severity.CRITICAL, RESET),
    63: ("bad memory is being taken out of use", Severity.WARNING, RESET),
    64: ("bad memory cannot be taken out of use", Severity.CRITICAL, RESET),
    74: ("an error of NVLink", Severity.CRITICAL, LINKS),
    79: ("it has fallen off the bus", Severity.CRITICAL, RESET),
    94: ("a memory error that hit one process only", Severity.WARNING, RESET),
    95: ("a memory error that may have hit any process", Severity.CRITICAL, RESET),
    119: ("its system processor does not answer", Severity.CRITICAL, RESET),
    120: ("an error of its system processor", Severity.CRITICAL, RESET),
}


def xid_meaning(code: int) -> tuple[str, Severity, str]:
    """Meaning of an Xid error of the NVIDIA driver, its severity, and what to do."""
    return XIDS.get(code, ("an error of the driver or the hardware", Severity.WARNING, LOOK_UP))
