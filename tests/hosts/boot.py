"""What runs as the first process of a host: makes the machine around it, and ends it when nobody holds its power cord any more.

    boot.py PARAMETERS

PARAMETERS is JSON: `name`, `binds` (pairs: what is there, where the host sees it), `memory` (size of /dev/shm).
The standard input is the power cord: when its other end is gone, as who made the host was killed, the host goes off.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path


def mount(*words: str) -> None:
    """Mount something in this host alone."""
    subprocess.run(["mount", *words], check=True, stdin=subprocess.DEVNULL)


def mount_system() -> None:
    """Show the devices of this host's own network, and the control groups of the machine where they were."""
    groups = Path(tempfile.mkdtemp(prefix="groups"))
    mount("--rbind", "/sys/fs/cgroup", str(groups))
    mount("-t", "sysfs", "sysfs", "/sys")
    mount("--move", str(groups), "/sys/fs/cgroup")
    groups.rmdir()


def make_machine(given: dict[str, object]) -> None:
    """Give this host its name, its files and its memory."""
    socket.sethostname(str(given["name"]))
    mount("--make-rprivate", "/")
    mount_system()
    binds = given["binds"]
    assert isinstance(binds, list)
    for source, target in binds:
        mount("--bind", source, target)
    mount("-t", "tmpfs", "-o", f"size={given['memory']},mode=1777", "tmpfs", "/dev/shm")


def reap() -> None:
    """Take the ends of those whose parents are gone."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def run() -> None:
    """Live until the power cord is pulled."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if 0 in ready and not os.read(0, 100):
            return
        if woken in ready:
            os.read(woken, 100)
            reap()


if __name__ == "__main__":
    make_machine(json.loads(sys.argv[1]))
    run()
