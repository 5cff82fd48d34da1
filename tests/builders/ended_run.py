"""RunStates whose ranks lose their heartbeat, end or fail."""

from __future__ import annotations

from ddpwatch import wire
from ddpwatch.core.limits import RankLostLimits
from tests.builders.fake_rank import make_beat
from tests.builders.synthetic_run import SECOND, look, make_run, train

CLOSED = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4321"
LOST = "RuntimeError: Connection closed by peer\n/lib/torch/autograd/graph.py:9 in run\n/home/me/train.py:88 in fit"
SMALL = wire.Collective("0", 66, "all_reduce", "[1000] Float", True, 4000)
LARGE = wire.Collective("0", 66, "all_reduce", "[9000] Float", True, 36000)


def beating(last_s, world=4, now_s=None, **options):
    """A run of 90 steps whose ranks were last heard at these seconds; those not named are heard now."""
    state = make_run({rank: train(0, 90) for rank in range(world)}, now_ns=SECOND, **options)
    now_s = max([100.0, *last_s.values()]) if now_s is None else now_s
    for at_s, rank in sorted((last_s.get(rank, now_s), rank) for rank in range(world)):
        state.apply(make_beat(rank, seq=4, step=90), int(at_s * SECOND))
    state.tick(int(now_s * SECOND))
    return state


def end(state, *ranks):
    """Their processes are found ended, and those that live are heard once more."""
    for rank in ranks:
        state.apply(wire.Gone(rank=rank, seq=0), state.now_ns)
    return outlived(state)


def fail(state, rank, text="ValueError: bad", at_s=None):
    """An exception ends a rank now, or has done so at that time; those that live are heard once more."""
    at_ns = state.now_ns if at_s is None else int(at_s * SECOND)
    state.apply(wire.Bye(rank=rank, seq=5, reason="failed", text=text, mono_ns=1), at_ns)
    return outlived(state)


def outlived(state):
    """Those that live are heard once more, late enough to show that they do."""
    alive = [rank for rank in state.ranks.values() if state.condition(rank) == "ok"]
    state.tick(state.now_ns + RankLostLimits.PROOF_NS)
    for rank in alive:
        rank.apply_beat(make_beat(rank.rank, step=90, mono_ns=state.now_ns), state.now_ns)
    return state


def ended_with(state, codes, ago_ns=0):
    """Processes are found ended, each with its exit code, all at about the same time."""
    for rank, code in codes.items():
        state.apply(wire.Gone(rank=rank, seq=0, exit_code=code, ago_ns=ago_ns), state.now_ns)
    return outlived(state)


def broken(aborted, ops, world=4):
    """One rank is aborted, and others fail in these operations; the rest is ended by the launcher."""
    state = beating(dict.fromkeys(range(world), 99.9), world=world, now_s=100)
    for rank, op in ops.items():
        bye = wire.Bye(rank=rank, seq=5, reason="failed", text=LOST, mono_ns=1, collectives=[op])
        state.apply(bye, state.now_ns)
    rest = set(range(world)) - {aborted, *ops}
    return look(ended_with(state, {aborted: -6, **dict.fromkeys(rest, -15)}))
