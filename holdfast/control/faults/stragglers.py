"""Ranks that slow the others down, and nodes through whose faults training continues.

Each is assessed when it is found and again while it lasts; new assessments are recorded, and a rank migrates where the policy finds that
that pays off.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.agent.workers.worker import BLOCK
from holdfast.control.config.watched_files import WatchedPolicy
from holdfast.control.faults.node_faults import machine_of
from holdfast.control.state.generations import Generations
from holdfast.control.state.job_log import JobLog
from holdfast.control.supervisor.requests import Requests
from holdfast.detectors.catalogue import Attribution, Fault, RecommendedAction
from holdfast.detectors.codec import packed
from holdfast.detectors.training.stragglers import COMPUTE, HOST, LONG, cost_of, cost_of_links, settled
from holdfast.history import models
from holdfast.policies.slowness import PastMigration, StragglerAction, StragglerCase, StragglerOutcome

MOVABLE: Final = frozenset({COMPUTE.id, HOST.id})
"""Kinds of slow ranks that a migration to another node may cure."""
DEGRADING: Final = frozenset({Attribution.GPU, Attribution.NODE, Attribution.NETWORK, Attribution.STORAGE})
"""What a node's fault is attributed to when it may slow its ranks down."""
NEGLIGIBLE: Final = 0.01
"""Share of a step below which slowness is recorded and not reported."""
INTERVAL: Final = 5.0
"""Seconds between two assessments of what lasts: in less time hardly any block of steps ends."""
WORSE: Final = 3.0
"""Slowness that costs so many times as much a step as when it was reported is reported again."""


@dataclass(slots=True)
class _WatchedRank:
    """A slow rank, or the slowest rank of a node with a fault, that is assessed again while it lasts."""

    fault: Fault
    node: str
    rank: int | None
    since: int
    """The step from which on the step times show its effect."""
    outcome: tuple[int, StragglerOutcome] | None = None
    """The rank that was assessed last (-1: it costs nothing), and the outcome."""


@dataclass(slots=True, kw_only=True)
class Stragglers:
    """What this job does about slow ranks, and what it has learned from its migrations."""

    log: JobLog
    wanted: StragglerAction
    """What the job file asks for."""
    cluster_kind: str
    generations: Generations
    policy: WatchedPolicy
    requests: Requests
    spares: Callable[[], tuple[str, ...]]
    _pauses: list[float] = field(default_factory=list)
    _moved: list[PastMigration] = field(default_factory=list)
    _failed: int = 0
    _watched: dict[tuple[str, str, int | None], _WatchedRank] = field(default_factory=dict)
    """By kind, node and rank; a node's fault has no rank."""
    _reported: dict[tuple[str, str, int | None], tuple[StragglerOutcome, float]] = field(default_factory=dict)
    """By kind, machine and rank: the outcome and the cost a step that were reported last."""
    _next: float = 0.0

    def remember(self, rows: Iterable[models.Request]) -> None:
        """Learn from finished migrations."""
        for row in rows:
            facts = row.facts or {}
            if not row.done:
                self._failed += 1
                continue
            if facts.get("pause") is not None:
                self._pauses.append(float(facts["pause"]))
            if facts.get("kind") and facts.get("rank") is not None:
                at = row.at if row.handled_at is None else row.handled_at
                self._moved.append(PastMigration(at=at, rank=int(facts["rank"]), node=str(facts.get("node", ""))))

    def assess(self, fault: Fault) -> None:
        """Decide about a rank that slows the others down, record that, and request a migration if there is to be one."""
        if fault.kind in MOVABLE and fault.rank is not None and fault.node is not None:
            one = self._watched[fault.kind, fault.node, fault.rank] = _WatchedRank(fault, fault.node, fault.rank, since=0)
            self._assess(one)

    def note(self, fault: Fault) -> None:
        """Watch a node with a fault through which training continues: the coming steps show what it costs."""
        if (
            fault.node is not None
            and fault.entry.attributed_to in DEGRADING
            and self.policy.present.asks.of(fault) is not RecommendedAction.RECORD
        ):
            since = self.generations.state.step_before + (LONG + 1) * BLOCK
            self._watched.setdefault((fault.kind, fault.node, None), _WatchedRank(fault, fault.node, None, since))

    def poll(self, now: float) -> None:
        """Assess again what lasts, at *now* (monotonic)."""
        if now < self._next or self.requests.migrations:  # a running migration may cure more than one
            return
        self._next = now + INTERVAL
        state = self.generations.state
        for key, one in list(self._watched.items()):
            ranks = [view.rank for view in state.ranks.values() if view.node == one.node]
            if one.node not in self.generations.members or (one.rank is not None and one.rank not in ranks):
                del self._watched[key]
            elif ranks and state.step_before >= one.since:
                self._assess(one)

    def _assess(self, one: _WatchedRank) -> None:
        """Ask the policy; record the outcome if it has changed or the cost has grown a lot, and report it then."""
        case, policy = self._case(one), self.policy.present
        if case is None:
            return
        decision = policy.stragglers(case)
        negligible = case.lost < NEGLIGIBLE * case.step
        outcome = -1 if negligible else case.rank, decision.act
        changed, one.outcome = one.outcome != outcome, outcome
        news = not negligible and (changed if decision.act is StragglerOutcome.MOVE else self._is_news(one, decision.act, case.lost))
        if not changed and not news:
            return
        facts: dict[str, Any] = {"kind": case.kind, "rank": case.rank, "node": case.node}
        self.log.recorder.add(
            models.StragglerDecision(
                job_id=self.log.job.id,
                at=case.now,
                **facts,
                act=decision.act,
                reason=decision.reason,
                policy=policy.name,
                record=packed(case),
            )
        )
        if news:
            self.log.record_event(decision.reason)
        if decision.act is StragglerOutcome.MOVE:
            details = {**facts, "quote": one.fault.quote, "reason": decision.reason}
            by = f"the detector of {case.kind}"
            self.requests.ask(models.Request(job_id=self.log.job.id, at=case.now, kind="migrate", by=by, facts=details))

    def _is_news(self, one: _WatchedRank, act: StragglerOutcome, lost: float) -> bool:
        """Return whether to report an outcome: it has changed, or its cost has grown a lot.

        Which rank of a node is the slowest changes all the time, and is not reported.
        """
        key = (one.fault.kind, machine_of(one.node, self.cluster_kind), one.rank)
        before = self._reported.get(key)
        if before is not None and before[0] is act and lost < WORSE * before[1]:
            return False
        self._reported[key] = (act, lost)
        return True

    def _case(self, one: _WatchedRank) -> StragglerCase | None:
        state, now = self.generations.state, time.time()
        breakdowns = state.step_breakdowns(state.now, self.generations.roles)
        if breakdowns is None or not settled(breakdowns):
            return None
        here = [rank for rank, node in breakdowns.nodes.items() if node == one.node and one.rank in (None, rank)]
        costs = {rank: cost for rank in here if (cost := cost_of(breakdowns, rank)) is not None}
        if not costs:
            return None
        rank = max(costs, key=lambda rank: (costs[rank][1], -rank))
        step, lost = costs[rank]
        if one.rank is None and one.fault.entry.attributed_to is Attribution.NETWORK:
            lost = max(lost, cost_of_links(breakdowns))
        until, wanted = state.until(), self.wanted
        if one.rank is None and wanted is StragglerAction.MIGRATE:  # that is for ranks that are known to be slow
            wanted = StragglerAction.AUTO
        return StragglerCase(
            now=now,
            kind=one.fault.kind,
            rank=rank,
            node=one.node,
            step=step,
            lost=lost,
            degraded=one.fault.kind if one.rank is None else "",
            remaining=None if until is None else max(0, until - state.step_before),
            wanted=wanted,
            blocked_reason=self.generations.why_not_kept(),
            spares=self.spares(),
            pauses=tuple(self._pauses),
            failed=self._failed,
            moved=tuple(self._moved),
        )
