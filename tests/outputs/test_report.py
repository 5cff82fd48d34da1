"""The report: its figures, its charts, and that no text of a recording becomes markup."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from plotly import graph_objects

from ddpwatch import wire
from ddpwatch.core.alerts.model import Severity
from ddpwatch.core.metrics.live_metrics import timings_of
from ddpwatch.outputs.report import charts
from ddpwatch.outputs.report.data import Scaling
from ddpwatch.outputs.report.html_elements import data_block, h, raw
from ddpwatch.outputs.report.page import page
from ddpwatch.simulator.scenario import Fault, Scenario
from ddpwatch.view.charts.phase_bar import rank_bars
from tests.builders.fake_rank import make_beat, make_hello, make_snap, make_step
from tests.builders.recordings import frame, make_run, measured, record, record_hung_steps, straggler
from tests.builders.scenario_frames import frames
from tests.builders.windows import FAST, aggregate_of, window
from tests.builders.windows import SLOW as LATE
from tests.outputs.hostile_report import PIECES, hostile_alert, hostile_frames, read

SLOW = 2
FAULT = Fault((SLOW,), "backward", 0.3, onset=60)
RUN = Scenario(4, steps=300, faults=(FAULT,), noise=0.01, seed=3, evaluate_every=100)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "slow.ddpw"
    return read(record(path, measured(RUN), RUN.world_size, alerts=[straggler(SLOW)]))


def test_the_figures_of_a_report_equal_those_of_the_simulated_run(report):
    (cost, *others) = report.aggregate.costs()
    phases_ns = RUN.phases_ns()
    usual = np.array([not RUN.evaluates_in(step) and step > 0 for step in range(RUN.steps)])

    assert report.aggregate.steps == usual.sum()
    assert report.skipped == RUN.steps // RUN.evaluate_every
    assert report.aggregate.total_ns == pytest.approx(phases_ns.sum(axis=1).mean(axis=0)[usual].sum())
    assert (cost.subject, cost.phases) == (SLOW, ("backward",))
    assert cost.share == pytest.approx(0.3 * 240 / (300 + 0.3 * 240), rel=0.15)
    assert sum(other.share for other in others) < 0.1 * cost.share
    assert report.aggregate.effective_batch == 4 * 32
    assert not report.simulated


def test_a_table_with_only_some_points_states_which(report, tmp_path):
    points = len(report.aggregate.over_time.begins)
    rows = re.search(r"All-reduce and step time.*?</table>", page(report), re.DOTALL).group().count("<tr>") - 1
    (every,) = re.findall(r"The table has every (\d+)(?:st|nd|rd|th) point\.", page(report))
    assert rows == -(-points // int(every)) < points

    short = read(record(tmp_path / "short.ddpw", measured(Scenario(2, steps=12)), 2))
    assert "The table has every" not in page(short)


def test_an_alert_is_reported_once_in_its_last_version(report):
    (alert,) = report.alerts

    assert alert.finding.subject == f"rank {SLOW}"


def test_a_hang_at_the_end_is_reported_with_its_duration_and_cost(tmp_path):
    hang = straggler(SLOW, since=300, rule="stall", subject="group 0", cost=None, evidence={"waiting_s": 45.0})
    reported = page(read(record(tmp_path / "hung.ddpw", measured(RUN), RUN.world_size, alerts=[hang])))
    before = page(read(record(tmp_path / "ran.ddpw", measured(RUN), RUN.world_size)))

    assert "hung at the end" in reported
    assert f"for rank {SLOW}, 3.0 rank-minutes" in reported
    assert "hung at the end" not in before


@pytest.fixture(scope="module")
def stuck(tmp_path_factory):
    return record_hung_steps(tmp_path_factory.mktemp("stuck") / "stuck.ddpw")


def test_a_hung_step_is_named_wherever_its_cost_is(stuck):
    reported = re.sub(r"<[^>]+>", " ", page(read(stuck)))
    once = r"hung for 6\.0 s at step 30"

    assert re.search(rf"The job {once}, waiting for rank 1, which cost \d+% of the whole run", reported)
    assert re.search(rf"Straggler cost.* rank 1 .* other +{once} ", reported, re.DOTALL)
    assert re.search(r"hung steps +6\.0 s +step 30 took 6\.0 s, waiting for rank 1", reported)
    assert "slow in" not in reported


def test_the_heat_map_and_the_costs_agree_on_the_stalled_rank(stuck):
    report = read(stuck)
    rows = re.search(r"Ranks by time.*?<tbody>(.*?)</tbody>", page(report), re.DOTALL).group(1).split("<tr>")[1:]
    first = re.findall(r"<td[^>]*>([^<]*)</td>", rows[0])

    assert first[0] == "rank 1"
    assert float(first[2].removesuffix("%")) == pytest.approx(100 * report.aggregate.costs()[0].share, abs=1.0)
    assert 95 <= float(first[3].removesuffix("%")) <= 100


def test_bad_ends_of_earlier_attempts_are_reported(tmp_path):
    path = tmp_path / "again.ddpw"
    words = "rank 1 was killed (SIGKILL)"
    lost = straggler(1, rule="rank-lost", severity=Severity.CRITICAL, message=words, cost=None)
    over = straggler(0, closed=80, rule="rank-lost", severity=Severity.CRITICAL, message="it was silent", cost=None)
    for number, alerts in enumerate(([over], [lost], [straggler(1)], [])):
        run = make_run(2, run_id=f"5ec0de5ec0de5ec{number}")
        record(path, measured(Scenario(2, steps=30)), 2, run=run, alerts=alerts)

    assert read(path).earlier_bad_ends == (f"Earlier attempt 2 ended badly: {words}.",)
    assert f"<p>Earlier attempt 2 ended badly: {words}.</p>" in page(read(path))
    assert read(path, 1).earlier_bad_ends == ()


def test_an_earlier_attempt_of_another_run_is_named(tmp_path):
    path = tmp_path / "other.ddpw"
    lost = straggler(1, rule="rank-lost", severity=Severity.CRITICAL, message="it was killed", cost=None)
    for number, name in enumerate(("<b>job", "train", "train")):
        run = make_run(2, run_id=f"5ec0de5ec0de5ec{number}", name=name)
        record(path, measured(Scenario(2, steps=30)), 2, run=run, alerts=[lost])

    assert read(path).earlier_bad_ends == (
        "Earlier attempt 2 ended badly: it was killed.",
        "Earlier attempt 1 (run <b>job) ended badly: it was killed.",
    )
    assert "(run &lt;b&gt;job) ended badly" in page(read(path))


def test_a_recording_without_its_log_says_that_its_newest_part_may_be_missing(tmp_path):
    path = record(tmp_path / "run.ddpw", measured(Scenario(2, steps=30)), 2)
    missing = "the newest data may be lost"
    assert missing not in page(read(path))
    with closing(sqlite3.connect(path)) as database, database:
        # As left by a recorder that was killed.
        database.execute("INSERT INTO writer VALUES ('elsewhere', 1, 1.0)")
    with path.open("r+b") as file:
        file.seek(18)
        file.write(b"\x02\x02")

    assert f"run.ddpw-wal is missing: {missing}" in page(read(path))


def test_a_simulated_run_is_marked(tmp_path):
    made_up = read(record(tmp_path / "x.ddpw", frames(Scenario(2, steps=20)), 2))

    assert made_up.simulated
    assert "SIMULATED" in page(made_up)


def test_ranks_with_implausible_figures_are_named_as_left_out(tmp_path):
    reported = [frame(make_hello(rank, 1, started_unix_ns=0), 1) for rank in range(4)]
    for first in range(0, 60, 10):
        for rank in range(4):
            absurd = {"forward_ns": 10**15} if rank == 3 else {}
            steps = [make_step(index, **absurd) for index in range(first, first + 10)]
            reported.append(frame(make_beat(rank, first + 2, step=first + 10, steps=steps), (first + 1) * 10**8))
    lied = read(record(tmp_path / "x.ddpw", reported, 4))

    assert lied.implausible == (3,)
    assert lied.aggregate.step_ns(0.5) == pytest.approx(30e6, rel=0.01)
    assert "Implausible figures of rank 3 were left out" in page(lied)


def test_the_table_over_time_ends_with_the_last_step(tmp_path):
    """Columns are two steps wide, but the last one has only one step."""
    reported = page(read(record(tmp_path / "x.ddpw", measured(Scenario(2, steps=296)), 2)))
    rows = re.findall(r"<td>(\d+(?: – \d+)?)</td>", reported)

    assert rows[0] == "1 – 2"
    assert rows[-1] == "295"


def test_an_attempt_without_steps_still_makes_a_page(tmp_path):
    nothing = page(read(record(tmp_path / "x.ddpw", [frame(make_hello(world_size=2), 1)], 2)))

    assert "Inconclusive: no step that all ranks have finished" in nothing


def test_the_report_of_a_run_of_one_step_states_that_the_first_is_not_measured(tmp_path):
    reported = [frame(make_snap(rank, 1, [make_step(0)], make_hello(rank, 1, world_size=2)), 1) for rank in range(2)]
    text = page(read(record(tmp_path / "one.ddpw", reported, 2)))

    assert "Inconclusive: only the first step is in the recording, which is not measured." in text
    assert "that all ranks have finished" not in text
    assert "Nobody kept the others waiting" not in text


def test_a_single_rank_has_no_all_reduce_and_no_waiting(tmp_path):
    alone = read(record(tmp_path / "alone.ddpw", measured(Scenario(1, steps=60)), 1))
    text = re.sub(r"<[^>]+>", " ", page(alone).split("</head>")[1].split("<script")[0])

    assert alone.aggregate.steps
    assert "Step time over time" in text
    assert not re.search(r"all-reduce|wire|waiting|slower ranks", text, re.IGNORECASE)
    (bar,) = rank_bars(alone.aggregate)
    assert "sync" in bar.parts_ns


def all_charts(report):
    aggregate = report.aggregate
    made = [
        charts.phases(rank_bars(aggregate)),
        charts.all_reduce(aggregate, 0.1, report.alerts),
        charts.step_time(aggregate),
    ]
    made += [charts.heat_map(aggregate), charts.utilization(report.utilization, "rss_bytes", "Memory", "GiB", 1.0)]
    buckets = wire.Bucket(0, 1000, 5, 50), wire.Bucket(1, 1000, 20, 90)
    made.append(charts.buckets(timings_of(list(buckets), 60, 4), 60))
    return [*made, charts.waterfall(Scaling(("x",), 0.83, (("wire", 0.09), ("waiting", 0.08))))]


def left_out(*windows):
    """Traces of the step time chart of these windows, by name."""
    return {trace["name"]: trace for trace in charts.step_time(aggregate_of(*windows)).data}


def test_the_band_of_step_times_has_a_closed_piece_for_each_part_without_a_gap():
    long = [window([FAST] * 4, 1, 1000), window([LATE] * 4, 1801, 1000), window([FAST] * 4, 3201, 200)]
    drawn = left_out(*long)
    steps, median, slow = drawn["median"]["x"], drawn["median"]["y"], drawn["p99"]["y"]
    band = drawn["up to p99"]
    assert band["fill"] == "toself"

    pieces, piece = [], []
    for x, y in zip(band["x"], band["y"], strict=True):
        if x is None:
            pieces.append(piece)
            piece = []
        else:
            piece.append((x, y))
    assert len(pieces) == 3
    assert piece == [], "the last one is closed, too"
    spans = [(min(piece)[0], max(piece)[0]) for piece in pieces]
    assert all(last < first for (_, last), (first, _) in pairwise(spans))
    known = [place for place, value in enumerate(median) if np.isfinite(value)]
    assert len(known) < len(steps)
    points = [point for piece in pieces for point in piece]
    assert sorted(points) == sorted((steps[place], curve[place]) for place in known for curve in (median, slow))


def test_columns_of_one_step_have_no_band():
    drawn = left_out(window([FAST] * 4, 1, 10), window([LATE] * 4, 12, 10))

    assert list(drawn) == ["step time"]


def test_few_steps_get_markers_and_a_label_each():
    few, many = aggregate_of(window([FAST] * 4, 1, 1)), aggregate_of(window([FAST] * 4, 1, 40))

    (dot,) = charts.step_time(few).data
    assert "markers" in dot["mode"]
    assert charts.step_time(few).layout["xaxis"] == {"title": {"text": "step"}, "range": [0.5, 1.5], "dtick": 1}
    assert charts.step_time(many).data[0]["mode"] == "lines"
    assert "dtick" not in charts.step_time(many).layout["xaxis"]


def test_one_hung_step_does_not_flatten_the_others():
    stuck = [each * 200 for each in FAST]
    even, uneven = (aggregate_of(window([FAST] * 4, 1, 40), window([each] * 4, 41, 1)) for each in (FAST, stuck))

    assert charts.step_time(uneven).layout["yaxis"]["type"] == "log"
    assert charts.step_time(even).layout["yaxis"] == {"title": {"text": "ms"}, "rangemode": "tozero"}


def test_time_axes_are_in_seconds_for_short_runs_and_in_minutes_for_long_ones(report, monkeypatch):
    short = charts.utilization(report.utilization, "rss_bytes", "Memory", "GiB", 1.0)
    monkeypatch.setattr(charts, "_LONG_S", 0.0)
    long = charts.utilization(report.utilization, "rss_bytes", "Memory", "GiB", 1.0)

    assert (short.layout["xaxis"]["title"]["text"], long.layout["xaxis"]["title"]["text"]) == ("seconds", "minutes")
    assert short.data[-1]["x"][-1] == pytest.approx(60 * long.data[-1]["x"][-1], rel=0.01)


@pytest.mark.parametrize(("ranks", "labels"), [(2, 3), (4, 5), (40, 5)])
def test_the_labels_of_the_color_scale_do_not_overlap(ranks, labels):
    chart = charts.heat_map(aggregate_of(window([FAST] * ranks), ranks=ranks))
    bar = chart.data[0]["colorbar"]

    assert charts.MAP_TOP // bar["dtick"] + 1 == labels
    assert (chart.height - 110) / (labels - 1) >= 14


def test_every_chart_is_valid_for_plotly(report):
    """Plotly's classes refuse invalid names and values; colors are substituted by the page's script."""
    for chart in all_charts(report):
        text = re.sub(r'"var:[a-z0-9-]+"', '"#123456"', msgspec.json.encode([chart.data, chart.layout]).decode())
        data, layout = msgspec.json.decode(text)
        figure = graph_objects.Figure({"data": data, "layout": layout})

        assert len(figure.data) == len(chart.data)
        assert chart.alt


def test_every_color_of_a_chart_is_a_variable_of_the_style(report):
    text = page(report)
    named = set(re.findall(r'"var:([a-z0-9-]+)"', msgspec.json.encode([c.data for c in all_charts(report)]).decode()))

    assert named
    assert all(f"--{name}:" in text for name in named)


class Reader(HTMLParser):
    """Collects the elements, attributes and text of a page."""

    def __init__(self):
        super().__init__()
        self.elements, self.attributes, self.texts = set(), set(), []

    def handle_starttag(self, tag, attrs):
        self.elements.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_data(self, data):
        self.texts.append(data)

    def handle_comment(self, data):
        raise AssertionError(f"a comment: {data[:80]}")


ELEMENTS = {
    "html", "head", "meta", "title", "style", "body", "main", "header", "h1", "h2", "h3", "p", "span", "div", "dl",
    "dt", "dd", "small", "section", "figure", "details", "summary", "table", "thead", "tbody", "tr", "th", "td", "b",
    "i", "ul", "li", "footer", "script",
}  # fmt: skip
ATTRIBUTES = {
    "lang", "charset", "name", "content", "http-equiv", "class", "id", "role", "aria-label", "style", "open", "type",
    "data-title",
}  # fmt: skip


@pytest.mark.parametrize("text", PIECES)
def test_no_text_of_a_recording_becomes_markup(tmp_path, monkeypatch, text):
    monkeypatch.setattr("ddpwatch.outputs.report.page.plotly_script", lambda: "/* the library */")
    path = tmp_path / (text.replace("/", "")[:60].replace("\0", "") + ".ddpw")
    run = make_run(2, name=text)
    made = page(read(record(path, hostile_frames(text, text), 2, alerts=[hostile_alert(text)], run=run)))
    reader = Reader()
    reader.feed(made)

    assert reader.elements <= ELEMENTS
    assert reader.attributes <= ATTRIBUTES
    assert made.count("<script") == made.count("</script>") == 3
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2028\u2029]", made)
    assert "SIMULATED" not in made
    # The text was shown: a sanitized part of it is in the page.
    assert "alert(" in "".join(reader.texts)


@pytest.mark.parametrize("text", PIECES)
def test_a_label_of_a_chart_contains_no_tag(text):
    """Plotly interprets some tags in its labels and decodes these entities."""
    assert not re.search(r"[<>]", charts.label(text, 1000))


def test_values_for_the_script_cannot_end_its_block():
    block = data_block("x", ["</script><!--", "\u2028", float("nan"), {"a": "&lt;"}])

    inside = block.partition(">")[2].removesuffix("</script>")
    assert not set("<>&\u2028") & set(inside)
    assert msgspec.json.decode(inside) == ["</script><!--", "\u2028", None, {"a": "&lt;"}]


def test_text_and_attributes_are_escaped_once():
    assert h("p", "a < b", h("b", "c"), title='"x"') == '<p title="&quot;x&quot;">a &lt; b<b>c</b></p>'


def test_a_script_that_would_end_itself_is_refused():
    with pytest.raises(ValueError, match="its own end"):
        raw("script", "x = '</SCRIPT>'")


def test_the_content_security_policy_allows_our_scripts_and_no_requests(report):
    made = page(report)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]+)"', made)

    assert "default-src &#x27;none&#x27;" in policy
    assert policy.count("sha256-") == 2
    assert "script-src &#x27;sha256-" in policy
    assert "http:" not in policy
    assert "https:" not in policy


def test_pauses_have_a_section_if_there_were_any(report):
    assert "<h2>Pauses</h2>" not in page(report)
    paused = window([FAST] * 4)
    paused.column("gc_ns")[1] = 4_000_000
    shown = page(replace(report, aggregate=aggregate_of(paused)))

    assert re.search(r"garbage collection.*?2\.5%.*?rank 1.*?10\.0%", shown, re.DOTALL)
