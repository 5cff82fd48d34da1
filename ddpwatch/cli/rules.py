"""`ddpwatch rules`: print what each rule means, and its thresholds."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any, Final

import click

from ddpwatch.cli._config import limit_options, limits_of
from ddpwatch.cli._terminal import show, terminal_size
from ddpwatch.errors import UsageError, choices_text
from ddpwatch.view.cells import Cell, Level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.view.cells import Line

MIB: Final = 1 << 20
FRACTIONS: Final = ("share", "part", "cost")
"""Ends of the keys of thresholds that are fractions."""
UNITS: Final = {
    "steps": "steps",
    "-s": "s",
    "factor": "times",
    "sigmas": "sigma",
    "readings": "readings",
    "outliers": "steps",
}
"""End of a threshold's key -> its unit."""


@click.command("rules")
@click.argument("rule", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
@limit_options
def command(*, rule: str | None, as_json: bool, limit: Sequence[str], config: str | None) -> None:
    """Explain each alert rule, and show its thresholds as they are set here."""
    from ddpwatch.core.detectors import DETECTORS
    from ddpwatch.core.limits import described

    limits = limits_of(config, limit)
    texts = {"judge": "Settings that all rules on steps share."}
    texts |= {detector.rule: detector.text for detector in DETECTORS}
    if rule is not None and rule not in texts:
        raise UsageError(f"unknown rule {rule!r}; {choices_text(rule, [detector.rule for detector in DETECTORS])}")
    chosen = [
        {"rule": name, "text": text, "limits": described(limits, name)}
        for name, text in texts.items()
        if rule in (None, name)
    ]
    if as_json:
        click.echo(json.dumps(chosen, indent=2))
    else:
        show([line for each in chosen for line in _lines(each, terminal_size()[0])])


def _lines(rule: dict[str, Any], columns: int) -> list[Line]:
    from ddpwatch.view.layout import paragraph

    wrapped = textwrap.wrap(rule["text"], max(40, columns - 2))
    lines: list[Line] = [[Cell(rule["rule"], Level.STRONG)], *([Cell(f"  {text}")] for text in wrapped)]
    settings = [
        f"  {rule['rule']}.{limit['key']} = {_value_text(limit['key'], limit['value'])}  " for limit in rule["limits"]
    ]
    width = max(map(len, settings), default=0)
    for setting, limit in zip(settings, rule["limits"], strict=True):
        lines += paragraph(limit["text"], columns, Level.DIM, lead=[Cell(setting.ljust(width))])
    return [*lines, []]


def _value_text(key: str, value: float) -> str:
    """A threshold as `--limit` takes it, with its unit, which the end of its key names."""
    from ddpwatch.core.units import percent

    number = str(value) if isinstance(value, int) else f"{value:g}"
    if key.endswith("-bytes"):
        return f"{number} ({value / MIB:g} MiB)"
    if key.endswith(FRACTIONS):
        return f"{number} ({percent(value)})"
    return next((f"{number} {unit}" for ending, unit in UNITS.items() if key.endswith(ending)), number)
