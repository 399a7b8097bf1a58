"""Nodes of a job that are to be left: asks for planned moves while there is time and room, and ends the waiting when there is no more."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from detectors.evidence import NodeLeaving
from holdfast.errors import WorldError
from holdfast.history import models
from holdfast.report.wording import duration, moment
from policies.drains import Drain, DrainAction, DrainView, ends_at, next_act
from policies.states import State

if TYPE_CHECKING:
    from holdfast.control.supervisor.controller import JobController

PAST: Final = 60.0
"""Seconds after which a node that should have been gone counts as any other again: it has come back, or it never went."""
AT_WORK = frozenset({State.RUNNING, State.MIGRATING})


class PlannedDrains:
    """Looks now and then which nodes are to be left, and does what that asks for."""

    def __init__(self, run: JobController) -> None:
        self._run = run
        self._asked: dict[str, float] = {}
        """Node to when a move of its ranks was last asked for here."""
        self._told: dict[str, str] = {}

    def look(self, now: float) -> None:
        """Do what is due at *now* (seconds since 1970) about each node that is to be left."""
        run = self._run
        self._forget_past(now)
        if run.state not in AT_WORK or run.incident is not None:
            return
        for node in run.members:
            departure = run.eligibility.departure(node)
            if departure is None:
                self._told.pop(node, None)
                self._asked.pop(node, None)
                continue
            after = next_act(departure, self._seen(node, now))
            if after.act is DrainAction.MOVE and run.state is State.RUNNING and not run.requests.asked_for(node):
                self._ask(departure, now)
            elif after.act is DrainAction.LEAVE:
                self._leave(node, now, after.reason)
            elif after.act is DrainAction.STAY and not run.requests.asked_for(node) and self._told.get(node) != after.reason:
                self._told[node] = after.reason
                run.remark(after.reason)

    def _forget_past(self, now: float) -> None:
        for one in self._run.eligibility.told_to_go():
            if one.by is not None and now > one.by + PAST:
                self.forget(one.node)

    def forget(self, node: str) -> None:
        """Forget that *node* was told to go: it stays, it is lent anew, or it has come back."""
        self._run.eligibility.take_back(node)
        self._run.fleet.leaving.discard(node)

    def rank_has_gone(self, node: str) -> None:
        """Learn that a rank ended by the signal with which *node* was told to go: there is nothing to wait for any more."""
        departure = self._run.eligibility.departure(node)
        if departure is not None:
            self._leave(node, time.time(), f"{departure.reason}; its ranks were told to go with it")

    @property
    def end(self) -> str:
        """Say why the job has to end now, saved, to be run again; empty when it need not."""
        return self._nowhere() or self._walltime_over() or self._run.borrowed_nodes.end

    def _nowhere(self) -> str:
        """Say so when all its nodes were told that they will be gone, soon, and no other one is free."""
        run, now = self._run, time.time()
        if run.borrowed_nodes.is_lent:  # others can be had: they are waited for
            return ""
        found = {node: run.eligibility.departure(node) for node in run.members if run.eligibility.is_told_to_go(node)}
        if not run.members or len(found) < len(run.members) or run.free():
            return ""
        save = run.spec.limits.last_save.total_seconds()
        if not any(one is not None and one.is_pressing(now, save) for one in found.values()):
            return ""
        return "every node of the job was told to go, and no other one is free: what they hold is saved"

    def _walltime_over(self) -> str:
        """Say so when its walltime is nearly over."""
        run, limits = self._run, self._run.spec.limits
        if limits.walltime is None:
            return ""
        walltime, save = limits.walltime.total_seconds(), limits.last_save.total_seconds() + limits.stop_grace.total_seconds()
        if time.time() < ends_at(submitted=run.job.at, walltime=walltime, save=save):
            return ""
        end = f"the walltime of {duration(walltime)} (`limits.walltime`) ends at {moment(run.job.at + walltime)}"
        return f"{end}: what the job has is saved, and the same `holdfast run` goes on from there"

    def _seen(self, node: str, now: float) -> DrainView:
        run = self._run
        outcome = run.requests.outcomes.get(node, "")
        alone = "" if len(run.board.ranks) > 1 else "its only rank cannot, as nobody would be left to find it"
        return DrainView(
            now=now,
            barred=run.why_not_kept() or alone,
            room=self._room(node),
            tried=self._asked.get(node) if outcome else None,
            outcome=outcome,
            save=run.spec.limits.last_save.total_seconds(),
        )

    def _room(self, node: str) -> bool:
        """Tell whether the ranks of *node* that are to move next could go to another one: with an agent already, or free."""
        run, ranks = self._run, self._run.board.membership
        count = 1 if len(ranks) == 1 else len(ranks.get(node, ()))
        return any(free >= count for other, free in run.room().items() if other != node) or bool(run.free())

    def _ask(self, departure: Drain, now: float) -> None:
        run = self._run
        self._asked[departure.node] = now
        self._told.pop(departure.node, None)
        run.remark(f"{departure.node} is to be left: {departure.reason}. Its ranks move while training goes on")
        ranks = run.board.membership[departure.node]
        facts: dict[str, Any] = {"from": departure.node}
        if len(ranks) == len(run.board.ranks):  # all cannot move at once: one goes first, the others follow it
            facts = {"rank": max(ranks), "node": departure.node}
        run.requests.ask(models.Request(job_id=run.job.id, at=now, kind="migrate", by=departure.reason, facts=facts))

    def _leave(self, node: str, now: float, reason: str) -> None:
        """Have the ladder answer: the time is up."""
        run = self._run
        if any(isinstance(one, NodeLeaving) and one.node == node for one in run.board.evidence):
            return
        if run.free() and not run.spares():  # one that nobody holds may take the place: bring it up before the ladder is asked
            for other, answer in run.fleet.each(run.free()[:1], run.fleet.bring_up).items():
                if not isinstance(answer, WorldError):
                    run.stand(other, "healthy", "its agent is up")
        run.board.evidence.append(NodeLeaving(node=node, at=now, why=reason, step=run.board.step_before))
