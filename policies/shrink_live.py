"""Fewer copies of the model: who lives goes on in its process, who finds no place is left out, and each step keeps its samples."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from policies.case import Case, Decision, ModelCopies, Pass, Placement, RecoveryAction
from policies.replace_ranks import by_itself, describe, first_true, follows_last, places, unfit_nodes, unhealthy_ranks

WORTH: Final = 2.0
"""So many times what a start costs the wider job has to save at least, over the steps that are left."""
HORIZON: Final = 3600.0
"""Seconds that are looked ahead where nobody knows how many steps are left."""


def complete_copies(copies: ModelCopies, vacant: AbstractSet[int]) -> ModelCopies:
    """Return the *copies* of the model, each of the ranks that hold it together, of which no rank is *vacant*."""
    return tuple(one for one in copies if vacant.isdisjoint(one))


def placements_to_grow(copies: ModelCopies, present: AbstractSet[int], room: Mapping[str, int]) -> dict[int, str]:
    """Return where ranks that are not *present* can go on, *room* being how many more each node could hold: as whole copies of the model.

    A copy that lacks fewest ranks comes first; nodes with most room are filled first, so that a copy is spread over few of them.
    """
    left, found = dict(room), dict[int, str]()
    for copy in sorted(copies, key=lambda ranks: (len(set(ranks) - present), ranks)):
        missing = sorted(set(copy) - present)
        if len(missing) > sum(left.values()):
            continue
        for rank in missing:
            node = max(left, key=lambda node: left[node])
            left[node] -= 1
            found[rank] = node
    return found


def restart_pays_off(*, left: float | None, cost: float, held: int, coming: int) -> bool:
    """Tell whether all ranks should start again to be more: on *held* nodes and as many *coming*.

    *left*: seconds that the steps take that are left, as the job is; where nobody knows, an hour's. *cost*: what a start takes, and the
    steps that it throws away.
    """
    return (HORIZON if left is None else left) * coming / (held + coming) >= WORTH * cost


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkLive:
    """Let the ranks that live stay in their processes, and go on without the copies of the model that are not whole any more."""

    most: int = 5
    """Recoveries in processes that live, in one incident: more are no recovery."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer when ranks find no place, a whole copy of the model is left, and the job allows so few nodes."""
        unhealthy = unhealthy_ranks(case)
        why = self._why_not(case, unhealthy)
        if why:
            return Pass(why)
        found, homeless = places(case, unhealthy)
        if not homeless:
            return Pass("every rank that is lost finds a place")
        left = complete_copies(case.copies, homeless)
        if not left or unhealthy >= {rank for one in left for rank in one}:
            return Pass(f"without rank(s) {_named(homeless)} no copy of the model is whole")
        staying = {rank for one in left for rank in one}
        seats = tuple(seat for seat in found if seat.rank in staying)
        nodes = _nodes(case, staying, seats)
        if len(nodes) < max(1, case.least):
            return Pass(f"{len(nodes)} node(s) left, the job needs {case.least}")
        return Decision(
            action=RecoveryAction.NARROW,
            reason=self._reason(case, frozenset(homeless), left, seats),
            drop=tuple(node for node in case.ranks if node in unfit_nodes(case)),
            seats=seats,
            vacate=tuple(sorted({rank for ranks in case.ranks.values() for rank in ranks} - staying)),
        )

    def _reason(self, case: Case, homeless: frozenset[int], left: ModelCopies, seats: tuple[Placement, ...]) -> str:
        said = [
            f"no place for rank(s) {_named(homeless)}",
            *(f"rank {seat.rank} goes on in {describe(seat)}" for seat in seats),
            f"on with {len(left)} of {len(case.copies)} copies of the model, which share out the same samples in each step",
        ]
        return "; ".join([case.reason, *said])

    def _why_not(self, case: Case, unhealthy: frozenset[int]) -> str:
        own = by_itself(case)
        reasons = {
            case.blocked_reason: bool(case.blocked_reason),
            own: bool(own),
            "the script does not share each step's batch out (`session.shares`): fewer ranks would see fewer samples": not case.copies,
            f"{case.replacement_attempts} recoveries in living processes were begun in this incident already": case.replacement_attempts
            >= self.most,
            "tried already in this incident": case.failed(RecoveryAction.NARROW),
            "the faults do not name a rank that is unhealthy": not unhealthy,
            "the last one brought no new step before this failure: it may follow the step": follows_last(case, RecoveryAction.NARROW),
        }
        return first_true(reasons)


def _nodes(case: Case, staying: AbstractSet[int], seats: tuple[Placement, ...]) -> set[str]:
    """Return the nodes that hold ranks then."""
    seated = {seat.rank for seat in seats}
    return {node for node, ranks in case.ranks.items() if any(rank in staying and rank not in seated for rank in ranks)} | {
        seat.node for seat in seats
    }


def _named(ranks: AbstractSet[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
