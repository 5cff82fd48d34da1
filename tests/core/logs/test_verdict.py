"""Root causes found in small logs in the form that real jobs leave them."""

from __future__ import annotations

import random

import pytest

from ddpwatch.core.logs.diagnose import ENDS, MAX_KINDS, LogDiagnosis
from ddpwatch.core.logs.parser import parse_line
from tests.builders.job_logs import GLOO, PEER, dump_signal, torchrun_report, verdict_of, waiting


def test_the_rank_with_the_lowest_enqueued_work_is_the_root_cause_and_not_the_first_to_time_out():
    logs = {f"rank{rank}.log": waiting(rank) for rank in (0, 1, 3)}
    verdict = verdict_of(logs | {"rank2.log": dump_signal(2, enqueued=8, first=0)})

    assert (verdict.culprits, verdict.cause, verdict.certain) == ((2,), "behind", True)
    assert verdict.victims == (0, 1, 3)
    assert "Rank 2 did not join: its last collective was #8" in verdict.text
    assert verdict.evidence[0].source == "rank2.log"


def test_the_same_in_one_file_for_all():
    text = waiting(3) + waiting(0) + dump_signal(2, enqueued=8, first=3) + waiting(1)

    assert verdict_of({"all.log": text}).culprits == (2,)


@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_lines_and_files_does_not_matter(seed):
    logs = {f"rank{rank}.log": waiting(rank) for rank in (0, 1, 3)} | {"rank2.log": dump_signal(2, 8, 0)}
    logs["torchrun.log"] = torchrun_report((0, -6, 10), (1, -6, 11), (2, -15, 12), (3, -6, 13))

    assert verdict_of(logs, shuffle=seed) == verdict_of(logs)


def test_a_rank_without_lines_while_all_others_wait_is_the_likeliest_root_cause():
    verdict = verdict_of({f"{rank}.log": waiting(rank) for rank in (0, 1, 3)})

    assert (verdict.culprits, verdict.cause, verdict.certain) == ((2,), "silent", False)


def test_all_ranks_at_the_same_work_name_no_root_cause():
    verdict = verdict_of({f"{rank}.log": waiting(rank) for rank in range(4)})

    assert (verdict.culprits, verdict.cause, verdict.certain) == ((), "transport", False)
    assert "network" in verdict.text


def test_different_collectives_at_the_same_place_are_reported():
    logs = {f"{rank}.log": waiting(rank, enqueued=9, op="BROADCAST" if rank == 1 else "ALLREDUCE") for rank in range(4)}
    verdict = verdict_of(logs)

    assert (verdict.culprits, verdict.cause) == ((1,), "mismatch")
    assert "BROADCAST on rank 1" in verdict.text


def test_groups_are_not_compared_with_each_other():
    def line(rank, group, enqueued, seq):
        return (
            f"[rank{rank}]:[E ProcessGroupNCCL.cpp:1] [PG ID 1 PG GUID {group}(TP) Rank {rank % 2}]  failure "
            f"detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {enqueued}, "
            "last completed work: 1\n"
        )

    text = line(0, 7, 50, 50) + line(1, 7, 49, 50) + line(2, 8, 5, 5) + line(3, 8, 5, 5)
    verdict = verdict_of({"all.log": text})

    assert verdict.culprits == (1,)
    assert "of TP 7" in verdict.text


def test_the_log_of_one_waiting_rank_names_no_root_cause():
    verdict = verdict_of({"7.log": waiting(7)})

    assert (verdict.culprits, verdict.cause) == ((), "timeout")
    assert "Pass the logs of all ranks" in verdict.text


def test_out_of_gpu_memory_on_one_rank_explains_the_others_timeouts():
    logs = {f"{rank}.log": waiting(rank) for rank in (0, 1, 3)}
    logs["2.log"] = (
        "[rank2]: Traceback\n[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. "
    )
    logs["2.log"] += "GPU 2 has a total capacity of 79.15 GiB of which"
    verdict = verdict_of(logs)

    assert (verdict.culprits, verdict.cause, verdict.certain) == ((2,), "cuda-oom", True)
    assert verdict.victims == (0, 1, 3)
    assert "2.0 GiB" in verdict.text


def test_a_killed_rank_explains_its_peers_broken_connections():
    ranks = "".join(f"[rank{rank}]: Traceback (most recent call last):\n[rank{rank}]: {PEER}\n" for rank in (0, 2, 3))
    report = torchrun_report((0, 1, 10), (1, -9, 11), (2, -15, 12), (3, -15, 13), first=1)
    verdict = verdict_of({"all.log": ranks + report})

    assert (verdict.culprits, verdict.cause, verdict.certain) == ((1,), "killed", True)
    assert verdict.victims == (0, 2, 3)
    assert any("exitcode" in each.text for each in verdict.evidence)


def test_the_kernels_log_shows_that_a_kill_was_for_memory():
    report = torchrun_report((0, 1, 10), (1, -9, 2413), first=1)
    kernel = "[1.0] Out of memory: Killed process 2413 (python3) total-vm:65880868kB, anon-rss:32000000kB"
    verdict = verdict_of({"out.log": f"[rank0]: {PEER}\n{report}", "dmesg": kernel})

    assert (verdict.culprits, verdict.cause, verdict.certain) == ((1,), "host-oom", True)
    assert "31 GiB" in verdict.text


XID = "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=8123, name=python, GPU has fallen off the bus."


def test_a_process_in_the_kernels_log_is_the_rank_if_its_pid_matches():
    kernel = f"{XID}\n[2.0] Out of memory: Killed process 8124 (python) total-vm:123456kB, anon-rss:99999kB"
    verdict = verdict_of({"out.log": torchrun_report((5, -9, 8124)), "dmesg": kernel})

    assert (verdict.culprits, verdict.cause, verdict.certain) == ((5,), "host-oom", True)
    assert "Xid" not in verdict.text


def test_the_verdict_names_the_difference_if_no_pid_in_the_kernels_log_matches():
    """In a container processes have other pids than in the kernel's log."""
    verdict = verdict_of({"out.log": torchrun_report((5, -9, 8124)), "dmesg": XID})

    assert (verdict.culprits, verdict.cause, verdict.certain) == ((5,), "gpu-fault", False)
    assert "lists rank 5 under another pid, so it was rank 5 only if the job ran in a container" in verdict.text


@pytest.mark.parametrize("name", ["log.{}", "logs/7/attempt_0/{}/stderr.log", "rank_{}.err"])
@pytest.mark.parametrize("silent", range(4))
def test_the_rank_without_symptoms_is_the_likeliest_root_cause_even_if_it_is_the_last_rank(silent, name):
    logs = {name.format(rank): f"[rank{rank}]: {PEER}" if rank != silent else "step 80" for rank in range(4)}
    verdict = verdict_of(logs)

    assert f"Most likely it was rank {silent}: all others report the failure." in verdict.text
    assert verdict.victims == tuple(rank for rank in range(4) if rank != silent)


def test_a_file_with_another_kind_of_name_is_not_a_rank():
    logs = {f"log.{rank}": f"[rank{rank}]: {PEER}" for rank in range(3)} | {"train3.log": "step 80"}

    assert "Most likely" not in verdict_of(logs).text


def test_a_launcher_that_saw_a_victim_first_does_not_make_it_the_culprit():
    report = torchrun_report((0, 1, 10), (1, -9, 11), first=0)
    verdict = verdict_of({"all.log": f"[rank0]: {PEER}\n{report}"})

    assert (verdict.culprits, verdict.cause) == ((1,), "killed")


def test_an_exception_explains_sigterm_and_an_escalated_kill():
    report = torchrun_report((0, -15, 10), (1, 1, 11), (2, -9, 12), first=1)
    verdict = verdict_of({"all.log": f"[rank1]: ValueError: bad sample\n{report}"})

    assert (verdict.culprits, verdict.cause, verdict.certain) == ((1,), "exception", True)
    assert verdict.victims == (0, 2)
    assert "raised ValueError: bad sample" in verdict.text


def test_a_caught_exception_is_not_the_root_cause():
    logs = {f"rank{rank}.log": waiting(rank) for rank in (0, 1, 3)}
    logs["rank0.log"] = "[rank0]: ModuleNotFoundError: No module named 'apex'\n" + logs["rank0.log"]
    verdict = verdict_of(logs | {"rank2.log": dump_signal(2, enqueued=8, first=0)})

    assert (verdict.culprits, verdict.cause) == ((2,), "behind")


def test_an_exception_in_another_file_of_a_rank_that_timed_out_later_is_not_the_root_cause():
    waits = "\n".join(f"[rank{rank}]: {GLOO}" for rank in (0, 2))
    verdict = verdict_of({"eval.log": "[rank2]: ValueError: caught", "job.log": waits})

    assert (verdict.cause, verdict.culprits) == ("gloo-timeout", ())


def test_a_rank_that_was_aborted_by_its_watchdog_is_a_victim():
    logs = {f"{rank}.log": waiting(rank) for rank in (0, 1)} | {"2.log": dump_signal(2, 8, 0)}
    logs["torchrun.log"] = torchrun_report((0, -6, 10), (1, -6, 11), (2, -15, 12))
    verdict = verdict_of(logs)

    assert (verdict.culprits, verdict.victims) == ((2,), (0, 1))


def test_aborts_alone_name_no_root_cause():
    closing = "W1116 19:02:44.5 7 torch/distributed/elastic/api.py:1] Sending process 11 closing signal SIGTERM\n"
    verdict = verdict_of({"torchrun.log": closing + torchrun_report((0, -6, 10), (1, -15, 11))})

    assert (verdict.culprits, verdict.cause) == ((), "aborted")
    assert verdict.text.startswith("Rank 0 exited first: it was aborted")


def test_gloo_timeouts_name_no_rank_and_neither_does_the_verdict():
    verdict = verdict_of({"all.log": f"[rank0]: {GLOO}\n[rank1]: {GLOO}\n[rank3]: {GLOO}"})

    assert (verdict.culprits, verdict.cause, verdict.certain) == ((), "gloo-timeout", False)
    assert "name no rank" in verdict.text
    assert "Most likely it was rank 2" in verdict.text


def test_a_rank_without_symptoms_is_not_a_secondary_failure_even_if_the_launcher_ended_it():
    report = torchrun_report((0, 1, 10), (1, -15, 11), (2, 1, 12), first=2)
    verdict = verdict_of({"all.log": f"[rank0]: {GLOO}\n[rank2]: {GLOO}\n{report}"})

    assert (verdict.culprits, verdict.cause, verdict.victims) == ((), "gloo-timeout", (0, 2))


def test_connections_lost_after_a_timeout_are_secondary_failures():
    verdict = verdict_of({"all.log": f"[rank0]: {PEER}\n[rank1]: {GLOO}\n[rank3]: {GLOO}"})

    assert (verdict.cause, verdict.victims) == ("gloo-timeout", (0, 1, 3))
    assert "timed out" in verdict.text
    assert "Most likely it was rank 2" in verdict.text


def test_lost_connections_alone_do_not_name_the_rank_that_died():
    verdict = verdict_of({"all.log": f"[rank0]: {PEER}\n[rank1]: {PEER}"})

    assert (verdict.culprits, verdict.cause, verdict.victims) == ((), "peer-died", (0, 1))


def test_the_desync_report_of_torch_names_the_absent_ranks():
    text = """
[rank0]:[E ProcessGroupNCCL.cpp:475] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=183, \
OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600096 milliseconds before timing out.
     - To our best knowledge, the lagging/dead/mismatched ranks that caused the desync are:
       - [7] finished collective #182, but didn't join collective #183 (count from 1)
     - Snapshot of ranks' latest states:
       #183 started ranks:
         [0, 1, 2, 3, 4, 5, 6] started ALLREDUCE
"""
    verdict = verdict_of({"all.log": text})

    assert (verdict.culprits, verdict.cause, verdict.certain) == ((7,), "absent", True)
    assert "#183" in verdict.text


def test_a_monitored_barrier_names_the_absent_ranks():
    verdict = verdict_of({"all.log": "RuntimeError: [Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 2000 ms"})

    assert (verdict.culprits, verdict.certain) == ((1, 3), True)


def old_timeout(rank, seq=691):
    return (
        f"[E ProcessGroupNCCL.cpp:821] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, TensorShape=[2, 4], Timeout(ms)=1800000) "
        "ran for 1801053 milliseconds before timing out.\n"
        f"[E ProcessGroupNCCL.cpp:456] [Rank {rank}] Some NCCL operations have failed or timed out.\n"
    )


def test_torch_1_13_names_only_the_ranks_that_waited():
    verdict = verdict_of({"all.log": old_timeout(0) + old_timeout(2) + old_timeout(3)})

    assert (verdict.culprits, verdict.cause, verdict.certain) == ((1,), "silent", False)
    assert verdict.victims == (0, 2, 3)


def test_torch_1_13_with_an_exception_in_the_file_of_a_rank():
    logs = {f"job/attempt_0/{rank}/stderr.log": old_timeout(rank) for rank in (0, 2, 3)}
    logs["job/attempt_0/1/stderr.log"] = "Traceback (most recent call last):\nKeyError: 'image'"
    verdict = verdict_of(logs)

    # The number in such a path is a local rank.
    assert (verdict.culprits, verdict.cause, verdict.certain) == ((1,), "exception", False)


def test_a_stuck_watchdog_is_reported():
    line = "[rank1]:[E ProcessGroupNCCL.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank 1] ProcessGroupNCCL's watchdog got "
    verdict = verdict_of(
        {"all.log": f"{line}stuck for 480 seconds without making progress in monitoring enqueued collectives."}
    )

    assert (verdict.culprits, verdict.cause, verdict.certain) == ((1,), "watchdog-stuck", False)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("Timed out after 2 seconds waiting for clients. 1/3 clients joined.", "rendezvous"),
        (
            "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
            "store-gone",
        ),
        ("slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***", "scheduler"),
        ("KeyboardInterrupt", "interrupted"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.", "gpu-fault"),
        ("[0] x.cc:1 NCCL WARN socketProgress: Connection closed by remote peer node2<51234>", "nccl-error"),
        ("ValueError: without a rank", "exception"),
    ],
)
def test_a_cause_without_a_rank_is_reported_without_one(line, cause):
    verdict = verdict_of({"all.log": line})

    assert (verdict.culprits, verdict.cause, verdict.certain) == ((), cause, False)


ENDED = """
W1117 03:58:12.818000 24308 torch/distributed/elastic/agent/server/api.py:753] Received {0} death signal, shutting down
W1117 03:58:12.818000 24308 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 7 closing signal {1}
[rank1]: RuntimeError: DataLoader worker (pid 4711) is killed by signal: Terminated.
[rank0]: RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:36507
Traceback (most recent call last):
    raise SignalException(f"Process {{os.getpid()}} got signal: {{sigval}}", sigval=sigval)
torch.distributed.elastic.multiprocessing.api.SignalException: Process 24308 got signal: {0}
"""


@pytest.mark.parametrize(("reported", "name"), [("15", "SIGTERM"), ("Signals.SIGTERM", "SIGTERM"), ("12", "SIGUSR2")])
def test_neither_a_signal_to_the_launcher_nor_what_follows_is_a_failure_of_a_rank(reported, name):
    verdict = verdict_of({"job.log": ENDED.format(reported, name)})

    assert (verdict.cause, verdict.culprits) == ("terminated", ())
    assert verdict.text.startswith(f"The launcher was terminated from outside by {name} and terminated the ranks")


def test_a_rank_that_failed_before_the_signal_to_the_launcher_is_the_root_cause():
    before = "[rank2]: ValueError: bad"
    verdict = verdict_of({"job.log": before + ENDED.format("15", "SIGTERM")})

    assert (verdict.cause, verdict.culprits) == ("exception", (2,))


def test_a_reset_gpu_context_is_not_a_root_cause():
    assert verdict_of({"dmesg": "NVRM: Xid (PCI:0000:41:00): 45, pid=1234, Ch 00000010"}) is None


def test_healthy_logs_give_no_verdict():
    periodic = "[rank{0}]:[I ProcessGroupNCCL.cpp:1] [PG ID 0 PG GUID 0(default_pg) Rank {0}] NCCL Work update "
    periodic += "periodically: last enqueued NCCL work: 1{0}, last completed NCCL work: 10."

    assert verdict_of({"all.log": "\n".join(["epoch 1", periodic.format(0), periodic.format(1)])}) is None
    assert LogDiagnosis().verdict() is None


def test_a_flood_of_lines_is_bounded_and_keeps_both_ends():
    book = LogDiagnosis()
    mark = parse_line(f"[rank0]: {PEER}")
    numbers = list(range(1, 2001))
    random.Random(0).shuffle(numbers)
    for number in numbers:
        book.add("all.log", number, mark)

    (kept,) = book._kept.values()
    assert [line for line, _, _ in kept] == [*range(1, ENDS + 1), *range(2001 - ENDS, 2001)]
    for number in range(MAX_KINDS + 10):
        book.add(f"{number}.log", 1, mark)
    assert (len(book._kept), book.marks) == (MAX_KINDS, 2000 + MAX_KINDS + 10)


def test_hostile_ranks_and_sources_do_no_harm():
    verdict = verdict_of({"\x1b[31mred\u202e.log": waiting(9_999_999) + waiting(0) + "[rank9999999]: KeyError: 'x'"})

    assert verdict.text.isprintable()
    assert all(each.source == "red.log" and each.text.isprintable() for each in verdict.evidence)


SPAWNED = """
W1116 22:16:04.532000 11069 torch/multiprocessing/spawn.py:165] Terminating process 11189 via signal SIGTERM
Traceback (most recent call last):
    raise ProcessRaisedException(msg, error_index, failed_process.pid)
torch.multiprocessing.spawn.ProcessRaisedException:

-- Process 2 terminated with the following error:
Traceback (most recent call last):
  File "train.py", line 14, in work
KeyError: 'weights'
"""


def test_the_child_that_torch_multiprocessing_names_is_the_rank_that_raised():
    verdict = verdict_of({"job.log": SPAWNED})

    assert verdict.text == "Rank 2 raised KeyError: 'weights'."
    assert (verdict.culprits, verdict.certain) == ((2,), True)


EXITED = """
W1117 08:01:20.785000 1240 torch/multiprocessing/spawn.py:165] Terminating process 1371 via signal SIGTERM
Traceback (most recent call last):
    raise ProcessExitedException(
torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with {how}
"""


@pytest.mark.parametrize(
    ("how", "cause", "text"),
    [
        ("signal SIGKILL", "killed", "Rank 1 was killed (SIGKILL); "),
        ("signal SIGSEGV", "signal", "Rank 1 crashed (SIGSEGV)."),
        ("signal <Unknown signal 99>", "signal", "Rank 1 was terminated (signal 99)."),
        ("exit code 3", "exit", "Rank 1 exited with code 3; "),
    ],
)
def test_the_child_that_torch_multiprocessing_saw_exit_is_the_rank_that_did(how, cause, text):
    verdict = verdict_of({"job.log": EXITED.format(how=how)})

    assert verdict.text.startswith(text)
    assert (verdict.culprits, verdict.cause, verdict.certain) == ((1,), cause, True)


def test_the_first_exit_in_the_report_of_torchrun_alone_blames_no_rank():
    verdict = verdict_of({"torchrun.log": torchrun_report((0, 1, 10), (1, -15, 11))})

    assert (verdict.culprits, verdict.victims, verdict.certain) == ((), (), False)
    assert verdict.text.startswith("Rank 0 exited first (code 1); its error is not in these logs")
    assert "--log-dir logs --redirects 3 --tee 3" in verdict.text


def test_a_rank_that_timed_out_in_gloo_is_a_victim_though_it_exited_first():
    report = torchrun_report((0, 1, 10), (1, -15, 11))
    verdict = verdict_of({"torchrun.log": report, "logs/0/stderr.log": f"[rank0]: {GLOO}"})

    assert (verdict.culprits, verdict.cause, verdict.victims) == ((), "gloo-timeout", (0,))
    assert verdict.text.endswith("Most likely it was rank 1: all others report the failure.")


def test_an_aborted_child_need_not_be_the_root_cause():
    verdict = verdict_of({"job.log": EXITED.format(how="signal SIGABRT")})

    assert (verdict.culprits, verdict.cause) == ((), "aborted")
    assert verdict.text.startswith("Rank 1 exited first: it was aborted by its runtime (SIGABRT)")


def test_a_child_that_exited_after_it_had_lost_a_peer_is_not_the_first_failure():
    verdict = verdict_of({"job.log": f"[rank1]: {PEER}\n[rank2]: ValueError: bad\n{EXITED.format(how='exit code 1')}"})

    assert verdict.culprits == (2,)


@pytest.mark.parametrize("stamp", ["Nov 16 21:49:47 node1 train[123]: ", "1794865784.2857 ", "Nov  6 01:02:03 n-1 a: "])
def test_a_timestamp_before_each_line_hides_no_exception(stamp):
    lines = ["[default1]:[rank1]: ValueError: bad label", f"[default0]:[rank0]: {PEER}"]
    verdict = verdict_of({"job.log": "\n".join(stamp + line for line in lines)})

    assert verdict.culprits == (1,)
    assert verdict.text.startswith("Rank 1 raised ValueError: bad label")
