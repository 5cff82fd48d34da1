"""What a rule is given to judge by.

What a rule is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from ddpwatch.core.diagnosis.arrivals import stuck, sync_points
from ddpwatch.core.diagnosis.early_exit import LeftBehind, left_behind
from ddpwatch.core.diagnosis.exits import Endings, endings
from ddpwatch.core.diagnosis.mismatch import OpMismatch, mismatch_at_end
from ddpwatch.core.diagnosis.timeouts import GivingUp, giving_up
from ddpwatch.core.limits import BaselineLimits, StallLimits
from ddpwatch.core.metrics.baseline import block_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.core.alerts.model import Finding
    from ddpwatch.core.diagnosis.arrivals import SyncPoint
    from ddpwatch.core.limits import Limits, TimeoutLimits
    from ddpwatch.core.metrics.baseline import Block, History
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.run import Condition, RunState

GOING_ON: Final[frozenset[Condition]] = frozenset({"ok", "paused"})


@dataclass(frozen=True)
class DetectorContext:
    """The run at one moment. Rules read it and change nothing."""

    state: RunState
    window: Window
    """The latest aligned steps up to the judged one, warming up excluded; may be empty for rules that go by time."""
    history: History
    """Blocks before those in the window."""
    limits: Limits
    out_of_step: tuple[int, ...] = ()
    """Ranks that cannot be compared with the others now; told to rules that go by time only."""

    @cached_property
    def latest_block(self) -> Block | None:
        """The latest steps as one block, to be held against those of the history; None = there are too few. More than
        one rule asks.
        """
        window = self.window.last(BaselineLimits.BLOCK_STEPS)
        return block_of(window) if len(window) >= BaselineLimits.MIN_STEPS else None

    @cached_property
    def sync_points(self) -> list[SyncPoint]:
        """Groups in which ranks wait, if any of them does for longer than a moment."""
        return sync_points(self.state, 1e9 * min(StallLimits.MIN_WAIT_S, self.limits.stall.least_s))

    @cached_property
    def timeout_in_ns(self) -> int | None:
        """Until the first timeout of a group ends the job, if nothing moves; None = not known. May be negative."""
        left = [sync_point.timeout_in_ns for sync_point in self.sync_points]
        return min((each for each in left if each is not None), default=None)

    @cached_property
    def stuck(self) -> list[SyncPoint]:
        """Groups in which ranks wait for longer than they ever have."""
        return stuck(self.sync_points, self.limits)

    @cached_property
    def urgent(self) -> bool:
        """Whether a timeout is near."""
        return any(is_near(sync_point, self.limits.timeout) for sync_point in self.sync_points)

    @cached_property
    def gave_up(self) -> GivingUp | None:
        """Who has waited for a timeout, and for whom; None = nobody has."""
        return giving_up(self.state)

    @cached_property
    def all_well(self) -> bool:
        """Whether all ranks are heard and go on: as a rule they do, and much need not be asked of thousands."""
        state = self.state
        return all(state.condition(rank) in GOING_ON for rank in state.ranks.values())

    @cached_property
    def endings(self) -> Endings:
        """Who ended badly, and in which order; more than one rule asks."""
        return Endings() if self.all_well else endings(self.state, self.limits.rank_lost.silent_s)

    @cached_property
    def left_behind(self) -> LeftBehind:
        """Who has left at the end of its data, and who failed without it; more than one rule asks."""
        return LeftBehind() if self.all_well else left_behind(self.state)

    @cached_property
    def mismatch(self) -> OpMismatch | None:
        """What the ranks were in when they lost each other; None = they have not, or something else explains it."""
        return mismatch_at_end(self.endings)


def is_near(sync_point: SyncPoint, limits: TimeoutLimits) -> bool:
    """Whether little is left of the time that ranks may wait in a group."""
    left_ns = sync_point.timeout_in_ns
    if left_ns is None or not sync_point.waiting:
        return False
    timeout_ns = max(member.group.timeout_ns for member in sync_point.waiting)
    return left_ns < min(limits.soon_s * 1e9, limits.soon_part * timeout_ns)


@dataclass(frozen=True)
class Detector:
    """A rule: its name, its pure function, and how long its alerts outlive what they tell of.

    The docstring of the function is the text that users are shown when they ask what the rule means.
    """

    rule: str
    find: Callable[[DetectorContext], list[Finding]]
    by_step: bool
    """Asked after steps; otherwise as time goes by."""
    gradual: bool = False
    """Goes by many readings, each of which changes little: where there are very many ranks, it is asked less often."""

    @property
    def text(self) -> str:
        """What the rule means, for users."""
        return " ".join((self.find.__doc__ or "").split())

    def close_delay(self, limits: Limits) -> float:
        """Steps, or nanoseconds for rules that go by time, until an alert that is no longer found is closed."""
        group = getattr(limits, self.rule.replace("-", "_"))
        return float(group.linger_steps if self.by_step else group.linger_s * 1e9)
