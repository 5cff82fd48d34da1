"""The demo plays its story on real ranks, and a viewer finds what it tells, in its order."""

import time
from contextlib import closing

from ddpwatch.cli.demo import training
from ddpwatch.session.follow import Following
from tests.builders.launchers import forked_demo

MOST_S = 80.0


def wait_for_straggler(following: Following, rank: int, phase: str, deadline_s: float) -> None:
    """Follow the run until this is told, from now on."""
    told = []
    while (rank, phase) not in told:
        assert time.monotonic() < deadline_s, f"rank {rank} was not called slow in {phase}, but {told}"
        assert not following.ended
        following.advance()
        for event in following.watch.book.drain():
            finding = event.alert.finding
            if finding.rule == "straggler" and event.kind != "closed" and len(finding.ranks) == 1:
                told.append((finding.ranks[0], finding.phase))


def test_a_viewer_names_the_data_straggler_and_then_the_backward_straggler(monkeypatch, zygote):
    forked_demo(monkeypatch, zygote)
    # Three ranks are the fewest with one for each; so large a lag stands out on any machine. Should a busy one miss a
    # chapter, the story comes around again.
    with training(ranks=3, seconds=2 * MOST_S, pace=4.0, lag=1.0) as run, closing(Following(run)) as following:
        deadline_s = time.monotonic() + MOST_S
        wait_for_straggler(following, 1, "data", deadline_s)
        wait_for_straggler(following, 2, "backward", deadline_s)
        state = following.watch.state

        assert {state.condition(rank) for rank in state.ranks.values()} == {"ok"}
