"""One run from frame to alert: applies frames and ticks to the state and evaluates the rules when they are due."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rule_names as rules
from ddpwatch.core.alerts.hang_alerts import is_suspect
from ddpwatch.core.alerts.staleness import with_staleness
from ddpwatch.core.detectors.engine import RuleEngine
from ddpwatch.core.limits import DEFAULTS, EvaluationLimits, Limits
from ddpwatch.core.metrics.live_metrics import measure
from ddpwatch.wire import MANY_RANKS

MAX_SUSPECTS: Final = 8
"""Maximum number of ranks of one alert whose stacks are requested."""
ONSET_STEPS: Final = 10
"""A straggler is detected about this number of steps after it became slow."""

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.alerts.model import AlertBook
    from ddpwatch.core.alerts.recorded import RecordedAlerts
    from ddpwatch.core.metrics.live_metrics import Figures
    from ddpwatch.core.state.run import RunState


class Monitor:
    """State and alerts of a run, for every front end. Reads no clock: time arrives with frames and ticks."""

    def __init__(
        self, state: RunState, limits: Limits = DEFAULTS, engine: RuleEngine | RecordedAlerts | None = None
    ) -> None:
        """Evaluate with `limits`, or leave that to `engine`."""
        self.state = state
        self._engine = engine or RuleEngine(limits)
        self._staleness_due_ns = 0

    @property
    def limits(self) -> Limits:
        """Thresholds in use."""
        return self._engine.limits

    @property
    def book(self) -> AlertBook:
        """All alerts."""
        return self._engine.book

    def between_rules(self, between: Callable[[], None]) -> None:
        """Call `between` between rules: see `RuleEngine.between`."""
        if isinstance(self._engine, RuleEngine):
            self._engine.between = between

    @property
    def behind(self) -> bool:
        """Whether another tick at once would evaluate more."""
        return self._engine.behind

    @property
    def caught_up(self) -> bool:
        """Whether everything received before watching began has been evaluated."""
        return self._engine.caught_up

    @property
    def suspects(self) -> frozenset[int]:
        """Ranks that others wait for: their stacks should be requested."""
        findings = [alert.finding for alert in self.book.open.values() if is_suspect(alert.finding)]
        return frozenset(rank for finding in findings for rank in finding.ranks[:MAX_SUSPECTS])

    def figures(self, upto: int | None = None) -> Figures | None:
        """Figures over the last steps, or those up to `upto`; if a straggler was found, over the steps since its onset
        only, because longer medians would hide it.
        """
        alerts = self.book.open.values() if upto is None else self.book.at(upto)
        found = [alert.since.step for alert in alerts if alert.finding.rule == rules.STRAGGLER]
        began = [step - ONSET_STEPS for step in found if step is not None]
        return measure(self.state, upto, since=max(began, default=0))

    def ingest(self, payload: bytes | memoryview, now_ns: int) -> int | None:
        """Apply a frame. Returns the rank that it claims, or None."""
        rank = self.state.ingest(payload, now_ns)
        if self.state.now_ns >= self._engine.due_ns:
            self._evaluate()
        return rank

    def ingest_all(self, frames: Sequence[tuple[bytes | memoryview, int]]) -> list[int | None]:
        """Apply many frames, each with its time, in order. The rules are evaluated at the same times as for single
        frames.
        """
        ranks: list[int | None] = []
        done = 0
        while done < len(frames):
            due_ns = self._engine.due_ns
            upto = len(frames)
            if frames[-1][1] >= due_ns:
                upto = next((at + 1 for at in range(done, upto) if frames[at][1] >= due_ns), upto)
            ranks += self.state.ingest_all(frames[done:upto])
            done = upto
            if self.state.now_ns >= due_ns:
                self._evaluate()
        return ranks

    def tick(self, now_ns: int, viewer_stall_ns: int = 0) -> None:
        """Advance the time without a frame. For `viewer_stall_ns` up to now the viewer itself did not run."""
        self.state.tick(now_ns, viewer_stall_ns)
        self._evaluate(idle=True)

    def evaluate_now(self) -> None:
        """Evaluate everything received, whether or not it is due: before showing it, and at the end."""
        self._evaluate(last=True)

    def _evaluate(self, *, last: bool = False, idle: bool = False) -> None:
        """Evaluate the rules, then set the staleness of the open alerts."""
        state, book = self.state, self.book
        self._engine.evaluate(state, last=last, idle=idle)
        if not book.open or self.behind or not self._engine.derives_staleness:
            return
        if last or state.now_ns >= self._staleness_due_ns:
            many = state.world_size > MANY_RANKS
            interval_ns = EvaluationLimits.GRADUAL_NS if many else EvaluationLimits.INTERVAL_NS
            self._staleness_due_ns = state.now_ns + interval_ns
            book.open.update((alert.key, alert) for alert in with_staleness(state, self.limits, book.open.values()))
