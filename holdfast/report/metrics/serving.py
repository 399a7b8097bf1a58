"""Answer Prometheus' scrapes over HTTP, and write for node_exporter's textfile collector."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from holdfast.errors import HoldfastError, NotWritable
from holdfast.report.metrics.exposition import CONTENT_TYPE

SECONDS: Final = 10.0
"""How long a scraper may take to say what it wants, and to take the answer."""
MOST: Final = 32
"""Scrapers at once: with one more the oldest that has not said what it wants is hung up on."""


class _Handler(BaseHTTPRequestHandler):
    """One scrape."""

    server: MetricsServer
    timeout = SECONDS
    server_version, sys_version = "holdfast", ""

    def do_GET(self) -> None:
        """Answer ``/metrics``; say at ``/`` where that is."""
        self.server.heard(self.connection)
        if self.path.partition("?")[0] == "/":
            self._answer(200, "text/plain; charset=utf-8", "Holdfast: /metrics is for Prometheus\n")
        elif self.path.partition("?")[0] != "/metrics":
            self._answer(404, "text/plain; charset=utf-8", "only /metrics is here\n")
        else:
            try:
                with self.server.turn:  # scrapers that come at once wait for each other
                    told = self.server.tell()
            except HoldfastError as error:  # Prometheus then shows the target as down
                self._answer(503, "text/plain; charset=utf-8", f"{error}\n")
            else:
                self._answer(200, CONTENT_TYPE, told)

    def _answer(self, status: int, kind: str, body: str) -> None:
        data = body.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401 (the signature of http.server)
        """Say nothing: a scrape a quarter of a minute is no news."""


class MetricsServer(ThreadingHTTPServer):
    """Listens on one address."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], tell: Callable[[], str]) -> None:
        """Listen; raise ``OSError`` when that cannot be."""
        self.tell, self.turn = tell, threading.Lock()
        self._silent: dict[socket.socket, float] = {}
        """Who has not said what it wants, the oldest first, and since when it is here."""
        self._here: set[socket.socket] = set()
        self._counting = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 (the signature of socketserver)
        """Serve a scraper in a thread of its own, unless there are too many of them."""
        with self._counting:
            is_full = len(self._here) >= MOST
            oldest = next(iter(self._silent), None) if is_full else None
            if oldest is not None:
                self._hang_up(oldest)
            if oldest is not None or not is_full:
                self._here.add(request)
                self._silent[request] = time.monotonic()
        if request in self._here:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def heard(self, request: socket.socket) -> None:
        """Note that a scraper has said what it wants."""
        with self._counting:
            self._silent.pop(request, None)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 (the signature of socketserver)
        """Hang up on a scraper that has been served."""
        with self._counting:
            self._silent.pop(request, None)
            self._here.discard(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Hang up on who takes too long: a byte now and then is no request."""
        with self._counting:
            for one in [one for one, since in self._silent.items() if time.monotonic() - since >= SECONDS]:
                self._hang_up(one)

    def _hang_up(self, request: socket.socket) -> None:
        """Have the thread that serves a scraper end."""
        self._silent.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 (the signature of socketserver)
        """Say nothing of a scraper that hung up."""


def write(path: Path, told: str) -> None:
    """Write the file as a whole: who reads it meanwhile has the one before. Everybody may read it: node_exporter is another user."""
    if path.is_dir():  # also the root, which has no name
        raise NotWritable("the file for node_exporter", str(path), os.strerror(errno.EISDIR))
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # Others may write to such a folder: what they lay out there is neither followed nor filled.
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            os.fchmod(descriptor, 0o644)
            file.write(told)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise NotWritable("the file for node_exporter", str(path), error.strerror or str(error)) from error
