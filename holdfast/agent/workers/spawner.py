"""Where workers' processes come from: a warm starter for as long as one can be had, and cold starts in its place."""

from __future__ import annotations

import logging
import os
import selectors
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from holdfast.agent import schema
from holdfast.agent.monitor.preemption import PreemptionSettings
from holdfast.agent.node.identity import Identity
from holdfast.agent.workers import error_file
from holdfast.agent.workers.fork_server import ForkServer, Launch, start_cold
from holdfast.log import note
from holdfast.protocol import HEARTBEAT_INTERVAL, BadLine, Message

log = logging.getLogger("holdfast.agent")

ANSWER_SECONDS: Final = 20.0
"""How long a starter that is ready may take over a fork (some 20 ms) before it counts as stuck."""
MOST_STARTERS: Final = 10
"""Starters one job may lose on a node; after that its workers start cold there."""
UNWANTED: Final = "stopped before it was started"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemstoreSettings:
    """How the job's state is to be kept in this node's memory."""

    address: str
    """Where other nodes reach this one."""
    limit: int | None = None
    """Bytes for all snapshots and replicas; None: half of what is free."""

    @classmethod
    def of(cls, message: Message) -> MemstoreSettings:
        """Return the plan in a part of a ``prepare`` order; raise `BadField` when it is none."""
        return cls(address=schema.text(message, "address"), limit=schema.maybe(schema.whole, message, "limit"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnPlan:
    """How a job's workers are run on this node."""

    job: str
    lease: float
    """Seconds after which the agent ends when no flow has spoken."""
    warm: bool
    python: str
    preload: tuple[str, ...]
    argv: tuple[str, ...]
    directory: str
    environment: dict[str, str]
    log_directory: Path
    defaults: dict[str, str]
    """Variables that a process is given where the node's environment does not have them, as torchrun does."""
    memory: MemstoreSettings | None = None
    """None: no state is kept in memory."""
    watch: bool = True
    """Faults of the node are looked for."""
    beat: float = HEARTBEAT_INTERVAL
    """Seconds between two beats to the flow."""
    notice: PreemptionSettings | None = None
    """Where notices of the node's end are to be seen; None: only SIGTERM is one."""

    @classmethod
    def of(cls, order: Message) -> SpawnPlan:
        """Return the plan in a ``prepare`` order; raise `BadField` when it is none."""
        warm, memory = schema.flag(order, "warm"), schema.maybe(schema.mapping, order, "memory")
        notice = schema.maybe(schema.mapping, order, "notice")
        return cls(
            job=schema.text(order, "job"),
            lease=schema.seconds(order, "lease"),
            warm=warm,
            python=schema.path(order, "python") if warm else "",
            preload=schema.words(order, "preload") if warm else (),
            argv=schema.words(order, "argv", least=1),
            directory=schema.path(order, "directory"),
            environment=schema.environment(order, "environment"),
            defaults=schema.maybe(schema.environment, order, "defaults") or {},
            log_directory=Path(schema.path(order, "log_directory")),
            memory=None if memory is None else MemstoreSettings.of(memory),
            beat=schema.maybe(schema.seconds, order, "beat") or HEARTBEAT_INTERVAL,
            watch=schema.maybe(schema.flag, order, "watch") is not False,
            notice=None if notice is None else PreemptionSettings.of(notice),
        )


class Spawner:
    """Has processes made, and tells of each when it is there; whoever asks for one gives it a number, its ticket."""

    def __init__(self, me: Identity, selector: selectors.BaseSelector, emit: Callable[..., None]) -> None:
        self._me, self._selector, self._emit = me, selector, emit
        self.born: Callable[[int, int], None] = lambda _ticket, _pid: None
        self.failed: Callable[[int, str, int | None], None] = lambda _ticket, _why, _errno: None
        self.local: dict[str, str] = {}
        """What every process is told of this node, beside what the plan says."""
        self._plan: SpawnPlan | None = None
        self._fork_server: ForkServer | None = None
        self._lost = 0
        self._waiting: dict[int, Launch | None] = {}
        """Processes that the starter owes us, by ticket; None for one that nobody wants any more."""

    @property
    def forking(self) -> bool:
        """Tell whether a child of ours may exist whose pid has not been told yet."""
        return self._fork_server is not None and self._fork_server.ready and bool(self._waiting)

    @property
    def fork_server_pid(self) -> int | None:
        """Return the pid of the warm starter, if there is one."""
        return self._fork_server.pid if self._fork_server else None

    def prepare(self, plan: SpawnPlan) -> bool:
        """Take on *plan* and have a starter warmed up for it; tell whether there is one. Raise ``OSError`` when there cannot be."""
        before, self._plan = self._plan, plan
        if before and (before.python, before.preload, before.environment) != (plan.python, plan.preload, plan.environment):
            self._drop_fork_server()
        if plan.warm and self._fork_server is None and self._lost < MOST_STARTERS:
            self._warm_up()
        return self._fork_server is not None

    def _warm_up(self) -> None:
        assert self._plan is not None
        fork_server = ForkServer(
            python=self._plan.python,
            environment={**self._plan.defaults, **os.environ, **self._plan.environment, **self._me.marks()},
            preload=self._plan.preload,
            log=self._me.directory / "fork-server.log",
        )
        self._fork_server = fork_server
        self._selector.register(fork_server.socket, selectors.EVENT_READ, lambda mask: self._serve(fork_server, mask))

    # -- starting -----------------------------------------------------------------------------------------------------

    def begin(self, ticket: int, places: dict[str, str], output: Path, *, cold: bool = True, program: tuple[str, ...] = ()) -> None:
        """Have a process started, *cold* too if it must be; `born` or `failed` is called, now or later.

        It runs the job's script, or *program*: an interpreter and a script with its arguments.
        """
        plan, environment = self._plan, self.environment(places)
        assert plan is not None
        argv = (program if not plan.warm else program[1:]) if program else plan.argv
        launch = Launch(argv=argv, environment=environment, directory="/" if program else plan.directory, log=output, cold=cold)
        if self._fork_server is None:
            self._start_cold(ticket, launch)
            return
        self._waiting[ticket] = launch
        if self._fork_server.ready:
            self._ask(self._fork_server, ticket, launch)

    def environment(self, places: dict[str, str]) -> dict[str, str]:
        """Return all variables of a process that is given *places*."""
        assert self._plan is not None
        return {**self._plan.defaults, **os.environ, **self._plan.environment, **places, **self.local, **self._me.marks()}

    def error_file(self, ticket: int) -> Path:
        """Return where the process of that ticket is to leave the error that ends it."""
        return error_file.place(self._me.directory, ticket)

    def _ask(self, fork_server: ForkServer, ticket: int, launch: Launch) -> None:
        if fork_server.ask(ticket, launch):
            self._watch(fork_server)
        else:
            self._fork_server_gone(fork_server)

    def _start_cold(self, ticket: int, launch: Launch) -> None:
        assert self._plan is not None
        if not launch.cold:
            self.failed(ticket, "there is no warm starter to fork it from", None)
            return
        if self._plan.warm:  # the script was meant for a starter, which is an interpreter already
            launch = replace(launch, argv=(self._plan.python, *launch.argv))
        try:
            pid = start_cold(launch)
        except OSError as error:
            self.failed(ticket, str(error), error.errno)
        else:
            self.born(ticket, pid)

    def forget(self, tickets: Iterable[int]) -> None:
        """Want these no more. What the starter has been asked for still comes to life, all else has `failed`."""
        asked = self._fork_server is not None and self._fork_server.ready
        for ticket in tickets:
            if ticket in self._waiting and asked:
                self._waiting[ticket] = None
            elif ticket in self._waiting:
                del self._waiting[ticket]
                self.failed(ticket, UNWANTED, None)

    # -- the warm starter ---------------------------------------------------------------------------------------------

    def _watch(self, fork_server: ForkServer) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if fork_server.unsent else 0)
        key = self._selector.get_key(fork_server.socket)
        if key.events != events:
            self._selector.modify(fork_server.socket, events, key.data)

    def _serve(self, fork_server: ForkServer, mask: int) -> None:
        if fork_server is not self._fork_server:
            return
        if mask & selectors.EVENT_WRITE and not fork_server.drain():
            self._fork_server_gone(fork_server)
            return
        self._watch(fork_server)
        if mask & selectors.EVENT_READ:
            self.hear()

    def hear(self) -> None:
        """Take in what the starter has said: before anybody asks who a process is, its pid must have been heard."""
        fork_server = self._fork_server
        if fork_server is None:
            return
        try:
            open_still = fork_server.read()
            while fork_server.event_queue:
                self._take(fork_server, fork_server.event_queue.popleft())
        except (BadLine, schema.BadField) as error:
            note(log, "starter.garbage", why=error)
            open_still = False
        if not open_still:
            self._fork_server_gone(fork_server)

    def _take(self, fork_server: ForkServer, message: Message) -> None:
        fork_server.asked = time.monotonic()
        if "ready" in message:
            fork_server.ready = True
            self._emit("fork-server.ready", seconds=schema.seconds(message, "seconds"), preloaded=list(schema.words(message, "preloaded")))
            for ticket, launch in list(self._waiting.items()):
                if launch is None:  # owed by a starter before this one, and unwanted
                    del self._waiting[ticket]
                    self.failed(ticket, UNWANTED, None)
                else:
                    self._ask(fork_server, ticket, launch)
            return
        ticket = schema.whole(message, "rank")
        if ticket not in self._waiting:
            return
        del self._waiting[ticket]
        if "pid" in message:
            self.born(ticket, schema.whole(message, "pid", least=2))
        else:
            self.failed(ticket, schema.text(message, "error"), schema.maybe(schema.whole, message, "errno"))

    def buried(self, pid: int) -> bool:
        """Tell whether *pid*, which has ended, was the starter; the end of its socket says so too, after its last messages."""
        if self._fork_server is None or self._fork_server.pid != pid:
            return False
        self._fork_server.bury()
        return True

    def _fork_server_gone(self, fork_server: ForkServer) -> None:
        """Start cold what the dead starter still owed, and warm up another one unless it never was of use."""
        if fork_server is not self._fork_server:
            return
        self._drop_fork_server()
        self._lost += 1
        self._emit("fork-server.exited", ready=fork_server.ready)
        waiting, self._waiting = self._waiting, {}
        for ticket, launch in waiting.items():
            if launch is None:
                self.failed(ticket, UNWANTED, None)
            else:
                self._start_cold(ticket, launch)
        if fork_server.ready and self._lost < MOST_STARTERS:
            try:
                self._warm_up()
            except OSError as error:
                note(log, "starter.failed", why=error)

    def _drop_fork_server(self) -> None:
        if self._fork_server is not None:
            self._selector.unregister(self._fork_server.socket)
            self._fork_server.close()
            self._fork_server = None

    # -- time ---------------------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """Return when the starter will have been silent for too long (monotonic)."""
        return self._fork_server.asked + ANSWER_SECONDS if self.forking and self._fork_server is not None else None

    def tick(self, now: float) -> None:
        """Give up a starter that is stuck, after its last words: what it has not told of by then never becomes a worker."""
        due, fork_server = self.due(), self._fork_server
        if due is None or now < due or fork_server is None:
            return
        fork_server.hang_up()
        while self._fork_server is fork_server:
            self.hear()

    def end(self) -> None:
        """End the starter and forget what it owed: nothing is started any more."""
        self._drop_fork_server()
        waiting, self._waiting = self._waiting, {}
        for ticket in waiting:
            self.failed(ticket, UNWANTED, None)
