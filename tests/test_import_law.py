"""Imports point down only, and no two modules import each other at run time.

`cli -> {tui | outputs} -> {view, session} -> recording -> {core, sources, simulator} -> wire <- agent`
"""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ddpwatch"

# The part below `ddpwatch` -> the parts directly under it; what those may import, it may import too.
DIRECTLY_BELOW = {
    "cli": {"tui", "outputs"},
    "tui": {"outputs", "view", "session"},
    "outputs": {"view", "session", "encryption"},
    "view": {"recording"},
    "session": {"recording"},
    "recording": {"core", "sources", "simulator", "rundir"},
    "simulator": {"sources"},  # for the type of a frame
    "sources": {"wire", "rundir", "encryption"},
    "core": {"wire"},
    "demo": {"agent", "simulator"},
    "agent": {"wire", "rundir", "encryption"},
    "rundir": {"wire"},
    "encryption": set(),
    "wire": set(),
    "errors": set(),
    "version": set(),
    "__main__": {"cli"},
    "__init__": set(),
}
ANYWHERE = {"errors", "version"}
# Third-party and standard modules that a part must not import, not even inside a function.
PURE = {
    "textual", "zmq", "torch", "psutil", "click", "time", "threading", "asyncio", "multiprocessing", "socket", "os",
    "subprocess", "sqlite3", "shutil", "tempfile", "urllib", "logging", "pathlib.Path",
}  # fmt: skip
IMPURE_CALL = re.compile(r"(datetime\.)?(datetime|date)\.(now|utcnow|today)|(pathlib\.)?Path|open|print|input")
"""Calls that read a clock or do I/O, in the parts that are `PURE`."""
MUST_NOT_KNOW = {
    "agent": {"textual", "rich", "numpy", "click"},
    "core": PURE,
    "view": PURE,
    "sources": {"textual", "torch", "click"},
    "simulator": {"textual", "torch", "click"},
    "recording": {"textual", "torch", "click", "zmq"},
    "session": {"textual", "torch", "click"},
    "outputs": {"textual", "torch", "click"},
    "tui": {"torch", "zmq", "click", "psutil", "threading", "subprocess"},
    "cli": {"torch"},
    "wire": {"zmq", "torch", "numpy", "psutil", "click"},
    "rundir": {"zmq", "torch", "numpy", "click"},
    "encryption": {"torch", "numpy", "click"},
}
MODULES = sorted({*PACKAGE.rglob("*.py"), *(PACKAGE / "agent").rglob("*.py")})


def below(part: str) -> set[str]:
    return {part}.union(*(below(lower) for lower in DIRECTLY_BELOW[part]))


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


def forbidden(path: Path) -> set[str]:
    """What the file imports and must not; the agent is to be imported as `ddpwatch.agent`."""
    part, names = part_of(path), imported(path)
    ours = {name.split(".")[1] for name in names if name.startswith("ddpwatch.")}
    others = names | {name.split(".")[0] for name in names}
    allowed = below(part) | ANYWHERE
    return (ours - allowed) | (others & (MUST_NOT_KNOW.get(part, set()) | {"agent"}))


def test_a_module_knows_only_what_is_below_it():
    assert len(MODULES) > 100
    assert {str(path.relative_to(PACKAGE)): found for path in MODULES if (found := forbidden(path))} == {}


def test_core_and_view_read_no_clock_and_no_file():
    calls = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} {ast.unparse(node.func)}"
        for path in MODULES
        if MUST_NOT_KNOW.get(part_of(path)) is PURE
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and IMPURE_CALL.fullmatch(ast.unparse(node.func))
    ]
    assert calls == []


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_at_start(path: Path, modules: set[str]) -> set[str]:
    """Our modules that are imported as soon as this one is: not in functions, and not for types only."""
    found: set[str] = set()
    pending = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in modules else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return found & modules


def test_no_two_modules_import_each_other():
    paths = {name_of(path): path for path in MODULES}
    waiting = {name: imported_at_start(path, set(paths)) - {name} for name, path in paths.items()}

    # Take away what imports nothing that is left, until nothing more can be taken away (Kahn's algorithm).
    while free := {name for name, needs in waiting.items() if not needs & waiting.keys()}:
        for name in free:
            del waiting[name]
    assert not waiting


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
        if part_of(path) not in {"agent", "demo", "__main__"} and path.name != "__init__.py"
    ]

    (loaded,) = loaded_after("\n".join(f"import {name}" for name in modules))
    assert loaded >= set(modules)
    assert "torch" not in loaded


def test_the_agent_has_one_name_only():
    """`ddpwatch/agent` is a relative link, so that the folder `agent/` can be imported, typed and packaged."""
    link = PACKAGE / "agent"

    assert link.is_symlink()
    assert str(link.readlink()) == "../agent"
