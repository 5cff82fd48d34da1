"""Topics of subscriptions through a relay, with the ranks they address.

A viewer has one connection to a relay, so it cannot select ranks by connecting to them. The topic's suffix does:
`snap/<nonce>/<block>` requests the history of a block of ranks, `stack/<nonce>/<rank>` the stack of one rank. The relay
subscribes to that same topic at those ranks only, which treat the suffix as part of the nonce. Histories are requested
by block, one after another, to bound memory.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, TypeAlias

from ddpwatch.wire import MAX_TOPIC_BYTES, TOPICS, Buckets

BLOCK_RANKS: Final = 64
"""Ranks whose histories are requested together."""
_TOPIC: Final = re.compile(rb"(snap|stacks?)/[0-9a-f]{1,32}/([0-9]{1,7})")

Kind: TypeAlias = Literal["snap", "stack", "bucket"]


class Subscription(NamedTuple):
    """Subscription to data on demand, with its target."""

    kind: Kind
    place: int
    """Number of the block for `snap`, rank for `stack`, unused for `bucket`."""


def block_of(rank: int) -> int:
    """Block number of a rank."""
    return rank // BLOCK_RANKS


def of_block(topic: bytes, rank: int) -> bytes:
    """Topic that requests data from the rank's block."""
    return b"%b/%d" % (topic, block_of(rank))


def of_rank(topic: bytes, rank: int) -> bytes:
    """Topic that requests data from this rank only."""
    return b"%b/%d" % (topic, rank)


def read(topic: bytes) -> Subscription | None:
    """Parse a viewer's subscription; None = a topic that is not on demand."""
    if topic == TOPICS[Buckets]:
        return Subscription("bucket", 0)
    found = _TOPIC.fullmatch(topic)
    if found is None or len(topic) > MAX_TOPIC_BYTES:
        return None
    return Subscription("snap" if found[1] == b"snap" else "stack", int(found[2]))
