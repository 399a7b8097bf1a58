"""Count the ranks of each node where the job file leaves that to the nodes (`nproc_per_node: auto`): all of them must agree."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.cluster.interface import Processors
from holdfast.control.agents.pool import AgentPool
from holdfast.control.config.worker_env import set_ranks
from holdfast.control.state.generations import Generations
from holdfast.control.state.job_log import JobLog
from holdfast.errors import BadParameters, NodeStateUnknown, RanksNotCounted
from holdfast.history import models
from holdfast.host import gpu_assignment
from holdfast.spec import TrainingJob
from holdfast.spec.nproc import NodeRanks, problem_of, ranks_on


@dataclass(slots=True, kw_only=True)
class RankCount:
    """Asks each node that the job gets; the first one decides how many ranks a node holds, and a node that differs is refused."""

    log: JobLog
    spec: TrainingJob
    agents: AgentPool
    generations: Generations
    _first: tuple[str, NodeRanks] | None = None
    """The node that decided, and its ranks."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self) -> None:
        """Have each node counted before it is prepared for the job, where the job file has no number."""
        if not isinstance(self.spec.nproc_per_node, int):
            self.agents.check_node = self._check

    def forget(self) -> None:
        """Let another node decide: the ones before are not used."""
        self._first = None

    def _check(self, node: str) -> None:
        """Count *node*; raise `RanksNotCounted` where it has other numbers than the node that decided."""
        try:
            found = self.agents.source.processors(node, self.spec.env.get(gpu_assignment.VISIBLE))
        except OSError as error:
            raise NodeStateUnknown(node, f"its GPUs and CPUs could not be counted: {error.strerror or error}") from error
        ranks = self._ranks(node, found)
        with self._lock:
            if self._first is None:
                self._first = node, ranks
                self.generations.ranks_per_node = ranks.number
                set_ranks(self.agents.plan, self.spec, ranks.number)
            first, decided = self._first
        if ranks != decided:
            raise RanksNotCounted(node, f"it has {ranks}, but {first} has {decided}", f"{first}: {decided}; {node}: {ranks}")

    def _ranks(self, node: str, found: Processors) -> NodeRanks:
        ranks = ranks_on(self.spec.nproc_per_node, gpus=found.gpus, cpus=found.cpus)
        if ranks is None:
            raise RanksNotCounted(node, "it has no GPU", f"{node} has no GPU")
        return ranks

    def settle(self, answers: Mapping[str, object]) -> None:
        """Record the number of ranks once the nodes of the launch have *answers*; raise `BadParameters` where they do not agree."""
        wrong = next((one for one in answers.values() if isinstance(one, RanksNotCounted)), None)
        if wrong is not None:
            raise BadParameters((problem_of(wrong.detail),))
        if self._first is None or self.log.job.spec.get("nproc_per_node") == self._first[1].number:
            return
        node, ranks = self._first
        self.log.job.spec = {**self.log.job.spec, "nproc_per_node": ranks.number}
        self.log.recorder.amend(models.Job, self.log.job.id, spec=self.log.job.spec)
        self.log.record_event(f"`nproc_per_node: {self.spec.nproc_per_node}` is {ranks.number} on each node: {node} has {ranks}")
