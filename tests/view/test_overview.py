"""Cards of the overview: step time, throughput, all-reduce share, devices."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given

from ddpwatch.view.cells import Level, line_columns, plain
from ddpwatch.view.overview import allreduce_card, compact, device_card, device_title, step_card, throughput_card
from tests.builders.fake_rank import make_gpu, make_gpus
from tests.view.pages import assert_fits, make_monitor, make_run_view, run_views, texts, widths

CARDS = (step_card, throughput_card, allreduce_card, device_card)


@pytest.fixture(scope="module")
def slow():
    return make_run_view(make_monitor())


@pytest.fixture(scope="module")
def even():
    return make_run_view(make_monitor(slow=None))


def test_the_step_card_shows_median_p99_and_pace(slow):
    first, second, _ = texts(step_card(slow, 26))

    assert first == "40.0 ms   p99 40.0"
    assert second == "25 steps/s"


def test_the_throughput_card_shows_all_ranks_and_one(slow):
    first, second, _ = texts(throughput_card(slow, 26))

    assert first == "3,200 samples/s"
    assert second == "800/rank · 76% own work"


def test_the_all_reduce_card_shows_share_threshold_and_straggler(slow):
    card = allreduce_card(slow, 26)
    first, second, bar = texts(card)

    assert re.fullmatch(r"\d+% ▲ over 10%", first)
    assert second.endswith(" (r2)")
    assert card[0][0].level is Level.WARN
    share = int(first.partition("%")[0])
    wire, waiting = (int(number) for number in re.findall(r"\d+", second.partition("(")[0]))
    assert wire + waiting == share
    assert line_columns(card[2]) == 26
    assert "░" in bar


def test_a_share_within_the_limit_is_no_warning():
    monitor = make_monitor(slow=None, steps=0)
    from tests.builders.fake_rank import make_snap, make_step

    for rank in range(4):
        monitor.state.apply(make_snap(rank, 6, [make_step(index) for index in range(60)]), 2)
    card = allreduce_card(make_run_view(monitor), 26)

    assert texts(card)[0] == "7%  of the step"
    assert {cell.level for line in card for cell in line} & {Level.WARN, Level.BAD} == set()


def test_a_card_without_figures_shows_why():
    nothing = make_run_view(make_monitor(received=0))
    assert texts(step_card(nothing, 26))[0] == "–  no step yet"
    assert texts(throughput_card(nothing, 26))[0] == "–  no step yet"
    assert texts(allreduce_card(nothing, 26))[0] == "–  no step yet"
    assert texts(device_card(nothing, 26))[0] == "–  no heartbeat"
    some = make_run_view(make_monitor(received=3))
    assert texts(throughput_card(some, 26))[0] == "–  ranks missing"
    assert texts(allreduce_card(some, 40))[1] == "wire/waiting: ranks missing"


def test_one_rank_has_nothing_to_reduce():
    alone = make_run_view(make_monitor(world=1, slow=None))

    assert texts(allreduce_card(alone, 30))[0] == "one rank: no all-reduce"
    assert texts(throughput_card(alone, 30))[1] == "one rank"


def test_the_device_card_shows_that_there_is_no_gpu(even):
    first, second, third = texts(device_card(even, 26))

    assert (first, second, third) == ("98% CPU   max 98%", "3.2 GiB RSS in total", "no GPU data")


def gpu_run_view(**changed):
    """Rank 2 is slow, and the others wait for it with NCCL."""
    monitor = make_monitor(hello=None)
    for rank, state in monitor.state.ranks.items():
        state.hello = msgspec.structs.replace(state.hello, backend="nccl")
        gpu = make_gpu(uuid=f"GPU-{rank}", temperature_c=60 + rank, **(changed if rank == 2 else {}))
        monitor.state.apply(make_gpus(rank, [gpu], seq=6), 2)
    return make_run_view(monitor)


def test_with_gpus_the_device_card_shows_how_much_of_the_utilization_is_waiting():
    card = device_card(gpu_run_view(), 26)

    assert device_title(gpu_run_view()) == "GPU"
    assert texts(card) == ["95%   25% waiting", "30/80 GiB · 63 °C r3", "no GPU throttled"]
    assert card[0][1].level is Level.WAITING


def test_the_hottest_gpu_is_named_in_few_words_where_there_is_little_room():
    wide, narrow = (texts(device_card(gpu_run_view(), columns))[1] for columns in (28, 18))

    assert (wide, narrow) == ("30/80 GiB · hottest 63 °C r3", "30/80G · 63 °C r3")


@pytest.mark.parametrize(
    ("changed", "reported", "level"),
    [
        ({"throttle": ["sw_thermal_slowdown"], "sm_mhz": 1110}, "▲ r2 thermal 1110/1980 MHz", Level.WARN),
        ({"throttle": ["hw_power_brake_slowdown"], "sm_mhz": 1110}, "▲ r2 throttled 1110 MHz", Level.WARN),
        ({"throttle": ["sw_power_cap"], "sm_mhz": 1900}, "1 at power cap 1900 MHz", Level.DIM),
        ({"throttle": ["gpu_idle"]}, "no GPU throttled", Level.DIM),
        ({"xids": [79]}, "✖ 1 GPU with errors", Level.BAD),
    ],
)
def test_the_device_card_shows_the_most_throttled_gpu(changed, reported, level):
    line = device_card(gpu_run_view(**changed), 26)[2]

    assert (plain(line), line[0].level) == (reported, level)
    assert line_columns(line) <= 26


def test_in_a_line_what_is_wrong_comes_before_what_does_not_fit():
    line = texts(compact(gpu_run_view(throttle=["sw_thermal_slowdown"], sm_mhz=1110), 80))[3]

    assert " ".join(line.split()) == "GPU 95% 25% waiting · ▲ r2 thermal 1110/1980 MHz · 30/80 GiB"


def test_the_same_answers_as_lines(slow):
    lines = texts(compact(slow, 80))

    assert [line.split()[0] for line in lines] == ["step", "throughput", "all-reduce", "CPU"]
    assert "40.0 ms" in lines[0]
    assert "(r2)" in lines[2]


@given(run_views(), widths)
def test_the_lines_fit_and_every_card_has_three(run_view, columns):
    assert_fits(compact(run_view, columns), columns, 4)
    for card in CARDS:
        assert len(card(run_view, columns)) == 3


@pytest.mark.parametrize("columns", [26, 21])
def test_looking_back_the_device_card_shows_that_its_values_are_current(columns):
    monitor = make_monitor()
    assert "‖" not in str(texts(device_card(make_run_view(monitor), columns)))
    assert "‖" not in str(texts(device_card(make_run_view(monitor, at=117), columns))), "hardly a difference"
    back = make_run_view(monitor, at=60)
    card = device_card(back, columns)

    assert texts(card)[2] == "‖ as of step 119"
    assert {cell.level for line in card[:2] for cell in line} == {Level.DIM}
    assert "  · ‖ as of step 119" in texts(compact(back, 80))[3]


def test_with_little_room_the_straggler_stays(slow):
    for columns in range(16, 40):
        second = texts(allreduce_card(slow, columns))[1]
        assert second.endswith(" (r2)")
        assert len(second) <= columns
        assert texts(throughput_card(slow, columns))[1].endswith(" own work")


def test_a_share_over_the_threshold_without_an_alert_is_marked_as_recent(slow):
    quiet = replace(slow, alerts=(), worst={})
    card = allreduce_card(quiet, 26)

    assert texts(card)[0] == "24%  over 10% recently"
    assert texts(allreduce_card(quiet, 21))[0] == "24%  recently"
    assert Level.WARN not in {cell.level for cell in card[0]}
