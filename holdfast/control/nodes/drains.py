"""Nodes that the job has to leave: request migrations while there is time and room, and have the policy act when there is none left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.control.nodes.job_nodes import JobNodes
from holdfast.control.state.generations import Generations
from holdfast.control.state.incidents import Incidents
from holdfast.control.state.job_log import JobLog
from holdfast.control.state.state_machine import JobStateMachine
from holdfast.control.supervisor.requests import Requests
from holdfast.detectors.evidence import NodeLeaving
from holdfast.history import models
from holdfast.policies.nodes.drains import Drain, DrainAction, DrainView, ends_at, next_action
from holdfast.policies.states import State
from holdfast.report.text.wording import duration, moment
from holdfast.spec import TrainingJob

EXPIRED: Final = 60.0
"""Seconds after a notice's time at which the node counts as any other again: it has returned, or was never taken."""
TRAINING = frozenset({State.RUNNING, State.MIGRATING})


@dataclass(slots=True, kw_only=True)
class PlannedDrains:
    """Checks periodically which nodes the job has to leave, and acts on it."""

    log: JobLog
    spec: TrainingJob
    generations: Generations
    incidents: Incidents
    machine: JobStateMachine
    nodes: JobNodes
    requests: Requests
    _requested: dict[str, float] = field(default_factory=dict)
    """Node to when a migration of its ranks was last requested here."""
    _reported: dict[str, str] = field(default_factory=dict)
    """Node to the reason why its ranks stay, as recorded last."""

    def poll(self, now: float) -> None:
        """Do what is due at *now* (seconds since 1970) about each node that the job has to leave."""
        self._forget_expired_notices(now)
        if self.machine.state not in TRAINING or self.incidents.current is not None:
            return
        for node in self.generations.members:
            drain = self.nodes.eligibility.drain_of(node)
            if drain is None:
                self._reported.pop(node, None)
                self._requested.pop(node, None)
                continue
            after = next_action(drain, self._view(node, now))
            if after.act is DrainAction.MOVE and self.machine.state is State.RUNNING and not self.requests.asked_for(node):
                self._request_migration(drain, now)
            elif after.act is DrainAction.LEAVE:
                self._leave(node, now, after.reason)
            elif after.act is DrainAction.STAY and not self.requests.asked_for(node) and self._reported.get(node) != after.reason:
                self._reported[node] = after.reason
                self.log.record_event(after.reason)

    def _forget_expired_notices(self, now: float) -> None:
        for one in self.nodes.eligibility.preemption_notices():
            if one.by is not None and now > one.by + EXPIRED:
                self.nodes.forget_notice(one.node)

    def rank_terminated_with_node(self, node: str) -> None:
        """Note that a rank exited by the signal with which *node* is preempted: there is nothing to wait for any more."""
        drain = self.nodes.eligibility.drain_of(node)
        if drain is not None:
            self._leave(node, time.time(), f"{drain.reason}; its ranks received the signal too")

    @property
    def end(self) -> str:
        """Return why the job has to end now, saved, to be run again later; empty when it need not."""
        return self._nowhere_to_go() or self._walltime_over() or self.nodes.allocations.end

    def _nowhere_to_go(self) -> str:
        """Return so when all nodes of the job will be preempted soon and no other one is free."""
        now, members, eligibility = time.time(), self.generations.members, self.nodes.eligibility
        if self.nodes.allocations.can_grow:  # the job waits for other nodes
            return ""
        found = {node: eligibility.drain_of(node) for node in members if eligibility.has_preemption_notice(node)}
        if not members or len(found) < len(members) or self.nodes.free():
            return ""
        save = self.spec.timeouts.final_checkpoint.total_seconds()
        if not any(one is not None and one.is_urgent(now, save) for one in found.values()):
            return ""
        return "every node of the job has a preemption notice, and no other one is free: a final checkpoint is saved"

    def _walltime_over(self) -> str:
        timeouts, submitted = self.spec.timeouts, self.log.job.at
        if self.spec.walltime is None:
            return ""
        walltime, save = self.spec.walltime.total_seconds(), (timeouts.final_checkpoint + timeouts.termination_grace).total_seconds()
        if time.time() < ends_at(submitted=submitted, walltime=walltime, save=save):
            return ""
        end = f"the walltime of {duration(walltime)} (`walltime`) ends at {moment(submitted + walltime)}"
        return f"{end}: a final checkpoint is saved, and the same `holdfast run` continues from it"

    def _view(self, node: str, now: float) -> DrainView:
        outcome = self.requests.outcomes.get(node, "")
        alone = "" if len(self.generations.state.ranks) > 1 else "its only rank cannot, as no other would remain to transfer its state"
        return DrainView(
            now=now,
            blocked_reason=self.generations.why_not_kept() or alone,
            room=self._has_room(node),
            tried=self._requested.get(node) if outcome else None,
            outcome=outcome,
            save=self.spec.timeouts.final_checkpoint.total_seconds(),
        )

    def _has_room(self, node: str) -> bool:
        """Return whether the ranks of *node* that move next fit on another node: one with an agent, or a free one."""
        ranks = self.generations.state.membership
        count = 1 if len(ranks) == 1 else len(ranks.get(node, ()))
        return any(free >= count for other, free in self.nodes.room().items() if other != node) or bool(self.nodes.free())

    def _request_migration(self, drain: Drain, now: float) -> None:
        self._requested[drain.node] = now
        self._reported.pop(drain.node, None)
        self.log.record_event(f"{drain.node} is to be drained: {drain.reason}. Its ranks migrate while training continues")
        ranks = self.generations.state.membership[drain.node]
        facts: dict[str, Any] = {"from": drain.node}
        if len(ranks) == len(self.generations.state.ranks):  # all cannot migrate at once: one goes first, the others follow it
            facts = {"rank": max(ranks), "node": drain.node}
        self.requests.ask(models.Request(job_id=self.log.job.id, at=now, kind="migrate", by=drain.reason, facts=facts))

    def _leave(self, node: str, now: float, reason: str) -> None:
        """Have the policy act: there is no more time."""
        evidence = self.generations.state.evidence
        if any(isinstance(one, NodeLeaving) and one.node == node for one in evidence):
            return
        if not self.nodes.spares() and (free := self.nodes.free()):  # the latter is a survey of the cluster
            self.nodes.bring_up(free[:1])  # it may replace the node: have it before the policy decides
        evidence.append(NodeLeaving(node=node, at=now, why=reason, step=self.generations.state.step_before))
