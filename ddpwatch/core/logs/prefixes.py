"""Writer of a log line, from the prefixes that launchers, loggers and process groups add.

`[rank3]:` and the default process group give global ranks. A launcher's `[default3]:` is a local rank, and srun's `3: `
is a task, which may be a whole host: both are used only as a fallback, and are not sure.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ddpwatch.core.state.sanitize import NAME_CHARS, sanitize

DEFAULT_GROUP: Final = "default_pg"
MAX_PREFIXES: Final = 8
"""Max prefixes of a line: scheduler, container, launcher, rank and logger are five."""
HEAD_CHARS: Final = 400
"""Characters at the beginning of a line in which prefixes are searched."""

# One prefix, with undecodable characters before it. Every repetition is bounded.
_PREFIX: Final = re.compile(
    r"""[\s\ufffd]{0,40}(?:
      \[rank(?P<rank>\d{1,7})\]:?
    | \[(?P<role>[A-Za-z_-]{1,40})(?P<local>\d{1,6})\]:
    | (?P<task>\d{1,7}):(?=\s)
    | \[?\d{4}-\d\d-\d\d[T\ ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?:?(?=\s|\[)
    | [A-Z][a-z]{2}\ {1,2}\d{1,2}\ \d\d:\d\d:\d\d(?:\.\d{1,9})?\ [\w.-]{1,64}\ [\w./@-]{1,64}(?:\[\d{1,9}\])?:(?=\s)
    | \[?\d{10}(?:[.,]\d{1,9})?\]?:?(?=\s)
    | \[?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]?:?(?=\s|\[)
    | \([A-Za-z_]\w{0,60}\ pid=\d{1,9}[^)\n]{0,80}\)(?=\s)
    | \[?[VIWEF](?:\d{3,4}\ \d\d:\d\d:\d\d(?:\.\d{1,9})?)?(?:\ {1,4}\d{1,9})?
      \ [\w./+-]{1,200}\.(?:cpp|cc|hpp|h|cu|py):\d{1,7}\]
    | (?=[A-Za-z_]*[0-9.-])(?![\w.]{0,200}(?:Error|Exception|Interrupt|Warning|Exit):)
      [A-Za-z0-9_][\w.-]{0,63}(?:\s{0,20}\||:)(?=\s)
    )""",
    re.VERBOSE,
)
_RANK: Final = re.compile(r"\[rank(\d{1,7})\]:")
_GROUP: Final = re.compile(
    r"\[PG (?:ID (?P<id>\d{1,9}) PG GUID (?P<uid>[^\s()\]]{0,80})(?:\((?P<desc>[^)\]]{0,80})\))?"
    r"|(?P<name>[^\s\]]{1,80})(?: \((?P<old_desc>[^)\]]{0,80})\))?) Rank (?P<rank>\d{1,7})\]"
)
_UNTRUSTED: Final = re.compile(r"\[Rank (\d{1,7})\]")


class Group(NamedTuple):
    """A process group named in a line, with the writer's rank in it."""

    name: str
    """`default_pg`, or description and id, because several groups may share a description."""
    rank: int


class Writer(NamedTuple):
    """Rank and process group of a line's writer."""

    rank: int | None
    rank_sure: bool
    """Whether the rank is certainly global."""
    group: Group | None
    body_at: int
    """Index of the first character after the prefixes."""


def read_group(text: str) -> Group | None:
    """The first process group named in the text; None if there is none."""
    start = text.find("[PG ")
    found = _GROUP.match(text, start) if start >= 0 else None
    if found is None:
        return None
    desc = found["desc"] or found["old_desc"] or ""
    uid = (found["uid"] or found["id"] if found["id"] else found["name"]) or ""
    if desc == DEFAULT_GROUP or (not desc and uid == "0"):
        return Group(DEFAULT_GROUP, int(found["rank"]))
    return Group(sanitize(f"{desc} {uid}".strip(), NAME_CHARS), int(found["rank"]))


def read_writer(text: str) -> Writer:
    """Parse the prefixes; everything after the last known prefix is the body."""
    at = 0
    hints: dict[str, int] = {}
    for _ in range(MAX_PREFIXES):
        found = _PREFIX.match(text, at, min(len(text), at + HEAD_CHARS))
        if found is None:
            break
        at = found.end()
        hints |= {name: int(found[name]) for name in ("rank", "local", "task") if found[name]}
    while at < len(text) and text[at] in " \ufffd":
        at += 1
    group = read_group(text)
    rank, sure = _rank(text, hints, group)
    return Writer(rank, sure, group, at)


def _rank(text: str, hints: dict[str, int], group: Group | None) -> tuple[int | None, bool]:
    if "rank" in hints:
        return hints["rank"], True
    if found := _RANK.search(text, 0, HEAD_CHARS):
        return int(found[1]), True
    if group is not None and group.name == DEFAULT_GROUP:
        return group.rank, True
    if "local" in hints:
        # A local rank equals the global rank on the first host only.
        return (None if hints.get("task") else hints["local"]), False
    if "task" in hints:
        return hints["task"], False
    if group is None and (untrusted := _UNTRUSTED.search(text)):
        # torch prints the rank of the first work ever logged, within that work's process group.
        return int(untrusted[1]), False
    return None, False
