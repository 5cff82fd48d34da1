"""The checks of `ddpwatch doctor`. None of them raises for what it finds.

torch is imported in a child process only: it may be missing or broken, and doctor must still work.
"""

from __future__ import annotations

import contextlib
import json
import platform
import re
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import zmq

import ddpwatch
from ddpwatch import rundir
from ddpwatch.core.state.sanitize import NAME_CHARS, NOTE_CHARS, sanitize
from ddpwatch.errors import DdpwatchError
from ddpwatch.sources.find_run import NO_RUN_CHECKS, SHORT_ID_CHARS, alive_ranks, live_runs, no_run_text
from ddpwatch.version import VERSION
from ddpwatch.view.cells import Cell, Level, line_columns
from ddpwatch.view.gpus.detail import NAMES
from ddpwatch.view.layout import paragraph
from ddpwatch.wire import ranges

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ddpwatch.view.cells import Line

SCHEMA: Final = 1
AGENT_TORCH: Final = (2, 4)
"""Oldest torch that the agent supports."""
FLIGHT_RECORDER_TORCH: Final = (2, 8)
"""Oldest torch whose flight recorder covers gloo's collectives."""
MANY_FILES: Final = 4096
"""Hard limit of open files from which on runs of thousands of ranks can be watched."""
TORCH_TIMEOUT_S: Final = 60.0
"""Longest wait, in seconds, for the import of torch, which is slow on network file systems."""
DRIVER_TIMEOUT_S: Final = 10.0
"""Longest wait, in seconds, for the NVIDIA driver, which may hang."""
RUN_FILE: Final = (
    # Without the working directory, where a file may have the name of any module.
    "import sys; sys.path = [place for place in sys.path if place]; import runpy; "
    "runpy.run_path(sys.argv[1], run_name='__main__')"
)
NO_GPUS: Final = "no GPU figures; CPU % and resident memory are shown instead"

Verdict: TypeAlias = Literal["ok", "info", "warn", "bad"]
MARKS: Final[dict[Verdict, Cell]] = {
    "ok": Cell("✔ ok   ", Level.OK),
    "info": Cell("- info ", Level.DIM),
    "warn": Cell("▲ warn ", Level.WARN),
    "bad": Cell("✖ bad  ", Level.BAD),
}


@dataclass(frozen=True)
class Check:
    """Result of one check: `bad` = ddpwatch cannot be used here, `warn` = something is missing, `info` = a fact."""

    name: str
    verdict: Verdict
    text: str


WRAPPERS: Final = Check(
    "models",
    "ok",
    "measured: DDP, and FSDP by the waits in its collectives; recognized: DeepSpeed, tensor and pipeline parallel, "
    "DataParallel, no wrapper",
)
"""What is measured, by how a model is wrapped."""


def check_all() -> list[Check]:
    """Run all checks, in the order in which they are shown."""
    return [*_versions(), _curve(), _open_files(), _torch(), *_torch_names(), WRAPPERS, *_nvidia(), *_run_directory()]


def checkup_lines(checks: Sequence[Check], columns: int) -> list[Line]:
    """The mark and name of each check, with its text wrapped beside them."""
    longest = max(len(check.name) for check in checks)
    lines: list[Line] = []
    for check in checks:
        lead = [MARKS[check.verdict], Cell(check.name.ljust(longest + 2), Level.STRONG)]
        for text in check.text.splitlines():
            lines += paragraph(text, columns, lead=lead)
            lead = [Cell(" " * line_columns(lead))]
    return lines


def checkup_object(checks: Sequence[Check]) -> dict[str, Any]:
    """The checks as a JSON object."""
    return {
        "schema": SCHEMA,
        "usable": all(check.verdict != "bad" for check in checks),
        "checks": [asdict(check) for check in checks],
    }


def _versions() -> Iterator[Check]:
    yield Check("python", "ok", platform.python_version())
    yield Check("ddpwatch", "ok", VERSION)
    yield Check("pyzmq", "ok", f"{zmq.__version__} with libzmq {zmq.zmq_version()}")
    for package in ("msgspec", "psutil", "numpy", "click", "textual"):
        if found := _installed(package):
            yield Check(package, "ok", found)
        elif package == "textual":
            yield Check(package, "warn", "missing, needed for the dashboard; run: pip install textual")
        else:
            yield Check(package, "bad", f"missing; run: pip install {package}")


def _curve() -> Check:
    if zmq.has("curve"):
        return Check("CURVE", "ok", "available: encrypted TCP to watch runs on other hosts")
    lost = "ranks on other hosts cannot be watched"
    return Check("CURVE", "warn", f"libzmq was built without encryption: {lost}; reinstall pyzmq from a wheel")


def _open_files() -> Check:
    """Check the hard limit: the viewer uses a descriptor per rank, and raises its soft limit itself."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard_limit == resource.RLIM_INFINITY or hard_limit >= MANY_FILES:
        return Check("open files", "ok", "enough for thousands of ranks")
    return Check("open files", "warn", f"at most {hard_limit}, one is needed per rank; raise it with `ulimit -Hn`")


def _torch() -> Check:
    """Check the torch of this environment; the training may use another one."""
    found = _installed("torch")
    if found is None:
        return Check("torch", "ok", "not installed here: only training needs it")
    version = _release(found)
    if version < AGENT_TORCH:
        return Check("torch", "warn", f"{found} is too old for ddpwatch.agent, which needs 2.4; watching works")
    if version < FLIGHT_RECORDER_TORCH:
        return Check("torch", "ok", f"{found}; gloo's flight recorder needs 2.8: hangs show less detail with gloo")
    return Check("torch", "ok", f"{found}; flight recorder available for gloo and NCCL")


def _torch_names() -> Iterator[Check]:
    """Check which private names of torch are missing, and what cannot be measured without them."""
    found = _installed("torch")
    if found is None or _release(found) < AGENT_TORCH:
        return
    try:
        command = [sys.executable, "-c", RUN_FILE, str(Path(ddpwatch.__file__).parent / "agent" / "torch_private.py")]
        child = subprocess.run(command, capture_output=True, timeout=TORCH_TIMEOUT_S, check=False)  # noqa: S603 - our own
        missing: list[dict[str, Any]] = json.loads(child.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        why = "took too long" if isinstance(error, subprocess.TimeoutExpired) else "failed"
        yield Check("torch names", "warn", f"importing torch {why}: what ddpwatch can measure with it is unknown")
        return
    if not missing:
        yield Check("torch names", "ok", "torch has every private name that ddpwatch uses")
    by_loss: dict[tuple[str, str, bool], list[str]] = {}
    for each in missing:
        by_loss.setdefault((each["without"], each["since"], each["expected"]), []).append(each["name"])
    for (without, since, expected), names in by_loss.items():
        needs = "" if expected else f", which torch {since} has"
        yield Check("torch names", "warn" if expected else "info", f"{without}; missing: {', '.join(names)}{needs}")


def _nvidia() -> Iterator[Check]:
    """Check which figures of the GPUs can be read, with the code that the agent reads them with."""
    reported = _ask_driver()
    if "why" in reported[0]:
        yield Check("NVIDIA", "warn", sanitize(f"{reported[0]['why']}: {NO_GPUS}", NOTE_CHARS))
        return
    yield Check("NVIDIA", "ok", sanitize(f"driver {reported[0]['driver']}, GPUs: {reported[0]['gpus']}", NOTE_CHARS))
    alike: dict[tuple[str, str], list[int]] = {}
    for gpu in reported[1:]:
        if "gpu" in gpu:
            alike.setdefault((gpu["name"], _unreadable(gpu["figures"])), []).append(gpu["gpu"])
    for (name, missing), numbers in alike.items():
        text = f"{name or 'of unknown name'}: {missing or 'all figures are readable'}"
        yield Check(f"GPU {ranges(numbers)}", "warn" if missing else "ok", sanitize(text, NOTE_CHARS))
    if "why" in reported[-1]:
        yield Check("GPU", "warn", f"{reported[-1]['why']}; figures of further GPUs are late or absent")


def _unreadable(figures: dict[str, str]) -> str:
    """Unreadable figures grouped by reason, as in `no power (no permission)`."""
    by_reason: dict[str, list[str]] = {}
    for name, why in figures.items():
        if why:
            by_reason.setdefault(why, []).append(NAMES.get(name, name))
    if len(by_reason) == 1 and len(figures) == sum(map(len, by_reason.values())):
        return f"no figure is readable ({next(iter(by_reason))})"
    return "; ".join(f"no {', '.join(names)} ({why})" for why, names in by_reason.items())


def _ask_driver(timeout_s: float = DRIVER_TIMEOUT_S) -> list[dict[str, Any]]:
    """Run the agent's NVML code in a child process, because a driver may hang and torch may be missing."""
    script = Path(ddpwatch.__file__).parent / "agent" / "gpu" / "nvml.py"
    child = subprocess.Popen(  # noqa: S603 - our own interpreter and file
        [sys.executable, "-c", RUN_FILE, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    late = False
    try:
        written = child.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired as expired:
        late, written = True, expired.stdout or b""
        child.kill()
        # A process inside a driver that hangs cannot be killed; it is left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            written = child.communicate(timeout=1)[0]
    reported: list[dict[str, Any]] = [json.loads(line) for line in written.splitlines() if line.endswith(b"}")]
    if late:
        return [*reported, {"why": f"the NVIDIA driver did not answer within {timeout_s:.0f} s"}]
    return reported or [{"why": "the NVIDIA driver could not be queried"}]


def _run_directory() -> Iterator[Check]:
    base = rundir.base_path()
    try:
        if not _exists(base):
            # The agent has to create it, too.
            rundir.ensure_base(base)
        rundir.check_base(base)
        rundir.socket_path(base, "0" * 32, 0)
        runs = live_runs()
    except DdpwatchError as error:
        yield Check("run directory", "bad", sanitize(str(error), NOTE_CHARS))
        return
    yield Check("run directory", "ok", sanitize(f"{base} is private to you; the agent writes to it", NOTE_CHARS))
    for place in rundir.places():
        if why := rundir.refusal(place):
            yield Check("not searched", "warn", sanitize(why, NOTE_CHARS))
            continue
        if place != base:
            yield Check("also searched", "info", sanitize(str(place), NOTE_CHARS))
        for piece in rundir.scan(place)[1]:
            yield Check("leftover", "warn", sanitize(f"{piece.path} {piece.reason}", NOTE_CHARS))
    for run in runs:
        alive = f"{len(alive_ranks(run))} of {run.world_size} ranks alive"
        yield Check("live run", "ok", f"{run.id[:SHORT_ID_CHARS]} ({sanitize(run.name, NAME_CHARS)}), {alive}")
    if not runs:
        yield Check("live run", "info", "\n".join([sanitize(no_run_text(), NOTE_CHARS), *NO_RUN_CHECKS]))


def _exists(base: Path) -> bool:
    try:
        base.lstat()
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return True


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number of a version: 2.13.0+cpu -> (2, 13)."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(int(number) for number in found.groups()) if found else (0, 0)
