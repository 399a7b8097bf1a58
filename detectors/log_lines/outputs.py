"""Match the last output of failed workers against log signatures, for reasons that an exit code or an exception does not give.

Faults that only restate how the worker exited are left out (`associations.toml`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Final

from holdfast.detectors.associations import ASSOCIATIONS, traits_of
from holdfast.detectors.catalogue import CATALOGUE, Fault
from holdfast.detectors.evidence import HangLimits, WorkerExit
from holdfast.detectors.log_lines.classification import judge
from holdfast.detectors.log_lines.heuristics import OTHERS, UNKNOWN
from holdfast.detectors.log_lines.tables import header_of, in_words
from holdfast.detectors.sources import exception_report, worker_output
from holdfast.detectors.training.exceptions import EXCEPTION, kind_of
from holdfast.detectors.training.process import EXIT_CODE, OTHER_SIGNAL, TELLS, see_exit
from holdfast.detectors.training.tracebacks import raised_in

LINES: Final = 40
"""Number of last output lines to match."""
WORKERS: Final = 64
"""Number of exits to read, the first ones: ten thousand ranks report one fault alike."""
_LIMITS: Final = HangLimits()
GENERIC: Final = frozenset({EXCEPTION.id, EXIT_CODE.id, OTHER_SIGNAL.id})
"""Kinds of exits without a reason."""
NAMELESS: Final = frozenset({None, *OTHERS, "script-exception", "process-status"})
"""Results for a line that no specific signature matches."""


def said(evidence: Iterable[object]) -> list[Fault]:
    """Return the faults in the last output of workers: each kind once per node, from the worker that printed it, or proved it, first."""
    return read(evidence, lambda: False)[0]


def read(evidence: Iterable[object], enough: Callable[[], bool]) -> tuple[list[Fault], list[int]]:
    """Return what `said` does, and the ranks whose output was not read completely: *enough*, called before each line, returned True."""
    ends = sorted((one for one in evidence if isinstance(one, WorkerExit)), key=lambda one: (one.at, one.rank))
    found: dict[tuple[str, str | None], Fault] = {}
    unread = list[int]()
    for one in [end for end in ends if not (end.code == 0 and end.finished)][:WORKERS]:
        if not _match_all(one, enough):
            unread.append(one.rank)
            continue
        for fault in _of(one):
            known = found.setdefault((fault.kind, fault.node), fault)
            if fault.is_proven and not known.is_proven:
                found[fault.kind, fault.node] = fault
    return list(found.values()), unread


def _match_all(seen: WorkerExit, enough: Callable[[], bool]) -> bool:
    """Match the lines of one worker, to fill the cache; return False if time ran out."""
    for line in _lines(seen):
        if enough():
            return False
        _kind(line)
    return True


def _of(seen: WorkerExit) -> Iterator[Fault]:
    """Yield the faults in the output of one worker."""
    end = see_exit(seen, _LIMITS)
    if end is None:
        return
    matches = _matches(seen)
    if end.kind in GENERIC and not matches and not any(map(_is_known, _lines(seen))):
        yield _unknown(seen, end)
    for kind, line, reported in matches:
        if not _restates(kind, end.kind):
            yield Fault(
                kind=kind,
                at=seen.at,
                node=seen.node,
                rank=seen.rank,
                step=seen.step,
                quote=line[:500],
                signature=f"{kind}, {end.signature}",
                source=exception_report(seen.rank) if reported and _is_itself(kind, line) else worker_output(seen.rank),
            )


def _is_itself(kind: str, line: str) -> bool:
    """Return whether an exception is the error of *kind*, and does not only quote its words."""
    entry = CATALOGUE[kind]
    return not entry.certain or entry.proves(line)


def _matches(seen: WorkerExit) -> list[tuple[str, str, bool]]:
    """Return the fault kinds of the exception and the last lines, each once, with its line and whether the worker reported it.

    Of several lines the first one that proves the kind counts: a program may have quoted the words of an error before it had one.
    """
    raised = seen.raised or raised_in(seen.output)
    known = {kind_of(raised)} if raised else set()
    found: dict[str, tuple[str, bool]] = {}
    for number, line in enumerate(_lines(seen)):
        kind = _kind(line)
        if kind is None or kind in known or kind in OTHERS or kind in ASSOCIATIONS.vague:
            continue
        if kind not in found or (CATALOGUE[kind].proves(line) and not CATALOGUE[kind].proves(found[kind][0])):
            found[kind] = line.strip(), seen.raised is not None and number == 0
    return [(kind, line, reported) for kind, (line, reported) in found.items()]


def _lines(seen: WorkerExit) -> list[str]:
    """Return a worker's exception and its last output lines, the values of tables in them with their headers."""
    raised = seen.raised or raised_in(seen.output)
    return [f"{raised.type}: {raised.message}".replace("\n", " ") if raised else "", *in_words(seen.output.splitlines(), LINES)]


def _unknown(seen: WorkerExit, end: Fault) -> Fault:
    """Return an unknown failure with all available evidence."""
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
    """Return the fault kind of *line*; None if it is benign or unknown."""
    return judge(line, words=False) if TELLS.search(line) or header_of(line) else None


def _is_known(line: str) -> bool:
    """Return whether a signature says more about *line* than that a script failed."""
    return _kind(line) not in NAMELESS


@lru_cache(maxsize=4096)
def _restates(kind: str, end: str) -> bool:
    """Return whether *kind* only restates the exit kind *end*."""
    restated = ASSOCIATIONS.restates.get(end)
    return restated is not None and restated.takes(traits_of(kind))
