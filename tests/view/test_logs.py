"""Log screen: diagnosis, recognized lines, and last lines."""

import pytest
from hypothesis import given

from ddpwatch import wire
from ddpwatch.view.logs import log_lines
from tests.view.pages import HOSTILE, assert_fits, heights, make_monitor, make_run_view, page, texts, widths


def logged(*files):
    """A run with log files: (name, lines)."""
    monitor = make_monitor()
    for name, lines in files:
        numbered = [wire.LogLine(number, text) for number, text in enumerate(lines, 1)]
        monitor.ingest(wire.encode(wire.LogLines(rank=0, seq=0, source=name, lines=numbered)), 1)
    return make_run_view(monitor)


def test_without_logs_it_explains_how_to_watch_them():
    assert "--log" in page(log_lines(make_run_view(make_monitor()), 100, 30))


def test_the_diagnosis_is_above_the_last_lines():
    drawn = logged(
        ("/logs/rank0.log", ["epoch 1", "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:14503"]),
        ("/logs/rank1.log", ["epoch 1", "[rank1]: ValueError: the user's own"]),
    )
    lines = texts(log_lines(drawn, 100, 30))

    assert lines[0] == "4 lines of 2 files read · 2 recognized"
    assert lines[1].startswith("✖ Rank 1 raised ValueError: the user's own")
    assert "✖ rank1.log      2 [rank1]: ValueError: the user's own" in lines
    assert lines[-2:] == ["  rank1.log      1 epoch 1", "✖ rank1.log      2 [rank1]: ValueError: the user's own"]


def test_paths_are_shown_as_far_as_they_differ():
    """With the directories that torchrun creates."""
    drawn = logged(
        ("/logs/none_x1/attempt_0/0/stdout.log", ["a"]),
        ("/logs/none_x1/attempt_0/3/stdout.log", ["b"]),
        ("/logs/none_x1/attempt_0/3/stderr.log", ["c"]),
        ("/logs/job.log", ["d"]),
    )

    assert texts(log_lines(drawn, 100, 30))[-4:] == [
        "  0/stdout.log      1 a",
        "  3/stdout.log      1 b",
        "  stderr.log        1 c",
        "  job.log           1 d",
    ]


def test_a_number_that_is_not_known_is_not_shown():
    monitor = make_monitor()
    lines = [wire.LogLine(7, "epoch 1")]
    monitor.ingest(wire.encode(wire.LogLines(rank=0, seq=0, source="a.log", lines=lines, counted=False)), 1)

    assert texts(log_lines(make_run_view(monitor), 100, 30))[-1] == "  a.log        epoch 1"


def test_the_middle_of_a_long_path_is_left_out():
    drawn = logged((f"/logs/1/{'x' * 30}.log", ["a"]), (f"/logs/2/{'x' * 30}.log", ["b"]))

    shown = [line.split()[0] for line in texts(log_lines(drawn, 100, 30))[-2:]]
    assert shown == [f"{rank}/xxxxxx…{'x' * 11}.log" for rank in (1, 2)]


def test_a_file_that_cannot_be_followed_is_reported():
    assert "▲ x.log cannot be read: Permission denied" in page(
        log_lines(logged(("", ["x.log cannot be read: Permission denied"])), 100, 30)
    )


@pytest.mark.parametrize("rows", [1, 2, 5, 12])
def test_the_latest_line_is_always_at_the_bottom(rows):
    lines = texts(log_lines(logged(("a.log", [f"line {number}" for number in range(100)])), 80, rows))

    assert len(lines) <= rows
    if rows > 2:
        assert lines[-1].endswith("line 99")


@pytest.fixture(scope="module")
def hostile():
    return logged((HOSTILE[:60], [HOSTILE, HOSTILE * 20, f"[rank1]: ValueError: {HOSTILE}", ""]), ("", [HOSTILE]))


@given(columns=widths, rows=heights)
def test_it_fits_whatever_is_in_the_files(hostile, columns, rows):
    assert_fits(log_lines(hostile, columns, rows), columns, rows)
