"""Asks every rule when it is due, and keeps the book.

Rules that go by steps are asked each time all ranks have done some more of them, about the steps up to there and no
others: so neither the order in which ranks are heard nor the pace of the viewer changes what they find.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core.alerts.model import AlertBook, Moment
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.detectors.context import DetectorContext
from ddpwatch.core.detectors.log_findings import without_duplicates
from ddpwatch.core.limits import DEFAULTS, BaselineLimits, JudgeLimits, Limits, WindowLimits
from ddpwatch.core.metrics.baseline import History
from ddpwatch.core.metrics.window import WINDOW_STEPS, compared_ranks, gather, scaled_steps
from ddpwatch.core.state.run import MANY_RANKS
from ddpwatch.core.state.step_store import TIMES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.detectors.context import Detector
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState

AT_ONCE: Final = 4
"""Judgements that are made without a break: a whole history is judged in portions, so that nobody waits for it."""
RULE_COLUMNS: Final = (*TIMES, "fingerprint", "comm_bytes")
"""Columns that a rule which goes by steps may look at; one that goes by time has the first of them."""
BY_STEP: Final = [detector for detector in DETECTORS if detector.by_step]
BY_TIME: Final = [detector for detector in DETECTORS if not detector.by_step]


class RuleEngine:
    """One for each run that is watched."""

    derives_staleness = True
    """Whether the staleness of alerts has to be evaluated: nothing is recorded of it."""

    def __init__(self, limits: Limits = DEFAULTS) -> None:
        """Begin with an empty book."""
        self.limits = limits
        self.book = AlertBook()
        self.history = History()
        self._next_step = limits.judge.warmup_steps + WindowLimits.MIN_STEPS
        self._next_block = limits.judge.warmup_steps + BaselineLimits.BLOCK_STEPS
        self.behind = False
        """Whether there are steps that could be judged, and have not been for want of time."""
        self.caught_up = False
        """Whether there was a moment when there were none: before that alerts are of steps long past."""
        self.due_ns = 0
        """Before this nothing has to be considered, as long as frames come."""
        self._gradual_due_ns = 0
        self._rule_steps = JudgeLimits.MAX_STEPS
        self._stride = limits.judge.stride_steps
        self.between: Callable[[], None] = _nothing
        """Called between rules, and before steps are gathered for them: of thousands of ranks that takes a while, and
        something else may be more urgent.
        """

    def evaluate(self, state: RunState, *, last: bool = False, idle: bool = False) -> None:
        """Judge what has become due. `last` = no more will come, so nothing is put off. `idle` = nothing has come just
        now, so there is time for what had to wait: as long as frames come, they go first.
        """
        if not last and state.now_ns < self.due_ns and not (idle and self.behind):
            return
        self.due_ns = state.now_ns + (
            JudgeLimits.EVALUATION_NS if state.world_size <= MANY_RANKS else JudgeLimits.MANY_RANKS_EVALUATION_NS
        )
        if not last and _still_arriving(state):
            return
        lineup = compared_ranks(state)
        ranks = lineup.compared
        front = min((rank.steps.newest for rank in ranks), default=-1)
        # After a gap that no ring bridges: what was between cannot be judged any more.
        oldest = front - state.kept_steps + WINDOW_STEPS
        self._next_step += max(0, -((self._next_step - oldest) // self._stride)) * self._stride
        portion = AT_ONCE if state.world_size <= MANY_RANKS else 1
        while self._next_step <= front and (last or portion):
            self._evaluate_steps(state, ranks, self._next_step)
            self._next_step += self._stride
            portion -= 1
        self.behind = self._next_step <= front
        if self.behind:
            return
        self.caught_up = True
        self.between()
        latest = self._latest(state, ranks, front)
        context = DetectorContext(state, latest, self.history, self.limits, lineup.out_of_step)
        gradual = last or state.world_size <= MANY_RANKS or state.now_ns >= self._gradual_due_ns
        if gradual:
            self._gradual_due_ns = state.now_ns + JudgeLimits.GRADUAL_NS
        now = _now(state, front)
        self._ask(context, now, [rule for rule in BY_TIME if gradual or not rule.gradual])
        if self.book.open and state.run_condition() == "ended":
            self.book.at_end(state, now)

    def _latest(self, state: RunState, ranks: Sequence[RankState], front: int) -> Window:
        """What rules that go by time may look at: few steps, because they are asked often."""
        steps = max(WindowLimits.MIN_STEPS, self.limits.uneven_batch.window_steps)
        return gather(state, ranks, upto=front, steps=steps, first=self.limits.judge.warmup_steps, columns=TIMES)

    def _evaluate_steps(self, state: RunState, ranks: Sequence[RankState], upto: int) -> None:
        self.between()
        window = self._window(state, ranks, upto)
        if len(window) < WindowLimits.MIN_STEPS:
            return
        self._next_block += (
            max(0, (upto - state.kept_steps - self._next_block) // BaselineLimits.BLOCK_STEPS)
            * BaselineLimits.BLOCK_STEPS
        )
        while self._next_block <= upto:
            # Of the block before: it must not be compared with itself.
            self.between()
            self._remember(state, ranks, self._next_block - BaselineLimits.BLOCK_STEPS)
            self._next_block += BaselineLimits.BLOCK_STEPS
        context = DetectorContext(state, window, self.history, self.limits)
        self._ask(context, self._moment(state, ranks, upto), BY_STEP)
        # Of short steps more are looked at, and less often: a hiccup of a moment spans many of them. By the steps
        # just judged and not by those that have come since, so that the viewer's pace changes nothing; and always by as
        # many: how many are looked at must not depend on how many were.
        baseline_ns = window.last(JudgeLimits.MAX_STEPS).median_step_ns
        self._rule_steps, self._stride = evaluation_steps(state.world_size, self.limits.judge, baseline_ns)

    def _remember(self, state: RunState, ranks: Sequence[RankState], upto: int) -> None:
        first = upto - BaselineLimits.BLOCK_STEPS + 1
        if first < self.limits.judge.warmup_steps:
            return
        block = gather(state, ranks, upto=upto, steps=BaselineLimits.BLOCK_STEPS, first=first, columns=RULE_COLUMNS)
        if len(block) >= WindowLimits.MIN_STEPS:
            self.history.add(block)

    def _window(self, state: RunState, ranks: Sequence[RankState], upto: int) -> Window:
        first = self.limits.judge.warmup_steps
        return gather(state, ranks, upto=upto, steps=self._rule_steps, first=first, columns=RULE_COLUMNS)

    def _ask(self, context: DetectorContext, at: Moment, asked: Sequence[Detector]) -> None:
        found = {}
        for detector in asked:
            self.between()
            found[detector.rule] = detector.find(context)
        found = without_duplicates(found)
        for detector in asked:
            close_delay = detector.close_delay(self.limits)
            self.book.update(detector.rule, found[detector.rule], at, close_delay=close_delay, by_step=detector.by_step)
        self.book.hand_over(at)

    @staticmethod
    def _moment(state: RunState, ranks: Sequence[RankState], step: int) -> Moment:
        """When the step ended, by the clock of the first rank that can tell; else now."""
        for rank in ranks:
            unix_ns = rank.unix_ns_of_step(step)
            if unix_ns:
                return Moment(step, state.now_ns, unix_ns)
        return _now(state, step)


def evaluation_steps(world_size: int, limits: JudgeLimits, step_ns: float) -> tuple[int, int]:
    """How many steps of this length are looked at, and after how many more it is looked again."""
    rule_steps = scaled_steps(JudgeLimits.MAX_STEPS, limits.least_s, step_ns)
    stride = limits.stride_steps * rule_steps // JudgeLimits.MAX_STEPS
    if world_size > MANY_RANKS:
        strides = round(JudgeLimits.STRIDE_NS_PER_RANK * world_size / max(stride * step_ns, 1.0))
        stride *= min(max(strides, 1), JudgeLimits.MAX_STRIDES)
    return rule_steps, stride


def _nothing() -> None:
    """Nobody is in a hurry."""


def _now(state: RunState, step: int) -> Moment:
    """This moment: in a hang the last step is long ago."""
    return Moment(step if step >= 0 else None, state.now_ns, state.unix_ns)


def _still_arriving(state: RunState) -> bool:
    """Whether ranks are just being heard, one after another: judged now, the first would be judged alone."""
    if state.first_ns is None or state.now_ns - state.first_ns >= JudgeLimits.START_DELAY_NS:
        return False
    return any(rank.hello is None for rank in state.ranks.values())
