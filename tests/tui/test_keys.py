"""Every key and every screen of the dashboard, pressed and clicked as a person would."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from textual.command import CommandPalette
from textual.widgets import Input

from ddpwatch.core.state.step_store import CAPACITY_STEPS
from ddpwatch.tui.help_screen import Help
from ddpwatch.tui.keys import KEYS, TABS
from ddpwatch.tui.screens import AlertList
from ddpwatch.tui.themes import COLOR_BLIND, THEMES
from ddpwatch.view.alerts.page import alert_text, all_alerts
from tests.tui.stage import buckets_of, hung, played, staged

SMALL = (80, 24)


async def test_the_numbers_go_to_the_screens_and_seven_only_after_the_end():
    follower = played("straggler")
    async with staged(follower) as stage:
        assert stage.pane == "overview"
        await stage.sees("● LIVE", "samples/s", "(r3)", "▲ slow backward")
        reported = {
            "ranks": "ranks × time",
            "allreduce": "gradient buckets",
            "devices": "No GPU data",
            "alerts": "what to try",
            "logs": "No log is watched",
        }
        for number, (name, title) in enumerate(TABS[1:], 2):
            await stage.press(str(number))
            await stage.shows(name)
            await stage.sees(f"[{number} {title}]", reported[name], "? help  q quit")
        await stage.press("7")
        await stage.settle()
        assert stage.pane == "logs"
        follower.end_well()
        await stage.shows("summary")
        await stage.sees("The run has ended", "[7 summary]", "■ ENDED", "straggler cost")
        await stage.press("2")
        await stage.shows("ranks")
        await stage.press("7")
        await stage.shows("summary")


async def test_a_run_that_ends_badly_names_the_rank_and_the_reason():
    follower = played("healthy")
    async with staged(follower) as stage:
        follower.end_badly("RuntimeError: NCCL communicator was aborted")
        await stage.shows("summary")
        await stage.sees("The run has ended badly", "rank 0 failed: RuntimeError: NCCL", "rank 3: exited after rank 0")


async def test_cursor_keys_move_in_the_table_and_pages_follow_its_height():
    async with staged(played("crowd"), SMALL) as stage:
        await stage.press("2")
        await stage.shows("ranks")
        table = stage.table
        order = stage.shown_ranks
        assert (table.cursor_rank, order[0]) == (777, 777)
        await stage.press("down", "j")
        assert table.cursor_rank == order[2]
        await stage.press("up", "k", "k")
        assert table.cursor_rank == order[0]
        await stage.press("pagedown")
        page = order.index(table.cursor_rank)
        assert 1 < page < table.size.height
        await stage.press("pageup")
        assert table.cursor_rank == order[0]
        await stage.press("end")
        assert table.cursor_rank == order[-1] == 1023
        await stage.sees("▌ 1023")
        await stage.press("home")
        assert table.cursor_rank == 777
        await stage.sees("▌  777")
        await stage.press("G", "g")
        assert table.cursor_rank == 777


async def test_enter_opens_the_page_of_a_rank_and_esc_goes_back_to_where_one_came_from():
    async with staged(played("straggler"), SMALL) as stage:
        for number, pane in (("1", "overview"), ("2", "ranks")):
            await stage.press(number, "home", "down", "down", "down", "enter")
            await stage.shows("rank")
            await stage.sees("rank 3", "node-0", "esc back")
            before = stage.text()
            await stage.press("pagedown")
            await stage.until(lambda before=before: stage.text() != before, "scrolled page")
            await stage.press("escape")
            await stage.shows(pane)
            assert stage.table.cursor_rank == 3
            assert stage.table.has_focus


async def test_the_page_of_another_rank_begins_at_its_top():
    async with staged(played("straggler"), SMALL) as stage:
        await stage.press("enter")
        await stage.shows("rank")
        top = stage.lines()[2:6]
        await stage.press("end")
        await stage.until(lambda: stage.lines()[2:6] != top, "the end of the page")
        await stage.press("escape", "down", "enter")
        await stage.shows("rank")
        await stage.sees("rank 1")
        assert "rank 1" in "\n".join(stage.lines()[2:6])


async def test_s_sorts_by_one_column_after_another_and_capital_s_turns_round():
    async with staged(played("straggler"), SMALL) as stage:
        titles = stage.table.titles
        assert stage.shown_ranks == list(range(8))
        await stage.press("s")
        await stage.sees("RANK▴")
        await stage.press("S")
        await stage.sees("RANK▾")
        assert stage.shown_ranks == list(range(7, -1, -1))
        for title in titles[1:]:
            await stage.press("s")
            await stage.sees(f"{title}▾")
        await stage.press("s")
        await stage.misses("▾", "▴")
        assert stage.shown_ranks == list(range(8))
        while stage.table.ordering.column != "SELF":
            await stage.press("s")
        assert stage.shown_ranks[0] == 3


async def test_what_is_typed_with_the_slash_in_one_burst_is_the_filter_and_no_command(tmp_path):
    async with staged(played("straggler"), export_to=tmp_path) as stage:
        await stage.burst("/[red]xeq")
        assert stage.app.screen.query_one("#filter", Input).value == "[red]xeq"
        assert not stage.app._exit
        assert not list(tmp_path.iterdir())
        await stage.press("escape")
        await stage.burst("2/node-1\rs")
        assert stage.pane == "ranks"
        assert stage.app.screen.query_one("#filter", Input).value == "node-1"
        await stage.until(lambda: sorted(stage.shown_ranks) == [4, 5, 6, 7], "the ranks of one host")
        await stage.sees("RANK▴", "filter: node-1")
        assert stage.table.has_focus


async def test_paused_all_screens_stay_as_they_were_while_the_run_goes_on():
    follower = played("healthy", upto=100)
    async with staged(follower) as stage:
        await stage.press("space")
        await stage.until(lambda: stage.app.run_view.paused, "it stands still")
        screens = {}
        for _ in range(2):
            for keys, pane in ((("1", "home", "down", "enter"), "rank"), (("4",), "devices"), (("1",), "overview")):
                await stage.press(*keys)
                await stage.shows(pane)
                screens.setdefault(pane, []).append((await stage.settle())[2:-1])
            follower.go_on(5)
            await stage.until(lambda: follower.monitor.state.ranks[3].step > 100, "more steps")
        assert all(first == second for first, second in screens.values())
        assert "step 100" in "\n".join(screens["rank"][0])


async def test_a_click_on_a_heading_sorts_and_a_second_one_turns_round():
    async with staged(played("straggler")) as stage:
        await stage.click("bwd")
        await stage.sees("bwd▾")
        assert stage.shown_ranks[0] == 3
        await stage.click("bwd▾")
        await stage.until(lambda: stage.shown_ranks[-1] == 3, "the other way round")
        await stage.sees("bwd▴")
        await stage.press("2")
        await stage.shows("ranks")
        await stage.sees("bwd▴")
        await stage.press("S")
        await stage.sees("bwd▾")


async def test_while_the_worst_is_followed_no_column_is_marked_as_sorted():
    async with staged(played("straggler")) as stage:
        await stage.click("bwd")
        await stage.sees("bwd▾")
        await stage.press("w")
        await stage.misses("bwd▾", "bwd▴")
        await stage.press("S")
        await stage.sees("bwd▴")


async def test_the_cursor_stays_on_its_rank_from_screen_to_screen():
    async with staged(played("straggler")) as stage:
        await stage.press("down", "down", "down", "down", "down")
        assert stage.table.cursor_rank == 5
        await stage.press("2")
        await stage.shows("ranks")
        assert stage.table.cursor_rank == 5
        await stage.press("down", "5")
        await stage.shows("alerts")
        await stage.press("1")
        await stage.shows("overview")
        assert stage.table.cursor_rank == 6
        await stage.sees("▌    6")


async def test_the_cursor_is_in_sight_on_the_other_screen_also_among_thousands():
    async with staged(played("crowd"), SMALL) as stage:
        await stage.press("end", "2")
        await stage.shows("ranks")
        assert stage.table.cursor_rank == 1023
        await stage.sees("▌ 1023")


async def test_looking_back_says_what_is_not_of_then():
    async with staged(played("straggler"), (180, 40)) as stage:
        await stage.misses("not of step")
        now = _elapsed(stage)
        await stage.press("shift+left")
        await stage.sees("‖ as of step 159 ")
        # What is of now does not stand beside figures of then.
        assert "00:00:00" < _elapsed(stage) < now
        assert _column(stage, "RSS") == {"–"}
        await stage.press("enter")
        await stage.shows("rank")
        await stage.sees("now at step 160")
        await stage.press("escape")
        await stage.press("4")
        await stage.shows("devices")
        await stage.sees("‖ as of step 159, not of step 139")
        await stage.press("5")
        await stage.shows("alerts")
        await stage.sees("was open")
        await stage.misses("not of step")
        await stage.press("l", "1")
        await stage.misses("not of step", "‖")
        assert "–" not in _column(stage, "RSS")
        assert _elapsed(stage) == now


def _elapsed(stage):
    return re.search(r"\d\d:\d\d:\d\d", stage.header)[0]


def _column(stage, title: str) -> set[str]:
    """What stands in a column of the table of ranks, by where its title ends."""
    heading = next(row for row, line in enumerate(stage.lines()) if title in line and "RANK" in line)
    lines = stage.lines()
    end = lines[heading].index(title) + len(title)
    return {line[:end].split()[-1] for line in lines[heading + 1 : heading + 1 + len(stage.shown_ranks)]}


async def test_the_filter_works_while_typed_enter_keeps_and_esc_clears_it():
    async with staged(played("straggler"), SMALL) as stage:
        field = stage.app.query_one("#filter", Input)
        assert not field.display
        await stage.press("slash")
        await stage.until(lambda: field.has_focus, "the field")
        await stage.press(*"slow")
        await stage.until(lambda: stage.shown_ranks == [3], "one rank")
        await stage.press("enter")
        await stage.until(lambda: not field.display and stage.table.has_focus, "the table again")
        assert stage.shown_ranks == [3]
        await stage.press("2")
        await stage.shows("ranks")
        assert stage.shown_ranks == [3]
        await stage.press("slash")
        await stage.until(lambda: field.has_focus, "the field")
        await stage.press("escape")
        await stage.until(lambda: stage.shown_ranks == list(range(8)), "all ranks")
        assert not field.display
        await stage.press("slash", *"node-1")
        await stage.until(lambda: stage.shown_ranks == [4, 5, 6, 7], "one host")
        await stage.press("backspace", "0", "space", "r", "2")
        await stage.until(lambda: stage.shown_ranks == [2], "two words")


async def test_a_filter_that_no_rank_matches_leaves_an_empty_table_that_still_works():
    async with staged(played("straggler"), SMALL) as stage:
        await stage.press("slash", *"[bold]nobody", "enter")
        await stage.until(lambda: stage.shown_ranks == [], "no rank")
        await stage.press("down", "up", "pagedown", "end", "home", "s", "S", "w", "enter")
        await stage.settle()
        assert stage.pane == "overview"
        await stage.press("slash", "escape")
        await stage.until(lambda: len(stage.shown_ranks) == 8, "all ranks")


async def test_enter_opens_no_rank_that_the_filter_hides():
    async with staged(played("straggler"), SMALL) as stage:
        await stage.press("down", "slash", *"node-1", "enter", "enter")
        await stage.shows("rank")
        await stage.sees("rank 4")


async def test_a_filter_shows_its_ranks_also_where_the_table_was_scrolled():
    async with staged(played("crowd"), SMALL) as stage:
        await stage.press("2")
        await stage.shows("ranks")
        await stage.press("end", "slash", *"r77", "enter")
        await stage.until(lambda: stage.shown_ranks == [77], "one rank")
        await stage.sees("  77 ")


async def test_follow_worst_brings_the_worst_rank_to_the_top_with_the_cursor_until_it_is_moved():
    async with staged(played("straggler"), SMALL) as stage:
        await stage.press("w")
        assert stage.shown_ranks[0] == stage.table.cursor_rank == 3
        await stage.press("down")
        assert not stage.table.ordering.follow_worst
        await stage.press("w", "w")
        assert not stage.table.ordering.follow_worst


async def test_the_rank_that_others_wait_for_is_in_sight_of_a_small_window_also_where_the_table_was_scrolled():
    follower = played("many")
    async with staged(follower, SMALL) as stage:
        await stage.press("end")
        await stage.until(lambda: stage.table.scroll_offset.y > 0, "the last rank")
        beats = hung(follower, missing=8)
        follower.receive(*beats, later_s=1)
        follower.receive(beats[0], later_s=2)
        await stage.sees("✖ HANGS", "✖ not joined: data")

        assert stage.shown_ranks[0] == 8
        assert stage.table.scroll_offset.y == 0


async def test_follow_worst_is_in_sight_also_where_the_table_was_scrolled():
    async with staged(played("crowd"), SMALL) as stage:
        await stage.press("2")
        await stage.shows("ranks")
        await stage.press("end")
        await stage.sees("▌ 1023")
        await stage.press("w")
        await stage.sees("▌  777")


async def test_space_pauses_while_the_run_goes_on_and_again_goes_back_to_live():
    follower = played("late", upto=100)
    async with staged(follower) as stage:
        await stage.press("space")
        await stage.sees("‖ STEP 99")
        still = stage.table._rows[2].figures
        follower.go_on(40)
        await stage.until(lambda: follower.monitor.state.step >= 140, "what comes meanwhile")
        await stage.settle()
        assert "step 99" in stage.header
        assert stage.table._rows[2].figures == still
        await stage.press("space")
        await stage.sees("● LIVE", "step 140")
        assert stage.table._rows[2].figures != still


async def test_arrows_go_through_time_and_the_figures_and_alerts_go_with_them():
    async with staged(played("late")) as stage:
        await stage.sees("● LIVE", "▲ slow data")
        await stage.press("left")
        await stage.sees("‖ STEP 158", "step 158")
        await stage.press("shift+left", "shift+left", "shift+left", "shift+left", "shift+left", "right")
        await stage.sees("‖ STEP 59", "steps 1 to 59", "no alerts")
        await stage.misses("▲ slow data")
        healthy = stage.app.run_view.figures.step_ns
        await stage.press("shift+right")
        await stage.sees("‖ STEP 79")
        await stage.press("l")
        await stage.sees("● LIVE", "▲ slow data")
        assert stage.app.run_view.figures.step_ns > 1.3 * healthy
        await stage.press("right")
        await stage.sees("● LIVE")
        await stage.press("left")
        await stage.sees("‖ STEP 158")
        await stage.click("‖ STEP")
        await stage.sees("● LIVE")
        await stage.press(*["shift+left"] * 10)
        await stage.sees(f"‖ STEP {stage.app.feed.oldest}")
        assert stage.app.run_view.figures is not None


async def test_a_step_that_has_left_the_history_gives_way_to_the_oldest_one():
    follower = played("long", upto=300)
    async with staged(follower) as stage:
        await stage.press(*["shift+left"] * 10)
        await stage.sees("‖ STEP 99")
        follower.go_on(600)
        await stage.until(lambda: follower.monitor.state.step >= 890, "what comes meanwhile")
        await stage.sees("‖ STEP 99")
        await stage.press("left")
        await stage.until(lambda: f"‖ STEP {stage.app.feed.oldest}" in stage.header, "a step that is there")
        await stage.sees("Earlier steps are not in memory.")
        assert stage.app.feed.oldest > stage.app.feed.timeline.newest - CAPACITY_STEPS > 99
        assert stage.app.run_view.figures is not None
        await stage.press("right")
        await stage.sees(f"‖ STEP {stage.app.feed.oldest + 1}")
        await stage.press("l")
        await stage.sees("● LIVE")


async def test_the_help_opens_lists_every_key_scrolls_and_closes():
    async with staged(played("healthy"), (80, 40)) as stage:
        await stage.press("question_mark")
        await stage.until(lambda: isinstance(stage.app.screen, Help), "the help")
        await stage.settle()
        pages = [stage.text()]
        while pages[-1] not in pages[:-1]:
            await stage.press("pagedown")
            await stage.settle()
            pages.append(stage.text())
        assert len(pages) > 2, "one page holds it all: nothing was scrolled"
        words = " ".join("".join(pages).replace("│", " ").split())
        for shown in KEYS:
            assert shown.shown in words
            assert shown.sentence.split()[0] in words
        for closing in ("escape", "q", "question_mark"):
            await stage.press(closing)
            await stage.until(lambda: not isinstance(stage.app.screen, Help), "the dashboard")
            await stage.press("h")
            await stage.until(lambda: isinstance(stage.app.screen, Help), "the help")


async def test_the_command_palette_goes_to_screens_and_its_typing_filters_no_ranks():
    async with staged(played("healthy")) as stage:
        await stage.press("ctrl+p")
        await stage.until(lambda: isinstance(stage.app.screen, CommandPalette), "the palette")
        await stage.sees("Go to overview", "Go to ranks", "Go to all-reduce", "Theme", "Quit")
        await stage.press(*"reduce")
        await stage.misses("Go to overview")
        await stage.sees("Go to all-reduce")
        await stage.press("enter")
        await stage.until(lambda: stage.app.screen is stage.app.screen_stack[0], "the palette's end")
        await stage.shows("allreduce")
        await stage.press("1")
        await stage.shows("overview")
        assert stage.shown_ranks == [0, 1, 2, 3]


async def test_all_our_themes_can_be_chosen_and_change_what_is_drawn():
    async with staged(played("straggler"), SMALL) as stage:
        texts, colors = set(), []
        for theme in THEMES:
            stage.app.theme = theme.name
            await stage.settle()
            texts.add(stage.text())
            marked = [
                segment.style for strip in stage.strips() for segment in strip if "▲ slow backward" in segment.text
            ]
            colors.append(str(marked[0].color))
        assert len(texts) == 1, "the text says it without colors"
        assert len(set(colors)) == len(THEMES), colors
        assert COLOR_BLIND in {theme.name for theme in THEMES}


async def test_sixteen_colors_uses_only_the_terminals_own():
    async with staged(played("straggler"), SMALL, theme="ddpwatch-16-colors") as stage:
        for number in "123456":
            await stage.press(number)
            await stage.settle()
            used = {
                colour.name
                for strip in stage.strips()
                for segment in strip
                if segment.style
                for colour in (segment.style.color, segment.style.bgcolor)
                if colour is not None and not (colour.is_default or colour.is_system_defined)
            }
            assert used == set(), number


async def test_c_copies_the_selected_alert_as_text():
    async with staged(played("many"), SMALL) as stage:
        await stage.press("c")
        assert stage.app.clipboard == ""
        await stage.press("5")
        await stage.shows("alerts")
        alerts = all_alerts(stage.app.run_view)
        assert len(alerts) >= 4
        await stage.press("down", "c")
        assert stage.app.clipboard == alert_text(alerts[1])
        assert alerts[1].finding.message.split()[0] in stage.app.clipboard
        await stage.sees("clipboard")
        await stage.press("up", "c")
        assert stage.app.clipboard == alert_text(alerts[0])
        await stage.press("pagedown", "pagedown", "c")
        assert stage.app.clipboard == alert_text(alerts[-1])


async def test_end_and_home_select_the_last_and_the_first_alert():
    async with staged(played("many"), SMALL) as stage:
        await stage.press("5")
        await stage.shows("alerts")
        listed = stage.app.query_one(AlertList)
        for key, place in (("end", -1), ("home", 0)):
            await stage.press(key)
            alerts = all_alerts(stage.app.run_view)
            assert len(alerts) > 1
            assert listed.alert(stage.app.run_view) is alerts[place]


async def test_e_writes_the_screen_as_an_svg_file(tmp_path):
    async with staged(played("straggler"), export_to=tmp_path) as stage:
        await stage.press("e")
        await stage.sees("Saved as ddpwatch-")
        (run_view,) = tmp_path.iterdir()
        svg = run_view.read_text(encoding="utf-8")
        assert ET.fromstring(svg).tag.endswith("svg")
        assert "backward" in svg
        assert "http" not in svg.replace("http://www.w3.org/", ""), "it loads nothing from the network"
        await stage.press("e")
        await stage.until(lambda: len(list(tmp_path.iterdir())) == 2, "a second one")
        assert not any("Written" in file.read_text(encoding="utf-8") for file in tmp_path.iterdir())


async def test_a_folder_that_cannot_be_written_is_one_line_and_no_crash(tmp_path):
    folder = tmp_path / "[bold red]x[/]" / "not there"
    async with staged(played("healthy"), export_to=folder) as stage:
        await stage.press("e")
        await stage.sees("Cannot write to", "[bold red]x[/]")
        assert stage.app.is_running


async def test_a_current_directory_that_is_gone_is_one_line_and_no_crash(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    async with staged(played("healthy")) as stage:
        gone.rmdir()
        await stage.press("e")
        await stage.sees("Cannot write to the current directory")
        assert stage.app.is_running
    monkeypatch.chdir(tmp_path)


async def test_the_mouse_goes_to_screens_chooses_ranks_and_opens_them():
    async with staged(played("straggler")) as stage:
        await stage.click("3 all-reduce")
        await stage.shows("allreduce")
        await stage.click("▲ 2")
        await stage.shows("alerts")
        await stage.click("1 overview")
        await stage.shows("overview")
        await stage.click("  5  node-1")
        assert stage.table.cursor_rank == 5
        await stage.click("  6  node-1", times=2)
        await stage.shows("rank")
        await stage.sees("rank 6")
        await stage.click("esc back")
        await stage.shows("overview")
        await stage.click("? help")
        await stage.until(lambda: isinstance(stage.app.screen, Help), "the help")


async def test_buckets_are_asked_for_only_on_their_screen_and_shown_when_they_come():
    follower = played("healthy")
    async with staged(follower, SMALL) as stage:
        assert True not in follower.wanted_buckets
        await stage.press("3")
        await stage.shows("allreduce")
        assert follower.wanted_buckets[-1] is True
        before = stage.text()
        follower.receive(*buckets_of(follower))
        await stage.until(lambda: stage.text() != before, "buckets")
        await stage.sees("25M")
        await stage.press("1")
        await stage.shows("overview")
        assert follower.wanted_buckets[-1] is False


async def test_simulated_data_says_so_on_every_screen():
    async with staged(played("healthy"), SMALL, simulated=True) as stage:
        for number in "123456":
            await stage.press(number)
            await stage.sees("SIMULATED")
        await stage.press("2")
        await stage.shows("ranks")
        await stage.press("enter")
        await stage.shows("rank")
        await stage.sees("SIMULATED")


async def test_q_quits():
    async with staged(played("healthy"), SMALL) as stage:
        await stage.press("q")
        await stage.until(lambda: not stage.app.is_running, "the end")
        assert stage.app.return_code in {0, None}


async def test_silence_is_seen_without_a_word_from_anybody():
    follower = played("healthy")
    async with staged(follower) as stage:
        await stage.sees("● LIVE")
        follower.monitor.tick(follower.monitor.state.now_ns + 10**10)
        await stage.sees("▲ NO HEARTBEAT", "▲ no heartbeat")


async def test_what_follows_the_number_of_a_screen_in_one_burst_is_for_that_screen():
    async with staged(played("straggler")) as stage:
        for number in ("2", "1"):
            await stage.press("3")
            await stage.shows("allreduce")
            await stage.burst(f"{number}\r")
            await stage.shows("rank")
            await stage.press("escape")


async def test_ctrl_c_leaves_as_it_ends_any_other_command():
    async with staged(played("healthy")) as stage:
        await stage.press("ctrl+c")
        await stage.until(lambda: not stage.app.is_running or stage.app._exit, "it leaves")
        assert stage.app.return_code == 130


async def test_paused_while_the_history_is_evaluated_the_findings_are_shown():
    follower = played("straggler")
    book, engine = follower.monitor.book, follower.monitor._engine
    engine.caught_up = False
    async with staged(follower) as stage:
        await stage.press("space")
        await stage.sees("‖ STEP 159")
        assert book.open
        await stage.misses("rank 3 (node-0) slow")
        engine.caught_up = True
        await stage.sees("‖ STEP 159", "rank 3 (node-0) slow", "▲ slow backward")
