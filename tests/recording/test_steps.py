"""Every recorded step is read, in whatever order the frames arrived."""

from contextlib import closing

import pytest

from ddpwatch.recording.reader import Recording
from ddpwatch.recording.steps import BETWEEN_LOOKS, LOOKS, StepReader
from tests.builders.fake_rank import make_beat, make_hello, make_snap, make_step
from tests.builders.recordings import frame, make_run, record

KEPT = 600
S = 1_000_000_000


def live(rank, index, at_ns=0):
    return frame(make_beat(rank, 10 + index, step=index + 1, steps=[make_step(index)]), at_ns)


def history(rank, upto, world, at_ns=0):
    steps = [make_step(index) for index in range(max(0, upto - KEPT + 1), upto + 1)]
    beat = make_beat(rank, 10 + upto, step=upto + 1)
    return frame(make_snap(rank, 10 + upto, steps, make_hello(rank, 1, world_size=world), beat), at_ns)


def read_steps(path, frames, world):
    record(path, frames, world, run=make_run(world))
    with closing(Recording(path)) as recorded:
        reader = StepReader(recorded, recorded.attempts[0])
        return reader, list(reader.windows(unusual=True))


def steps_of(windows):
    return [int(index) for window in windows for index in window.indices]


@pytest.mark.parametrize("gap", [60, 200, 500, 580])
@pytest.mark.parametrize("before", [1, 8, 16])
def test_steps_between_two_recorders_are_read_from_later_histories(tmp_path, gap, before):
    """A recorder is killed and the next continues the file: it receives live steps first, then one history after the
    other, with checks for ready steps between them.
    """
    world, killed = 3, 300
    again, end = killed + gap, killed + gap + 400
    frames = [history(rank, 0, world) for rank in range(world)]
    frames += [live(rank, index) for index in range(1, killed) for rank in range(world)]
    coming = [live(rank, index, 9 * S) for index in range(again, end) for rank in range(world)]
    for rank in range(world):
        upto = again + before * (rank + 1)
        place = (upto - again) * world + rank
        coming.insert(place, history(rank, upto, world, 9 * S))
    reader, windows = read_steps(tmp_path / "again.ddpw", [*frames, *coming], world)

    first = again + before * world - KEPT + 1
    assert steps_of(windows) == [*range(killed), *range(max(killed, first), end)]
    assert reader.skipped == max(0, first - killed)
    assert all(window.complete for window in windows)


def test_steps_missing_everywhere_are_skipped_and_later_ones_read(tmp_path):
    """A gap longer than histories reach, another before the first is skipped, then a far longer one."""
    world = 2
    frames = [history(rank, 0, world) for rank in range(world)]
    parts = [range(1, 300), range(310, 500), range(510, 900), range(100_000_000, 100_000_700)]
    frames += [
        live(rank, part[0] + n, k * 9 * S)
        for k, part in enumerate(parts)
        for n in range(len(part))
        for rank in range(world)
    ]
    reader, windows = read_steps(tmp_path / "gaps.ddpw", frames, world)

    assert steps_of(windows) == [0, *(index for part in parts for index in part)]
    assert reader.skipped == 100_000_000 - 900 + 20


def test_histories_of_a_host_that_came_back_are_aligned_with_the_others(tmp_path):
    """Its ranks were silent for 300 steps; after the reconnect their histories come after live steps."""
    world, away, back, end = 4, range(2, 4), 500, 900
    at_ns = [index * S // 10 for index in range(end)]
    frames = [history(rank, 0, world) for rank in range(world)]
    for index in range(1, end):
        for rank in range(world):
            if rank in away and 200 <= index < back:
                continue
            frames.append(live(rank, index, at_ns[index]))
            if rank in away and index == back + 12 * (rank - 1):
                frames.append(history(rank, index, world, at_ns[index]))
    _, windows = read_steps(tmp_path / "away.ddpw", frames, world)

    assert steps_of(windows) == [*range(end)]
    assert all(window.complete for window in windows)


@pytest.mark.parametrize("gone", [60, 129, 200, 255, 383, 1000])
def test_a_host_that_stays_away_does_not_block_the_others(tmp_path, gone):
    world, end = 4, 2000
    frames = [history(rank, 0, world) for rank in range(world)]
    frames += [
        live(rank, index, index * S // 10)
        for index in range(1, end)
        for rank in range(world)
        if rank < 2 or index < gone
    ]
    _, windows = read_steps(tmp_path / "gone.ddpw", frames, world)

    assert steps_of(windows) == [*range(end)]
    assert steps_of(window for window in windows if window.complete) == [*range(gone)]
    assert {window.ranks for window in windows} == {(0, 1, 2, 3), (0, 1)}


def test_fast_steps_are_not_overwritten_between_two_checks(tmp_path):
    """Enough frames for the longest interval between checks, with more steps in it than a ring holds."""
    count, each = BETWEEN_LOOKS * LOOKS // 16, 4
    steps = [make_step(index) for index in range(1, count * each + 1)]
    frames = [history(0, 0, 1)]
    for number in range(count):
        come = steps[number * each : (number + 1) * each]
        frames.append(frame(make_beat(0, number + 11, step=come[-1].index + 1, steps=come)))
    record(tmp_path / "fast.ddpw", frames, 1, run=make_run(1))
    with closing(Recording(tmp_path / "fast.ddpw")) as recorded:
        reader = StepReader(recorded, recorded.attempts[0])
        # As in a recording that is sixteen times as long.
        reader.frames *= 16
        windows = list(reader.windows(unusual=True))

    assert steps_of(windows) == [*range(count * each + 1)]
