"""Text from outside is reduced to printable text."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.core.state.sanitize import are_sanitized, is_sanitized, sanitize, sanitized
from ddpwatch.wire import Note


@pytest.mark.parametrize(
    ("hostile", "kept"),
    [
        ("node-a", "node-a"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x9b2Jgone", "gone"),
        ("\x1b]0;title\x07name", "name"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPq...\x1b\\after", "after"),
        ("two\nlines\tand\rmore", "two lines and more"),
        ("user\u202egnp.exe", "usergnp.exe"),
        ("zero\u200bwidth\ufeff", "zerowidth"),
        ("[rank0]: Traceback", "[rank0]: Traceback"),
        ("моделью 模型", "моделью 模型"),
        ("\x00\x07\x7f", ""),
    ],
)
def test_only_printable_text_is_kept(hostile, kept):
    assert kept == sanitize(hostile, 80)


def test_a_cut_is_visible_and_within_the_limit():
    assert sanitize("a" * 100, 5) == "aaaa…"
    assert sanitize("a" * 5, 5) == "aaaaa"


@given(st.text(), st.integers(1, 50))
def test_no_text_gets_a_control_character_through(text, limit):
    kept = sanitize(text, limit)

    assert len(kept) <= limit
    assert not [char for char in kept if unicodedata.category(char) in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}]


@given(st.lists(st.text(max_size=6)), st.integers(1, 6))
def test_several_texts_are_sanitized_if_each_of_them_is(texts, limit):
    assert are_sanitized(texts, limit) == all(is_sanitized(text, limit) for text in texts)


def test_of_a_message_only_the_fields_that_need_it_are_changed():
    plain = Note(rank=0, seq=1, kind="note", text="all is well", step=1, mono_ns=1)
    assert sanitized(plain, 20) is plain
    hostile = Note(rank=0, seq=1, kind="note", text="\x1b[31mall is well", step=1, mono_ns=1)
    assert sanitized(hostile, 20) == plain
    assert sanitized(plain, 4) == Note(rank=0, seq=1, kind="note", text="all…", step=1, mono_ns=1)
