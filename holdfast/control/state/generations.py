"""The generations of one job: the number, ranks and processes of the present one, and what stays known from one to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from holdfast.control.checkpoints.replicas import Replicas
from holdfast.control.checkpoints.snapshot_stats import SnapshotStats
from holdfast.control.config.worker_env import seat_environment
from holdfast.control.state.generation import GenerationState
from holdfast.control.state.job_log import JobLog
from holdfast.control.state.migration import MigrationState
from holdfast.control.state.rank_table import RankTable
from holdfast.detectors.training.progress import Pause
from holdfast.history import History, models, queries
from holdfast.policies.nodes.placement import nodes_needed
from holdfast.policies.recovery.case import ModelCopies
from holdfast.policies.recovery.policy import Pace
from holdfast.spec import TrainingJob


class Generations:
    """The present generation, and how the next one begins."""

    def __init__(self, log: JobLog, spec: TrainingJob, replicas: Replicas, snapshots: SnapshotStats) -> None:
        self._log, self._spec, self._replicas, self._snapshots = log, spec, replicas, snapshots
        self.ranks_per_node = spec.nproc_per_node if isinstance(spec.nproc_per_node, int) else 1
        """Ranks on each node. Where the job file has no number it is counted when the first node is brought up."""
        self.number = 0
        self.members: tuple[str, ...] = ()
        """Nodes that hold its ranks."""
        self.port = 0
        """Port of its rendezvous store."""
        self.rank_table = RankTable()
        self.state = GenerationState(0, {})
        """What its agents reported."""
        self.roles: tuple[tuple[int, ...], ...] = ()
        """Sets of ranks that do the same work on different data, as rank 0 reported them."""
        self.copies: ModelCopies = ()
        """Sets of ranks that hold one copy of the model together, where the script distributes each step's samples over them."""
        self.recordings = ""
        """Where rank 0 stored the recorded collectives that a hot spare needs to warm up without communication."""
        self.integration = ""
        """The level of integration that the script has reached, as a sentence; empty until that is known."""
        self._reserve: dict[str, Any] = {}
        """Spare nodes, hot spares, isolated nodes, and the pid of each rank's process on its node, as last recorded."""
        self._pause: dict[str, Any] | None = None
        """Since when no rank makes progress, and why; None while they do."""
        self.sent_to: dict[str, int] = {}
        """Node to the newest generation that its agent received."""
        self.newest = 0
        """The highest generation number that any worker may have received."""
        self.migration: MigrationState | None = None
        """The planned generation that is being prepared while this one trains."""
        self.managed = False
        """Whether its workers have reported steps or managed state."""
        self.trained = False
        """Whether any step was finished since the job was submitted; `best` may be one of a job of this name before."""
        self.best = 0
        """Newest step that the job ever finished."""
        self._longest_start: float | None = None
        self._step = 0.0
        self.on_begin: Callable[[GenerationState, GenerationState], None] = lambda _before, _state: None
        """Called with the states of the former and of the new generation before anything else learns of the new one."""

    # -- from one to the next -----------------------------------------------------------------------------------------

    @property
    def id(self) -> str:
        """Return the id of the present generation's row: one job, one number, one row, whoever writes it."""
        return f"{self._log.job.id}-{self.number}"

    def pace(self) -> Pace:
        """Return how long the job took to start, at most, and takes for a step: what a recovery may take depends on it."""
        startup = self._spec.timeouts.startup.total_seconds()
        return Pace(start=self._longest_start, step=self.state.step_seconds() or self._step, startup=startup)

    def _note_pace(self) -> None:
        """Keep how long the present generation took to start, and takes for a step, before it ends."""
        start = self.state.start_seconds()
        if start is not None:
            self._longest_start = max(start, self._longest_start or 0.0)
        self._step = self.state.step_seconds() or self._step

    def end(self) -> None:
        """Record the end of the present generation, if there is one."""
        self._note_pace()
        if self.number:
            now = time.time()
            self._snapshots.record(self.state, now)
            self._log.recorder.amend(models.Generation, self.id, ended_at=now)

    def begin(self, number: int, membership: dict[str, list[int]], *, rank_table: RankTable) -> None:
        """Start generation *number*; of the processes that stay alive the new state keeps what was known.

        *membership*: node to its ranks.
        """
        before, self.state = self.state, GenerationState(number, membership, since=rank_table.since, kept=rank_table.kept)
        self.number, self.newest, self.members = number, max(self.newest, number), tuple(membership)
        self.rank_table, self.port = rank_table, rank_table.store[1]
        self._pause = None
        self._reserve.pop("pids", None)
        self.on_begin(before, self.state)

    def enter(self, number: int, membership: dict[str, list[int]], *, rank_table: RankTable, reason: str) -> None:
        """End the present generation, begin generation *number*, and record both."""
        self.end()
        self.begin(number, membership, rank_table=rank_table)
        self._log.recorder.add(
            models.Generation(
                id=self.id,
                job_id=self._log.job.id,
                number=number,
                at=time.time(),
                world_size=len(self.state.ranks),
                ranks={node: list(ranks) for node, ranks in membership.items()},
                port=self.port,
                reason=reason,
                facts=self.facts(),
            )
        )

    def facts(self) -> dict[str, Any]:
        """Return what the next controller has to know of this generation's processes if it reattaches to them."""
        groups = {"roles": [list(ranks) for ranks in self.roles], "copies": [list(ranks) for ranks in self.copies]}
        level = {"integration": self.integration} if self.integration else {}
        return {**self.rank_table.as_record(), **groups, "recordings": self.recordings, **level, **self._reserve, "pause": self._pause}

    def record_facts(self) -> None:
        """Record `facts` as they are now."""
        self._log.recorder.amend(models.Generation, self.id, facts=self.facts())

    def record_reserve(self, overview: Mapping[str, Any]) -> None:
        """Record the spare nodes, ready hot spares, isolated nodes and pids, when they have changed: `holdfast status` shows them."""
        found = {"spare_nodes": list(overview["spares"]), "hot_spares": overview["hot_spares"], "isolated": overview["isolated"]}
        found["pids"] = {str(rank): view.pid for rank, view in self.state.ranks.items() if view.pid is not None and not view.ended}
        if self.number and found != self._reserve:
            self._reserve = found
            self.record_facts()

    def record_pause(self, pause: Pause | None) -> None:
        """Record since when no rank makes progress; None: they do again."""
        self._pause = None if pause is None else pause.as_record()
        self.record_facts()

    def record_first_step(self) -> None:
        """Record when this generation made its first step, and from which step it resumed."""
        self.rank_table = replace(self.rank_table, joined=self.number)
        resumed, first, until = self.state.resumed_step(), self.state.first_step_at(), self.state.until()
        self._log.recorder.amend(models.Generation, self.id, first_step_at=first, resumed_step=resumed, until=until)

    @property
    def complete_before(self) -> int | None:
        """Return the step at which the script was complete when the job started: it resumed there and made no step; else None."""
        return None if self.trained or self.state.any_stepped() else self.state.resumed_step() or None

    def record_resumed(self) -> None:
        """Record from which step this generation resumed, where it made no step."""
        self._log.recorder.amend(models.Generation, self.id, resumed_step=self.state.resumed_step())

    def recorded_before(self, history: History) -> tuple[int, dict[int, int]]:
        """Return the newest step in the history, and for each recorded generation the step that it resumed from."""
        newest = queries.last_step(history, self._log.job.id)
        begun = {one.number: one.resumed_step or 0 for one in queries.generations(history, self._log.job.id)}
        return newest.step if newest is not None else 0, begun

    # -- queries ----------------------------------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Return how many nodes the job's ranks take when each holds as many as it can."""
        return -(-len(self.state.ranks) // self.ranks_per_node)

    def nodes_needed(self, lost: frozenset[str]) -> tuple[str, ...]:
        """Return the nodes that hold the job's ranks when each node, except the *lost* ones, holds as many as it can."""
        return nodes_needed(self.state.membership, self.ranks_per_node, lost)

    def vacant(self) -> frozenset[int]:
        """Return the ranks that the job trains without."""
        return frozenset(range(self.rank_table.width)) - self.state.ranks.keys()

    def steps_expected(self) -> bool:
        """Return whether the ranks should report steps."""
        return self._spec.progress == "steps" or (self._spec.progress == "auto" and (self.managed or self.state.managed()))

    def begun(self) -> bool:
        """Return whether training runs: all ranks started and, in a job known to report steps, each has made its first one."""
        if not self.state.all_started():
            return False
        expects = self._spec.progress == "steps" or (self._spec.progress == "auto" and self.managed)
        return self.state.all_stepped() if expects else True

    def why_not_kept(self) -> str:
        """Return why the ranks that are alive cannot stay in their processes; empty when they can."""
        if not self.state.grouped():
            return "the job's process groups are not managed by Holdfast"
        if not self.rank_table.incarnations:
            return "the controller before did not record what the processes of this generation know of each other"
        if not self.best:
            return "no step has been made yet"
        if any(rank.succeeded for rank in self.state.ranks.values()):
            return "some ranks have finished already"
        return ""

    def seat_environment(
        self, rank: int, node: str | None = None, *, number: int | None = None, rank_table: RankTable | None = None
    ) -> dict[str, str]:
        """Return the environment of a process that takes *rank* over, on *node* if that is known, in generation *number*."""
        table, ranks = rank_table or self.rank_table, self.ranks_per_node
        place = seat_environment(
            rank, table, generation=self.number if number is None else number, ranks_per_node=ranks, job=self._log.job.name
        )
        return {**place, **self._replicas.environments(self.state.membership, [node])[node]}
