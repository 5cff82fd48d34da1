"""What a viewer pays to follow a large run: 1024 ranks at 10 steps a second, through the state and all rules.

The frames are those of real agents: a world of this size is flushed once a second, so each rank sends a message of ten
steps and a heartbeat every second, evenly distributed, and a hello every five. They are made in advance, a second at a
time; measured is the CPU time of ingesting them.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import psutil

from benchmarks.pairs import row
from ddpwatch import wire
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.simulator.scenario import Fault, Scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS = 1024
FEW_RANKS = 16
STEPS_PER_S = 10
SECONDS = 30
FULL_SECONDS = 65
"""After these the rings of all ranks are full."""
LONG_SECONDS = 95
HELLO_EVERY_S = 5
BLOCK_S = 10
"""Synthetic durations repeat after this many steps, so that they take no memory of their own."""
BUDGET_CORE = 0.15
BUDGET_RATIO = 1.25
LATE_GROWTH = 0.05
"""Of all growth: what a heap may still do when nothing more is kept."""
MIB = 1 << 20

Taker = RunState | Monitor
Chunk = list[tuple[bytes, int]]


@dataclass(frozen=True)
class Price:
    """What taking a run in has cost."""

    cpu_s: float
    """CPU time of the first `SECONDS`."""
    events: int
    """Steps, beats and hellos in them."""
    grew_mib: float
    """Resident memory, from before the first frame."""
    grew_late_mib: float
    """The part of it since the rings were full."""

    @property
    def core(self) -> float:
        """As a part of a core, were the run live."""
        return self.cpu_s / SECONDS

    @property
    def us_per_event(self) -> float:
        """CPU time of one event, in microseconds."""
        return 1e6 * self.cpu_s / self.events


def chunks(world_size: int, seconds: int) -> Iterator[Chunk]:
    """The frames of each second, in the order of their arrival. One rank is slow from half of `SECONDS` on."""
    fault = Fault((world_size // 3,), "backward", 0.3, onset=0)
    blocks = [
        Scenario(world_size, steps=BLOCK_S * STEPS_PER_S, step_ms=1000 / STEPS_PER_S, faults=faults, seed=1).phases_ns()
        for faults in ((), (fault,))
    ]
    ends_ns = [0] * world_size
    seqs = [0] * world_size
    for second in range(seconds):
        durations_ns = blocks[second >= SECONDS // 2]
        first = second % BLOCK_S * STEPS_PER_S
        chunk: Chunk = []
        for rank in range(world_size):
            now_ns = int(1e9 * (1 + second + rank / world_size))
            steps = []
            for at in range(STEPS_PER_S):
                phases_ns = durations_ns[rank, :, first + at].tolist()
                ends_ns[rank] += sum(phases_ns)
                index = second * STEPS_PER_S + at
                steps.append(wire.Step(index, ends_ns[rank], *phases_ns, samples=32, batch=32, backwards=1))
            messages = _messages(world_size, rank, second, steps, now_ns)
            for message in messages:
                seqs[rank] += 1
                chunk.append((wire.encode(msgspec.structs.replace(message, seq=seqs[rank])), now_ns))
        yield chunk


def _messages(world_size: int, rank: int, second: int, steps: list[wire.Step], now_ns: int) -> list[wire.Message]:
    """What a rank sends in a second, not numbered yet."""
    beat = wire.Beat(
        rank=rank, seq=0, mono_ns=now_ns, step=steps[-1].index + 1, phase=3, phase_ns=1000,
        groups=[wire.Group("0", world_size, steps[-1].index)], cpu_percent=99.0, rss_bytes=1 << 30,
        agent_cpu_ns=second * 1000, hook_ns=second * 1000, table=wire.pack_steps(steps),
        table_columns=len(wire.STEP_COLUMNS),
    )  # fmt: skip
    messages: list[wire.Message] = [_hello(world_size, rank, now_ns)] if second % HELLO_EVERY_S == 0 else []
    return [*messages, beat]


def _hello(world_size: int, rank: int, now_ns: int) -> wire.Hello:
    return wire.Hello(
        rank=rank, seq=0, wire_version=wire.WIRE_VERSION, agent_version="simulated", run_id="0", run_name="simulated",
        attempt=0, world_size=world_size, local_rank=rank % 8, host=f"node-{rank // 8}", pid=1000 + rank,
        started_unix_ns=1, mono_ns=now_ns, backend="nccl", kind="ddp", model="Simulated", device="cuda:0",
        comm="passive", python="3.12", torch="2.13",
        ddp={"bucket_cap_mb": "25", "static_graph": "False", "find_unused_parameters": "False"},
        unix_ns=1_700_000_000_000_000_000 + now_ns,
    )  # fmt: skip


def price(taker: Taker, world_size: int, seconds: int, profile: cProfile.Profile | None = None) -> Price:
    """Take a run in, and nothing else. The CPU time is that of the first `SECONDS`."""
    process = psutil.Process()
    cpu_s, frames = 0.0, 0
    before = full = 0
    for second, chunk in enumerate(chunks(world_size, seconds)):
        if second == 0:
            before = full = process.memory_info().rss
        if second == FULL_SECONDS:
            full = process.memory_info().rss
        if profile is not None:
            profile.enable()
        began_s = time.process_time()
        for payload, now_ns in chunk:
            taker.ingest(payload, now_ns)
        if second < SECONDS:
            cpu_s += time.process_time() - began_s
            frames += len(chunk)
        if profile is not None:
            profile.disable()
    after = process.memory_info().rss
    events = frames + world_size * SECONDS * (STEPS_PER_S - 1)
    return Price(cpu_s, events, (after - before) / MIB, (after - full) / MIB)


def state(world_size: int) -> RunState:
    """A run of which nothing has been received."""
    return RunState("0", "simulated", world_size)


def main() -> None:
    """The price of everything, of the state alone, and how it grows with the world; `--profile` shows where it goes."""
    if "--profile" in sys.argv:
        profile = cProfile.Profile()
        price(Monitor(state(RANKS)), RANKS, SECONDS, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    monitor = Monitor(state(RANKS))
    all_of_it = price(monitor, RANKS, LONG_SECONDS)
    _check(monitor)
    alone = price(state(RANKS), RANKS, SECONDS)
    few = price(Monitor(state(FEW_RANKS)), FEW_RANKS, SECONDS)
    few_alone = price(state(FEW_RANKS), FEW_RANKS, SECONDS)
    row(
        f"viewer, {RANKS} ranks x {STEPS_PER_S} steps/s for {SECONDS} s",
        f"{100 * all_of_it.core:.1f} % core", f"{100 * BUDGET_CORE:.0f} %", all_of_it.core <= BUDGET_CORE,
        f"decoding and state {100 * alone.core:.1f} %, judging {100 * (all_of_it.core - alone.core):.1f} %",
    )  # fmt: skip
    ratio = all_of_it.us_per_event / few.us_per_event
    row(
        f"viewer, an event of {RANKS} ranks against one of {FEW_RANKS}", f"x {ratio:.2f}", f"x {BUDGET_RATIO}",
        ratio <= BUDGET_RATIO,
        f"{all_of_it.us_per_event:.1f} and {few.us_per_event:.1f} us;"
        f" state alone {alone.us_per_event:.1f} and {few_alone.us_per_event:.1f}",
    )  # fmt: skip
    row(
        f"viewer's memory, {RANKS} ranks, after {LONG_SECONDS} s", f"{all_of_it.grew_mib:.0f} MiB", "bounded",
        all_of_it.grew_late_mib < LATE_GROWTH * all_of_it.grew_mib,
        f"grew {all_of_it.grew_late_mib:+.1f} MiB over the last {LONG_SECONDS - FULL_SECONDS} s, all rings being full",
    )  # fmt: skip


def _check(monitor: Monitor) -> None:
    """Fail if frames were refused or no straggler was found: the time would be that of something else."""
    state = monitor.state
    refused = state.bad + state.unknown + sum(rank.lost for rank in state.ranks.values())
    assert not refused, f"{refused} frames were refused"
    blamed = [alert.finding.ranks for (rule, _), alert in monitor.book.open.items() if rule == "straggler"]
    assert blamed == [(RANKS // 3,)], f"rank {RANKS // 3} is slow, {blamed} were blamed"


if __name__ == "__main__":
    main()
