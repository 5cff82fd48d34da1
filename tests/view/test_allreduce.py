"""All-reduce screen: share, wire and waiting, the straggler, and buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ddpwatch import wire
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from ddpwatch.view.allreduce import bucket_lines, share_lines, waited_for
from ddpwatch.view.cells import Level, line_columns, plain
from ddpwatch.view.run_view import run_view
from tests.builders.fake_rank import MS, make_snap, make_step


def make_run_view(world=4, received=None, slow=2, buckets=None, at=None, comm="passive", kind="ddp", **step):
    """Run of 60 steps in which the others wait 10 of 40 ms for the slow rank."""
    state = RunState("ab12cd34", "train", world, [Place(rank, "node-a", 100 + rank) for rank in range(world)])
    for rank in range(world if received is None else received):
        late = {"backward": 26} if rank == slow else {"sync": 12} if slow is not None else {}
        steps = [make_step(index, backwards=1, **late, **step) for index in range(60)]
        snap = make_snap(rank, seq=5, steps=steps)
        hello = replace(snap.hello, comm=comm, kind=kind)
        state.apply(replace(snap, hello=hello), now_ns=1)
    for rank, reported in (buckets or {}).items():
        state.apply(wire.Buckets(rank=rank, seq=5, step=59, buckets=reported), now_ns=1)
    monitor, timeline = Monitor(state), Timeline()
    monitor.evaluate_now()
    timeline.follow(state)
    return run_view(monitor, timeline, at=at)


def make_bucket(index, ready_ms, done_ms, size=25 << 20):
    return wire.Bucket(index=index, bytes=size, ready_ns=int(ready_ms * MS), done_ns=int(done_ms * MS))


def share(shown, columns=100, rows=16):
    return [plain(line) for line in share_lines(shown, columns, rows)]


def buckets(shown, columns=100, rows=12, **options):
    return [plain(line) for line in bucket_lines(shown, columns, rows, **options)]


def test_the_share_is_shown_with_wire_waiting_verdict_and_straggler():
    lines = share(make_run_view())

    assert lines[0] == "all-reduce  24% of the step = wire 5% + waiting 19%   ▲ over 10%"
    assert lines[1].startswith("waiting for rank 2, which costs ")
    assert lines[2] == "overlap     unknown: bucket timing is off"
    assert "▒ wire   █ waiting   ╌╌ threshold 10%" in lines[-1]
    assert any("10% ┼" in line for line in lines)


def test_a_small_share_is_well():
    lines = share(make_run_view(slow=None))

    assert lines[0] == "all-reduce  7% of the step = wire 7% + waiting 0%   ✓ under 10%"
    assert lines[1] == "waiting for no rank in particular"


def test_where_a_rank_is_not_heard_nothing_is_guessed():
    lines = share(make_run_view(received=3, slow=None))

    assert "wire and waiting are unknown" in lines[0]
    assert lines[1] == "waiting for unknown: no data from some ranks"
    assert "▤ sync, not split" in lines[-1]
    assert "wire" not in lines[-1]


def test_without_ddp_it_says_what_is_not_measured():
    shown = make_run_view(kind="fsdp2")

    assert share(shown)[0].startswith("collectives")
    assert "overlap     not measured: FSDP2 has no DDP buckets" in share(shown)
    assert buckets(shown)[0].startswith("FSDP2: gradient buckets, their overlap and buffer broadcasts are parts of DDP")


def test_overlap_is_shown_if_buckets_are_timed():
    assert share(make_run_view(busy_ns=48 * MS))[2].startswith("overlap     80% of the gradient all-reduce")


def test_bus_bandwidth_is_shown_beside_the_overlap():
    line = share(make_run_view(busy_ns=48 * MS, comm_bytes=480_000_000))[2]

    assert line.endswith(" is hidden behind backward · 15 GB/s bus bandwidth")


def test_without_steps_or_with_one_rank_it_says_why_there_is_nothing():
    assert "no step yet" in share(make_run_view(received=0))[0]
    assert "only one rank" in share(make_run_view(world=1, slow=None))[0]


def test_the_step_that_is_looked_back_at_is_marked():
    assert any("▼" in line for line in share(make_run_view(at=30)))
    assert not any("▼" in line for line in share(make_run_view()))


@given(st.integers(0, 130), st.integers(0, 30), st.sampled_from([None, 0, 3]))
def test_all_of_it_fits_any_size(columns, rows, received):
    if received not in _shown:
        reported = [make_bucket(index, index, index + 2 + index / 9) for index in range(20)]
        _shown[received] = make_run_view(received=received, buckets=None if received == 0 else {0: reported}, at=7)
    for draw in (share_lines, bucket_lines):
        lines = draw(_shown[received], columns, rows)
        assert len(lines) <= rows
        assert all(line_columns(line) <= columns for line in lines)


_shown: dict = {}


def test_buckets_have_size_times_overlap_and_bus_bandwidth():
    # The slow rank computes backward for 26 ms.
    reported = [make_bucket(2, 20, 32), make_bucket(0, 4, 8, size=1 << 20), make_bucket(1, 10, 20)]
    lines = buckets(make_run_view(buckets={0: reported, 2: reported}))

    assert lines[0] == "rank 2, which the others wait for · step 59 · 3 buckets, 51M · times in ms"
    assert lines[1].split() == ["#", "SIZE", "READY", "TOOK", "SINCE", "START", "OF", "BACKWARD", "HIDDEN", "GB/s"]
    rows = [line.split() for line in lines[2:5]]
    assert [row[:4] for row in rows] == [
        ["0", "1.0M", "4.00", "4.00"],
        ["1", "25M", "10.0", "10.0"],
        ["2", "25M", "20.0", "12.0"],
    ]
    # 25 MiB x 2 x 3/4 in 10 ms.
    assert [row[-2:] for row in rows] == [["100%", "0.39"], ["100%", "3.93"], ["50%", "3.28"]]
    assert lines[5].startswith("━ hidden behind backward   █ exposed")


def test_the_bar_distinguishes_hidden_from_exposed_time():
    reported = [make_bucket(0, 0, 13), make_bucket(1, 13, 39), make_bucket(2, 30, 38)]
    lines = buckets(make_run_view(buckets={2: reported}), columns=45 + 39)
    bars = [line[29 : 29 + 39] for line in lines[2:5]]

    assert bars[0] == "━" * 13 + " " * 13 + "╎" + " " * 12
    assert bars[1] == "·" * 13 + "━" * 13 + "█" * 13
    assert bars[2] == "·" * 30 + "█" * 8 + " "


def test_an_end_that_could_not_be_seen_is_not_made_up():
    # The agent reports the end of the pass for buckets whose end it has not seen.
    reported = [make_bucket(0, 1, 30), make_bucket(1, 5, 30), make_bucket(2, 9, 0), make_bucket(3, 9, 20)]
    lines = buckets(make_run_view(buckets={2: reported}))

    assert [line.split()[3] for line in lines[2:6]] == ["–", "–", "–", "11.0"]
    assert [line.split()[-1] == "–" for line in lines[2:6]] == [True, True, True, False]
    assert "┄" in lines[2]


def test_several_backward_passes_in_a_step_leave_the_overlap_unproven():
    shown = make_run_view(buckets={2: [make_bucket(0, 1, 3)]})
    steps = [make_step(60, backwards=2)]
    shown.state.apply(wire.Steps(rank=2, seq=6, steps=steps), 1)
    shown.state.apply(wire.Buckets(rank=2, seq=6, step=60, buckets=[make_bucket(0, 1, 3)]), 1)
    row = buckets(shown)[2].split()

    assert row[-2] == "–"
    assert row[-1] != "–"


def test_more_buckets_than_rows_are_counted():
    reported = [make_bucket(index, index, index + 1.5) for index in range(30)]
    lines = buckets(make_run_view(buckets={0: reported}), rows=10)

    assert len(lines) == 10
    assert lines[-2] == "… 24 more"
    assert sum(line.strip().startswith(str(index)) for index, line in enumerate(lines[2:-2])) == 6


def test_the_rank_is_the_one_that_is_asked_for_or_the_first_that_has_any():
    reported = {1: [make_bucket(0, 1, 2)], 3: [make_bucket(0, 1, 2)]}

    assert buckets(make_run_view(buckets=reported))[0].startswith("rank 1 · step 59")
    assert buckets(make_run_view(buckets=reported), rank=3)[0].startswith("rank 3 · ")
    assert "comm=" in " ".join(buckets(make_run_view(buckets=reported), rank=0))
    assert "comm=" in " ".join(buckets(make_run_view(buckets=reported), rank=99))


@pytest.mark.parametrize("columns", [60, 90])
def test_without_buckets_it_says_how_to_have_them(columns):
    text = " ".join(buckets(make_run_view(), columns=columns))

    assert 'ddpwatch.agent.install(model, comm="buckets")' in text
    assert "One registered by your script is timed anyway" in text
    assert "next step" in buckets(make_run_view(comm="hook"))[0]


def test_of_one_rank_there_is_no_bus():
    shown = make_run_view(world=1, slow=None, buckets={0: [make_bucket(0, 1, 3)]})

    assert buckets(shown)[2].split()[-1] == "–"


def test_huge_numbers_stay_in_their_columns():
    reported = [wire.Bucket(index=4095, bytes=2**62, ready_ns=1, done_ns=2), wire.Bucket(0, 2**62, 2**61, 2**62)]
    lines = buckets(make_run_view(buckets={2: reported}))

    assert {line_columns(line) for line in bucket_lines(make_run_view(buckets={2: reported}), 100, 12)[2:4]} == {100}
    assert lines[3].split()[0] == "4095"
    assert lines[3].endswith(">9999")


def test_a_rank_is_waited_for_if_it_has_an_alert_or_costs_enough():
    assert waited_for(make_run_view())[0] == (2,)
    assert waited_for(make_run_view(slow=None)) == ((), None)
    assert waited_for(make_run_view(received=0)) == ((), None)


def test_meaning_is_not_by_colour_alone():
    first = share_lines(make_run_view(), 100, 16)[0]

    assert [cell.text for cell in first if cell.level is Level.WARN] == ["24%", "▲ over 10%"]
