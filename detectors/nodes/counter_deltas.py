"""Error counters of a node that grew between two readings: context for an incident, whether or not a threshold was exceeded."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, Final

from holdfast.detectors.evidence import Unknown
from holdfast.detectors.nodes.findings import grown
from holdfast.detectors.nodes.health import label
from holdfast.detectors.nodes.readings import NodeReading

COUNTS_ERRORS: Final = re.compile(
    r"err|drop|discard|crc|replay|retr|timeout|fail|lost|overrun|missed|corrected|violation|down|recover|throttl|oom|retired|bit|symbol"
)
"""Names of error counters; counters of traffic and work grow all the time."""


def grown_errors(before: NodeReading, now: NodeReading) -> dict[str, int]:
    """Return the growth of error counters from *before* to *now*, by path (`network.nics[eth0].counters.rx_crc_errors`)."""
    return dict(sorted(_walk(before, now, "")))


def _walk(before: Any, now: Any, where: str) -> Iterator[tuple[str, int]]:  # noqa: ANN401 (any evidence)
    if type(before) is not type(now) or isinstance(now, Unknown):
        return
    if type(now) is int:
        growth = grown(before, now) if COUNTS_ERRORS.search(where.rpartition(".")[2]) else None
        if growth:
            yield where, growth
        return
    earlier, later = dict(_parts(before)), dict(_parts(now))
    for name in later.keys() & earlier.keys():
        yield from _walk(earlier[name], later[name], f"{where}{name}".lstrip("."))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 (any evidence)
    """Yield the parts of *value*, each with its path."""
    if dataclasses.is_dataclass(value):
        yield from ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, dict):
        yield from ((f".{name}", item) for name, item in value.items())
    elif isinstance(value, tuple):
        yield from ((f"[{label(item, number)}]", item) for number, item in enumerate(value))
