"""`ddpwatch rules`: print what each rule means, and its thresholds."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import click

from ddpwatch.cli._config import limit_options, limits_of
from ddpwatch.cli._terminal import show, terminal_size
from ddpwatch.errors import UsageError
from ddpwatch.view.cells import Cell, Level

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.view.cells import Line


@click.command("rules")
@click.argument("rule", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
@limit_options
def command(*, rule: str | None, as_json: bool, limit: Sequence[str], config: str | None) -> None:
    """Say what every rule means and which limits it goes by, as set here."""
    from ddpwatch.core.detectors import DETECTORS
    from ddpwatch.core.limits import described

    limits = limits_of(config, limit)
    texts = {"judge": "What all rules that go by steps have in common."}
    texts |= {detector.rule: detector.text for detector in DETECTORS}
    if rule is not None and rule not in texts:
        raise UsageError(f"there is no rule {rule!r}; there are {', '.join(texts)}")
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
    wrapped = textwrap.wrap(rule["text"], max(40, columns - 2))
    lines: list[Line] = [[Cell(rule["rule"], Level.STRONG)], *([Cell(f"  {text}")] for text in wrapped)]
    for limit in rule["limits"]:
        setting = f"  {rule['rule']}.{limit['key']} = {limit['value']:g}"
        texts = textwrap.wrap(limit["text"], max(30, columns - 38))
        lines.append([Cell(f"{setting:<36}"), Cell(texts[0], Level.DIM)])
        lines += [[Cell(" " * 36 + text, Level.DIM)] for text in texts[1:]]
    return [*lines, []]
