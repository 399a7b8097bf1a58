"""A connection to the gate of a node that is another machine: orders to it, and streams to its agent, over one channel."""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time
from contextlib import suppress
from typing import Final, Protocol

from holdfast.cluster.proxy_schema import complaint, refusal, superseded
from holdfast.errors import NodeError, NodeLost, NodeStateUnknown, ProtocolMismatch, Superseded
from holdfast.process import boot_time
from holdfast.protocol import GREETING, MAX_LINE_BYTES, PROTOCOL, BadLine, Message, complete_lines, decode, encode, numbered

NOISE: Final = 64 * 1024
"""Bytes that a login shell may print before the gate speaks."""
CHUNK: Final = 256 * 1024
MOST_DIGITS: Final = 9
"""Of the number of a stream."""


class Pipe(Protocol):
    """A program's standard input and output on another machine."""

    def recv(self, size: int) -> bytes:
        """Return what it said, up to *size* bytes; nothing when it has ended. Raise ``OSError`` when the way there is gone."""
        ...

    def sendall(self, data: bytes) -> None:
        """Say *data*; raise ``OSError`` when the way there is gone."""
        ...

    def close(self) -> None:
        """End the program and the way there; whoever waits is woken. May be called again, and from any thread."""
        ...

    def ended(self) -> str:
        """Return why the program ended, in words that name the cure where there is one; empty when it did not say."""
        ...


class ProxyClient:
    """The gate of one node, greeted."""

    def __init__(self, node: str, pipe: Pipe, *, directory: str, cluster: str, until: float) -> None:
        """Greet the gate by *until* (monotonic); raise `NodeLost` when it does not answer, `NodeStateUnknown` when it is none of ours."""
        self.node, self._pipe = node, pipe
        self._answers: dict[int, queue.SimpleQueue[Message | None]] = {}
        self._streams: dict[int, socket.socket] = {}
        self._numbers = itertools.count(1)
        self._sending, self._lock = threading.Lock(), threading.Lock()
        self._ended, self._why = False, "the connection to its gate ended"
        watch = threading.Timer(max(0.01, until - time.monotonic()), pipe.close)
        watch.daemon = True
        watch.start()
        try:
            rest = self._greeted(until)
            threading.Thread(target=self._listen, args=(rest,), name=f"gate-{node}", daemon=True).start()
            left, entered = until - time.monotonic(), boot_time()
            self.facts = self.order("enter", seconds=max(0.01, left), directory=directory, node=node, cluster=cluster)
            self.ahead = float(self.facts.get("clock") or entered) - entered
            """Seconds by which the node's clock since its boot is ahead of ours; a way that is slow lets orders come so much later."""
        except BaseException:
            pipe.close()
            raise
        finally:
            watch.cancel()

    def _greeted(self, until: float) -> bytes:
        """Wait for the gate's first line; return what came after it. The pipe is closed at *until*."""
        heard = b""
        while len(heard) < NOISE:
            start = heard.find(GREETING)
            if start >= 0 and (end := heard.find(b"\n", start)) >= 0:
                self._check(heard[start + len(GREETING) : end])
                return heard[end + 1 :]
            try:
                data = self._pipe.recv(4096)
            except OSError as error:
                raise NodeLost(self.node, f"no gate answered there: {error}") from error
            if not data and time.monotonic() > until:
                raise NodeLost(self.node, "it let us in, and its gate did not speak in time")
            if not data:
                why = self._pipe.ended()
                last = heard.strip().splitlines()[-1].decode("utf-8", "replace")[:160] if heard.strip() else ""
                raise NodeStateUnknown(self.node, why or f"its gate ended before it spoke{f' ({last})' if last else ''}")
            heard += data
        raise NodeStateUnknown(self.node, f"its login shell prints more than {NOISE // 1024} KiB before a command: mend ~/.bashrc there")

    def _check(self, hello: bytes) -> None:
        try:
            spoken = decode(hello).get("protocol")
        except BadLine:
            spoken = None
        if spoken != PROTOCOL:
            raise ProtocolMismatch(self.node, f"the Holdfast there speaks protocol {str(spoken)[:20]}, this one {PROTOCOL}")

    # -- orders -------------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Tell whether it can be talked to, as far as is known."""
        return not self._ended

    def order(self, verb: str, *, seconds: float, **facts: object) -> Message:
        """Have the gate do something and return its answer; raise ``OSError`` with what it said when that is no.

        Raise `Superseded` when it is no because a newer flow has been at work there.
        Raise `NodeLost` when no answer comes within *seconds*, or one that makes no sense: its node may be in the wrong hands.
        """
        number, answers = next(self._numbers), queue.SimpleQueue[Message | None]()
        with self._lock:
            if self._ended:
                raise NodeLost(self.node, self._why)
            self._answers[number] = answers
        try:
            self._say(0, encode({"id": number, "do": verb, **facts}))
            answer = answers.get(timeout=seconds)
        except queue.Empty:
            raise NodeLost(self.node, f"its gate gave no answer to '{verb}' within {seconds:.1f} s") from None
        except OSError as error:
            raise NodeLost(self.node, f"the connection to its gate ended: {error}") from error
        finally:
            self._answers.pop(number, None)
        if answer is None:
            raise NodeLost(self.node, self._why)
        if answer.get("ok") is not True and (newer := superseded(answer)):
            raise Superseded(self.node, newer, str(refusal(answer)))
        if answer.get("ok") is not True:
            raise refusal(answer)
        if why := complaint(verb, answer):
            raise NodeLost(self.node, f"its gate's answer to '{verb}' makes no sense: {why}")
        return answer

    def stream(self, *, seconds: float) -> socket.socket:
        """Return a connection to the agent there; raise ``OSError`` when nobody listens, `NodeLost` when the node does not answer."""
        number, (ours, theirs) = next(self._numbers), socket.socketpair()
        with self._lock:
            self._streams[number] = ours
        try:
            self.order("open", seconds=seconds, stream=number)
        except BaseException:
            self._drop(number)
            for end in (ours, theirs):
                end.close()
            raise
        threading.Thread(target=self._send_on, args=(number, ours), name=f"stream-{self.node}", daemon=True).start()
        return theirs

    def close(self) -> None:
        """End the connection; its streams end with it."""
        self._pipe.close()

    # -- the channel --------------------------------------------------------------------------------------------------

    def _say(self, number: int, lines: bytes) -> None:
        with self._sending:
            self._pipe.sendall(numbered(number, lines))

    def _send_on(self, number: int, sock: socket.socket) -> None:
        """Pass on what is said to the agent, until whoever talks to it goes, or it."""
        with suppress(OSError):
            for lines in complete_lines(sock, CHUNK):
                self._say(number, lines)
        with suppress(NodeError, OSError):
            if self._streams.get(number) is sock:
                self._say(0, encode({"do": "close", "stream": number}))
        self._drop(number)
        sock.close()

    def _listen(self, rest: bytes) -> None:
        """Take in what the gate says."""
        try:
            with suppress(OSError):
                self._hear(rest)
        except BadLine as error:
            self._why = f"what its gate says makes no sense: {error}"
        finally:  # whatever it was that it said: nobody waits for answers that nobody hears
            self._end()

    def _end(self) -> None:
        with self._lock:
            self._ended = True
            waiting, numbers = list(self._answers.values()), list(self._streams)
        for answers in waiting:
            answers.put(None)
        for number in numbers:
            self._drop(number)
        self._pipe.close()

    def _hear(self, rest: bytes) -> None:
        while True:
            *lines, rest = rest.split(b"\n")
            self._take(lines)
            if len(rest) > MAX_LINE_BYTES:
                raise BadLine("a line that is too long")
            data = self._pipe.recv(CHUNK)
            if not data:
                return
            rest += data

    def _take(self, lines: list[bytes]) -> None:
        """Pass lines on, those of one stream that follow each other together."""
        for mark, group in itertools.groupby(lines, key=lambda line: line.partition(b" ")[0]):
            if not mark.isdigit() or len(mark) > MOST_DIGITS:
                raise BadLine(f"no number of a stream: {mark[:80]!r}")
            number = int(mark)
            texts = [line[len(mark) + 1 :] for line in group]
            if number:
                sock = self._streams.get(number)
                if sock is not None:
                    with suppress(OSError):
                        sock.sendall(b"\n".join([*texts, b""]))
                continue
            for text in texts:
                self._hear_gate(decode(text))

    def _hear_gate(self, message: Message) -> None:
        match message:
            case {"closed": int(number)}:
                self._drop(number)
            case {"re": int(number)}:
                answers = self._answers.get(number)
                if answers is not None:
                    answers.put(message)
            case {"re": None}:  # of what was said without a number: nobody waits for it
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
