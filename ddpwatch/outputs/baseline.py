"""The run of one process that others are measured against, read from its recording."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from ddpwatch.core.numbers import plural
from ddpwatch.core.overall import profile_of_digest
from ddpwatch.errors import UsageError
from ddpwatch.outputs.readout import Readout, digest_of
from ddpwatch.sources.recorded import Recorded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ddpwatch.core.scaling import Profile


class NoBaseline(UsageError):
    """A recording cannot be measured against."""


def read_baseline(path: Path, progress: Callable[[int], None] | None = None) -> Profile:
    """The last attempt in the recording that has steps. Refuses a run of several ranks, and one without steps."""
    with closing(Recorded(path)) as recorded:
        sizes = {attempt.run.world_size for attempt in recorded.attempts}
        if sizes != {1}:
            raise NoBaseline(
                f"{path} is a run of {plural(max(sizes), 'rank')}: a baseline is the recording of the same training "
                "in one process"
            )
        for attempt in reversed(recorded.attempts):
            readout = Readout(recorded, attempt, progress)
            profile = profile_of_digest(digest_of(readout.windows(), tuple(readout.state.ranks))[0])
            if profile is not None:
                return profile
    raise NoBaseline(f"{path} has no finished step: a baseline needs some")
