"""Whether the all-reduce share is marked: as the alert has it, so that the two never contradict each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpwatch.core import rules
from ddpwatch.core.numbers import percent

if TYPE_CHECKING:
    from ddpwatch.view.picture import Picture


def share_mark(picture: Picture) -> str:
    """The mark beside the share, in words; empty = none.

    It is there while the alert is open and has not faded, or the share is above the limit and no rule can judge yet.
    Of a share that is above the limit and of no alert, `share_lately` tells.
    """
    figures, limit = picture.figures, picture.limits.comm_share.share
    if figures is None:
        return ""
    over = figures.share > limit
    is_open = any(alert.finding.rule == rules.COMM_SHARE for alert in picture.fresh)
    if not is_open and not (over and picture.too_early):
        return ""
    # An alert stays open until the share has fallen clearly below the limit.
    return f"▲ over {percent(limit)}" if over else f"▲ was over {percent(limit)}"


def share_lately(picture: Picture) -> str:
    """In words, that the share is above the limit though there is no alert: the rule looks at other steps than the
    figures are of. Empty = it is not.
    """
    figures, limit = picture.figures, picture.limits.comm_share.share
    if figures is None or picture.state.world_size < 2 or figures.share <= limit or share_mark(picture):
        return ""
    return f"over {percent(limit)} just now"
