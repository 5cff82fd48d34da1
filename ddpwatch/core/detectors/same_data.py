"""Compares batch checksums between ranks, and checks samplers for missing sharding and set_epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.model import Finding, Severity
from ddpwatch.core.model_kinds import MODEL_PARALLEL, OWN_SAMPLES, kind_of_run
from ddpwatch.core.units import plural, ranks_text

if TYPE_CHECKING:
    from ddpwatch.core.detectors.context import DetectorContext, Evidence
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState
    from ddpwatch.core.state.step_store import IntArray
    from ddpwatch.wire import Loader

RULE: Final = rules.SAME_DATA
WHOLE_DATASET: Final = frozenset({"RandomSampler", "SequentialSampler"})
"""Samplers of torch that iterate over the whole dataset on every rank."""
BATCH_ADVICE: Final = (
    "Shard the dataset: DataLoader(..., sampler=DistributedSampler(dataset)), or split an IterableDataset by rank and "
    "worker. Within a model-parallel group equal batches are correct."
)
EPOCH_ADVICE: Final = "Call sampler.set_epoch(epoch) at the start of every epoch, before iterating over the DataLoader."
SAMPLER_ADVICE: Final = "Use sampler=DistributedSampler(dataset), unless each rank already reads its own files."


def same_data(context: DetectorContext) -> list[Finding]:
    """Ranks train on the same samples, so that they repeat each other's work, or in the same order in every epoch.

    Compares checksums of sampled batches: ranks with equal checksums at the same step had the same batch. Also checks
    that a shuffling DistributedSampler gets `set_epoch`, and that the sampler is distributed: any other iterates over
    the whole dataset on every rank.
    """
    findings = _same_batches(context)
    if not any(finding.proven for finding in findings):
        findings += _sampler(context.state)
    return findings + _set_epoch(context.state)


def _same_batches(context: DetectorContext) -> list[Finding]:
    window = context.window
    if len(window.ranks) < 2 or kind_of_run(context.state) in MODEL_PARALLEL:
        return []
    prints = window.column("fingerprint")
    prints = prints[:, (prints != 0).all(axis=0)]
    sampled = prints.shape[1]
    if sampled < context.limits.same_data.steps:
        return []
    shared = _shared(prints)
    often = np.flatnonzero(shared.sum(axis=1) >= context.limits.same_data.steps)
    if not len(often):
        return []
    ranks = tuple(window.ranks[row] for row in often)
    groups = len(np.unique(prints[often], axis=0))
    # Batches that never change are masks or synthetic data: they prove nothing about the samples.
    varies = bool((prints[often] != prints[often, :1]).any())
    label = "all ranks" if len(ranks) == window.world_size else ranks_text(ranks)
    grouped = f" in {groups} groups" if groups > 1 else ""
    steps = int(shared[often].sum(axis=1).min())
    message = (
        f"{label} train on the same samples{grouped}: equal batches in {steps} of {plural(sampled, 'sampled step')}"
    )
    evidence: Evidence = {"equal_steps": steps, "sampled_steps": sampled, "groups": groups}
    finding = Finding(RULE, Severity.WARNING, "batches", message, BATCH_ADVICE, ranks, evidence=evidence, proven=varies)
    return [finding]


def _shared(prints: IntArray) -> IntArray:
    """By (rank, step): 1 where another rank had the same batch."""
    shared = np.zeros_like(prints)
    for step in range(prints.shape[1]):
        _, group, members = np.unique(prints[:, step], return_inverse=True, return_counts=True)
        shared[:, step] = members[group] > 1
    return shared


def _sampler(state: RunState) -> list[Finding]:
    if state.world_size < 2:
        return []
    found: dict[int, str] = {}
    for rank in state.ranks.values():
        loader = _newest(rank)
        if loader is None or rank.hello is None or rank.hello.kind not in OWN_SAMPLES:
            continue
        if not loader.distributed and loader.replicas == 0 and loader.sampler in WHOLE_DATASET:
            found[rank.rank] = loader.sampler
    if not found:
        return []
    names = " and ".join(sorted(set(found.values())))
    message = f"sampler {names} is not distributed: every rank iterates over the whole dataset, unless that is sharded"
    ranks = () if len(found) == state.world_size else tuple(found)
    evidence: Evidence = {"sampler": names, "ranks": len(found)}
    return [Finding(RULE, Severity.INFO, "sampler", message, SAMPLER_ADVICE, ranks, evidence=evidence)]


def _set_epoch(state: RunState) -> list[Finding]:
    passes = {rank.rank: same for rank in state.ranks.values() if (same := _equal_passes(rank))}
    if not passes:
        return []
    most = max(passes.values())
    message = f"set_epoch() was never called: every epoch has the same order ({most} epochs observed)"
    ranks = () if len(passes) == state.world_size else tuple(passes)
    evidence: Evidence = {"equal_passes": most, "ranks": len(passes)}
    return [Finding(RULE, Severity.WARNING, "set_epoch", message, EPOCH_ADVICE, ranks, evidence=evidence)]


def _equal_passes(rank: RankState) -> int:
    """Passes over the data with an unchanged epoch of the sampler; 0 if it ever changed."""
    newest = _newest(rank)
    if newest is None or not (newest.distributed and newest.shuffle) or newest.sampler_epoch < 0:
        return 0
    passes = [loader for loader in rank.loaders.values() if _identity(loader) == _identity(newest)]
    # Fetching one batch before training begins a pass too, but in the same step and epoch as the real one.
    made = min(len({loader.step for loader in passes}), len({loader.epoch for loader in passes}))
    return made if made > 1 and {loader.sampler_epoch for loader in passes} == {newest.sampler_epoch} else 0


def _newest(rank: RankState) -> Loader | None:
    return rank.loaders[max(rank.loaders)] if rank.loaders else None


def _identity(loader: Loader) -> tuple[str, int, int]:
    """Distinguishes the DataLoaders of a script."""
    return loader.sampler, loader.batch_size, loader.length
