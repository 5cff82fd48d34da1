"""Processes to be killed in place of ranks."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager

import msgspec

from ddpwatch import rundir


@contextmanager
def victim_process():
    """A process to be killed, at the latest on exit."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def belonging_to(run_file, process, rank, node=None):
    """The run with one rank played by that process."""
    endpoints = [
        msgspec.structs.replace(
            endpoint,
            pid=process.pid,
            pid_created_s=rundir.created_s(process.pid),
            node=node or endpoint.node,
        )
        if endpoint.rank == rank
        else endpoint
        for endpoint in run_file.endpoints
    ]
    return msgspec.structs.replace(run_file, endpoints=endpoints)
