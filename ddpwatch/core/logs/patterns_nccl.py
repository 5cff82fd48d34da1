"""Patterns of NCCL and gloo lines: timeouts, desync reports, transport errors."""

from __future__ import annotations

from typing import Final

from ddpwatch.core.logs.pattern import INT, RANK, RANKS, REST, error, info, warning

_WORK: Final = (
    rf"SeqNum=(?P<seq>{INT}), OpType=(?P<op>\w{{1,80}})(?:, TensorShape=\[(?P<shape>[\d, ]{{0,200}})\])?"
    rf"(?:, NumelIn=(?P<numel_in>{INT}), NumelOut=(?P<numel_out>{INT}))?, Timeout\(ms\)=(?P<timeout_ms>{INT})\)"
)
_AT_WORK: Final = (
    rf"(?P<seq>{INT})(?:,| PG status:) last enqueued (?:NCCL )?work: (?P<enqueued>{INT})"
    rf"(?:, last started work: (?P<started>{INT}) \((?P<started_op>[^)]{{0,80}})\))?"
    rf", last completed (?:NCCL )?work: (?P<completed>{INT})"
)
_STATUS: Final = rf"ast enqueued NCCL work: (?P<enqueued>{INT}), last completed NCCL work: (?P<completed>{INT})"
_NCCL: Final = (
    error("nccl-timeout", "Watchdog caught collective operation timeout: ",
          rf"(?:WorkNCCL\({_WORK} ran for (?P<elapsed_ms>{INT}) milliseconds)?"),
    error("nccl-progress", "Timeout at NCCL work: ", _AT_WORK),
    error("nccl-progress", "detected by watchdog at work: ", _AT_WORK),
    error("nccl-progress", "detected by watchdog at work sequence id: ", _AT_WORK),
    info("nccl-progress", "NCCL Work update periodically: ", rf"l{_STATUS}"),
    warning("dump-signal", "Received a ",
            rf"(?:global |dump )(?:timeout|signal)[^.]{{0,200}}?from +(?:rank (?P<from_rank>{INT})|this local|another)"
            rf".{{0,300}}?L{_STATUS}"),
    error("nccl-async-error", "Collective WorkNCCL(",
          rf"{_WORK} raised the following async exception: (?P<error>{REST})"),
    error("nccl-async-error", "found async exception when checking for NCCL errors: ", rf"(?P<error>{REST})"),
    error("watchdog-abort", "Some NCCL operations have failed or timed out", detail="failed"),
    error("watchdog-abort", "To avoid data inconsistency, we are taking the entire process down"),
    error("nccl-aborted", "NCCL communicator was aborted on rank ",
          rf"{RANK}(?:\. +Original reason for failure was: (?P<reason>{REST}))?"),
    error("watchdog-abort", "watchdog thread terminated with exception: ", rf"(?P<reason>{REST})"),
    error("watchdog-abort", "instance of 'c10::DistBackendError'"),
    error("heartbeat", "watchdog got stuck for ", rf"(?P<stuck_s>{INT}) seconds", detail="stuck"),
    error("heartbeat", "Terminating the process after attempting to dump debug info, due to ",
          r"(?P<reason>[^.]{1,200})\.", detail="kill"),
    error("heartbeat", "Heartbeat monitor timed out!",
          rf".{{0,200}}?workMetaList_\.size\(\)=(?P<in_flight>{INT})", detail="stuck"),
    error("heartbeat", "NCCL monitor thread timeout", detail="stuck"),
    error("gil-held", "Could not acquire GIL within 300 ms on exit"),
    warning("remote-error", "remote error detected from rank: ", rf"(?P<from_rank>{INT})"),
    info("nccl-ras", " has launched up to operation ", rf"(?P<launched>{INT})", head=rf"Rank {RANK}", about=True),
    info("nccl-ras", " has not launched any operations", head=rf"Rank {RANK}", about=True),
)  # fmt: skip

_DESYNC: Final = (
    error("desync-timeout", "Timeout at collective: ", rf"(?P<op>\w{{1,80}}), #(?P<seq>{INT})",
          head=rf"- \[{RANK}\] ", about=True),
    error("desync-report", "are the lagging ranks that caused this timeout",
          head=rf"ranks \[{RANKS}\] ", detail="never-joined"),
    error("desync-report", "joined but didn't finish collective #", rf"(?P<seq>{INT})",
          head=rf"\[{RANKS}\] ", detail="stuck"),
    error("desync-report", "finished collective #", rf"(?P<seq>{INT}), but didn't join collective #(?P<next_seq>{INT})",
          head=rf"\[{RANKS}\] ", detail="not-joined"),
)  # fmt: skip

_PEER: Final = r"peer (?P<peer_host>[^\s<]{1,200})(?:<(?P<peer_port>\d{1,7})>)?(?: with status=(?P<status>\S{1,80}))?"
_WARNING: Final = (
    r"(?P<host>[\w.-]{1,100}):(?P<pid>\d{1,10}):(?P<tid>\d{1,10}) \[(?P<gpu>\d{1,5})\] "
    r"(?:(?P<source_file>[^\s:]{1,100}):(?P<source_line>\d{1,7}) (?:\([^)]{0,80}\) )?)?"
)
_ERROR_NAMES: Final = (
    "UnhandledCudaError", "SystemError", "InternalError", "InvalidArgument", "InvalidUsage", "RemoteError",
)  # fmt: skip
_NCCL_ERRORS: Final = (
    warning("nccl-init", " is setting up NCCL communicator", r".{0,120}? by key '(?P<key>[^']{0,200})'",
            head=rf"\[{RANK}\]"),
    warning("nccl-warn", "NCCL WARN ", rf"(?P<message>{REST})", head=_WARNING),
    warning("nccl-peer", "Connection closed by remote ", _PEER),
    warning("nccl-peer", "Got completion from ", _PEER),
    error("nccl-error", "NCCL error in: ",
          r"(?P<source_file>[^:]{1,200}):(?P<source_line>\d{1,7}), (?P<error>.{1,400}?)"
          r", NCCL version (?P<version>[\d.]{1,20})"),
    *(error("nccl-error", f"nccl{name}: ", rf"(?P<error>{REST})", detail=f"nccl{name}") for name in _ERROR_NAMES),
)  # fmt: skip

_ADDRESS: Final = rf"\[(?P<peer_host>[^\]]{{1,200}})\]:(?P<peer_port>{INT})"
_GLOO: Final = (
    error("gloo-timeout", "Timed out waiting ",
          rf"(?P<timeout_ms>{INT})ms for (?P<direction>recv|send) operation to complete"),
    error("gloo-timeout", "Application timeout caused pair closure", detail="cascade"),
    *(error("gloo-closed", hint, _ADDRESS) for hint in ("Connection closed by peer ", "Read error ", "Socket closed ")),
    *(error("gloo-timeout", f"{what} timeout ", _ADDRESS) for what in ("Read", "Write", "Connect")),
    error("monitored-barrier", " failed to pass monitoredBarrier in ", rf"(?P<timeout_ms>{INT}) ms",
          head=rf"Ranks? {RANKS}"),
    error("barrier-reached", " successfully reached monitoredBarrier, but received errors", head=rf"Rank {RANK}"),
    error("barrier-timeout", " timed out in monitoredBarrier after ", rf"(?P<timeout_ms>{INT}) ms",
          head=rf"Rank {RANK}"),
)  # fmt: skip

COLLECTIVES: Final = (*_NCCL, *_DESYNC, *_NCCL_ERRORS, *_GLOO)
"""Patterns of collectives, in the order in which they are tried."""
