"""The nodes of one job: which it may have, which are spare, where hot spares wait, and which have to be left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from typing import Final

from holdfast.control.agents.client import AgentClient
from holdfast.control.agents.pool import AgentPool
from holdfast.control.config.worker_env import roles_environment
from holdfast.control.faults.job_faults import JobFaults
from holdfast.control.nodes.allocations import AllocatedNodes
from holdfast.control.nodes.approvals import Approvals
from holdfast.control.nodes.eligibility import NodeEligibility
from holdfast.control.nodes.hot_spares import HotSparePool, HotSpareRequest, places_for
from holdfast.control.nodes.preflight import Preflight
from holdfast.control.nodes.rank_count import RankCount
from holdfast.control.nodes.spare_pool import SparePool
from holdfast.control.state.generations import Generations
from holdfast.control.state.incidents import Incidents
from holdfast.control.state.job_log import JobLog
from holdfast.control.state.rank_table import SpareLocalRanks
from holdfast.control.state.state_machine import JobStateMachine
from holdfast.errors import WorldError
from holdfast.history import History
from holdfast.plurals import plural
from holdfast.policies.recovery.case import HotSpare
from holdfast.policies.states import State
from holdfast.spec import Cluster, TrainingJob
from holdfast.spec.check import short_of_gpus

SPARE_PATIENCE: Final = 30.0
"""Seconds for which the agent of a spare node may be unreachable while training runs: on a slow link its messages wait behind those of
others, and the hot spare on it is worth more than to know early. No job is placed on it meanwhile."""


@dataclass(slots=True, kw_only=True)
class JobNodes:
    """Knows which nodes the job can use now."""

    log: JobLog
    spec: TrainingJob
    cluster: Cluster
    """The cluster as its file describes it now."""
    history: InitVar[History]
    agents: AgentPool
    generations: Generations
    incidents: Incidents
    machine: JobStateMachine
    faults: JobFaults
    eligibility: NodeEligibility
    approvals: Approvals
    hot_spares: HotSparePool = field(init=False)
    preflight: Preflight = field(init=False)
    allocations: AllocatedNodes = field(init=False)
    spare_pool: SparePool = field(init=False)
    rank_count: RankCount = field(init=False)

    def __post_init__(self, history: History) -> None:
        eligibility = self.eligibility
        self.hot_spares = HotSparePool(self.agents, self.log.record_event)
        self.preflight = Preflight(
            self.cluster, history, on=self.spec.preflight, why_suspect=eligibility.why_suspect, cut_short=eligibility.cut_short
        )
        self.allocations = AllocatedNodes(
            log=self.log,
            spec=self.spec,
            agents=self.agents,
            generations=self.generations,
            incidents=self.incidents,
            machine=self.machine,
            faults=self.faults,
            eligibility=eligibility,
            forget_notice=self.forget_notice,
        )
        self.rank_count = RankCount(log=self.log, spec=self.spec, agents=self.agents, generations=self.generations)
        self.rank_count.begin()
        eligibility.allocation_drain = self.allocations.drain_of
        self.spare_pool = SparePool(
            log=self.log,
            spec=self.spec,
            agents=self.agents,
            generations=self.generations,
            preflight=self.preflight,
            candidates=self.candidates,
            kept_out_now=self.kept_out,
            announce=not self.allocations.can_grow,
        )

    # -- nodes --------------------------------------------------------------------------------------------------------

    def spares(self) -> tuple[str, ...]:
        """Return the nodes with a reachable agent and no ranks that jobs may have, suspect ones last."""
        return tuple(
            self.preflight.by_preference(
                self.eligibility.usable(self.agents.alive(but={*self.generations.members, *self.faults.unreachable()}))
            )
        )

    def free(self) -> list[str]:
        """Return the nodes of the cluster that no job has and that this one may have, in the cluster's order."""
        fit = set(self.cluster.labelled(self.spec.node_labels)) if self.spec.node_labels else None
        few = short_of_gpus(self.spec, self.cluster)
        return self.eligibility.usable(node for node in self.agents.free() if (fit is None or node in fit) and node not in few)

    def candidates(self) -> list[str]:
        """Return the nodes from which a spare one may be taken: free ones or, where nodes are allocated to jobs, the job's unused ones."""
        allocated = self.allocations.usable()
        if allocated is None:
            return self.free()
        alive = set(self.agents.clients) | set(self.generations.members)
        return [node for node in self.eligibility.usable(allocated) if node not in alive]

    def kept_out(self) -> frozenset[str]:
        """Return the nodes that are out of service, or were given up and are unreachable."""
        return frozenset({*self.eligibility.isolated(), *self.agents.uncleaned})

    def room(self) -> dict[str, int]:
        """Return how many more ranks each node with an agent could hold: spare nodes, and those that lost ranks to other nodes."""
        ranks, eligibility = self.generations.state.membership, self.eligibility
        alive = [
            node for node in self.agents.alive() if not (eligibility.drain_of(node) if node in ranks else eligibility.why_ineligible(node))
        ]
        return {node: max(0, self.generations.ranks_per_node - len(ranks.get(node, ()))) for node in alive}

    def bring_up(self, nodes: Iterable[str]) -> dict[str, AgentClient | WorldError]:
        """Start agents on *nodes*, and record those that have one; return the agents' clients, or why there is none."""
        answers = self.agents.each(nodes, self.agents.bring_up)
        for node, answer in answers.items():
            if not isinstance(answer, WorldError):
                self.log.record_node_status(node, "healthy", "its agent is up")
        return answers

    def release_lost_spares(self) -> None:
        """Release spare nodes that are unreachable or out of service: no rank is affected, so that is an event and no incident."""
        if self.faults.connectivity.is_partitioned():
            return
        silence, members = self.spec.timeouts.heartbeat.total_seconds(), set(self.generations.members)
        if self.machine.state is State.RUNNING and self.incidents.current is None:
            silence = max(silence, SPARE_PATIENCE)
        for node, why in self.agents.lost(silence).items():
            if node not in members:
                self.agents.drop(node)
                self.log.record_node_status(node, "lost", f"the agent of this spare node is unreachable: {why}")
                self.log.record_event(f"spare {node} is lost ({why}); {plural(len(self.spares()), 'spare')} left")
        if not members or self.generations.migration is not None:  # the target of a planned move is no member yet
            return
        for node in self.agents.alive():
            if node not in members and (why := self.eligibility.why_ineligible(node)):
                self.agents.drop_async(node)
                self.log.record_node_status(node, "excluded", why)
                self.log.record_event(f"spare {node} is released: {why}; {plural(len(self.spares()), 'spare')} left")

    def forget_notice(self, node: str) -> None:
        """Forget that *node* was to be left: it stays, it is allocated anew, or it has come back."""
        self.eligibility.take_back(node)
        self.agents.leaving.discard(node)

    # -- hot spares ---------------------------------------------------------------------------------------------------

    def ready_hot_spares(self) -> tuple[HotSpare, ...]:
        """Return the hot spares that can take over a rank now."""
        unreachable = self.faults.unreachable()
        return tuple(one for one in self.hot_spares.ready(self.generations.rank_table.width) if one.node not in unreachable)

    def fill_hot_spares(self) -> None:
        """Start the hot spares that are missing while training runs."""
        generations = self.generations
        if not (generations.roles and generations.state.grouped() and generations.state.all_stepped()):
            return
        spec, room = self.spec, self.room()
        auto = min(self.generations.ranks_per_node * spec.spare_nodes, sum(room.values()))
        count = auto if spec.hot_spares == "auto" else spec.hot_spares
        stay = tuple(node for node in generations.members if not self.eligibility.drain_of(node))
        self.hot_spares.maintain(places_for(count, room, stay, self.hot_spares.held()), self.hot_spare_spec())

    def hot_spare_spec(self) -> HotSpareRequest:
        """Return what this job's hot spares have to be able to do."""
        generations = self.generations
        places, membership = generations.rank_table.places, generations.state.membership
        return HotSpareRequest(
            roles=generations.roles,
            world=generations.rank_table.width,
            environment=self._hot_spare_environment,
            ranks_per_node=generations.ranks_per_node,
            local_ranks=lambda node: {places[rank] for rank in membership.get(node, ()) if rank in places},
        )

    def local_ranks_of_spares(self, taking: Mapping[int, int | None]) -> SpareLocalRanks:
        """Return the local ranks of the hot spares that are *taking* a rank each (rank to id), and of those that wait on."""
        spares = self.hot_spares.spares
        own = {number: one.local_rank for number, one in spares.items() if one.local_rank is not None}
        parked = dict[str, set[int]]()
        for number in own.keys() - set(taking.values()):
            parked.setdefault(spares[number].node, set()).add(own[number])
        return SpareLocalRanks(
            taking={rank: own[number] for rank, number in taking.items() if number is not None and number in own},
            parked=parked,
            per_node=self.generations.ranks_per_node,
        )

    def _hot_spare_environment(self, rank: int, number: int, role: int) -> dict[str, str]:
        """Return the environment of hot spare *number*, which imitates *rank* until it gets a rank, and offloads the state of *role*."""
        return {
            **self.generations.seat_environment(rank),
            **roles_environment(self.generations.roles, self.generations.recordings),
            "HOLDFAST_HOT_SPARE": str(number),
            "HOLDFAST_WAITING_ROLE": str(role),
        }
