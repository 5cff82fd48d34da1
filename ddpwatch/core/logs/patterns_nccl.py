"""Patterns of NCCL and gloo lines: timeouts, desync reports, transport errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ddpwatch.core.logs.pattern import INT, RANKS, shape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ddpwatch.core.logs.pattern import LinePattern

_WORK: Final = (
    rf"WorkNCCL\(SeqNum=(?P<seq>{INT}), OpType=(?P<op>\w{{1,80}})(?:, TensorShape=\[(?P<shape>[\d, ]{{0,200}})\])?"
    rf"(?:, NumelIn=(?P<numel_in>{INT}), NumelOut=(?P<numel_out>{INT}))?, Timeout\(ms\)=(?P<timeout_ms>{INT})\)"
)
_ENDED: Final = (
    rf"(?:,| PG status:) last enqueued (?:NCCL )?work: (?P<enqueued>{INT})"
    rf"(?:, last started work: (?P<started>{INT}) \((?P<started_op>[^)]{{0,80}})\))?"
    rf", last completed (?:NCCL )?work: (?P<completed>{INT})"
)
_ADDRESS: Final = rf"\[(?P<peer_host>[^\]]{{1,200}})\]:(?P<peer_port>{INT})"


def _nccl() -> Iterator[LinePattern]:
    yield shape(
        "nccl-timeout",
        "error",
        "Watchdog caught collective operation timeout: ",
        rf"(?:{_WORK} ran for (?P<elapsed_ms>{INT}) milliseconds)?",
    )
    yield shape("nccl-progress", "error", "Timeout at NCCL work: ", rf"(?P<seq>{INT}){_ENDED}")
    yield shape("nccl-progress", "error", "detected by watchdog at work: ", rf"(?P<seq>{INT}){_ENDED}")
    yield shape("nccl-progress", "error", "detected by watchdog at work sequence id: ", rf"(?P<seq>{INT}){_ENDED}")
    status = rf"last enqueued NCCL work: (?P<enqueued>{INT}), last completed NCCL work: (?P<completed>{INT})"
    yield shape("nccl-progress", "info", "NCCL Work update periodically: ", status)
    yield shape(
        "dump-signal",
        "warning",
        "Received a ",
        r"(?:global |dump )(?:timeout|signal)[^.]{0,200}?from +(?:rank (?P<from_rank>-?\d{1,20})|this local|another)"
        r".{0,300}?L" + status[1:],
    )
    yield shape(
        "nccl-async-error",
        "error",
        "Collective WorkNCCL(",
        rf"{_WORK[len('WorkNCCL') + 2 :]} raised the following async exception: (?P<error>.{{0,400}})",
    )
    yield shape(
        "nccl-async-error",
        "error",
        "found async exception when checking for NCCL errors: ",
        r"(?P<error>.{0,400})",
    )
    yield shape("watchdog-abort", "error", "Some NCCL operations have failed or timed out", detail="failed")
    yield shape("watchdog-abort", "error", "To avoid data inconsistency, we are taking the entire process down")
    yield shape(
        "nccl-aborted",
        "error",
        "NCCL communicator was aborted on rank ",
        r"(?P<rank>\d{1,7})(?:\. +Original "
        r"reason for failure was: (?P<reason>.{0,400}))?",
    )
    yield shape("watchdog-abort", "error", "watchdog thread terminated with exception: ", r"(?P<reason>.{0,400})")
    yield shape("watchdog-abort", "error", "instance of 'c10::DistBackendError'")
    yield shape("heartbeat", "error", "watchdog got stuck for ", rf"(?P<stuck_s>{INT}) seconds", detail="stuck")
    yield shape(
        "heartbeat",
        "error",
        "Terminating the process after attempting to dump debug info, due to ",
        r"(?P<reason>[^.]{1,200})\.",
        detail="kill",
    )
    yield shape(
        "heartbeat",
        "error",
        "Heartbeat monitor timed out!",
        rf".{{0,200}}?workMetaList_\.size\(\)=(?P<in_flight>{INT})",
        detail="stuck",
    )
    yield shape("heartbeat", "error", "NCCL monitor thread timeout", detail="stuck")
    yield shape("gil-held", "error", "Could not acquire GIL within 300 ms on exit")
    yield shape("remote-error", "warning", "remote error detected from rank: ", rf"(?P<from_rank>{INT})")
    yield shape(
        "nccl-ras",
        "info",
        " has launched up to operation ",
        rf"(?P<launched>{INT})",
        head=r"Rank (?P<rank>\d{1,7})",
        about=True,
    )
    yield shape("nccl-ras", "info", " has not launched any operations", head=r"Rank (?P<rank>\d{1,7})", about=True)


def _desync() -> Iterator[LinePattern]:
    yield shape(
        "desync-timeout",
        "error",
        "Timeout at collective: ",
        rf"(?P<op>\w{{1,80}}), #(?P<seq>{INT})",
        head=r"- \[(?P<rank>\d{1,7})\] ",
        about=True,
    )
    yield shape(
        "desync-report",
        "error",
        "are the lagging ranks that caused this timeout",
        head=rf"ranks \[{RANKS}\] ",
        detail="never-joined",
    )
    yield shape(
        "desync-report",
        "error",
        "joined but didn't finish collective #",
        rf"(?P<seq>{INT})",
        head=rf"\[{RANKS}\] ",
        detail="stuck",
    )
    yield shape(
        "desync-report",
        "error",
        "finished collective #",
        rf"(?P<seq>{INT}), but didn't join collective #(?P<next_seq>{INT})",
        head=rf"\[{RANKS}\] ",
        detail="not-joined",
    )


def _nccl_errors() -> Iterator[LinePattern]:
    yield shape(
        "nccl-init",
        "warning",
        " is setting up NCCL communicator",
        r".{0,120}? by key '(?P<key>[^']{0,200})'",
        head=r"\[(?P<rank>\d{1,7})\]",
    )
    peer = r"peer (?P<peer_host>[^\s<]{1,200})(?:<(?P<peer_port>\d{1,7})>)?(?: with status=(?P<status>\S{1,80}))?"
    warning = (
        r"(?P<host>[\w.-]{1,100}):(?P<pid>\d{1,10}):(?P<tid>\d{1,10}) \[(?P<gpu>\d{1,5})\] "
        r"(?:(?P<source_file>[^\s:]{1,100}):(?P<source_line>\d{1,7}) (?:\([^)]{0,80}\) )?)?"
    )
    yield shape("nccl-warn", "warning", "NCCL WARN ", r"(?P<message>.{0,400})", head=warning)
    yield shape("nccl-peer", "warning", "Connection closed by remote ", peer)
    yield shape("nccl-peer", "warning", "Got completion from ", peer)
    yield shape(
        "nccl-error",
        "error",
        "NCCL error in: ",
        r"(?P<source_file>[^:]{1,200}):(?P<source_line>\d{1,7}), (?P<error>.{1,400}?)"
        r", NCCL version (?P<version>[\d.]{1,20})",
    )
    for name in (
        "UnhandledCudaError",
        "SystemError",
        "InternalError",
        "InvalidArgument",
        "InvalidUsage",
        "RemoteError",
    ):
        yield shape("nccl-error", "error", f"nccl{name}: ", r"(?P<error>.{0,400})", detail=f"nccl{name}")


def _gloo() -> Iterator[LinePattern]:
    yield shape(
        "gloo-timeout",
        "error",
        "Timed out waiting ",
        rf"(?P<timeout_ms>{INT})ms for (?P<direction>recv|send) operation to complete",
    )
    yield shape("gloo-timeout", "error", "Application timeout caused pair closure", detail="cascade")
    for hint in ("Connection closed by peer ", "Read error ", "Socket closed "):
        yield shape("gloo-closed", "error", hint, _ADDRESS)
    for hint in ("Read timeout ", "Write timeout ", "Connect timeout "):
        yield shape("gloo-timeout", "error", hint, _ADDRESS)
    yield shape(
        "monitored-barrier",
        "error",
        " failed to pass monitoredBarrier in ",
        rf"(?P<timeout_ms>{INT}) ms",
        head=rf"Ranks? {RANKS}",
    )
    yield shape(
        "barrier-reached",
        "error",
        " successfully reached monitoredBarrier, but received errors",
        head=r"Rank (?P<rank>\d{1,7})",
    )
    yield shape(
        "barrier-timeout",
        "error",
        " timed out in monitoredBarrier after ",
        rf"(?P<timeout_ms>{INT}) ms",
        head=r"Rank (?P<rank>\d{1,7})",
    )


COLLECTIVES: Final = (*_nccl(), *_desync(), *_nccl_errors(), *_gloo())
"""Patterns of collectives, in the order in which they are tried."""
