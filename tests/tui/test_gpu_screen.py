"""The screen of GPUs: a cursor, an order, and the page of the rank behind a GPU."""

from __future__ import annotations

from dataclasses import replace

from ddpwatch.tui.gpu_screen import DeviceList
from ddpwatch.view.cells import plain
from ddpwatch.view.columns import Ordering
from tests.builders.fake_rank import make_gpu, make_gpus
from tests.tui.stage import played, staged


def ranks(stage) -> list[str]:
    """The ranks of the GPUs from top to bottom."""
    lines = [line.strip("│ ▌").split() for line in stage.lines()]
    return [words[0] for words in lines if len(words) > 3 and words[1].startswith("cuda:")]


async def test_the_gpus_can_be_sorted_chosen_and_opened():
    async with staged(played("gpus")) as stage:
        await stage.press("4")
        await stage.shows("devices")
        assert ranks(stage) == list("01234567")
        await stage.sees("▌     0  cuda:0", "rank 0 · cuda:0", "▲ hw thermal", "s sort")

        await stage.press("down", "down")
        await stage.sees("▌     2  cuda:2", "rank 2 · cuda:2")

        await stage.click("TEMP")
        await stage.sees("TEMP▾", "▌     3  cuda:3")
        assert ranks(stage)[0] == "3"
        await stage.press("S")
        await stage.sees("TEMP▴")
        assert ranks(stage)[-1] == "3"
        await stage.press("end", "enter")
        await stage.shows("rank")
        await stage.sees("hardware thermal slowdown")


async def test_gpus_and_ranks_are_sorted_separately():
    async with staged(played("gpus")) as stage:
        await stage.press("4")
        await stage.shows("devices")
        await stage.press("s", "s")
        await stage.sees("UTIL▴")
        await stage.press("2")
        await stage.shows("ranks")
        assert not {"▾", "▴"} & set(stage.text())


async def test_until_the_cursor_is_moved_the_list_begins_at_its_top():
    follower = played("512-gpus")
    opened = dict(follower.monitor.book.open)
    follower.monitor.book.open.clear()
    async with staged(follower) as stage:
        await stage.press("4")
        await stage.shows("devices")
        assert ranks(stage)[0] == "0"
        await stage.sees("▌     0  cuda:0")
        follower.monitor.book.open.update(opened)
        await stage.sees("▌   336  cuda:0", "rank 336 · cuda:0")
        assert ranks(stage)[:2] == ["336", "337"]
        # A moved cursor stays with its GPU.
        await stage.press("down")
        await stage.sees("▌   337  cuda:1")
        follower.monitor.book.open.clear()
        await stage.until(lambda: ranks(stage)[0] not in {"336", "337"}, "another host on top, or its GPU in sight")
        await stage.sees("▌   337  cuda:1")


async def test_a_click_chooses_a_gpu():
    async with staged(played("gpus")) as stage:
        await stage.press("4")
        await stage.shows("devices")
        await stage.click("cuda:5")
        await stage.sees("▌     5  cuda:5", "rank 5 · cuda:5")


async def test_without_gpus_no_key_is_promised_that_does_nothing():
    async with staged(played("healthy")) as stage:
        await stage.press("4")
        await stage.shows("devices")
        await stage.sees("No GPU data")
        assert "s sort" not in stage.lines()[-1]
        await stage.press("s", "enter", "down")
        await stage.shows("devices")


async def test_a_list_that_is_sorted_by_a_figure_stays_where_it_is_while_gpus_change_places():
    async with staged(played("gpus")) as stage:
        await stage.press("4")
        await stage.shows("devices")
        listed, run_view = stage.app.query_one(DeviceList), stage.app.run_view
        listed.ordering = Ordering("UTIL")

        def lines_after(**util_of):
            for row in run_view.rows:
                rank, gpus = row.state.rank, row.state.gpus
                gpu = make_gpu(device=f"cuda:{rank}", util_percent=util_of.get(f"r{rank}", 50 + rank))
                # Far ahead of what is played meanwhile, which is then too late to change it.
                gpus.update(make_gpus(rank, [gpu], mono_ns=gpus.latest.mono_ns + 10**15), gpus.received_ns)
            return [plain(line) for line in listed._lines_from(replace(run_view), 116, 6)]

        assert "▌     0  " in lines_after()[1]
        moved = lines_after(r0=99)
        assert (listed.first, listed.chosen_gpu) == (0, (0, "cuda:0"))
        assert "     1  " in moved[1]

        listed.chosen_gpu = (7, "cuda:7")  # as a key does
        assert "▌     7  " in "".join(lines_after())
