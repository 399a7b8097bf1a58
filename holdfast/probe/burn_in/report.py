"""What a burn-in found, as values for a user's own flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from detectors.burn_in_results import CheckMark
from holdfast.errors import NodesBusy
from holdfast.probe.burn_in.repair import Repair
from policies.cordons import TESTABLE
from policies.node_states import NodeState

BurnInOutcome = Literal["passed", "failed", "skipped"]


class NodeBurnIn(BaseModel):
    """What one node was found to be."""

    model_config = ConfigDict(frozen=True)

    node: str
    outcome: BurnInOutcome
    """`skipped`: not all that is needed could be checked, which does not count as passed."""
    reason: str
    checks: tuple[str, ...]
    """Every check in words, with what it measured."""
    state: str
    """The node's state afterwards: `healthy`, `quarantined`, ..."""


class BurnInReport(BaseModel):
    """One burn-in of some nodes of a cluster."""

    model_config = ConfigDict(frozen=True)

    cluster: str
    nodes: tuple[NodeBurnIn, ...]

    def of(self, outcome: BurnInOutcome) -> list[str]:
        """Return the names of the nodes with that *outcome*."""
        return [one.node for one in self.nodes if one.outcome == outcome]

    @property
    def passed(self) -> bool:
        """Tell whether every node passed."""
        return all(one.outcome == "passed" for one in self.nodes)


def run(repair: Repair, nodes: Sequence[str]) -> BurnInReport:
    """Burn in *nodes*; a node that is in quarantine returns to service if it passes. Raise `NodesBusy` when a job trains on one of them."""
    jobs, known = repair.jobs(), repair.known()
    busy = tuple(f"job '{jobs[node]}' trains on {node}" for node in nodes if node in jobs)
    if busy:
        raise NodesBusy("no burn-in can run now", busy, "Wait until the job has ended, or name other nodes")
    repair.begin([node for node in nodes if known[node].of_kind(*TESTABLE) and known[node].state is not NodeState.RETIRED])
    outcomes = repair.try_out(list(dict.fromkeys(nodes)))
    repair.conclude()
    after = repair.known()
    return BurnInReport(
        cluster=repair.cluster.name,
        nodes=tuple(
            NodeBurnIn(
                node=node,
                outcome=_outcome(found.mark),
                reason=found.reason,
                checks=found.evidence,
                state=str(after[node].state),
            )
            for node, found in outcomes.items()
        ),
    )


def _outcome(mark: CheckMark) -> BurnInOutcome:
    """Return *mark* as users read it; what could not be checked is neither a pass nor a failure."""
    if mark is CheckMark.PASSED:
        return "passed"
    return "failed" if mark is CheckMark.FAILED else "skipped"
