"""Serve metrics to Prometheus over HTTP, or write them for node_exporter's textfile collector."""

from __future__ import annotations

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
from holdfast.report import write_atomically

TIMEOUT: Final = 10.0
"""Seconds for a scraper to send its request, and to receive the response."""
MAX_CONNECTIONS: Final = 32
"""Concurrent scrapers; with one more, the oldest without a request is disconnected."""


class _Handler(MetricsHandler):
    """One scrape."""

    server: MetricsServer
    timeout = TIMEOUT
    server_version, sys_version = "holdfast", ""

    def do_GET(self) -> None:  # noqa: N802 (the name that http.server calls)
        """Serve ``/metrics``; show at ``/`` where that is."""
        self.server.request_received(self.connection)
        path = self.path.partition("?")[0]
        if path == "/":
            self._answer(200, "Holdfast: /metrics is for Prometheus\n")
        elif path != "/metrics":
            self._answer(404, "only /metrics is here\n")
        else:
            self.path = path  # without a query: the library would filter by `name[]`, which needs a registry with fixed names
            self.registry = self.server.collector
            try:
                super().do_GET()
            except HoldfastError as error:  # raised before anything was sent; Prometheus shows the target as down
                self._answer(503, f"{error}\n")

    def _answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.end_headers()
        self.wfile.write(body.encode("utf-8", "replace"))

    def end_headers(self) -> None:
        """Keep browsers from interpreting a job's name as HTML."""
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()


class MetricsServer(ThreadingHTTPServer):
    """Listens on one address with limits on the number and the duration of connections, which the library's server lacks."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], collector: Collector) -> None:
        """Listen; raise ``OSError`` on failure."""
        self.collector = collector
        self._waiting: dict[socket.socket, float] = {}
        """Connections without a request, oldest first, and since when they are open."""
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 (the signature of socketserver)
        """Serve a scraper in a thread, unless there are too many."""
        with self._lock:
            is_full = len(self._open) >= MAX_CONNECTIONS
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
        """Record that a scraper has sent its request."""
        with self._lock:
            self._waiting.pop(request, None)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 (the signature of socketserver)
        """Close the connection of a scraper after the response."""
        with self._lock:
            self._waiting.pop(request, None)
            self._open.discard(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Disconnect scrapers that take too long, also those that send a byte now and then."""
        with self._lock:
            for one in [one for one, since in self._waiting.items() if time.monotonic() - since >= TIMEOUT]:
                self._disconnect(one)

    def _disconnect(self, request: socket.socket) -> None:
        """End the connection and thereby the thread that serves it."""
        self._waiting.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 (the signature of socketserver)
        """Log nothing: a scraper disconnected, or was disconnected."""


def write(path: Path, collector: Collector) -> None:
    """Write the metrics to a file atomically and readable for everybody, because node_exporter is another user; raise `NotWritable`."""
    content = generate_latest(collector)
    try:
        write_atomically(path, content, mode=0o644)
    except OSError as error:
        raise NotWritable("the file for node_exporter", str(path), error.strerror or str(error)) from error
