"""Attempt, vote, apply: a step is applied by every rank or by none, and the work of a lost rank continues on another.

The vote happens before the first optimizer applies a step. Until then nothing has changed that the rank state at the step's start cannot
undo. A rank whose vote got no answer learns the result at the next rendezvous: if any rank has applied the step it rolls forward, as all
ranks voted for it; otherwise no rank has applied it.
"""

from __future__ import annotations

import logging
import time
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.optim import Optimizer

from holdfast.runtime.agent_client import link
from holdfast.runtime.data.loader import Loader
from holdfast.runtime.groups.backends import GenerationEnded
from holdfast.runtime.groups.control_tree import PeerConnectionLost
from holdfast.runtime.groups.device_library import refuse_capture
from holdfast.runtime.groups.dry_runs import first_exchanges, recorded_collectives
from holdfast.runtime.groups.dry_runs.recorded_collectives import Coverage
from holdfast.runtime.groups.membership import GroupGeneration, MembershipManager
from holdfast.runtime.groups.migration import LiveMigrations
from holdfast.runtime.groups.state_transfer import StateTransfer, TransferCorrupted
from holdfast.runtime.peer_errors import is_device_error, is_late_peer, is_peer_loss
from holdfast.runtime.process.exit import SigtermHandler
from holdfast.runtime.snapshots.device_runtime import CHANGE_STATE
from holdfast.runtime.snapshots.restore import RestoreError, Restorer, SnapshotSource
from holdfast.runtime.snapshots.restore_planner import NoPlan, RankHolding, RestorePlan, SnapshotRef, own_shard, plan, shards_by_rank
from holdfast.runtime.snapshots.snapshotter import Snapshotter
from holdfast.runtime.state import unmanaged
from holdfast.runtime.state.step_backup import StepBackup
from holdfast.runtime.state.training import Training
from holdfast.runtime.telemetry.device_times import process_device_times
from holdfast.runtime.telemetry.wait_windows import process_waits

_log = logging.getLogger("holdfast.runtime")

RecoveryResult = dict[str, Any]


class Clock:
    """Seconds spent in the phases of a recovery."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Count the time since the last lap to *phase*."""
        now = time.monotonic()
        self.seconds[phase] = round(self.seconds.get(phase, 0.0) + now - self._begin, 6)
        self._begin = now


class RecoveryRendezvous(NamedTuple):
    """What the ranks of a new generation report of themselves, and the plan that follows from it."""

    generation: GroupGeneration
    reports: dict[int, dict[str, Any]]
    plan: RestorePlan
    clock: Clock


@dataclass(slots=True, kw_only=True)
class Agreed:
    """What all ranks agreed on in the last vote, except whether the step counts."""

    switch: int = 0
    """The generation of a live migration that begins after the step; 0: none."""
    facts: bool = True
    """Every rank knows the facts."""
    every: int = 1
    """Steps between two snapshots."""
    control: int = 0
    """Interval in steps of runs of steps without a snapshot, which show what one costs; 0: never."""
    stop: bool = False
    """Some rank received SIGTERM: all exit after the step."""
    behind: bool = False
    """Some rank's replicas are behind: no rank begins another snapshot."""


class RecoveryManager:
    """Keeps one session's training consistent over changes of its ranks."""

    model_copy: int | None = None
    """The copy of the model that this rank belongs to, where the samples of a step are divided among the copies."""
    backup: StepBackup
    """The state at the start of the current step."""

    def __init__(self, training: Training, membership: MembershipManager, checkpoints: Callable[[], list[int]]) -> None:
        self.training, self.membership = training, membership
        self.live = 0
        """The last step that this rank has applied."""
        self.new = False
        """This process takes a place in a generation that others are in already."""
        self.step_seconds = 0.0
        """Seconds of the last step, for processes that did not compute it."""
        self.facts: dict[str, Any] = {}
        """What all ranks know of each other: shards, groups, roles; gathered once, sent to new processes."""
        self._checkpoints = checkpoints
        self._decision: bool | None = None
        self._unknown = False
        """The result of the last vote is not known."""
        self.agreed = Agreed()
        self._damaged = 0
        self._half_restored = False
        """A snapshot turned out to be damaged while it was read into the state."""
        self._undone = False
        """This rank has left the step that does not count: no rank waits for it in a collective."""
        self._step = 0
        self._tried = 0
        """The newest generation that this process has tried to enter."""
        self._rendezvous: RecoveryRendezvous | None = None
        self._sent_state = b""
        """The rank state that the backup ranks have of this rank; empty while they have none."""
        self._rank_states: dict[int, dict[int, bytes]] = {}
        """Rank states of protected ranks: by rank, by the step after which they are valid."""
        self.memory = SnapshotSource.of()
        """The snapshots that this process can reach."""
        self.lineage = 0
        """The generation that last went back to an earlier step."""
        self.sigterm_handler = SigtermHandler()
        self.snapshotter: Snapshotter | None = None
        """Takes this rank's snapshots."""
        self.migrations = LiveMigrations(self)
        membership.on_command = self.migrations.receive
        self.warming_up = False
        """Steps belong to a warm-up: there is no vote, and nothing of them is kept."""
        self._coverage: Coverage | None = None
        for optimizer in training.optimizers:
            self._guard(optimizer)

    def begin_steps(self) -> None:
        """End the beginning of the script: other ranks keep what this rank received in it, and so does the disk, for when all are lost."""
        membership, first = self.membership, self.membership.startup is not None
        membership.begin_steps(first_exchanges.storages_of(self.training.tensors()))
        if not first or membership.control_tree is None:
            return
        place, rank = recorded_collectives.folder(), membership.generation.rank
        record = membership.records.get(rank, b"")
        if place is not None and len(record) <= recorded_collectives.MAX_STARTUP:
            try:
                recorded_collectives.write_startup(recorded_collectives.startup_path(place, membership.width, rank), record)
            except OSError as error:
                _log.warning("what was exchanged before step 1 could not be written to %s: %s", place, error)
        try:
            membership.exchange_records()
        except (PeerConnectionLost, GenerationEnded) as error:
            self._fail_step(error)

    # -- attempt ------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Keep what an attempt at *step* may change, until it is known whether the step counts."""
        self._decision, self._unknown, self._undone = None, False, False
        self._step = step
        self.membership.transaction.final = False
        self.backup = StepBackup(self.training)
        if self._sent_state:  # what lies between two steps, such as an evaluation, may have drawn numbers
            self._send_if_changed(self.backup.rank_state, step - 1)

    def _guard(self, optimizer: Optimizer) -> None:
        """Make *optimizer* wait for the vote before it applies a step."""
        apply, recovery = optimizer.step, self

        def step(_self: Optimizer, *args: Any, **more: Any) -> Any:  # noqa: ANN401 (the optimizer's own)
            if not recovery.may_apply():
                return None
            if recovery.snapshotter is not None:
                recovery.snapshotter.before_change()  # also for an optimizer whose class does not call torch's hooks
            return apply(*args, **more)

        if hasattr(apply, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001 (or the scheduler complains)
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    # -- vote ---------------------------------------------------------------------------------------------------------

    def may_apply(self) -> bool:
        """Return whether this step counts: all ranks have voted for it. Raise `CapturedStep` while a CUDA graph is captured."""
        refuse_capture("`optimizer.step()`", CHANGE_STATE)
        if self.warming_up:
            return True
        if self._decision is None:
            self._decision = self._decide()
            self._damaged = self.membership.transaction.damaged
        return self._decision

    @property
    def damaged(self) -> bool:
        """Whether operations since the vote returned neutral results: the step counts, what was summed up after it does not."""
        return self.membership.transaction.damaged > self._damaged

    def _decide(self) -> bool:
        membership, transaction, snapshotter = self.membership, self.membership.transaction, self.snapshotter
        assert membership.control_tree is not None
        self._await_device()
        vote: dict[str, Any] = {"ok": not transaction.lost, "switch": self.migrations.ready_for(), "facts": bool(self.facts)}
        vote |= (
            {"every": snapshotter.planning.wanted, "control": snapshotter.planning.control}
            if snapshotter is not None
            else {"every": 1, "control": 0}
        )
        vote["stop"] = self.sigterm_handler.received
        self._sent_state = self.training.rank_state()
        window = process_waits()
        ours = window.enter("vote")
        if snapshotter is not None:
            snapshotter.finish()  # before the vote: if the step counts, the snapshot before it is complete everywhere
        vote["behind"] = snapshotter is not None and snapshotter.behind()
        asked = time.perf_counter()
        try:
            absent = {"ok": False, "switch": 0, "facts": True, "every": 1, "control": 0, "stop": False, "behind": False}
            result = membership.control_tree.vote(vote, _merge_votes, absent, self._packed(self._sent_state), self._keep)
        except (PeerConnectionLost, GenerationEnded) as error:
            self._fail_step(error)
            if not vote["ok"]:
                return False  # this rank voted against it, so no rank has applied it
            self._unknown = True
            self._rendezvous = self._meet()
            return self._rendezvous.plan.step == self._step and membership.generation.rank in self._rendezvous.plan.roll_forward
        finally:
            if ours:
                window.leave()
        if snapshotter is not None:
            snapshotter.waited(time.perf_counter() - asked)
        counts = bool(result.pop("ok"))
        if not counts:
            transaction.fail("another rank has lost a peer")
        self.agreed = Agreed(**result)
        return counts

    def _await_device(self) -> None:
        """Wait until the device has done the work of the step: before that it is unknown whether its collectives succeeded."""
        process_device_times().end()
        try:
            self.membership.wait_for_device()
        except RuntimeError as error:
            if is_device_error(error) or not (self.membership.transaction.lost or is_peer_loss(error)):
                raise

    def _fail_step(self, error: Exception) -> None:
        self.membership.transaction.fail(str(error) or "the controller ended this generation")

    def _send_if_changed(self, rank_state: bytes, step: int) -> None:
        """Send the backup ranks the rank state after *step*, unless they have it."""
        if rank_state != self._sent_state and self.membership.control_tree is not None:
            self._sent_state = rank_state
            self.membership.control_tree.send_final_state(self._packed(rank_state, step))

    def _packed(self, rank_state: bytes, step: int | None = None) -> bytes:
        return (self._step if step is None else step).to_bytes(8, "big") + rank_state

    def _keep(self, rank: int, packed: bytes) -> None:
        """Keep the state of a protected *rank*: that of the step before stays until the step is certainly applied."""
        step, kept = int.from_bytes(packed[:8], "big"), self._rank_states.setdefault(rank, {})
        kept[step] = packed[8:]
        for old in [one for one in kept if one < step - 1]:
            del kept[old]

    # -- apply --------------------------------------------------------------------------------------------------------

    def end(self, step: int) -> bool:
        """End the attempt at *step*; return whether it counts. If not, everything is as it was at its start."""
        if not self.may_apply():
            self.backup.restore()
            self._undone = True
            return False
        self.live = step
        membership = self.membership
        membership.transaction.final = True  # until the next step begins
        if not self._unknown:
            self._send_if_changed(self.training.rank_state(), step)
        if not self.agreed.facts and not self._unknown:
            self.agreed.facts = True
            try:
                self._gather_facts()
            except (PeerConnectionLost, GenerationEnded) as error:
                membership.transaction.fail(str(error))
        if not self.needs_new_generation:
            self._record()
        return True

    def lost_peer(self, error: BaseException) -> bool:
        """Return whether *error* follows from the loss of a peer, in joint work outside of a step; record the loss."""
        transaction = self.membership.transaction
        if _is_group_failure(error):
            transaction.fail(str(error))
        return transaction.lost and not is_device_error(error)

    @property
    def lost_any_peer(self) -> bool:
        """Whether a peer is lost, so that nothing can be done together before the next rendezvous."""
        return self.membership.transaction.lost or self._rendezvous is not None

    @property
    def needs_new_generation(self) -> bool:
        """Whether the ranks must enter a new generation before the next step."""
        return self.lost_any_peer or self.agreed.switch > 0

    # -- a new generation ---------------------------------------------------------------------------------------------

    def recover(self) -> RecoveryResult:
        """Enter the next generation with the state of the step that all continue from; return that step.

        The result names a ``checkpoint`` to load, if that is needed, and the ``seconds`` of the step, where they are known. Its loss is not
        among them: each rank has its own, and that of a lost rank is lost with it.
        """
        if self.agreed.switch:
            number, self.agreed.switch = self.agreed.switch, 0
            if not self.membership.transaction.lost and self._switched(number):
                return {"checkpoint": None, "step": self.live}
        if self.new:
            command = self.membership.wait_for("regroup", "prepare")
            if command["do"] == "prepare":
                self.migrations.take_over(command)
                return {"checkpoint": None, "step": self.live}
            self.membership.put_back(command)
        while True:
            rendezvous = self._rendezvous or self._meet()
            self._rendezvous = None
            try:
                return self._finish(rendezvous)
            except (PeerConnectionLost, GenerationEnded, RuntimeError) as error:
                if is_device_error(error) or not (self.membership.transaction.lost or _is_group_failure(error)):
                    raise
                self._start_over(error)

    def _switched(self, number: int) -> bool:
        """Switch to the generation of a live migration; return whether that succeeded."""
        try:
            self.migrations.switch(number)
        except (PeerConnectionLost, GenerationEnded, RuntimeError) as error:
            if not _is_group_failure(error):
                raise
            self._fail_step(error)
            return False
        return True

    def resume_at(self, step: int, rank_state: bytes) -> None:
        """Continue from *step*, with the generators and the position in the data of the process before."""
        self.training.load_rank_state(rank_state)
        self.live = self._step = step
        self.new = False

    def _report_broken(self, why: str) -> None:
        """Report to the controller that groups of living ranks are broken, which it may not have noticed."""
        self.membership.transaction.fail(why)
        if why:
            group = next(iter(self.membership.transaction.broken), "")
            generation = max(self._tried, self.membership.generation.number)  # in a rendezvous: the one that could not be entered
            link().report("broken", generation=generation, step=self.live, group=group, why=why[:500])

    def _start_over(self, error: Exception) -> None:
        """Prepare for another generation: the one that was to be entered is broken too."""
        self.membership.stores.reconnect_next_time()
        self._report_broken(str(error))

    def _meet(self) -> RecoveryRendezvous:
        """Wait for the next generation and exchange the state of all ranks in it."""
        membership = self.membership
        membership.note_rendezvous()
        if not self.new and not self._undone:
            # Others may wait in the step that this rank has not begun, in a group that has lost no member.
            membership.abandon_groups("this rank goes no further in this generation")
        if not self.new and membership.transaction.lost:
            self._report_broken(membership.transaction.why)
        while True:
            command = membership.wait_for("regroup", newer=max(self._tried, 0 if self.new else membership.generation.number))
            self._tried = int(command["generation"])
            try:
                rendezvous = self._gathered(GroupGeneration.of(command))
            except (PeerConnectionLost, GenerationEnded, RuntimeError) as error:
                if not _is_group_failure(error):
                    raise
                self._start_over(error)
                continue
            if rendezvous is not None:
                return rendezvous

    def _gathered(self, generation: GroupGeneration) -> RecoveryRendezvous | None:
        """Connect in *generation* and plan its recovery; return None, and report it, when no recovery is possible."""
        membership, clock = self.membership, Clock()
        self.use_memory_of(generation)
        membership.set_members(generation)
        if membership.control_tree is not None:
            membership.control_tree.drain(self._keep, membership.records.__setitem__)
        store = membership.open_store(generation)
        membership.use_store(store)
        membership.publish_records(generation, store)
        membership.connect_neighbours(generation)
        control_tree = membership.control_tree
        assert control_tree is not None
        if not self.new:
            kept = {*control_tree.protected_ranks, *generation.changed}
            self._rank_states = {rank: states for rank, states in self._rank_states.items() if rank in kept}
        self._share_facts(generation)
        reports = control_tree.gather(self._report(generation))  # with the group names that a new process has here
        starts = {one["startup_generation"] for one in reports.values()} - {None}
        if len(starts) > 1:
            numbers = ", ".join(map(str, sorted(starts)))
            self._cannot(generation, f"they began in different generations ({numbers}), so what they exchanged before step 1 differs")
            return None
        checkpoints = set.intersection(*(set(one["checkpoints"]) for one in reports.values()))  # those that every rank can see
        by_rank = generation.world == membership.width  # else ranks were renumbered, and snapshots may belong to others than the present

        def plan_with(stored: set[SnapshotRef]) -> RestorePlan | NoPlan:
            usable = stored if by_rank else set[SnapshotRef]()
            return plan(_holdings(reports, self.facts, usable), checkpoints, usable)

        def suffices(stored: set[SnapshotRef]) -> bool:
            planned = plan_with(stored)
            return not by_rank or (isinstance(planned, RestorePlan) and not planned.checkpoint)

        stored = self.memory.merge_facts(
            list(reports.values()),
            generation.world,
            lowest=generation.rank == min(reports),
            gather=lambda found: control_tree.gather(found).values(),
            suffices=suffices,
        )
        found = plan_with(stored)
        clock.lap("meet")
        if isinstance(found, NoPlan):
            self._cannot(generation, found.why)
            return None
        return RecoveryRendezvous(generation, reports, found, clock)

    def _cannot(self, generation: GroupGeneration, why: str) -> None:
        link().report("recovery-failed", generation=generation.number, why=why)
        self.membership.enter(generation)

    def _share_facts(self, generation: GroupGeneration) -> None:
        """Give the facts to new processes: from the lowest rank that knows them, or from disk when none of those is left."""
        membership, control_tree = self.membership, self.membership.control_tree
        assert control_tree is not None
        knows = control_tree.gather(bool(self.facts) and not self.new)
        first = min((rank for rank, has in knows.items() if has), default=-1)
        mine = self.facts if generation.rank == first else {}
        if first < 0 and generation.rank == min(knows):
            mine = recorded_collectives.read_facts(recorded_collectives.folder(), membership.width)
        facts = control_tree.reduce(mine, lambda one, other: one or other)
        if self.new:
            self.take_facts(generation, facts)

    def use_memory_of(self, generation: GroupGeneration) -> None:
        """Read snapshots from the memory stores of *generation* from now on: nodes have left and joined since this process started."""
        if generation.memory is not None:
            self.memory.servers = generation.memory

    def take_facts(self, generation: GroupGeneration, facts: dict[str, Any]) -> None:
        """Take the facts that the others gathered; they name the groups of the rank that this process becomes."""
        self.facts = facts
        if facts:
            self.membership.become_rank(self.facts["groups"][str(generation.rank)], generation.rank)
            self.membership.set_members(generation)

    def _report(self, generation: GroupGeneration) -> dict[str, Any]:
        """Return what this rank reports of itself in a rendezvous."""
        return {
            "live": None if self.new or self._half_restored else self.live,
            "new": self.new,
            "startup_generation": self.membership.startup_generation,
            "prepared": self._step if self._unknown and self._decision is None and not self._half_restored else None,
            "groups": self.membership.group_status(generation),
            "rank_states": {str(rank): sorted(kept) for rank, kept in self._rank_states.items()},
            "checkpoints": self._checkpoints(),
            "lineage": self.lineage,
            **self.memory.facts(generation.world),
        }

    def _finish(self, rendezvous: RecoveryRendezvous) -> RecoveryResult:
        """Rebuild the groups and restore the state as planned."""
        generation, reports, found, clock = rendezvous
        membership, control_tree = self.membership, self.membership.control_tree
        assert control_tree is not None
        clock.lap("step")  # the rest of the script's step, in a rank that rolled forward
        notes = self.leave_dry_run(generation) if self.new else []
        made, kept, later = membership.rebuild(generation, {rank: one["groups"] for rank, one in reports.items()})
        clock.lap("groups")
        size, took = (0, 0.0) if found.checkpoint else self._restore(found, generation)
        clock.lap("load")
        knows = not self.new and self.live == found.step  # how long the step took that all continue from
        self.live = self._step = found.step
        if found.checkpoint or found.roll_back or found.from_memory:  # steps were given up: a new lineage begins
            self.lineage = generation.number
            self.memory.forget_newer(found.step, generation.number)
        else:
            self.lineage = found.lineage
        membership.exchange_records()
        result: RecoveryResult = {"checkpoint": found.step if found.checkpoint else None, "step": found.step, "seconds": None}
        if found.checkpoint:
            control_tree.reduce(0, max)
        else:  # so that a new backup rank has the rank state before anything can happen to the protected one
            mine: dict[str, Any] = {"ok": True, "seconds": self.step_seconds if knows else None}
            self._sent_state = self.training.rank_state()
            votes = control_tree.vote(mine, _merge_votes, {"ok": False, "seconds": None}, self._packed(self._sent_state), self._keep)
            result["seconds"] = votes["seconds"]
        differs = self._differences(rendezvous, notes)
        membership.enter(generation)
        membership.renew()
        membership.rebuild_later(generation, later)
        self.new = False
        link().mark("group", clock.seconds["meet"] + clock.seconds["groups"])
        link().mark("load", clock.seconds["load"])
        link().report(
            "regrouped",
            generation=generation.number,
            step=self.live,
            seconds=clock.seconds,
            rebuilt=made,
            kept=kept,
            source="checkpoint" if found.checkpoint else "memory" if found.from_memory else "live",
            replica=found.takes_replica(generation.rank),
            reason=found.reason,
            bytes=size,
            bandwidth=size / took if took else 0.0,
            interface=membership.generation_store.host if membership.generation_store is not None else "",
            **({"differs": differs} if differs else {}),
        )
        return result

    def _differences(self, rendezvous: RecoveryRendezvous, notes: list[str]) -> list[str]:
        """Compare state outside of the session with the other ranks; return how this rank, if it is new, differs from them.

        A state that is still to be read from disk is not compared.
        """
        generation, control_tree = rendezvous.generation, self.membership.control_tree
        assert control_tree is not None
        states = control_tree.gather({} if rendezvous.plan.checkpoint else unmanaged.comparable(self.training))
        if not self.new:
            return []
        new = {rank for rank, one in rendezvous.reports.items() if one["new"]}
        present = generation.ranks
        wrong = unmanaged.identity(present.index(generation.rank), len(present)) if len(present) == self.membership.width else []
        found = unmanaged.shortened([*wrong, *notes, *unmanaged.differences(states, new, generation.rank)])
        for one in found:
            _log.warning("after the recovery: %s", one)
        return found

    def _restore(self, found: RestorePlan, generation: GroupGeneration) -> tuple[int, float]:
        """Take this rank's state from other ranks and from snapshots in memory, as planned; return bytes and seconds."""
        transfer = StateTransfer(self.training, self.membership, generation)
        moved, seconds = transfer.execute(found, self._rank_states, self.training.load_rank_state)
        begin, size = time.monotonic(), 0
        for fetch in found.fetches:
            if fetch.target == generation.rank:
                self._half_restored = self._half_restored or bool(fetch.parts)
                try:
                    size += Restorer(self.training, self.memory).take(fetch, self.training.load_rank_state)
                except RestoreError as spoiled:
                    spoiled.report()
                    raise
                self._half_restored = self._half_restored and not fetch.parts
        return moved + size, seconds + (time.monotonic() - begin if size else 0.0)

    def leave_dry_run(self, generation: GroupGeneration) -> list[str]:
        """Let operations reach real peers from now on, and count those that the dry run has not met.

        Return where this process began differently from the one before it.
        """
        membership = self.membership
        dry_run, membership.dry_run = membership.dry_run, None
        for group in membership.groups:
            group.dry_run = None
        if dry_run is not None and dry_run.hot_spare is not None:
            self._coverage = Coverage(membership.groups, dry_run.known)
            membership.set_listener(self._coverage)
        data = self.training.data
        if isinstance(data, Loader):
            data.take_rank(generation.rank, generation.world)
        return dry_run.notes if dry_run is not None else []

    # -- recording and facts ------------------------------------------------------------------------------------------

    def _record(self) -> None:
        """After a step that counts: continue the recording of this rank's role, or report what an activated hot spare met first."""
        membership, recorder = self.membership, self.membership.recorder
        if self._coverage is not None:
            link().report("coverage", **self._coverage.summary())
            self._coverage = None
            membership.set_listener(None)
        if recorder is None or not self.facts:
            return
        place, rank = recorded_collectives.folder(), membership.generation.rank
        lowest = rank == min(next(ranks for ranks in self.roles if rank in ranks))
        if place is not None and lowest and not recorder.complete:
            recorder.complete = True  # in the step to come
            return
        if place is not None and recorder.complete:
            path = place / f"world-{membership.generation.world}-rank-{rank}.pt"
            try:
                recorder.write(path)
            except OSError as error:
                _log.warning("the recording for hot spares could not be written to %s: %s", path, error)
        membership.stop_recording()
        if rank == min(membership.generation.ranks):
            if place is not None:
                with suppress(OSError):  # reported above, for the recording
                    recorded_collectives.write_roles_and_facts(place, self.roles, self.facts)
            link().report("roles", roles=self.roles, recordings=str(place or ""), copies=self.copies)

    def numbered(self, fact: str) -> dict[str, Any]:
        """Return a fact of each present rank, by the number that torch knows it by."""
        known: dict[str, Any] = self.facts.get(fact, {})
        return {str(number): known[str(rank)] for number, rank in enumerate(self.membership.generation.ranks)} if known else {}

    @property
    def copies(self) -> list[list[int]]:
        """Return, for each copy of the model, the ranks that hold it together; none where a step's samples are not divided anew."""
        copies: dict[str, int | None] = self.facts.get("copies", {})
        found: dict[int, list[int]] = {}
        for rank, copy_ in copies.items():
            if copy_ is None:
                return []
            found.setdefault(copy_, []).append(int(rank))
        held = [sorted(self.facts["shards"][str(rank)] for rank in ranks) for ranks in found.values()]
        return sorted(map(sorted, found.values())) if all(one == held[0] for one in held) else []

    @property
    def roles(self) -> list[list[int]]:
        """Ranks with the same role, the largest role first."""
        found: dict[str, list[int]] = {}
        for rank, role in self.facts["roles"].items():
            found.setdefault(role, []).append(int(rank))
        return sorted((sorted(ranks) for ranks in found.values()), key=lambda ranks: (-len(ranks), ranks))

    def _gather_facts(self) -> None:
        """Gather, once, which ranks hold copies of each other, which have the same role, and who is in which group."""
        membership, training = self.membership, self.training
        assert membership.control_tree is not None
        groups = [[group.group_name, group.ranks] for group in membership.groups]
        mine = {"shards": training.sample(), "roles": training.shape(), "groups": groups, "copies": self.model_copy}
        gathered = membership.control_tree.gather(mine)
        self.facts = {fact: {str(rank): one[fact] for rank, one in gathered.items()} for fact in mine}


def _merge_votes(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge two votes for a step, or two confirmations of a recovery."""
    both = (one, other)
    merged = {"ok": one["ok"] and other["ok"]}
    if "seconds" in one:
        return merged | {"seconds": max((each["seconds"] for each in both if each["seconds"] is not None), default=None)}
    return merged | {
        "switch": min(one["switch"], other["switch"]),
        "facts": one["facts"] and other["facts"],
        "stop": one["stop"] or other["stop"],
        "behind": one["behind"] or other["behind"],
        "every": max(one["every"], other["every"]),  # a snapshot that one rank skips is useless to all
        "control": min((each["control"] for each in both if each["control"]), default=0),
    }


def _is_group_failure(error: BaseException) -> bool:
    """Return whether *error* only means that ranks could not connect: the controller decides what follows."""
    if isinstance(error, PeerConnectionLost | GenerationEnded | TransferCorrupted | RestoreError):
        return True
    return isinstance(error, RuntimeError) and (is_peer_loss(error) or is_late_peer(error))


def _holdings(reports: dict[int, dict[str, Any]], facts: dict[str, Any], stored: set[SnapshotRef]) -> list[RankHolding]:
    """Return the ranks' holdings for the planner.

    When no rank is left that knows which states are copies of each other, snapshots show it; before the first step no state has copies.
    """
    shards = facts.get("shards") or {str(rank): shard for rank, shard in shards_by_rank(stored).items()}
    return [
        RankHolding(
            rank=rank,
            shard=shards.get(str(rank), own_shard(rank)),
            node=one["node"],
            live=one["live"],
            prepared=one["prepared"],
            lineage=one["lineage"],
            rank_states={int(other): frozenset(steps) for other, steps in one["rank_states"].items()},
        )
        for rank, one in reports.items()
    ]
