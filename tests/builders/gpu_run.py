"""Runs with GPU readings."""

from __future__ import annotations

from tests.builders.fake_rank import make_beat, make_gpu, make_gpus
from tests.builders.synthetic_run import SECOND

HOT = {"sm_mhz": 1110, "temperature_c": 89, "throttle": ["hw_slowdown", "sw_thermal_slowdown"]}
CAPPED = {"sm_mhz": 1600, "throttle": ["sw_power_cap"]}


def read_gpus(state, readings=30, begin_ns=0, **changed_by_rank):
    """Apply one GPU reading a second of every rank; `r3=HOT` changes those of rank 3, a list changes them in turn."""
    for second in range(readings):
        mono_ns = begin_ns + (second + 1) * SECOND
        for rank in state.ranks:
            changes = changed_by_rank.get(f"r{rank}", {})
            changes = changes[second % len(changes)] if isinstance(changes, list) else changes
            changes = changes if isinstance(changes, tuple) else (changes,)
            gpus = [
                make_gpu(**{"device": f"cuda:{place}", "uuid": f"GPU-{rank}-{place}", **change})
                for place, change in enumerate(changes)
            ]
            state.apply(make_gpus(rank, gpus, seq=10 + second, mono_ns=mono_ns), mono_ns)
    for rank in state.ranks:
        state.apply(make_beat(rank, seq=10 + readings, mono_ns=2 * SECOND, step=60, phase=1), state.now_ns)
    return state
