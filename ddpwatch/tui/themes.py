"""Themes: the color of each level of a cell."""

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
LIGHT: Final = "ddpwatch-light"
COLOR_BLIND: Final = "ddpwatch-color-blind"
"""The palette of Okabe and Ito, distinguishable with all common forms of color blindness."""
SIXTEEN: Final = "ddpwatch-16-colors"
"""The terminal's own sixteen colors, whatever they look like."""

_NAMES: Final = (DEFAULT, LIGHT, COLOR_BLIND, SIXTEEN)
_BASE: Final = {
    "primary": ("#5c8fe6", "#2457b3", "#56b4e9", "ansi_blue"),
    "secondary": ("#56b6c2", "#0f7886", "#00a67d", "ansi_cyan"),
    "accent": ("#e5a53a", "#a86200", "#f0e442", "ansi_yellow"),
    "warning": ("#f0b429", "#a35b00", "#f0e442", "ansi_yellow"),
    "error": ("#ff6b61", "#b3201a", "#e69f00", "ansi_bright_red"),
    "success": ("#7fbf6a", "#35772a", "#56b4e9", "ansi_green"),
    "foreground": ("#dfe3ea", "#20242b", "#f2f2f2", "ansi_default"),
    "background": ("#12151b", "#fbfbf8", "#101010", "ansi_default"),
    "surface": ("#12151b", "#fbfbf8", "#101010", "ansi_default"),
    "panel": ("#2a303b", "#d6d8d4", "#3a3a3a", "ansi_default"),
}
"""Textual's colors, in the order of `_NAMES`."""
_OWN: Final = {
    "phase-data": ("#c678dd", "#8a3fa0", "#cc79a7", "ansi_magenta"),
    "phase-forward": ("#56b6c2", "#0f7886", "#56b4e9", "ansi_cyan"),
    "phase-backward": ("#5c8fe6", "#2457b3", "#3b8fd1", "ansi_blue"),
    "phase-waiting": ("#e5a53a", "#a86200", "#e69f00", "ansi_yellow"),
    "phase-wire": ("#f0d98c", "#7a5c00", "#f0e442", "ansi_bright_yellow"),
    "phase-optimizer": ("#7fbf6a", "#35772a", "#00a67d", "ansi_green"),
    "phase-other": ("#7f8794", "#6a707c", "#8f8f8f", "ansi_bright_black"),
    "quiet": ("#8b93a1", "#5f6672", "#a0a0a0", "ansi_bright_black"),
    "heat-1": ("#6b7280", "#8a909c", "#6b7280", "ansi_bright_black"),
    "heat-2": ("#d7b54a", "#9a7200", "#56b4e9", "ansi_yellow"),
    "heat-3": ("#e8893b", "#b85a00", "#f0e442", "ansi_bright_yellow"),
    "heat-4": ("#e8504a", "#c0221c", "#e69f00", "ansi_bright_red"),
}
"""Theme variables of ddpwatch, in the order of `_NAMES`."""
VARIABLES: Final = {variable: colors[0] for variable, colors in _OWN.items()}
"""Defaults for themes that do not set the variables of ddpwatch."""


def _theme(place: int, name: str) -> Theme:
    ansi = name == SIXTEEN
    return Theme(
        name=name,
        **{color: values[place] for color, values in _BASE.items()},  # type: ignore[arg-type]
        dark=name != LIGHT,
        ansi=ansi,
        variables={
            **(BUILTIN_THEMES["ansi-dark"].variables if ansi else {}),
            **{variable: values[place] for variable, values in _OWN.items()},
        },
    )


THEMES: Final = tuple(_theme(place, name) for place, name in enumerate(_NAMES))

_COLORS: Final = {
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
    """All themes, also those of Textual."""
    return sorted({*BUILTIN_THEMES, *_NAMES})


def styles_of(variables: Mapping[str, str]) -> dict[Level, Style]:
    """The style of each level with these theme variables."""
    return {level: _style(variables.get(_COLORS.get(level, ""), ""), bold=level in _BOLD) for level in Level}


@lru_cache(maxsize=256)
def _style(color: str, *, bold: bool) -> Style:
    return Style(color=Color.parse(color).rich_color if color else None, bold=bold or None)
