"""Evaluates every rule when it is due, and updates the alert book.

Rules by step are evaluated at fixed steps that all ranks have finished, with the steps up to there and no others: so
neither the order of arrival nor the viewer's speed changes what they find.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core.alerts.model import AlertBook, Moment
from ddpwatch.core.detectors import DETECTORS
from ddpwatch.core.detectors.context import DetectorContext
from ddpwatch.core.detectors.log_findings import without_duplicates
from ddpwatch.core.limits import DEFAULTS, BaselineLimits, EvaluationLimits, Limits, WindowLimits
from ddpwatch.core.metrics.baseline import History
from ddpwatch.core.metrics.window import PAUSE_COLUMNS, WINDOW_STEPS, compared_ranks, gather, scaled_steps
from ddpwatch.core.state.step_store import TIMES
from ddpwatch.wire import MANY_RANKS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.detectors.context import Detector
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.rank import RankState
    from ddpwatch.core.state.run import RunState

AT_ONCE: Final = 4
"""Evaluations of steps in one call: a whole history is evaluated in portions, so that nothing waits for it."""
RULE_COLUMNS: Final = (*TIMES, "fingerprint", "comm_bytes", "input_elements", *PAUSE_COLUMNS)
"""Columns of steps that rules by step may read; rules by time have `TIMES`."""
BY_STEP: Final = [detector for detector in DETECTORS if detector.by_step]
BY_TIME: Final = [detector for detector in DETECTORS if not detector.by_step]
BLOCK: Final = BaselineLimits.BLOCK_STEPS


def _nothing() -> None:
    # Not a lambda: engines are pickled.
    pass


class RuleEngine:
    """Schedule and alert book of one run."""

    derives_staleness = True
    """Whether the staleness of alerts has to be evaluated: nothing is recorded of it."""

    def __init__(self, limits: Limits = DEFAULTS) -> None:
        """Begin with an empty book."""
        self.limits = limits
        self.book = AlertBook()
        self.history = History()
        self._warmup = limits.judge.warmup_steps
        self._next_step = self._warmup + WindowLimits.MIN_STEPS
        self._next_block = self._warmup + BLOCK
        self.behind = False
        """Whether steps are due that were put off to the next call."""
        self.caught_up = False
        """Whether no step was due at some moment: before that, alerts are about steps long past."""
        self.due_ns = 0
        """Next evaluation, by the viewer's clock, as long as frames arrive."""
        self._gradual_due_ns = 0
        self._rule_steps = EvaluationLimits.MAX_STEPS
        self._stride = limits.judge.stride_steps
        self.between: Callable[[], None] = _nothing
        """Called between rules and before steps are gathered: with thousands of ranks both take a while, and something
        else may be more urgent.
        """

    def evaluate(self, state: RunState, *, last: bool = False, idle: bool = False) -> None:
        """Evaluate what is due. `last` = nothing more will arrive, so nothing is put off. `idle` = no frame has just
        arrived, so there is time for what was put off.
        """
        if not last and state.now_ns < self.due_ns and not (idle and self.behind):
            return
        many = state.world_size > MANY_RANKS
        self.due_ns = state.now_ns + (EvaluationLimits.MANY_RANKS_INTERVAL_NS if many else EvaluationLimits.INTERVAL_NS)
        if not last and _still_arriving(state):
            return
        lineup = compared_ranks(state)
        ranks = lineup.compared
        front = min((rank.steps.newest for rank in ranks), default=-1)
        # Steps that have left the ring, after a gap, cannot be evaluated.
        oldest = front - state.kept_steps + WINDOW_STEPS
        self._next_step += max(0, -((self._next_step - oldest) // self._stride)) * self._stride
        portion = 1 if many else AT_ONCE
        while self._next_step <= front and (last or portion):
            self._evaluate_steps(state, ranks, self._next_step)
            self._next_step += self._stride
            portion -= 1
        self.behind = self._next_step <= front
        if self.behind:
            return
        self.caught_up = True
        self.between()
        # Few steps, because rules by time are evaluated often.
        steps = max(WindowLimits.MIN_STEPS, self.limits.uneven_batch.window_steps)
        latest = gather(state, ranks, upto=front, steps=steps, first=self._warmup, columns=TIMES)
        context = DetectorContext(state, latest, self.history, self.limits, lineup.out_of_step)
        gradual = last or not many or state.now_ns >= self._gradual_due_ns
        if gradual:
            self._gradual_due_ns = state.now_ns + EvaluationLimits.GRADUAL_NS
        now = _now(state, front)
        self._apply(context, now, [rule for rule in BY_TIME if gradual or not rule.gradual])
        if self.book.open and state.run_condition() == "ended":
            self.book.at_end(state, now)

    def _evaluate_steps(self, state: RunState, ranks: Sequence[RankState], upto: int) -> None:
        self.between()
        window = self._gather(state, ranks, upto, self._rule_steps, self._warmup)
        if len(window) < WindowLimits.MIN_STEPS:
            return
        self._next_block += max(0, (upto - state.kept_steps - self._next_block) // BLOCK) * BLOCK
        while self._next_block <= upto:
            self.between()
            # The block before the latest: steps must not be compared with themselves.
            self._add_to_history(state, ranks, self._next_block - BLOCK)
            self._next_block += BLOCK
        self._apply(DetectorContext(state, window, self.history, self.limits), _moment(state, ranks, upto), BY_STEP)
        # Short steps: larger windows, less often, because one hiccup spans many of them. Derived from a fixed number of
        # the steps just evaluated, so that neither the viewer's speed nor the previous window size has an influence.
        step_ns = window.last(EvaluationLimits.MAX_STEPS).median_step_ns
        self._rule_steps, self._stride = evaluation_steps(state.world_size, self.limits.judge, step_ns)

    def _add_to_history(self, state: RunState, ranks: Sequence[RankState], upto: int) -> None:
        first = upto - BLOCK + 1
        if first >= self._warmup:
            block = self._gather(state, ranks, upto, BLOCK, first)
            if len(block) >= WindowLimits.MIN_STEPS:
                self.history.add(block)

    @staticmethod
    def _gather(state: RunState, ranks: Sequence[RankState], upto: int, steps: int, first: int) -> Window:
        return gather(state, ranks, upto=upto, steps=steps, first=first, columns=RULE_COLUMNS)

    def _apply(self, context: DetectorContext, at: Moment, detectors: Sequence[Detector]) -> None:
        """Evaluate these rules, and update the book with what they find."""
        found = {}
        for detector in detectors:
            self.between()
            found[detector.rule] = detector.find(context)
        found = without_duplicates(found)
        for detector in detectors:
            close_delay = detector.close_delay(self.limits)
            self.book.update(detector.rule, found[detector.rule], at, close_delay=close_delay, by_step=detector.by_step)
        self.book.hand_over(at)


def evaluation_steps(world_size: int, limits: EvaluationLimits, step_ns: float) -> tuple[int, int]:
    """Window size, and steps between evaluations, for steps of this length."""
    rule_steps = scaled_steps(EvaluationLimits.MAX_STEPS, limits.least_s, step_ns)
    stride = limits.stride_steps * rule_steps // EvaluationLimits.MAX_STEPS
    if world_size > MANY_RANKS:
        strides = round(EvaluationLimits.STRIDE_NS_PER_RANK * world_size / max(stride * step_ns, 1.0))
        stride *= min(max(strides, 1), EvaluationLimits.MAX_STRIDES)
    return rule_steps, stride


def _moment(state: RunState, ranks: Sequence[RankState], step: int) -> Moment:
    """When the step ended, by the clock of the first rank that knows it; else now."""
    for rank in ranks:
        if unix_ns := rank.unix_ns_of_step(step):
            return Moment(step, state.now_ns, unix_ns)
    return _now(state, step)


def _now(state: RunState, step: int) -> Moment:
    """This moment: in a hang the last step is long ago."""
    return Moment(step if step >= 0 else None, state.now_ns, state.unix_ns)


def _still_arriving(state: RunState) -> bool:
    """Whether the first hellos are still arriving: the first ranks would be compared without the others."""
    if state.first_ns is None or state.now_ns - state.first_ns >= EvaluationLimits.START_DELAY_NS:
        return False
    return any(rank.hello is None for rank in state.ranks.values())
