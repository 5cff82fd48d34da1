"""Whatever the size of the terminal and whatever the ranks say: nothing overlaps, is cut silently or breaks out."""

from __future__ import annotations

from itertools import combinations

import pytest
from textual.geometry import Region
from textual.widgets import Input

from ddpwatch.tui.app import Dashboard
from ddpwatch.tui.rank_table import RankTable
from ddpwatch.tui.widgets import Painted
from ddpwatch.view.cells import line_columns, plain
from tests.tui.stage import played, staged

SIZES = [(80, 24), (99, 29), (100, 30), (119, 31), (121, 40), (140, 24), (250, 80)]
THOROUGH = [(80, 24), (119, 31), (250, 80)]
"""Here every screen is looked at, elsewhere the overview: it is the one that changes its shape."""
TINY = [(40, 10), (1, 1)]
SCREENS = "123456"


def leaves(stage):
    """What is in sight and draws, with its place on the screen."""
    return {
        widget: region.intersection(clip)
        for widget, (region, clip) in stage.app.screen._compositor.visible_widgets.items()
        if isinstance(widget, Painted | RankTable | Input) and region.overlaps(clip)
    }


def assert_in_order(stage, where: str, *, tiny: bool = False):
    """No two widgets share a cell, none leaves the screen, and no line is wider or lower than its widget."""
    places = leaves(stage)
    screen = Region(0, 0, *stage.app.screen.size)
    for (one, its), (other, others) in combinations(places.items(), 2):
        assert not its.overlaps(others), f"{where}: {one} and {other}"
    for widget, region in places.items():
        assert screen.contains_region(region), f"{where}: {widget} at {region}"
        assert tiny or region.size == widget.outer_size, f"{where}: {widget} is cut to {region}"
        for line in drawn(widget):
            columns = widget.scrollable_content_region.width
            assert tiny or line_columns(line) <= columns, f"{where}: {widget} cuts {plain(line)!r} at {columns}"
        if isinstance(widget, Painted) and not tiny and not can_scroll(widget):
            assert len(widget._lines) <= widget.size.height, f"{where}: {widget} loses its last lines"
    for strip in stage.strips():
        assert strip.cell_length == screen.width, f"{where}: {strip.text!r}"
        assert all(char.isprintable() for char in strip.text), f"{where}: {strip.text!r}"


def drawn(widget):
    if isinstance(widget, RankTable):
        return [widget._line(y) for y in range(widget.size.height)]
    return widget._lines if isinstance(widget, Painted) else []


def can_scroll(widget) -> bool:
    return widget.styles.overflow_y != "hidden"


async def every_screen(stage, where: str, **how):
    for number in SCREENS:
        await stage.press(number)
        await stage.settle()
        assert_in_order(stage, f"{where}, screen {number}", **how)
    await stage.press("2")
    await stage.shows("ranks")
    await stage.press("enter")
    await stage.settle()
    assert_in_order(stage, f"{where}, page of a rank", **how)
    await stage.press("escape")


@pytest.mark.parametrize("script", ["many", "hostile", "crowd"])
async def test_nothing_overlaps_or_is_cut_at_any_size(script):
    follower = played(script)
    # A few sizes each: together they are a spread, and every one of them is a resize.
    sizes = {"many": SIZES[::-1], "hostile": [SIZES[0]], "crowd": [SIZES[0], SIZES[4]]}[script]
    async with staged(follower, (120, 40)) as stage:
        for size in sizes:
            await stage.resize(*size)
            assert_in_order(stage, f"{script} {size}")
            if size in THOROUGH:
                await every_screen(stage, f"{script} {size}")
                await stage.press("1")
        if script == "many":
            follower.end_badly("x" * 500)
            await stage.shows("summary")
            for size in (SIZES[0], SIZES[3]):
                await stage.resize(*size)
                assert_in_order(stage, f"summary {size}")
                await stage.press("question_mark")
                await stage.settle()
                assert_in_order(stage, f"help {size}")
                await stage.press("escape")


async def test_a_tiny_terminal_is_no_crash():
    async with staged(played("straggler"), (40, 10)) as stage:
        for size in TINY:
            await stage.resize(*size)
            await every_screen(stage, f"{size}", tiny=True)
            await stage.press("question_mark", "escape", "1", "slash", "escape")
        await stage.resize(120, 40)
        await stage.press("1")
        await stage.settle()
        assert_in_order(stage, "back again")


async def test_small_and_back_draws_the_same():
    async with staged(played("straggler")) as stage:
        before = stage.text()
        for size in ((80, 24), (200, 60), (40, 10), (120, 40)):
            await stage.resize(*size)
        assert stage.text() == before


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_filter_lies_over_nothing_but_the_keys(size):
    async with staged(played("straggler"), size) as stage:
        await stage.press("slash")
        lines = await stage.settle()
        (field,) = [region for widget, region in leaves(stage).items() if isinstance(widget, Input)]
        assert field.height == 1
        assert "RANK" in "\n".join(lines)
        for widget, region in leaves(stage).items():
            assert isinstance(widget, Input) or not region.overlaps(field), widget


async def test_text_from_outside_can_neither_restyle_nor_click_nor_break_the_screen():
    actions = {name.removeprefix("action_") for name in dir(Dashboard) if name.startswith("action_")}
    async with staged(played("hostile")) as stage:
        literal = 0
        for key in (*SCREENS, "rank"):
            await stage.press(*(("2", "end", "enter") if key == "rank" else (key,)))
            await stage.settle()
            for strip in stage.strips():
                literal += "[bold red]evil[/]" in strip.text
                for segment in strip:
                    assert "\x1b" not in segment.text
                    if "evil" in segment.text or "[/]" in segment.text:
                        assert segment.style.color is None or segment.style.color.name != "red", segment
                        assert not segment.style.link
                        clicked = segment.style.meta.get("@click", "")
                        assert "quit" not in clicked
                        assert not clicked or clicked.removeprefix("app.").split("(")[0] in actions
        assert literal >= 5
        assert stage.app.is_running


async def test_hostile_text_in_the_end_of_a_run_is_shown_as_it_is():
    from tests.tui.stage import EVIL

    follower = played("healthy")
    async with staged(follower) as stage:
        follower.end_badly(EVIL)
        await stage.shows("summary")
        await stage.sees("rank 0 failed: [bold red]evil[/] [@click=app.quit]go[/]")
        assert_in_order(stage, "hostile end")


async def test_a_screen_that_is_gone_to_shows_the_latest_run_view_from_its_first_frame_on(monkeypatch):
    frames = []
    display = Dashboard._display

    def displayed(app, screen, renderable):
        frames.append([strip.text for strip in screen._compositor.render_strips()])
        display(app, screen, renderable)

    monkeypatch.setattr(Dashboard, "_display", displayed)
    follower = played("straggler", upto=80)
    async with staged(follower) as stage:
        for key, pane in (("2", "ranks"), ("3", "allreduce"), ("5", "alerts")):
            await stage.press(key)
            await stage.shows(pane)
            old = await stage.settle()
            await stage.press("1")
            await stage.shows("overview")
            step = stage.app.run_view.last_step
            follower.go_on(20)
            await stage.until(lambda step=step: stage.app.run_view.last_step >= step + 20, "more steps")
            await stage.settle()
            frames.clear()
            await stage.press(key)
            await stage.shows(pane)
            new = await stage.settle()
            seen = [frame for frame in frames if frame[1] == new[1]]
            assert seen
            # The first line shows the time.
            assert all(frame[1:] == new[1:] for frame in seen)
            assert new[2:] != old[2:]


@pytest.mark.parametrize("size", [(80, 28), (80, 34)])
async def test_rows_that_few_ranks_leave_free_are_for_the_alerts(size):
    async with staged(played("straggler"), size=size) as stage:
        alerts = stage.app.query_one("#urgent", Painted)
        reported = [plain(line) for line in alerts._lines]
        table = stage.app.query_one("#overview-table", RankTable)

        assert any("clock and temperature" in line for line in reported), reported
        assert len(reported) == alerts.size.height
        assert {"straggler", "comm-share"} <= {line[2:].partition(":")[0] for line in reported}
        assert table.size.height > len(table._rows)
