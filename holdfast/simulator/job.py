"""A simulated job: it trains until something happens, then a system decides, and the decision is carried out phase by phase."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

import simpy

from holdfast.detectors.catalogue import Fault
from holdfast.detectors.diagnosis import PastFailure, diagnose
from holdfast.policies.nodes.drains import Drain, DrainAction, DrainView, next_action
from holdfast.policies.nodes.node_faults import find_node_faults
from holdfast.policies.recovery.case import (
    IN_PROCESS,
    Case,
    Decision,
    PastFault,
    PastRecovery,
    RecoveryAction,
)
from holdfast.policies.recovery.in_process import restart_pays_off
from holdfast.policies.recovery.policy import Pace, Policy
from holdfast.policies.slowness import PastMigration, StragglerAction, StragglerCase, StragglerOutcome
from holdfast.simulator import accounts
from holdfast.simulator.accounts import JobAccount
from holdfast.simulator.causes import BUG, OVERRUN, PEER, Symptom
from holdfast.simulator.incidents import Attempt, Hit, IncidentInWork
from holdfast.simulator.nodes import NodePool
from holdfast.simulator.placement import JobPlacement
from holdfast.simulator.progress import TrainingPace, TrainingProgress
from holdfast.simulator.scenario import ScenarioJob
from holdfast.simulator.systems import LostAttempts, RecoveryPlan, RecoverySystem, Restore

MAX_FAULTS: Final = 500
"""Past faults of one kind that a case has, as in the controller."""
MAX_FAILURES: Final = 50
MOMENT: Final = 1e-3
"""Seconds before a deadline that count as the deadline: sums of times are rounded."""
COMMANDED: Final = frozenset({"isolate", "reschedule", "resume"})
"""Phases that need a controller; from then on ranks and agents know what to do. `resume`: a recovery that is published as one pause."""
SLOW: Final = "rank-straggles"
CAPACITY: Final = "capacity"
Steps = Generator[simpy.Event, Any, Any]


class SimulatedJob:
    """One job under one system."""

    def __init__(  # noqa: PLR0913 (what it stands on)
        self,
        env: simpy.Environment,
        spec: ScenarioJob,
        *,
        system: RecoverySystem,
        policy: Policy,
        pool: NodePool,
        pace: TrainingPace,
        gpus_per_node: int,
        nodes_per_rack: int,
        operator: float,
        end: float,
        bug_at: float | None,
        count_startup: bool,
        seed: str,
    ) -> None:
        self._env, self.spec, self._system, self._policy, self._pool = env, spec, system, policy, pool
        self._width, self._rack, self._operator, self._bug_at, self._end = gpus_per_node, nodes_per_rack, operator, bug_at, end
        self.account = JobAccount()
        self.progress = TrainingProgress(pace, self.account)
        self._numbers = random.Random(seed)  # noqa: S311 (a simulation)
        self._lag_numbers = random.Random(f"{seed}/lags")  # noqa: S311 (its own: other times stay as they are without measured lags)
        self._at = JobPlacement(env, spec, pool, width=gpus_per_node, hot_spares=system.hot_spares)
        self._away: set[int] = set()
        """Copies of the model that a system without shared ranks has lost for now."""
        self._moved: deque[PastMigration] = deque(maxlen=50)
        self._attempts: deque[Attempt] = deque(maxlen=policy.budget.max_recoveries + policy.budget.max_recoveries_without_progress + 8)
        self._failures: deque[PastFailure] = deque(maxlen=MAX_FAILURES)
        self._earlier: dict[str, deque[PastFault]] = {}
        self._window = max(rule.window for rule in policy.noting)
        self._inbox: deque[Hit | str | tuple[str, float, float]] = deque()
        self._news = env.event()
        self._incidents = 0
        pool.on_free.append(self._tell_of_capacity)
        pool.on_repaired.append(self._tell_of_repair)
        self._spending: tuple[str, float] | None = None
        """Category and beginning of what the job does now, if that is not training."""
        self._count_startup = count_startup
        self._controller_back = 0.0
        self._down_since: float | None = None
        """When the incident began that is in work."""
        self.process = env.process(self._live())

    # -- what happens to it ------------------------------------------------------------------------------------------

    @property
    def members(self) -> Sequence[str]:
        """Return the nodes of the job."""
        return self._at.nodes

    def has(self, node: str) -> bool:
        """Return whether *node* is one of the job's."""
        return node in self._at.place

    def hit(self, hit: Hit) -> None:
        """Tell the job of a fault."""
        self.account.faults += 1
        if hit.breaks:
            self._at.broken[hit.node] = hit
        elif hit.repair:
            self._at.degraded[hit.node] = hit.repair
        self._send(hit)

    def node_of(self, rank: int) -> str | None:
        """Return the node that has *rank*; None while none has."""
        return self._at.ranks.node_of(rank)

    def lose_controller(self, seconds: float) -> None:
        """Lose the controller, if the system has one, for *seconds*."""
        if self._system.managed:
            self._controller_back = max(self._controller_back, self._env.now + seconds)

    def uptime(self, now: float) -> float:
        """Return the seconds until *now* that were no part of an incident."""
        return now - sum(self.account.downtime) - (0.0 if self._down_since is None else now - self._down_since)

    def slow_down(self, node: str, share: float, seconds: float) -> None:
        """Slow the job down while *node* is slow."""
        self._at.slow[node] = share
        self._send(SLOW)
        self._env.process(self._speed_up(node, seconds))

    def _speed_up(self, node: str, seconds: float) -> Steps:
        yield self._env.timeout(seconds)
        if self._at.slow.pop(node, None) is not None:
            self._send("pace")

    def announce_leaving(self, node: str, by: float, seconds: float) -> None:
        """Tell the job that *node* is taken out at the time *by*, for *seconds*."""
        self._send((node, by, seconds))

    def _tell_of_capacity(self) -> None:
        if self._at.misses_ranks:
            self._send(CAPACITY)

    def _tell_of_repair(self, node: str) -> None:
        self._at.broken.pop(node, None)

    def _send(self, message: Hit | str | tuple[str, float, float]) -> None:
        self._inbox.append(message)
        if not self._news.triggered:
            self._news.succeed()

    # -- its life ----------------------------------------------------------------------------------------------------

    def done_now(self, now: float) -> float:
        """Return the training that is done at *now*, in seconds of steps."""
        return self.progress.at(now)

    def close(self, now: float) -> None:
        """Account for what the job is doing at the end of the simulation."""
        if self.progress.training:
            self.progress.stop(now)
        elif self._spending is not None:
            self.account.spend(self._spending[0], now - self._spending[1])
            self._spending = None

    def _live(self) -> Steps:
        if self._count_startup:
            plan = self._system.plans[RecoveryAction.RESTART_WORKERS]
            yield from self._spend(accounts.STARTUP, plan.seconds(self.progress.pace.step))
        while self.account.completed_at is None:
            self._train()
            yield from self._until_news()
            if self.progress.training:
                self.progress.stop(self._env.now)
            if self.spec.work is not None and self.progress.done >= self.spec.work.total_seconds() - 1e-6:
                self.account.completed_at = self._env.now
            elif self._bug_at is not None and self.progress.done >= self._bug_at - 1e-6:
                node = self._at.nodes[len(self._attempts) % len(self._at.nodes)]  # the rank has moved by then
                bug = Hit(node=node, cause=BUG, at=self._env.now, breaks=False, signature="ValueError in train.py", step=self.progress.step)
                self.account.faults += 1
                yield from self._recover([bug])
            else:
                yield from self._answer_news()

    def _train(self) -> None:
        self._pool.note_vacant(self.spec.name, len(self._at.nodes) - self._at.ranks.total / self._width)
        self._news = self._env.event()
        if self._inbox:
            self._news.succeed()
        self.progress.start(self._env.now, capacity=self.capacity, slowdown=max(self._at.slow.values(), default=0.0))

    def _until_news(self) -> Steps:
        """Wait until something happens, the work is done, or the script's bug is reached."""
        ends = [one for one in (self.spec.work.total_seconds() if self.spec.work else None, self._bug_at) if one is not None]
        if ends and (seconds := self.progress.until(min(ends))) < float("inf"):
            yield self._news | self._env.timeout(seconds)
        else:
            yield self._news

    @property
    def capacity(self) -> float:
        """Return the share of the whole job that trains."""
        if self._away:
            return 1 - len(self._away) / self.spec.copies
        return self._at.ranks.total / (self.spec.nodes * self._width)

    def _answer_news(self) -> Steps:
        """Do what the news ask for: recover from faults first, then leave nodes that are taken out, then look at slow and free nodes."""
        news, self._inbox = self._inbox, deque()
        hits = [one for one in news if isinstance(one, Hit) and one.node in self._at.place]
        if hits:
            yield from self._recover(hits)
        for one in news:
            if isinstance(one, tuple) and one[0] in self._at.place:
                yield from self._drain(*one)
        if SLOW in news:
            yield from self._judge_slow_nodes()
        if CAPACITY in news:
            yield from self._grow()

    def _spend(self, category: str, seconds: float) -> Steps:
        """Let *seconds* pass for *category*, or fewer if a fault comes; return whether one came."""
        if seconds <= 0:
            return False
        began = self._env.now
        self._spending = category, began
        self._news = self._env.event()
        timeout = self._env.timeout(seconds)
        while not timeout.processed:
            yield timeout | self._news
            if timeout.processed:
                break
            self._news = self._env.event()
            if any(self._is_noticed(one) for one in self._inbox):
                break
        spent = self._env.now - began
        self._spending = None
        self.account.spend(category, spent)
        return spent < seconds and not timeout.processed

    def _new_hits(self) -> list[Hit]:
        """Return the faults of its nodes that came since, and leave other news for later."""
        found = [one for one in self._inbox if isinstance(one, Hit) and self._is_noticed(one)]
        self._inbox = deque(one for one in self._inbox if not isinstance(one, Hit) or one.cause.symptom is Symptom.NO_FIRST_STEP)
        return found

    def _is_noticed(self, message: Hit | str | tuple[str, float, float]) -> bool:
        """Return whether *message* is a fault of a node of the job that is noticed while a recovery runs."""
        return isinstance(message, Hit) and message.node in self._at.place and message.cause.symptom is not Symptom.NO_FIRST_STEP

    # -- recovery ----------------------------------------------------------------------------------------------------

    def _recover(self, hits: list[Hit]) -> Steps:
        """Bring the job back after *hits*."""
        self._incidents += 1
        self.account.incidents += 1
        incident = IncidentInWork(number=self._incidents, at=self._env.now, hits=hits)
        self._down_since = self._env.now
        detection = max(self._system.detection(one.cause).draw(self._numbers, self.progress.pace.step) for one in hits)
        if (yield from self._spend("detect", detection)):
            incident.hits += self._new_hits()
        if known := self._system.lost_attempts.get(hits[0].cause.name):
            yield from self._break_off(incident, self._numbers.choice(known))
        corrupt = any(one.corrupt_since is not None for one in hits)
        if corrupt or self._system.rejoin is None or not self._lose_replicas(incident.hits):
            while not (yield from self._attempt(incident)):
                pass
        self.account.downtime.append(self._env.now - incident.at)
        self._down_since = None

    def _attempt(self, incident: IncidentInWork) -> Steps:
        """Decide and carry the decision out; return whether training can go on."""
        if self._controller_back > self._env.now:
            yield from self._await_controller("detect")
        # The time passes first: what is decided is carried out at once, so that no spare can break in between.
        yield from self._spend("diagnose", self._system.decide.draw(self._numbers, self.progress.pace.step))
        if self._controller_back > self._env.now:
            yield from self._await_controller("detect")
        incident.hits += self._new_hits()
        decision, case = self._decide(incident)
        self.account.actions[decision.action] += 1
        root = case.diagnosis.root
        self._attempts.append(
            Attempt(
                at=self._env.now, action=decision.action, node=root.node, best=self.progress.best_step, incident=incident.number,
                kind=root.kind, step=root.step,
            )
        )  # fmt: skip
        if decision.action is RecoveryAction.FAIL:
            yield from self._start_anew(incident, decision)
            return True
        if self._system.managed:
            self._isolate(case, decision)
        hot = self._at.rearrange(decision)
        if decision.action is RecoveryAction.WAIT_FOR_CAPACITY and not (yield from self._wait(decision.need)):
            incident.tried.append(decision.action)
            return False
        incident.replacement_attempts += decision.action in IN_PROCESS
        plan = self._system.plan(decision.action, hot=hot)
        if not (yield from self._carry_out(decision.action, plan, incident)):
            incident.hits = [*(replace(one, at=self._env.now) for one in self._at.broken.values()), *self._new_hits()] or incident.hits
            return False
        self._restore(plan.restore, incident, keeps_ranks=decision.action is RecoveryAction.RETRY_STEP)
        return True

    def _carry_out(self, action: RecoveryAction, plan: RecoveryPlan, incident: IncidentInWork) -> Steps:
        """Let the phases of *plan* pass; return whether they brought the job back. An action that takes too long counts as tried."""
        limit = self._policy.timeouts.of(action, self._pace()) if self._system.managed else float("inf")
        spent = list[tuple[str, float]]()
        for phase, time in plan.phases:
            seconds = time.draw(self._numbers, self.progress.pace.step)
            allowed = limit - sum(one for _, one in spent)
            if seconds > allowed:
                self.account.timed_out[action] += 1
                incident.tried.append(action)
                yield from self._spend("failed attempt", allowed)
                return False
            if (yield from self._spend(phase, seconds)):
                lost = min(allowed, self._system.failed_attempt.draw(self._numbers, self.progress.pace.step))
                cut_off = self._system.managed and lost >= self._policy.timeouts.of(RecoveryAction.REPLACE_RANKS)
                yield from self._break_off(incident, LostAttempts(lost, cut_off))
                return False
            if self._controller_back > self._env.now and phase in COMMANDED:
                yield from self._await_controller("failed attempt")
                hit = {one.node for one in incident.hits}
                incident.hits += [Hit(node=one, cause=PEER, at=self._env.now, breaks=False) for one in self._at.nodes if one not in hit]
                return False
            spent.append((phase, seconds))
        stuck = [one for one in self._inbox if isinstance(one, Hit) and one.cause.symptom is Symptom.NO_FIRST_STEP]
        if limit < float("inf") and stuck:
            self._inbox = deque(one for one in self._inbox if one not in stuck)
            self.account.timed_out[action] += 1
            incident.tried.append(action)
            incident.hits = [replace(stuck[0], cause=OVERRUN, at=self._env.now)]
            yield from self._spend("failed attempt", limit - sum(one for _, one in spent))
            return False
        if limit < float("inf") and any(one.cause.symptom is Symptom.HANG for one in self._at.broken.values()):
            incident.tried.append(action)  # a node that still hangs is not reported again: the attempt ends at its timeout
            yield from self._spend("failed attempt", limit - sum(one for _, one in spent))
        return not self._at.broken

    def _pace(self) -> Pace:
        """Return how long a start takes: a restart without what comes before its workers start."""
        step = self.progress.pace.step
        phases = self._system.plan(RecoveryAction.RESTART_WORKERS, hot=False).phases
        return Pace(start=sum(time.mean(step) for name, time in phases if name not in ("isolate", "reschedule")), step=step)

    def _break_off(self, incident: IncidentInWork, lost: LostAttempts) -> Steps:
        """Let the time pass that attempts take which another fault has hit, once in an incident."""
        if incident.broken_off:
            return
        incident.broken_off = True
        end = self._env.now + lost.seconds
        while (left := end - self._env.now) > MOMENT:
            yield from self._spend("failed attempt", left)
            incident.hits += self._new_hits()
        if lost.escalated:
            self.account.timed_out[RecoveryAction.REPLACE_RANKS] += 1
            incident.tried.append(RecoveryAction.REPLACE_RANKS)
            incident.hits = [replace(incident.hits[0], cause=OVERRUN, at=self._env.now)]

    def _await_controller(self, category: str) -> Steps:
        """Let time pass until there is a controller again; faults are not noticed before."""
        while (left := self._controller_back - self._env.now) > MOMENT:
            began, self._spending = self._env.now, (category, self._env.now)
            yield self._env.timeout(left)
            self._spending = None
            self.account.spend(category, self._env.now - began)

    def _restore(self, restore: Restore, incident: IncidentInWork, *, keeps_ranks: bool = False) -> None:
        """Go back to the state that is left. A rank that is lost is alive in another copy of the model, or only in a snapshot."""
        if restore is Restore.STEP and self.spec.copies == 1 and not keeps_ranks and not self._system.redundant_stages:
            restore = Restore.SNAPSHOT
        corrupt = [one.corrupt_since for one in incident.hits if one.corrupt_since is not None]
        progress = self.progress
        if corrupt:
            progress.restore(progress.newest_checkpoint(before=min(corrupt)))
        elif restore is Restore.DISK or (restore is Restore.SNAPSHOT and self._replicas_lost(incident)):
            progress.restore(progress.newest_checkpoint())
        elif restore is Restore.SNAPSHOT and self._system.snapshot_lags:
            lag = self._lag_numbers.choice(self._system.snapshot_lags)
            progress.restore(max(0.0, progress.newest_step() - lag * progress.pace.step))
        else:
            progress.restore(progress.newest_snapshot() if restore is Restore.SNAPSHOT else progress.newest_step())

    def _replicas_lost(self, incident: IncidentInWork) -> bool:
        """Return whether a snapshot and all its replicas, each one rack further in rank order, were lost together."""
        lost, racks = self._places_lost(incident), range(1, self.spec.checkpoint.snapshot_replicas + 1)
        return any(all((place + rack * self._rack) % max(1, self.spec.nodes) in lost for rack in racks) for place in lost)

    def _places_lost(self, incident: IncidentInWork) -> set[int]:
        return {incident.places[one.node] for one in incident.hits if one.breaks and one.node in incident.places}

    def _start_anew(self, incident: IncidentInWork, decision: Decision) -> Steps:
        """Let a person start the failed job again: on all its nodes, from disk."""
        self.account.failures += 1
        self.account.failed_reason = self.account.failed_reason or decision.reason
        end = self._env.now + self._operator
        while self._env.now < end - MOMENT:
            yield from self._spend(accounts.FAILED, end - self._env.now)
            self._new_hits()
        for node in [one for one in self._at.nodes if one in self._at.broken]:
            self._at.exchange([node], [])
        self._at.fill_up()
        if len(self._at.nodes) < self.spec.min_nodes:
            yield from self._wait(self.spec.min_nodes, forever=True)
        self._attempts.clear()
        self._failures.clear()
        if self._bug_at is not None and self.progress.done >= self._bug_at - 1e-6:
            self._bug_at = None  # the person who started it again has mended the script
        plan = self._system.plans[RecoveryAction.RESTART_WORKERS]
        while not (yield from self._pass(plan)):
            for hit in self._new_hits():
                if hit.breaks:
                    self._at.exchange([hit.node], self._pool.prefer_hot(1))
        self._restore(Restore.DISK, incident)

    def _pass(self, plan: RecoveryPlan) -> Steps:
        """Let all phases of *plan* pass, without a limit; return False when a fault came."""
        for phase, time in plan.phases:
            if (yield from self._spend(phase, time.draw(self._numbers, self.progress.pace.step))):
                return False
        return True

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _decide(self, incident: IncidentInWork) -> tuple[Decision, Case]:
        faults = [self._fault(one) for one in incident.hits if one.node in self._at.place] or [self._fault(incident.hits[-1])]
        incident.places |= {one.node: self._at.place[one.node] for one in incident.hits if one.node in self._at.place}
        diagnosis = diagnose(faults, tuple(self._failures), len(self._at.nodes), {}, self._policy.asks)
        dead = {rank for one in incident.hits for rank in self._dead(one)}
        case = Case(
            now=self._env.now,
            diagnosis=diagnosis,
            members=self._at.members,
            lost=frozenset(one.node for one in self._at.broken.values() if one.cause.symptom is Symptom.NODE_LOST),
            spares=tuple(self._pool.free),
            least=self.spec.min_nodes,
            past=self._past(incident),
            tried=tuple(incident.tried),
            budget=self._policy.budget,
            recommended_actions=self._policy.asks,
            earlier=self._remembered(faults),
            blocked_reason=self._system.blocked_reason,
            ranks=self._at.ranks,
            dead=frozenset(dead),
            hot_spares=self._at.hot_spares(len(dead) + self._width * len(incident.hits), {one.node for one in incident.hits}),
            copies=() if self._system.blocked_reason else self._at.live_copies(),
            replacement_attempts=incident.replacement_attempts,
        )
        for fault in faults:
            self._remember(fault, incident.number, root=fault is diagnosis.root)
        root = diagnosis.root
        if not incident.tried:
            self._failures.append(
                PastFailure(node=root.node, step=root.step, signature=root.signature, kind=root.kind, at=root.at, device=root.device)
            )
        return (self._policy.decide(case).decision if self._system.managed else self._decide_by_figures(case)), case

    def _decide_by_figures(self, case: Case) -> Decision:
        """Return what a system without policies does: replace broken nodes, or wait for nodes; it goes on with fewer if it can."""
        reason, bad = case.diagnosis.reason, tuple(self._at.broken)
        if len(bad) + len(self._at.degraded) <= len(case.spares):
            bad += tuple(node for node in self._at.degraded if node not in self._at.broken)
        if not bad:
            return Decision(action=RecoveryAction.RESTART_WORKERS, reason=reason)
        fatal = self._system.redundant_stages and self._stages_lost(bad)
        add = tuple(self._pool.prefer_hot(len(bad)) if self._system.hot_spares else case.spares[: len(bad)])
        if len(add) == len(bad):
            action = RecoveryAction.ROLLBACK if fatal else RecoveryAction.REPLACE_NODE
            return Decision(action=action, reason=reason, drop=bad, add=add)
        if not fatal and self._system.shrinks and len(case.members) - len(bad) + len(add) >= max(1, case.least):
            return Decision(action=RecoveryAction.SHRINK_RESTART, reason=reason, drop=bad, add=add)
        return Decision(action=RecoveryAction.WAIT_FOR_CAPACITY, reason=reason, drop=bad, add=add, need=self.spec.nodes)

    def _stages_lost(self, nodes: Iterable[str]) -> bool:
        """Return whether *nodes* hold a stage of a pipeline and the one before it, which computes it again."""
        per_copy = self.spec.nodes // self.spec.copies
        parts = min(self.spec.stages, per_copy)
        lost = {divmod(self._at.place[node], per_copy) for node in nodes if node in self._at.place}
        stages = {(copy, place * parts // per_copy) for copy, place in lost}
        return any((copy, (stage - 1) % parts) in stages for copy, stage in stages)

    def _fault(self, hit: Hit) -> Fault:
        ranks = self._at.ranks.get(hit.node, ())
        rank = ranks[0] if ranks and (hit.cause.symptom is Symptom.CRASH or hit.cause.names_rank) else None
        return Fault(
            kind=hit.cause.kind,
            at=hit.at,
            node=hit.node,
            rank=rank,
            step=self.progress.step if hit.step is None and rank is not None else hit.step,
            quote=hit.cause.name,
            signature=hit.signature or f"{hit.cause.kind} at {hit.at:.3f}",
            device="" if hit.cause.of_process or hit.cause.symptom is Symptom.NODE_LOST else "device 0",
        )

    def _dead(self, hit: Hit) -> tuple[int, ...]:
        """Return the ranks without a process after *hit*."""
        ranks = self._at.ranks.get(hit.node, ())
        if hit.cause.symptom is Symptom.NODE_LOST:
            return ranks
        return ranks[:1] if hit.cause.symptom is Symptom.CRASH else ()

    def _past(self, incident: IncidentInWork) -> tuple[PastRecovery, ...]:
        attempts = list(self._attempts)
        nexts = [(one.best, one.incident) for one in attempts[1:]] + [(self.progress.best_step, incident.number)]
        return tuple(
            PastRecovery(
                at=one.at, action=one.action, node=one.node, made_progress=best > one.best,
                interrupted=one.action in IN_PROCESS and one.incident == number, kind=one.kind, step=one.step,
            )
            for one, (best, number) in zip(attempts, nexts, strict=False)
        )  # fmt: skip

    def _remembered(self, faults: Iterable[Fault]) -> tuple[PastFault, ...]:
        """Return the past faults of the same kinds, without those of this incident and those that no rule counts any more."""
        found, since = list[PastFault](), self._env.now - self._window
        for kind in {fault.kind for fault in faults}:
            known = self._earlier.get(kind, deque())
            while known and known[0].at < since:
                known.popleft()
            found += (one for one in known if one.incident != str(self._incidents))
        return tuple(sorted(found, key=lambda one: one.at))

    def _remember(self, fault: Fault, incident: int, *, root: bool) -> None:
        known = self._earlier.setdefault(fault.kind, deque(maxlen=MAX_FAULTS))
        known.append(PastFault(kind=fault.kind, at=fault.at, node=str(fault.node), device=fault.device, incident=str(incident), root=root))

    # -- nodes -------------------------------------------------------------------------------------------------------

    def _isolate(self, case: Case, decision: Decision) -> None:
        """Count the faults against the nodes that *decision* drops, as the controller does when it isolates them."""
        for counted in find_node_faults(case, decision.drop):
            self._pool.count_against(counted)

    def _wait(self, need: int, *, forever: bool = False) -> Steps:
        """Wait until the job has *need* nodes; return whether it has, before the policy's time is up."""
        limit = self._policy.timeouts.wait_for_capacity if self._system.managed and not forever else float("inf")
        end = self._env.now + limit
        while True:
            for hit in self._new_hits():
                if hit.breaks:
                    self._at.exchange([hit.node], [])
            self._at.fill_up()
            if len(self._at.nodes) >= need:
                return True
            if self._env.now >= end - MOMENT:
                return False
            began, self._news = self._env.now, self._env.event()
            self._spending = "wait", began
            yield self._news | self._env.timeout(end - self._env.now) if end < float("inf") else self._news
            self._inbox = deque(one for one in self._inbox if one != CAPACITY)
            self._spending = None
            self.account.spend("wait", self._env.now - began)

    def _grow(self) -> Steps:
        """Take nodes in that became free, if that is worth its cost."""
        if self._away or not self._at.misses_ranks or not self._pool.free:
            return
        if self._system.managed and not self._system.blocked_reason and self.spec.copies > 1:
            yield from self._grow_live()
            return
        coming = min(self.spec.nodes - len(self._at.nodes), len(self._pool.free))
        if self._system.grow is not None:
            self._at.fill_up()
            yield from self._spend(accounts.MIGRATION, self._system.grow.draw(self._numbers, self.progress.pace.step))
            return
        if not self._system.managed:
            return
        plan, progress = self._system.plan(RecoveryAction.REPLACE_NODE, hot=False), self.progress
        work = self.spec.work.total_seconds() - progress.done if self.spec.work else self._end - self._env.now
        back = 0.0 if self._system.snapshots else progress.done - progress.newest_checkpoint()
        cost = plan.seconds(progress.pace.step) + back
        if restart_pays_off(left=work / max(1e-9, self.capacity), cost=cost, held=len(self._at.nodes), coming=coming):
            self._at.fill_up()
            yield from self._pass(plan)
            progress.restore(progress.newest_snapshot() if plan.restore is Restore.SNAPSHOT else progress.newest_checkpoint())

    def _grow_live(self) -> Steps:
        """Start missing ranks in complete copies of the model while the others train."""
        if self._system.grow is not None and self._at.grow():
            yield from self._spend(accounts.MIGRATION, self._system.grow.draw(self._numbers, self.progress.pace.step))

    # -- whole replicas ----------------------------------------------------------------------------------------------

    def _lose_replicas(self, hits: Sequence[Hit]) -> bool:
        """Go on without the copies of the model that *hits* took; return False when none is left."""
        per_copy = self.spec.nodes // self.spec.copies
        lost = {self._at.place[one.node] // per_copy for one in hits if one.node in self._at.place} - self._away
        if len(self._away | lost) >= self.spec.copies:
            return False
        self.account.actions["lose-replica"] += len(lost)
        self._away |= lost
        for copy in lost:
            self._env.process(self._rejoin(copy, range(copy * per_copy, (copy + 1) * per_copy)))
        return True

    def _rejoin(self, copy: int, places: range) -> Steps:
        """Replace the broken nodes of a replica, start it, and let it catch up with the others."""
        assert self._system.rejoin is not None
        while True:
            for node in [self._at.nodes[place] for place in places if self._at.nodes[place] in self._at.broken]:
                if self._pool.free:
                    self._at.exchange([node], [next(iter(self._pool.free))])
            waiting = any(self._at.nodes[place] in self._at.broken for place in places)
            yield self._env.timeout(60.0 if waiting else self._system.rejoin.draw(self._numbers, self.progress.pace.step))
            if not any(self._at.nodes[place] in self._at.broken for place in places) and not waiting:
                break
        self._away.discard(copy)
        self._send("pace")

    # -- planned changes ---------------------------------------------------------------------------------------------

    def _judge_slow_nodes(self) -> Steps:
        """Replace slow nodes, as far as the system does that."""
        for node, share in list(self._at.slow.items()):
            if self._system.migrate is None or not self._pool.free or node not in self._at.place:
                continue
            if self._system.managed and not self._is_worth_moving(node, share):
                continue
            self._moved.append(PastMigration(at=self._env.now, rank=self._at.ranks[node][0], node=node))
            self.account.actions["migrate"] += 1
            self._at.exchange([node], self._pool.prefer_hot(1))
            yield from self._spend(accounts.MIGRATION, self._system.migrate.draw(self._numbers, self.progress.pace.step))

    def _is_worth_moving(self, node: str, share: float) -> bool:
        """Return what the policy decides about a slow node."""
        assert self._system.migrate is not None
        step = self.progress.pace.step / (1 - share)
        case = StragglerCase(
            now=self._env.now,
            kind=SLOW,
            rank=self._at.ranks[node][0],
            node=node,
            step=step,
            lost=step - self.progress.pace.step,
            wanted=StragglerAction.AUTO,
            blocked_reason=self._system.blocked_reason,
            spares=tuple(self._pool.free),
            pauses=(self._system.migrate.mean(self.progress.pace.step),),
            moved=tuple(self._moved),
        )
        return self._policy.stragglers(case).act is StragglerOutcome.MOVE

    def _drain(self, node: str, by: float, seconds: float) -> Steps:
        """Leave a node that is taken out as planned: while training runs, or by a restart before it is gone."""
        room, migrate = bool(self._pool.free), self._system.migrate
        drain = Drain(node=node, reason="planned maintenance", since=self._env.now, by=by)
        blocked = self._system.blocked_reason or ("" if migrate else "all ranks restart")
        action = next_action(drain, DrainView(now=self._env.now, blocked_reason=blocked, room=room)).act
        if action is DrainAction.STAY:  # until the deadline
            self._env.process(self._drain_later(node, by, seconds))
            return
        self.account.actions["migrate" if action is DrainAction.MOVE else "planned-restart"] += 1
        self._at.exchange([node], self._pool.prefer_hot(1))
        self._pool.leave(node, seconds)
        if action is DrainAction.MOVE and migrate is not None:
            yield from self._spend(accounts.MIGRATION, migrate.draw(self._numbers, self.progress.pace.step))
            return
        needed = self.spec.min_nodes if self._system.managed or self._system.shrinks else self.spec.nodes
        if len(self._at.nodes) < needed:
            yield from self._wait(needed, forever=True)
        yield from self._pass(self._system.plan(RecoveryAction.REPLACE_NODE, hot=False))

    def _drain_later(self, node: str, by: float, seconds: float) -> Steps:
        yield self._env.timeout(max(0.0, by - self._env.now))
        if node in self._at.place:
            self._send((node, self._env.now, seconds))
