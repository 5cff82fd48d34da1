"""Patterns of lines about everything but collectives: GPU, host, DDP, store, launcher, scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core.logs.pattern import INT, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpwatch.core.logs.pattern import LinePattern


def _host() -> Iterator[LinePattern]:
    yield shape(
        "cuda-oom",
        "error",
        "CUDA out of memory",
        r"(?:\. Tried to allocate (?P<wanted>[\d.]{1,20} [KMGT]?i?B|[\d.]{1,20} bytes)"
        r"(?:\.? \(?GPU (?P<gpu>\d{1,5}))?)?",
    )
    yield shape("cuda-error", "error", "CUDA error: ", r"(?P<error>.{0,400})")
    yield shape(
        "xid",
        "error",
        "NVRM: Xid (",
        rf"(?P<bus>PCI:[0-9a-fA-F:.]{{1,40}})\): (?P<xid>\d{{1,5}})(?:, pid='?(?:(?P<pid>{INT})|<unknown>)'?)?"
        r"(?:, name=(?P<process>[^,]{1,80}))?, (?P<message>.{0,400})",
    )
    for scope, hint in (
        ("cgroup", "Memory cgroup out of memory: Killed process "),
        ("host", "Out of memory: Killed process "),
    ):
        yield shape(
            "oom-killer",
            "error",
            hint,
            rf"(?P<pid>{INT}) \((?P<process>[^)]{{0,80}})\)(?:.{{0,200}}?anon-rss:(?P<anon_kb>{INT})kB)?",
            detail=scope,
        )
    yield shape("crash", "error", "Fatal Python error: ", r"(?P<error>.{0,200})")


def _ddp() -> Iterator[LinePattern]:
    yield shape("ddp-error", "error", "Expected to have finished reduction in the prior iteration", detail="unused")
    yield shape(
        "ddp-error",
        "error",
        "Parameter indices which did not receive grad for rank ",
        r"(?P<rank>\d{1,7}): (?P<parameters>[\d ]{1,200})",
        detail="unused",
    )
    yield shape(
        "ddp-error",
        "error",
        "Parameter at index ",
        rf"(?P<parameter>{INT})(?: with name (?P<name>\S{{1,200}}))? has been marked as ready twice",
        detail="twice",
    )
    yield shape(
        "ddp-error",
        "error",
        " in this process with sizes [",
        r"(?P<sizes>[\d, ]{0,200})\] appears not to match (?P<what>sizes|strides) of the same param",
        head=r"\[(?P<rank>\d{1,7})\]: params\[(?P<parameter>\d{1,9})\]",
        detail="shape",
    )
    yield shape(
        "ddp-error",
        "error",
        "DDP expects same model across all ranks, but Rank ",
        rf"(?P<rank>\d{{1,7}}) has (?P<params>{INT}) params, while rank (?P<other_rank>\d{{1,7}}) has "
        rf"inconsistent (?P<other_params>{INT}) params",
        detail="params",
    )
    yield shape(
        "collective-mismatch",
        "error",
        "Detected mismatch between collectives on ranks. Rank ",
        r"(?P<rank>\d{1,7}) is running collective: (?P<collective>CollectiveFingerPrint\(.{0,400}?\)), but Rank "
        r"(?P<other_rank>\d{1,7}) is running collective: (?P<other_collective>CollectiveFingerPrint\(.{0,400}?\))",
    )


def _gloo_mismatch() -> Iterator[LinePattern]:
    yield shape(
        "gloo-mismatch",
        "error",
        "distributed collective mismatch",
        "",
        head=r"(?P<received_bytes>\d{1,15}) vs (?P<expected_bytes>\d{1,15})\. Received data size doesn't match "
        r"expected size\. Is there a ",
    )


def _store() -> Iterator[LinePattern]:
    yield shape(
        "store-timeout", "error", "wait timeout after ", rf"(?P<timeout_ms>{INT})ms, keys: (?P<keys>.{{0,200}})"
    )
    yield shape(
        "store-timeout", "error", "barrier timeout after ", rf"(?P<timeout_ms>{INT})ms, key: (?P<keys>\S{{0,200}})"
    )
    yield shape(
        "store-join",
        "error",
        "Timed out after ",
        rf"(?P<waited_s>{INT}) seconds waiting for clients\. (?P<joined>{INT})/(?P<expected>{INT}) clients joined",
    )
    yield shape(
        "store-unreachable",
        "error",
        "The client socket has timed out after ",
        rf"(?:(?P<timeout_ms>{INT})ms|(?P<timeout_s>{INT})s)? ?\w{{0,20}} ?while trying to connect to "
        rf"\((?P<host>[^,]{{1,200}}), (?P<port>{INT})\)",
    )
    yield shape("store-gone", "error", "0 bytes. Connection was likely closed")
    yield shape("store-timeout", "error", "Socket Timeout")


def _launcher() -> Iterator[LinePattern]:
    yield shape(
        "torchrun-failure",
        "error",
        "failed (exitcode: ",
        rf"(?P<exit_code>{INT})\)\s{{1,20}}local_rank: (?P<local_rank>\d{{1,7}}) \(pid: (?P<pid>{INT})\)"
        r"(?: of (?:binary|fn): (?P<program>\S{1,200}))?",
    )
    yield shape(
        "torchrun-closing",
        "info",
        " closing signal ",
        r"(?P<signal>SIG\w{1,20})",
        head=rf"Sending process (?P<pid>{INT})",
    )
    # A signal to the launcher, which it forwards to all ranks.
    yield shape("launcher-signal", "error", " death signal", head=r"Received (?:Signals\.)?(?P<signal>\w{1,20})")
    yield shape(
        "launcher-signal",
        "error",
        "SignalException: Process ",
        rf"(?P<pid>{INT}) got signal: (?:Signals\.)?(?P<signal>\w{{1,20}})",
    )
    yield shape("torchrun-root", "info", "Root Cause (first observed failure)")
    yield shape("torchrun-others", "info", "Other Failures:")
    yield shape(
        "torchrun-rank",
        "info",
        "(local_rank: ",
        r"(?P<local_rank>\d{1,7})\)",
        head=r"\brank\s{1,20}: (?P<rank>\d{1,7}) ",
        about=True,
    )
    yield shape(
        "exit-code",
        "error",
        "exitcode",
        rf"\s{{1,20}}: (?P<exit_code>{INT}) \(pid: (?P<pid>{INT})\)(?:\s{{1,20}}\((?P<signal>SIG\w{{1,20}})\))?",
    )
    yield shape(
        "exit-signal",
        "error",
        "Signal ",
        rf"(?P<signal_number>{INT}) \((?P<signal>[\w/]{{1,20}})\) received by PID (?P<pid>{INT})",
    )
    yield shape(
        "spawn-child",
        "info",
        "-- Process ",
        r"(?P<rank>\d{1,7}) terminated with the following error",
        about=True,
    )
    yield shape(
        "spawn-exit",
        "error",
        "Exception: process ",
        rf"(?P<rank>\d{{1,7}}) terminated with (?:signal (?P<signal>SIG\w{{1,20}})"
        rf"|signal <Unknown signal (?P<signal_number>{INT})>|exit code (?P<exit_code>{INT}))",
        about=True,
    )
    yield shape("torchrun-report", "info", "errors.ChildFailedError")
    yield shape("oom-killer", "error", " oom_kill event", head=r"Detected \d{1,7}", detail="slurm")
    yield shape("oom-killer", "error", " oom-kill event", head=r"Detected \d{1,7}", detail="slurm")
    yield shape(
        "scheduler-end",
        "error",
        "CANCELLED AT ",
        r"\S{1,40} (?P<detail>DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE))",
    )
    yield shape("cancelled", "error", "CANCELLED AT ", r"(?P<reason>.{0,200})")


CAUSES: Final = (*_host(), *_ddp())
"""Patterns of possible root causes, tried before those of collectives."""
REPORTS: Final = (*_gloo_mismatch(), *_store(), *_launcher())
"""Patterns of reports written after a failure, tried last."""
