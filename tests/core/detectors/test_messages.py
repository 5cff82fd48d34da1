"""Every message, advice and explanation of every rule, as one page of prose to review.

After a change of words: `DDPWATCH_MESSAGES_UPDATE=1 pytest tests/core/detectors/test_messages.py`, then read the diff.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from textwrap import wrap

import pytest

from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.limits import DEFAULTS, described
from tests.builders.golden import assert_as_reviewed
from tests.core.detectors.sample_runs import SAMPLES

GOLDEN = Path(__file__).parent / "messages.golden.txt"
WIDTH = 118


def wrapped(text, indent=""):
    return wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def page(detector):
    """Explanation, thresholds and sample messages of a rule; an advice once."""
    lines = [f"# {detector.rule}", "", *wrapped(detector.text), ""]
    lines += [f"  {each['key']} = {each['value']}  {each['text']}" for each in described(DEFAULTS, detector.rule)]
    advised = set()
    for title, context in SAMPLES[detector.rule]():
        findings = detector.find(context)
        assert findings, f"{detector.rule} finds nothing in the sample {title!r}"
        lines += ["", f"[{title}]"]
        for finding in findings:
            lines.append(f"{finding.severity.name:<8} {finding.message}")
            if finding.advice not in advised:
                lines += wrapped(f"Try: {finding.advice}", " " * 9)
            advised.add(finding.advice)
    return "\n".join(lines) + "\n"


def test_every_message_of_every_rule_is_the_reviewed_one():
    assert_as_reviewed("\n".join(map(page, DETECTORS)), GOLDEN)


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda detector: detector.rule)
def test_every_advice_of_a_rule_is_in_a_sample(detector):
    module = vars(importlib.import_module(detector.find.__module__))
    advice = {name: value for name, value in module.items() if name.endswith("ADVICE") and isinstance(value, str)}
    shown = " ".join(GOLDEN.read_text(encoding="utf-8").split())

    assert [name for name, value in advice.items() if value not in shown] == []


@pytest.mark.parametrize("detector", DETECTORS, ids=lambda detector: detector.rule)
def test_a_message_that_is_cut_at_80_columns_still_names_its_ranks_or_its_figure(detector):
    """A line of the status has the mark and the name of the rule before it."""
    room = 80 - len("▲ rank-failed   ")
    named, figure = r"rank \d|ranks \d|host |all |the ranks|any rank", r"\d|sampler"
    findings = [finding for _, context in SAMPLES[detector.rule]() for finding in detector.find(context)]
    cut = [(named if finding.ranks else figure, finding.message[:room]) for finding in findings]

    assert [head for pattern, head in cut if not re.search(pattern, head)] == []
