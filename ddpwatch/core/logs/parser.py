"""Parse one line of a training log into a `Mark`, by the patterns of torch 1.13 and later.

Most lines match nothing, so a few literal substrings are tested first, and patterns run only on what passes. Lines are
untrusted: escape sequences and control characters are removed before matching, and at most `MAX_CHARS` are read.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ddpwatch.core.logs.pattern import LINE_CHARS, Mark
from ddpwatch.core.logs.patterns_nccl import COLLECTIVES
from ddpwatch.core.logs.patterns_system import CAUSES, REPORTS
from ddpwatch.core.logs.prefixes import Writer, read_writer
from ddpwatch.core.state.sanitize import sanitize

if TYPE_CHECKING:
    from ddpwatch.core.logs.pattern import Severity, Value

LINE_PATTERNS: Final = (*CAUSES, *COLLECTIVES, *REPORTS)
"""All patterns in the order in which they are tried; the first match wins."""

PREFILTERS: Final = (
    "NCCL", "nccl", "atchdog", "ollective", "imed out", "imeout", "GIL", "Received a ", "remote error detected",
    "data inconsistency", "ging ranks", "launched", "onnection ", "Got completion", "Read error", "Socket closed",
    "Barrier", "exitcode", " closing signal ", "Root Cause (", "Other Failures:", "(local_rank: ", "Signal ",
    "oom_kill", "oom-kill", "CANCELLED", "finished reduction", "Parameter ", "with sizes [", "DDP expects",
    "ut of memory", "CUDA error", "NVRM: Xid", "Fatal Python", "Error", "Exception", "Interrupt", "c10d",
    "dump debug info", "-- Process ", "death signal",
)  # fmt: skip
"""Substrings, one of which is in every pattern's hint; a line without any of them is skipped at this cost alone."""


MAX_CHARS: Final = 16_384
"""Characters read of a line."""
FIELD_CHARS: Final = 200
"""Characters kept of a field."""
LARGEST_SEQUENCE: Final = 2**31 - 1
"""Max sequence number; some versions print uninitialized memory before the first work has completed."""
MAX_NUMBER: Final = 2**53
"""Exclusive bound of the absolute value of all other numbers, which a float holds exactly."""
_SEQUENCES: Final = frozenset({"seq", "next_seq", "enqueued", "started", "completed", "launched"})
_NUMBERS: Final = _SEQUENCES | frozenset(
    {
        "numel_in", "numel_out", "timeout_ms", "timeout_s", "elapsed_ms", "stuck_s", "in_flight", "from_rank",
        "source_line", "pid", "tid", "gpu", "peer_port", "port", "waited_s", "joined", "expected", "exit_code",
        "received_bytes", "expected_bytes", "local_rank", "signal_number", "parameter", "params", "other_params",
        "other_rank", "xid", "anon_kb",
    }
)  # fmt: skip
_UNITS_BYTES: Final = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_EXCEPTION: Final = re.compile(
    r"(?P<exception>(?:[A-Za-z_]\w{0,60}\.){0,8}[A-Za-z_]\w{0,80}?(?:Error|Exception|Interrupt))"
    r"(?:: (?P<message>.{0,400})|:?\s*\Z)"
)
_CHATTER: Final = "] NCCL INFO "
"""Marker of NCCL's INFO lines: there are thousands, and none reports a failure."""
_WORDS_OF_EXCEPTIONS: Final = ("Error", "Exception", "Interrupt", "c10d")
# Exceptions raised on a rank because of another rank.
_OF_A_PEER: Final = re.compile(
    r"broken ?pipe|connection ?(?:was )?(?:closed|reset|refused|aborted)|socket (?:closed|error|timeout)"
    r"|remote (?:process|peer)|distnetworkerror|diststoreerror|distbackenderror|failed to (?:recv|send)\b"
    r"|timed out waiting",
    re.IGNORECASE,
)
# Exceptions of other libraries' connections are not about a rank.
_FOREIGN: Final = re.compile(r"(?!torch\.|c10)\w+\.")


def parse_line(text: str) -> Mark | None:
    """Parse one line; None if it reports nothing about a failure."""
    text = text[:MAX_CHARS]
    # A plain loop is faster than one alternation pattern or `any`.
    for word in PREFILTERS:
        if word in text:
            return _read(text)
    return None


def _read(text: str) -> Mark | None:
    if _CHATTER in text:
        return None
    line = sanitize(text, MAX_CHARS)
    for pattern in LINE_PATTERNS:
        if pattern.hint in line and (found := pattern.fields_in(line)) is not None:
            return _mark(line, pattern.kind, pattern.severity, read_writer(line), found, about=pattern.about)
    if not any(word in line for word in _WORDS_OF_EXCEPTIONS):
        return None
    # A progress bar may precede it on the same line.
    return _exception(sanitize(text.rstrip().rpartition("\r")[2], MAX_CHARS) if "\r" in text else line)


def _exception(line: str) -> Mark | None:
    writer = read_writer(line)
    found = _EXCEPTION.match(line, writer.body_at)
    of_a_peer = _OF_A_PEER.search(line, writer.body_at) is not None
    if found is None:
        return _mark(line, "peer-error", "warning", writer, {}) if of_a_peer and "c10d" in line else None
    fields = {"exception": found["exception"], "message": found["message"] or ""}
    if found["exception"].endswith("Interrupt"):
        return _mark(line, "interrupt", "warning", writer, fields)
    kind = "peer-error" if of_a_peer and not _FOREIGN.match(found["exception"]) else "exception"
    return _mark(line, kind, "error", writer, fields)


def _mark(
    line: str, kind: str, severity: Severity, writer: Writer, found: dict[str, str], *, about: bool = False
) -> Mark:
    rank, sure = writer.rank, writer.rank_sure
    stated = found.pop("rank", None)
    if stated is not None and (about or rank is None):
        rank, sure = int(stated), about
    fields = _fields(found)
    if writer.group is not None and rank is None:
        fields["group_rank"] = writer.group.rank
    return Mark(
        kind, severity, sanitize(line, LINE_CHARS), rank, sure, writer.group.name if writer.group else "", fields
    )


def _fields(found: dict[str, str]) -> dict[str, Value]:
    fields: dict[str, Value] = {}
    for name, text in found.items():
        if name == "wanted":
            amount, _, unit = text.partition(" ")
            if amount.count(".") <= 1 and unit in _UNITS_BYTES and amount != ".":
                fields["wanted_bytes"] = int(float(amount) * _UNITS_BYTES[unit])
        elif name not in _NUMBERS:
            fields[name] = sanitize(text, FIELD_CHARS) if name != "ranks" else text
        elif (number := _number(name, int(text))) is not None:
            fields["rss_bytes" if name == "anon_kb" else name] = number * 1024 if name == "anon_kb" else number
    return fields


def _number(name: str, value: int) -> int | None:
    """The value, or None if it is impossible. Works are counted from 1, so -1 for "none yet" becomes 0."""
    if name in _SEQUENCES:
        return max(value, 0) if -1 <= value <= LARGEST_SEQUENCE else None
    return value if -MAX_NUMBER < value < MAX_NUMBER else None
