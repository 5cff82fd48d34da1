"""mkdocs hooks: parts of pages that are generated from ddpwatch's code, and pictures from outside docs/.

A line `<!-- generated: NAME -->` in a page is replaced by what the function of that name in `GENERATED` returns.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_type_hints

import click
from mkdocs.structure.files import File

from ddpwatch.cli.main import COMMANDS, group
from ddpwatch.core import limits
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.tui.keys import KEYS, REPLAY_KEYS
from ddpwatch.tui.themes import theme_names
from ddpwatch.view.glossary import GLOSSARY
from tests.core.detectors.sample_runs import SAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT: Final = Path(__file__).parents[1]
MARK: Final = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
MIB: Final = 1 << 20
HELP_COLUMNS: Final = 90
"""Width of the help of a command: a block of code on a page is about as wide."""
EVERY_RULE: Final = "judge"
"""Group of the settings that all rules share."""
MARKS: Final = frozenset({"states and marks", "charts"})
"""Groups of the glossary whose terms are mostly symbols: a table, because headings of symbols cannot be linked to."""
UNITS: Final[tuple[tuple[Any, Callable[[float], str]], ...]] = (
    (limits.Share, lambda value: f"{value:.0%}"),
    (limits.Fraction, lambda value: f"{value:.0%}"),
    (limits.Factor, lambda value: f"{value:g}×"),
    (limits.Sigmas, lambda value: f"{value:g} σ"),
    (limits.Steps, lambda value: f"{value:g} steps"),
    (limits.Seconds, lambda value: f"{value:g} s"),
    (limits.Bytes, lambda value: f"{value / MIB:g} MiB"),
    (limits.Readings, lambda value: f"{value:g} readings"),
)
"""How a setting of each type reads with its unit."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pictures that `make screenshots` has written."""
    for path in sorted((ROOT / "screenshots").iterdir()):
        if path.suffix in (".svg", ".png"):
            files.append(File.generated(config, f"screenshots/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Fill in what is generated. An unknown name fails the build."""
    return MARK.sub(lambda found: GENERATED[found[1]](), markdown)


def rules() -> str:
    """Each rule with its explanation, a sample message and its settings."""
    parts = []
    for detector in DETECTORS:
        parts += [f"## {detector.rule}", detector.text]
        # The first sample behind the reviewed messages of the tests.
        _, context = next(iter(SAMPLES[detector.rule]()))
        finding = detector.find(context)[0]
        parts += [f'!!! example "Sample message"\n\n    {_plain(finding.message)}']
        parts += [f"    *What to try:* {_plain(finding.advice)}"]
        parts += [_settings(detector.rule)]
    return "\n\n".join(parts)


def settings_of_all_rules() -> str:
    """The settings that all rules share."""
    return _settings(EVERY_RULE)


def commands() -> str:
    """The help of each command, as it is printed."""
    parts = []
    main = click.Context(group, info_name="ddpwatch", terminal_width=HELP_COLUMNS)
    for name in COMMANDS:
        command = group.get_command(main, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=main, help_option_names=["-h", "--help"])
        parts += [f"## ddpwatch {name}", f"```text\n{command.get_help(context)}\n```"]
    return "\n\n".join(parts)


def glossary() -> str:
    """Terms of the dashboard's help."""
    parts = []
    for title, terms in GLOSSARY.items():
        parts.append(f"## {title[0].upper()}{title[1:]}")
        if title in MARKS:
            parts.append(_table(("On the screen", "Meaning"), ((f"**{term}**", text) for term, text in terms.items())))
        else:
            parts += [f"### {term}\n\n{_plain(text)}" for term, text in terms.items()]
    return "\n\n".join(parts)


def keys() -> str:
    """Keys of the dashboard."""
    return _table(("Key", "What it does"), ((f"`{key.shown}`", key.sentence) for key in KEYS))


def replay_keys() -> str:
    """Keys that a replay has in addition."""
    return _table(("Key", "What it does"), ((f"`{key.shown}`", key.sentence) for key in REPLAY_KEYS))


def themes() -> str:
    """Names of the themes that are made for ddpwatch."""
    return ", ".join(f"`{name}`" for name in theme_names() if name.startswith("ddpwatch"))


def security() -> str:
    """The security policy, without its title."""
    return (ROOT / "SECURITY.md").read_text(encoding="utf-8").partition("\n")[2]


GENERATED: Final[dict[str, Callable[[], str]]] = {
    "commands": commands,
    "glossary": glossary,
    "keys": keys,
    "replay-keys": replay_keys,
    "rules": rules,
    "security": security,
    "settings-of-all-rules": settings_of_all_rules,
    "themes": themes,
}


def _settings(rule: str) -> str:
    group = getattr(limits.DEFAULTS, rule.replace("-", "_"))
    kinds = get_type_hints(type(group), vars(limits), include_extras=True)
    rows = [
        (
            f"`{rule}.{each['key']}`",
            f"`{each['value']}`",
            next(text(each["value"]) for kind, text in UNITS if kind == kinds[each["key"].replace("-", "_")]),
            each["text"],
        )
        for each in limits.described(limits.DEFAULTS, rule)
    ]
    return _table(("Setting", "Default", "Reads as", "Meaning"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *((*(cell.replace("|", "\\|") for cell in row),) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Text without meaning for Markdown: messages have `*`, `_`, `#` and `<` in them."""
    return re.sub(r"([*_#<>\[\]])", r"\\\1", text)
