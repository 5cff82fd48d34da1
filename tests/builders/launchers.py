"""Launchers, forked from a process that has torch: the ranks that they start are processes of their own, as always."""

from __future__ import annotations

import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.builders.zygote import Child, Zygote

MAX_S = 100.0


def torchrun(zygote: Zygote, arguments: list[str], env: dict[str, str]) -> tuple[int, str]:
    """`torchrun` with these arguments, to its end: its exit code, and all that it and its ranks have printed."""
    with zygote.family({"OMP_NUM_THREADS": "1", **env}) as start:
        launcher = start(_torchrun, arguments)
        try:
            return launcher.wait(MAX_S), launcher.output()
        finally:
            if not launcher.ended():
                launcher.kill(signal.SIGTERM)  # and not SIGKILL: it ends its ranks itself
                launcher.wait()


def _torchrun(arguments: list[str]) -> None:
    from torch.distributed.run import main

    main(arguments)


class DemoRank:
    """What `subprocess.Popen` would be of a rank of the demo, without a torch to import."""

    def __init__(self, zygote: Zygote, command: list[str], env: dict[str, str]) -> None:
        _python, _m, module, *arguments = command
        assert module == "ddpwatch.demo.job"
        self._child: Child = zygote.start(_demo_rank, arguments, env=env)

    @property
    def returncode(self) -> int | None:
        return self._child.code

    def poll(self) -> int | None:
        return self._child.code if self._child.ended() else None

    def kill(self) -> None:
        self._child.kill()

    def wait(self) -> int:
        self._child.discard()
        return self._child.code


def forked_demo(monkeypatch, zygote: Zygote) -> None:
    """Have the demo's ranks forked; all else of it is as users have it."""

    def popen(command, *, env, **_options):
        return DemoRank(zygote, command, env)

    processes = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr("ddpwatch.cli._demo_processes.subprocess", processes)


def _demo_rank(arguments: list[str]) -> None:
    from ddpwatch.demo.job import main

    sys.argv = ["ddpwatch.demo.job", *arguments]
    main()
