"""Faults from the exception that ended a worker's script, reported or printed."""

from __future__ import annotations

import errno
from functools import partial
from typing import Final

from holdfast.detectors.catalogue import Attribution, Fault, RecommendedAction, fault_kind
from holdfast.detectors.evidence import Sample, WorkerException, WorkerExit
from holdfast.detectors.sources import exception_report
from holdfast.detectors.training.tracebacks import places_in

ERRNO_3: Final = "https://man7.org/linux/man-pages/man3/errno.3.html"
FINISHED: Final = Sample(WorkerExit(node="n0", rank=0, at=0.0, code=0, finished=True, step=9))
ABORT_ERROR: Final = "holdfast.runtime.groups.device_library.AbortTimedOut"
"""Raised by Holdfast if a rank's communicators do not abort."""
NO_PLACE: Final = "?"
"""The location, in a fault's signature, of an exception that no line raised."""


def an_exit(**facts: object) -> Sample:
    """Return a sample of a worker's exit."""
    return Sample(WorkerExit(node="n0", rank=0, at=0.0, step=7, **facts))  # type: ignore[arg-type]


_define = partial(fault_kind, source="exception report, worker output", recommended_action=RecommendedAction.RESTART, healthy=FINISHED)
EXCEPTION: Final = _define(
    id="worker-exception",
    title="A worker's script raised an exception",
    component="worker",
    attributed_to=Attribution.PROCESS,
    action="restart once with the ranks on other nodes; the same exception at the same step there is the user's error",
    reference="https://docs.python.org/3/tutorial/errors.html",
    unhealthy=an_exit(code=1, raised=WorkerException(type="ValueError", message="bad batch")),
    weight=60,
)
PEER_LOST: Final = _define(
    id="worker-peer-lost",
    title="A worker failed because a peer was lost",
    component="communication",
    attributed_to=Attribution.NONE,
    action="look for the peer that failed first; restart the workers",
    reference="https://docs.pytorch.org/docs/stable/distributed.html",
    unhealthy=an_exit(code=1, raised=WorkerException(type="RuntimeError", message="Connection reset by peer", peer_lost=True)),
    weight=5,
)
GPU_MEMORY: Final = _define(
    id="worker-gpu-out-of-memory",
    title="A worker requested more GPU memory than is free",
    component="gpu memory",
    attributed_to=Attribution.USER_CODE,
    action="restart once: another process may have held the memory; then the user must fix it",
    reference="https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",
    unhealthy=an_exit(code=1, raised=WorkerException(type="torch.OutOfMemoryError", message="CUDA out of memory. Tried to allocate 2 GiB")),
    weight=65,
)
ABORT: Final = _define(
    id="worker-abort-timed-out",
    title="A worker's communicators did not abort, so it ended itself",
    component="communication",
    attributed_to=Attribution.PROCESS,
    action="look for the fault that ended the generation; if this happens again on the same GPU, check it and its driver",
    reference="docs/explanation/managed-groups.md",
    unhealthy=an_exit(
        code=75,
        raised=WorkerException(
            type=ABORT_ERROR,
            message="1 of 3 communicators of this rank did not abort within 10 s: this process exits, so that another takes its rank",
        ),
    ),
    weight=45,
)
DISK_FULL: Final = _define(
    id="worker-disk-full",
    title="A worker failed because a disk has no space left",
    component="storage",
    attributed_to=Attribution.STORAGE,
    action="free space, or move the job's output",
    reference=ERRNO_3,
    unhealthy=an_exit(code=1, raised=WorkerException(type="OSError", message="[Errno 28] No space left on device", errno=28)),
    weight=70,
)
STORAGE: Final = _define(
    id="worker-storage-failed",
    title="A worker failed because storage did: an I/O error, a stale mount, a file system gone read-only",
    component="storage",
    attributed_to=Attribution.STORAGE,
    action="restart; if it happens again check the mount and the kernel's log",
    reference=ERRNO_3,
    unhealthy=an_exit(code=1, raised=WorkerException(type="OSError", message="[Errno 5] Input/output error: '/data/shard-3'", errno=5)),
    weight=68,
)
NETWORK: Final = _define(
    id="worker-service-unreachable",
    title="A worker failed because something that its script uses over the network did not answer",
    component="network",
    attributed_to=Attribution.NETWORK,
    action="restart; if it happens again check the service that the script uses",
    reference=ERRNO_3,
    unhealthy=an_exit(code=1, raised=WorkerException(type="ConnectionRefusedError", message="[Errno 111] Connection refused", errno=111)),
    weight=50,
)

# Error numbers of the environment, not of the code, however many nodes have them at once.
_BY_ERRNO: Final = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), DISK_FULL.id),
    **dict.fromkeys((errno.EIO, errno.EROFS, errno.ESTALE, errno.EREMOTEIO, errno.ENXIO, errno.ENODEV, errno.EUCLEAN), STORAGE.id),
    **dict.fromkeys((errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT), NETWORK.id),
    **dict.fromkeys((errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ENETRESET), NETWORK.id),
    -3: NETWORK.id,  # EAI_AGAIN: no name server answered
}
_GPU_MEMORY: Final = ("CUDA out of memory", "CUDA error: out of memory")
INTERRUPT: Final = "worker-sigint"
"""Python raises an exception for this signal; it is no error."""
_BY_TYPE: Final = {"KeyboardInterrupt": INTERRUPT, ABORT_ERROR: ABORT.id}


def kind_of(raised: WorkerException) -> str:
    """Return the fault kind of *raised*."""
    if raised.peer_lost:
        return PEER_LOST.id
    if raised.type in _BY_TYPE:
        return _BY_TYPE[raised.type]
    if raised.errno in _BY_ERRNO:
        return _BY_ERRNO[raised.errno]
    if "No space left on device" in raised.message:
        return DISK_FULL.id
    if raised.type.endswith("OutOfMemoryError") or any(words in raised.message for words in _GPU_MEMORY):
        return GPU_MEMORY.id
    return EXCEPTION.id


def see_exception(seen: WorkerExit, raised: WorkerException, source: str = "") -> Fault:
    """Return the fault of the exception that ended a worker's script; type and innermost location identify equal ones.

    *source*: where it was read; by default the worker's own report.
    """
    name = raised.type.removeprefix("__main__.")  # printed tracebacks omit it
    first = next(iter(raised.message.strip().splitlines()), "")
    place = next(reversed(places_in(raised.traceback)), NO_PLACE)
    return Fault(
        kind=kind_of(raised),
        at=seen.at,
        node=seen.node,
        rank=seen.rank,
        step=seen.step,
        quote=(f"{name}: {first}" if first else name)[:300],
        signature=f"{name} at {place}",
        detail=raised.traceback or seen.output,
        source=source or exception_report(seen.rank),
    )
