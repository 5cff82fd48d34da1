"""Deterministic runs for the dashboard, and a driver of its keys."""

from __future__ import annotations

import pickle
import time
from collections import Counter, deque
from contextlib import asynccontextmanager
from functools import cache

import msgspec
from textual import events
from textual.keys import _character_to_key

from ddpwatch import wire
from ddpwatch.core.limits import DEFAULTS
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.simulator.gpus import SimulatedGpus
from ddpwatch.simulator.scenario import Fault, Scenario
from ddpwatch.sources.frames import Frame
from ddpwatch.tui.app import Dashboard
from ddpwatch.tui.feed import Feed
from tests.builders.scenario_frames import frames
from tests.recordings.make import HERE as RECORDINGS
from tests.recordings.make import RUN_ID, read

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m[bold red]evil[/] [@click=app.quit]go[/]\u202e名前 שלום\r\n"
"""Tries to restyle, to clear the screen, to set a title, to become a button, and to turn the line round."""
UNIX_NS = 1_790_000_000_000_000_000
"""When all these runs started."""
GIVE_UP_S = 20.0
TRY_S = 0.01


class Played:
    """The part of `RunFollower` that the feed uses, with frames that arrive when the test says so."""

    def __init__(self, monitor: Monitor, later: list[Frame] = ()) -> None:
        self.monitor = monitor
        self.answered = True
        self.idle = True
        self.closed = False
        self.wanted_buckets: list[bool] = []
        self.looked_at: frozenset[int] = frozenset()
        self._coming: deque[Frame] = deque()
        self._later: deque[Frame] = deque(later)

    # --- what the feed uses ---

    def advance(self, timeout_ms: int = 0) -> int:
        self.idle = not self._coming
        if self._coming:
            frame = self._coming.popleft()
            self.monitor.ingest(frame.payload, frame.received_ns)
        return self.monitor.state.now_ns

    def drain(self) -> list:
        return self.monitor.book.drain()

    def read_last_logs(self) -> None:
        """There are none."""

    def want_buckets(self, wanted: bool) -> None:
        self.wanted_buckets.append(wanted)

    def request_stacks(self, ranks: frozenset[int]) -> None:
        self.looked_at = ranks

    def close(self) -> None:
        self.closed = True

    @property
    def said_goodbye(self) -> bool:
        return all(rank.bye is not None for rank in self.monitor.state.ranks.values())

    @property
    def ended(self) -> bool:
        return all(rank.bye is not None or rank.gone_ns is not None for rank in self.monitor.state.ranks.values())

    # --- what a test does with it ---

    def go_on(self, steps: int) -> None:
        """Receive more steps of every rank."""
        last = max(rank.steps.newest for rank in self.monitor.state.ranks.values()) + steps
        while self._later and _first_step(self._later[0]) <= last:
            self._coming.append(self._later.popleft())

    def receive(self, *messages: wire.Message, later_s: int = 0) -> None:
        """Receive these messages, that many seconds later."""
        now_ns = self.monitor.state.now_ns + later_s * 1_000_000_000
        self._coming.extend(Frame(b"", wire.encode(message), now_ns) for message in messages)

    def end_well(self) -> None:
        self.receive(*(_bye(rank, "closed") for rank in self.monitor.state.ranks))

    def end_badly(self, text: str = "RuntimeError: CUDA error") -> None:
        """The first rank fails, the last is killed, the others say goodbye."""
        first, *middle, last = self.monitor.state.ranks
        self.receive(
            _bye(first, "failed", text), wire.Gone(rank=last, seq=0), *(_bye(rank, "closed") for rank in middle)
        )


def played(script: str, *, upto: int | None = None) -> Played:
    """A run of `SCRIPTS`, with all its steps or those before `upto`; the others come with `go_on`."""
    monitor, later = _prepared(script, upto)
    return Played(pickle.loads(monitor), later)


def recorded(name: str) -> Played:
    """A run of real ranks without a message yet: all come with the next `advance`."""
    follower = Played(Monitor(RunState(RUN_ID, "demo", 4)))
    follower._coming.extend(read(RECORDINGS / f"{name}.msgpack.gz"))
    return follower


SCRIPTS = {
    "healthy": Scenario(4, steps=160),
    "straggler": Scenario(8, steps=160, ranks_per_host=4, faults=(Fault((3,), "backward", 0.36),)),
    "late": Scenario(4, steps=160, faults=(Fault((2,), "data", 0.5, onset=80),)),
    "many": Scenario(
        12,
        steps=120,
        ranks_per_host=4,
        faults=(Fault((3,), "data", 0.5, onset=0), Fault((9,), "forward", 0.3, onset=0)),
    ),
    "hostile": Scenario(4, steps=100, faults=(Fault((2,), "backward", 0.5, onset=0),)),
    "long": Scenario(2, steps=900, step_ms=10.0),
    "crowd": Scenario(1024, steps=60, faults=(Fault((777,), "data", 0.6, onset=0),)),
    "one": Scenario(1, steps=60),
    "gpus": Scenario(8, steps=160, faults=(Fault((3,), "backward", 0.36, onset=0),)),
    "512-gpus": Scenario(512, steps=60, faults=(Fault((341,), "backward", 0.36, onset=0),)),
}
_FLUSH_STEPS = {"long": 20, "crowd": 60, "512-gpus": 60}


@cache
def _prepared(script: str, upto: int | None) -> tuple[bytes, list[Frame]]:
    """The monitor, pickled, so that each test has its own."""
    scenario = SCRIPTS[script]
    name = EVIL if script == "hostile" else "resnet50"
    monitor = Monitor(RunState("5ec0de5ec0de5ec0", name, scenario.world_size), DEFAULTS)
    later = []
    reported = frames(scenario, flush_steps=_FLUSH_STEPS.get(script, 5))
    for frame in _with_gpus(reported, scenario) if "gpus" in script else reported:
        dressed = _dressed(frame, hostile=script == "hostile")
        if upto is not None and _first_step(dressed) >= upto:
            later.append(dressed)
        else:
            monitor.ingest(dressed.payload, dressed.received_ns)
    if script == "many":
        _much_goes_wrong(monitor)
    if script == "hostile":
        _all_texts_are_evil(monitor)
    monitor.evaluate_now()
    return pickle.dumps(monitor), later


def _with_gpus(reported, scenario: Scenario):
    """The same run with a GPU for each rank, read twice a second."""
    gpus = SimulatedGpus(scenario.world_size, scenario.ranks_per_host, 0)
    seqs, due_ns = Counter(), Counter()
    for frame in reported:
        message = wire.decode(frame.payload)
        messages = [message]
        for step in message.steps if isinstance(message, wire.Steps) else ():
            if step.end_ns >= due_ns[message.rank]:
                due_ns[message.rank] = step.end_ns + 500_000_000
                gpu = gpus.gpu(message.rank, 1000 + message.rank, step, scenario.faults, step.end_ns)
                messages.append(wire.Gpus(rank=message.rank, seq=0, mono_ns=step.end_ns, gpus=[gpu]))
        for one in messages:
            seqs[one.rank] += 1
            yield frame._replace(payload=wire.encode(msgspec.structs.replace(one, seq=seqs[one.rank])))


def _dressed(frame: Frame, *, hostile: bool) -> Frame:
    """The frame of a rank with all the data of a real one."""
    message = wire.decode(frame.payload)
    if isinstance(message, wire.Hello):
        texts = {"host": f"{EVIL}{message.rank}", "model": EVIL, "backend": EVIL, "kind": EVIL, "ddp": {EVIL: EVIL}}
        message = msgspec.structs.replace(
            message,
            agent_version="0.1.0",
            started_unix_ns=UNIX_NS,
            unix_ns=UNIX_NS,
            **(texts if hostile else {"backend": "nccl", "model": "ResNet", "torch": "2.13.0", "python": "3.11.9"}),
        )
    elif isinstance(message, wire.Beat):
        message = msgspec.structs.replace(
            message, cpu_percent=90.0 + message.rank % 9, rss_bytes=(1400 + 7 * (message.rank % 16)) << 20
        )
    return frame._replace(payload=wire.encode(message))


def _first_step(frame: Frame) -> int:
    message = wire.decode(frame.payload)
    if isinstance(message, wire.Steps):
        return message.steps[0].index
    return message.step - 1 if isinstance(message, wire.Beat) else 0


def _much_goes_wrong(monitor: Monitor) -> None:
    now_ns = monitor.state.now_ns
    for message in (
        wire.Beat(rank=2, seq=100, mono_ns=now_ns, step=120, phase=3, phase_ns=0, cpu_percent=97.0, dropped=500),
        _bye(5, "failed", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
        wire.Gone(rank=7, seq=0),
    ):
        monitor.ingest(wire.encode(message), now_ns)
    _go_on_without(monitor, {5, 7}, {rank: 101 if rank == 2 else 50 for rank in range(12)})


def _all_texts_are_evil(monitor: Monitor) -> None:
    now_ns = monitor.state.now_ns
    for message in (
        wire.Beat(rank=0, seq=42, mono_ns=now_ns, step=100, phase=0, phase_ns=0, pause=EVIL),
        wire.Note(rank=1, seq=42, kind=EVIL, text=EVIL, step=3, mono_ns=9),
        _bye(3, "failed", f"ValueError: {EVIL}"),
    ):
        monitor.ingest(wire.encode(message), now_ns)
    _go_on_without(monitor, {3}, {0: 43, 1: 43, 2: 42})


def _go_on_without(monitor: Monitor, left: set[int], seqs: dict[int, int]) -> None:
    """Receive the others a second later: only then it is clear that these ranks have gone."""
    now_ns = monitor.state.now_ns + 1_000_000_000
    for rank in monitor.state.ranks.values():
        if rank.rank not in left:
            beat = msgspec.structs.replace(rank.beat, seq=seqs[rank.rank], mono_ns=now_ns)
            monitor.ingest(wire.encode(beat), now_ns)


def buckets_of(follower: Played) -> list[wire.Buckets]:
    """What ranks send while their buckets are subscribed to."""
    timed = [
        wire.Bucket(index, 25 << 20, (5 + 9 * index) * 1_000_000, (12 + 9 * index) * 1_000_000) for index in (0, 1, 2)
    ]
    return [wire.Buckets(rank=rank, seq=0, step=100, buckets=timed) for rank in follower.monitor.state.ranks]


def hung(follower: Played, missing: int) -> list[wire.Beat]:
    """Heartbeats of the ranks after all of them have waited for one for some seconds."""
    ranks = follower.monitor.state.ranks
    beats = []
    for number, rank in ranks.items():
        waits = number != missing
        group = wire.Group("0", len(ranks), 1042 if waits else 1041, 1041, "", "all_reduce" if waits else "", 4096)
        group = msgspec.structs.replace(group, age_ns=12_000_000_000 if waits else 0)
        phase = wire.PHASES.index("sync" if waits else "data")
        changes = {"mono_ns": 2**61, "phase": phase, "phase_ns": 12_000_000_000, "groups": [group]}
        beats.append(msgspec.structs.replace(rank.beat, seq=rank.beat.seq + 1_000_000, **changes))
    return beats


def _bye(rank: int, reason: str, text: str = "") -> wire.Bye:
    # A number of 0 stands outside the numbered stream.
    return wire.Bye(rank=rank, seq=0, reason=reason, text=text, mono_ns=1)


def no_runs() -> list:
    return []


class Stage:
    """A dashboard that is up, and what a person does with it and sees of it."""

    def __init__(self, app: Dashboard, pilot) -> None:
        self.app, self.pilot = app, pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def burst(self, text: str) -> None:
        """Type this as a paste or a slow line does it: all at once, whatever the first of it opens."""
        for character in text:
            key = "enter" if character == "\r" else character if character.isalnum() else _character_to_key(character)
            self.app.post_message(events.Key(key, character))
        await self.settle()

    async def until(self, condition, what: str = "") -> None:
        """Wait until this holds, and fail with the screen if it never does."""
        deadline_s = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline_s:
            if condition():
                return
            await self.pilot.pause(TRY_S)
        raise AssertionError(f"waited in vain for {what or condition}; the screen:\n{self.text()}")

    async def sees(self, *texts: str) -> None:
        """Wait until all of these are on the screen."""
        await self.until(lambda: all(text in self.text() for text in texts), repr(texts))

    async def misses(self, *texts: str) -> None:
        """Wait until none of these is on the screen."""
        await self.until(lambda: not any(text in self.text() for text in texts), f"no {texts!r}")

    async def shows(self, pane: str) -> None:
        """Wait until this screen is shown, and drawn."""
        await self.until(lambda: self.pane == pane, f"screen {pane}")
        await self.settle()

    async def settle(self) -> list[str]:
        """Wait until nothing changes any more, and return the lines of the screen."""
        before: list[str] = []
        deadline_s = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline_s:
            await self.pilot.pause()
            now = self.lines()
            if now == before:
                return now
            before = now
        raise AssertionError(f"it never stands still:\n{self.text()}")

    async def resize(self, columns: int, rows: int) -> None:
        await self.pilot.resize_terminal(columns, rows)
        await self.until(lambda: self.app.screen.size == (columns, rows), f"size {columns}x{rows}")
        await self.settle()

    async def click(self, text: str, *, times: int = 1, last: bool = False) -> None:
        """Click on the first place of the screen that shows the text."""
        await self.sees(text)
        places = [(line.find(text), row) for row, line in enumerate(self.lines()) if text in line]
        column, row = places[-1 if last else 0]
        await self.pilot.click(offset=(column, row), times=times)

    def strips(self) -> list:
        return self.app.screen._compositor.render_strips()

    def lines(self) -> list[str]:
        return [strip.text for strip in self.strips()]

    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines())

    @property
    def header(self) -> str:
        return self.lines()[0]

    @property
    def pane(self) -> str | None:
        return self.app.screen_stack[0].query_one("#switch").current

    @property
    def table(self):
        return next(iter(self.app.screen_stack[0].query(f"#{self.pane} RankTable")))

    @property
    def shown_ranks(self) -> list[int]:
        """Ranks of the table, from top to bottom."""
        return [row.state.rank for row in self.table._rows]


@asynccontextmanager
async def staged(follows=None, size=(120, 40), *, feed: Feed | None = None, simulated: bool = False, **settings):
    """The dashboard on a run, drawn."""
    feed = feed or Feed(DEFAULTS, follows=follows, find=no_runs, simulated=simulated)
    app = Dashboard(feed, **settings)
    app.animation_level = "none"
    async with app.run_test(size=size, notifications=True) as pilot:
        stage = Stage(app, pilot)
        if follows is not None:
            await stage.until(lambda: stage.pane != "lobby" and stage.header.strip(), "the first run view")
        await stage.settle()
        yield stage
