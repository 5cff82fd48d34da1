"""CONTRIBUTING names files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PATH = re.compile(r"(?<![\w/])((?:\w+/)+\w+\.py)\b")


def exists(path: str) -> bool:
    return (ROOT / path).is_file() or (ROOT / "ddpwatch" / path).is_file()


def test_every_file_it_names_exists():
    named = set(PATH.findall(TEXT))

    assert len(named) > 30
    assert not {path for path in named if not exists(path)}


def test_the_table_of_changes_has_a_file_in_each_row():
    table = TEXT[TEXT.index("## Where do I change") : TEXT.index("## How to add")]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]

    assert len(rows) >= 20
    assert not [row for row in rows if not (PATH.search(row) and exists(PATH.search(row)[1]))]
