"""`holdfast admin metrics`: the history as metrics for Prometheus."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Final

import click
from prometheus_client import Metric, generate_latest

from holdfast.cli.output import echo_json, hint
from holdfast.errors import OperatorError
from holdfast.report.metrics.families import HistoryCollector
from holdfast.report.metrics.serving import MetricsServer, write

LOOPBACK: Final = "127.0.0.1"
LOCAL: Final = frozenset({"127.0.0.1", "::1", "localhost"})


class BadListenAddress(OperatorError):
    """An address on which this machine cannot listen."""

    address: str
    why: str

    def __str__(self) -> str:
        return f"cannot listen on '{self.address}': {self.why}. Name a free port, as in `--serve 9464`, or an address of this machine too"


def metrics(serve: str | None, output: Path | None, *, as_json: bool) -> int:
    """Print once, write a file, or answer scrapes until a signal."""
    if (serve is not None) + (output is not None) + as_json > 1:
        raise click.UsageError("`--serve`, `--output` and `--json` exclude each other")
    collector = HistoryCollector()
    if serve is not None:
        return _serve(serve, collector)
    if output is not None:
        write(output, collector)
    elif as_json:
        echo_json([_record(one) for one in collector.collect()])
    else:
        sys.stdout.write(generate_latest(collector).decode())
    return 0


def _record(family: Metric) -> dict[str, object]:
    name = f"{family.name}_total" if family.type == "counter" else family.name  # as in the text format
    samples = [{"name": one.name, "labels": one.labels, "value": float(one.value)} for one in family.samples]
    return {"name": name, "type": family.type, "help": family.documentation, "samples": samples}


def _serve(where: str, collector: HistoryCollector) -> int:
    """Serve on ``PORT``, ``HOST:PORT`` or ``[HOST]:PORT``."""
    host, colon, port = where.rpartition(":")
    if not (port.isascii() and port.isdigit()):
        raise BadListenAddress(where, "it names no port")
    host = (host.removeprefix("[").removesuffix("]") if colon else LOOPBACK) or LOOPBACK
    try:
        server = MetricsServer((host, int(port)), collector)
    except (OSError, OverflowError) as error:
        raise BadListenAddress(where, getattr(error, "strerror", None) or str(error)) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with server:
        shown = f"[{host}]" if ":" in host else host
        hint(f"metrics at http://{shown}:{server.server_port}/metrics until Ctrl-C")
        if host not in LOCAL:
            hint("Anyone who can reach this address can read names of jobs, nodes and faults: restrict access with a firewall or a proxy.")
        server.serve_forever()
    return 0
