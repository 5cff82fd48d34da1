"""The rules, in the order in which they are asked. A new one is a file here and a line in `DETECTORS`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core.detectors.comm_share import COMM_SHARE
from ddpwatch.core.detectors.data_bound import DATA_BOUND
from ddpwatch.core.detectors.desync import DESYNC
from ddpwatch.core.detectors.drift import DRIFT
from ddpwatch.core.detectors.gpu_error import GPU_ERROR
from ddpwatch.core.detectors.gpu_idle import GPU_IDLE
from ddpwatch.core.detectors.gpu_throttle import GPU_THROTTLE
from ddpwatch.core.detectors.lossy import LOSSY
from ddpwatch.core.detectors.memory import MEMORY
from ddpwatch.core.detectors.rank_failed import RANK_FAILED
from ddpwatch.core.detectors.rank_lost import RANK_LOST
from ddpwatch.core.detectors.same_data import SAME_DATA
from ddpwatch.core.detectors.slow_link import SLOW_LINK
from ddpwatch.core.detectors.slowdown import SLOWDOWN
from ddpwatch.core.detectors.stall import STALL
from ddpwatch.core.detectors.straggler import STRAGGLER
from ddpwatch.core.detectors.timeout import TIMEOUT
from ddpwatch.core.detectors.uneven_batch import UNEVEN_BATCH

if TYPE_CHECKING:
    from ddpwatch.core.detectors.context import Detector

DETECTORS: Final[tuple[Detector, ...]] = (
    STRAGGLER,
    COMM_SHARE,
    SLOW_LINK,
    DATA_BOUND,
    SLOWDOWN,
    UNEVEN_BATCH,
    SAME_DATA,
    DRIFT,
    MEMORY,
    GPU_THROTTLE,
    GPU_ERROR,
    GPU_IDLE,
    RANK_LOST,
    RANK_FAILED,
    STALL,
    DESYNC,
    TIMEOUT,
    LOSSY,
)
