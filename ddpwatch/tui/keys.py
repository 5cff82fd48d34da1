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
    Binding("left", "scrub(-1)", "a step back"),
    Binding("right", "scrub(1)", "a step on"),
    Binding("shift+left", f"scrub(-{LONG_SCRUB_STEPS})", "many steps back"),
    Binding("shift+right", f"scrub({LONG_SCRUB_STEPS})", "many steps on"),
    Binding("l", "live", "live"),
    Binding("slash", "filter", "filter"),
    Binding("s", "sort_next", "sort"),
    Binding("S", "sort_turn", "turn the order"),
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
    Key("esc", "back", "leave", "go back to where you came from", ("rank",)),
    Key("c", "copy", "copy", "copy the selected alert as text", ("alerts",)),
    Key("x", "", "open_stuck", "while the job hangs: open the page of the rank that the others wait for"),
    Key("/", "filter", "filter", "show only ranks with these words: a rank, a host, a state, a rule", _TABLES),
    Key("s", "sort", "sort_next", "sort by the next column; S turns the order round, and so does a click", _SORTED),
    Key("w", "worst", "follow_worst", "keep the worst rank on top, with the cursor on it", _TABLES),
    Key("space", "pause", "pause", "stand still while the run goes on; again goes back to live"),
    Key("← →", "time", "scrub(-1)", "go back and forth in time by a step, with shift by twenty"),
    Key("l", "live", "live", "come back to now"),
    Key("r", "runs", "runs", "choose another run, where there is one; esc goes back to this one"),
    Key("?", "help", "help", "explain every number"),
    Key("q", "quit", "quit", "leave; the training does not notice"),
    Key("1-6", "", "", "go to a screen; 7 is the summary of a run that has ended"),
    Key("↑ ↓", "", "", "move the cursor, or scroll; page up and down, home and end work too"),
    Key("e", "", "export", "write this screen as an SVG file into the current directory"),
    Key("ctrl+p", "", "", "find a command or a theme"),
)


REPLAY_KEYS: Final = (
    Key("space", "play/pause", "pause", "play the recording, or stand still"),
    Key(". ,", "step", "step(1)", "one step on or back, and stand still there"),
    Key("n N", "alert", "alert(1)", "go to where the next alert was opened, or the one before"),
    Key("[ ]", "10 s", "jump(10)", "ten seconds back or on; { and } five minutes"),
    Key("+ -", "speed", "faster(1)", "play faster or slower"),
    Key("g", "go to", "go_to", "go to a time: 03:41, 03:41:20, a date and a time, +90s from the beginning, 50%"),
    Key("home end", "", "seek_part(0)", "go to the first step or alert of the recording, or to its end"),
)
"""Keys of a replay, in place of those in `_NOT_IN_REPLAY`."""
_NOT_IN_REPLAY: Final = frozenset({"space", "l", "← →", "r"})
REPLAY_BINDINGS: Final = (
    Binding("full_stop", "step(1)", "a step on"),
    Binding("comma", "step(-1)", "a step back"),
    Binding("n", "alert(1)", "next alert"),
    Binding("N", "alert(-1)", "last alert"),
    Binding("right_square_bracket", "jump(10)", "10 s on"),
    Binding("left_square_bracket", "jump(-10)", "10 s back"),
    Binding("right_curly_bracket", "jump(300)", "5 min on"),
    Binding("left_curly_bracket", "jump(-300)", "5 min back"),
    Binding("plus,equals_sign", "faster(1)", "faster"),
    Binding("minus", "faster(-1)", "slower"),
    # With priority over the lists, which use these keys in a live run.
    Binding("g", "go_to", "go to a time", priority=True),
    Binding("home", "edge(0)", "beginning", priority=True),
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
    return [("space", "go on", "live"), ("l", "live", "live"), *(key for key in listed if key[0] != "space")]


def all_keys(*, replayed: bool = False) -> list[tuple[str, str]]:
    """Keys and sentences for the help."""
    kept = [key for key in KEYS if not replayed or key.shown not in _NOT_IN_REPLAY - {"← →"}]
    return [(key.shown, key.sentence) for key in (*(REPLAY_KEYS if replayed else ()), *kept)]
