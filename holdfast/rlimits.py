"""File descriptors: a flow holds a connection to every agent of its job, and the usual soft limit of 1,024 ends at a thousand nodes."""

from __future__ import annotations

import resource
from typing import Final

from holdfast.errors import TooFewDescriptors

OTHERS: Final = 256
"""Descriptors for everything that is no connection to a node: the history, Prefect, files, threads' wake-up pipes."""
EACH: Final = 4
"""Descriptors for one node: a login and the stream in it, and as many again while a connection that ended is replaced."""


def make_room(what: str, nodes: int) -> None:
    """See to it that this process may hold connections to so many *nodes* for *what* it does; raise `TooFewDescriptors` when it may not."""
    needed = EACH * nodes + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise TooFewDescriptors(what, nodes, needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
