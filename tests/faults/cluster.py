"""Several hosts on one machine: network namespaces on a bridge, each with a name and a run directory of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CLONE_NEWUTS = 0x04000000
CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Why namespaces cannot be made here; empty = they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` of iproute2"
    name = f"ddpw{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()[:200]}"
    probe = subprocess.run(
        ["ip", "-n", name, "link", "add", "name", "switch0", "type", "bridge"],
        check=False,
        capture_output=True,
        text=True,
    )
    subprocess.run(["ip", "netns", "delete", name], check=False)
    return f"no bridge can be made in a namespace: {probe.stderr.strip()[:200]}" if probe.returncode else ""


class Cluster:
    """`count` hosts called node-a, node-b and so on, at 10.99.0.1, .2 and so on. Use it in a `with` block."""

    def __init__(self, count: int) -> None:
        self._id = f"ddpw{secrets.token_hex(3)}"
        self.hosts = [f"node-{chr(ord('a') + k)}" for k in range(count)]
        self.base = Path(tempfile.mkdtemp(prefix="ddpw-", dir="/tmp"))

    def __enter__(self):
        try:
            self._ip("netns", "add", self._id)
            self._ip("-n", self._id, "link", "add", "name", "switch0", "type", "bridge")
            self._ip("-n", self._id, "link", "set", "switch0", "up")
            for number, host in enumerate(self.hosts, 1):
                space = self.space(host)
                self._ip("netns", "add", space)
                port = ("peer", "name", host, "netns", self._id)
                self._ip("-n", space, "link", "add", "eth0", "type", "veth", *port)
                self._ip("-n", self._id, "link", "set", host, "master", "switch0", "up")
                self._ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
                self._ip("-n", space, "link", "set", "lo", "up")
                self._ip("-n", space, "link", "set", "eth0", "up")
                self.run_dir(host).mkdir(mode=0o700)
                assert number < 200
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for name in [self._id, *map(self.space, self.hosts)]:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        shutil.rmtree(self.base, ignore_errors=True)

    def space(self, host: str) -> str:
        return f"{self._id}-{host}"

    def address(self, host: str) -> str:
        return f"10.99.0.{self.hosts.index(host) + 1}"

    def run_dir(self, host: str) -> Path:
        return self.base / host

    def cut(self, host: str) -> None:
        """Pull its cable."""
        self._ip("-n", self._id, "link", "set", host, "down")

    def mend(self, host: str) -> None:
        self._ip("-n", self._id, "link", "set", host, "up")

    @contextlib.contextmanager
    def bad_line(self, host: str, *, loss: float, delay_s: float):
        """In the block its line loses this part of the frames, and the others are late; in both directions. Gives what
        waits until it has done so.
        """
        command = [sys.executable, str(Path(__file__).with_name("bad_line.py"))]
        arguments = [self._id, host, self.space(host), str(loss), str(delay_s)]
        with subprocess.Popen([*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as line:
            try:
                assert line.stdout.readline() == b"ready\n"
                yield lambda: line.stdout.readline() == b"used\n"
            finally:
                line.stdin.close()
                reported = line.stdout.read()
            passed, lost = map(int, reported.split()[-2:])
            assert passed > lost > 0, "the line was not used"

    def place(self, host: str) -> tuple[str, str, str]:
        """What `move_to` needs to know."""
        return host, f"/run/netns/{self.space(host)}", str(self.run_dir(host))

    def _ip(self, *arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def move_to(place: tuple[str, str, str]) -> None:
    """This process, which has no other thread yet, is on that host from now on."""
    host, space, run_dir = place
    with open(space) as file:
        _done(_libc.setns(file.fileno(), CLONE_NEWNET))
    _done(_libc.unshare(CLONE_NEWUTS))
    _done(_libc.sethostname(host.encode(), len(host)))
    os.environ["DDPWATCH_RUN_DIR"] = run_dir


def _done(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
