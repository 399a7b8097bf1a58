"""A slow link: what a host sends and is sent goes through this process, which holds every frame back for a while.

    link.py OUTER INNER NAMESPACE ADDRESS MAC SETTINGS

Two TAP devices are made: OUTER stays here, for the switch, INNER goes to the network NAMESPACE as `eth0` in place of what is there.
SETTINGS is a JSON file, read anew when it changes: `delay` and `jitter`, in seconds each way.
Says `ready`, and ends with its standard input. The kernel's own tool for that (`tc netem`) is missing from many kernels.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from pathlib import Path

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
FRAME = 65536


def tap(name: str) -> int:
    """Make a TAP device; return what its frames are read from and written to."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def put_in(inner: str, namespace: str, address: str, mac: str) -> None:
    """Put *inner* into the host in place of its cable. Its connections stay: the addresses are the same."""
    subprocess.run(["ip", "link", "set", inner, "address", mac, "netns", namespace], check=True)
    lines = ["link set eth0 down", "link set eth0 name cable", f"link set {inner} name eth0", f"addr del {address} dev cable"]
    lines += [f"addr add {address} dev eth0", "link set eth0 up"]
    subprocess.run(["ip", "-n", namespace, "-batch", "-"], input="\n".join(lines), text=True, check=True)


def carry(ends: tuple[int, int], settings: Path) -> None:
    """Carry frames from each end to the other, late."""
    waiting: list[tuple[float, int, int, bytes]] = []
    number, seen, delay, jitter = 0, 0, 0.0, 0.0
    while True:
        now = time.monotonic()
        if (changed := settings.stat().st_mtime_ns) != seen:
            given = json.loads(settings.read_text())
            seen, delay, jitter = changed, given["delay"], given["jitter"]
        while waiting and waiting[0][0] <= now:
            _, _, end, frame = heapq.heappop(waiting)
            send(end, frame)
        ready, _, _ = select.select([*ends, 0], [], [], max(0.0, waiting[0][0] - now) if waiting else None)
        if 0 in ready:
            return
        for end in ready:
            number += 1
            due = time.monotonic() + delay + random.random() * jitter
            heapq.heappush(waiting, (due, number, ends[end == ends[0]], os.read(end, FRAME)))


def send(end: int, frame: bytes) -> None:
    """Send a frame; one that finds no room, or no cable, is lost like any other."""
    try:
        os.write(end, frame)
    except OSError:
        return


if __name__ == "__main__":
    outer, inner, namespace, address, mac, settings = sys.argv[1:]
    ends = (tap(outer), tap(inner))
    put_in(inner, namespace, address, mac)
    print("ready", flush=True)
    carry(ends, Path(settings))
