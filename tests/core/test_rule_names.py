"""Rule names: one constant each, used by all modules."""

from __future__ import annotations

import ast
from pathlib import Path

import ddpwatch
from ddpwatch.core import rule_names as rules
from ddpwatch.core.detectors import DETECTORS

PACKAGE = Path(ddpwatch.__file__).parent
ORDINARY = {"memory", "drift", "slowdown", "timeout"}
"""Names that are also words of other vocabularies."""


def test_every_detector_has_a_name_of_the_list_and_every_name_a_detector():
    names = {detector.rule for detector in DETECTORS}

    assert {value for name, value in vars(rules).items() if name.isupper() and isinstance(value, str)} == names
    assert names >= rules.STOPPING | rules.WAITING


def test_no_other_module_spells_the_name_of_a_rule():
    names = {detector.rule for detector in DETECTORS} - ORDINARY
    spelled = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {node.value}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != Path(rules.__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in names
    ]

    assert not spelled
