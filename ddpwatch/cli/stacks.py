"""`ddpwatch stacks`: print the Python stack of every rank."""

from __future__ import annotations

import json
import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

import click

from ddpwatch.cli._follow_run import find_run
from ddpwatch.cli._options import seconds
from ddpwatch.cli._terminal import show, terminal_size
from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.rundir import RunFile

MAX_ASKED: Final = 256
"""Max. number of ranks asked unless `--rank` names them."""


@click.command("stacks")
@click.argument("selector", metavar="[RUN]", required=False)
@click.option("--rank", "wanted", type=int, multiple=True, metavar="RANK", help="Only this rank; repeatable.")
@click.option("--all", "everything", is_flag=True, help="All threads, not only the one that trains.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, one object a rank.")
@click.option("--timeout", "timeout_s", type=seconds, default=3.0, show_default=True, help="Longest wait for answers.")
def command(*, selector: str | None, wanted: Sequence[int], everything: bool, as_json: bool, timeout_s: float) -> None:
    """Print the Python stack of every rank; ranks that are at the same place are shown together.

    Nothing is stopped for it. RUN is as in `ddpwatch status`. Without --rank the first 256 ranks are asked.
    """
    from ddpwatch.view.stacks import stacks_lines, stacks_object

    run = find_run(selector)
    known = sorted(endpoint.rank for endpoint in run.endpoints)
    for rank in wanted:
        if rank not in known:
            raise UsageError(f"no rank {rank} in this run; it has {len(known)}, from {known[0]} to {known[-1]}")
    ranks = _ask(run, sorted(set(wanted)) or known[:MAX_ASKED], everything=everything, timeout_s=timeout_s)
    if as_json:
        click.echo(json.dumps(stacks_object(ranks), indent=2))
    else:
        show(stacks_lines(ranks, terminal_size()[0]))


def _ask(run: RunFile, wanted: Sequence[int], *, everything: bool, timeout_s: float) -> list[RankState]:
    """Request the stacks of these ranks, and return the ranks with those that came in time."""
    from ddpwatch.core.state.run import RunState
    from ddpwatch.sources.frames import Frame
    from ddpwatch.sources.live import Live

    state = RunState(run.id, run.name, run.world_size)
    asked = [state.ranks[rank] for rank in wanted]
    deadline_s = time.monotonic() + timeout_s
    with closing(Live(run)) as live:
        live.want_stacks(frozenset(wanted), everything=everything)
        while time.monotonic() < deadline_s and not all(rank.stack for rank in asked):
            item = live.poll(50)
            if isinstance(item, Frame):
                state.ingest(item.payload, item.received_ns)
    return asked
