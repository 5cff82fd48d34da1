"""A run and the judgement on it, fed by one road: frames and ticks in, state and alerts out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rules
from ddpwatch.core.alerts.hangs import is_suspect
from ddpwatch.core.alerts.staleness import with_staleness
from ddpwatch.core.detectors.engine import RuleEngine
from ddpwatch.core.limits import DEFAULTS, JudgeLimits, Limits
from ddpwatch.core.metrics.figures import measure
from ddpwatch.core.state.run import MANY_RANKS

MAX_SUSPECTS: Final = 8
ONSET_STEPS: Final = 10
"""A slow rank is found about so many steps after it has become slow."""

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.alerts.model import AlertBook
    from ddpwatch.core.alerts.recorded import RecordedAlerts
    from ddpwatch.core.metrics.figures import Figures
    from ddpwatch.core.state.run import RunState


class Monitor:
    """What every front end shows. Has no clock: time comes in with frames and ticks."""

    def __init__(
        self, state: RunState, limits: Limits = DEFAULTS, engine: RuleEngine | RecordedAlerts | None = None
    ) -> None:
        """Watch a run from what is known of it so far; judge it by `limits`, or have `engine` do it."""
        self.state = state
        self._engine = engine or RuleEngine(limits)
        self._staleness_due_ns = 0

    @property
    def limits(self) -> Limits:
        """What it is judged by."""
        return self._engine.limits

    @property
    def book(self) -> AlertBook:
        """The alerts."""
        return self._engine.book

    def between_rules(self, between: Callable[[], None]) -> None:
        """Call this between rules: see `RuleEngine.between`."""
        if isinstance(self._engine, RuleEngine):
            self._engine.between = between

    @property
    def behind(self) -> bool:
        """Whether more can be judged at once, by a tick."""
        return self._engine.behind

    @property
    def caught_up(self) -> bool:
        """Whether all that there was when watching began has been judged."""
        return self._engine.caught_up

    @property
    def suspects(self) -> frozenset[int]:
        """Ranks whose stack should be asked for: those that others wait for."""
        ranks: set[int] = set()
        for alert in self.book.open.values():
            if is_suspect(alert.finding):
                ranks.update(alert.finding.ranks[:MAX_SUSPECTS])
        return frozenset(ranks)

    def figures(self, upto: int | None = None) -> Figures | None:
        """The figures over the last steps, or those up to one. Where a rank has become slow meanwhile, over the steps
        since then: medians that reach further back would show it as fast as the others.
        """
        alerts = self.book.open.values() if upto is None else self.book.at(upto)
        found = [alert.since.step for alert in alerts if alert.finding.rule == rules.STRAGGLER]
        began = [step - ONSET_STEPS for step in found if step is not None]
        return measure(self.state, upto, since=max(began, default=0))

    def ingest(self, payload: bytes | memoryview, now_ns: int) -> int | None:
        """A frame has come. Returns the rank that it claims to be of; None = it claims none."""
        rank = self.state.ingest(payload, now_ns)
        if self.state.now_ns >= self._engine.due_ns:
            self._evaluate()
        return rank

    def ingest_all(self, reported: Sequence[tuple[bytes | memoryview, int]]) -> list[int | None]:
        """Many frames have come, each with its time, in order. Judged is at the very moments at which it would be, had
        they come one by one.
        """
        ranks: list[int | None] = []
        done = 0
        while done < len(reported):
            due_ns = self._engine.due_ns
            upto = len(reported)
            if reported[-1][1] >= due_ns:
                upto = next((at + 1 for at in range(done, upto) if reported[at][1] >= due_ns), upto)
            ranks += self.state.ingest_all(reported[done:upto])
            done = upto
            if self.state.now_ns >= due_ns:
                self._evaluate()
        return ranks

    def tick(self, now_ns: int, viewer_stall_ns: int = 0) -> None:
        """Time has passed, and nothing has come. For `viewer_stall_ns` up to now the viewer itself has not looked."""
        self.state.tick(now_ns, viewer_stall_ns)
        self._evaluate(idle=True)

    def evaluate_now(self) -> None:
        """Judge all that has come, without waiting until it is due: before a look, and at the end."""
        self._evaluate(last=True)

    def _evaluate(self, *, last: bool = False, idle: bool = False) -> None:
        """Ask the rules, then set the staleness of the open alerts."""
        state, book = self.state, self.book
        self._engine.evaluate(state, last=last, idle=idle)
        if not book.open or self.behind or not self._engine.derives_staleness:
            return
        if last or state.now_ns >= self._staleness_due_ns:
            interval_ns = JudgeLimits.EVALUATION_NS if state.world_size <= MANY_RANKS else JudgeLimits.GRADUAL_NS
            self._staleness_due_ns = state.now_ns + interval_ns
            book.open.update((alert.key, alert) for alert in with_staleness(state, self.limits, book.open.values()))
