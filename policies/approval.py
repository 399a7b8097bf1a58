"""The guard on how much a recovery may take out of a job: below its least nodes a person decides."""

from __future__ import annotations

from dataclasses import dataclass

from policies.case import Case, Decision, Pass, RecoveryAction
from policies.node_faults import UNSURE


@dataclass(frozen=True, slots=True, kw_only=True)
class AskAPerson:
    """Ask a person before nodes that still work are isolated and too few are left for the job."""

    def __call__(self, case: Case) -> Decision | Pass:
        """Answer when faults ask for nodes that are not lost, and the job could not train without them."""
        root = case.diagnosis.root
        doubted = {root.node} if root.kind in UNSURE else set()  # it is let go, and not isolated
        asked = tuple(node for node in case.unfit if node not in case.lost | case.approved | case.announced | doubted)
        left = len(case.members) - len(case.unfit) + min(len(case.spares), len(case.unfit))
        if not asked:
            return Pass("no node that still works would be taken out without a person's word")
        if left >= max(1, case.least):
            return Pass(f"{left} node(s) are left, the job needs {case.least}")
        if left + len(asked) < max(1, case.least):
            return Pass(f"{left + len(asked)} node(s) would be left with {', '.join(asked)} too, and the job needs {case.least}")
        if not case.approval_possible:
            return Pass("the cluster's settings ask nobody")
        reason = f"{case.reason}; without {', '.join(asked)} {left} node(s) are left and the job needs {case.least}, so a person is asked"
        return Decision(action=RecoveryAction.ASK_A_PERSON, reason=reason, drop=asked, need=case.least)
