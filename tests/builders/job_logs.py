"""Small logs in the form that real jobs leave them, and the verdict on them."""

from __future__ import annotations

import random

from ddpwatch.core.logs.diagnose import LogDiagnosis
from ddpwatch.core.logs.parser import parse_line

PEER = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:14503"
GLOO = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv "
GLOO += "operation to complete"


def verdict_of(logs, shuffle=None):
    """Verdict on logs, given as text by file name."""
    found = [
        (source, number, mark)
        for source, text in logs.items()
        for number, line in enumerate(text.strip("\n").splitlines(), 1)
        if (mark := parse_line(line)) is not None
    ]
    if shuffle is not None:
        random.Random(shuffle).shuffle(found)
    book = LogDiagnosis()
    for source in logs:
        book.read(source)
    for source, number, mark in found:
        book.add(source, number, mark)
    return book.verdict()


def waiting(rank, seq=9, enqueued=12, op="ALLREDUCE"):
    """Lines that torch 2.8 and later write on a rank that timed out."""
    head = f"[rank{rank}]:[E810 03:04:11.061727749 ProcessGroupNCCL.cpp:683]"
    group = f"[PG ID 0 PG GUID 0(default_pg) Rank {rank}]"
    return f"""
step 8 loss 1.5
{head} [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=80, \
NumelOut=80, Timeout(ms)=600000) ran for 600096 milliseconds before timing out.
{head} {group}  failure detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {enqueued}, \
last completed work: {seq - 1}
{head} {group} Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels
{head} {group} To avoid data inconsistency, we are taking the entire process down.
{head} {group} Process group watchdog thread terminated with exception: [Rank {rank}] Watchdog caught collective
terminate called after throwing an instance of 'c10::DistBackendError'
"""


def dump_signal(rank, enqueued, first):
    """Lines of a late rank when another one signals all ranks to dump."""
    return f"""
[rank{rank}]:[E810 03:04:11.9 ProcessGroupNCCL.cpp:1700] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump \
signal due to a collective timeout from  rank {first} and we will try our best to dump the debug info. Last enqueued \
NCCL work: {enqueued}, last completed NCCL work: {enqueued}.This is most likely caused by incorrect usages
"""


def torchrun_report(*blocks, first=0):
    """Final report of torchrun: (rank, exit code, pid) of each failure, the first observed one apart."""

    def block(index, rank, code, pid):
        name = {-9: "(SIGKILL)", -15: "(SIGTERM)", -6: "(SIGABRT)", -11: "(SIGSEGV)"}.get(code, "")
        return f"""[{index}]:
  time      : 2026-01-02_03:04:05
  host      : node1
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: {pid})  {name}
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""

    root_rank, root_code, root_pid = blocks[first]
    others = "".join(block(n, *each) for n, each in enumerate(blocks) if n != first)
    return f"""
E0102 03:04:05.314000 26902 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {root_code}) \
local_rank: {root_rank} (pid: {root_pid}) of binary: python
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
{others}------------------------------------------------------------
Root Cause (first observed failure):
{block(0, *blocks[first])}============================================================
"""
