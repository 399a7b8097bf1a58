"""How workers' processes are started: forked from a fork server for as long as there is one, or else as new interpreters.

A fork server is an interpreter that has imported torch and waits. A fork of it is a worker in some 20 ms instead of seconds.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Final

from holdfast.agent import schema
from holdfast.agent.connection import MessageStream
from holdfast.agent.monitor.preemption import PreemptionSettings
from holdfast.agent.node.identity import Identity
from holdfast.agent.schema import BadField, Count, FilePath, Flag, Seconds, Text, Texts
from holdfast.host.process import kill, spawn
from holdfast.log import note
from holdfast.protocol import HEARTBEAT_INTERVAL, BadLine, Message
from holdfast.source_tree import ROOT

log = logging.getLogger("holdfast.agent")

PROGRAM: Final = ROOT / "holdfast" / "runtime" / "process" / "fork_server_main.py"
"""Run as a file, so that the job's own interpreter needs no Holdfast installed."""
ANSWER_SECONDS: Final = 20.0
"""How long a fork server may take for a fork (some 20 ms) before it counts as stuck."""
MAX_FORK_SERVERS: Final = 10
"""Fork servers that one job may lose on a node; after that its workers are started without one there."""
CANCELLED: Final = "stopped before it was started"

_Environment = Annotated[dict[str, str], schema.environment]
_Folder = Annotated[Path, lambda message, name: Path(schema.path(message, name))]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemstoreSettings:
    """How the job's state is kept in this node's memory."""

    address: Text
    """Where other nodes reach this one."""
    limit: Count | None
    """Bytes for all snapshots and replicas; None: half of what is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnPlan:
    """How a job's workers are run on this node: the fields of a ``prepare`` command."""

    job: Text
    lease: Seconds
    """Seconds after which the agent ends when no controller has sent a command."""
    warm: Flag
    python: Text = ""
    """Path of the interpreter; only used with *warm*."""
    preload: Texts = field(default_factory=list)
    argv: Texts
    directory: FilePath
    environment: _Environment
    log_directory: _Folder
    defaults: _Environment | None
    """Variables that a process gets where the node's environment does not have them, as with torchrun."""
    memory: Annotated[MemstoreSettings, schema.record_in(MemstoreSettings)] | None
    """None: no state is kept in memory."""
    watch: Flag = True
    """The node is monitored for faults."""
    beat: Seconds = HEARTBEAT_INTERVAL
    """Seconds between two heartbeats to the controller."""
    notice: Annotated[PreemptionSettings, schema.record_in(PreemptionSettings)] | None
    """Where preemption notices are found; None: only SIGTERM is one."""

    def __post_init__(self) -> None:
        if not self.argv:
            raise BadField("argv", "a list of at least 1 texts without NUL", self.argv)
        if self.warm:
            schema.path({"python": self.python or None}, "python")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to run for one rank, one hot spare, or one helper."""

    argv: tuple[str, ...]
    """The complete command without a fork server; script and arguments with one."""
    environment: dict[str, str]
    directory: str
    log: Path
    cold: bool = True
    """It may be started without a fork server."""


class ForkServer(MessageStream):
    """The agent's end of a fork server: it gets launches and answers with pids."""

    def __init__(self, *, python: str, environment: dict[str, str], preload: tuple[str, ...], log: Path) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        self.ready = False
        self.active_at = 0.0
        """When it last got a launch, or last answered (monotonic)."""
        self.reaped = False
        """Its process has ended: its pid may be another's."""
        try:
            with theirs, log.open("ab") as output:
                argv = (python, str(PROGRAM), str(theirs.fileno()), *preload)
                self.pid = spawn(argv, output, env=environment, pass_fds=[theirs.fileno()])
        except BaseException:
            ours.close()
            raise

    def launch(self, request_id: int, launch: Launch) -> bool:
        """Request a process, whose pid is reported with its request id; False when the fork server has exited."""
        self.active_at = time.monotonic()
        facts = {"argv": launch.argv, "environment": launch.environment, "directory": launch.directory, "log": str(launch.log)}
        return self.send({"rank": request_id, "agent": os.getpid(), **facts})

    def close(self) -> None:
        """End the fork server."""
        self.socket.close()
        if not self.reaped:
            kill(self.pid, signal.SIGKILL)


class Spawner:
    """Starts processes and reports each once it runs; the caller gives each a number, its request id."""

    def __init__(self, me: Identity, selector: selectors.BaseSelector, emit: Callable[..., None]) -> None:
        self._me, self._selector, self._emit = me, selector, emit
        self.spawned: Callable[[int, int], None] = lambda _request_id, _pid: None
        self.failed: Callable[[int, str, int | None], None] = lambda _request_id, _why, _errno: None
        self.node_environment: dict[str, str] = {}
        """Variables about this node that every process gets in addition to those of the plan."""
        self._plan: SpawnPlan | None = None
        self._fork_server: ForkServer | None = None
        self._lost = 0
        self._waiting: dict[int, Launch | None] = {}
        """Processes that the fork server has still to start, by request id; None for a cancelled one."""

    @property
    def forking(self) -> bool:
        """Return whether a child of ours may exist whose pid is not known yet."""
        return self._fork_server is not None and self._fork_server.ready and bool(self._waiting)

    @property
    def fork_server_pid(self) -> int | None:
        """Return the pid of the fork server, if there is one."""
        return self._fork_server.pid if self._fork_server else None

    def prepare(self, plan: SpawnPlan) -> bool:
        """Use *plan* from now on, and start a fork server for it; return whether there is one. Raise ``OSError`` when it cannot start."""
        before, self._plan = self._plan, plan
        if before and (before.python, before.preload, before.environment) != (plan.python, plan.preload, plan.environment):
            self._close_fork_server()
        if plan.warm and self._fork_server is None and self._lost < MAX_FORK_SERVERS:
            self._start_fork_server()
        return self._fork_server is not None

    def _start_fork_server(self) -> None:
        assert self._plan is not None
        fork_server = ForkServer(
            python=self._plan.python,
            environment={**(self._plan.defaults or {}), **os.environ, **self._plan.environment, **self._me.marks()},
            preload=tuple(self._plan.preload),
            log=self._me.directory / "fork-server.log",
        )
        self._fork_server = fork_server
        self._selector.register(fork_server.socket, selectors.EVENT_READ, lambda mask: self._serve(fork_server, mask))

    # -- starting -----------------------------------------------------------------------------------------------------

    def begin(self, request_id: int, variables: dict[str, str], output: Path, *, cold: bool = True, program: tuple[str, ...] = ()) -> None:
        """Start a process, without a fork server too if *cold*; `spawned` or `failed` is called, now or later.

        It runs the job's script, or *program*: an interpreter and a script with its arguments.
        """
        plan, environment = self._plan, self.environment(variables)
        assert plan is not None
        argv = (program if not plan.warm else program[1:]) if program else tuple(plan.argv)
        launch = Launch(argv=argv, environment=environment, directory="/" if program else plan.directory, log=output, cold=cold)
        if self._fork_server is None:
            self._start_cold(request_id, launch)
            return
        self._waiting[request_id] = launch
        if self._fork_server.ready:
            self._request(self._fork_server, request_id, launch)

    def environment(self, variables: dict[str, str]) -> dict[str, str]:
        """Return the complete environment of a process that gets *variables*."""
        assert self._plan is not None
        plan = self._plan
        return {**(plan.defaults or {}), **os.environ, **plan.environment, **variables, **self.node_environment, **self._me.marks()}

    def _request(self, fork_server: ForkServer, request_id: int, launch: Launch) -> None:
        if fork_server.launch(request_id, launch):
            fork_server.wait_for(self._selector)
        else:
            self._fork_server_exited(fork_server)

    def _start_cold(self, request_id: int, launch: Launch) -> None:
        assert self._plan is not None
        if not launch.cold:
            self.failed(request_id, "there is no fork server to fork it from", None)
            return
        if self._plan.warm:  # the script was meant for a fork server, which is an interpreter already
            launcher = (str(PROGRAM), "run") if launch.argv == tuple(self._plan.argv) else ()
            launch = replace(launch, argv=(self._plan.python, *launcher, *launch.argv))
        try:
            with launch.log.open("ab") as output:
                pid = spawn(launch.argv, output, env=launch.environment, cwd=launch.directory, start_new_session=True)
        except OSError as error:
            self.failed(request_id, str(error), error.errno)
        else:
            self.spawned(request_id, pid)

    def cancel(self, request_ids: Iterable[int]) -> None:
        """Cancel these. What the fork server has got already still starts, the others get `failed`."""
        requested = self._fork_server is not None and self._fork_server.ready
        for request_id in request_ids:
            if request_id in self._waiting and requested:
                self._waiting[request_id] = None
            elif request_id in self._waiting:
                del self._waiting[request_id]
                self.failed(request_id, CANCELLED, None)

    # -- the fork server ------------------------------------------------------------------------------------------------

    def _serve(self, fork_server: ForkServer, mask: int) -> None:
        if fork_server is not self._fork_server:
            return
        if mask & selectors.EVENT_WRITE and not fork_server.drain():
            self._fork_server_exited(fork_server)
            return
        fork_server.wait_for(self._selector)
        if mask & selectors.EVENT_READ:
            self.receive()

    def receive(self) -> None:
        """Read the fork server's messages: a pid must be known before anybody asks whose process it is."""
        fork_server = self._fork_server
        if fork_server is None:
            return
        try:
            is_open = fork_server.read()
            while fork_server.received:
                self._take(fork_server, fork_server.received.popleft())
        except (BadLine, BadField) as error:
            note(log, "fork-server.bad-message", why=error)
            is_open = False
        if not is_open:
            self._fork_server_exited(fork_server)

    def _take(self, fork_server: ForkServer, message: Message) -> None:
        fork_server.active_at = time.monotonic()
        if "ready" in message:
            fork_server.ready = True
            preloaded = list(schema.arguments(message, "preloaded"))
            self._emit("fork-server.ready", seconds=schema.seconds(message, "seconds"), preloaded=preloaded)
            for request_id, launch in list(self._waiting.items()):
                if launch is None:  # requested from an earlier fork server, and cancelled
                    del self._waiting[request_id]
                    self.failed(request_id, CANCELLED, None)
                else:
                    self._request(fork_server, request_id, launch)
            return
        request_id = schema.integer(message, "rank")
        if request_id not in self._waiting:
            return
        del self._waiting[request_id]
        if "pid" in message:
            self.spawned(request_id, schema.integer(message, "pid", minimum=2))
        else:
            self.failed(request_id, schema.text(message, "error"), schema.optional(schema.integer, message, "errno"))

    def reaped(self, pid: int) -> bool:
        """Note that *pid* has ended, and return whether it was the fork server; the end of its socket follows its last messages."""
        if self._fork_server is None or self._fork_server.pid != pid:
            return False
        self._fork_server.reaped = True
        return True

    def _fork_server_exited(self, fork_server: ForkServer) -> None:
        """Start without it what it had still to start, and start another one unless it was never ready."""
        if fork_server is not self._fork_server:
            return
        self._close_fork_server()
        self._lost += 1
        self._emit("fork-server.exited", ready=fork_server.ready)
        waiting, self._waiting = self._waiting, {}
        for request_id, launch in waiting.items():
            if launch is None:
                self.failed(request_id, CANCELLED, None)
            else:
                self._start_cold(request_id, launch)
        if fork_server.ready and self._lost < MAX_FORK_SERVERS:
            try:
                self._start_fork_server()
            except OSError as error:
                note(log, "fork-server.failed", why=error)

    def _close_fork_server(self) -> None:
        if self._fork_server is not None:
            self._selector.unregister(self._fork_server.socket)
            self._fork_server.close()
            self._fork_server = None

    # -- time ---------------------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """Return when the fork server will have been silent for too long (monotonic)."""
        return self._fork_server.active_at + ANSWER_SECONDS if self.forking and self._fork_server is not None else None

    def tick(self, now: float) -> None:
        """Give up a stuck fork server, after reading its last messages: what it has not reported by then never becomes a worker."""
        due, fork_server = self.due(), self._fork_server
        if due is None or now < due or fork_server is None:
            return
        with suppress(OSError):
            fork_server.socket.shutdown(socket.SHUT_RDWR)  # what it has sent can still be read, and then the end
        while self._fork_server is fork_server:
            self.receive()

    def end(self) -> None:
        """End the fork server and cancel what it had still to start."""
        self._close_fork_server()
        waiting, self._waiting = self._waiting, {}
        for request_id in waiting:
            self.failed(request_id, CANCELLED, None)
