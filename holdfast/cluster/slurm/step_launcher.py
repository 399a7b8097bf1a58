"""``python -m holdfast.cluster.slurm.step_launcher``: a job step on each node of an allocation that starts agents there.

A process started in a step ends with the step, and a step ends with its `srun`. An agent must outlive the controller, so a launcher that
came with the allocation starts it. Standard library only, as agents are.
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

from holdfast.host.process import NODE_MARK, mark_of, reset_signals
from holdfast.protocol import BadLine, LineBuffer, Message, connect, encode, listen
from holdfast.source_tree import python_path_env

SOCKET: Final = "launcher.sock"
REQUEST_SECONDS: Final = 5.0
"""Time for a client to send its request."""
START_SECONDS: Final = 30.0
"""Time for an agent to listen."""
NO_LAUNCHER: Final = 4
"""Exit status of a client that found no launcher."""
KEPT_VARIABLES: Final = frozenset({"SLURM_CONF", "SLURM_JOB_ID", "SLURMD_NODENAME"})
"""Slurm's variables that agents, and so the scripts, keep. The others describe this step (one task, rank 0 of 1) and would mislead."""


class StepLauncher:
    """Starts agents on a node, and ends after a time without any: then nobody needs the allocation any more."""

    def __init__(self, folder: Path, idle_seconds: float) -> None:
        self._folder, self._idle_seconds = folder, idle_seconds
        self._agents: list[subprocess.Popen[bytes]] = []
        self.stop_requested = False
        """The allocation is being revoked: end with the last agent."""
        make_private(folder)
        self._listener = listen(folder / SOCKET)

    def serve(self) -> None:
        """Start agents on request, until there has been none for too long."""
        since = time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while self._agents or (not self.stop_requested and time.monotonic() - since < self._idle_seconds):
                ready = selector.select(1.0)
                self._agents = [agent for agent in self._agents if agent.poll() is None]
                if ready:
                    client, _ = self._listener.accept()
                    with client, suppress(OSError, BadLine):
                        self._handle(client)
                if self._agents or ready:
                    since = time.monotonic()

    def _handle(self, client: socket.socket) -> None:
        """Start an agent, which reports to *client* itself when it listens."""
        client.settimeout(REQUEST_SECONDS)
        request = _read_line(client)
        try:
            names = ["--node", str(request["node"]), "--cluster", str(request["cluster"])]
            with (self._folder / "agent.log").open("ab") as log:
                agent = subprocess.Popen(
                    [sys.executable, "-m", "holdfast.agent", "--directory", str(self._folder), *names, "--ready-fd", str(client.fileno())],
                    env=environment(self._folder),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[client.fileno()],
                    start_new_session=True,
                    cwd="/",
                )
        except (OSError, KeyError, ValueError) as error:
            client.sendall(encode({"ready": False, "why": f"its step launcher cannot start an agent: {error}"}))
        else:
            self._agents.append(agent)


def make_private(folder: Path) -> None:
    """Make a node's folder, `BASE/nodes/NAME`; raise ``OSError`` when another user's is there, as everybody can write to /tmp."""
    base = folder.parents[1]
    for place in (base, folder.parent, folder):
        with suppress(FileExistsError):
            place.mkdir(parents=place == base, mode=0o700)
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "is not a folder of yours; remove it, or name another `directory`", str(place))
        place.chmod(0o700)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of an agent: ours without the variables of this step."""
    kept = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES or not name.startswith(("SLURM", "SRUN"))}
    return {**kept, **python_path_env(os.environ), NODE_MARK: mark_of(folder)}  # for the workers, whatever their interpreter


def request_agent(folder: Path, node: str, cluster: str) -> int:
    """Have the launcher start an agent, and print the answer once that listens; return the exit status."""
    try:
        launcher = connect(folder / SOCKET, seconds=REQUEST_SECONDS)
    except OSError:
        return NO_LAUNCHER
    with launcher:
        launcher.settimeout(START_SECONDS)
        try:
            launcher.sendall(encode({"node": node, "cluster": cluster}))
            answer = _read_line(launcher)
        except (OSError, BadLine) as error:
            answer = {"ready": False, "why": f"its step launcher gave no answer: {error}"}
    sys.stdout.buffer.write(encode(answer or {"ready": False, "why": "its agent exited before it was ready"}))
    return 0


def _read_line(sock: socket.socket) -> Message:
    lines = LineBuffer()
    while data := sock.recv(4096):
        for message in lines.feed(data):
            return message
    return {}


def main() -> int:
    """Run the launcher of a node, or send it a request."""
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.cluster.slurm.step_launcher", description="Start agents on a node of an allocation."
    )
    parser.add_argument("--directory", type=Path, required=True, help="the folder that contains the node folders, `nodes/NAME`")
    parser.add_argument("--idle", type=float, default=300.0, help="seconds without an agent after which the launcher ends")
    parser.add_argument("--start", metavar="NODE", help="ask the running launcher for an agent of this name")
    parser.add_argument("--cluster", default="slurm", help="the cluster's name")
    args = parser.parse_args()
    node = args.start or os.environ["SLURMD_NODENAME"]
    folder = args.directory.expanduser().absolute() / "nodes" / node
    if args.start:
        return request_agent(folder, args.start, args.cluster)
    reset_signals()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # they are for the agents, which take them as preemption notices
    try:
        launcher = StepLauncher(folder, args.idle)
        signal.signal(signal.SIGTERM, lambda *_: setattr(launcher, "stop_requested", True))
        launcher.serve()
    except OSError as error:
        parser.exit(2, f"holdfast step launcher of {node}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
