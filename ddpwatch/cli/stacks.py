"""`ddpwatch stacks`: print the Python stacks of the ranks."""

from __future__ import annotations

import json
import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

import click

from ddpwatch.cli._follow_run import find_run
from ddpwatch.cli._options import RUN_HELP, timeout_option
from ddpwatch.cli._terminal import say, show, terminal_size
from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ddpwatch.core.state.rank import RankState
    from ddpwatch.rundir import RunFile

MAX_ASKED: Final = 256
"""Max. number of ranks asked unless `--rank` names them."""


@click.command("stacks", epilog=RUN_HELP)
@click.argument("selector", metavar="[RUN]", required=False)
@click.option("--rank", "wanted", type=int, multiple=True, metavar="RANK", help="Only this rank; repeatable.")
@click.option("--all", "everything", is_flag=True, help="All threads, not only the training thread.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array with one object per rank.")
@timeout_option
def command(*, selector: str | None, wanted: Sequence[int], everything: bool, as_json: bool, timeout_s: float) -> None:
    """Print the Python stacks of the ranks, with ranks at the same place grouped. Training is not paused.

    In runs of more than 256 ranks only the first 256 are asked, unless --rank names others.
    """
    from ddpwatch.core.units import plural
    from ddpwatch.view.stacks import stacks_lines, stacks_object
    from ddpwatch.wire import ranges

    run = find_run(selector)
    known = sorted(endpoint.rank for endpoint in run.endpoints)
    for rank in wanted:
        if rank not in known:
            raise UsageError(f"no rank {rank} in this run; it has {plural(len(known), 'rank')}: {ranges(known)}")
    if not wanted and len(known) > MAX_ASKED:
        say(f"only the first {MAX_ASKED} of {len(known)} ranks are asked; name others with --rank")
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
