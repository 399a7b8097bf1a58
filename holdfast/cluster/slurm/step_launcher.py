"""``python -m holdfast.cluster.slurm.step_launcher``: a step of Slurm's on each node, which starts agents there.

What is started in a step ends with it, and a step ends with the `srun` that began it. An agent must outlive the flow: so a warden that
came with the allocation starts it. It needs the standard library only, as agents do.
"""

from __future__ import annotations

import argparse
import errno
import os
import selectors
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from holdfast.process import NODE_MARK, mark_of, reset_signals
from holdfast.protocol import BadLine, LineBuffer, Message, connect, encode, listen
from holdfast.source_tree import python_path_env

SOCKET: Final = "warden.sock"
HEAR: Final = 5.0
"""Seconds in which whoever has connected has to say what is wanted."""
START: Final = 30.0
"""Seconds that an agent may take to listen."""
NONE: Final = 4
"""Exit status of who asked and met no warden."""
KEPT: Final = frozenset({"SLURM_CONF", "SLURM_JOB_ID", "SLURMD_NODENAME"})
"""What agents, and so the scripts, keep of Slurm's variables. The others tell of this step: one task, rank 0 of 1, which would mislead."""


class StepLauncher:
    """Starts agents on a node, and ends when there has been none for a while: then nobody needs the allocation any more."""

    def __init__(self, folder: Path, idle: float) -> None:
        self._folder, self._idle = folder, idle
        self._agents: list[subprocess.Popen[bytes]] = []
        self.told_to_go = False
        """Its allocation is being taken back: it ends with its last agent."""
        own(folder)
        self._door = listen(folder / SOCKET)

    def serve(self) -> None:
        """Start what is asked for until nobody asks any more."""
        since = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._door, selectors.EVENT_READ)
            while self._agents or (not self.told_to_go and time.monotonic() - since < self._idle):
                ready = selector.select(1.0)
                self._agents = [agent for agent in self._agents if agent.poll() is None]
                if ready:
                    guest, _ = self._door.accept()
                    with guest, suppress(OSError, BadLine):
                        self._hear(guest)
                if self._agents or ready:
                    since = time.monotonic()

    def _hear(self, guest: socket.socket) -> None:
        guest.settimeout(HEAR)
        request = _line(guest)
        try:
            self._agents.append(self._start(str(request["node"]), str(request["cluster"]), guest))
        except (OSError, KeyError, ValueError) as error:
            guest.sendall(encode({"ready": False, "why": f"its warden cannot start an agent: {error}"}))

    def _start(self, node: str, cluster: str, guest: socket.socket) -> subprocess.Popen[bytes]:
        """Start an agent, which tells *guest* itself when it listens."""
        words = ["--directory", str(self._folder), "--node", node, "--cluster", cluster, "--ready-fd", str(guest.fileno())]
        with (self._folder / "agent.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "holdfast.agent", *words],
                env=environment(self._folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[guest.fileno()],
                start_new_session=True,
                cwd="/",
            )


def own(folder: Path) -> None:
    """Make a node's folder, `BASE/nodes/NAME`; raise ``OSError`` when somebody else's lies in its place, as /tmp is everybody's."""
    base = folder.parents[1]
    for place in (base, folder.parent, folder):
        with suppress(FileExistsError):
            place.mkdir(parents=place == base, mode=0o700)
        seen = place.lstat()
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "is not a folder of yours; remove it, or name another `directory`", str(place))
        place.chmod(0o700)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of an agent: ours, without what is true of this step alone."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT or not name.startswith(("SLURM", "SRUN"))}
    return {**kept, **python_path_env(os.environ), NODE_MARK: mark_of(folder)}  # for the workers, whatever their interpreter


def ask(folder: Path, node: str, cluster: str) -> int:
    """Have the warden start an agent, and print what that says once it listens."""
    try:
        door = connect(folder / SOCKET, seconds=HEAR)
    except OSError:
        return NONE
    with door:
        door.settimeout(START)
        try:
            door.sendall(encode({"node": node, "cluster": cluster}))
            told = _line(door)
        except (OSError, BadLine) as error:
            told = {"ready": False, "why": f"its warden gave no answer: {error}"}
    sys.stdout.buffer.write(encode(told or {"ready": False, "why": "its agent ended without a word"}))
    return 0


def _line(sock: socket.socket) -> Message:
    lines = LineBuffer()
    while data := sock.recv(4096):
        for message in lines.feed(data):
            return message
    return {}


def main() -> int:
    """Be the warden of a node, or ask it."""
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.cluster.slurm.step_launcher", description="Start agents on a node of an allocation."
    )
    parser.add_argument("--directory", type=Path, required=True, help="the folder with those of the nodes, `nodes/NAME`")
    parser.add_argument("--idle", type=float, default=300.0, help="seconds without an agent after which it ends")
    parser.add_argument("--start", metavar="NODE", help="ask the warden that is there for an agent of this name")
    parser.add_argument("--cluster", default="slurm", help="the cluster's name")
    args = parser.parse_args()
    node = args.start or os.environ["SLURMD_NODENAME"]
    folder = args.directory.expanduser().absolute() / "nodes" / node
    if args.start:
        return ask(folder, args.start, args.cluster)
    reset_signals()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are for agents, who take them for notices of their end
    try:
        warden = StepLauncher(folder, args.idle)
        signal.signal(signal.SIGTERM, lambda *_: setattr(warden, "told_to_go", True))
        warden.serve()
    except OSError as error:
        parser.exit(2, f"holdfast warden of {node}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
