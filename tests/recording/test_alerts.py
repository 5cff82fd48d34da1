"""Recorded alerts: screen, replay, report and export show each at its worst, with the same text."""

from __future__ import annotations

import io
import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.alerts.recorded import write_alerts
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.core.monitor import Monitor
from ddpwatch.core.state.rank import Place
from ddpwatch.core.state.run import RunState
from ddpwatch.outputs.export.json import write_json
from ddpwatch.outputs.export.step_range import LAST_STEP, Exported
from ddpwatch.outputs.report.data import gather
from ddpwatch.outputs.report.page import page
from ddpwatch.recording.alerts import recalled
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.schema import ALERTS
from ddpwatch.recording.writer import Recorder
from ddpwatch.session.playback import Playback
from ddpwatch.simulator.scenario import Fault, Scenario
from ddpwatch.view.alerts.format import iso
from ddpwatch.view.cells import plain
from ddpwatch.view.run_view import run_view
from ddpwatch.view.summary import summary_lines
from tests.builders.fake_rank import make_beat, make_hello, make_step
from tests.builders.recordings import frame, make_run, record, straggler
from tests.builders.scenario_frames import frames

SLOW, ONSET, LASTS, STEPS = 2, 60, 60, 170
WORST = 20
FAULTS = (
    Fault((SLOW,), "data", 2.0, onset=ONSET, burst=(WORST, 100_000)),
    Fault((SLOW,), "data", 0.3, onset=ONSET + WORST, burst=(LASTS - WORST, 100_000)),
)
"""Slowness by step: worst at first, then less until it ends."""
RUN = Scenario(4, steps=STEPS, spikes=0.0, faults=FAULTS)


@pytest.fixture(scope="module", params=["now", "before"], ids=["as it is written", "as it was before"])
def stale_run(request, tmp_path_factory):
    """A recording in which a rank was slow for a while, with the monitor of the live run. An older recorder wrote
    neither the worst of an alert nor its staleness.
    """
    path = tmp_path_factory.mktemp("stale_run") / "stale_run.ddpw"
    run = make_run(RUN.world_size)
    places = [Place(endpoint.rank, endpoint.host, endpoint.pid) for endpoint in run.endpoints]
    monitor = Monitor(RunState(run.id, run.name, run.world_size, places))
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "before":
            patch.setattr("ddpwatch.recording.writer.write_alerts", _without_worst)
        with closing(Recorder(path)) as recorder:
            recorder.begin(run)
            recorder._due_ns = 0
            for frame in frames(RUN):
                monitor.ingest(frame.payload, frame.received_ns)
                recorder.add([frame], [wire.claimed_rank(frame.payload)])
                recorder.add_events(changes(monitor, request.param), frame.received_ns)
                recorder.flush(monitor.state, frame.received_ns, monitor.book.open.values())
            monitor.evaluate_now()
            recorder.add_events(changes(monitor, request.param), monitor.state.now_ns)
            recorder.finish(monitor.state, monitor.state.now_ns, monitor.book.open.values())
    return path, monitor, request.param


def changes(monitor, written):
    """Events to be recorded, with `written` as an older version did, without staleness."""
    events = monitor.book.drain()
    return events if written == "now" else [replace(event, alert=as_before(event.alert)) for event in events]


def as_before(alert):
    return replace(alert, stale=None, seen=None)


def _without_worst(alerts):
    return write_alerts([replace(as_before(alert), worst=None) for alert in alerts])


def drawn(monitor):
    timeline = Timeline()
    timeline.follow(monitor.state)
    return [plain(line) for line in summary_lines(run_view(monitor, timeline), 400, 200, duration_s=1.0)]


def reported(lines):
    return next(line for line in lines if " straggler  " in line).strip()


def test_all_outputs_show_a_stale_straggler_at_its_worst(stale_run):
    path, monitor, written = stale_run
    alert = monitor.book.open["straggler", f"rank {SLOW}"]
    worst = alert.at_worst.finding
    assert (alert.finding.severity, worst.severity) == (Severity.WARNING, Severity.CRITICAL)
    assert worst.cost > alert.finding.cost

    live = reported(drawn(monitor))
    with closing(Playback(Recording(path))) as playback:
        playback.seek(playback.recorded.attempts[0].last_ns)
        playback.catch_up()
        replayed = reported(drawn(playback.follows.monitor))
    with closing(Recording(path)) as recorded:
        (attempt,) = recorded.attempts
        report = gather(recorded, attempt)
        file = io.StringIO()
        write_json(Exported(recorded, attempt, (0, LAST_STEP)), file)
    (shown,) = [each for each in report.alerts if each.finding.rule == "straggler"]
    (listed,) = [each for each in json.loads(file.getvalue())["alerts"] if each["rule"] == "straggler"]
    seen = shown.seen.step

    assert live.startswith("✖ straggler")
    assert live.endswith(f"not seen since step {seen})")
    assert seen == ONSET + LASTS - 1
    assert listed["last_seen_step"] == seen
    assert listed["last"] == iso(shown.seen.unix_ns)
    assert (listed["from_step"], listed["upto_step"]) == (shown.finding.from_step, shown.finding.upto_step)
    assert listed["severity"] == shown.finding.severity.word == "critical"
    assert listed["message"] == shown.finding.message
    assert listed["advice"].startswith("Its DataLoader is late")
    assert f"critical · not seen since step {seen}, open at the end" in page(report)
    if written == "now":
        assert worst.message in live
        assert shown.finding.message == worst.message
        assert replayed == live
    else:
        # As bad as the last event reported.
        assert replayed.startswith(f"✖ straggler     {shown.finding.message}")


def test_without_recorded_texts_no_output_calls_the_alert_stale(stale_run):
    path, _, _ = stale_run
    copy = path.with_name("events.ddpw")
    copy.write_bytes(path.read_bytes())
    with closing(sqlite3.connect(copy)) as database, database:
        assert database.execute("DELETE FROM block WHERE shard = ?", (ALERTS,)).rowcount
    with closing(Recording(copy)) as recorded:
        report = gather(recorded, recorded.attempts[0])

    (shown,) = [each for each in report.alerts if each.finding.rule == "straggler"]
    assert shown.finding.severity is Severity.CRITICAL
    assert not shown.stale


def test_the_final_text_is_kept_beside_the_worst(stale_run):
    path, monitor, _ = stale_run
    with closing(Recording(path)) as recorded:
        (alert,) = [each for each in recalled(recorded, recorded.attempts[0]) if each.finding.rule == "straggler"]

    assert alert.finding == monitor.book.open[alert.key].finding
    assert alert.worst is not None


def waited(path, *, stuck, reason):
    """A recording in which rank 1 waited for rank 0 at step 55, and the recorder left the alert open. `stuck` = no step
    came after that. With a reason, both ranks send a goodbye.
    """
    reported = [frame(make_hello(rank, 1, world_size=2), 1) for rank in range(2)]
    for first in range(0, 55 if stuck else 60, 5):
        steps = [make_step(index) for index in range(first, first + 5)]
        beats = [make_beat(rank, first + 2, step=first + 5, steps=steps) for rank in range(2)]
        reported += [frame(beat, (first + 5) * 10**8) for beat in beats]
    byes = [wire.Bye(rank=rank, seq=99, reason=reason, text="", mono_ns=9) for rank in range(2) if reason]
    reported += [frame(bye, 61 * 10**8) for bye in byes]
    alert = straggler(0, since=54, rule="stall", subject="group 0", cost=None, message="rank 0 has not joined",
                      evidence={"waiting_s": 4.0, "waiting": "rank 1"})  # fmt: skip
    return record(path, reported, 2, alerts=[alert])


@pytest.mark.parametrize(
    ("stuck", "reason", "over"),
    [(False, "exit", True), (False, "", True), (True, "exit", True), (True, "failed", False), (True, "", False)],
    ids=["it went on and ended", "it went on", "it ended well", "it was ended in it", "it waits"],
)
def test_a_hang_that_the_run_recovered_from_is_closed_even_if_its_recorder_left_it_open(tmp_path, stuck, reason, over):
    path = waited(tmp_path / "late.ddpw", stuck=stuck, reason=reason)
    with closing(Recording(path)) as recorded:
        (attempt,) = recorded.attempts
        report = gather(recorded, attempt)
        file = io.StringIO()
        write_json(Exported(recorded, attempt, (0, LAST_STEP)), file)
    with closing(Playback(Recording(path))) as playback:
        playback.seek(playback.recorded.attempts[0].last_ns)
        playback.catch_up()
        monitor = playback.follows.monitor
        shown = run_view(monitor, Timeline())
    (listed,) = json.loads(file.getvalue())["alerts"]
    reported = page(report)

    assert listed["open"] is not over
    assert listed["closed_step"] == ((54 if stuck else 59) if over else None)
    assert ("Hung at the end" in reported) is not over
    assert ("hung at the end" in reported) is not over
    # During a run alerts have a close delay; recovery is shown at once.
    assert any(alert.key == ("stall", "group 0") for alert in shown.fresh) is not over
    assert len(monitor.book.open) + len(monitor.book.closed) == 1
