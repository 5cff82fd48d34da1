"""What a viewer pays to follow a large run: 1024 ranks at 10 steps a second, through the state and all rules.

The frames are those of real agents: a world of this size is flushed once a second, so each rank sends a message of ten
steps and a beat every second, spread over it, and a hello every five. They are made in advance, a second at a time;
what is measured is the CPU time of taking them in.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from benchmarks.pairs import row
from ddpwatch import wire
from ddpwatch.core.state import RunState
from ddpwatch.core.watch import Watch
from ddpwatch.sources.synthetic import Fault, Scenario, host_of

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
BUDGET_CORE = 0.15
BUDGET_RATIO = 1.25
MIB = 1 << 20

Taker = RunState | Watch
Chunk = list[tuple[bytes, int]]


@dataclass(frozen=True)
class Price:
    """What taking a run in has cost."""

    cpu_s: float
    simulated_s: int
    frames: int
    events: int
    """Steps, beats and hellos."""
    grew_mib: float
    """Resident memory, from before the first frame."""
    grew_late_mib: float
    """And since the rings were full; 0 if the run was shorter."""

    @property
    def core(self) -> float:
        """As a part of a core, were the run live."""
        return self.cpu_s / self.simulated_s

    @property
    def us_per_event(self) -> float:
        """CPU time of one event, in microseconds."""
        return 1e6 * self.cpu_s / self.events


def chunks(world_size: int, seconds: int) -> Iterator[Chunk]:
    """The frames of each second, in the order of their arrival. One rank is slow for the second half."""
    fault = Fault((world_size // 3,), "backward", 0.3, onset=seconds * STEPS_PER_S // 2)
    scenario = Scenario(world_size, steps=seconds * STEPS_PER_S, step_ms=1000 / STEPS_PER_S, faults=(fault,), seed=1)
    durations_ns = scenario.phases_ns()
    ends_ns = durations_ns.sum(axis=1).cumsum(axis=1)
    seqs = [0] * world_size
    for second in range(seconds):
        chunk: Chunk = []
        first = second * STEPS_PER_S
        for rank in range(world_size):
            now_ns = int(1e9 * (1 + second + rank / world_size))
            phases = durations_ns[rank, :, first : first + STEPS_PER_S].T.tolist()
            ends = ends_ns[rank, first : first + STEPS_PER_S].tolist()
            messages: list[wire.Message] = []
            if second % HELLO_EVERY_S == 0:
                messages.append(_hello(scenario, rank, now_ns))
            messages += [
                wire.Steps(rank=rank, seq=0, steps=[
                    wire.Step(first + at, ends[at], *phases[at], samples=32, batch=32, backwards=1)
                    for at in range(STEPS_PER_S)
                ]),
                wire.Beat(
                    rank=rank, seq=0, mono_ns=now_ns, step=first + STEPS_PER_S, phase=3, phase_ns=1000,
                    groups=[wire.Group("0", world_size, first + STEPS_PER_S)], cpu_percent=99.0, rss_bytes=1 << 30,
                    agent_cpu_ns=second * 1000, hook_ns=second * 1000,
                ),
            ]  # fmt: skip
            for message in messages:
                seqs[rank] += 1
                chunk.append((wire.encode(_numbered(message, seqs[rank])), now_ns))
        yield chunk


def _numbered(message: wire.Message, seq: int) -> wire.Message:
    import msgspec

    return msgspec.structs.replace(message, seq=seq)


def _hello(scenario: Scenario, rank: int, now_ns: int) -> wire.Hello:
    return wire.Hello(
        rank=rank, seq=0, wire_version=wire.WIRE_VERSION, agent_version="simulated", run_id="0", run_name="simulated",
        attempt=0, world_size=scenario.world_size, local_rank=rank % scenario.ranks_per_host,
        host=host_of(scenario, rank), pid=1000 + rank, started_unix_ns=1, mono_ns=now_ns, backend="nccl", kind="ddp",
        model="Simulated", device="cuda:0", comm="passive", python="3.12", torch="2.13",
        ddp={"bucket_cap_mb": "25", "static_graph": "False", "find_unused_parameters": "False"},
        unix_ns=1_700_000_000_000_000_000 + now_ns,
    )  # fmt: skip


def price(taker: Taker, world_size: int, seconds: int, profile: cProfile.Profile | None = None) -> Price:
    """Take a run in, and nothing else."""
    process = psutil.Process()
    cpu_s, frames = 0.0, 0
    before = full = process.memory_info().rss
    for second, chunk in enumerate(chunks(world_size, seconds)):
        if second == FULL_SECONDS:
            full = process.memory_info().rss
        if profile is not None:
            profile.enable()
        began_s = time.process_time()
        for payload, now_ns in chunk:
            taker.take(payload, now_ns)
        cpu_s += time.process_time() - began_s
        if profile is not None:
            profile.disable()
        frames += len(chunk)
    after = process.memory_info().rss
    events = frames + world_size * seconds * (STEPS_PER_S - 1)
    late = (after - full) / MIB if seconds > FULL_SECONDS else 0.0
    return Price(cpu_s, seconds, frames, events, (after - before) / MIB, late)


def state(world_size: int) -> RunState:
    """A run of which nothing has been heard."""
    return RunState("0", "simulated", world_size)


def main() -> None:
    """The price of everything, of the state alone, and how it grows with the world; `--profile` shows where it goes."""
    if "--profile" in sys.argv:
        profile = cProfile.Profile()
        price(Watch(state(RANKS)), RANKS, SECONDS, profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return
    watch = Watch(state(RANKS))
    all_of_it = price(watch, RANKS, SECONDS)
    assert not state_is_bad(watch.state), "frames were refused: this would be the price of something else"
    blamed = sorted({rank for (rule, _), alert in watch.book.open.items() if rule == "straggler"
                     for rank in alert.finding.ranks})  # fmt: skip
    assert blamed == [RANKS // 3], f"rank {RANKS // 3} is slow, {blamed} were blamed"
    alone = price(state(RANKS), RANKS, SECONDS)
    few = price(Watch(state(FEW_RANKS)), FEW_RANKS, 4 * SECONDS)
    few_alone = price(state(FEW_RANKS), FEW_RANKS, 4 * SECONDS)
    row(
        f"viewer's core, {RANKS} ranks x {STEPS_PER_S} steps/s, {SECONDS} s",
        f"{100 * all_of_it.core:.1f} % core", f"{100 * BUDGET_CORE:.0f} %", all_of_it.core <= BUDGET_CORE,
        f"decoding and state {100 * alone.core:.1f} %, judging {100 * (all_of_it.core - alone.core):.1f} %",
    )  # fmt: skip
    ratio = all_of_it.us_per_event / few.us_per_event
    row(
        f"an event of {RANKS} ranks against one of {FEW_RANKS}", f"x {ratio:.2f}", f"x {BUDGET_RATIO}",
        ratio <= BUDGET_RATIO,
        f"{all_of_it.us_per_event:.2f} and {few.us_per_event:.2f} us;"
        f" state alone {alone.us_per_event:.2f} and {few_alone.us_per_event:.2f}",
    )  # fmt: skip
    del watch
    long = price(Watch(state(RANKS)), RANKS, LONG_SECONDS)
    row(
        f"viewer's memory, {RANKS} ranks, {LONG_SECONDS} s", f"{long.grew_mib:.0f} MiB", "bounded",
        long.grew_late_mib < 0.05 * long.grew_mib,
        f"grew {long.grew_late_mib:+.1f} MiB over the last {LONG_SECONDS - FULL_SECONDS} s, when all rings were full",
    )  # fmt: skip


def state_is_bad(state: RunState) -> bool:
    """Whether anything could not be used."""
    return bool(state.bad or state.unknown or any(rank.lost for rank in state.ranks.values()))


if __name__ == "__main__":
    main()
