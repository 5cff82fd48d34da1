"""The count of missing frames relies on positions that may be damaged themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.recording.recovery import Block, missing_frames


def whole(portions, frames=4):
    """Portions of two blocks each, with alternating frames."""
    return [
        Block(number, (number + 1) * frames - 1 - shard, frames // 2, sound=True)
        for number in range(portions)
        for shard in (1, 0)
    ]


def test_no_frame_of_a_complete_recording_is_missing():
    assert missing_frames(whole(10), []) == (0, 40)
    assert missing_frames(whole(10), [3, 19, 39]) == (0, 40)


@given(st.sets(st.integers(0, 18)))
def test_frames_of_unreadable_and_missing_blocks_are_counted(lost):
    blocks = whole(10)
    hurt = [block._replace(sound=number not in lost) for number, block in enumerate(blocks)]
    gone = [block for number, block in enumerate(blocks) if number not in lost]

    assert missing_frames(hurt, [3, 39]) == (2 * len(lost), 40 - 2 * len(lost))
    # Frames before the first checkpoint may have been removed by retention.
    assert missing_frames(gone, [3, 39]) == (2 * len(lost - {0, 1}), 40 - 2 * len(lost))


@pytest.mark.parametrize("number", [4, 10, 18])
@pytest.mark.parametrize("claims", [{"last": 1 << 14}, {"last": 0}, {"portion": 1 << 20}], ids=str)
def test_a_damaged_position_changes_the_count_little(number, claims):
    blocks = whole(10)
    blocks[number] = blocks[number]._replace(**claims)
    blocks.sort(key=lambda block: block.portion)
    missing, there = missing_frames(blocks, [3, 39])

    assert there == 40
    assert missing <= 2


def test_frames_after_the_last_readable_one_are_counted_by_checkpoint_or_metadata():
    blocks = whole(10)[:12]

    assert missing_frames(blocks, [3, 39]) == (16, 24)
    assert missing_frames([*blocks, Block(6, 27, 4, sound=False)], [3]) == (4, 24)
    assert missing_frames([], [7]) == (0, 0)
    assert missing_frames([], []) == (0, 0)
