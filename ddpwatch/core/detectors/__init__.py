"""The rules: one pure function a rule, from a `DetectorContext` to findings.

Begin with `context.py` (what a rule is given), then any rule, then `engine.py` (when rules are evaluated). How a cause
is found lives in `core/diagnosis`, when alerts open and close in `core/alerts`, thresholds in `core/limits.py`.
"""

from __future__ import annotations

from typing import Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.detectors.comm_share import comm_share
from ddpwatch.core.detectors.context import Detector
from ddpwatch.core.detectors.cpu_starvation import cpu_starvation
from ddpwatch.core.detectors.data_bound import data_bound
from ddpwatch.core.detectors.desync import desync
from ddpwatch.core.detectors.drift import drift
from ddpwatch.core.detectors.gpu_error import gpu_error
from ddpwatch.core.detectors.gpu_idle import gpu_idle
from ddpwatch.core.detectors.gpu_throttle import gpu_throttle
from ddpwatch.core.detectors.lossy import lossy
from ddpwatch.core.detectors.memory import memory
from ddpwatch.core.detectors.pauses import pauses
from ddpwatch.core.detectors.rank_failed import rank_failed
from ddpwatch.core.detectors.rank_lost import rank_lost
from ddpwatch.core.detectors.same_data import same_data
from ddpwatch.core.detectors.slow_link import slow_link
from ddpwatch.core.detectors.slowdown import slowdown
from ddpwatch.core.detectors.stall import stall
from ddpwatch.core.detectors.straggler import straggler
from ddpwatch.core.detectors.sync_point import sync_point
from ddpwatch.core.detectors.timeout import timeout
from ddpwatch.core.detectors.uneven_batch import uneven_batch
from ddpwatch.core.detectors.uneven_work import uneven_work

DETECTORS: Final[tuple[Detector, ...]] = (
    Detector(rules.STRAGGLER, straggler, by_step=True),
    Detector(rules.COMM_SHARE, comm_share, by_step=True),
    Detector(rules.SYNC_POINT, sync_point, by_step=True),
    Detector(rules.UNEVEN_WORK, uneven_work, by_step=True),
    Detector(rules.CPU_STARVATION, cpu_starvation, by_step=False, gradual=True),
    Detector(rules.PAUSES, pauses, by_step=True),
    Detector(rules.SLOW_LINK, slow_link, by_step=True),
    Detector(rules.DATA_BOUND, data_bound, by_step=True),
    Detector(rules.SLOWDOWN, slowdown, by_step=True),
    # By time: a rank whose data has ended finishes no more steps.
    Detector(rules.UNEVEN_BATCH, uneven_batch, by_step=False),
    Detector(rules.SAME_DATA, same_data, by_step=True),
    Detector(rules.DRIFT, drift, by_step=True),
    Detector(rules.MEMORY, memory, by_step=False, gradual=True),
    Detector(rules.GPU_THROTTLE, gpu_throttle, by_step=False, gradual=True),
    Detector(rules.GPU_ERROR, gpu_error, by_step=False),
    Detector(rules.GPU_IDLE, gpu_idle, by_step=False, gradual=True),
    Detector(rules.RANK_LOST, rank_lost, by_step=False),
    Detector(rules.RANK_FAILED, rank_failed, by_step=False),
    Detector(rules.STALL, stall, by_step=False),
    Detector(rules.DESYNC, desync, by_step=False),
    Detector(rules.TIMEOUT, timeout, by_step=False),
    Detector(rules.LOSSY, lossy, by_step=False),
)
"""In the order in which they are evaluated and listed."""
