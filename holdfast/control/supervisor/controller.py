"""The controller of one job: joins the parts that know its generations, incidents, nodes, checkpoints and faults, and drives them.

Its loop, `watch`, handles events until a fault, the end or a request needs an answer. No part holds the controller: each gets the
few others that it needs. The tasks of the flow, and the functions that they call in `holdfast.control`, are given the controller as
their argument.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.control.agents.pool import AgentPool
from holdfast.control.agents.reactor import REACTOR
from holdfast.control.checkpoints.job_checkpoints import JobCheckpoints
from holdfast.control.checkpoints.replicas import Replicas
from holdfast.control.checkpoints.snapshot_stats import SnapshotStats
from holdfast.control.config.watched_files import ClusterFile, WatchedPolicy
from holdfast.control.faults.job_faults import JobFaults
from holdfast.control.faults.stragglers import Stragglers
from holdfast.control.nodes.approvals import Approvals
from holdfast.control.nodes.drains import PlannedDrains
from holdfast.control.nodes.eligibility import NodeEligibility
from holdfast.control.nodes.job_nodes import JobNodes
from holdfast.control.nodes.scale_up import ScaleUp
from holdfast.control.state.generation import MALFORMED_EVENT, GenerationState, hang_limits
from holdfast.control.state.generations import Generations
from holdfast.control.state.incidents import Incidents
from holdfast.control.state.job_log import JobLog
from holdfast.control.state.state_machine import JobStateMachine
from holdfast.control.supervisor import event_table
from holdfast.control.supervisor.detach import Detach, answer_sigterm
from holdfast.control.supervisor.event_handlers import EventHandlers
from holdfast.control.supervisor.flow_run import FlowRun
from holdfast.control.supervisor.requests import Requests
from holdfast.detectors.catalogue import RecommendedActions
from holdfast.detectors.evidence import InterruptedRecovery
from holdfast.errors import JobDetached, LeaseLost
from holdfast.history import History, LeaseRenewer, Recorder, models, this_host
from holdfast.log import note
from holdfast.paths import job_directory
from holdfast.plurals import all_of, named_ranks
from holdfast.policies.nodes.cordons import Owner
from holdfast.policies.recovery.policy import Policy
from holdfast.policies.slowness import StragglerAction
from holdfast.policies.states import Event, State, Transition
from holdfast.protocol import Message
from holdfast.report.text.wording import count
from holdfast.spec import Cluster, TrainingJob

log = logging.getLogger("holdfast.control")

TICK: Final = 0.1
"""Seconds between two checks of everything that is no event: requests to stop, silent agents, progress."""
PING: Final = 1.0
FILL: Final = 0.5
"""Seconds between two checks of the hot spares and spare nodes, while training runs."""
STARTED: Final = frozenset({State.LAUNCHING, State.RUNNING, State.RESUMING, State.MIGRATING})
"""States in which the job's nodes are those that will train."""
PROGRESSED: Final = "got_on"
"""In an incident's facts: the generation before it made progress, in a job that reports no steps."""


@dataclass(slots=True, kw_only=True, repr=False)  # it refers to the state of every node and rank
class JobController:
    """Controls one job until it ends, is suspended, or is detached."""

    job: models.Job
    spec: TrainingJob
    cluster: Cluster
    history: History
    recorder: Recorder
    agents: AgentPool
    requests: Requests
    detach: Detach
    """Whether this controller is to leave the job, which goes on."""
    flow_run: FlowRun
    """The Prefect flow run that this controller runs in."""
    reattached: bool = False
    """Another controller began the job."""
    handed_over: bool = False
    """That was this flow's launcher."""
    launcher: bool = False
    """This controller launches the job for a flow that is not ready yet."""
    log: JobLog = field(init=False)
    machine: JobStateMachine = field(init=False)
    generations: Generations = field(init=False)
    incidents: Incidents = field(init=False)
    nodes: JobNodes = field(init=False)
    checkpoints: JobCheckpoints = field(init=False)
    faults: JobFaults = field(init=False)
    stragglers: Stragglers = field(init=False)
    scale_up: ScaleUp = field(init=False)
    drains: PlannedDrains = field(init=False)
    handlers: EventHandlers = field(init=False)
    policy_file: WatchedPolicy = field(init=False)
    cluster_file: ClusterFile = field(init=False)
    lease: LeaseRenewer = field(init=False)
    deposed_by: str | None = None
    """Who took the lease away, if somebody did."""
    terminated_at: float | None = None
    """When its process received a SIGTERM that is still to be answered (monotonic)."""
    saved: str = ""
    """What is on disk of a job that was stopped or suspended: where a resume continues from."""
    handled_until: float = float("-inf")
    """Until when (monotonic) all that agents had sent has been handled. What is not so by a deadline is not so only once this has passed
    it: a process that was stopped meanwhile, or had to wait for a processor, has the answer and does not know it yet."""
    _invalid: set[str] = field(default_factory=set)
    """Nodes whose agents sent an invalid event."""
    _next_ping: float = 0.0
    _next_fill: float = 0.0

    def __post_init__(self) -> None:
        job, spec, agents = self.job, self.spec, self.agents
        log = self.log = JobLog(job, self.cluster.name, self.recorder)
        self.policy_file, self.cluster_file = WatchedPolicy(spec, job_directory(spec.name)), ClusterFile(self.cluster)
        replicas, snapshots = Replicas(agents, spec.checkpoint.memory), SnapshotStats(self.recorder, job.id)
        generations = self.generations = Generations(log, spec, replicas, snapshots)
        generations.on_begin = self._begin_generation
        incidents = self.incidents = Incidents(log, generations)
        machine = self.machine = JobStateMachine(log, generations)
        self.checkpoints = JobCheckpoints(
            log=log,
            agents=agents,
            generations=generations,
            incidents=incidents,
            machine=machine,
            replicas=replicas,
            snapshots=snapshots,
        )
        approvals = Approvals(self.history, job, self.cluster.quarantine.approval_timeout.total_seconds(), log.record_event, log.publish)
        eligibility = NodeEligibility(
            self.cluster, self.history, agents.source.names, Owner(name=f"job {job.name}"), log.record_event, approvals
        )
        eligibility.ends = None if spec.walltime is None else job.at + spec.walltime.total_seconds()
        self.faults = JobFaults(
            log=log,
            spec=spec,
            agents=agents,
            generations=generations,
            incidents=incidents,
            policy=self.policy_file,
            is_excused=eligibility.is_excused,
        )
        self.nodes = JobNodes(
            log=log,
            spec=spec,
            cluster=self.cluster,
            history=self.history,
            agents=agents,
            generations=generations,
            incidents=incidents,
            machine=machine,
            faults=self.faults,
            eligibility=eligibility,
            approvals=approvals,
        )
        self.stragglers = Stragglers(
            log=log,
            wanted=StragglerAction(spec.checks.straggler),
            cluster_kind=self.cluster.kind,
            generations=generations,
            policy=self.policy_file,
            requests=self.requests,
            spares=self.nodes.spares,
        )
        self.drains = PlannedDrains(
            log=log,
            spec=spec,
            generations=generations,
            incidents=incidents,
            machine=machine,
            nodes=self.nodes,
            requests=self.requests,
        )
        self.handlers = EventHandlers(
            log=log,
            history=self.history,
            cluster_kind=self.cluster.kind,
            limits=hang_limits(spec.timeouts),
            events=agents.event_queue,
            generations=generations,
            incidents=incidents,
            nodes=self.nodes,
            checkpoints=self.checkpoints,
            faults=self.faults,
            stragglers=self.stragglers,
            drains=self.drains,
        )
        self.scale_up = ScaleUp(spec, generations, self.nodes, self.handlers.newest_complete)

    # -- the state ----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """Return the state that the job is in."""
        return self.machine.state

    @property
    def reason(self) -> str:
        """Return the reason of the last transition."""
        return self.machine.reason

    def move(self, event: Event, reason: str) -> None:
        """Make the transition that *event* asks for, and record it."""
        self.machine.move(event, reason)

    @property
    def is_to_end(self) -> bool:
        """Return whether a person asked the job to stop or to be suspended."""
        return bool(self.requests.stop_reason or self.requests.suspend_reason)

    @property
    def suspended(self) -> bool:
        """Return whether the job is saved, holds no nodes, and waits to be resumed."""
        return self.state is State.SUSPENDED

    @property
    def ended(self) -> bool:
        """Return whether the job has ended."""
        return self.machine.ended

    @property
    def released(self) -> bool:
        """Return whether the job holds no nodes any more: it has ended, or is suspended."""
        return self.ended or self.suspended

    @property
    def detached(self) -> bool:
        """Return whether this controller leaves the job, which goes on."""
        return bool(self.detach.why) and not self.released

    @property
    def live(self) -> bool:
        """Return whether this controller has still something to do for the job."""
        return not (self.released or self.detached)

    def depose(self, holder: str) -> None:
        """Take into account that *holder* took the lease away."""
        self.deposed_by = holder

    @property
    def token(self) -> str:
        """Return the secret by which the job's workers know each other."""
        return str(self.agents.plan["environment"]["HOLDFAST_TOKEN"])

    @property
    def policy(self) -> Policy:
        """Return the policy that is in force, with what the job file sets itself."""
        return self.policy_file.present

    @property
    def recommended_actions(self) -> RecommendedActions:
        """Return the recommended actions of fault kinds that are in force."""
        return self.policy_file.present.asks

    # -- for the Prefect UI -------------------------------------------------------------------------------------------

    def overview(self) -> dict[str, Any]:
        """Return what is known of the job when its controller takes it."""
        return {
            "job": self.job,
            "cluster": self.cluster.name,
            "host": this_host().partition("/")[0],
            "state": str(self.state),
            "history": self.history,
            "reattached": self.reattached and not self.handed_over,
            "step": self.generations.best or None,
            **self.node_overview(),
        }

    def node_overview(self) -> dict[str, Any]:
        """Return which node holds which ranks, which nodes are spare or out of service, and where hot spares wait."""
        eligibility = self.nodes.eligibility
        return {
            "ranks": {node: tuple(ranks) for node, ranks in self.generations.state.membership.items()},
            "spares": self.nodes.spares() if not self.ended else (),
            "hot_spares": dict(Counter(one.node for one in self.nodes.ready_hot_spares())),
            "isolated": {node: eligibility.isolation(node) for node in eligibility.isolated()},
        }

    # -- the loop -----------------------------------------------------------------------------------------------------

    def pump(self, seconds: float = TICK) -> None:
        """Handle the agents' events, waiting up to *seconds* for the first one, then do the periodic work that is due.

        Raise `LeaseLost` or `JobDetached` when this controller may or should not go on.
        """
        read = REACTOR.caught_up
        for node, event in self.agents.event_queue.drain(seconds):
            try:
                event_table.take(self.handlers, node, event)
            except MALFORMED_EVENT as error:
                self._note_invalid(node, event, error)
        self.handled_until = read
        if self.deposed_by:
            raise LeaseLost(self.job.name, self.deposed_by)
        answer_sigterm(self)
        if self.detached:
            raise JobDetached(self.job.name, self.detach.why)
        self.faults.connectivity.poll()
        now = time.monotonic()
        if now >= self._next_ping:
            self._next_ping = now + PING
            self._work_each_second()
        if self.state in STARTED:
            self._check_training(now)
        if now >= self._next_fill and self._trains_undisturbed():
            self._next_fill = now + FILL
            self.nodes.fill_hot_spares()
            self.nodes.preflight.maintain(self.nodes.spares())
            self.scale_up.poll(now)
            self.nodes.spare_pool.poll(now)

    def _note_invalid(self, node: str, event: Message, error: Exception) -> None:
        """Ignore an invalid event; report the first one of each node, as it may be a bug of ours too."""
        if node in self._invalid:
            return
        self._invalid.add(node)
        why = f"{str(event.get('event'))[:40]}: {error!r}"[:200]
        note(log, "event.invalid", level=logging.WARNING, node=node, why=why, message=repr(event)[:400])
        self.log.record_event(f"the agent of {node} sent an invalid event ({why}); it is ignored")

    def _trains_undisturbed(self) -> bool:
        return self.state is State.RUNNING and self.incidents.current is None and not self.faults.connectivity.is_partitioned()

    def _work_each_second(self) -> None:
        self.agents.ping()
        self.agents.check_superseded()
        self.nodes.release_lost_spares()
        if self.state in STARTED:
            for evidence, text in self.checkpoints.replicas.maintain(self.generations.members):
                self.handlers.report_memory(evidence, text)
        self._publish_findings()
        self.checkpoints.snapshots.poll(self.generations.state, time.time(), training=self.state is State.RUNNING)
        self.read_files()
        self.nodes.allocations.poll()
        self.drains.poll(time.time())

    def _publish_findings(self) -> None:
        """Report what threads found while the controller did something else: nodes, preflight checks, the network, agents that are back."""
        generations = self.generations
        if self.incidents.current is None or self.state is State.WAITING:
            overview = self.node_overview()
            self.log.publish("nodes", overview)
            generations.record_reserve(overview)
        for why, nodes in self.nodes.preflight.news(generations.members).items():
            self.log.record_event(f"{', '.join(nodes)}: {why}")
        for text in self.faults.network_check.news():
            self.log.record_event(text)
        for node, status in self.agents.newly_reachable():
            self.take_in(node, status)
            self.log.record_event(f"the agent of {node} is reachable again")
            if node in generations.members and generations.sent_to[node] < generations.number:  # what was presumed of it is not so
                generations.state.evidence.append(InterruptedRecovery(at=time.time(), state=self.state))

    def take_in(self, node: str, status: Message) -> None:
        """Take over what the agent of *node*, which ran already, reports of its ranks and hot spares."""
        generations = self.generations
        generations.sent_to[node] = int(status["generation"])
        self.nodes.hot_spares.reattach(node, status.get("hot_spares") or {}, generations.rank_table.width)
        generations.state.unseen.difference_update(generations.state.membership.get(node, ()))
        for rank in status.get("grouped") or () if status["generation"] == generations.number else ():
            if rank in generations.state.ranks:
                generations.state.ranks[rank].grouped = True

    def _check_training(self, now: float) -> None:
        """Report the faults through which training continues, and ask ranks without progress for their status."""
        self.handlers.poll(now)
        for fault in self.faults.new_alerts(now, self.handlers.good_before):
            self.stragglers.assess(fault)
        self.stragglers.poll(now)
        self.faults.query_ranks(now)

    def read_files(self) -> None:
        """Read the policy and cluster files if they changed, and record that."""
        for text in (*self.policy_file.news(), *self.cluster_file.news()):
            self.log.record_event(text)
        if self.cluster is self.cluster_file.present:
            return
        before, self.cluster = self.cluster, self.cluster_file.present
        self.nodes.cluster = self.nodes.eligibility.cluster = self.cluster
        if self.cluster.preemption_notice != before.preemption_notice:  # where agents look for preemption notices
            self.agents.plan["notice"] = self.cluster.preemption_notice.for_agents()
            for node in self.agents.alive():
                self.agents.send_command_async(node, "notice", notice=self.agents.plan["notice"])

    # -- generations and incidents ------------------------------------------------------------------------------------

    def _begin_generation(self, before: GenerationState, state: GenerationState) -> None:
        """Have every part begin with the new generation's *state*; of processes that stay alive it keeps what was known *before*."""
        state.keep(before, self.recommended_actions)
        self.faults.begin(state)
        self.handlers.begin()
        self._next_ping = 0.0  # the replica nodes have to follow

    def close_incident(self, outcome: str) -> None:
        """Record how the incident in work ended."""
        row = self.incidents.close(outcome)
        if outcome == "recovered":
            self.checkpoints.note_recovered(row)


# -- watch the job until a fault, its end, or a request needs an answer -----------------------------------------------------

SLICE: Final = 300.0
"""Seconds between two rounds of memory management while nothing happens."""


def watch(run: JobController, *, seconds: float, until: Callable[[], bool] | None = None) -> Transition | None:
    """Handle events until the job faults, finishes, has to stop, or *until* is true; return None after *seconds*."""
    end = time.monotonic() + seconds
    while True:
        if (turn := poll(run)) is not None:
            return turn
        if until is not None and until():
            return Transition(Event.STARTED, _who_runs(run.generations.state))
        if run.handled_until >= end:
            return None
        run.pump(min(TICK, max(0.0, end - time.monotonic())))


def _who_runs(state: GenerationState) -> str:
    """Say that the ranks run, and which of them have exited already."""
    gone = [view.rank for view in state.ranks.values() if view.succeeded]
    if not gone:
        return all_of(len(state.ranks), "rank runs", "ranks run")
    started = all_of(len(state.ranks), "rank has started", "ranks have started")
    return f"{started}; {named_ranks(gone)} exited with status 0 already"


def see_begun(run: JobController, *, seconds: float) -> Transition | None:
    """Monitor the job until its first step; return None when that has not come within *seconds* of reachable agents."""
    turn = watch(run, seconds=max(0.0, seconds), until=run.generations.begun)
    while turn is None and run.faults.connectivity.is_partitioned():
        turn = watch(run, seconds=TICK, until=run.generations.begun)
    return turn


def poll(run: JobController) -> Transition | None:
    """Return the transition that is due, if any."""
    if end := run.drains.end:
        return Transition(Event.TIME_OVER, end)
    if done := _done(run):
        return Transition(Event.FINISHED, done)
    if (turn := ending(run)) is not None:  # before faults: what is to end is saved, and needs no recovery first
        return turn
    symptom = run.faults.symptom()
    if symptom:
        return Transition(Event.FAULTED, symptom)
    if run.state is State.RUNNING and (run.requests.migrations or run.scale_up.due):
        return Transition(Event.MOVE_ASKED, run.requests.migrations[0].describe() if run.requests.migrations else run.scale_up.describe())
    return None


def _done(run: JobController) -> str:
    """Return why the job is completed; empty when it is not."""
    if run.generations.state.ranks and run.generations.state.all_succeeded():
        every = all_of(len(run.generations.state.ranks), "rank")
        if (step := run.generations.complete_before) is not None:
            return f"it was complete at step {count(step)} already: {every} resumed there and exited"
        return f"{every} exited with status 0"
    if why := run.faults.why_completed():
        run.log.record_event(why)
    return why


def ending(run: JobController) -> Transition | None:
    """Return the transition that ends or suspends the job, if a person requested that or its time is over."""
    if run.requests.stop_reason:
        return Transition(Event.STOP_ASKED, run.requests.stop_reason)
    if run.requests.suspend_reason:
        return Transition(Event.SUSPEND_ASKED, run.requests.suspend_reason)
    return Transition(Event.TIME_OVER, end) if (end := run.drains.end) else None
