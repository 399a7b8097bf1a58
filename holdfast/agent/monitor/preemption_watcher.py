"""``python -m holdfast.agent.monitor.preemption_watcher DESCRIPTOR``: watch for preemption notices, report new ones to the agent."""

from __future__ import annotations

import http.client
import re
import socket
import stat
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from holdfast.process import survive_sigterm
from holdfast.protocol import LineBuffer, Message, encode

MOST: Final = 64 * 1024
"""Bytes of a file or an answer that are read."""
NONE_YET: Final = frozenset({404, 410})
"""Answers that say that there is no notice (AWS answers 404 until there is one)."""
TOKEN: Final = "X-aws-ec2-metadata-token"  # noqa: S105 (the name of a header)
TOKEN_LASTS: Final = 21600
"""Seconds for which a token is asked; AWS gives none for longer."""


class NoticeUnreadable(Exception):
    """Whether there is a notice could not be seen: that is neither a notice nor none."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


def in_file(path: str, pattern: str) -> str | None:
    """Return what the file at *path* says of the node's end; nothing while it does not exist. Raise `NoticeUnreadable`."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MOST).decode(errors="replace") if stat.S_ISREG(Path(path).stat().st_mode) else ""
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        text = ""
    except OSError as error:
        raise NoticeUnreadable(f"{path} cannot be read: {error.strerror or error}") from error
    return f"{path} says that it will go{_quoted(text)}" if re.search(pattern, text) else None


class Answered(NoticeUnreadable):
    """An address answered with a *status* that says nothing of a notice."""

    def __init__(self, url: str, status: int) -> None:
        super().__init__(f"{url} answered with status {status}")
        self.status = status


def at_url(url: str, headers: dict[str, str], pattern: str, *, timeout: float) -> str | None:
    """Return what *url* answers of the node's end; nothing without a notice. Raise `NoticeUnreadable` at a timeout."""
    try:
        text = _asked(url, headers, timeout=timeout)
    except Answered as error:
        if error.status in NONE_YET:
            return None
        raise
    return f"{url} says that it will go{_quoted(text)}" if re.search(pattern, text) else None


def _asked(url: str, headers: dict[str, str], *, timeout: float, method: str = "GET") -> str:
    """Return what *url* answers; raise `NoticeUnreadable` where that is not an answer in time with status 200."""
    until = time.monotonic() + timeout
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # what speaks of this node is not asked by way of another
    try:
        request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310 (http or https: the spec allows no other)
        with opener.open(request, timeout=timeout) as answer:
            if answer.status != http.client.OK:
                raise Answered(url, answer.status)
            return _body(answer, until).decode(errors="replace")
    except urllib.error.HTTPError as error:
        error.close()
        raise Answered(url, error.code) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoticeUnreadable(f"{url} does not answer: {getattr(error, 'reason', None) or str(error) or type(error).__name__}") from error


class Tokens:
    """What a metadata service wants with every question (IMDSv2): asked for by PUT, used until half of its time is over."""

    def __init__(self) -> None:
        self._url, self._token, self._until = "", "", 0.0

    def at_url(self, url: str, token_url: str | None, headers: dict[str, str], pattern: str, *, timeout: float) -> str | None:
        """Do as `at_url` with a token where there is one to ask for; one that is refused is asked for anew, once."""
        if not token_url:
            return at_url(url, headers, pattern, timeout=timeout)
        old = bool(self._token)
        try:
            return at_url(url, {**headers, TOKEN: self._of(token_url, timeout)}, pattern, timeout=timeout)
        except Answered as error:
            self._token = ""
            if error.status != http.client.UNAUTHORIZED or not old:
                raise
        return at_url(url, {**headers, TOKEN: self._of(token_url, timeout)}, pattern, timeout=timeout)

    def _of(self, url: str, timeout: float) -> str:
        now = time.monotonic()
        if not self._token or now > self._until or url != self._url:
            self._url, self._until = url, now + TOKEN_LASTS / 2
            self._token = ""
            self._token = _asked(url, {f"{TOKEN}-ttl-seconds": str(TOKEN_LASTS)}, timeout=timeout, method="PUT").strip()
        return self._token


def _body(answer: Any, until: float) -> bytes:  # noqa: ANN401 (urllib's answer)
    body = b""
    while len(body) < MOST and (more := answer.read1(MOST - len(body))):
        body += more
        if time.monotonic() > until:
            raise TimeoutError("its answer does not end")
    return body


def _quoted(text: str) -> str:
    line = " ".join(text.split())[:200]
    return f": {line}" if line and line.isprintable() else ""


def look(plan: Message, tokens: Tokens) -> str | None:
    """Return the notice that there is, if any; raise `NoticeUnreadable` where one of the places could not be seen and no other has one."""
    asked: list[Callable[[], str | None]] = []
    if plan.get("file"):
        asked.append(lambda: in_file(plan["file"], plan["pattern"]))
    if plan.get("url"):
        told = plan["url"], plan.get("token_url"), plan["headers"], plan["pattern"]
        asked.append(lambda: tokens.at_url(*told, timeout=plan["timeout"]))
    unseen = None
    for ask in asked:
        try:
            found = ask()
        except NoticeUnreadable as error:
            unseen = unseen or error
            continue
        if found:
            return found
    if unseen is not None:
        raise unseen
    return None


class PreemptionWatcher:
    """Looks again and again, and tells what is new; what cannot be seen changes nothing, and is told once."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent, self._lines = agent, LineBuffer()
        self._plan: Message | None = None
        self._notice: str | None = None
        self._blind = False
        self._tokens = Tokens()

    def run(self) -> None:
        """Look until the agent goes."""
        while True:
            self._agent.settimeout(self._plan["every"] if self._plan is not None else None)
            try:
                data = self._agent.recv(1 << 16)
            except TimeoutError:
                data = None
            if data == b"":
                return
            for message in self._lines.feed(data or b""):
                self._plan = message
            if self._plan is not None:
                self._look(self._plan)

    def _look(self, plan: Message) -> None:
        try:
            found = look(plan, self._tokens)
        except NoticeUnreadable as error:
            if not self._blind:
                self._say({"blind": error.why})
            self._blind = True
            return
        self._blind = False
        if bool(found) != bool(self._notice):
            self._say({"notice": found})
        self._notice = found

    def _say(self, message: Message) -> None:
        self._agent.settimeout(None)
        self._agent.sendall(encode(message))


def main(arguments: list[str]) -> None:
    """Look for notices until the agent goes."""
    survive_sigterm()
    with socket.socket(fileno=int(arguments[0])) as agent:
        agent.set_inheritable(False)
        try:
            PreemptionWatcher(agent).run()
        except ConnectionError:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
