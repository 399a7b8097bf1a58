"""The user's side of Holdfast in a training script: what to save, the current step, and the loop over steps."""

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

from holdfast.host import gpu_assignment
from holdfast.plurals import plural
from holdfast.runtime.agent_client import FINAL_CHECKPOINT_SECONDS, StepSize, link
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.load import load, newest_complete
from holdfast.runtime.checkpoint.manifest import InvalidatedSteps
from holdfast.runtime.checkpoint.save import CheckpointSettings, Saver
from holdfast.runtime.checkpoint.storage_errors import StorageError, StorageErrorReporter
from holdfast.runtime.data.batch_shards import BatchSplit, MicroBatch
from holdfast.runtime.data.loader import Loader
from holdfast.runtime.groups.dry_runs.recorded_collectives import WARM_UP_STEPS
from holdfast.runtime.groups.membership import MembershipManager, membership
from holdfast.runtime.groups.process_group import ManagedGroup
from holdfast.runtime.groups.recovery_manager import RecoveryManager
from holdfast.runtime.process import hot_spare, successor
from holdfast.runtime.process.exit import EXIT_STATUS, SigtermHandler, wait_until_idle
from holdfast.runtime.process.hot_spare import OffloadedState, Roles
from holdfast.runtime.process.restart_script import RestartScript
from holdfast.runtime.snapshots.config import PendingWrite, SnapshotConfig, SnapshotPlace
from holdfast.runtime.snapshots.copy_schedule import PROFILE
from holdfast.runtime.snapshots.reports import ProfileFile, StatsReporter
from holdfast.runtime.snapshots.restore import SnapshotSource, from_memory
from holdfast.runtime.snapshots.snapshotter import Snapshotter
from holdfast.runtime.state import rng, tree, unmanaged
from holdfast.runtime.state.training import Stateful, Training, unwrapped, unwrapped_optimizer
from holdfast.runtime.telemetry import integration_level
from holdfast.runtime.telemetry.ddp_determinism import M, average_gradients, stabilize_all_ddp, stabilize_ddp, watch
from holdfast.runtime.telemetry.device_times import process_device_times
from holdfast.runtime.telemetry.progress import section
from holdfast.runtime.telemetry.rank_status import answer_queries
from holdfast.runtime.telemetry.replica_checksums import ReplicaChecksums
from holdfast.runtime.telemetry.wait_windows import StepTimer
from holdfast.runtime.user_loop import UserLoop
from holdfast.runtime.world import World, join

EVERY: Final = 100
"""Steps between checkpoints unless the session or the job sets an interval."""

AGREE: Final = 100
"""Steps between two agreements on the snapshot interval, in ranks whose groups are not managed."""
AGREE_FIRST: Final = (1, 40, 72)
"""Steps since a process started at which they agree too: the cost of snapshots is known soon."""
KEEP: Final = 2
"""Complete checkpoints to keep: with two, a damaged newest one costs one interval and not the job."""

_log = logging.getLogger("holdfast.runtime")


class Step:
    """One step of training. `Session.steps` yields it; `end` ends it."""

    def __init__(self, session: Session, number: int) -> None:
        self.number: int = number
        """Number of the step, counted from 1 over the whole job."""
        self.skip: int = session._invalidated.skipped_before(number)  # noqa: SLF001 (as below)
        """Number of steps whose batches must be skipped before this step, because their loss was not finite.

        A `Loader` skips them. A script with other data must skip them itself.
        """
        self._session, self._start, self.ended = session, time.perf_counter(), False

    def end(self, loss: Tensor | float | None = None, *, samples: int | None = None, tokens: int | None = None) -> None:
        """End the step: report it with its loss and size, and save a checkpoint when one is due.

        Call it once, after ``optimizer.step()``, on every rank.

        Args:
            loss: Loss of the step: a number, or a tensor with one element, of any shape. A tensor on a GPU is copied to the host, which
                waits for the step. None reports no loss, and the checks of the loss are skipped.
            samples: Samples that all ranks together computed in the step, for the throughput in samples per second. None: as the session's
                `Loader` knows it, where it has a batch size and either divides the batches (`Session.micro_batches`), has a
                ``DistributedSampler``, or is the only rank's.
            tokens: Tokens that all ranks together computed in the step, for the throughput in tokens per second. None: not reported.

        Raises:
            RuntimeError: The step has ended already.
            TypeError: The loss is neither a number nor a tensor with one element, or a size is not a whole number.
            ValueError: ``samples`` or ``tokens`` is negative.
            SystemExit: The process received SIGTERM and the step is saved; with managed groups this happens on all ranks together.
        """
        if self.ended:
            raise RuntimeError(f"step {self.number} has ended already: call step.end() once, at the end of the step")
        self._finish("step.end", loss, StepSize.of("step.end", samples, tokens))

    def _finish(self, function: str, loss: Tensor | float | None, size: StepSize) -> None:
        """End the step with what the script has given to *function*."""
        number = _number(function, loss)
        self.ended = True
        self._session._end_step(self.number, number, time.perf_counter() - self._start, size)  # noqa: SLF001 (the two are one thing)


class Session(AbstractContextManager["Session"]):
    """Training that Holdfast monitors, saves and resumes.

    `session` creates it. Entering the ``with`` block joins the other ranks and restores the newest complete state; leaving it without an
    exception saves the last step. The loop is either ``for step in session.steps(until=...)``, or the script's own: `start` begins it, and
    `step` ends each of its steps.
    """

    def __init__(self, training: Training, settings: CheckpointSettings | None, *, any_rank: bool = False) -> None:
        self._training, self._settings = training, settings
        self._world: World | None = None
        self._saver: Saver | None = None
        self._generators: rng.State | None = None
        self._tried = 0
        """The last step that was loaded, saved, or failed to be saved."""
        self._until: int | None = None
        self._initialised_group = False
        self._recovery: RecoveryManager | None = None
        self._any_rank = any_rank
        self._sigterm_handler = SigtermHandler()
        self._memory = SnapshotSource.of()
        self._snapshotter: Snapshotter | None = None
        self._shards: dict[str, str] = {}
        """The shard of every rank, in ranks whose groups are not managed: copies of each other have the same."""
        self._late_reporter = StorageErrorReporter()
        self._profile_file = ProfileFile(None if settings is None else settings.directory)
        self._stats = StatsReporter()
        self._invalidated = InvalidatedSteps.of()
        self._step_timer = StepTimer(device=process_device_times().seconds)
        self._checksums = ReplicaChecksums(training.model, os.environ)
        self._from_replica = False
        """Whether this rank resumes from a replica of its snapshot."""
        self._lineage = 0
        """The generation that last went back to an earlier step."""
        self._loop: UserLoop | None = None
        """The script's own loop; None where `steps` yields the steps."""
        self._joins_at_once = True
        """Whether a process that takes a rank can join the others without a first step of its own."""
        self._yields_steps = self._closed = False
        self.steps_done: int = 0
        """Number of steps that are done, over the whole job: the number of the last step that ended; 0 before the first."""
        self.loss: float | None = None
        """Loss of that step, as given to `Step.end` or `Session.step`. With managed groups it is NaN where this process does not know it:
        it took its rank after that step, or the step ended without a loss."""
        self.saved: int | None = None
        """Last step with a complete checkpoint, as far as this process knows. It learns of a checkpoint that is written while training
        continues when the next one is due."""
        self.resumed_from: Path | None = None
        """Folder of the checkpoint from which this run resumed; None if it started from step 0 or from in-memory snapshots."""
        self.extra: MutableMapping[str, Any] = training.extra
        """The mapping given as ``extra``, with restored values after a resume."""

    def __enter__(self) -> Self:
        """Announce this worker, join the other ranks, and restore the newest complete state, unless `start` has."""
        if self._loop is None:
            self._enter()
        return self

    def start(self, until: int | None = None) -> Self:
        """Begin a training loop of the script's own, which ends each of its steps by `step`; use it in place of `steps`.

        It joins the other ranks and restores the newest complete state, as entering the ``with`` block does, and the random generators
        too. So call it directly before the loop, when the model is wrapped and everything else is built:

            with holdfast.session(model=model, optimizer=optimizer, data=loader).start() as session:
                for epoch in range(loader.epoch, 10):  # a Loader(..., endless=False)
                    for batch in loader:
                        ...
                        session.step(loss)

        To keep the indentation of the loop, leave out ``with``, and call `close` after it.

        Args:
            until: Total number of steps of the job, for the remaining time in `holdfast status` and the last checkpoint; None: not known.

        Returns:
            This session.

        Raises:
            RuntimeError: The session has begun already.
            ValueError: ``until`` is negative.
        """
        if self._loop is not None:
            raise RuntimeError("session.start() was called already: call it once, before the loop")
        if self._world is not None:
            raise RuntimeError("the session has begun already: for a loop of your own use `with holdfast.session(...).start() as session:`")
        self._until = _checked_until("start", until)
        self._prepare_loop()
        self._begin_prepared_loop()
        return self

    def _prepare_loop(self, obstacle: str = "") -> None:
        """Restore the state for a loop that is not `steps`; *obstacle*: why it cannot repeat a step, where that is known."""
        self._loop = UserLoop(self, obstacle)
        self._enter()

    def _begin_prepared_loop(self) -> None:
        assert self._loop is not None
        self._loop.begin()

    def _continue_after(self, step: int, source: Path | None) -> None:
        """Continue after *step* with a state that was not restored here, but by a framework from *source*."""
        self.steps_done = self._tried = step
        self.loss, self._generators, self.resumed_from = None, None, source
        if self._recovery is not None:
            self._recovery.live = step
        link().resumed(step, source)

    def step(self, loss: Tensor | float | None = None, *, samples: int | None = None, tokens: int | None = None) -> bool:
        """End a step of the script's own loop: report it with its loss and size, and save a checkpoint when one is due.

        Call it once, after ``optimizer.step()``, on every rank. The next step begins when the loop takes a batch from the session's
        `Loader`; without a `Loader` it begins at once.

        With managed groups, a step in which a rank is lost does not count: no rank applies it. The session puts everything back to its
        state at the step's beginning, and the `Loader` hands out the same batches again, when the ranks are complete. Do what must happen
        once for each step, such as a log line or an evaluation, only if the result is True.

        Args:
            loss: Loss of the step: as for `Step.end`.
            samples: Samples that all ranks together computed in the step: as for `Step.end`.
            tokens: Tokens that all ranks together computed in the step: as for `Step.end`.

        Returns:
            Whether the step counts. It does unless a rank was lost in it, or a hot spare warms up.

        Raises:
            RuntimeError: The loop was not begun by `start`, or has taken no batch from the session's `Loader` since the step before.
            TypeError: The loss is neither a number nor a tensor with one element, or a size is not a whole number.
            ValueError: ``samples`` or ``tokens`` is negative.
            SystemExit: The process received SIGTERM and the step is saved; with managed groups this happens on all ranks together.
        """
        if self._loop is None or self._closed:
            raise RuntimeError(self._why_no_step())
        return self._loop.end_step(loss, StepSize.of("session.step", samples, tokens))

    def _why_no_step(self) -> str:
        if self._closed:
            return "the session has ended: call session.step(loss) inside its `with` block, or before session.close()"
        if self._yields_steps:
            return "session.steps() yields the steps of this loop: end each by step.end(loss), and do not call session.step()"
        return "session.step() ends a step of your own loop, which has not begun: use `with holdfast.session(...).start() as session:`"

    def close(self) -> None:
        """End the session: save the last step, unless it is saved, and report the end. Leaving the ``with`` block does this."""
        self.__exit__(None, None, None)

    def _enter(self) -> None:
        _announce()
        watch()
        start = time.monotonic()
        self._initialised_group = join(_device_of(self._training.model))
        self._world = World.current()
        self._decline_repair()
        integration_level.session_begins(grouped=self._world.size > 1)
        if self._world.grouped:
            atexit.register(wait_until_idle)
        if self._settings is not None and self._settings.every > 0 and (membership() is not None or self._world.size == 1):
            self._sigterm_handler.listen()
        if (config := SnapshotConfig.of()) is not None:
            self._take_snapshots(config)
        if (manager := membership()) is not None and self._joins_others(manager):
            return
        link().mark("group", time.monotonic() - start)
        start = time.monotonic()
        self._restore(self._world)
        if self._recovery is not None:
            self._recovery.live = self.steps_done
        link().mark("load", time.monotonic() - start)
        link().resumed(self.steps_done, self.resumed_from, replica=self._from_replica)

    def _joins_others(self, manager: MembershipManager) -> bool:
        """Prepare for the loss of ranks; return whether this process takes its state from other ranks, when the steps begin."""
        self._recovery = RecoveryManager(self._training, manager, self._complete_steps)
        self._recovery.sigterm_handler = self._sigterm_handler
        if manager.dry_run is None:
            if self._loop is None:
                link().report("groups")
            return False
        self._recovery.new = True
        if self._settings is not None:  # to save, in a process that takes its state from others
            self._training.check()
            self._saver = Saver(self._settings, self._world or World.current(), link().generation)
        return True

    def _decline_repair(self) -> None:
        """Leave groups that the launcher manages unasked as they are after a fault, where a step cannot be repeated, or may not be."""
        manager = membership()
        if manager is None or not manager.replaces_init:
            return
        if self._loop is not None and (obstacle := self._loop.find_obstacle()):
            manager.decline(f"this loop cannot repeat a step ({obstacle})")
        elif self._training.data is None and os.environ.get("HOLDFAST_GROUPS") != "managed":
            manager.decline("the session has no `data`, so a repeated step might get another batch (`groups: managed` repairs them)")

    def _take_snapshots(self, config: SnapshotConfig) -> None:
        if self._training.optimizers:
            self._snapshotter = Snapshotter(self._training, config)
        else:
            self._stats.why = "the session has no optimizer, so it is unknown when the state changes"

    @property
    def restored_generators(self) -> rng.State | None:
        """The state that the random generators get when the steps begin, after a restore."""
        return self._generators

    @property
    def rank(self) -> int:
        """Global rank of this process now. It changes when a hot spare takes a rank: read it when you need it, do not store it."""
        return World.current().rank

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Default process group, for wrappers such as DDP that take one; None with a single rank."""
        return dist.group.WORLD

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """After a clean end save the last step, unless it is saved, and report the end."""
        if kind is not None or self._closed:
            return
        if self._world is None:
            raise RuntimeError("the session has not begun: call session.close() after session.start() and the loop")
        if self._loop is not None:
            self._loop.close()
        self._closed = True
        if self._saver is not None and self._is_unsaved() and self._settings is not None and self._settings.every > 0:
            self._save(at_once=True)
        if self._snapshotter is not None:
            self._write_profile(at_once=True)
            self._snapshotter.close()
            self._snapshotter = None
        link().finished(self.steps_done)
        if self._initialised_group:
            atexit.register(_destroy_group)

    def steps(self, until: int | None = None) -> Iterator[Step]:
        """Yield the steps that remain, beginning after the last one that ended.

        With managed groups, a step in which a rank is lost is yielded again.

        Args:
            until: Total number of steps of the job; None: no end.

        Yields:
            The step to compute now. Call its `end` before the next one.

        Raises:
            RuntimeError: The session was not entered with ``with``, `start` has begun a loop of the script's own, or a step was not
                ended.
            ValueError: ``until`` is negative.
        """
        if self._world is None:
            raise RuntimeError("the session has not begun: use `with holdfast.session(...) as session:` around the loop")
        if self._loop is not None:
            raise RuntimeError(
                "session.start() has begun a loop of your own, which ends its steps by session.step(loss): leave out one of both"
            )
        self._until, self._yields_steps = _checked_until("steps", until), True
        yield from self._warm_up_steps(self._begin_loop())
        while True:
            if self._recovery is not None and (self._recovery.new or self._recovery.needs_new_generation):
                self._recover(self._recovery)
            if until is not None and self.steps_done >= until:
                return
            step = self._begin_step()
            yield step
            if not step.ended:
                raise RuntimeError(f"step {step.number} was not ended: call step.end(loss) at its end, or break to stop early")

    def _begin_step(self, *, warming_up: bool = False) -> Step:
        step = Step(self, self.steps_done + 1)
        if warming_up:
            return step
        link().step = step.number
        if self._recovery is not None:
            self._recovery.begin(step.number)
        shards, world = self._numbered("shards"), World.current()
        mine = shards.get(str(world.rank), "")
        if world.size > 1 and (not mine or list(shards.values()).count(mine) > 1):  # other ranks may hold copies of the parameters
            self._checksums.check(self.steps_done, mine)
        self._take_snapshot()
        if isinstance(self._training.data, Loader):
            self._training.data.begin_step(skip=step.skip)
        return step

    def _apply_generators(self) -> None:
        if self._generators is not None:
            rng.apply(self._generators)
            self._generators = None

    def _numbered(self, facts: str) -> Mapping[str, Any]:
        """Return what the ranks know of each other, by rank as text."""
        if self._recovery is not None:
            return self._recovery.numbered(facts)
        return {} if facts == "groups" else self._shards

    def _take_snapshot(self) -> None:
        """Begin a snapshot of the current state if it is due; it is completed before the step that begins is applied."""
        snapshotter, recovery, world = self._snapshotter, self._recovery, World.current()
        if snapshotter is None:
            return
        snapshotter.begin_step()
        if recovery is not None:
            if recovery.facts:
                snapshotter.set_place(SnapshotPlace.of(world.rank, world.size, recovery.numbered("shards")), recovery.lineage)
            agreed = recovery.agreed
            recovery.snapshotter = snapshotter
            snapshotter.every, snapshotter.replicas_behind = agreed.every, agreed.behind
            snapshotter.control = agreed.control
            self._write_profile()
            if snapshotter.due(self.steps_done):
                snapshotter.take(self.steps_done, recovery.backup.rank_state, recovery.backup.buffers)
            return
        if self.steps_done and (snapshotter.counts.steps in AGREE_FIRST or self.steps_done % AGREE == PROFILE):
            of_ranks = world.gather((self._training.sample(), snapshotter.planning.wanted, snapshotter.planning.control))
            self._shards = {str(rank): shard for rank, (shard, *_) in enumerate(of_ranks)}
            snapshotter.set_place(SnapshotPlace.of(world.rank, world.size, self._shards), self._lineage)
            snapshotter.every = max(every for _, every, _ in of_ranks)
            snapshotter.control = min((control for *_, control in of_ranks if control), default=0)
            self._write_profile()
        if snapshotter.due(self.steps_done):
            snapshotter.take(self.steps_done, self._training.rank_state(), self._training.copied_buffers())

    def _write_profile(self, *, at_once: bool = False) -> None:
        """Write to disk what steps look like and what snapshots cost, when it is due."""
        world = World.current()
        if self._snapshotter is None or not (at_once or self._profile_file.due()):
            return
        shards, roles, mine = self._numbered("shards"), self._numbered("roles"), str(world.rank)
        layout = {
            "shard": shards.get(mine, ""),
            "copies": [int(rank) for rank, shard in shards.items() if shard == shards.get(mine)],
            "role": [int(rank) for rank, role in roles.items() if role == roles.get(mine)],
            "groups": self._numbered("groups").get(mine, []),
            "sharded": self._is_sharded(),
        }
        facts = {"rank": world.rank, "world": world.size, "generation": link().generation, "step": self.steps_done, "layout": layout}
        self._profile_file.write(self._snapshotter, facts)

    def micro_batches(
        self, *, group: dist.ProcessGroup | None = None, max_samples: int | None = None, equal_size: bool = False
    ) -> Iterator[MicroBatch]:
        """Yield this rank's part of the next step's batch, for elastic training: usually one micro-batch.

        The batch size of the session's `Loader` is that of a complete step over all ranks. While the job runs with fewer ranks, each rank
        computes a larger part, in several micro-batches, so that the step's batch and gradient stay the same. Gradients accumulate over
        the micro-batches; DDP averages them over the ranks in the backward pass of the last one:

            for part in session.micro_batches():
                loss = loss_of(model(part.batch)) * part.weight
                loss.backward()

        Args:
            group: Group of data-parallel replicas that divide the batch; None: all ranks.
            max_samples: Maximum number of samples in a micro-batch; None: a rank's part of the batch at the job's full size.
            equal_size: Give every micro-batch exactly ``max_samples`` samples, for models built for one size, such as pipeline stages. A
                rank with too few samples repeats some with a weight of 0. ``max_samples`` should divide the batch size.

        Yields:
            The micro-batches of this rank; none at the end of the last epoch.

        Raises:
            TypeError: The session's ``data`` is not a `Loader`.
            ValueError: The `Loader` cannot be divided: it has no batch size, or its order differs between ranks.
        """
        data = self._training.data
        if not isinstance(data, Loader):
            raise TypeError("session.micro_batches() yields the batches of the session's data: give session(data=holdfast.Loader(...))")
        if self._loop is not None:
            data.announce_batch()  # this may change the ranks among which the batch is divided
        world = World.current()
        place, copies = (world.rank, world.size) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if self._recovery is not None and self._recovery.model_copy is None:
            self._recovery.model_copy = place
        if max_samples is None and data.samples_of_a_step:
            max_samples = -(-data.samples_of_a_step // self._copies_at_full_width(group, copies))
        data.split_batches(BatchSplit(place=place, copies=copies, max_samples=max_samples, equal_size=equal_size))
        try:
            for part in data.micro_batches():
                average_gradients(now=part.last)
                yield part
        finally:
            average_gradients(now=True)

    def _copies_at_full_width(self, group: dist.ProcessGroup | None, present: int) -> int:
        """Return how many members *group* has with all nodes of the job: ranks may be missing, or the job began on fewer nodes."""
        managed, manager = dist.group.WORLD if group is None else group, membership()
        copies = len(managed.all_ranks) if isinstance(managed, ManagedGroup) else present
        ranks = World.current().size if manager is None else manager.width
        return max(copies, copies * int(os.environ.get("HOLDFAST_WIDTH") or 0) // ranks)

    def section(self, name: str, limit: float | timedelta | None = None) -> AbstractContextManager[None]:
        """Declare a long section, as `holdfast.section` does.

        Args:
            name: Name of the section, for messages.
            limit: Maximum duration in seconds, or a ``timedelta``; None: the job's ``timeouts.section``.

        Returns:
            The context manager of the section.

        Raises:
            ValueError: ``limit`` is not above 0.
        """
        return section(name, limit)

    def stabilize_ddp(self, model: M) -> M:
        """Fix the order in which DDP sums gradients, so that losses after a restart are bit-identical.

        Args:
            model: A ``DistributedDataParallel`` module that has computed no step yet. Other modules are returned unchanged.

        Returns:
            The same module.
        """
        return stabilize_ddp(model)

    def _end_step(self, number: int, loss: float | None, seconds: float, size: StepSize) -> None:
        """Record the end of a step; with managed groups, if all ranks have applied it."""
        recovery = self._recovery
        if recovery is not None:
            if recovery.warming_up or not recovery.end(number):
                return
            loss = None if recovery.damaged else loss  # it was summed after the vote, without a peer that was lost meanwhile
            recovery.step_seconds = seconds
        self.steps_done, self.loss = number, loss if loss is not None or recovery is None else math.nan
        timing = self._step_timer.end() if recovery is not None else None
        snapshot = self._stats.stats(self._snapshotter, link().generation)
        if size.samples is None and isinstance(self._training.data, Loader):
            size = StepSize(samples=self._training.data.samples_taken, tokens=size.tokens)
        link().beat(number, loss, seconds, self._until, size, snapshot=snapshot, timing=timing)
        if self._settings is not None and (self._settings.due(number) or (number == self._until and self._settings.every > 0)):
            self._save(at_once=number == self._until)
        self._exit_if_terminated()
        self._begin_timing()

    def _begin_timing(self) -> None:
        """Begin to measure how the next step spends its time."""
        self._step_timer.begin()
        process_device_times().begin(None if self._recovery is None else self._recovery.membership.device)

    def _exit_if_terminated(self) -> None:
        """Save the last step and exit, if any rank received SIGTERM: all ranks save it together, or none does."""
        recovery = self._recovery
        terminated = self._sigterm_handler.received if recovery is None else recovery.agreed.stop and not recovery.needs_new_generation
        if not terminated or (recovery is None and World.current().size > 1):  # without a vote the ranks cannot agree on a step
            return
        if self._is_unsaved():
            self._save(at_once=True)
        if recovery is None or not recovery.needs_new_generation:
            saved = f"step {self.steps_done} is {'' if self.saved == self.steps_done else 'not '}saved"
            _log.warning("terminated by SIGTERM: %s", saved)
            link().flush(FINAL_CHECKPOINT_SECONDS)
            raise SystemExit(EXIT_STATUS)

    # -- saving -------------------------------------------------------------------------------------------------------

    def _is_unsaved(self) -> bool:
        """Return whether the current state was not saved, or its write to disk is only requested."""
        return self.steps_done > self._tried or (self._snapshotter is not None and self._snapshotter.write_pending)

    def _save(self, *, at_once: bool) -> None:
        """Save the current state, in a section of its own: *at_once*, or from its snapshot where possible."""
        self._tried = self.steps_done
        if self._saver is None or self._world is None:
            return
        if World.current() != self._world:
            _log.warning(
                "step %d is not saved: the process group is not the one the session began with; end the session first", self.steps_done
            )
            return
        if self._recovery is not None and self._recovery.lost_any_peer:  # a new rank is not at a save: it would not answer
            self._tried = self.saved or 0
            return
        try:
            if not at_once and self._snapshotter is not None and self._leave_to_writer(self._snapshotter, self._world):
                return
            with section("checkpoint"):
                state = self._training.collect({"step": self.steps_done, "loss": self.loss}, self._world.rank)
                if self._saver.save(state, self.steps_done, lowest=self._training.buffers()):
                    self.saved = self.steps_done
                    self._set_interval(self._saver.every)  # all ranks are here, or meet before the next step
        except Exception as error:
            if self._recovery is None or not self._recovery.lost_peer(error):
                raise
            self._tried = self.saved or 0  # this step or a later one is saved when the ranks are complete again

    def _set_interval(self, every: int | None) -> None:
        """Use the checkpoint interval that the controller has chosen, if any; called where all ranks do so between the same steps."""
        if self._settings is not None:
            self._settings = self._settings.with_interval(every)

    def _leave_to_writer(self, snapshotter: Snapshotter, world: World) -> bool:
        """Leave the checkpoint of this step to the checkpoint writers, alongside training; return whether all ranks can.

        While one of them still writes the checkpoint before, this one is skipped: training does not wait for the disk.
        """
        assert self._settings is not None
        begin = time.perf_counter()
        with section("checkpoint"):  # rank 0 reads the folder, on storage that may be slow
            mine: dict[str, Any] = {"ready": snapshotter.readiness(self.steps_done)}
            if world.rank == 0:
                mine |= {"every": link().may_commit(self.steps_done).every, "saved": max(self._complete_steps(), default=self.saved)}
        of_ranks = world.gather(mine)  # in no section: a rank that does not come to it is found as fast as in a step
        if any(one["ready"] == "unable" for one in of_ranks):
            return False
        self._set_interval(of_ranks[0]["every"])
        self.saved = of_ranks[0]["saved"]
        if any(one["ready"] == "busy" for one in of_ranks):
            if world.rank == 0:
                why = "the checkpoint before is still being written: the disk needs longer for one than the checkpoint interval"
                self._late_reporter.report(StorageError("checkpoint-backlog", why), self.steps_done, self._settings.directory)
            return True
        self._late_reporter.reset()
        paused = time.perf_counter() - begin
        directory, keep = self._settings.directory, self._settings.keep
        snapshotter.request_write(PendingWrite(step=self.steps_done, directory=directory, keep=keep, loss=self.loss, paused=paused))
        return True

    # -- hot spares and recovery --------------------------------------------------------------------------------------

    def _begin_loop(self) -> int:
        """End the beginning of the script; return the number of steps for which a process that has no rank yet must warm up."""
        self._apply_generators()  # not sooner: what was built since the restore may have drawn numbers
        recovery = self._recovery
        if recovery is None:
            return 0
        all_stable, dry_run = stabilize_all_ddp(), recovery.membership.dry_run
        recovery.begin_steps()
        # A process that joins running ranks must do beforehand what those did only in their first step: pipelines agree on shapes,
        # sharded modules on much else. Stabilized DDP over one group has nothing left to do.
        self._joins_at_once = all_stable and len(recovery.membership.groups) == 1 and not self._is_sharded()
        is_spare = dry_run is not None and dry_run.hot_spare is not None
        return WARM_UP_STEPS if is_spare else int(recovery.new and not self._joins_at_once)

    def _warm_up_steps(self, steps: int) -> Iterator[Step]:
        """Yield the steps of a warm-up, in a process that has no rank yet: they have no effect on the job."""
        recovery = self._recovery
        if recovery is None:
            return
        for number in range(steps):
            recovery.warming_up = True
            yield Step(self, number + 1)
        if recovery.membership.dry_run is not None and recovery.membership.dry_run.hot_spare is not None:
            self._wait_for_rank(recovery)
        recovery.warming_up = False

    def _is_sharded(self) -> bool:
        """Return whether the model's parameters are sharded: what a rank holds of them then depends on the rank."""
        return any(hasattr(one, "device_mesh") for one in self._training.model.parameters())

    def _wait_for_rank(self, recovery: RecoveryManager) -> None:
        """Wait for a rank with memory released; continue as that rank, or have the script run again for it.

        A loop of the script's own is always run again: this process is not at the place in it where the other ranks are.
        """
        roles, manager, data = Roles(), recovery.membership, self._training.data
        roles.run_next_role(done=True)
        offloaded = OffloadedState(self._training)
        link().report(
            "parked",
            roles=roles.roles,
            role=roles.waiting_role,
            seconds=hot_spare.since_start(),
            rss=hot_spare.resident_bytes(),
            coverage=hot_spare.coverage_of(manager.dry_run),
        )
        successor.send_imports()
        command = manager.wait_for("regroup", "prepare")
        rank = int(command["rank"])
        data_follows = not isinstance(data, Loader) or data.can_take_rank(manager.generation.world)
        interchangeable = self._any_rank and data_follows and not self._is_sharded() and rank in roles.roles[roles.now]
        gpu = gpu_assignment.own_gpu()
        hot_spare.activate(command)
        other_gpu = gpu_assignment.own_gpu() != gpu  # its model and its context stay on the one on which it warmed up
        manager.put_back(command)
        same_rank = rank == manager.generation.rank and not roles.warmed
        other_rank_kept = unmanaged.libraries_with_other_rank(rank, manager.generation.world)
        if self._loop is not None or other_gpu or other_rank_kept or not (interchangeable or same_rank) or not manager.startup_matches():
            raise RestartScript({"RANK": str(rank), "HOLDFAST_FRESH": "1"})
        offloaded.reallocate()

    def _recover(self, recovery: RecoveryManager) -> None:
        """Enter the next generation together with the other ranks, and resume from the newest step that they hold."""
        is_new = recovery.new
        if self._snapshotter is not None:
            self._snapshotter.give_up()  # the state may be replaced
        result = recovery.recover()
        self._begin_timing()
        self._world = World.current()
        self._set_interval(recovery.membership.generation.every)
        if self._saver is not None and self._settings is not None:
            self._saver = Saver(self._settings, self._world, link().generation)
        if result["checkpoint"] is not None:
            self._restore(self._world, memory=False)
            recovery.live = self.steps_done
            self._apply_generators()
        self.steps_done = recovery.live
        link().resumed(self.steps_done, self.resumed_from if result["checkpoint"] is not None else None)
        if is_new and self.steps_done and result["checkpoint"] is None:
            self.loss = math.nan  # only the process before knew it
            if (seconds := result.get("seconds")) is not None:  # that process may have exited before it could report its last step
                link().beat(self.steps_done, None, seconds, self._until)

    # -- restoring ----------------------------------------------------------------------------------------------------

    def _complete_steps(self) -> list[int]:
        """Return the steps of the checkpoints that look complete."""
        if self._settings is None:
            return []
        with suppress(OSError):
            return list(manifest.complete_steps(self._settings.directory, self._invalidated))
        return []

    def _restore(self, world: World, *, memory: bool = True) -> None:
        """Restore the newest complete state: from the memory of nodes, or from disk."""
        if self._settings is None:
            return
        self._training.check()
        self._saver = Saver(self._settings, world, link().generation)
        if memory and self._restored_from_memory(world):
            return
        found = newest_complete(self._settings.directory, world, self._invalidated)
        self._saver.corrupt.update(found.skipped)
        if world.rank == 0:
            self._saver.clear()
        if found.folder is not None:
            progress = load(self._training, found.folder, world)
            self.steps_done = self._tried = self.saved = progress["step"]
            self.loss, self._generators = progress["loss"], progress["rng"]
            self.resumed_from = found.folder
            if found.manifest is not None and found.manifest.world_size != world.size and world.rank == 0:
                _log.warning(
                    "step %d was saved by %s and continues on %d: all ranks have started anew, with everything that a script or a "
                    "framework computes from the number of ranks",
                    *(self.steps_done, plural(found.manifest.world_size, "rank"), world.size),
                )
        if memory and self._invalidated.ranges:  # snapshots of later steps are invalidated
            self._begin_lineage()

    def _restored_from_memory(self, world: World) -> bool:
        """Resume from the memory of nodes if that has a newer step than the disk; return whether it had."""
        if not link().attached:
            return False
        on_disk = world.broadcast(max(self._complete_steps(), default=0))
        found = from_memory(self._training, self._memory, world, on_disk, self._apply_rank_state)
        if found is None:
            return False
        if world.rank == 0 and self._saver is not None:
            self._saver.clear()
        self.steps_done = found.step
        self._begin_lineage()
        self._from_replica = found.takes_replica(world.rank)
        _log.info("%s", found.reason)
        return True

    def _begin_lineage(self) -> None:
        """Distinguish all states from now on from those of the same steps made before; discard those in memory on this node."""
        self._lineage = link().generation
        if self._recovery is not None:
            self._recovery.lineage = self._lineage
        self._memory.forget_newer(self.steps_done, self._lineage)

    def _apply_rank_state(self, packed: bytes) -> None:
        """Restore the position in the data now, and the generators when the steps begin."""
        rank_state = tree.unpickled(packed)
        if self._training.data is not None and rank_state["data"] is not None:
            self._training.data.load_state_dict(rank_state["data"])
        self._generators = rank_state["rng"]


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
    """Create the session of a training script: it reports steps to Holdfast, saves checkpoints, and resumes from them.

    Under ``torchrun``, or alone, it reports nothing and saves only if ``checkpoint_dir`` is given.

    Args:
        model: Module to train, wrapped (DDP) or not. Checkpoints use the parameter names of the unwrapped module.
        optimizer: One optimizer, or a sequence; what Accelerate has prepared, or its original.
        schedulers: One learning rate scheduler, or a sequence: objects with ``state_dict`` and ``load_state_dict``.
        data: A `Loader`, or another object with ``state_dict`` and ``load_state_dict``. Its state is saved for each rank.
        extra: Other objects with ``state_dict`` and ``load_state_dict``, or plain values, by name; equal on all ranks. A resume writes
            plain values back into the mapping.
        checkpoint_dir: Folder of the checkpoints; None: the job's (``HOLDFAST_CHECKPOINT_DIR``), or no checkpoints outside of a job.
        save_every: Steps between checkpoints; 0: none; None: the job's ``checkpoint.interval``, or 100 outside of a job.
        keep: Number of complete checkpoints to keep; None: the job's ``checkpoint.keep``, or 2 outside of a job.
        any_rank: Declare that the script reads `Session.rank` whenever it needs its rank, and stores nothing that depends on it; the
            ``DistributedSampler`` of a `Loader` is handled. A hot spare then takes any rank of its role at once. Without it, a hot spare
            that takes a different rank runs the script again from the start, in its warm process.

    Returns:
        The session. Enter it with ``with``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: ``save_every`` or ``keep`` is not a whole number, or is too small; or managed groups with an optimizer that Accelerate
            has prepared for ``fp16``.
    """
    optimizers = _several("optimizer", optimizer, Optimizer)
    if any(getattr(one, "scaler", None) is not None and unwrapped_optimizer(one) is not one for one in optimizers):
        _decline_scaled()
    training = Training(
        model=unwrapped(_instance("model", model, nn.Module)),
        optimizers=tuple(map(unwrapped_optimizer, optimizers)),
        schedulers=_several("schedulers", schedulers, Stateful),
        data=None if data is None else _instance("data", data, Stateful),
        extra={} if extra is None else _instance("extra", extra, MutableMapping),
    )
    environment, settings = os.environ, None
    every = _count("save_every", save_every, environment.get("HOLDFAST_SAVE_EVERY"), EVERY, least=0)
    kept = _count("keep", keep, environment.get("HOLDFAST_KEEP"), KEEP, least=1)
    if place := checkpoint_dir or environment.get("HOLDFAST_CHECKPOINT_DIR"):
        settings = CheckpointSettings(directory=Path(place).absolute(), every=every, keep=kept, fixed=save_every is not None)
    return Session(training, settings, any_rank=any_rank)


def _decline_scaled() -> None:
    """Have groups not repaired with Accelerate's gradient scaler, which skips steps on its own; refuse those that were asked for."""
    manager = membership()
    if manager is not None and manager.replaces_init and os.environ.get("HOLDFAST_GROUPS") != "managed":
        manager.decline("Accelerate's optimizer for mixed_precision='fp16' cannot repeat a step ('bf16' can)")
    elif manager is not None:
        raise ValueError(
            "managed groups do not support the optimizer that Accelerate prepares for mixed_precision='fp16': use 'bf16', or torch's groups"
        )


def _count(name: str, given: int | None, configured: str | None, default: int, *, least: int) -> int:
    """Return the number for *name*: as given, else as configured in the environment, else the default."""
    value: object = given if given is not None else (configured or default)
    try:
        number = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        number = least - 1
    if number < least:
        raise ValueError(f"{name} is {value!r}, but must be an integer of at least {least}")
    return int(number)


def _instance(name: str, value: Any, kind: type[Any]) -> Any:  # noqa: ANN401 (checked here)
    """Return *value* if it is a *kind*; else raise ``TypeError``."""
    if isinstance(value, kind):
        return value
    if name == "optimizer" and type(value).__module__.startswith("deepspeed."):
        raise TypeError(
            f"session(optimizer=...) got DeepSpeed's {type(value).__name__}, which keeps its state in parts of its own: report steps by "
            "holdfast.heartbeat(engine.global_steps, loss), and save by engine.save_checkpoint"
        )
    expected = "something with state_dict() and load_state_dict()" if kind is Stateful else f"a {kind.__name__}"
    raise TypeError(f"session({name}=...) got a {type(value).__name__}, but must be {expected}")


def _several(name: str, value: Any, kind: type[Any]) -> tuple[Any, ...]:  # noqa: ANN401 (as above)
    """Return one object, several or none as a tuple."""
    if value is None:
        return ()
    return tuple(_instance(name, one, kind) for one in (value if isinstance(value, list | tuple) else [value]))


def _number(function: str, loss: Tensor | float | None) -> float | None:
    """Return *loss*, which the script gave to *function*, as a number, without rounding; fetch it from its device once."""
    if loss is None:
        return None
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise TypeError(f"{function}(loss) got a tensor of shape {tuple(loss.shape)}: reduce it to one number first, e.g. loss.mean()")
    try:
        return float(loss.item() if isinstance(loss, Tensor) else loss)
    except (TypeError, ValueError):
        raise TypeError(f"{function}(loss) got a {type(loss).__name__}, but must be a number or a tensor of one element") from None


def _checked_until(function: str, until: int | None) -> int | None:
    if until is not None and until < 0:
        raise ValueError(f"{function}(until={until}): the number of steps cannot be negative")
    return until


def _device_of(model: nn.Module) -> torch.device:
    """Return the device of *model*."""
    return next((value.device for value in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def _announce() -> None:
    """Announce this worker to the agent; where `join` does not receive commands yet, answer queries from now on."""
    _report_uncaught_exceptions()
    link().hello()
    if membership() is None and link().attached:
        link().listen(answer_queries())
    link().has_session = True


def _destroy_group() -> None:
    """Destroy the group that a session has initialised, when the script ends."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _report_uncaught_exceptions() -> None:
    """Send the exception that ends this process to the agent, with the current step."""
    if not link().attached or getattr(sys.excepthook, "of_holdfast", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        link().exception(error)
        before(kind, error, trace)

    hook.of_holdfast = True  # type: ignore[attr-defined]
    sys.excepthook = hook
