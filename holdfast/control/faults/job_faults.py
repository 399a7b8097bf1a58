"""The faults of one job: what the evidence shows now, what of it asks for an action, and the rows that record it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

from holdfast.control.agents.connectivity import ConnectivityMonitor
from holdfast.control.agents.pool import AgentPool
from holdfast.control.config.watched_files import WatchedPolicy
from holdfast.control.faults.evaluator import Alerts, FaultEvaluator
from holdfast.control.faults.network import NetworkCheck
from holdfast.control.faults.node_faults import FaultHistory
from holdfast.control.faults.rank_status import Pauses, RankStatusQuery
from holdfast.control.state.generation import GenerationState, hang_limits
from holdfast.control.state.generations import Generations
from holdfast.control.state.incidents import Incidents
from holdfast.control.state.job_log import JobLog
from holdfast.detectors.catalogue import Fault, FaultKey, RecommendedActions
from holdfast.detectors.evidence import HangLimits
from holdfast.detectors.training.progress import NOT_ENDING
from holdfast.history import models
from holdfast.plurals import named_ranks
from holdfast.report.text import wording
from holdfast.spec import TrainingJob

REMEMBERED: Final = 5000
"""How many of the newest faults keep a reference to their rows; also how many a generation keeps in each of its lists of faults."""
ROLL_CALL: Final = 0.1
"""Seconds between two checks for ranks that make no progress."""
SUSPECT_AFTER: Final = 4
"""Missed heartbeats of an agent from which on a stalled job may be stalled by that agent's node."""
SILENT_AND_STALLED: Final = 8
"""Missed heartbeats that count as an agent's silence while the job is stalled: two signals that agree need less of each."""
ALL_SILENT: Final = 2
"""Times `timeouts.heartbeat` after which silence counts that all of a job's nodes share while another node answers. That no step is known
of is no second signal then: steps are reported over the same connections. A saturated link silences all, and the job trains on."""

NOTHING: Final[Mapping[FaultKey, str]] = MappingProxyType({})


@dataclass(slots=True, kw_only=True)
class JobFaults:
    """Evaluates the evidence of the present generation."""

    log: JobLog
    spec: TrainingJob
    agents: AgentPool
    generations: Generations
    incidents: Incidents
    policy: WatchedPolicy
    is_excused: Callable[[Fault, RecommendedActions], bool]
    """Returns whether a person decided that the node of a fault stays."""
    connectivity: ConnectivityMonitor = field(init=False)
    pauses: Pauses = field(init=False)
    rank_status: RankStatusQuery = field(init=False)
    network_check: NetworkCheck = field(init=False)
    evaluator: FaultEvaluator = field(init=False)
    alerts: Alerts = field(init=False)
    history: FaultHistory = field(default_factory=FaultHistory)
    _limits: HangLimits = field(init=False)
    _rows: dict[int, tuple[Fault, models.FaultRecord]] = field(default_factory=dict)
    """The newest faults on record, by their identity, with their rows."""
    _next_roll_call: float = 0.0

    def __post_init__(self) -> None:
        lease = self.spec.timeouts.lease.total_seconds()
        self.connectivity = ConnectivityMonitor(self.agents, lambda: self.generations.members, lease, self.announce, self.log.record_event)
        self.pauses = Pauses(self.log.record_event, self.generations.record_pause)
        self.rank_status = RankStatusQuery(self.agents)
        self.network_check = NetworkCheck(self.agents.source)
        self._limits = hang_limits(self.spec.timeouts)
        self.begin(self.generations.state)

    def begin(self, state: GenerationState) -> None:
        """Begin with a new generation's *state*: no evidence of the one before counts."""
        self.evaluator, self.alerts = FaultEvaluator(state, self.connectivity.known_until), Alerts(lambda: self.recommended_actions)

    @property
    def recommended_actions(self) -> RecommendedActions:
        """Return the recommended actions that the policy sets for fault kinds now."""
        return self.policy.present.asks

    # -- what is known ------------------------------------------------------------------------------------------------

    def all(self) -> list[Fault]:
        """Return every fault that the evidence of this generation shows now, unreachable agents aside."""
        return self.evaluator.faults(self._limits, steps_expected=self.generations.steps_expected())

    def acting(self) -> list[Fault]:
        """Return those that ask for an action."""
        return [
            fault
            for fault in self.all()
            if self.recommended_actions.needs_action(fault) and not self.is_excused(fault, self.recommended_actions)
        ]

    def missing_members(self) -> dict[str, str]:
        """Return the members whose agents are unreachable, and why: the agent exited, or is silent while no step is made."""
        gone, limit = self.agents.disconnected(), self.spec.timeouts.heartbeat.total_seconds()
        silent = self.agents.silent(limit)
        if silent and self._steps_advance():
            silent = {}  # never act on a node while the job's steps still advance through it
        if not silent and (soon := self.agents.silent(min(limit, SILENT_AND_STALLED * self.agents.beat))) and self.stalled():
            silent = soon
        members = set(self.generations.members)
        if len(members) > 1 and members <= silent.keys():
            silent = self.agents.silent(ALL_SILENT * limit)
        cut_off = self.agents.cut_off()
        if cut_off and not (self.acting() or self.stalled()):
            cut_off = {}
        if (silent or cut_off) and self.connectivity.is_partitioned() and not self.acting():
            silent = cut_off = {}
        missing = {**silent, **cut_off, **gone}
        return {node: why for node, why in missing.items() if node in members}

    def unreachable(self) -> dict[str, str]:
        """Return the nodes whose agents are silent and accept no new connection, and why; none while all of them are."""
        return {} if self.connectivity.is_partitioned() else self.agents.lost(self.spec.timeouts.heartbeat.total_seconds())

    def uncertain(self) -> bool:
        """Return whether an agent may turn out to be missing within a moment, or has just answered again.

        Its connection has just ended and is being rebuilt, or the job is stalled and the agent missed several heartbeats.
        """
        members = set(self.generations.members)
        if not self.agents.reconnecting().isdisjoint(members):
            return True
        silent = self.agents.silent(SUSPECT_AFTER * self.agents.beat).keys() & members
        return bool(silent) and self.stalled() and not silent <= self.missing_members().keys()

    def _steps_advance(self) -> bool:
        newest = max((rank.progress_at for rank in self.generations.state.ranks.values()), default=0.0)
        return time.time() - newest < self.spec.timeouts.heartbeat.total_seconds()

    def stalled(self) -> bool:
        """Return whether no rank has made progress for longer than the job's own steps explain."""
        return self.evaluator.is_stalled(self._limits, steps_expected=self.generations.steps_expected())

    def why_completed(self) -> str:
        """Return why the job is completed although some ranks have not exited; empty when it is not.

        Rank 0 exited with status 0, or all steps are done, and the remaining ranks show no sign of life. To run all of it again would not
        help: a script that comes to its end on rank 0 would come to it again. A rank 0 that ran for less than `timeouts.exit_grace` before
        any step is known has not come to the end of a training: the others wait for it, at a rendezvous for example.
        """
        state = self.generations.state
        if not any(rank.succeeded for rank in state.ranks.values()):
            return ""
        fault = next((one for one in self.acting() if one.kind == NOT_ENDING.id), None)
        until = state.until()
        early = not state.any_stepped() and not self.generations.trained and state.first.ran() < self._limits.exit_grace
        if fault is None or not ((state.first.succeeded and not early) or (until is not None and state.step_before >= until)):
            return ""
        self.record(fault, incident=None)
        running = sorted(rank.rank for rank in state.ranks.values() if not rank.ended)
        done = "rank 0 exited with status 0" if state.first.succeeded else f"step {until}, the last one, is done"
        end = "did not exit by itself and is terminated" if len(running) == 1 else "did not exit by themselves and are terminated"
        return f"{done}; {named_ranks(running)} {end}: {fault.quote}"

    def symptom(self) -> str | None:
        """Return what has to be diagnosed, if anything."""
        missing = self.missing_members()
        if missing:
            return "; ".join(f"the agent of {node} is unreachable: {why}" for node, why in missing.items())
        found = self.acting()
        return f"{found[0].kind} of {found[0].place}: {found[0].quote}" if found else None

    # -- periodic checks ----------------------------------------------------------------------------------------------

    def new_alerts(self, now: float, newest_good: Callable[[int], str]) -> Iterator[Fault]:
        """Yield the new faults at *now* (monotonic) through which training continues, each recorded and announced.

        *newest_good* describes the newest checkpoint from before a step.
        """
        state = self.generations.state
        for fault in self.alerts.poll(state, now, roles=self.generations.roles, limits=self._limits, good=newest_good):
            self.announce(fault)
            yield fault

    def query_ranks(self, now: float) -> None:
        """Ask ranks for the checksums that an alert needs, and ranks without progress for their status. *now*: monotonic."""
        state = self.generations.state
        for step, ranks in self.alerts.checksum_requests(state):
            nodes = {state.ranks[rank].node for rank in ranks}
            self.rank_status.ask(state, nodes, {"do": "sums", "step": step}, ranks=sorted(ranks))
        if now < self._next_roll_call:
            return
        self._next_roll_call = now + ROLL_CALL
        progress = self.evaluator.progress(self._limits, steps_expected=self.generations.steps_expected())
        if progress is not None:
            self.rank_status.poll(state, progress, self._limits)
            self.pauses.poll(state, progress, self._limits)

    # -- the record ---------------------------------------------------------------------------------------------------

    def announce(self, fault: Fault) -> None:
        """Record a fault through which training continues, and an event that describes it."""
        self.record(fault, incident=None)
        self.log.record_event(wording.fault_line(fault.entry.title, fault.quote, fault.entry.action))

    def add_node_fault(self, fault: Fault) -> None:
        """Keep a fault of a node for the next diagnosis, and record it with the incident in work."""
        keep_newest(self.generations.state.node_faults, fault)
        self.record(fault, incident=self.incidents.current_id)

    def record(
        self, fault: Fault, *, incident: str | None, root: bool = False, confirmed: Mapping[FaultKey, str] = NOTHING
    ) -> models.FaultRecord:
        """Write a fault into the history, and return its row; one that is there already becomes the incident's.

        *confirmed*: the faults that a second signal confirms (`Diagnosis.confirmed`).
        """
        action = replace(self.recommended_actions, confirmed=confirmed).of(fault)
        if id(fault) in self._rows:
            known = self._rows[id(fault)][1]
            known.incident_id, known.root, known.recommended_action = incident, root, action
            self.history.remember([known])
            self.log.recorder.amend(models.FaultRecord, known.id, incident_id=incident, root=root, recommended_action=action)
            return known
        evidence = {name: getattr(fault, name) for name in ("quote", "signature", "detail", "device")}
        row = models.FaultRecord(
            job_id=self.log.job.id,
            incident_id=incident,
            at=fault.at,
            kind=fault.kind,
            recommended_action=action,
            target=fault.target,
            attributed_to=fault.entry.attributed_to,
            rank=fault.rank,
            node=fault.node,
            generation=self.generations.number,
            step=fault.step,
            root=root,
            evidence={**evidence, **_measured(fault), "source": fault.source or fault.entry.source},
        )
        self.log.recorder.add(row)
        self.history.remember([row])
        self._rows[id(fault)] = fault, row
        if len(self._rows) > REMEMBERED:
            del self._rows[next(iter(self._rows))]
        self.log.publish("fault", {"fault": row})
        return row

    def rows_of(self, faults: Iterable[Fault]) -> set[str]:
        """Return the ids of the rows that *faults* have in the history already."""
        return {self._rows[id(fault)][1].id for fault in faults if id(fault) in self._rows}


def _measured(fault: Fault) -> dict[str, bool | str]:
    """Return what was measured of the device that a line names, for the record."""
    return {name: value for name in ("idle", "contradicted", "supported") if (value := getattr(fault, name))}


def keep_newest(faults: list[Fault], fault: Fault) -> None:
    """Add *fault* to *faults*, which each diagnosis reads and which may not grow without limit."""
    faults.append(fault)
    del faults[:-REMEMBERED]
