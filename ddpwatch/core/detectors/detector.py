"""What a rule is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddpwatch.core.alerts import Finding
    from ddpwatch.core.evidence import Evidence
    from ddpwatch.core.limits import Limits


@dataclass(frozen=True)
class Detector:
    """A rule: its name, its pure function, and how long its alerts outlive what they tell of.

    The docstring of the function is the text that users are shown when they ask what the rule means.
    """

    rule: str
    find: Callable[[Evidence], list[Finding]]
    by_step: bool
    """Asked after steps; otherwise as time goes by."""
    gradual: bool = False
    """Goes by many readings, each of which changes little: where there are very many ranks, it is asked less often."""

    @property
    def text(self) -> str:
        """What the rule means, for users."""
        return " ".join((self.find.__doc__ or "").split())

    def linger(self, limits: Limits) -> float:
        """Steps, or nanoseconds for rules that go by time, until an alert that is no longer found is closed."""
        group = getattr(limits, self.rule.replace("-", "_"))
        return float(group.linger_steps if self.by_step else group.linger_s * 1e9)
