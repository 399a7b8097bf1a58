"""The words of torch, gloo and NCCL that say that a peer is gone: one set for errors that were raised and for those that were printed.

The runtime (`holdfast.runtime.peer_errors`) judges what a worker raised, the detectors (`detectors.tracebacks`) what a worker without a
runtime printed, and both must come to the same verdict. Standard library only.
"""

from __future__ import annotations

import re
from typing import Final

_GLOO_LOST: Final = re.compile(
    r"Connection (?:closed by peer|reset by peer|refused|timed out)|Broken pipe|No route to host|Network is unreachable"
    r"|Timed out waiting \d+ms for (?:send|recv) operation|timed out connecting|Socket closed|failed to pass monitoredBarrier",
)
_NCCL_LOST: Final = re.compile(
    r"ncclRemoteError|remote process exited|Connection (?:closed by remote peer|reset by peer|refused|timed out)"
    r"|caught collective operation timeout|communicator was aborted|Some NCCL operations have failed or timed out",
)
LOCAL_SOCKET_ERROR: Final = re.compile(r"failed to (?:listen|bind)|EADDRINUSE|EACCES|EADDRNOTAVAIL")
"""What torch says of a socket that this process could not open itself."""
DEVICE_ERROR: Final = re.compile(r"\b(?:CUDA|HIP) error\b")
"""What torch says of an error of the device: it sticks, so that every later call in this process fails."""
PEER_LOST_ERROR: Final = "holdfast.runtime.groups.control_tree.PeerConnectionLost"
"""What our own groups raise where a peer does not come to them, or leaves."""


def is_peer_lost_message(words: str) -> bool:
    """Tell whether an error of gloo or NCCL with these *words* says that a peer is gone."""
    if "gloo" in words.lower():
        return bool(_GLOO_LOST.search(words))
    return "nccl" in words.lower() and bool(_NCCL_LOST.search(words))
