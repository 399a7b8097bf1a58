"""A node's folder on this machine: start its agent, see whether one runs, and end everything on the node."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.agent.event_log import EVENT_LOG, replayed_events
from holdfast.agent.node.epochs import Epochs, FencingToken
from holdfast.host.own_variables import without_added
from holdfast.host.process import NODE_MARK, is_alive, mark_of, sweep
from holdfast.memstore import store_folders
from holdfast.protocol import BadLine, LineBuffer, Message

START_SECONDS: Final = 20.0
"""How long an agent may take to listen: some 0.2 s on an idle machine, more while it starts many."""
ORCHESTRATOR: Final = ("HOLDFAST_HISTORY", "HOLDFAST_PREFECT_", "PREFECT_")
"""Prefixes of variables that no agent gets: they may hold the password of a database, or an API key."""


class AgentNotStarted(Exception):
    """The agent did not start; the message says why."""


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """The running agent of a node."""

    pid: int
    job: str | None


def inherited_environment() -> dict[str, str]:
    """Return what an agent, and so each worker of its node, gets of this process's environment."""
    return {name: value for name, value in without_added(os.environ).items() if not name.startswith(ORCHESTRATOR)}


@dataclass(frozen=True, slots=True)
class AgentDirectory:
    """The folder of a node, and the processes that carry its mark."""

    folder: Path
    node: str
    cluster: str
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the agent, and all that it starts, gets in addition to this process's own environment."""
    options: tuple[str, ...] = ()
    """Options of the interpreter that the agent runs in."""

    def start_agent(self, token: FencingToken | None = None) -> None:
        """Start an agent that outlives this process, and wait until it listens.

        Raise `AgentNotStarted`, or `Refused` for a late *token*.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.admit(token)
            answer = self._spawn()
        except (OSError, BadLine, subprocess.TimeoutExpired) as error:
            raise AgentNotStarted(f"no agent could be started in {self.folder}: {error}") from error
        if not answer.get("ready"):
            raise AgentNotStarted(f"its agent did not start: {answer.get('why', 'it sent nothing')}; see {self.folder / 'agent.log'}")

    def _spawn(self) -> Message:
        """Start the agent; return its first message, or an empty one when it exited without one."""
        ours, theirs = socket.socketpair()
        with ours, theirs, (self.folder / "agent.log").open("ab") as log:
            command = [sys.executable, *self.options, "-m", "holdfast.agent", "--detach", "--directory", str(self.folder)]
            command += ["--node", self.node, "--cluster", self.cluster, "--ready-fd", str(theirs.fileno())]
            starter = subprocess.Popen(
                command,
                env={**inherited_environment(), **self.environment, NODE_MARK: mark_of(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                cwd="/",
            )
            theirs.close()
            try:
                starter.wait(START_SECONDS)
                ours.settimeout(START_SECONDS)
                lines = LineBuffer()
                while data := ours.recv(4096):
                    for message in lines.feed(data):
                        return message
            except BaseException:
                starter.kill()
                starter.wait()
                raise
        return {}

    def running_agent(self) -> AgentStatus | None:
        """Return the agent that runs there, if one does."""
        try:
            facts = json.loads((self.folder / "agent.json").read_text())
            pid, job = int(facts["pid"]), facts["job"]
            alive = is_alive(pid, facts["started"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return AgentStatus(pid, job) if alive else None

    @property
    def epochs(self) -> Epochs:
        """Return the newest epochs that are recorded here."""
        return Epochs(self.folder)

    def admit(self, token: FencingToken | None) -> None:
        """Accept a controller's command; raise `Refused` where another one runs its job by now, or the command is too late."""
        if token is not None:
            self.epochs.admit(token)

    def fence(self, job: str | None = None, token: FencingToken | None = None) -> list[int]:
        """Kill everything that carries the node's mark, its agent included, and return the pids.

        With *job*, kill nothing when an agent of another job serves there: that one had to end what was there before it could begin. With
        *token*, raise `Refused` instead for a late command, and kill nothing more once a newer controller's command arrives here: this
        process may be suspended before each kill.
        """
        self.admit(token)
        agent = self.running_agent()
        if job is not None and agent is not None and agent.job not in {None, job}:
            return []

        def spare(_pid: int) -> bool:
            if token is not None:
                self.epochs.check(token)
            return False

        return sweep(NODE_MARK, mark_of(self.folder), spare=spare)

    def replayed_events(self, job: str) -> list[Message]:
        """Return the newest steps and checkpoints of *job* in the event logs here; a killed agent may not have sent them."""
        return replayed_events(self.folder / EVENT_LOG, job)

    def wipe_memory(self, job: str, token: FencingToken | None = None) -> None:
        """Remove the job's memory store, which a killed agent leaves. Raise `Refused` for a late *token*."""
        self.admit(token)
        store_folders.wipe(store_folders.memstore_of(mark_of(self.folder), job))
