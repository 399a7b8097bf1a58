"""A node's folder on this machine: an agent started there, seen from outside, and everything on the node ended."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.agent.event_log import EVENT_LOG, past
from holdfast.agent.node.epochs import Epochs, FencingToken
from holdfast.memstore import store_folders
from holdfast.own_variables import without_added
from holdfast.process import NODE_MARK, is_alive, mark_of, sweep
from holdfast.protocol import BadLine, LineBuffer, Message

START_SECONDS: Final = 20.0
"""How long an agent may take to listen: some 0.2 s on an idle machine, more on one that is busy starting others."""


class AgentNotStarted(Exception):
    """No agent came up; says why."""


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """The agent of a node, as its folder and the process table tell."""

    pid: int
    job: str | None


OTHERS: Final = ("HOLDFAST_HISTORY", "HOLDFAST_PREFECT_", "PREFECT_")
"""Beginnings of the names of variables that are the orchestrator's alone: they may hold the password of a database, or a key."""


def _inherited() -> dict[str, str]:
    """Return what an agent, and so each worker of its node, is given of this process's environment."""
    return {name: value for name, value in without_added(os.environ).items() if not name.startswith(OTHERS)}


@dataclass(frozen=True, slots=True)
class AgentDirectory:
    """The folder that is a node to its agent, and what carries its mark."""

    folder: Path
    node: str
    cluster: str
    environment: dict[str, str] = field(default_factory=dict)
    """What the agent, and all that it starts, is given beside this process's own environment."""
    options: tuple[str, ...] = ()
    """Options of the interpreter that the agent runs in."""

    def start_agent(self, token: FencingToken | None = None) -> None:
        """Start an agent that outlives this process, and wait until it listens; raise `AgentNotStarted`, or `Refused` for a late *token*."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.admit(token)
            told = self._spawn()
        except (OSError, BadLine, subprocess.TimeoutExpired) as error:
            raise AgentNotStarted(f"no agent could be started in {self.folder}: {error}") from error
        if not told.get("ready"):
            raise AgentNotStarted(f"its agent did not come up: {told.get('why', 'no word from it')}; see {self.folder / 'agent.log'}")

    def _spawn(self) -> Message:
        """Start the agent; return its first word, or nothing when it ended without one."""
        ours, theirs = socket.socketpair()
        with ours, theirs, (self.folder / "agent.log").open("ab") as log:
            command = [sys.executable, *self.options, "-m", "holdfast.agent", "--detach", "--directory", str(self.folder)]
            command += ["--node", self.node, "--cluster", self.cluster, "--ready-fd", str(theirs.fileno())]
            fork_server = subprocess.Popen(
                command,
                env={**_inherited(), **self.environment, NODE_MARK: mark_of(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                cwd="/",
            )
            theirs.close()
            try:
                fork_server.wait(START_SECONDS)
                return _first_word(ours)
            except BaseException:
                fork_server.kill()
                fork_server.wait()
                raise

    def seen(self) -> AgentStatus | None:
        """Return the agent that lives there, if one does."""
        try:
            facts = json.loads((self.folder / "agent.json").read_text())
            pid, job = int(facts["pid"]), facts["job"]
            alive = is_alive(pid, facts["started"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return AgentStatus(pid, job) if alive else None

    @property
    def epochs(self) -> Epochs:
        """Return what is known here of the newest flows."""
        return Epochs(self.folder)

    def admit(self, token: FencingToken | None) -> None:
        """Let an order of a flow in; raise `Refused` where another one steers its job by now, or it comes too late to know."""
        if token is not None:
            self.epochs.admit(token)

    def fence(self, job: str | None = None, token: FencingToken | None = None) -> list[int]:
        """Kill everything that carries the node's mark, its agent included, and return what was killed.

        With *job*, nothing when an agent of another job serves there: that one had to end what was there before it could begin. With
        *token* raise `Refused` instead for an order that is late, and kill nothing more once a newer flow is heard of here: this process
        may stand still before each kill.
        """
        self.admit(token)
        seen = self.seen()
        if job is not None and seen is not None and seen.job not in {None, job}:
            return []
        return sweep(NODE_MARK, mark_of(self.folder), spare=lambda _pid: self._overtaken(token))

    def _overtaken(self, token: FencingToken | None) -> bool:
        if token is not None:
            self.epochs.check(token)
        return False

    def past(self, job: str) -> list[Message]:
        """Return the newest steps and checkpoints of *job* in the journals of agents here, which may not have lived to tell them."""
        return past(self.folder / EVENT_LOG, job)

    def wipe_memory(self, job: str, token: FencingToken | None = None) -> None:
        """Remove the job's memory store: an agent that was killed has left it. Raise `Refused` for a late *token*."""
        self.admit(token)
        store_folders.wipe(store_folders.memstore_of(mark_of(self.folder), job))


def _first_word(sock: socket.socket) -> Message:
    sock.settimeout(START_SECONDS)
    lines = LineBuffer()
    while data := sock.recv(4096):
        for message in lines.feed(data):
            return message
    return {}
