"""What workers said before they ended, judged by the signatures of logs: the reason that an exit code or an exception alone does not give.

Only ends that went wrong are read, and of those the last lines; what restates how the worker ended is left out (`associations.toml`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Final

from detectors.associations import ASSOCIATIONS, traits_of
from detectors.catalogue import Fault
from detectors.evidence import HangLimits, WorkerExit
from detectors.exceptions import EXCEPTION, kind_of
from detectors.log_heuristics import OTHERS, UNKNOWN
from detectors.logs import judge
from detectors.process import EXIT_CODE, OTHER_SIGNAL, TELLS, see_exit
from detectors.sources import exception_report, worker_output
from detectors.tracebacks import raised_in

LINES: Final = 40
"""Last lines of an output that are judged."""
WORKERS: Final = 64
"""Ends that are judged, the first ones: what ten thousand ranks say of one fault they say alike."""
_LIMITS: Final = HangLimits()
GENERIC: Final = frozenset({EXCEPTION.id, EXIT_CODE.id, OTHER_SIGNAL.id})
"""Kinds of ends that say that a worker failed, and not why."""
NAMELESS: Final = frozenset({None, *OTHERS, "script-exception", "process-status"})
"""What judging a line comes to where nothing in the catalogue knows it."""


def said(evidence: Iterable[object]) -> list[Fault]:
    """Return the faults that workers' last words tell of: each kind once a node, by the worker that said it first."""
    return read(evidence, lambda: False)[0]


def read(evidence: Iterable[object], enough: Callable[[], bool]) -> tuple[list[Fault], list[int]]:
    """Return what `said` does, and the ranks whose last words were not all read: *enough* was true, which is asked before each line."""
    ends = sorted((one for one in evidence if isinstance(one, WorkerExit)), key=lambda one: (one.at, one.rank))
    found: dict[tuple[str, str | None], Fault] = {}
    unread = list[int]()
    for one in [end for end in ends if not (end.code == 0 and end.finished)][:WORKERS]:
        if not _knows_all(one, enough):
            unread.append(one.rank)
            continue
        for fault in _of(one):
            found.setdefault((fault.kind, fault.node), fault)
    return list(found.values()), unread


def _knows_all(seen: WorkerExit, enough: Callable[[], bool]) -> bool:
    """Judge the lines of one worker, for the cache; False if there was no time for all of them."""
    for line in _lines(seen):
        if enough():
            return False
        _kind(line)
    return True


def _of(seen: WorkerExit) -> Iterator[Fault]:
    """Yield what one worker said, kind by kind."""
    end = see_exit(seen, _LIMITS)
    if end is None:
        return
    told = list(_judged(seen))
    if end.kind in GENERIC and not told and not any(map(_is_known, _lines(seen))):
        yield _unknown(seen, end)
    for kind, line, reported in told:
        if not _restates(kind, end.kind):
            yield Fault(
                kind=kind,
                at=seen.at,
                node=seen.node,
                rank=seen.rank,
                step=seen.step,
                quote=line[:500],
                signature=f"{kind}, {end.signature}",
                source=exception_report(seen.rank) if reported else worker_output(seen.rank),
            )


def _judged(seen: WorkerExit) -> Iterator[tuple[str, str, bool]]:
    """Yield the kinds that the exception and the last lines are of, each once."""
    raised = seen.raised or raised_in(seen.output)
    known = {kind_of(raised)} if raised else set()
    for number, line in enumerate(_lines(seen)):
        kind = _kind(line)
        if kind is not None and kind not in known and kind not in OTHERS and kind not in ASSOCIATIONS.vague:
            known.add(kind)
            yield kind, line.strip(), seen.raised is not None and number == 0


def _lines(seen: WorkerExit) -> list[str]:
    """Return what a worker raised, and the last lines that it printed."""
    raised = seen.raised or raised_in(seen.output)
    return [f"{raised.type}: {raised.message}".replace("\n", " ") if raised else "", *seen.output.splitlines()[-LINES:]]


def _unknown(seen: WorkerExit, end: Fault) -> Fault:
    """Return a failure that nothing in the catalogue knows, with all that is known around it."""
    how = f"rank {seen.rank} on {seen.node}{f', step {seen.step}' if seen.step is not None else ''}: {end.quote}"
    traceback = seen.raised.traceback if seen.raised else ""
    return Fault(
        kind=UNKNOWN,
        at=seen.at,
        node=seen.node,
        rank=seen.rank,
        step=seen.step,
        quote=end.quote,
        signature=f"{UNKNOWN}, {end.signature}",
        detail="\n".join(part for part in (how, traceback.strip(), seen.output.strip()) if part),
        source=end.source or worker_output(seen.rank),
    )


@lru_cache(maxsize=4096)
def _kind(line: str) -> str | None:
    """Return what *line* is a fault of; None for what is benign, or what no signature knows."""
    return judge(line, words=False) if TELLS.search(line) else None


def _is_known(line: str) -> bool:
    """Tell whether a signature says more of *line* than that a script raised something or ended."""
    return _kind(line) not in NAMELESS


@lru_cache(maxsize=4096)
def _restates(kind: str, end: str) -> bool:
    """Tell whether words of *kind* say no more than that the worker ended as *end* says."""
    restated = ASSOCIATIONS.restates.get(end)
    return restated is not None and restated.takes(traits_of(kind))
