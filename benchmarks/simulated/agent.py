"""One simulated agent: it answers commands and reports workers as a real one does (see `holdfast.agent`), and has none.

What is left out: processes, the journal on disk, hot spares, state in memory, the looks at the node. An order that needs those is refused.
"""

from __future__ import annotations

import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from benchmarks.simulated.training import Training
from holdfast.protocol import HEARTBEAT_INTERVAL, LineBuffer, Message, encode

REMEMBERED: Final = 512
"""Newest events that are sent again to a controller that attaches."""
UNTIL: Final = 1_000_000
"""Steps that the script wants to do."""
REGROUPED: Final[Message] = {
    "seconds": {"meet": 0.01, "step": 0.0, "groups": 0.01, "load": 0.01},
    "rebuilt": 1,
    "kept": 0,
    "source": "live",
    "replica": False,
    "reason": "the surviving ranks have all of it",
    "bytes": 4096,
    "bandwidth": 1e9,
    "interface": "127.0.0.1",
}
"""How a worker came into the next generation, as the runtime reports it."""
_PIDS: Final = count(100_000)


class Line:
    """A flow's connection to one agent."""

    def __init__(self, sock: socket.socket, agent: Agent, full: Callable[[Line], None]) -> None:
        self.socket, self.agent, self._full = sock, agent, full
        self.lines, self.unsent = LineBuffer(), bytearray()
        self.attached = False

    def send(self, line: bytes) -> None:
        """Send *line*, now or later."""
        self.unsent += line
        if len(self.unsent) == len(line):
            self.drain()
            if self.unsent:
                self._full(self)

    def drain(self) -> None:
        """Send what waits, as far as it is taken; what nobody receives any more is dropped."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            return
        except OSError:  # the end of the connection is noticed where it is read
            self.unsent.clear()


@dataclass(slots=True, kw_only=True)
class Worker:
    """A rank that an agent says to have a process for."""

    rank: int
    pid: int
    started: float
    stepped: bool = False
    regroups: bool = False
    """It came by a replacement of ranks: it was kept, or has joined ranks that were."""


class Agent:
    """The agent of one node."""

    def __init__(self, node: str, training: Training) -> None:
        self.node, self._training = node, training
        self.lines: list[Line] = []
        self.job: str | None = None
        self.beat = HEARTBEAT_INTERVAL
        self.generation = self._since = self._seq = self._epoch = 0
        self._membership: dict[str, list[int]] = {}
        self._abandoned: int | None = None
        self._workers: dict[int, Worker] = {}
        self._past: deque[tuple[int, bytes]] = deque(maxlen=REMEMBERED)
        self.given: Counter[str] = Counter()
        """How often each order was carried out."""
        self._verbs: dict[str, Callable[[Line, Message], Message]] = {
            "about": self._about,
            "attach": self._attach,
            "ping": lambda _line, _order: {},
            "prepare": self._prepare,
            "port": lambda _line, _order: {"port": 29500},
            "start": self._start,
            "stop": self._stop,
            "abandon": self._abandon,
            "regroup": self._regroup,
            "query": lambda _line, _order: {"queried": []},
            "living": lambda _line, _order: {"generation": self.generation, "ranks": sorted(self._workers)},
            "notice": lambda _line, _order: {},
            "checkpoint-interval": lambda _line, _order: {},
            "end": self._end,
        }

    # -- receiving ------------------------------------------------------------------------------------------------------

    def take(self, line: Line, order: Message) -> None:
        """Answer *order*."""
        verb, epoch = self._verbs.get(order["do"]), order.get("epoch") or 0
        if verb is None:
            answer: Message = {"ok": False, "why": f"a simulated agent does not know '{order['do']}'"}
        elif self.job is not None and order["do"] != "about" and order.get("job") not in {None, self.job}:
            answer = {"ok": False, "why": f"held by job {self.job}"}
        elif epoch < self._epoch:
            answer = {"ok": False, "why": f"a newer controller runs this job (epoch {self._epoch}, yours {epoch})"}
        else:
            self._epoch = max(self._epoch, epoch)
            answer = {"ok": True, **verb(line, order)}
            self.given[order["do"]] += 1
        line.send(encode({"re": order["id"], **answer}))

    def _about(self, _line: Line, _order: Message) -> Message:
        return {
            "agent": f"simulated-{self.node}",
            "pid": 1,
            "job": self.job,
            "epoch": self._epoch,
            "generation": self.generation,
            "membership": self._membership,
            "since": self._since,
            "workers": {str(one.rank): one.pid for one in self._workers.values()},
            "grouped": sorted(self._workers),
            "leavers": [],
            "hot_spares": {},
            "abandoned": self._abandoned,
            "roles": None,
            "memory": None,
        }

    def _attach(self, line: Line, order: Message) -> Message:
        line.attached = True
        for seq, event_line in self._past:
            if seq > order["since"]:
                line.send(event_line)
        return {"agent": f"simulated-{self.node}", "since": min(order["since"], self._seq)}

    def _prepare(self, _line: Line, order: Message) -> Message:
        self.job, self.beat = order["job"], order["beat"]
        return {"warm": True, "memory": None}

    def _start(self, _line: Line, order: Message) -> Message:
        self._enter(order)
        for worker in order["workers"]:
            self._begin(worker["rank"])
        started = sorted(self._workers)
        world = max((int(worker["environment"]["WORLD_SIZE"]) for worker in order["workers"]), default=0)
        self._training.arrive(self, self.generation, started, world)
        return {"started": started}

    def _regroup(self, _line: Line, order: Message) -> Message:
        kept, self._workers = self._workers, {}
        self._enter(order)
        for seat in order["workers"]:
            if seat["from"] == "kept":
                worker = self._workers[seat["rank"]] = kept[seat["rank"]]
                worker.stepped = False
                self._report("worker.kept", rank=worker.rank, pid=worker.pid, generation=self.generation, grouped=True)
            else:
                worker = self._begin(seat["rank"])
            worker.regroups = True
        self._training.arrive(self, self.generation, list(self._workers), order["facts"]["world"])
        return {}

    def _enter(self, order: Message) -> None:
        self.generation, self._since, self._abandoned = order["generation"], self._seq, None
        self._membership = order.get("membership") or {}

    def _begin(self, rank: int) -> Worker:
        worker = self._workers[rank] = Worker(rank=rank, pid=next(_PIDS), started=time.time())
        self._report("worker.started", rank=rank, pid=worker.pid, generation=self.generation)
        self._report("worker.hello", rank=rank, generation=self.generation)
        return worker

    def _stop(self, _line: Line, order: Message) -> Message:
        self._lose(list(self._workers), ordered=True)
        self._report("workers.exited", generation=order["generation"])
        return {}

    def _abandon(self, _line: Line, order: Message) -> Message:
        self._abandoned = order["generation"]
        self._training.leave(self.generation, lost=False)
        killed = [rank for rank in order["kill"] if rank in self._workers]
        self._lose(killed, ordered=True)
        return {"notified": sorted(self._workers), "killed": killed}

    def _end(self, _line: Line, _order: Message) -> Message:
        self._lose(list(self._workers), ordered=True)
        self.job = None
        return {}

    # -- its faults ----------------------------------------------------------------------------------------------

    def vanish(self) -> None:
        """Lose power: nobody gets any message about it."""
        self._training.leave(self.generation)
        self._workers.clear()
        self.job = None

    def kill(self, rank: int) -> None:
        """Have a worker die by SIGKILL."""
        self._lose([rank], ordered=False)

    def _lose(self, ranks: Iterable[int], *, ordered: bool) -> None:
        for rank in ranks:
            worker = self._workers.pop(rank)
            self._training.leave(self.generation, lost=not ordered)
            self._report(
                "worker.exited",
                rank=rank,
                generation=self.generation,
                finished=False,
                step=self._training.step,
                pid=worker.pid,
                ended=time.time(),
                code=None,
                signal=9,
                oom=None,
                oom_blind=None,
                raised=None,
                ordered=ordered,
                output="",
            )

    def met(self, resumed: int, step: int, *, first: int) -> None:
        """Have every worker join the others, resume, and do its first step."""
        for rank, worker in self._workers.items():
            facts = {"rank": rank, "generation": self.generation}
            if not worker.regroups:
                self._report("worker.groups", **facts)
            self._report("mark", **facts, name="group", seconds=0.01)
            self._report("mark", **facts, name="load", seconds=0.01)
            if worker.regroups:
                self._report("worker.regrouped", step=resumed, **REGROUPED, **facts, for_generation=self.generation)
            self._report("resumed", **facts, step=resumed, path=None, replica=False)
            self._report("worker.stepped", **facts, step=step, until=UNTIL, heartbeat=False)
            worker.stepped = True
            if rank == first:
                self.report_steps(range(step, step + 1), 0.01)
                if not worker.regroups:
                    self._report("worker.roles", roles=[sorted(self._training.seats)], recordings="", copies=[], **facts)

    def report_broken_groups(self) -> None:
        """Have every worker say that its group broke, as it does when a peer is lost."""
        for rank in self._workers:
            why = "Connection closed by peer [127.0.0.1]:29501"
            facts = {"rank": rank, "generation": self.generation, "for_generation": self.generation}
            self._report("worker.broken", step=self._training.step, group="0", why=why, **facts)

    def report_steps(self, steps: Iterable[int], seconds: float) -> None:
        """Report finished steps, as the agent of the lowest rank does."""
        now = time.time()
        self._report("steps", generation=self.generation, steps=[(step, now, seconds, 1.0) for step in steps])

    # -- reporting ------------------------------------------------------------------------------------------------------

    def _report(self, event: str, **facts: Any) -> None:  # noqa: ANN401 (whatever JSON can hold)
        self._seq += 1
        line = encode({"seq": self._seq, "event": event, "at": time.time(), **facts})
        self._past.append((self._seq, line))
        for one in self.lines:
            if one.attached:
                one.send(line)

    def say_beats(self, now: float) -> bool:
        """Report how far every worker is, at *now* (monotonic); return whether there was anything to report."""
        hearers = [one for one in self.lines if one.attached and not one.unsent]
        if not self._workers or not hearers:
            return False
        age = max(0.0, round(now - self._training.moved, 3))
        ranks = {str(one.rank): self._view(one, age) for one in self._workers.values()}
        line = encode({"event": "heartbeats", "at": time.time(), "generation": self.generation, "ranks": ranks})
        for one in hearers:
            one.send(line)
        return True

    def _view(self, worker: Worker, age: float) -> Message:
        return {
            "step": self._training.step if worker.stepped else None,
            "age": age,
            "section": None,
            "section_limit": None,
            "managed": worker.stepped,
            "process": "S",
            "wait": "futex_wait_queue",
            "output_age": round(time.time() - worker.started, 3),
            "printed": True,
            "pid": worker.pid,
            "snapshot": {},
            "step_timings": [],
            "checks": [],
            "replica": None,
        }
