"""Orders that change who holds which rank while training processes live on: the way out of a fault, or of a node, without a restart."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from holdfast.agent.command_fields import (
    Abandon,
    Drop,
    Pace,
    RankAssignment,
    RankTableUpdate,
    Regroup,
    Standby,
    Switch,
    Tell,
)
from holdfast.agent.errors import Refused
from holdfast.agent.workers.worker import NO_RANK, Worker
from holdfast.process import state_of
from holdfast.protocol import Message

if TYPE_CHECKING:
    from holdfast.agent.server import AgentServer
    from holdfast.agent.workers.group import WorkerGroup


class InProcessRecovery:
    """Carries these orders out. Each is refused as a whole or done as a whole."""

    def __init__(self, service: AgentServer) -> None:
        self._service = service

    @property
    def _workers(self) -> WorkerGroup:
        return self._service.workers

    # -- a generation ends ----------------------------------------------------------------------------------------------

    def abandon(self, command: Abandon) -> Message:
        """Wake the workers of the current generation from whatever they wait for, and kill some of them."""
        workers, generation = self._workers, command.generation
        if generation != workers.generation:
            raise Refused(f"generation {generation} is not the current one, that is {workers.generation}")
        workers.abandoned = generation
        unhealthy = [worker for worker in workers.living() if worker.rank in command.kill]
        for worker in unhealthy:
            workers.kill(worker)
        told = []
        for worker in workers.living():
            over = worker.ahead if worker.is_ahead else generation  # one that has switched already is to give up that one too
            line = {"do": "abandon", "generation": over, "lost": command.lost}
            if worker.rank not in command.kill and self._service.tell(worker, line):
                told.append(worker.rank)
        return {"told": sorted(told), "killed": sorted(worker.rank for worker in unhealthy)}

    # -- the next one begins --------------------------------------------------------------------------------------------

    def regroup(self, command: Regroup) -> Message:
        """Begin a generation with workers that are kept, standbys that take over ranks, and fresh ones; tell each what it needs to know."""
        table = command.table
        for worker in self._workers.everybody():
            self._service.hear_out(worker)  # what has been said so far belongs to the old generation
        taken, since = self._taken(table), self._workers.generation
        for worker in taken.values():
            if worker.line is None and not worker.greetings:
                raise Refused(f"{worker.name} has no line to its agent on which it could be told")
        self._begin(table, taken)
        for seat in table.workers:
            line = {**command.facts, "do": "regroup", "generation": table.generation, "rank": seat.rank}
            if seat.source == "fresh":
                self._start_fresh(seat, line)
            else:
                self._hand_over(taken[seat.rank], seat, line, since)
        return {}

    def _start_fresh(self, seat: RankAssignment, line: Message) -> None:
        worker = self._workers.workers[seat.rank] = self._workers.recruit(seat.rank)
        worker.greetings, worker.grouped = [line], True
        self._workers.launch(worker, seat.environment)

    def _hand_over(self, worker: Worker, seat: RankAssignment, line: Message, since: int) -> None:
        """Tell a process that lives already what it is from now on."""
        if seat.source == "kept":
            worker.former = since
        else:
            line |= {"environment": seat.environment, "log": str(worker.log)}
        if worker.line is None:  # it has not said hello yet: only the newest generation matters to it
            worker.greetings = [line]
        else:
            self._service.tell(worker, line)

    def switch(self, command: Switch) -> Message:
        """Put on record that the workers themselves have gone over to the next generation, as was planned with them."""
        taken = self._taken(command.table)
        self._begin(command.table, taken)
        for worker in taken.values():
            self._service.release(worker)
        return {}

    def _taken(self, table: RankTableUpdate) -> dict[int, Worker]:
        """Return the living processes for the ranks that are not filled with fresh ones; refuse unless all can be had."""
        self._workers.reap()
        self._check(table)
        taken = {}
        for seat in table.workers:
            if seat.source == "kept":
                taken[seat.rank] = self._kept(seat.rank)
            elif seat.standby is not None:
                taken[seat.rank] = self._parked(seat.standby)
        return taken

    def _check(self, table: RankTableUpdate) -> None:
        workers = self._workers
        self._check_job()
        if table.generation <= workers.generation:
            raise Refused(f"generation {table.generation} is not newer than {workers.generation}")
        if workers.stopping:
            raise Refused(f"the workers of generation {workers.generation} are being stopped")

    def _check_job(self) -> None:
        if self._service.ending:
            raise Refused("this agent is ending")
        if self._workers.plan is None:
            raise Refused("no job was prepared on this node: give the order 'prepare' first")

    def _kept(self, rank: int) -> Worker:
        worker = self._workers.workers.get(rank)
        if worker is None or worker.gone:
            raise Refused(f"rank {rank} has no living worker here that could be kept")
        if worker.ordered or worker.finished:
            raise Refused(f"the worker of rank {rank} cannot be kept: it {'was told to end' if worker.ordered else 'has finished'}")
        return worker

    def _parked(self, standby: int) -> Worker:
        worker = self._workers.standbys.get(standby)
        if worker is None or worker.gone or worker.ordered or worker.pid is None:
            raise Refused(f"no standby {standby} lives here")
        if worker.parked is None or state_of(worker.pid) == "T":
            raise Refused(f"standby {standby} {'has not parked yet' if worker.parked is None else 'stands still'}")
        return worker

    def _begin(self, table: RankTableUpdate, taken: dict[int, Worker]) -> None:
        """Let the generation begin here: whoever is kept or taken over belongs to it, all other workers leave."""
        workers, kept = self._workers, list(taken.values())
        self._service.begin_generation(table.generation)
        for worker in workers.living():
            if worker not in kept:
                worker.ordered, worker.leave_by = True, time.monotonic() + table.leave
                workers.leavers.append(worker)
        workers.enter(table.generation, table.membership)
        workers.workers = {}
        for rank, worker in taken.items():
            workers.workers[rank] = worker
            if worker.standby is None:
                worker.enter(table.generation)
                self._service.emit("worker.kept", rank=rank, pid=worker.pid, generation=table.generation, grouped=worker.grouped)
            else:
                self._promote(worker, rank)

    def _promote(self, worker: Worker, rank: int) -> None:
        workers, standby = self._workers, worker.standby
        assert standby is not None
        del workers.standbys[standby]
        worker.promote(rank, workers.generation, workers.recruit(rank).log)
        with suppress(OSError):  # the process opens it too, and tells when it cannot
            worker.open_log(workers.plan.job if workers.plan is not None else "")
        self._service.emit("worker.started", rank=rank, pid=worker.pid, generation=workers.generation, standby=standby)

    # -- standbys -------------------------------------------------------------------------------------------------------

    def standby(self, command: Standby) -> Message:
        """Start processes that run the script as far as they can without a rank; one that lives already is left alone."""
        workers, wanted = self._workers, command.standbys
        self._check_job()
        if not workers.warm:
            raise Refused("standbys are forked from a warm starter, and there is none on this node")
        started = [standby for standby in wanted if standby not in workers.standbys]
        for standby in started:
            worker = workers.standbys[standby] = workers.recruit(NO_RANK, standby=standby)
            workers.launch(worker, wanted[standby])
        return {"started": sorted(started)}

    def drop(self, command: Drop) -> Message:
        """Kill standbys; those that are gone already are."""
        dropped = [standby for standby in command.standbys if standby in self._workers.standbys]
        for standby in dropped:
            self._workers.kill(self._workers.standbys[standby])
        return {"dropped": sorted(dropped)}

    def tell(self, command: Tell) -> Message:
        """Pass a message on to workers and standbys as it is, to all of them or to none."""
        workers = self._workers
        workers.reap()
        named = [(f"rank {rank}", workers.workers.get(rank)) for rank in command.ranks]
        named += [(f"standby {standby}", workers.standbys.get(standby)) for standby in command.standbys]
        hearers = [worker for _, worker in named if worker is not None and not worker.gone and worker.line is not None]
        deaf = [name for name, worker in named if worker not in hearers]
        if deaf:
            raise Refused(f"{', '.join(deaf)} cannot be told: it does not live here, or has no line to its agent")
        for worker in hearers:
            self._service.tell(worker, command.message)
        return {}

    def pace(self, command: Pace) -> Message:
        """Keep how often the current generation is to save: rank 0 hears it when it asks for leave to commit, and tells the others."""
        workers, generation = self._workers, command.generation
        if generation != workers.generation:
            raise Refused(f"generation {generation} is not the current one, that is {workers.generation}")
        workers.pace = command.every
        return {}
