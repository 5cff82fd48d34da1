"""Join SVG screenshots into one animated SVG, with CSS keyframes that show and hide the rows of the terminal.

A row that stays the same over several frames is stored once, which keeps the file small.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Final, NamedTuple
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

ROW_UNITS: Final = 24.4
"""Height of a terminal row in Rich's SVG, in its user units."""
BASELINE: Final = 20.0
"""Position of the first row's text, in the same units."""
RECT_TOP: Final = 1.5
"""Position of the first row's background, in the same units."""
SCREEN: Final = re.compile(r'<g transform="[^"]+" clip-path="[^"]+-clip-terminal\)">')
"""Start of the terminal's contents; before it, Rich draws the window."""
MATRIX: Final = re.compile(r'<g class="[\w-]+-matrix">')
ROW_CLIP: Final = re.compile(r'\s*<clipPath id="[^"]+-line-\d+">.*?</clipPath>', re.DOTALL)
TEXT_STYLE: Final = re.compile(r"\s*\.([\w-]+-r\d+) \{ (.*?) ?\}")
CSS: Final = """    rect {{ shape-rendering: crispEdges }}
    .frame {{ visibility: hidden; animation: {seconds:g}s step-end infinite }}
    .poster {{ visibility: visible }}
{rules}
    @media (prefers-reduced-motion: reduce) {{ .frame {{ animation: none }} }}
    </style>"""


class Shot(NamedTuple):
    """A screenshot, and how long it is shown."""

    svg: str
    seconds: float


def animate(shots: Sequence[Shot], poster: int) -> str:
    """Return an SVG that repeats the shots forever.

    Renderers without animation, and readers who prefer reduced motion, see only the shot at index `poster`.
    """
    styles: dict[str, str] = {}
    screens = [_rows(shot.svg, styles) for shot in shots]
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    for row in range(max(map(max, screens)) + 1):
        for content, same in groupby(range(len(shots)), key=lambda index: screens[index].get(row, "")):
            indices = list(same)
            y = BASELINE + row * ROW_UNITS
            groups[indices[0], indices[-1] + 1].append(f'<g transform="translate(0,{y:.1f})">{content}</g>')

    starts = [0.0, *accumulate(shot.seconds for shot in shots)]
    rules = [f"    .{name} {{ {style} }}" for style, name in styles.items()]
    frames = []
    for (first, end), rows in sorted(groups.items()):
        name = f"f{first}-{end}"
        rules.append(_keyframes(name, starts[first] / starts[-1], starts[end] / starts[-1]))
        still = " poster" if first <= poster < end else ""
        frames.append(f'<g class="frame {name}{still}">{"".join(rows)}</g>')
    css = CSS.format(seconds=starts[-1], rules="\n".join(rules))
    return "\n".join([_window(shots[0].svg).replace("</style>", css), *frames, "</g></g></svg>\n"])


def _keyframes(name: str, start: float, end: float) -> str:
    """CSS that shows a group between two fractions of the animation's duration."""
    points = {0.0: "hidden", end: "hidden", start: "visible"}
    steps = " ".join(f"{100 * at:.2f}% {{ visibility: {points[at]} }}" for at in sorted(points) if at < 1)
    return f"    .{name} {{ animation-name: {name} }} @keyframes {name} {{ {steps} }}"


def _window(svg: str) -> str:
    """The drawing up to the rows: the window around the terminal, and the terminal's background."""
    screen, matrix = SCREEN.search(svg), MATRIX.search(svg)
    assert screen is not None
    assert matrix is not None
    window = TEXT_STYLE.sub("", ROW_CLIP.sub("", svg[: screen.end()]))
    return f'{window}<rect fill="{_background(svg)}" width="100%" height="100%"/>{matrix[0]}'


def _background(svg: str) -> str:
    """The most frequent color behind text."""
    colors: list[str] = re.findall(r'<rect fill="(#\w+)" x=', svg)
    return Counter(colors).most_common(1)[0][0]


def _rows(svg: str, styles: dict[str, str]) -> dict[int, str]:
    """Row -> its drawing, with short class names; `styles` collects those of all screenshots, as Rich numbers anew."""
    screen = SCREEN.search(svg)
    assert screen is not None
    style_of = dict(TEXT_STYLE.findall(svg))
    background = _background(svg)
    rows: dict[int, str] = defaultdict(str)
    for each in ET.fromstring("<svg>" + svg[screen.start() :]).iter():  # noqa: S314 - written by Rich just now
        y = float(each.get("y", "0"))
        if each.tag == "rect" and each.get("fill") != background:
            row = round((y - RECT_TOP) / ROW_UNITS)
            rows[row] += '<rect fill="{fill}" x="{x}" y="-18.5" width="{width}" height="{height}"/>'.format(
                **each.attrib
            )
        elif each.tag == "text":
            row = round((y - BASELINE) / ROW_UNITS)
            name = styles.setdefault(style_of[each.attrib["class"]], f"s{len(styles)}")
            place = 'x="{x}" textLength="{textLength}"'.format(**each.attrib)
            rows[row] += f'<text class="{name}" {place}>{escape(each.text or "")}</text>'
    return rows
