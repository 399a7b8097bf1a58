"""What the past says of a fault: it came on too many nodes to be one's, or too often on one. These rules note it and decide nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from detectors.associations import belongs, is_secondary
from detectors.catalogue import Blame, Fault, RecommendedAction
from policies.case import Case, Noted, Pass, PastFault

OFF: Final = "switched off"
PARTS: Final = frozenset({Blame.GPU, Blame.NODE, Blame.NETWORK, Blame.STORAGE})
"""What a node is made of, or hangs on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcuseWhenCorrelated:
    """Hold a fault against no node when the same kind came on many within a short time: it is the software's, or something's they share.

    Nodes fail each by itself. At one fault in 6,300 node-hours (`policies.checkpoint_interval.PUBLISHED`) three of 1,000 nodes have
    faults of any kind within ten minutes once in two years, while a broken script has them all fail the same way.
    """

    nodes: int = 3
    """Different nodes from which on no node is blamed; 0: never."""
    share: float = 0.0
    """The same as a share of the job's nodes (0 to 1), two of them at least; 0: the number above alone decides."""
    window: float = 600.0
    """Seconds."""

    def __call__(self, case: Case) -> Noted | Pass:
        """Note the kinds that came on many nodes; a node that is lost stays lost."""
        if not self.nodes and not self.share:
            return Pass(OFF)
        seen = [
            fault for fault in (case.diagnosis.root, *case.diagnosis.secondary_failures) if case.recommended_actions.needs_action(fault)
        ]
        kinds = dict.fromkeys(fault.kind for fault in seen if not is_secondary(fault.kind) and not belongs(fault.kind, "node-gone"))
        found = {kind: nodes for kind in kinds if len(nodes := self._nodes(kind, case)) >= self._least(len(case.members))}
        if not found:
            root, least = case.diagnosis.root.kind, self._least(len(case.members))
            return Pass(f"{root} came on {len(self._nodes(root, case))} node(s) within {self.window:.0f} s, not on {least}")
        why = "; ".join(
            f"{kind} came on {len(nodes)} nodes ({', '.join(sorted(nodes))}) within {self.window:.0f} s: held against none of them"
            for kind, nodes in found.items()
        )
        return Noted(why, replace(case, common=case.common | found.keys(), notes=(*case.notes, why)))

    def _nodes(self, kind: str, case: Case) -> set[str]:
        now = {fault.node for fault in (case.diagnosis.root, *case.diagnosis.secondary_failures) if fault.kind == kind and fault.node}
        return now | {one.node for one in case.earlier if one.kind == kind and case.now - one.at < self.window}

    def _least(self, members: int) -> int:
        """Return from how many nodes on a fault of *members* is common."""
        by_share = max(2, -(-members * self.share // 1)) if self.share else 0
        return int(min(one for one in (self.nodes, by_share) if one))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveWhenRecurring:
    """Have a node leave, while there are spares, that had the same fault too often, though it might be restarted in place.

    What ends processes has the budget of restarts in place against it already, and tells of the script as well as of the node: it is
    counted here only where somebody says so.
    """

    times: int = 4
    """Incidents of one kind on one node (and one device of it, where that is known), the present one included; 0: never."""
    processes: int = 0
    """The same for kinds that speak against processes, or against nobody; 0: never."""
    window: float = 86_400.0
    """Seconds."""

    def __call__(self, case: Case) -> Noted | Pass:
        """Note the node of the root fault."""
        root = case.diagnosis.root
        times = self.times if root.entry.blame in PARTS else self.processes
        if why := _not_its_own(case, root) or ("" if times else f"{root.kind} is not counted"):
            return Pass(why)
        before = {one.incident for one in _alike(case, root) if one.root and case.now - one.at < self.window}
        said = f"{root.kind} for time {len(before) + 1} within {self.window:.0f} s on {_place(root)}"
        if len(before) + 1 < times:
            return Pass(f"{said}, of {times}")
        return _worn(case, root, said)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveWhenFlapping:
    """Have a node leave, while there are spares, on which a fault of its parts comes and goes: also where training went on each time."""

    times: int = 5
    """Comings of one kind on one node (and one device of it, where that is known), the present one included; 0: never."""
    window: float = 600.0
    """Seconds."""
    apart: float = 5.0
    """Seconds from one coming to the next; what is told sooner is the same one."""

    def __call__(self, case: Case) -> Noted | Pass:
        """Note the node of any fault that speaks against one, watched ones included."""
        if not self.times:
            return Pass(OFF)
        most, why = 0, "nothing speaks against the parts of a node"
        for fault in case.against_nodes():
            if (
                _not_its_own(case, fault)
                or fault.entry.blame not in PARTS
                or case.recommended_actions.of(fault) is RecommendedAction.RECORD
            ):
                continue
            comings = self._comings([one.at for one in _alike(case, fault) if 0 <= case.now - one.at < self.window], fault.at)
            said = f"{fault.kind} came {comings} time(s) within {self.window:.0f} s on {_place(fault)}"
            if comings >= self.times:
                return _worn(case, fault, said)
            if comings > most:
                most, why = comings, f"{said}, of {self.times}"
        return Pass(why)

    def _comings(self, before: Iterable[float], now: float) -> int:
        count, last = 0, float("-inf")
        for at in sorted((*before, now)):
            if at - last >= self.apart:
                count += 1
            last = at
        return count


def _not_its_own(case: Case, fault: Fault) -> str:
    """Return why *fault* is not counted against the node that it was seen on; empty when it is."""
    if fault.node not in case.members:
        return "the fault names no node of the job"
    if fault.kind in case.common:
        return "it came on many nodes"
    if is_secondary(fault.kind):
        return "an error that only tells of a lost peer blames nobody"
    return "the script is at fault" if case.recommended_actions.of(fault) is RecommendedAction.USER_ERROR else ""


def _alike(case: Case, fault: Fault) -> list[PastFault]:
    """Return the times that *fault* came before: same kind, same node, and same device where both are known."""
    return [
        one
        for one in case.earlier
        if (one.kind, one.node) == (fault.kind, fault.node) and (not one.device or not fault.device or one.device == fault.device)
    ]


def _place(fault: Fault) -> str:
    return f"{fault.node} ({fault.device})" if fault.device else f"{fault.node}"


def _worn(case: Case, fault: Fault, said: str) -> Noted | Pass:
    if not case.spares:
        return Pass(f"{said}: too often, but no spare is there to take its place")
    assert fault.node is not None
    why = f"{said}: too often, the node leaves"
    return Noted(why, replace(case, worn=case.worn | {fault.node}, notes=(*case.notes, why)))
