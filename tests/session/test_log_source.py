"""Log files become frames: all lines that match a pattern, and the last of the others."""

import os

import pytest

from ddpwatch.core.detectors.context import DetectorContext
from ddpwatch.core.detectors.desync import desync
from ddpwatch.core.detectors.rank_failed import rank_failed
from ddpwatch.core.detectors.rank_lost import rank_lost
from ddpwatch.core.detectors.timeout import timeout
from ddpwatch.core.limits import DEFAULTS
from ddpwatch.core.logs.log_state import KEPT_LINES
from ddpwatch.core.metrics.baseline import History
from ddpwatch.core.metrics.window import gather
from ddpwatch.core.state.run import RunState
from ddpwatch.session.log_source import LAST_LINES, POLL_NS, LogFrames

SECOND = 1_000_000_000
ENQUEUED = (
    "[rank{rank}]:[E1116 03:04:11.061727749 ProcessGroupNCCL.cpp:683] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  "
    "failure detected by watchdog at work sequence id: 1042 PG status: last enqueued work: {enqueued}, "
    "last completed work: 1041"
)


@pytest.fixture
def logs(tmp_path):
    """Log frames of a folder, and a state that ingests them."""
    frames = LogFrames([str(tmp_path / "*.log")])
    state = RunState("ab12cd34", "train", 4)
    clock = [SECOND]

    def read():
        clock[0] += POLL_NS
        for frame in frames.poll(clock[0]):
            state.ingest(frame.payload, frame.received_ns)
        return state

    yield read
    frames.close()


def look(state):
    return DetectorContext(state, gather(state, [], upto=-1, steps=1), History(), DEFAULTS)


def test_the_last_lines_are_shown_and_all_are_counted(tmp_path, logs):
    (tmp_path / "rank0.log").write_text("".join(f"step {step}\n" for step in range(500)))
    state = logs()

    assert state.logs.lines == 500
    assert [entry.text for entry in state.logs.entries] == [f"step {step}" for step in range(500 - LAST_LINES, 500)]
    assert [entry.number for entry in state.logs.entries] == list(range(501 - LAST_LINES, 501))


def test_matching_lines_are_sent_wherever_they_are(tmp_path, logs):
    (tmp_path / "rank0.log").write_text("torch.cuda.OutOfMemoryError: CUDA out of memory.\n" + "step\n" * 5000)
    state = logs()

    (entry,) = state.logs.marked
    assert (entry.number, entry.mark.kind) == (1, "cuda-oom")
    assert state.logs.lines == 5001
    assert len(state.logs.entries) <= KEPT_LINES


def test_the_rank_with_the_lowest_work_number_is_named_and_not_the_first_to_report(tmp_path, logs):
    for rank, enqueued in ((0, 1044), (1, 1043), (3, 1044), (2, 1041)):
        (tmp_path / f"rank{rank}.log").write_text(ENQUEUED.format(rank=rank, enqueued=enqueued) + "\n")
    (finding,) = timeout(look(logs()))

    assert (finding.rule, finding.subject, finding.ranks) == ("timeout", "logs", (2,))
    assert finding.message.startswith("Rank 2 did not join")
    assert rank_failed(look(logs())) == []


def test_the_end_of_one_rank_is_a_failure_and_no_timeout(tmp_path, logs):
    (tmp_path / "all.log").write_text("[rank1]: ValueError: the user's own\n")
    state = logs()
    (finding,) = rank_failed(look(state))

    assert (finding.rule, finding.ranks) == ("rank-failed", (1,))
    assert timeout(look(state)) == []


def test_hostile_lines_are_sanitized_and_bounded(tmp_path, logs):
    (tmp_path / "rank0.log").write_bytes(b"\x1b[31m[red]\x1b[0m \xff\xfe\x00 " + b"x" * 10_000 + b"\n")
    (entry,) = logs().logs.entries

    assert "\x1b" not in entry.text
    assert len(entry.text) <= 500
    assert entry.text.startswith("[red]")


def test_files_that_appear_later_are_followed(tmp_path, logs):
    assert logs().logs.lines == 0
    (tmp_path / "late.log").write_text("one\ntwo\n")
    assert logs().logs.lines == 2


def test_watched_and_unreadable_logs_are_reported(tmp_path, logs):
    (tmp_path / "pipe.log").mkdir()
    shot = logs().logs.snapshot()

    assert shot.watched
    assert shot.entries == ()
    assert shot.notices[0].endswith("is a directory; only regular files are read")
    assert shot.notices[1].startswith("no file matches ")
    assert not RunState("ab12cd34", "train", 4).logs.snapshot().watched


def test_lines_written_before_the_run_are_skipped(tmp_path):
    old, new = tmp_path / "old.log", tmp_path / "new.log"
    for path in (old, new):
        path.write_text("[rank1]: ValueError: the user's own\n")
    os.utime(old, (1000.0, 1000.0))
    frames = LogFrames([str(tmp_path / "*.log")], since_unix_s=2000.0)
    state = RunState("ab12cd34", "train", 4)
    for frame in frames.poll(SECOND):
        state.ingest(frame.payload, frame.received_ns)
    frames.close()

    assert [entry.source for entry in state.logs.entries] == [str(new)]


def test_a_warning_without_a_timeout_is_not_a_timeout(tmp_path, logs):
    (tmp_path / "all.log").write_text(
        "[rank0]:   what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 66668 vs 668. Received "
        "data size doesn't match expected size. Is there a distributed collective mismatch in your code?\n"
    )
    context = look(logs())

    assert [finding.subject for finding in desync(context)] == ["logs"]
    assert timeout(context) == rank_failed(context) == rank_lost(context) == []


def test_files_older_than_the_run_are_reported_as_followed_from_their_end(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.log").write_text("old\n")
        os.utime(tmp_path / f"{name}.log", (1000, 1000))
    frames = LogFrames([str(tmp_path / "*.log")], since_unix_s=2000.0)
    state = RunState("ab12cd34", "train", 4)
    for frame in frames.poll(SECOND):
        state.ingest(frame.payload, frame.received_ns)
    frames.close()

    assert state.logs.notices == ["2 files followed from their end, because they were written before the run"]
