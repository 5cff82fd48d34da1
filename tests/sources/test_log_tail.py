"""Tailing log files: growing, rotated, truncated, late, unreadable, with endless lines."""

from __future__ import annotations

import os

import pytest

from ddpwatch.sources import log_tail as tail_module
from ddpwatch.sources.log_tail import FILE_BYTES, LINE_BYTES, LOOK_BACK_BYTES, Lines, Tail


@pytest.fixture
def follow():
    """Make a Tail that is closed at the end."""
    tails = []

    def make(*globs, **options):
        tails.append(Tail([str(each) for each in globs], **options))
        return tails[-1]

    yield make
    for each in tails:
        each.close()


def append(path, data):
    with open(path, "ab") as file:
        file.write(data)


def test_complete_lines_come_once_and_in_order(tmp_path, follow):
    log = tmp_path / "a.log"
    log.write_bytes(b"one\ntwo\nthr")
    tail = follow(log)

    assert tail.poll() == [Lines(str(log), 1, ["one", "two"], 0)]
    assert tail.poll() == []
    append(log, b"ee\r\nfour")
    assert tail.poll() == [Lines(str(log), 3, ["three"], 0)]
    assert tail.finish() == [Lines(str(log), 4, ["four"], 0)]
    assert tail.sources == ()


def test_files_that_appear_later_are_read_from_their_beginning(tmp_path, follow):
    tail = follow(tmp_path / "**" / "*.log", from_end=True)

    assert tail.poll() == []
    (tmp_path / "deep").mkdir()
    late = tmp_path / "deep" / "late.log"
    late.write_bytes(b"line\n" * LOOK_BACK_BYTES)
    (lines,) = tail.poll()
    assert (lines.source, lines.first_line, len(lines.texts), lines.skipped) == (str(late), 1, LOOK_BACK_BYTES, 0)


def test_an_existing_file_is_read_from_near_its_end(tmp_path, follow):
    log = tmp_path / "a.log"
    log.write_bytes(b"0123456789 some line\n" * 10_000 + b"last\n")
    (lines,) = follow(log, from_end=True).poll()

    assert lines.texts[-1] == "last"
    assert set(lines.texts[:-1]) == {"0123456789 some line"}
    assert sum(len(text) + 1 for text in lines.texts) <= LOOK_BACK_BYTES
    assert 0 <= log.stat().st_size - lines.skipped - sum(len(text) + 1 for text in lines.texts) <= 1


def numbered(lines):
    return list(enumerate(lines.texts, lines.first_line))


def test_line_numbers_are_those_of_the_file_when_read_from_near_its_end(tmp_path, follow):
    log = tmp_path / "a.log"
    log.write_text("".join(f"line {number}\n" for number in range(1, 20_001)))
    (lines,) = follow(log, from_end=True).poll()

    assert len(lines.texts) < 20_000
    assert all(text == f"line {number}" for number, text in numbered(lines))


def test_line_numbers_are_those_of_the_file_when_an_older_one_grows(tmp_path, follow):
    log = tmp_path / "a.log"
    log.write_bytes(b"one\ntwo\n")
    os.utime(log, (1000, 1000))
    tail = follow(log, from_end=True, since_unix_s=2000)

    assert (tail.poll(), tail.older) == ([], 1)
    append(log, b"three\nfour\n")
    assert tail.poll() == [Lines(str(log), 3, ["three", "four"], 8)]


def test_skipped_lines_of_a_large_file_are_not_counted(tmp_path, follow, monkeypatch):
    monkeypatch.setattr(tail_module, "COUNTED_BYTES", 7)
    log = tmp_path / "a.log"
    log.write_bytes(b"one\ntwo\n")
    os.utime(log, (1000, 1000))
    tail = follow(log, from_end=True, since_unix_s=2000)
    tail.poll()
    append(log, b"three\n")
    (lines,) = tail.poll()

    assert (lines.texts, lines.counted) == (["three"], False)


def test_a_rotated_file_is_read_to_its_end_and_then_its_successor(tmp_path, follow):
    log = tmp_path / "a.log"
    log.write_bytes(b"one\n")
    tail = follow(log)
    tail.poll()
    append(log, b"two\nunfinished")
    log.rename(tmp_path / "a.log.1")
    log.write_bytes(b"three\n")

    assert [lines.texts for lines in tail.poll()] == [["two"], ["unfinished"]]
    assert tail.poll() == [Lines(str(log), 1, ["three"], 0)]


def test_a_rotated_file_whose_new_name_matches_is_not_read_twice(tmp_path, follow):
    log = tmp_path / "a.log"
    log.write_bytes(b"one\ntwo\n")
    tail = follow(f"{log}*")
    tail.poll()
    log.rename(tmp_path / "a.log.1")
    log.write_bytes(b"new\n")
    append(tmp_path / "a.log.1", b"late\n")

    seen = [lines for _ in range(3) for lines in tail.poll()]
    assert sorted(text for lines in seen for text in lines.texts) == ["late", "new"]


def test_a_truncated_file_begins_anew(tmp_path, follow):
    log = tmp_path / "a.log"
    log.write_bytes(b"one\ntwo\nthree and a rest")
    tail = follow(log)
    tail.poll()
    log.write_bytes(b"anew\n")

    assert tail.poll() == [Lines(str(log), 1, ["anew"], 0)]


def test_a_deleted_file_is_followed_again_when_it_is_back(tmp_path, follow):
    log = tmp_path / "a.log"
    log.write_bytes(b"one\n")
    tail = follow(log)
    tail.poll()
    log.unlink()
    assert tail.poll() == []
    assert tail.sources == ()
    log.write_bytes(b"more than before\n")

    assert tail.poll() == [Lines(str(log), 1, ["more than before"], 0)]


def test_invalid_utf8_is_replaced(tmp_path, follow):
    log = tmp_path / "a.log"
    log.write_bytes(b"\xff\xfe\x00ok\n" + "é\n".encode() + b"\xe2\x82\n" + bytes(range(256)) * 10 + b"\nend\n")
    (lines,) = follow(log).poll()

    assert lines.texts[:3] == ["\ufffd\ufffd\x00ok", "é", "\ufffd"]
    assert lines.texts[-1] == "end"


def test_a_character_that_arrives_in_two_parts_is_joined(tmp_path, follow):
    log = tmp_path / "a.log"
    log.write_bytes(b"caf\xc3")
    tail = follow(log)
    tail.poll()
    append(log, b"\xa9\n")

    assert tail.poll()[0].texts == ["café"]


def test_an_endless_line_is_truncated(tmp_path, follow):
    log = tmp_path / "a.log"
    log.write_bytes(b"x" * (5 * FILE_BYTES) + b"\nshort\n")
    tail = follow(log)
    seen = []
    while not tail.caught_up:
        seen += tail.poll()
        assert len(tail._files[str(log)]._rest) <= LINE_BYTES

    assert [len(text) for lines in seen for text in lines.texts] == [LINE_BYTES, 5]
    assert sum(lines.skipped for lines in seen) == 5 * FILE_BYTES - LINE_BYTES


def test_a_poll_is_bounded_and_the_next_continues(tmp_path, follow):
    log = tmp_path / "a.log"
    log.write_bytes(b"a line of some length\n" * 300_000)
    tail = follow(log)
    counts = []
    while not tail.caught_up:
        counts.append(sum(len(lines.texts) for lines in tail.poll()))

    assert sum(counts) == 300_000
    assert max(counts) * 22 <= FILE_BYTES + 22


def test_many_large_files_take_turns(tmp_path, follow, monkeypatch):
    monkeypatch.setattr(tail_module, "POLL_BYTES", 100_000)
    monkeypatch.setattr(tail_module, "FILE_BYTES", 60_000)
    for name in "abcd":
        (tmp_path / name).write_bytes(b"0123456789\n" * 20_000)
    tail = follow(tmp_path / "*")
    rounds = [{lines.source[-1] for lines in tail.poll()} for _ in range(2)]

    assert rounds == [{"a", "b"}, {"c", "d"}]
    counts = dict.fromkeys("abcd", 0)
    tail = follow(tmp_path / "*")
    while not tail.caught_up:
        for lines in tail.poll():
            counts[lines.source[-1]] += len(lines.texts)
    assert set(counts.values()) == {20_000}


def test_pipes_and_directories_are_rejected_once_without_blocking(tmp_path, follow):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    tail = follow(tmp_path / "*", "/dev/null")

    assert [tail.poll() for _ in range(3)] == [[], [], []]
    assert len(tail.errors) == 4
    assert any("folder is a directory" in error for error in tail.errors)
    assert any("pipe is a pipe" in error for error in tail.errors)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_reported_once(tmp_path, follow):
    log = tmp_path / "a.log"
    log.write_bytes(b"one\n")
    log.chmod(0)
    tail = follow(log)

    assert [tail.poll(), tail.poll()] == [[], []]
    assert len(tail.errors) == 1
    assert "Permission denied" in tail.errors[0]
    log.chmod(0o600)
    assert tail.poll()[0].texts == ["one"]


def test_a_read_error_is_reported_once(tmp_path, follow):
    (tmp_path / "a.log").write_bytes(b"one\n")
    tail = follow("/proc/self/mem", tmp_path / "a.log")

    assert [lines.texts for _ in range(3) for lines in tail.poll()] == [["one"]]
    assert [error.partition(":")[0] for error in tail.errors] == ["/proc/self/mem cannot be read anymore"]


def test_a_file_with_two_names_is_read_once(tmp_path, follow):
    (tmp_path / "a.log").write_bytes(b"one\n")
    (tmp_path / "latest.log").symlink_to("a.log")

    assert len(follow(tmp_path / "*.log").poll()) == 1


def test_a_file_name_may_contain_glob_characters(tmp_path, follow):
    log = tmp_path / "log[1].txt"
    log.write_bytes(b"one\n")

    assert follow(log).poll()[0].texts == ["one"]


def test_nothing_is_left_open(tmp_path, follow):
    (tmp_path / "a.log").write_bytes(b"one\n")
    before = os.listdir("/proc/self/fd")
    tail = follow(tmp_path / "*.log")
    tail.poll()
    tail.finish()

    assert os.listdir("/proc/self/fd") == before
