"""HTML that is right by construction: whatever is no `Html` is text, and is escaped.

What the sections of a report are put together from.
"""

from __future__ import annotations

import json
import math
from html import escape
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddpwatch.core.state.sanitize import NOTE_CHARS, sanitize

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpwatch.outputs.report.charts import Chart

_EMPTY: Final = frozenset({"meta", "br"})
"""Elements that hold nothing and have no end."""


class Html(str):
    """Text that is markup already. Made by this module only, from pieces that were escaped."""

    __slots__ = ()


def h(name: str, /, *children: str | Html | Iterable[str | Html], **attributes: str | None) -> Html:
    """An element. A trailing `_` of an attribute's name is left out, other `_` are `-`; None = there is none."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(sanitize(value, NOTE_CHARS))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = joined(*children)
    return Html(f"<{name}{pairs}>" if name in _EMPTY else f"<{name}{pairs}>{inside}</{name}>")


def joined(*children: str | Html | Iterable[str | Html]) -> Html:
    """Pieces one after another."""
    texts = []
    for child in children:
        if isinstance(child, Html):
            texts.append(str(child))
        elif isinstance(child, str):
            texts.append(escape(_sanitized(child)))
        else:
            texts.append(str(joined(*child)))
    return Html("".join(texts))


def _sanitized(text: str) -> str:
    """Tame, but with the space that keeps it apart from what stands beside it."""
    before, after = (" " if text[place : place + 1] == " " else "" for place in (0, len(text) - 1))
    return f"{before}{sanitize(text.strip(' '), 2 * NOTE_CHARS)}{after}"


def table(
    titles: Sequence[str], rows: Iterable[Sequence[str | Html]], *, numbers: Iterable[int] = (), stacks: bool = False
) -> Html:
    """A table that scrolls by itself where it is too wide; columns of `numbers` stand to the right. One that `stacks`
    does not scroll: on a phone the cells of a row stand below each other, each beside its title.
    """
    right = frozenset(numbers)

    def cells(kind: str, row: Sequence[str | Html]) -> list[Html]:
        return [
            h(
                kind,
                cell,
                class_="n" if place in right else None,
                data_title=titles[place] if stacks and kind == "td" else None,
            )
            for place, cell in enumerate(row)
        ]

    head = h("thead", h("tr", cells("th", titles)))
    body = h("tbody", (h("tr", cells("td", row)) for row in rows))
    return h("div", h("table", head, body), class_="wide stacks" if stacks else "wide")


def data_block(name: str, value: Any) -> Html:
    """Values for a script, in a block that no browser runs."""
    text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # As JSON has them, too; but neither an end of the block nor a comment can be made of them.
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Html(f'<script type="application/json" id="{escape(name)}">{text}</script>')


def raw(name: str, text: str) -> Html:
    """A script or a style of our own. Refuses one that would end it."""
    if f"</{name}" in text.lower():
        raise ValueError(f"a {name} cannot hold its own end")
    return Html(f"<{name}>{text}</{name}>")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


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
