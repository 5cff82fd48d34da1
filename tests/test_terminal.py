"""The terminal that other tests look through shows what a program draws, and types what a test gives it."""

import os
import re
import sys
import textwrap
import time

import psutil
import pytest

from tests.builders.terminal import Terminal
from tests.builders.training import wait_for


def program(text: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text)]


ECHO = """
    import shutil, signal, sys, termios, tty
    def show(*_):
        size = shutil.get_terminal_size()
        sys.stdout.write(f"\\x1b[2J\\x1b[HI am {size.columns} x {size.lines}")
        sys.stdout.flush()
    signal.signal(signal.SIGWINCH, show)
    tty.setraw(0)
    show()
    while (key := sys.stdin.read(1)) != "q":
        sys.stdout.write(f"\\x1b[3;1Hlast key {ord(key)} ")
        sys.stdout.flush()
"""


def test_a_program_sees_its_size_its_keys_and_a_resize():
    with Terminal(program(ECHO), 90, 20) as terminal:
        terminal.wait_for("I am 90 x 20")
        terminal.send("x")
        terminal.wait_for(re.compile(r"last key 120\b"))
        terminal.resize(132, 43)
        shown_s = terminal.wait_for("I am 132 x 43")
        terminal.send("enter", "q")

        assert terminal.wait_for_end() == 0
        assert terminal.started_s < shown_s < time.monotonic()
        assert terminal.lines()[2] == "last key 13"
        assert len(terminal.lines()) == 43


def test_what_a_screen_library_asks_of_the_terminal_is_not_drawn_even_if_it_comes_in_pieces():
    pieces = [b"\x1b[>1u", b"a\x1b[<u", b"b\x1b[", b"<uc", b"\x1bP=1s\x1b", b"\\d\x1b[?2026$p", b"e\xe2\x96", b"\x88"]
    pieces += [b"\x1b[1;31mf"]
    write = "; ".join(f"os.write(1, {piece!r}); time.sleep(0.02)" for piece in pieces)
    with Terminal(program(f"import os, time; {write}"), 20, 3) as terminal:
        assert terminal.wait_for_end() == 0

        assert terminal.lines() == ["abcde█f", "", ""]
        assert terminal.bytes_read == sum(map(len, pieces))
        assert (terminal.style_at(6, 0).fg, terminal.style_at(6, 0).bold) == ("red", True)


def test_ctrl_c_interrupts_the_program():
    with Terminal(program("import time; print('ready', flush=True); time.sleep(60)"), 60, 10) as terminal:
        terminal.wait_for("ready")
        terminal.send("ctrl+c")

        assert terminal.wait_for_end() == -2
        assert "KeyboardInterrupt" in terminal.text()


def test_what_does_not_come_is_reported_with_the_screen():
    with Terminal(program("print('something else')"), 30, 4) as terminal, pytest.raises(AssertionError) as failure:
        terminal.wait_for("the thing")
    assert "the program has ended" in str(failure.value)
    assert "something else" in str(failure.value)


def test_a_program_that_will_not_end_is_killed_with_its_children_and_reaped(monkeypatch):
    monkeypatch.setattr("tests.builders.terminal.END_S", 0.2)
    stubborn = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = os.fork()
        if child:
            print(f"child {child} of mine", flush=True)
        while True:
            time.sleep(60)
    """
    before = os.listdir("/proc/self/fd")
    with Terminal(program(stubborn), 30, 4) as terminal:
        terminal.wait_for("of mine")
        child = int(terminal.text().split()[1])

    assert terminal.close() == -9
    assert not psutil.pid_exists(terminal.pid)
    wait_for(lambda: not psutil.pid_exists(child))
    assert len(os.listdir("/proc/self/fd")) == len(before)
