"""Ranks that hold the others up: each is weighed once a generation, on record, and moved where the policy says that it pays."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from detectors.catalogue import Fault
from detectors.paces import COMPUTE, HOST, cost_of
from holdfast.history import models
from policies.slowness import MovedBefore, SlowAct, SlowRank, Wanted

if TYPE_CHECKING:
    from holdfast.control.run import Run

MOVABLE: Final = frozenset({COMPUTE.id, HOST.id})
"""Kinds that a move to another node may cure."""


class SlowRanks:
    """What this job has learnt of planned moves, and what it does about slow ranks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pauses: list[float] = []
        self._moved: list[MovedBefore] = []
        self._failed = 0

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
                self._moved.append(MovedBefore(at=at, rank=int(facts["rank"]), node=str(facts.get("node", ""))))

    def weigh(self, fault: Fault) -> None:
        """Decide about a rank that holds the others up, put that on record, and ask for the move if there is to be one."""
        run = self._run
        if fault.kind not in MOVABLE or fault.rank is None or fault.node is None:
            return
        slow = self._case(fault, fault.rank, fault.node)
        if slow is None:
            return
        weighed = run.policy.slowness(slow)
        facts: dict[str, Any] = {"kind": fault.kind, "rank": slow.rank, "node": slow.node}
        run.recorder.add(
            models.Weighing(
                job_id=run.job.id,
                at=slow.now,
                **facts,
                act=weighed.act,
                because=weighed.because,
                policy=run.policy.name,
                record=slow.as_record(),
            )
        )
        run.remark(weighed.because)
        if weighed.act is SlowAct.MOVE:
            asked = {**facts, "quote": fault.quote, "because": weighed.because}
            by = f"the detector of {fault.kind}"
            run.requests.ask(models.Request(job_id=run.job.id, at=slow.now, kind="migrate", by=by, facts=asked))

    def _case(self, fault: Fault, rank: int, node: str) -> SlowRank | None:
        run, now = self._run, time.time()
        paces = run.board.paces(run.board.now, run.roles)
        cost = cost_of(paces, rank) if paces is not None else None
        if cost is None:
            return None
        until = run.board.until()
        return SlowRank(
            now=now,
            kind=fault.kind,
            rank=rank,
            node=node,
            step=cost[0],
            lost=cost[1],
            remaining=None if until is None else max(0, until - run.board.step_before),
            wanted=Wanted(run.spec.checks.straggler),
            barred=run.why_not_kept(),
            spares=run.spares(),
            pauses=tuple(self._pauses),
            failed=self._failed,
            moved=tuple(self._moved),
        )
