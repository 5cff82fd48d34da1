"""Thresholds from files and from the command line: precedence, and errors for invalid ones."""

from __future__ import annotations

import os

import click
import pytest

from ddpwatch.cli._config import limits_of
from ddpwatch.cli._options import span
from ddpwatch.core.limits import DEFAULTS
from ddpwatch.errors import UsageError


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_file_the_limits_are_the_defaults(here):
    assert limits_of(None, ()) == DEFAULTS


def test_a_file_in_the_current_directory_counts(here):
    (here / "ddpwatch.toml").write_text("[straggler]\nshare = 0.03\n[comm-share]\nwindow-steps = 20\n")
    limits = limits_of(None, ())

    assert (limits.straggler.share, limits.comm_share.window_steps) == (0.03, 20)
    assert limits.straggler.sigmas == DEFAULTS.straggler.sigmas


def test_the_project_file_counts_only_without_a_file_of_our_own(here):
    (here / "pyproject.toml").write_text("[tool.ruff]\nx = 1\n[tool.ddpwatch.straggler]\nshare = 0.07\n")
    assert limits_of(None, ()).straggler.share == 0.07

    (here / "ddpwatch.toml").write_text("")
    assert limits_of(None, ()) == DEFAULTS


@pytest.mark.parametrize("text", ["", "[tool.ruff]\nx = 1\n", "tool = 3\n"])
def test_a_project_file_that_is_not_about_us_changes_nothing(here, text):
    (here / "pyproject.toml").write_text(text)

    assert limits_of(None, ()) == DEFAULTS


def test_a_named_file_replaces_the_search(here):
    (here / "ddpwatch.toml").write_text("[straggler]\nsigmas = 9.0\n")
    (here / "other.toml").write_text("[straggler]\nshare = 0.2\n")
    limits = limits_of("other.toml", ())

    assert (limits.straggler.share, limits.straggler.sigmas) == (0.2, DEFAULTS.straggler.sigmas)


def test_the_command_line_wins_over_the_file_and_the_last_wins(here):
    (here / "ddpwatch.toml").write_text("[straggler]\nshare = 0.03\nsigmas = 9.0\n")
    limits = limits_of(None, ["straggler.share=0.04", "straggler.share = 5e-2", "rank-lost.silent-s=9"])

    assert (limits.straggler.share, limits.straggler.sigmas, limits.rank_lost.silent_s) == (0.05, 9.0, 9.0)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("straggler.share=-1", "threshold straggler.share: must be a number greater than 0"),
        ("straggler.share=abc", "threshold straggler.share: 'abc' is not a number"),
        ("straggler.share='1'", "is not a number"),
        ("straggler.share=true", "is not a number"),
        ("straggler.share=", "threshold straggler.share: 'nothing' is not a number"),
        ("straggler.share=[1]", "is not a number"),
        ("straggler.share=1\nx = 2", "is not a number"),
        ("straggler.share=" + "[" * 10_000, "is not a number"),
        ("straggler.share=nan", "threshold straggler.share: nan is not a finite number"),
        ("straggler.share=inf", "threshold straggler.share: inf is not a finite number"),
        ("straggler.share=-inf", "threshold straggler.share: -inf is not a finite number"),
        ("straggler.window-steps=1.5", "threshold straggler.window-steps: must be a whole number"),
        ("straggler.window-steps=1" + "0" * 30, "threshold straggler.window-steps"),
        ("straggler.nosuch=1", "straggler has no threshold 'nosuch'; choose from: share, window-steps,"),
        ("straggler.shar=1", "straggler has no threshold 'shar'; did you mean share?"),
        ("stragler.share=1", "unknown rule 'stragler'; did you mean straggler?"),
        ("nosuch.share=1", "unknown rule 'nosuch'; choose from: "),
        ("straggler.share", "not of the form RULE.KEY=NUMBER"),
        ("share=1", "not of the form RULE.KEY=NUMBER"),
        (".share=1", "not of the form RULE.KEY=NUMBER"),
        ("a.b.c=1", "not of the form RULE.KEY=NUMBER"),
        ("", "not of the form RULE.KEY=NUMBER"),
    ],
)  # fmt: skip
def test_nonsense_on_the_command_line_is_refused_by_name(here, setting, words):
    with pytest.raises(UsageError) as refused:
        limits_of(None, ["comm-share.share=0.2", setting])

    assert str(refused.value).startswith(f"--limit {setting}: ")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[straggler]\nshare = -1", "threshold straggler.share: must be a number greater than 0"),
        ("[straggler]\nshare = nan", "threshold straggler.share: nan is not a finite number"),
        ("[straggler]\nshare = 'x'", "threshold straggler.share: must be a number, not text"),
        ("[straggler]\nnosuch = 1", "straggler has no threshold 'nosuch'"),
        ("[nosuch]\nshare = 1", "unknown rule 'nosuch'"),
        ("straggler = 3", "threshold straggler: must be a table of thresholds, not a whole number"),
        ("[straggler]\nshare = ", "not valid TOML: "),
        ("[straggler]\n\nshare 1", "line 3"),
    ],
)
def test_nonsense_in_a_file_is_refused_with_the_name_of_the_file(here, text, words):
    (here / "ddpwatch.toml").write_text(text)
    with pytest.raises(UsageError) as refused:
        limits_of(None, ())
    assert str(refused.value).startswith("ddpwatch.toml: ")
    assert words in str(refused.value)

    (here / "ddpwatch.toml").rename(here / "other.toml")
    with pytest.raises(UsageError, match=r"^--config other\.toml: "):
        limits_of("other.toml", ())


def test_nonsense_in_the_project_file_is_refused_with_its_section(here):
    (here / "pyproject.toml").write_text("[tool.ddpwatch.straggler]\nshare = 0\n")
    with pytest.raises(UsageError, match=r"^pyproject.toml \[tool.ddpwatch\]: threshold straggler.share: "):
        limits_of(None, ())

    (here / "pyproject.toml").write_text("[tool]\nddpwatch = 3\n")
    with pytest.raises(UsageError, match=r"^pyproject.toml: tool.ddpwatch is not a table$"):
        limits_of(None, ())


def test_a_file_that_cannot_be_read_is_reported_as_such(here):
    os.mkfifo(here / "pipe")
    (here / "latin").write_bytes(b"# \xe4\n")
    (here / "large").write_bytes(b"#" * (2 << 20))
    for name, words in {
        "missing": "No such file",
        ".": "not a regular file",
        "pipe": "not a regular file",
        "latin": "not in UTF-8",
        "large": "too large",
    }.items():
        with pytest.raises(UsageError, match=f"^--config {name}: .*{words}"):
            limits_of(name, ())


@pytest.mark.parametrize("command", ["status", "watch"])
def test_both_commands_refuse_nonsense_in_one_line(ddpwatch, command):
    done = ddpwatch(command, "--limit", "straggler.share=nan")

    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "ddpwatch: --limit straggler.share=nan: threshold straggler.share: nan is not a finite number\n"
    )


@pytest.mark.parametrize(
    ("text", "span_s"), [("60", 60), ("60s", 60), ("5m", 300), ("2h", 7200), ("0.5s", 0.5), (" 1.5m ", 90)]
)
def test_a_span_of_time_is_read_as_people_write_it(text, span_s):
    assert span(text) == span_s


@pytest.mark.parametrize("text", ["", "s", "m5", "5x", "-1", "0", "nan", "inf", "infs", "1e9h", "5 minutes"])
def test_what_is_no_span_of_time_is_refused(text):
    with pytest.raises(click.BadParameter, match="not a duration"):
        span(text)
