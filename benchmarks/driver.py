"""A minimal flow and agent in one, for benchmarks of the workers.

Ranks are real processes, forked from the warm starter that agents use; what is left out is the flow's detection and decision, so the
clock of these benchmarks starts at the order. Everything a worker receives is what the controller would have sent.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from benchmarks import steps
from benchmarks.measuring import ROOT, wait_for
from holdfast.agent.workers.spawner import PROGRAM
from holdfast.host.ports import free_port
from holdfast.host.process import become_subreaper, die_with_parent, state_of
from holdfast.protocol import LineBuffer, Message, encode, listen
from holdfast.runtime.process.fork_server import USUAL_IMPORTS

TOKEN: Final = "ab" * 16


class Starter:
    """The warm starter, as an agent runs it. Its forks become children of this process."""

    def __init__(self, place: Path, *more: str) -> None:
        become_subreaper()
        parent = os.getpid()
        mine, theirs = socket.socketpair()
        with theirs, (place / "fork-server.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(theirs.fileno()), *USUAL_IMPORTS, *more],
                env=clean_environment(),
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509 (called before there are threads)
            )
        self._lines, self._channel = LineBuffer(), mine
        self._answer()

    def fork(self, argv: Sequence[str], environment: Mapping[str, str], directory: Path, log: Path) -> int:
        """Start a worker; return its pid."""
        order = {"rank": 0, "agent": os.getpid(), "argv": list(argv), "environment": dict(environment)}
        self._channel.sendall(encode({**order, "directory": str(directory), "log": str(log)}))
        return int(self._answer()["pid"])

    def _answer(self) -> Message:
        while data := self._channel.recv(65536):
            for message in self._lines.feed(data):
                return message
        raise RuntimeError("the warm starter has ended")

    def close(self) -> None:
        """End the starter."""
        self._channel.close()
        self._process.wait(20)


def clean_environment() -> dict[str, str]:
    """Return an environment with nothing in it that only holds here."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "TORCHINDUCTOR_"))}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


class Driver:
    """One job of *ranks* ranks, two on a node."""

    def __init__(self, fork_server: Starter, place: Path, argv: Sequence[str], ranks: int, given: Mapping[str, str] | None = None) -> None:
        place.mkdir(parents=True)
        self.place, self.ranks, self._fork_server = place, ranks, fork_server
        self._argv, self._given = list(argv), dict(given or {})
        self.pids: dict[int | str, int] = {}
        """Of each rank, and of hot spares (``"s0"``)."""
        self.generation, self._serve, self._hot_spares = 1, 0, 0
        self._since = dict.fromkeys(range(ranks), 1)
        self._store = ("127.0.0.1", free_port())
        self._received: list[Message] = []
        self._lines: dict[int, socket.socket] = {}
        self._all: list[int] = []
        self._server = listen(place / "s")
        threading.Thread(target=self._accept, daemon=True).start()
        for rank in range(ranks):
            self._start(rank, self._of(rank), f"rank-{rank}")

    # -- processes ----------------------------------------------------------------------------------------------------

    def _of(self, rank: int) -> dict[str, str]:
        return {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "HOLDFAST_GENERATION": str(self.generation)}

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        job = {
            "HOLDFAST_SOCKET": str(self.place / "s"),
            "HOLDFAST_TOKEN": TOKEN,
            "HOLDFAST_CHECKPOINT_DIR": str(self.place / "checkpoints"),
            "HOLDFAST_SAVE_EVERY": "0",
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": self._store[0],
            "MASTER_PORT": str(self._store[1]),
        }
        return {**clean_environment(), **job, **self._given, **more}

    def _start(self, key: int | str, more: Mapping[str, str], log: str, *, cold: bool = False) -> None:
        environment, path = self._environment(more), self.place / f"{log}.log"
        if cold:
            with path.open("ab") as out:
                command = [sys.executable, *self._argv]
                pid = subprocess.Popen(command, env=environment, cwd=self.place, stdout=out, stderr=out, start_new_session=True).pid
        else:
            pid = self._fork_server.fork(self._argv, environment, self.place, path)
        self.pids[key] = pid
        self._all.append(pid)

    def hot_spare(self) -> str:
        """Start a hot spare that knows all ranks as one role; return its name once it has parked."""
        name, self._hot_spares = f"s{self._hot_spares}", self._hot_spares + 1
        roles = json.dumps([list(range(self.ranks))])
        more = {"HOLDFAST_HOT_SPARE": name[1:], "HOLDFAST_ROLES": roles, "HOLDFAST_WAITING_ROLE": "0"}
        wait_for(lambda: any(one["t"] == "roles" for one in list(self._received)), "the tape")
        self._start(
            name, {**self._of(0), **more, "HOLDFAST_RECORDINGS": str(self.place / "checkpoints" / "recordings")}, f"hot-spare-{name}"
        )
        pid = self.pids[name]
        self._await(lambda: any(one["t"] == "parked" and one["pid"] == pid for one in list(self._received)), f"{name} parked")
        return name

    # -- what they say ------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                line, _ = self._server.accept()
                pid = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
                self._lines[pid] = line
                threading.Thread(target=self._listen, args=(pid, line), daemon=True).start()

    def _listen(self, pid: int, line: socket.socket) -> None:
        lines = LineBuffer()
        with suppress(OSError):
            while data := line.recv(65536):
                for message in lines.feed(data):
                    if message["t"] == "commit-request":
                        line.sendall(encode({"re": message["id"], "ok": True, "why": ""}))
                    elif message["t"] == "register-successor":
                        self.pids.update({key: message["pid"] for key, one in self.pids.items() if one == pid})
                        self._all.append(message["pid"])
                        line.sendall(encode({"re": message["id"], "ok": True, "why": ""}))
                    elif message["t"] != "beat":
                        self._received.append({**message, "pid": pid})

    def said(self, word: str) -> list[Message]:
        """Return all that ranks have said with *word*."""
        return [one for one in list(self._received) if one["t"] == word]

    def of_generation(self, word: str, generation: int) -> list[Message]:
        """Return what ranks have said with *word* about *generation*."""
        return [one for one in list(self._received) if one["t"] == word and one.get("generation") == generation]

    def done(self) -> dict[int, list[steps.Done]]:
        """Return the steps of every rank."""
        return steps.read(self.place, self.ranks)

    def run(self, more: int, what: str = "steps") -> None:
        """Wait for that many more steps of every rank."""
        until = steps.newest(self.done()) + more
        self._await(lambda: steps.newest(self.done()) >= until, what)

    def _await(self, condition: Any, what: str) -> None:  # noqa: ANN401 (a question)
        try:
            wait_for(condition, what, every=0.05)
        except TimeoutError as error:
            texts = [f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(self.place.glob("*.log"))]
            said = [str({key: value for key, value in one.items() if key != "traceback"}) for one in self._received[-20:]]
            raise TimeoutError("\n".join([str(error), *texts, *said])) from error

    # -- a change of one rank -----------------------------------------------------------------------------------------

    def replace(self, rank: int, hot_spare: str | None = None, *, cold: bool = False, **more: str) -> tuple[float, steps.Recovered]:
        """Have *rank* die and give its place to *hot_spare* or to a fresh process; return when that was ordered, and how it went."""
        before = self.pids[rank]
        (self.place / f"die-{rank}").touch()
        wait_for(lambda: state_of(before) == "Z", f"the end of rank {rank}", every=0.001)
        at = time.time()
        facts = self._next_generation(rank)
        if hot_spare is None:
            self._start(rank, {**self._of(rank), "HOLDFAST_FRESH": "1", **more}, f"rank-{rank}", cold=cold)
        else:
            self.pids[rank] = self.pids.pop(hot_spare)
        for other in range(self.ranks):
            if other != rank:
                self._send(other, {**facts, "rank": other})
        extra: Message = {} if hot_spare is None else {"environment": self._of(rank), "log": str(self.place / f"rank-{rank}.log")}
        self._send(rank, {**facts, "rank": rank, **extra})
        self._await(lambda: steps.recovery(self.done(), rank, before), f"recovery of rank {rank}")
        found = steps.recovery(self.done(), rank, before)
        assert found is not None
        return at, found

    def _next_generation(self, rank: int) -> Message:
        for other in range(self.ranks):
            if other != rank:
                self._send(other, {"do": "abandon", "generation": self.generation, "lost": [rank]})
        since, self.generation = self.generation, self.generation + 1
        self._since[rank] = self.generation
        if self._serve == rank:
            self._serve, self._store = (0 if rank else 1), ("127.0.0.1", free_port())
        return {
            "do": "regroup",
            "generation": self.generation,
            "world": self.ranks,
            "incarnations": [[one, one, number] for one, number in self._since.items()],
            "store": list(self._store),
            "serve": self._serve,
            "token": TOKEN,
            "changed": [rank],
            "since": since,
        }

    def _send(self, rank: int, message: Message) -> None:
        wait_for(lambda: self.pids[rank] in self._lines, f"the line of rank {rank}")
        self._lines[self.pids[rank]].sendall(encode(message))

    def close(self) -> None:
        """End everything."""
        for pid in self._all:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._all:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
