"""The report as one HTML file: style, charts and the library that draws them inside it. Asks for nothing from anywhere.

The policy in its head lets the browser run our two scripts, known by their hashes, and no other; and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import TYPE_CHECKING, Final

from ddpwatch.core.units import plural
from ddpwatch.errors import DdpwatchError
from ddpwatch.outputs.report import sections
from ddpwatch.outputs.report import sections as machines
from ddpwatch.outputs.report.html import Html, all_together, data_block, h, joined, raw
from ddpwatch.version import VERSION
from ddpwatch.view.verdict import verdict

if TYPE_CHECKING:
    from ddpwatch.outputs.report.data import Report

GENERATOR: Final = "ddpwatch report"
"""By this a report is known as one of ours."""
MARK: Final = f'<meta name="generator" content="{GENERATOR}">'
MAX_BEFORE: Final = 3
"""Attempts before this one of which is told how they ended badly, the latest."""
_ORDER: Final = (
    sections.phases,
    sections.over_time,
    sections.heat,
    sections.costs,
    sections.scaling,
    sections.alerts,
    machines.loads,
    machines.buckets,
    machines.reproduce,
)


class NoPlotly(DdpwatchError):
    """The library that draws the charts is not installed."""


def plotly_script() -> str:
    """The library that draws in the browser. Raises `NoPlotly`."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise NoPlotly("a report needs plotly: pip install 'ddpwatch[report]'") from None
    script: str = get_plotlyjs()
    return script


def page(report: Report) -> str:
    """The whole file."""
    library, drawing, style = plotly_script(), _own("draw.js"), _own("style.css")
    body, charts = all_together([sections.key_figures(report), *(part(report) for part in _ORDER)])
    name = report.state.name or report.state.run_id
    head = joined(
        h("meta", charset="utf-8"),
        Html(MARK),
        h("meta", http_equiv="Content-Security-Policy", content=_policy(library, drawing)),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("meta", name="referrer", content="no-referrer"),
        h("title", f"{name} · ddpwatch report"),
        raw("style", style),
    )
    figures = [{"name": c.name, "height": c.height, "data": c.data, "layout": c.layout} for c in charts]
    main = h("main", _header(report, name), _verdict(report), body, h("footer", f"Made by ddpwatch {VERSION}."))
    scripts = joined(data_block("charts", figures), raw("script", library), raw("script", drawing))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{main}\n{scripts}</body></html>\n'


def _header(report: Report, name: str) -> Html:
    when = machines.clock_text(report.began_ns)
    attempt = f" · attempt {report.number} of {report.attempts}" if report.attempts > 1 else ""
    mark = h("p", h("span", "SIMULATED", class_="mark"), " None of this was measured.") if report.simulated else ""
    return h("header", h("h1", name), h("p", f"Training report · {when}{attempt}", class_="quiet"), mark)


def _verdict(report: Report) -> Html:
    found = verdict(report.state, report.outcome, report.aggregate, report.alerts)
    before = report.before[:MAX_BEFORE]
    if (more := len(report.before) - len(before)) > 0:
        before = (*before, f"{plural(more, 'attempt')} before that ended badly, too.")
    besides = (h("p", text) for text in (*found.besides, *before))
    return h("div", h("p", found.text), besides, class_=f"verdict {found.level.value}", id="verdict")


def _own(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; connect-src 'none'; "
        "base-uri 'none'; form-action 'none'"
    )
