"""README.md as the description on a package index, with absolute links. All other metadata is in pyproject.toml.

An index shows the text without the repository's files, so relative images and links would be broken there. They point
to the tag of the release: a later change of a screenshot does not alter the page of an old release.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
TAG = "v" + runpy.run_path(str(ROOT / "ddpwatch" / "version.py"))["VERSION"]
RAW = f"https://raw.githubusercontent.com/ddpwatch/ddpwatch/{TAG}/"
BLOB = f"https://github.com/ddpwatch/ddpwatch/blob/{TAG}/"


def with_absolute_links(markdown: str) -> str:
    """Return the text with relative targets of images and links made absolute; links within the page stay."""
    markdown = re.sub(r'(!\[[^\]]*\]\(|<img\b[^>]*\bsrc=")(?!\w+:)', rf"\g<1>{RAW}", markdown)
    return re.sub(r'(\]\(|<a\b[^>]*\bhref=")(?!\w+:|#)', rf"\g<1>{BLOB}", markdown)


setup(
    long_description=with_absolute_links((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
