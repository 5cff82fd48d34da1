"""The keys of the dashboard: bindings, a word for the last line, and a sentence for the help."""

from __future__ import annotations

from typing import Final, NamedTuple

from textual.binding import Binding

TABS: Final = (
    ("overview", "overview"),
    ("ranks", "ranks"),
    ("allreduce", "all-reduce"),
    ("devices", "GPUs"),
    ("alerts", "alerts"),
    ("logs", "logs"),
)
"""Names and titles of the screens, in the order of their number keys."""
SUMMARY: Final = "summary"
LONG_SCRUB_STEPS: Final = 20
"""Number of steps that shift and an arrow key move."""
BINDINGS: Final = (
    *(Binding(str(number), f"show('{name}')", title) for number, (name, title) in enumerate(TABS, 1)),
    Binding("7", f"show('{SUMMARY}')", "summary"),
    Binding("escape", "leave", "back"),
    Binding("space", "pause", "pause"),
    Binding("left", "scrub(-1)", "one step back"),
    Binding("right", "scrub(1)", "one step forward"),
    Binding("shift+left", f"scrub(-{LONG_SCRUB_STEPS})", "20 steps back"),
    Binding("shift+right", f"scrub({LONG_SCRUB_STEPS})", "20 steps forward"),
    Binding("l", "live", "live"),
    Binding("slash", "filter", "filter"),
    Binding("s", "sort_next", "sort"),
    Binding("S", "sort_turn", "reverse the order"),
    Binding("w", "follow_worst", "follow the worst"),
    Binding("x", "open_stuck", "the stuck rank"),
    Binding("c", "copy", "copy"),
    Binding("r", "runs", "runs"),
    Binding("e", "export", "export"),
    Binding("question_mark,h", "help", "help"),
    Binding("q", "quit", "quit"),
    Binding("ctrl+c", "interrupt", "quit", show=False, priority=True),
)
"""Keys of all screens; a focused widget may have more."""


class Key(NamedTuple):
    """One key, or several that belong together, as shown to the user."""

    shown: str
    word: str
    """For the last line; empty = not shown there."""
    action: str
    """Action of a click on it."""
    sentence: str
    screens: tuple[str, ...] = ()
    """Screens on which it works; empty = all."""


_TABLES: Final = ("overview", "ranks")
_SORTED: Final = (*_TABLES, "gpus")
KEYS: Final = (
    Key("⏎", "rank", "open_rank", "open the page of the rank under the cursor", _SORTED),
    Key("esc", "back", "leave", "go back", ("rank",)),
    Key("c", "copy", "copy", "copy the selected alert as text", ("alerts",)),
    Key("x", "", "open_stuck", "while the job hangs: open the page of the rank that the others wait for"),
    Key("/", "filter", "filter", "filter ranks by rank, host, state or rule", _TABLES),
    Key("s", "sort", "sort_next", "sort by the next column; S or a click on the title reverses the order", _SORTED),
    Key("w", "worst", "follow_worst", "keep the worst rank on top, with the cursor on it", _TABLES),
    Key("space", "pause", "pause", "pause the screen while the run continues; again resumes"),
    Key("← →", "time", "scrub(-1)", "go one step back or forward; with shift, 20 steps"),
    Key("l", "live", "live", "return to the live view"),
    Key("r", "runs", "runs", "choose another run, if there is one; esc returns to this one"),
    Key("?", "help", "help", "explain the figures of this screen"),
    Key("q", "quit", "quit", "quit; training is not affected"),
    Key("1-6", "", "", "go to a screen; 7 is the summary of a run that has ended"),
    Key("↑ ↓", "", "", "move the cursor or scroll; also page up, page down, home, end"),
    Key("e", "", "export", "save this screen as an SVG file in the current directory"),
    Key("ctrl+p", "", "", "open the command palette, also for themes"),
)


REPLAY_KEYS: Final = (
    Key("space", "play/pause", "pause", "play or pause the recording"),
    Key(". ,", "step", "step(1)", "go one step forward or back, and pause there"),
    Key("n N", "alert", "alert(1)", "go to the next or previous alert"),
    Key("[ ]", "10 s", "jump(10)", "go 10 s back or forward; { and } 5 min"),
    Key("+ -", "speed", "faster(1)", "play faster or slower"),
    Key("g", "go to", "go_to", "go to a time: 03:41, 03:41:20, a date and a time, +90s from the start, 50%"),
    Key("home end", "", "seek_part(0)", "go to the first step or alert of the recording, or to its end"),
)
"""Keys of a replay, in place of those in `_NOT_IN_REPLAY`."""
_NOT_IN_REPLAY: Final = frozenset({"space", "l", "← →", "r"})
REPLAY_BINDINGS: Final = (
    Binding("full_stop", "step(1)", "one step forward"),
    Binding("comma", "step(-1)", "one step back"),
    Binding("n", "alert(1)", "next alert"),
    Binding("N", "alert(-1)", "previous alert"),
    Binding("right_square_bracket", "jump(10)", "10 s forward"),
    Binding("left_square_bracket", "jump(-10)", "10 s back"),
    Binding("right_curly_bracket", "jump(300)", "5 min forward"),
    Binding("left_curly_bracket", "jump(-300)", "5 min back"),
    Binding("plus,equals_sign", "faster(1)", "faster"),
    Binding("minus", "faster(-1)", "slower"),
    # With priority over the lists, which use these keys in a live run.
    Binding("g", "go_to", "go to a time", priority=True),
    Binding("home", "edge(0)", "start", priority=True),
    Binding("end", "edge(1)", "end", priority=True),
)


def keys_of(
    screen: str,
    *,
    paused: bool = False,
    gpus: bool = False,
    replayed: bool = False,
    ended: bool = False,
    runs: bool = True,
) -> list[tuple[str, str, str]]:
    """Keys for the last line of a screen: key, word, action; while paused, how to resume comes first. With `gpus` the
    screen of devices is a table; `runs` = another run can be chosen.
    """
    screen = "gpus" if gpus and screen == "devices" else screen
    if replayed:
        left_out = set(_NOT_IN_REPLAY)
    else:
        # Live, there is nothing to go back to; after the end there is nothing to pause.
        left_out = {"l"} | ({"space"} if ended else set()) | (set() if runs else {"r"})
        left_out |= {"← →"} if screen == SUMMARY else set()
    known = [key for key in KEYS if key.shown not in left_out]
    listed = [
        (key.shown, key.word, key.action)
        for key in (*(REPLAY_KEYS if replayed else ()), *known)
        if key.word and (not key.screens or screen in key.screens)
    ]
    if replayed or not paused:
        return listed
    if ended:
        return [("l", "the end", "live"), *listed]
    return [("space", "resume", "live"), ("l", "live", "live"), *(key for key in listed if key[0] != "space")]


def all_keys(*, replayed: bool = False) -> list[tuple[str, str]]:
    """Keys and sentences for the help."""
    kept = [key for key in KEYS if not replayed or key.shown not in _NOT_IN_REPLAY - {"← →"}]
    return [(key.shown, key.sentence) for key in (*(REPLAY_KEYS if replayed else ()), *kept)]
