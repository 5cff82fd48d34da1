"""What a rule is given (`DetectorContext`), and what it is made of (`Detector`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

from ddpwatch.core.diagnosis.arrivals import stuck, sync_points
from ddpwatch.core.diagnosis.early_exit import LeftBehind, left_behind
from ddpwatch.core.diagnosis.exits import Endings, endings
from ddpwatch.core.diagnosis.mismatch import OpMismatch, mismatch_at_end
from ddpwatch.core.diagnosis.timeouts import TimedOut, timed_out
from ddpwatch.core.limits import BaselineLimits
from ddpwatch.core.metrics.baseline import block_of
from ddpwatch.core.state.run import ALIVE
from ddpwatch.core.units import ranks_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ddpwatch.core.alerts.model import Finding
    from ddpwatch.core.diagnosis.arrivals import GroupMember, SyncPoint
    from ddpwatch.core.diagnosis.exits import End
    from ddpwatch.core.limits import Limits, TimeoutLimits
    from ddpwatch.core.metrics.baseline import Block, History
    from ddpwatch.core.metrics.window import Window
    from ddpwatch.core.state.run import RunState

Evidence: TypeAlias = dict[str, float | int | str]
"""The numbers behind a finding, by name and unit."""


@dataclass(frozen=True)
class DetectorContext:
    """The run at one moment, read-only. What more than one rule needs is computed once."""

    state: RunState
    window: Window
    """Latest aligned steps up to the evaluated one, without warmup; may be empty for rules by time."""
    history: History
    """Blocks of steps before the window."""
    limits: Limits
    out_of_step: tuple[int, ...] = ()
    """Ranks that cannot be compared with the others at this moment; known to rules by time only."""

    @property
    def has_majority(self) -> bool:
        """Whether at least half of the ranks can be compared: otherwise what seems odd may be normal."""
        return len(self.window.ranks) * 2 >= self.window.world_size

    @cached_property
    def latest_block(self) -> Block | None:
        """The latest steps as one block, to compare with the history; None = too few steps."""
        window = self.window.last(BaselineLimits.BLOCK_STEPS)
        return block_of(window) if len(window) >= BaselineLimits.MIN_STEPS else None

    @cached_property
    def sync_points(self) -> list[SyncPoint]:
        """Groups in which a rank waits for longer than in every step."""
        return sync_points(self.state, 1e9 * min(self.limits.stall.MIN_WAIT_S, self.limits.stall.least_s))

    @cached_property
    def timeout_in_ns(self) -> int | None:
        """Time until the first group's timeout ends the job; None = unknown. Negative if it is over."""
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
    def gave_up(self) -> TimedOut | None:
        """Ranks whose wait timed out, and the ranks they waited for; None = no wait timed out."""
        return timed_out(self.state)

    @cached_property
    def all_well(self) -> bool:
        """Whether every rank is alive. Nearly always so, and it spares most checks of thousands of ranks."""
        state = self.state
        return all(state.condition(rank) in ALIVE for rank in state.ranks.values())

    @cached_property
    def endings(self) -> Endings:
        """Ranks that ended badly, in order: first failures, and the secondary failures after them."""
        return Endings() if self.all_well else endings(self.state, self.limits.rank_lost.silent_s)

    @cached_property
    def left_behind(self) -> LeftBehind:
        """Ranks that left at the end of their data, and the ranks that failed without them."""
        return LeftBehind() if self.all_well else left_behind(self.state)

    @cached_property
    def mismatch(self) -> OpMismatch | None:
        """Operations the ranks were in when their connections broke; None = not broken, or explained otherwise."""
        return mismatch_at_end(self.endings)


def is_near(sync_point: SyncPoint, limits: TimeoutLimits) -> bool:
    """Whether the timeout of a group is about to fire."""
    left_ns = sync_point.timeout_in_ns
    if left_ns is None or not sync_point.waiting:
        return False
    timeout_ns = max(member.group.timeout_ns for member in sync_point.waiting)
    return left_ns < min(limits.soon_s * 1e9, limits.soon_part * timeout_ns)


def ranks_of(items: Iterable[End | GroupMember]) -> tuple[int, ...]:
    """Rank numbers of ends or of group members, in order."""
    return tuple(sorted(item.rank.rank for item in items))


def names_of(items: Iterable[End | GroupMember]) -> str:
    """Their ranks as text: `ranks 0-3, 7`."""
    return ranks_text(item.rank.rank for item in items)


@dataclass(frozen=True)
class Detector:
    """A rule: its name, its pure function and its schedule. The function's docstring is shown to users."""

    rule: str
    find: Callable[[DetectorContext], list[Finding]]
    by_step: bool
    """Evaluated after steps; otherwise as time passes."""
    gradual: bool = False
    """Uses many readings that change little, so that it is evaluated less often where there are very many ranks."""

    @property
    def text(self) -> str:
        """Explanation of the rule for users."""
        return " ".join((self.find.__doc__ or "").split())

    def close_delay(self, limits: Limits) -> float:
        """Steps, or nanoseconds for rules by time, until an alert that is not found any more is closed."""
        group = getattr(limits, self.rule.replace("-", "_"))
        return float(group.linger_steps if self.by_step else group.linger_s * 1e9)
