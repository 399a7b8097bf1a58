"""Ranks that hold the others up, and nodes that training goes on through although something is wrong with them.

Each is weighed when it is seen and again while it lasts; what is new is put on record, and a rank is moved where that pays by the policy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from detectors.catalogue import Blame, Fault, RecommendedAction
from detectors.codec import packed
from detectors.stragglers import COMPUTE, HOST, LONG, cost_of, cost_of_links, settled
from holdfast.agent.workers.step_timing import BLOCK
from holdfast.control.config.policy_file import WatchedPolicy
from holdfast.control.faults.node_faults import machine_of
from holdfast.control.state.generations import Generations
from holdfast.control.state.job_log import JobLog
from holdfast.control.supervisor.requests import Requests
from holdfast.history import models
from policies.slowness import PastMigration, StragglerAction, StragglerCase, StragglerOutcome

MOVABLE: Final = frozenset({COMPUTE.id, HOST.id})
"""Kinds of slow ranks that a move to another node may cure."""
DEGRADING: Final = frozenset({Blame.GPU, Blame.NODE, Blame.NETWORK, Blame.STORAGE})
"""What a fault of a node speaks against that may make its ranks slow."""
FREE: Final = 0.01
"""Share of a step below which slowness costs nothing worth a word: it stays on record for who asks."""
AGAIN: Final = 5.0
"""Seconds between two times that what lasts is weighed: in between hardly any block of steps has come."""
WORSE: Final = 3.0
"""A slowness that costs so many times as much a step as when it was announced is announced again."""


@dataclass(slots=True)
class _WatchedRank:
    """A rank, or the slowest of a node, that is weighed again while it lasts."""

    fault: Fault
    node: str
    rank: int | None
    since: int
    """The step from which on the paces tell of it."""
    told: tuple[int, StragglerOutcome] | None = None
    """The rank that was weighed last (-1: it costs nothing), and the answer."""


@dataclass(slots=True, kw_only=True)
class Stragglers:
    """What this job has learnt of planned moves, and what it does about slow ranks."""

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
    """By kind, node and rank; without a rank what is wrong with a node."""
    _announced: dict[tuple[str, str, int | None], tuple[StragglerOutcome, float]] = field(default_factory=dict)
    """By kind, machine and rank: what was announced last, the answer and the cost a step."""
    _next: float = 0.0

    def remember(self, rows: Iterable[models.Request]) -> None:
        """Learn from planned moves that came to an end."""
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
        """Decide about a rank that holds the others up, put that on record, and ask for the move if there is to be one."""
        if fault.kind in MOVABLE and fault.rank is not None and fault.node is not None:
            one = self._watched[fault.kind, fault.node, fault.rank] = _WatchedRank(fault, fault.node, fault.rank, since=0)
            self._judge(one)

    def note(self, fault: Fault) -> None:
        """Watch a node that training goes on through: what it costs shows in the steps to come."""
        if fault.node is not None and fault.entry.blame in DEGRADING and self.policy.present.asks.of(fault) is not RecommendedAction.RECORD:
            since = self.generations.state.step_before + (LONG + 1) * BLOCK
            self._watched.setdefault((fault.kind, fault.node, None), _WatchedRank(fault, fault.node, None, since))

    def poll(self, now: float) -> None:
        """Weigh again what lasts, at *now* (monotonic)."""
        if now < self._next or self.requests.moves:  # a move in work may cure more than one
            return
        self._next = now + AGAIN
        for key, one in list(self._watched.items()):
            ranks = [view.rank for view in self.generations.state.ranks.values() if view.node == one.node]
            if one.node not in self.generations.members or (one.rank is not None and one.rank not in ranks):
                del self._watched[key]
            elif ranks and self.generations.state.step_before >= one.since:
                self._judge(one)

    def _judge(self, one: _WatchedRank) -> None:
        """Ask the policy; put the answer on record where it is another than before or costs far more, and announce it then."""
        slow, policy = self._case(one), self.policy.present
        if slow is None:
            return
        weighed = policy.slowness(slow)
        free = slow.lost < FREE * slow.step
        answer = -1 if free else slow.rank, weighed.act
        changed, one.told = one.told != answer, answer
        news = not free and (changed if weighed.act is StragglerOutcome.MOVE else self._is_news(one, weighed.act, slow.lost))
        if not changed and not news:
            return
        facts: dict[str, Any] = {"kind": slow.kind, "rank": slow.rank, "node": slow.node}
        self.log.recorder.add(
            models.StragglerDecision(
                job_id=self.log.job.id,
                at=slow.now,
                **facts,
                act=weighed.act,
                reason=weighed.reason,
                policy=policy.name,
                record=packed(slow),
            )
        )
        if news:
            self.log.record_event(weighed.reason)
        if weighed.act is StragglerOutcome.MOVE:
            asked = {**facts, "quote": one.fault.quote, "reason": weighed.reason}
            by = f"the detector of {slow.kind}"
            self.requests.ask(models.Request(job_id=self.log.job.id, at=slow.now, kind="migrate", by=by, facts=asked))

    def _is_news(self, one: _WatchedRank, act: StragglerOutcome, lost: float) -> bool:
        """Tell whether an answer is worth a word: another one than before, or for a cost that has grown by far.

        Which rank of a node is the slowest changes all the time, and is no news.
        """
        key = (one.fault.kind, machine_of(one.node, self.cluster_kind), one.rank)
        before = self._announced.get(key)
        if before is not None and before[0] is act and lost < WORSE * before[1]:
            return False
        self._announced[key] = (act, lost)
        return True

    def _case(self, one: _WatchedRank) -> StragglerCase | None:
        state, now = self.generations.state, time.time()
        paces = state.paces(state.now, self.generations.roles)
        if paces is None or not settled(paces):
            return None
        here = [rank for rank, node in paces.nodes.items() if node == one.node and one.rank in (None, rank)]
        costs = {rank: cost for rank in here if (cost := cost_of(paces, rank)) is not None}
        if not costs:
            return None
        rank = max(costs, key=lambda rank: (costs[rank][1], -rank))
        step, lost = costs[rank]
        if one.rank is None and one.fault.entry.blame is Blame.NETWORK:
            lost = max(lost, cost_of_links(paces))
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
