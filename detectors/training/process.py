"""Faults of worker processes: how they exited, were stopped, or failed to start."""

from __future__ import annotations

import errno
import re
import signal
from functools import partial
from typing import Final

from holdfast.detectors.catalogue import Attribution, Fault, RecommendedAction, fault_kind
from holdfast.detectors.evidence import HangLimits, Sample, StartFailure, Unknown, WorkerExit, WorkerStop
from holdfast.detectors.log_lines.heuristics import TROUBLE
from holdfast.detectors.sources import worker_output
from holdfast.detectors.training.exceptions import FINISHED, PEER_LOST, an_exit, see_exception
from holdfast.detectors.training.hang_analysis import numbered
from holdfast.detectors.training.tracebacks import aborted_for_lost_peer, raised_in

SIGNAL_7: Final = "https://man7.org/linux/man-pages/man7/signal.7.html"

# Signal, what usually sends it, recommended action, attribution, weight. SIGTERM and SIGHUP come from a person or a scheduler.
_SIGNALS: Final[tuple[tuple[str, str, Attribution, int], ...]] = (
    ("SIGKILL", "was killed from outside: a person, a scheduler, or the kernel without leaving a trace", Attribution.PROCESS, 90),
    ("SIGSEGV", "touched memory that is not its own: a bug in native code, or bad memory", Attribution.PROCESS, 90),
    ("SIGBUS", "touched memory that cannot be had: /dev/shm full, a mapped file cut short, or bad memory", Attribution.PROCESS, 90),
    ("SIGABRT", "aborted itself: an uncaught C++ exception, an assertion, glibc's heap check", Attribution.PROCESS, 60),
    ("SIGFPE", "divided an integer by zero in native code", Attribution.PROCESS, 80),
    ("SIGILL", "met an instruction this CPU does not have: a wheel built for another CPU, or bad memory", Attribution.NODE, 85),
    ("SIGTRAP", "hit a breakpoint or a CHECK of native code", Attribution.PROCESS, 80),
    ("SIGSYS", "made a system call that a sandbox forbids", Attribution.PROCESS, 80),
    ("SIGTERM", "was asked to end from outside Holdfast", Attribution.PROCESS, 85),
    ("SIGINT", "was interrupted from outside Holdfast", Attribution.PROCESS, 85),
    ("SIGHUP", "lost its terminal or its parent", Attribution.PROCESS, 85),
    ("SIGQUIT", "was asked from outside to end with a core dump", Attribution.PROCESS, 85),
    ("SIGPIPE", "wrote to a pipe nobody reads", Attribution.PROCESS, 75),
    ("SIGXCPU", "used up its CPU time limit", Attribution.NODE, 85),
    ("SIGXFSZ", "wrote a file beyond the size limit", Attribution.NODE, 85),
    ("SIGUSR1", "got a signal it does not handle; schedulers send it as a notice before the time limit", Attribution.PROCESS, 80),
    ("SIGUSR2", "got a signal it does not handle", Attribution.PROCESS, 80),
    ("SIGALRM", "did not handle the end of an alarm timer", Attribution.PROCESS, 70),
)

_define = partial(fault_kind, component="worker", recommended_action=RecommendedAction.RESTART, healthy=FINISHED)
for _name, _cause, _attributed_to, _weight in _SIGNALS:
    _define(
        id=f"worker-{_name.lower()}",
        title=f"A worker was ended by {_name}: it {_cause}",
        source="process exit",
        attributed_to=_attributed_to,
        action="restart the workers from the newest complete checkpoint",
        reference=SIGNAL_7,
        unhealthy=an_exit(signal=int(getattr(signal, _name))),
        weight=_weight,
    )

OTHER_SIGNAL: Final = _define(
    id="worker-other-signal",
    title="A worker was ended by a signal without a fault kind of its own",
    source="process exit",
    attributed_to=Attribution.PROCESS,
    action="restart the workers from the newest complete checkpoint",
    reference=SIGNAL_7,
    unhealthy=an_exit(signal=int(signal.SIGRTMIN) + 3),
    weight=80,
)
OOM_KILLED: Final = _define(
    id="worker-oom-killed",
    title="The kernel killed a worker because memory ran out",
    component="host memory",
    source="process exit, kernel log, cgroup counters",
    attributed_to=Attribution.NODE,
    action="restart; if it comes again move off the node or lower the job's memory",
    reference="https://docs.kernel.org/admin-guide/mm/concepts.html#oom-killer",
    unhealthy=an_exit(signal=9, oom="Out of memory: Killed process 4711 (python) total-vm:9000kB, anon-rss:8000kB"),
    weight=95,
)
EXIT_CODE: Final = _define(
    id="worker-exit-code",
    title="A worker exited with a non-zero status and gave no reason",
    source="process exit",
    attributed_to=Attribution.PROCESS,
    action="restart once with the ranks on other nodes; the same status at the same step there is the user's error",
    reference="https://man7.org/linux/man-pages/man3/exit.3.html",
    unhealthy=an_exit(code=3),
    weight=55,
)
EXIT_EARLY: Final = _define(
    id="worker-exit-early",
    title="A worker exited with status 0 before its steps were done, or while others still needed it",
    source="process exit",
    attributed_to=Attribution.USER_CODE,
    action="restart once; all ranks must make the same steps and collectives to the end: correct the script where one of them leaves early",
    reference="docs/reference/glossary.md",
    unhealthy=an_exit(code=0),
    weight=55,
)
STOPPED: Final = _define(
    id="worker-stopped",
    title="A signal stopped a worker, and none resumes it",
    source="process state",
    attributed_to=Attribution.PROCESS,
    action="kill it and restart the workers",
    reference=SIGNAL_7,
    unhealthy=Sample(WorkerStop(node="n0", rank=0, at=0.0, signal=19, seconds=1.5)),
    healthy=Sample(WorkerStop(node="n0", rank=0, at=0.0, signal=19, seconds=0.2)),
    weight=92,
)
START_FAILED: Final = _define(
    id="worker-start-failed",
    title="A node could not start its workers",
    component="node",
    source="agent",
    recommended_action=RecommendedAction.EVICT,
    attributed_to=Attribution.NODE,
    action="try the next action: this node cannot run the job as it is",
    reference="https://man7.org/linux/man-pages/man2/execve.2.html",
    unhealthy=Sample(StartFailure(node="n0", at=0.0, why="[Errno 11] Resource temporarily unavailable", errno=11)),
    weight=88,
)
NOT_RUNNABLE: Final = _define(
    id="worker-command-not-runnable",
    title="A node cannot run the workers' command: it is missing there, or no program",
    component="node",
    source="agent",
    recommended_action=RecommendedAction.EVICT,
    attributed_to=Attribution.NODE,
    action="on one node: mount or install what is missing; on every node: fix `command`, `python` or `directory` of the job",
    reference="https://man7.org/linux/man-pages/man2/execve.2.html",
    unhealthy=Sample(StartFailure(node="n0", at=0.0, why="[Errno 2] No such file or directory: 'trian'", errno=2)),
    weight=89,
)

_NAMED: Final = {int(getattr(signal, name)): f"worker-{name.lower()}" for name, *_ in _SIGNALS}
_FROM_OUTSIDE: Final = frozenset({
    signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
})  # fmt: skip
"""Signals that come from outside: the last output of the worker is rarely the reason."""
TELLS: Final = re.compile(rf"{TROUBLE}|\w(?:Error|Exception)\b|\bKilled\b|NCCL WARN|\bXid\b", re.ASCII)
"""Pattern that an output line must match to report a problem: most training output does not."""
_SHELL: Final = 128
"""A shell exits with this plus the signal number if a signal ended its command."""
_CANNOT_RUN: Final = frozenset({
    errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.E2BIG, errno.ENAMETOOLONG,
})  # fmt: skip


def _fault(seen: WorkerExit, entry: str, quote: str, signature: str) -> Fault:
    return Fault(
        kind=entry, at=seen.at, node=seen.node, rank=seen.rank, step=seen.step, quote=quote, signature=signature, detail=_detail(seen)
    )


def _detail(seen: WorkerExit) -> str:
    """Return a worker's last output as evidence; empty if a signal from outside ended it and no line reports a problem."""
    return "" if seen.signal in _FROM_OUTSIDE and not TELLS.search(seen.output) else seen.output


def name_of(number: int) -> str:
    """Return the name of signal *number*."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "a realtime signal"


def last_words(output: str) -> str:
    """Return the last printable line of a worker's output."""
    line = next((line.strip() for line in reversed(output.splitlines()) if line.strip()), "")
    return f"; last output: {line[:200]}" if line.isprintable() and line else ""


def _by_signal(seen: WorkerExit, number: int, how: str) -> Fault:
    if number == signal.SIGKILL and isinstance(seen.oom, str):
        return _fault(seen, OOM_KILLED.id, seen.oom, "oom")
    quote = f"{how} ({name_of(number)})"
    if number == signal.SIGABRT and aborted_for_lost_peer(seen.output):
        return _fault(seen, PEER_LOST.id, f"{quote} by its own watchdog, because a peer was lost", "watchdog")
    if number == signal.SIGKILL and isinstance(seen.oom, Unknown):
        quote += f"; whether memory ran out is unknown: {seen.oom.why}"
    return _fault(seen, _NAMED.get(number, OTHER_SIGNAL.id), quote, f"signal {number}")


def _by_status(seen: WorkerExit) -> Fault:
    code = seen.code
    if code is not None and code - _SHELL in _NAMED:
        return _by_signal(seen, code - _SHELL, f"exited with status {code}, as a shell does after signal {code - _SHELL}")
    if code == 0:
        if seen.missed_by:
            quote = f"exited with status 0, and {numbered(seen.missed_by)} lost a peer while communicating after that"
            return _fault(seen, EXIT_EARLY.id, quote, "status 0")
        after = f" after step {seen.step}" if seen.step is not None else ""
        return _fault(seen, EXIT_EARLY.id, f"exited with status 0{after}, before its steps were done", "status 0")
    quote = f"exited with status {code}" if code is not None else "exited, the status is unknown"
    return _fault(seen, EXIT_CODE.id, quote + last_words(seen.output), f"status {code}")


def see_exit(seen: WorkerExit, _limits: HangLimits) -> Fault | None:
    """Return the fault of a worker's exit; None for a successful exit."""
    if seen.raised and seen.signal in (None, signal.SIGABRT):  # an abort after an exception does not hide the exception
        return see_exception(seen, seen.raised)
    if seen.signal is not None:
        return _by_signal(seen, seen.signal, f"ended by signal {seen.signal}")
    if seen.code == 0 and seen.finished:
        return None
    raised = raised_in(seen.output) if seen.code else None
    return see_exception(seen, raised, worker_output(seen.rank)) if raised else _by_status(seen)


def see_stop(seen: WorkerStop, limits: HangLimits) -> Fault | None:
    """Report a stopped worker after a grace period: a debugger also stops it briefly."""
    if seen.seconds < limits.stopped_process:
        return None
    quote = f"stopped by signal {seen.signal} ({name_of(seen.signal)}), for {seen.seconds:.1f} s"
    return Fault(kind=STOPPED.id, at=seen.at, node=seen.node, rank=seen.rank, step=seen.step, quote=quote, signature="stopped")


def see_start(seen: StartFailure, _limits: HangLimits) -> Fault:
    """Report a failed start: what is missing on all nodes is the job's error."""
    found = re.search(r"\[Errno (\d+)\]", seen.why)  # if the agent rejected the command, only the text has it
    number = seen.errno if seen.errno is not None else int(found[1]) if found else None
    entry = NOT_RUNNABLE if number in _CANNOT_RUN else START_FAILED
    return Fault(kind=entry.id, at=seen.at, node=seen.node, quote=seen.why, signature=f"start errno {number}")
