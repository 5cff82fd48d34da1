"""`ddpwatch watch`: follow a run without a dashboard, print alert changes, and end with an exit code."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import click

from ddpwatch.cli._config import limit_options, limits_of
from ddpwatch.cli._follow_run import deadline_ns, interrupt_on_sigterm, say_missing_logs, summary, wait_for_run
from ddpwatch.cli._options import (
    RUN_HELP,
    CommandWithLogs,
    check_retention,
    recorder_of,
    recording_summary,
    retention_options,
    span,
)
from ddpwatch.cli._terminal import say, show
from ddpwatch.cli.main import ENDED_BADLY, NOT_KEPT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddpwatch.core.alerts.model import AlertEvent
    from ddpwatch.outputs.alert_sinks import Receiver, Sink
    from ddpwatch.outputs.headless import AlertCounts
    from ddpwatch.outputs.prometheus.exporter import Exporter
    from ddpwatch.rundir import RunFile


@click.command("watch", cls=CommandWithLogs, epilog=RUN_HELP)
@click.argument("selector", metavar="[RUN]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line for each alert change.")
@click.option("--for", "for_s", type=span, metavar="DURATION", help="Stop after this time: 60s, 5m, 2h.")
@click.option(
    "--fail-on",
    type=click.Choice(["info", "warning", "critical"]),
    help="Exit with 4 if an alert of this severity or worse opened.",
)
@click.option(
    "--exec",
    "command_line",
    metavar="CMD",
    help="Run this shell command for each alert change, with the JSON object on stdin.",
)
@click.option("--webhook", metavar="URL", help="POST each alert change to this URL as JSON.")
@click.option("--prometheus", metavar="HOST:PORT", help="Serve Prometheus metrics there, such as 127.0.0.1:9464.")
@click.option("--log", multiple=True, metavar="GLOB", help="Also watch these log files; repeatable.")
@click.option("--record", "file", metavar="FILE", help="Also record the run into this file.")
@retention_options
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
    file: str | None,
    keep_s: float | None,
    max_bytes: int | None,
    limit: Sequence[str],
    config: str | None,
) -> None:
    """Follow a run until it ends, and print each alert as it opens, changes and closes. Waits for the run to start.

    Exits with 4 if a rank failed, was lost or had no heartbeat when the run ended, or if --fail-on matched; otherwise
    with 1 if the recording of --record is incomplete, and with 0 if not.
    """
    from ddpwatch.core.alerts.model import Severity
    from ddpwatch.outputs.alert_sinks import LAST_CHANCE_S, Command, Sink, Webhook, close_all
    from ddpwatch.outputs.headless import AlertCounts, watch_until_end

    interrupt_on_sigterm()
    check_retention(file, keep_s, max_bytes)
    until_ns = deadline_ns(for_s)
    limits = limits_of(config, limit)
    receivers: list[Receiver] = [] if command_line is None else [Command(command_line)]
    if webhook is not None:
        receivers.append(Webhook(webhook))
    exporter = _exporter(prometheus)
    with recorder_of(file, keep_s, max_bytes) as recorder:
        run = wait_for_run(selector, until_ns)
        say_missing_logs(log)
        alerts = AlertCounts()
        sinks = [Sink(receiver, lambda text: say(f"ddpwatch: {text}")) for receiver in receivers]
        try:
            handler = _alert_handler(run, alerts, sinks, as_json=as_json)
            ending = watch_until_end(
                run, limits, handler, until_ns=until_ns, logs=log, recorder=recorder, exporter=exporter
            )
        except BaseException as error:
            undelivered = close_all(sinks, 0.0)
            if isinstance(error, KeyboardInterrupt):
                say(summary(run, None, alerts, _not_delivered(undelivered)))
            raise
        say(summary(run, ending, alerts, _not_delivered(close_all(sinks, LAST_CHANCE_S))))
    if recorder is not None:
        say(recording_summary(recorder))
    failed = fail_on is not None and alerts.worst is not None and alerts.worst >= Severity[fail_on.upper()]
    if ending.bad or failed:
        raise click.exceptions.Exit(ENDED_BADLY)
    if recorder is not None and recorder.incomplete:
        raise click.exceptions.Exit(NOT_KEPT)


def _not_delivered(undelivered: dict[str, int]) -> list[str]:
    from ddpwatch.core.units import plural

    return [f"{name}: {plural(count, 'alert change')} not delivered" for name, count in undelivered.items()]


def _exporter(address: str | None) -> Exporter | None:
    """Serve metrics at the address until the command ends, even while there is no run yet."""
    if address is None:
        return None
    from ddpwatch.outputs.prometheus.exporter import Exporter

    exporter = Exporter(address)
    click.get_current_context().call_on_close(exporter.close)
    say(f"serving metrics at http://{exporter.address}/metrics")
    if exporter.public:
        say(f"warning: anyone who can reach {exporter.address} can read them; bind to 127.0.0.1 to keep them local")
    return exporter


def _alert_handler(
    run: RunFile, alerts: AlertCounts, sinks: Sequence[Sink], *, as_json: bool
) -> Callable[[AlertEvent], None]:
    """Handler that counts each alert change, queues it for the sinks, and prints it."""
    from ddpwatch.view.alerts.format import event_lines, event_object

    def handle(event: AlertEvent) -> None:
        alerts.count(event)
        change = event_object(event, run_id=run.id, run_name=run.name)
        for sink in sinks:
            sink.put(change)
        if as_json:
            click.echo(json.dumps(change))
        else:
            # The time zone is read each time: a long run may outlive a change to daylight saving time.
            show(event_lines(event, datetime.now(timezone.utc).astimezone().tzinfo or timezone.utc))

    return handle
