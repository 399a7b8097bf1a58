"""`holdfast metrics`: what the history knows, for Prometheus."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Final

from prometheus_client import Metric, generate_latest

from holdfast.cli.output import hint, say_json
from holdfast.errors import OperatorError
from holdfast.report.metrics.families import HistoryCollector
from holdfast.report.metrics.serving import MetricsServer, write

LOOPBACK: Final = "127.0.0.1"
OURS: Final = frozenset({"127.0.0.1", "::1", "localhost"})


class NoAddress(OperatorError):
    """An address at which nobody can listen."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(address, why)
        self.address, self.why = address, why

    def __str__(self) -> str:
        return f"cannot listen at '{self.address}': {self.why}. Name a free port, as in `--serve 9464`, or an address of this machine too"


def metrics(serve: str | None, textfile: Path | None, *, as_json: bool) -> int:
    """Print once, write a file, or answer scrapes until a signal."""
    collector = HistoryCollector()
    if serve is not None:
        return _serve(serve, collector)
    if textfile is not None:
        write(textfile, collector)
    elif as_json:
        say_json([_record(one) for one in collector.collect()])
    else:
        sys.stdout.write(generate_latest(collector).decode())
    return 0


def _record(family: Metric) -> dict[str, object]:
    name = f"{family.name}_total" if family.type == "counter" else family.name  # as the text has it
    samples = [{"name": one.name, "labels": one.labels, "value": float(one.value)} for one in family.samples]
    return {"name": name, "type": family.type, "help": family.documentation, "samples": samples}


def _serve(where: str, collector: HistoryCollector) -> int:
    address = _address(where)
    try:
        server = MetricsServer(address, collector)
    except (OSError, OverflowError) as error:
        raise NoAddress(where, getattr(error, "strerror", None) or str(error)) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with server:
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        hint(f"metrics at http://{shown}:{server.server_port}/metrics until Ctrl-C")
        if address[0] not in OURS:
            hint("Whoever reaches this address can read names of jobs, nodes and faults: let a firewall or a proxy choose who.")
        server.serve_forever()
    return 0


def _address(where: str) -> tuple[str, int]:
    """Return host and port of ``PORT``, ``HOST:PORT`` or ``[HOST]:PORT``."""
    host, colon, port = where.rpartition(":")
    if not (port.isascii() and port.isdigit()):
        raise NoAddress(where, "it names no port")
    return (host.removeprefix("[").removesuffix("]") if colon else LOOPBACK) or LOOPBACK, int(port)
