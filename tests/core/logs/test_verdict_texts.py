"""Every text of a verdict, as one page of prose to review.

After a change of words: `DDPWATCH_MESSAGES_UPDATE=1 pytest tests/core/logs/test_verdict_texts.py`, then read the diff.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

from tests.builders.golden import assert_as_reviewed
from tests.builders.job_logs import GLOO, PEER, dump_signal, torchrun_report, verdict_of, waiting

GOLDEN = Path(__file__).parent / "verdicts.golden.txt"
MISMATCH = (
    "[rank{}]: RuntimeError: Detected mismatch between collectives on ranks. Rank {} is running collective: "
    "CollectiveFingerPrint(SequenceNumber=7, OpType=ALLREDUCE), but Rank 1 is running collective: "
    "CollectiveFingerPrint(SequenceNumber=7, OpType=BROADCAST)."
)
GLOO_MISMATCH = (
    "op.preamble.length <= op.nbytes. 8192 vs 4096. Received data size doesn't match expected size. Is there a "
    "distributed collective mismatch in your code?"
)
XID = "kernel: NVRM: Xid (PCI:0000:3b:00): {}, pid={}, name=python, GPU has fallen off the bus."
OOM_KILL = "kernel: Out of memory: Killed process {} (python) total-vm:99kB, anon-rss:32505856kB, file-rss:0kB"
WAITS = {f"{rank}.log": waiting(rank) for rank in range(4)}


def all_but(rank, logs=None):
    return {name: text for name, text in (logs or WAITS).items() if name != f"{rank}.log"}


def exits(*codes, first=0):
    return {"torchrun.log": torchrun_report(*((rank, code, 10 + rank) for rank, code in enumerate(codes)), first=first)}


def desync(*lines):
    return {"all.log": "\n".join(f"[rank0]:[E ProcessGroupNCCL.cpp:1]   {line}" for line in lines)}


SAMPLES = {
    "mismatch, one rank": {"all.log": "\n".join(MISMATCH.format(rank, rank) for rank in (0, 2, 3))},
    "mismatch, two ranks": {"all.log": MISMATCH.format(0, 0)},
    "mismatch by size": {"all.log": f"[rank2]: {GLOO_MISMATCH}"},
    "different collectives": {
        f"{rank}.log": waiting(rank, enqueued=9, op="BROADCAST" if rank == 1 else "ALLREDUCE") for rank in range(4)
    },
    "GPU fault": {"dmesg": XID.format(79, 11)} | exits(-15, -6, first=1),
    "CUDA out of memory": {
        "all.log": "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1\n"
        f"[rank0]: {PEER}"
    },
    "host out of memory": {"dmesg": OOM_KILL.format(11)} | exits(-15, -9, first=1),
    "host out of memory, another pid": {"dmesg": OOM_KILL.format(4711)} | exits(-15, -9, first=1),
    "host out of memory, no pid known": {"dmesg": OOM_KILL.format(4711)},
    "CUDA error": {"all.log": "[rank1]: RuntimeError: CUDA error: an illegal memory access was encountered"},
    "DDP error": {
        "all.log": "[rank1]: RuntimeError: Expected to have finished reduction in the prior iteration before starting"
    },
    "exception": {"all.log": f"[rank1]: ValueError: bad sample\n[rank0]: {PEER}\n[rank2]: {PEER}"},
    "exception without a rank": {"all.log": "ValueError: bad sample"},
    "crash": {"all.log": "[rank1]: Fatal Python error: Segmentation fault"},
    "killed": exits(-15, -9, first=1),
    "signal": exits(-15, -11, first=1),
    "exit code": exits(-15, 3, first=1) | {"rank0.log": f"[rank0]: {PEER}"},
    "exit code alone": exits(1, -15),
    "exit codes alone, two hosts": exits(1, 1) | {"other.log": exits(1, 1, first=1)["torchrun.log"]},
    "two ranks killed": exits(-9, -9) | {"other.log": exits(-9, -9, first=1)["torchrun.log"]},
    "aborted": exits(-6, -15),
    "desync report, not joined": desync("[1] finished collective #8, but didn't join collective #9"),
    "desync report, never joined": desync("ranks [1, 2] are the lagging ranks that caused this timeout"),
    "desync report, stuck": desync("[0, 1] joined but didn't finish collective #9"),
    "monitored barrier": {"all.log": "[rank0]: RuntimeError: Rank 1 failed to pass monitoredBarrier in 30000 ms"},
    "behind": all_but(2) | {"2.log": dump_signal(2, enqueued=8, first=0)},
    "behind, not proven": all_but(2) | {"2.log": dump_signal(2, enqueued=10, first=0)},
    "behind by their timeouts": {"0.log": waiting(0, seq=9), "1.log": waiting(1, seq=11)},
    "no lines": all_but(2),
    "one log only": {"0.log": waiting(0)},
    "all joined": WAITS,
    "watchdog": {"all.log": "[rank1]:[E ProcessGroupNCCL.cpp:1] ProcessGroupNCCL's watchdog got stuck for 480 seconds"},
    "watchdog, GIL": {"all.log": "[rank1]: Could not acquire GIL within 300 ms on exit, possible GIL induced hang"},
    "scheduler": {
        "slurm.out": "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***"
    },
    "cancelled": {"slurm.out": "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-02T03:04:05 ***"},
    "interrupted": {"all.log": "[rank0]: KeyboardInterrupt"},
    "gloo timeout with the report of torchrun": {"all.log": f"[rank0]: {GLOO}\n" + exits(1, -15)["torchrun.log"]},
    "gloo timeout": {f"rank{rank}.log": f"[rank{rank}]: {GLOO}" for rank in (0, 1, 3)},
    "launcher signaled": {"torchrun.log": "api.py:753] Received 15 death signal, shutting down workers"},
    "launcher signaled, by name": {"torchrun.log": "api.py:753] Received Signals.SIGTERM death signal"},
    "connections": {f"rank{rank}.log": f"[rank{rank}]: {PEER}" for rank in (0, 1, 3, 4, 6)},
    "store lost": {"all.log": "[rank1]: DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed."},
    "NCCL error": {"all.log": "[rank1]: n1:9:10 [0] NCCL WARN Connection closed by remote peer n2<4711>"},
    "rendezvous": {"all.log": "DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients joined."},
    "NCCL timeout": {"all.log": "[rank1]: Some NCCL operations have failed or timed out."},
    "store timeout": {"all.log": "[rank1]: DistStoreError: wait timeout after 60000ms, keys: /x"},
}


def test_every_text_of_a_verdict_is_the_reviewed_one():
    pages = []
    for title, logs in SAMPLES.items():
        verdict = verdict_of(logs)
        assert verdict is not None, title
        sure = "certain" if verdict.certain else "likely"
        pages.append("\n".join([f"[{title}] {verdict.cause}, {sure}", *wrap(verdict.text, 118), ""]))

    assert_as_reviewed("\n".join(pages), GOLDEN)
