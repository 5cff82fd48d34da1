"""RunStates that hang: ranks with collectives in flight, and one that has not joined."""

from __future__ import annotations

from ddpwatch import wire
from tests.builders.fake_rank import make_beat, make_group
from tests.builders.synthetic_run import SECOND, make_run, train

SYNC, DATA = wire.PHASES.index("sync"), wire.PHASES.index("data")
NOW_S = 100
GLOO = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 20000ms for recv operation to complete"
)


def halted(groups_by_rank, heard_s=None, steps=90, sync=2, hosts=(), **beats_by_rank):
    """A run whose ranks report these groups: a group, a list of them, or None for a rank that reports none.

    A rank with something in flight is in sync, any other in data; `r2={"pause": "x"}` changes the beat of rank 2, and
    `heard_s` says when a rank was heard last.
    """
    state = make_run({rank: train(0, steps, sync=sync) for rank in groups_by_rank}, now_ns=SECOND, hosts=hosts)
    heard_s = {rank: (heard_s or {}).get(rank, NOW_S) for rank in groups_by_rank}
    for rank in sorted(groups_by_rank, key=heard_s.get):
        groups = groups_by_rank[rank]
        groups = groups if isinstance(groups, list) else [groups] if groups else []
        age_ns = max((group.age_ns for group in groups), default=0)
        fields = {"step": steps, "phase": SYNC if age_ns else DATA, "phase_ns": age_ns or 13 * SECOND, "groups": groups}
        beat = make_beat(rank, seq=4, **{**fields, **beats_by_rank.get(f"r{rank}", {})})
        state.apply(beat, int(heard_s[rank] * SECOND))
    state.tick(NOW_S * SECOND)
    return state


def one_missing(wait_s=12.0, missing=2, world=4, **options):
    """All wait in #42, and one rank has joined 41 operations only."""
    ranks = {rank: make_group(41) if rank == missing else make_group(42, wait_s, size=world) for rank in range(world)}
    return halted(ranks, **options)


def crossed(wait_s=9):
    """Of two ranks one waits in the job's own group, and the other in a side group."""
    return halted(
        {
            0: [make_group(41, size=2), make_group(7, 9, name="side", size=2)],
            1: [make_group(42, wait_s, size=2), make_group(6, name="side", size=2)],
        }
    )


def failed(state, texts):
    for rank, text in texts.items():
        state.apply(wire.Bye(rank=rank, seq=7, reason="failed", text=text, mono_ns=1), state.now_ns)
    return state
