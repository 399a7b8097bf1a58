"""Recognize the error messages of torch, gloo and NCCL that mean that a peer is lost.

The runtime (`holdfast.runtime.peer_errors`) applies the patterns to raised errors, the detectors
(`holdfast.detectors.training.tracebacks`) to printed ones, so that both reach the same result. Standard library only.
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
    r"|caught collective operation timeout|NCCL timeout in|communicator was aborted|Some NCCL operations have failed or timed out",
)
LOCAL_SOCKET_ERROR: Final = re.compile(r"failed to (?:listen|bind)|EADDRINUSE|EACCES|EADDRNOTAVAIL")
"""torch's message if this process itself could not open a socket."""
DEVICE_ERROR: Final = re.compile(r"(?i:\b(?:CUDA|HIP) error\b)|ncclUnhandledCudaError|\b(?:Cuda|HIP) failure\b")
"""The messages of torch and NCCL for an error of this process's own device. Such an error is sticky: every later call here fails.

It decides even where the message names a lost peer too: the "Last error" of NCCL's message is the newest of the whole process.
"""
PEER_LOST_ERROR: Final = "holdfast.runtime.groups.control_tree.PeerConnectionLost"
"""Raised by Holdfast's process groups if a peer does not connect, or disconnects."""


def is_peer_lost_message(message: str) -> bool:
    """Return whether *message*, an error of gloo or NCCL, means that a peer is lost."""
    if "gloo" in message.lower():
        return bool(_GLOO_LOST.search(message))
    return "nccl" in message.lower() and bool(_NCCL_LOST.search(message))
