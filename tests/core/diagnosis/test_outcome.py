"""How a run ended: a gate and exit codes depend on it, and all outputs format it."""

from dataclasses import replace

import pytest

from ddpwatch import wire
from ddpwatch.core.alerts.model import Alert, Finding, Moment, Severity
from ddpwatch.core.diagnosis.outcome import alert_of_bad_end, outcome_of
from ddpwatch.core.state.run import RunState
from ddpwatch.view.verdict import bad_end_text
from tests.builders.fake_rank import make_beat, make_hello
from tests.builders.recordings import straggler

CLOSED = "RuntimeError: Connection closed by peer [127.0.0.1]:14261"
WAITS = "rank 1 has not joined all_reduce #201."


def bad_end(state, alerts):
    outcome = outcome_of(state, alerts)
    text = bad_end_text(outcome)
    assert bool(text) == (outcome.ending == "badly")
    return text


def run(**byes):
    """Two ranks; `r1="exit"` = that one has said goodbye for this reason."""
    state = RunState("ab12cd34", "train", 2)
    for rank in range(2):
        state.apply(make_hello(rank, 1, world_size=2), 10**9)
        state.apply(make_beat(rank, 2), 10**9)
        if reason := byes.get(f"r{rank}"):
            text = "ValueError: boom" if reason == "failed" else ""
            state.apply(wire.Bye(rank=rank, seq=3, reason=reason, text=text, mono_ns=9), 2 * 10**9)
    return state


def stall(severity=Severity.CRITICAL, closed=None):
    return straggler(1, closed=closed, rule="stall", severity=severity, message=WAITS)


def test_a_rank_that_failed_or_was_killed_is_a_bad_end():
    killed = run(r0="exit")
    killed.apply(wire.Gone(rank=1, seq=0, ago_ns=1, exit_code=-9), 3 * 10**9)

    assert bad_end(run(r0="exit", r1="failed"), []) == "rank 1 failed with ValueError: boom"
    assert bad_end(killed, []).startswith("rank 1 was killed (SIGKILL)")


def test_a_rank_that_failed_in_the_last_moment_is_a_bad_end_though_the_others_seem_to_go_on():
    assert bad_end(run(r1="failed"), []) == "rank 1 failed"


def test_a_hang_that_the_recording_ends_in_is_a_bad_end():
    assert bad_end(run(), [stall()]) == WAITS.removesuffix(".")


@pytest.mark.parametrize(
    ("state", "alerts"),
    [
        (run(r0="exit", r1="exit"), []),
        (run(), []),
        (run(r0="exit", r1="exit"), [stall()]),
        (run(), [stall(Severity.WARNING)]),
        (run(), [stall(closed=90)]),
        (run(), [straggler(1, severity=Severity.CRITICAL)]),
    ],
    ids=["goodbye", "goes on", "goodbye after a wait", "short wait", "wait that is over", "slow"],
)
def test_no_other_run_came_to_a_bad_end(state, alerts):
    assert bad_end(state, alerts) == ""


def test_a_rank_without_any_heartbeat_is_the_root_cause_of_lost_connections():
    """A rank that fails in its first step ends before its first heartbeat."""
    state = RunState("ab12cd34", "train", 2)
    state.apply(make_hello(0, 1, world_size=2), 10**9)
    state.apply(make_beat(0, 2), 10**9)
    state.apply(wire.Bye(rank=0, seq=3, reason="failed", text=CLOSED, mono_ns=9), 2 * 10**9)

    assert bad_end(state, []) == "rank 0 lost its connection to another rank; no message ever came from rank 1"


def test_the_ending_is_well_only_if_every_agent_reported_to_the_end():
    assert outcome_of(run(), ()).ending == "going on"
    assert outcome_of(run(r0="exit"), ()).ending == "going on"
    assert outcome_of(run(r0="exit", r1="closed"), ()).ending == "well"
    assert outcome_of(run(r0="exit", r1="off"), ()).ending == "unknown"
    assert outcome_of(RunState("ab12cd34", "train", 2), ()).ending == "going on"


def test_silence_counts_once_it_has_lasted_or_nothing_else_is_left_of_the_run():
    beating, alone = run(), run(r0="exit")
    beating.tick(4 * 10**9)
    beating.apply(make_beat(0, 3), 4 * 10**9)
    alone.tick(4 * 10**9)

    assert outcome_of(beating, ()).bad == {}
    assert outcome_of(alone, ()).bad == {1: "silent"}
    beating.apply(make_beat(0, 4), 8 * 10**9)
    assert outcome_of(beating, ()).bad == {1: "silent"}


def test_of_several_waits_the_most_severe_one_that_names_ranks_explains_the_end():
    mild, severe = stall(Severity.WARNING), stall()
    nobody = replace(severe, finding=replace(severe.finding, ranks=(), subject="somebody"))

    for alerts in ([mild, nobody, severe], [severe, nobody, mild]):
        assert outcome_of(run(), alerts).explained_by is severe


@pytest.mark.parametrize(
    ("rules", "reported"),
    [
        ({"rank-lost": Severity.CRITICAL}, "rank-lost"),
        ({"rank-lost": Severity.INFO}, ""),
        ({"straggler": Severity.CRITICAL}, ""),
        ({"stall": Severity.WARNING}, ""),
        ({"stall": Severity.CRITICAL}, "stall"),
        ({"stall": Severity.WARNING, "rank-lost": Severity.CRITICAL}, "stall"),
    ],
)
def test_alerts_alone_decide_on_a_bad_end(rules, reported):
    now = Moment(5, 1, 0)
    alerts = [Alert(Finding(rule, how, rule, rule, "", (1,)), now, now) for rule, how in rules.items()]

    found = alert_of_bad_end(alerts)
    assert (found.finding.message if found is not None else "") == reported
    assert alert_of_bad_end([replace(alert, closed=now) for alert in alerts]) is None
