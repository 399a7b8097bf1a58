"""The commands that a controller gives to an agent: how each is carried out, and the table of them all."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

from holdfast.agent import schema
from holdfast.agent.connection import ClientConnection
from holdfast.agent.errors import Refused, StaleEpoch
from holdfast.agent.monitor.preemption import PreemptionSettings
from holdfast.agent.schema import Addresses, Count, FilePath, Membership, Numbers, Object, Objects, Positive, Seconds, Signal, Text
from holdfast.agent.workers.in_process_recovery import InProcessRecovery
from holdfast.agent.workers.spawner import SpawnPlan
from holdfast.host.ports import free_port
from holdfast.host.process import is_ending
from holdfast.log import note
from holdfast.memstore.write_requests import BadWriteRequest, WriteRequest
from holdfast.plurals import plural
from holdfast.protocol import PROTOCOL, Message

if TYPE_CHECKING:
    from holdfast.agent.server import AgentServer

log = logging.getLogger("holdfast.agent")

UPGRADE: Final = "install the same Holdfast on both sides"
MAX_ANSWERS: Final = 256
"""Answers that are kept, for commands that are sent again because the connection ended before their answer arrived."""

NewRanks = Annotated[dict[int, dict[str, str]], schema.environments_by("rank")]
"""Processes to start: the environment of each, by its rank."""
Plan = Annotated[SpawnPlan, lambda message, _name: schema.read_record(SpawnPlan, message)]
"""In fields of the command itself."""
NoticePlan = Annotated[PreemptionSettings, schema.record_in(PreemptionSettings)]


class CommandHandler(InProcessRecovery):
    """Carries out a controller's commands. The parameters of a command's method are the fields of its message."""

    def __init__(self, service: AgentServer) -> None:
        super().__init__(service)
        self._answers: OrderedDict[tuple[str, int], Message] = OrderedDict()

    def take(self, peer: ClientConnection, command: Message) -> Message:
        """Carry out *command* and return the answer. A refused one changes nothing, and does not renew the lease.

        A command that was carried out already, by its number in its controller's session, only gets the same answer again.
        """
        session, number = command.get("session"), command.get("id")
        if not isinstance(session, str) or not isinstance(number, int):
            return self._carry_out(peer, command)
        key = session[:64], number
        if key not in self._answers:
            answer = self._carry_out(peer, command)
            if command.get("do") in {"ping", "about", "attach"}:  # these may be repeated
                return answer
            self._answers[key] = answer
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)
        return self._answers[key]

    def _carry_out(self, peer: ClientConnection, command: Message) -> Message:
        try:
            kind = self._admitted(command)
            connection = {"peer": peer} if kind.gets_connection else {}
            answer = {"ok": True, **kind.run(self, **connection, **schema.read_fields(kind.run, command))}
            self._service.renew()
        except StaleEpoch as error:
            answer = {"ok": False, "why": str(error), "epoch": error.epoch}
        except Refused as error:
            answer = {"ok": False, "why": str(error)}
        except schema.BadField as error:
            answer = {"ok": False, "why": f"the command is malformed: {error}; {UPGRADE}"}
        except OSError as error:
            answer = {"ok": False, "why": str(error), "errno": error.errno}
        except Exception as error:  # a command that fails in an unforeseen way must not end the workers
            log.exception("command.failed")
            answer = {"ok": False, "why": f"the agent failed to carry it out: {type(error).__name__}: {error}"}
        return {"re": command.get("id"), **answer}

    def _admitted(self, command: Message) -> CommandKind:
        """Return the kind of *command*; raise `Refused` for an unknown one, another protocol, or a controller without the lease."""
        name = schema.text(command, "do")
        if name not in COMMANDS:
            raise Refused(f"unknown command '{name[:40]}': this agent knows {', '.join(COMMANDS)}; {UPGRADE}")
        protocol = command.get("protocol")
        if name in {"about", "attach"} and protocol != PROTOCOL:  # first: a refused controller must not depose the active one
            raise Refused(f"this agent speaks protocol {PROTOCOL}, the controller {str(protocol)[:20]}: {UPGRADE}")
        if name not in {"about", "token"}:  # whoever may connect may read these
            self._check_epoch(command)
        return COMMANDS[name]

    def _check_epoch(self, command: Message) -> None:
        """Raise `Refused` unless the newest controller of the job that this node serves gives the command."""
        service = self._service
        epoch = schema.optional(schema.integer, command, "epoch") or 0
        job = schema.optional(schema.text, command, "job")
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
            service.accept_epoch(service.job, epoch)
            service.notify_superseded(epoch)

    # -- commands that read ---------------------------------------------------------------------------------------------

    def about(self) -> Message:
        """Report who this agent is and what runs on its node."""
        service, workers = self._service, self._service.workers
        spares = {
            str(number): {
                **(spare.parked or {}),
                "pid": spare.pid,
                "ready": spare.parked is not None and not spare.ordered,
                "local_rank": spare.gpu_variables.get("LOCAL_RANK"),
            }
            for number, spare in workers.hot_spares.items()
        }
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
            "leavers": sorted(worker.pid for worker in workers.leavers if worker.pid is not None and not worker.exited),
            "hot_spares": spares,
            "abandoned": workers.abandoned,
            "roles": workers.roles,
            "memory": service.memstore.about(),
        }

    def living(self) -> Message:
        """Report which ranks live and have not failed or finished, after reading all that was received of their ends so far."""
        workers = self._service.workers
        for worker in workers.living():
            self._service.receive_all(worker)
        workers.reap()
        running = [worker for worker in workers.living() if worker.raised is None and not worker.finished]
        ranks = sorted(worker.rank for worker in running if worker.pid is not None and not is_ending(worker.pid))
        return {"generation": workers.generation, "ranks": ranks}

    def attach(self, since: Count, peer: ClientConnection) -> Message:
        """Answer, send the events after ``since``, and from then on every event as it comes."""
        peer.sent_seq = min(since, self._service.event_log.seq)
        peer.replay = None
        return {"agent": self._service.me.id, "since": peer.sent_seq}

    def ping(self) -> Message:
        """Show that the connection works."""
        return {}

    def stored(self) -> Message:
        """Report which complete snapshots lie in this node's memory: its ranks', and replicas of others."""
        return {"snapshots": self._service.memstore.stored()}

    def token(self, job: Text) -> Message:
        """Give the job's secret, without which nobody joins its workers: whoever may connect here could start any of them anyway."""
        plan = self._service.workers.plan
        if plan is None or job != self._service.job:
            raise Refused("this agent does not run that job")
        return {"token": plan.environment.get("HOLDFAST_TOKEN", "")}

    def port(self) -> Message:
        """Give a port that is free now, outside the range from which the kernel serves outgoing connections."""
        try:
            return {"port": free_port()}
        except OSError as error:
            raise Refused("no free port found") from error

    # -- the job and its generations --------------------------------------------------------------------------------------

    def prepare(self, epoch: Count | None, plan: Plan) -> Message:
        """Accept a job: keep how its workers are run, and start a fork server for it."""
        service = self._service
        if service.ending:
            raise Refused("this agent is ending")
        warm = service.workers.prepare(plan)
        service.accept_job(plan.job, epoch or 0, plan.lease)
        service.memstore.prepare(plan)
        service.monitor.prepare(watch=plan.watch)
        service.notices.prepare(plan.notice)
        return {"warm": warm, "memory": service.memstore.about()}

    def start(self, generation: Count, membership: Membership, workers: NewRanks) -> Message:
        """Begin a generation, and start its workers on this node."""
        service, group = self._service, self._service.workers
        self.check_job()
        if generation <= group.generation:
            raise Refused(f"generation {generation} is not newer than {group.generation}")
        living = group.living() + [worker for worker in group.leavers if not worker.exited]
        if living or group.stopping:
            left, who = plural(len(living), "worker"), "it" if len(living) == 1 else "they"
            raise Refused(f"{left} of generation {group.generation}, or processes that {who} started, still run")
        service.begin_generation(generation)
        group.start(generation, membership, workers)
        self.end_hot_spares_in_the_way(group.living())
        return {"started": sorted(workers)}

    def stop(self, generation: Count, signal: Signal, grace: Seconds) -> Message:
        """Signal the workers, and kill those that remain after *grace*; event `workers.exited` reports when none is left."""
        workers = self._service.workers
        if generation < workers.generation:
            raise Refused(f"generation {generation} is over, this is {workers.generation}")
        workers.stop(generation, signal, grace)
        return {}

    def query(self, generation: Count, query: Object, ranks: Numbers | None) -> Message:
        """Send a query to the connected workers of this node (or those *ranks*); they answer in events of their own."""
        self.check_generation(generation)
        workers = [one for one in self._service.workers.living() if one.connection is not None and (ranks is None or one.rank in ranks)]
        return {"queried": [worker.rank for worker in workers if self._service.send(worker, query)]}

    def end(self) -> Message:
        """End the workers and this agent, and wipe what is kept in memory."""
        note(log, "agent.end-requested")
        self._service.end()
        return {}

    # -- snapshots, notices, the outbox -----------------------------------------------------------------------------------

    def replicate(self, to: Addresses, bandwidth: Count | None) -> Message:
        """Copy the snapshots of this node's ranks to these nodes only from now on, at *bandwidth* bytes a second at most."""
        if not self._service.memstore.serves():
            raise Refused("this node keeps nothing in memory that others could have")
        self._service.memstore.replicate(to, bandwidth)
        return {}

    def flush(self, generation: Count, world: Positive, keep: Positive, directory: FilePath, snapshots: Objects) -> Message:
        """Write the last snapshots of a generation, whose workers have all ended, to disk as a checkpoint."""
        service = self._service
        living = [str(worker.rank) for worker in service.workers.living()]
        if living:
            raise Refused(f"rank {', '.join(living)} still runs, and takes snapshots of its own")
        requests = []
        for item in snapshots:
            facts = {name: schema.integer(item, name) for name in ("rank", "step", "lineage")}
            facts |= {"generation": generation, "world": world, "keep": keep}
            try:
                requests.append(WriteRequest.of({"snapshot": schema.text(item, "name"), "directory": directory, **facts}))
            except BadWriteRequest as error:
                raise schema.BadField("snapshots", "a list of snapshots", item) from error
        service.checkpoint_writer.write_final(generation, requests)
        return {}

    def notice(self, notice: NoticePlan) -> Message:
        """Look for preemption notices somewhere else from now on."""
        self._service.notices.prepare(notice)
        return {}

    def outbox_add(self, records: Objects) -> Message:
        """Keep rows that the history does not accept now."""
        self._service.outbox.add(records)
        return {}

    def outbox_read(self, since: Count) -> Message:
        """Return such rows from byte *since* on, a part at a time."""
        records, following = self._service.outbox.since(since)
        return {"records": records, "next": following}

    def outbox_clear(self) -> Message:
        """Remove such rows: the history has them."""
        self._service.outbox.clear()
        return {}


@dataclass(frozen=True, slots=True)
class CommandKind:
    """One command that a controller gives."""

    name: str
    run: Callable[..., Message]
    """Carries it out and returns the fields of the answer. Its parameters are the fields of the command."""
    answer: tuple[str, ...] = ()
    """The names of the answer's fields."""
    gets_connection: bool = False
    """*run* also gets the connection, as *peer*."""


_ABOUT: Final = (
    "agent", "pid", "job", "epoch", "generation", "membership", "since", "workers", "grouped", "leavers", "hot_spares", "abandoned",
    "roles",
    "memory",
)  # fmt: skip

COMMANDS: Final[Mapping[str, CommandKind]] = {
    kind.name: kind
    for kind in (
        CommandKind("about", CommandHandler.about, _ABOUT),
        CommandKind("attach", CommandHandler.attach, ("agent", "since"), gets_connection=True),
        CommandKind("ping", CommandHandler.ping),
        CommandKind("prepare", CommandHandler.prepare, ("warm", "memory")),
        CommandKind("port", CommandHandler.port, ("port",)),
        CommandKind("start", CommandHandler.start, ("started",)),
        CommandKind("stop", CommandHandler.stop),
        CommandKind("replicate", CommandHandler.replicate),
        CommandKind("stored", CommandHandler.stored, ("snapshots",)),
        CommandKind("query", CommandHandler.query, ("queried",)),
        CommandKind("living", CommandHandler.living, ("generation", "ranks")),
        CommandKind("flush", CommandHandler.flush),
        CommandKind("notice", CommandHandler.notice),
        CommandKind("token", CommandHandler.token, ("token",)),
        CommandKind("outbox-add", CommandHandler.outbox_add),
        CommandKind("outbox-read", CommandHandler.outbox_read, ("records", "next")),
        CommandKind("outbox-clear", CommandHandler.outbox_clear),
        CommandKind("abandon", CommandHandler.abandon, ("notified", "killed")),
        CommandKind("regroup", CommandHandler.regroup),
        CommandKind("switch", CommandHandler.switch),
        CommandKind("start-hot-spares", CommandHandler.start_hot_spares, ("started", "refused")),
        CommandKind("drop", CommandHandler.drop, ("dropped",)),
        CommandKind("forward", CommandHandler.forward),
        CommandKind("checkpoint-interval", CommandHandler.checkpoint_interval),
        CommandKind("end", CommandHandler.end),
    )
}
