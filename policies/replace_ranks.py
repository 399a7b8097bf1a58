"""Ranks that live stay in their processes, lost ones go on in standbys or in fresh processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from detectors.associations import belongs, follows_step, is_secondary
from detectors.catalogue import NO_ACTION_NEEDED, Fault, RecommendedAction
from detectors.causes import explained
from detectors.correlation import BLAMED
from detectors.groups import GROUP_BROKEN, TAKE_OVER_FAILED
from detectors.node import AGENT_LOST
from detectors.process import STOPPED
from policies.case import IN_PROCESS, Case, Decision, HotSpare, Pass, Placement, RecoveryAction

OUTSIDE: Final = frozenset({GROUP_BROKEN.id, TAKE_OVER_FAILED.id, STOPPED.id})
"""What is said of a process and is not its own doing."""


def unfit_nodes(case: Case) -> frozenset[str]:
    """Return the nodes that cannot hold ranks now: lost ones, and those that a fault asks to leave."""
    return case.leaving


def unhealthy_ranks(case: Case) -> frozenset[int]:
    """Return the ranks whose processes are lost, or are to be: what ended, stood still, raised, or ran on a node that went away."""
    spared = NO_ACTION_NEEDED if RecoveryAction.RETRY_STEP in case.tried else NO_ACTION_NEEDED | {RecommendedAction.RETRY_STEP}
    faults = [
        fault for fault in (case.diagnosis.root, *case.diagnosis.secondary_failures) if case.recommended_actions.of(fault) not in spared
    ]
    hearsay = {GROUP_BROKEN.id, TAKE_OVER_FAILED.id} | ({BLAMED.id} - {case.diagnosis.root.kind})
    named = {fault.rank for fault in faults if fault.rank is not None and fault.kind not in hearsay and not _follows(fault, case)}
    gone = unfit_nodes(case) | {fault.node for fault in faults if fault.kind == AGENT_LOST.id}
    held = {rank for node in gone if node for rank in case.ranks.get(node, ())}
    return frozenset((named | held | case.dead) & {rank for ranks in case.ranks.values() for rank in ranks})


def failed_by_itself(case: Case) -> frozenset[int]:
    """Return the ranks that the last take-over of this incident brought back, and whose new processes failed for reasons of their own.

    Not those that somebody ended or stopped, that lost a peer or their node, or of which it is only said that they stand still.
    """
    seen = (
        fault
        for fault in (case.diagnosis.root, *case.diagnosis.secondary_failures)
        if fault.rank in case.seated and case.recommended_actions.needs_action(fault)
    )
    return frozenset(fault.rank for fault in seen if fault.rank is not None and not _from_outside(fault.kind))


def _from_outside(kind: str) -> bool:
    groups = ("ended-from-outside", "node-gone", "stall")
    return kind in OUTSIDE or is_secondary(kind) or any(belongs(kind, group) for group in groups)


def by_itself(case: Case) -> str:
    """Say that the process which took a rank over failed by itself, if one did: another one would meet the same."""
    failed = sorted(failed_by_itself(case))
    return f"the new process of rank(s) {', '.join(map(str, failed))} failed for a reason of its own: another would, too" if failed else ""


def _follows(fault: Fault, case: Case) -> bool:
    """Tell whether *fault* is a standstill that follows from the root: the rank that was suspected first waits like all others."""
    root = case.diagnosis.root
    return fault is not root and belongs(fault.kind, "stall") and explained(root, fault) > 0


def places(case: Case, unhealthy: frozenset[int]) -> tuple[tuple[Placement, ...], frozenset[int]]:
    """Find a place for every unhealthy rank: a standby, in its role if there is one, else a fresh process on its own node.

    Ranks whose nodes are gone have the first choice: for them there is nothing but standbys, and spare nodes. Return the places, and the
    ranks for which there is none.
    """
    gone, home = unfit_nodes(case), {rank: node for node, ranks in case.ranks.items() for rank in ranks}
    ready = [one for one in case.standbys if one.node not in gone]
    spares = [node for node in case.spares if node not in gone]
    width = max((len(ranks) for ranks in case.ranks.values()), default=1)
    found, homeless = list[Placement](), set[int]()
    placed = Counter(node for rank, node in home.items() if rank not in unhealthy)
    for rank in sorted(unhealthy, key=lambda rank: (home[rank] not in gone, rank)):
        best = min(ready, key=lambda one: _distance(case, rank, home[rank], one), default=None)
        if best is not None:
            ready.remove(best)
            found.append(Placement(rank=rank, node=best.node, standby=best.id))
            continue
        node = home[rank] if home[rank] not in gone else min((n for n in spares if placed[n] < width), key=placed.__getitem__, default=None)
        if node is None:
            homeless.add(rank)
            continue
        placed[node] += 1
        found.append(Placement(rank=rank, node=node))
    return tuple(sorted(found, key=lambda seat: seat.rank)), frozenset(homeless)


def _distance(case: Case, rank: int, home: str, standby: HotSpare) -> tuple[bool, bool, int]:
    """Return how badly *standby* suits *rank*: another role costs a warm-up; what may follow the step has to move."""
    role = next((number for number, ranks in enumerate(case.roles) if rank in ranks), None)
    follows = follows_step(case.diagnosis.root.kind)
    return role is not None and standby.role is not None and standby.role != role, (standby.node == home) is follows, standby.id


def _told(found: tuple[Placement, ...]) -> str:
    if not found:
        return "no rank is lost: the groups are built anew"
    return "; ".join(f"rank {seat.rank} goes on in {describe(seat)}" for seat in found)


def follows_last(case: Case, action: RecoveryAction) -> bool:
    """Tell whether the last recovery was by *action*, brought no new step, and this failure may be the script's own."""
    return follows_step(case.diagnosis.root.kind) and bool(case.past) and case.past[-1].action is action and not case.past[-1].made_progress


def first_true(reasons: Mapping[str, bool]) -> str:
    """Return the first of *reasons* that holds; empty when none does."""
    return next((why for why, true in reasons.items() if true), "")


def describe(seat: Placement) -> str:
    """Say what process a rank goes on in."""
    return f"standby {seat.standby} on {seat.node}" if seat.standby is not None else f"a fresh process on {seat.node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceRanks:
    """Let the ranks that live stay in their processes, and give the lost ones to standbys or fresh processes."""

    most: int = 5
    """Take-overs in one incident: more are no recovery."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer when it is known who is unhealthy, somebody lives, and every unhealthy rank finds a place."""
        unhealthy = unhealthy_ranks(case)
        why = self._why_not(case, unhealthy)
        if why:
            return Pass(why)
        found, homeless = places(case, unhealthy)
        if homeless:
            return Pass(f"no standby for rank(s) {', '.join(map(str, sorted(homeless)))}, and no spare node for a fresh process")
        gone = unfit_nodes(case)
        others = sum(map(len, case.ranks.values())) - len(unhealthy)
        stay = "the other one stays in its process" if others == 1 else f"the other {others} stay in their processes"
        reason = f"{case.reason}; {_told(found)}, {stay}"
        return Decision(
            action=RecoveryAction.TAKE_OVER, reason=reason, drop=tuple(node for node in case.ranks if node in gone), seats=found
        )

    def _why_not(self, case: Case, unhealthy: frozenset[int]) -> str:
        root, ranks, own = case.diagnosis.root, sum(map(len, case.ranks.values())), by_itself(case)
        reasons = {
            case.blocked_reason: bool(case.blocked_reason),
            f"{case.replacement_attempts} take-overs were begun in this incident already": case.replacement_attempts >= self.most,
            own: bool(own),
            "tried already in this incident": not unhealthy and not IN_PROCESS.isdisjoint(case.tried),
            "the faults do not name a rank that is unhealthy": not unhealthy and root.kind != GROUP_BROKEN.id,
            "no rank is left whose state could be gone on with": len(unhealthy) >= ranks,
            "the last take-over brought no new step before this failure: it may follow the step": follows_last(
                case, RecoveryAction.TAKE_OVER
            ),
        }
        return first_true(reasons)
