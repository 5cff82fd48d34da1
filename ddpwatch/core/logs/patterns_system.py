"""Patterns of lines about everything but collectives: GPU, host, DDP, store, launcher, scheduler."""

from __future__ import annotations

from typing import Final

from ddpwatch.core.logs.pattern import INT, RANK, REST, error, info

_OOM_KILL: Final = rf"(?P<pid>{INT}) \((?P<process>[^)]{{0,80}})\)(?:.{{0,200}}?anon-rss:(?P<anon_kb>{INT})kB)?"
_HOST: Final = (
    error("cuda-oom", "CUDA out of memory",
          r"(?:\. Tried to allocate (?P<wanted>[\d.]{1,20} [KMGT]?i?B|[\d.]{1,20} bytes)"
          r"(?:\.? \(?GPU (?P<gpu>\d{1,5}))?)?"),
    error("cuda-error", "CUDA error: ", rf"(?P<error>{REST})"),
    error("xid", "NVRM: Xid (",
          rf"(?P<bus>PCI:[0-9a-fA-F:.]{{1,40}})\): (?P<xid>\d{{1,5}})(?:, pid='?(?:(?P<pid>{INT})|<unknown>)'?)?"
          rf"(?:, name=(?P<process>[^,]{{1,80}}))?, (?P<message>{REST})"),
    error("oom-killer", "Memory cgroup out of memory: Killed process ", _OOM_KILL, detail="cgroup"),
    error("oom-killer", "Out of memory: Killed process ", _OOM_KILL, detail="host"),
    error("crash", "Fatal Python error: ", r"(?P<error>.{0,200})"),
)  # fmt: skip

_DDP: Final = (
    error("ddp-error", "Expected to have finished reduction in the prior iteration", detail="unused"),
    error("ddp-error", "Parameter indices which did not receive grad for rank ",
          rf"{RANK}: (?P<parameters>[\d ]{{1,200}})", detail="unused"),
    error("ddp-error", "Parameter at index ",
          rf"(?P<parameter>{INT})(?: with name (?P<name>\S{{1,200}}))? has been marked as ready twice", detail="twice"),
    error("ddp-error", " in this process with sizes [",
          r"(?P<sizes>[\d, ]{0,200})\] appears not to match (?P<what>sizes|strides) of the same param",
          head=rf"\[{RANK}\]: params\[(?P<parameter>\d{{1,9}})\]", detail="shape"),
    error("ddp-error", "DDP expects same model across all ranks, but Rank ",
          rf"{RANK} has (?P<params>{INT}) params, while rank (?P<other_rank>\d{{1,7}}) has "
          rf"inconsistent (?P<other_params>{INT}) params", detail="params"),
    error("collective-mismatch", "Detected mismatch between collectives on ranks. Rank ",
          rf"{RANK} is running collective: (?P<collective>CollectiveFingerPrint\({REST}?\)), but Rank "
          rf"(?P<other_rank>\d{{1,7}}) is running collective: (?P<other_collective>CollectiveFingerPrint\({REST}?\))"),
)  # fmt: skip

_STORE: Final = (
    error("gloo-mismatch", "distributed collective mismatch",
          head=r"(?P<received_bytes>\d{1,15}) vs (?P<expected_bytes>\d{1,15})\. Received data size doesn't match "
               r"expected size\. Is there a "),
    error("store-timeout", "wait timeout after ", rf"(?P<timeout_ms>{INT})ms, keys: (?P<keys>.{{0,200}})"),
    error("store-timeout", "barrier timeout after ", rf"(?P<timeout_ms>{INT})ms, key: (?P<keys>\S{{0,200}})"),
    error("store-join", "Timed out after ",
          rf"(?P<waited_s>{INT}) seconds waiting for clients\. (?P<joined>{INT})/(?P<expected>{INT}) clients joined"),
    error("store-unreachable", "The client socket has timed out after ",
          rf"(?:(?P<timeout_ms>{INT})ms|(?P<timeout_s>{INT})s)? ?\w{{0,20}} ?while trying to connect to "
          rf"\((?P<host>[^,]{{1,200}}), (?P<port>{INT})\)"),
    error("store-gone", "0 bytes. Connection was likely closed"),
    error("store-timeout", "Socket Timeout"),
)  # fmt: skip

_LAUNCHER: Final = (
    error("torchrun-failure", "failed (exitcode: ",
          rf"(?P<exit_code>{INT})\)\s{{1,20}}local_rank: (?P<local_rank>\d{{1,7}}) \(pid: (?P<pid>{INT})\)"
          r"(?: of (?:binary|fn): (?P<program>\S{1,200}))?"),
    info("torchrun-closing", " closing signal ", r"(?P<signal>SIG\w{1,20})",
         head=rf"Sending process (?P<pid>{INT})"),
    # A signal to the launcher, which it forwards to all ranks.
    error("launcher-signal", " death signal", head=r"Received (?:Signals\.)?(?P<signal>\w{1,20})"),
    error("launcher-signal", "SignalException: Process ",
          rf"(?P<pid>{INT}) got signal: (?:Signals\.)?(?P<signal>\w{{1,20}})"),
    info("torchrun-root", "Root Cause (first observed failure)"),
    info("torchrun-others", "Other Failures:"),
    info("torchrun-rank", "(local_rank: ", r"(?P<local_rank>\d{1,7})\)",
         head=rf"\brank\s{{1,20}}: {RANK} ", about=True),
    error("exit-code", "exitcode",
          rf"\s{{1,20}}: (?P<exit_code>{INT}) \(pid: (?P<pid>{INT})\)(?:\s{{1,20}}\((?P<signal>SIG\w{{1,20}})\))?"),
    error("exit-signal", "Signal ",
          rf"(?P<signal_number>{INT}) \((?P<signal>[\w/]{{1,20}})\) received by PID (?P<pid>{INT})"),
    info("spawn-child", "-- Process ", rf"{RANK} terminated with the following error", about=True),
    error("spawn-exit", "Exception: process ",
          rf"{RANK} terminated with (?:signal (?P<signal>SIG\w{{1,20}})"
          rf"|signal <Unknown signal (?P<signal_number>{INT})>|exit code (?P<exit_code>{INT}))", about=True),
    info("torchrun-report", "errors.ChildFailedError"),
    error("oom-killer", " oom_kill event", head=r"Detected \d{1,7}", detail="slurm"),
    error("oom-killer", " oom-kill event", head=r"Detected \d{1,7}", detail="slurm"),
    error("scheduler-end", "CANCELLED AT ",
          r"\S{1,40} (?P<detail>DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE))"),
    error("cancelled", "CANCELLED AT ", r"(?P<reason>.{0,200})"),
)  # fmt: skip

CAUSES: Final = (*_HOST, *_DDP)
"""Patterns of possible root causes, tried before those of collectives."""
REPORTS: Final = (*_STORE, *_LAUNCHER)
"""Patterns of reports written after a failure, tried last."""
