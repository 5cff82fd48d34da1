"""HTML elements of a report, safe by construction: anything but an `Html` is text and is escaped."""

from __future__ import annotations

import json
import math
from html import escape
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ddpwatch.core.state.sanitize import NOTE_CHARS, sanitize

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ddpwatch.outputs.report.charts import Chart

_VOID: Final = frozenset({"meta", "br"})
"""Elements without content and end tag."""


class Html(str):
    """Markup. Made from escaped pieces, by this module only."""

    __slots__ = ()


def h(name: str, /, *children: str | Html | Iterable[str | Html], **attributes: str | None) -> Html:
    """An element. In names of attributes a trailing `_` is dropped and others become `-`; None leaves one out."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(sanitize(value, NOTE_CHARS))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{pairs}>" if name in _VOID else f"<{name}{pairs}>{concat(*children)}</{name}>")


def concat(*children: str | Html | Iterable[str | Html]) -> Html:
    """Concatenate pieces, escaping text."""
    texts = []
    for child in children:
        if isinstance(child, Html):
            texts.append(str(child))
        elif isinstance(child, str):
            texts.append(escape(_sanitized(child)))
        else:
            texts.append(str(concat(*child)))
    return Html("".join(texts))


def _sanitized(text: str) -> str:
    """Sanitize, but keep a leading and a trailing space, which separate it from its neighbors."""
    before, after = (" " if text[place : place + 1] == " " else "" for place in (0, len(text) - 1))
    return f"{before}{sanitize(text.strip(' '), 2 * NOTE_CHARS)}{after}"


def table(
    titles: Sequence[str], rows: Iterable[Sequence[str | Html]], *, numbers: Iterable[int] = (), stacks: bool = False
) -> Html:
    """A table that scrolls where it is too wide; columns of `numbers` are aligned to the right. With `stacks` it does
    not scroll: on a phone the cells of a row are below each other, each beside its title.
    """
    right = frozenset(numbers)

    def cells(kind: str, row: Sequence[str | Html]) -> list[Html]:
        title_of = titles if stacks and kind == "td" else [None] * len(titles)
        return [
            h(kind, cell, class_="n" if column in right else None, data_title=title_of[column])
            for column, cell in enumerate(row)
        ]

    head = h("thead", h("tr", cells("th", titles)))
    body = h("tbody", (h("tr", cells("td", row)) for row in rows))
    return h("div", h("table", head, body), class_="wide stacks" if stacks else "wide")


def data_block(name: str, value: Any) -> Html:
    """JSON for a script, in a block that browsers do not run."""
    text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    # JSON escapes, with which no text can end the block or begin a comment.
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Html(f'<script type="application/json" id="{escape(name)}">{text}</script>')


def raw(name: str, text: str) -> Html:
    """A script or style of our own; raises ValueError if it contains its own end tag."""
    if f"</{name}" in text.lower():
        raise ValueError(f"a {name} cannot hold its own end")
    return Html(f"<{name}>{text}</{name}>")


def _finite(value: Any) -> Any:
    """The value with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class Section(NamedTuple):
    """A section of the page, with the charts that are drawn in it."""

    body: Html
    charts: tuple[Chart, ...] = ()


def section(title: str, *body: Html, charts: tuple[Chart, ...] = ()) -> Section:
    """A section with a heading."""
    return Section(h("section", h("h2", title), *body), charts)


def figure(chart: Chart, figures: Html | None = None) -> Html:
    """Placeholder of a chart. The table of its figures is open until the script has drawn it."""
    height = f"min-height:{chart.height}px"
    place = h("div", id=f"chart-{chart.name}", class_="chart", role="img", aria_label=chart.alt, style=height)
    if figures is None:
        return h("figure", place)
    return h("figure", place, h("details", h("summary", "The figures as a table"), figures, class_="figures", open=""))


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """A list of names and values."""
    return h("dl", [concat(h("dt", name), h("dd", text)) for name, text in pairs], class_="facts")
