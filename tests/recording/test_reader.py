"""Damaged, foreign and hostile files: a clear error, and every readable row is read."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import subprocess
from contextlib import closing

import msgspec
import pytest
import zstandard

from ddpwatch.recording import writer as recorder_module
from ddpwatch.recording.alerts import reported
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.schema import APPLICATION_ID, PAGE_BYTES, SCHEMA, TABLES, NoRecording, Unreadable
from ddpwatch.recording.sqlite_open import lacks_wal
from ddpwatch.recording.steps import StepReader
from ddpwatch.recording.writer import Recorder
from tests.builders.kept_runs import copied, follow, kept, real_frames
from tests.builders.training import wait_for
from tests.recordings.make import RUN_ID

TRIES = 12


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A recording of a real run, as bytes."""
    path = tmp_path_factory.mktemp("finished") / "run.ddpw"
    with pytest.MonkeyPatch.context() as patch:
        # Smaller portions, so that there are more rows to lose.
        patch.setattr(recorder_module, "PORTION_NS", 100_000_000)
        patch.setattr(recorder_module, "CHECKPOINT_FRAMES", 100)
        patch.setattr(recorder_module, "CHECKPOINT_FRAMES_PER_RANK", 0)
        kept(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory):
    """The same as a killed recorder leaves it: bytes of the file and of its WAL."""
    folder = tmp_path_factory.mktemp("unfinished")
    with closing(Recorder(folder / "run.ddpw")) as recorder:
        follow(recorder, real_frames())
        wait_for(lambda: recorder.written == len(real_frames()))
        return (folder / "run.ddpw").read_bytes(), (folder / "run.ddpw-wal").read_bytes()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.ddpw"


def read_all(path):
    """Read everything in a recording; returns payloads and the number of damaged parts."""
    with closing(Recording(path)) as recording:
        payloads = []
        for attempt in recording.attempts:
            payloads += [entry.payload for entry in recording.entries(attempt)]
            recording.checkpoint(attempt, attempt.last_ns)
            reported(recording, attempt)
            list(StepReader(recording, attempt).windows(unusual=True))
            recording.frames(attempt)
            recording.dropped(attempt)
        recording.refresh()
        return payloads, recording.damaged


def read_or_refused(path):
    """The same, or nothing if it is refused with an error that names the file."""
    try:
        return read_all(path)
    except (NoRecording, Unreadable) as error:
        words = str(error)
    assert str(path) in words
    return [], 1


def changed(path, *statements):
    """Execute statements on the database."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        for statement, *values in statements:
            database.execute(statement, values)


def is_part_of(some, whole):
    """Whether these frames are among those, in order."""
    left = iter(whole)
    return all(any(each == other for other in left) for each in some)


def test_a_truncated_file_is_read_up_to_the_cut(path, finished):
    whole = [frame.payload for frame in real_frames()]
    chance = random.Random(7)
    read = []
    for _ in range(TRIES):
        size = chance.randrange(len(finished))
        path.write_bytes(finished[:size])
        payloads, damaged = read_or_refused(path)
        assert damaged
        assert is_part_of(payloads, whole)
        read.append((size, len(payloads)))

    enough = [count for size, count in read if size > len(finished) // 2]
    assert min(enough) > len(whole) // 5, "half a file holds some of the run"
    assert max(count for _, count in read) > len(whole) * 3 // 4


@pytest.mark.parametrize("wrong", [0xFF, 0x87, ord("!")])
def test_one_wrong_byte_in_the_schema_costs_no_frame(path, finished, wrong):
    """SQLite's error message may then contain invalid UTF-8."""
    data = bytearray(finished)
    for at in [at for at in range(len(data)) if data.startswith(b"CREATE INDEX block_by_time", at)]:
        data[at + 30] = wrong
    path.write_bytes(data)
    payloads, damaged = read_all(path)

    assert damaged
    assert payloads == [frame.payload for frame in real_frames()]


def test_overwritten_bytes_cost_only_the_rows_in_them(path, finished):
    whole = [frame.payload for frame in real_frames()]
    chance = random.Random(8)
    counts = []
    for _ in range(TRIES):
        damage = bytearray(finished)
        at = chance.randrange(100, len(damage) - 600)
        damage[at : at + 600] = chance.randbytes(600)
        path.write_bytes(damage)
        payloads, _ = read_or_refused(path)
        assert is_part_of(payloads, whole)
        counts.append(len(payloads))

    assert sorted(counts)[3] > len(whole) * 3 // 4
    assert min(counts) > len(whole) // 2


def test_without_the_root_page_of_blocks_steps_are_read_from_checkpoints(path, finished):
    """The worst page to lose: SQLite finds no block without it."""
    path.write_bytes(finished)
    with closing(sqlite3.connect(path)) as database:
        (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'block'").fetchone()
    path.write_bytes(finished[: (root - 1) * PAGE_BYTES] + bytes(PAGE_BYTES) + finished[root * PAGE_BYTES :])

    with closing(Recording(path)) as recording:
        (attempt,) = recording.attempts
        assert recording.frames(attempt) == 0
        assert sum(len(window) for window in StepReader(recording, attempt).windows(unusual=True)) > 0
        assert recording.damaged
        assert reported(recording, attempt)


@pytest.mark.parametrize("moved", [0, 1_000_000])
def test_rows_after_lost_ones_are_found_whatever_their_ids(path, finished, moved):
    """Retention removes the oldest rows, so that the first id may be any."""
    path.write_bytes(finished)
    changed(path, (f"UPDATE block SET id = -id - {moved}",), ("UPDATE block SET id = -id",), ("VACUUM",))
    whole, _ = read_all(path)
    data = bytearray(path.read_bytes())
    with closing(sqlite3.connect(path)) as database:
        (root,) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'block'").fetchone()
    # The first child of the root, by the first cell of that page.
    at = (root - 1) * PAGE_BYTES
    cell = at + int.from_bytes(data[at + 12 : at + 14], "big")
    first = int.from_bytes(data[cell : cell + 4], "big")
    data[(first - 1) * PAGE_BYTES : first * PAGE_BYTES] = bytes(PAGE_BYTES)
    path.write_bytes(data)
    payloads, damaged = read_all(path)

    assert damaged
    assert len(whole) * 3 // 4 < len(payloads) < len(whole)


@pytest.mark.parametrize(
    "content", [bytes(PAGE_BYTES), random.Random(9).randbytes(PAGE_BYTES)], ids=["nothing", "noise"]
)
def test_a_lost_page_never_hides_alert_events_silently(path, finished, content):
    """Loses each page in turn; many alerts, so that they have pages of their own."""
    path.write_bytes(finished)
    copy = "INSERT INTO alert (attempt, at_ns, kind, event) SELECT attempt, at_ns, kind, event FROM alert"
    changed(path, *5 * [(copy,)], ("PRAGMA wal_checkpoint(TRUNCATE)",), ("PRAGMA journal_mode = DELETE",))
    whole = path.read_bytes()
    reported = events_of(path)[0]
    assert len(reported) > 50
    hurt = 0
    for page in range(len(whole) // PAGE_BYTES):
        path.write_bytes(whole[: page * PAGE_BYTES] + content + whole[(page + 1) * PAGE_BYTES :])
        try:
            events, said = events_of(path)
        except (NoRecording, Unreadable):
            continue
        assert said or events == reported
        hurt += events != reported
    assert hurt > 2


def events_of(path):
    """Events of alerts, and whether the reader reports that some may be missing."""
    with closing(Recording(path)) as recording:
        return [row.event for row in recording.alerts()], recording.alerts_hurt


@pytest.mark.parametrize("part", ["file", "log"])
def test_the_file_of_a_killed_recorder_may_be_damaged_too(path, unfinished, part):
    whole = [frame.payload for frame in real_frames()]
    file, log = unfinished
    chance = random.Random(9)
    path.write_bytes(file)
    path.with_name("run.ddpw-wal").write_bytes(log)
    assert read_all(path) == (whole, 0)
    for number in range(TRIES // 2):
        path.with_name("run.ddpw-shm").unlink(missing_ok=True)
        data = bytearray(file if part == "file" else log)
        if number % 2:
            del data[chance.randrange(len(data)) :]
        else:
            data[chance.randrange(100, len(data))] ^= 0xFF
        path.write_bytes(data if part == "file" else file)
        path.with_name("run.ddpw-wal").write_bytes(log if part == "file" else data)
        payloads, _ = read_or_refused(path)
        assert is_part_of(payloads, whole)


def test_recording_into_a_damaged_file_works_or_is_refused_with_a_reason(path, finished):
    chance = random.Random(10)
    for _ in range(10):
        path.with_name("run.ddpw-wal").unlink(missing_ok=True)
        path.write_bytes(finished[: chance.randrange(100, len(finished))])
        with pytest.raises(Unreadable, match=r"run\.ddpw"):
            Recorder(path)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda path: None, NoRecording, "no such file"),
        (lambda path: path.touch(), NoRecording, "is empty"),
        (lambda path: path.mkdir(), Unreadable, "is a directory"),
        (os.mkfifo, Unreadable, "is not a regular file"),
        (lambda path: path.write_text("step,loss\n1,2\n" * 50), Unreadable, "is not a ddpwatch recording"),
        (lambda path: path.write_bytes(b"SQLite format 3\0"), NoRecording, "ends before anything was recorded"),
        (lambda path: changed(path, ("CREATE TABLE t (a)",)), Unreadable, "of another program"),
    ],
)
def test_other_files_are_refused_by_name(path, make, kind, words):
    make(path)

    with pytest.raises(kind, match=words):
        Recording(path)
    if kind is Unreadable:
        with pytest.raises(Unreadable, match=words):
            Recorder(path)


def test_a_newer_schema_is_refused_with_its_version(path):
    copied(path)
    changed(path, (f"PRAGMA user_version = {SCHEMA + 1}",))

    with pytest.raises(Unreadable, match=rf"newer ddpwatch \(schema {SCHEMA + 1}\)"):
        Recording(path)
    with pytest.raises(Unreadable, match="newer ddpwatch"):
        Recorder(path)


@pytest.mark.parametrize(
    ("at", "damage"),
    [(0, bytes(4096)), (0, b"\xff" * 100), (60, b"\x00\x6e\x00\x01"), (68, b"oops")],
    ids=["first page", "header", "schema", "program"],
)
def test_a_damaged_header_is_recovered_and_all_rows_are_read(path, finished, at, damage):
    path.write_bytes(finished)
    whole, _ = read_all(path)
    path.write_bytes(finished[:at] + damage + finished[at + len(damage) :])

    payloads, damaged = read_all(path)

    assert payloads == whole
    assert damaged
    with pytest.raises(Unreadable, match="its beginning is damaged"):
        Recorder(path)


def test_a_copy_without_its_wal_names_the_missing_file(path, unfinished):
    path.write_bytes(unfinished[0])

    with pytest.raises(NoRecording, match=r"nothing was recorded in .*, or it is in run.ddpw-wal, which is missing"):
        Recording(path)
    assert lacks_wal(path)
    assert [each.name for each in path.parent.iterdir()] == ["run.ddpw"]
    path.with_name("run.ddpw-wal").write_bytes(unfinished[1])
    assert not lacks_wal(path)


def test_a_file_read_while_its_recorder_closed_it_is_complete(path):
    recorder = Recorder(path)
    follow(recorder, real_frames())
    wait_for(lambda: recorder.written == len(real_frames()))
    with closing(Recording(path)):
        # While another process reads it, SQLite keeps WAL mode.
        recorder.close()
    whole, damaged = read_all(path)

    assert (len(whole), damaged) == (len(real_frames()), 0)
    assert not lacks_wal(path)
    for log in path.parent.glob("run.ddpw-*"):
        log.unlink()
    assert not lacks_wal(path), "a copy of the file alone is whole, too"
    assert read_all(path) == (whole, 0)


def test_a_recorder_that_waits_for_a_run_is_named(path):
    with closing(Recorder(path)), pytest.raises(NoRecording, match=f"yet: process {os.getpid()} is waiting for a run"):
        Recording(path)


def test_the_wal_is_read_in_a_read_only_directory(path, unfinished, tmp_path):
    path.write_bytes(unfinished[0])
    path.with_name("run.ddpw-wal").write_bytes(unfinished[1])
    whole, _ = read_all(path)
    place = tmp_path / "place"
    place.mkdir()
    # Simulates a read-only disk, because root ignores the permissions of a directory.
    mounted = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", place]
    if subprocess.run(mounted, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        for name in ("run.ddpw", "run.ddpw-wal"):
            shutil.copyfile(path.with_name(name), place / name)
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        assert read_all(place / "run.ddpw") == (whole, 0)
        assert sorted(each.name for each in place.iterdir()) == ["run.ddpw", "run.ddpw-wal"]
    finally:
        subprocess.run(["umount", place], check=True)


def test_an_empty_recording_is_reported(path):
    changed(path, (f"PRAGMA application_id = {APPLICATION_ID}",), *((table,) for table in TABLES))

    with pytest.raises(NoRecording, match="nothing was recorded"):
        Recording(path)


@pytest.mark.parametrize("damage", ["last_ns = last_ns - 177000000000", "first_ns = first_ns + 99000000000"])
def test_an_impossible_time_does_not_extend_the_attempt(path, damage):
    copied(path)
    with closing(Recording(path)) as recording:
        (attempt,) = recording.attempts
    changed(path, (f"UPDATE block SET {damage} WHERE id = 3",))

    with closing(Recording(path)) as recording:
        assert (recording.attempts[0].first_ns, recording.attempts[0].last_ns) == (attempt.first_ns, attempt.last_ns)


def test_a_lost_description_is_restored_from_frames(path):
    copied(path)
    changed(path, ("UPDATE attempt SET run = x'00'",))

    with closing(Recording(path)) as recording:
        (attempt,) = recording.attempts
        assert (attempt.run.id, attempt.run.world_size) == (RUN_ID, 4)
        assert len(list(recording.entries(attempt))) == len(real_frames())


BOMB = zstandard.ZstdCompressor().compress(bytes(100 << 20))
CLAIM = b"\x28\xb5\x2f\xfd\xe0" + (2**60).to_bytes(8, "little") + b"\x00\x00\x00"
MANY = zstandard.ZstdCompressor().compress(b"\x94\xdd\xff\xff\xff\xff")
UNEVEN = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode([[1], [2], [b""], []]))
TIMELESS = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode([[1], [2**63], [b""], [b""]]))


@pytest.mark.parametrize("table", ["block", "checkpoint"])
@pytest.mark.parametrize("data", [BOMB, CLAIM, MANY, UNEVEN, TIMELESS, b"", b"\0" * 100], ids=str)
def test_hostile_blocks_are_skipped_and_counted(path, table, data):
    copied(path)
    frames = "WHERE shard >= 0" if table == "block" else ""
    changed(path, (f"UPDATE {table} SET data = ? WHERE id = (SELECT max(id) FROM {table} {frames})", data))
    payloads, damaged = read_all(path)

    assert damaged
    assert is_part_of(payloads, [frame.payload for frame in real_frames()])
    assert len(payloads) > 300


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE block SET last_ns = 'soon' WHERE id = 3",
        "UPDATE block SET first_ns = 1e300 WHERE id = 3",
        "UPDATE block SET portion = x'00' WHERE id = 3",
        "UPDATE block SET attempt = 'a' WHERE id = 3",
        "UPDATE block SET shard = 9223372036854775807 WHERE id = 3",
        "UPDATE block SET frames = 9223372036854775807",
        "UPDATE block SET last_ns = -9223372036854775808 WHERE id = 3",
        "UPDATE block SET data = 17 WHERE id = 3",
        "UPDATE block SET data = 'text' WHERE id = 3",
        "UPDATE block SET portion = 5",
        "UPDATE attempt SET began_ns = 'long ago'",
        "UPDATE span SET until_ns = 9223372036854775807",
        "UPDATE alert SET kind = 5, event = 'x'",
        "UPDATE alert SET event = zeroblob(2000000)",
        "UPDATE alert SET at_ns = x'ff'",
        "UPDATE checkpoint SET position = 'p', at_ns = 5",
        "INSERT INTO attempt VALUES (99, x'00', 0)",
        "INSERT INTO gap VALUES (1, 'a', 'b', 'c')",
    ],
)
def test_values_of_the_wrong_type_are_skipped(path, statement):
    copied(path)
    changed(path, (statement,))
    payloads, _ = read_all(path)

    assert len(payloads) > 300 or "portion = 5" in statement


def test_views_in_place_of_tables_are_never_queried(path):
    """A view may compute forever. The existing rows are read without it."""
    copied(path)
    endless = (
        "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x FROM r) SELECT x AS id, x AS run, x AS began_ns FROM r"
    )
    changed(path, ("ALTER TABLE attempt RENAME TO other",), (f"CREATE VIEW attempt AS {endless}",))
    payloads, damaged = read_all(path)

    assert damaged
    assert len(payloads) == len(real_frames())


def test_a_recording_is_read_in_a_read_only_directory(path, tmp_path):
    copied(path)
    place = tmp_path / "locked"
    place.mkdir()
    shutil.copy(path, place / "run.ddpw")
    place.chmod(0o500)
    try:
        payloads, damaged = read_all(place / "run.ddpw")
    finally:
        place.chmod(0o700)

    assert (len(payloads), damaged) == (len(real_frames()), 0)


def test_frames_are_found_by_time_and_by_rank(path):
    copied(path)
    with closing(Recording(path)) as recording:
        (attempt,) = recording.attempts
        whole = list(recording.entries(attempt))
        first_ns, last_ns = whole[100].at_ns, whole[300].at_ns
        some = list(recording.entries(attempt, from_ns=first_ns, upto_ns=last_ns))
        assert some == [entry for entry in whole if first_ns < entry.at_ns <= last_ns]
        assert list(recording.entries(attempt, after=whole[400].position)) == whole[401:]
        assert list(recording.entries(attempt, shard=0)) == whole
        assert list(recording.entries(attempt, shard=1)) == []
