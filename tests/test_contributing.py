"""CONTRIBUTING, the other documents and the docstrings of packages name files and modules that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ddpwatch"
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
FOLDERS = sorted({path.name for top in (ROOT, PACKAGE) for path in top.iterdir() if (path / "__init__.py").exists()})
PATH = re.compile(rf"(?<![\w/.])((?:{'|'.join(FOLDERS)}|contrib|examples)/\w[\w/]*(?:\.\w+)*)(?![\w<])")
"""A path below a folder of ours."""
DOTTED = re.compile(r"(?<![\w/.])(ddpwatch(?:\.[a-z_]+)+)\b")
CODE = re.compile(r"`([a-z_./*]+)`")
DOCUMENTS = ["CONTRIBUTING.md", "README.md", "SECURITY.md", "CHANGELOG.md"]
DOCUMENTS += sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))
NOT_MODULES = {"install", "array_like", "mono_ns", "_ns"}
"""Arguments, fields and functions that docstrings of packages mention."""
PACKAGES = sorted(path for top in (PACKAGE, ROOT / "agent") for path in top.rglob("__init__.py"))


def exists(path: str, folder: Path = PACKAGE) -> bool:
    """Whether there is such a file, module or package, from the folder or from one above it."""
    tops = [top for top in (folder, *folder.parents) if top.is_relative_to(ROOT)]
    return any([*top.glob(name)] for top in tops for name in (path, f"{path}.py"))


def as_path(dotted: str) -> str:
    return dotted.removesuffix(".py").replace(".", "/")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_and_module_that_a_document_names_exists(name):
    text = (ROOT / name).read_text()
    modules = [dotted for dotted in DOTTED.findall(text) if not dotted.endswith((".toml", ".json"))]

    assert [path for path in PATH.findall(text) if not exists(path)] == []
    # The last part may be a function.
    assert [each for each in modules if not (exists(as_path(each)) or exists(as_path(each.rpartition(".")[0])))] == []


def test_the_table_of_changes_has_a_file_in_each_row():
    table = TEXT[TEXT.index("## Where do I change") : TEXT.index("## How to add")]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]

    assert len(rows) >= 20
    assert [row for row in rows if not re.search(r"\| `((?:agent|ddpwatch)/\S+\.py)` \|$", row)] == []


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.parent.name)
def test_every_module_that_the_docstring_of_a_package_names_exists(package):
    named = set(CODE.findall(ast.get_docstring(ast.parse(package.read_text())) or "")) - NOT_MODULES

    assert {name for name in named if not exists(as_path(name), package.parent)} == set()
