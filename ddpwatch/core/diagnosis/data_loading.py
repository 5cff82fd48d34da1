"""Why a rank waits for its DataLoader: settings, first batches, and the CPU use of its worker processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ddpwatch.core.limits import DataBoundLimits
from ddpwatch.core.units import ms_text, plural

if TYPE_CHECKING:
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.core.state.step_store import IntArray
    from ddpwatch.wire import Loader


class FirstBatches(NamedTuple):
    """Wait for the first batch of each pass over the data, against the wait for later ones."""

    share: float
    """Fraction of all waiting for data that is for first batches."""
    first_ns: float
    later_ns: float
    """Medians."""


def first_batches(state: RunState, window: Window, row: int) -> FirstBatches | None:
    """First batches of one rank; None = fewer than two passes begin in the window, or nothing else happens in it."""
    return _first_batches(state.ranks[window.ranks[row]], window.indices, window.column("data_ns")[row])


def first_batches_of(rank: RankState) -> FirstBatches | None:
    """The same in the steps that are kept of the rank."""
    indices = rank.steps.indices()
    return _first_batches(rank, indices, rank.steps.column("data_ns", indices))


def _first_batches(rank: RankState, indices: IntArray, data_ns: IntArray) -> FirstBatches | None:
    begin = [loader.step for loader in rank.loaders.values()]
    if not len(indices) or sum(step >= indices[0] for step in begin) < 2:
        return None
    starts = np.isin(indices, begin)
    if np.count_nonzero(starts) < 2 or starts.all():
        return None
    return FirstBatches(
        float(data_ns[starts].sum()) / max(float(data_ns.sum()), 1.0),
        float(np.median(data_ns[starts])),
        float(np.median(data_ns[~starts])),
    )


def loading_advice(state: RunState, window: Window, row: int) -> str:
    """The setting to try, from what is measured of this rank; empty = nothing is known of its DataLoader."""
    rank = state.ranks[window.ranks[row]]
    loader = rank.loader
    if loader is None:
        return ""
    advice = _first_batch_advice(loader, first_batches(state, window, row)) or _workers_advice(state, rank, loader)
    on_gpu = rank.hello is not None and rank.hello.device.startswith("cuda")
    if on_gpu and loader.pin_memory is False:
        advice += f"{' ' if advice else ''}pin_memory is off: try pin_memory=True with copies that are non_blocking."
    return advice


def _first_batch_advice(loader: Loader, first: FirstBatches | None) -> str:
    if first is None or first.share < DataBoundLimits.FIRST_BATCH_SHARE or not loader.workers:
        return ""
    lead = f"Most of it is the first batch of each epoch ({ms_text(first.first_ns)}, later {ms_text(first.later_ns)})"
    if loader.persistent_workers:
        return f"{lead}: try longer epochs, or a larger prefetch_factor."
    return f"{lead}, because workers start anew: try persistent_workers=True."


def _workers_advice(state: RunState, rank: RankState, loader: Loader) -> str:
    cores, ranks = _cores(rank), _ranks_on_host(state, rank)
    if not loader.workers:
        suggested = (
            min(max(cores // ranks - 1, 1), DataBoundLimits.MAX_WORKERS) if cores else DataBoundLimits.DEFAULT_WORKERS
        )
        return f"The DataLoader has no workers, so the training thread loads every batch: try num_workers={suggested}."
    used = rank.workers
    if used is None:
        return ""
    lead = plural(loader.workers, "worker")
    if used.queued_percent >= DataBoundLimits.STARVED_PERCENT:
        on = f" ({plural(cores, 'core')} for {plural(ranks, 'rank')})" if cores else ""
        return (
            f"The {lead} waited for a CPU core {used.queued_percent}% of the time{on}: try fewer num_workers, "
            "OMP_NUM_THREADS=1, or more cores per rank."
        )
    if used.cpu_percent < DataBoundLimits.BUSY_PERCENT:
        return (
            f"The {lead} used only {used.cpu_percent}% of a core each, so they wait for storage or the network: "
            "try a local copy, fewer and larger files, or more num_workers, which read at the same time."
        )
    free = free_cores(state, rank)
    lead = f"The {lead} used {used.cpu_percent}% of a core each"
    if free is not None and free < ranks:
        return f"{lead}, and no core is free: try cheaper transforms, or more cores per rank."
    more = loader.workers if free is None else min(loader.workers, int(free) // ranks)
    spare = f", and {plural(int(free), 'core')} of the host are free" if free is not None else ""
    return f"{lead}{spare}: try num_workers={loader.workers + more}."


def free_cores(state: RunState, rank: RankState) -> float | None:
    """Cores that the ranks of its host and their workers leave idle; None = not known."""
    if not (cores := _cores(rank)):
        return None
    used_percent = sum(_cpu_percent(other) for other in state.ranks.values() if other.host == rank.host)
    return max(0.0, cores - used_percent / 100)


def _cpu_percent(rank: RankState) -> float:
    """CPU use of a rank and its workers, in percent of one core."""
    own = rank.beat.cpu_percent if rank.beat is not None else 0.0
    return own + (rank.workers.cpu_percent * rank.workers.workers if rank.workers is not None else 0.0)


def _cores(rank: RankState) -> int:
    return rank.hello.cores if rank.hello is not None else 0


def _ranks_on_host(state: RunState, rank: RankState) -> int:
    return sum(other.host == rank.host for other in state.ranks.values())
