"""Rules about past faults: correlated across nodes, recurring or flapping on one node. They add remarks to the case and decide nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from holdfast.detectors.associations import belongs, is_secondary
from holdfast.detectors.catalogue import HARDWARE_OF_NODE, TAKES_NODE_OUT, Attribution, Fault, RecommendedAction
from holdfast.plurals import plural
from holdfast.policies.recovery.case import Case, Noted, Pass, PastFault

OFF: Final = "switched off"
PARTS: Final = frozenset({Attribution.GPU, Attribution.NODE, Attribution.NETWORK, Attribution.STORAGE})
"""Attributions to a node's own parts, or to what it is connected to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcuseWhenCorrelated:
    """Attribute a fault to no node if the same kind came on many within a short time: software, or something shared, is the cause.

    Nodes fail independently. At one fault in 6,300 node-hours (`checkpoint_interval.PUBLISHED`) three of 1,000 nodes have faults
    of any kind within ten minutes once in two years, while a broken script makes all of them fail the same way.
    On large clusters hardware breaks in bursts nevertheless (power, cooling, a bad batch). A fault of a node's own hardware that takes it
    out therefore counts against each of a few nodes of many: their ranks would fail there again. It is excused where it came on most of
    the job's nodes.
    """

    min_nodes: int = 3
    """Number of nodes with the fault that makes it correlated; 0: never."""
    min_share: float = 0.0
    """The same as a share of the job's nodes (0 to 1), at least two; 0: only the number counts."""
    window: float = 600.0
    """Seconds."""
    hardware_share: float = 0.5
    """Share of the job's nodes that a fault of their own hardware, which takes them out, must exceed; 0: as other faults."""

    def __call__(self, case: Case) -> Noted | Pass:
        """Mark the kinds that came on many nodes; a lost node stays lost."""
        if not self.min_nodes and not self.min_share:
            return Pass(OFF)
        seen = [
            fault for fault in (case.diagnosis.root, *case.diagnosis.secondary_failures) if case.recommended_actions.needs_action(fault)
        ]
        faults = {fault.kind: fault for fault in seen if not is_secondary(fault.kind) and not belongs(fault.kind, "node-gone")}
        found = {kind: nodes for kind, one in faults.items() if len(nodes := self._nodes(kind, case)) >= self._least(case, one)}
        if not found:
            root = case.diagnosis.root
            nodes, least = self._nodes(root.kind, case), self._least(case, root)
            return Pass(f"{root.kind} came on {plural(len(nodes), 'node')} within {self.window:.0f} s, not on {least}")
        why = "; ".join(
            f"{kind} came on {len(nodes)} nodes ({', '.join(sorted(nodes))}) within {self.window:.0f} s: attributed to none of them"
            for kind, nodes in found.items()
        )
        return Noted(why, replace(case, correlated=case.correlated | found.keys(), notes=(*case.notes, why)))

    def _nodes(self, kind: str, case: Case) -> set[str]:
        now = {fault.node for fault in (case.diagnosis.root, *case.diagnosis.secondary_failures) if fault.kind == kind and fault.node}
        return now | {one.node for one in case.earlier if one.kind == kind and case.now - one.at < self.window}

    def _least(self, case: Case, fault: Fault) -> int:
        """Return the number of nodes that makes *fault* correlated."""
        members = len(case.members)
        by_share = max(2, -(-members * self.min_share // 1)) if self.min_share else 0
        least = int(min(one for one in (self.min_nodes, by_share) if one))
        is_broken = fault.entry.attributed_to in HARDWARE_OF_NODE and case.recommended_actions.of(fault) in TAKES_NODE_OUT
        return max(least, int(members * self.hardware_share) + 1) if is_broken and self.hardware_share else least


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveWhenRecurring:
    """Replace a node that had the same fault too often, while there are spares, although its workers could be restarted.

    Faults of processes are limited by the budget of restarts already, and may be the script's: they are counted here only if configured.
    """

    times: int = 4
    """Incidents of one kind on one node (and one device of it, if known), the present one included; 0: never."""
    process_times: int = 0
    """The same for kinds attributed to processes, or to nothing; 0: never."""
    window: float = 86_400.0
    """Seconds."""

    def __call__(self, case: Case) -> Noted | Pass:
        """Mark the node of the root fault."""
        root = case.diagnosis.root
        times = self.times if root.entry.attributed_to in PARTS else self.process_times
        if why := _not_its_own(case, root) or ("" if times else f"{root.kind} is not counted"):
            return Pass(why)
        before = {one.incident for one in _past(case, root) if one.root and case.now - one.at < self.window}
        said = f"{root.kind} for time {len(before) + 1} within {self.window:.0f} s on {_where(root)}"
        if len(before) + 1 < times:
            return Pass(f"{said}, of {times}")
        return _mark(case, root, said)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveWhenFlapping:
    """Replace a node on which a fault of its parts comes and goes, while there are spares, even if training continued each time."""

    times: int = 5
    """Occurrences of one kind on one node (and one device of it, if known), the present one included; 0: never."""
    window: float = 600.0
    """Seconds."""
    min_gap: float = 5.0
    """Minimum seconds between two occurrences; reports closer together are one."""

    def __call__(self, case: Case) -> Noted | Pass:
        """Mark the node of any fault attributed to one, also of faults that are only monitored."""
        if not self.times:
            return Pass(OFF)
        most, why = 0, "no fault is attributed to the parts of a node"
        for fault in case.against_nodes():
            if (
                _not_its_own(case, fault)
                or fault.entry.attributed_to not in PARTS
                or case.recommended_actions.of(fault) is RecommendedAction.RECORD
            ):
                continue
            occurrences = self._occurrences([one.at for one in _past(case, fault) if 0 <= case.now - one.at < self.window], fault.at)
            said = f"{fault.kind} came {plural(occurrences, 'time')} within {self.window:.0f} s on {_where(fault)}"
            if occurrences >= self.times:
                return _mark(case, fault, said)
            if occurrences > most:
                most, why = occurrences, f"{said}, of {self.times}"
        return Pass(why)

    def _occurrences(self, before: Iterable[float], now: float) -> int:
        count, last = 0, float("-inf")
        for at in sorted((*before, now)):
            if at - last >= self.min_gap:
                count += 1
            last = at
        return count


def _not_its_own(case: Case, fault: Fault) -> str:
    """Return why *fault* does not count against its node; empty if it does."""
    if fault.node not in case.members:
        return "the fault names no node of the job"
    if fault.kind in case.correlated:
        return "it came on many nodes"
    if is_secondary(fault.kind):
        return "a secondary failure does not show which node is at fault"
    return "the script is at fault" if case.recommended_actions.of(fault) is RecommendedAction.USER_ERROR else ""


def _past(case: Case, fault: Fault) -> list[PastFault]:
    """Return past occurrences of *fault*: same kind and node, and same device if both are known."""
    return [
        one
        for one in case.earlier
        if (one.kind, one.node) == (fault.kind, fault.node) and (not one.device or not fault.device or one.device == fault.device)
    ]


def _where(fault: Fault) -> str:
    return f"{fault.node} ({fault.device})" if fault.device else f"{fault.node}"


def _mark(case: Case, fault: Fault, said: str) -> Noted | Pass:
    if not case.spares:
        return Pass(f"{said}: too often, but there is no spare to replace the node")
    assert fault.node is not None
    why = f"{said}: too often, the node is replaced"
    return Noted(why, replace(case, worn=case.worn | {fault.node}, notes=(*case.notes, why)))
