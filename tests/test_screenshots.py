"""The animated picture: every shot has its time, rows that stay are stored once, nothing is loaded from elsewhere."""

import io
import re
from pathlib import Path
from xml.etree import ElementTree as ET

from rich.console import Console

from screenshots.animation import Shot, animate

DEMO = Path(__file__).parent.parent / "screenshots" / "demo.svg"
SVG = "{http://www.w3.org/2000/svg}"
MAX_BYTES = 1_000_000


def shot(*lines, seconds=1.0):
    console = Console(width=20, record=True, file=io.StringIO(), force_terminal=True)
    for line in lines:
        console.print(line, style="white on black")
    return Shot(console.export_svg(title="ddpwatch"), seconds)


def shown_at(svg, percent):
    """Texts that the keyframes show at this moment, top down."""
    root = ET.fromstring(svg)
    css = root.find(f"{SVG}style").text
    texts = []
    for frame in root.iter(f"{SVG}g"):
        if not frame.get("class", "").startswith("frame "):
            continue
        (steps,) = re.findall(rf"@keyframes {frame.get('class').split()[1]} {{ (.*) }}\n", css)
        points = [(float(at), what) for at, what in re.findall(r"([\d.]+)% { visibility: (\w+) }", steps)]
        if [what for at, what in points if at <= percent][-1] == "visible":
            for row in frame:
                y = float(row.get("transform").rpartition(",")[2].rstrip(")"))
                texts.append((y, "".join(row.itertext()).strip()))
    return [text for _, text in sorted(texts) if text]


def test_each_shot_is_shown_in_its_time():
    svg = animate([shot("run", "healthy"), shot("run", "slow", seconds=2.0), shot("run", "hung")], poster=1)

    assert shown_at(svg, 10) == ["run", "healthy"]
    assert shown_at(svg, 30) == shown_at(svg, 70) == ["run", "slow"]
    assert shown_at(svg, 90) == ["run", "hung"]


def test_a_row_that_stays_is_stored_once():
    svg = animate([shot("run", "healthy"), shot("run", "slow")], poster=0)

    assert svg.count(">run<") == 1


def test_without_animation_the_poster_is_visible():
    svg = animate([shot("run", "healthy"), shot("run", "slow")], poster=1)
    still = [frame for frame in ET.fromstring(svg).iter() if frame.get("class", "").endswith(" poster")]

    assert {text for frame in still for text in map(str.strip, frame.itertext()) if text} == {"run", "slow"}


def test_the_demo_names_the_straggler_and_counts_down():
    svg = DEMO.read_text().replace("\xa0", " ")
    earlier, last = (" ".join(shown_at(svg, percent)) for percent in (70, 99.9))

    assert len(svg) < MAX_BYTES
    assert "straggler" in svg
    assert "rank 2 has not joined" in earlier
    assert "rank 2 has not joined" in last
    assert re.search(r"[\d mins]+ left", earlier)[0] != re.search(r"[\d mins]+ left", last)[0]


def test_the_demo_loads_nothing():
    svg = DEMO.read_text()

    assert set(re.findall(r"https?://[^\"\s]+", svg)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in svg
