"""File descriptors: a controller has a connection to every agent of its job, and the usual soft limit is 1,024."""

from __future__ import annotations

import resource
from typing import Final

from holdfast.errors import TooFewFileDescriptors

BASE: Final = 256
"""Descriptors for everything but nodes: the history, Prefect, files, threads' wake-up pipes."""
PER_NODE: Final = 4
"""Descriptors for one node: a transport and the stream in it, and as many again while an ended connection is replaced."""


def raise_descriptor_limit(what: str, nodes: int) -> None:
    """Allow this process connections to so many *nodes* for *what*; raise `TooFewFileDescriptors` when the hard limit is too low."""
    needed = PER_NODE * nodes + BASE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise TooFewFileDescriptors(what, nodes, needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
