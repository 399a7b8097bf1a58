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
from typing import Final

from holdfast.host.process import survive_sigterm
from holdfast.protocol import LineBuffer, Message, encode

MAX_BYTES: Final = 64 * 1024
"""Bytes of a file or an answer that are read."""
NO_NOTICE: Final = frozenset({404, 410})
"""Statuses that say that there is no notice (AWS answers 404 until there is one)."""
TOKEN_HEADER: Final = "X-aws-ec2-metadata-token"  # noqa: S105 (the name of a header)
TOKEN_SECONDS: Final = 21600
"""Lifetime of a token; AWS gives none for longer."""


class NoticeUnreadable(Exception):
    """It is unknown whether there is a notice."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class UnexpectedStatus(NoticeUnreadable):
    """An address answered with a *status* that says nothing about a notice."""

    def __init__(self, url: str, status: int) -> None:
        super().__init__(f"{url} answered with status {status}")
        self.status = status


def in_file(path: str, pattern: str) -> str | None:
    """Return the notice in the file at *path*; None while it does not exist or does not match. Raise `NoticeUnreadable`."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_BYTES).decode(errors="replace") if stat.S_ISREG(Path(path).stat().st_mode) else ""
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IsADirectoryError:
        text = ""
    except OSError as error:
        raise NoticeUnreadable(f"{path} cannot be read: {error.strerror or error}") from error
    return _notice(path, text, pattern)


def at_url(url: str, headers: dict[str, str], pattern: str, *, timeout: float) -> str | None:
    """Return the notice that *url* gives; None without one. Raise `NoticeUnreadable`, also at a timeout."""
    try:
        return _notice(url, _fetch(url, headers, timeout=timeout), pattern)
    except UnexpectedStatus as error:
        if error.status in NO_NOTICE:
            return None
        raise


def _notice(source: str, text: str, pattern: str) -> str | None:
    if not re.search(pattern, text):
        return None
    line = " ".join(text.split())[:200]
    return f"{source} announces preemption" + (f": {line}" if line and line.isprintable() else "")


def _fetch(url: str, headers: dict[str, str], *, timeout: float, method: str = "GET") -> str:
    """Return the body that *url* answers with; raise `NoticeUnreadable` where there is none in time with status 200."""
    until = time.monotonic() + timeout
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a metadata service answers about the machine that asks it
    try:
        request = urllib.request.Request(url, headers=headers, method=method)  # noqa: S310 (http or https: the spec allows no other)
        with opener.open(request, timeout=timeout) as answer:
            if answer.status != http.client.OK:
                raise UnexpectedStatus(url, answer.status)
            body = b""
            while len(body) < MAX_BYTES and (more := answer.read1(MAX_BYTES - len(body))):
                body += more
                if time.monotonic() > until:
                    raise TimeoutError("its answer does not end")
            return body.decode(errors="replace")
    except urllib.error.HTTPError as error:
        error.close()
        raise UnexpectedStatus(url, error.code) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise NoticeUnreadable(f"{url} does not answer: {getattr(error, 'reason', None) or str(error) or type(error).__name__}") from error


class Tokens:
    """The token that a metadata service wants with every request (IMDSv2): fetched by PUT, used for half of its lifetime."""

    def __init__(self) -> None:
        self._url, self._token, self._until = "", "", 0.0

    def at_url(self, url: str, token_url: str | None, headers: dict[str, str], pattern: str, *, timeout: float) -> str | None:
        """Do as `at_url`, with a token from *token_url* where that is given; a refused token is replaced once."""
        if not token_url:
            return at_url(url, headers, pattern, timeout=timeout)
        old = bool(self._token)
        try:
            return at_url(url, {**headers, TOKEN_HEADER: self._get(token_url, timeout)}, pattern, timeout=timeout)
        except UnexpectedStatus as error:
            self._token = ""
            if error.status != http.client.UNAUTHORIZED or not old:
                raise
        return at_url(url, {**headers, TOKEN_HEADER: self._get(token_url, timeout)}, pattern, timeout=timeout)

    def _get(self, url: str, timeout: float) -> str:
        now = time.monotonic()
        if not self._token or now > self._until or url != self._url:
            self._url, self._until = url, now + TOKEN_SECONDS / 2
            self._token = ""
            self._token = _fetch(url, {f"{TOKEN_HEADER}-ttl-seconds": str(TOKEN_SECONDS)}, timeout=timeout, method="PUT").strip()
        return self._token


def find_notice(plan: Message, tokens: Tokens) -> str | None:
    """Return the notice that there is, if any; raise `NoticeUnreadable` where a source cannot be read and no other has a notice."""
    sources: list[Callable[[], str | None]] = []
    if plan.get("file"):
        sources.append(lambda: in_file(plan["file"], plan["pattern"]))
    if plan.get("url"):
        request = plan["url"], plan.get("token_url"), plan["headers"], plan["pattern"]
        sources.append(lambda: tokens.at_url(*request, timeout=plan["timeout"]))
    unreadable = None
    for source in sources:
        try:
            found = source()
        except NoticeUnreadable as error:
            unreadable = unreadable or error
            continue
        if found:
            return found
    if unreadable is not None:
        raise unreadable
    return None


class PreemptionWatcher:
    """Checks again and again, and reports changes. What cannot be read changes nothing, and is reported once."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent, self._lines = agent, LineBuffer()
        self._plan: Message | None = None
        self._notice: str | None = None
        self._blind = False
        self._tokens = Tokens()

    def run(self) -> None:
        """Check until the agent exits."""
        while True:
            self._agent.settimeout(self._plan["interval"] if self._plan is not None else None)
            try:
                data = self._agent.recv(1 << 16)
            except TimeoutError:
                data = None
            if data == b"":
                return
            for message in self._lines.feed(data or b""):
                self._plan = message
            if self._plan is not None:
                self._check(self._plan)

    def _check(self, plan: Message) -> None:
        try:
            found = find_notice(plan, self._tokens)
        except NoticeUnreadable as error:
            if not self._blind:
                self._send({"blind": error.why})
            self._blind = True
            return
        self._blind = False
        if bool(found) != bool(self._notice):
            self._send({"notice": found})
        self._notice = found

    def _send(self, message: Message) -> None:
        self._agent.settimeout(None)
        self._agent.sendall(encode(message))


def main(arguments: list[str]) -> None:
    """Watch for notices until the agent exits."""
    survive_sigterm()
    with socket.socket(fileno=int(arguments[0])) as agent:
        agent.set_inheritable(False)
        try:
            PreemptionWatcher(agent).run()
        except ConnectionError:
            return


if __name__ == "__main__":
    main(sys.argv[1:])
