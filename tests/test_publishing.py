"""Files that a host of repositories reads: workflows, templates, pre-commit, citation, changelog, completion."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ddpwatch.version import VERSION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PRE_COMMIT = ROOT / ".pre-commit-config.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKE = re.compile(r"\bmake ([a-z-]+(?: [a-z-]+)*)")
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)


def load(path):
    return yaml.safe_load(path.read_text())


def commands(node):
    """Every shell command of a workflow or a hook."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from [value] if key in {"run", "entry"} else commands(value)
    elif isinstance(node, list):
        for each in node:
            yield from commands(each)


@pytest.mark.parametrize(
    "path", [*GITHUB.rglob("*.yml"), PRE_COMMIT, ROOT / "CITATION.cff"], ids=lambda path: path.name
)
def test_yaml_parses(path):
    assert isinstance(load(path), dict)


@pytest.mark.parametrize("path", [*WORKFLOWS, PRE_COMMIT], ids=lambda path: path.name)
def test_only_make_targets_that_exist_are_called(path):
    called = {target for command in commands(load(path)) for words in MAKE.findall(command) for target in words.split()}

    assert called <= set(TARGET.findall((ROOT / "Makefile").read_text()))


def test_ci_and_pre_commit_run_what_contributors_run():
    ci = [*commands(load(ROOT / ".github" / "workflows" / "ci.yml"))]

    assert {"make check", "make test"} <= set(ci)
    assert [*commands(load(PRE_COMMIT))] == ["make check"]


def test_ci_tests_every_python_of_the_metadata_and_the_oldest_torch():
    matrix = load(GITHUB / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    (torch,) = PROJECT["optional-dependencies"]["torch"]

    assert set(versions) <= set(matrix["python"])
    assert PROJECT["requires-python"] == f">={matrix['python'][0]}"
    assert {"torch", torch.replace(">=", "==") + ".*"} == {each["torch"] for each in matrix["include"]}


def test_only_the_release_of_a_tag_may_ask_pypi_for_trust():
    release = load(GITHUB / "workflows" / "release.yml")
    publish = release["jobs"]["publish"]

    # PyYAML reads the key `on` as the boolean of YAML 1.1.
    assert release[True] == {"push": {"tags": ["v*"]}}
    assert release["permissions"] == {"contents": "read"}
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["needs"] == "ci"


def test_the_bug_template_asks_for_the_output_of_doctor():
    fields = load(GITHUB / "ISSUE_TEMPLATE" / "bug.yml")["body"]
    (doctor,) = (field for field in fields if "ddpwatch doctor" in field["attributes"].get("label", ""))

    assert doctor["validations"] == {"required": True}


def test_citation_and_changelog_name_the_version():
    assert load(ROOT / "CITATION.cff")["version"] == VERSION
    assert re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1] == VERSION


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_documented_completion_prints_a_script(shell):
    documented = (ROOT / "docs" / "shell-completion.md").read_text()
    (setting,) = set(re.findall(rf"_DDPWATCH_COMPLETE={shell}_source(?= ddpwatch)", documented))
    name, value = setting.split("=")
    command = [sys.executable, "-m", "ddpwatch"]
    done = subprocess.run(command, env={**os.environ, name: value}, capture_output=True, text=True, check=True)

    assert "_ddpwatch_completion" in done.stdout
