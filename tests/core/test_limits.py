"""Limits: every threshold has a name, a unit, a valid default and a docstring."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import pytest

from ddpwatch.core import limits as module
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.limits import DEFAULTS, Limits, limits_from
from ddpwatch.core.state.step_store import CAPACITY_STEPS
from ddpwatch.errors import UsageError

GROUPS = {field.encode_name: field.type for field in msgspec.structs.fields(Limits)}
FIELDS = [(group, field) for group, kind in GROUPS.items() for field in msgspec.structs.fields(kind)]
KEYS = [f"{group}.{field.encode_name}" for group, field in FIELDS]


def refused(table):
    with pytest.raises(UsageError) as caught:
        limits_from(table, "limits.toml")
    text = str(caught.value)
    assert text.startswith("limits.toml: ")
    assert "\n" not in text
    return text


def test_the_defaults_are_valid_and_are_what_an_empty_file_gives():
    written = msgspec.to_builtins(DEFAULTS)

    assert limits_from({}, "limits.toml") == DEFAULTS
    assert limits_from(written, "limits.toml") == DEFAULTS
    assert set(written) == set(GROUPS)


def test_every_rule_has_a_group_of_its_name_and_there_are_no_others():
    assert set(GROUPS) == {detector.rule for detector in DETECTORS} | {"judge"}


def test_every_limit_has_a_default_and_takes_it_from_a_file():
    for group, field in FIELDS:
        assert field.default is not msgspec.NODEFAULT, field
        assert limits_from({group: {field.encode_name: field.default}}, "limits.toml") == DEFAULTS, field


@pytest.mark.parametrize("value", [-1, 0, float("nan"), float("inf"), "much", None, [1], 10**18], ids=repr)
def test_an_invalid_value_is_refused_by_name(value):
    for group, field in FIELDS:
        assert f"{group}.{field.encode_name}" in refused({group: {field.encode_name: value}})


def test_a_limit_that_does_not_exist_is_refused_by_name():
    text = refused({"straggler": {"shore": 0.1}})

    assert "straggler" in text
    assert "shore" in text


def test_a_group_that_does_not_exist_is_refused_by_name():
    assert "stragler" in refused({"stragler": {"share": 0.1}})


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_that_is_no_table_is_refused_by_name(group):
    assert group in refused({group: 3})


def test_what_a_file_does_not_name_stays_as_it_was():
    changed = limits_from({"comm-share": {"share": 0.3}, "straggler": {"linger-steps": 10}}, "limits.toml")

    assert (changed.comm_share.share, changed.straggler.linger_steps) == (0.3, 10)
    assert changed.comm_share.window_steps == DEFAULTS.comm_share.window_steps
    assert changed.slowdown == DEFAULTS.slowdown


def test_names_are_written_with_hyphens_as_users_write_them():
    assert all("_" not in key for key in KEYS)
    assert "window_steps" in refused({"straggler": {"window_steps": 80}})


def test_no_window_is_larger_than_what_is_kept():
    windows = [field.default for _, field in FIELDS if field.encode_name == "window-steps"]

    assert max(windows) <= CAPACITY_STEPS // 2


def test_every_limit_and_every_group_is_explained_in_the_source():
    tree = ast.parse(Path(module.__file__).read_text())
    explained = set()
    for group in (node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")):
        assert ast.get_docstring(group), group.name
        if group.name == "Limits":
            continue
        for field, text in zip(group.body, [*group.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                assert isinstance(text, ast.Expr), f"{group.name}.{field.target.id} has no docstring"
                assert isinstance(text.value, ast.Constant)
                assert text.value.value.endswith("."), f"{group.name}.{field.target.id}"
                assert field.value is not None
                explained.add((group.name, field.target.id))

    tunable = {(kind.__name__, name) for kind in GROUPS.values() for name in kind.__struct_fields__}
    assert {(group, name) for group, name in explained if not name.isupper()} == tunable


def test_a_fixed_threshold_is_no_setting():
    assert "MAX_SEPARATE" in refused({"straggler": {"MAX_SEPARATE": 3}})
    assert "max-separate" in refused({"straggler": {"max-separate": 3}})
    assert "MAX_SEPARATE" not in str(msgspec.to_builtins(DEFAULTS))


METHOD_OR_LAYOUT = {
    "detectors.engine.AT_ONCE",
    "detectors.rank_failed.MAX_HOSTS",
    "detectors.rank_failed.MESSAGE_CHARS",
    "detectors.stall.MAX_ACTIVITIES",
    "detectors.straggler.MAX_CHARS",
    "diagnosis.slow_episode.ROUNDS",
    "diagnosis.straggler_stats.EVERY_STEP",
    "diagnosis.straggler_stats.LATEST_SETS",
    "diagnosis.straggler_stats.MAD_TO_SIGMA",
    "diagnosis.straggler_stats.MEDIAN_ERROR",
    "diagnosis.straggler_stats.PERIODIC_SETS",
    "diagnosis.straggler_stats.SIGMA_ERROR",
    "diagnosis.straggler_stats.VERY_MANY",
    "alerts.history.KEPT_CLOSED",
    "alerts.history.NOTE_STEPS",
    "alerts.model.KEPT_CLOSED",
    "alerts.model.KEPT_EVENTS",
    "alerts.recorded.MAX_EVIDENCE",
    "alerts.recorded.MAX_RANKS",
    "alerts.recorded.MAX_NUMBER",
    "alerts.severity.COST_STEP",
    "compare.bootstrap.BLOCK_RESAMPLES",
    "compare.bootstrap.MAX_ROWS",
    "compare.bootstrap.RESAMPLES",
    "compare.bootstrap.SEED",
    "compare.bootstrap.STRETCH_STEPS",
    "compare.random_walk_interval.BLOCKS_FREEDOM",
    "compare.random_walk_interval.COSINES",
    "compare.random_walk_interval.FAR_PARTS",
    "compare.random_walk_interval.LONG_BLOCKS",
    "compare.random_walk_interval.MAX_PARTS",
    "compare.random_walk_interval.MIN_PART_STEPS",
    "compare.random_walk_interval.STEADY",
}
"""Numbers beside their use: constants of a method or an order, text lengths, bounds of memory and of input."""


def test_every_number_that_decides_is_a_limit():
    found = set()
    for package in ("detectors", "diagnosis", "alerts", "compare"):
        for path in (Path(module.__file__).parent / package).glob("*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and _is_number(node.value):
                    found.add(f"{package}.{path.stem}.{node.target.id}")

    assert found <= METHOD_OR_LAYOUT


def _is_number(value):
    return value is not None and all(
        isinstance(node, (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop))
        or (isinstance(node, ast.Constant) and isinstance(node.value, (int, float)))
        for node in ast.walk(value)
    )
