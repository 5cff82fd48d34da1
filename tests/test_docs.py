"""README and pages of docs/: generated parts are up to date, links work on GitHub, commands and variables exist."""

import re
import shlex
from pathlib import Path

import click
import pytest

from ddpwatch.cli.main import COMMANDS, group
from ddpwatch.core.detectors import DETECTORS
from docs.generate import pages

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(ddpwatch [a-z][^`]*)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")
VARIABLE = re.compile(r"\b_?DDPWATCH_[A-Z_]+\b")


def blocks(*languages):
    """Fenced blocks of these languages with the name of their page."""
    return [
        (page.name, code)
        for page in PAGES
        for _, language, code in FENCE.findall(page.read_text())
        if language in languages
    ]


def calls(text):
    """Calls of ddpwatch in a line of a shell, each as its words from the command on."""
    words = shlex.split(text, comments=True)
    for start, word in enumerate(words):
        if word == "ddpwatch" and start + 1 < len(words) and words[start + 1] in COMMANDS:
            rest = words[start + 1 :]
            yield rest[: next((k for k, each in enumerate(rest) if each in ("&", "&&", "|", ">")), len(rest))]


def command(name):
    return group.get_command(click.Context(group), name)


def anchors(text):
    """Anchors of the headings as GitHub makes them: mkdocs, which checks its own, merges hyphens."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_generated_parts_are_up_to_date():
    stale = [path.name for path, text in pages().items() if path.read_text() != text]

    assert not stale, f"{', '.join(stale)} of docs/ differ from the code: run `make generate`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_work_in_the_repository(page):
    for path, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target.read_text()), f"{path}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_inline_code_is_in_one_line(page):
    assert [line for line in FENCE.sub("", page.read_text()).splitlines() if line.count("`") % 2] == []


def test_every_command_in_a_block_can_be_called_like_that():
    lines = [(page, line) for page, code in blocks("") for line in code.replace("\\\n", " ").splitlines()]
    found = [(page, call) for page, line in lines for call in calls(line)]

    assert len(found) > 40
    for page, (name, *arguments) in found:
        try:
            command(name).make_context(name, arguments)
        except click.UsageError as error:
            pytest.fail(f"{page}: {name} {arguments}: {error.format_message()}")


def test_every_option_in_running_text_exists():
    texts = [(page.name, " ".join(text.split())) for page in PAGES for text in INLINE.findall(page.read_text())]
    found = [(page, call) for page, text in texts for call in calls(text)]

    assert len(found) > 40
    for page, (name, *arguments) in found:
        known = {option for each in command(name).params for option in each.opts} | {"--help"}
        assert {word.partition("=")[0] for word in arguments if word.startswith("--")} <= known, (page, name)


@pytest.mark.parametrize(("page", "code"), blocks("python", "py"))
def test_python_in_the_pages_compiles(page, code):
    compile(code, page, "exec")


def test_every_environment_variable_of_the_code_is_documented_and_no_other():
    sources = [*(ROOT / "ddpwatch").rglob("*.py"), *(ROOT / "agent").rglob("*.py")]
    in_code = {name for path in sources for name in VARIABLE.findall(path.read_text())}
    # Their names are put together from those of the facts.
    in_code |= {"DDPWATCH_RULE", "DDPWATCH_SEVERITY", "DDPWATCH_EVENT"}

    assert set(VARIABLE.findall((ROOT / "docs" / "json.md").read_text())) == in_code
    for page in PAGES:
        assert set(VARIABLE.findall(page.read_text())) <= in_code, page.name


def test_every_rule_is_in_the_overview_of_alerts():
    page = (ROOT / "docs" / "alerts.md").read_text()

    assert [detector.rule for detector in DETECTORS if f"(#{detector.rule})" not in page] == []


def test_settings_in_toml_are_valid():
    from ddpwatch.cli._config import _parse
    from ddpwatch.core.limits import limits_from

    examples = blocks("toml")
    assert examples
    for page, code in examples:
        limits_from(_parse(code), page)


def test_the_readme_is_short_enough_to_be_read():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160
