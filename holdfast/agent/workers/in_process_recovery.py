"""Commands that change which process holds which rank while training processes live on: recovery and migration without a restart."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final

from holdfast.agent import schema
from holdfast.agent.errors import Refused
from holdfast.agent.node.devices import hot_spares_on_gpus_of, rank_with_gpu_of
from holdfast.agent.schema import Count, Membership, Numbers, Object, Positive, Seconds
from holdfast.agent.workers.worker import NO_RANK, Worker
from holdfast.host.process import state_of
from holdfast.log import note
from holdfast.protocol import Message

if TYPE_CHECKING:
    from holdfast.agent.server import AgentServer

log = logging.getLogger("holdfast.agent")

LEAVE_SECONDS: Final = 30.0
"""How long a worker whose rank has been given to another process may take to exit, unless the command has another value."""
SOURCES: Final = ("kept", "hot-spare", "fresh")
NO_HOT_SPARE: Final = -1


def _source(message: Message, name: str) -> str:
    source = schema.text(message, name)
    if source not in SOURCES:
        raise schema.BadField(name, f"one of {', '.join(SOURCES)}", source)
    return source


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """Which process holds a rank in the next generation."""

    rank: Count
    from_: Annotated[str, _source]
    """One of `SOURCES`."""
    hot_spare: Count = NO_HOT_SPARE
    """The number of the hot spare that takes the rank, if one does."""
    environment: Annotated[dict[str, str], schema.environment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.from_ == "hot-spare" and self.hot_spare == NO_HOT_SPARE:
            raise schema.BadField("hot_spare", "a whole number of at least 0", None)


def _assignments(message: Message, name: str) -> tuple[RankAssignment, ...]:
    found = tuple(schema.read_record(RankAssignment, item) for item in schema.objects(message, name))
    for numbers in ([one.rank for one in found], [one.hot_spare for one in found if one.from_ == "hot-spare"]):
        if len(set(numbers)) < len(numbers):
            raise schema.BadField(name, "a list that names each rank and each hot spare once", message[name])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTableUpdate:
    """The next generation, as far as it concerns this node."""

    generation: Count
    membership: Membership
    workers: Annotated[tuple[RankAssignment, ...], _assignments]
    leave: Seconds = LEAVE_SECONDS


Table = Annotated[RankTableUpdate, lambda message, _name: schema.read_record(RankTableUpdate, message)]
"""In fields of the command itself."""
NewHotSpares = Annotated[dict[int, dict[str, str]], schema.environments_by("id")]


class InProcessRecovery:
    """Carries these commands out. Each is refused as a whole or done as a whole."""

    def __init__(self, service: AgentServer) -> None:
        self._service = service

    def check_job(self) -> None:
        """Raise `Refused` unless a job was prepared here."""
        if self._service.ending:
            raise Refused("this agent is ending")
        if self._service.workers.plan is None:
            raise Refused("no job was prepared on this node: give the command 'prepare' first")

    def check_generation(self, generation: int) -> None:
        """Raise `Refused` unless *generation* is the current one."""
        if generation != self._service.workers.generation:
            raise Refused(f"generation {generation} is not the current one, that is {self._service.workers.generation}")

    # -- a generation ends ----------------------------------------------------------------------------------------------

    def abandon(self, generation: Count, lost: Numbers, kill: Numbers) -> Message:
        """Wake the workers of the current generation from their waits for the *lost* ranks, and kill the ranks in *kill*."""
        workers = self._service.workers
        self.check_generation(generation)
        workers.abandoned = generation
        unhealthy = [worker for worker in workers.living() if worker.rank in kill]
        for worker in unhealthy:
            workers.kill(worker)
        notified = []
        for worker in workers.living():
            over = worker.ahead if worker.is_ahead else generation  # one that has switched already gives up that one too
            message = {"do": "abandon", "generation": over, "lost": lost}
            if worker.rank not in kill and self._service.send(worker, message):
                notified.append(worker.rank)
        return {"notified": sorted(notified), "killed": sorted(worker.rank for worker in unhealthy)}

    # -- the next one begins --------------------------------------------------------------------------------------------

    def regroup(self, facts: Object, table: Table) -> Message:
        """Begin a generation with kept workers, hot spares that take ranks, and fresh workers; send each what it needs to know."""
        service, workers = self._service, self._service.workers
        for worker in workers.everybody():
            service.finish_reading(worker)  # what has arrived so far belongs to the old generation
        taken, former = self._processes(table), workers.generation
        for worker in taken.values():
            if worker.connection is None and not worker.greetings:
                raise Refused(f"{worker.name} is not connected to its agent")
        self._begin(table, taken)
        fresh = list[Worker]()
        for seat in table.workers:
            message = {**facts, "do": "regroup", "generation": table.generation, "rank": seat.rank}
            if seat.from_ == "fresh":
                worker = workers.workers[seat.rank] = workers.new_worker(seat.rank)
                worker.greetings, worker.grouped = [message], True
                workers.launch(worker, seat.environment)
                fresh.append(worker)
                continue
            worker = taken[seat.rank]
            if seat.from_ == "kept":
                worker.former = former
            else:
                message |= {"environment": seat.environment, "log": str(worker.log)}
            if worker.connection is None:  # it has not sent hello yet: only the newest generation matters to it
                worker.greetings = [message]
            else:
                service.send(worker, message)
        self.end_hot_spares_in_the_way(fresh)
        return {}

    def switch(self, table: Table) -> Message:
        """Record that the workers themselves have gone over to the next generation, as was planned with them."""
        if any(seat.from_ == "fresh" for seat in table.workers):
            raise schema.BadField("from", "kept or hot-spare", "fresh")
        taken = self._processes(table)
        self._begin(table, taken)
        for worker in taken.values():
            self._service.release(worker)
        return {}

    def _processes(self, table: RankTableUpdate) -> dict[int, Worker]:
        """Return the living processes for all ranks that no fresh one gets; raise `Refused` unless each can be had."""
        workers = self._service.workers
        workers.reap()
        self.check_job()
        if table.generation <= workers.generation:
            raise Refused(f"generation {table.generation} is not newer than {workers.generation}")
        if workers.stopping:
            raise Refused(f"the workers of generation {workers.generation} are being stopped")
        taken = {}
        for seat in table.workers:
            if seat.from_ == "kept":
                taken[seat.rank] = self._kept(seat.rank)
            elif seat.from_ == "hot-spare":
                taken[seat.rank] = self._parked(seat.hot_spare)
        return taken

    def _kept(self, rank: int) -> Worker:
        worker = self._service.workers.workers.get(rank)
        if worker is None or worker.exited:
            raise Refused(f"rank {rank} has no living worker here that could be kept")
        if worker.ordered or worker.finished:
            raise Refused(f"the worker of rank {rank} cannot be kept: it {'is being ended' if worker.ordered else 'has finished'}")
        return worker

    def _parked(self, hot_spare: int) -> Worker:
        worker = self._service.workers.hot_spares.get(hot_spare)
        if worker is None or worker.exited or worker.ordered or worker.pid is None:
            raise Refused(f"hot spare {hot_spare} does not run here")
        if worker.parked is None or state_of(worker.pid) == "T":
            raise Refused(f"hot spare {hot_spare} {'has not parked yet' if worker.parked is None else 'is stopped by a signal'}")
        return worker

    def _begin(self, table: RankTableUpdate, taken: dict[int, Worker]) -> None:
        """Begin the generation here: the processes in *taken* belong to it, all other workers leave."""
        service, workers = self._service, self._service.workers
        environments = {seat.rank: seat.environment for seat in table.workers}
        service.begin_generation(table.generation)
        for worker in workers.living():
            if worker not in taken.values():
                worker.ordered, worker.leave_by = True, time.monotonic() + table.leave
                workers.leavers.append(worker)
        for worker in taken.values():
            if worker.former is None:
                worker.was_first = worker.hot_spare is None and worker.rank == workers.first
        workers.enter(table.generation, table.membership)
        workers.workers = dict(taken)
        for rank, worker in taken.items():
            if worker.hot_spare is None:
                worker.enter(table.generation)
                service.emit("worker.kept", rank=rank, pid=worker.pid, generation=table.generation, grouped=worker.grouped)
                continue
            hot_spare = worker.hot_spare
            del workers.hot_spares[hot_spare]
            worker.gpu_variables = workers.gpu_variables(environments[rank])  # a fresh process in its place takes the GPU of these
            worker.activate(rank, workers.generation, workers.new_worker(rank).log)
            with suppress(OSError):  # the process opens it too, and reports when it cannot
                worker.open_log(workers.plan.job if workers.plan is not None else "")
            service.emit("worker.started", rank=rank, pid=worker.pid, generation=workers.generation, hot_spare=hot_spare)

    # -- hot spares -----------------------------------------------------------------------------------------------------

    def start_hot_spares(self, hot_spares: NewHotSpares) -> Message:
        """Start processes that run the script as far as they can without a rank; one that lives already stays as it is.

        One that would share the GPU of a rank is refused, as it would take memory and time from training; not where ranks share GPUs too.
        """
        workers = self._service.workers
        self.check_job()
        if not workers.warm:
            raise Refused("hot spares are forked from a fork server, and there is none on this node")
        started, refused = list[int](), dict[str, str]()
        for number in hot_spares:
            if number in workers.hot_spares:
                continue
            rank = rank_with_gpu_of(workers.gpu_variables(hot_spares[number]), workers.living(), self._service.root)
            if rank is not None:
                refused[str(number)] = f"it would share the GPU of rank {rank}"
                continue
            worker = workers.hot_spares[number] = workers.new_worker(NO_RANK, hot_spare=number)
            workers.launch(worker, hot_spares[number])
            started.append(number)
        return {"started": sorted(started), "refused": refused}

    def end_hot_spares_in_the_way(self, starting: list[Worker]) -> None:
        """Kill hot spares on the GPUs of ranks that are *starting*: they were started beside other ranks, and would share a GPU with these.

        The controller starts others where a GPU is free.
        """
        workers = self._service.workers
        for worker in hot_spares_on_gpus_of(starting, list(workers.hot_spares.values()), self._service.root):
            note(log, "hot-spare.in-the-way", id=worker.hot_spare, local_rank=worker.gpu_variables.get("LOCAL_RANK"))
            workers.kill(worker)

    def drop(self, hot_spares: Numbers) -> Message:
        """Kill hot spares; those that have exited already count as dropped."""
        workers = self._service.workers
        dropped = [number for number in hot_spares if number in workers.hot_spares]
        for number in dropped:
            workers.kill(workers.hot_spares[number])
        return {"dropped": sorted(dropped)}

    def forward(self, message: Object, ranks: Numbers, hot_spares: Numbers) -> Message:
        """Pass a message on to workers and hot spares as it is, to all of them or to none."""
        workers = self._service.workers
        workers.reap()
        named = {f"rank {rank}": workers.workers.get(rank) for rank in ranks}
        named |= {f"hot spare {number}": workers.hot_spares.get(number) for number in hot_spares}
        targets = [worker for worker in named.values() if worker is not None and not worker.exited and worker.connection is not None]
        unreachable = [name for name, worker in named.items() if worker not in targets]
        if unreachable:
            raise Refused(f"{', '.join(unreachable)} cannot be reached: not running here, or not connected to its agent")
        for worker in targets:
            self._service.send(worker, message)
        return {}

    def checkpoint_interval(self, generation: Count, steps: Positive) -> Message:
        """Keep the checkpoint interval of the current generation: rank 0 gets it when it asks for leave to commit, and sends it on."""
        self.check_generation(generation)
        self._service.workers.checkpoint_interval = steps
        return {}
