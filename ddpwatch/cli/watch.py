"""`ddpwatch watch`: follow a run without a screen, say what changes, and end with a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from ddpwatch.cli.options import span
from ddpwatch.cli.settings import limit_options, limits_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.alerts import AlertEvent
    from ddpwatch.outputs.prometheus import Exporter
    from ddpwatch.outputs.sinks import Receiver, Sink
    from ddpwatch.outputs.watching import Ending, Tally
    from ddpwatch.rundir import RunFile

LOOK_AGAIN_S: Final = 0.5
_MAX_LINE_CHARS: Final = 1000


@click.command("watch")
@click.argument("selector", metavar="[RUN]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line for each change of an alert.")
@click.option("--for", "for_s", type=span, metavar="SPAN", help="Watch no longer than this: 60s, 5m, 2h.")
@click.option(
    "--fail-on", type=click.Choice(["info", "warning", "critical"]), help="Exit with 4 if an alert was so severe."
)
@click.option("--exec", "command_line", metavar="CMD", help="Run this for each change, with its JSON object on stdin.")
@click.option("--webhook", metavar="URL", help="POST each change to this address as JSON.")
@click.option("--prometheus", metavar="HOST:PORT", help="Serve metrics there, as 127.0.0.1:9464, while watching.")
@click.option("--log", multiple=True, metavar="GLOB", help="Watch these log files, too; repeatable.")
@limit_options
def command(
    *,
    selector: str | None,
    as_json: bool,
    for_s: float | None,
    fail_on: str | None,
    command_line: str | None,
    webhook: str | None,
    prometheus: str | None,
    log: Sequence[str],
    limit: Sequence[str],
    config: str | None,
) -> None:
    """Follow a run until it ends, and say each time that an alert opens, changes or closes.

    RUN is the beginning of a run id, a run's name, or the path of a run.json; none is needed if only one is live.
    While there is no such run, this waits for one to start.

    Exits with 4 if a rank failed, was lost or was silent when the run ended, or if --fail-on matched.
    """
    import glob
    import signal
    import time

    from ddpwatch.cli.main import ENDED_BADLY
    from ddpwatch.errors import NoSuchRun
    from ddpwatch.outputs.sinks import LAST_CHANCE_S, Sink, close_all
    from ddpwatch.outputs.watching import Tally, watch_to_the_end

    signal.signal(signal.SIGTERM, _terminate)
    until_ns = None if for_s is None else time.monotonic_ns() + int(for_s * 1e9)
    limits = limits_of(config, limit)
    receivers = _receivers(command_line, webhook)
    exporter = _exporter(prometheus)
    run = _wait_for_run(selector, until_ns)
    if run is None:
        raise NoSuchRun("no run has started in that time")
    for pattern in log:
        if not glob.glob(pattern, recursive=True):  # noqa: PTH207 - the pattern may be absolute
            _say(f"no file matches {pattern} yet; it is watched as soon as there is one")
    tally = Tally()
    sinks = [Sink(receiver, lambda text: _say(f"ddpwatch: {text}")) for receiver in receivers]
    try:
        teller = _teller(run, tally, sinks, as_json=as_json)
        ending = watch_to_the_end(run, limits, teller, until_ns=until_ns, logs=log, exporter=exporter)
    except BaseException as error:
        undelivered = close_all(sinks, 0.0)
        if isinstance(error, KeyboardInterrupt):
            _say(_summary(run, None, tally, undelivered))
        raise
    _say(_summary(run, ending, tally, close_all(sinks, LAST_CHANCE_S)))
    if ending.bad or _matches(fail_on, tally):
        raise click.exceptions.Exit(ENDED_BADLY)


def _terminate(*_: object) -> None:
    """End as Ctrl-C does: with a summary, and without leaving a command behind."""
    raise KeyboardInterrupt


def _receivers(command_line: str | None, webhook: str | None) -> list[Receiver]:
    from ddpwatch.outputs.sinks import Command, Webhook

    receivers: list[Receiver] = []
    if command_line is not None:
        receivers.append(Command(command_line))
    if webhook is not None:
        receivers.append(Webhook(webhook))
    return receivers


def _exporter(address: str | None) -> Exporter | None:
    """Metrics at that address until the command ends; a run need not be there yet."""
    if address is None:
        return None
    from ddpwatch.outputs.prometheus import Exporter

    exporter = Exporter(address)
    click.get_current_context().call_on_close(exporter.close)
    _say(f"metrics are at http://{exporter.address}/metrics")
    if exporter.public:
        _say(f"warning: whoever reaches {exporter.address} can read them; 127.0.0.1 keeps them on this host")
    return exporter


def _wait_for_run(selector: str | None, until_ns: int | None) -> RunFile | None:
    """The run that is meant, once it is there; None if time is up before. A path is not waited for."""
    import time

    from ddpwatch.errors import NoSuchRun
    from ddpwatch.sources.runs import find, is_path

    told = False
    while True:
        try:
            return find(selector)
        except NoSuchRun:
            if selector is not None and is_path(selector):
                raise
        if not told:
            which = "a run" if selector is None else f"run {selector!r}"
            _say(f"waiting for {which}; add ddpwatch.agent.install(model) to the script")
            told = True
        if until_ns is not None and time.monotonic_ns() >= until_ns:
            return None
        left_s = LOOK_AGAIN_S if until_ns is None else (until_ns - time.monotonic_ns()) / 1e9
        time.sleep(max(0.0, min(LOOK_AGAIN_S, left_s)))


def _teller(run: RunFile, tally: Tally, sinks: Sequence[Sink], *, as_json: bool) -> Callable[[AlertEvent], None]:
    """What is done with each change: counted, queued for the sinks, and printed."""
    import json
    from datetime import datetime, timezone

    from ddpwatch.cli.paint import show
    from ddpwatch.view.alerts import event_lines, event_object

    def tell(event: AlertEvent) -> None:
        tally.count(event)
        change = event_object(event, run_id=run.id, run_name=run.name)
        for sink in sinks:
            sink.put(change)
        if as_json:
            click.echo(json.dumps(change))
        else:
            # The zone anew each time: a run may outlive a change of the clocks.
            show(event_lines(event, datetime.now(timezone.utc).astimezone().tzinfo or timezone.utc))

    return tell


def _matches(fail_on: str | None, tally: Tally) -> bool:
    from ddpwatch.core.alerts import Severity

    return fail_on is not None and tally.worst is not None and tally.worst >= Severity[fail_on.upper()]


def _summary(run: RunFile, ending: Ending | None, tally: Tally, undelivered: dict[str, int]) -> str:
    """One line on how it came out; without an ending somebody stopped watching."""
    from ddpwatch.core.numbers import plural
    from ddpwatch.sources.runs import SHORT_ID_CHARS

    counts = tally.by_severity()
    alerts = plural(counts.total(), "alert") if counts else "no alert"
    by_severity = ", ".join(f"{counts[severity]} {severity.word}" for severity in sorted(counts, reverse=True))
    parts = [
        f"run {run.id[:SHORT_ID_CHARS]} ({run.name}) {_how(ending)}",
        f"{alerts} opened" + (f": {by_severity}" if counts else ""),
        *(f"{name}: {plural(count, 'change')} not delivered" for name, count in undelivered.items()),
    ]
    return "; ".join(parts)


def _how(ending: Ending | None) -> str:
    from ddpwatch.core.numbers import ranks_text

    if ending is None:
        return "goes on, no longer watched"
    if ending.bad:
        by_condition: dict[str, list[int]] = {}
        for rank, condition in ending.bad.items():
            by_condition.setdefault(condition, []).append(rank)
        return "ended badly: " + ", ".join(f"{ranks_text(ranks)} {word}" for word, ranks in by_condition.items())
    return {
        "goodbye": "has ended: its ranks said goodbye",
        "gone": "has ended: its processes are gone",
        "time": "goes on; the time for watching is up",
    }[ending.how]


def _say(text: str) -> None:
    import contextlib

    # Names of runs may be in it; they are as foreign here as on the screen.
    from ddpwatch.core.text import tame

    # Nobody may be listening, and the threads of the sinks say things, too.
    with contextlib.suppress(OSError):
        click.echo(tame(text, _MAX_LINE_CHARS), err=True)
