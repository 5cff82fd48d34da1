"""Frames of a synthetic run, as its ranks would publish them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ddpwatch import wire
from ddpwatch.simulator.scenario import simulated_step
from ddpwatch.sources.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpwatch.simulator.scenario import Scenario

SYNC_PATH = 1 << wire.MAX_POINTS + 1 | 1
"""Sequence of one sync point outside DDP, which all ranks leave together."""


def frames(scenario: Scenario, *, flush_steps: int = 5) -> Iterator[Frame]:
    """Frames of all ranks, in the order of a job whose network delays nothing."""
    durations_ns = scenario.phases_ns()
    points_ns = scenario.script_sync_ns(durations_ns)
    elements = scenario.input_elements()
    queued_ns = scenario.queued_ns().cumsum(axis=1)
    ends_ns = durations_ns.sum(axis=1).cumsum(axis=1)
    seqs = [0] * scenario.world_size
    for first in range(0, scenario.steps, flush_steps):
        last = min(first + flush_steps, scenario.steps)
        for rank in range(scenario.world_size):
            now_ns = int(ends_ns[rank, last - 1])
            if first == 0:
                seqs[rank] += 1
                yield _frame(_hello(scenario, rank, seqs[rank]), now_ns)
                if scenario.collective_after:
                    seqs[rank] += 1
                    yield _frame(_sync_path(scenario, rank, seqs[rank]), now_ns)
            seqs[rank] += 2
            steps = []
            for index in range(first, last):
                end_ns, phases_ns = int(ends_ns[rank, index]), durations_ns[rank, :, index].tolist()
                flags = wire.EVALUATED if scenario.evaluates_in(index) else 0
                step = simulated_step(
                    index, end_ns, phases_ns, scenario.batch, flags=flags, input_elements=int(elements[rank, index])
                )
                if scenario.collective_after:
                    point_ns = int(points_ns[rank, index])
                    step = msgspec.structs.replace(step, point1_ns=point_ns, sync_path=SYNC_PATH)
                steps.append(step)
            yield _frame(wire.Steps(rank=rank, seq=seqs[rank] - 1, steps=steps), now_ns)
            yield _frame(_beat(rank, seqs[rank], last, now_ns, int(queued_ns[rank, last - 1])), now_ns)


def host_of(scenario: Scenario, rank: int) -> str:
    """Host name of a rank."""
    return f"node-{rank // scenario.ranks_per_host}"


def _frame(message: wire.Message, now_ns: int) -> Frame:
    return Frame(wire.TOPICS[type(message)], wire.encode(message), now_ns)


def _hello(scenario: Scenario, rank: int, seq: int) -> wire.Hello:
    return wire.Hello(
        rank=rank, seq=seq, wire_version=wire.WIRE_VERSION, agent_version="simulated", run_id=f"{scenario.seed:08x}",
        run_name="simulated", attempt=0, world_size=scenario.world_size, local_rank=rank % scenario.ranks_per_host,
        host=host_of(scenario, rank), pid=1000 + rank, started_unix_ns=0, mono_ns=0, backend="simulated", kind="ddp",
        model="simulated",
    )  # fmt: skip


def _sync_path(scenario: Scenario, rank: int, seq: int) -> wire.SyncPath:
    point = wire.SyncPoint("all_reduce", "train.py:88", wire.PHASES.index(scenario.collective_after))
    return wire.SyncPath(rank=rank, seq=seq, step=0, path=SYNC_PATH, points=[point], count=1)


def _beat(rank: int, seq: int, step: int, now_ns: int, queued_ns: int) -> wire.Beat:
    return wire.Beat(
        rank=rank,
        seq=seq,
        mono_ns=now_ns,
        step=step,
        phase=wire.PHASES.index("sync"),
        phase_ns=0,
        rss_bytes=1 << 30,
        queued_ns=queued_ns,
    )
