"""Runs that make each rule report each of its messages: the samples behind `messages.golden.txt`."""

from __future__ import annotations

import msgspec

from ddpwatch import wire
from ddpwatch.core import rule_names as rules
from ddpwatch.core.state.rank import RankState
from ddpwatch.core.state.run import RunState
from ddpwatch.simulator.scenario import Fault, Scenario
from tests.builders.ended_run import CLOSED, LARGE, SMALL, beating, broken, end, ended_with, fail
from tests.builders.fake_rank import make_beat, make_group, make_hello, make_stack, make_step
from tests.builders.gpu_run import CAPPED, HOT, read_gpus
from tests.builders.hung_run import (
    DATA,
    GLOO,
    HALF_HOUR_NS,
    NOW_S,
    PEER,
    SLEEPS,
    SYNC,
    crossed,
    failed,
    halted,
    missing_in_two_groups,
    one_missing,
    with_timeout,
)
from tests.builders.scenario_frames import frames
from tests.builders.synthetic_run import (
    SECOND,
    collecting,
    look,
    make_run,
    remember,
    run_of,
    saving,
    train,
    with_loader,
    with_sync_points,
)

TWO_HOSTS = ("node-a", "node-a", "node-b", "node-b")
GIB = 1 << 30
LOW = {"util_percent": 12}
BASE_MS = {"data": 2, "forward": 8, "backward": 16, "optimizer": 2, "other": 0}


def late(phase="backward", every=1, ranks=(2,), world=4, hosts=(), **hello):
    """Ranks that take 10 ms longer in a phase, in every n-th step; the others wait for them."""
    steps = {}
    for rank in range(world):
        steps[rank] = []
        for index in range(10, 110):
            slow = index % every == 0
            changed = {phase: BASE_MS[phase] + 10} if slow and rank in ranks else {"sync": 12 if slow else 2}
            steps[rank].append(make_step(index, **changed))
    return make_run(steps, hosts=hosts, **hello)


def simulated(world, *faults, reported=None, **changed):
    """A noisy run."""
    scenario = Scenario(world, **{"steps": 120, "noise": 0.03, "seed": 1, "faults": faults, **changed})
    state = RunState("ab12cd34", "train", world)
    for frame in frames(scenario, flush_steps=20):
        message = wire.decode(frame.payload)
        if reported and isinstance(message, wire.Beat):
            message = msgspec.structs.replace(message, queued_ns=reported(message))
        state.apply(message, 1)
    return state


def straggler_samples():
    for phase in BASE_MS:
        yield f"slow in {phase}", look(late(phase))
    yield "on the CPU", look(late(device="cpu"))
    yield "every 3rd step", look(late(every=3))
    yield "several hosts", look(late(hosts=TWO_HOSTS))
    yield "a whole host", look(late(ranks=(2, 3, 6, 7), world=8, hosts=("node-a", "node-a", "node-b", "node-b") * 2))
    yield "many ranks", look(late(ranks=tuple(range(0, 20, 2)), world=24))
    yield "a rank is not seen", look(make_run({0: train(), 1: train(), 2: train(backward=26)}, world=4))
    slow_ms = ({"data": 11}, {"forward": 18}, {"backward": 26})
    varied = [make_step(index, **slow_ms[index % 3]) for index in range(10, 110)]
    others = {rank: train(count=100, sync=12) for rank in (0, 1, 3)}
    yield "varying phases", look(make_run({**others, 2: varied}))
    sometimes = [make_step(i, **({"backward": 26} if i % 7 in {0, 3} else {"sync": 2})) for i in range(10, 110)]
    yield "some of the steps", look(make_run({**others, 2: sometimes}))
    slow = make_run({rank: train(0, 60, **({"backward": 46} if rank == 3 else {"sync": 32})) for rank in range(4)})
    yield "low clocks, with a reason", look(read_gpus(slow, readings=4, r3=HOT))
    slow = make_run({rank: train(0, 60, **({"backward": 46} if rank == 3 else {"sync": 32})) for rank in range(4)})
    yield "low clocks, without a reason", look(read_gpus(slow, readings=4, r3={"sm_mhz": 1200}))
    starved = simulated(
        4,
        Fault((1,), "forward", 0.3, onset=40),
        reported=lambda beat: int({1: 0.25}.get(beat.rank, 0.01) * beat.mono_ns) + 1,
    )
    yield "CPU starvation", look(starved)
    yield "garbage collection", look(collecting({2: 3}))
    for name in ("save_ns", "eval_ns"):
        yield f"paused, {name}", look(saving({0}, every=4, name=name))
    yield "a DataLoader without workers", look(with_loader(late("data", cores=16), workers=0))


def comm_share_samples():
    yield "wire, one host", look(run_of(sync=12))
    yield "wire, two hosts", look(run_of(sync=12, hosts=TWO_HOSTS))
    for kind in ("fsdp2", "deepspeed"):
        yield f"wire, {kind}", look(make_run({rank: train(sync=12) for rank in range(4)}, hosts=TWO_HOSTS, kind=kind))
    yield "waiting for one rank", look(late())
    parts = {"backward": 26}, {"sync": 12}
    turns = {r: [make_step(10 + i, **parts[i % 4 != r]) for i in range(48)] for r in range(4)}
    yield "waiting for varying ranks", look(make_run(turns))
    yield "a rank is not seen", look(make_run({rank: train(sync=12) for rank in range(3)}, world=4))
    starved = simulated(
        4, Fault((1,), "forward", 0.3, onset=0), reported=lambda beat: int(0.4 * beat.mono_ns) + 1, steps=60
    )
    yield "waiting for cores", look(starved)
    yield "kept open", look(run_of(sync_ns=2_700_000, other=0))


def sync_point_samples():
    path = {"sync": 8, "point1_ns": 4_000_000, "point2_ns": 2_000_000, "sync_path": wire.ALL_POINTS | 1 << 8}
    points = ("all_reduce", "train.py:88", "other"), ("barrier", "train.py:90", "other")
    yield "every step", look(with_sync_points(run_of(**path), *points))
    steps = [make_step(index, **(path if index % 2 else {})) for index in range(10, 60)]
    yield "every second step", look(with_sync_points(make_run(dict.fromkeys(range(4), steps)), *points))


def uneven_work_samples():
    yield "uneven inputs", look(simulated(4, uneven=0.5))


def cpu_starvation_samples():
    def starved(beat):
        return int((0.2 + 0.1 * beat.rank) * beat.mono_ns) + 1

    yield "cores not known", look(simulated(2, reported=starved))
    state = simulated(2, reported=starved)
    for rank in range(2):
        hello = make_hello(rank, 900, world_size=2, host="node-0", cores=4, mono_ns=10**12)
        state.apply(hello, 1)
        loader = wire.Loader(rank=rank, seq=901, step=0, epoch=0, sampler="S", distributed=True, workers=8)
        state.apply(loader, 1)
    yield "with settings", look(state)


def pauses_samples():
    yield "all ranks", look(collecting(dict.fromkeys(range(4), 10)))
    yield "one rank", look(collecting({2: 5}))
    young = {rank: train(gc_ns=1_200_000) for rank in range(4)}
    yield "young generations", look(make_run(young))
    yield "a world of one", look(collecting({0: 10}, world=1))
    yield "saves of one rank", look(saving(ranks={0}))
    yield "saves of all ranks", look(saving(ranks={0, 1, 2, 3}))


def slow_link_samples():
    before = remember(*[run_of(sync=2, comm_bytes=98 << 20)] * 4)
    yield "one host", look(run_of(sync=6, comm_bytes=98 << 20), before)
    yield "two hosts", look(run_of(sync=6, hosts=TWO_HOSTS), remember(*[run_of(sync=2)] * 4))


def data_bound_samples():
    yield "all ranks", look(run_of(data=19))
    yield "most ranks", look(make_run({rank: train(data=19) if rank else train(sync=20) for rank in range(4)}))
    yield "a world of one", look(run_of(world=1, data=19))
    slow, two = {"data": 19}, {"workers": 2, "pin_memory": False, "persistent_workers": False}
    yield "no workers", look(with_loader(run_of(**slow), workers=0))
    yield "busy workers, free cores", look(with_loader(run_of(**slow, cores=32), used=(97, 1), **two))
    yield "busy workers, no free core", look(with_loader(run_of(**slow, cores=8), used=(97, 1), **two))
    yield "starved workers", look(with_loader(run_of(**slow, cores=4), used=(60, 35), **two))
    yield "waiting workers", look(with_loader(run_of(**slow, cores=32), used=(12, 1), **two))
    yield "memory not pinned", look(with_loader(run_of(**slow, device="cuda:0"), **two))
    short = {rank: [make_step(i, **({"data": 200} if i % 5 == 0 else {})) for i in range(10, 60)] for rank in range(4)}
    starts = range(10, 60, 5)
    yield "short epochs", look(with_loader(make_run(short), starts=starts, **two))
    yield (
        "short epochs, persistent workers",
        look(with_loader(make_run(short), starts=starts, workers=2, persistent_workers=True)),
    )


def slowdown_samples():
    yield "work", look(run_of(backward=22), remember(*[run_of()] * 4))
    yield "wire", look(run_of(sync=12), remember(*[run_of(sync=2)] * 4))
    slower = make_run({rank: train(backward=26) for rank in range(3)}, world=4)
    yield "a rank is not seen", look(slower, remember(*[run_of()] * 4))


def uneven_batch_samples():
    def samples(*counts):
        return look(make_run({rank: train(samples=number) for rank, number in enumerate(counts)}))

    yield "one rank", samples(32, 32, 32, 24)
    yield "several ranks", samples(32, 32, 32, 24, 16)
    short = [make_step(index, samples=24 if index >= 57 else 32) for index in range(10, 60)]
    yield "some steps", look(make_run({0: train(), 1: train(), 2: short}))
    varied = {rank: [make_step(i, samples=30 + (i + rank) % 3) for i in range(10, 60)] for rank in range(3)}
    yield "all ranks", look(make_run(varied))
    large, small = {"samples": 32, "forward": 16}, {"samples": 24, "sync": 10}
    slower = {rank: [make_step(i, **(large if i % 2 == rank else small)) for i in range(10, 60)] for rank in range(2)}
    yield "all ranks, with a cost", look(make_run(slower))
    state = make_run({rank: train(0, 90) for rank in range(3)})
    state.apply(wire.Bye(rank=1, seq=4, reason="exit", text="", mono_ns=1), 1)
    for rank in (0, 2):
        state.apply(make_beat(rank, seq=4, step=90, phase=SYNC, phase_ns=2 * SECOND), 1)
    yield "a rank has exited, the others wait", look(state)
    groups = {rank: make_group(42, 9, op="barrier" if rank == 1 else "all_reduce", size=3) for rank in range(3)}
    yield "a rank is in a barrier", look(with_data(halted(groups, r1={"phase": DATA}), 1))
    groups = {rank: make_group(41) if rank == 1 else make_group(42, 9, timeout_ns=HALF_HOUR_NS) for rank in range(3)}
    yield "a rank has not joined", look(with_data(halted(groups), 1))
    yield "the others have failed", look(left_behind())


def with_data(state, ended):
    """The data of one rank has ended, and that of the others has not."""
    batches = len(state.ranks[ended].steps.indices())
    for rank in state.ranks:
        length = batches + (0 if rank == ended else 5)
        loader = wire.Loader(rank=rank, seq=9, step=0, epoch=0, sampler="S", distributed=True, length=length)
        state.apply(loader, state.now_ns)
    return state


def left_behind(*, at_end=True):
    """Rank 2 exits at the end of its data, and the others lose their connections."""
    state = make_run({rank: train(0, 90) for rank in range(3)}, now_ns=SECOND)
    if at_end:
        with_data(state, 2)
    state.apply(wire.Bye(rank=2, seq=10, reason="exit", text="", mono_ns=1), SECOND)
    for rank in range(2):
        state.apply(make_beat(rank, seq=10, step=90, phase=SYNC, phase_ns=2 * SECOND), 3 * SECOND)
        state.apply(wire.Bye(rank=rank, seq=11, reason="failed", text=CLOSED, mono_ns=1), 3 * SECOND)
    state.tick(12 * SECOND)
    return state


def same_data_samples():
    def batches(print_of):
        steps = {r: [make_step(i, fingerprint=0 if i % 8 else print_of(r, i)) for i in range(10, 60)] for r in range(4)}
        return look(make_run(steps))

    def loaders(*sampler_epochs, **fields):
        state = run_of(2)
        for epoch, sampler_epoch in enumerate(sampler_epochs):
            for rank in range(2):
                known = {"sampler": "DistributedSampler", "distributed": True, "replicas": 2, "shuffle": True, **fields}
                loader = wire.Loader(
                    rank=rank, seq=10 + epoch, step=20 * epoch, epoch=epoch, sampler_epoch=sampler_epoch, **known
                )
                state.apply(loader, 1)
        return look(state)

    yield "all ranks", batches(lambda _, index: index)
    yield "two ranks", batches(lambda rank, index: 1000 * index + min(rank, 2))
    yield "groups", batches(lambda rank, index: 1000 * index + rank // 2)
    yield "no set_epoch", loaders(0, 0, 0)
    yield "not distributed", loaders(-1, sampler="RandomSampler", distributed=False, replicas=0)


def drift_samples():
    def checked(*checks, **hello):
        state = make_run({rank: train() for rank in range(4)}, **hello)
        for number, (parameter, crcs) in enumerate(checks):
            for rank, crc in enumerate(crcs):
                step = 99 + 100 * number
                message = wire.Checksum(rank=rank, seq=100 + step, step=step, parameter=parameter, offset=0, crc=crc)
                state.apply(message, 1)
        return look(state)

    yield "one rank", checked(("fc.weight", (6, 6, 7, 6)))
    yield "one rank of a process group", checked(("fc.weight", (6, 6, 7, 6)), replicas="0-3")
    yield "no majority", checked(("fc.weight", (5, 5, 6, 6)))
    yield "several parameters", checked(("fc.weight", (5, 5, 5, 6)), ("fc.bias", (7, 7, 7, 8)))


def memory_samples():
    def used(world, leaking):
        state = RunState("ab12cd34", "train", world)
        for number in range(61):
            for rank in range(world):
                rss_bytes = GIB + number * 15 * (1 << 20) * (rank in leaking)
                state.apply(make_beat(rank, seq=number + 1, rss_bytes=rss_bytes), (number + 1) * 10 * SECOND)
        return look(state)

    pieces = {"reserved_bytes": 70 * GIB, "allocated_bytes": 40 * GIB}
    full = [{"used_bytes": int((0.9 + 0.07 * n / 89) * 80 * GIB), "total_bytes": 80 * GIB} for n in range(90)]
    yield "one rank", used(3, {1})
    yield "many ranks", used(4, {0, 1, 2, 3})
    yield "a GPU", look(read_gpus(run_of(), 90, r1=full))
    yield "a fragmented GPU", look(read_gpus(run_of(), 90, r1=[{**each, **pieces} for each in full]))
    yield "many GPUs", look(read_gpus(run_of(), 90, r0=full, r1=full, r2=full, r3=full))


def gpu_throttle_samples():
    yield "hot", look(read_gpus(run_of(), r3=HOT))
    yield "power, below the others", look(read_gpus(run_of(), r1={**CAPPED, "sm_mhz": 1200}))
    yield "power, normal", look(read_gpus(run_of(), r0=CAPPED, r1=CAPPED, r2=CAPPED, r3=CAPPED))
    yield "power, one GPU", look(read_gpus(run_of(1), r0=CAPPED))
    yield "a host", look(read_gpus(run_of(hosts=TWO_HOSTS), r2=HOT, r3={**HOT, "sm_mhz": 900}))
    hosts = tuple(f"node-{rank // 4}" for rank in range(20))
    yield "many GPUs", look(read_gpus(run_of(20, hosts), **{f"r{rank}": HOT for rank in range(0, 20, 4)}))


def gpu_error_samples():
    for code in (13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 95, 119, 120, 999):
        yield f"Xid {code}", look(read_gpus(run_of(), readings=1, r2={"xids": [code]}))
    yield "several", look(read_gpus(run_of(), readings=1, r2={"xids": [31, 79, 45]}))
    yield "ECC", look(read_gpus(run_of(), readings=2, r1=[{"ecc_uncorrected": 7}, {"ecc_uncorrected": 9}]))
    yield "lost", look(read_gpus(run_of(), readings=1, r0={"lost": True}))
    yield "many GPUs", look(read_gpus(run_of(24), readings=1, **{f"r{rank}": {"xids": [79]} for rank in range(24)}))


def gpu_idle_samples():
    for phase in ("data", "sync", "other", "forward", "backward", "optimizer"):
        yield phase, look(read_gpus(run_of(**{phase: 90}), **{f"r{rank}": LOW for rank in range(4)}))
    yield "one rank", look(read_gpus(run_of(), r0=LOW))
    yield "some ranks", look(read_gpus(run_of(12), **{f"r{rank}": LOW for rank in range(4)}))


def rank_lost_samples():
    yield "ended", look(end(beating({1: 99.9}), 1))
    behind = end(beating({1: 99.9}), 1)
    behind.ranks[0].apply_beat(make_beat(0, step=97, mono_ns=behind.now_ns + 1), behind.now_ns)
    yield "ended, the others have gone on", look(behind)
    yield "ended before its first message", look(end(make_run({0: train()}, world=2), 1))
    killed = beating({1: 99.9})
    killed.apply(wire.Gone(rank=1, seq=0, oom_kills=1), killed.now_ns)
    yield "OOM killer", look(end(killed))
    for code in (-9, -11, -15, -99, 7):
        yield f"exit code {code}", look(ended_with(beating({1: 99.9}), {1: code}))
    yield "several at once", look(end(beating({1: 20, 0: 20}), 0, 1))
    yield "several, killed", look(ended_with(beating({}), {0: -9, 2: -9}))
    yield "all, on a signal", look(ended_with(beating({}), dict.fromkeys(range(4), -15)))
    lines = "torch/distributed/elastic/agent/server/api.py:753] Received 15 death signal, shutting down workers"
    yield (
        "all, on a signal that the launcher logs",
        look(logged(ended_with(beating({}), dict.fromkeys(range(4), -15)), lines)),
    )
    yield "a host, ended", look(end(beating({2: 80, 3: 80}, hosts=TWO_HOSTS), 2, 3))
    yield "no heartbeat", look(beating({1: 93}))
    for by in ("signal", "debugger", "disk", "nothing"):
        state = beating({1: 93})
        state.apply(wire.Held(rank=1, seq=0, by=by), state.now_ns)
        yield f"no heartbeat, held by {by}", look(state)
    yield "no heartbeat from many", look(beating(dict.fromkeys(range(5), 80), world=12, hosts=("node-a",) * 12))
    yield "no heartbeat from a host", look(beating({2: 80, 3: 80}, hosts=TWO_HOSTS))
    yield "no heartbeat from any rank", look(beating(dict.fromkeys(range(4), 80), now_s=100))
    relayed = beating({})
    relayed.apply(wire.Relay(rank=0, seq=1, host="login-1"), relayed.now_ns)
    relayed.tick(relayed.now_ns + 20 * SECOND)
    yield "no heartbeat from the relay", look(relayed)
    yield "secondary", look(end(beating({1: 80, 0: 82, 2: 82.1, 3: 82.2}, now_s=83), 0, 1, 2, 3))
    yield (
        "secondary, some without a heartbeat",
        look(end(fail(beating({1: 80, 0: 82, 2: 82, 3: 82}, now_s=100), 1, at_s=80), 0, 2)),
    )
    timed_out = failed(beating({}), {0: GLOO})
    yield "secondary to a timeout", look(ended_with(timed_out, dict.fromkeys((1, 2, 3), -15)))
    yield "aborted, with a mismatch", broken(0, {1: LARGE, 2: SMALL, 3: SMALL})
    yield "aborted, the others agree", broken(0, {1: LARGE, 2: LARGE, 3: LARGE})
    yield "aborted, too little is known", broken(0, {1: LARGE})
    yield "aborted alone", look(ended_with(beating({}), {1: -6}))


def logged(state, *lines):
    numbered = [wire.LogLine(number, line) for number, line in enumerate(lines, 1)]
    state.apply(wire.LogLines(rank=0, seq=0, source="job.log", lines=numbered), state.now_ns)
    return state


def rank_failed_samples():
    yield "an exception", look(fail(beating({}), 1, "ValueError: no such class 12\n/home/me/train.py:88 in fit"))
    yield "an exception without a text", look(fail(beating({}), 1, ""))
    yield "a complaint about a peer", look(fail(beating({}), 2, CLOSED))
    state = beating({})
    state.apply(wire.Bye(rank=1, seq=5, reason="exit", text="", mono_ns=1), state.now_ns)
    yield "an exit code", look(ended_with(state, {1: 3}))
    state = beating({}, world=12)
    for rank in range(12):
        fail(state, rank, at_s=100 + rank / 100)
    yield "very many", look(state)
    state = beating({})
    for rank, at_s in enumerate((100, 100.1, 100.2, 100.3)):
        fail(state, rank, "KeyboardInterrupt", at_s=at_s)
    yield "interrupted", look(state)
    yield "secondary", look(fail(fail(beating({}), 1, at_s=100), 3, "KeyError: 7", at_s=101))
    for text in (CLOSED, GLOO):
        state = beating({1: 80.0}, now_s=80.1)
        state.apply(wire.Gone(rank=1, seq=0), int(81.5 * SECOND))
        for rank in (0, 2, 3):
            fail(state, rank, text, at_s=81)
        yield "secondary, connection lost" if text is CLOSED else "secondary, timed out", look(state)
    state = fail(end(beating({1: 99.8, 3: 99.9}, now_s=100), 1, 3), 0, CLOSED)
    yield "secondary to two", look(state)
    yield "secondary to an abort", broken(0, {1: LARGE})
    yield (
        "secondary to a rank without a heartbeat",
        look(failed(one_missing(heard_s={2: NOW_S - 20}), {0: GLOO, 1: GLOO, 3: GLOO})),
    )
    state = beating({1: 99.9}, now_s=100)
    for rank in (0, 2, 3):
        state.apply(wire.Bye(rank=rank, seq=5, reason="failed", text=CLOSED, mono_ns=1), state.now_ns)
    state.apply(make_beat(1, seq=9, step=90), state.now_ns + SECOND)
    yield "connections, none was first", look(state)
    state = beating({2: 97.5}, world=3, hosts=("node1", "node2", "node3"))
    for rank in (0, 1):
        bye = wire.Bye(rank=rank, seq=5, reason="failed", text="Connection reset by peer", mono_ns=1)
        state.apply(bye, int(97.7 * SECOND))
    yield "connections, one has no heartbeat", look(state)
    state = one_missing(world=3)
    state.apply(wire.Bye(rank=2, seq=6, reason="exit", text="", mono_ns=1), state.now_ns)
    yield "connections, one has exited", look(failed(state, {0: PEER, 1: PEER}))
    state = failed(one_missing(), {0: PEER, 1: GLOO, 3: GLOO})
    state.tick(state.now_ns + SECOND)
    state.apply(make_beat(2, seq=8, phase=DATA, groups=[make_group(41)]), state.now_ns)
    yield "timed out, one has not joined", look(state)
    both = halted({0: make_group(42, size=2), 1: make_group(42, size=2)})
    yield "timed out, nothing was seen", look(failed(both, {0: GLOO, 1: GLOO}))
    ops = {rank: make_group(126, 19, op=op, size=2) for rank, op in enumerate(("all_reduce", "broadcast"))}
    yield "timed out in different operations", look(failed(halted(ops), {0: GLOO, 1: GLOO}))
    yield "left behind at the end of the data", look(left_behind())
    yield "left behind", look(left_behind(at_end=False))


def stall_samples():
    yield "missing", look(one_missing())
    state = one_missing()
    state.apply(make_stack(2, *SLEEPS), state.now_ns)
    yield "missing, with its stack", look(state)
    yield "missing, with the timeout", look(with_timeout(12, 1800))
    yield "missing, the timeout is over", look(with_timeout(30, 20))
    yield (
        "missing, several",
        look(halted({0: make_group(42, 12, size=6), **{rank: make_group(41, size=6) for rank in range(1, 6)}})),
    )
    yield (
        "missing, paused",
        look(halted({0: make_group(42, 9), 1: make_group(41), 2: make_group(41)}, r1={"pause": "checkpoint"})),
    )
    for activity in ("torch.save", "evaluation"):
        busy = {"phase": wire.PHASES.index("other"), "activity": activity, "phase_ns": 40 * SECOND}
        yield f"missing, in {activity}", look(one_missing(40.0, r2=busy))
    yield "missing in two groups", look(missing_in_two_groups())
    side = {rank: make_group(7 - (rank == 2), 9 * (rank != 2), name="side") for rank in range(4)}
    yield "missing in a side group", look(halted({rank: [make_group(900), side[rank]] for rank in range(4)}))
    unrecorded = {rank: make_group(42 - (rank == 1), completed=None, size=2) for rank in range(2)}
    yield "missing, without a flight recorder", look(halted(unrecorded, r0={"phase": SYNC, "phase_ns": 9 * SECOND}))
    other = wire.PHASES.index("other")
    yield "missing, between phases", look(one_missing(r2={"phase": other}))
    state = one_missing()
    batches = len(state.ranks[2].steps.indices())
    for rank in state.ranks:
        loader = wire.Loader(rank=rank, seq=9, step=0, epoch=0, sampler="S", distributed=True, length=batches)
        state.apply(loader, state.now_ns)
    yield "missing, at the end of its data", look(state)
    yield "missing, no heartbeat", look(one_missing(heard_s={2: NOW_S - 7}))
    for by in ("signal", "debugger", "disk", "nothing"):
        state = one_missing(heard_s={2: NOW_S - 7})
        state.apply(wire.Held(rank=2, seq=0, by=by), state.now_ns)
        yield f"missing, no heartbeat, held by {by}", look(state)
    yield "missing, on another host", look(one_missing(hosts=TWO_HOSTS))
    groups = {0: make_group(42, 12), 1: make_group(42, 12), 2: make_group(41), 3: make_group(41)}
    yield "missing, a whole host", look(halted(groups, heard_s={2: NOW_S - 8, 3: NOW_S - 7}, hosts=TWO_HOSTS))
    yield (
        "missing, the only rank of a host",
        look(one_missing(heard_s={2: NOW_S - 7}, hosts=("node-a", "node-b", "node-c", "node-d"))),
    )
    for hosts in (("node-a",) * 3, ("node-a", "node-a", "node-b")):
        state = halted({0: make_group(42, 12, size=3), 1: make_group(42, 11, size=3)}, hosts=hosts)
        state.ranks[2] = RankState(2, hosts[2], 1002)
        yield f"never received, on {hosts[2]}", look(state)
    yield "all have joined", look(halted({rank: make_group(42, 12) for rank in range(4)}))


def desync_samples():
    def disagree(*ops):
        return look(
            halted({rank: make_group(42, 9, op=op, shape="[8] Float", size=len(ops)) for rank, op in enumerate(ops)})
        )

    yield "one rank", disagree("all_reduce", "all_reduce", "broadcast", "all_reduce")
    yield "several ranks", disagree("all_reduce", "broadcast", "all_reduce", "barrier")
    yield "two ranks", disagree("all_reduce", "barrier")
    yield "crossed", look(crossed())
    side = {"name": "side", "timeout_ns": HALF_HOUR_NS}
    state = halted(
        {
            0: [make_group(41), make_group(7, 9, **side)],
            1: [make_group(42, 9, timeout_ns=20 * SECOND), make_group(6, **side)],
            2: [make_group(41), make_group(7, 9, **side)],
        }
    )
    yield "crossed, with a minority", look(state)
    yield "aborted", broken(0, {1: LARGE, 2: SMALL, 3: SMALL})
    yield "aborted, no majority", broken(0, {1: LARGE, 2: SMALL, 3: LARGE})
    unseen = broken(0, {1: SMALL, 2: LARGE, 3: LARGE}).state
    unseen.ranks[0].exit_code = None
    yield "aborted, one end was not seen", look(unseen)


def timeout_samples():
    paused = {"r1": {"pause": "evaluation"}}
    yield "near, one has not joined", look(with_timeout(1785, 1800, **paused))
    late_beat = with_timeout(1785, 1800, **paused)
    late_beat.tick(late_beat.now_ns + 16 * SECOND)
    yield "due", look(late_beat)
    arrived = make_group(42, 1785, size=3, timeout_ns=HALF_HOUR_NS)
    yield "near, one is not seen", look(halted({0: arrived, 1: arrived}))
    near = {"timeout_ns": 20 * SECOND, "size": 2}
    chain = {
        0: [make_group(42, 15, name="left", **near)],
        1: [make_group(41, name="left", size=2), make_group(7, 15, name="right", size=3)],
        2: [make_group(7, 15, name="right", size=3)],
    }
    yield "near, in a chain of groups", look(halted(chain))
    yield "fired, one had not joined", look(failed(one_missing(), {0: GLOO, 1: GLOO, 3: GLOO}))
    state = halted(
        {
            0: [make_group(41), make_group(7, name="side")],
            1: [make_group(42), make_group(6, name="side")],
            2: [make_group(41), make_group(7, name="side")],
        }
    )
    yield "fired, in another group", look(failed(state, {1: GLOO}))
    state = halted({0: [make_group(41), make_group(7, name="side")], 1: [make_group(42), make_group(6, name="side")]})
    yield "fired, crossed", look(failed(state, {0: GLOO, 1: GLOO}))
    state = halted({0: make_group(42), 1: make_group(42)})
    yield "fired, nothing was seen", look(failed(state, {0: GLOO}))
    state = halted({rank: make_group(41) for rank in range(4)})
    for rank in (0, 1, 3):
        state.ranks[rank] = RankState(rank)
        state.apply(wire.Bye(rank=rank, seq=0, reason="failed", text=GLOO, mono_ns=1), state.now_ns)
    yield "fired, all but one", look(state)
    for ops in (("all_reduce", "broadcast", "all_reduce"), ("all_reduce", "broadcast")):
        groups = {rank: make_group(126, 19, op=op, size=len(ops)) for rank, op in enumerate(ops)}
        yield (
            f"fired, {len(ops)} ranks in different operations",
            look(failed(halted(groups), dict.fromkeys(groups, GLOO))),
        )


def lossy_samples():
    state = beating({})
    state.apply(make_beat(1, seq=8, step=90), state.now_ns)
    yield "messages", look(state)
    state = beating({})
    state.apply(make_beat(2, seq=5, step=90, dropped=1200), state.now_ns)
    yield "records", look(state)
    state = beating({})
    state.count_bad(1, "wrong type")
    state.ingest(b"junk", state.now_ns)
    yield "unreadable", look(state)
    yield "implausible", look(make_run({rank: train(backward=900 if rank == 1 else 16) for rank in range(3)}))
    state = beating({})
    state.apply(wire.Bye(rank=1, seq=5, reason="off", text="KeyError: 7", mono_ns=1), state.now_ns)
    yield "agent off", look(state)
    state = beating({}, world=12)
    for rank in range(9):
        state.apply(make_beat(rank, seq=9, step=90), state.now_ns)
    state.apply(wire.Bye(rank=9, seq=5, reason="off", text="KeyError: 7", mono_ns=1), state.now_ns)
    yield "many ranks", look(state)


SAMPLES = {
    rules.STRAGGLER: straggler_samples,
    rules.COMM_SHARE: comm_share_samples,
    rules.SYNC_POINT: sync_point_samples,
    rules.UNEVEN_WORK: uneven_work_samples,
    rules.CPU_STARVATION: cpu_starvation_samples,
    rules.PAUSES: pauses_samples,
    rules.SLOW_LINK: slow_link_samples,
    rules.DATA_BOUND: data_bound_samples,
    rules.SLOWDOWN: slowdown_samples,
    rules.UNEVEN_BATCH: uneven_batch_samples,
    rules.SAME_DATA: same_data_samples,
    rules.DRIFT: drift_samples,
    rules.MEMORY: memory_samples,
    rules.GPU_THROTTLE: gpu_throttle_samples,
    rules.GPU_ERROR: gpu_error_samples,
    rules.GPU_IDLE: gpu_idle_samples,
    rules.RANK_LOST: rank_lost_samples,
    rules.RANK_FAILED: rank_failed_samples,
    rules.STALL: stall_samples,
    rules.DESYNC: desync_samples,
    rules.TIMEOUT: timeout_samples,
    rules.LOSSY: lossy_samples,
}
"""By rule, a generator of titles and of what the rule is given."""
