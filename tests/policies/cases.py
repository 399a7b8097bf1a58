"""Cases with what a test does not care about filled in."""

from __future__ import annotations

from typing import Any

from holdfast.detectors.catalogue import Fault
from holdfast.detectors.diagnosis import Diagnosis
from holdfast.policies.recovery.escalation import POLICIES, Case, Decision, PastRecovery, RecoveryAction, decide

NOW = 10_000.0


def a_diagnosis(kind: str = "worker-sigkill", node: str | None = "a", *beside: tuple[str, str]) -> Diagnosis:
    """Return the diagnosis that *kind* on *node* is the root; *beside* it kinds and nodes of other faults."""
    root = Fault(kind=kind, at=NOW - 1, node=node, quote="what was seen")
    others = tuple(Fault(kind=other, at=NOW, node=where, quote="also seen") for other, where in beside)
    return Diagnosis(root=root, secondary_failures=others, reason=f"{kind} of {root.target}: what was seen")


def a_recovery(
    action: RecoveryAction = RecoveryAction.RESTART_WORKERS, node: str | None = "a", at: float = NOW - 60, *, made_progress: bool = True
) -> PastRecovery:
    """Return an earlier recovery."""
    return PastRecovery(at=at, action=action, node=node, made_progress=made_progress)


def a_case(kind: str = "worker-sigkill", node: str | None = "a", *beside: tuple[str, str], **facts: Any) -> Case:
    """Return a case of three nodes, all of which the job needs, without spares."""
    if "lost" in facts:
        facts["lost"] = frozenset(facts["lost"])
    return Case(**{"now": NOW, "diagnosis": a_diagnosis(kind, node, *beside), "members": ("a", "b", "c"), "least": 3, **facts})


def decided(policy: str, case: Case) -> Decision:
    """Return what *policy* decides."""
    return decide(POLICIES[policy], case).decision
