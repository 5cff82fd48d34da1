"""Names of the rules, as in TOML files, alerts, sinks and Prometheus, and groups of rules that are treated alike."""

from __future__ import annotations

from typing import Final

STRAGGLER: Final = "straggler"
COMM_SHARE: Final = "comm-share"
SYNC_POINT: Final = "sync-point"
UNEVEN_WORK: Final = "uneven-work"
CPU_STARVATION: Final = "cpu-starvation"
PAUSES: Final = "pauses"
SLOW_LINK: Final = "slow-link"
DATA_BOUND: Final = "data-bound"
SLOWDOWN: Final = "slowdown"
UNEVEN_BATCH: Final = "uneven-batch"
SAME_DATA: Final = "same-data"
DRIFT: Final = "drift"
MEMORY: Final = "memory"
GPU_THROTTLE: Final = "gpu-throttle"
GPU_ERROR: Final = "gpu-error"
GPU_IDLE: Final = "gpu-idle"
RANK_LOST: Final = "rank-lost"
RANK_FAILED: Final = "rank-failed"
STALL: Final = "stall"
DESYNC: Final = "desync"
TIMEOUT: Final = "timeout"
LOSSY: Final = "lossy"

STUCK: Final = frozenset({STALL, DESYNC, TIMEOUT})
"""Rules about ranks that wait in a collective, and about nothing else."""
WAITING: Final = STUCK | {UNEVEN_BATCH}
"""Rules whose findings may be about waiting ranks: a rank without data left keeps the others waiting, too."""
EXITS: Final = frozenset({RANK_LOST, RANK_FAILED})
"""Rules about ranks whose process ended, or whose heartbeats stopped."""
STOPPING: Final = EXITS | STUCK
"""Rules about problems that a job does not recover from: how slow it was matters less."""
