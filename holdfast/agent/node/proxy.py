"""``python -I -m holdfast.agent.node.proxy``: the far end of a connection to a node that is another machine.

Whoever has a way to run a program on the node (SSH, a step of Slurm) runs this one and talks to it over its standard input and output, in
lines of a number, a space and one JSON object. Number 0 are orders to the gate itself; every other number is a stream: the lines of one
connection to the agent's socket, passed on as they are. So one channel carries all that is between a node and who steers it, nothing
listens on the network, and a reader that stalls stops the gate's reading and nothing else: the agent keeps what it has to tell.

Standard library only.
"""

from __future__ import annotations

import base64
import os
import platform
import select
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from detectors.codec import packed
from holdfast.agent import schema
from holdfast.agent.errors import Refused, StaleEpoch
from holdfast.agent.node.directory import AgentDirectory, AgentNotStarted
from holdfast.agent.node.epochs import FencingToken
from holdfast.agent.node.interfaces import bandwidth_to, interfaces, listening, meet
from holdfast.agent.node.venvs import interpreter_for
from holdfast.agent.workers.log_files import AGENT, folder_of, listed, piece, place_of
from holdfast.process import boot_time, reset_signals, survive_sigterm
from holdfast.protocol import GREETING, MAX_LINE_BYTES, PROTOCOL, BadLine, Message, complete_lines, connect, decode, encode, numbered
from holdfast.source_tree import python_path_env

IDLE: Final = 90.0
"""Seconds without a word after which the gate ends: a connection that was cut silently is never told to be closed."""
CHUNK: Final = 256 * 1024
MOST_DIGITS: Final = 9
OPTION: Final = "--protocol"
"""Before the version of the protocol that the caller speaks. Gates of all versions have to know it."""


class ProxyServer:
    """Serves one connection."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink
        self._streams: dict[int, socket.socket] = {}
        self._writing = threading.Lock()
        self._place: AgentDirectory | None = None
        self._verbs: dict[str, Callable[[Message], Message]] = {
            "ping": lambda _order: {},
            "open": self._open,
            "close": self._close,
            "start": self._start,
            "admit": self._admit,
            "look": lambda _order: self._look(),
            "fence": self._fence,
            "wipe": self._wipe,
            "past": lambda order: {"events": self._there.past(schema.text(order, "job"))},
            "logs": lambda order: {"logs": listed(self._logs(order)), "place": place_of(self._logs(order))},
            "log": self._log,
            "listen": lambda _order: listening(),
            "measure": self._measure,
            "meet": self._meet,
        }

    def run(self) -> int:
        """Serve until the other end is gone, or says nothing for too long."""
        os.write(self._sink, GREETING + encode({"protocol": PROTOCOL, "pid": os.getpid(), "python": platform.python_version()}))
        rest = b""
        while select.select([self._source], [], [], IDLE)[0]:
            data = os.read(self._source, CHUNK)
            if not data:
                return 0
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if not self._take(line):
                    return 2
            if len(rest) > MAX_LINE_BYTES:
                return 2
        return 0

    def _take(self, line: bytes) -> bool:
        """Pass a line on, or carry out the order in it; False for what is no line of ours."""
        number, _, text = line.partition(b" ")
        if not number.isdigit() or len(number) > MOST_DIGITS:
            return False
        if number != b"0":
            self._pass_on(int(number), text)
            return True
        try:
            order = decode(text)
        except BadLine:
            return False
        if order.get("do") == "enter":  # the others need to know which node this is
            self._answer(order, self._enter)
        else:
            threading.Thread(target=self._answer, args=(order, self._verb), name="gate order", daemon=True).start()
        return True

    def _answer(self, order: Message, act: Callable[[Message], Message]) -> None:
        try:
            answer = {"ok": True, **act(order)}
        except StaleEpoch as error:
            answer = {"ok": False, "why": str(error), "epoch": error.epoch}
        except (ValueError, AgentNotStarted, Refused) as error:
            answer = {"ok": False, "why": str(error)}
        except OSError as error:
            answer = {"ok": False, "why": error.strerror or str(error), "errno": error.errno}
        self._say(0, encode({"re": order.get("id"), **answer}))

    def _verb(self, order: Message) -> Message:
        verb = self._verbs.get(schema.text(order, "do"))
        if verb is None or self._place is None:
            raise schema.BadField("do", f"one of {', '.join(self._verbs)}, after 'enter'", order.get("do"))
        return verb(order)

    # -- orders -------------------------------------------------------------------------------------------------------

    def _enter(self, order: Message) -> Message:
        """Learn which node this is; say what it is like."""
        folder = Path(schema.text(order, "directory")).expanduser().absolute()
        path = python_path_env(os.environ)  # for the workers
        self._place = AgentDirectory(
            folder / "nodes" / schema.text(order, "node"),
            schema.text(order, "node"),
            schema.text(order, "cluster"),
            path,
            ("-I",) if sys.flags.isolated else (),
        )
        return {
            "directory": str(folder),
            "interpreter": sys.executable,
            "host": platform.node(),
            "interfaces": packed(interfaces()),
            "reached": reached_at(),
            "clock": boot_time(),
            **self._look(),
        }

    def _start(self, order: Message) -> Message:
        self._there.start_agent(_token(order))
        return {}

    def _admit(self, order: Message) -> Message:
        """Say whether what is done in another way, such as the start of an agent by its warden, may be done for this flow."""
        self._there.admit(_token(order))
        return {}

    def _look(self) -> Message:
        seen = self._there.seen()
        return {"agent": None if seen is None else {"pid": seen.pid, "job": seen.job}}

    def _fence(self, order: Message) -> Message:
        return {"killed": self._there.fence(schema.maybe(schema.text, order, "job"), _token(order))}

    def _logs(self, order: Message) -> Path:
        return folder_of(self._there.folder.parents[1] / "jobs", schema.text(order, "job"))

    def _log(self, order: Message) -> Message:
        """Give a piece of the log of one of a job's ranks, or of the agent."""
        name = schema.text(order, "name")
        folder = self._there.folder if name == AGENT else self._logs(order)
        data = piece(folder, name, schema.maybe(schema.whole, order, "at"), schema.whole(order, "most"))
        return {"data": base64.b64encode(data).decode()}

    def _wipe(self, order: Message) -> Message:
        self._there.wipe_memory(schema.text(order, "job"), _token(order))
        return {}

    def _measure(self, order: Message) -> Message:
        source = schema.maybe(schema.text, order, "source")
        host, port, token = schema.text(order, "host"), schema.whole(order, "port"), schema.text(order, "token")
        return bandwidth_to(host, port, token, schema.seconds(order, "during"), source)

    def _meet(self, order: Message) -> Message:
        source = schema.maybe(schema.text, order, "source")
        return meet(schema.text(order, "host"), schema.whole(order, "port"), schema.seconds(order, "within"), source)

    @property
    def _there(self) -> AgentDirectory:
        assert self._place is not None
        return self._place

    # -- streams ------------------------------------------------------------------------------------------------------

    def _open(self, order: Message) -> Message:
        number = schema.whole(order, "stream", least=1)
        if number in self._streams:
            raise schema.BadField("stream", "the number of no other stream", number)
        sock = connect(self._there.folder / "agent.sock", seconds=5.0)
        sock.settimeout(None)
        self._streams[number] = sock
        threading.Thread(target=self._relay, args=(number, sock), name=f"stream {number}", daemon=True).start()
        return {}

    def _close(self, order: Message) -> Message:
        sock = self._streams.get(schema.whole(order, "stream"))
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        return {}

    def _pass_on(self, number: int, line: bytes) -> None:
        sock = self._streams.get(number)
        if sock is not None:
            with suppress(OSError):  # its reader tells of the end
                sock.sendall(line + b"\n")

    def _relay(self, number: int, sock: socket.socket) -> None:
        """Pass on what the agent says."""
        with suppress(OSError):
            for lines in complete_lines(sock, CHUNK):
                self._say(number, lines)
        self._streams.pop(number, None)
        sock.close()
        self._say(0, encode({"closed": number}))

    def _say(self, number: int, lines: bytes) -> None:
        """Write whole *lines* of a stream; a sink that is gone ends the gate."""
        data = memoryview(numbered(number, lines))
        with self._writing:
            try:
                while data:
                    data = data[os.write(self._sink, data) :]
            except OSError:
                os._exit(0)


def _token(order: Message) -> FencingToken | None:
    """Return in whose name the order is given; nothing where no flow gives it."""
    if order.get("epoch") is None:
        return None
    return FencingToken(job=schema.text(order, "job"), epoch=schema.whole(order, "epoch"), until=schema.number(order, "until"))


def reached_at() -> str | None:
    """Return the address of this machine under which whoever logged in reached it, as sshd tells."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else None  # noqa: PLR2004 (address and port of both ends)


def hand_over(words: list[str]) -> None:
    """Become the gate of another version where *words* name its protocol, and it is there: a job's flow is of the version that began it."""
    spoken = words[1] if words[:1] == [OPTION] and len(words) > 1 else ""
    if spoken.isdecimal() and len(spoken) <= MOST_DIGITS:
        with suppress(OSError):  # then this one greets, and is refused with both versions
            python = interpreter_for(int(spoken), Path(sys.prefix))
            if python is not None:
                os.execv(python, [str(python), "-I", "-m", "holdfast.agent.node.proxy"])  # noqa: S606 (an environment of ours; no shell)


def main() -> int:
    """Serve on standard input and output; hand these over to a gate that speaks what the caller does, where this one does not."""
    reset_signals()
    hand_over(sys.argv[1:])
    survive_sigterm()
    source, sink = os.dup(0), os.dup(1)
    with Path(os.devnull).open("r+b", buffering=0) as nothing:  # nobody but the gate talks there
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    return ProxyServer(source, sink).run()


if __name__ == "__main__":
    status = main()
    os._exit(status)  # threads that wait for an agent would keep it
