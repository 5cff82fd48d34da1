"""Colours: what each level of a cell looks like in each theme."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

from rich.style import Style
from textual.color import Color
from textual.theme import BUILTIN_THEMES, Theme

from ddpwatch.view.cells import Level

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT: Final = "ddpwatch"
COLOUR_BLIND: Final = "ddpwatch-colour-blind"
SIXTEEN: Final = "ddpwatch-16-colours"

VARIABLES: Final = {
    "phase-data": "#c678dd",
    "phase-forward": "#56b6c2",
    "phase-backward": "#5c8fe6",
    "phase-waiting": "#e5a53a",
    "phase-wire": "#f0d98c",
    "phase-optimizer": "#7fbf6a",
    "phase-other": "#7f8794",
    "quiet": "#8b93a1",
    "heat-1": "#6b7280",
    "heat-2": "#d7b54a",
    "heat-3": "#e8893b",
    "heat-4": "#e8504a",
}
"""What a theme may set besides Textual's own variables, and what holds where it does not."""

_LIGHT: Final = {
    "phase-data": "#8a3fa0",
    "phase-forward": "#0f7886",
    "phase-backward": "#2457b3",
    "phase-waiting": "#a86200",
    "phase-wire": "#7a5c00",
    "phase-optimizer": "#35772a",
    "phase-other": "#6a707c",
    "quiet": "#5f6672",
    "heat-1": "#8a909c",
    "heat-2": "#9a7200",
    "heat-3": "#b85a00",
    "heat-4": "#c0221c",
}
# The palette of Okabe and Ito, which people with any of the common forms of colour blindness can tell apart.
_SAFE: Final = {
    "phase-data": "#cc79a7",
    "phase-forward": "#56b4e9",
    "phase-backward": "#3b8fd1",
    "phase-waiting": "#e69f00",
    "phase-wire": "#f0e442",
    "phase-optimizer": "#00a67d",
    "phase-other": "#8f8f8f",
    "quiet": "#a0a0a0",
    "heat-1": "#6b7280",
    "heat-2": "#56b4e9",
    "heat-3": "#f0e442",
    "heat-4": "#e69f00",
}
# Sixteen colours, as the terminal has them: nothing is assumed about what they look like.
_ANSI: Final = {
    **BUILTIN_THEMES["ansi-dark"].variables,
    "phase-data": "ansi_magenta",
    "phase-forward": "ansi_cyan",
    "phase-backward": "ansi_blue",
    "phase-waiting": "ansi_yellow",
    "phase-wire": "ansi_bright_yellow",
    "phase-optimizer": "ansi_green",
    "phase-other": "ansi_bright_black",
    "quiet": "ansi_bright_black",
    "heat-1": "ansi_bright_black",
    "heat-2": "ansi_yellow",
    "heat-3": "ansi_bright_yellow",
    "heat-4": "ansi_bright_red",
}

THEMES: Final = (
    Theme(
        name=DEFAULT,
        primary="#5c8fe6",
        secondary="#56b6c2",
        accent="#e5a53a",
        warning="#f0b429",
        error="#ff6b61",
        success="#7fbf6a",
        foreground="#dfe3ea",
        background="#12151b",
        surface="#12151b",
        panel="#2a303b",
        dark=True,
    ),
    Theme(
        name="ddpwatch-light",
        primary="#2457b3",
        secondary="#0f7886",
        accent="#a86200",
        warning="#a35b00",
        error="#b3201a",
        success="#35772a",
        foreground="#20242b",
        background="#fbfbf8",
        surface="#fbfbf8",
        panel="#d6d8d4",
        dark=False,
        variables=_LIGHT,
    ),
    Theme(
        name=COLOUR_BLIND,
        primary="#56b4e9",
        secondary="#00a67d",
        accent="#f0e442",
        warning="#f0e442",
        error="#e69f00",
        success="#56b4e9",
        foreground="#f2f2f2",
        background="#101010",
        surface="#101010",
        panel="#3a3a3a",
        dark=True,
        variables=_SAFE,
    ),
    Theme(
        name=SIXTEEN,
        primary="ansi_blue",
        secondary="ansi_cyan",
        accent="ansi_yellow",
        warning="ansi_yellow",
        error="ansi_bright_red",
        success="ansi_green",
        foreground="ansi_default",
        background="ansi_default",
        surface="ansi_default",
        panel="ansi_default",
        dark=True,
        ansi=True,
        variables=_ANSI,
    ),
)

_COLOURS: Final = {
    Level.DIM: "quiet",
    Level.OK: "success",
    Level.WARN: "warning",
    Level.BAD: "error",
    Level.DATA: "phase-data",
    Level.FORWARD: "phase-forward",
    Level.BACKWARD: "phase-backward",
    Level.WAITING: "phase-waiting",
    Level.WIRE: "phase-wire",
    Level.OPTIMIZER: "phase-optimizer",
    Level.OTHER: "phase-other",
    Level.KEY: "accent",
    Level.TITLE: "primary",
    Level.HEAT_1: "heat-1",
    Level.HEAT_2: "heat-2",
    Level.HEAT_3: "heat-3",
    Level.HEAT_4: "heat-4",
}
_BOLD: Final = frozenset({Level.STRONG, Level.WARN, Level.BAD, Level.KEY, Level.TITLE})


def theme_names() -> list[str]:
    """All that can be asked for."""
    return sorted({*BUILTIN_THEMES, *(theme.name for theme in THEMES)})


def styles_of(variables: Mapping[str, str]) -> dict[Level, Style]:
    """How each level is drawn with these theme variables."""
    return {
        level: _style(variables.get(_COLOURS[level], "") if level in _COLOURS else "", bold=level in _BOLD)
        for level in Level
    }


@lru_cache(maxsize=256)
def _style(colour: str, *, bold: bool) -> Style:
    return Style(color=Color.parse(colour).rich_color if colour else None, bold=bold or None)
