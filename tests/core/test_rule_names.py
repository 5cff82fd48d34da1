"""Rules: one constant each for the name, used by all modules; a row in the README and a test file of their own."""

from __future__ import annotations

import ast
from pathlib import Path

import ddpwatch
from ddpwatch.core import rule_names as rules
from ddpwatch.core.detectors import DETECTORS

PACKAGE = Path(ddpwatch.__file__).parent
NAMES = [detector.rule for detector in DETECTORS]
ORDINARY = {"memory", "drift", "slowdown", "timeout", "pauses"}
"""Names that are also words of other vocabularies."""


def test_every_detector_has_a_name_of_the_list_and_every_name_a_detector():
    listed = [value for name, value in vars(rules).items() if name.isupper() and isinstance(value, str)]

    assert sorted(listed) == sorted(NAMES)
    assert len(set(listed)) == len(listed)
    assert set(NAMES) >= rules.STOPPING | rules.WAITING


def test_every_rule_has_a_row_in_the_readme():
    table = (PACKAGE.parent / "README.md").read_text().partition("| rule | what it finds |")[2].partition("\n\n")[0]
    rules_of_rows = " ".join(row.split("|")[1] for row in table.splitlines()[2:])

    assert [name for name in NAMES if f"`{name}`" not in rules_of_rows] == []


def test_every_rule_has_a_test_file_of_its_own():
    folder = Path(__file__).parent / "detectors"

    assert [name for name in NAMES if not (folder / f"test_{name.replace('-', '_')}.py").exists()] == []


def test_no_other_module_spells_the_name_of_a_rule():
    names = set(NAMES) - ORDINARY
    spelled = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.value}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != Path(rules.__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]

    assert not spelled
