"""Whether the all-reduce share is marked: as the alert has it, so that the two never contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpwatch.core import rules
from ddpwatch.core.numbers import percent
from ddpwatch.core.window import ENOUGH_STEPS
from ddpwatch.view.fading import faded_alerts

if TYPE_CHECKING:
    from ddpwatch.core.figures import Figures
    from ddpwatch.core.watch import Watch
    from ddpwatch.view.picture import Picture


def share_mark(picture: Picture) -> str:
    """The mark beside the share, in words; empty = none.

    It is there while the alert is open and has not faded, or the share is above the limit and no rule can judge yet.
    Of a share that is above the limit and of no alert, `share_lately` tells.
    """
    is_open = any(alert.finding.rule == rules.COMM_SHARE for alert in picture.fresh)
    return _mark(picture.figures, picture.limits.comm_share.share, is_open=is_open, too_early=picture.too_early)


def share_lately(picture: Picture) -> str:
    """In words, that the share is above the limit though there is no alert: the rule looks at other steps than the
    figures are of. Empty = it is not.
    """
    figures, limit = picture.figures, picture.limits.comm_share.share
    if figures is None or picture.state.world_size < 2 or figures.share <= limit or share_mark(picture):
        return ""
    return f"over {percent(limit)} just now"


def share_mark_now(watch: Watch, figures: Figures) -> str:
    """The same for a run that is looked at once."""
    alerts = [alert for alert in watch.book.open.values() if alert.finding.rule == rules.COMM_SHARE]
    too_early = figures.last_step < watch.limits.judge.warmup_steps + ENOUGH_STEPS
    is_open = len(faded_alerts(watch, alerts, figures)) < len(alerts)
    return _mark(figures, watch.limits.comm_share.share, is_open=is_open, too_early=too_early)


def _mark(figures: Figures | None, limit: float, *, is_open: bool, too_early: bool) -> str:
    if figures is None:
        return ""
    over = figures.share > limit
    if not is_open and not (over and too_early):
        return ""
    # An alert stays open until the share has fallen clearly below the limit.
    return f"▲ over {percent(limit)}" if over else f"▲ was over {percent(limit)}"
