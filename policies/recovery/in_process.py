"""Recovery rules that keep live ranks in their processes: retry the step, replace lost ranks, continue with fewer model copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from holdfast.detectors.associations import belongs, follows_step, is_secondary
from holdfast.detectors.catalogue import NO_ACTION_NEEDED, Fault, RecommendedAction
from holdfast.detectors.causes import explained
from holdfast.detectors.correlation import BLAMED
from holdfast.detectors.nodes.node import AGENT_LOST
from holdfast.detectors.training.groups import GROUP_BROKEN, REPLACE_RANKS_FAILED
from holdfast.detectors.training.process import STOPPED
from holdfast.plurals import named_ranks, plural
from holdfast.policies.recovery.case import IN_PROCESS, Case, Decision, HotSpare, ModelCopies, Pass, Placement, RecoveryAction
from holdfast.policies.recovery.rank_map import in_order

EXTERNAL: Final = frozenset({GROUP_BROKEN.id, REPLACE_RANKS_FAILED.id, STOPPED.id})
"""Kinds that are reported about a process and are not its own fault."""
SEVERITY: Final = tuple(RecommendedAction)
"""Recommended actions, the least severe first."""
MIN_GAIN: Final = 2.0
"""A restart on more nodes must save at least this many times its own cost over the remaining steps."""
HORIZON: Final = 3600.0
"""Seconds of training to consider if the number of remaining steps is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryStep:
    """Keep all ranks in their processes, rebuild their process groups, and repeat the open step."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Apply to a fault that needs no more than that, if no rank is lost and no node has to be removed."""
        unhealthy, severity = unhealthy_ranks(case), self._recommended(case)
        no_gain = bool(case.past) and case.past[-1].action is RecoveryAction.RETRY_STEP and not case.past[-1].made_progress
        obstacle = _first_true(
            {
                case.blocked_reason: bool(case.blocked_reason),
                f"the fault asks for {severity}": severity is not RecommendedAction.RETRY_STEP,
                "tried already in this incident": RecoveryAction.RETRY_STEP in case.tried,
                f"{', '.join(case.unfit)} cannot hold ranks": bool(case.unfit),
                f"{named_ranks(unhealthy)} must be replaced": bool(unhealthy),
                "the last retry brought no new step": no_gain,
            }
        )
        if obstacle:
            return Pass(obstacle)
        reason = (
            f"{case.reason}; no rank is lost: all {case.rank_map.total} stay in their processes, rebuild their groups and repeat the step"
        )
        return Decision(action=RecoveryAction.RETRY_STEP, reason=reason)

    def _recommended(self, case: Case) -> RecommendedAction:
        """Return the action recommended for the root cause; if that needs none, the most severe one for its secondary failures."""
        root, actions = case.recommended_actions.of(case.diagnosis.root), case.recommended_actions
        others = [actions.of(fault) for fault in case.diagnosis.secondary_failures if actions.needs_action(fault)]
        return max(others, key=SEVERITY.index, default=root) if root in NO_ACTION_NEEDED else root


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceRanks:
    """Keep live ranks in their processes, and continue the lost ones in hot spares or new processes."""

    most: int = 5
    """Attempts in one incident."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Apply if the lost ranks are known, some rank is alive, and there is a place for every lost one."""
        unhealthy, ranks = unhealthy_ranks(case), case.rank_map.total
        own = failed_again(case)
        obstacle = _first_true(
            {
                case.blocked_reason: bool(case.blocked_reason),
                f"{case.replacement_attempts} attempts to replace ranks were made in this incident": case.replacement_attempts >= self.most,
                own: bool(own),
                "tried already in this incident": not unhealthy and not IN_PROCESS.isdisjoint(case.tried),
                "the faults do not name a rank that is unhealthy": not unhealthy and case.diagnosis.root.kind != GROUP_BROKEN.id,
                "no rank with a usable state is left": len(unhealthy) >= ranks,
                "the last replacement brought no new step before this failure: it may follow the step": may_follow_step(
                    case, RecoveryAction.REPLACE_RANKS
                ),
            }
        )
        if obstacle:
            return Pass(obstacle)
        found, unplaced = find_places(case, unhealthy)
        if unplaced:
            return Pass(f"no hot spare for {named_ranks(unplaced)}, and no spare node for a new process")
        others = ranks - len(unhealthy)
        stay = "the other one stays in its process" if others == 1 else f"the other {others} stay in their processes"
        moves = "; ".join(map(_continues, found)) or "no rank is lost: the groups are rebuilt"
        drop = in_order(case.leaving, case.ranks)
        return Decision(action=RecoveryAction.REPLACE_RANKS, reason=f"{case.reason}; {moves}, {stay}", drop=drop, seats=found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkLive:
    """Keep live ranks in their processes, and continue with the model copies that are complete; each step keeps its samples."""

    most: int = 5
    """Recoveries in live processes in one incident."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Apply if lost ranks have no place, a complete copy of the model is left, and the job may run on so few nodes."""
        unhealthy, own = unhealthy_ranks(case), failed_again(case)
        obstacle = _first_true(
            {
                case.blocked_reason: bool(case.blocked_reason),
                own: bool(own),
                "the script does not split each step's batch (`session.micro_batches`): fewer ranks would see fewer samples": (
                    not case.copies
                ),
                f"{case.replacement_attempts} recoveries in live processes were tried in this incident": case.replacement_attempts
                >= self.most,
                "tried already in this incident": case.failed(RecoveryAction.SHRINK_LIVE),
                "the faults do not name a rank that is unhealthy": not unhealthy,
                "the last one brought no new step before this failure: it may follow the step": may_follow_step(
                    case, RecoveryAction.SHRINK_LIVE
                ),
            }
        )
        if obstacle:
            return Pass(obstacle)
        found, unplaced = find_places(case, unhealthy)
        if not unplaced:
            return Pass("every lost rank has a place")
        copies = complete_copies(case.copies, unplaced)
        staying = {rank for one in copies for rank in one}
        if unhealthy >= staying:
            return Pass(f"without {named_ranks(unplaced)} no copy of the model is complete")
        seats = tuple(seat for seat in found if seat.rank in staying)
        kept = staying - {seat.rank for seat in seats}
        nodes = {node for node, ranks in case.ranks.items() if not kept.isdisjoint(ranks)} | {seat.node for seat in seats}
        if len(nodes) < max(1, case.least):
            return Pass(f"{plural(len(nodes), 'node')} left, the job needs {case.least}")
        texts = [
            case.reason,
            f"no place for {named_ranks(unplaced)}",
            *map(_continues, seats),
            f"continue with {len(copies)} of {len(case.copies)} copies of the model, which split the same samples in each step",
        ]
        return Decision(
            action=RecoveryAction.SHRINK_LIVE,
            reason="; ".join(texts),
            drop=in_order(case.leaving, case.ranks),
            seats=seats,
            vacate=tuple(sorted(case.rank_map.ranks() - staying)),
        )


def unhealthy_ranks(case: Case) -> frozenset[int]:
    """Return the ranks whose processes are lost or must be replaced: they exited, stalled, raised, or their node is removed."""
    spared = NO_ACTION_NEEDED if RecoveryAction.RETRY_STEP in case.tried else NO_ACTION_NEEDED | {RecommendedAction.RETRY_STEP}
    root = case.diagnosis.root
    faults = [fault for fault in (root, *case.diagnosis.secondary_failures) if case.recommended_actions.of(fault) not in spared]
    reported_by_others = {GROUP_BROKEN.id, REPLACE_RANKS_FAILED.id} | ({BLAMED.id} - {root.kind})
    named = {
        fault.rank
        for fault in faults
        if fault.rank is not None and fault.kind not in reported_by_others and not _is_stalled_by_root(fault, root)
    }
    nodes = case.leaving | {fault.node for fault in faults if fault.kind == AGENT_LOST.id}
    on_nodes = {rank for node in nodes if node for rank in case.ranks.get(node, ())}
    known = case.rank_map.ranks()
    return frozenset(rank for rank in named | on_nodes | case.dead if rank in known)


def _is_stalled_by_root(fault: Fault, root: Fault) -> bool:
    """Return whether *fault* is a stall that the root cause explains: the rank that was suspected first waits like all others."""
    return fault is not root and belongs(fault.kind, "stall") and explained(root, fault) > 0


def failed_again(case: Case) -> str:
    """Return why replaced ranks must not be replaced again: their new processes failed by themselves; empty if they did not.

    A process that was killed or stopped, lost a peer or its node, or is only reported as stalled, has not failed by itself.
    """
    seen = (fault for fault in (case.diagnosis.root, *case.diagnosis.secondary_failures) if fault.rank in case.seated)
    failed = {fault.rank for fault in seen if fault.rank is not None and case.recommended_actions.needs_action(fault) and _is_own(fault)}
    if not failed:
        return ""
    if len(failed) == 1:
        return f"the new process of {named_ranks(failed)} failed by itself: another one would, too"
    return f"the new processes of {named_ranks(failed)} failed by themselves: others would, too"


def _is_own(fault: Fault) -> bool:
    if fault.kind in EXTERNAL or is_secondary(fault.kind):
        return False
    return not any(belongs(fault.kind, group) for group in ("ended-from-outside", "node-gone", "stall"))


def may_follow_step(case: Case, action: RecoveryAction) -> bool:
    """Return whether the last recovery was *action* without a new step, and the failure may be the script's own."""
    last = case.past[-1] if case.past else None
    return follows_step(case.diagnosis.root.kind) and last is not None and last.action is action and not last.made_progress


def find_places(case: Case, unhealthy: frozenset[int]) -> tuple[tuple[Placement, ...], frozenset[int]]:
    """Return a place for each unhealthy rank, and the ranks without one.

    A rank goes to a hot spare, if possible of its role, else to a new process on its own node or on a spare node. Ranks of removed nodes
    choose first, as they cannot stay on their node.
    """
    removed, ranks = case.leaving, case.rank_map
    home = {rank: node for rank in unhealthy if (node := ranks.node_of(rank)) is not None}
    ready = [one for one in case.hot_spares if one.node not in removed]
    spares = [node for node in case.spares if node not in removed]
    found, unplaced = list[Placement](), set[int]()
    load = Counter[str]()

    def loaded(node: str) -> int:
        return load[node] + sum(rank not in unhealthy for rank in ranks.get(node, ()))

    for rank in sorted(unhealthy, key=lambda rank: (home[rank] not in removed, rank)):
        best = min(ready, key=lambda one: _mismatch(case, rank, home[rank], one), default=None)
        if best is not None:
            ready.remove(best)
            found.append(Placement(rank=rank, node=best.node, hot_spare=best.id))
            continue
        free = (node for node in spares if loaded(node) < ranks.most)
        node = home[rank] if home[rank] not in removed else min(free, key=loaded, default=None)
        if node is None:
            unplaced.add(rank)
            continue
        load[node] += 1
        found.append(Placement(rank=rank, node=node))
    return tuple(sorted(found, key=lambda seat: seat.rank)), frozenset(unplaced)


def _mismatch(case: Case, rank: int, home: str, spare: HotSpare) -> tuple[bool, bool, int]:
    """Rate how badly *spare* suits *rank*: another role costs a warm-up; a failure that may follow the step needs another node."""
    role = next((number for number, ranks in enumerate(case.roles) if rank in ranks), None)
    other_role = role is not None and spare.role is not None and spare.role != role
    return other_role, (spare.node == home) is follows_step(case.diagnosis.root.kind), spare.id


def complete_copies(copies: ModelCopies, vacant: AbstractSet[int]) -> ModelCopies:
    """Return the *copies* of the model without a *vacant* rank."""
    return tuple(one for one in copies if vacant.isdisjoint(one))


def placements_to_grow(copies: ModelCopies, present: AbstractSet[int], room: Mapping[str, int]) -> dict[int, str]:
    """Return nodes for missing ranks, in complete copies of the model; *room* is the number of further ranks that each node can take.

    Copies with the fewest missing ranks come first. Nodes with the most room are filled first, so that a copy is on few nodes.
    """
    room, found = dict(room), dict[int, str]()
    for copy in sorted(copies, key=lambda ranks: (len(set(ranks) - present), ranks)):
        missing = sorted(set(copy) - present)
        if len(missing) > sum(room.values()):
            continue
        for rank in missing:
            found[rank] = max(room, key=room.__getitem__)
            room[found[rank]] -= 1
    return found


def restart_pays_off(*, left: float | None, cost: float, held: int, coming: int) -> bool:
    """Return whether to restart all ranks to grow from *held* nodes by *coming* ones.

    *left*: seconds that the remaining steps take on the present nodes; None: unknown. *cost*: seconds of a restart and of the steps that it
    throws away.
    """
    return (HORIZON if left is None else left) * coming / (held + coming) >= MIN_GAIN * cost


def _first_true(reasons: Mapping[str, bool]) -> str:
    """Return the first of *reasons* that is true; empty if none is."""
    return next((reason for reason, is_true in reasons.items() if is_true), "")


def _continues(seat: Placement) -> str:
    where = f"hot spare {seat.hot_spare} on {seat.node}" if seat.hot_spare is not None else f"a new process on {seat.node}"
    return f"rank {seat.rank} continues in {where}"
