"""The dashboard as a process in a real terminal: against real ranks, and in terminals of every kind."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

import ddpwatch.agent
from ddpwatch.session.run_follower import RunFollower
from ddpwatch.sources.find_run import live_runs
from tests.builders.fake_rank import FakeRun
from tests.builders.terminal import Terminal
from tests.builders.training import loader, make, train_step, wait_for

ROOT = Path(__file__).parents[2]
WORLD = 4
SLOW = 2
BASE_S = 0.03
NAP_S = 0.03
MAX_STEPS = 3000
MAX_S = 60.0


def attached(run_dir, columns=120, rows=40, *arguments, **environment):
    command = [sys.executable, "-m", "ddpwatch", "attach", *arguments]
    return Terminal(
        command, columns, rows, env={"DDPWATCH_RUN_DIR": str(run_dir), "PYTHONPATH": str(ROOT), **environment}
    )


def slow_run(rank, world_size, *, place):
    """Train until the test has seen enough; one rank is slow in backward. Returns the steps done."""
    model, optimizer = make()
    model.module.before_forward = lambda: time.sleep(BASE_S)
    if rank == SLOW:
        model.module.before_backward = lambda: time.sleep(NAP_S)
    last = Path(place) / "last"
    with ddpwatch.agent.install(model, run_name="slow") as agent:
        for step, (batch, target) in enumerate(loader(world_size, rank, batches=MAX_STEPS)):
            if rank == 0 and (Path(place) / "stop").exists() and not last.exists():
                (Path(place) / "draft").write_text(str(step + 1))
                (Path(place) / "draft").rename(last)
            # All agree: a rank in the step after rank 0's has met it since.
            if last.exists() and step > int(last.read_text()):
                break
            train_step(model, optimizer, batch, target)
        assert agent.active
        return agent._recorder.index


def test_attach_see_the_straggler_open_its_page_detach_and_the_training_goes_on(pool, run_dir, tmp_path):
    running = pool.start(slow_run, WORLD, place=str(tmp_path))
    done = []
    try:
        with attached(run_dir) as terminal:
            terminal.wait_for("● LIVE", MAX_S)
            terminal.wait_for("▲ slow backward", MAX_S)
            terminal.wait_for(f"straggler: rank {SLOW} slow in backward", MAX_S)
            # By hand, or with the worst on top: the cursor is on the first row then.
            terminal.send("w")
            terminal.wait_for(lambda screen: f"▌    {SLOW}  " in screen, MAX_S)
            terminal.send("enter")
            terminal.wait_for("esc back", MAX_S)
            terminal.wait_for(f"rank {SLOW}  ", MAX_S)
            terminal.send("q")
            assert terminal.wait_for_end(MAX_S) == 0
        assert all(rank.alive() for rank in running.ranks)
        (run,) = live_runs()
        with closing(RunFollower(run)) as follower:
            before, deadline_s = None, time.monotonic() + MAX_S
            ranks = follower.monitor.state.ranks.values()
            while before is None or min(rank.steps.newest for rank in ranks) < before + 10:
                assert time.monotonic() < deadline_s, "the ranks no longer step"
                follower.advance()
                if before is None and follower.answered:
                    before = max(rank.steps.newest for rank in ranks)
            (tmp_path / "stop").touch()
            while not follower.ended:
                assert time.monotonic() < deadline_s, "the ranks do not end"
                follower.advance()
            assert {follower.monitor.state.condition(rank) for rank in ranks} == {"ended"}
    finally:
        (tmp_path / "stop").touch()
        done += running.finish()
    assert len(set(done)) == 1
    assert done[0] > 30


@pytest.mark.parametrize(
    ("terminal_kind", "settings", "colored"),
    [
        ("linux", {}, True),
        ("vt100", {}, True),
        ("no-such-terminal", {}, True),
        ("xterm-256color", {"NO_COLOR": "1"}, False),
    ],
)
def test_terminals_of_every_kind_show_it_in_their_colors_and_are_left_in_order(
    run_dir, terminal_kind, settings, colored
):
    with FakeRun(run_dir, 2) as run:
        run.train(0, 60, slow_rank=1)
        with attached(run_dir, 80, 24, TERM=terminal_kind, COLORTERM="", **settings) as terminal:
            terminal.wait_for("● LIVE", MAX_S)
            terminal.wait_for("slow", MAX_S)
            styles = [terminal.style_at(column, row) for row in range(24) for column in range(80)]
            colors = {color for style in styles for color in (style.fg, style.bg)} - {"default"}
            # Its own sixteen have names; what is mixed has numbers, and would become one of those by chance.
            assert all(color.isalpha() for color in colors), colors
            assert (len(colors) > 3) is colored, colors
            terminal.send("5")
            terminal.wait_for("[5 alerts]", MAX_S)
            terminal.send("q")
            assert terminal.wait_for_end(MAX_S) == 0
            assert "Traceback" not in terminal.text()


@pytest.mark.parametrize("terminal_kind", ["dumb", ""])
def test_a_terminal_that_cannot_be_drawn_on_gets_a_line_that_says_what_to_do(run_dir, terminal_kind):
    with attached(run_dir, 160, 24, TERM=terminal_kind) as terminal:
        assert terminal.wait_for_end(MAX_S) == 2
        (line,) = [line for line in terminal.text().splitlines() if line.strip()]

    assert line.startswith("ddpwatch: the dashboard cannot draw on this terminal (TERM")
    assert line.rstrip().endswith("use `ddpwatch status` or `ddpwatch watch` instead")


def test_a_terminal_that_changes_its_size_is_filled_again(run_dir):
    with FakeRun(run_dir, 2) as run:
        run.train(0, 60)
        with attached(run_dir, 80, 24) as terminal:
            terminal.wait_for("● LIVE", MAX_S)
            terminal.resize(120, 40)
            terminal.wait_for("ranks × time", MAX_S)
            terminal.resize(80, 24)
            terminal.wait_for(lambda screen: "ranks × time" not in screen and "● LIVE" in screen, MAX_S)
            terminal.send("q")
            assert terminal.wait_for_end(MAX_S) == 0


def test_a_terminal_that_is_gone_takes_the_dashboard_along(run_dir):
    """Drain what it was about to write: nothing was read for a while, so that the buffer is full."""
    main, secondary = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    shell = ["/bin/sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(secondary)]
    dashboard = [sys.executable, "-m", "ddpwatch", "demo", "--simulated", "--ranks", "8"]
    process = subprocess.Popen(
        [*shell, *dashboard], stdin=secondary, stdout=secondary, stderr=secondary, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        os.close(secondary)
        seen = b""
        while b"LIVE" not in seen:
            assert select.select([main], [], [], MAX_S)[0], "nothing is drawn"
            seen += os.read(main, 65536)
        wait_for(lambda: _stands_still(psutil.Process(process.pid)), MAX_S)
        os.close(main)
        main = -1
        process.wait(MAX_S)
    finally:
        if main >= 0:
            os.close(main)
        process.kill()
        process.wait()


def _stands_still(process: psutil.Process) -> bool:
    """Whether it does nothing any more, which a dashboard of a run that goes on never does by itself."""
    before = process.cpu_times()
    time.sleep(1.0)
    return process.cpu_times() == before
