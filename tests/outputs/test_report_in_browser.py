"""The report in a real browser: it opens without requests or console errors, and draws."""

from __future__ import annotations

from contextlib import closing

import pytest

from ddpwatch.outputs.report.page import page
from ddpwatch.simulator.scenario import Fault, Scenario
from tests.builders.fake_rank import make_gpu, make_gpus, make_hello
from tests.builders.recordings import frame, measured, record, straggler
from tests.outputs.browser import Browser, find_chromium
from tests.outputs.hostile_report import PIECES, hostile_alert, hostile_frames, read

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium here")
RUN = Scenario(4, steps=200, faults=(Fault((2,), "backward", 0.3),), seed=3)

LOOK_WHEN_PRINTED = """
window.addEventListener("beforeprint", () => {
  window.widths = [...document.querySelectorAll(".chart svg.main-svg")].map((each) => each.width.baseVal.value);
  window.card = getComputedStyle(document.documentElement).getPropertyValue("--card").trim();
})"""


@pytest.fixture(scope="module")
def browser():
    with closing(Browser()) as started:
        yield started


def gpu_frames():
    for second in range(1, 20):
        for rank in range(4):
            reading = make_gpus(rank, [make_gpu(util_percent=90 + rank)], seq=10_000 + second, mono_ns=second * 10**9)
            yield frame(reading, second * 10**9)


@pytest.fixture(scope="module")
def report_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    reported = sorted([*measured(RUN), *gpu_frames()], key=lambda each: each.received_ns)
    path = folder / "report.html"
    path.write_text(page(read(record(folder / "run.ddpw", reported, 4, alerts=[straggler(2)]))))
    return path


def opened(browser, path, width, scheme="light"):
    tab = browser.page()
    tab.prefer(scheme)
    tab.resize(width, mobile=width < 500)
    tab.open(path.as_uri())
    return tab


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (360, "dark")])
def test_the_page_opens_without_requests_and_fits_the_width(browser, report_file, width, scheme):
    tab = opened(browser, report_file, width, scheme)

    assert tab.complaints == []
    # Data URLs that plotly creates, as for the heat map, are not requests.
    assert [each for each in tab.requests if not each.startswith("data:")] == [report_file.as_uri()]
    assert tab.value("document.documentElement.scrollWidth") == width
    drawn = tab.value("[...document.querySelectorAll('.chart')].map(c => [c.id, !!c.querySelector('svg.main-svg')])")
    assert len(drawn) == 8
    assert all(has for _, has in drawn)
    assert tab.value("document.querySelectorAll('#chart-phases .bars .point').length") == 4 * 7
    assert tab.value("document.querySelectorAll('#chart-step-time .scatterlayer .trace').length") == 1
    assert tab.value("document.querySelectorAll('#chart-map .heatmaplayer image').length") == 1
    assert tab.value("document.querySelector('details.figures').open") is False
    page_color = tab.value("getComputedStyle(document.body).backgroundColor")
    assert page_color == ("rgb(18, 22, 28)" if scheme == "dark" else "rgb(246, 247, 249)")


def test_on_a_phone_a_name_is_above_its_value(browser, tmp_path):
    """A long name beside it would leave the value only a few letters of width."""
    reported = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    }
    hello = frame(make_hello(0, seq=9_000, world_size=4, environment=reported), 10**9)
    frames = sorted([*measured(RUN), hello], key=lambda each: each.received_ns)
    path = tmp_path / "report.html"
    path.write_text(page(read(record(tmp_path / "run.ddpw", frames, 4))))
    widths = "[...document.querySelectorAll('.facts dd')].map(each => each.getBoundingClientRect().width)"

    assert min(opened(browser, path, 390).value(widths)) > 300
    wide = opened(browser, path, 1200)
    assert min(wide.value(widths)) > 90
    beside = "(each => each.previousElementSibling.offsetTop == each.offsetTop)(document.querySelector('.facts dd'))"
    assert wide.value(beside)


@pytest.mark.parametrize("width", [320, 400, 1200])
def test_the_table_of_costs_needs_no_horizontal_scrolling(browser, report_file, width):
    """On a phone each figure is beside its title, one below the other."""
    tab = opened(browser, report_file, width)
    cells = """[...document.querySelector('.stacks').querySelectorAll('tbody tr:first-child td')].map(each => {
        const box = each.getBoundingClientRect(), inside = each.closest('section').getBoundingClientRect();
        const title = getComputedStyle(each, '::before').content;
        return [each.innerText, title, box.left >= inside.left && box.right <= inside.right, box.top];
    })"""
    found = tab.value(cells)

    assert [text for text, *_ in found][:3] == ["rank 2", "node-0", "backward"]
    assert found[-1][0].endswith("GPU-seconds")
    assert all(inside for *_, inside, _ in found)
    tops = [top for *_, top in found]
    if width < 600:
        assert tops == sorted(set(tops)), "one below the other"
        titles = [title.strip('"') for _, title, *_ in found]
        assert [title for title in titles if title] == ["host", "phase", "when", "of the whole run", "GPU time lost"]
    else:
        assert max(tops) - min(tops) < 10, "a row"
        assert {title for _, title, *_ in found} == {"none"}


def test_the_utilization_tables_need_no_horizontal_scrolling_on_a_phone(browser, report_file):
    tab = opened(browser, report_file, 400)
    over = """[...document.querySelectorAll('section')].filter(each => /^(GPUs|CPU and memory)/.test(each.innerText))
        .flatMap(each => [...each.querySelectorAll('.wide')]).map(each => each.scrollWidth - each.clientWidth)"""
    found = tab.value(over)

    assert found
    assert max(found) <= 0


def test_without_scripts_the_figures_are_shown_as_tables(browser, report_file):
    tab = browser.page()
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    tab.resize(800)
    tab.open(report_file.as_uri())
    root = tab.call("DOM.getDocument")["root"]["nodeId"]

    assert tab.call("DOM.querySelectorAll", nodeId=root, selector="svg")["nodeIds"] == []
    assert tab.call("DOM.querySelectorAll", nodeId=root, selector="details.figures[open]")["nodeIds"]
    shown = tab.call("Accessibility.getFullAXTree")["nodes"]
    assert any("optimizer" in str(node.get("name", {}).get("value")) for node in shown)


def test_it_prints_on_white_paper_with_its_charts(browser, report_file):
    tab = opened(browser, report_file, 1200, "dark")
    tab.value(LOOK_WHEN_PRINTED)
    pdf = tab.pdf()

    assert pdf.startswith(b"%PDF")
    assert max(tab.value("window.widths")) <= 680
    assert tab.value("window.card") == "#ffffff"
    assert tab.value("document.querySelector('#chart-share svg.main-svg').width.baseVal.value") > 700


def test_on_paper_no_heading_is_separated_from_its_text(browser, report_file):
    tab = opened(browser, report_file, 1200)
    breaks = "[...new Set([...document.querySelectorAll('h2, h3, p')].map(each => getComputedStyle(each).breakInside))]"

    assert tab.value(breaks) == ["auto"]
    tab.call("Emulation.setEmulatedMedia", media="print")
    assert tab.value(breaks) == ["avoid"]


def test_hostile_text_of_a_recording_runs_no_script(browser, tmp_path):
    """Every text field contains a script; none runs or becomes an element of a chart."""
    path = tmp_path / "hostile.html"
    alerts = [hostile_alert(text) for text in PIECES]
    source = record(tmp_path / "x.ddpw", hostile_frames(*PIECES), len(PIECES), alerts=alerts)
    # Without the Content-Security-Policy, which would also keep them from running.
    path.write_text(page(read(source)).replace("Content-Security-Policy", "nothing"))
    tab = opened(browser, path, 800)

    assert tab.complaints == []
    assert [each for each in tab.requests if not each.startswith("data:")] == [path.as_uri()]
    assert tab.value("document.querySelectorAll('img, svg a, [onerror], [onload]').length") == 0
    assert tab.value("document.querySelectorAll('.chart svg.main-svg').length") > 0
    assert "<svg/onload=alert(4)>" in tab.value("document.body.innerText")
