"""What is known of one generation: folded from the agents' events, asked by the tasks. No I/O.

All of it belongs to one generation; the next one starts with an empty board, so that nothing begun and
never ended can look like a fault later.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from detectors.catalogue import CATALOGUE_ACTIONS, Fault, RecommendedAction, RecommendedActions
from detectors.evidence import (
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
from detectors.hang_analysis import operations
from detectors.progress import WINDOW
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

_LASTING: Final = frozenset({RecommendedAction.RESET_GPU, RecommendedAction.DRAIN, RecommendedAction.EVICT})
"""Levels of faults that a new generation does not heal."""


@dataclass(slots=True, kw_only=True)
class RankState:
    """One rank as its node's agent tells of it. Times are the agent's wall clock."""

    rank: int
    node: str
    pid: int | None = None
    started: float | None = None
    managed: bool = False
    hello: bool = False
    grouped: bool = False
    """Its process groups are Holdfast's own: its process can be kept when others are lost."""
    ahead: bool = False
    """It has gone over to a planned generation by itself."""
    step: int = 0
    first_step: float | None = None
    first_step_number: int | None = None
    until: int | None = None
    resumed: int | None = None
    resumed_from: str | None = None
    """The checkpoint that it resumed from; none where the state came from memory, or there was none."""
    resumed_replica: bool = False
    """Its state came from a replica that another node had kept."""
    marks: dict[str, float] = field(default_factory=dict)
    beat: RankHeartbeat | None = None
    beat_at: float = 0.0
    status: RankStatus | None = None
    """Where it said that it stands when it was asked last."""
    standing_at: float = 0.0
    """When that was heard."""
    moved_at: float = 0.0
    """When it was last seen to have begun operations since the look before."""
    paces: deque[tuple[int, StepBreakdown]] = field(default_factory=lambda: deque(maxlen=PACES))
    """How its steps spent their time: blocks by number."""
    first_paces: list[StepBreakdown] = field(default_factory=list)
    """The first ones after the warm-up: what the newest are compared with."""
    progress_at: float = 0.0
    """When it last got on, as far as is known here."""
    stopped: tuple[int, float, float] | None = None
    """Signal that stopped it, when by its agent's clock, and when that was heard."""
    raised: bool = False
    ended: bool = False
    ended_at: float = 0.0
    """When its end was heard of."""
    succeeded: bool = False
    started_at: float = 0.0
    """When its start was heard of."""
    printed_at: float | None = None
    """When it was first heard that it had printed anything."""

    def known_step(self) -> int | None:
        """Return the step it had finished, if it is one that reports steps."""
        return self.step if self.managed else None

    def reached(self) -> tuple[str, int, str]:
        """Return the node, how far this rank's start came, and that in words."""
        stages = (
            (self.first_step, "has stepped"),
            (self.resumed is not None, "has loaded its state"),
            (self.marks, "has joined the group"),
        )
        for far, (true, words) in zip((4, 3, 2), stages, strict=True):
            if true:
                return self.node, far, words
        return self.node, int(self.started is not None), "has started" if self.started is not None else "has not started"


PACES: Final = 64
"""Blocks of steps that are kept of each rank."""
FIRST_PACES: Final = 8
"""Blocks after the warm-up that stay for comparison."""
RECENT_PACES: Final = 16
"""Newest blocks that are judged."""
LOSSES: Final = 512
CHECKS: Final = 8
"""Newest checks of the parameters that are kept."""
Roles = tuple[tuple[int, ...], ...]

TERMINATED: Final = 128 + signal.SIGTERM
"""Status of a rank that took SIGTERM for the wish that it is, and ended by itself."""
MALFORMED_EVENT: Final = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
"""What taking in an event raises that no agent of ours sends: a journal was damaged, or a node is in the wrong hands."""


FIRST_WORDS: Final = 30.0
"""Seconds from the first word about a rank in which all agents tell of theirs: one that nobody has told of may be what others wait for."""


class GenerationState:
    """One generation's ranks, the evidence against them, and how far they are."""

    def __init__(self, generation: int, membership: dict[str, list[int]], *, since: int = 0, kept: Collection[int] = ()) -> None:
        """Begin a generation; the processes of the ranks *kept* live on from generation *since*."""
        self.generation, self.membership = generation, membership
        self.since, self.kept = since, frozenset(kept)
        self.ranks = {rank: RankState(rank=rank, node=node) for node, ranks in membership.items() for rank in ranks}
        self.unseen: set[int] = set()
        """Ranks whose agents nobody has reached since the job was adopted: of them is presumed what the others do."""
        self.evidence: list[Evidence] = []
        self.unusable: list[Fault] = []
        """Faults of devices that ranks compute on, and cannot any more: they are acted on though steps may still come in."""
        self.node_faults: list[Fault] = []
        """What is wrong with nodes, as their lookouts told while this generation ran, or lastingly before it."""
        self.problems: list[Fault] = []
        """What training goes on through: trouble with checkpoints and with state in memory."""
        self.gone, self.terminated = set[str](), set[str]()
        """Nodes all of whose workers have ended by our order; and nodes with a rank that SIGTERM ended which nobody here had sent: what
        takes nodes away sends it to all there is on them."""
        self.durations: deque[tuple[int, float]] = deque(maxlen=100_000)
        self.step_before, self.longest_pause = 0, 0.0
        """Newest step any rank has finished; and, of all generations, the longest time without progress after which the job went on by
        itself."""
        self.overrun: RecoveryTimeout | None = None
        self.regrouped: dict[int, WorkerRegrouped] = {}
        """By rank, how it came into this generation."""
        self.covered: dict[int, WorkerCoverage] = {}
        """By rank that a standby took, how much of its first step the warm-up had foreseen."""
        self.losses: deque[tuple[int, float]] = deque(maxlen=LOSSES)
        """The newest losses of rank 0, by step."""
        self.asked_at = 0.0
        """When the ranks were last asked where they stand."""
        self.checks: dict[int, dict[int, tuple[str, str]]] = {}
        """By step and rank, what it says whose copy its parameters are (if it knows) and their digest."""
        self.sums: dict[tuple[int, int], dict[str, int]] = {}
        """By rank and step, the sums of single tensors that were asked for."""
        self.news: deque[Evidence] = deque()
        """What was seen since the last time somebody took it away."""
        self.heartbeats = False
        """Steps are told by scripts that keep their own state, and not by all ranks perhaps."""
        self._stepped = 0
        """Ranks that have finished a step of this generation: asked with every one of thousands of events."""
        self._lowest = min(self.ranks, default=0)
        self._now = self._first_beat = 0.0
        """When anything was heard last, and when the first of the ranks was heard of (wall clock)."""

    @property
    def first(self) -> RankState:
        """The lowest rank, whose steps are those of the job."""
        return self.ranks[self._lowest]

    # -- taking in ----------------------------------------------------------------------------------------------------

    def admits(self, node: str, event: AgentEvent) -> bool:
        """Tell whether *event* of *node*'s agent belongs to this generation.

        Raise one of `MALFORMED_EVENT` for what *node* says of a rank that another one has.
        """
        if event.generation not in {None, self.generation} and not self._ends_before_it_is_kept(event):
            return False
        if isinstance(event, WorkerEvent) and self.ranks[event.rank].node != node:
            raise ValueError(f"rank {event.rank} is on {self.ranks[event.rank].node}")
        return True

    def note_arrival(self, event: AgentEvent, now: float, *, shows_progress: bool) -> None:
        """Learn that *event* arrived at *now*: ages are counted from then, by one clock; those of the nodes may differ."""
        self._now = now
        if isinstance(event, RankEvent):
            self.unseen.discard(event.rank)
            if shows_progress and not (isinstance(event, Saved) and event.beside):
                self.ranks[event.rank].progress_at = now

    def _ends_before_it_is_kept(self, event: AgentEvent) -> bool:
        """Tell whether a process that was to live on ended before its agent had got the order for this generation."""
        if not isinstance(event, WorkerRaised | WorkerExited) or event.generation != self.since:
            return False
        return event.rank in self.kept and self.ranks[event.rank].started is None

    def keep(self, before: GenerationState, recommended_actions: RecommendedActions = CATALOGUE_ACTIONS) -> None:
        """Take over what is known of the processes that live on from the generation *before*."""
        self.longest_pause = before.longest_pause
        self.node_faults = [
            fault for fault in before.node_faults if recommended_actions.of(fault) in _LASTING and fault.node in self.membership
        ]
        if self.kept:
            self.step_before = before.step_before
        for rank in self.ranks.keys() - self.kept:
            self.ranks[rank].grouped = bool(self.kept)  # it can join those that live in no other way
        for rank in self.kept & before.ranks.keys():
            view, old = self.ranks[rank], before.ranks[rank]
            view.pid, view.managed, view.hello, view.grouped, view.until = old.pid, old.managed, old.hello, old.grouped, old.until
            view.ended, view.raised, view.succeeded = old.ended, old.raised, old.succeeded
        # Who was to live on and has ended since that was decided: its end belongs to this generation, or nobody would answer it.
        self.evidence += [seen for seen in before.evidence if isinstance(seen, WorkerExit) and seen.rank in self.kept]

    def note_missing(self, ranks: Iterable[int]) -> None:
        """Learn that nobody took the place of these *ranks*: their agent would not begin the generation."""
        for rank in ranks:
            self.ranks[rank].ended = True

    def on_worker_started(self, _node: str, event: WorkerStarted) -> None:
        """Note its process; a standby that was promoted reports steps."""
        view = self.ranks[event.rank]
        view.pid, view.started, view.started_at = event.pid, event.at, self._now
        if event.standby is not None:
            view.hello = view.managed = True  # it had warmed up and parked

    def on_worker_kept(self, _node: str, event: WorkerKept) -> None:
        """Note that its process lives on."""
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
        """Note whether it is ahead of this generation."""
        self.ranks[event.rank].ahead = event.for_generation > self.generation

    def on_worker_broken(self, node: str, event: WorkerBroken) -> None:
        """Keep the broken groups as evidence."""
        self.evidence.append(GroupFailure(node=node, rank=event.rank, at=event.at, why=event.why, group=event.group, step=event.step))

    def on_worker_regrouped(self, _node: str, event: WorkerRegrouped) -> None:
        """Keep how it came into this generation."""
        self.regrouped[event.rank] = event

    def on_worker_coverage(self, _node: str, event: WorkerCoverage) -> None:
        """Keep how much of its first step was foreseen."""
        self.covered[event.rank] = event

    def on_worker_recovery_failed(self, node: str, event: WorkerRecoveryFailed) -> None:
        """Keep the refusal as evidence."""
        self.evidence.append(ReplaceRanksFailure(node=node, rank=event.rank, at=event.at, why=event.why))

    def on_worker_hello(self, _node: str, event: WorkerHello) -> None:
        """Note that it is connected."""
        self.ranks[event.rank].hello = True

    def on_mark(self, _node: str, event: Mark) -> None:
        """Keep how long a part of its start took."""
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
        for step, _, seconds, loss in event.steps:
            self.durations.append((step, seconds))
            if loss is not None:
                self.losses.append((step, loss))
            self._advance(self.first, step)
        self.first.progress_at = self._now

    def on_heartbeats(self, node: str, event: Heartbeats) -> None:
        """Note how far each rank of the node is."""
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
                self._note_paces(view, beat.paces)
                self._note_checks(view, beat.checks)

    def _note_paces(self, view: RankState, told: Iterable[list[float]]) -> None:
        newest = view.paces[-1][0] if view.paces else -1
        for number, own, talk, data in told:
            if number > newest:
                pace = StepBreakdown(own=own, talk=talk, data=data)
                if view.first_paces or view.paces:  # the first block has the warm-up in it
                    view.first_paces += [pace] if len(view.first_paces) < FIRST_PACES else []
                view.paces.append((int(number), pace))

    def _note_checks(self, view: RankState, told: Iterable[ParameterDigest]) -> None:
        for one in told:
            self.checks.setdefault(one.step, {})[view.rank] = one.shard, one.digest
        while len(self.checks) > CHECKS:
            del self.checks[min(self.checks)]

    def on_worker_rank_status(self, _node: str, event: WorkerRankStatus) -> None:
        """Keep where it stands; whoever has begun operations since the last answer makes progress."""
        view, told = self.ranks[event.rank], parse_rank_status(event.said)
        if told is None:
            return
        before, view.status, view.standing_at = view.status, told, self._now
        if before is not None and operations([before]) != operations([told]):
            view.moved_at = self._now

    def on_worker_checksums(self, _node: str, event: WorkerChecksums) -> None:
        """Keep the sums of its tensors."""
        said = event.said
        if isinstance(said.get("sums"), dict):
            self.sums[event.rank, said.get("step", 0)] = {str(name): int(value) for name, value in said["sums"].items()}

    def on_worker_loss(self, node: str, event: WorkerLoss) -> None:
        """Keep the bad loss as news."""
        self.news.append(NonFiniteLoss(node=node, rank=event.rank, at=event.at, step=event.step, loss=event.loss))

    def _advance(self, view: RankState, step: int) -> None:
        view.step = max(view.step, step)
        self.step_before = max(self.step_before, view.step)

    def on_worker_stopped(self, _node: str, event: WorkerStopped) -> None:
        """Note since when it is stopped."""
        self.ranks[event.rank].stopped = (event.signal, event.at, self._now)

    def on_worker_continued(self, _node: str, event: WorkerContinued) -> None:
        """Forget that it was stopped."""
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
        """Note its end; one that nobody ordered is evidence, unless its exception was before it."""
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
        """Note that nothing of this generation is left on the node."""
        self.gone.add(node)

    @property
    def now(self) -> float:
        """When anything was heard last (wall clock)."""
        return self._now

    # -- asking -------------------------------------------------------------------------------------------------------

    def stops(self, now: float) -> list[WorkerStop]:
        """Return the workers that stand still by a signal."""
        return [
            WorkerStop(
                node=view.node, rank=view.rank, at=view.stopped[1], signal=view.stopped[0], seconds=now - view.stopped[2], step=view.step
            )
            for view in self.ranks.values()
            if view.stopped is not None and not view.ended
        ]

    def progress(self, now: float, *, steps_expected: bool) -> Progress | None:
        """Return how far all living ranks are, or None before their agents have told, or had the time to.

        After that one of which nothing was heard keeps nobody from seeing that the others stand still: it is among them, without progress.
        The times of steps say nothing of a rank that has still to come to its first one.
        """
        living = [view for view in self.ranks.values() if not view.ended]
        heard = [view for view in living if view.beat is not None]
        silent = [view for view in living if view.beat is None]
        if not heard or (now - self._first_beat < FIRST_WORDS and any(view.rank not in self.unseen for view in silent)):
            return None
        begun = min((view.started for view in living if view.started is not None), default=now)
        ranks = {view.rank: _rank_progress(view, now, now - begun) for view in living}
        under_way = all(
            view.started is not None and (view.first_step is not None or (view.beat is not None and not view.managed))
            for view in living
            if view.rank not in self.unseen
        )
        ends = [now - view.ended_at for view in self.ranks.values() if view.ended_at]
        quiet = [view.beat.output_age + now - view.beat_at for view in heard if view.beat is not None and view.beat.output_age is not None]
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
            printed=bool(ends) or any(view.printed_at is not None for view in heard),
            ended=tuple(sorted(view.rank for view in self.ranks.values() if view.succeeded)),
            since_end=min(ends, default=0.0),
        )

    def paces(self, now: float, roles: Roles) -> StepBreakdowns | None:
        """Return how all ranks spent their time, or None before all have told enough to compare."""
        views = [view for view in self.ranks.values() if not view.ended]
        if not views or any(len(view.paces) < 2 for view in views):  # noqa: PLR2004 (the first has the warm-up in it)
            return None
        recent = {view.rank: tuple(pace for _, pace in list(view.paces)[1:][-RECENT_PACES:]) for view in views}
        first = {view.rank: tuple(view.first_paces) for view in views}
        nodes = {view.rank: view.node for view in views}
        return StepBreakdowns(at=now, step=self.step_before, nodes=nodes, first=first, blocks=recent, roles=roles)

    def grouped(self) -> bool:
        """Tell whether the process groups of every rank that lives are Holdfast's own; a flow that adopts the job hears of no others."""
        living = [view for view in self._seen() if not view.ended] or list(self.ranks.values())  # groups are made by all ranks together
        return bool(living) and all(view.grouped for view in living)

    def dead(self) -> frozenset[int]:
        """Return the ranks whose processes have ended, or are about to."""
        return frozenset(view.rank for view in self.ranks.values() if (view.ended and not view.succeeded) or view.raised)

    def managed(self) -> bool:
        """Tell whether any rank has announced that it reports steps."""
        return any(view.managed for view in self.ranks.values())

    def all_started(self) -> bool:
        """Tell whether every rank has a process, or had one."""
        seen = self._seen()
        return bool(seen) and all(view.started is not None for view in seen)

    def _seen(self) -> list[RankState]:
        return [view for view in self.ranks.values() if view.rank not in self.unseen]

    def any_stepped(self) -> bool:
        """Tell whether any rank has finished a step of this generation."""
        return self._stepped > 0

    def all_stepped(self) -> bool:
        """Tell whether every rank has finished a step of this generation; with heartbeats, whether any has that tells of its steps."""
        if self.heartbeats:
            return self._stepped > 0 and self.all_started()
        return 0 < self._stepped == len(self.ranks) - len(self.unseen)

    def is_ahead(self) -> bool:
        """Tell whether a rank has gone over to a planned generation that is not on record."""
        return any(view.ahead for view in self.ranks.values())

    def cut_short(self) -> bool:
        """Tell whether ranks were ended by a flow's order that no flow here gave: the one before died in the middle of a recovery."""
        return not self.evidence and any(view.ended and not view.succeeded for view in self.ranks.values())

    def all_running(self) -> bool:
        """Tell whether every rank has a process that runs, or ended as it should."""
        return all(view.started is not None and (not view.ended or view.succeeded) for view in self._seen())

    def all_succeeded(self) -> bool:
        """Tell whether every rank has ended as it should."""
        return all(view.succeeded for view in self.ranks.values())

    def all_ended(self, nodes: set[str]) -> bool:
        """Tell whether nothing of this generation runs on *nodes*, as their agents say."""
        return nodes <= self.gone

    def startup(self) -> float | None:
        """Return the seconds from the start of the last rank to the job's first output; None while nothing was printed."""
        printed = [view.printed_at for view in self.ranks.values() if view.printed_at is not None]
        return max(0.0, min(printed) - max(view.started_at for view in self.ranks.values())) if printed else None

    def first_step_at(self) -> float | None:
        """Return when the last rank finished its first step (or started, for scripts that report none)."""
        if self.all_stepped():
            return max(view.first_step or 0.0 for view in self.ranks.values())
        if not self.managed() and self.all_started():
            return max(view.started or 0.0 for view in self.ranks.values())
        return None

    def resumed_step(self) -> int | None:
        """Return the step that the ranks went on from."""
        return max((view.resumed for view in self.ranks.values() if view.resumed is not None), default=None)

    def resumed_from_step(self, before: GenerationState) -> int | None:
        """Return the step that the ranks went on from: as they told, or as the first step shows that came by heartbeat.

        A script that reports one step in ten went on ten before the first that it reports, as far as anybody can tell.
        """
        told = self.resumed_step()
        if told is not None or not self.heartbeats:
            return told
        first = min((view.first_step_number for view in self.ranks.values() if view.first_step_number is not None), default=None)
        return None if first is None else max(0, first - max(before.stride(), 1))

    def stride(self) -> int:
        """Return how many steps lie between two that are told, at the least; 0 where no two were."""
        numbers = sorted({step for step, _ in self.durations})
        return min((later - earlier for earlier, later in pairwise(numbers)), default=0)

    def until(self) -> int | None:
        """Return the step that the script wants to reach."""
        return next((view.until for view in self.ranks.values() if view.until is not None), None)

    def slowest_mark(self, name: str) -> float:
        """Return the longest seconds any rank spent on *name* (``group``, ``load``)."""
        return max((view.marks.get(name, 0.0) for view in self.ranks.values()), default=0.0)

    def seconds_of(self, after: int) -> float:
        """Return how many seconds the steps after *after* took: the work that a rollback to it loses."""
        return sum(seconds for step, seconds in self.durations if step > after)


def _raised(facts: ExceptionFacts) -> WorkerException:
    return WorkerException(
        type=facts.type, message=facts.message, traceback=facts.traceback or "", errno=facts.errno, peer_lost=facts.peer_lost
    )


def _rank_progress(view: RankState, now: float, lasted: float) -> RankProgress:
    """Return how far a rank is; without a beat, that none has come in the seconds that its generation has *lasted*."""
    beat = view.beat
    if beat is None:
        return RankProgress(node=view.node, step=view.step, age=lasted, managed=view.managed, heard=False)
    return RankProgress(
        node=view.node,
        step=view.step,
        age=now - view.progress_at,
        section=beat.section,
        section_limit=beat.section_limit,
        process=beat.process,
        wait=beat.wait,
        managed=view.managed,
        status=view.status if view.standing_at > view.progress_at else None,
    )


def hang_limits(limits: Any) -> HangLimits:  # noqa: ANN401 (holdfast.spec.Limits, which this module must not need to import)
    """Return the job's limits as the detectors read them, in seconds."""
    silence = limits.output_silence
    return HangLimits(
        first_step=limits.first_step.total_seconds(),
        least=limits.hang_least.total_seconds(),
        factor=limits.hang_factor,
        timeout=limits.hang_timeout.total_seconds(),
        section=limits.section.total_seconds(),
        stopped_grace=limits.stopped_grace.total_seconds(),
        output_silence=silence.total_seconds() if silence is not None else None,
        end_grace=limits.end_grace.total_seconds(),
    )
