"""File descriptors: a flow holds a connection to every agent of its job, and the usual soft limit of 1,024 ends at a thousand nodes."""

from __future__ import annotations

import resource
from typing import Final

from holdfast.errors import TooFewFileDescriptors

OTHERS: Final = 256
"""Descriptors for everything that is no connection to a node: the history, Prefect, files, threads' wake-up pipes."""
EACH: Final = 4
"""Descriptors for one node: a login and the stream in it, and as many again while a connection that ended is replaced."""


def raise_descriptor_limit(what: str, nodes: int) -> None:
    """Allow this process connections to *nodes* nodes for *what*; raise `TooFewFileDescriptors` when the limit is too low."""
    needed = EACH * nodes + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise TooFewFileDescriptors(what, nodes, needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
