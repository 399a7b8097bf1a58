"""What a flow may ask of an agent: how each command is carried out, and the table of them all."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from holdfast.agent import schema
from holdfast.agent.command_fields import (
    Abandon,
    Ask,
    Attach,
    Deposit,
    Deposited,
    Drop,
    Fields,
    Flush,
    Pace,
    PreemptionSource,
    Prepare,
    Regroup,
    Replicate,
    Standby,
    Start,
    Stop,
    Switch,
    Tell,
    Token,
)
from holdfast.agent.errors import Refused, StaleEpoch
from holdfast.agent.workers.in_process_recovery import InProcessRecovery
from holdfast.agent.workers.worker import Worker
from holdfast.log import note
from holdfast.memstore.write_requests import BadWriteRequest, WriteRequest
from holdfast.ports import free_port
from holdfast.process import is_ending
from holdfast.protocol import PROTOCOL, Message

if TYPE_CHECKING:
    from holdfast.agent.connection import ClientConnection
    from holdfast.agent.server import AgentServer

log = logging.getLogger("holdfast.agent")

SAME: Final = "install the same Holdfast on both sides"
ANSWERED: Final = 256
"""Answers that are remembered, for orders that are given again because a connection ended before their answer was heard."""


class CommandHandler:
    """Carries out a flow's orders, as the table at the end of this module says."""

    def __init__(self, service: AgentServer) -> None:
        self._service = service
        self._answered: OrderedDict[tuple[str, int], Message] = OrderedDict()
        self.recovery = InProcessRecovery(service)

    def take(self, peer: ClientConnection, order: Message) -> Message:
        """Carry out *order* and return the answer; one that is refused changes nothing, and does not renew the lease.

        An order that was carried out already, as its number in its flow's session says, is only answered again.
        """
        session, number = order.get("session"), order.get("id")
        if not isinstance(session, str) or not isinstance(number, int):
            return self._carry_out(peer, order)
        name = session[:64], number
        if name not in self._answered:
            answer = self._carry_out(peer, order)
            if order.get("do") in {"ping", "about", "attach"}:  # nothing comes of doing these again
                return answer
            self._answered[name] = answer
            if len(self._answered) > ANSWERED:
                self._answered.popitem(last=False)
        return self._answered[name]

    def _carry_out(self, peer: ClientConnection, order: Message) -> Message:
        try:
            kind = self._kind(order)
            answer = {"ok": True, **kind.run(self, peer, kind.fields.of(order))}
            self._service.renew()
        except StaleEpoch as error:
            answer = {"ok": False, "why": str(error), "epoch": error.epoch}
        except Refused as error:
            answer = {"ok": False, "why": str(error)}
        except schema.BadField as error:
            answer = {"ok": False, "why": f"order not understood: {error}; {SAME}"}
        except OSError as error:
            answer = {"ok": False, "why": str(error), "errno": error.errno}
        except Exception as error:  # an order that goes wrong in a way nobody thought of must not end the workers
            log.exception("order.failed")
            answer = {"ok": False, "why": f"the agent could not carry it out: {type(error).__name__}: {error}"}
        return {"re": order.get("id"), **answer}

    def _kind(self, order: Message) -> CommandKind[Any]:
        name = schema.text(order, "do")
        if name not in COMMANDS:
            raise Refused(f"no order is called '{name[:40]}': this agent knows {', '.join(COMMANDS)}; {SAME}")
        if name in {"about", "attach"}:
            self._speaks(order)  # first: a flow that is refused must not depose the one whose job it is
        if name not in {"about", "token"}:  # who may connect may ask
            self._admit(order)
        return COMMANDS[name]

    def _admit(self, order: Message) -> None:
        """Let only the newest flow of the job that holds this node give orders; an older one's lease has gone to another."""
        service = self._service
        epoch = schema.maybe(schema.whole, order, "epoch") or 0
        job = schema.maybe(schema.text, order, "job")
        if service.job is None:
            newest = 0 if job is None else service.epochs.of(job)
            if epoch < newest:  # another agent served it here before
                raise StaleEpoch(newest, epoch)
            return
        if job not in {None, service.job}:
            raise Refused(f"held by job {service.job}")
        if epoch < service.epoch:
            raise StaleEpoch(service.epoch, epoch)
        if epoch > service.epoch:
            service.follow(service.job, epoch)
            service.tell_of_newer(epoch)

    def _speaks(self, order: Message) -> None:
        spoken = order.get("protocol")
        if spoken != PROTOCOL:
            raise Refused(f"this agent speaks protocol {PROTOCOL}, the flow {str(spoken)[:20]}: {SAME}")

    def about(self, _peer: ClientConnection, _command: Fields) -> Message:
        """Say who this agent is and what runs on its node."""
        service, workers = self._service, self._service.workers
        return {
            "agent": service.me.id,
            "pid": os.getpid(),
            "job": service.job,
            "epoch": service.epoch,
            "generation": workers.generation,
            "membership": workers.membership,
            "since": service.generation_seq,
            "workers": {str(worker.rank): worker.pid for worker in workers.living()},
            "grouped": sorted(worker.rank for worker in workers.living() if worker.grouped),
            "leavers": sorted(worker.pid for worker in workers.leavers if worker.pid is not None and not worker.gone),
            "standbys": {str(number): _view(standby) for number, standby in workers.standbys.items()},
            "abandoned": workers.abandoned,
            "roles": workers.roles,
            "memory": service.memstore.about(),
        }

    def living(self, _peer: ClientConnection, _command: Fields) -> Message:
        """Say which ranks live and mean to, after all that was seen and heard of their ends so far."""
        workers = self._service.workers
        for worker in workers.living():
            self._service.hear_all(worker)
        workers.reap()
        well = [worker for worker in workers.living() if worker.raised is None and not worker.finished]
        living = sorted(worker.rank for worker in well if worker.pid is not None and not is_ending(worker.pid))
        return {"generation": workers.generation, "ranks": living}

    def attach(self, peer: ClientConnection, command: Attach) -> Message:
        """Answer, tell the events after ``since``, and from then on every event as it comes."""
        peer.told = min(command.since, self._service.event_log.seq)
        peer.past = None
        return {"agent": self._service.me.id, "since": peer.told}

    def ping(self, _peer: ClientConnection, _command: Fields) -> Message:
        """Show that both ends are there."""
        return {}

    def prepare(self, _peer: ClientConnection, command: Prepare) -> Message:
        """Take on a job: remember how its workers are run, and start a warm starter for it."""
        service, plan = self._service, command.plan
        if service.ending:
            raise Refused("this agent is ending")
        warm = service.workers.prepare(plan)
        service.hold(plan.job, command.epoch or 0, plan.lease)
        service.memstore.prepare(plan)
        service.watching.prepare(watch=plan.watch)
        service.notices.prepare(plan.notice)
        return {"warm": warm, "memory": service.memstore.about()}

    def port(self, _peer: ClientConnection, _command: Fields) -> Message:
        """Give a port that is free now, outside the range from which the kernel serves outgoing connections."""
        try:
            return {"port": free_port()}
        except OSError as error:
            raise Refused("no free port found") from error

    def start(self, _peer: ClientConnection, command: Start) -> Message:
        """Begin a generation, and start its workers on this node."""
        service, workers, generation = self._service, self._service.workers, command.generation
        if service.ending or workers.plan is None:
            raise Refused("this agent is ending" if service.ending else "no job was prepared on this node: give the order 'prepare' first")
        if generation <= workers.generation:
            raise Refused(f"generation {generation} is not newer than {workers.generation}")
        living = workers.living() + [worker for worker in workers.leavers if not worker.gone]
        if living or workers.stopping:
            raise Refused(f"{len(living)} worker(s) of generation {workers.generation} still live, or what they left does")
        service.begin_generation(generation)
        workers.start(generation, command.membership, command.workers)
        return {"started": sorted(command.workers)}

    def stop(self, _peer: ClientConnection, command: Stop) -> Message:
        """Signal the workers; event `workers.exited` says when none is left."""
        workers, generation = self._service.workers, command.generation
        if generation < workers.generation:
            raise Refused(f"generation {generation} is over, this is {workers.generation}")
        workers.stop(generation, command.signal, command.grace)
        return {}

    def replicate(self, _peer: ClientConnection, command: Replicate) -> Message:
        """Copy the snapshots of this node's ranks to other nodes' memory from now on, and nowhere else."""
        if not self._service.memstore.serves():
            raise Refused("this node keeps nothing in memory that others could have")
        self._service.memstore.replicate(command.to, command.bandwidth)
        return {}

    def ask(self, _peer: ClientConnection, command: Ask) -> Message:
        """Put a question to the workers of this node (or to those *ranks*) that have a line; they answer in events of their own."""
        generation, ranks, workers = command.generation, command.ranks, self._service.workers
        if generation != workers.generation:
            raise Refused(f"generation {generation} is not the current one, that is {workers.generation}")
        asked = [worker for worker in workers.living() if worker.line is not None and (ranks is None or worker.rank in ranks)]
        return {"asked": [worker.rank for worker in asked if self._service.tell(worker, command.question)]}

    def stored(self, _peer: ClientConnection, _command: Fields) -> Message:
        """Say which snapshots lie whole in this node's memory: its ranks', and what others keep here."""
        return {"snapshots": self._service.memstore.stored()}

    def flush(self, _peer: ClientConnection, command: Flush) -> Message:
        """Put snapshots on disk, of workers that have ended: the last of a generation, which is over then."""
        service = self._service
        generation, living = command.generation, [str(worker.rank) for worker in service.workers.living()]
        if living:
            raise Refused(f"rank {', '.join(living)} still lives, and takes snapshots of its own")
        facts = {"generation": generation, "world": command.world, "keep": command.keep}
        service.checkpoint_writer.write_final(generation, [_wanted(one, command.directory, facts) for one in command.snapshots])
        return {}

    def notice(self, _peer: ClientConnection, command: PreemptionSource) -> Message:
        """Look for notices of the node's end somewhere else from now on."""
        self._service.notices.prepare(command.notice)
        return {}

    def token(self, _peer: ClientConnection, command: Token) -> Message:
        """Tell the job's secret, without which nobody joins its workers: who may connect here could have any of them started anyway."""
        plan = self._service.workers.plan
        if plan is None or command.job != self._service.job:
            raise Refused("this agent does not run that job")
        return {"token": plan.environment.get("HOLDFAST_TOKEN", "")}

    def deposit(self, _peer: ClientConnection, command: Deposit) -> Message:
        """Keep rows that the history does not take now."""
        self._service.deposit.add(command.records)
        return {}

    def deposited(self, _peer: ClientConnection, command: Deposited) -> Message:
        """Give such rows back, a part at a time."""
        records, following = self._service.deposit.since(command.since)
        return {"records": records, "next": following}

    def withdraw(self, _peer: ClientConnection, _command: Fields) -> Message:
        """Forget such rows: the history has them."""
        self._service.deposit.clear()
        return {}

    def end(self, _peer: ClientConnection, _command: Fields) -> Message:
        """End the workers and this agent, and wipe what is kept in memory."""
        note(log, "agent.told-to-end")
        self._service.end()
        return {}


def _wanted(item: Message, directory: str, facts: Message) -> WriteRequest:
    """Return the order for one snapshot; raise `BadField` when it cannot be one."""
    own = {name: schema.whole(item, name) for name in ("rank", "step", "lineage")}
    try:
        return WriteRequest.of({"snapshot": schema.text(item, "name"), "directory": directory, **own, **facts})
    except BadWriteRequest as error:
        raise schema.BadField("snapshots", "a list of snapshots", item) from error


def _view(standby: Worker) -> Message:
    """Return what is known of a standby: a flow that comes later has not heard it park."""
    return {**(standby.parked or {}), "pid": standby.pid, "ready": standby.parked is not None and not standby.ordered}


C = TypeVar("C", bound=Fields)


@dataclass(frozen=True, slots=True)
class CommandKind(Generic[C]):
    """One command that a controller gives."""

    name: str
    fields: type[C]
    run: Callable[[CommandHandler, ClientConnection, C], Message]
    """Carries it out, and returns the fields of the answer."""
    answer: tuple[str, ...] = ()
    """The names of those fields."""


def _in_process(run: Callable[[InProcessRecovery, C], Message]) -> Callable[[CommandHandler, ClientConnection, C], Message]:
    """Have the part that changes ranks in living processes carry a command out."""

    @wraps(run)
    def carry_out(handler: CommandHandler, _peer: ClientConnection, command: C) -> Message:
        return run(handler.recovery, command)

    return carry_out


_ABOUT: Final = (
    "agent", "pid", "job", "epoch", "generation", "membership", "since", "workers", "grouped", "leavers", "standbys", "abandoned", "roles",
    "memory",
)  # fmt: skip

COMMANDS: Final[Mapping[str, CommandKind[Any]]] = {
    kind.name: kind
    for kind in (
        CommandKind("about", Fields, CommandHandler.about, _ABOUT),
        CommandKind("attach", Attach, CommandHandler.attach, ("agent", "since")),
        CommandKind("ping", Fields, CommandHandler.ping),
        CommandKind("prepare", Prepare, CommandHandler.prepare, ("warm", "memory")),
        CommandKind("port", Fields, CommandHandler.port, ("port",)),
        CommandKind("start", Start, CommandHandler.start, ("started",)),
        CommandKind("stop", Stop, CommandHandler.stop),
        CommandKind("replicate", Replicate, CommandHandler.replicate),
        CommandKind("stored", Fields, CommandHandler.stored, ("snapshots",)),
        CommandKind("ask", Ask, CommandHandler.ask, ("asked",)),
        CommandKind("living", Fields, CommandHandler.living, ("generation", "ranks")),
        CommandKind("flush", Flush, CommandHandler.flush),
        CommandKind("notice", PreemptionSource, CommandHandler.notice),
        CommandKind("token", Token, CommandHandler.token, ("token",)),
        CommandKind("deposit", Deposit, CommandHandler.deposit),
        CommandKind("deposited", Deposited, CommandHandler.deposited, ("records", "next")),
        CommandKind("withdraw", Fields, CommandHandler.withdraw),
        CommandKind("abandon", Abandon, _in_process(InProcessRecovery.abandon), ("told", "killed")),
        CommandKind("regroup", Regroup, _in_process(InProcessRecovery.regroup)),
        CommandKind("switch", Switch, _in_process(InProcessRecovery.switch)),
        CommandKind("standby", Standby, _in_process(InProcessRecovery.standby), ("started",)),
        CommandKind("drop", Drop, _in_process(InProcessRecovery.drop), ("dropped",)),
        CommandKind("tell", Tell, _in_process(InProcessRecovery.tell)),
        CommandKind("pace", Pace, _in_process(InProcessRecovery.pace)),
        CommandKind("end", Fields, CommandHandler.end),
    )
}
