"""`ddpwatch doctor`: check what works on this machine."""

from __future__ import annotations

import json

import click

from ddpwatch.cli._terminal import show, terminal_size


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@click.pass_context
def command(context: click.Context, *, as_json: bool) -> None:
    """Check this machine: versions, the run directory, live runs, and which figures can be measured.

    Exits with 1 if ddpwatch cannot be used here.
    """
    from ddpwatch.cli._doctor_checks import check_all, checkup_lines, checkup_object

    checks = check_all()
    if as_json:
        click.echo(json.dumps(checkup_object(checks), indent=2))
    else:
        show(checkup_lines(checks, terminal_size()[0]))
    if any(check.verdict == "bad" for check in checks):
        context.exit(1)
