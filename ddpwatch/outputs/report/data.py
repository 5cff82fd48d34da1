"""All that a report tells, in one pass over an attempt. Of a fixed size, however long the run was."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final

from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.core.metrics.utilization import COLUMNS, Utilization
from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize
from ddpwatch.recording.alerts import alerts_at_worst, earlier_alerts
from ddpwatch.recording.database import lacks_wal
from ddpwatch.recording.health import damage_of
from ddpwatch.recording.schema import RecordedBy
from ddpwatch.recording.steps import StepReader, digest_of
from ddpwatch.view.alerts.format import most_urgent_first
from ddpwatch.view.verdict import before_it

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.core.alerts.model import Alert
    from ddpwatch.core.diagnosis.outcome import Outcome
    from ddpwatch.core.metrics.aggregate import Digest
    from ddpwatch.core.state.run import RunState
    from ddpwatch.recording.health import Damage
    from ddpwatch.recording.reader import Attempt, Recording

MAX_ALERTS: Final = 100
"""Alerts that are told in full, the most urgent ones."""
PROGRESS_UPDATES: Final = 4 * COLUMNS
"""How often it is looked how hard the machines worked: a few times for each column of a chart."""
SIMULATED: Final = "simulated"


@dataclass(frozen=True)
class Scaling:
    """How well the job scales against a run of one process."""

    lines: tuple[str, ...]
    """As sentences."""
    efficiency: float
    """Part of the ideal speed-up that was reached."""
    losses: tuple[tuple[str, float], ...]
    """Where the rest went, by name; negative = gained. Together `1 - efficiency`."""


@dataclass(frozen=True)
class Report:
    """What is known of one attempt."""

    file_name: str
    number: int
    attempts: int
    """This attempt, counted from 1, and how many the recording holds."""
    began_ns: int
    ended_ns: int
    """Unix time of its first and its last frame."""
    state: RunState
    """As it was at the end."""
    digest: Digest
    loads: Utilization
    alerts: tuple[Alert, ...] = ()
    """All of them as they were at their worst, the most urgent first."""
    before: tuple[str, ...] = ()
    """How attempts before this one ended, each as a sentence; those that ended badly, the latest first."""
    simulated: bool = False
    damage: Damage | None = None
    """What could not be read of the recording; None = nothing that is known of."""
    unclosed: bool = False
    """Whether its recorder did not close it, and the log with its newest part is not beside it."""
    skipped: int = 0
    """Steps that not all ranks had, or that held a pause, an evaluation or a skipped update."""
    implausible: tuple[int, ...] = ()
    """Ranks whose figures were left out somewhere because they cannot be true."""
    scaling: Scaling | None = None
    recorded_by: RecordedBy = field(default_factory=RecordedBy)
    """By which version it was recorded, and by which limits judged."""

    @cached_property
    def outcome(self) -> Outcome:
        """How it ended."""
        return outcome_of(self.state, self.alerts)

    @property
    def seconds(self) -> float:
        """How long was recorded."""
        return max(self.ended_ns - self.began_ns, 0) / 1e9


def gather(recorded: Recording, attempt: Attempt, progress: Callable[[int], None] | None = None) -> Report:
    """Read an attempt. `progress` is told, now and then, how many more frames are done."""
    loads, done = Utilization((attempt.last_ns - attempt.first_ns) // PROGRESS_UPDATES), 0

    def look(frames: int) -> None:
        nonlocal done
        done += frames
        loads.sample(readout.state)
        if progress is not None:
            progress(frames)

    readout = StepReader(recorded, attempt, look)
    digest, implausible = digest_of(readout.windows(), tuple(readout.state.ranks))
    look(max(readout.frames - done, 0))
    loads.sample(readout.state, last=True)
    found, before = alerts_at_worst(recorded, attempt, readout.state), _before(recorded, attempt)
    return Report(
        file_name=sanitize(recorded.path.name, NAME_CHARS),
        number=recorded.attempts.index(attempt) + 1,
        attempts=len(recorded.attempts),
        began_ns=attempt.first_ns,
        ended_ns=attempt.last_ns,
        state=readout.state,
        digest=digest,
        loads=loads,
        alerts=tuple(most_urgent_first(found)),
        before=before,
        simulated=is_simulated(readout.state, attempt),
        damage=damage_of(recorded, attempt),
        unclosed=lacks_wal(recorded.path),
        skipped=readout.skipped,
        implausible=implausible,
        recorded_by=attempt.recorded_by,
    )


def _before(recorded: Recording, attempt: Attempt) -> tuple[str, ...]:
    def other(number: int) -> str:
        run = recorded.attempts[number - 1].run
        return "" if run.name == attempt.run.name else run.name or run.id

    reported = sorted(earlier_alerts(recorded, attempt).items(), reverse=True)
    return tuple(filter(None, (before_it(number, alerts, other(number)) for number, alerts in reported)))


def is_simulated(state: RunState, attempt: Attempt) -> bool:
    """Whether nothing of it was measured."""
    return attempt.run.job == SIMULATED or any(
        rank.hello is not None and rank.hello.agent_version == SIMULATED for rank in state.ranks.values()
    )
