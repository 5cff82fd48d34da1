"""What the steps mean across ranks: own work, waiting, wire, and the all-reduce share.

Ranks are aligned by step index; clocks of different hosts are never compared. In synchronous training all step times
are equal and only `self` shows the slow rank. Ranks meet twice in a step, before the forward pass and after backward;
at each meeting the time that even the last to arrive spends in `sync` is the wire's, the rest is waiting. Where ranks
are missing, wire and waiting cannot be told apart and stay None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core.ring import CAPACITY_STEPS, COLUMN
from ddpwatch.wire import EVALUATED, PAUSED, PHASES, SKIPPED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.rank import RankState
    from ddpwatch.core.ring import IntArray
    from ddpwatch.core.state import RunState

WINDOW_STEPS: Final = 50
"""Figures are over at most this many of the latest aligned steps."""
ENOUGH_STEPS: Final = 10
"""Steps with a pause, an evaluation or a skipped update are left out if at least this many others are near."""
_NEAR_STEPS: Final = 2 * WINDOW_STEPS
_UNUSUAL: Final = SKIPPED | PAUSED | EVALUATED
_PHASE_ROWS: Final = [COLUMN[f"{phase}_ns"] for phase in PHASES]


@dataclass(frozen=True)
class RankFigures:
    """Medians of one rank over the window, in nanoseconds."""

    rank: int
    step_ns: float
    self_ns: float
    """Own work: the step without `sync`."""
    data_ns: float
    forward_ns: float
    backward_ns: float
    sync_ns: float
    optimizer_ns: float
    other_ns: float
    wait_ns: float | None
    """Part of `sync` spent waiting for slower ranks; None = unproven, a rank is missing."""
    batch: int | None
    """Largest micro-batch; None = could not be told."""


@dataclass(frozen=True)
class Figures:
    """The job over its last aligned steps."""

    first_step: int
    last_step: int
    steps: int
    """How many steps the figures stand on."""
    complete: bool
    """Whether all ranks of the world are in; if not, what compares ranks or adds them up is None."""
    step_ns: float
    """Median over steps of the mean over ranks."""
    samples_per_s: float | None
    effective_batch: int | None
    """Samples of all ranks in one step, accumulation included."""
    share: float
    """All-reduce share: mean sync over mean step."""
    wire_share: float | None
    wait_share: float | None
    """`wire_share + wait_share == share`."""
    overlap: float | None
    """Part of the gradient all-reduce hidden behind computing; None = bucket timing is off."""
    ranks: dict[int, RankFigures]


def measure(state: RunState) -> Figures | None:
    """The figures over the last steps that all ranks have; None where there are none: unproven, not guessed."""
    ranks = together(state)
    window = window_steps(ranks)
    if not len(window):
        return None
    table = np.stack([rank.steps.at(window) for rank in ranks])
    phases_ns = table[:, _PHASE_ROWS]
    step_ns = phases_ns.sum(axis=1)
    sync_ns = table[:, COLUMN["sync_ns"]]
    wire_ns, wait_ns = split(sync_ns, table[:, COLUMN["presync_ns"]])
    complete = len(ranks) == state.world_size
    samples, samples_per_s = _throughput(table[:, COLUMN["samples"]], step_ns) if complete else (None, None)
    mean_step_ns = max(float(step_ns.mean()), 1.0)
    share = float(sync_ns.mean()) / mean_step_ns
    wire_share = float(wire_ns.mean()) / mean_step_ns if complete else None
    return Figures(
        first_step=int(window[0]),
        last_step=int(window[-1]),
        steps=len(window),
        complete=complete,
        step_ns=float(np.median(step_ns.mean(axis=0))),
        samples_per_s=samples_per_s,
        effective_batch=samples,
        share=share,
        wire_share=wire_share,
        wait_share=None if wire_share is None else share - wire_share,
        overlap=_overlap(table),
        ranks=_per_rank(ranks, table, wait_ns if complete else None),
    )


def split(sync_ns: IntArray, presync_ns: IntArray) -> tuple[IntArray, IntArray]:
    """Wire per step and waiting per rank and step, from sync as (rank, step). They add up to sync exactly.

    Each meeting has its own last to arrive. Several backward passes in a step are one meeting here, so that with them
    wire is what the network costs at the most.
    """
    wire_ns = presync_ns.min(axis=0) + (sync_ns - presync_ns).min(axis=0)
    return wire_ns, sync_ns - wire_ns


def together(state: RunState) -> list[RankState]:
    """The ranks that are compared: all that were heard, without those that left while the others trained on.

    A rank that ended or fell silent within the window still counts, so that the last figures of a run that ends, or
    hangs, stay those of the whole world.
    """
    heard = [rank for rank in state.ranks.values() if rank.sign_ns is not None]
    live = {rank.rank for rank in heard if state.condition(rank) in {"ok", "paused"}}
    front = max((rank.steps.newest for rank in heard if rank.rank in live), default=-1)
    return [rank for rank in heard if rank.rank in live or rank.steps.newest > front - WINDOW_STEPS]


def window_steps(ranks: Sequence[RankState]) -> IntArray:
    """Indices of the steps to stand on: the last `WINDOW_STEPS` that all these ranks have, never step 0.

    Step 0 holds warming up and bucket building. Unusual steps are left out while enough others are near.
    """
    newest = min((rank.steps.newest for rank in ranks), default=-1)
    aligned = np.arange(max(1, newest - CAPACITY_STEPS + 1), newest + 1, dtype=np.int64)
    for rank in ranks:
        aligned = aligned[rank.steps.holds(aligned)]
    near = aligned[-_NEAR_STEPS:]
    usual = np.ones(len(near), dtype=np.bool_)
    for rank in ranks:
        usual &= rank.steps.column("flags", near) & _UNUSUAL == 0
    chosen = near[usual] if usual.sum() >= ENOUGH_STEPS else near
    return chosen[-WINDOW_STEPS:]


def _throughput(samples: IntArray, step_ns: IntArray) -> tuple[int | None, float | None]:
    """Median samples in a step and per second, over the steps whose samples every rank could tell."""
    told = (samples > 0).all(axis=0)
    if not told.any():
        return None, None
    in_step = samples[:, told].astype(np.float64).sum(axis=0)
    seconds = np.maximum(step_ns[:, told].mean(axis=0), 1.0) / 1e9
    return int(np.median(in_step)), float(np.median(in_step / seconds))


def _overlap(table: IntArray) -> float | None:
    """Only the gradient all-reduce can overlap: what `sync` spends before the forward pass is not held against it."""
    busy_ns = table[:, COLUMN["busy_ns"]].astype(np.float64)
    known = busy_ns > 0
    if not known.any():
        return None
    exposed_ns = np.maximum(table[:, COLUMN["sync_ns"]] - table[:, COLUMN["presync_ns"]], 0)
    return float(np.clip(1.0 - exposed_ns[known].sum() / busy_ns[known].sum(), 0.0, 1.0))


def _per_rank(ranks: Sequence[RankState], table: IntArray, wait_ns: IntArray | None) -> dict[int, RankFigures]:
    phases_ns = np.median(table[:, _PHASE_ROWS], axis=2)
    step_ns = table[:, _PHASE_ROWS].sum(axis=1)
    sync_ns = table[:, COLUMN["sync_ns"]]
    steps = np.median(step_ns, axis=1)
    selves = np.median(step_ns - sync_ns, axis=1)
    waits = None if wait_ns is None else np.median(wait_ns, axis=1)
    batches = np.median(table[:, COLUMN["batch"]], axis=1)
    return {
        rank.rank: RankFigures(
            rank=rank.rank,
            step_ns=float(steps[row]),
            self_ns=float(selves[row]),
            **{f"{phase}_ns": float(phases_ns[row, column]) for column, phase in enumerate(PHASES)},
            wait_ns=None if waits is None else float(waits[row]),
            batch=int(batches[row]) or None,
        )
        for row, rank in enumerate(ranks)
    }
