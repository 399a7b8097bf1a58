"""Nodes of a job that are to be left: asks for planned moves while there is time and room, and ends the waiting when there is no more."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

from detectors.evidence import NodeLeaving
from holdfast.control.agents.pool import AgentPool
from holdfast.control.nodes.job_nodes import JobNodes
from holdfast.control.state.generations import Generations
from holdfast.control.state.incidents import Incidents
from holdfast.control.state.job_log import JobLog
from holdfast.control.state.state_machine import JobStateMachine
from holdfast.control.supervisor.requests import Requests
from holdfast.errors import WorldError
from holdfast.history import models
from holdfast.report.wording import duration, moment
from holdfast.spec import TrainingJob
from policies.drains import Drain, DrainAction, DrainView, ends_at, next_action
from policies.states import State

PAST: Final = 60.0
"""Seconds after which a node that should have been gone counts as any other again: it has come back, or it never went."""
AT_WORK = frozenset({State.RUNNING, State.MIGRATING})


@dataclass(slots=True, kw_only=True)
class PlannedDrains:
    """Looks now and then which nodes are to be left, and does what that asks for."""

    log: JobLog
    spec: TrainingJob
    agents: AgentPool
    generations: Generations
    incidents: Incidents
    machine: JobStateMachine
    nodes: JobNodes
    requests: Requests
    _asked: dict[str, float] = field(default_factory=dict)
    """Node to when a move of its ranks was last requested here."""
    _told: dict[str, str] = field(default_factory=dict)
    """Node to the reason for which it stays, as recorded last."""

    def poll(self, now: float) -> None:
        """Do what is due at *now* (seconds since 1970) about each node that is to be left."""
        self._forget_past(now)
        if self.machine.state not in AT_WORK or self.incidents.current is not None:
            return
        for node in self.generations.members:
            drain_of = self.nodes.eligibility.drain_of(node)
            if drain_of is None:
                self._told.pop(node, None)
                self._asked.pop(node, None)
                continue
            after = next_action(drain_of, self._seen(node, now))
            if after.act is DrainAction.MOVE and self.machine.state is State.RUNNING and not self.requests.asked_for(node):
                self._ask(drain_of, now)
            elif after.act is DrainAction.LEAVE:
                self._leave(node, now, after.reason)
            elif after.act is DrainAction.STAY and not self.requests.asked_for(node) and self._told.get(node) != after.reason:
                self._told[node] = after.reason
                self.log.record_event(after.reason)

    def _forget_past(self, now: float) -> None:
        for one in self.nodes.eligibility.preemption_notices():
            if one.by is not None and now > one.by + PAST:
                self.nodes.forget_notice(one.node)

    def rank_terminated_with_node(self, node: str) -> None:
        """Learn that a rank ended by the signal with which *node* was told to go: there is nothing to wait for any more."""
        drain_of = self.nodes.eligibility.drain_of(node)
        if drain_of is not None:
            self._leave(node, time.time(), f"{drain_of.reason}; its ranks were told to go with it")

    @property
    def end(self) -> str:
        """Say why the job has to end now, saved, to be run again; empty when it need not."""
        return self._nowhere() or self._walltime_over() or self.nodes.allocations.end

    def _nowhere(self) -> str:
        """Say so when all its nodes were told that they will be gone, soon, and no other one is free."""
        now, members, eligibility = time.time(), self.generations.members, self.nodes.eligibility
        if self.nodes.allocations.is_lent:  # others can be had: they are waited for
            return ""
        found = {node: eligibility.drain_of(node) for node in members if eligibility.has_preemption_notice(node)}
        if not members or len(found) < len(members) or self.nodes.free():
            return ""
        save = self.spec.limits.last_save.total_seconds()
        if not any(one is not None and one.is_urgent(now, save) for one in found.values()):
            return ""
        return "every node of the job was told to go, and no other one is free: what they hold is saved"

    def _walltime_over(self) -> str:
        """Say so when its walltime is nearly over."""
        limits, submitted = self.spec.limits, self.log.job.at
        if limits.walltime is None:
            return ""
        walltime, save = limits.walltime.total_seconds(), limits.last_save.total_seconds() + limits.stop_grace.total_seconds()
        if time.time() < ends_at(submitted=submitted, walltime=walltime, save=save):
            return ""
        end = f"the walltime of {duration(walltime)} (`limits.walltime`) ends at {moment(submitted + walltime)}"
        return f"{end}: what the job has is saved, and the same `holdfast run` goes on from there"

    def _seen(self, node: str, now: float) -> DrainView:
        outcome = self.requests.outcomes.get(node, "")
        alone = "" if len(self.generations.state.ranks) > 1 else "its only rank cannot, as nobody would be left to find it"
        return DrainView(
            now=now,
            blocked_reason=self.generations.why_not_kept() or alone,
            room=self._room(node),
            tried=self._asked.get(node) if outcome else None,
            outcome=outcome,
            save=self.spec.limits.last_save.total_seconds(),
        )

    def _room(self, node: str) -> bool:
        """Tell whether the ranks of *node* that are to move next could go to another one: with an agent already, or free."""
        ranks = self.generations.state.membership
        count = 1 if len(ranks) == 1 else len(ranks.get(node, ()))
        return any(free >= count for other, free in self.nodes.room().items() if other != node) or bool(self.nodes.free())

    def _ask(self, drain_of: Drain, now: float) -> None:
        self._asked[drain_of.node] = now
        self._told.pop(drain_of.node, None)
        self.log.record_event(f"{drain_of.node} is to be left: {drain_of.reason}. Its ranks move while training goes on")
        ranks = self.generations.state.membership[drain_of.node]
        facts: dict[str, Any] = {"from": drain_of.node}
        if len(ranks) == len(self.generations.state.ranks):  # all cannot move at once: one goes first, the others follow it
            facts = {"rank": max(ranks), "node": drain_of.node}
        self.requests.ask(models.Request(job_id=self.log.job.id, at=now, kind="migrate", by=drain_of.reason, facts=facts))

    def _leave(self, node: str, now: float, reason: str) -> None:
        """Have the ladder answer: the time is up."""
        evidence, free = self.generations.state.evidence, self.nodes.free()
        if any(isinstance(one, NodeLeaving) and one.node == node for one in evidence):
            return
        if free and not self.nodes.spares():  # one that nobody holds may take the place: bring it up before the ladder is asked
            for other, answer in self.agents.each(free[:1], self.agents.bring_up).items():
                if not isinstance(answer, WorldError):
                    self.log.record_node_status(other, "healthy", "its agent is up")
        evidence.append(NodeLeaving(node=node, at=now, why=reason, step=self.generations.state.step_before))
