"""Talk to the proxy of a node on another machine: commands to it, and streams to the node's agent, over one channel."""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time
from contextlib import suppress
from typing import Final, Protocol

from holdfast.cluster.proxy_schema import newer_epoch, problem_of, refusal
from holdfast.errors import NodeError, NodeLost, NodeStateUnknown, ProtocolMismatch, Superseded
from holdfast.host.process import boot_time
from holdfast.protocol import GREETING, MAX_LINE_BYTES, PROTOCOL, BadLine, Message, complete_lines, decode, encode, numbered

MAX_BANNER_BYTES: Final = 64 * 1024
"""What a login shell may print before the proxy's greeting."""
CHUNK: Final = 256 * 1024
MAX_DIGITS: Final = 9
"""Of the number of a stream."""


class Pipe(Protocol):
    """The standard input and output of a program on another machine."""

    def recv(self, size: int) -> bytes:
        """Return up to *size* bytes of output; nothing when the program has ended. Raise ``OSError`` when the connection is lost."""
        ...

    def sendall(self, data: bytes) -> None:
        """Send *data* to the program; raise ``OSError`` when the connection is lost."""
        ...

    def close(self) -> None:
        """End the program and the connection; blocked calls return. May be called again, and from any thread."""
        ...

    def ended(self) -> str:
        """Return why the program ended, with the cure where there is one; empty when that is unknown."""
        ...


class ProxyClient:
    """A connection to the proxy of one node."""

    def __init__(self, node: str, pipe: Pipe, *, directory: str, cluster: str, until: float) -> None:
        """Wait for the greeting until *until* (monotonic).

        Raise `NodeLost` when none comes, `NodeStateUnknown` when no Holdfast runs there, `ProtocolMismatch` for another version.
        """
        self.node, self._pipe = node, pipe
        self._answers: dict[int, queue.SimpleQueue[Message | None]] = {}
        self._streams: dict[int, socket.socket] = {}
        self._numbers = itertools.count(1)
        self._sending, self._lock = threading.Lock(), threading.Lock()
        self._ended, self._why = False, "the connection to its proxy ended"
        timer = threading.Timer(max(0.01, until - time.monotonic()), pipe.close)
        timer.daemon = True
        timer.start()
        try:
            rest = self._read_greeting(until)
            threading.Thread(target=self._receive, args=(rest,), name=f"proxy-{node}", daemon=True).start()
            left, sent_at = until - time.monotonic(), boot_time()
            self.facts = self.command("select-node", seconds=max(0.01, left), directory=directory, node=node, cluster=cluster)
            self.clock_ahead = float(self.facts.get("clock") or sent_at) - sent_at
            """Seconds by which the node's clock since boot is ahead of ours, the time to get there included."""
        except BaseException:
            pipe.close()
            raise
        finally:
            timer.cancel()

    def _read_greeting(self, until: float) -> bytes:
        """Wait for the proxy's first line; return what came after it. The pipe is closed at *until*."""
        received = b""
        while len(received) < MAX_BANNER_BYTES:
            start = received.find(GREETING)
            if start >= 0 and (end := received.find(b"\n", start)) >= 0:
                try:
                    protocol = decode(received[start + len(GREETING) : end]).get("protocol")
                except BadLine:
                    protocol = None
                if protocol != PROTOCOL:
                    raise ProtocolMismatch(self.node, f"the Holdfast there speaks protocol {str(protocol)[:20]}, this one {PROTOCOL}")
                return received[end + 1 :]
            try:
                data = self._pipe.recv(4096)
            except OSError as error:
                raise NodeLost(self.node, f"no answer from its proxy: {error}") from error
            if not data and time.monotonic() > until:
                raise NodeLost(self.node, "login succeeded, but its proxy sent no greeting in time")
            if not data:
                why = self._pipe.ended()
                last = received.strip().splitlines()[-1].decode("utf-8", "replace")[:160] if received.strip() else ""
                raise NodeStateUnknown(self.node, why or f"its proxy ended before its greeting{f' ({last})' if last else ''}")
            received += data
        limit = f"{MAX_BANNER_BYTES // 1024} KiB"
        raise NodeStateUnknown(self.node, f"its login shell prints more than {limit} before a command: fix ~/.bashrc there")

    # -- commands -----------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Return whether the connection is open, as far as is known."""
        return not self._ended

    def command(self, command: str, /, *, seconds: float, **facts: object) -> Message:
        """Send a command to the proxy and return its answer.

        Raise ``OSError`` with the proxy's reason when it refuses, `Superseded` when it refuses for the sake of a newer controller, and
        `NodeLost` when no answer comes within *seconds* or the answer is malformed.
        """
        number, answers = next(self._numbers), queue.SimpleQueue[Message | None]()
        with self._lock:
            if self._ended:
                raise NodeLost(self.node, self._why)
            self._answers[number] = answers
        try:
            self._send(0, encode({"id": number, "do": command, **facts}))
            answer = answers.get(timeout=seconds)
        except queue.Empty:
            raise NodeLost(self.node, f"no answer from its proxy to '{command}' within {seconds:.1f} s") from None
        except OSError as error:
            raise NodeLost(self.node, f"the connection to its proxy ended: {error}") from error
        finally:
            self._answers.pop(number, None)
        if answer is None:
            raise NodeLost(self.node, self._why)
        if answer.get("ok") is not True:
            why = refusal(answer)
            if epoch := newer_epoch(answer):
                raise Superseded(self.node, str(why), epoch)
            raise why
        if problem := problem_of(command, answer):
            raise NodeLost(self.node, f"its proxy's answer to '{command}' is malformed: {problem}")
        return answer

    def stream(self, *, seconds: float) -> socket.socket:
        """Return a connection to the agent; raise ``OSError`` when no agent listens, `NodeLost` when the node is unreachable."""
        number, (ours, theirs) = next(self._numbers), socket.socketpair()
        with self._lock:
            self._streams[number] = ours
        try:
            self.command("open", seconds=seconds, stream=number)
        except BaseException:
            self._drop(number)
            for end in (ours, theirs):
                end.close()
            raise
        threading.Thread(target=self._forward, args=(number, ours), name=f"stream-{self.node}", daemon=True).start()
        return theirs

    def close(self) -> None:
        """End the connection; its streams end with it."""
        self._pipe.close()

    # -- the channel --------------------------------------------------------------------------------------------------

    def _send(self, number: int, lines: bytes) -> None:
        with self._sending:
            self._pipe.sendall(numbered(number, lines))

    def _forward(self, number: int, sock: socket.socket) -> None:
        """Send what a client writes on to the agent, until either of them closes."""
        with suppress(OSError):
            for lines in complete_lines(sock, CHUNK):
                self._send(number, lines)
        with suppress(NodeError, OSError):
            if self._streams.get(number) is sock:
                self._send(0, encode({"do": "close", "stream": number}))
        self._drop(number)
        sock.close()

    def _receive(self, rest: bytes) -> None:
        """Read from the proxy until it ends, then wake everyone who waits for an answer."""
        try:
            with suppress(OSError):
                self._read_lines(rest)
        except BadLine as error:
            self._why = f"its proxy sent malformed data: {error}"
        finally:
            with self._lock:
                self._ended = True
                waiting, numbers = list(self._answers.values()), list(self._streams)
            for answers in waiting:
                answers.put(None)
            for number in numbers:
                self._drop(number)
            self._pipe.close()

    def _read_lines(self, rest: bytes) -> None:
        while True:
            *lines, rest = rest.split(b"\n")
            self._dispatch(lines)
            if len(rest) > MAX_LINE_BYTES:
                raise BadLine("a line that is too long")
            data = self._pipe.recv(CHUNK)
            if not data:
                return
            rest += data

    def _dispatch(self, lines: list[bytes]) -> None:
        """Deliver lines; those of one stream that follow each other are sent together."""
        for prefix, group in itertools.groupby(lines, key=lambda line: line.partition(b" ")[0]):
            if not prefix.isdigit() or len(prefix) > MAX_DIGITS:
                raise BadLine(f"no number of a stream: {prefix[:80]!r}")
            number = int(prefix)
            texts = [line[len(prefix) + 1 :] for line in group]
            if number:
                sock = self._streams.get(number)
                if sock is not None:
                    with suppress(OSError):
                        sock.sendall(b"\n".join([*texts, b""]))
                continue
            for text in texts:
                self._take_message(decode(text))

    def _take_message(self, message: Message) -> None:
        match message:
            case {"closed": int(number)}:
                self._drop(number)
            case {"re": int(number)}:
                answers = self._answers.get(number)
                if answers is not None:
                    answers.put(message)
            case {"re": None}:  # the answer to a message without a number, which nobody waits for
                return
            case _:
                raise BadLine(f"neither an answer nor the end of a stream: {str(message)[:80]!r}")

    def _drop(self, number: int) -> None:
        """End a stream: its reader sees the end."""
        with self._lock:
            sock = self._streams.pop(number, None)
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
