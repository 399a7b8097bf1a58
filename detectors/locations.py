"""What a fault's words name: the part of the node that it was seen on, and the peers that it accuses."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from detectors.catalogue import Fault

_BUS: Final = re.compile(r"(?:PCI:|\b)[0-9a-fA-F]{4,8}:(?P<bus>[0-9a-fA-F]{2}:[0-9a-fA-F]{2})\b")
_PART: Final = re.compile(
    r"\b(?P<part>mlx[45]_\d+|(?:bond|ib|eth|roce|rdma|enp|ens|eno)\d\w*|nvme\d+(?:n\d+)?|sd[a-z]{1,2}|md\d+|GPU[- ]?\d+|dimm\w*\d)\b",
    re.IGNORECASE,
)
_STAMP: Final = re.compile(r"\b\d{1,2}:\d{2}:\d{2}\b|\d{4}-\d\d-\d\dT?\S*")
_HOST: Final = re.compile(
    r"(?:[Pp]eer|[Cc]onnect to|remote (?:peer )?address|connection (?:to|from))\s+(?:address )?"
    r"\[?(?P<host>[A-Za-z0-9][\w.-]*)\]?\s*[<:](?P<port>\d+)"
)
_GLOO: Final = re.compile(r"\[(?P<host>[0-9a-fA-F.:]+)\]:\d+")
_NUMBERS: Final = r"\d+(?:\s*,\s*\d+)*"
_RANKS: Final = re.compile(
    r"(?i)\b(?:remote rank|peer rank|from rank|to rank|rank\(s\)|dead ranks?|missing ranks?|peer)[ :=]+"
    rf"\[?(?P<ranks>{_NUMBERS})\b(?![.<:\w])"
    rf"|\branks? \[?(?P<failed>{_NUMBERS})\]? "
    r"(?:failed to pass|did not (?:arrive|come|join|call)|not respond|is dead|has not joined)"
)


def device_of(fault: Fault) -> str:
    """Return the part of the node that *fault* was seen on: what the detector says, or what its words name; empty for none."""
    return device_in(fault.device) or fault.device or device_in(fault.quote)


@lru_cache(maxsize=4096)
def device_in(text: str) -> str:
    """Return the device that *text* names, in one form however it is written; empty for none."""
    text = _STAMP.sub(" ", text)
    if found := _BUS.search(text):
        return found["bus"].lower()
    return found["part"].lower() if (found := _PART.search(text)) else ""


@lru_cache(maxsize=16384)
def peers_in(text: str) -> frozenset[str]:
    """Return whom *text* accuses: hosts and addresses as they stand, ranks as ``rank 3``."""
    hosts = {found["host"] for pattern in (_HOST, _GLOO) for found in pattern.finditer(text)}
    told = [found["ranks"] or found["failed"] for found in _RANKS.finditer(text)]
    ranks = {f"rank {number.strip()}" for one in told for number in one.split(",")}
    return frozenset(hosts | ranks)
