"""Texts that are reviewed as one file: compared with it, or written to it on request."""

from __future__ import annotations

import os

UPDATE = "DDPWATCH_MESSAGES_UPDATE"


def assert_as_reviewed(text, path):
    """Compare with the file; with `DDPWATCH_MESSAGES_UPDATE=1` write it first."""
    if os.environ.get(UPDATE):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"if that is meant: {UPDATE}=1 pytest, then read the diff"
