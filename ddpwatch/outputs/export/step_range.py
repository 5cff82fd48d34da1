"""Aligned steps of one attempt, all or a range, for every export format."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ddpwatch.errors import UsageError
from ddpwatch.outputs.export.logged_values import Logged
from ddpwatch.recording.steps import StepReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ddpwatch.core.metrics.window import Window
    from ddpwatch.recording.reader import Attempt, Recording

LAST_STEP: Final = 2**62
"""Step number that no run reaches."""
PROGRESS_FRAMES: Final = 4096
"""Number of frames between two progress reports."""


class Exported:
    """Reads one attempt for export."""

    def __init__(
        self,
        recorded: Recording,
        attempt: Attempt,
        steps: tuple[int, int] = (0, LAST_STEP),
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Read from the first to the last of `steps`, both included."""
        self.recorded, self.attempt = recorded, attempt
        self._progress = progress
        self.reader = StepReader(recorded, attempt, progress, self._add_logged)
        self.state = self.reader.state
        self.logged = Logged(steps, self.state.world_size, self.state.kept_steps)
        """Logged values, as far as the attempt was read."""
        self.number = recorded.attempts.index(attempt) + 1
        """Number of the attempt, counted from 1."""
        self.count = 0
        """Number of steps yielded so far."""
        self._first, self._last = steps
        self._there: tuple[int, int] | None = None
        """First and last step of the attempt, as far as it was read."""
        self.unusual = True
        """Whether steps with a pause, an evaluation or a skipped update are among them."""
        self.whole = steps == (0, LAST_STEP)
        """Whether all steps were asked for."""

    def _add_logged(self, payload: bytes) -> None:
        self.logged.add(payload)

    def logged_names(self) -> tuple[str, ...]:
        """Names of logged values in those steps, by a pass of its own, for formats with a header."""
        found = Logged((self._first, self._last), self.state.world_size, self.state.kept_steps)
        done = number = 0
        for number, entry in enumerate(self.recorded.entries(self.attempt), 1):
            found.add(entry.payload)
            if self._progress is not None and number % PROGRESS_FRAMES == 0:
                self._progress(number - done)
                done = number
        if self._progress is not None:
            self._progress(number - done)
        return tuple(found.series)

    def windows(self, *, unusual: bool = True) -> Iterator[Window]:
        """Yield those steps, with or without unusual ones; raises UsageError for a range without steps."""
        self.unusual = unusual
        for window in self.reader.windows(unusual=unusual):
            first, last = int(window.indices[0]), int(window.indices[-1])
            self._there = (first if self._there is None else self._there[0], last)
            wanted = (window.indices >= self._first) & (window.indices <= self._last)
            if not wanted.all():
                window = replace(window, indices=window.indices[wanted], table=window.table[:, :, wanted])  # noqa: PLW2901
            self.count += len(window)
            if len(window):
                yield window
        if self._there is not None and not self.count:
            wanted_steps, there = _span_text(self._first, self._last), _span_text(*self._there)
            raise UsageError(f"no step of {wanted_steps} in the recording, which has {there}")


def _span_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last if last < LAST_STEP else ''}"


def steps_of(text: str) -> tuple[int, int]:
    """First and last step of `100-200`, `100-` or `-200`, or one step."""
    first, dash, last = text.partition("-")
    try:
        span = int(first or 0), int(last) if last else LAST_STEP if dash else int(first)
    except ValueError:
        span = (0, -1)
    if not 0 <= span[0] <= span[1] <= LAST_STEP:
        raise UsageError(f"{text!r} is not a range of steps such as 100-200, 100- or -200")
    return span
