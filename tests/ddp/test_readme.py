"""The code in the README and in docs/ works as it is."""

import re
from pathlib import Path

import torch

import ddpwatch.agent
from tests.builders.training import loader, make, snapshot, train_step

README = Path(__file__).parents[2] / "README.md"
DOCS = README.parent / "docs"


def snippets(page):
    """Blocks to run; those of other libraries, which are not installed here, are marked `py` instead."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def one_line(rank, world_size, *, snippet):
    """Train after the one line was run."""
    model, optimizer = make()
    exec(snippet, {"model": model})
    for batch, target in loader(world_size, rank, batches=5):
        train_step(model, optimizer, batch, target)
    return len(snapshot(ddpwatch.agent._current).steps)


def whole_agent(rank, world_size, *, snippet, path):
    """Run every call that the page of the API shows."""
    model, optimizer = make()
    names = {"model": model, "optimizer": optimizer, "torch": torch, "path": f"{path}-{rank}", "ddpwatch": ddpwatch}
    before, call, rest = snippet.partition("agent.close()")
    exec(before, names)
    snap = snapshot(names["agent"])
    exec(call + rest, names)
    return snap.hello.run_name, [note.kind for note in snap.notes], snap.steps[0].values, names["agent"].active


def every_snippet(rank, world_size, *, codes, path):
    """Run each snippet by itself; the names of those after which nothing was measured."""
    silent = []
    for name, code in codes:
        model, optimizer = make()
        names = {"model": model, "optimizer": optimizer, "torch": torch, "path": f"{path}-{rank}", "ddpwatch": ddpwatch}
        names["batches"] = loader(world_size, rank, batches=2)
        names["update_parameters"] = lambda model, batch, optimizer=optimizer: train_step(model, optimizer, *batch)
        exec(code, names)
        agent = ddpwatch.agent._current
        for batch, target in loader(world_size, rank, batches=2):
            train_step(model, optimizer, batch, target)
        if agent.active and not snapshot(agent).steps:
            silent.append(name)
        agent.close()
    return silent


def test_the_one_line_measures(pool):
    assert pool.run(one_line, 2, snippet=snippets(README)[0]) == [5, 5]


def test_every_snippet_of_the_pages_runs(pool, tmp_path):
    codes = [(page.name, code) for page in sorted(DOCS.glob("*.md")) for code in snippets(page)]

    assert len(codes) >= 5
    assert pool.run(every_snippet, 2, codes=codes, path=str(tmp_path / "model.pt")) == [[], []]


def test_the_agent_does_what_is_written(pool, tmp_path):
    answers = pool.run(whole_agent, 2, snippet=snippets(DOCS / "agent-api.md")[0], path=str(tmp_path / "model.pt"))

    assert answers == [("resnet50", ["pause", "resume"], {"loss": 0.25}, False)] * 2


def test_both_commands_stand_in_the_readme_and_in_the_makefile():
    makefile = (README.parent / "Makefile").read_text()

    for command in ("demo", "test"):
        assert f"make {command} " in README.read_text()
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE)
