"""What the sections of a report are put together from."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ddpwatch.outputs.report.markup import Html, h, joined

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpwatch.outputs.report.charts import Chart


class Section(NamedTuple):
    """A part of the page, and the charts that have their places in it."""

    body: Html
    charts: tuple[Chart, ...] = ()


def section(title: str, *body: Html, charts: tuple[Chart, ...] = ()) -> Section:
    """A part with a heading."""
    return Section(h("section", h("h2", title), *body), charts)


def figure(chart: Chart, figures: Html | None = None) -> Html:
    """The place of a chart. Its figures as a table are open until a script has drawn it."""
    height = f"min-height:{chart.height}px"
    place = h("div", id=f"chart-{chart.name}", class_="chart", role="img", aria_label=chart.alt, style=height)
    if figures is None:
        return h("figure", place)
    return h("figure", place, h("details", h("summary", "The figures as a table"), figures, class_="figures", open=""))


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Names and what is known of them."""
    return h("dl", [joined(h("dt", name), h("dd", text)) for name, text in pairs], class_="facts")


def all_together(sections: Sequence[Section]) -> tuple[Html, list[Chart]]:
    """All of them as one piece, and their charts."""
    return joined(*(part.body for part in sections)), [chart for part in sections for chart in part.charts]
