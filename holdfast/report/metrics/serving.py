"""Answer Prometheus' scrapes over HTTP, and write for node_exporter's textfile collector."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from prometheus_client import MetricsHandler, generate_latest
from prometheus_client.registry import Collector

from holdfast.errors import HoldfastError, NotWritable

SECONDS: Final = 10.0
"""How long a scraper may take to send its request, and to take the answer."""
MOST: Final = 32
"""Scrapers at once: with one more the oldest that has not sent its request is disconnected."""


class _Handler(MetricsHandler):
    """One scrape."""

    server: MetricsServer
    timeout = SECONDS
    server_version, sys_version = "holdfast", ""

    def do_GET(self) -> None:  # noqa: N802 (the name that http.server calls)
        """Answer ``/metrics``; say at ``/`` where that is."""
        self.server.request_received(self.connection)
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer(200, "Holdfast: /metrics is for Prometheus\n")
        elif path != "/metrics":
            self._answer(404, "only /metrics is here\n")
        else:
            self.path = path  # without a query: the library would look for `name[]` in a registry that knows all names beforehand
            self.registry = self.server.collector
            try:
                super().do_GET()
            except HoldfastError as error:  # raised before anything was sent; Prometheus then shows the target as down
                self._answer(503, f"{error}\n")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.end_headers()
        self.wfile.write(body.encode("utf-8", "replace"))

    def end_headers(self) -> None:
        """Have no browser take a job's name for a page."""
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()


class MetricsServer(ThreadingHTTPServer):
    """Listens on one address, and limits how many connections are open and how long each may take: the library's server has no limits."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], collector: Collector) -> None:
        """Listen; raise ``OSError`` when that cannot be."""
        self.collector = collector
        self._waiting: dict[socket.socket, float] = {}
        """Connections without a request, the oldest first, and since when they are open."""
        self._open: set[socket.socket] = set()
        self._counting = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 (the signature of socketserver)
        """Serve a scraper in a thread of its own, unless there are too many of them."""
        with self._counting:
            is_full = len(self._open) >= MOST
            oldest = next(iter(self._waiting), None) if is_full else None
            if oldest is not None:
                self._disconnect(oldest)
            if oldest is not None or not is_full:
                self._open.add(request)
                self._waiting[request] = time.monotonic()
        if request in self._open:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def request_received(self, request: socket.socket) -> None:
        """Note that a scraper has sent its request."""
        with self._counting:
            self._waiting.pop(request, None)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 (the signature of socketserver)
        """Close the connection of a scraper that has its answer."""
        with self._counting:
            self._waiting.pop(request, None)
            self._open.discard(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Disconnect who takes too long: a byte now and then is no request."""
        with self._counting:
            for one in [one for one, since in self._waiting.items() if time.monotonic() - since >= SECONDS]:
                self._disconnect(one)

    def _disconnect(self, request: socket.socket) -> None:
        """End the connection, and with it the thread that serves it."""
        self._waiting.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 (the signature of socketserver)
        """Log nothing: a scraper disconnected, or was disconnected."""


def write(path: Path, collector: Collector) -> None:
    """Write the file as a whole: who reads it meanwhile has the one before. Everybody may read it: node_exporter is another user."""
    if path.is_dir():  # also the root, which has no name
        raise NotWritable("the file for node_exporter", str(path), os.strerror(errno.EISDIR))
    text = generate_latest(collector)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        # Others may write to such a folder, and `prometheus_client.write_to_textfile` would follow a link at the name that it takes
        # beside the file, which is easy to guess.
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)
            file.write(text)
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise NotWritable("the file for node_exporter", str(path), error.strerror or str(error)) from error
