"""Controller and agents in one: forks real ranks, receives their messages, and has the survivors of a fault regroup."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from holdfast.host.ports import free_port
from holdfast.memstore.shared_memory import labels
from holdfast.protocol import LineBuffer, Message, encode, listen
from tests.imported import Program
from tests.runtime.ranks import ROOT
from tests.waiting import wait_until

T = TypeVar("T")

SCRIPTS = Path(__file__).parent / "scripts"
TOKEN = "ab" * 16
SECONDS = 60.0
"""How long anything may take on a busy machine."""


class Workers:
    """A process that has torch imported and forks workers from itself."""

    def __init__(self, torch: Path, *imports: str) -> None:
        """Have the process at the socket *torch* fork it; workers find the modules *imports* imported too."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        self.environment = environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._server = Program(torch, "tests.runtime.group_server", *imports, environment=self.environment)
        assert "ready" in self._server.answer()

    def fork(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Start a worker that runs *argv*; return its pid."""
        order = {"argv": list(argv), "environment": {**self.environment, **environment}, "log": str(log), "directory": str(ROOT)}
        return int(self._server.ask(order)["pid"])

    def ended(self) -> dict[int, int]:
        """Return the exit status (negative: the signal) of every worker that has ended, by pid."""
        return {int(pid): status for pid, status in self._server.ask({}).items()}

    def close(self) -> None:
        """End the server; workers that are left die with it."""
        self._server.close()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended: the *results* of each rank, the *losses* it committed by step, and its last exit *status*."""

    results: list[Any]
    losses: list[dict[int, float | None]]
    status: list[int]


class FlowDouble:
    """One job: `begin` it, wait for a fault, `regroup`, and `finish`."""

    def __init__(self, workers: Workers, folder: Path, script: str, *arguments: object, ranks: int = 4, **more: Any) -> None:
        """Make a job of *script* on *ranks*.

        *more*: ``groups`` (as in a job file, for a launcher that replaces `init_process_group`), ``interval`` (that of rank 0, from
        its first save on), ``chaos`` (faults the script does to itself), ``save`` (steps between checkpoints), ``stride`` (ranks of a
        node), ``memory`` (every node has a memory store; other than a job's own, one that takes every snapshot, however long that
        holds training up, unless ``policy`` says otherwise), ``servers`` (where the memory of nodes is served).
        """
        self.workers, self.folder, self.ranks = workers, folder, ranks
        self.argv = [str(SCRIPTS / f"{script}.py"), str(folder), *(str(one) for one in arguments)]
        self.generation, self.serve, self.stride = 1, 0, more.get("stride", 2)
        self.newest = 1
        """The highest number that a generation was ever to have: one that came to nothing leaves its own unused."""
        self.received: list[Message] = []
        """Every message, with the pid of its sender."""
        self.pids: dict[int | str, int] = {}
        """Of the present process of each rank, and of each hot spare (``"s0"``)."""
        self.incarnations = dict.fromkeys(range(ranks), 1)
        """Of the ranks that are there."""
        self.changes = dict.fromkeys(range(ranks), 0)
        """How often each rank went to another process."""
        self.every: int | None = None
        """Steps between checkpoints that the coming generation uses."""
        self.interval: int | None = more.get("interval")
        """Steps between checkpoints that rank 0 gets when it saves."""
        self.servers: Mapping[str, tuple[str, int]] = more.get("servers", {})
        """Where the memory of nodes is served from the coming generation on."""
        self.places = {rank: f"node-{rank // self.stride}" for rank in range(ranks)}
        """The node of each rank."""
        self.moving: tuple[int, str, Message]
        """The migration in progress: the rank, the hot spare it moves to, and the facts sent to all."""
        self.coming: dict[int, str] = {}
        """The hot spare that becomes each rank, in a migration or where places were vacant."""
        self._store = ("127.0.0.1", free_port())
        self._lines: dict[int, socket.socket] = {}
        self._all: list[int] = []
        self._rank_of: dict[int, int] = {}
        self._memory, self._policy = bool(more.get("memory")), more.get("policy", "pause")
        self._given = {"CHAOS": json.dumps(more.get("chaos", [])), "HOLDFAST_SAVE_EVERY": str(more.get("save", 0))}
        if "groups" in more:
            self._given["HOLDFAST_GROUPS"] = more["groups"]
        self._server = listen(folder / "s")
        threading.Thread(target=self._accept, daemon=True).start()

    # -- workers ------------------------------------------------------------------------------------------------------

    def begin(self) -> FlowDouble:
        """Start all ranks."""
        for rank in range(self.ranks):
            self._fork(rank, self._of(rank), f"rank-{rank}")
        return self

    def hot_spare(
        self, number: int, roles: Sequence[Sequence[int]] | None = None, park: int = 0, *, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a hot spare; `receive` returns when it is offloaded."""
        known = [list(role) for role in roles or [range(self.ranks)]]
        status = {"HOLDFAST_HOT_SPARE": str(number), "HOLDFAST_ROLES": json.dumps(known), "HOLDFAST_WAITING_ROLE": str(park)}
        self._fork(f"s{number}", {**self._of(min(known[park])), **status, **(environment or {})}, f"hot-spare-{number}")

    def memstore(self, rank: int) -> Path:
        """Return where the node of *rank* keeps snapshots."""
        return self.folder / "memory" / self.places[rank]

    def snapshots(self, rank: int) -> list[tuple[int, Path]]:
        """Return the complete snapshots of *rank* on its node: steps and files, oldest first."""
        found = {path: label for path, label in labels(self.memstore(rank)).items() if label.rank == rank}
        return sorted((label.step, path) for path, label in found.items())

    def restart(self) -> None:
        """Kill all living ranks and start all again, as the controller does when none can continue."""
        before = {self.pids[rank] for rank in range(self.ranks)}
        for pid in before - self.workers.ended().keys():
            os.kill(pid, signal.SIGKILL)
        self.until(lambda: before <= self.workers.ended().keys(), "the end of all")
        self.generation = self.newest = self.newest + 1
        self._store = ("127.0.0.1", free_port())
        self.serve, self.incarnations = 0, dict.fromkeys(range(self.ranks), self.generation)
        for rank in range(self.ranks):
            self.changes[rank] += 1
        self.begin()

    def _of(self, rank: int) -> dict[str, str]:
        return {"RANK": str(rank), "LOCAL_RANK": str(rank % self.stride), "HOLDFAST_GENERATION": str(self.generation)}

    def _fork(self, key: int | str, environment: Mapping[str, str], log: str) -> None:
        job = {
            "HOLDFAST_SOCKET": str(self.folder / "s"),
            "HOLDFAST_TOKEN": TOKEN,
            "HOLDFAST_CHECKPOINT_DIR": str(self.folder / "checkpoints"),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.stride),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store[1]),
        }
        if self._memory:
            memstore = self.memstore(int(environment["RANK"]))
            memstore.mkdir(parents=True, exist_ok=True)
            job |= {"HOLDFAST_MEMSTORE": str(memstore), "HOLDFAST_NODE": memstore.name}
            job |= {"HOLDFAST_MEMORY_POLICY": self._policy, "HOLDFAST_MEMORY_PAUSE": "10"}
            job |= {"HOLDFAST_MEMORY_SERVERS": json.dumps(self.servers)}
        self.pids[key] = self.workers.fork(self.argv, {**job, **self._given, **environment}, self.folder / f"{log}.log")
        self._all.append(self.pids[key])
        if isinstance(key, int):
            self._rank_of[self.pids[key]] = key

    def kill(self, key: int | str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank or a hot spare."""
        os.kill(self.pids[key], number)

    def _succeed(self, before: int, pid: int) -> None:
        """Take another process as a rank or a hot spare."""
        self._all.append(pid)
        if before in self._rank_of:
            self._rank_of[pid] = self._rank_of[before]
        for key in [key for key, present in self.pids.items() if present == before]:
            self.pids[key] = pid

    # -- what they say ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                line, _ = self._server.accept()
            except OSError:
                return
            pid = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
            self._lines[pid] = line
            threading.Thread(target=self._listen, args=(pid, line), daemon=True).start()

    def _listen(self, pid: int, line: socket.socket) -> None:
        lines = LineBuffer()
        with suppress(OSError):
            while data := line.recv(65536):
                for message in lines.feed(data):
                    if message["t"] == "commit-request":
                        line.sendall(encode({"re": message["id"], "ok": True, "why": "", "every": self.interval}))
                    if message["t"] == "register-successor":
                        self._succeed(pid, message["pid"])
                        line.sendall(encode({"re": message["id"], "ok": True, "why": ""}))
                    self.received.append({**message, "pid": pid})

    def of(self, word: str, key: int | str | None = None) -> list[Message]:
        """Return the messages *word*, of the current process of *key* if it is given."""
        pid = None if key is None else self.pids[key]
        return [one for one in list(self.received) if one["t"] == word and pid in (None, one["pid"])]

    def receive(self, word: str, key: int | str | None = None, **fields: Any) -> Message:
        """Wait for a message *word* with these *fields*, from *key* if it is given."""
        found = self.until(lambda: [one for one in self.of(word, key) if fields.items() <= one.items()], f"'{word}' of {key} with {fields}")
        return found[0]

    def until(self, predicate: Callable[[], T], what: str) -> T:
        """Wait for *predicate*; a failure shows all logs."""
        return wait_until(predicate, seconds=SECONDS, explain=lambda: f"{what} did not come about.\n{self.logs()}")

    def until_dead(self, *keys: int | str) -> None:
        """Wait until the present processes of *keys* have been killed."""
        for key in keys:
            status = self.until(lambda key=key: self.workers.ended().get(self.pids[key]), f"the end of {key}")  # type: ignore[misc]
            assert status == -signal.SIGKILL, self.logs()

    def until_stopped(self, rank: int) -> None:
        """Wait until *rank* has been stopped."""
        path = Path(f"/proc/{self.pids[rank]}/stat")
        self.until(lambda: path.read_text().rpartition(")")[2].split()[0] == "T", f"the stop of {rank}")

    def pass_gate(self, name: str = "gate") -> None:
        """Open a gate at which ranks wait in their script."""
        (self.folder / name).touch()

    def logs(self) -> str:
        """Return the ends of all logs and of the messages."""
        said = [{name: value for name, value in one.items() if name != "traceback"} for one in list(self.received) if one["t"] != "beat"]
        texts = [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log"))]
        return "\n".join([*texts, "--- said", *(str(one) for one in said[-40:])])

    # -- orders -------------------------------------------------------------------------------------------------------

    def send(self, key: int | str, message: Message) -> None:
        """Send a command to the current process of *key*, once it listens."""
        self.until(lambda: self.pids[key] in self._lines, f"the line of {key}")
        self._lines[self.pids[key]].sendall(encode(message))

    def abandon(self, lost: Sequence[int]) -> None:
        """Have the survivors leave every wait, and kill lost ranks that still live."""
        for rank in self.incarnations:
            if rank in lost:
                with suppress(ProcessLookupError):
                    self.kill(rank)
            else:
                self._send(rank, {"do": "abandon", "generation": self.generation, "lost": list(lost)})

    def shrink(self, lost: Sequence[int]) -> None:
        """End the generation and begin the next without the *lost* ranks."""
        self.abandon(lost)
        for rank in lost:
            del self.incarnations[rank]
        since, self.generation = self.generation, self.newest + 1
        self.newest = self.generation
        if self.serve in lost:
            self.serve = min(self.incarnations)
            self._store = ("127.0.0.1", free_port())
        for rank in self.incarnations:
            self._send(rank, {"do": "regroup", **self._facts(self.generation, [], since), "rank": rank})

    def regroup(self, lost: Sequence[int] = (), hot_spares: Mapping[int, str] | None = None, *, fork: bool = True) -> Callable[[], None]:
        """End the generation and begin the next: *lost* ranks go to *hot_spares*, or to new processes; so do vacant ones named there.

        Return what starts the fresh processes, when they are not to be started at once (*fork*).
        """
        self.abandon([rank for rank in lost if rank in self.incarnations])
        since, self.generation = self.generation, self.newest + 1
        self.newest = self.generation
        self.incarnations.update(dict.fromkeys(lost, self.generation))
        for rank in lost:
            self.changes[rank] += 1
        if self.serve in lost:
            self.serve = min(self.incarnations.keys() - set(lost))
            self._store = ("127.0.0.1", free_port())
        facts = {"do": "regroup", **self._facts(self.generation, lost, since)}
        fresh = [rank for rank in lost if rank not in (hot_spares or {})]
        for rank in self.incarnations.keys() - set(fresh):
            more: Message = {}
            if rank in lost:
                self.pids[rank] = self.pids.pop((hot_spares or {})[rank])
                self._rank_of[self.pids[rank]] = rank
                more = {"environment": self._of(rank), "log": str(self.folder / f"rank-{rank}.log")}
            self._send(rank, {**facts, "rank": rank, **more})

        def start() -> None:
            for rank in fresh:
                self._fork(rank, {**self._of(rank), "HOLDFAST_FRESH": "1"}, f"rank-{rank}")
                self.send(rank, {**facts, "rank": rank})

        if fork:
            start()
        return start

    def _facts(self, generation: int, changed: Sequence[int], since: int) -> Message:
        """Return what every process must know of the next *generation*."""
        return {
            "generation": generation,
            "world": len(self.incarnations),
            "incarnations": [[rank, rank, number] for rank, number in (self.incarnations | dict.fromkeys(changed, generation)).items()],
            "store": list(self._store),
            "serve": self.serve,
            "token": TOKEN,
            "changed": list(changed),
            "since": since,
            "every": self.every,
            "memory": dict(self.servers),
        }

    def _send(self, rank: int, message: Message) -> None:
        with suppress(OSError):  # it has died meanwhile: the flow learns that later
            self.send(rank, message)

    def mended(self) -> list[Message]:
        """Wait until every rank has regrouped in the current generation; return their reports."""

        def regrouped() -> dict[int, Message]:
            assert not [one for one in self.of("recovery-failed") if one["generation"] == self.generation], self.logs()
            return {one["pid"]: one for one in self.of("regrouped") if one["generation"] == self.generation}

        def present() -> set[int]:  # asked each time: a hot spare's successor may come meanwhile
            return {self.pids[rank] for rank in self.incarnations}

        self.until(lambda: regrouped().keys() >= present(), f"the regrouping of all in generation {self.generation}")
        return [regrouped()[self.pids[rank]] for rank in self.incarnations]

    # -- planned moves ------------------------------------------------------------------------------------------------

    def prepare(self, rank: int, hot_spare: str) -> None:
        """Have all prepare, alongside training, for *rank* to migrate to *hot_spare*; then `switch`, or `forget` it."""
        self.newest += 1
        facts = {"do": "prepare", **self._facts(self.newest, [rank], self.generation), "leavers": [rank]}
        if self.serve == rank:
            facts |= {"serve": min(set(range(self.ranks)) - {rank}), "store": ["127.0.0.1", free_port()]}
        self.moving, self.coming = (rank, hot_spare, facts), {rank: hot_spare}
        for one in range(self.ranks):
            self._send(one, {**facts, "rank": one})
        environment = {**self._of(rank), "HOLDFAST_GENERATION": str(self.newest)}
        self.send(hot_spare, {**facts, "rank": rank, "environment": environment, "log": str(self.folder / f"rank-{rank}.log")})

    def grow(self, hot_spares: Mapping[int, str]) -> None:
        """Have all prepare, alongside training, for *hot_spares* to take the vacant places of the ranks named there."""
        self.newest += 1
        facts = {"do": "prepare", **self._facts(self.newest, sorted(hot_spares), self.generation), "leavers": []}
        facts["world"] = len(self.incarnations) + len(hot_spares)
        self.coming = dict(hot_spares)
        for one in self.incarnations:
            self._send(one, {**facts, "rank": one})
        for rank, hot_spare in hot_spares.items():
            environment = {**self._of(rank), "HOLDFAST_GENERATION": str(self.newest)}
            self.send(hot_spare, {**facts, "rank": rank, "environment": environment, "log": str(self.folder / f"rank-{rank}.log")})

    def grown(self) -> None:
        """Wait until all have switched."""
        for hot_spare in self.coming.values():
            self.receive("switched", hot_spare, generation=self.newest)
        self.generation = self.newest
        for rank, hot_spare in self.coming.items():
            self.pids[rank] = self.pids.pop(hot_spare)
            self._rank_of[self.pids[rank]] = rank
            self.incarnations[rank] = self.generation
            self.changes[rank] += 1
        for one in self.incarnations:
            self.receive("switched", one, generation=self.generation)

    def prepared(self) -> None:
        """Wait until all ranks and the new process are ready to switch."""
        keys: list[int | str] = [*self.incarnations, *self.coming.values()]
        for key in keys:
            self.receive("prepared", key, generation=self.newest)

    def may_switch(self) -> None:
        """Allow all to switch; wait until each rank knows, so that its next vote says so."""
        for rank in self.incarnations:
            self.send(rank, {"do": "switch", "generation": self.newest})
        for rank in self.incarnations:
            self.receive("may switch", rank, generation=self.newest)

    def switched(self) -> list[Message]:
        """Wait until all have switched and the leaving process has exited; return their reports by rank."""
        rank, hot_spare, facts = self.moving
        leaver = self.pids[rank]
        self.receive("departed", rank)
        self.until(lambda: leaver in self.workers.ended(), f"the end of the process that rank {rank} left")
        assert self.workers.ended()[leaver] == 0, self.logs()
        self.pids[rank] = self.pids.pop(hot_spare)
        self._rank_of[self.pids[rank]] = rank
        self.generation, self.serve, self._store = self.newest, facts["serve"], (facts["store"][0], facts["store"][1])
        self.incarnations[rank] = self.generation
        self.changes[rank] += 1
        return [self.receive("switched", one, generation=self.generation) for one in range(self.ranks)]

    def forget(self) -> None:
        """Cancel the migration: living ranks drop it, and the new process exits."""
        for rank in range(self.ranks):
            self._send(rank, {"do": "forget", "generation": self.newest})
        with suppress(ProcessLookupError):
            self.kill(self.moving[1])
        self.until_dead(self.moving[1])

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> Ended:
        """Wait until all ranks have exited; return their results."""
        mine = [self.pids[rank] for rank in self.incarnations]
        status = self.until(lambda: (ended := self.workers.ended()).keys() >= set(mine) and [ended[pid] for pid in mine], "the end of all")
        assert status
        results = [
            json.loads(path.read_text()) if (path := self.folder / f"result-{rank}.json").exists() else None for rank in range(self.ranks)
        ]
        return Ended(results, self.losses(), status)

    def losses(self) -> list[dict[int, float | None]]:
        """Return the losses that each rank committed, by step, None where it is not known; a repeated step must have the same loss."""
        found: list[dict[int, float | None]] = [{} for _ in range(self.ranks)]
        for beat in self.of("beat"):
            of_rank, step = found[self._rank_of[beat["pid"]]], beat["step"]
            if of_rank.get(step) is None:
                of_rank[step] = beat["loss"]
            assert beat["loss"] in {of_rank[step], None}, (beat, self.logs())
        return found

    def close(self) -> None:
        """Kill all remaining processes."""
        for pid in set(self._all) - self.workers.ended().keys():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.workers.ended().keys() >= set(self._all), seconds=SECONDS)
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for line in self._lines.values():
            line.close()


UNTIL = 16
"""Steps of a job."""

Job = Callable[..., FlowDouble]
"""Makes and starts a job; its remaining processes end with the test."""


def undisturbed(flow: FlowDouble) -> Ended:
    """Return the results of *flow* without any fault."""
    ended = flow.begin().finish()
    assert ended.status == [0] * flow.ranks, flow.logs()
    assert sorted(ended.losses[0]) == list(range(1, UNTIL + 1))
    flow.close()
    return ended


def assert_undisturbed(flow: FlowDouble, whole: Ended) -> None:
    """Assert that every rank has the final parameters, and every committed step the loss, of the undisturbed run.

    A process that took a rank does not know the loss of the step before.
    """
    ended = flow.finish()
    assert ended.status == [0] * flow.ranks, flow.logs()
    assert ended.results == whole.results
    for rank, losses in enumerate(ended.losses):
        assert {step: loss for step, loss in losses.items() if loss is not None}.items() <= whole.losses[rank].items()
        assert list(losses.values()).count(None) <= flow.changes[rank], f"rank {rank} has a step without a loss"
        assert len(losses) == UNTIL or flow.changes[rank], f"rank {rank} has left out a step"
    assert {step: loss for losses in ended.losses for step, loss in losses.items() if loss is not None} == whole.losses[0]
