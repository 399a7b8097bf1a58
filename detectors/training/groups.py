"""Faults that live workers report: a broken process group, a generation that they cannot join."""

from __future__ import annotations

from typing import Final

from holdfast.detectors.catalogue import Attribution, Fault, RecommendedAction, fault_kind
from holdfast.detectors.evidence import GroupFailure, HangLimits, ReplaceRanksFailure, Sample
from holdfast.detectors.training.exceptions import FINISHED

GROUP_BROKEN: Final = fault_kind(
    id="group-broken",
    title="A process group failed while its ranks run, or before another sign of the lost rank",
    component="communication",
    source="worker's report",
    recommended_action=RecommendedAction.RETRY_STEP,
    attributed_to=Attribution.NETWORK,
    action="rebuild the groups between live ranks and retry the step; replace lost ranks",
    reference="https://docs.pytorch.org/docs/stable/distributed.html",
    unhealthy=Sample(GroupFailure(node="n0", rank=0, at=0.0, why="Connection closed by peer", group="0", step=7)),
    healthy=FINISHED,
    weight=6,
)
REPLACE_RANKS_FAILED: Final = fault_kind(
    id="replace-ranks-failed",
    title="A rank or an agent cannot take part in the replacement of ranks",
    component="job",
    source="worker's report, agent's answer",
    recommended_action=RecommendedAction.RESTART,
    attributed_to=Attribution.NONE,
    action="the next action is tried at once",
    unhealthy=Sample(ReplaceRanksFailure(node="n0", rank=0, at=0.0, why="no rank holds a complete copy of the state")),
    healthy=FINISHED,
    weight=15,
)


def see_group_failure(seen: GroupFailure, _limits: HangLimits) -> Fault:
    """Report a broken process group; the cause needs other evidence."""
    quote = f"process group {seen.group or '?'} failed: {seen.why}"[:500]
    return Fault(kind=GROUP_BROKEN.id, at=seen.at, node=seen.node, rank=seen.rank, step=seen.step, quote=quote, signature=GROUP_BROKEN.id)


def see_replace_ranks_failure(seen: ReplaceRanksFailure, _limits: HangLimits) -> Fault:
    """Report a failed replacement of ranks. It counts against no node, as the fault behind it is already diagnosed."""
    who = f"rank {seen.rank} on {seen.node}" if seen.rank is not None else f"the agent of {seen.node}"
    return Fault(
        kind=REPLACE_RANKS_FAILED.id, at=seen.at, quote=f"{who} cannot take part: {seen.why}"[:500], signature=REPLACE_RANKS_FAILED.id
    )
