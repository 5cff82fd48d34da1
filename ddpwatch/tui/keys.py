"""Every key of the dashboard: what it does, in a word for the last line and in a sentence for the help."""

from __future__ import annotations

from typing import Final, NamedTuple

TABS: Final = (
    ("overview", "overview"),
    ("ranks", "ranks"),
    ("allreduce", "all-reduce"),
    ("devices", "GPUs"),
    ("alerts", "alerts"),
    ("logs", "logs"),
)
"""Name and title of the screens, in the order of their numbers."""


class Key(NamedTuple):
    """One key, or several that belong together."""

    shown: str
    word: str
    """For the last line; empty = it is not told there."""
    action: str
    """What a click on it does."""
    sentence: str
    screens: tuple[str, ...] = ()
    """Where it works; empty = everywhere."""


_TABLES: Final = ("overview", "ranks")
KEYS: Final = (
    Key("⏎", "rank", "open_rank", "open the page of the rank under the cursor", _TABLES),
    Key("esc", "back", "leave", "go back to where you came from", ("rank",)),
    Key("c", "copy", "copy", "copy the selected alert as text", ("alerts",)),
    Key("x", "", "open_stuck", "while the job hangs: open the page of the rank that the others wait for"),
    Key("/", "filter", "filter", "show only ranks with these words: a rank, a host, a state, a rule", _TABLES),
    Key("s", "sort", "sort_next", "sort by the next column; S turns the order round, and so does a click", _TABLES),
    Key("w", "worst", "follow_worst", "keep the worst rank on top, with the cursor on it", _TABLES),
    Key("space", "pause", "pause", "stand still while the run goes on; again goes back to live"),
    Key("← →", "time", "scrub(-1)", "go back and forth in time by a step, with shift by twenty"),
    Key("l", "live", "live", "come back to now"),
    Key("?", "help", "help", "explain every number"),
    Key("q", "quit", "quit", "leave; the training does not notice"),
    Key("1-6", "", "", "go to a screen; 7 is the summary of a run that has ended"),
    Key("↑ ↓", "", "", "move the cursor, or scroll; page up and down, home and end work too"),
    Key("e", "", "export", "write this screen as an SVG file into the current directory"),
    Key("ctrl+p", "", "", "find a command or a theme"),
)


def keys_of(screen: str, *, paused: bool = False) -> list[tuple[str, str, str]]:
    """Those that the last line tells on a screen: key, word, action. While it stands still, first how to go on."""
    told = [(key.shown, key.word, key.action) for key in KEYS if key.word and _works_on(key, screen)]
    if not paused:
        return told
    return [("space", "go on", "live"), *(key for key in told if key[0] not in {"space", "l"})]


def all_keys() -> list[tuple[str, str]]:
    """Key and sentence, for the help."""
    return [(key.shown, key.sentence) for key in KEYS]


def _works_on(key: Key, screen: str) -> bool:
    return not key.screens or screen in key.screens
