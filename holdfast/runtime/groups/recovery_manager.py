"""Attempt, vote, apply: a step is applied by every rank or by none, and what a lost rank held is carried on by another.

The vote stands before the first optimizer applies a step. While it is open nobody has changed anything that the light state of the
step's beginning cannot undo. A rank whose vote got no answer knows at the next meeting of the generation: if any rank
has applied the step it rolls forward, for all have voted for it; else nobody has.
"""

from __future__ import annotations

import copy
import logging
import time
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from holdfast.protocol import Message
from holdfast.runtime.agent_client import link
from holdfast.runtime.data.loader import Loader
from holdfast.runtime.groups import first_exchanges, recorded_collectives, state_transfer
from holdfast.runtime.groups.backends import GenerationEnded
from holdfast.runtime.groups.control_tree import PeerConnectionLost
from holdfast.runtime.groups.membership import GroupGeneration, MembershipManager
from holdfast.runtime.groups.migration import LiveMigrations
from holdfast.runtime.groups.recorded_collectives import Coverage, OnGroup
from holdfast.runtime.groups.state_transfer import Clock
from holdfast.runtime.groups.transfer_plan import TransferPlan
from holdfast.runtime.peer_errors import is_device_error, is_late_peer, is_peer_loss
from holdfast.runtime.process.sigterm import SigtermHandler
from holdfast.runtime.snapshots.restore import RestoreError, Restorer, SnapshotSource, tell
from holdfast.runtime.snapshots.restore_planner import NoPlan, RankHolding, RestorePlan, SnapshotRef, own_shard, plan, shards_by_rank
from holdfast.runtime.snapshots.snapshotter import Snapshotter
from holdfast.runtime.state import rng, tree, unmanaged
from holdfast.runtime.state.training import Stateful, Training, put_values
from holdfast.runtime.telemetry.wait_windows import process_waits

_log = logging.getLogger("holdfast.runtime")

IncidentDiagnosis = dict[str, Any]


class RecoveryRendezvous:
    """What the ranks of a new generation have told each other, and the plan that follows from it."""

    def __init__(self, generation: GroupGeneration, told: dict[int, dict[str, Any]], found: RestorePlan, clock: Clock) -> None:
        self.generation, self.told, self.plan, self.clock = generation, told, found, clock


@dataclass(slots=True, kw_only=True)
class Agreed:
    """What all ranks have agreed on with the newest vote, beside whether the step counts."""

    switch: int = 0
    """The planned generation that begins after the step; 0: none."""
    facts: bool = True
    """Every rank knows the facts."""
    every: int = 1
    """Steps between two snapshots."""
    control: int = 0
    """Every how many steps some are left without a snapshot, to see what one costs; 0: never."""
    stop: bool = False
    """Some rank was told to end: all end after the step."""
    behind: bool = False
    """Some rank's replicas are behind: nobody begins another snapshot."""


class RecoveryManager:
    """Keeps one session's training whole over changes of its ranks."""

    model_copy: int | None = None
    """Which copy of the model this rank belongs to, where the samples of a step are shared out among the copies."""

    def __init__(self, training: Training, membership: MembershipManager, checkpoints: Callable[[], list[int]]) -> None:
        self.training, self.membership = training, membership
        self.live = 0
        """The last step that this rank has applied."""
        self.new = False
        """This process takes a place in a generation that others are in already."""
        self.last: tuple[float | None, float] = (None, 0.0)
        """Loss and seconds of the last step: a process that comes in does not know them."""
        self.facts: dict[str, Any] = {}
        """What all ranks know of each other: pieces, groups, roles; gathered once, handed to newcomers."""
        self._checkpoints = checkpoints
        self._decision: bool | None = None
        self._unknown = False
        self.agreed = Agreed()
        self._damaged = 0
        self._hurt = False
        """The state is half filled: a snapshot turned out to be spoiled while it was read."""
        self._retracted = False
        """This rank has gone through all of the step that does not count: nobody waits for it in a collective."""
        self._step = 0
        self._tried = 0
        """The newest generation that this process has tried to come into."""
        self._meeting: RecoveryRendezvous | None = None
        self._begin: dict[str, Any] = {}
        self._voted_light = b""
        self._lights: dict[int, dict[int, bytes]] = {}
        """Light states of wards: by rank, by the step after which they hold."""
        self.memory = SnapshotSource.of()
        """The snapshots that this process can reach."""
        self.lineage = 0
        """The generation that last went back to an earlier step."""
        self.sigterm_handler = SigtermHandler()
        """Whether this process was told to end."""
        self.snapshotter: Snapshotter | None = None
        """Takes this rank's snapshots."""
        self.moves = LiveMigrations(self)
        membership.planned = self.moves.hear
        self.warming_up = False
        """Steps are those of a warm-up: nobody votes, and nothing of them stays."""
        self._coverage: Coverage | None = None
        for optimizer in training.optimizers:
            self._guard(optimizer)

    def begin_steps(self) -> None:
        """End the beginning of the script: what the ranks exchanged there is kept on others of them from now on."""
        membership, first = self.membership, self.membership.startup is not None
        membership.begin_steps(first_exchanges.storages_of(self.training.tensors()))
        if first and membership.control_tree is not None:
            self._keep_on_disk()
            try:
                membership.share_records()
            except (PeerConnectionLost, GenerationEnded) as error:
                membership.transaction.fail(str(error) or "the flow has ended this generation")

    def _keep_on_disk(self) -> None:
        """Leave what this rank received before its first step beside the tapes, for when all are lost who keep it."""
        place, rank = recorded_collectives.folder(), self.membership.generation.rank
        record = self.membership.records.get(rank, b"")
        if place is not None and len(record) <= recorded_collectives.LARGEST_STARTUP:
            try:
                recorded_collectives.write_startup(recorded_collectives.startup_of(place, self.membership.width, rank), record)
            except OSError as error:
                _log.warning("what was exchanged before step 1 could not be left in %s: %s", place, error)

    # -- attempt ------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Note what an attempt at *step* may change before it is known whether it counts."""
        self._decision, self._unknown, self._retracted = None, False, False
        self._step = step
        self.membership.transaction.final = False
        training = self.training
        self._begin = {
            "rank_state": self.rank_state(),
            "schedulers": [copy.deepcopy(one.state_dict()) for one in training.schedulers],
            "settings": [_settings(one) for one in training.optimizers],
            "extra": tree.pickled({name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in training.extra.items()}),
            "places": list(training.model.buffers()),
            "buffers": training.copied_buffers(),
        }

    @property
    def initial_rank_state(self) -> bytes:
        """Return the light state with which the step in work began."""
        return bytes(self._begin["rank_state"])

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Return copies of the model's buffers as they were when the step in work began."""
        return dict(self._begin["buffers"])

    def rank_state(self) -> bytes:
        """Return this rank's own state: generators, and the position in the data."""
        return self.training.rank_state()

    def _apply_rank_state(self, rank_state: bytes) -> None:
        told = tree.unpickled(rank_state)
        if self.training.data is not None and told["data"] is not None:
            self.training.data.load_state_dict(told["data"])
        rng.apply(told["rng"])

    def _guard(self, optimizer: Optimizer) -> None:
        """Have *optimizer* ask before it applies a step."""
        apply, recovery = optimizer.step, self

        def step(_self: Optimizer, *args: Any, **more: Any) -> Any:  # noqa: ANN401 (the optimizer's own)
            return apply(*args, **more) if recovery.may_apply() else None

        if hasattr(apply, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # noqa: SLF001 (or the scheduler complains)
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    # -- vote ---------------------------------------------------------------------------------------------------------

    def may_apply(self) -> bool:
        """Tell whether this step counts: all ranks have voted for it."""
        if self.warming_up:
            return True
        if self._decision is None:
            self._decision = self._decide()
            self._damaged = self.membership.transaction.damaged
        return self._decision

    @property
    def damaged(self) -> bool:
        """Whether operations since the vote were given zeros: the step counts, what was summed up after it does not."""
        return self.membership.transaction.damaged > self._damaged

    def _decide(self) -> bool:
        membership, transaction = self.membership, self.membership.transaction
        assert membership.control_tree is not None
        self._await_device()
        every, control = (self.snapshotter.planning.wanted, self.snapshotter.planning.control) if self.snapshotter is not None else (1, 0)
        mine = {"ok": not transaction.lost, "switch": self.moves.ready_for(), "facts": bool(self.facts), "every": every, "control": control}
        mine["stop"] = self.sigterm_handler.told
        self._voted_light = self.rank_state()
        window = process_waits()
        ours = window.enter("vote")
        if self.snapshotter is not None:
            self.snapshotter.finish()  # before the vote: who sees that the step counts knows that the snapshot before it is complete everywhere
        mine["behind"] = self.snapshotter is not None and self.snapshotter.behind()
        asked = time.perf_counter()
        try:
            absent = {"ok": False, "switch": 0, "facts": True, "every": 1, "control": 0, "stop": False, "behind": False}
            told = membership.control_tree.vote(mine, _both, absent, self._packed(self._voted_light), self._keep)
        except (PeerConnectionLost, GenerationEnded) as error:
            transaction.fail(str(error) or "the flow has ended this generation")
            if not mine["ok"]:
                return False  # I have voted against it, so nobody has applied it
            self._unknown = True
            self._meeting = self._meet()
            return self._step in self._forward()
        finally:
            if ours:
                window.leave()
        if self.snapshotter is not None:
            self.snapshotter.waited(time.perf_counter() - asked)
        if not told["ok"]:
            transaction.fail("another rank has lost a peer")
        self.agreed = Agreed(
            switch=int(told["switch"]),
            facts=bool(told["facts"]),
            every=int(told["every"]),
            control=int(told["control"]),
            stop=bool(told["stop"]),
            behind=bool(told["behind"]),
        )
        return bool(told["ok"])

    def _await_device(self) -> None:
        """Wait until a GPU has done what the step asked of it: until then nobody can say that its collectives went well."""
        if any(one.is_cuda for one in self.training.model.parameters()):
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                if is_device_error(error) or not (self.membership.transaction.lost or is_peer_loss(error)):
                    raise

    def _forward(self) -> set[int]:
        """Return the step that this rank rolls forward to, if it does."""
        assert self._meeting is not None
        return {self._meeting.plan.step} if self.membership.generation.rank in self._meeting.plan.roll_forward else set()

    def _packed(self, rank_state: bytes) -> bytes:
        return self._step.to_bytes(8, "big") + rank_state

    def _keep(self, ward: int, packed: bytes) -> None:
        """Keep a ward's light state: that of the step before stays until the step is surely applied."""
        step, kept = int.from_bytes(packed[:8], "big"), self._lights.setdefault(ward, {})
        kept[step] = packed[8:]
        for old in [one for one in kept if one < step - 1]:
            del kept[old]

    # -- apply --------------------------------------------------------------------------------------------------------

    def end(self, step: int) -> bool:
        """End the attempt at *step*; tell whether it counts. If it does not, all is as it was at its beginning."""
        if not self.may_apply():
            self._undo()
            self._retracted = True
            return False
        self.live = step
        membership = self.membership
        membership.transaction.final = True  # until the next step begins
        assert membership.control_tree is not None
        if not self._unknown and (rank_state := self.rank_state()) != self._voted_light:
            membership.control_tree.send_final_state(self._packed(rank_state))
        if not self.agreed.facts and not self._unknown:
            self.agreed.facts = True
            try:
                self._gather_facts()
            except (PeerConnectionLost, GenerationEnded) as error:
                membership.transaction.fail(str(error))
        if not self.needs_new_generation:
            self._record()
        return True

    def _undo(self) -> None:
        training = self.training
        self._apply_rank_state(self._begin["rank_state"])
        for scheduler, state in zip(training.schedulers, self._begin["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        for optimizer, settings in zip(training.optimizers, self._begin["settings"], strict=True):
            for group, values in zip(optimizer.param_groups, settings, strict=True):  # a scheduler has moved the learning rate on
                group.update(values)
        for name, state in tree.unpickled(self._begin["extra"]).items():
            present = training.extra.get(name)
            if isinstance(present, Stateful):
                present.load_state_dict(state)
            else:
                training.extra[name] = state
        with torch.no_grad():
            for one, value in zip(self._begin["places"], self.buffers.values(), strict=True):
                put_values(one, value)
        for parameter in training.model.parameters():
            parameter.grad = None

    def lost_peer(self, error: BaseException) -> bool:
        """Tell whether *error* comes of a peer's loss, in work that all ranks do together outside of a step; note the loss."""
        transaction = self.membership.transaction
        if isinstance(error, PeerConnectionLost | GenerationEnded) or (isinstance(error, RuntimeError) and _of_groups(error)):
            transaction.fail(str(error))
        return transaction.lost and not is_device_error(error)

    @property
    def lost_any_peer(self) -> bool:
        """Whether a peer is lost, so that until the ranks have met in a new generation nothing can be done together."""
        return self.membership.transaction.lost or self._meeting is not None

    @property
    def needs_new_generation(self) -> bool:
        """Whether the ranks must meet in a new generation before the next step."""
        return self.lost_any_peer or self.agreed.switch > 0

    # -- a new generation ---------------------------------------------------------------------------------------------

    def recover(self) -> IncidentDiagnosis:
        """Come into the next generation, and hold the state of the step it goes on from; return what to tell about it."""
        if self.agreed.switch:
            number, self.agreed.switch = self.agreed.switch, 0
            if not self.membership.transaction.lost and self._switched(number):
                return {"checkpoint": None, "step": self.live}
        if self.new and (order := self._planned_order()) is not None:
            self.moves.take_over(order)
            return {"checkpoint": None, "step": self.live}
        while True:
            meeting = self._meeting or self._meet()
            self._meeting = None
            try:
                return self._finish(meeting)
            except (PeerConnectionLost, GenerationEnded) as error:
                self._begin_again(error)
            except RuntimeError as error:
                if is_device_error(error) or not (self.membership.transaction.lost or _of_groups(error)):
                    raise
                self._begin_again(error)

    def _switched(self, number: int) -> bool:
        """Carry a planned move out; tell whether that went well."""
        try:
            self.moves.carry_out(number)
        except (PeerConnectionLost, GenerationEnded, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not _of_groups(error):
                raise
            self.membership.transaction.fail(str(error) or "the flow has ended this generation")
            return False
        return True

    def _planned_order(self) -> Message | None:
        """Return the order by which this new process takes the place of one that still lives, if that is how it comes in."""
        order = self.membership.wait_for("regroup", "prepare")
        if order["do"] == "prepare":
            return order
        self.membership.put_back(order)
        return None

    def settle_in(self, step: int, rank_state: bytes) -> None:
        """Go on from *step*, with the generators and the position in the data that the process before had."""
        self._apply_rank_state(rank_state)
        self.live = self._step = step
        self.new = False

    def _tell_broken(self, why: str) -> None:
        """Tell the flow what it may not have seen: that groups of living ranks are broken."""
        self.membership.transaction.fail(why)
        transaction = self.membership.transaction
        if why:
            group = next(iter(transaction.broken), "")
            generation = max(self._tried, self.membership.generation.number)  # in a meeting: the one that could not be come into
            link().report("broken", generation=generation, step=self.live, group=group, why=why[:500])

    def _begin_again(self, error: Exception) -> None:
        """Make ready for another generation: the one that was to be come into is broken too."""
        self.membership.stores.doubt()
        self._tell_broken(str(error))

    def _meet(self) -> RecoveryRendezvous:
        """Wait for the next generation and learn from the others where everybody stands."""
        membership = self.membership
        membership.note_meeting()
        if not self.new and not self._retracted:
            # Others may be in the step that this rank has not begun, and wait for it there, in a group that has lost nobody.
            membership.cut("this rank goes no further in this generation")
        if not self.new and membership.transaction.lost:
            self._tell_broken(membership.transaction.why)
        while True:
            order = membership.wait_for("regroup", newer=max(self._tried, 0 if self.new else membership.generation.number))
            self._tried = int(order["generation"])
            try:
                meeting = self._gathered(GroupGeneration.of(order))
            except (PeerConnectionLost, GenerationEnded) as error:
                self._begin_again(error)
                continue
            except RuntimeError as error:
                if not _of_groups(error):
                    raise
                self._begin_again(error)
                continue
            if meeting is not None:
                return meeting

    def _gathered(self, generation: GroupGeneration) -> RecoveryRendezvous | None:
        membership, clock = self.membership, Clock()
        self.learn_of(generation)
        membership.fill(generation)
        if membership.control_tree is not None:
            membership.control_tree.leftovers(self._keep, membership.records.__setitem__)
        membership.connect(generation)
        assert membership.generation_store is not None
        membership.leave_records(generation, membership.generation_store)
        membership.connect_neighbours(generation)
        assert membership.control_tree is not None
        if not self.new:
            self._lights = {
                rank: kept
                for rank, kept in self._lights.items()
                if rank in membership.control_tree.protected_ranks or rank in generation.changed
            }
        knows = membership.control_tree.gather(bool(self.facts) and not self.new)
        first = min((rank for rank, has in knows.items() if has), default=-1)
        mine = self.facts if generation.rank == first else {}
        if first < 0 and generation.rank == min(knows):  # nobody is left of those who knew
            mine = recorded_collectives.read_facts(recorded_collectives.folder(), membership.width)
        facts = membership.control_tree.reduce(mine, lambda one, other: one or other)
        if self.new:
            self.take_facts(generation, facts)
        told = membership.control_tree.gather(self._holding(generation))  # now under the names that a newcomer's groups have here
        if len(born := {one["born"] for one in told.values()} - {None}) > 1:
            why = f"they began in different generations ({', '.join(map(str, sorted(born)))}), so what they exchanged before step 1 differs"
            link().report("cannot", generation=generation.number, why=why)
            membership.enter(generation)
            return None
        checkpoints = set.intersection(*(set(one["checkpoints"]) for one in told.values()))  # of those that every rank can see
        lowest, gather = generation.rank == min(told), membership.control_tree.gather
        stored = self.memory.reached(list(told.values()), generation.world, lowest=lowest, gather=lambda found: gather(found).values())
        if generation.world < membership.width:
            stored = set()  # snapshots name their ranks as torch does, by number without gaps: they may be of others than those who live
        found = plan(_holdings(told, self.facts, stored), checkpoints, stored)
        clock.lap("meet")
        if isinstance(found, NoPlan):
            link().report("cannot", generation=generation.number, why=found.why)
            membership.enter(generation)
            return None
        return RecoveryRendezvous(generation, told, found, clock)

    def learn_of(self, generation: GroupGeneration) -> None:
        """Know from now on where the memory of nodes is served: some are lost since this process was started, others have come."""
        if generation.memory is not None:
            self.memory.servers = generation.memory

    def take_facts(self, generation: GroupGeneration, facts: dict[str, Any]) -> None:
        """Take the facts that the others gathered long ago; they name the groups of the rank that this process becomes."""
        self.facts = facts
        if facts:
            self.membership.take_places(self.facts["groups"][str(generation.rank)], generation.rank)
            self.membership.fill(generation)

    def _holding(self, generation: GroupGeneration) -> dict[str, Any]:
        """Return what this rank tells the others about itself."""
        return {
            "live": None if self.new or self._hurt else self.live,
            "new": self.new,
            "born": self.membership.born,
            "prepared": self._step if self._unknown and self._decision is None and not self._hurt else None,
            "groups": self.membership.status(generation),
            "rank_states": {str(rank): sorted(kept) for rank, kept in self._lights.items()},
            "checkpoints": self._checkpoints(),
            "lineage": self.lineage,
            **self.memory.told(generation.world),
        }

    def _finish(self, meeting: RecoveryRendezvous) -> IncidentDiagnosis:
        generation, clock, membership = meeting.generation, meeting.clock, self.membership
        clock.lap("step")  # what the script still did after the meeting, in a rank that rolled forward
        notes = self.leave_sandbox(generation) if self.new else []
        made, kept, later = membership.rebuild(generation, {rank: one["groups"] for rank, one in meeting.told.items()})
        clock.lap("groups")
        assert membership.control_tree is not None
        verdict: IncidentDiagnosis = {"checkpoint": meeting.plan.step if meeting.plan.checkpoint else None, "step": meeting.plan.step}
        moved = (0, 0.0)
        if not meeting.plan.checkpoint:
            moved = self._mover(generation).move(meeting.plan, self._lights, self._apply_rank_state)
            moved = self._take_from_memory(meeting.plan, generation, moved)
        clock.lap("load")
        knows = not self.new and self.live == meeting.plan.step  # the loss of the step that all go on from
        self.live = self._step = meeting.plan.step
        self._go_on(meeting.plan, generation)
        membership.share_records()
        if meeting.plan.checkpoint:
            membership.control_tree.reduce({"ok": True}, _both)
        else:  # so that a buddy that is new has the light state of its ward before anything can happen to that
            mine: dict[str, Any] = {"ok": True, "told": [generation.rank, *self.last] if knows else None}
            told = membership.control_tree.vote(mine, _both, {"ok": False, "told": None}, self._packed(self.rank_state()), self._keep)
            verdict["told"] = told["told"][1:] if told["told"] else None
        differs = self._differs(meeting, notes)
        membership.enter(generation)
        membership.renew()
        membership.rebuild_later(generation, later)
        self.new = False
        seconds = {name: round(value, 6) for name, value in clock.seconds.items()}
        size, took = moved
        link().mark("group", seconds.get("meet", 0.0) + seconds.get("groups", 0.0))
        link().mark("load", seconds.get("load", 0.0))
        link().report(
            "regrouped",
            generation=generation.number,
            step=self.live,
            seconds=seconds,
            rebuilt=made,
            kept=kept,
            source=_source(meeting.plan),
            replica=meeting.plan.takes_replica(generation.rank),
            reason=meeting.plan.reason,
            bytes=size,
            bandwidth=size / took if took else 0.0,
            interface=membership.generation_store.host if membership.generation_store is not None else "",
            **({"differs": differs} if differs else {}),
        )
        return verdict

    def _differs(self, meeting: RecoveryRendezvous, notes: list[str]) -> list[str]:
        """Compare what lies outside of the session with the other ranks; return where this rank, if it is new here, is not as it should be.

        A state that is still to be read from disk is not compared.
        """
        generation, control_tree = meeting.generation, self.membership.control_tree
        assert control_tree is not None
        told = control_tree.gather({} if meeting.plan.checkpoint else unmanaged.comparable(self.training))
        new = {rank for rank, one in meeting.told.items() if one["new"]}
        if not self.new:
            return []
        present = generation.ranks
        wrong = unmanaged.identity(present.index(generation.rank), len(present)) if len(present) == self.membership.width else []
        found = unmanaged.shortened([*wrong, *notes, *unmanaged.differences(told, new, generation.rank)])
        for one in found:
            _log.warning("after the recovery: %s", one)
        return found

    def _take_from_memory(self, plan: RestorePlan, generation: GroupGeneration, moved: tuple[int, float]) -> tuple[int, float]:
        """Take what the plan has for this rank in the memory of nodes; return bytes and seconds, those of *moved* included."""
        begin, size = time.monotonic(), 0
        for fetch in plan.fetches:
            if fetch.target == generation.rank:
                self._hurt = self._hurt or bool(fetch.parts)
                try:
                    size += Restorer(self.training, self.memory).take(fetch, self._apply_rank_state)
                except RestoreError as spoiled:
                    tell(spoiled)
                    raise
                self._hurt = self._hurt and not fetch.parts
        return moved[0] + size, moved[1] + (time.monotonic() - begin if size else 0.0)

    def _go_on(self, plan: RestorePlan, generation: GroupGeneration) -> None:
        """Begin a new lineage where steps were given up; forget snapshots of those."""
        if plan.checkpoint or plan.roll_back or plan.from_memory:
            self.lineage = generation.number
            self.memory.forget_newer(plan.step, generation.number)
        else:
            self.lineage = plan.lineage

    def _mover(self, generation: GroupGeneration) -> TransferPlan:
        return TransferPlan(self.training, self.membership, generation)

    def leave_sandbox(self, generation: GroupGeneration) -> list[str]:
        """Let operations reach real peers from now on, and count those that the sandbox has not met.

        Return where this process began otherwise than the one before it.
        """
        membership = self.membership
        dry_run, membership.dry_run = membership.dry_run, None
        for group in membership.groups:
            group.dry_run = None
        if dry_run is not None and dry_run.standby is not None:
            self._coverage = Coverage(dry_run.known)
            membership.watch(OnGroup(membership.groups, self._coverage))
        data = self.training.data
        if isinstance(data, Loader):
            data.take_rank(generation.rank, generation.world)
        return dry_run.notes if dry_run is not None else []

    # -- recording ----------------------------------------------------------------------------------------------------

    def _record(self) -> None:
        """After a step that counts: go on with the tape of this rank's role, or report what a promoted standby met first."""
        membership, recorder = self.membership, self.membership.recorder
        if self._coverage is not None:
            link().report("coverage", **self._coverage.told())
            self._coverage = None
            membership.watch(None)
        if recorder is None or not self.facts:
            return
        place, mine = recorded_collectives.folder(), self.roles[self._role()]
        if recorder.whole:
            path = place / f"world-{membership.generation.world}-rank-{min(mine)}.pt"  # type: ignore[operator]
            try:
                recorder.write(path)
            except OSError as error:
                _log.warning("the tape for standbys could not be written: %s", error)
            membership.hear_nothing()
        elif place is not None and membership.generation.rank == min(mine):
            recorder.whole = True
            return
        else:
            membership.hear_nothing()
        if membership.generation.rank == min(membership.generation.ranks):
            if place is not None:
                with suppress(OSError):  # said above, for the tape
                    recorded_collectives.write_roles(place, self.roles)
                    recorded_collectives.write_facts(place, self.facts)
            link().report("roles", roles=self.roles, recordings=str(place or ""), copies=self.copies)

    def numbered(self, fact: str) -> dict[str, Any]:
        """Return what is known of each rank that is there, by the number that torch knows it by."""
        known: dict[str, Any] = self.facts.get(fact, {})
        return {str(number): known[str(rank)] for number, rank in enumerate(self.membership.generation.ranks)} if known else {}

    @property
    def copies(self) -> list[list[int]]:
        """Return the ranks that hold a copy of the model together, for each copy; none where a step's samples are not shared out anew."""
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
        """Ranks that play the same role, the largest role first."""
        found: dict[str, list[int]] = {}
        for rank, role in self.facts["roles"].items():
            found.setdefault(role, []).append(int(rank))
        return sorted((sorted(ranks) for ranks in found.values()), key=lambda ranks: (-len(ranks), ranks))

    def _role(self) -> int:
        return next(number for number, ranks in enumerate(self.roles) if self.membership.generation.rank in ranks)

    # -- facts --------------------------------------------------------------------------------------------------------

    def _gather_facts(self) -> None:
        """Learn, once, which ranks hold copies of each other, which play the same role, and who is in which group."""
        membership = self.membership
        assert membership.control_tree is not None
        told = membership.control_tree.gather(
            {
                "shard": self.training.sample(),
                "role": self.training.shape(),
                "groups": [[group.group_name, group.ranks] for group in membership.groups],
                "copy": self.model_copy,
            }
        )
        self.facts = {
            "shards": {str(rank): one["shard"] for rank, one in told.items()},
            "roles": {str(rank): one["role"] for rank, one in told.items()},
            "groups": {str(rank): one["groups"] for rank, one in told.items()},
            "copies": {str(rank): one["copy"] for rank, one in told.items()},
        }


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a copy of what *optimizer* was set to, group by group: learning rates and the like."""
    return [
        {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge two votes."""
    merged = {"ok": one["ok"] and other["ok"]}
    if "told" in one:  # the lowest rank's word counts
        merged["told"] = min((each["told"] for each in (one, other) if each["told"]), key=lambda told: told[0], default=None)
    if "switch" in one:
        merged |= {"switch": min(one["switch"], other["switch"]), "facts": one["facts"] and other["facts"]}
        merged |= {name: one[name] or other[name] for name in ("stop", "behind")}
        merged |= {"every": max(one["every"], other["every"])}  # a snapshot that one rank leaves out is of no use to anybody
        merged |= {"control": min((each["control"] for each in (one, other) if each["control"]), default=0)}
    return merged


def _source(plan: RestorePlan) -> str:
    """Return where the state came from that all go on with."""
    if plan.checkpoint:
        return "checkpoint"
    return "memory" if plan.from_memory else "live"


def _of_groups(error: RuntimeError) -> bool:
    """Tell whether *error* only says that ranks could not come together: the flow decides what follows."""
    return is_peer_loss(error) or is_late_peer(error) or isinstance(error, state_transfer.TransferCorrupted | RestoreError)


def _holdings(told: dict[int, dict[str, Any]], facts: dict[str, Any], stored: set[SnapshotRef]) -> list[RankHolding]:
    """Return the ranks' holdings as the planner reads them.

    When nobody is left who knows whose state is a copy of whose, snapshots tell; before any step is done everybody's is its own.
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
            rank_states={int(ward): frozenset(steps) for ward, steps in one["rank_states"].items()},
        )
        for rank, one in told.items()
    ]
