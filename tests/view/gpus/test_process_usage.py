"""CPU and memory by host, the page of devices without GPUs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.run import RunState
from ddpwatch.view.glossary import GLOSSARY
from ddpwatch.view.gpus.process_usage import INSTEAD, device_table, memory_change
from tests.builders.fake_rank import make_beat, make_gpus, make_hello, make_snap
from tests.view.pages import assert_fits, heights, make_monitor, make_run_view, page, run_views, texts, widths


def make_devices(cpu=(50.0, 100.0, 100.0, 400.0), ranks_per_host=2, received=None, whys=None, cores=0):
    """Ranks with this CPU in percent each, and 1, 2, 3 … GiB."""
    state = RunState("ab12cd34", "train", len(cpu))
    for rank, used in list(enumerate(cpu))[:received]:
        beat = make_beat(rank, 5, cpu_percent=used, rss_bytes=(rank + 1) << 30)
        hello = make_hello(rank, 5, host=f"node-{rank // ranks_per_host}", cores=cores)
        gpus = make_gpus(rank, [], why=whys[rank]) if whys else None
        state.apply(make_snap(rank, 5, hello=hello, beat=beat, gpus=gpus), now_ns=1)
    return make_run_view(Monitor(state))


def table(drawn, columns=80, rows=40, first=0):
    lines = texts(device_table(drawn, columns, rows, first=first))
    return lines[next(place for place, text in enumerate(lines) if "RANK" in text) :]


@settings(deadline=None, max_examples=40)
@given(run_views(), widths, heights, st.integers(-2, 30))
def test_it_fits_any_window_whatever_is_known(drawn, columns, rows, first):
    assert_fits(device_table(drawn, columns, rows, first=first), columns, rows)


def test_it_says_that_there_is_no_gpu_data_and_that_no_reason_is_known():
    reported = page(device_table(make_devices(), 60, 40, first=0))

    assert reported.startswith(f"· No GPU data: no rank has reported a GPU. {INSTEAD}")


def test_it_says_why_no_gpu_is_read_in_the_words_of_most_ranks():
    drawn = make_devices(whys=["no driver", "no NVIDIA driver is loaded", "no NVIDIA driver is loaded", ""])

    assert page(device_table(drawn, 90, 40, first=0)).startswith(
        "· No GPU data: no NVIDIA driver is loaded. Shown instead: CPU"
    )


def test_the_share_of_its_cores_is_shown_where_it_is_known():
    lines = table(make_devices(cores=8), columns=100)

    assert "OF ITS CORES" in lines[0]
    assert "50% of 8 cores" in next(text for text in lines if text.split()[0] == "3")
    assert "OF ITS CORES" not in table(make_devices(), columns=100)[0]


def test_ranks_stand_below_their_host_with_its_total():
    lines = table(make_devices())

    assert [text.split()[0] for text in lines[1:]] == ["node-0", "0", "1", "node-1", "2", "3"]
    assert "2 ranks · CPU 150%" in lines[1]
    assert lines[1].endswith("3.0G")
    assert lines[4].endswith("7.0G")


def test_each_rank_has_cpu_memory_and_its_part_of_the_hosts():
    words = table(make_devices())[2].split()

    assert words[:2] == ["0", "50%"]
    assert words[-2:] == ["1.0G", "33%"]


def test_bars_have_one_scale_and_more_is_longer():
    lengths = {text.split()[0]: text.count("█") for text in table(make_devices())[1:]}

    assert lengths["3"] > lengths["2"] == lengths["1"] > lengths["0"] > 0


def test_one_busy_core_fills_no_bar_even_if_no_rank_uses_more():
    low = table(make_devices(cpu=(10.0, 10.0)))[2]

    assert low.count("█") < 5


def test_ranks_without_a_message_are_shown_as_unknown():
    lines = table(make_devices(received=2))

    assert [text.split()[:2] for text in lines if text.split()[0] in {"2", "3"}] == [["2", "–"], ["3", "–"]]
    assert any("unknown host" in text for text in lines)


def test_what_is_above_and_below_is_announced():
    drawn = make_devices(cpu=(50.0,) * 40, ranks_per_host=8)
    lines = table(drawn, rows=12, first=5)

    assert "↑ 5 lines" in lines[0]
    shown = len(lines) - 2
    assert lines[-1].strip() == f"… {45 - 5 - shown} more lines"


def test_scrolling_shows_each_line_once_in_order():
    drawn = make_devices(cpu=(50.0,) * 11, ranks_per_host=4)
    whole = table(drawn, rows=100)[1:]

    for first in range(len(whole) - 4):
        shown = table(drawn, rows=8, first=first)[1:]
        body = [text for text in shown if "more line" not in text]
        assert body == whole[first : first + len(body)]
        assert len(body) >= 3


def test_the_end_can_be_reached_and_not_passed():
    drawn = make_devices(cpu=(50.0,) * 40, ranks_per_host=8)

    assert table(drawn, rows=12, first=1000)[-1].split()[0] == "39"


def test_memory_changes_either_way():
    rank = make_devices().state.ranks[0]
    assert memory_change(rank) == ""

    rank.rss_history.put(60_000_000_001, 512 << 20)
    assert memory_change(rank) == "-512M in 1m 00s"


def test_looking_back_it_says_that_readings_are_current():
    monitor = make_monitor()
    back = make_run_view(monitor, at=60)

    assert "not of step" not in page(device_table(make_run_view(monitor), 80, 40, first=0))
    for rows in (2, 5, 40):
        assert texts(device_table(back, 80, rows, first=0))[0] == "‖ as of step 119, not of step 60"
        assert_fits(device_table(back, 80, rows, first=0), 80, rows)


def test_the_share_of_memory_is_that_of_the_ranks_and_says_so():
    lines = table(make_devices(), columns=100)

    assert "OF RANKS'" in lines[0]
    assert "HOST" not in lines[0]
    assert ["33%" in line for line in lines[2:4]] == [True, False], "1 of 3 GiB"
    [reported] = [terms["of ranks'"] for terms in GLOSSARY.values() if "of ranks'" in terms]
    assert "not of the host's memory" in reported
