"""Export formats: each is read back and compared with the recording."""

import csv
import errno
import gzip
import io
import itertools
import json
import os
from collections import Counter, defaultdict
from contextlib import closing
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from ddpwatch import wire
from ddpwatch.core.units import count, ms
from ddpwatch.errors import UsageError
from ddpwatch.outputs.atomic_files import atomic_output
from ddpwatch.outputs.export.csv import COLUMNS, safe, write_csv
from ddpwatch.outputs.export.json import write_json
from ddpwatch.outputs.export.step_range import LAST_STEP, Exported, steps_of
from ddpwatch.outputs.export.trace import write_trace
from ddpwatch.outputs.report.data import gather
from ddpwatch.outputs.report.sections import key_figures
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.steps import StepReader
from ddpwatch.simulator.scenario import Fault, Scenario
from ddpwatch.sources.frames import Frame
from ddpwatch.wire import PHASES
from tests.builders.fake_rank import MS, make_beat, make_gpus, make_hello, make_snap, make_step
from tests.builders.recordings import make_run, record, record_hung_steps, record_scenario, write_recording
from tests.recordings.make import read

HERE = Path(__file__).parent
KEPT = HERE.parent / "recordings"
SCHEMA = json.loads((HERE / "trace-event.schema.json").read_text())
HOSTILE = '=HYPERLINK("http://x")\x1b[2J\u202e<script>alert(1)</script>"},{"ph":"B"'
SCENARIO = Scenario(4, steps=150, ranks_per_host=2, faults=(Fault((3,), "backward", 0.3, onset=0),), evaluate_every=40)


def frame(message, at_ns=0):
    return Frame(wire.TOPICS.get(type(message), b"snap/0"), wire.encode(message), at_ns)


def exported(path, write, steps=(0, LAST_STEP), attempt=-1):
    with closing(Recording(path)) as recorded:
        file = io.StringIO()
        write(Exported(recorded, recorded.attempts[attempt], steps), file)
        return file.getvalue()


def table(path, **options):
    return list(csv.DictReader(io.StringIO(exported(path, write_csv, **options))))


def trace(path, **options):
    """Validated events of the trace."""
    found = json.loads(exported(path, write_trace, **options))
    valid(found)
    check(found["traceEvents"])
    return found["traceEvents"]


def valid(found):
    """Validate against the schema; a few events of each form, because each takes a millisecond."""
    kinds = defaultdict(list)
    for event in found["traceEvents"]:
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
        kinds[(event["ph"], event.get("cat"), *sorted(event))].append(event)
    some = [event for alike in kinds.values() for event in [*alike[:5], *alike[5::200]]]
    jsonschema.validate({**found, "traceEvents": some}, SCHEMA)


def ns(event, field="ts"):
    return round(event[field] * 1000)


def check(events):
    """Check the rules of the format beyond single events."""
    processes = {event["pid"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {event["pid"] for event in events} <= processes
    tracks, flows = defaultdict(list), defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert (event["pid"], event["tid"]) in threads
            tracks[event["pid"], event["tid"]].append((ns(event), ns(event) + ns(event, "dur")))
        elif event["ph"] in {"s", "f"}:
            flows[event["id"]].append(event)
    for slices in tracks.values():
        open_ends = []
        for begin, end in sorted(slices, key=lambda slice_: (slice_[0], -slice_[1])):
            while open_ends and open_ends[-1] <= begin:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], "slices of a track nest or follow each other"
            open_ends.append(end)
    for ends in flows.values():
        assert [event["ph"] for event in ends] == ["s", "f"]
        assert ns(ends[0]) <= ns(ends[1])
        for event in ends:
            inside = tracks[event["pid"], event["tid"]]
            assert any(begin <= ns(event) < end for begin, end in inside), "an arrow ends in a slice"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return record_scenario(tmp_path_factory.mktemp("export") / "run.ddpw", SCENARIO)


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Four gloo ranks, rank 2 slow in backward."""
    frames = read(KEPT / "slow-backward.msgpack.gz")
    return write_recording(tmp_path_factory.mktemp("export") / "real.ddpw", (make_run(4), frames))


def test_the_step_table_has_every_rank_and_step_with_the_times_that_were_measured(path):
    rows = table(path)
    truth_ns = SCENARIO.phases_ns()

    assert len(rows) == SCENARIO.world_size * SCENARIO.steps
    assert [(int(row["step"]), int(row["rank"])) for row in rows[:5]] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    for row in rows[::37]:
        phases = truth_ns[int(row["rank"]), :, int(row["step"])]
        assert [float(row[f"{phase}_ms"]) for phase in PHASES] == pytest.approx(phases / 1e6, abs=6e-4)
        assert float(row["step_ms"]) == pytest.approx(phases.sum() / 1e6, abs=6e-4)
        assert float(row["wire_ms"]) + float(row["wait_ms"]) == pytest.approx(float(row["sync_ms"]), abs=2e-3)
        assert row["host"] == f"node-{int(row['rank']) // 2}"
        assert row["evaluated"] == str(int(SCENARIO.evaluates_in(int(row["step"]))))


def test_a_step_that_one_rank_timed_on_the_host_has_a_mark_and_no_wire_or_wait(tmp_path):
    def steps(rank):
        flags = {7: wire.HOST_TIMED} if rank else {}
        return [make_step(index, sync=20 - 15 * rank, flags=flags.get(index, 0)) for index in range(12)]

    snaps = [frame(make_snap(rank, steps=steps(rank), hello=make_hello(rank, world_size=2))) for rank in range(2)]
    path = record(tmp_path / "run.ddpw", snaps, 2)

    rows = table(path)
    assert len(rows) == 24
    assert [(row["step"], row["rank"]) for row in rows if row["host_timed"] == "1"] == [("7", "1")]
    assert {row["step"] for row in rows if not row["wire_ms"] and not row["wait_ms"]} == {"7"}
    assert sum(event["ph"] == "s" for event in trace(path)) == 11


def test_the_time_of_a_step_is_that_of_its_rank(real):
    rows = table(real)

    assert all(row["time"].startswith("20") and row["time"].endswith("Z") for row in rows)
    of_rank = [row["time"] for row in rows if row["rank"] == "1"]
    assert of_rank == sorted(of_rank)


def test_a_range_of_steps_can_be_exported(path):
    assert {int(row["step"]) for row in table(path, steps=(100, 109))} == set(range(100, 110))
    steps = [event for event in trace(path, steps=(100, 109)) if event.get("cat") == "step"]
    assert len(steps) == 40
    assert min(ns(event) for event in steps) == 0


@pytest.mark.parametrize(
    ("text", "span"), [("3-9", (3, 9)), ("3-", (3, LAST_STEP)), ("-9", (0, 9)), ("4", (4, 4)), ("-", (0, LAST_STEP))]
)
def test_ranges_of_steps_are_parsed(text, span):
    assert steps_of(text) == span


@pytest.mark.parametrize("text", ["", "x", "9-3", "1-2-3", "-1-4", "1.5"])
def test_an_invalid_range_is_refused(text):
    with pytest.raises(UsageError, match="is not a range of steps"):
        steps_of(text)


def test_the_json_has_the_run_its_ranks_and_its_alerts(path):
    found = json.loads(exported(path, write_json))

    assert found["schema"] == 1
    assert found["run"]["world_size"] == 4
    # Without the first step and those with an evaluation.
    assert found["steps"]["count"] == 150 - found["steps"]["left_out"] - 1 == 146
    assert (found["steps"]["first"], found["steps"]["last"]) == (1, 149)
    assert found["steps"]["waited_for"] == [3]
    share = found["steps"]["allreduce"]
    assert share["share"] == pytest.approx(share["wire_share"] + share["wait_share"], abs=2e-4)
    ranks = {rank["rank"]: rank for rank in found["ranks"]}
    assert max(ranks, key=lambda rank: ranks[rank]["mean_self_ms"]) == 3
    assert max(ranks, key=lambda rank: ranks[rank]["imposed_share"]) == 3
    straggler = next(alert for alert in found["alerts"] if alert["rule"] == "straggler")
    assert straggler["ranks"] == [3]
    assert straggler["open"]
    assert straggler["closed"] is None


@pytest.mark.parametrize("which", ["path", "real"])
def test_the_json_and_the_report_have_the_same_figures(request, which):
    path = request.getfixturevalue(which)
    steps = json.loads(exported(path, write_json))["steps"]
    ranks = json.loads(exported(path, write_json))["ranks"]
    with closing(Recording(path)) as recorded:
        report = gather(recorded, recorded.attempts[-1])
    tiles = key_figures(report).body

    assert f"{steps['count']} measured" in tiles
    assert f"{ms(steps['step_ms'] * 1e6)} ms" in tiles
    assert f"p99 {ms(steps['step_p99_ms'] * 1e6)} ms" in tiles
    assert f">{count(steps['samples_per_s'])}<" in tiles
    assert f">{round(100 * steps['allreduce']['share'])}%<" in tiles
    assert sum(steps["mean_parts_ms"].values()) == pytest.approx(
        sum(rank["mean_step_ms"] for rank in ranks) / len(ranks), rel=1e-4
    )
    costs = {cost.subject: cost.share for cost in report.aggregate.costs()}
    for rank in ranks:
        assert rank["imposed_share"] == pytest.approx(costs.get(rank["rank"], 0.0), abs=1e-4)


def test_the_json_has_hung_steps_and_the_ranks_that_were_waited_for(tmp_path):
    reported = json.loads(exported(record_hung_steps(tmp_path / "stuck.ddpw"), write_json))
    once = reported["steps"]["stood_still"]

    assert (once["steps"], once["longest_step"], once["rank"]) == (1, 30, 1)
    assert (once["lost_s"], once["longest_s"]) == (pytest.approx(6.0, abs=0.01), pytest.approx(6.03, abs=0.01))
    assert [rank["stood_still"] for rank in reported["ranks"]] == [None, once, None]


def test_the_trace_lays_out_what_was_measured(path):
    """Phases add up to their step, ranks end a step together, and arrows begin at the slow rank."""
    events = trace(path)
    truth_ns = SCENARIO.phases_ns()
    steps = [event for event in events if event.get("cat") == "step"]
    phases = Counter()
    for event in events:
        if event.get("cat") == "phase" and event["tid"] == 1:
            phases[event["name"]] += ns(event, "dur")

    assert len(steps) == 4 * 150
    # Steps of the lowest rank are never shortened: its clock is the timeline.
    assert phases["backward"] == pytest.approx(truth_ns[0, PHASES.index("backward")].sum(), rel=1e-6)
    assert phases["waiting"] + phases["wire"] == pytest.approx(truth_ns[0, PHASES.index("sync")].sum(), rel=1e-6)
    ends = defaultdict(set)
    for event in steps:
        ends[event["args"]["step"]].add(ns(event) + ns(event, "dur"))
    assert all(len(together) == 1 for together in ends.values())
    arrows = [event for event in events if event["ph"] == "s"]
    assert len(arrows) > 300
    assert Counter(event["tid"] for event in arrows).most_common(1)[0][0] == 3 + 1


def test_the_trace_has_shares_and_alerts(path):
    events = trace(path)
    shares = [event["args"] for event in events if event["name"] == "all-reduce share (%)"]
    alerts = [event for event in events if event["ph"] == "i"]

    assert len(shares) == 150
    assert np.median([share["wire"] + share["waiting"] for share in shares]) > 15
    assert any(event["name"].startswith("straggler opened") and event["args"]["ranks"] == [3] for event in alerts)
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and "name" in event["args"]}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(tracks[event["pid"], event["tid"]], event["s"]) for event in alerts} == {("alerts", "t")}
    # Perfetto would take such a thread for the main thread of its host and show it first.
    assert not [event for event in events if event["ph"] != "C" and event["pid"] == event["tid"]]
    assert names == {"job", "alerts", "host node-0", "host node-1", "rank 0", "rank 1", "rank 2", "rank 3"}


def test_a_real_run_is_a_valid_trace_and_its_slow_rank_is_where_the_arrows_come_from(real):
    arrows = [event["tid"] - 1 for event in trace(real) if event["ph"] == "s"]

    assert Counter(arrows).most_common(1)[0][0] == 2


def gpu_frames(world=2, steps=60):
    """Ranks with unrelated clocks and a GPU reading every ten steps."""
    for rank in range(world):
        clock_ns = (rank + 1) * 10**12
        hello = make_hello(rank, 1, world_size=world, host=f"h{rank}", mono_ns=clock_ns)
        yield frame(make_snap(rank, 1, [], hello, make_beat(rank, 1, step=0, mono_ns=clock_ns)))
    for first in range(0, steps, 10):
        for rank in range(world):
            clock_ns = (rank + 1) * 10**12
            done = [make_step(index, end_ns=clock_ns + (index + 1) * 30 * MS) for index in range(first, first + 10)]
            seq = 2 + first // 5
            yield frame(make_gpus(rank, seq=seq, mono_ns=clock_ns + (first + 1) * 30 * MS), first)
            yield frame(make_beat(rank, seq + 1, step=first + 10, steps=done, mono_ns=done[-1].end_ns), first)


def test_gpu_readings_are_placed_at_the_steps_they_were_taken_in(tmp_path):
    """The hosts' clocks differ by 15 minutes, but on the timeline the readings coincide."""
    path = write_recording(tmp_path / "gpu.ddpw", (make_run(2, hosts=["h0", "h1"]), gpu_frames()))

    readings = defaultdict(list)
    for event in trace(path):
        if event["ph"] == "C" and event["name"].startswith("GPU"):
            readings[event["name"]].append(ns(event))

    assert len(readings) == 2
    first, second = readings.values()
    assert first == second == [(place * 10 + 1) * 30 * MS for place in range(6)]


def hostile_frames():
    hello = make_hello(
        0, 1, world_size=1, host=HOSTILE, model=HOSTILE, backend=HOSTILE, torch=HOSTILE, device=HOSTILE,
        ddp={HOSTILE: HOSTILE}, unix_ns=2**62,
    )  # fmt: skip
    steps = [make_step(index, end_ns=2**61 + index) for index in range(40)]
    notes = [wire.Note(rank=0, seq=1, kind=HOSTILE, text=HOSTILE, step=1, mono_ns=1)]
    yield frame(make_snap(0, 1, steps, hello, make_beat(0, 1, step=40, steps=[]), notes=notes))
    gpu = wire.Gpu(HOSTILE, name=HOSTILE, util_percent=50)
    yield frame(make_gpus(0, [gpu], seq=2, mono_ns=2**61 + 20, why=HOSTILE), 1)
    yield frame(wire.Bye(rank=0, seq=3, reason=HOSTILE, text=HOSTILE, mono_ns=2**62), 2)


def test_hostile_text_and_numbers_stay_what_they_are_in_every_format(tmp_path):
    path = write_recording(tmp_path / "evil.ddpw", (make_run(1, name=HOSTILE, hosts=[HOSTILE]), hostile_frames()))

    rows = table(path)
    assert len(rows) == 40
    assert {len(row) for row in rows} == {len(COLUMNS)}
    assert rows[0]["host"].startswith("'=HYPERLINK")
    text = exported(path, write_csv) + exported(path, write_json) + exported(path, write_trace)
    assert "\x1b" not in text
    assert "\u202e" not in json.dumps(json.loads(exported(path, write_json)), ensure_ascii=False)
    events = trace(path)
    assert not [event for event in events if event["ph"] == "B"]
    assert sum(event["ph"] == "C" and "HYPERLINK" in event["name"] for event in events) == 1


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "＝1", "\u200b=1"])
def test_no_cell_begins_like_a_formula(text):
    assert safe(text)[0] not in "=+-@＝＋－＠\t"


def test_harmless_names_are_unchanged():
    assert safe("node-a.example.org") == "node-a.example.org"


def test_an_attempt_without_steps_has_a_header_and_no_rows(tmp_path):
    run = make_run(2)
    path = write_recording(tmp_path / "empty.ddpw", (run, [frame(make_hello(0, 1, world_size=2))]))

    assert exported(path, write_csv) == ",".join(COLUMNS) + "\n"
    found = json.loads(exported(path, write_json))
    assert found["steps"]["count"] == 0
    assert [rank["mean_step_ms"] for rank in found["ranks"]] == [None, None]
    assert {event["ph"] for event in trace(path)} == {"M"}


def test_one_step_without_samples_is_exported(tmp_path):
    step = make_step(0, samples=0, batch=0)
    one = frame(make_snap(0, 1, [step], make_hello(0, 1, world_size=1), make_beat(0, 1, step=1)))
    path = write_recording(tmp_path / "one.ddpw", (make_run(1), [one]))

    (row,) = table(path)
    assert row["samples"] == row["batch"] == ""
    assert json.loads(exported(path, write_json))["steps"]["samples_per_s"] is None
    assert sum(event.get("cat") == "step" for event in trace(path)) == 1


def test_while_a_rank_is_missing_wire_and_waiting_are_not_split(tmp_path):
    received = frame(make_snap(0, 1, [make_step(index) for index in range(20)], make_hello(0, 1, world_size=2)))
    path = write_recording(tmp_path / "half.ddpw", (make_run(2), [received]))

    rows = table(path)
    assert len(rows) == 20
    assert {(row["wire_ms"], row["wait_ms"]) for row in rows} == {("", "")}
    names = {event["name"] for event in trace(path) if event.get("cat") == "phase"}
    assert "sync" in names
    assert not names & {"wire", "waiting"}


def test_each_attempt_is_exported_separately(tmp_path):
    def steps(world, first):
        done = [make_step(first + index) for index in range(15)]
        return [frame(make_snap(rank, 1, done, make_hello(rank, 1, world_size=world))) for rank in range(world)]

    first, second = make_run(2, run_id="a" * 16), make_run(1, run_id="b" * 16)
    path = write_recording(tmp_path / "twice.ddpw", (first, steps(2, 0)), (second, steps(1, 50)))

    assert {row["attempt"] for row in table(path)} == {"2"}
    assert {row["rank"] for row in table(path, attempt=0)} == {"0", "1"}
    assert json.loads(exported(path, write_json))["attempts"] == 2


def test_snapshots_that_arrive_one_after_the_other_lose_no_step(tmp_path):
    """More ranks than frames between two checks: the first rank is far ahead of those not yet received."""
    world = 300
    done = [make_step(index) for index in range(200)]
    frames = (frame(make_snap(rank, 1, done, make_hello(rank, 1, world_size=world))) for rank in range(world))
    path = write_recording(tmp_path / "wide.ddpw", (make_run(world), frames))

    with closing(Recording(path)) as recorded:
        windows = list(StepReader(recorded, recorded.attempts[0]).windows())
    assert all(window.complete for window in windows)
    assert sum(map(len, windows)) == 200


def test_a_snapshot_after_live_steps_is_read_from_its_beginning(tmp_path):
    """As from a rank that registered after the viewer connected."""
    done = [make_step(index) for index in range(60)]
    frames = [frame(make_snap(0, 1, done[:30], make_hello(0, 1, world_size=2)))]
    frames += [frame(make_beat(rank, 10 + k, steps=done[30 + k : 31 + k])) for k in range(30) for rank in range(2)]
    frames.insert(20, frame(make_snap(1, 19, done[:40], make_hello(1, 1, world_size=2))))
    path = write_recording(tmp_path / "late.ddpw", (make_run(2), frames))

    assert min(int(row["step"]) for row in table(path)) == 0
    assert len(table(path)) == 2 * 60


def test_a_file_appears_when_complete_and_is_replaced_only_if_forced(tmp_path):
    target, source = tmp_path / "out.csv", tmp_path / "no-such.ddpw"
    with pytest.raises(ZeroDivisionError), atomic_output(target, source, force=False) as file:
        file.write(f"half{1 / 0}")
    assert list(tmp_path.iterdir()) == []
    with atomic_output(target, source, force=False) as file:
        file.write("whole")
    with pytest.raises(UsageError, match="--force"), atomic_output(target, source, force=False):
        pass
    assert target.read_text() == "whole"
    with atomic_output(target, source, force=True) as file:
        file.write("again")
    assert target.read_text() == "again"
    with pytest.raises(UsageError, match="is a directory"), atomic_output(tmp_path, source, force=True):
        pass


def refusing(number):
    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    return refuse


def test_a_write_error_names_the_requested_file(tmp_path, monkeypatch):
    target = tmp_path / "out.html"
    monkeypatch.setattr(Path, "open", refusing(errno.ENOSPC))
    with (
        pytest.raises(OSError, match="No space") as reported,
        atomic_output(target, tmp_path / "run.ddpw", force=False),
    ):
        pass
    assert reported.value.filename == str(target)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_directory_is_a_usage_error_that_names_the_option(tmp_path, monkeypatch, number):
    """On a read-only file system unlinking a file that does not exist fails too."""
    target = tmp_path / "out.html"
    monkeypatch.setattr(Path, "open", refusing(number))
    monkeypatch.setattr(Path, "unlink", refusing(number))
    said = f"cannot write {target}: {tmp_path} is not writable"
    with pytest.raises(UsageError, match=said), atomic_output(target, tmp_path / "run.ddpw", force=False):
        pass


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_permissions_of_a_file_follow_the_umask(path, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        with atomic_output(tmp_path / "out", path, force=False) as file:
            file.write("x")
    finally:
        os.umask(before)

    assert (tmp_path / "out").stat().st_mode & 0o777 == mode


def test_the_recording_itself_is_never_overwritten(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    before = path.read_bytes()
    for target, force in itertools.product((path, link), (True, False)):
        with pytest.raises(UsageError, match="is the recording itself"), atomic_output(target, path, force=force):
            pass
    assert path.read_bytes() == before


def test_a_file_name_that_ends_in_gz_is_compressed(path, tmp_path):
    with closing(Recording(path)) as recorded, atomic_output(tmp_path / "t.json.gz", path, force=False) as file:
        write_trace(Exported(recorded, recorded.attempts[0]), file)

    with gzip.open(tmp_path / "t.json.gz", "rt") as file:
        valid(json.load(file))


def test_steps_that_only_some_ranks_have_finished_at_the_end_are_counted_as_left_out(tmp_path):
    steps = {0: 30, 1: 24}
    reported = [
        Frame(b"snap/0", wire.encode(make_snap(rank, 1, [make_step(index) for index in range(done)])), 1)
        for rank, done in steps.items()
    ]
    path = record(tmp_path / "killed.ddpw", reported, 2)
    with closing(Recording(path)) as recorded:
        readout = StepReader(recorded, recorded.attempts[0])
        done = [int(index) for window in readout.windows() for index in window.indices]

    assert done[-1] == 23
    assert readout.skipped == 6
