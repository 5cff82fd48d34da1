"""Runs on this host as rows of a list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpwatch.sources.runs import alive_ranks
from ddpwatch.view.runs import RunRow

if TYPE_CHECKING:
    from ddpwatch.rundir import RunFile


def row_of(run: RunFile, now_unix_s: float) -> RunRow:
    """One run, as it is now."""
    return RunRow(
        id=run.id,
        name=run.name,
        attempt=run.attempt,
        world_size=run.world_size,
        ranks_alive=len(alive_ranks(run)),
        host=min(run.endpoints, key=lambda endpoint: endpoint.rank).host,
        hosts=len({endpoint.host for endpoint in run.endpoints}),
        age_s=max(0.0, now_unix_s - run.started_unix_s),
        job=run.job,
    )
