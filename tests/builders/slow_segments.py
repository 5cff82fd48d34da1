"""Runs in which one rank is slow in one phase after the other, and the part of such a run that a viewer evaluates."""

from __future__ import annotations

import time

import msgspec
import torch

from ddpwatch.core.detectors.straggler import straggler
from ddpwatch.core.limits import DEFAULTS
from tests.builders.synthetic_run import look, make_run

NAP_S = 0.02
WORK_S = 0.005
"""Own work of each rank in a step, so that the noise of a busy machine is small against it."""
SEGMENT = 23
"""Steps in which the slow rank is slow in one phase."""
PHASES = ("data", "forward", "backward", "optimizer", "other")
LIMITS = msgspec.structs.replace(
    DEFAULTS,
    judge=msgspec.structs.replace(DEFAULTS.judge, least_s=0.001, warmup_steps=2),
    # Naps are three quarters of a step. On a busy machine a rank may be slower than the others by more than 5%.
    straggler=msgspec.structs.replace(DEFAULTS.straggler, share=0.3),
)


class Batches(torch.utils.data.Dataset):
    """Samples that take as long as `before` does."""

    def __init__(self, count, before):
        self.count, self.before = count, before

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.before()
        return torch.full((8, 8), float(index % 5)), torch.zeros(8, dtype=torch.long)


class Naps:
    """Sleeps of the slow rank: in each segment in the phase that it is named for."""

    def __init__(self, segments, *, slow):
        self.segments, self.slow, self.number = segments, slow, 0

    def nap(self, phase):
        if phase == "forward":
            time.sleep(WORK_S)
        if self.slow and self.segments[self.number // SEGMENT] == phase:
            time.sleep(NAP_S)

    def batches(self):
        """A DataLoader over all segments."""
        data = Batches(len(self.segments) * SEGMENT, lambda: self.nap("data"))
        return torch.utils.data.DataLoader(data, batch_size=None)

    def next_step(self):
        self.number = min(self.number + 1, len(self.segments) * SEGMENT - 1)


def state_of(answers, segment):
    """The run as a viewer knows it at the end of a segment, of which only this one happened."""
    first = segment * SEGMENT + 1
    steps = {
        rank: [
            msgspec.structs.replace(step, index=step.index - first + 3)
            for step in made
            if first <= step.index < first + SEGMENT - 2
        ]
        for rank, (made, _, _) in enumerate(answers)
    }
    state = make_run(steps)
    for rank, (_, paths, _) in enumerate(answers):
        for seq, path in enumerate(paths, start=4):
            state.apply(msgspec.structs.replace(path, rank=rank, seq=seq), 1)
    return state


def named_stragglers(answers, segments):
    """Ranks and phases that the straggler rule names in each segment."""
    named = {}
    for number, phase in enumerate(segments):
        findings = straggler(look(state_of(answers, number), limits=LIMITS))
        named[phase] = [(finding.ranks, finding.phase) for finding in findings if finding.proven and not finding.ended]
    return named
