"""Runs to draw: with all figures, with almost none, and with hostile text and numbers."""

from __future__ import annotations

from hypothesis import strategies as st

from ddpwatch import wire
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from ddpwatch.view.cells import line_columns, plain
from ddpwatch.view.run_view import run_view
from tests.builders.fake_rank import MS, make_beat, make_gpu, make_gpus, make_hello, make_snap, make_step

HOSTILE = "\x1b]0;owned\x07\x1b[2J[bold red]evil[/]\u202e\n名前は長いです שלום a\u0301\u0301"
HUGE_GPU = wire.Gpu(
    "cuda:0", util_percent=100, used_bytes=2**62, total_bytes=1, own_bytes=2**62, temperature_c=2**62, power_mw=2**62,
    power_limit_mw=1, sm_mhz=2**62, sm_max_mhz=2**62, throttle=["hw_slowdown", HOSTILE], pcie_tx_bytes_s=2**62,
    ecc_corrected=2**62, ecc_uncorrected=2**62, xids=[2**62, 79], allocated_bytes=2**62, reserved_bytes=2**62,
    processes=[wire.GpuProcess(2**62, None, HOSTILE)] * 9, absent={HOSTILE: HOSTILE, "power_mw": "not supported"},
)  # fmt: skip
widths = st.integers(20, 250)
heights = st.integers(1, 80)


def make_run_view(monitor, **options):
    monitor.evaluate_now()
    timeline = Timeline()
    timeline.follow(monitor.state)
    return run_view(monitor, timeline, **options)


def make_monitor(world=4, received=None, slow=2, steps=120, slow_ms=26, **snap):
    """A run in which the backward pass of one rank takes 26 ms instead of 16."""
    state = RunState("ab12cd34ab12cd34", "train", world, [Place(rank, "node-a", 100 + rank) for rank in range(world)])
    for rank in range(world if received is None else received):
        late = {"backward": slow_ms} if rank == slow else {"sync": 12}
        done = [make_step(index, **late) for index in range(steps)]
        state.apply(make_snap(rank, seq=5, steps=done, **snap), now_ns=1)
    return Monitor(state)


def texts(lines):
    return [plain(line) for line in lines]


def page(lines):
    """Lines joined into one text, in which wrapped sentences can be found."""
    return " ".join(" ".join(texts(lines)).split())


def assert_fits(lines, columns, rows=None):
    for line in lines:
        assert line_columns(line) <= columns, plain(line)
        assert all(char.isprintable() for cell in line for char in cell.text), line
    if rows is not None:
        assert len(lines) <= rows


@st.composite
def run_views(draw):
    """Random run: with missing, ended and failed ranks, missing steps, and hostile text."""
    world = draw(st.integers(1, 6))
    text = draw(st.sampled_from(["", "node-a", HOSTILE, HOSTILE * 5, "x" * 200, "名" * 200]))[:200]
    state = RunState(text, text, world, [Place(rank, text, 0) for rank in range(draw(st.integers(0, world)))])
    monitor = Monitor(state)
    for rank in range(draw(st.integers(0, world))):
        steps = draw(st.sampled_from([0, 1, 12, 40]))
        slow = draw(st.sampled_from([0, 1, 30, 10**9]))
        done = [make_step(index, data=slow, fingerprint=7) for index in range(steps)]
        hello = make_hello(
            rank, 5, host=text, model=text, torch=text, kind=text, backend=text, ddp={text: text, "a": "b"},
            parameters=draw(st.sampled_from([0, 2**62])), unix_ns=draw(st.sampled_from([0, 10**18, 2**62])),
        )  # fmt: skip
        beat = make_beat(
            rank, 5, step=steps, pause=draw(st.sampled_from(["", text])), hook_ns=draw(st.sampled_from([0, 2**62])),
            cpu_percent=draw(st.sampled_from([0.0, 98.0, 1e300])), rss_bytes=draw(st.sampled_from([0, 2**62])),
            agent_cpu_ns=draw(st.sampled_from([0, 2**62])), phase_ns=draw(st.sampled_from([0, MS, 2**62])),
        )  # fmt: skip
        notes = [wire.Note(rank=rank, seq=5, kind="k", text=text, step=3, mono_ns=at) for at in range(5)]
        loader = wire.Loader(rank=rank, seq=5, step=0, epoch=0, sampler=text, distributed=False, workers=2, length=9)
        gpus = draw(st.sampled_from([None, [], [wire.Gpu(text)], [HUGE_GPU, make_gpu(device=text, name=text)]]))
        reported = None if gpus is None else make_gpus(rank, gpus, why=text)
        state.apply(make_snap(rank, 5, done, hello, beat, notes=notes, loaders=[loader], gpus=reported), now_ns=1)
        ending = draw(st.sampled_from(["", "", "closed", "failed", "off", "gone"]))
        if ending == "gone":
            state.apply(wire.Gone(rank=rank, seq=0), 2)
        elif ending:
            state.apply(wire.Bye(rank=rank, seq=6, reason=ending, text=text * 3, mono_ns=9), 2)
    monitor.tick(draw(st.sampled_from([3, 20_000_000_000])))
    at = draw(st.sampled_from([None, 0, 20, 10**6]))
    return make_run_view(monitor, at=at)
