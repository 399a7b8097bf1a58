"""A training loop that the script writes itself: where its steps begin, and what happens to one that does not count.

`Session.step` ends a step. The next one begins when the loop takes its next batch from the session's `Loader`, so that an evaluation
between two steps belongs to neither; without a `Loader` it begins at once. Nobody can jump back in the script's own code. But a step that
does not count has changed nothing, so the loader hands out its batches again, and a process that takes a rank runs the script from its
beginning to the batch at which the others wait.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

import torch.distributed as dist
from torch import Tensor

from holdfast.runtime.agent_client import StepSize, link
from holdfast.runtime.data.loader import Loader

if TYPE_CHECKING:
    from holdfast.runtime.session import Session, Step

_log: Final = logging.getLogger("holdfast.runtime")


class StepNotRepeatable(dist.DistNetworkError):
    """A rank was lost, and the script's own loop cannot repeat the step in its process: all ranks restart."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(step, why)
        self.step, self.why = step, why

    def __str__(self) -> str:
        return f"step {self.step} cannot be repeated in this process: {self.why}. All ranks restart"


class UserLoop:
    """The steps of a loop that the script writes itself."""

    def __init__(self, session: Session, obstacle: str = "") -> None:
        self._session = session
        data = session._training.data  # noqa: SLF001 (as all uses here: this is a part of the session)
        self._loader = data if isinstance(data, Loader) else None
        self._step: Step | None = None
        """The current step; None between two steps, and before the first."""
        self._warm_up = 0
        """Number of steps that a process without a rank still computes to warm up."""
        self.obstacle = obstacle
        """Why a step that does not count cannot be repeated in its process."""

    def begin(self) -> None:
        """Begin the loop: in a process that takes a rank, with the state of the step at which the others are."""
        session, recovery = self._session, self._session._recovery  # noqa: SLF001
        self._warm_up = session._begin_loop()  # noqa: SLF001
        if recovery is not None:
            self.obstacle = self.find_obstacle()
            self._report_obstacle(new=recovery.new)
            dry_run = recovery.membership.dry_run
            recovery.warming_up = dry_run is not None and dry_run.hot_spare is not None
            if self.obstacle:  # this one will not be given a rank: it need not warm up
                self.leave_warm_up()
            if recovery.new and not recovery.warming_up:
                self._recover()
        if self._loader is None:
            self._begin_step()
        else:
            self._loader.before_batch = self.begin_step

    def find_obstacle(self) -> str:
        """Return why a step cannot be repeated in its process, or a new process cannot come to the place of the others in the loop.

        Empty where both can. Before the loop has begun, wrappers and the number of groups are not looked at.
        """
        session = self._session
        if self.obstacle:
            return self.obstacle
        if self._loader is None:
            return "its data is not known, as the session has no holdfast.Loader"
        if self._loader.length is None:
            return "the length of an epoch is not known, as the dataset has none"
        if session._is_sharded():  # noqa: SLF001
            return "a process with shards of parameters cannot join in a step that is not its first one"
        if not session._joins_at_once:  # noqa: SLF001
            return "with several process groups, or with a DDP that learns from its first step, a process cannot join in a later one"
        return ""

    def _report_obstacle(self, *, new: bool) -> None:
        """Report to the controller, and to the user once, how a step is repeated in which a rank is lost."""
        if new:
            return
        first = self._session.rank == 0
        if not self.obstacle:
            link().report("groups")
            if first:
                _log.info(
                    "a step in which a rank is lost is repeated in the other ranks' processes: the Loader hands out its batches again"
                )
        elif first:
            _log.warning("a step in which a rank is lost cannot be repeated in this loop: %s. All ranks will restart", self.obstacle)

    # -- steps --------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Begin a step, unless one has begun: the loop takes a batch."""
        if self._step is None:
            self._begin_step()

    def _begin_step(self) -> None:
        recovery = self._session._recovery  # noqa: SLF001
        warming_up = recovery is not None and recovery.warming_up
        if recovery is not None and not warming_up and recovery.needs_new_generation:
            self._recover()
        self._step = self._session._begin_step(warming_up=warming_up)  # noqa: SLF001

    def end_step(self, loss: Tensor | float | None, size: StepSize) -> bool:
        """End the current step; return whether it counts."""
        session = self._session
        if self._loader is None:
            self.begin_step()
        step = self._step
        if step is None:
            raise RuntimeError(
                f"step {session.steps_done + 1} took no batch from the session's Loader: call session.step(loss) once for each batch, or "
                "for each group of batches, that the loop takes from it"
            )
        step._finish("session.step", loss, size)  # noqa: SLF001
        self._step = None
        if self._warm_up:
            self._end_warm_up_step()
            return False
        counts = session.steps_done == step.number
        if self.obstacle and not counts:
            raise StepNotRepeatable(step.number, self.obstacle)
        if self._loader is None and session.steps_done != session._until:  # noqa: SLF001
            self._begin_step()
        return counts

    def _end_warm_up_step(self) -> None:
        self._warm_up -= 1
        if not self._warm_up:
            self.leave_warm_up()
        if self._loader is None:
            self._begin_step()

    def leave_warm_up(self) -> None:
        """Wait for a rank, in a hot spare; this ends in another run of the script."""
        recovery = self._session._recovery  # noqa: SLF001
        if recovery is not None and recovery.warming_up:
            self._session._wait_for_rank(recovery)  # noqa: SLF001

    def _recover(self) -> None:
        """Enter the next generation, and see to it that the state is still one of this place in the script."""
        session, recovery, loader = self._session, self._session._recovery, self._loader  # noqa: SLF001
        assert recovery is not None
        if self.obstacle:
            raise StepNotRepeatable(session.steps_done + 1, self.obstacle)
        is_new, epoch = recovery.new, loader.epoch if loader is not None else 0
        session._recover(recovery)  # noqa: SLF001
        if loader is None:
            return
        loader.leave_finished_epoch()  # the others have: they are at a batch
        if not (is_new or loader.endless) and loader.epoch != epoch:
            why = f"the newest state that is left is one of epoch {loader.epoch}, and the loop is in epoch {epoch}"
            raise StepNotRepeatable(session.steps_done + 1, why)

    def close(self) -> None:
        """End the loop: no batch of the loader begins a step from now on, and no rank is left behind."""
        recovery = self._session._recovery  # noqa: SLF001
        self.leave_warm_up()
        if recovery is not None and recovery.needs_new_generation and not self.obstacle:
            self._recover()
        if self._loader is not None:
            self._loader.before_batch = None
