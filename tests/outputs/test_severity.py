"""Severity of an alert and of its rank is the same in every output of one state."""

from collections import Counter
from types import SimpleNamespace

import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Alert, AlertEvent, Moment, Severity
from ddpwatch.outputs.export.json import alert_entry
from ddpwatch.outputs.prometheus.metrics import MAX_RANKS, open_alerts, sample_run
from ddpwatch.outputs.report import sections
from ddpwatch.view.alerts.format import MARKS, STALE, event_lines, event_object
from ddpwatch.view.alerts.page import alert_detail, alert_list
from ddpwatch.view.alerts.panel import alert_panel, hang_lines
from ddpwatch.view.cells import Cell, Level
from ddpwatch.view.header import header_line
from ddpwatch.view.ranks.columns import badge
from ddpwatch.view.ranks.detail import rank_page
from ddpwatch.view.ranks.table import rank_table
from ddpwatch.view.run_view import current_view, refreshed_view
from ddpwatch.view.status import status_object, status_screen
from ddpwatch.view.summary import summary_lines
from tests.builders.fake_rank import make_beat
from tests.builders.findings import finding
from tests.view.pages import make_monitor, page, texts

COLUMNS = 160
RULE = "gpu-error"


def opened(**changed):
    at = Moment(119, 1, 0)
    return Alert(finding(**{"rule": RULE, "phase": None, "cost": None, **changed}), at, at, stale=False)


def with_alerts(*alerts, world=4, **run):
    """A healthy run with these alerts open."""
    monitor = make_monitor(slow=None, world=world, **run)
    monitor.evaluate_now()
    monitor.book.open = {alert.key: alert for alert in alerts}
    return monitor


def cells_of(lines, text):
    return [cell for line in lines for cell in line if cell.text.strip().startswith(text)]


@pytest.mark.parametrize("severity", Severity)
def test_every_output_shows_an_alert_and_its_rank_with_one_severity(severity):
    alert = opened(severity=severity)
    monitor = with_alerts(alert)
    drawn = current_view(monitor)
    mark, level, _ = MARKS[severity]

    # The rank.
    assert [row.severity for row in drawn.rows] == [None, severity, None, None]
    assert badge(drawn.rows[1]) == Cell(f"{mark} {RULE}", level)
    assert drawn.urgent[0] is drawn.rows[1]
    for lines in (rank_table(drawn.rows, COLUMNS, show_host=False), status_screen(drawn, COLUMNS)):
        assert {cell.level for cell in cells_of(lines, f"{mark} {RULE}")} == {level}
    assert {cell.level for cell in cells_of(rank_page(drawn, 1, COLUMNS, 40), f"{mark} {RULE}")} == {level}

    # The alert.
    lists = [
        alert_list(drawn, COLUMNS, 10, selected=0, first=0),
        alert_detail(alert, COLUMNS),
        alert_panel(drawn, 80, 10),
    ]
    for lines in [*lists, summary_lines(drawn, COLUMNS, 60, duration_s=9.0), event_lines(AlertEvent("opened", alert))]:
        marks = [cell for line in lines for cell in line if cell.text.strip() in {mark, f"{mark} {severity.word}"}]
        assert {cell.level for cell in marks} == {level}, texts(lines)
    counted = cells_of([header_line(drawn, COLUMNS)], f"{mark} 1")
    assert [cell.level for cell in counted] == ([] if severity is Severity.INFO else [level])

    # For machines.
    objects = [*status_object(drawn)["alerts"], alert_entry(alert)]
    objects.append(event_object(AlertEvent("opened", alert), run_id="1", run_name="train"))
    assert [each["severity"] for each in objects] == [severity.word] * 3
    counts = dict(open_alerts(sample_run(monitor, Counter())))
    assert {labels for labels, number in counts.items() if number} == {(RULE, severity.word)}
    report = sections.alerts(SimpleNamespace(damage=None, alerts=(alert,))).body
    assert f'class="{severity.word}">{mark} {RULE}' in report


def test_a_stale_alert_leaves_its_rank_without_severity():
    alert = opened(severity=Severity.CRITICAL)
    drawn = current_view(with_alerts(Alert(alert.finding, alert.since, alert.last, stale=True, seen=alert.last)))

    assert drawn.rows[1].severity is None
    assert badge(drawn.rows[1]) == Cell("ok", Level.OK)
    assert cells_of(alert_panel(drawn, 80, 10), STALE)[0].level is Level.DIM
    assert "✖" not in page([header_line(drawn, COLUMNS)])


@pytest.mark.parametrize("severity", [Severity.WARNING, Severity.CRITICAL])
def test_the_banner_of_a_hang_its_rank_and_the_header_have_the_severity_of_its_alert(severity):
    hang = opened(
        rule="stall", severity=severity, message="rank 1 has not joined", evidence={"waiting": "ranks 0, 2-3"}
    )
    monitor = with_alerts(hang)
    for rank in range(4):
        monitor.state.apply(make_beat(rank, 6, phase_ns=0), 1)
    drawn = current_view(monitor)
    mark, level, _ = MARKS[severity]

    assert hang_lines(drawn, COLUMNS)[0][0] == Cell(f"{mark} ", level)
    assert cells_of([header_line(drawn, COLUMNS)], f"{mark} HANGS")[0].level is level
    assert cells_of(status_screen(drawn, COLUMNS), f"{mark} hangs")[0].level is level
    assert badge(drawn.rows[1]).level is level
    assert badge(drawn.rows[1]).text.startswith(f"{mark} not joined")


def test_rows_are_redrawn_when_a_severity_changes():
    monitor = with_alerts(opened())
    drawn = current_view(monitor)
    assert refreshed_view(drawn) is not None

    monitor.book.open[RULE, "rank 1"] = opened(severity=Severity.CRITICAL)
    assert refreshed_view(drawn) is None


def test_prometheus_names_the_most_severe_of_many_ranks():
    monitor = with_alerts(opened(ranks=(200,)), world=MAX_RANKS + 1, received=MAX_RANKS, steps=12)
    monitor.state.apply(wire.Bye(rank=7, seq=6, reason="failed", text="", mono_ns=9), now_ns=1)

    assert {7, 200, MAX_RANKS} <= {rank.rank for rank in sample_run(monitor, Counter()).ranks}
