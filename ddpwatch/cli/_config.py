"""Thresholds of the rules from a TOML file, and from `--limit` on top of it.

The file is `--config FILE`, else `ddpwatch.toml` in the current directory, else `[tool.ddpwatch]` of the
`pyproject.toml` there. An invalid key or value is refused with the place where it was found.
"""

from __future__ import annotations

import math
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.limits import Limits

OWN_FILE: Final = "ddpwatch.toml"
PROJECT_FILE: Final = "pyproject.toml"
MAX_FILE_BYTES: Final = 1 << 20
"""Max. size of a configuration file, in bytes; a larger one is another file."""

CommandT = TypeVar("CommandT", bound="Callable[..., Any]")


def limit_options(command: CommandT) -> CommandT:
    """Add `--limit` and `--config`, as the parameters `limit` and `config`, to a command that evaluates rules."""
    command = click.option(
        "--config",
        metavar="FILE",
        help=f"Read thresholds from this TOML file.  [default: ./{OWN_FILE}, or ./{PROJECT_FILE}]",
    )(command)
    return click.option(
        "--limit",
        multiple=True,
        metavar="RULE.KEY=NUMBER",
        help="Set a threshold, such as straggler.share=0.03; repeatable.",
    )(command)


def limits_of(config: str | None, limit: Sequence[str]) -> Limits:
    """Thresholds from the file, overridden by those of the command line, of which the last one wins."""
    from ddpwatch.core.limits import limits_from

    merged, where = _from_file(config)
    limits = limits_from(merged, where)
    for setting in limit:
        where = f"--limit {setting}"
        group, key, value = _read_setting(setting, where)
        _refuse_non_finite({group: {key: value}}, where)
        # Checked alone first, so that the message names this setting.
        limits_from({group: {key: value}}, where)
        merged = {**merged, group: {**merged.get(group, {}), key: value}}
        limits = limits_from(merged, where)
    return limits


def _from_file(config: str | None) -> tuple[dict[str, Any], str]:
    """The table of the file, and the file's name for messages; an empty table without a file."""
    if config is not None:
        where = f"--config {config}"
        table = _read(Path(config), where)
    elif Path(OWN_FILE).exists():
        table, where = _read(Path(OWN_FILE), OWN_FILE), OWN_FILE
    elif Path(PROJECT_FILE).exists():
        table, where = _section(_read(Path(PROJECT_FILE), PROJECT_FILE)), f"{PROJECT_FILE} [tool.ddpwatch]"
    else:
        return {}, OWN_FILE
    _refuse_non_finite(table, where)
    return table, where


def _section(project: dict[str, Any]) -> dict[str, Any]:
    tool = project.get("tool", {})
    section = tool.get("ddpwatch", {}) if isinstance(tool, dict) else {}
    if not isinstance(section, dict):
        raise UsageError(f"{PROJECT_FILE}: tool.ddpwatch is not a table")
    return section


def _read(path: Path, where: str) -> dict[str, Any]:
    try:
        # Opening a pipe that has no writer would block.
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{where}: not a regular file")
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"{where}: cannot read it: {getattr(error, 'strerror', None) or error}") from None
    if len(text) > MAX_FILE_BYTES:
        raise UsageError(f"{where}: too large for a configuration file")
    try:
        return _parse(text.decode())
    except UnicodeDecodeError:
        raise UsageError(f"{where}: not valid TOML: not in UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not valid TOML: {error}") from None


def _read_setting(setting: str, where: str) -> tuple[str, str, Any]:
    name, equals, text = setting.partition("=")
    group, _, key = name.strip().partition(".")
    if not equals or not group or not key or "." in key:
        raise UsageError(f"{where}: not of the form RULE.KEY=NUMBER, such as straggler.share=0.03")
    try:
        table = _parse(f"value = {text.strip()}")
    except (ValueError, RecursionError):
        table = {}
    value = table.get("value")
    if set(table) != {"value"} or isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{where}: threshold {group}.{key}: {text.strip() or 'nothing'!r} is not a number")
    return group, key, value


def _refuse_non_finite(table: dict[str, Any], where: str) -> None:
    """Refuse infinity and NaN, which TOML allows as numbers."""
    for group, keys in table.items():
        for key, value in keys.items() if isinstance(keys, dict) else ():
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{where}: threshold {group}.{key}: {value} is not a finite number")


def _parse(text: str) -> dict[str, Any]:
    """Parse TOML; raises a `ValueError` that names the line."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    table: dict[str, Any] = tomllib.loads(text)
    return table
