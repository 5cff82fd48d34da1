"""`ddpwatch replay`: open the dashboard on a recording, or print the status at one moment of it."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ddpwatch.cli._recordings import baseline_of, baseline_option, say_damage
from ddpwatch.cli._terminal import check_theme, open_dashboard, refusal, show, terminal_size
from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from datetime import tzinfo

    from ddpwatch.core.metrics.scaling import Profile
    from ddpwatch.session.playback import Playback

# Bounds of `--speed`, relative to real time.
MIN_SPEED: Final = 0.01
MAX_SPEED: Final = 1000.0
BEFORE_ALERT_NS: Final = 5_000_000_000
"""Time before an alert opened at which `--from-alert` begins, in nanoseconds."""


@click.command("replay")
@click.argument("file", metavar="FILE")
@click.option(
    "--speed",
    type=float,
    default=1.0,
    show_default=True,
    metavar="NUMBER",
    help="Playback speed relative to real time.",
)
@click.option(
    "--at",
    metavar="MOMENT",
    help="Start here: 03:41, 2026-11-16T03:41:20.5 (local time; append Z for UTC), +1h30m from the start, 50%.",
)
@click.option("--from-alert", type=int, metavar="NUMBER", help="Start 5 s before this alert opened; 1 = the first.")
@click.option(
    "--theme", help="Color theme; Ctrl-P in the dashboard lists them.  [default: $DDPWATCH_THEME, or ddpwatch]"
)
@click.option("--json", "as_json", is_flag=True, help="Print the status at that moment as a JSON object instead.")
@baseline_option
def command(
    *,
    file: str,
    speed: float,
    at: str | None,
    from_alert: int | None,
    theme: str | None,
    as_json: bool,
    baseline: Path | None,
) -> None:
    """Open the dashboard on a recording, with the run and its alerts as they were.

    Without a terminal, it prints the status at --at or --from-alert, or at the end of the recording.
    """
    from ddpwatch.recording.reader import Recording
    from ddpwatch.session.playback import Playback

    if not MIN_SPEED <= speed <= MAX_SPEED:
        raise UsageError(f"--speed {speed:g} is not between {MIN_SPEED:g} and {MAX_SPEED:g}")
    if at is not None and from_alert is not None:
        raise UsageError("--at and --from-alert exclude each other; use one of them")
    if theme is not None:
        check_theme(theme)
    against = baseline_of(baseline)
    interactive = not refusal() and not as_json
    with closing(Playback(Recording(Path(file)), speed=speed, playing=interactive)) as playback:
        start_ns = _start_ns(playback, at, from_alert, BEFORE_ALERT_NS if interactive else 0)
        notice = ""
        if from_alert is not None and not playback.is_kept(from_alert):
            notice = f"The frames of alert {from_alert} were deleted by --keep or --max; this is the first moment left."
        if interactive:
            from ddpwatch.tui.replay_feed import ReplayFeed

            start_ns = playback.first_sight_ns if start_ns is None else start_ns
            open_dashboard(ReplayFeed(playback, start_ns, against, notice), theme=theme)
        else:
            if notice:
                click.echo(f"ddpwatch: {notice}", err=True)
            at_ns = playback.reel.at(playback.reel.total_ns) if start_ns is None else start_ns
            _print(playback, at_ns, against, as_json=as_json)


def _start_ns(playback: Playback, at: str | None, from_alert: int | None, before_ns: int) -> int | None:
    """Moment to begin at, `before_ns` before the alert; None = the user chose none."""
    from ddpwatch.recording.time_parser import NoMoment

    try:
        if at is not None:
            return playback.moment(at, _zone())
        return None if from_alert is None else playback.before_alert(from_alert, before_ns, _zone())
    except NoMoment as error:
        raise UsageError(f"{f'--at {at}' if at is not None else f'--from-alert {from_alert}'}: {error}") from None


def _print(playback: Playback, at_ns: int, baseline: Profile | None, *, as_json: bool) -> None:
    from ddpwatch.recording.schema import Unreadable
    from ddpwatch.recording.time_parser import time_text
    from ddpwatch.view.run_view import current_view
    from ddpwatch.view.status import status_object, status_screen

    playback.seek(at_ns)
    playback.catch_up()
    # With short steps, a checkpoint has too few that all ranks have finished.
    playback.fill_figures()
    assert playback.follows is not None
    monitor, recorded = playback.follows.monitor, playback.recorded
    if recorded.damaged and all(rank.last_received_ns is None for rank in monitor.state.ranks.values()):
        raise Unreadable(f"{recorded.path} is damaged, and that moment cannot be read; choose another with --at")
    say_damage(recorded, recorded.attempts[playback.place], partly=True)
    run_view = current_view(monitor, baseline)
    if as_json:
        click.echo(json.dumps(status_object(run_view), indent=2))
        return
    attempts = len(playback.reel.spans)
    attempt = f", attempt {playback.place + 1} of {attempts}" if attempts > 1 else ""
    click.echo(f"recorded status {time_text(playback.pace.now_ns, _zone())}{attempt}")
    columns, rows = terminal_size()
    show(status_screen(run_view, columns, None if rows is None else rows - 2))


def _zone() -> tzinfo:
    """The user's time zone."""
    return datetime.now(timezone.utc).astimezone().tzinfo or timezone.utc
