"""Faults told by workers that live: a process group that broke, a generation that they cannot join."""

from __future__ import annotations

from typing import Final

from detectors.catalogue import Blame, Fault, RecommendedAction, fault_kind
from detectors.evidence import GroupFailure, HangLimits, ReplaceRanksFailure, Sample
from detectors.exceptions import FINISHED

GROUP_BROKEN: Final = fault_kind(
    id="group-broken",
    title="A process group broke while its ranks live, or before anything else was heard of the one that is lost",
    component="communication",
    source="worker's report",
    recommended_action=RecommendedAction.RETRY_STEP,
    blame=Blame.NETWORK,
    action="build the groups anew between the ranks that live and do the step again; replace ranks that do not live",
    reference="https://docs.pytorch.org/docs/stable/distributed.html",
    unhealthy=Sample(GroupFailure(node="n0", rank=0, at=0.0, why="Connection closed by peer", group="0", step=7)),
    healthy=FINISHED,
    weight=6,
)
TAKE_OVER_FAILED: Final = fault_kind(
    id="take-over-failed",
    title="Somebody who has a part in a take-over cannot carry it out",
    component="job",
    source="worker's report, agent's answer",
    recommended_action=RecommendedAction.RESTART,
    blame=Blame.NONE,
    action="the next action is tried at once",
    unhealthy=Sample(ReplaceRanksFailure(node="n0", rank=0, at=0.0, why="no rank holds a whole copy of the state")),
    healthy=FINISHED,
    weight=15,
)


def see_broken(seen: GroupFailure, _limits: HangLimits) -> Fault:
    """Name a group that broke; whose doing it was, other evidence has to say."""
    quote = f"process group {seen.group or '?'} broke: {seen.why}"[:500]
    return Fault(kind=GROUP_BROKEN.id, at=seen.at, node=seen.node, rank=seen.rank, step=seen.step, quote=quote, signature=GROUP_BROKEN.id)


def see_take_over(seen: ReplaceRanksFailure, _limits: HangLimits) -> Fault:
    """Name a take-over that failed. Nobody is to blame for it: what it was to answer has been diagnosed before."""
    who = f"rank {seen.rank} on {seen.node}" if seen.rank is not None else f"the agent of {seen.node}"
    return Fault(kind=TAKE_OVER_FAILED.id, at=seen.at, quote=f"{who} cannot take part: {seen.why}"[:500], signature=TAKE_OVER_FAILED.id)
