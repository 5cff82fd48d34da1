"""`ddpwatch rules`: every rule with its explanation and its thresholds."""

from __future__ import annotations

import json

import pytest

from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.limits import DEFAULTS


def test_every_rule_is_explained_with_all_its_limits(ddpwatch):
    rules = {rule["rule"]: rule for rule in json.loads(ddpwatch("rules", "--json").stdout)}

    assert list(rules) == ["judge", *(detector.rule for detector in DETECTORS)]
    for name, rule in rules.items():
        group = getattr(DEFAULTS, name.replace("-", "_"))
        assert [limit["key"].replace("-", "_") for limit in rule["limits"]] == list(group.__struct_fields__)
        assert all(limit["text"].endswith(".") and len(limit["text"]) > 10 for limit in rule["limits"])
        assert rule["text"].endswith(".")


def test_a_limit_is_shown_as_it_is_set(ddpwatch):
    done = ddpwatch("rules", "straggler", "--limit", "straggler.share=0.03", COLUMNS="80")

    assert "straggler.share = 0.03" in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "comm-share" not in done.stdout


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_the_text_fits_the_terminal(ddpwatch, columns):
    done = ddpwatch("rules", COLUMNS=columns)

    assert max(len(line) for line in done.stdout.splitlines()) <= max(70, int(columns))


def test_an_unknown_rule_is_refused_by_name(ddpwatch):
    done = ddpwatch("rules", "nonsense")

    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown rule 'stragler'; did you mean straggler?" in ddpwatch("rules", "stragler").stderr
    assert "unknown rule 'nonsense'; choose from: straggler," in done.stderr
