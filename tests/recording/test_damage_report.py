"""Texts about a recording's damage, and what is not claimed of a damaged one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpwatch.recording.damage_report import Damage, damage_mark, damage_sentence
from ddpwatch.view.alerts.page import alert_list
from ddpwatch.view.summary import summary_lines
from tests.view.pages import make_monitor, make_run_view, page


@pytest.mark.parametrize(
    ("damage", "sentence", "mark"),
    [
        (Damage(1, 0, 90), "1 part could not be read", "1 part unreadable"),
        (Damage(2, 1, 90), "2 parts could not be read, 1 of 91 frames is missing", "1 frame unreadable"),
        (
            Damage(2, 0, 89, 0.001, alerts=True),
            "2 parts could not be read, the last bit of the file is cut off, alerts may be missing",
            "2 parts unreadable, maybe alerts",
        ),
        (Damage(1, 0, 9, partly=True), "1 part could not be read, as far as it was read", "1+ parts unreadable"),
    ],
)  # fmt: skip
def test_damage_texts(damage, sentence, mark):
    assert damage_sentence(damage) == f"The recording is damaged: {sentence}."
    assert damage_mark(damage) == mark


@pytest.mark.parametrize("alerts", [False, True])
def test_possibly_missing_alerts_are_not_reported_as_none(alerts):
    calm = replace(make_run_view(make_monitor(), replayed=True), alerts=(), closed=())
    hurt = replace(calm, damage=Damage(1, 4, 90, alerts=alerts))
    summary = page(summary_lines(hurt, 120, 60, duration_s=5.0))

    assert "The recording is damaged: 1 part could not be read, 4 of 94 frames are missing" in summary
    assert ("none in the whole run" in summary) is not alerts
    assert ("No alerts." in page(alert_list(hurt, 100, 20, selected=0, first=0))) is not alerts
    assert "damaged" not in page(summary_lines(calm, 120, 60, duration_s=5.0))
