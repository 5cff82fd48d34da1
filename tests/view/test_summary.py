"""Summary of a run that has ended, and its root cause in part of a line."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from ddpwatch import wire
from ddpwatch.core.alerts.model import Finding, Moment, Severity
from ddpwatch.core.diagnosis.outcome import outcome_of
from ddpwatch.core.metrics.timeline import Timeline
from ddpwatch.view.outcome_text import root_cause_text
from ddpwatch.view.run_view import run_view
from ddpwatch.view.summary import summary_lines
from tests.builders.fake_rank import make_beat, make_snap, make_step
from tests.view.pages import HOSTILE, assert_fits, heights, make_monitor, make_run_view, page, run_views, texts, widths

ALL_ROWS = 200


def ended(monitor, reasons=("closed",) * 4, text=""):
    for rank, reason in enumerate(reasons):
        if reason == "gone":
            monitor.state.apply(wire.Gone(rank=rank, seq=0), 2)
        elif reason:
            monitor.state.apply(wire.Bye(rank=rank, seq=6, reason=reason, text=text, mono_ns=9), 2)
    return monitor


def summary(monitor, columns=100, rows=ALL_ROWS, **options):
    return summary_lines(make_run_view(monitor), columns, rows, duration_s=3725, **options)


@settings(deadline=None, max_examples=40)
@given(run_views(), widths, heights)
def test_it_fits_any_window_whatever_has_happened(drawn, columns, rows):
    lines = summary_lines(drawn, columns, rows, duration_s=1.0, how=HOSTILE, newer=[HOSTILE], runs=True)
    assert_fits(lines, columns, rows)


def test_a_run_that_all_ranks_have_left_in_order_has_ended_well():
    assert texts(summary(ended(make_monitor())))[0] == "■ The run has ended: all ranks exited cleanly."


def test_a_failure_is_shown_with_its_text_and_the_others_with_how_they_ended():
    monitor = ended(make_monitor(), ["closed", "closed", "failed", "closed"], "RuntimeError: [rank2] out of memory")
    text = page(summary(monitor))

    assert text.startswith("✖ The run has ended badly")
    assert "rank 2 failed: RuntimeError: [rank2] out of memory" in text
    assert "ranks 0-1, 3: exited cleanly" in text


def test_a_rank_that_was_killed_is_shown():
    text = page(summary(ended(make_monitor(), ["closed", "gone", "closed", "closed"])))

    assert text.startswith("✖ The run has ended badly")
    assert "rank 1: exited without reporting an error" in text


def test_ranks_that_were_taken_along_are_not_blamed():
    monitor = make_monitor()
    monitor.state.apply(wire.Bye(rank=2, seq=6, reason="failed", text="ValueError: bad sample", mono_ns=9), 10**9)
    for rank in (0, 1, 3):
        text = "RuntimeError: Connection closed by peer [127.0.0.1]:4242"
        monitor.state.apply(wire.Bye(rank=rank, seq=6, reason="failed", text=text, mono_ns=9), 2 * 10**9)
    text = page(summary(monitor))

    assert "rank 2 failed: ValueError: bad sample" in text
    assert "ranks 0-1, 3: exited after rank 2" in text
    assert "Connection closed" not in text


def test_a_rank_that_timed_out_is_not_blamed_and_the_diagnosis_comes_first():
    monitor = make_monitor()
    waited = "RuntimeError: Timed out waiting 20000ms for recv operation to complete"
    monitor.state.apply(wire.Bye(rank=0, seq=6, reason="failed", text=waited, mono_ns=9), 10**9)
    for rank in (1, 2, 3):
        monitor.state.apply(wire.Gone(rank=rank, seq=0, exit_code=-15, ago_ns=1), 2 * 10**9)
    found = Finding("timeout", Severity.CRITICAL, "gave up", "rank 0 gave up; rank 1 had not joined", "", (1,))
    monitor.book.update("timeout", [found], Moment(5, 1, 0), close_delay=1, by_step=False)
    lines = texts(summary(monitor))

    assert lines[1].strip() == "rank 0 gave up; rank 1 had not joined"
    assert lines[2].strip().startswith("rank 0 timed out waiting: RuntimeError")
    assert "rank 1: exited after that" in page(summary(monitor)), "it is named, and is not a secondary failure"
    assert "ranks 2-3: exited after rank 0, which need not be the root cause" in page(summary(monitor))


GLOO = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 20000ms for "
    "recv operation to complete. This is typically caused by a straggler or a rank that is not there. {} · "
    "/srv/lib/torch/autograd/graph.py:979 in _engine_run_backward · /srv/job/train.py:73 in main"
)
CLOSED = "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:{}"


@pytest.mark.parametrize(
    ("words", "lead", "said"),
    [
        (GLOO, "ranks 0-2 timed out waiting: ", "Timed out waiting 20000ms"),
        (CLOSED, "ranks 0-2 failed: ", "Connection closed by peer"),
    ],
)
def test_those_that_ended_alike_share_two_lines(words, lead, said):
    monitor = make_monitor()
    for rank in range(3):
        bye = wire.Bye(rank=rank, seq=6, reason="failed", text=words.format(4711 + rank), mono_ns=9)
        monitor.state.apply(bye, 10**9)
    lines = texts(summary(monitor, 80, 24))
    first = next(place for place, line in enumerate(lines) if line.startswith(f"  {lead}RuntimeError: {said}"))
    figures = next(place for place, line in enumerate(lines) if line.startswith("ran for"))
    victims = list(filter(None, lines[first:figures]))

    assert len(victims) <= 2
    assert victims[-1].endswith("…") == (words is GLOO)


def test_each_different_exception_is_shown():
    monitor = make_monitor()
    for rank, text in enumerate(("ValueError: a", "KeyError: b", "ValueError: a · x.py:1 in f")):
        monitor.state.apply(wire.Bye(rank=rank, seq=6, reason="failed", text=text, mono_ns=9), 10**9)
    text = page(summary(monitor))

    assert "ranks 0, 2 failed: ValueError: a" in text
    assert "rank 1 failed: KeyError: b" in text


def test_an_aborted_rank_is_not_blamed():
    monitor = make_monitor()
    monitor.state.apply(wire.Gone(rank=1, seq=0, exit_code=-6, ago_ns=1), 10**9)
    for rank in (0, 2, 3):
        monitor.state.apply(wire.Gone(rank=rank, seq=0, exit_code=-15, ago_ns=1), 2 * 10**9)

    assert "ranks 0, 2-3: exited after rank 1, which need not be the root cause" in page(summary(monitor))


def test_ranks_that_fell_silent_make_a_bad_end():
    monitor = ended(make_monitor(), ["closed", "closed", "closed", ""])
    monitor.tick(60_000_000_000)

    assert "rank 3: no heartbeat" in page(summary(monitor))


def test_an_agent_that_switched_itself_off_does_not_know_how_the_training_ended():
    text = page(summary(ended(make_monitor(), ["off"] * 4)))

    assert "ddpwatch switched itself off on ranks 0-3" in text
    assert "ended well" not in text


def test_the_figures_of_the_run():
    text = page(summary(ended(make_monitor())))

    for reported in ("ran for 1 h 2 min", "steps 120", "step 40.0 ms", "throughput 3,200 samples/s, 800 per rank"):
        assert reported in text
    # 12 of 40 ms on three ranks, 2 on the fourth; the wire is what that one has.
    assert "all-reduce 24% of the step = wire 5% + waiting 19% · ▲ over 10%" in text


def test_straggler_costs():
    lines = texts(summary(ended(make_monitor())))

    [cost] = [text for text in lines if text.startswith("  rank 2")]
    assert cost.split()[2] == "25%"
    assert cost.endswith("of the whole run")


def test_costs_are_of_the_whole_run_with_the_part_that_was_seen():
    monitor = make_monitor(steps=600)
    monitor.state.apply(make_beat(0, seq=9, step=5000), now_ns=2)
    text = page(summary(ended(monitor)))

    assert "step 40.0 ms, median of the 599 steps that were seen" in text
    assert "25% █████ of the 599 steps that were seen" in text


def test_if_ranks_are_late_in_turn_none_is_named():
    monitor = make_monitor(steps=0)
    for rank in range(4):
        late = [{"backward": 26, "sync": 2} if index % 4 == rank else {"sync": 12} for index in range(120)]
        done = [make_step(index, **phases) for index, phases in enumerate(late)]
        monitor.state.apply(make_snap(rank, seq=6, steps=done), now_ns=1)
    lines = texts(summary(ended(monitor)))

    assert "  no rank stands out: different ranks were late in turn, 25% in total" in lines
    assert not any(line.startswith("  rank") for line in lines)


def test_runs_that_have_started_since_come_first_with_the_key_to_them():
    lines = texts(summary(ended(make_monitor()), newer=["[b]a", "b", "c", "d"], runs=True))

    assert lines[0] == "● Other runs have started since: [b]a, b, c and 1 more. Press r to choose it."
    assert any(line.startswith("r ") for line in lines)
    assert not any(line.startswith("r ") for line in texts(summary(ended(make_monitor()))))


def test_a_straggler_that_recovered_before_the_end_is_shown():
    monitor = make_monitor()
    monitor.evaluate_now()
    key = ("straggler", "rank 2")
    alert = monitor.book.open.pop(key)
    # The finding continues for a while after the last slow step, and the alert stays open for longer.
    finding = replace(alert.finding, from_step=12, upto_step=60)
    monitor.book.closed.append(replace(alert, finding=finding, since=Moment(20, 0, 0), closed=Moment(90, 1, 0)))
    drawn = run_view(monitor, Timeline())

    text = page(summary_lines(drawn, 120, ALL_ROWS, duration_s=1.0))
    assert "in backward, steps 12 to 60" in text


def test_no_rank_is_blamed_if_none_was_slow():
    assert "none" in page(summary(ended(make_monitor(slow=None))))


def test_without_all_ranks_it_is_unproven_and_says_so():
    text = page(summary(make_monitor(received=3)))

    assert "wire and waiting are unknown" in text
    assert "– unknown: no data from some ranks" in text


def test_alerts_are_counted_and_the_worst_come_first():
    monitor = ended(make_monitor(), ["closed", "closed", "closed", "failed"], "boom")
    lines = texts(summary(monitor))

    [heading] = [text for text in lines if text.startswith("── alerts")]
    assert heading.startswith("── alerts · 2 warnings, besides how it ended ─")
    rules = [text.split()[1] for text in lines[lines.index(heading) + 1 :] if text.startswith("▲")]
    assert rules == ["straggler", "comm-share"]


def test_if_the_only_alerts_are_of_the_end_the_list_refers_to_it():
    monitor = ended(make_monitor(slow=None, steps=5), ["closed", "closed", "closed", "failed"], "boom")

    assert "none besides how it ended, shown above" in page(summary(monitor))
    assert "critical" not in page(summary(monitor))


def test_a_failure_is_shown_once():
    monitor = ended(make_monitor(), ["closed", "closed", "closed", "failed"], "boom")

    assert page(summary(monitor)).count("boom") == 1


@pytest.mark.parametrize("rows", [6, 12, 24])
def test_what_to_do_next_stays_in_sight_however_low_the_window(rows):
    lines = texts(summary(ended(make_monitor()), rows=rows))

    assert len(lines) <= rows
    assert lines[-1].startswith("q ")
    assert rows == 24 or any(text.endswith("more lines") for text in lines)


def test_a_run_of_one_rank_has_no_straggler_costs():
    text = page(summary(ended(make_monitor(1, slow=None), ["closed"])))

    assert "all-reduce" not in text.partition("── alerts")[0]
    assert "who cost" not in text


def test_markup_in_the_note_of_the_front_end_is_shown_as_text():
    assert "[bold red]evil[/]" in page(summary(ended(make_monitor()), how=HOSTILE))


# root cause in part of a line


def root_cause(monitor):
    return root_cause_text(outcome_of(monitor.state, monitor.book.open.values()))


@pytest.mark.parametrize(
    ("first", "reported"),
    [
        (wire.Gone(rank=2, seq=0, exit_code=-9, ago_ns=1), "rank 2 was killed (SIGKILL)"),
        (wire.Gone(rank=2, seq=0), "rank 2 was lost"),
        (
            wire.Bye(rank=2, seq=6, reason="failed", text="ValueError: bad label. · x.py:1 in f", mono_ns=9),
            "rank 2 failed: ValueError: bad label",
        ),
    ],
)
def test_the_root_cause_comes_before_secondary_failures(first, reported):
    monitor = make_monitor()
    assert root_cause(monitor) == ""
    monitor.state.apply(first, 10**9)
    assert root_cause(monitor) == "", "no secondary failures"
    for rank in (0, 1, 3):
        words = f"RuntimeError: Connection closed by peer [127.0.0.1]:{rank}"
        monitor.state.apply(wire.Bye(rank=rank, seq=6, reason="failed", text=words, mono_ns=9), 2 * 10**9)

    assert root_cause(monitor) == f"{reported}; ranks 0-1, 3 after it"


def test_an_exit_code_is_shown_if_there_was_no_exception():
    monitor = ended(make_monitor(), [None, None, "exit", None])
    monitor.state.apply(wire.Gone(rank=2, seq=0, exit_code=3, ago_ns=1), 3)
    for rank in (0, 1, 3):
        monitor.state.apply(wire.Gone(rank=rank, seq=0, exit_code=-15, ago_ns=1), 2 * 10**9)

    assert root_cause(monitor) == "rank 2 exited with code 3; ranks 0-1, 3 after it"


@pytest.mark.parametrize(
    ("rule", "ranks", "evidence", "reported"),
    [
        ("timeout", (1,), {}, "rank 1 did not join a collective; ranks 0, 2-3 after it"),
        ("timeout", (1,), {"camps": "x"}, "rank 1 ran a mismatched collective; ranks 0, 2-3 after it"),
        ("desync", (1, 2), {}, "ranks 1-2 ran a mismatched collective; ranks 0, 3 after them"),
        ("uneven-batch", (1,), {}, "rank 1 left the job early; ranks 0, 2-3 after it"),
        ("desync", (0, 1, 2, 3), {}, ""),
        ("timeout", (), {}, ""),
    ],
)
def test_the_rank_missing_from_a_collective_is_the_root_cause_not_the_first_to_end(rule, ranks, evidence, reported):
    monitor = make_monitor()
    waited = "RuntimeError: Timed out waiting 20000ms for recv operation to complete"
    for rank in range(4):
        monitor.state.apply(wire.Bye(rank=rank, seq=6, reason="failed", text=waited, mono_ns=9), 10**9)
    found = Finding(rule, Severity.CRITICAL, "fired", "told", "", ranks, evidence=evidence)
    monitor.book.update(rule, [found], Moment(5, 1, 0), close_delay=1, by_step=False)

    assert root_cause(monitor) == reported


def test_an_aborted_rank_is_not_the_root_cause():
    monitor = make_monitor()
    monitor.state.apply(wire.Gone(rank=1, seq=0, exit_code=-6, ago_ns=1), 10**9)
    for rank in (0, 2, 3):
        monitor.state.apply(wire.Gone(rank=rank, seq=0, exit_code=-15, ago_ns=1), 2 * 10**9)

    assert root_cause(monitor) == ""
