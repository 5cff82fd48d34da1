"""Imports point down only: `cli -> {tui | outputs} -> view -> core -> wire <- agent`, and `cli -> sources -> wire`."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ddpwatch"

# What may be imported from where, by the first part below `ddpwatch`. Everything may know the words for errors.
SHARED = {"errors", "version"}
MAY_KNOW = {
    "errors": set(),
    "version": set(),
    "wire": {"wire", "errors"},
    "rundir": {"wire"},
    "curve": set(),
    "recording": {"wire", "rundir"},
    "opening": {"recording"},
    "agent": {"agent", "wire", "rundir", "curve"},
    "core": {"core", "wire"},
    "sources": {"sources", "wire", "rundir", "curve", "recording", "opening"},
    "view": {"view", "core", "wire"},
    "outputs": {"outputs", "view", "core", "sources", "wire", "rundir", "curve", "recording", "opening"},
    "tui": {"tui", "outputs", "view", "core", "sources", "wire", "rundir", "recording"},
    "cli": {"cli", "tui", "outputs", "view", "core", "sources", "wire", "rundir", "curve", "recording", "opening"},
    "demo": {"demo", "agent", "sources"},
    "__main__": {"cli"},
    "__init__": set(),
}
# Third parties that a part must not know, however deep inside a function the import stands.
MUST_NOT_KNOW = {
    "agent": {"textual", "rich", "numpy", "click"},
    "core": {"textual", "zmq", "torch", "psutil", "click", "time", "threading", "socket", "os", "subprocess"},
    "view": {"textual", "zmq", "torch", "psutil", "click", "time", "threading", "socket", "os", "subprocess"},
    "sources": {"textual", "torch", "click"},
    "outputs": {"textual", "torch", "click"},
    "tui": {"torch", "zmq", "click", "psutil", "threading", "subprocess"},
    "cli": {"torch"},
    "wire": {"zmq", "torch", "numpy", "psutil", "click"},
    "rundir": {"zmq", "torch", "numpy", "click"},
    "curve": {"torch", "numpy", "click"},
    "recording": {"zmq", "torch", "numpy", "click"},
    "opening": {"zmq", "torch", "numpy", "click"},
}
MODULES = sorted(PACKAGE.rglob("*.py")) + sorted((PACKAGE / "agent").rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imported(path: Path) -> set[str]:
    """Every module that the file imports, anywhere in it; relative imports are not used in this project."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", sorted(set(MODULES)), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_knows_only_what_is_below_it(path):
    part = part_of(path)
    names = imported(path)

    ours = {name.split(".")[1] for name in names if name.startswith("ddpwatch.")}
    assert ours <= MAY_KNOW[part] | SHARED

    others = {name.split(".")[0] for name in names}
    assert not others & MUST_NOT_KNOW.get(part, set())
    assert "agent" not in others, "import it as ddpwatch.agent"


def test_no_module_is_longer_than_four_hundred_lines():
    lengths = {path: len(path.read_text().splitlines()) for path in MODULES}

    assert not {str(path): length for path, length in lengths.items() if length > 400}


def loaded_after(*statements: str) -> list[set[str]]:
    """The modules that a fresh interpreter has loaded after each of the statements, one after another."""
    code = "\n".join(f"{statement}\nprint(*sys.modules)" for statement in statements)
    command = [sys.executable, "-c", f"import sys\n{code}"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return [set(line.split()) for line in result.stdout.splitlines()]


def packages(modules: set[str]) -> set[str]:
    return {name.split(".")[0] for name in modules}


def test_importing_the_package_imports_nothing():
    bare, loaded = loaded_after("pass", "import ddpwatch")

    assert packages(loaded) - packages(bare) == {"ddpwatch"}


def test_the_viewer_loads_no_torch():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in MODULES
        if part_of(path) in {"cli", "core", "outputs", "sources", "tui", "view", "wire", "rundir"}
        and path.name != "__init__.py"
    ]

    (loaded,) = loaded_after("\n".join(f"import {name}" for name in modules))
    assert loaded >= set(modules)
    assert "torch" not in loaded


def test_the_agent_has_one_name_only():
    """`ddpwatch/agent` is a relative link, so that the folder `agent/` can be imported, typed and packaged."""
    link = PACKAGE / "agent"

    assert link.is_symlink()
    assert str(link.readlink()) == "../agent"
