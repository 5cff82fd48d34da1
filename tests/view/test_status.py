"""JSON object and text screen of `ddpwatch status`."""

from __future__ import annotations

import json

import pytest

from ddpwatch import wire
from ddpwatch.core.limits import DEFAULTS, LivenessLimits
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from ddpwatch.core.units import ranks_text
from ddpwatch.view.cells import Level, line_columns, plain
from ddpwatch.view.run_view import current_view
from ddpwatch.view.status import status_object, status_screen
from tests.builders.fake_rank import MS, make_beat, make_gpu, make_gpus, make_hello, make_snap, make_step
from tests.view.pages import make_monitor

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202eevil\nname"


def make_state(world=4, received=None, slow=2, name="train", **snap):
    """A run with one slow rank, 60 steps in."""
    state = RunState("ab12cd34ab12cd34", name, world, [Place(rank, "node-a", 100 + rank) for rank in range(world)])
    for rank in range(world if received is None else received):
        late = {"backward": 26} if rank == slow else {"sync": 12}
        steps = [make_step(index, **late) for index in range(60)]
        state.apply(make_snap(rank, seq=5, steps=steps, **snap), now_ns=1)
    return state


def evaluated(state, limits=DEFAULTS):
    monitor = Monitor(state, limits)
    monitor.evaluate_now()
    return monitor


def cells(state, columns=80, rows=None):
    return status_screen(current_view(evaluated(state)), columns, rows)


def screen(state, columns=80, rows=None):
    return [plain(line) for line in cells(state, columns, rows)]


def keys(value):
    """Nested keys of an object, without its values."""
    if isinstance(value, dict):
        return {name: keys(item) for name, item in value.items()}
    return [keys(value[0])] if isinstance(value, list) and value else None


RANK_KEYS = [
    "rank",
    "host",
    "pid",
    "state",
    "step",
    "phase",
    "activity",
    "step_ms",
    "self_ms",
    "data_ms",
    "forward_ms",
    "backward_ms",
    "sync_ms",
    "wait_ms",
    "optimizer_ms",
    "other_ms",
    "pauses",
    "batch",
    "cpu_percent",
    "rss_bytes",
    "lost",
    "gpu",
]


POINT_KEYS = ("op", "place", "phase", "share", "wire_share", "wait_share", "steps_share", "mean_ms")


@pytest.mark.parametrize("received", [0, 2, 4])
def test_the_object_has_the_documented_keys_whatever_is_known(received):
    state = make_state(received=received)

    assert keys(status_object(current_view(Monitor(state)))) == {
        "schema": None,
        "run": dict.fromkeys(["id", "name", "backend", "world_size", "hosts", "state"]),
        "step": None,
        "step_ms": None,
        "samples_per_s": None,
        "effective_batch": None,
        "allreduce": dict.fromkeys(["share", "wire_share", "wait_share", "overlap"]),
        "sync_points": None if received < 4 else [dict.fromkeys(POINT_KEYS)],
        "scaling": None,
        "ranks": [dict.fromkeys(RANK_KEYS) | {"pauses": dict.fromkeys(["gc_share", "save_share", "eval_share"])}],
        "alerts": None,
    }


def test_the_object_has_the_figures():
    state = make_state()
    status = status_object(current_view(Monitor(state)))

    assert status["schema"] == 1
    assert status["run"] == {
        "id": "ab12cd34ab12cd34",
        "name": "train",
        "backend": "gloo",
        "world_size": 4,
        "hosts": 1,
        "state": "live",
    }
    assert (status["step"], status["step_ms"], status["effective_batch"]) == (60, 40.0, 128)
    assert status["samples_per_s"] == 3200.0
    assert status["allreduce"] == {"share": 0.2375, "wire_share": 0.05, "wait_share": 0.1875, "overlap": None}
    assert [(point["op"], point["share"], point["wait_share"]) for point in status["sync_points"]] == [
        ("gradient all-reduce", 0.2375, 0.1875)
    ]
    assert status["alerts"] == []
    assert status["ranks"][2] == {
        "rank": 2,
        "host": "node-a",
        "pid": 1002,
        "state": "ok",
        "step": 60,
        "phase": "sync",
        "activity": None,
        "step_ms": 40.0,
        "self_ms": 38.0,
        "data_ms": 1.0,
        "forward_ms": 8.0,
        "backward_ms": 26.0,
        "sync_ms": 2.0,
        "wait_ms": 0.0,
        "optimizer_ms": 2.0,
        "other_ms": 1.0,
        "pauses": {"gc_share": 0.0, "save_share": 0.0, "eval_share": 0.0},
        "batch": 32,
        "cpu_percent": 98.0,
        "rss_bytes": 812 << 20,
        "lost": 0,
        "gpu": None,
    }


def test_the_object_has_the_first_gpu_of_a_rank():
    state = make_state()
    gpus = [make_gpu(power_mw=312_345, throttle=["sw_power_cap"]), make_gpu(device="cuda:1", util_percent=1)]
    state.apply(make_gpus(1, gpus, seq=99, mono_ns=9), 2)
    status = status_object(current_view(Monitor(state)))

    assert status["ranks"][0]["gpu"] is None
    assert status["ranks"][1]["gpu"] == {
        "name": "Stand-in 80GB",
        "util": 95,
        "mem_util": 40,
        "mem_used": 30 << 30,
        "mem_total": 80 << 30,
        "temp_c": 60,
        "power_w": 312.3,
        "throttle": ["sw_power_cap"],
    }


def test_the_printed_shares_add_up():
    state = RunState("ab12cd34", "train", 3)
    for rank, sync in enumerate((1_000_003, 3_333_331, 7_777_777)):
        state.apply(make_snap(rank, steps=[make_step(index, sync_ns=sync) for index in range(5)]), now_ns=1)
    shares = status_object(current_view(Monitor(state)))["allreduce"]

    assert round(shares["wire_share"] + shares["wait_share"], 4) == shares["share"]


def test_a_missing_rank_has_no_figures_and_leaves_waiting_unproven():
    state = make_state(received=3)
    status = status_object(current_view(Monitor(state)))

    assert status["ranks"][3]["state"] == "missing"
    assert status["ranks"][3]["step_ms"] is None
    assert status["allreduce"]["wire_share"] is None
    assert status["ranks"][0]["wait_ms"] is None
    assert status["allreduce"]["share"] is not None


def test_the_object_is_json_even_if_a_rank_sends_infinity():
    state = make_state()
    state.apply(make_beat(0, seq=6, cpu_percent=float("inf")), now_ns=2)

    json.dumps(status_object(current_view(Monitor(state))), allow_nan=False)
    assert screen(state)


def test_the_screen_answers_at_a_glance():
    lines = screen(make_state())

    assert lines[0].startswith("train · gloo · 4 ranks on 1 host · step 60 · batch 128")
    assert lines[0].endswith("● live")
    assert "step time     40.0 ms · all times in ms, medians of 26 steps" in lines
    assert "throughput    3,200 samples/s · 800 per rank" in lines
    assert "all-reduce    24% = wire 5% + waiting 19%  ▲ over 10%" in lines
    (alert,) = [line for line in lines if line.startswith("▲ straggler   ")]
    assert "rank 2 slow in backward: 26.0 ms vs 16.0 ms on the others" in alert
    assert not any(line.startswith("slowest rank") for line in lines)


def test_the_table_has_a_row_a_rank_with_all_columns_at_80():
    lines = screen(make_state())
    heading = next(number for number, line in enumerate(lines) if line.startswith("RANK"))

    assert lines[heading].split() == [
        "RANK",
        "ONE",
        "STEP",
        "SELF",
        "SYNC",
        "WAIT",
        "data",
        "fwd",
        "bwd",
        "opt",
        "other",
        "CPU%",
        "RSS",
        "STATE",
    ]
    assert [line.split()[0] for line in lines[heading + 1 : heading + 5]] == ["0", "1", "2", "3"]
    assert "▲38.0 2.00 0.00 1.00 8.00 26.0 2.00  1.00   98 812M ▲ slow" in lines[heading + 3]
    assert "░" in lines[heading + 1]
    assert "░" not in lines[heading + 3], "the slow rank does not wait"


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_a_rank_with_a_mark_is_not_called_ok(columns):
    lines = screen(make_state(), columns)
    heading = next(number for number, line in enumerate(lines) if line.startswith("RANK"))

    assert [line.endswith("▲ slow") for line in lines[heading + 1 : heading + 5]] == [False, False, True, False]
    assert ["▲38.0" in line for line in lines[heading + 1 : heading + 5]] == [False, False, True, False]


def test_a_small_share_is_not_marked():
    state = make_state(world=2, received=0)
    for rank in range(2):
        state.apply(make_snap(rank, steps=[make_step(index, sync=1) for index in range(60)]), now_ns=1)
    text = "\n".join(screen(state))

    assert "over 10%" not in text
    assert "none stands out" in text


def test_one_rank_has_no_all_reduce():
    text = "\n".join(screen(make_state(world=1)))

    assert "1 rank on 1 host" in text
    assert "all-reduce" not in text


@pytest.mark.parametrize("columns", [40, 80, 81, 99, 100, 120, 200, 300])
@pytest.mark.parametrize("received", [0, 3, 4])
def test_no_line_is_wider_than_the_terminal(columns, received):
    note = wire.Note(rank=0, seq=1, kind="k", text="a rather long note " * 20, step=0, mono_ns=1)
    state = make_state(received=received, name="模型 " * 30, notes=[note])
    lines = cells(state, columns)

    assert max(line_columns(line) for line in lines) <= columns
    assert any("STATE" in plain(line) for line in lines)


def test_a_wide_terminal_shows_more():
    narrow, wide = screen(make_state(), 80), screen(make_state(), 200)

    assert "HOST" not in "".join(narrow)
    assert "node-a" in "".join(wide)
    assert max(line.count("█") for line in wide) > 3 * max(line.count("█") for line in narrow)


def test_many_ranks_come_slowest_first_and_fit_the_height():
    state = make_state(world=40, slow=33)
    lines = screen(state, 80, rows=24)
    heading = next(number for number, line in enumerate(lines) if line.startswith("RANK"))

    assert len(lines) == 24
    assert lines[heading + 1].split()[0] == "33"
    shown = [line for line in lines if line.endswith((" ok", " ▲ slow"))]
    assert f"… {40 - len(shown)} more" in lines
    assert len(screen(state, 80)) > 40


@pytest.mark.parametrize("rows", range(8, 24))
def test_a_low_window_still_shows_the_rank_that_matters(rows):
    state = make_state(world=4, slow=2)
    lines = screen(state, 80, rows=rows)

    assert len(lines) <= rows
    assert any(line.startswith("   2 ") for line in lines)
    assert ("… 3 more" in lines) == (rows == 8)


def test_many_ranks_with_one_missing_show_it_first():
    lines = screen(make_state(world=40, received=39), 80, rows=24)
    heading = next(number for number, line in enumerate(lines) if line.startswith("RANK"))

    assert "missing" in lines[heading + 1]


def test_sixteen_ranks_keep_their_order():
    lines = screen(make_state(world=16, slow=9))
    heading = next(number for number, line in enumerate(lines) if line.startswith("RANK"))

    assert [line.split()[0] for line in lines[heading + 1 : heading + 17]] == [str(rank) for rank in range(16)]


def test_states_are_shown_as_words():
    state = make_state(world=6, received=5)
    state.apply(make_beat(0, seq=6, pause="checkpoint"), now_ns=LivenessLimits.NO_HEARTBEAT_NS + 1)
    state.apply(make_beat(1, seq=6, phase_ns=12_000_000_000), now_ns=LivenessLimits.NO_HEARTBEAT_NS + 1)
    state.apply(wire.Bye(rank=2, seq=6, reason="exit", text="", mono_ns=9), now_ns=1)
    state.apply(wire.Bye(rank=3, seq=6, reason="off", text="KeyError: x", mono_ns=9), now_ns=1)
    rows = [line for line in screen(state, 120) if line.lstrip()[:1].isdigit()]

    for row, words in zip(
        rows, ["‖ checkpoint", "▲ 12 s in sync", "■ exited", "▲ agent off", "▲ no heartbeat", "✖ missing"], strict=True
    ):
        assert row.endswith(words)
    assert any(line.endswith("rank 3: its agent disabled itself (KeyError: x)") for line in screen(state, 120))


def test_unknown_figures_are_shown_as_such():
    nothing = screen(make_state(received=0))

    assert nothing[0].endswith("… no heartbeat yet")
    assert "figures       unknown: no step yet" in nothing


def test_steps_without_a_common_one_are_unproven():
    state = RunState("ab12cd34", "train", 2)
    for rank in range(2):
        state.apply(make_snap(rank, steps=[make_step(rank + 1)]), now_ns=1)

    assert "figures       unknown: no step yet that all ranks have finished" in screen(state)


def test_notes_are_shown_beneath_and_losses_once_as_alerts():
    note = {"kind": "dataparallel", "text": "DataParallel is used", "step": 0, "mono_ns": 1}
    state = make_state()
    for rank in range(2):
        state.apply(wire.Note(rank=rank, seq=6, **note), now_ns=1)
    state.apply(make_beat(3, seq=16, dropped=4), now_ns=1)
    state.count_bad(1, "why not")
    state.ingest(b"\x81\xa1t\xa3new", now_ns=1)
    lines = screen(state)

    assert "▲ ranks 0-1: DataParallel is used" in lines
    assert "▲ lossy       rank 3: 10 messages lost, 4 records dropped by the agent" in lines
    assert "▲ lossy       rank 1: 1 unreadable or invalid record" in lines
    assert len([line for line in lines if "lost" in line or "unreadable" in line]) == 2
    assert any("of an unknown kind" in line for line in lines)


def test_a_healthy_run_has_nothing_beneath():
    assert screen(make_state())[-1].startswith("▚ data")


def test_ranks_are_listed_as_people_write_them():
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 3, 7]) == "ranks 0-3, 7"


def test_meaning_is_never_by_colour_alone():
    """Text colored as a warning has a mark or a word, too."""
    state = make_state()
    warned = [plain(line) for line in cells(state) if any(cell.level in {Level.WARN, Level.BAD} for cell in line)]

    assert warned
    assert all("▲" in line or "✖" in line or "slowest" in line for line in warned)


def test_hostile_names_cannot_reach_the_terminal():
    hello = make_hello(0, host=HOSTILE, backend=HOSTILE, model=HOSTILE)
    note = wire.Note(rank=0, seq=1, kind=HOSTILE, text=HOSTILE, step=0, mono_ns=1)
    state = RunState("ab12cd34", HOSTILE, 1, [Place(0, HOSTILE, 1)])
    beat = make_beat(0, pause=HOSTILE)
    state.apply(make_snap(0, hello=hello, beat=beat, steps=[make_step(1), make_step(2)], notes=[note]), now_ns=1)
    state.count_bad(0, HOSTILE)
    text = "".join(screen(state, 200)) + json.dumps(status_object(current_view(Monitor(state))), ensure_ascii=False)

    assert text.count("evil name") >= 6
    assert text.isprintable()
    assert "owned" not in text


def test_a_phase_longer_than_the_longest_step_does_not_break_the_bar():
    """Medians of phases may add up to more than the median of the step."""
    state = RunState("ab12cd34", "train", 1)
    uneven = [make_step(1, forward_ns=90 * MS), make_step(2, backward_ns=90 * MS), make_step(3, data_ns=90 * MS)]
    state.apply(make_snap(0, steps=uneven), now_ns=1)

    assert max(line_columns(line) for line in cells(state)) <= 80


def test_a_run_with_only_its_first_step_explains_why_it_has_no_figures():
    state = RunState("ab12cd34", "train", 2)
    for rank in range(2):
        state.apply(make_snap(rank, steps=[make_step(0)]), now_ns=1)

    assert "figures       unknown: only the first step, which is not measured" in screen(state)


def test_one_rank_has_no_share_of_an_all_reduce():
    monitor = make_monitor(slow=None, world=1)
    assert set(status_object(current_view(monitor))["allreduce"].values()) == {None}
