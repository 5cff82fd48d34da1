"""Checks that private words stay out of what users read: `python -m tests.prose`, a part of `make check`.

Reads string literals of the source (not docstrings, which ruff covers, nor single words such as JSON keys) and the
documents. Words are matched as written here, so that the list stays short: a private word, and what to write instead.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
INSTEAD = {
    r"told|tells? of": "reported, shown",
    r"(was|is|are|were|not|never|last) heard": "received, no heartbeat",
    r"signs? of life": "heartbeat",
    r"so (many|much|long)": "the number or the duration",
    r"who (has|had|waits|complains|began|cost|is|was)": "the rank that …",
    r"middle rank": "median rank",
    r"not come(?! back)": "has not joined",
    r"stood still|standstill": "hung, stalled",
    r"judged?": "evaluate",
    r"per cent|\d %": "10%",
    r"is no (number|table|limit|size|span|part|regular|TOML|recording|run)": "is not a …",
    r"colour|utilisation|recognise|grey": "US spelling",
}
WORDS = re.compile(
    "|".join(rf"(?P<w{place}>(?<!\w)(?:{word})(?!\w))" for place, word in enumerate(INSTEAD)), re.IGNORECASE
)
DOCUMENTS = [
    "README.md",
    "SECURITY.md",
    "CHANGELOG.md",
    *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))),
]


def texts_of_source() -> Iterator[tuple[str, int, str]]:
    """String literals of more than one word, with file and line."""
    for folder in ("agent", "ddpwatch"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if (ROOT / "ddpwatch" / "agent") in path.parents:
                continue
            tree = ast.parse(path.read_text())
            bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                text = node.value if isinstance(node, ast.Constant) and id(node) not in bare else None
                if isinstance(text, str) and " " in text:
                    yield str(path.relative_to(ROOT)), node.lineno, text


def texts_of_documents() -> Iterator[tuple[str, int, str]]:
    """Lines of the documents without their inline code (keys, names of themes), with file and line."""
    for name in DOCUMENTS:
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            yield name, number, re.sub(r"`[^`]*`", "", line)


def main() -> int:
    """Print each finding on a line; 1 = there are some."""
    found = 0
    for name, number, text in [*texts_of_source(), *texts_of_documents()]:
        for match in WORDS.finditer(text):
            instead = list(INSTEAD.values())[int((match.lastgroup or "w0")[1:])]
            print(f"{name}:{number}: {match[0]!r}: write {instead}")
            found += 1
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
