"""The state of one generation and its ranks, folded from the agents' events. No I/O.

The next generation starts with an empty state, so that nothing left over from this one can look like a fault.
"""

from __future__ import annotations

import signal
import statistics
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, Final

from holdfast.control.agents.events import (
    AgentEvent,
    ExceptionFacts,
    Heartbeats,
    Mark,
    ParameterDigest,
    RankEvent,
    RankHeartbeat,
    Resumed,
    Saved,
    StartFailed,
    Steps,
    WorkerBroken,
    WorkerChecksums,
    WorkerContinued,
    WorkerCoverage,
    WorkerEvent,
    WorkerExited,
    WorkerGroups,
    WorkerHello,
    WorkerKept,
    WorkerLoss,
    WorkerPidChanged,
    WorkerRaised,
    WorkerRankStatus,
    WorkerRecoveryFailed,
    WorkerRegrouped,
    WorkersExited,
    WorkerStarted,
    WorkerStepped,
    WorkerStopped,
    WorkerSwitched,
)
from holdfast.control.faults.rank_status import parse_rank_status
from holdfast.detectors.catalogue import CATALOGUE_ACTIONS, Fault, RecommendedAction, RecommendedActions
from holdfast.detectors.evidence import (
    EarlyExit,
    Evidence,
    GroupFailure,
    HangLimits,
    NonFiniteLoss,
    Progress,
    RankProgress,
    RankStatus,
    RecoveryTimeout,
    ReplaceRanksFailure,
    StartFailure,
    StepBreakdown,
    StepBreakdowns,
    Unknown,
    WorkerException,
    WorkerExit,
    WorkerStop,
)
from holdfast.detectors.training.hang_analysis import operations
from holdfast.detectors.training.progress import WINDOW

_LASTING: Final = frozenset({RecommendedAction.RESET_GPU, RecommendedAction.DRAIN, RecommendedAction.EVICT})
"""Recommended actions of faults that a new generation does not cure."""


@dataclass(slots=True, kw_only=True)
class RankState:
    """One rank as its node's agent reports it. Times are the agent's wall clock."""

    rank: int
    node: str
    pid: int | None = None
    started: float | None = None
    managed: bool = False
    hello: bool = False
    grouped: bool = False
    """It uses managed process groups: its process can be kept when others are lost."""
    ahead: bool = False
    """It has switched to a planned generation."""
    step: int = 0
    first_step: float | None = None
    first_step_number: int | None = None
    until: int | None = None
    resumed: int | None = None
    resumed_from: str | None = None
    """The checkpoint that it resumed from; None where the state came from memory, or there was none."""
    resumed_replica: bool = False
    """Its state came from a replica on another node."""
    marks: dict[str, float] = field(default_factory=dict)
    beat: RankHeartbeat | None = None
    beat_at: float = 0.0
    status: RankStatus | None = None
    """Its answer to the last status query."""
    status_at: float = 0.0
    """When that was received."""
    moved_at: float = 0.0
    """When a status query last found operations that the one before had not."""
    breakdowns: deque[tuple[int, StepBreakdown]] = field(default_factory=lambda: deque(maxlen=BLOCKS))
    """How its steps spent their time: blocks of steps by number."""
    first_breakdowns: list[StepBreakdown] = field(default_factory=list)
    """The first ones after the warm-up, with which the newest are compared."""
    progress_at: float = 0.0
    """When it last made progress, as far as is known here."""
    stopped: tuple[int, float, float] | None = None
    """The signal that stopped it, when by its agent's clock, and when that was received."""
    raised: bool = False
    ended: bool = False
    ended_at: float = 0.0
    """When its exit was reported."""
    succeeded: bool = False
    started_at: float = 0.0
    """When its start was reported."""
    printed_at: float | None = None
    """When its first output was reported."""

    def ran(self) -> float:
        """Return the seconds from the start of a rank that has ended to its exit, as both were reported."""
        return max(0.0, self.ended_at - self.started_at)

    def known_step(self) -> int | None:
        """Return the newest step it has finished; None where the script reports no steps."""
        return self.step if self.managed else None

    def reached(self) -> tuple[str, int, str]:
        """Return the node, the stage that this rank's startup reached, and its description."""
        stages = (
            (self.first_step, "has stepped"),
            (self.resumed is not None, "has loaded its state"),
            (self.marks, "has joined the group"),
        )
        for stage, (reached, description) in zip((4, 3, 2), stages, strict=True):
            if reached:
                return self.node, stage, description
        return self.node, int(self.started is not None), "has started" if self.started is not None else "has not started"


BLOCKS: Final = 64
"""Newest blocks of steps that are kept of each rank."""
NEWEST_STEPS: Final = 64
"""The newest steps, from which the time of one is estimated."""
FIRST_BLOCKS: Final = 8
"""First blocks after the warm-up that are kept for comparison."""
RECENT_BLOCKS: Final = 16
"""Newest blocks that detectors get."""
LOSSES: Final = 512
CHECKS: Final = 8
"""Newest checks of the parameters that are kept."""
Roles = tuple[tuple[int, ...], ...]

TERMINATED: Final = 128 + signal.SIGTERM
"""Exit status of a rank that handled SIGTERM and exited by itself."""
MALFORMED_EVENT: Final = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""What handling an invalid event raises: an event log was damaged, or a node is hostile."""
FIRST_HEARTBEATS: Final = 30.0
"""Seconds from the first heartbeat of a rank until all are expected; after that, a rank without one may be what the others wait for."""


class GenerationState:
    """One generation's ranks, the evidence of their faults, and their progress."""

    def __init__(self, generation: int, membership: dict[str, list[int]], *, since: int = 0, kept: Collection[int] = ()) -> None:
        """Begin a generation; the ranks *kept* keep their processes from generation *since*."""
        self.generation, self.membership = generation, membership
        self.since, self.kept = since, frozenset(kept)
        self.ranks = {rank: RankState(rank=rank, node=node) for node, ranks in membership.items() for rank in ranks}
        self.unseen: set[int] = set()
        """Ranks whose agents were not reached since the controller reattached: they are assumed to do what the others do."""
        self.evidence: list[Evidence] = []
        self.unusable: list[Fault] = []
        """Faults after which a GPU cannot compute that ranks use: they are acted on even though steps may still arrive."""
        self.node_faults: list[Fault] = []
        """Faults of nodes that their monitors reported in this generation, and lasting ones from before."""
        self.problems: list[Fault] = []
        """Problems with checkpoints and in-memory snapshots, through which training continues."""
        self.stopped_nodes, self.terminated = set[str](), set[str]()
        """Nodes whose workers have all exited after a command; and nodes with a rank that a SIGTERM of somebody else ended: a batch system
        that preempts a node sends it to every process there."""
        self.durations: deque[tuple[int, float]] = deque(maxlen=100_000)
        self.step_before, self.longest_pause = 0, 0.0
        """The newest step that any rank has finished; and, of all generations, the longest time without progress after which the job
        continued by itself (seconds)."""
        self.overrun: RecoveryTimeout | None = None
        self.regrouped: dict[int, WorkerRegrouped] = {}
        """By rank, how it joined this generation."""
        self.covered: dict[int, WorkerCoverage] = {}
        """By rank that a hot spare took, how much of its first step the warm-up had covered."""
        self.losses: deque[tuple[int, float]] = deque(maxlen=LOSSES)
        """The newest losses of rank 0, by step."""
        self.asked_at = 0.0
        """When the ranks were last queried for their status."""
        self.checks: dict[int, dict[int, tuple[str, str]]] = {}
        """By step and rank, the shard that its parameters are a replica of (if it knows) and their digest."""
        self.sums: dict[tuple[int, int], dict[str, int]] = {}
        """By rank and step, the requested checksums of single tensors."""
        self.news: deque[Evidence] = deque()
        """Evidence that nobody has taken yet."""
        self.heartbeats = False
        """The steps come from `holdfast.heartbeat`, perhaps not from all ranks."""
        self._stepped = 0
        """How many ranks have finished a step of this generation; counted, as it is read with every one of thousands of events."""
        self._lowest = min(self.ranks, default=0)
        self._now = self._first_beat = 0.0
        """When the last event and the first heartbeat arrived (wall clock)."""

    @property
    def first(self) -> RankState:
        """The lowest rank, whose steps are those of the job."""
        return self.ranks[self._lowest]

    # -- events -------------------------------------------------------------------------------------------------------

    def admits(self, node: str, event: AgentEvent) -> bool:
        """Return whether *event* of *node*'s agent belongs to this generation.

        Raise one of `MALFORMED_EVENT` when *node* reports on a rank of another node.
        """
        if event.generation not in {None, self.generation}:
            if not (isinstance(event, WorkerRaised | WorkerExited) and event.generation == self.since and event.rank in self.kept):
                return False
            # A process that was to be kept may exit before its agent has received the command for this generation.
            if self.ranks[event.rank].started is not None:
                return False
        if isinstance(event, WorkerEvent) and self.ranks[event.rank].node != node:
            raise ValueError(f"rank {event.rank} is on {self.ranks[event.rank].node}")
        return True

    def note_arrival(self, event: AgentEvent, now: float, *, shows_progress: bool) -> None:
        """Note that *event* arrived at *now*: ages are counted from then by this host's clock, as those of the nodes may differ."""
        self._now = now
        if isinstance(event, RankEvent):
            self.unseen.discard(event.rank)
            if shows_progress and not (isinstance(event, Saved) and event.overlapped):
                self.ranks[event.rank].progress_at = now

    def keep(self, before: GenerationState, recommended_actions: RecommendedActions = CATALOGUE_ACTIONS) -> None:
        """Copy what is known of the processes that are kept from the generation *before*."""
        self.longest_pause = before.longest_pause
        self.node_faults = [
            fault
            for fault in before.node_faults
            if fault.node in self.membership
            and (recommended_actions.of(fault) in _LASTING or (fault.needs_proof and fault.entry.recommended_action in _LASTING))
        ]
        if self.kept:
            self.step_before = before.step_before
        for rank in self.ranks.keys() - self.kept:
            self.ranks[rank].grouped = bool(self.kept)  # it can only join kept processes with managed groups
        for rank in self.kept & before.ranks.keys():
            view, old = self.ranks[rank], before.ranks[rank]
            view.pid, view.managed, view.hello, view.grouped, view.until = old.pid, old.managed, old.hello, old.grouped, old.until
            view.ended, view.raised, view.succeeded = old.ended, old.raised, old.succeeded
        # A process that was to be kept and has exited since: its exit belongs to this generation, or nobody would handle it.
        self.evidence += [seen for seen in before.evidence if isinstance(seen, WorkerExit) and seen.rank in self.kept]

    def note_missing(self, ranks: Iterable[int]) -> None:
        """Note that these *ranks* have no process: their agent refused to begin the generation."""
        for rank in ranks:
            self.ranks[rank].ended = True

    def on_worker_started(self, _node: str, event: WorkerStarted) -> None:
        """Note its process; an activated hot spare reports steps."""
        view = self.ranks[event.rank]
        view.pid, view.started, view.started_at = event.pid, event.at, self._now
        if event.hot_spare is not None:
            view.hello = view.managed = True  # it had warmed up

    def on_worker_kept(self, _node: str, event: WorkerKept) -> None:
        """Note that its process was kept."""
        view = self.ranks[event.rank]
        view.pid, view.started, view.started_at = event.pid, event.at, self._now
        view.grouped = view.grouped or event.grouped

    def on_worker_pid_changed(self, _node: str, event: WorkerPidChanged) -> None:
        """Note its process."""
        self.ranks[event.rank].pid = event.pid

    def on_worker_groups(self, _node: str, event: WorkerGroups) -> None:
        """Note that its process can be kept when others are lost."""
        self.ranks[event.rank].grouped = True

    def on_worker_switched(self, _node: str, event: WorkerSwitched) -> None:
        """Note whether it is ahead of the recorded generation."""
        self.ranks[event.rank].ahead = event.for_generation > self.generation

    def on_worker_broken(self, node: str, event: WorkerBroken) -> None:
        """Keep the broken groups as evidence."""
        self.evidence.append(GroupFailure(node=node, rank=event.rank, at=event.at, why=event.why, group=event.group, step=event.step))

    def on_worker_regrouped(self, _node: str, event: WorkerRegrouped) -> None:
        """Keep how it joined this generation."""
        self.regrouped[event.rank] = event

    def on_worker_coverage(self, _node: str, event: WorkerCoverage) -> None:
        """Keep how much of its first step was covered."""
        self.covered[event.rank] = event

    def on_worker_recovery_failed(self, node: str, event: WorkerRecoveryFailed) -> None:
        """Keep the refusal as evidence."""
        self.evidence.append(ReplaceRanksFailure(node=node, rank=event.rank, at=event.at, why=event.why))

    def on_worker_hello(self, _node: str, event: WorkerHello) -> None:
        """Note that it is connected."""
        self.ranks[event.rank].hello = True

    def on_mark(self, _node: str, event: Mark) -> None:
        """Keep how long a part of its startup took."""
        view = self.ranks[event.rank]
        view.managed = True
        view.marks[event.name] = event.seconds

    def on_resumed(self, _node: str, event: Resumed) -> None:
        """Note its step, and where its state came from."""
        view = self.ranks[event.rank]
        view.managed, view.resumed, view.step = True, event.step, event.step
        view.resumed_from, view.resumed_replica = event.path, event.replica
        self.step_before = max(self.step_before, event.step)

    def on_worker_stepped(self, _node: str, event: WorkerStepped) -> None:
        """Note its first step of this generation."""
        view = self.ranks[event.rank]
        self._stepped += view.first_step is None
        view.managed, view.first_step, view.first_step_number = True, event.at, event.step
        view.until = event.until
        self.heartbeats = self.heartbeats or event.heartbeat
        self._advance(view, event.step)

    def on_steps(self, _node: str, event: Steps) -> None:
        """Keep how long the steps took, and their losses."""
        for step, _, seconds, loss, *_ in event.steps:
            self.durations.append((step, seconds))
            if loss is not None:
                self.losses.append((step, loss))
            self._advance(self.first, step)
        self.first.progress_at = self._now

    def on_heartbeats(self, node: str, event: Heartbeats) -> None:
        """Note the progress of each rank of the node."""
        self._first_beat = self._first_beat or self._now
        for name, beat in event.ranks.items():
            view = self.ranks.get(int(name))
            if view is not None and view.node == node:
                view.beat, view.beat_at = beat, self._now
                view.progress_at = max(view.progress_at, self._now - beat.age)
                view.managed = view.managed or beat.managed
                if view.printed_at is None and beat.printed:
                    view.printed_at = self._now
                self._advance(view, beat.step or 0)
                self._note_breakdowns(view, beat.step_timings)
                self._note_checks(view, beat.checks)

    def _note_breakdowns(self, view: RankState, blocks: Iterable[list[float]]) -> None:
        newest = view.breakdowns[-1][0] if view.breakdowns else -1
        for number, own, talk, data in blocks:
            if number > newest:
                breakdown = StepBreakdown(own=own, talk=talk, data=data)
                if view.breakdowns and len(view.first_breakdowns) < FIRST_BLOCKS:  # the first block includes the warm-up
                    view.first_breakdowns.append(breakdown)
                view.breakdowns.append((int(number), breakdown))

    def _note_checks(self, view: RankState, digests: Iterable[ParameterDigest]) -> None:
        for one in digests:
            self.checks.setdefault(one.step, {})[view.rank] = one.shard, one.digest
        while len(self.checks) > CHECKS:
            del self.checks[min(self.checks)]

    def on_worker_rank_status(self, _node: str, event: WorkerRankStatus) -> None:
        """Keep its status; a rank that has begun operations since the last answer makes progress."""
        view, status = self.ranks[event.rank], parse_rank_status(event.said)
        if status is None:
            return
        before, view.status, view.status_at = view.status, status, self._now
        if before is not None and operations([before]) != operations([status]):
            view.moved_at = self._now

    def on_worker_checksums(self, _node: str, event: WorkerChecksums) -> None:
        """Keep the checksums of its tensors."""
        sums = event.said.get("sums")
        if isinstance(sums, dict):
            self.sums[event.rank, event.said.get("step", 0)] = {str(name): int(value) for name, value in sums.items()}

    def on_worker_loss(self, node: str, event: WorkerLoss) -> None:
        """Keep the loss as evidence."""
        self.news.append(NonFiniteLoss(node=node, rank=event.rank, at=event.at, step=event.step, loss=event.loss))

    def _advance(self, view: RankState, step: int) -> None:
        view.step = max(view.step, step)
        self.step_before = max(self.step_before, view.step)

    def on_worker_stopped(self, _node: str, event: WorkerStopped) -> None:
        """Note the signal and the time of the stop."""
        self.ranks[event.rank].stopped = (event.signal, event.at, self._now)

    def on_worker_continued(self, _node: str, event: WorkerContinued) -> None:
        """Note that it runs again."""
        self.ranks[event.rank].stopped = None

    def on_worker_raised(self, node: str, event: WorkerRaised) -> None:
        """Keep the exception as evidence."""
        view = self.ranks[event.rank]
        view.raised = True
        self._advance(view, event.step or 0)
        self.evidence.append(
            WorkerExit(node=node, rank=view.rank, at=event.at, code=1, step=view.known_step(), raised=_raised(event.raised), finished=False)
        )

    def on_worker_exited(self, node: str, event: WorkerExited) -> None:
        """Note its exit; it is evidence unless a command caused it or its exception was reported before."""
        view = self.ranks[event.rank]
        view.ended, view.ended_at, view.stopped = True, self._now, None
        self._advance(view, event.step or 0)
        if event.ordered or view.raised:
            return
        if event.signal == signal.SIGTERM or event.code == TERMINATED:
            self.terminated.add(node)
        seen = WorkerExit(
            node=node,
            rank=view.rank,
            at=event.ended,
            code=event.code,
            signal=event.signal,
            finished=event.finished,
            step=view.known_step(),
            raised=_raised(event.raised) if event.raised else None,
            oom=event.oom or (Unknown(event.oom_blind) if event.oom_blind else None),
            output=event.output or "",
        )
        view.succeeded = seen.code == 0 and seen.finished
        self.evidence.append(seen)

    def on_start_failed(self, node: str, event: StartFailed) -> None:
        """Keep the failure as evidence."""
        self.evidence.append(StartFailure(node=node, at=event.at, why=event.why, errno=event.errno))

    def on_workers_exited(self, node: str, _event: WorkersExited) -> None:
        """Note that no worker of this generation runs on the node any more."""
        self.stopped_nodes.add(node)

    @property
    def now(self) -> float:
        """When the last event arrived (wall clock)."""
        return self._now

    # -- queries -------------------------------------------------------------------------------------------------------

    def stops(self, now: float) -> list[WorkerStop]:
        """Return the workers that a signal has stopped."""
        return [
            WorkerStop(
                node=view.node, rank=view.rank, at=view.stopped[1], signal=view.stopped[0], seconds=now - view.stopped[2], step=view.step
            )
            for view in self.ranks.values()
            if view.stopped is not None and not view.ended
        ]

    def progress(self, now: float, *, steps_expected: bool) -> Progress | None:
        """Return the progress of all running ranks, or None before their first heartbeats are due.

        After that a rank without a heartbeat counts as one without progress, so that it does not hide that the others are stalled. The
        times of steps say nothing about a rank before its first one.
        """
        living = [view for view in self.ranks.values() if not view.ended]
        beating = [view for view in living if view.beat is not None]
        silent = [view for view in living if view.beat is None]
        if not beating or (now - self._first_beat < FIRST_HEARTBEATS and any(view.rank not in self.unseen for view in silent)):
            return None
        begun = min((view.started for view in living if view.started is not None), default=now)
        ranks = {view.rank: _rank_progress(view, now, now - begun) for view in living}
        under_way = all(
            view.started is not None and (view.first_step is not None or (view.beat is not None and not view.managed))
            for view in living
            if view.rank not in self.unseen
        )
        ends = [now - view.ended_at for view in self.ranks.values() if view.ended_at]
        quiet = [
            view.beat.output_age + now - view.beat_at for view in beating if view.beat is not None and view.beat.output_age is not None
        ]
        return Progress(
            at=now,
            ranks=ranks,
            step_seconds=tuple(seconds for _, seconds in list(self.durations)[-WINDOW:]) if under_way else (),
            since_start=now - begun,
            steps_expected=steps_expected,
            output_age=min([*quiet, *ends], default=None),
            moved=min((now - view.moved_at for view in living if view.moved_at > view.progress_at), default=None),
            status_requested=self.asked_at > max(view.progress_at for view in living),
            longest_pause=self.longest_pause,
            printed=bool(ends) or any(view.printed_at is not None for view in beating),
            ended=tuple(sorted(view.rank for view in self.ranks.values() if view.succeeded)),
            since_end=min(ends, default=0.0),
        )

    def early_exit(self, now: float) -> EarlyExit | None:
        """Return the ranks that exited with status 0 while others run, before any step of this generation; None where there are none."""
        ended = sorted((view for view in self.ranks.values() if view.succeeded), key=lambda view: view.ended_at)
        running = tuple(sorted(view.rank for view in self.ranks.values() if not view.ended))
        if not ended or not running or self.any_stepped():
            return None
        first = ended[0]
        return EarlyExit(
            at=now,
            node=first.node,
            ended=tuple(view.rank for view in ended),
            running=running,
            ran=first.ran(),
            since=now - first.ended_at,
        )

    def step_breakdowns(self, now: float, roles: Roles) -> StepBreakdowns | None:
        """Return how all ranks spent their time, or None before all have reported enough to compare."""
        views = [view for view in self.ranks.values() if not view.ended]
        if not views or any(len(view.breakdowns) < 2 for view in views):  # noqa: PLR2004 (the first includes the warm-up)
            return None
        recent = {view.rank: tuple(one for _, one in list(view.breakdowns)[1:][-RECENT_BLOCKS:]) for view in views}
        first = {view.rank: tuple(view.first_breakdowns) for view in views}
        nodes = {view.rank: view.node for view in views}
        return StepBreakdowns(at=now, step=self.step_before, nodes=nodes, first=first, blocks=recent, roles=roles)

    def grouped(self) -> bool:
        """Return whether every running rank uses managed process groups; a controller that reattaches learns of no others."""
        living = [view for view in self._seen() if not view.ended] or list(self.ranks.values())  # all ranks create groups together
        return bool(living) and all(view.grouped for view in living)

    def dead(self) -> frozenset[int]:
        """Return the ranks whose processes have failed, or are about to."""
        return frozenset(view.rank for view in self.ranks.values() if (view.ended and not view.succeeded) or view.raised)

    def managed(self) -> bool:
        """Return whether any rank reports steps."""
        return any(view.managed for view in self.ranks.values())

    def all_started(self) -> bool:
        """Return whether every rank has, or had, a process."""
        seen = self._seen()
        return bool(seen) and all(view.started is not None for view in seen)

    def _seen(self) -> list[RankState]:
        return [view for view in self.ranks.values() if view.rank not in self.unseen]

    def any_stepped(self) -> bool:
        """Return whether any rank has finished a step of this generation."""
        return self._stepped > 0

    def all_stepped(self) -> bool:
        """Return whether every rank has finished a step of this generation; where steps come from `holdfast.heartbeat`, whether any has."""
        if self.heartbeats:
            return self._stepped > 0 and self.all_started()
        return 0 < self._stepped == len(self.ranks) - len(self.unseen)

    def is_ahead(self) -> bool:
        """Return whether a rank has switched to a planned generation that is not on record."""
        return any(view.ahead for view in self.ranks.values())

    def cut_short(self) -> bool:
        """Return whether the commands of an earlier controller ended ranks: it died in the middle of a recovery."""
        return not self.evidence and any(view.ended and not view.succeeded for view in self.ranks.values())

    def all_running(self) -> bool:
        """Return whether every rank runs, or has succeeded."""
        return all(view.started is not None and (not view.ended or view.succeeded) for view in self._seen())

    def all_succeeded(self) -> bool:
        """Return whether every rank has succeeded."""
        return all(view.succeeded for view in self.ranks.values())

    def all_ended(self, nodes: set[str]) -> bool:
        """Return whether no worker of this generation runs on *nodes*, as their agents report."""
        return nodes <= self.stopped_nodes

    def startup(self) -> float | None:
        """Return the seconds from the start of the last rank to the job's first output; None while nothing was printed."""
        printed = [view.printed_at for view in self.ranks.values() if view.printed_at is not None]
        return max(0.0, min(printed) - max(view.started_at for view in self.ranks.values())) if printed else None

    def first_step_at(self) -> float | None:
        """Return when the last rank finished its first step (or started, for scripts without steps)."""
        if self.all_stepped():
            return max(view.first_step or 0.0 for view in self.ranks.values())
        if not self.managed() and self.all_started():
            return max(view.started or 0.0 for view in self.ranks.values())
        return None

    def start_seconds(self) -> float | None:
        """Return the seconds from the first start of a worker to the last rank's first step; None before that."""
        started = min((view.started for view in self.ranks.values() if view.started is not None), default=None)
        first_step = self.first_step_at()
        return None if started is None or first_step is None else max(0.0, first_step - started)

    def step_seconds(self) -> float | None:
        """Return the median of the newest steps' seconds; None before there are any."""
        newest = [seconds for _, seconds in islice(reversed(self.durations), NEWEST_STEPS)]
        return statistics.median(newest) if newest else None

    def resumed_step(self) -> int | None:
        """Return the step that the ranks resumed from."""
        return max((view.resumed for view in self.ranks.values() if view.resumed is not None), default=None)

    def resumed_from_step(self, before: GenerationState) -> int | None:
        """Return the step that the ranks resumed from: as reported, or estimated from the first step that came by heartbeat.

        A script that reports every tenth step is taken to have resumed ten before the first that it reports.
        """
        resumed = self.resumed_step()
        if resumed is not None or not self.heartbeats:
            return resumed
        first = min((view.first_step_number for view in self.ranks.values() if view.first_step_number is not None), default=None)
        return None if first is None else max(0, first - max(before.stride(), 1))

    def stride(self) -> int:
        """Return the smallest distance between two reported steps; 0 where fewer than two were."""
        numbers = sorted({step for step, _ in self.durations})
        return min((later - earlier for earlier, later in pairwise(numbers)), default=0)

    def until(self) -> int | None:
        """Return the last step of the script, if it reports one."""
        return next((view.until for view in self.ranks.values() if view.until is not None), None)

    def slowest_mark(self, name: str) -> float:
        """Return the seconds that the slowest rank spent on *name* (``group``, ``load``)."""
        return max((view.marks.get(name, 0.0) for view in self.ranks.values()), default=0.0)

    def seconds_of(self, after: int) -> float:
        """Return the seconds that the steps after *after* took: the work that a rollback to it loses."""
        return sum(seconds for step, seconds in self.durations if step > after)


def _raised(facts: ExceptionFacts) -> WorkerException:
    return WorkerException(
        type=facts.type, message=facts.message, traceback=facts.traceback or "", errno=facts.errno, peer_lost=facts.peer_lost
    )


def _rank_progress(view: RankState, now: float, lasted: float) -> RankProgress:
    """Return the progress of a rank; without a heartbeat, that there was none in the seconds that its generation has *lasted*."""
    beat = view.beat
    if beat is None:
        return RankProgress(node=view.node, step=view.step, age=lasted, managed=view.managed, reported=False)
    return RankProgress(
        node=view.node,
        step=view.step,
        age=now - view.progress_at,
        section=beat.section,
        section_limit=beat.section_limit,
        process=beat.process,
        wait=beat.wait,
        managed=view.managed,
        status=view.status if view.status_at > view.progress_at else None,
    )


def hang_limits(timeouts: Any) -> HangLimits:  # noqa: ANN401 (holdfast.spec.Timeouts, which this module must not need to import)
    """Return the job's timeouts for the detectors, in seconds."""
    silence = timeouts.log_silence
    return HangLimits(
        startup=timeouts.startup.total_seconds(),
        hang_min=timeouts.hang_min.total_seconds(),
        hang_multiplier=timeouts.hang_multiplier,
        hang=timeouts.hang.total_seconds(),
        section=timeouts.section.total_seconds(),
        stopped_process=timeouts.stopped_process.total_seconds(),
        log_silence=silence.total_seconds() if silence is not None else None,
        exit_grace=timeouts.exit_grace.total_seconds(),
    )
