"""Bring nodes back into service: run a burn-in for one cordon of a node, and apply the outcome to that very cordon.

If the node's state changes meanwhile, the outcome is out of date and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict

from holdfast.cluster import check_names, names_of, open_cluster
from holdfast.detectors.nodes.burn_in_results import CheckMark
from holdfast.errors import NodesBusy
from holdfast.history import History, cordons
from holdfast.history.cordons import CordonTable
from holdfast.history.models import Job
from holdfast.policies.nodes.burn_in import BurnInOutcome
from holdfast.policies.nodes.cordons import TESTABLE, Answer, BurnInAttempt, CordonChanged, Node, NodeTransition, OperatorRequest, Owner
from holdfast.policies.nodes.node_states import NodeState
from holdfast.policies.nodes.quarantine import begin_burn_in, end_burn_in
from holdfast.policies.nodes.required_checks import PartToTest, parts_to_test
from holdfast.probe.burn_in.plan import BurnInPlan
from holdfast.probe.burn_in.runner import BurnInRunner, OnCheck
from holdfast.probe.burn_in.session import open_burn_in_connections
from holdfast.probe.registry import register
from holdfast.spec import Cluster

PASSED: Final[dict[CheckMark, bool | None]] = {CheckMark.PASSED: True, CheckMark.FAILED: False, CheckMark.SKIPPED: None}
ABORTED: Final = "the burn-in was aborted"


@dataclass(slots=True)
class Repair:
    """Burn-ins of some nodes of one cluster."""

    cluster: Cluster
    history: History
    owner: Owner
    plan: BurnInPlan
    on_check: OnCheck = lambda _node, _check: None
    trials: dict[str, BurnInAttempt] = field(default_factory=dict)
    """Nodes whose burn-in has begun and not ended."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Nodes without a burn-in, or without a valid result, and why."""
    outcomes: dict[str, BurnInOutcome] = field(default_factory=dict)
    transitions: list[tuple[str, NodeTransition]] = field(default_factory=list)
    """Nodes, and the changes of their states."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End burn-ins that nobody will finish."""
        self.conclude()

    def known(self) -> dict[str, Node]:
        """Return all nodes of the cluster in their present states."""
        recorded = cordons.nodes(self.history, self._table(), now=time.time())
        return {name: recorded.get(name, Node(name=name)) for name in names_of(self.cluster)}

    def due(self) -> list[str]:
        """Return the nodes that are due for a burn-in."""
        now = time.time()
        return [name for name, node in self.known().items() if node.is_due(now)]

    def jobs(self) -> dict[str, str]:
        """Return the nodes of a local cluster on which a job trains now, each with the job's name."""
        if self.cluster.kind != "local":
            return {}
        found = [(view.name, view.job) for view in open_cluster(self.cluster).survey() if view.job]
        with self.history.session() as session:
            jobs = [(node, id_, session.get(Job, id_)) for node, id_ in found]
        return {node: job.name if job is not None else id_ for node, id_, job in jobs}

    def begin(self, nodes: Sequence[str], busy: Collection[str] = ()) -> list[str]:
        """Begin a burn-in of each of *nodes* for the cordon that it may lift; return those for which one has begun.

        A node that is *busy* is skipped: the load of its job would count against it.
        """
        known = self.known()
        for node in nodes:
            testable = known[node].of_kind(*TESTABLE)
            if node in busy:
                self.skipped[node] = "a job trains on it"
            elif not testable:
                self.skipped[node] = f"it is {known[node].state}, and a burn-in changes nothing about that"
            else:
                answer = self._apply(
                    node, "a burn-in is due", partial(begin_burn_in, number=testable[0].number, seconds=self.plan.max_seconds)
                )
                if isinstance(answer, CordonChanged):
                    self.trials[node] = answer.burn_in
                else:
                    self.skipped[node] = answer.why
        return list(self.trials)

    def try_out(self, nodes: Sequence[str]) -> dict[str, BurnInOutcome]:
        """Run the checks on *nodes*; nodes in service are their partners, those without a job first."""
        jobs, known = self.jobs(), self.known()
        partners = [name for name, node in known.items() if name not in nodes and not node.is_isolated]
        partners.sort(key=lambda name: name in jobs)
        gpus = {} if self.cluster.kind == "slurm" else self.cluster.gpus_of
        wanted = {node: self.parts_to_test(known[node]) for node in nodes}
        with open_burn_in_connections(self.cluster) as connections:
            runner = BurnInRunner(connections, replace(self.plan, gpus=gpus), on_check=self.on_check, wanted=wanted)
            self.outcomes |= runner.try_out(nodes, partners)
        return self.outcomes

    def parts_to_test(self, node: Node) -> tuple[PartToTest, ...]:
        """Return the parts of *node* that a burn-in has to exercise: those of every fault that programs cordon it for."""
        faults = (fault for one in node.of_kind(*TESTABLE) for fault in one.faults)
        return parts_to_test(faults, self.cluster.burn_in.accept_untested)

    def conclude(self) -> list[tuple[str, NodeTransition]]:
        """Apply the outcome of each burn-in that has begun; return the changes of nodes' states."""
        moved, rules = [], self.cluster.quarantine.rules
        for node in list(self.trials):
            trial, found = self.trials.pop(node), self.outcomes.get(node)
            passed = PASSED[found.mark] if found is not None else None
            answer = self._apply(
                node,
                found.reason if found is not None else ABORTED,
                partial(end_burn_in, ran=trial, passed=passed, rules=rules),
                found.evidence if found is not None else (),
            )
            if isinstance(answer, CordonChanged):
                moved += [(node, move) for move in answer.transitions]
            else:
                self.skipped[node] = f"its burn-in does not count: {answer.why}"
        self.transitions += moved
        return moved

    def _apply(self, node: str, reason: str, act: Callable[[Node, OperatorRequest], Answer], evidence: tuple[str, ...] = ()) -> Answer:
        now = time.time()
        request = OperatorRequest(owner=self.owner, reason=reason, at=now, evidence=evidence)
        return cordons.apply(self.history, self._table(), node, lambda one, _: act(one, request), now=now)

    def _table(self) -> CordonTable:
        return CordonTable(cluster=self.cluster.name, names=names_of(self.cluster), rules=self.cluster.quarantine.rules)


@contextmanager
def open_repair(cluster: Cluster, seconds: float | None = None, nodes: Sequence[str] = ()) -> Iterator[Repair]:
    """Yield a repair of *nodes* of *cluster*, which tasks find by `registered`; raise `OperatorError` when there can be none."""
    with closing(History.open()) as history:
        owner, plan = Owner(name="node-repair"), BurnInPlan.of(cluster.burn_in, seconds=seconds)
        with Repair(cluster, history, owner, plan) as repair:
            check_names(nodes, cluster.name, names_of(cluster))
            with register(cluster.name, repair):
                yield repair


class NodeBurnIn(BaseModel):
    """The result of a burn-in of one node, for a user's own flow."""

    model_config = ConfigDict(frozen=True)

    node: str
    outcome: Literal["passed", "failed", "skipped"]
    """`skipped`: not everything that is needed could be checked, which does not count as passed."""
    reason: str
    checks: tuple[str, ...]
    """Every check as text, with its measurements."""
    state: str
    """The node's state afterwards: `healthy`, `quarantined`, ..."""


class BurnInReport(BaseModel):
    """The results of a burn-in of some nodes of a cluster, for a user's own flow."""

    model_config = ConfigDict(frozen=True)

    cluster: str
    nodes: tuple[NodeBurnIn, ...]

    def of(self, outcome: Literal["passed", "failed", "skipped"]) -> list[str]:
        """Return the names of the nodes with that *outcome*."""
        return [one.node for one in self.nodes if one.outcome == outcome]

    @property
    def passed(self) -> bool:
        """Return whether every node passed."""
        return all(one.outcome == "passed" for one in self.nodes)


def run_burn_in(repair: Repair, nodes: Sequence[str]) -> BurnInReport:
    """Burn in *nodes*; one that is in quarantine returns to service if it passes. Raise `NodesBusy` when a job trains on one of them."""
    jobs, known = repair.jobs(), repair.known()
    busy = tuple(f"job '{jobs[node]}' trains on {node}" for node in nodes if node in jobs)
    if busy:
        raise NodesBusy("no burn-in can run now", busy, "Wait until the job has ended, or name other nodes")
    repair.begin([node for node in nodes if known[node].of_kind(*TESTABLE) and known[node].state is not NodeState.DECOMMISSIONED])
    outcomes = repair.try_out(list(dict.fromkeys(nodes)))
    repair.conclude()
    after = repair.known()
    names: dict[CheckMark, Literal["passed", "failed", "skipped"]] = {
        CheckMark.PASSED: "passed",
        CheckMark.FAILED: "failed",
        CheckMark.SKIPPED: "skipped",
    }
    results = [
        NodeBurnIn(node=node, outcome=names[found.mark], reason=found.reason, checks=found.evidence, state=str(after[node].state))
        for node, found in outcomes.items()
    ]
    return BurnInReport(cluster=repair.cluster.name, nodes=tuple(results))
