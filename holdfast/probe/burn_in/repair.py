"""Bring nodes back: a burn-in is begun for one hold of a node, made, and its outcome said for that very hold. For a flow and for a person.

What happens to the node meanwhile goes before: an outcome that is out of date changes nothing.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Self

from detectors.burn_in_results import CheckMark
from holdfast.cluster import names_of, open_cluster
from holdfast.errors import UnknownNode
from holdfast.history import History
from holdfast.history import cordons as record
from holdfast.history.cordons import CordonTable
from holdfast.history.models import Job
from holdfast.probe.burn_in.connections import open_burn_in_connections
from holdfast.probe.burn_in.plan import BurnInPlan
from holdfast.probe.burn_in.runner import BurnInRunner, Tell
from holdfast.spec import Cluster
from policies.burn_in import BurnInOutcome
from policies.cordons import TESTABLE, Answer, BurnInAttempt, CordonChanged, Node, NodeTransition, OperatorRequest, Owner, Rules
from policies.quarantine import begin_burn_in, end_burn_in
from policies.required_checks import PartToTest, parts_to_test

PASSED: dict[CheckMark, bool | None] = {CheckMark.PASSED: True, CheckMark.FAILED: False, CheckMark.SKIPPED: None}
BROKEN_OFF = "the burn-in was broken off"


@dataclass(slots=True)
class Repair:
    """Burn-ins of some nodes of one cluster."""

    cluster: Cluster
    history: History
    owner: Owner
    plan: BurnInPlan
    tell: Tell = lambda _node, _check: None
    trials: dict[str, BurnInAttempt] = field(default_factory=dict)
    """Nodes whose burn-in was begun, and has not been concluded."""
    left: dict[str, str] = field(default_factory=dict)
    """Nodes that were not tried, and why."""
    outcomes: dict[str, BurnInOutcome] = field(default_factory=dict)
    moves: list[tuple[str, NodeTransition]] = field(default_factory=list)
    """Nodes, and how they moved."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        """Leave no burn-in open that nobody makes any more."""
        self.conclude()

    # -- which ------------------------------------------------------------------------------------------------------------

    def known(self) -> dict[str, Node]:
        """Return the nodes of the cluster as they are."""
        held = record.nodes(self.history, self._place(), now=time.time())
        return {name: held.get(name, Node(name=name)) for name in names_of(self.cluster)}

    def due(self) -> list[str]:
        """Return the nodes on which a burn-in should be run now."""
        now = time.time()
        return [name for name, node in self.known().items() if node.is_due(now)]

    def check_names(self, nodes: Iterable[str]) -> None:
        """Raise `UnknownNode` for a name that the cluster does not have."""
        names = names_of(self.cluster)
        for node in nodes:
            if node not in names:
                raise UnknownNode(node, self.cluster.name, tuple(difflib.get_close_matches(node, names, n=3) or names[:5]))

    def jobs(self) -> dict[str, str]:
        """Return the nodes on which a job trains now, each with its name, as far as that can be seen from here."""
        if self.cluster.kind != "local":
            return {}  # no job runs there yet
        seen = [(view.name, view.job) for view in open_cluster(self.cluster).survey() if view.job]
        with self.history.session() as session:
            jobs = [(node, id_, session.get(Job, id_)) for node, id_ in seen]
        return {node: job.name if job is not None else id_ for node, id_, job in jobs}

    # -- one after another ------------------------------------------------------------------------------------------------

    def begin(self, nodes: Sequence[str], busy: Collection[str] = ()) -> list[str]:
        """Begin a burn-in of each of *nodes* for the hold that it may lift; return those for which one was begun.

        A node of *busy* is left for later: what its job takes away would be held against it.
        """
        known = self.known()
        for node in nodes:
            if node in busy:
                self.left[node] = "a job trains on it"
                continue
            holds = known[node].of_kind(*TESTABLE)
            if not holds:
                self.left[node] = f"it is {known[node].state}: nothing that a burn-in lifts is held against it"
                continue
            answer = self._say(node, partial(_begun, number=holds[0].number, seconds=self.plan.at_most))
            if isinstance(answer, CordonChanged):
                self.trials[node] = answer.burn_in
            else:
                self.left[node] = answer.why
        return list(self.trials)

    def try_out(self, nodes: Sequence[str]) -> dict[str, BurnInOutcome]:
        """Make the checks on *nodes*; those in service lend themselves as partners, the ones without a job first."""
        jobs = self.jobs()
        known = self.known()
        partners = [name for name, node in known.items() if name not in nodes and not node.is_isolated]
        partners.sort(key=lambda name: name in jobs)
        gpus = {} if self.cluster.kind == "slurm" else self.cluster.gpus_of
        plan, wanted = replace(self.plan, gpus=gpus), {node: self.parts_to_test(known[node]) for node in nodes}
        with open_burn_in_connections(self.cluster) as posts:
            self.outcomes |= BurnInRunner(posts, plan, tell=self.tell, wanted=wanted).try_out(nodes, partners)
        return self.outcomes

    def parts_to_test(self, node: Node) -> tuple[PartToTest, ...]:
        """Return the parts of *node* that a burn-in has to exercise: those of every fault that programs hold it for."""
        held = (fault for hold in node.of_kind(*TESTABLE) for fault in hold.faults)
        return parts_to_test(held, self.cluster.burn_in.accept_untested)

    def conclude(self) -> list[tuple[str, NodeTransition]]:
        """Say what came of each burn-in that was begun; return how nodes moved by that."""
        moved = []
        for node in list(self.trials):
            trial, found = self.trials.pop(node), self.outcomes.get(node)
            answer = self._say(
                node,
                partial(_ended, trial=trial, passed=PASSED[found.mark] if found is not None else None, rules=self._place().rules),
                reason=found.reason if found is not None else BROKEN_OFF,
                evidence=found.evidence if found is not None else (),
            )
            if isinstance(answer, CordonChanged):
                moved += [(node, move) for move in answer.moves]
            else:
                self.left[node] = f"its burn-in counts for nothing: {answer.why}"
        self.moves += moved
        return moved

    def _say(
        self, node: str, act: Callable[[Node, OperatorRequest], Answer], reason: str = "a burn-in is due", evidence: tuple[str, ...] = ()
    ) -> Answer:
        now = time.time()
        word = OperatorRequest(owner=self.owner, reason=reason, at=now, evidence=evidence)
        return record.apply(self.history, self._place(), node, lambda one, _: act(one, word), now=now)

    def _place(self) -> CordonTable:
        return CordonTable(cluster=self.cluster.name, names=names_of(self.cluster), rules=self.cluster.quarantine.rules)


def _begun(node: Node, word: OperatorRequest, *, number: int, seconds: float) -> Answer:
    return begin_burn_in(node, word, number, seconds=seconds)


def _ended(node: Node, word: OperatorRequest, *, trial: BurnInAttempt, passed: bool | None, rules: Rules) -> Answer:
    return end_burn_in(node, word, trial, passed=passed, rules=rules)
