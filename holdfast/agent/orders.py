"""What a flow may ask of an agent, and what workers tell it."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.agent.starter import Launch, WarmStarter, start_cold
from holdfast.agent.worker import Worker
from holdfast.log import note
from holdfast.wire import PROTOCOL, Message

if TYPE_CHECKING:
    from holdfast.agent.service import Peer, Service

log = logging.getLogger("holdfast.agent")


class Refused(Exception):
    """An order that cannot be carried out, and why."""


class Orders:
    """Carries out a flow's orders and takes in what workers say."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._plan: Message = {}
        self._waiting: dict[int, Launch] = {}
        self._verbs: dict[str, Callable[[Peer, Message], Message]] = {
            "about": self._about,
            "attach": self._attach,
            "ping": lambda _peer, _order: {},
            "prepare": self._prepare,
            "port": self._port,
            "start": self._start,
            "stop": self._stop,
            "end": self._end,
        }

    # -- from the flow ------------------------------------------------------------------------------------------------

    def take(self, peer: Peer, order: Message) -> None:
        """Carry out *order* and answer it. An order of an older flow (a smaller epoch) is refused: its lease has gone to another."""
        answer: Message
        try:
            epoch = int(order.get("epoch", 0))
            if epoch < self._service.epoch:
                raise Refused(f"a newer flow steers this job (epoch {self._service.epoch}, yours {epoch})")  # noqa: TRY301
            self._service.epoch = epoch
            answer = {"ok": True, **self._verbs[order["do"]](peer, order)}
        except Refused as error:
            answer = {"ok": False, "why": str(error)}
        except (KeyError, TypeError, ValueError) as error:
            answer = {"ok": False, "why": f"order not understood: {type(error).__name__} {error}"}
        except OSError as error:
            answer = {"ok": False, "why": str(error), "errno": error.errno}
        self._service.send(peer, {"re": order.get("id"), **answer})
        if peer.follows is not None and not peer.attached:
            peer.attached = True
            for event in self._service.journal.since(peer.follows):
                self._service.send(peer, event)

    def _about(self, _peer: Peer, order: Message) -> Message:
        """Say who this agent is and what runs on its node."""
        if order.get("protocol") != PROTOCOL:
            raise Refused(f"this agent speaks protocol {PROTOCOL}, the flow {order.get('protocol')}: install the same Holdfast on both")
        service = self._service
        return {
            "agent": service.id,
            "pid": os.getpid(),
            "job": service.job,
            "generation": service.generation,
            "membership": service.membership,
            "since": service.generation_seq,
            "workers": {str(worker.rank): worker.pid for worker in service.living()},
        }

    def _attach(self, peer: Peer, order: Message) -> Message:
        """Answer, tell the events after ``since``, and from then on every event as it comes."""
        peer.follows = int(order["since"])
        return {}

    def _prepare(self, _peer: Peer, order: Message) -> Message:
        """Take on a job: remember how its workers are run, and start a warm starter for it."""
        service = self._service
        if service.job not in (None, order["job"]):
            raise Refused(f"held by job {service.job}")
        service.job, service.lease = order["job"], float(order["lease"])
        service.renew()
        service.write_facts()
        self._plan = order
        Path(order["log_directory"]).mkdir(parents=True, exist_ok=True)
        if order["warm"] and service.starter is None:
            self._warm_up()
        return {"warm": service.starter is not None}

    def _warm_up(self) -> None:
        plan = self._plan
        with (self._service.directory / "starter.log").open("ab") as output:
            starter = WarmStarter(
                python=plan["python"],
                environment={**os.environ, **plan["environment"], **self._marks()},
                preload=list(plan["preload"]),
                log=output,
            )
        self._service.use_starter(starter)

    def _marks(self) -> dict[str, str]:
        service = self._service
        return {"HOLDFAST_NODE": service.node, "HOLDFAST_NODE_MARK": str(service.directory), "HOLDFAST_SOCKET": str(service.directory / "agent.sock")}

    def _port(self, _peer: Peer, _order: Message) -> Message:
        """Give a port that is free now, outside the range from which the kernel serves outgoing connections."""
        low = _first_ephemeral()
        for _ in range(200):
            port = 10_000 + int.from_bytes(os.urandom(4)) % max(1000, low - 10_000)
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                try:
                    probe.bind(("", port))
                except OSError:
                    continue
                return {"port": port}
        raise Refused("no free port found")

    def _start(self, _peer: Peer, order: Message) -> Message:
        service, generation = self._service, int(order["generation"])
        if generation <= service.generation:
            raise Refused(f"generation {generation} is not newer than {service.generation}")
        if service.living():
            raise Refused(f"{len(service.living())} worker(s) of generation {service.generation} still live")
        service.generation, service.workers, service.steps = generation, {}, []
        service.generation_seq, service.membership = service.journal.seq, order["membership"]
        service.memory.forget()
        for item in order["workers"]:
            self._begin(generation, int(item["rank"]), dict(item["environment"]))
        return {"started": sorted(service.workers)}

    def _begin(self, generation: int, rank: int, environment: dict[str, str]) -> None:
        plan, service = self._plan, self._service
        path = Path(plan["log_directory"]) / f"rank-{rank}.log"
        begin = _mark_log(path, generation, rank)
        worker = Worker(rank=rank, generation=generation, log=path, log_begin=begin)
        launch = Launch(
            rank=rank,
            argv=tuple(plan["argv"]),
            environment={**os.environ, **plan["environment"], **environment, **self._marks()},
            directory=plan["directory"],
            log=str(path),
        )
        if plan["warm"] and service.starter:
            service.workers[rank] = worker
            self._waiting[rank] = launch
            if service.starter.ready:
                service.starter.send(launch)
            return
        pid = start_cold(self._cold(launch))
        service.workers[rank] = worker
        service.registered(worker, pid)

    def _cold(self, launch: Launch) -> Launch:
        """Return *launch* as a command of its own, for a script that was meant to be forked."""
        if not self._plan["warm"]:
            return launch
        return Launch(
            rank=launch.rank,
            argv=(self._plan["python"], *launch.argv),
            environment=launch.environment,
            directory=launch.directory,
            log=launch.log,
        )

    def _stop(self, _peer: Peer, order: Message) -> Message:
        generation = int(order["generation"])
        if generation < self._service.generation:
            raise Refused(f"generation {generation} is over, this is {self._service.generation}")
        self._service.stop(generation, int(order["signal"]), float(order["grace"]))
        return {}

    def _end(self, _peer: Peer, _order: Message) -> Message:
        self._service.end()
        return {}

    # -- from the warm starter ----------------------------------------------------------------------------------------

    def hear_starter(self, message: Message) -> None:
        """Take a pid, a failure, or the news that the starter is ready."""
        service = self._service
        if message.get("ready"):
            assert service.starter is not None
            service.starter.ready = True
            service.emit("starter.ready", seconds=message["seconds"], preloaded=message["preloaded"])
            for launch in list(self._waiting.values()):
                service.starter.send(launch)
            return
        worker = service.workers.get(message["rank"])
        self._waiting.pop(message["rank"], None)
        if worker is None:
            return
        if "pid" in message:
            service.registered(worker, message["pid"])
        else:
            worker.gone = True
            service.emit("start.failed", rank=worker.rank, generation=worker.generation, why=message["error"], errno=message.get("errno"))

    def starter_gone(self) -> None:
        """Start cold what the dead starter still owed, and warm up another one."""
        service = self._service
        service.emit("starter.gone")
        waiting, self._waiting = self._waiting, {}
        for rank, launch in waiting.items():
            worker = service.workers[rank]
            try:
                service.registered(worker, start_cold(self._cold(launch)))
            except OSError as error:
                worker.gone = True
                service.emit("start.failed", rank=rank, generation=worker.generation, why=str(error), errno=error.errno)
        if not waiting and not service.ending:  # one that dies before it is ever of use would die again
            self._warm_up()

    # -- from workers -------------------------------------------------------------------------------------------------

    def hear_worker(self, peer: Peer, message: Message) -> None:
        """Take in what a worker says; one that is not of this generation is heard no more."""
        service = self._service
        worker = service.worker_of(peer.pid)
        if worker is None:
            if message["t"] == "commit?":
                service.send(peer, {"re": message.get("id"), "ok": False, "why": "this process is no worker of the current generation"})
            return
        handler: Callable[[Worker, Message], None] | None = getattr(self, "_on_" + str(message["t"]).rstrip("?"), None)
        if message["t"] == "commit?":
            self._on_commit(peer, worker, message)
        elif handler is None or message["t"] == "commit":
            note(log, "worker.unknown-word", rank=worker.rank, word=message["t"])
        else:
            handler(worker, message)

    def _emit(self, event: str, worker: Worker, **facts: Any) -> None:
        self._service.emit(event, rank=worker.rank, generation=worker.generation, **facts)

    def _on_hello(self, worker: Worker, message: Message) -> None:
        if message.get("protocol") != PROTOCOL:
            self._emit("worker.stranger", worker, why=f"speaks protocol {message.get('protocol')}, this agent {PROTOCOL}")
            return
        worker.advance()
        self._emit("worker.hello", worker)

    def _on_mark(self, worker: Worker, message: Message) -> None:
        worker.managed = True
        worker.advance()
        self._emit("mark", worker, name=message["name"], seconds=message["seconds"])

    def _on_resumed(self, worker: Worker, message: Message) -> None:
        worker.managed = True  # a hello alone is no promise of steps: the warm starter says it for any script that raises
        worker.advance()
        worker.step = message["step"]
        self._emit("resumed", worker, step=message["step"], path=message.get("path"))

    def _on_beat(self, worker: Worker, message: Message) -> None:
        service = self._service
        worker.step, now = message["step"], time.time()
        worker.advance()
        if worker.first_step is None:
            worker.first_step = now
            self._emit("worker.stepped", worker, step=message["step"], until=message.get("until"))
        if worker.rank == 0:
            service.steps.append([message["step"], now, message["seconds"], message.get("loss")])
            service.flush_soon()

    def _on_section(self, worker: Worker, message: Message) -> None:
        begins = bool(message["begin"])
        worker.section = message["name"] if begins else None
        worker.section_limit = message.get("limit_s") if begins else None
        worker.advance()
        if message["name"] != "save":  # one a checkpoint would fill the journal
            self._emit("section", worker, name=message["name"], begin=begins)

    def _on_saved(self, worker: Worker, message: Message) -> None:
        worker.advance()
        self._emit("saved", worker, **{name: message.get(name) for name in ("step", "path", "seconds", "size")})

    def _on_trouble(self, worker: Worker, message: Message) -> None:
        self._emit("trouble", worker, **{name: message.get(name) for name in ("kind", "step", "path", "why")})

    def _on_exception(self, worker: Worker, message: Message) -> None:
        worker.raised = {name: message.get(name) for name in ("type", "message", "traceback", "step", "errno", "peer_lost")}
        self._emit("worker.raised", worker, raised=worker.raised, step=worker.step)  # its process may take a second to end

    def _on_bye(self, worker: Worker, message: Message) -> None:
        worker.finished = True
        worker.section, worker.section_limit = "end of script", None  # no steps are expected any more
        worker.advance()
        self._emit("bye", worker, step=message.get("step"))

    def _on_commit(self, peer: Peer, worker: Worker, message: Message) -> None:
        """Let a checkpoint be put in place only by a worker of the current generation; its steps are on record before it."""
        service = self._service
        current = worker.generation == service.generation and not service.ending and not service.is_stopping()
        service.flush_steps()
        why = "" if current else f"generation {worker.generation} is over"
        service.send(peer, {"re": message.get("id"), "ok": current, "why": why})


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def _mark_log(path: Path, generation: int, rank: int) -> int:
    """Say in the log where this worker's output begins; return the size up to there."""
    with path.open("ab") as file:
        file.write(f"--- holdfast: rank {rank}, generation {generation}\n".encode())
        return file.tell()
