"""What a viewer wishes of ranks behind a relay, as topics.

A viewer has one connection to a relay, so it cannot choose by connecting whom it asks, as it does with ranks. The
end of the topic says it: `snap/<nonce>/<block>` asks the ranks of a block for their history, `stack/<nonce>/<rank>`
one rank for its stack. The relay subscribes to the very topic, at those ranks and no others; to them all of it is a
nonce. Blocks and not all at once: the viewer asks for the next one when it has read the last.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, TypeAlias

from ddpwatch.wire import MAX_TOPIC_BYTES, TOPICS, Buckets

BLOCK_RANKS: Final = 64
_TOPIC: Final = re.compile(rb"(snap|stacks?)/[0-9a-f]{1,32}/([0-9]{1,7})")

Kind: TypeAlias = Literal["snap", "stack", "bucket"]


class Subscription(NamedTuple):
    """What a topic asks for, and of whom."""

    kind: Kind
    place: int
    """The number of the block for `snap`, the rank for `stack`; of buckets it says nothing."""


def block_of(rank: int) -> int:
    """The block that a rank is in."""
    return rank // BLOCK_RANKS


def of_block(topic: bytes, rank: int) -> bytes:
    """The topic by which the block is asked that this rank is in."""
    return b"%b/%d" % (topic, block_of(rank))


def of_rank(topic: bytes, rank: int) -> bytes:
    """The topic by which this rank alone is asked."""
    return b"%b/%d" % (topic, rank)


def read(topic: bytes) -> Subscription | None:
    """What a viewer asks for; None = nothing that is given on demand."""
    if topic == TOPICS[Buckets]:
        return Subscription("bucket", 0)
    found = _TOPIC.fullmatch(topic)
    if found is None or len(topic) > MAX_TOPIC_BYTES:
        return None
    return Subscription("snap" if found[1] == b"snap" else "stack", int(found[2]))
