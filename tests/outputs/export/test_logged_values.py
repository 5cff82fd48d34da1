"""Values passed to `agent.log` are in every export, for any name and any order of arrival."""

import csv
import io
import json
import math
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import jsonschema
import pytest

from ddpwatch import wire
from ddpwatch.outputs.export.csv import COLUMNS, write_csv
from ddpwatch.outputs.export.json import write_json
from ddpwatch.outputs.export.logged_values import MAX_NAMES, Logged
from ddpwatch.outputs.export.step_range import LAST_STEP, Exported
from ddpwatch.outputs.export.trace import write_trace
from ddpwatch.recording.reader import Recording
from tests.builders.fake_rank import make_beat, make_hello, make_snap, make_step
from tests.builders.recordings import frame, make_run, write_recording

SCHEMA = json.loads((Path(__file__).parents[1] / "trace-event.schema.json").read_text())
STEPS = 40
HOSTILE = '=HYPERLINK("http://x")\x1b[2J\u202e'


def loss(rank, step):
    return 1.0 / (1 + step) + rank


def reported(world=2, values=None):
    """A snapshot of half of the steps that arrives after the first live one, then the others live; all but each third
    have something logged.
    """

    def logged(rank, step):
        return (values or (lambda rank, step: {"loss": loss(rank, step)}))(rank, step) if step % 3 else None

    for rank in range(world):
        done = [make_step(step, values=logged(rank, step)) for step in range(STEPS)]
        yield frame(make_beat(rank, 5, step=21, steps=done[20:21]))
        yield frame(make_snap(rank, 5, done[:21], make_hello(rank, 1, world_size=world)))
        for first in range(21, STEPS, 4):
            yield frame(make_beat(rank, first, step=first + 4, steps=done[first : first + 4]), first)


def exported(path, write, steps=(0, LAST_STEP)):
    with closing(Recording(path)) as recorded:
        file = io.StringIO()
        export = Exported(recorded, recorded.attempts[-1], steps)
        write(export, file)
        return file.getvalue(), export


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_recording(tmp_path_factory.mktemp("logged") / "run.ddpw", (make_run(2), reported()))


def test_the_csv_has_a_column_for_each_logged_name(path):
    rows = list(csv.DictReader(io.StringIO(exported(path, write_csv)[0])))

    assert list(rows[0]) == [*COLUMNS, "log_loss"]
    assert len(rows) == 2 * STEPS
    for row in rows:
        rank, step = int(row["rank"]), int(row["step"])
        assert row["log_loss"] == (str(loss(rank, step)) if step % 3 else "")


def test_without_logged_values_there_is_no_column(tmp_path):
    path = write_recording(tmp_path / "run.ddpw", (make_run(2), reported(values=lambda _rank, _step: None)))

    assert exported(path, write_csv)[0].splitlines()[0] == ",".join(COLUMNS)


def test_names_outside_of_the_range_make_no_column(path):
    rows = list(csv.DictReader(io.StringIO(exported(path, write_csv, steps=(3, 3))[0])))

    assert len(rows) == 2
    assert list(rows[0]) == list(COLUMNS)


def test_the_json_has_statistics_of_each_name_and_the_last_values_of_each_rank(path):
    """The first value is that of the first step, although a later one arrived before it."""
    found = json.loads(exported(path, write_json)[0])

    values = [loss(rank, step) for rank in range(2) for step in range(STEPS) if step % 3]
    assert found["logged"] == {
        "loss": {
            "count": len(values),
            "first": values[0],
            "last": values[-1],
            "min": min(values),
            "max": max(values),
            "mean": pytest.approx(sum(values) / len(values)),
        }
    }
    assert [rank["logged"] for rank in found["ranks"]] == [{"loss": loss(rank, 38)} for rank in range(2)]


def test_the_last_value_is_that_of_the_last_step_in_any_order_of_arrival(tmp_path):
    ahead = [frame(make_snap(1, 9, [make_step(step, values={"x": step + 0.5}) for step in range(9)]))]
    behind = [frame(make_snap(0, 9, [make_step(step, values={"x": float(step)}) for step in range(8)]))]
    path = write_recording(tmp_path / "run.ddpw", (make_run(2), [*ahead, *behind]))
    found = json.loads(exported(path, write_json)[0])["logged"]["x"]

    assert (found["first"], found["last"]) == (0.0, 8.5)


def test_the_trace_has_a_counter_of_each_rank_at_the_end_of_the_steps(path):
    text, _ = exported(path, write_trace)
    events = json.loads(text)["traceEvents"]
    jsonschema.validate({"traceEvents": [event for event in events if event["ph"] == "C"]}, SCHEMA)
    ends = {event["args"]["step"]: event["ts"] + event["dur"] for event in events if event.get("cat") == "step"}
    tracks = defaultdict(dict)
    for event in events:
        if "loss of rank" in event["name"]:
            tracks[event["name"]][round(event["ts"], 3)] = event["args"]["logged"]

    assert tracks == {
        f"loss of rank {rank}": {round(ends[step], 3): loss(rank, step) for step in range(STEPS) if step % 3}
        for rank in range(2)
    }


def test_nan_and_infinity_are_exported_where_the_format_has_them(tmp_path):
    odd = {1: math.nan, 2: math.inf, 4: -math.inf, 5: 2.5}
    path = write_recording(
        tmp_path / "run.ddpw", (make_run(2), reported(values=lambda _, step: {"x": odd.get(step, 1.0)}))
    )

    rows = list(csv.DictReader(io.StringIO(exported(path, write_csv)[0])))
    assert [row["log_x"] for row in rows if row["rank"] == "0"][:6] == ["", "nan", "inf", "", "-inf", "2.5"]
    found = json.loads(exported(path, write_json)[0])["logged"]["x"]
    assert (found["min"], found["max"]) == (1.0, 2.5)
    assert found["mean"] is not None
    json.loads(exported(path, write_trace)[0], parse_constant=pytest.fail)


def test_hostile_names_are_sanitized_and_begin_no_cell(tmp_path):
    path = write_recording(
        tmp_path / "run.ddpw", (make_run(2), reported(values=lambda *_: {HOSTILE: 1.0, "step": 2.0}))
    )

    text = "".join(exported(path, write)[0] for write in (write_csv, write_json, write_trace))
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\u202e" not in text
    titles = next(csv.reader(io.StringIO(exported(path, write_csv)[0])))
    assert all(title.startswith("log_") for title in titles[len(COLUMNS) :])
    assert len(set(titles)) == len(titles) == len(COLUMNS) + 2


def test_the_number_of_names_is_bounded_and_further_ones_are_counted(tmp_path):
    path = write_recording(
        tmp_path / "run.ddpw", (make_run(2), reported(values=lambda _, step: {f"n{step}.{k}": k for k in range(9)}))
    )

    text, export = exported(path, write_csv)
    assert len(next(csv.reader(io.StringIO(text)))) == len(COLUMNS) + MAX_NAMES
    assert export.logged.left_out == 9 * sum(step % 3 > 0 for step in range(STEPS)) - MAX_NAMES


def test_steps_kept_for_a_rank_are_bounded_and_invalid_ranks_ignored():
    logged = Logged((0, LAST_STEP), world_size=2, kept=50)
    for first in range(0, 1000, 10):
        steps = [make_step(step, values={"loss": float(step)}) for step in range(first, first + 10)]
        for rank in (0, 1, 7):
            logged.add(wire.encode(make_beat(rank, 1, step=first, steps=steps)))
        # Received again, as in the snapshot after a reconnect.
        logged.add(wire.encode(make_beat(0, 1, step=first, steps=steps)))

    assert logged.series["loss"].count == 2000
    assert [step for step in range(1000) if logged.at(0, step)] == list(range(900, 1000))
    assert logged.at(7, 999) == {}
    logged.add(b"\xa5steps and no message")
