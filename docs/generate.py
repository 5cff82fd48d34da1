"""Writes the parts of docs/ that come from ddpwatch's code: `make generate`.

Such a part is between the lines `<!-- generated: NAME -->` and `<!-- end of NAME -->` of a page; the function of that
name in `GENERATED` returns its text, Markdown that GitHub and mkdocs show alike.
"""

from __future__ import annotations

import html
import inspect
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_type_hints

import click
import yaml

from ddpwatch.agent import Agent, install
from ddpwatch.cli.main import COMMANDS, group
from ddpwatch.core import limits
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.tui.keys import KEYS, REPLAY_KEYS
from ddpwatch.tui.themes import theme_names
from ddpwatch.view.glossary import GLOSSARY
from tests.core.detectors.sample_runs import SAMPLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DOCS: Final = Path(__file__).parent
ROOT: Final = DOCS.parent
PART: Final = re.compile(r"^<!-- generated: ([\w-]+) -->\n.*?^<!-- end of \1 -->$", re.MULTILINE | re.DOTALL)
MIB: Final = 1 << 20
HELP_COLUMNS: Final = 90
"""Width of the help of a command: a block of code on a page is about as wide."""
EVERY_RULE: Final = "judge"
"""Group of the thresholds that all rules share."""
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
"""How a threshold of each type reads with its unit."""
AGENT_MEMBERS: Final = ("active", "step", "log", "pause", "close")
"""What a training script uses of an agent."""


def pages() -> dict[Path, str]:
    """Each page with the text that it should have. An unknown name of a part is an error."""
    return {path: PART.sub(_filled, path.read_text(encoding="utf-8")) for path in sorted(DOCS.glob("*.md"))}


def _filled(found: re.Match[str]) -> str:
    name = found[1]
    return f"<!-- generated: {name} -->\n\n{GENERATED[name]()}\n\n<!-- end of {name} -->"


def contents() -> str:
    """All pages by section, as in the navigation of the site."""
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    rows = []
    for section in navigation:
        for title, entries in section.items():
            links = [f"[{name}]({_from_docs(page)})" for entry in entries for name, page in entry.items()]
            rows.append(f"- {title}: {' · '.join(links)}")
    return "\n".join(rows)


def _from_docs(page: str) -> str:
    return page if (DOCS / page).exists() else f"../{page}"


def agent_api() -> str:
    """Signature and docstring of what a training script calls."""
    parts = ["### install()", *_documented(install), "### Agent", *_sections(Agent)]
    for name in AGENT_MEMBERS:
        member = inspect.getattr_static(Agent, name)
        is_property = isinstance(member, property)
        parts += [
            f"### Agent.{name}" + ("" if is_property else "()"),
            *_documented(member.fget if is_property else member),
        ]
    return "\n\n".join(parts)


def _documented(function: Any) -> list[str]:
    source = textwrap.dedent(inspect.getsource(function))
    signature, _, _ = source.partition(':\n    """')
    return [f"```py\n{signature}: ...\n```", *_sections(function)]


def _sections(documented: Any) -> list[str]:
    """A docstring in Google's style as Markdown."""
    text, *sections = re.split(
        r"^(Args|Returns|Raises|Example):\n", inspect.getdoc(documented) or "", flags=re.MULTILINE
    )
    parts = [text.strip()]
    for title, indented in zip(sections[::2], sections[1::2], strict=True):
        body = textwrap.dedent(indented).strip()
        if title == "Example":
            code = re.sub(r"^(>>>|\.\.\.) ", "", body, flags=re.MULTILINE)
            parts.append(f"```py\n{code}\n```")
        elif title == "Returns":
            parts.append(f"**Returns:** {' '.join(body.split())}")
        else:
            entries = [" ".join(entry.split()).partition(": ") for entry in re.split(r"\n(?=\S)", body)]
            parts += [f"**{title}:**", "\n".join(f"- `{name}`: {meaning}" for name, _, meaning in entries)]
    return parts


def rules() -> str:
    """Each rule with its explanation, a sample message and its thresholds."""
    parts = []
    for detector in DETECTORS:
        parts += [f"## {detector.rule}", detector.text]
        # The first sample behind the reviewed messages of the tests.
        _, context = next(iter(SAMPLES[detector.rule]()))
        finding = detector.find(context)[0]
        parts += [f"> **Sample message:** {_plain(finding.message)}\n>\n> **What to try:** {_plain(finding.advice)}"]
        parts += [_thresholds(detector.rule)]
    return "\n\n".join(parts)


def thresholds_of_all_rules() -> str:
    """The thresholds that all rules share."""
    return _thresholds(EVERY_RULE)


def commands() -> str:
    """The help of each command, as it is printed."""
    parts = []
    main = click.Context(group, info_name="ddpwatch", terminal_width=HELP_COLUMNS)
    for name in COMMANDS:
        command = group.get_command(main, name)
        assert command is not None
        # click keeps the help option of the first call, which may have been one without the group and its `-h`.
        command._help_option = None  # noqa: SLF001 - there is no public way to clear it
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


GENERATED: Final[dict[str, Callable[[], str]]] = {
    "agent-api": agent_api,
    "commands": commands,
    "contents": contents,
    "glossary": glossary,
    "keys": keys,
    "replay-keys": replay_keys,
    "rules": rules,
    "themes": themes,
    "thresholds-of-all-rules": thresholds_of_all_rules,
}


def _thresholds(rule: str) -> str:
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
    return _table(("Threshold", "Default", "Reads as", "Meaning"), rows)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *((*(cell.replace("|", "\\|") for cell in row),) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Text without meaning for Markdown: messages have `*`, `_`, `#` and `<` in them."""
    return re.sub(r"([*_#\[\]])", r"\\\1", html.escape(text, quote=False))


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
