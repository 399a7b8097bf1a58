"""The user's side: what to keep, where training stands, and the loop over its steps."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from holdfast.runtime.agent_client import FINAL_CHECKPOINT_SECONDS, link
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.invalidated import WrittenOff
from holdfast.runtime.checkpoint.load import load, newest_whole
from holdfast.runtime.checkpoint.save import Keeping, Saver
from holdfast.runtime.checkpoint.storage_errors import StorageError, StorageErrorReporter
from holdfast.runtime.data.batch_shards import BatchSplit, Share
from holdfast.runtime.data.loader import Loader
from holdfast.runtime.groups.membership import membership
from holdfast.runtime.groups.process_group import ManagedGroup
from holdfast.runtime.groups.recorded_collectives import WARM_UP_STEPS
from holdfast.runtime.groups.recovery_manager import RecoveryManager
from holdfast.runtime.process import standby as parking
from holdfast.runtime.process import successor
from holdfast.runtime.process.exit import EXIT_STATUS, SigtermHandler, wait_until_idle
from holdfast.runtime.process.restart_script import RestartScript
from holdfast.runtime.process.standby import OffloadedState, Roles
from holdfast.runtime.snapshots.config import SnapshotConfig, SnapshotPlace, WriteWish
from holdfast.runtime.snapshots.copy_schedule import PROFILE
from holdfast.runtime.snapshots.profile_file import ProfileFile
from holdfast.runtime.snapshots.restart import from_memory
from holdfast.runtime.snapshots.restore import SnapshotSource
from holdfast.runtime.snapshots.snapshotter import Snapshotter
from holdfast.runtime.snapshots.stats_reporter import StatsReporter
from holdfast.runtime.state import rng, tree, unmanaged
from holdfast.runtime.state.training import Stateful, Training, unwrapped
from holdfast.runtime.telemetry.ddp_determinism import M, stabilize_all_ddp, stabilize_ddp, sum_up, watch
from holdfast.runtime.telemetry.rank_status import answering
from holdfast.runtime.telemetry.replica_checksums import ReplicaChecksums
from holdfast.runtime.telemetry.sections import section
from holdfast.runtime.telemetry.step_timing import StepTimer
from holdfast.runtime.world import World, join

EVERY: Final = 100
"""Steps between checkpoints unless the session or the job says otherwise."""

AGREE: Final = 100
"""Steps after which ranks whose groups are not managed agree anew how often a snapshot is taken."""
AGREE_FIRST: Final = (1, 40, 72)
"""Steps since a process began at which they agree too: what snapshots cost is known soon."""
KEEP: Final = 2
"""Whole checkpoints that stay: with two, a damaged newest one costs one interval and not the job."""

_log = logging.getLogger("holdfast.runtime")


class Step:
    """One step of training, from the moment it is handed out until it is committed."""

    def __init__(self, session: Session, number: int) -> None:
        self.number = number
        """Counted from 1 over the whole job; after its commit so many steps are done."""
        self.skip = session._off.passed_over(number)  # noqa: SLF001 (as below)
        """Batches of so many steps are to be passed over first, as a loss was no number: a `Loader` does so, other data is the script's."""
        self._session, self._start, self.committed = session, time.perf_counter(), False

    def commit(self, loss: Tensor | float | None = None) -> None:
        """Declare the step done, with its *loss* (a number or a tensor of one element); save when it is time."""
        if self.committed:
            raise RuntimeError(f"step {self.number} is committed already: call commit once, at the end of the step")
        number = _number(loss)
        self.committed = True
        self._session._done(self.number, number, time.perf_counter() - self._start)  # noqa: SLF001 (the two are one thing)


class Session(AbstractContextManager["Session"]):
    """Training that is watched and kept: made by `session`, entered with ``with``."""

    def __init__(self, training: Training, keeping: Keeping | None, *, any_rank: bool = False) -> None:
        self._training, self._keeping = training, keeping
        self._world: World | None = None
        self._saver: Saver | None = None
        self._generators: rng.State | None = None
        self._tried = 0
        """The last step that was loaded, saved, or failed to be saved."""
        self._until: int | None = None
        self._made_group = False
        self._recovery: RecoveryManager | None = None
        self._any_rank = any_rank
        self._sigterm_handler = SigtermHandler()
        self._memory = SnapshotSource.of()
        self._snapshotter: Snapshotter | None = None
        self._pieces: dict[str, str] = {}
        """What ranks whose groups are not managed have told of their states: copies of one have the same name."""
        self._behind = StorageErrorReporter()
        self._told = ProfileFile(None if keeping is None else keeping.directory)
        self._ledger = StatsReporter()
        self._off = WrittenOff.of()
        self._pace = StepTimer()
        self._checker = ReplicaChecksums(training.model, os.environ)
        self._from_replica = False
        """Whether this rank goes on from a replica of its snapshot."""
        self._lineage = 0
        """The generation that last went back to an earlier step."""
        self.step = 0
        """The last committed step; 0 before the first."""
        self.loss: float | None = None
        """The loss committed with it."""
        self.saved: int | None = None
        """The last step whose checkpoint stands, as far as this run knows; of one written beside training it learns with the next."""
        self.resumed_from: Path | None = None
        """The checkpoint that this run goes on from."""
        self.extra = training.extra

    def __enter__(self) -> Self:
        """Announce this worker, join the other ranks, and go back to the newest whole checkpoint."""
        _report_what_nobody_catches()
        _announce()
        link().has_session = True
        watch()
        start = time.monotonic()
        self._made_group = join(_device_of(self._training.model))
        self._world = World.present()
        if self._world.grouped:
            atexit.register(wait_until_idle)
        if self._keeping is not None and self._keeping.every > 0 and (membership() is not None or self._world.size == 1):
            self._sigterm_handler.listen()
        config = SnapshotConfig.of()
        if config is not None and self._training.optimizers:  # else nobody says when the state changes
            self._snapshotter = Snapshotter(self._training, config)
        elif config is not None:
            self._ledger.why = "the session has no optimizer, so nothing tells when the state changes"
        managed = membership()
        if managed is not None:
            self._recovery = RecoveryManager(self._training, managed, self._whole_steps)
            self._recovery.sigterm_handler = self._sigterm_handler
            if managed.dry_run is not None:
                self._recovery.new = True
                self._prepare_saving()
                return self
            link().report("groups")
        link().mark("group", time.monotonic() - start)
        start = time.monotonic()
        self._restore(self._world)
        if self._recovery is not None:
            self._recovery.live = self.step
        link().mark("load", time.monotonic() - start)
        link().resumed(self.step, self.resumed_from, replica=self._from_replica)
        return self

    @property
    def restored_generators(self) -> rng.State | None:
        """The state that the random generators get when the steps begin, after a restore."""
        return self._generators

    @property
    def rank(self) -> int:
        """This process's rank now; a standby that took a rank over in place has another one than when the script began."""
        return World.present().rank

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of all ranks, for wrappers that want one."""
        return dist.group.WORLD

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """After a clean end save the last step, unless it is saved, and say goodbye."""
        if kind is not None:
            return
        if self._saver is not None and self._is_unsaved() and self._keeping is not None and self._keeping.every > 0:
            self._save(at_once=True)
        if self._snapshotter is not None:
            self._tell_profile(at_once=True)
            self._snapshotter.close()
            self._snapshotter = None
        link().finished(self.step)
        if self._made_group:
            atexit.register(_leave_group)

    def steps(self, until: int | None = None) -> Iterator[Step]:
        """Hand out the steps from the first one not yet done up to *until* (without it: without end)."""
        if self._world is None:
            raise RuntimeError("the session has not begun: use `with holdfast.session(...) as session:` around the loop")
        if until is not None and until < 0:
            raise ValueError(f"steps(until={until}): the number of steps cannot be negative")
        self._until = until
        if self._generators is not None:  # not sooner: what was built since the restore may have drawn numbers
            rng.apply(self._generators)
            self._generators = None
        yield from self._rehearsal()
        while self._goes_on(until):
            step = Step(self, self.step + 1)
            link().step = step.number
            if self._recovery is not None:
                self._recovery.begin(step.number)
            self._check_copies()
            self._take_snapshot()
            if isinstance(self._training.data, Loader):
                self._training.data.begin_step(skip=step.skip)
            yield step
            if not step.committed:
                raise RuntimeError(f"step {step.number} was not committed: call step.commit(loss) at its end, or break to stop early")

    def _check_copies(self) -> None:
        """Tell what the parameters are like, if it is time: whoever holds copies of them must have the same."""
        rank = str(World.present().rank)
        shards = self._recovery.numbered("shards") if self._recovery is not None else self._pieces
        mine = shards.get(rank, "")
        if World.present().size > 1 and (not mine or list(shards.values()).count(mine) > 1):
            self._checker.look(self.step, mine)

    def _take_snapshot(self) -> None:
        """Begin a snapshot of the present state in the node's memory, if it is time; it ends before the step that begins is applied."""
        snapshotter, recovery, world = self._snapshotter, self._recovery, World.present()
        if snapshotter is None:
            return
        snapshotter.begin_step()
        if recovery is not None:
            if recovery.facts:
                snapshotter.sit(SnapshotPlace.of(world.rank, world.size, recovery.numbered("shards")), recovery.lineage)
            recovery.snapshotter, snapshotter.every, snapshotter.held = snapshotter, recovery.agreed.every, recovery.agreed.behind
            snapshotter.control = recovery.agreed.control
            self._tell_profile()
            if snapshotter.due(self.step):
                snapshotter.take(self.step, recovery.backup.rank_state, recovery.backup.buffers)
            return
        if self.step and (snapshotter.counts.steps in AGREE_FIRST or self.step % AGREE == PROFILE):
            told = world.gather((self._training.sample(), snapshotter.planning.wanted, snapshotter.planning.control))
            self._pieces = {str(rank): shard for rank, (shard, *_) in enumerate(told)}
            snapshotter.sit(SnapshotPlace.of(world.rank, world.size, self._pieces), self._lineage)
            snapshotter.every = max(every for _, every, _ in told)
            snapshotter.control = min((control for *_, control in told if control), default=0)
            self._tell_profile()
        if snapshotter.due(self.step):
            snapshotter.take(self.step, self._training.rank_state(), self._training.copied_buffers())

    def _tell_profile(self, *, at_once: bool = False) -> None:
        """Leave on disk what steps look like and what snapshots cost, now and then."""
        snapshotter, recovery, world = self._snapshotter, self._recovery, World.present()
        if snapshotter is None or not (at_once or self._told.due()):
            return
        shards = recovery.numbered("shards") if recovery is not None else self._pieces
        roles = recovery.numbered("roles") if recovery is not None else self._pieces
        groups = recovery.numbered("groups").get(str(world.rank), []) if recovery is not None else []
        mine = str(world.rank)
        layout = {
            "shard": shards.get(mine, ""),
            "copies": [int(rank) for rank, shard in shards.items() if shard == shards.get(mine)],
            "role": [int(rank) for rank, role in roles.items() if role == roles.get(mine)],
            "groups": groups,
            "sharded": self._is_sharded(),
        }
        facts = {"rank": world.rank, "world": world.size, "generation": link().generation, "step": self.step, "layout": layout}
        self._told.tell(snapshotter, facts)

    def shares(self, *, group: dist.ProcessGroup | None = None, most: int | None = None, even: bool = False) -> Iterator[Share]:
        """Hand out what this rank computes of the next step's batch, drawn from the session's `Loader`: one share, as a rule.

        The batch of the `DataLoader` is that of a whole step, over all ranks. While the job goes on with fewer ranks each computes more of
        it, in several shares. Gradients add up over them; DDP averages them over the ranks with the last one::

            for share in session.shares():
                loss = loss_of(model(share.batch)) * share.weight
                loss.backward()

        Args:
            group: the ranks that hold copies of the same parameters and share the batch; default: all.
            most: samples that a rank computes at once at most; default: its part of the batch when all ranks are there.
            even: every share has *most* samples, for what is built for one size, like a pipeline's stages; a rank for which there are not
                enough computes some again at a weight of 0. *most* should divide the batch.
        """
        data = self._training.data
        if not isinstance(data, Loader):
            raise TypeError("session.shares() hands out the batches of the session's data: give session(data=holdfast.Loader(...))")
        present = World.present()
        place, copies = (present.rank, present.size) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if self._recovery is not None and self._recovery.model_copy is None:
            self._recovery.model_copy = place
        if most is None and data.samples_of_a_step:
            most = -(-data.samples_of_a_step // self._copies_of(group, copies))
        data.deal(BatchSplit(place=place, copies=copies, most=most, even=even))
        try:
            for share in data.step_shares():
                sum_up(at_once=share.last)
                yield share
        finally:
            sum_up(at_once=True)

    def _copies_of(self, group: dist.ProcessGroup | None, present: int) -> int:
        """Return how many members *group* has at the job's full width: places may be vacant, or all ranks have begun on fewer nodes."""
        managed, everybody = dist.group.WORLD if group is None else group, membership()
        copies = len(managed.all_ranks) if isinstance(managed, ManagedGroup) else present
        ranks = World.present().size if everybody is None else everybody.width
        return max(copies, copies * int(os.environ.get("HOLDFAST_WIDTH") or 0) // ranks)

    def section(self, name: str, limit: float | timedelta | None = None) -> AbstractContextManager[None]:
        """Declare a long section: `holdfast.section`."""
        return section(name, limit)

    def stabilize_ddp(self, model: M) -> M:
        """Return *model* (fresh from DDP) with its order of summation settled: needed for losses equal to the bit after a restart."""
        return stabilize_ddp(model)

    def _done(self, number: int, loss: float | None, seconds: float) -> None:
        """Take note of a step that is done; with managed groups, if all ranks have applied it."""
        if self._recovery is not None and (self._recovery.warming_up or not self._recovery.end(number)):
            return
        if self._recovery is not None:
            loss = None if self._recovery.damaged else loss  # summed up after the vote, without a peer that was lost meanwhile
            self._recovery.last = loss, seconds
        self.step, self.loss = number, loss if loss is not None or self._recovery is None else math.nan
        pace = self._pace.end() if self._recovery is not None and _device_of(self._training.model).type == "cpu" else None
        snapshot = self._ledger.said(self._snapshotter, link().generation)
        link().beat(number, loss, seconds, self._until, snapshot=snapshot, pace=pace)
        if self._keeping is not None and (self._keeping.due(number) or (number == self._until and self._keeping.every > 0)):
            self._save(at_once=number == self._until)
        self._end_if_told()
        self._pace.begin()

    def _end_if_told(self) -> None:
        """Save the step that is done and end, if any rank was told to end: what lives is saved as a whole, or not at all."""
        recovery = self._recovery
        told = self._sigterm_handler.received if recovery is None else recovery.agreed.stop and not recovery.needs_new_generation
        if not told or (recovery is None and World.present().size > 1):  # without a vote nobody knows at which step the others hear of it
            return
        if self._is_unsaved():
            self._save(at_once=True)
        if recovery is None or not recovery.needs_new_generation:
            _log.warning("told to end: %s", f"step {self.step} is saved" if self.saved == self.step else f"step {self.step} is not saved")
            link().flush(FINAL_CHECKPOINT_SECONDS)
            raise SystemExit(EXIT_STATUS)

    def _is_unsaved(self) -> bool:
        """Tell whether the present state was not tried to be saved, or is only about to be."""
        return self.step > self._tried or (self._snapshotter is not None and self._snapshotter.owes)

    def _save(self, *, at_once: bool) -> None:
        """Save the present state, in a section of its own: here and *at_once*, or out of its snapshot where that can be."""
        self._tried = self.step
        if self._saver is None or self._world is None:
            return
        if World.present() != self._world:
            _log.warning("step %d is not saved: the process group is not the one the session began with; end the session first", self.step)
            return
        if self._recovery is not None and self._recovery.lost_any_peer:  # a fresh rank is not at a save: nobody would answer
            self._tried = self.saved or 0
            return
        with section("checkpoint"):
            try:
                self._save_together(self._saver, self._world, at_once=at_once)
            except Exception as error:
                if self._recovery is None or not self._recovery.lost_peer(error):
                    raise
                self._tried = self.saved or 0  # the same step is saved again, or a later one, when the ranks are whole again

    def _save_together(self, saver: Saver, world: World, *, at_once: bool) -> None:
        if not at_once and self._snapshotter is not None and self._left_to_writer(self._snapshotter, world):
            return
        state = self._training.collect({"step": self.step, "loss": self.loss}, world.rank)
        if saver.save(state, self.step, lowest=self._training.buffers()):
            self.saved = self.step
            if self._keeping is not None:
                self._keeping = self._keeping.following(saver.every)  # all ranks are here, or meet anew before the next step

    def _left_to_writer(self, snapshotter: Snapshotter, world: World) -> bool:
        """Leave the checkpoint of this step to the checkpoint writers, which write it beside training; tell whether all ranks can.

        While one of them is still at the checkpoint before, this one is left out: training waits for no disk.
        """
        assert self._keeping is not None
        begin = time.perf_counter()
        mine: dict[str, Any] = {"ready": snapshotter.readiness(self.step)}
        if world.rank == 0:
            mine |= {"every": link().may_commit(self.step).every, "saved": max(self._whole_steps(), default=self.saved)}
        told = world.gather(mine)
        if any(one["ready"] == "unable" for one in told):
            return False
        self._keeping, self.saved = self._keeping.following(told[0]["every"]), told[0]["saved"]
        if any(one["ready"] == "busy" for one in told):
            if world.rank == 0:
                why = "the checkpoint before is still being written: the disk takes longer for one than lies between two"
                self._behind.tell(StorageError("checkpoint-late", why), self.step, self._keeping.directory)
            return True
        self._behind.forget()
        stood = time.perf_counter() - begin
        snapshotter.wish(WriteWish(step=self.step, directory=self._keeping.directory, keep=self._keeping.keep, loss=self.loss, stood=stood))
        return True

    def _goes_on(self, until: int | None) -> bool:
        """Come to a whole set of ranks first, if it is not; tell whether there is another step to do."""
        if self._recovery is not None and (self._recovery.new or self._recovery.needs_new_generation):
            self._recover(self._recovery)
        return until is None or self.step < until

    # -- standing by --------------------------------------------------------------------------------------------------

    def _rehearsal(self) -> Iterator[Step]:
        """Hand out the steps of a warm-up, in a process that is no rank yet: nothing of them stays."""
        recovery = self._recovery
        if recovery is None:
            return
        all_settled, dry_run = stabilize_all_ddp(), recovery.membership.dry_run
        recovery.begin_steps()
        standby = dry_run is not None and dry_run.standby is not None
        # Who comes to ranks that have done something only once, in their first step, must do that by itself before: pipelines agree on
        # shapes, sharded modules on much else. Settled DDP over one group has nothing left to do.
        simple = all_settled and len(recovery.membership.groups) == 1 and not self._is_sharded()
        for number in range(WARM_UP_STEPS if standby else int(recovery.new and not simple)):
            recovery.warming_up = True
            yield Step(self, number + 1)
        if standby:
            self._park(recovery)
        recovery.warming_up = False

    def _is_sharded(self) -> bool:
        """Tell whether the model's parameters are sharded: what a rank holds of them then depends on which rank it is."""
        return any(hasattr(one, "device_mesh") for one in self._training.model.parameters())

    def _park(self, recovery: RecoveryManager) -> None:
        """Wait for a rank with memory given back; come back as that rank, or have the script run again for it."""
        roles, managed, data = Roles(), recovery.membership, self._training.data
        roles.run_next_role(done=True)
        parked = OffloadedState(self._training)
        link().report(
            "parked",
            roles=roles.roles,
            role=roles.waiting_role,
            seconds=parking.since_start(),
            rss=parking.resident_bytes(),
            coverage=parking.coverage_of(managed.dry_run),
        )
        successor.send_imports()
        order = managed.wait_for("regroup", "prepare")
        rank = int(order["rank"])
        follows = not isinstance(data, Loader) or data.can_take_rank(managed.generation.world)
        alike = self._any_rank and follows and not self._is_sharded() and rank in roles.roles[roles.now]
        parking.activate(order)
        managed.put_back(order)
        same = rank == managed.generation.rank and not roles.warmed  # it has never been in another place
        kept_by = unmanaged.libraries_with_other_rank(rank, managed.generation.world)
        if kept_by or not (alike or same) or not managed.startup_matches():
            raise RestartScript({"RANK": str(rank), "HOLDFAST_FRESH": "1"})
        parked.reallocate()

    def _recover(self, recovery: RecoveryManager) -> None:
        """Come into the next generation together with the other ranks, and go on from the newest step that they hold."""
        is_new = recovery.new
        if self._snapshotter is not None:
            self._snapshotter.give_up()  # the state may be replaced
        verdict = recovery.recover()
        self._pace.begin()
        self._world = World.present()
        if self._keeping is not None:
            self._keeping = self._keeping.following(
                recovery.membership.generation.every
            )  # here, where all ranks change over between two steps
        if self._saver is not None and self._keeping is not None:
            self._saver = Saver(self._keeping, self._world, link().generation)
        if verdict["checkpoint"] is not None:
            self._restore(self._world, memory=False)
            recovery.live = self.step
            if self._generators is not None:
                rng.apply(self._generators)
                self._generators = None
        self.step = recovery.live
        link().resumed(self.step, self.resumed_from if verdict["checkpoint"] is not None else None)
        if is_new and self.step and verdict.get("last"):
            loss, seconds = verdict["last"]  # the process before may have ended before it could tell of its last step
            self.loss = math.nan if loss is None else loss
            link().beat(self.step, loss, seconds, self._until)

    def _whole_steps(self) -> list[int]:
        """Return the steps of the checkpoints that look whole."""
        if self._keeping is None:
            return []
        with suppress(OSError):
            return list(manifest.complete_steps(self._keeping.directory, self._off))
        return []

    def _prepare_saving(self) -> None:
        """Be ready to save, in a process that takes its state from others."""
        if self._keeping is not None and self._world is not None:
            self._training.check()
            self._saver = Saver(self._keeping, self._world, link().generation)

    def _restore(self, world: World, *, memory: bool = True) -> None:
        """Take the newest state that is whole: in the memory of nodes, or on disk."""
        if self._keeping is None:
            return
        self._training.check()
        self._saver = Saver(self._keeping, world, link().generation)
        if memory and self._restored_from_memory(world):
            return
        found = newest_whole(self._keeping.directory, world, self._off)
        self._saver.corrupt.update(found.skipped)
        if world.rank == 0:
            self._saver.clear()
        if found.folder is not None:
            progress = load(self._training, found.folder, world)
            self.step = self._tried = self.saved = progress["step"]
            self.loss, self._generators = progress["loss"], progress["rng"]
            self.resumed_from = found.folder
        if memory and self._off.ranges:  # what lies in memory of later steps is older, and spoiled
            self._begin_lineage()

    def _restored_from_memory(self, world: World) -> bool:
        """Go on from the memory of nodes if that has a newer step than the disk; tell whether it had."""
        if not link().attached:
            return False
        found = from_memory(self._training, self._memory, world, world.told(max(self._whole_steps(), default=0)), self._apply_rank_state)
        if found is None:
            return False
        if world.rank == 0 and self._saver is not None:
            self._saver.clear()
        self.step = found.step
        self._begin_lineage()
        self._from_replica = found.takes_replica(world.rank)
        _log.info("%s", found.reason)
        return True

    def _begin_lineage(self) -> None:
        """Have all that is made from now on be known from what was made of the same steps before; forget that on this node."""
        self._lineage = link().generation
        if self._recovery is not None:
            self._recovery.lineage = self._lineage
        self._memory.forget_newer(self.step, self._lineage)

    def _apply_rank_state(self, rank_state: bytes) -> None:
        """Take the position in the data now, the generators when the steps begin."""
        told = tree.unpickled(rank_state)
        if self._training.data is not None and told["data"] is not None:
            self._training.data.load_state_dict(told["data"])
        self._generators = told["rng"]


def session(  # noqa: PLR0913 (each is one thing of the user's, all but the first optional, all by name)
    *,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    schedulers: Stateful | Sequence[Stateful] | None = None,
    data: Stateful | None = None,
    extra: MutableMapping[str, Any] | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    keep: int | None = None,
    any_rank: bool = False,
) -> Session:
    """Keep training: beat for the agent if there is one, and save and resume if there is a checkpoint directory.

    Args:
        model: the module, wrapped by DDP or not; it is stored under the names of the unwrapped one.
        optimizer: one, or several.
        schedulers: one, or several; anything with ``state_dict`` and ``load_state_dict``.
        data: a `Loader`, or anything else with ``state_dict`` and ``load_state_dict``; kept for each rank by itself.
        extra: more things of that kind, or plain values, by name; the same on every rank. Plain values are put back into the mapping.
        checkpoint_dir: default: ``HOLDFAST_CHECKPOINT_DIR``, which the agent sets; without either nothing is saved.
        save_every: steps between checkpoints, 0 for none; default: ``HOLDFAST_SAVE_EVERY``, else 100.
        keep: whole checkpoints that stay; default: ``HOLDFAST_KEEP``, else 2.
        any_rank: the script asks ``session.rank`` whenever it needs its rank and keeps nothing that depends on it (a `Loader`'s
            `DistributedSampler` is seen to): a standby can then become another rank of its role as it stands. Without this promise it
            runs the script again from the top, in its warm process.
    """
    training = Training(
        model=unwrapped(_instance("model", model, nn.Module)),
        optimizers=_several("optimizer", optimizer, Optimizer),
        schedulers=_several("schedulers", schedulers, Stateful),
        data=None if data is None else _instance("data", data, Stateful),
        extra={} if extra is None else _instance("extra", extra, MutableMapping),
    )
    return Session(training, _keeping(checkpoint_dir, save_every, keep, os.environ), any_rank=any_rank)


def _keeping(
    directory: str | os.PathLike[str] | None, every: int | None, keep: int | None, environment: Mapping[str, str]
) -> Keeping | None:
    """Return where and how often to save, from the arguments or else from *environment*."""
    place = directory or environment.get("HOLDFAST_CHECKPOINT_DIR")
    plan = {
        "every": _count("save_every", every, environment.get("HOLDFAST_SAVE_EVERY"), EVERY, least=0),
        "keep": _count("keep", keep, environment.get("HOLDFAST_KEEP"), KEEP, least=1),
    }
    return Keeping(directory=Path(place).absolute(), **plan, fixed=every is not None) if place else None


def _count(name: str, given: int | None, wanted: str | None, default: int, *, least: int) -> int:
    """Return the number for *name*: as given, else as the environment says, else the default."""
    value: object = given if given is not None else (wanted or default)
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        number = least - 1
    if number < least:
        raise ValueError(f"{name} is {value!r}, but must be a whole number of at least {least}")
    return int(number)


def _instance(name: str, value: Any, kind: type[Any]) -> Any:  # noqa: ANN401 (checked here)
    """Return *value* if it is a *kind*; else say what was given where."""
    if isinstance(value, kind):
        return value
    wanted = "something with state_dict() and load_state_dict()" if kind is Stateful else f"a {kind.__name__}"
    raise TypeError(f"session({name}=...) got a {type(value).__name__}, but must be {wanted}")


def _several(name: str, value: Any, kind: type[Any]) -> tuple[Any, ...]:  # noqa: ANN401 (as above)
    """Return one thing, several or none as a tuple."""
    if value is None:
        return ()
    return tuple(_instance(name, one, kind) for one in (value if isinstance(value, list | tuple) else [value]))


def _number(loss: Tensor | float | None) -> float | None:
    """Return *loss* as a number, without rounding; fetch it from its device once."""
    if loss is None:
        return None
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise TypeError(f"step.commit(loss) got a tensor of shape {tuple(loss.shape)}: reduce it to one number first, e.g. loss.mean()")
    try:
        return float(loss.item() if isinstance(loss, Tensor) else loss)
    except (TypeError, ValueError):
        raise TypeError(f"step.commit(loss) got a {type(loss).__name__}, but must be a number or a tensor of one element") from None


def _device_of(model: nn.Module) -> torch.device:
    """Return where *model* lives."""
    return next((value.device for value in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def _announce() -> None:
    """Say hello to the agent; where `join` has not begun to hear its orders, have its questions answered from now on."""
    link().hello()
    if membership() is None and link().attached:
        link().listen(answering())


def _leave_group() -> None:
    """Take down the group that a session made, once the script has ended well."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _report_what_nobody_catches() -> None:
    """Send the exception that ends this process to the agent, with the step that was in work."""
    if not link().attached or getattr(sys.excepthook, "of_holdfast", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        link().exception(error)
        before(kind, error, trace)

    hook.of_holdfast = True  # type: ignore[attr-defined]
    sys.excepthook = hook
