"""RunStates that hang: ranks with collectives in flight, and one that has not joined."""

from __future__ import annotations

from ddpwatch import wire
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from tests.builders.fake_rank import make_beat, make_group, make_hello
from tests.builders.synthetic_run import SECOND, make_run, train

SYNC, DATA = wire.PHASES.index("sync"), wire.PHASES.index("data")
NOW_S = 100
HALF_HOUR_NS = 1800 * SECOND
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:36507"
SLEEPS = [("nap", "/srv/job/train.py", 88), ("main", "/srv/job/train.py", 12)]
GLOO = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 20000ms for recv operation to complete"
)


def halted(groups_by_rank, heard_s=None, steps=90, sync=2, hosts=(), **beats_by_rank):
    """A run whose ranks report these groups: a group, a list of them, or None for none.

    A rank with something in flight is in sync, any other in data; `r2={"pause": "x"}` changes the heartbeat of rank 2,
    and `heard_s` has the time of a rank's last one.
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


def missing_in_two_groups():
    """Rank 3 has joined neither in the default group nor in a group of ranks 2 and 3, in which rank 2 waits."""
    side = {"name": "side", "size": 2}
    return halted(
        {
            0: make_group(42, 9),
            1: make_group(42, 9),
            2: [make_group(41), make_group(7, 9, **side)],
            3: [make_group(41), make_group(6, **side)],
        }
    )


def with_timeout(wait_s, timeout_s, **options):
    arrived = make_group(42, wait_s, size=3, timeout_ns=timeout_s * SECOND)
    return halted({0: arrived, 1: make_group(41, size=3), 2: arrived}, **options)


class Watched:
    """Three ranks that have trained, monitored heartbeat by heartbeat."""

    def __init__(self) -> None:
        self.monitor = Monitor(RunState("ab12cd34", "train", 3))
        self.now_ns, self.seq = SECOND, 2
        for rank in range(3):
            self._send(make_hello(rank, 1, world_size=3))
            self._send(wire.Steps(rank=rank, seq=2, steps=train(0, 90)))

    def beat(self, *groups, **reported) -> None:
        """A quarter of a second later all ranks report their group."""
        self.now_ns += SECOND // 4
        self.seq += 1
        for rank, group in enumerate(groups):
            phase = SYNC if group.age_ns else DATA
            self._send(make_beat(rank, seq=self.seq, phase=phase, groups=[group], **{"step": 90, **reported}))
        self.monitor.tick(self.now_ns)

    def wait(self, first_s, last_s) -> None:
        """Rank 1 does not join, and the others wait from the first to the last second."""
        for quarter in range(int(first_s * 4), int(last_s * 4)):
            arrived = make_group(42, quarter / 4, size=3)
            self.beat(arrived, make_group(41, size=3), arrived)

    def go_on(self, seconds) -> None:
        for number in range(seconds * 4):
            self.beat(*[make_group(43 + number, size=3)] * 3)

    def go_on_to(self, step) -> None:
        """A quarter of a second later all ranks have finished the steps before this one."""
        self.beat(*[make_group(43, size=3)] * 3, step=step, steps=train(90, step - 90))

    def end(self, reason) -> None:
        """All ranks say goodbye, a quarter of a second later."""
        self.now_ns += SECOND // 4
        for rank in range(3):
            self._send(wire.Bye(rank=rank, seq=self.seq + 1, reason=reason, text="", mono_ns=9))
        self.monitor.evaluate_now()

    def changes(self):
        return [(event.kind, event.alert.finding.severity) for event in self.monitor.book.drain()
                if event.alert.finding.rule == "stall"]  # fmt: skip

    def _send(self, message) -> None:
        self.monitor.ingest(wire.encode(message), self.now_ns)
