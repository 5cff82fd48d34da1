"""mkdocs hooks: files from outside docs/ that pages link to are part of the site.

In the repository such a link begins with `../`; the site has these files beside its pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT: Final = Path(__file__).parents[1]
OUTSIDE: Final = ("SECURITY.md", "screenshots/*.svg", "screenshots/*.png")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files from outside."""
    for path in sorted(found for pattern in OUTSIDE for found in ROOT.glob(pattern)):
        files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Link to them where they are in the site. A link to any other file outside docs/ fails the build."""
    return re.sub(r"\]\(\.\./(?=SECURITY\.md|screenshots/)", "](", markdown)
