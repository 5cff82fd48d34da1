"""The report as one self-contained HTML file: style, data, plotly and the script that draws.

Its Content-Security-Policy allows our two scripts, by their hashes, and no request to anywhere.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from typing import TYPE_CHECKING, Final

from ddpwatch.core.units import plural
from ddpwatch.errors import DdpwatchError
from ddpwatch.outputs.report import sections
from ddpwatch.outputs.report.html_elements import Html, concat, data_block, h, raw
from ddpwatch.version import VERSION
from ddpwatch.view.verdict import verdict

if TYPE_CHECKING:
    from ddpwatch.outputs.report.data import Report

MARK: Final = '<meta name="generator" content="ddpwatch report">'
"""Identifies a file as a report, which may be overwritten."""
MAX_BAD_ENDS: Final = 3
"""Max earlier attempts whose bad end gets a sentence."""
_SECTIONS: Final = (
    sections.key_figures,
    sections.phases,
    sections.over_time,
    sections.heat,
    sections.costs,
    sections.scaling,
    sections.alerts,
    sections.utilization,
    sections.sync_points,
    sections.pauses,
    sections.buckets,
    sections.reproduce,
)


def plotly_script() -> str:
    """Source of plotly.js; raises DdpwatchError if plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise DdpwatchError("a report needs plotly: pip install plotly") from None
    script: str = get_plotlyjs()
    return script


def page(report: Report) -> str:
    """Text of the file."""
    library, drawing = plotly_script(), _resource("draw.js")
    parts = [section(report) for section in _SECTIONS]
    name = report.state.name or report.state.run_id
    head = concat(
        h("meta", charset="utf-8"),
        Html(MARK),
        h("meta", http_equiv="Content-Security-Policy", content=_policy(library, drawing)),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("meta", name="referrer", content="no-referrer"),
        h("title", f"{name} · ddpwatch report"),
        raw("style", _resource("style.css")),
    )
    figures = [
        {"name": chart.name, "height": chart.height, "data": chart.data, "layout": chart.layout}
        for part in parts
        for chart in part.charts
    ]
    bodies, footer = [part.body for part in parts], h("footer", f"Made by ddpwatch {VERSION}.")
    main = h("main", _header(report, name), _verdict(report), bodies, footer)
    scripts = concat(data_block("charts", figures), raw("script", library), raw("script", drawing))
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{main}\n{scripts}</body></html>\n'


def _header(report: Report, name: str) -> Html:
    when = sections.clock_text(report.began_ns)
    attempt = f" · attempt {report.number} of {report.attempts}" if report.attempts > 1 else ""
    mark = h("p", h("span", "SIMULATED", class_="mark"), " None of this was measured.") if report.simulated else ""
    return h("header", h("h1", name), h("p", f"Training report · {when}{attempt}", class_="quiet"), mark)


def _verdict(report: Report) -> Html:
    found = verdict(report.state, report.outcome, report.aggregate, report.alerts)
    bad_ends = report.earlier_bad_ends[:MAX_BAD_ENDS]
    if more := len(report.earlier_bad_ends) - len(bad_ends):
        bad_ends = (*bad_ends, f"{plural(more, 'attempt')} before that also ended badly.")
    besides = (h("p", text) for text in (*found.besides, *bad_ends))
    return h("div", h("p", found.text), besides, class_=f"verdict {found.level.value}", id="verdict")


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _policy(*scripts: str) -> str:
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; connect-src 'none'; "
        "base-uri 'none'; form-action 'none'"
    )
