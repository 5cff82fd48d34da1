"""A line that loses and delays, where the kernel cannot make one so: frames go through this process.

    python bad_line.py SPACE_OF_SWITCH PORT SPACE_OF_HOST LOSS DELAY_S

Takes a port of the switch out of it, and passes on what comes from either side. Says `ready`, and `used` when frames
were passed on and fewer were lost. Ends with its input, and says how many it were; then the port is as it was.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TAP_PLAIN = 0x0002 | 0x1000
SIOCETHTOOL = 0x8946
CHECKSUMS, SCATTER, SEGMENTS, GENERIC = 0x17, 0x19, 0x1F, 0x24
"""What a device leaves to the other end, which here is no device: to be done before frames are sent."""
PASSED_ON = 4
"""Kind of a frame that we have sent ourselves."""
EVERYTHING = 3
LONGEST_FRAME = 65_536
MAX_QUEUED = 4096
_libc = ctypes.CDLL(None, use_errno=True)


def enter(space: str) -> None:
    with open(f"/run/netns/{space}") as file:
        assert _libc.setns(file.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())


def send_whole_frames(device: str) -> None:
    """Have it work out checksums and cut segments by itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for feature in (SEGMENTS, GENERIC, SCATTER, CHECKSUMS):
            value = ctypes.create_string_buffer(struct.pack("II", feature, 0))
            fcntl.ioctl(any_socket, SIOCETHTOOL, struct.pack("16sP", device.encode(), ctypes.addressof(value)))


def open_tap(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP_PLAIN))
    return tap


def pass_on(port: socket.socket, tap: int, loss: float, delay_s: float) -> tuple[int, int]:
    """Forward until stopped; returns the number of frames forwarded and of those lost."""
    chance = random.Random(1)
    passed = lost = 0
    used = False
    queue: deque[tuple[float, bool, bytes]] = deque()
    while True:
        wait_s = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        ready, _, _ = select.select([port, tap, sys.stdin], [], [], wait_s)
        if sys.stdin in ready:
            return passed, lost
        for source in ready:
            if source is port:
                frame, address = port.recvfrom(LONGEST_FRAME)
                if address[2] == PASSED_ON:
                    continue
            else:
                frame = os.read(tap, LONGEST_FRAME)
            if chance.random() < loss or len(queue) >= MAX_QUEUED:
                lost += 1
            else:
                passed += 1
                queue.append((time.monotonic() + delay_s, source is port, frame))
        if not used and passed > lost > 0:
            used = True
            print("used", flush=True)
        while queue and queue[0][0] <= time.monotonic():
            _, to_switch, frame = queue.popleft()
            os.write(tap, frame) if to_switch else port.send(frame)


def main() -> None:
    switch, device, host, loss, delay_s = sys.argv[1:]
    enter(host)
    send_whole_frames("eth0")
    enter(switch)
    tap = open_tap("badline0")
    for words in (f"{device} nomaster", "badline0 master switch0 up"):
        subprocess.run(["ip", "link", "set", *words.split()], check=True)
    try:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERYTHING)) as port:
            port.bind((device, 0))
            print("ready", flush=True)
            passed, lost = pass_on(port, tap, float(loss), float(delay_s))
            print(passed, lost)
    finally:
        os.close(tap)
        subprocess.run(["ip", "link", "set", device, "master", "switch0"], check=True)


if __name__ == "__main__":
    main()
