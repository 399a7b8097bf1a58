"""One job as its flow sees it: the state, the fleet, the board, the incident in work, and the record of all of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

from detectors.catalogue import Fault, Levels
from detectors.diagnosis import Before
from detectors.evidence import CutShort
from detectors.progress import NOT_ENDING
from holdfast.control.agents.connectivity import ConnectivityMonitor
from holdfast.control.agents.pool import AgentPool
from holdfast.control.checkpoints.interval import CheckpointInterval
from holdfast.control.checkpoints.recovery_facts import came_back, facts_of
from holdfast.control.checkpoints.replicas import Replicas
from holdfast.control.checkpoints.snapshot_stats import SnapshotStats, age_of
from holdfast.control.config.cluster_file import ClusterFile
from holdfast.control.config.policy_file import WatchedPolicy
from holdfast.control.config.worker_env import roles_environment, seat_environment
from holdfast.control.faults.alerts import Alerts
from holdfast.control.faults.evaluator import FaultEvaluator
from holdfast.control.faults.history import FaultHistory
from holdfast.control.faults.network_check import NetworkCheck
from holdfast.control.faults.pauses import Pauses
from holdfast.control.faults.rank_status import RankStatusQuery
from holdfast.control.faults.stragglers import Stragglers
from holdfast.control.nodes.allocations import BorrowedNodes
from holdfast.control.nodes.approvals import Approvals
from holdfast.control.nodes.drains import PlannedDrains
from holdfast.control.nodes.eligibility import NodeEligibility
from holdfast.control.nodes.hot_spares import HotSparePool, HotSpareSpec, places_for
from holdfast.control.nodes.preflight import Preflight
from holdfast.control.nodes.scale_up import ScaleUp
from holdfast.control.nodes.spare_pool import SparePool
from holdfast.control.state.generation import NONSENSE, GenerationState, limits_of
from holdfast.control.state.migration import MigrationState
from holdfast.control.state.rank_table import RankTable
from holdfast.control.supervisor import event_table, termination
from holdfast.control.supervisor.detach import Detach
from holdfast.control.supervisor.event_handlers import EventHandlers
from holdfast.control.supervisor.flow_run import FlowRun
from holdfast.control.supervisor.incident import IncidentInWork
from holdfast.control.supervisor.news import nodes_of
from holdfast.control.supervisor.requests import Requests
from holdfast.errors import HandedOver, LeaseLost
from holdfast.history import History, LeaseKeeper, Recorder, models, queries
from holdfast.history.statistics import STEPS
from holdfast.log import note
from holdfast.paths import job_directory
from holdfast.protocol import Message
from holdfast.report import wording
from holdfast.report.wording import ranks as in_ranges
from holdfast.spec import Cluster, TrainingJob
from holdfast.spec.check import short_of_gpus
from policies import uptime
from policies.case import IN_PROCESS, Copies, Decision, HotSpare, PastRecovery, RecoveryAction
from policies.cordons import Owner
from policies.placement import regular
from policies.policy import Policy
from policies.states import TERMINAL, Event, State, advance

log = logging.getLogger("holdfast.control")

TICK: Final = 0.1
"""Seconds between two looks at everything that is no event: stops, silence, progress."""
PING: Final = 1.0
FILL: Final = 0.5
"""Seconds between two looks at the pool of standbys, while training runs."""
STARTED: Final = frozenset({State.LAUNCHING, State.RUNNING, State.RESUMING, State.MIGRATING})
"""States in which the job's nodes are those that will train."""
REMEMBERED: Final = 5000
"""Faults whose rows are remembered."""
DOUBT: Final = 4
"""Beats without a word from an agent from which on a standstill of the job may be its node's."""
SILENT_AND_STILL: Final = 8
"""Beats without a word from an agent that count as its silence while the job stands still: two signals that agree need less of each."""
SPARE_PATIENCE: Final = 30.0
"""Seconds for which a spare node may be unheard while training runs: on a slow link its words and its answers wait behind those of others,
and the standby that it holds is worth more than to know early. No job goes on it meanwhile."""
GOT_ON: Final = "got_on"
"""In an incident's facts: the generation before it brought the job on, which reports no steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryAttempt:
    """One recovery that was decided: when, which action, against which node, and the job's newest step ever at that time."""

    at: float
    action: RecoveryAction
    node: str | None
    best: int
    incident: str
    """Id of the incident that it is to answer."""
    kind: str = ""
    """Catalogue kind of the root fault, where it is on record."""
    step: int | None = None
    """The step that it came at."""
    generation: int = 0
    """The generation that it is to follow."""
    got_on: bool = False
    """That generation brought the job on, if it is one without steps."""


@dataclass(slots=True, kw_only=True)
class JobController:
    """A job being steered."""

    job: models.Job
    spec: TrainingJob
    cluster: Cluster
    history: History
    recorder: Recorder
    fleet: AgentPool
    keeper: LeaseKeeper = field(init=False)
    pool: HotSparePool = field(init=False)
    requests: Requests = field(init=False)
    preflight: Preflight = field(init=False)
    eligibility: NodeEligibility = field(init=False)
    approvals: Approvals = field(init=False)
    replicas: Replicas = field(init=False)
    snapshots: SnapshotStats = field(init=False)
    pauses: Pauses = field(init=False)
    roll: RankStatusQuery = field(init=False)
    concerns: Alerts = field(init=False)
    hearing: EventHandlers = field(init=False)
    departures: PlannedDrains = field(init=False)
    slow_ranks: Stragglers = field(init=False)
    watched_policy: WatchedPolicy = field(init=False)
    cluster_file: ClusterFile = field(init=False)
    growth: ScaleUp = field(init=False)
    refill: SparePool = field(init=False)
    traffic: NetworkCheck = field(init=False)
    sight: FaultEvaluator = field(init=False)
    connectivity: ConnectivityMonitor = field(init=False)
    borrowed_nodes: BorrowedNodes = field(init=False)
    seen_before: FaultHistory = field(default_factory=FaultHistory)
    state: State = State.LAUNCHING
    generation: int = 0
    members: tuple[str, ...] = ()
    port: int = 0
    rank_table: RankTable = field(default_factory=RankTable)
    roles: tuple[tuple[int, ...], ...] = ()
    """Sets of ranks that do the same work on different data, as rank 0 told of them."""
    copies: Copies = ()
    """Sets of ranks that hold one copy of the model together, where the script shares each step's samples out among them."""
    tapes: str = ""
    """Where rank 0 left what a standby needs to warm up by itself."""
    held: dict[str, int] = field(default_factory=dict)
    """Node to the newest generation that its agent has been told of."""
    newest: int = 0
    """The greatest number of a generation that any worker may have heard of."""
    board: GenerationState = field(default_factory=lambda: GenerationState(0, {}))
    incident: IncidentInWork | None = None
    closed: models.Incident | None = None
    """The newest incident that was closed."""
    recovered: Decision | None = None
    """The newest decision on it."""
    moving: MigrationState | None = None
    incidents: int = 0
    cadence: CheckpointInterval | None = None
    """How often to save, where that is the flow's to choose."""
    attempts: list[RecoveryAttempt] = field(default_factory=list)
    failures_before: list[Before] = field(default_factory=list)
    adopted: bool = False
    """Another flow began the job."""
    managed: bool = False
    """Its workers have been seen to report steps."""
    best: int = 0
    """Newest step the job ever finished."""
    moved: str = ""
    """Because of the last move."""
    lost: str | None = None
    """Who took the lease away, if somebody did."""
    handover: Detach = field(default_factory=Detach)
    """Whether this flow is to let go of the job."""
    flow_run: FlowRun = field(default_factory=FlowRun)
    """The Prefect flow run that this controller runs in."""
    terminated_at: float | None = None
    """When its process received a SIGTERM that is still to be answered (monotonic)."""
    saved: str = ""
    """What is on disk of a job that was stopped or suspended: where a resume continues from."""
    tell: Callable[[str, dict[str, Any]], None] = lambda _event, _facts: None
    """Where news for the Prefect UI go."""
    _paced: int = 0
    """The generation whose cadence was changed while it ran."""
    _rows: dict[int, tuple[Fault, models.Fault]] = field(default_factory=dict)
    """The newest faults on record, by their identity, with their rows."""
    _nonsense: set[str] = field(default_factory=set)
    """Nodes whose agents told what makes no sense."""
    _next_ping: float = 0.0
    _next_fill: float = 0.0
    _next_roll: float = 0.0

    def __post_init__(self) -> None:
        self.pool = HotSparePool(self.fleet, self.remark)
        asking = self.cluster.quarantine.ask.total_seconds()
        self.approvals = Approvals(self.history, self.job, asking, self.remark, self.pass_on)
        owner = Owner(name=f"job {self.job.name}")
        self.eligibility = NodeEligibility(self.cluster, self.history, self.fleet.source.names, owner, self.remark, self.approvals)
        walltime = self.spec.limits.walltime
        self.eligibility.ends = None if walltime is None else self.job.at + walltime.total_seconds()
        self.preflight = Preflight(
            self.cluster, self.history, on=self.spec.preflight, doubts=self.eligibility.doubts, cut_short=self.eligibility.cut_short
        )
        self.replicas = Replicas(self.fleet, self.spec.checkpoint.memory)
        self.snapshots = SnapshotStats(self.recorder, self.job.id)
        self.pauses = Pauses(self.remark)
        self.roll, self.concerns = RankStatusQuery(self.fleet), Alerts(lambda: self.levels)
        self.hearing, self.departures, self.slow_ranks = EventHandlers(self), PlannedDrains(self), Stragglers(self)
        self.watched_policy = WatchedPolicy(self.spec, job_directory(self.spec.name))
        self.cluster_file = ClusterFile(self.cluster)
        self.growth, self.borrowed_nodes, self.refill = ScaleUp(self), BorrowedNodes(self), SparePool(self)
        self.traffic = NetworkCheck(self.fleet.source)
        self.connectivity = ConnectivityMonitor(self.fleet, self.spec.limits.lease.total_seconds(), self._note, self.remark)
        self.sight = FaultEvaluator(self.board, self.connectivity.known_until)
        self.eligibility.lent = self.borrowed_nodes.departure

    # -- moving -------------------------------------------------------------------------------------------------------

    def move(self, event: Event, reason: str) -> None:
        """Take the move that *event* asks for, and record it."""
        before, self.state = self.state, advance(self.state, event)
        self.moved = reason
        self.recorder.add(
            models.Move(
                job_id=self.job.id,
                at=time.time(),
                before=before,
                event=event,
                after=self.state,
                reason=reason,
                generation=self.generation,
            )
        )
        note(log, "job.moved", job=self.job.name, before=before, event=event, after=self.state, reason=reason)
        self.tell("moved", {"before": before, "event": event, "after": self.state, "reason": reason})

    @property
    def token(self) -> str:
        """Return the secret by which the job's workers know each other."""
        return str(self.fleet.plan["environment"]["HOLDFAST_TOKEN"])

    @property
    def is_to_end(self) -> bool:
        """Tell whether a person asked the job to stop or to be suspended."""
        return bool(self.requests.stop_reason or self.requests.suspend_reason)

    @property
    def suspended(self) -> bool:
        """Tell whether the job is saved, holds no nodes, and waits to be resumed."""
        return self.state is State.SUSPENDED

    @property
    def released(self) -> bool:
        """Tell whether the job holds no nodes any more: it has ended, or is suspended."""
        return self.over or self.suspended

    @property
    def live(self) -> bool:
        """Tell whether this controller has still something to do for the job."""
        return not (self.released or self.handed_over)

    @property
    def over(self) -> bool:
        """Tell whether the job has ended."""
        return self.state in TERMINAL

    @property
    def handed_over(self) -> bool:
        """Tell whether this flow lets go of the job, which goes on."""
        return bool(self.handover.why) and not self.released

    def submit(self) -> None:
        """Record that the job begins its life."""
        self.recorder.add(
            models.Move(
                job_id=self.job.id, at=time.time(), before="", event="submitted", after=self.state, reason="submitted", generation=0
            )
        )

    def pass_on(self, event: str, facts: dict[str, Any]) -> None:
        """Give news of others to where the Prefect UI gets them."""
        self.tell(event, facts)

    def lose(self, holder: str) -> None:
        """Learn that *holder* took the lease away."""
        self.lost = holder

    def remark(self, text: str) -> None:
        """Record something worth telling that is no fault."""
        note(log, "job.remark", job=self.job.name, text=text)
        self.recorder.add(models.Remark(job_id=self.job.id, at=time.time(), text=text))

    def stand(self, node: str, standing: str, reason: str) -> None:
        """Record a change of a node's standing."""
        self.recorder.add(
            models.NodeMove(cluster=self.cluster.name, node=node, at=time.time(), standing=standing, reason=reason, job_id=self.job.id)
        )

    # -- looking ------------------------------------------------------------------------------------------------------

    def pump(self, seconds: float = TICK) -> None:
        """Take in what agents have said, waiting up to *seconds* for the first word; do what is due in between."""
        for node, event in self.fleet.event_queue.drain(seconds):
            try:
                event_table.take(self, node, event)
            except NONSENSE as error:
                self._tell_nonsense(node, event, error)
        self._housekeep()

    def _tell_nonsense(self, node: str, event: Message, error: Exception) -> None:
        """Go on without an event that makes no sense; it is told once of each node, as it may speak of a bug of ours too."""
        if node in self._nonsense:
            return
        self._nonsense.add(node)
        why = f"{str(event.get('event'))[:40]}: {error!r}"[:200]
        note(log, "event.nonsense", level=logging.WARNING, node=node, why=why, told=repr(event)[:400])
        self.remark(f"the agent of {node} told what makes no sense ({why}): it is let pass")

    def _housekeep(self) -> None:
        if self.lost:
            raise LeaseLost(self.job.name, self.lost)
        termination.answer(self)
        if self.handed_over:
            raise HandedOver(self.job.name, self.handover.why)
        self.connectivity.look()
        now = time.monotonic()
        if now >= self._next_ping:
            self._next_ping = now + PING
            self.fleet.ping()
            self.fleet.heed()
            self.drop_dead_spares()
            if self.state in STARTED:
                for evidence, words in self.replicas.keep_up(self.members):
                    self.hearing.tell_of_memory(evidence, words)
            self._tell_news()
            self.snapshots.look(self.board, time.time(), training=self.state is State.RUNNING)
            self.take_files()
            self.borrowed_nodes.look()
            self.departures.look(time.time())
        if self.state in STARTED:
            self._look_out(now)
        if now >= self._next_fill and self.state is State.RUNNING and self.incident is None and not self.connectivity.deaf():
            self._next_fill = now + FILL
            self.fill_pool()
            self.preflight.keep_up(self.spares())
            self.growth.look(now)
            self.refill.look(now)

    def _tell_news(self) -> None:
        """Tell of what was found beside the flow's work."""
        if self.incident is None or self.state is State.WAITING:
            self.tell("nodes", nodes_of(self))
        for why, nodes in self.preflight.news(self.members).items():
            self.remark(f"{', '.join(nodes)}: {why}")
        for words in self.traffic.news():
            self.remark(words)
        for node, told in self.fleet.reached_late():
            self.take_in(node, told)
            self.remark(f"the agent of {node} could be reached again")
            if node in self.members and self.held[node] < self.generation:  # what was presumed of it is not so
                self.board.evidence.append(CutShort(at=time.time(), state=self.state))

    def take_in(self, node: str, told: Message) -> None:
        """Learn what the agent of *node*, which ran already, says of its ranks and standbys."""
        self.held[node] = int(told["generation"])
        self.pool.adopt(node, told.get("standbys") or {}, self.rank_table.width)
        self.board.unseen.difference_update(self.board.membership.get(node, ()))
        for rank in told.get("grouped") or () if told["generation"] == self.generation else ():
            if rank in self.board.ranks:
                self.board.ranks[rank].grouped = True

    def _look_out(self, now: float) -> None:
        """Tell of what training goes on through, and ask ranks that are quiet where they stand."""
        self.hearing.look(now)
        for fault in self.concerns.look(
            self.board, now, roles=self.roles, limits=limits_of(self.spec.limits), good=self.hearing.good_before
        ):
            self._note(fault)
            self.slow_ranks.weigh(fault)
        self.slow_ranks.look(now)
        for step, ranks in self.concerns.questions(self.board):
            self.roll.ask(self.board, {self.board.ranks[rank].node for rank in ranks}, {"do": "sums", "step": step}, ranks=sorted(ranks))
        if now >= self._next_roll:
            self._next_roll = now + TICK
            seen = self.sight.progress(limits_of(self.spec.limits), steps_expected=self._steps_expected())
            if seen is not None:
                self.roll.look(self.board, seen, limits_of(self.spec.limits))
                self.pauses.look(self.board, seen, limits_of(self.spec.limits))

    def _note(self, fault: Fault) -> None:
        """Record a fault that training goes on through, and tell of it."""
        self.record_fault(fault, incident=None)
        self.remark(wording.told(fault.entry.title, fault.quote, fault.entry.action))

    def record_fault(self, fault: Fault, *, incident: str | None, root: bool = False) -> models.Fault:
        """Write a fault into the history, and return its row; one that is there already becomes the incident's."""
        if id(fault) in self._rows:
            known = self._rows[id(fault)][1]
            known.incident_id, known.root = incident, root
            self.seen_before.remember([known])
            self.recorder.amend(models.Fault, known.id, incident_id=incident, root=root)
            return known
        evidence = {name: getattr(fault, name) for name in ("quote", "signature", "detail", "device")}
        row = models.Fault(
            job_id=self.job.id,
            incident_id=incident,
            at=fault.at,
            kind=fault.kind,
            level=self.levels.of(fault),
            subject=fault.subject,
            blame=fault.entry.blame,
            rank=fault.rank,
            node=fault.node,
            generation=self.generation,
            step=fault.step,
            root=root,
            evidence={**evidence, "source": fault.source or fault.entry.source},
        )
        self.recorder.add(row)
        self.seen_before.remember([row])
        self._rows[id(fault)] = fault, row
        if len(self._rows) > REMEMBERED:
            del self._rows[next(iter(self._rows))]
        self.tell("fault", {"fault": row})
        return row

    def rows_of(self, faults: Iterable[Fault]) -> set[str]:
        """Return the ids of the rows that *faults* have in the history already."""
        return {self._rows[id(fault)][1].id for fault in faults if id(fault) in self._rows}

    # -- evidence -----------------------------------------------------------------------------------------------------

    def seen(self) -> list[Fault]:
        """Return everything that speaks against this generation now, agents' silence aside."""
        return self.sight.faults(limits_of(self.spec.limits), steps_expected=self._steps_expected())

    def _steps_expected(self) -> bool:
        return self.spec.progress == "steps" or (self.spec.progress == "auto" and (self.managed or self.board.managed()))

    def faults(self) -> list[Fault]:
        """Return the faults of this generation that ask for an act."""
        return [fault for fault in self.seen() if self.levels.acts(fault) and not self.eligibility.pardons(fault, self.levels)]

    def missing(self) -> dict[str, str]:
        """Return the members whose agents do not speak, and why: gone, or silent while no step comes through."""
        gone, limit = self.fleet.gone(), self.spec.limits.agent_silence.total_seconds()
        silent = self.fleet.silent(limit)
        if silent and self._steps_advance():
            silent = {}  # never act on a node while the job's steps still advance through it
        if not silent and (soon := self.fleet.silent(min(limit, SILENT_AND_STILL * self.fleet.beat))) and self._stands_still():
            silent = soon
        cut_off = self.fleet.cut_off()
        if cut_off and not (self.faults() or self._stands_still()):
            cut_off = {}
        if (silent or cut_off) and self.connectivity.deaf() and not self.faults():
            silent = cut_off = {}
        missing = {**silent, **cut_off, **gone}
        return {node: why for node, why in missing.items() if node in self.members}

    def doubtful(self) -> bool:
        """Tell whether an agent is missing in a moment, or has spoken again.

        Its connection has just ended and is sought, or the job stands still and it has missed several beats.
        """
        if not self.fleet.sought().isdisjoint(self.members):
            return True
        silent = self.fleet.silent(DOUBT * self.fleet.beat).keys() & set(self.members)
        return bool(silent) and self._stands_still() and not silent <= self.missing().keys()

    def _steps_advance(self) -> bool:
        limit = self.spec.limits.agent_silence.total_seconds()
        newest = max((view.progress_at for view in self.board.ranks.values()), default=0.0)
        return time.time() - newest < limit

    def _stands_still(self) -> bool:
        """Tell whether no rank gets on, for longer than the job's own steps explain."""
        return self.sight.stands_still(limits_of(self.spec.limits), steps_expected=self._steps_expected())

    def over_but_for(self) -> str:
        """Return why the job is completed although some ranks have not ended; empty when it is not.

        Rank 0 has ended with status 0, or all steps are done, and the ranks that are left show no sign of life any more. To run all of it
        again would not help: a script that has come to its end on rank 0 would come to it again.
        """
        if not any(view.well for view in self.board.ranks.values()):
            return ""
        fault = next((one for one in self.faults() if one.kind == NOT_ENDING.id), None)
        until = self.board.until()
        if fault is None or not (self.board.first.well or (until is not None and self.board.step_before >= until)):
            return ""
        self.record_fault(fault, incident=None)
        left = sorted(view.rank for view in self.board.ranks.values() if not view.ended)
        done = "rank 0 ended with status 0" if self.board.first.well else f"step {until}, the last one, is done"
        return f"{done}; rank(s) {in_ranges(left)} did not end by themselves and are ended: {fault.quote}"

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
        """Return the nodes with an agent and no ranks, those last that something speaks against; none that no job may be given.

        Nor any that neither speaks nor answers now.
        """
        return tuple(self.preflight.by_worth(self.eligibility.usable(self.fleet.alive(but={*self.members, *self._unheard()}))))

    def standbys(self) -> tuple[HotSpare, ...]:
        """Return the standbys that can take over a rank now."""
        unheard = self._unheard()
        return tuple(one for one in self.pool.ready(self.rank_table.width) if one.node not in unheard)

    def _unheard(self) -> dict[str, str]:
        """Return the nodes that neither speak nor answer by a new connection, and why; none while nobody can be heard at all."""
        return {} if self.connectivity.deaf() else self.fleet.lost(self.spec.limits.agent_silence.total_seconds())

    def free(self) -> list[str]:
        """Return the nodes of the cluster that nobody holds and that jobs may be given, in the cluster's order."""
        fit = set(self.cluster.labelled(self.spec.nodes.labels)) if self.spec.nodes.labels else None
        few = short_of_gpus(self.spec, self.cluster)
        return self.eligibility.usable(node for node in self.fleet.free() if (fit is None or node in fit) and node not in few)

    def vacant(self) -> frozenset[int]:
        """Return the ranks that the job goes on without."""
        return frozenset(range(self.rank_table.width)) - self.board.ranks.keys()

    def room(self) -> dict[str, int]:
        """Return how many more ranks each node with an agent could hold: spare nodes, and those that a take-over left with fewer."""
        ranks = self.board.membership
        alive = [
            node for node in self.fleet.alive() if not (self.eligibility.departure(node) if node in ranks else self.eligibility.bars(node))
        ]
        return {node: max(0, self.spec.nodes.ranks - len(ranks.get(node, ()))) for node in alive}

    def drop_dead_spares(self) -> None:
        """Let go of spares whose agents are gone: no rank is hurt, so it is recorded and no incident."""
        if self.connectivity.deaf():
            return
        silence = self.spec.limits.agent_silence.total_seconds()
        if self.state is State.RUNNING and self.incident is None:
            silence = max(silence, SPARE_PATIENCE)
        for node, why in self.fleet.lost(silence).items():
            if node not in self.members:
                self.fleet.drop(node)
                self.stand(node, "lost", f"the agent of this spare is gone: {why}")
                self.remark(f"spare {node} is gone ({why}); {len(self.spares())} spare(s) left")
        if self.members and self.moving is None:  # who is to come in a planned move is no member yet
            self._drop_barred_spares()

    def _drop_barred_spares(self) -> None:
        """Let go of spares that were taken out of service meanwhile."""
        members = set(self.members)
        for node in self.fleet.alive():
            if node not in members and (why := self.eligibility.bars(node)):
                self.fleet.drop_later(node)
                self.stand(node, "excluded", why)
                self.remark(f"spare {node} is let go: {why}; {len(self.spares())} spare(s) left")

    # -- standbys -----------------------------------------------------------------------------------------------------

    def why_not_kept(self) -> str:
        """Return why the ranks that live could not be kept in their processes; empty when they could."""
        if not self.board.grouped():
            return "the job's process groups are not Holdfast's own"
        if not self.rank_table.incarnations:
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
        stay = tuple(node for node in self.members if not self.eligibility.departure(node))
        self.pool.keep_up(places_for(count, room, stay, self.pool.held()), self.wanted())

    def wanted(self) -> HotSpareSpec:
        """Return what this job's standbys are to be good for."""
        return HotSpareSpec(roles=self.roles, world=self.rank_table.width, environment=self.standby_environment)

    def standby_environment(self, rank: int, number: int, role: int) -> dict[str, str]:
        """Return the environment of standby *number*, which stands for *rank* until it is given one, and parks in *role*."""
        return {
            **self.seat_environment(rank),
            **roles_environment(self.roles, self.tapes),
            "HOLDFAST_STANDBY": str(number),
            "HOLDFAST_PARK": str(role),
        }

    def seat_environment(
        self, rank: int, node: str | None = None, *, generation: int | None = None, rank_table: RankTable | None = None
    ) -> dict[str, str]:
        """Return what a process that takes over *rank*, on *node* if that is known, must know of its place."""
        number, ranks = self.generation if generation is None else generation, self.spec.nodes.ranks
        place = seat_environment(rank, rank_table or self.rank_table, generation=number, ranks_per_node=ranks, job=self.job.name)
        return {**place, **self.replicas.environments(self.board.membership, [node])[node]}

    @property
    def width(self) -> int:
        """Return how many nodes the job's ranks take when each holds as many as it can."""
        return -(-len(self.board.ranks) // self.spec.nodes.ranks)

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

    def begin_generation(self, number: int, membership: dict[str, list[int]], *, rank_table: RankTable) -> None:
        """Start a new generation with an empty board; of processes that live on it knows what was known of them."""
        before, self.board = self.board, GenerationState(number, membership, since=rank_table.since, kept=rank_table.kept)
        self.board.keep(before, self.levels)
        self.sight = FaultEvaluator(self.board, self.connectivity.known_until)
        self.concerns = Alerts(lambda: self.levels)
        self.generation, self.newest, self.members = number, max(self.newest, number), tuple(membership)
        self.rank_table, self.port = rank_table, rank_table.store[1]
        self.hearing.begin()
        self._next_ping = 0.0  # whose snapshots are kept where has to follow

    def enter_generation(self, number: int, membership: dict[str, list[int]], *, rank_table: RankTable, reason: str) -> None:
        """End the current generation, begin the next one, and put both on record."""
        self.end_generation()
        self.begin_generation(number, membership, rank_table=rank_table)
        self.recorder.add(
            models.Generation(
                id=self.generation_id(),
                job_id=self.job.id,
                number=number,
                at=time.time(),
                world_size=len(self.board.ranks),
                ranks={node: list(ranks) for node, ranks in membership.items()},
                port=self.port,
                reason=reason,
                facts=self.facts(),
            )
        )

    def choose_every(self, since: str, nodes: int) -> int | None:
        """Choose how often to save on so many *nodes*; leave a change, *since* when it holds, and its reason on record."""
        if self.cadence is None:
            return None
        present, steps = self.rank_table.every, [seconds for _, seconds in islice(reversed(self.board.durations), STEPS)]
        choice = self.cadence.choose(present, nodes=nodes, incidents=self.answered(), steps=steps)
        if choice is not None and choice.every != present:
            before = f" (before: {present:,})" if present else ""
            self.remark(f"from {since} on a checkpoint every {wording.plural(choice.every, 'step')}{before}: {choice.reason}")
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
        if every != self.rank_table.every:
            self.rank_table, self._paced = replace(self.rank_table, every=every), self.generation
            self.recorder.amend(models.Generation, self.generation_id(), facts=self.facts())
        if self._paced == self.generation:
            self.fleet.later(self.board.first.node, "pace", generation=self.generation, every=every)

    def answered(self) -> frozenset[str]:
        """Return the incidents for which a recovery was decided, or is about to be."""
        present = {self.incident.row.id} if self.incident is not None else set()
        return frozenset({one.incident for one in self.attempts} | present)

    def facts(self) -> dict[str, Any]:
        """Return what the next flow must know of this generation's processes, if it has to adopt them."""
        told = {"roles": [list(ranks) for ranks in self.roles], "tapes": self.tapes, "copies": [list(ranks) for ranks in self.copies]}
        return {**self.rank_table.as_record(), **told}

    def continue_generation(
        self, number: int, membership: dict[str, list[int]], *, rank_table: RankTable, recorded: int, saved: int
    ) -> None:
        """Take up a generation that another flow began: what the history has of it is not recorded twice."""
        self.begin_generation(number, membership, rank_table=rank_table)
        self.hearing.begin(recorded=recorded, saved=saved)
        newest = queries.last_step(self.history, self.job.id)
        begun = {one.number: one.resumed_step or 0 for one in queries.generations(self.history, self.job.id)}
        self.hearing.remember(newest.step if newest is not None else 0, begun)

    def note_first_step(self) -> None:
        """Record when this generation did its first step, and what it went on from."""
        self.rank_table = replace(self.rank_table, joined=self.generation)
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
            grouped = facts_of(self.board.regrouped, self.board.covered) or came_back(self.board.ranks.values()) or {}
            row.facts = {**(row.facts or {}), **grouped} or None
            for rank, told in sorted(self.board.regrouped.items()):
                for one in told.differs:
                    self.remark(f"rank {rank}, which another process has taken over, is not as it was: {one}")
            if self.cadence is not None:
                self.cadence.note_recovered(row)
        age = age_of(incident.board)
        if age is not None:
            row.facts = {**(row.facts or {}), "snapshot_age": age}
        for phase in incident.rows():
            self.recorder.add(phase)
        fields = ("action", "outcome", "closed_at", "generation_after", "resumed_step", "steps_lost", "downtime_s", "reason", "facts")
        self.recorder.amend(models.Incident, row.id, **{name: getattr(row, name) for name in fields})
        self.tell("incident", {"incident": incident})
        self.incident, self.closed, self.recovered = None, row, incident.decision

    def _account(self, incident: IncidentInWork, now: float) -> None:
        """Split the time since the ranks were stopped into T1 to T4, and price the rollback (T0) by what the lost steps had taken.

        What nobody reported has no phase: of a script that reports no steps only the start of its processes is known, of one that keeps
        its own state not what its time until the first new step went into.
        """
        row, first = incident.row, self.board.first_step_at() or now
        started = max((view.started or 0.0 for view in self.board.ranks.values()), default=now)
        incident.lap("reschedule", started)
        group, load = self.board.slowest_mark("group"), self.board.slowest_mark("load")
        rest = max(0.0, first - incident.lap_at - group - load)
        if not self.board.any_stepped():
            row.facts = {**(row.facts or {}), models.DOWN_UNTIL: models.STARTED}
        elif not self.board.heartbeats:
            incident.seconds |= {"communication": group, "load": load, "warm-up": rest}
        row.downtime_s = first - row.fault_at
        row.resumed_step = self.board.went_on_from(incident.board)
        if row.resumed_step is not None and row.step_before is not None:
            row.steps_lost = max(0, row.step_before - row.resumed_step)
            incident.seconds["rollback"] = incident.board.seconds_of(row.resumed_step)

    def past(self, now: float) -> tuple[PastRecovery, ...]:
        """Return the earlier recoveries with what each gained until the next one."""
        if not self.attempts:
            return ()
        present = self.incident.row.id if self.incident is not None else ""
        nexts = [(one.got_on, one.best, one.incident) for one in self.attempts[1:]] + [(self.got_on(now), self.best, present)]
        return tuple(
            PastRecovery(
                at=one.at,
                action=one.action,
                node=one.node,
                gained=best > one.best if self.managed else got_on,
                overtaken=one.action in IN_PROCESS and one.incident == incident,
                kind=one.kind,
                step=one.step,
            )
            for one, (got_on, best, incident) in zip(self.attempts, nexts, strict=True)
        )

    def got_on(self, now: float) -> bool:
        """Tell whether this generation, until *now* or its fault, brought a job without steps on; what was decided on it counts once."""
        begun = self.board.first_step_at()
        if self.managed or begun is None or (self.attempts and self.attempts[-1].generation >= self.generation):
            return False
        diagnosis = self.incident.diagnosis if self.incident is not None else None
        return uptime.got_on((now if diagnosis is None else diagnosis.root.at) - begun, self.board.startup())

    # -- the policy ---------------------------------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """Return the policy that is in force, under what the job itself says."""
        return self.watched_policy.present

    @property
    def levels(self) -> Levels:
        """Return how much faults ask for now."""
        return self.watched_policy.present.asks

    def take_files(self) -> None:
        """Take in what is new about the policy and the cluster's plan, and record it."""
        for text in (*self.watched_policy.news(), *self.cluster_file.news()):
            self.remark(text)
        if self.cluster is not (present := self.cluster_file.present):
            self._take_plan(present)

    def _take_plan(self, cluster: Cluster) -> None:
        """Go by *cluster* from now on, and have agents look for notices where it says."""
        before, self.cluster = self.cluster, cluster
        self.eligibility.cluster = cluster
        if cluster.notice == before.notice:
            return
        self.fleet.plan["notice"] = cluster.notice.for_agents()
        for node in self.fleet.alive():
            self.fleet.later(node, "notice", notice=self.fleet.plan["notice"])
