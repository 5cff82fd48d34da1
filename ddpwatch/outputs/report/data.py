"""Data of a report, gathered in one pass over an attempt; its size does not grow with the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

from ddpwatch.core.alerts.severity import most_urgent_first
from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.core.metrics.aggregate import RunAggregate
from ddpwatch.core.metrics.utilization import COLUMNS, Utilization
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.recording.alerts import alerts_at_worst, earlier_alerts
from ddpwatch.recording.damage_report import damage_of
from ddpwatch.recording.schema import RecordedBy
from ddpwatch.recording.sqlite_open import lacks_wal
from ddpwatch.recording.steps import StepReader
from ddpwatch.view.verdict import before_it

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.core.diagnosis.outcome import Outcome
    from ddpwatch.core.state.run import RunState
    from ddpwatch.recording.damage_report import Damage
    from ddpwatch.recording.reader import Attempt, Recording

UTILIZATION_SAMPLES: Final = 4 * COLUMNS
"""Number of utilization samples of an attempt: a few for each column of a chart."""
SIMULATED: Final = "simulated"


@dataclass(frozen=True)
class Scaling:
    """Scaling efficiency against a run of one process."""

    lines: tuple[str, ...]
    """Sentences."""
    efficiency: float
    """Fraction of the ideal speedup that was reached."""
    losses: tuple[tuple[str, float], ...]
    """Name and fraction of each loss, negative for a gain; they add up to `1 - efficiency`."""


@dataclass(frozen=True)
class Report:
    """Data of one attempt."""

    file_name: str
    number: int
    """Number of the attempt, counted from 1."""
    attempts: int
    """Number of attempts in the recording."""
    began_ns: int
    """Unix time of its first frame."""
    ended_ns: int
    """Unix time of its last frame."""
    state: RunState
    """State at the end."""
    aggregate: RunAggregate
    utilization: Utilization
    alerts: tuple[Alert, ...] = ()
    """All alerts at their worst severity, the most urgent first."""
    earlier_bad_ends: tuple[str, ...] = ()
    """A sentence for each earlier attempt that ended badly, the latest first."""
    simulated: bool = False
    damage: Damage | None = None
    """What could not be read of the recording; None if no damage was found."""
    unclosed: bool = False
    """Whether its recorder did not close it, and SQLite's log with its newest part is missing."""
    skipped: int = 0
    """Steps left out: not all ranks had them, or they held a pause, an evaluation or a skipped update."""
    implausible: tuple[int, ...] = ()
    """Ranks with implausible figures, which were left out."""
    scaling: Scaling | None = None
    recorded_by: RecordedBy = field(default_factory=RecordedBy)
    """Version and thresholds of the recorder."""

    @cached_property
    def outcome(self) -> Outcome:
        """How the attempt ended."""
        return outcome_of(self.state, self.alerts)

    @property
    def seconds(self) -> float:
        """Duration of the recording."""
        return max(self.ended_ns - self.began_ns, 0) / 1e9


def gather(recorded: Recording, attempt: Attempt, progress: Callable[[int], None] | None = None) -> Report:
    """Read an attempt; `progress` is called with the number of further frames read."""
    utilization, done = Utilization((attempt.last_ns - attempt.first_ns) // UTILIZATION_SAMPLES), 0

    def sample(frames: int) -> None:
        nonlocal done
        done += frames
        utilization.sample(reader.state)
        if progress is not None:
            progress(frames)

    reader = StepReader(recorded, attempt, sample)
    aggregate = RunAggregate.of_run(reader.windows(), tuple(reader.state.ranks))
    sample(max(reader.frames - done, 0))
    utilization.sample(reader.state, last=True)
    return Report(
        file_name=sanitize(recorded.path.name, NAME_CHARS),
        number=recorded.attempts.index(attempt) + 1,
        attempts=len(recorded.attempts),
        began_ns=attempt.first_ns,
        ended_ns=attempt.last_ns,
        state=reader.state,
        aggregate=aggregate,
        utilization=utilization,
        alerts=tuple(most_urgent_first(alerts_at_worst(recorded, attempt, reader.state))),
        earlier_bad_ends=_earlier_bad_ends(recorded, attempt),
        simulated=_is_simulated(reader.state, attempt),
        damage=damage_of(recorded, attempt),
        unclosed=lacks_wal(recorded.path),
        skipped=reader.skipped,
        implausible=tuple(sorted(aggregate.implausible)),
        recorded_by=attempt.recorded_by,
    )


def _earlier_bad_ends(recorded: Recording, attempt: Attempt) -> tuple[str, ...]:
    def other(number: int) -> str:
        """Name of the run, if it differs."""
        run = recorded.attempts[number - 1].run
        return "" if run.name == attempt.run.name else run.name or run.id

    reported = sorted(earlier_alerts(recorded, attempt).items(), reverse=True)
    return tuple(filter(None, (before_it(number, alerts, other(number)) for number, alerts in reported)))


def _is_simulated(state: RunState, attempt: Attempt) -> bool:
    return attempt.run.job == SIMULATED or any(
        rank.hello is not None and rank.hello.agent_version == SIMULATED for rank in state.ranks.values()
    )
