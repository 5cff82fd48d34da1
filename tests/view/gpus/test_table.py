"""The GPU page: waiting, owners of memory, throttling, order, map and details."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch import wire
from ddpwatch.view.cells import Level, line_columns, plain
from ddpwatch.view.columns import Ordering
from ddpwatch.view.gpus.busy_and_waiting import gpu_rows, waiting_percent
from ddpwatch.view.gpus.columns import memory_bar, memory_text
from ddpwatch.view.gpus.detail import NAMES, gpu_curves, gpu_detail
from ddpwatch.view.gpus.table import gpu_map, gpu_page, gpu_table, key_of
from ddpwatch.view.ranks.detail import rank_page
from ddpwatch.view.ranks.table import rank_table
from tests.builders.fake_rank import make_beat, make_gpu, make_gpus
from tests.view.pages import assert_fits, heights, make_monitor, make_run_view, page, run_views, texts, widths

SECOND = 1_000_000_000
BY_HOST = Ordering()
HOT = {"sm_mhz": 1110, "temperature_c": 89, "throttle": ["sw_thermal_slowdown"]}


def gpu_monitor(world=4, hosts=2, backend="nccl", gpus=None, steps=120, **by_rank):
    """Rank 2 is slow and the others wait for it: 10 of 40 ms. `r2=HOT` changes its GPU."""
    monitor = make_monitor(world=world, steps=steps)
    for rank, state in monitor.state.ranks.items():
        host = f"node-{rank * hosts // world}"
        state.apply_hello(
            msgspec.structs.replace(state.hello, backend=backend, host=host, mono_ns=state.hello.mono_ns + 1)
        )
        gpu = make_gpu(device=f"cuda:{rank}", uuid=f"GPU-{rank}", **by_rank.get(f"r{rank}", {}))
        monitor.state.apply(make_gpus(rank, gpus or [gpu], seq=6, mono_ns=9), 2)
    return monitor


def drawn(monitor=None, columns=116, rows=30, first=0, chosen=None, ordering=BY_HOST, **options):
    run_view = make_run_view(monitor or gpu_monitor(), **options)
    return gpu_table(run_view, gpu_page(run_view, ordering), columns, rows, first=first, chosen=chosen)


def line_of(lines, rank):
    return next(line for line in lines if re.match(rf"[▌ ] +{rank} ", plain(line)))


@settings(deadline=None, max_examples=60)
@given(run_views(), widths, heights, st.integers(-2, 30), st.sampled_from(["", "UTIL", "TEMP", "MEMORY", "RANK", "?"]))
def test_it_fits_any_window_whatever_is_known(run_view, columns, rows, first, column):
    found = gpu_page(run_view, Ordering(column))
    lines = gpu_table(run_view, found, columns, rows, first=first, chosen=None)

    assert_fits(lines, columns, rows)
    for entry in found.entries:
        if entry.gpu is not None:
            assert_fits(gpu_detail(entry.gpu, columns), columns)
            assert_fits(gpu_curves(entry.gpu, columns, rows), columns, rows)


@settings(deadline=None, max_examples=20)
@given(run_views(), st.integers(60, 200))
def test_the_rank_table_and_the_rank_page_fit_with_any_gpus(run_view, columns):
    assert_fits(rank_table(run_view.rows, columns, show_host=True), columns)
    for row in run_view.rows:
        assert_fits(rank_page(run_view, row.state.rank, columns, 500), columns)


def test_gpus_stand_below_their_host_whose_line_sums_them_up():
    lines = texts(drawn(gpu_monitor(r2=HOT)))

    assert lines[1].startswith("all 2 hosts  4 GPUs · 95%, 25% waiting · 1.6/2.8 kW · hottest 89 °C")
    assert lines[3].startswith("node-0  2 GPUs · 95%, 25% waiting · 0.8/1.4 kW · hottest 60 °C")
    assert lines[6].endswith("▲ 1 throttled")
    assert [text.split()[0] for text in lines[3:]] == ["node-0", "0", "1", "node-1", "2", "3"]


def test_a_line_shows_all_readings_of_a_gpu():
    text = plain(line_of(drawn(gpu_monitor(r2=HOT)), 2))

    for figure in ("cuda:2", "95%", "30/80G", "89 °C", "400/700 W", "1110/1980", "▲ thermal"):
        assert figure in text


@pytest.mark.parametrize("columns", [76, 116, 196])
def test_utilization_that_is_waiting_is_drawn_as_waiting(columns):
    lines = drawn(columns=columns)
    waits = {rank: plain(line_of(lines, rank)).count("░") for rank in range(4)}
    busy = {rank: plain(line_of(lines, rank)).count("█") for rank in range(4)}

    assert waits[2] == 0 < waits[0] == waits[1] == waits[3]
    assert busy[2] > busy[0] > 2 * waits[0]


def test_without_nccl_only_time_beyond_the_rest_of_the_step_counts_as_waiting():
    for backend, util, waiting in (("nccl", 40, 25), ("gloo", 40, 0), ("gloo", 95, 20), ("nccl", 10, 10)):
        run_view = make_run_view(gpu_monitor(backend=backend, r0={"util_percent": util}))
        [row, *_] = run_view.rows
        assert waiting_percent(row, row.state.gpus.latest.gpus[0]) == pytest.approx(waiting, abs=0.5)


def test_a_rank_that_hangs_in_a_collective_waits_with_all_its_utilization():
    monitor = gpu_monitor(r1={"util_percent": 100})
    monitor.state.apply(make_beat(1, 7, phase=3, phase_ns=5 * SECOND, mono_ns=9), 3)
    line = line_of(drawn(monitor), 1)

    assert "█" not in plain(line)
    assert plain(line).endswith("░ waiting")
    assert "all of it waiting in all-reduce" in page(gpu_detail(gpu_rows(make_run_view(monitor).rows)[1], 100))


def test_looking_back_no_current_reading_is_called_waiting():
    lines = drawn(at=60)

    assert plain(lines[0]) == "‖ as of step 119, not of step 60"
    assert all("░" not in plain(line_of(lines, rank)) for rank in range(4))
    assert not any(", of it" in text for text in texts(lines))
    assert make_run_view(gpu_monitor(), at=60).totals.gpus.waiting_percent is None


def test_memory_is_split_by_owner():
    gpu = make_gpu(used_bytes=60, total_bytes=80, own_bytes=50, reserved_bytes=40)
    bar = memory_bar(gpu, 40)

    assert plain(bar) == "▆" * 20 + "▄" * 5 + "▂" * 5 + "·" * 10
    assert line_columns(memory_bar(wire.Gpu("cuda:0"), 40)) == 40
    assert (
        plain(memory_bar(make_gpu(used_bytes=60, total_bytes=80, own_bytes=None, reserved_bytes=None), 8)) == "▂▂▂▂▂▂··"
    )


@pytest.mark.parametrize(
    ("used", "total", "reported"),
    [(61 << 30, 80 << 30, "61/80G"), (512 << 20, 80 << 30, "512M/80G"), (3 << 30, 0, "3.0G")],
)
def test_memory_has_one_unit_where_both_numbers_have_the_same(used, total, reported):
    assert memory_text(used, total) == reported


@pytest.mark.parametrize(
    ("column", "order", "mark"),
    [("UTIL", [1, 0, 2, 3], "▴"), ("TEMP", [2, 0, 1, 3], "▾"), ("MEMORY", [3, 0, 1, 2], "▾")],
)
def test_sorted_by_a_figure_the_worst_gpu_comes_first_with_its_host(column, order, mark):
    monitor = gpu_monitor(r1={"util_percent": 5}, r2=HOT, r3={"used_bytes": 79 << 30})
    lines = texts(drawn(monitor, ordering=Ordering(column)))
    places = [(int(text.split()[0]), text.split()[1]) for text in lines[3:]]

    assert places == [(rank, f"node-{rank // 2}") for rank in order]
    assert f"{column}{mark}" in lines[2]
    turned = gpu_page(make_run_view(monitor), Ordering(column, backwards=True))
    assert turned.entries[-1].gpu.row.state.rank == order[0]


def test_the_heading_marks_the_column_of_ranks_too_and_its_title_stays_whole():
    lines = texts(drawn(gpu_monitor(), ordering=Ordering("RANK")))
    assert "RANK▴" in lines[2]
    assert "…" not in lines[2]


def test_the_chosen_one_is_marked_and_found_again_in_any_order():
    monitor = gpu_monitor(r2=HOT)
    run_view = make_run_view(monitor)
    for ordering in (Ordering(), Ordering("TEMP"), Ordering("UTIL", backwards=True)):
        found = gpu_page(run_view, ordering)
        assert key_of(found.entries[found.line_of((3, "cuda:3"))].gpu) == (3, "cuda:3")
        assert key_of(found.entries[found.line_of((9, "gone"))].gpu) == found.keys()[0]
    marked = [text for text in texts(drawn(monitor, chosen=(3, "cuda:3"))) if text.startswith("▌")]
    assert [text.split()[1] for text in marked] == ["3"]


def test_of_many_gpus_hosts_with_an_alert_come_first():
    monitor = gpu_monitor(world=48, hosts=6)
    hosts = [entry.host for entry in gpu_page(make_run_view(monitor), Ordering()).entries if entry.gpu is None]
    assert hosts == [f"node-{place}" for place in range(6)]

    late = make_monitor(world=48, slow=41)
    for rank, state in late.state.ranks.items():
        state.host = f"node-{rank // 8}"
        late.state.apply(make_gpus(rank, seq=6, mono_ns=9), 2)
    first = gpu_page(make_run_view(late), Ordering()).entries[0]
    assert first.host == "node-5"


def test_scrolling_shows_each_line_once_in_order_and_says_what_is_below():
    monitor = gpu_monitor(world=12, hosts=3)
    whole = texts(drawn(monitor, rows=60))[3:]

    for first in range(len(whole) - 6):
        shown = texts(drawn(monitor, rows=10, first=first))[3:]
        body = [text for text in shown if "more line" not in text]
        assert body == whole[first : first + len(body)]
        assert len(body) >= 6
    assert texts(drawn(monitor, rows=10))[-1].strip() == f"… {len(whole) - 6} more lines"


def test_512_gpus_have_one_line_each_and_no_blank_ones():
    monitor = gpu_monitor(world=512, hosts=64, steps=1)
    lines = texts(drawn(monitor, rows=1000))

    assert len(lines) == 3 + 512 + 64
    assert all(lines)


def test_a_rank_without_a_gpu_says_why():
    monitor = gpu_monitor()
    monitor.state.apply(make_gpus(1, [], seq=7, mono_ns=10, why="no such device"), 3)
    text = plain(line_of(drawn(monitor), 1))

    assert text.split() == ["1", "no", "GPU", "data:", "no", "such", "device"]
    assert "No GPU data: no such device." in page(gpu_detail(gpu_rows(make_run_view(monitor).rows)[1], 90))


def test_stale_readings_are_dim_and_say_so():
    monitor = gpu_monitor()
    monitor.state.apply(make_beat(1, 7, mono_ns=9), 40 * SECOND)
    line = line_of(drawn(monitor), 1)

    assert "▲ stale" in plain(line)
    assert {cell.level for cell in line if "95%" in cell.text} == {Level.DIM}


@pytest.mark.parametrize(
    ("changed", "badge", "level"),
    [
        ({"lost": True}, "✖ lost", Level.BAD),
        ({"xids": [13, 79]}, "✖ Xid 79", Level.BAD),
        ({"ecc_uncorrected": 2}, "· ECC 2", Level.DIM),
        ({"throttle": ["sw_power_cap"]}, "· power cap", Level.DIM),
        ({"throttle": ["hw_slowdown", "hw_thermal_slowdown"]}, "▲ hw thermal", Level.WARN),
        ({}, "ok", Level.OK),
    ],
)
def test_a_badge_shows_what_is_wrong(changed, badge, level):
    line = line_of(drawn(gpu_monitor(r1=changed)), 1)

    assert (line[-1].text, line[-1].level) == (badge, level)


def test_the_details_name_processes_and_why_figures_are_absent():
    gpu = make_gpu(
        processes=[wire.GpuProcess(7, 1 << 30, "other"), wire.GpuProcess(1000, 29 << 30, "python")],
        absent={"power_mw": "not supported", "power_limit_mw": "not supported", "xids": "no permission"},
        nvlink_tx_bytes_s=24 << 30, xids=[79],
    )  # fmt: skip
    reported = page(gpu_detail(gpu_rows(make_run_view(gpu_monitor(gpus=[gpu])).rows)[0], 100))

    assert "1000 (this rank) python 29G · 7 other 1.0G" in reported
    assert "power, power limit: not supported; Xid errors: no permission" in reported
    assert (
        "30/80 GiB (38%): torch 27G, rest of this process 2.0G, other processes 1.0G; tensors 20G, peak 25G" in reported
    )
    assert "NVLink 24G/s out, –/s in" in reported
    assert "Xid 79, GPU has fallen off the bus" in reported


def test_the_curves_show_the_same_time_on_scales_of_their_own():
    monitor = gpu_monitor()
    for second in range(1, 30):
        gpu = make_gpu(device="cuda:0", sm_mhz=1980 if second < 15 else 990, power_mw=None, util_percent=100)
        monitor.state.apply(make_gpus(0, [gpu], seq=6 + second, mono_ns=second * SECOND), 3)
    entry = gpu_rows(make_run_view(monitor).rows)[0]
    lines = texts(gpu_curves(entry, 100, 9))

    assert lines[0].startswith("── history · last 28 s")
    assert [text.split()[0] for text in lines[1:]] == ["utilization", "memory", "SM", "power", "temperature"]
    clocks = next(text for text in lines if text.startswith("SM clock"))
    assert "▇▇▇▇▄▄▄▄" in clocks
    assert clocks.startswith("SM clock     990 MHz to 1980 MHz ")
    assert gpu_curves(gpu_rows(make_run_view(gpu_monitor()).rows)[0], 100, 9) == []


@pytest.mark.parametrize(("rows", "each"), [(5, 0), (6, 1), (10, 1), (11, 2), (100, 2)])
def test_the_curves_are_as_high_as_there_is_room_for_and_stand_apart(rows, each):
    monitor = gpu_monitor()
    for second in range(1, 9):
        gpu = make_gpu(device="cuda:0", util_percent=100 if second < 5 else 50)
        monitor.state.apply(make_gpus(0, [gpu], seq=6 + second, mono_ns=second * SECOND), 3)
    lines = texts(gpu_curves(gpu_rows(make_run_view(monitor).rows)[0], 100, rows))

    assert len(lines) == (1 + 5 * each if each else 0)
    if each == 2:
        assert lines[1].startswith("utilization")
        assert lines[1].rstrip().endswith(" ▆▇▇▇▇")
        assert lines[2].split() == ["█████████"]


MANY = {"r70": HOT, "r71": {"xids": [79]}, "r72": {"util_percent": None}, "r73": {"util_percent": 1}}


def test_looking_back_the_map_says_that_glyphs_include_waiting():
    monitor = gpu_monitor(world=80, hosts=8)

    assert "utilization" in plain(gpu_map(make_run_view(monitor, at=60), 76, 30)[0])
    assert "busy" in plain(gpu_map(make_run_view(monitor), 76, 30)[0])


def test_the_map_shows_many_gpus_with_a_glyph_each():
    lines = gpu_map(make_run_view(gpu_monitor(world=80, hosts=8, **MANY)), 76, 30)

    assert plain(lines[0]) == "rank ▂▅█ busy   ░ waiting   ▲ throttled   ✖ error   ? no data"
    assert [plain(line).split() for line in lines[1:]] == [
        ["0", "▆▆█▆▆▆▆▆▆▆", *["▆" * 10] * 5],
        ["60", "▆" * 10, "▲✖?▁▆▆▆▆▆▆"],
    ]
    level = {cell.text: cell.level for cell in lines[-1]}
    assert (level["▲"], level["✖"], level["?"]) == (Level.WARN, Level.BAD, Level.DIM)


def test_few_gpus_or_little_room_make_no_map():
    monitor = gpu_monitor(world=80, hosts=8)

    assert gpu_map(make_run_view(gpu_monitor()), 60, 30) == []
    assert gpu_map(make_run_view(monitor), 60, 2) == []
    assert len(gpu_map(make_run_view(monitor), 60, 3)) == 3


def test_a_host_with_more_gpus_than_columns_goes_on_in_the_next_line():
    lines = gpu_map(make_run_view(gpu_monitor(world=80, hosts=1)), 45, 30)

    assert [plain(line).split()[0] for line in lines[1:]] == ["0", "40"]
    assert_fits(lines, 45, 30)


def test_clocks_set_by_hand_are_not_called_throttled():
    set_by_hand = {"sm_mhz": 1200, "throttle": ["gpu_idle", "applications_clocks_setting"]}
    reported = page(gpu_detail(gpu_rows(make_run_view(gpu_monitor(r0=set_by_hand)).rows)[0], 120))

    assert "SM 1200/1980 MHz, memory 2619/2619 MHz, set by applications clocks" in reported


def test_every_figure_that_may_be_absent_has_a_name():
    figures = set(wire.Gpu.__struct_fields__) - {"device", "uuid", "name", "lost", "absent"}

    assert set(NAMES) == figures


def test_the_rank_table_has_columns_for_gpus_where_they_are_read():
    run_view = make_run_view(gpu_monitor(r2={"used_bytes": 61 << 30}))
    title, *lines = texts(rank_table(run_view.rows, 140, show_host=True))
    assert "GPU%" in title
    assert "GPU MEM" in title
    assert "95░" in lines[0]
    assert "95 " in lines[2]
    assert "61G" in lines[2]

    assert "GPU" not in plain(rank_table(make_run_view(make_monitor()).rows, 140, show_host=True)[0])


def test_the_rank_page_shows_its_gpu_and_whether_readings_belong_to_the_step():
    monitor = gpu_monitor(r2=HOT)
    reported = page(rank_page(make_run_view(monitor), 2, 100, 500))
    assert "cuda:2 · Stand-in 80GB" in reported
    assert "SM 1110/1980 MHz, memory 2619/2619 MHz, thermal slowdown" in reported

    assert "25% waiting in all-reduce" in page(rank_page(make_run_view(monitor), 0, 100, 500))
    back = page(rank_page(make_run_view(monitor, at=60), 0, 100, 500))
    assert "Stand-in 80GB · as of step 119, not of step 60" in back
    assert "25% waiting in all-reduce" not in back
