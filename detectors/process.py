"""Faults seen in how a worker's process ended, stood still, or could not start."""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Callable
from typing import Final

from detectors.catalogue import Blame, Fault, FaultKind, Level, kind
from detectors.evidence import Blind, HangLimits, Raised, Sample, StartTrouble, WorkerExit, WorkerStop

SIGNAL_7: Final = "https://man7.org/linux/man-pages/man7/signal.7.html"
FINISHED: Final = Sample(evidence=WorkerExit(node="n0", rank=0, at=0.0, code=0, finished=True, step=9))


def _exit(**facts: object) -> Sample:
    return Sample(evidence=WorkerExit(node="n0", rank=0, at=0.0, step=7, **facts))  # type: ignore[arg-type]


# Signal, what usually sends it, level, blame, weight. SIGTERM and SIGHUP come from a person or a scheduler, not from the worker.
_SIGNALS: Final[tuple[tuple[str, str, Blame, int], ...]] = (
    ("SIGKILL", "killed from outside: a person, a scheduler, or the kernel without leaving a trace", Blame.PROCESS, 90),
    ("SIGSEGV", "touched memory that is not its own: a bug in native code, or bad memory", Blame.PROCESS, 90),
    ("SIGBUS", "touched memory that cannot be had: /dev/shm full, a mapped file cut short, or bad memory", Blame.PROCESS, 90),
    ("SIGABRT", "gave up by itself: a C++ exception nobody caught, an assertion, glibc's heap check", Blame.PROCESS, 70),
    ("SIGFPE", "divided an integer by zero in native code", Blame.PROCESS, 80),
    ("SIGILL", "met an instruction this CPU does not have: a wheel built for another CPU, or bad memory", Blame.NODE, 85),
    ("SIGTRAP", "hit a breakpoint or a CHECK of native code", Blame.PROCESS, 80),
    ("SIGSYS", "made a system call that a sandbox forbids", Blame.PROCESS, 80),
    ("SIGTERM", "was asked to end from outside Holdfast", Blame.PROCESS, 85),
    ("SIGINT", "was interrupted from outside Holdfast", Blame.PROCESS, 85),
    ("SIGHUP", "lost the terminal or parent it hung on", Blame.PROCESS, 85),
    ("SIGQUIT", "was asked from outside to end with a core dump", Blame.PROCESS, 85),
    ("SIGPIPE", "wrote to a pipe nobody reads", Blame.PROCESS, 75),
    ("SIGXCPU", "used up its CPU time limit", Blame.NODE, 85),
    ("SIGXFSZ", "wrote a file beyond the size limit", Blame.NODE, 85),
    ("SIGUSR1", "got a signal it does not handle; schedulers send it as a notice before the time limit", Blame.PROCESS, 80),
    ("SIGUSR2", "got a signal it does not handle", Blame.PROCESS, 80),
    ("SIGALRM", "let an alarm run out", Blame.PROCESS, 70),
)

for _name, _cause, _blame, _weight in _SIGNALS:
    kind(
        FaultKind(
            id=f"worker-{_name.lower()}",
            title=f"A worker was ended by {_name}: it {_cause}",
            component="worker",
            source="process exit",
            level=Level.RESTART_PROCESS,
            blame=_blame,
            action="restart the workers from the newest whole checkpoint",
            reference=SIGNAL_7,
            sick=_exit(signal=int(getattr(signal, _name))),
            healthy=FINISHED,
            weight=_weight,
        )
    )

OTHER_SIGNAL: Final = kind(
    FaultKind(
        id="worker-other-signal",
        title="A worker was ended by a signal without an entry of its own",
        component="worker",
        source="process exit",
        level=Level.RESTART_PROCESS,
        blame=Blame.PROCESS,
        action="restart the workers from the newest whole checkpoint",
        reference=SIGNAL_7,
        sick=_exit(signal=int(signal.SIGRTMIN) + 3),
        healthy=FINISHED,
        weight=80,
    )
)
OOM_KILLED: Final = kind(
    FaultKind(
        id="worker-oom-killed",
        title="The kernel killed a worker because memory ran out",
        component="host memory",
        source="process exit, kernel log, cgroup counters",
        level=Level.RESTART_PROCESS,
        blame=Blame.NODE,
        action="restart; if it comes again move off the node or lower the job's memory",
        reference="https://docs.kernel.org/admin-guide/mm/concepts.html#oom-killer",
        sick=_exit(signal=9, oom="Out of memory: Killed process 4711 (python) total-vm:9000kB, anon-rss:8000kB"),
        healthy=FINISHED,
        weight=95,
    )
)
EXCEPTION: Final = kind(
    FaultKind(
        id="worker-exception",
        title="A worker's script raised an exception",
        component="worker",
        source="exception report, worker output",
        level=Level.RESTART_PROCESS,
        blame=Blame.PROCESS,
        action="restart once with the ranks on other nodes; the same exception at the same step there is the user's error",
        reference="https://docs.python.org/3/tutorial/errors.html",
        sick=_exit(code=1, raised=Raised(type="ValueError", message="bad batch")),
        healthy=FINISHED,
        weight=60,
    )
)
PEER_LOST: Final = kind(
    FaultKind(
        id="worker-peer-lost",
        title="A worker failed because another one went away",
        component="communication",
        source="exception report, worker output",
        level=Level.RESTART_PROCESS,
        blame=Blame.NONE,
        action="look for the peer that failed first; restart the workers",
        reference="https://docs.pytorch.org/docs/stable/distributed.html",
        sick=_exit(code=1, raised=Raised(type="RuntimeError", message="Connection reset by peer", peer_lost=True)),
        healthy=FINISHED,
        weight=5,
    )
)
GPU_MEMORY: Final = kind(
    FaultKind(
        id="worker-gpu-out-of-memory",
        title="A worker asked for more GPU memory than is free",
        component="gpu memory",
        source="exception report, worker output",
        level=Level.RESTART_PROCESS,
        blame=Blame.USER_CODE,
        action="restart once: another process may have held the memory; then the user's to mend",
        reference="https://docs.pytorch.org/docs/stable/notes/cuda.html#memory-management",
        sick=_exit(code=1, raised=Raised(type="torch.OutOfMemoryError", message="CUDA out of memory. Tried to allocate 2 GiB")),
        healthy=FINISHED,
        weight=65,
    )
)
DISK_FULL: Final = kind(
    FaultKind(
        id="worker-disk-full",
        title="A worker failed because a disk has no space left",
        component="storage",
        source="exception report, worker output",
        level=Level.RESTART_PROCESS,
        blame=Blame.STORAGE,
        action="free space, or move the job's output",
        reference="https://man7.org/linux/man-pages/man3/errno.3.html",
        sick=_exit(code=1, raised=Raised(type="OSError", message="[Errno 28] No space left on device", errno=28)),
        healthy=FINISHED,
        weight=70,
    )
)
EXIT_CODE: Final = kind(
    FaultKind(
        id="worker-exit-code",
        title="A worker ended with a status that is not 0 and said no reason",
        component="worker",
        source="process exit",
        level=Level.RESTART_PROCESS,
        blame=Blame.PROCESS,
        action="restart once with the ranks on other nodes; the same status at the same step there is the user's error",
        reference="https://man7.org/linux/man-pages/man3/exit.3.html",
        sick=_exit(code=3),
        healthy=FINISHED,
        weight=55,
    )
)
EXIT_EARLY: Final = kind(
    FaultKind(
        id="worker-exit-early",
        title="A worker ended with status 0 before its steps were done",
        component="worker",
        source="process exit",
        level=Level.RESTART_PROCESS,
        blame=Blame.USER_CODE,
        action="restart once; a script that leaves its loop early is the user's to mend",
        reference="docs/words.md",
        sick=_exit(code=0),
        healthy=FINISHED,
        weight=55,
    )
)
STOPPED: Final = kind(
    FaultKind(
        id="worker-stopped",
        title="A signal stopped a worker, and nobody lets it go on",
        component="worker",
        source="process state",
        level=Level.RESTART_PROCESS,
        blame=Blame.PROCESS,
        action="kill it and restart the workers",
        reference=SIGNAL_7,
        sick=Sample(evidence=WorkerStop(node="n0", rank=0, at=0.0, signal=19, seconds=1.5)),
        healthy=Sample(evidence=WorkerStop(node="n0", rank=0, at=0.0, signal=19, seconds=0.2)),
        weight=92,
    )
)
START_FAILED: Final = kind(
    FaultKind(
        id="worker-start-failed",
        title="A node could not start its workers",
        component="node",
        source="agent",
        level=Level.EVICT_NOW,
        blame=Blame.NODE,
        action="try the next rung: this node cannot run the job as it is",
        reference="https://man7.org/linux/man-pages/man2/execve.2.html",
        sick=Sample(evidence=StartTrouble(node="n0", at=0.0, why="[Errno 11] Resource temporarily unavailable", errno=11)),
        healthy=FINISHED,
        weight=88,
    )
)

_LAST_LINE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning|Iteration)): ?(?P<message>.*)$", re.MULTILINE)
_PEER_WORDS = re.compile(
    r"Connection (reset|closed|refused) by peer|Connection closed by peer|DistNetworkError|NCCL (remote|communicator)|"
    r"ncclRemoteError|ncclSystemError|Broken pipe|Timed out waiting \d+ms for (recv|send)|\[Rank \d+\] Watchdog caught collective",
    re.IGNORECASE,
)


def raised_in(output: str) -> Raised | None:
    """Return the exception whose traceback ends *output*, as a worker started cold leaves it there."""
    begin = output.rfind("Traceback (most recent call last)")
    if begin < 0:
        return None
    found = None
    for found in _LAST_LINE.finditer(output, begin):  # noqa: B007 (the last one is wanted)
        pass
    if not found:
        return None
    number = re.search(r"\[Errno (\d+)\]", found["message"])
    return Raised(
        type=found["type"],
        message=found["message"],
        traceback=output[begin:],
        errno=int(number[1]) if number else None,
        peer_lost=bool(_PEER_WORDS.search(found[0])),
    )


def _kind_of(raised: Raised) -> FaultKind:
    if raised.peer_lost:
        return PEER_LOST
    if raised.errno == errno.ENOSPC or "No space left on device" in raised.message:
        return DISK_FULL
    if raised.type.endswith("OutOfMemoryError") or "CUDA out of memory" in raised.message:
        return GPU_MEMORY
    return EXCEPTION


def place_of(traceback: str) -> str:
    """Return the innermost place in *traceback* (``file:line``), which tells two failures of one type apart."""
    places = re.findall(r'File "([^"]+)", line (\d+)', traceback)
    return f"{places[-1][0]}:{places[-1][1]}" if places else "?"


def _by_exception(seen: WorkerExit, raised: Raised) -> Fault:
    first = raised.message.strip().splitlines()[0] if raised.message.strip() else ""
    return Fault(
        kind=_kind_of(raised).id,
        at=seen.at,
        node=seen.node,
        rank=seen.rank,
        step=seen.step,
        quote=f"{raised.type}: {first}"[:300],
        signature=f"{raised.type} at {place_of(raised.traceback)}",
        detail=raised.traceback or seen.output,
    )


def _by_signal(seen: WorkerExit, number: int) -> Fault:
    if isinstance(seen.oom, str):
        return Fault(kind=OOM_KILLED.id, at=seen.at, node=seen.node, rank=seen.rank, step=seen.step, quote=seen.oom, signature="oom")
    known = {int(getattr(signal, name)): name for name, *_ in _SIGNALS}
    name = known.get(number)
    quote = f"ended by signal {number} ({name or 'no entry of its own'})"
    if number == signal.SIGKILL and isinstance(seen.oom, Blind):
        quote += f"; whether memory ran out is not known: {seen.oom.why}"
    entry = f"worker-{name.lower()}" if name else OTHER_SIGNAL.id
    return Fault(
        kind=entry, at=seen.at, node=seen.node, rank=seen.rank, step=seen.step, quote=quote, signature=f"signal {number}", detail=seen.output
    )


def see_exit(seen: WorkerExit, _limits: HangLimits) -> Fault | None:
    """Name what a worker's end means; None for one that ended well."""
    if seen.signal is not None:
        return _by_signal(seen, seen.signal)
    raised = seen.raised or (raised_in(seen.output) if seen.code else None)
    if raised and seen.code:
        return _by_exception(seen, raised)
    if seen.code == 0 and seen.finished:
        return None
    entry = EXIT_CODE if seen.code else EXIT_EARLY
    quote = f"ended with status {seen.code}" + ("" if seen.code else f" after step {seen.step}, before its steps were done")
    return Fault(
        kind=entry.id,
        at=seen.at,
        node=seen.node,
        rank=seen.rank,
        step=seen.step,
        quote=quote,
        signature=f"status {seen.code}",
        detail=seen.output,
    )


def see_stop(seen: WorkerStop, limits: HangLimits) -> Fault | None:
    """Call a stopped worker a fault once it has stood still longer than the grace: a debugger stops one for a moment too."""
    if seen.seconds < limits.stopped_grace:
        return None
    quote = f"stopped by signal {seen.signal}, standing still for {seen.seconds:.1f} s"
    return Fault(kind=STOPPED.id, at=seen.at, node=seen.node, rank=seen.rank, step=seen.step, quote=quote, signature="stopped")


def see_start(seen: StartTrouble, _limits: HangLimits) -> Fault:
    """Name a start that failed."""
    return Fault(kind=START_FAILED.id, at=seen.at, node=seen.node, quote=seen.why, signature=f"start errno {seen.errno}")


Detector = Callable[..., Fault | None]
