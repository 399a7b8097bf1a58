"""``python -I -m holdfast.agent.node.proxy``: the far end of a connection to a node that is another machine.

The transport (SSH, a step of Slurm) runs this program on the node and exchanges lines with it over its standard input and output: a number,
a space and one JSON object. Number 0 are commands to the proxy itself; every other number is a stream: the lines of one connection to the
agent's socket, passed on as they are. So one channel carries everything between a node and its controller, nothing listens on the network,
and a slow reader stops only the proxy's reading: the agent keeps its events.

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
from functools import partial
from pathlib import Path
from typing import Annotated, Final

from holdfast.agent import schema
from holdfast.agent.errors import Refused, StaleEpoch
from holdfast.agent.node.directory import AgentDirectory, AgentNotStarted
from holdfast.agent.node.epochs import FencingToken
from holdfast.agent.node.interfaces import bandwidth_to, check_connection, interfaces, listen_for_measurement
from holdfast.agent.node.processors import processors
from holdfast.agent.schema import Count, Positive, Seconds, Text
from holdfast.agent.workers.log_files import AGENT, folder_of, listed, place_of, read_part
from holdfast.detectors.codec import packed
from holdfast.host.process import boot_time, reset_signals, survive_sigterm
from holdfast.protocol import GREETING, MAX_LINE_BYTES, PROTOCOL, BadLine, Message, complete_lines, connect, decode, encode, numbered
from holdfast.source_tree import python_path_env

IDLE_SECONDS: Final = 90.0
"""Seconds without input after which the proxy exits: a silently partitioned connection is never closed."""
CHUNK: Final = 256 * 1024
MAX_DIGITS: Final = 9
OPTION: Final = "--protocol"
"""Before the version of the protocol that the caller speaks. Proxies of all versions have to know it."""
VENVS: Final = "envs"
"""Folder in which `holdfast node bootstrap` makes one environment for each version of Holdfast."""
WHEEL: Final = "lib/python*/site-packages/holdfast_node-*.dist-info"
PROTOCOL_FILE: Final = "protocol.txt"
"""File of the wheel with the protocol version that it speaks."""
LAST_FILE: Final = "RECORD"
"""The file that is written when all others are there."""


def _token(message: Message, _name: str) -> FencingToken | None:
    """Return what authorizes a command, in fields of the command itself; None where no controller gives it."""
    if message.get("epoch") is None:
        return None
    return FencingToken(job=schema.text(message, "job"), epoch=schema.integer(message, "epoch"), until=schema.number(message, "until"))


Token = Annotated[FencingToken | None, _token]


class ProxyServer:
    """Serves one connection."""

    def __init__(self, source: int, sink: int) -> None:
        self._source, self._sink = source, sink
        self._streams: dict[int, socket.socket] = {}
        self._writing = threading.Lock()
        self._place: AgentDirectory | None = None
        self._commands: dict[str, Callable[..., Message]] = {
            "select-node": self._select_node,
            "ping": self._ping,
            "processors": processors,
            "open": self._open,
            "close": self._close,
            "start": self._start,
            "admit": self._admit,
            "agent": self._agent,
            "fence": self._fence,
            "wipe": self._wipe,
            "replay": self._replay,
            "logs": self._logs,
            "log": self._log,
            "listen": listen_for_measurement,
            "measure": self._measure,
            "connect": self._connect,
        }

    def run(self) -> int:
        """Serve until the other end closes, or sends nothing for too long."""
        os.write(self._sink, GREETING + encode({"protocol": PROTOCOL, "pid": os.getpid(), "python": platform.python_version()}))
        rest = b""
        while self._has_input(IDLE_SECONDS) or self._has_input(0.0):  # one that was stopped leaves the first without what came meanwhile
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

    def _has_input(self, seconds: float) -> bool:
        return bool(select.select([self._source], [], [], seconds)[0])

    def _take(self, line: bytes) -> bool:
        """Pass a line on, or carry out the command in it; False for a malformed line."""
        number, _, text = line.partition(b" ")
        if not number.isdigit() or len(number) > MAX_DIGITS:
            return False
        if number != b"0":
            sock = self._streams.get(int(number))
            if sock is not None:
                with suppress(OSError):  # its reader reports the end
                    sock.sendall(text + b"\n")
            return True
        try:
            command = decode(text)
        except BadLine:
            return False
        if command.get("do") == "select-node":  # the others need to know which node this is
            self._answer(command, partial(self._carry_out, command))
        else:
            threading.Thread(
                target=self._answer, args=(command, partial(self._carry_out, command)), name="proxy command", daemon=True
            ).start()
        return True

    def _answer(self, command: Message, act: Callable[[], Message]) -> None:
        try:
            answer = {"ok": True, **act()}
        except StaleEpoch as error:
            answer = {"ok": False, "why": str(error), "epoch": error.epoch}
        except (ValueError, AgentNotStarted, Refused) as error:
            answer = {"ok": False, "why": str(error)}
        except OSError as error:
            answer = {"ok": False, "why": error.strerror or str(error), "errno": error.errno}
        self._send(0, encode({"re": command.get("id"), **answer}))

    def _carry_out(self, command: Message) -> Message:
        name = schema.text(command, "do")
        run = self._commands.get(name)
        if run is None or (self._place is None and name != "select-node"):
            raise schema.BadField("do", f"one of {', '.join(self._commands)}, and 'select-node' first", command.get("do"))
        return run(**schema.read_fields(run, command))

    # -- commands: the parameters of each are its fields ------------------------------------------------------------------

    def _select_node(self, directory: Text, node: Text, cluster: Text) -> Message:
        """Keep which node this is; describe it."""
        folder = Path(directory).expanduser().absolute()
        options = ("-I",) if sys.flags.isolated else ()
        self._place = AgentDirectory(folder / "nodes" / node, node, cluster, python_path_env(os.environ), options)
        return {
            "directory": str(folder),
            "interpreter": sys.executable,
            "host": platform.node(),
            "interfaces": packed(interfaces()),
            "reached": ssh_address(),
            "clock": boot_time(),
            **self._agent(),
        }

    def _ping(self) -> Message:
        return {}

    def _start(self, token: Token) -> Message:
        self._node.start_agent(token)
        return {}

    def _admit(self, token: Token) -> Message:
        """Answer whether this controller may do something past this proxy, such as a start by Slurm's step launcher."""
        self._node.admit(token)
        return {}

    def _agent(self) -> Message:
        agent = self._node.running_agent()
        return {"agent": None if agent is None else {"pid": agent.pid, "job": agent.job}}

    def _fence(self, job: Text | None, token: Token) -> Message:
        return {"killed": self._node.fence(job, token)}

    def _wipe(self, job: Text, token: Token) -> Message:
        self._node.wipe_memory(job, token)
        return {}

    def _replay(self, job: Text) -> Message:
        return {"events": self._node.replayed_events(job)}

    def _logs(self, job: Text) -> Message:
        folder = self._log_folder(job)
        return {"logs": listed(folder), "place": place_of(folder)}

    def _log_folder(self, job: str) -> Path:
        return folder_of(self._node.folder.parents[1] / "jobs", job)

    def _log(self, name: Text, job: Text | None, at: Count | None, most: Count) -> Message:
        """Return a part of the log of one of a job's ranks, or of the agent."""
        data = read_part(self._node.folder if name == AGENT else self._log_folder(job or ""), name, at, most)
        return {"data": base64.b64encode(data).decode()}

    def _measure(self, host: Text, port: Count, token: Text, during: Seconds, source: Text | None) -> Message:
        return bandwidth_to(host, port, token, during, source)

    def _connect(self, host: Text, port: Count, within: Seconds, source: Text | None) -> Message:
        return check_connection(host, port, within, source)

    @property
    def _node(self) -> AgentDirectory:
        assert self._place is not None
        return self._place

    # -- streams ------------------------------------------------------------------------------------------------------

    def _open(self, stream: Positive) -> Message:
        if stream in self._streams:
            raise schema.BadField("stream", "the number of no other stream", stream)
        sock = connect(self._node.folder / "agent.sock", seconds=5.0)
        sock.settimeout(None)
        self._streams[stream] = sock
        threading.Thread(target=self._relay, args=(stream, sock), name=f"stream {stream}", daemon=True).start()
        return {}

    def _close(self, stream: Count) -> Message:
        sock = self._streams.get(stream)
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        return {}

    def _relay(self, number: int, sock: socket.socket) -> None:
        """Pass on what the agent sends."""
        with suppress(OSError):
            for lines in complete_lines(sock, CHUNK):
                self._send(number, lines)
        self._streams.pop(number, None)
        sock.close()
        self._send(0, encode({"closed": number}))

    def _send(self, number: int, lines: bytes) -> None:
        """Write complete *lines* of a stream; exit when the sink is closed."""
        data = memoryview(numbered(number, lines))
        with self._writing:
            try:
                while data:
                    data = data[os.write(self._sink, data) :]
            except OSError:
                os._exit(0)


def ssh_address() -> str | None:
    """Return the address of this machine to which the SSH client connected, as sshd reports it."""
    fields = os.environ.get("SSH_CONNECTION", "").split()
    return fields[2] if len(fields) == 4 else None  # noqa: PLR2004 (address and port of both ends)


def interpreter_for(protocol: int, own: Path) -> Path | None:
    """Return the interpreter of the newest environment next to *own* that speaks *protocol*, if *own* does not and one does.

    New controllers use the newest environment. Jobs that began before it was made go on in theirs.
    """
    if protocol == PROTOCOL or own.parent.name != VENVS:
        return None
    found = [place for place in own.parent.iterdir() if place != own and _speaks(place, protocol)]
    return max(found, key=lambda place: place.stat().st_mtime) / "bin" / "python" if found else None


def _speaks(environment: Path, protocol: int) -> bool:
    """Return whether *environment* is complete and speaks *protocol*."""
    for wheel in environment.glob(WHEEL):
        with suppress(OSError, ValueError):
            is_complete = (wheel / LAST_FILE).exists() and (environment / "bin" / "python").exists()
            if is_complete and int((wheel / PROTOCOL_FILE).read_text()) == protocol:
                return True
    return False


def exec_proxy_of(arguments: list[str]) -> None:
    """Become the proxy of another version if *arguments* name its protocol and it is installed: a job keeps the version it began with."""
    protocol = arguments[1] if arguments[:1] == [OPTION] and len(arguments) > 1 else ""
    if protocol.isdecimal() and len(protocol) <= MAX_DIGITS:
        with suppress(OSError):  # then this one greets, and is refused with both versions
            python = interpreter_for(int(protocol), Path(sys.prefix))
            if python is not None:
                os.execv(python, [str(python), "-I", "-m", "holdfast.agent.node.proxy"])  # noqa: S606 (an environment of ours; no shell)


def main() -> int:
    """Serve on standard input and output, or hand these over to the proxy of the version that the caller speaks."""
    reset_signals()
    exec_proxy_of(sys.argv[1:])
    survive_sigterm()
    source, sink = os.dup(0), os.dup(1)
    with Path(os.devnull).open("r+b", buffering=0) as nothing:  # nothing else may write to the channel
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno(), 1)
    return ProxyServer(source, sink).run()


if __name__ == "__main__":
    status = main()
    os._exit(status)  # threads that wait for an agent would keep it
