"""What the diagnosis of an incident is given beside the faults that ask for an act, and how its verdict is kept."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from detectors.catalogue import CATALOGUE_ACTIONS, Fault, RecommendedAction, RecommendedActions
from detectors.causes import Candidate
from detectors.diagnosis import Diagnosis, unexplained_faults
from detectors.logs import warm
from detectors.outputs import read
from holdfast.control.faults.node_faults import machine_of
from holdfast.history import models
from holdfast.report import wording
from policies.case import PastFault

if TYPE_CHECKING:
    from holdfast.control.supervisor.controller import JobController

MOST_EVIDENCE: Final = 12
"""Pieces of evidence that are kept for each explanation; the faults themselves stand in rows of their own."""
MOST_SUBJECTS: Final = 8
READING: Final = 1.0
"""Seconds for which a recovery waits for what workers said last to be read: nothing is isolated before."""
RECENT: Final = 7200.0
"""Seconds for which a fault of a node that asks for nothing may still explain something."""


def compile_log_patterns() -> None:
    """Have the expressions compiled that last words are judged by, while workers start: a tenth of a second that no incident waits for."""
    threading.Thread(target=warm, name="signatures", daemon=True).start()


def context_faults(run: JobController) -> list[Fault]:
    """Return what is known beside the faults that ask for an act: what is wrong with the nodes, and what training goes on through.

    What is only to be recorded, such as a clock that nobody keeps, explains nothing.
    """
    now = time.time()
    seen = [fault for fault in run.faults.all() if not run.recommended_actions.needs_action(fault)]
    kind = run.cluster.kind
    acting = {_thing(fault, kind) for fault in run.generations.state.unusable}
    others = [fault for fault in run.generations.state.node_faults if _thing(fault, kind) not in acting]
    told = [
        fault for fault in (*others, *run.generations.state.problems) if fault.node in run.generations.members and now - fault.at < RECENT
    ]
    known = [fault for fault in (*seen, *told) if run.recommended_actions.of(fault) is not RecommendedAction.RECORD]
    return [fault for fault in known if not run.nodes.eligibility.is_excused(fault, run.recommended_actions)]


def _thing(fault: Fault | PastFault, cluster_kind: str) -> tuple[str, str, str]:
    """Return what a fault is of, and where: the nodes of one machine hear of the same."""
    return fault.kind, fault.device, machine_of(fault.node or "", cluster_kind)


def heard_once(earlier: Iterable[PastFault], unusable: Iterable[Fault], cluster_kind: str) -> tuple[PastFault, ...]:
    """Leave out of *earlier* what other nodes of the same machine reported of an *unusable* GPU: the fault did not come on them."""
    acting = {_thing(fault, cluster_kind): fault.node for fault in unusable}
    return tuple(one for one in earlier if acting.get(_thing(one, cluster_kind), one.node) == one.node)


def read_last_output(run: JobController) -> list[Fault]:
    """Return what workers said before they ended: read once, when the evidence has settled, and for a moment only, as ranks wait for it."""
    end = time.monotonic() + READING
    found, unread = read(run.generations.state.evidence, lambda: time.monotonic() >= end)
    if unread:
        run.log.record_event(
            f"the last output of {wording.plural(len(unread), 'rank')} ({wording.ranks(unread)}) was not read: a recovery waits "
            f"{READING:g} s for it at most. `holdfast logs {run.job.name}` shows it, `holdfast classify` reads it"
        )
    return found


def places(run: JobController) -> dict[str, str]:
    """Return the node of everything by which a fault may name a peer."""
    ranks = {f"rank {rank}": view.node for rank, view in run.generations.state.ranks.items()}
    return ranks | {node: node for node in run.generations.members}


def belong(diagnosis: Diagnosis, acting: Iterable[Fault]) -> list[Fault]:
    """Return the faults that are the incident's, the root first: what asks for an act, and what the root explains; noise is not."""
    root = diagnosis.root
    followed = diagnosis.candidates[0].explains if diagnosis.candidates else ()
    ours = {id(fault) for fault in (*acting, *followed)}
    return [root, *(fault for fault in diagnosis.secondary_failures if fault is not root and id(fault) in ours)]


def row_of(
    diagnosis: Diagnosis, job: str, incident: str, recommended_actions: RecommendedActions = CATALOGUE_ACTIONS
) -> models.IncidentDiagnosis:
    """Return the verdict as a row of the history."""
    root = diagnosis.root
    candidates = [record(one, recommended_actions) for one in diagnosis.candidates]
    return models.IncidentDiagnosis(
        job_id=job,
        incident_id=incident,
        at=time.time(),
        kind=root.kind,
        subject=root.subject,
        weight=diagnosis.candidates[0].weight if diagnosis.candidates else 1.0,
        reason=diagnosis.reason,
        candidates=candidates,
    )


def record(one: Candidate, recommended_actions: RecommendedActions = CATALOGUE_ACTIONS) -> dict[str, Any]:
    """Return an explanation for programs: what it is, its weight, its evidence with time and source, what it explains and what not."""
    fault = one.fault
    return {
        "kind": fault.kind,
        "subject": fault.subject,
        "node": fault.node,
        "rank": fault.rank,
        "device": fault.device,
        "weight": one.weight,
        "blame": str(fault.entry.blame),
        "recommended_action": str(recommended_actions.of(fault)),
        "rules": one.reason,
        "evidence": [
            {"at": seen.at, "source": seen.source, "subject": seen.subject, "quote": seen.quote} for seen in one.evidence[:MOST_EVIDENCE]
        ],
        "explains": _counted(one.explains),
        "unexplained": _counted(unexplained_faults(one, recommended_actions)),
    }


def _counted(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """Return how often each kind, and where, with some subjects: ten thousand echoes are one line."""
    counts = Counter(fault.kind for fault in faults)
    subjects = {kind: [fault.subject for fault in faults if fault.kind == kind][:MOST_SUBJECTS] for kind in counts}
    return [{"kind": kind, "count": count, "subjects": subjects[kind]} for kind, count in counts.most_common()]
