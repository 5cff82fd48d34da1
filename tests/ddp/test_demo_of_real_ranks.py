"""The demo plays its schedule on real ranks, and a viewer finds its faults in order."""

import time
from contextlib import closing

from ddpwatch.cli._demo_processes import training
from ddpwatch.session.run_follower import RunFollower
from tests.builders.launchers import forked_demo

MAX_S = 80.0


def wait_for_straggler(follower: RunFollower, rank: int, phase: str, deadline_s: float) -> None:
    """Follow the run until this is reported."""
    reported = []
    while (rank, phase) not in reported:
        assert time.monotonic() < deadline_s, f"rank {rank} was not called slow in {phase}, but {reported}"
        assert not follower.ended
        follower.advance()
        for event in follower.monitor.book.drain():
            finding = event.alert.finding
            if finding.rule == "straggler" and event.kind != "closed" and len(finding.ranks) == 1:
                reported.append((finding.ranks[0], finding.phase))


def test_a_viewer_names_the_data_straggler_and_then_the_backward_straggler(monkeypatch, zygote):
    forked_demo(monkeypatch, zygote)
    # Three ranks are the fewest with one for each; so large a lag stands out on any machine. Should a busy one miss a
    # chapter, the story comes around again.
    with training(ranks=3, seconds=2 * MAX_S, pace=4.0, lag=1.0) as run, closing(RunFollower(run)) as follower:
        deadline_s = time.monotonic() + MAX_S
        wait_for_straggler(follower, 1, "data", deadline_s)
        wait_for_straggler(follower, 2, "backward", deadline_s)
        state = follower.monitor.state

        assert {state.condition(rank) for rank in state.ranks.values()} == {"ok"}
