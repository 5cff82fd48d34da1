"""A run and the judgement on it, fed by one road: frames and ticks in, state and alerts out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core import rules
from ddpwatch.core.alerts.hangs import is_suspect
from ddpwatch.core.alerts.staleness import with_staleness
from ddpwatch.core.detectors.engine import EVERY_NS, GRADUAL_NS, Judge
from ddpwatch.core.limits import DEFAULTS, Limits
from ddpwatch.core.metrics.figures import measure
from ddpwatch.core.state.run import MANY_RANKS

MOST_SUSPECTS: Final = 8
ONSET_STEPS: Final = 10
"""A slow rank is found about so many steps after it has become slow."""

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.alerts.model import AlertBook
    from ddpwatch.core.alerts.recorded import Recalled
    from ddpwatch.core.metrics.figures import Figures
    from ddpwatch.core.state.run import RunState


class Watch:
    """What every front end shows. Has no clock: time comes in with frames and ticks."""

    def __init__(self, state: RunState, limits: Limits = DEFAULTS, judge: Judge | Recalled | None = None) -> None:
        """Watch a run from what is known of it so far; judge it by `limits`, or have `judge` do it."""
        self.state = state
        self._judge = judge or Judge(limits)
        self._staleness_due_ns = 0

    @property
    def limits(self) -> Limits:
        """What it is judged by."""
        return self._judge.limits

    @property
    def book(self) -> AlertBook:
        """The alerts."""
        return self._judge.book

    def between_rules(self, between: Callable[[], None]) -> None:
        """Call this between rules: see `Judge.between`."""
        if isinstance(self._judge, Judge):
            self._judge.between = between

    @property
    def behind(self) -> bool:
        """Whether more can be judged at once, by a tick."""
        return self._judge.behind

    @property
    def caught_up(self) -> bool:
        """Whether all that there was when watching began has been judged."""
        return self._judge.caught_up

    @property
    def suspects(self) -> frozenset[int]:
        """Ranks whose stack should be asked for: those that others wait for."""
        ranks: set[int] = set()
        for alert in self.book.open.values():
            if is_suspect(alert.finding):
                ranks.update(alert.finding.ranks[:MOST_SUSPECTS])
        return frozenset(ranks)

    def figures(self, upto: int | None = None) -> Figures | None:
        """The figures over the last steps, or those up to one. Where a rank has become slow meanwhile, over the steps
        since then: medians that reach further back would show it as fast as the others.
        """
        alerts = self.book.open.values() if upto is None else self.book.at(upto)
        found = [alert.since.step for alert in alerts if alert.finding.rule == rules.STRAGGLER]
        began = [step - ONSET_STEPS for step in found if step is not None]
        return measure(self.state, upto, since=max(began, default=0))

    def take(self, payload: bytes | memoryview, now_ns: int) -> int | None:
        """A frame has come. Returns the rank that it claims to be of; None = it claims none."""
        rank = self.state.take(payload, now_ns)
        if self.state.now_ns >= self._judge.due_ns:
            self._evaluate()
        return rank

    def take_all(self, told: Sequence[tuple[bytes | memoryview, int]]) -> list[int | None]:
        """Many frames have come, each with its time, in order. Judged is at the very moments at which it would be, had
        they come one by one.
        """
        ranks: list[int | None] = []
        done = 0
        while done < len(told):
            due_ns = self._judge.due_ns
            upto = len(told)
            if told[-1][1] >= due_ns:
                upto = next((at + 1 for at in range(done, upto) if told[at][1] >= due_ns), upto)
            ranks += self.state.take_all(told[done:upto])
            done = upto
            if self.state.now_ns >= due_ns:
                self._evaluate()
        return ranks

    def tick(self, now_ns: int, held_up_ns: int = 0) -> None:
        """Time has passed, and nothing has come. For `held_up_ns` up to now the viewer itself has not looked."""
        self.state.tick(now_ns, held_up_ns)
        self._evaluate(idle=True)

    def judge_now(self) -> None:
        """Judge all that has come, without waiting until it is due: before a look, and at the end."""
        self._evaluate(last=True)

    def _evaluate(self, *, last: bool = False, idle: bool = False) -> None:
        """Ask the rules, then set the staleness of the open alerts."""
        state, book = self.state, self.book
        self._judge.consider(state, last=last, idle=idle)
        if not book.open or self.behind or not self._judge.derives_staleness:
            return
        if last or state.now_ns >= self._staleness_due_ns:
            self._staleness_due_ns = state.now_ns + (EVERY_NS if state.world_size <= MANY_RANKS else GRADUAL_NS)
            book.open.update((alert.key, alert) for alert in with_staleness(state, self.limits, book.open.values()))
