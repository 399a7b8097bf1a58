"""One job as its flow sees it: the state, the fleet, the board, the incident in work, and the record of all of it."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

from detectors.catalogue import Fault, Level
from detectors.diagnosis import Before, see
from detectors.evidence import Evidence, MemoryTrouble
from holdfast.control.board import Board, limits_of
from holdfast.control.cadence import Cadence
from holdfast.control.fleet import Fleet
from holdfast.control.incident import IncidentInWork
from holdfast.control.lineup import Lineup
from holdfast.control.move import MoveInWork
from holdfast.control.plan import roles_environment, seat_environment
from holdfast.control.rebuilt import came_back, facts_of
from holdfast.control.replicas import Replicas
from holdfast.control.requests import Requests
from holdfast.control.snapshots import Snapshots, age_of
from holdfast.control.standbys import Pool, Wanted, places_for
from holdfast.errors import LeaseLost
from holdfast.history import History, LeaseKeeper, Recorder, models
from holdfast.history.figures import STEPS
from holdfast.log import note
from holdfast.report import wording
from holdfast.spec import Cluster, TrainingJob
from holdfast.wire import Message
from policies.ladder import Budget, Recovery, Rung
from policies.placement import regular
from policies.states import TERMINAL, Event, State, advance

log = logging.getLogger("holdfast.control")

TICK: Final = 0.1
"""Seconds between two looks at everything that is no event: stops, silence, progress."""
PING: Final = 1.0
FILL: Final = 0.5
"""Seconds between two looks at the pool of standbys, while training runs."""
STARTED: Final = frozenset({State.LAUNCHING, State.RUNNING, State.RESUMING, State.MIGRATING})
"""States in which the job's nodes are those that will train."""
SETTLED: Final = 300.0
"""Seconds a job without steps must run for its recovery to count as having brought it on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One recovery that was decided: when, which rung, against which node, and the job's newest step ever at that time."""

    at: float
    rung: Rung
    node: str | None
    best: int
    incident: str
    """Id of the incident that it is to answer."""


@dataclass(slots=True, kw_only=True)
class Run:
    """A job being steered."""

    job: models.Job
    spec: TrainingJob
    cluster: Cluster
    history: History
    recorder: Recorder
    fleet: Fleet
    keeper: LeaseKeeper = field(init=False)
    pool: Pool = field(init=False)
    requests: Requests = field(init=False)
    replicas: Replicas = field(init=False)
    snapshots: Snapshots = field(init=False)
    state: State = State.LAUNCHING
    generation: int = 0
    members: tuple[str, ...] = ()
    port: int = 0
    lineup: Lineup = field(default_factory=Lineup)
    roles: tuple[tuple[int, ...], ...] = ()
    """Sets of ranks that do the same work on different data, as rank 0 told of them."""
    tapes: str = ""
    """Where rank 0 left what a standby needs to warm up by itself."""
    held: dict[str, int] = field(default_factory=dict)
    """Node to the newest generation that its agent has been told of."""
    newest: int = 0
    """The greatest number of a generation that any worker may have heard of."""
    board: Board = field(default_factory=lambda: Board(0, {}))
    incident: IncidentInWork | None = None
    moving: MoveInWork | None = None
    incidents: int = 0
    cadence: Cadence | None = None
    """How often to save, where that is the flow's to choose."""
    attempts: list[Attempt] = field(default_factory=list)
    failures_before: list[Before] = field(default_factory=list)
    managed: bool = False
    """Its workers have been seen to report steps."""
    best: int = 0
    """Newest step the job ever finished."""
    moved: str = ""
    """Because of the last move."""
    lost: str | None = None
    """Who took the lease away, if somebody did."""
    tell: Callable[[str, dict[str, Any]], None] = lambda _event, _facts: None
    """Where news for the Prefect UI go."""
    _recorded: int = 0
    _saved: int = 0
    _paced: int = 0
    """The generation whose cadence was changed while it ran."""
    _troubles: set[tuple[str, str]] = field(default_factory=set)
    _next_ping: float = 0.0
    _next_fill: float = 0.0

    def __post_init__(self) -> None:
        self.pool = Pool(self.fleet, self.remark)
        self.replicas = Replicas(self.fleet, self.spec.checkpoint.memory)
        self.snapshots = Snapshots(self.recorder, self.job.id)

    # -- moving -------------------------------------------------------------------------------------------------------

    def move(self, event: Event, because: str) -> None:
        """Take the move that *event* asks for, and record it."""
        before, self.state = self.state, advance(self.state, event)
        self.moved = because
        self.recorder.add(
            models.Move(
                job_id=self.job.id,
                at=time.time(),
                before=before,
                event=event,
                after=self.state,
                because=because,
                generation=self.generation,
            )
        )
        note(log, "job.moved", job=self.job.name, before=before, event=event, after=self.state, because=because)
        self.tell("moved", {"before": before, "event": event, "after": self.state, "because": because})

    @property
    def stop_asked(self) -> bool:
        """Tell whether a person asked the job to stop."""
        return self.requests.stop_asked

    @property
    def over(self) -> bool:
        """Tell whether the job has ended."""
        return self.state in TERMINAL

    def submit(self) -> None:
        """Record that the job begins its life."""
        self.recorder.add(
            models.Move(
                job_id=self.job.id, at=time.time(), before="", event="submitted", after=self.state, because="submitted", generation=0
            )
        )

    def lose(self, holder: str) -> None:
        """Learn that *holder* took the lease away."""
        self.lost = holder

    def remark(self, text: str) -> None:
        """Record something worth telling that is no fault."""
        note(log, "job.remark", job=self.job.name, text=text)
        self.recorder.add(models.Remark(job_id=self.job.id, at=time.time(), text=text))

    def stand(self, node: str, standing: str, because: str) -> None:
        """Record a change of a node's standing."""
        self.recorder.add(
            models.NodeMove(cluster=self.cluster.name, node=node, at=time.time(), standing=standing, because=because, job_id=self.job.id)
        )

    # -- looking ------------------------------------------------------------------------------------------------------

    def pump(self, seconds: float = TICK) -> None:
        """Take in what agents have said, waiting up to *seconds* for the first word; do what is due in between."""
        try:
            node, event = self.fleet.inbox.get(timeout=seconds)
            while True:
                self._take(node, event)
                node, event = self.fleet.inbox.get_nowait()
        except queue.Empty:
            pass
        self._housekeep()

    def _housekeep(self) -> None:
        if self.lost:
            raise LeaseLost(self.job.name, self.lost)
        now = time.monotonic()
        if now >= self._next_ping:
            self._next_ping = now + PING
            self.fleet.ping()
            self.drop_dead_spares()
            if self.state in STARTED:
                for evidence, words in self.replicas.keep_up(self.members):
                    self._tell_of_memory(evidence, words)
            self.snapshots.look(self.board, time.time(), training=self.state is State.RUNNING)
        if now >= self._next_fill and self.state is State.RUNNING and self.incident is None:
            self._next_fill = now + FILL
            self.fill_pool()

    def _take(self, node: str, event: Message) -> None:
        self.board.take(node, event, time.time())
        self.best = max(self.best, self.board.step_before)
        if event["event"] == "steps" and event["generation"] < self.generation:
            self._record_steps(event)  # heard again by a flow that adopted the job; a step that is recorded already stays as it is
        handler = getattr(self, "_on_" + event["event"].replace(".", "_"), None)
        if handler is not None and event.get("generation", self.generation) == self.generation:
            handler(node, event)

    def _on_steps(self, _node: str, event: Message) -> None:
        self.managed = True
        self._record_steps(event)
        step, _, seconds, loss = event["steps"][-1]
        self.tell("progress", {"step": step, "until": self.board.until(), "loss": loss, "seconds": seconds})

    def _record_steps(self, event: Message) -> None:
        generation = event["generation"]
        for step, at, seconds, loss in event["steps"]:
            if generation < self.generation or step > self._recorded:
                row = models.Step(job_id=self.job.id, generation=generation, step=step, at=at, seconds=seconds, loss=loss)
                self.recorder.add(row)
        if generation == self.generation:
            self._recorded = max(self._recorded, event["steps"][-1][0])

    def _on_resumed(self, _node: str, _event: Message) -> None:
        self.managed = True

    def _on_worker_stepped(self, _node: str, _event: Message) -> None:
        if self.board.all_stepped():
            self.note_first_step()

    def _on_worker_roles(self, _node: str, event: Message) -> None:
        """Remember the job's roles, for standbys and for the flows to come."""
        roles = event.get("roles")
        if roles:
            self.roles, self.tapes = tuple(tuple(ranks) for ranks in roles), str(event.get("tapes") or "")
            self.recorder.amend(models.Generation, self.generation_id(), facts=self.facts())

    def _of_move(self, _node: str, event: Message) -> None:
        if self.moving is not None:
            self.moving.take(event["event"].partition(".")[2], event)

    _on_worker_prepared = _on_worker_unprepared = _on_worker_switched = _on_worker_left = _of_move
    _on_standby_prepared = _on_standby_unprepared = _on_standby_switched = _of_move

    def _on_standby_started(self, _node: str, event: Message) -> None:
        self.pool.note_started(event["id"])

    def _on_standby_ready(self, _node: str, event: Message) -> None:
        self.pool.note_ready(event)

    def _on_standby_gone(self, _node: str, event: Message) -> None:
        self.pool.note_gone(event)

    def _on_agent_leaving(self, node: str, event: Message) -> None:
        """Have the ranks of a node that is about to go moved away while there is time; one that cannot be is a lost node in a moment."""
        if node in self.fleet.leaving:
            return
        self.fleet.leaving.add(node)
        self.remark(f"{node} was told to go, and will be gone in {event['seconds']:.0f} s")
        if node in self.members:
            facts = {"from": node}
            self.recorder.add(models.Request(job_id=self.job.id, at=time.time(), kind="migrate", by=f"the agent of {node}", facts=facts))

    @property
    def nowhere(self) -> bool:
        """Tell whether all nodes of the job were told to go, and there is none to go on with."""
        return bool(self.members) and set(self.members) <= self.fleet.leaving and not self.fleet.free()

    def _on_saved(self, _node: str, event: Message) -> None:
        if event["step"] <= self._saved:
            return
        self._saved = event["step"]
        facts = {name: event[name] for name in ("at", "step", "path", "seconds", "size")}
        beside = event.get("beside") or None
        self.recorder.add(models.Checkpoint(job_id=self.job.id, generation=self.generation, beside=beside, **facts))
        if self.cadence is not None:
            self.cadence.note_saved(event["seconds"], beside)
            self.pace()

    def _on_trouble(self, node: str, event: Message) -> None:
        """Record a checkpoint's trouble at once; training goes on through it, so the flow need not turn."""
        if (event["kind"], event["path"]) in self._troubles:
            return
        self._troubles.add((event["kind"], event["path"]))
        facts = {name: event[name] for name in ("at", "step", "path")}
        self.recorder.add(
            models.Checkpoint(job_id=self.job.id, generation=self.generation, trouble=event["kind"], because=event["why"], **facts)
        )
        for fault in see([self.board.trouble(node, event)], limits_of(self.spec.limits)):
            self.record_fault(fault, incident=None)
            self.remark(f"{fault.entry.title}: {fault.quote}. Cure: {fault.entry.action}")

    def _of_memory(self, node: str, event: Message) -> None:
        """Take in what an agent tells of the state in memory."""
        self._tell_of_memory(*self.replicas.take(node, event))

    def _tell_of_memory(self, evidence: MemoryTrouble | None, words: str) -> None:
        """Record a trouble with the state in memory; training goes on through it."""
        for fault in see([evidence], limits_of(self.spec.limits)) if evidence is not None else ():
            self.record_fault(fault, incident=None)
            words = words and f"{fault.entry.title}: {words}. Cure: {fault.entry.action}"
        if words:
            self.remark(words)

    _on_memory_none = _on_memory_full = _on_replica_lost = _on_replica_kept = _of_memory

    def record_fault(self, fault: Fault, *, incident: str | None, root: bool = False) -> models.Fault:
        """Write a fault into the history, and return its row."""
        row = models.Fault(
            job_id=self.job.id,
            incident_id=incident,
            at=fault.at,
            kind=fault.kind,
            level=fault.entry.level,
            subject=fault.subject,
            blame=fault.entry.blame,
            rank=fault.rank,
            node=fault.node,
            generation=self.generation,
            step=fault.step,
            root=root,
            evidence={"quote": fault.quote, "signature": fault.signature, "detail": fault.detail, "source": fault.entry.source},
        )
        self.recorder.add(row)
        self.tell("fault", {"kind": fault.kind, "subject": fault.subject, "quote": fault.quote, "level": fault.entry.level})
        return row

    # -- evidence -----------------------------------------------------------------------------------------------------

    def evidence(self) -> list[Evidence]:
        """Return everything that speaks against this generation now, agents' silence aside."""
        now = time.time()
        found: list[Evidence] = [*self.board.evidence, *self.board.stops(now)]
        steps = self.spec.progress == "steps" or (self.spec.progress == "auto" and (self.managed or self.board.managed()))
        progress = self.board.progress(now, steps_expected=steps)
        if progress is not None:
            found.append(progress)
        if self.board.overrun is not None:
            found.append(self.board.overrun)
        return found

    def faults(self) -> list[Fault]:
        """Return the faults of this generation that ask for an act."""
        seen = see(self.evidence(), limits_of(self.spec.limits))
        return [fault for fault in seen if fault.entry.level not in (Level.RECORD, Level.WATCH)]

    def missing(self) -> dict[str, str]:
        """Return the members whose agents do not speak, and why: gone, or silent while no step comes through."""
        gone = self.fleet.gone()
        silent = self.fleet.silent(self.spec.limits.agent_silence.total_seconds())
        if silent and self._steps_advance():
            silent = {}  # never act on a node while the job's steps still advance through it
        return {node: why for node, why in {**silent, **gone}.items() if node in self.members}

    def _steps_advance(self) -> bool:
        limit = self.spec.limits.agent_silence.total_seconds()
        newest = max((view.progress_at for view in self.board.ranks.values()), default=0.0)
        return time.time() - newest < limit

    def symptom(self) -> str | None:
        """Return what has to be explained, if anything."""
        missing = self.missing()
        if missing:
            return "; ".join(f"the agent of {node} is gone: {why}" for node, why in missing.items())
        found = self.faults()
        return f"{found[0].kind} of {found[0].subject}: {found[0].quote}" if found else None

    def begun(self) -> bool:
        """Tell whether this generation is at work: all started, and a job known to report steps has made its first one."""
        if not self.board.all_started():
            return False
        expects = self.spec.progress == "steps" or (self.spec.progress == "auto" and self.managed)
        return self.board.all_stepped() if expects else True

    def spares(self) -> tuple[str, ...]:
        """Return the nodes with an agent and no ranks."""
        return tuple(node for node in self.fleet.alive() if node not in self.members)

    def room(self) -> dict[str, int]:
        """Return how many more ranks each node with an agent could hold: spare nodes, and those that a take-over left with fewer."""
        ranks = self.board.membership
        return {node: max(0, self.spec.nodes.ranks - len(ranks.get(node, ()))) for node in self.fleet.alive()}

    def drop_dead_spares(self) -> None:
        """Let go of spares whose agents are gone: no rank is hurt, so it is recorded and no incident."""
        for node, why in self.fleet.gone().items():
            if node not in self.members:
                self.fleet.drop(node)
                self.stand(node, "lost", f"the agent of this spare is gone: {why}")
                self.remark(f"spare {node} is gone ({why}); {len(self.spares())} spare(s) left")

    # -- standbys -----------------------------------------------------------------------------------------------------

    def why_not_kept(self) -> str:
        """Return why the ranks that live could not be kept in their processes; empty when they could."""
        if not self.board.grouped():
            return "the job's process groups are not Holdfast's own"
        if not self.lineup.incarnations:
            return "the flow before did not live to record what the processes of this generation know of each other"
        if not self.best:
            return "no step has been made yet"
        if any(view.well for view in self.board.ranks.values()):
            return "some ranks have finished already"
        return ""

    def fill_pool(self) -> None:
        """Start the standbys that are missing, beside training that runs."""
        if not (self.roles and self.board.grouped() and self.board.all_stepped()):
            return
        nodes, room = self.spec.nodes, self.room()
        count = nodes.standbys if nodes.standbys is not None else min(nodes.ranks * nodes.spare, sum(room.values()))
        self.pool.keep_up(places_for(count, room, self.members), self.wanted())

    def wanted(self) -> Wanted:
        """Return what this job's standbys are to be good for."""
        return Wanted(roles=self.roles, world=len(self.board.ranks), environment=self.standby_environment)

    def standby_environment(self, rank: int, number: int, role: int) -> dict[str, str]:
        """Return the environment of standby *number*, which stands for *rank* until it is given one, and parks in *role*."""
        return {
            **self.seat_environment(rank),
            **roles_environment(self.roles, self.tapes),
            "HOLDFAST_STANDBY": str(number),
            "HOLDFAST_PARK": str(role),
        }

    def seat_environment(self, rank: int, generation: int | None = None, lineup: Lineup | None = None) -> dict[str, str]:
        """Return what a process that takes over *rank* must know of its place."""
        number, ranks = self.generation if generation is None else generation, self.spec.nodes.ranks
        place = seat_environment(rank, lineup or self.lineup, generation=number, ranks_per_node=ranks, job=self.job.name)
        return {**place, **self.replicas.environment()}

    def regular(self) -> tuple[str, ...]:
        """Return the nodes that hold the job's ranks when each holds as many as it can."""
        lost = self.incident.lost if self.incident is not None else set()
        return regular(self.board.membership, self.spec.nodes.ranks, frozenset(lost))

    # -- generations --------------------------------------------------------------------------------------------------

    def generation_id(self) -> str:
        """Return the id of the current generation's row: one job, one number, one row, whoever writes it."""
        return f"{self.job.id}-{self.generation}"

    def end_generation(self) -> None:
        """Record the end of the current generation, if there is one."""
        if self.generation:
            now = time.time()
            self.snapshots.record(self.board, now)
            self.recorder.amend(models.Generation, self.generation_id(), ended_at=now)

    def begin_generation(self, number: int, membership: dict[str, list[int]], *, lineup: Lineup) -> None:
        """Start a new generation with an empty board; of processes that live on it knows what was known of them."""
        before, self.board = self.board, Board(number, membership, since=lineup.since, kept=lineup.kept)
        self.board.keep(before)
        self.generation, self.newest, self.members = number, max(self.newest, number), tuple(membership)
        self.lineup, self.port = lineup, lineup.store[1]
        self._recorded = self._saved = 0
        self._next_ping = 0.0  # whose snapshots are kept where has to follow

    def enter_generation(self, number: int, membership: dict[str, list[int]], *, lineup: Lineup, because: str) -> None:
        """End the current generation, begin the next one, and put both on record."""
        self.end_generation()
        self.begin_generation(number, membership, lineup=lineup)
        self.recorder.add(
            models.Generation(
                id=self.generation_id(),
                job_id=self.job.id,
                number=number,
                at=time.time(),
                world_size=len(self.board.ranks),
                ranks={node: list(ranks) for node, ranks in membership.items()},
                port=self.port,
                because=because,
                facts=self.facts(),
            )
        )

    def choose_every(self, since: str, nodes: int) -> int | None:
        """Choose how often to save on so many *nodes*; leave a change, *since* when it holds, and its reason on record."""
        if self.cadence is None:
            return None
        present, steps = self.lineup.every, [seconds for _, seconds in islice(reversed(self.board.durations), STEPS)]
        choice = self.cadence.choose(present, nodes=nodes, incidents=self.answered(), steps=steps)
        if choice is not None and choice.every != present:
            before = f" (before: {present:,})" if present else ""
            self.remark(f"from {since} on a checkpoint every {wording.plural(choice.every, 'step')}{before}: {choice.because}")
        return None if choice is None else choice.every

    def pace(self) -> None:
        """Leave the cadence that the figures ask for now with the agent of rank 0, which hands it on with the next save.

        Told again after each save once it has changed, as an order may be lost. Nothing depends on whether the ranks have it yet: they go
        over to it together, and the next generation says it anew.
        """
        if self.state is not State.RUNNING or self.incident is not None or self.moving is not None:
            return
        every = self.choose_every("the next save", len(self.members))
        if every is None:
            return
        if every != self.lineup.every:
            self.lineup, self._paced = replace(self.lineup, every=every), self.generation
            self.recorder.amend(models.Generation, self.generation_id(), facts=self.facts())
        if self._paced == self.generation:
            self.fleet.later(self.board.ranks[0].node, "pace", generation=self.generation, every=every)

    def answered(self) -> frozenset[str]:
        """Return the incidents for which a recovery was decided, or is about to be."""
        present = {self.incident.row.id} if self.incident is not None else set()
        return frozenset({one.incident for one in self.attempts} | present)

    def facts(self) -> dict[str, Any]:
        """Return what the next flow must know of this generation's processes, if it has to adopt them."""
        return {**self.lineup.as_record(), "roles": [list(ranks) for ranks in self.roles], "tapes": self.tapes}

    def continue_generation(self, number: int, membership: dict[str, list[int]], *, lineup: Lineup, recorded: int, saved: int) -> None:
        """Take up a generation that another flow began: what the history has of it is not recorded twice."""
        self.begin_generation(number, membership, lineup=lineup)
        self._recorded, self._saved = recorded, saved

    def note_first_step(self) -> None:
        """Record when this generation did its first step, and what it went on from."""
        self.lineup = replace(self.lineup, joined=self.generation)
        resumed = self.board.resumed_step()
        first, until = self.board.first_step_at(), self.board.until()
        self.recorder.amend(models.Generation, self.generation_id(), first_step_at=first, resumed_step=resumed, until=until)

    def close_incident(self, outcome: str) -> None:
        """Record how the incident in work ended: phases, steps lost, downtime."""
        incident = self.incident
        assert incident is not None
        row, now = incident.row, time.time()
        row.outcome, row.closed_at, row.generation_after = outcome, now, self.generation
        if outcome == "recovered":
            self._account(incident, now)
            row.facts = facts_of(self.board.regrouped, self.board.covered) or came_back(self.board.ranks.values())
            if self.cadence is not None:
                self.cadence.note_recovered(row)
        age = age_of(incident.board)
        if age is not None:
            row.facts = {**(row.facts or {}), "snapshot_age": age}
        for phase in incident.rows():
            self.recorder.add(phase)
        fields = ("rung", "outcome", "closed_at", "generation_after", "resumed_step", "steps_lost", "downtime_s", "because", "facts")
        self.recorder.amend(models.Incident, row.id, **{name: getattr(row, name) for name in fields})
        self.tell("incident", {"incident": incident})
        self.incident = None

    def _account(self, incident: IncidentInWork, now: float) -> None:
        """Split the time since the ranks were stopped into T1 to T4, and price the rollback (T0) by what the lost steps had taken."""
        row, first = incident.row, self.board.first_step_at() or now
        started = max((view.started or 0.0 for view in self.board.ranks.values()), default=now)
        incident.lap("reschedule", started)
        group, load = self.board.slowest_mark("group"), self.board.slowest_mark("load")
        incident.seconds |= {"communication": group, "load": load, "warm-up": max(0.0, first - incident.lap_at - group - load)}
        row.downtime_s = first - row.fault_at
        row.resumed_step = self.board.resumed_step()
        if row.resumed_step is not None and row.step_before is not None:
            row.steps_lost = max(0, row.step_before - row.resumed_step)
            incident.seconds["rollback"] = incident.board.seconds_of(row.resumed_step)

    def past(self, now: float) -> tuple[Recovery, ...]:
        """Return the earlier recoveries with what each gained until the next one."""
        if not self.attempts:
            return ()
        present = self.incident.row.id if self.incident is not None else ""
        nexts = [(one.at, one.best, one.incident) for one in self.attempts[1:]] + [(now, self.best, present)]
        return tuple(
            Recovery(
                at=one.at,
                rung=one.rung,
                node=one.node,
                gained=best > one.best if self.managed else at - one.at > SETTLED,
                overtaken=one.rung is Rung.TAKE_OVER and one.incident == incident,
            )
            for one, (at, best, incident) in zip(self.attempts, nexts, strict=True)
        )

    def budget(self) -> Budget:
        """Return the job's budget as the policies read it."""
        budget = self.spec.budget
        return Budget(
            in_place=budget.in_place, window=budget.window.total_seconds(), recoveries=budget.recoveries, fruitless=budget.fruitless
        )

    def deadline(self, rung: Rung) -> float:
        """Return how many seconds *rung* may take."""
        deadlines = self.spec.deadlines
        return {
            Rung.TAKE_OVER: deadlines.take_over,
            Rung.RESTART_IN_PLACE: deadlines.restart_in_place,
            Rung.REPLACE_NODE: deadlines.replace_node,
            Rung.SHRINK: deadlines.shrink,
            Rung.WAIT_FOR_CAPACITY: deadlines.replace_node,  # once capacity is there; the wait has its own
        }[rung].total_seconds()
