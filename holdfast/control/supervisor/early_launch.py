"""Launch a job before its flow can, since Prefect takes seconds to start and the ranks need not wait for it.

`holdfast.prefect.server` starts this program, the launcher, before anything else. It takes the job's lease, submits the job and launches
it, as the flow's launch task does, collects what the ranks report, and recovers from their faults as the flow does. When the flow is
ready to control the job, it has the launcher detach (`hand_over`), and reattaches to the job, as to any that runs without a controller.
Until then the launcher ends the job if that is requested, if the process of the flow dies, and if no recovery is possible. The last it
leaves to the flow where a Prefect server is configured: that shows a failed flow run then. Where Prefect cannot be started or reached,
the launcher controls the job to its end (`go_on_alone`), while the process of the flow tries again: no job ends because Prefect is slow.
On a machine of few cores Prefect is started once the ranks have started (`wait_for_ranks`): both are seconds of computing, and would slow
each other down.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Final

from holdfast.host.process import die_with_parent
from holdfast.policies.states import Event, State

if TYPE_CHECKING:
    from holdfast.control.supervisor.controller import JobController
    from holdfast.control.supervisor.detach import Detach
    from holdfast.policies.states import Transition

FIELD: Final = "launch_early"
"""Field of a spec file: the flow is of a new job, which a launcher may launch."""
VARIABLE: Final = "HOLDFAST_LAUNCHER"
"""Variable of the flow's process: the pid of its launcher, a child of this process."""
DETACH: Final = signal.SIGUSR1
STOP: Final = signal.SIGTERM
FLOW_FAILED: Final = signal.SIGUSR2
"""Informs a launcher, before `STOP`, that nobody stops the job: its flow could not start."""
NO_FLOW: Final = "its flow ended before it took control of the job"
"""Reason of a job that its launcher ends, as no flow will control it."""
ALONE: Final = signal.SIGRTMIN + 8
"""Informs a launcher that the flow is late: it controls the job to its end, unless the flow can start before that."""
LATE: Final = (
    "Prefect could not be started or reached so far: the job goes on without it, faults are recovered from as usual, and Prefect is tried "
    "again; the flow's log in the job's directory says what it lacks"
)
RETRY_SECONDS: Final = 30.0
"""From one attempt to start the flow to the next, where its launcher controls the job meanwhile."""
POLL: Final = 0.02
STOP_SECONDS: Final = 120.0
"""How long a launcher may take to end a job of which its flow will never take control."""
FEW_CORES: Final = 4
"""With fewer, ranks and Prefect start one after the other."""
RANKS_SECONDS: Final = 10.0
"""How long Prefect waits for them at most: nodes may have to be waited for, and a flow shows that."""
ENDS: Final = frozenset({Event.STOP_ASKED, Event.SUSPEND_ASKED, Event.TIME_OVER})
"""What ends a job here in any case; also what cannot be recovered from, where no server is configured that would show it."""
OF_THE_FLOW: Final = frozenset({Event.FINISHED, Event.MOVE_ASKED, Event.FAILED})
"""What a launcher leaves to the flow, unless that is late: the end that a flow run reports, and what is no answer to a fault."""
IN_WORK: Final = frozenset({State.DIAGNOSING, State.DECIDING, State.ISOLATING, State.RESCHEDULING})
"""States in which a job is not handed over: the recovery would be decided anew."""
ENDED: Final = 10
"""Exit status of a launcher whose job has ended; with any other status the job continues, or was never submitted."""


class HandOver(Enum):
    """What a flow gets from its launcher."""

    NONE = auto()
    """It had none."""
    TAKEN = auto()
    """The job, if the launcher could submit it."""
    ENDED = auto()
    """The job has ended."""


# -- in the process of the flow ---------------------------------------------------------------------------------------


def start(arguments: list[str], detach: Detach) -> None:
    """Start a launcher if *arguments* (a program and its spec file) are those of a new job; it dies with this process.

    On a machine of few cores return once the ranks have started, the launcher has ended, or this process is to detach.
    """
    os.environ.pop(VARIABLE, None)
    with suppress(OSError, ValueError, IndexError, AttributeError):
        if json.loads(Path(arguments[1]).read_text()).get(FIELD):
            parent, (started, theirs) = os.getpid(), os.pipe()
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", __spec__.name, arguments[1], str(theirs)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs],
                preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),  # noqa: PLW1509 (no thread has been started yet)
            )
            child.returncode = 0  # so that Popen never waits for it: this process is replaced by the flow's
            os.close(theirs)
            os.environ[VARIABLE] = str(child.pid)
            signal.signal(signal.SIGCHLD, _exit_with_the_job)
            if len(os.sched_getaffinity(0)) < FEW_CORES:
                wait_for_ranks(started, detach)
            os.close(started)


def wait_for_ranks(started: int, detach: Detach) -> None:
    """Wait until the other end of the pipe *started* is closed, for a while."""
    until = time.monotonic() + RANKS_SECONDS
    while time.monotonic() < until and not detach.why and not select.select([started], [], [], POLL)[0]:
        pass


def _exit_with_the_job(*_: object) -> None:
    """Exit if the launcher has ended its job: there is nothing left for a flow, and the Prefect server may not answer for long."""
    with suppress(ChildProcessError, KeyError):
        ended, status = os.waitpid(int(os.environ[VARIABLE]), os.WNOHANG)
        if ended:
            del os.environ[VARIABLE]
            if os.waitstatus_to_exitcode(status) == ENDED:
                sys.exit(ENDED)


def hand_over() -> HandOver:
    """Have the launcher detach from its job, and wait until it has."""
    status = _end(DETACH)
    if status is None:
        return HandOver.NONE
    return HandOver.ENDED if status == ENDED else HandOver.TAKEN


def go_on_alone() -> bool:
    """Have a launcher that controls the job do so to its end, unless the flow can start before; return whether there is one."""
    if not has_launcher():
        return False
    os.kill(int(os.environ[VARIABLE]), ALONE)
    return True


def has_launcher() -> bool:
    """Return whether a launcher controls the job."""
    with suppress(ChildProcessError, KeyError):
        return os.waitid(os.P_PID, int(os.environ[VARIABLE]), os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False


def wait_to_try_again(detach: Detach) -> bool:
    """Wait until the flow is to be tried again; return False if its launcher has ended by then, or this process is to detach."""
    until = time.monotonic() + RETRY_SECONDS
    while time.monotonic() < until and not detach.why and has_launcher():
        time.sleep(10 * POLL)
    return not detach.why and has_launcher()


def abandon(number: int, *, failed: bool = False) -> None:
    """Have a launcher that is left end its job (`STOP`) or detach from it (`DETACH`), as no flow will control it; wait until it has.

    *failed*: the flow could not start, rather than being stopped.
    """
    if failed and (pid := os.environ.get(VARIABLE)):
        with suppress(ProcessLookupError):
            os.kill(int(pid), FLOW_FAILED)
    _end(number)


def _end(number: int) -> int | None:
    """Send the launcher a signal and return its exit status; None where there is no launcher."""
    pid = os.environ.pop(VARIABLE, "")
    if not pid:
        return None
    with suppress(ChildProcessError, ProcessLookupError):
        os.kill(int(pid), number)
        until = time.monotonic() + STOP_SECONDS
        while time.monotonic() < until:
            ended, status = os.waitpid(int(pid), os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(POLL)
        os.kill(int(pid), signal.SIGKILL)
    return None


# -- the launcher -----------------------------------------------------------------------------------------------------


def main(spec: str, started: str) -> int:
    """Launch the job that the file *spec* describes, and close the descriptor *started* once its ranks have started.

    What fails here fails again in the flow, which reports it.
    """
    flow_failed, flow_late = list[int](), list[int]()
    signal.signal(FLOW_FAILED, lambda number, _frame: flow_failed.append(number))
    signal.signal(ALONE, lambda number, _frame: flow_late.append(number))
    from holdfast.control.supervisor.controller import JobController  # noqa: PLC0415 (after these signals are handled)
    from holdfast.control.supervisor.detach import SIGTERM  # noqa: PLC0415
    from holdfast.control.supervisor.supervise import control_job  # noqa: PLC0415
    from holdfast.errors import HoldfastError  # noqa: PLC0415
    from holdfast.spec import TrainingJob, cluster_of  # noqa: PLC0415

    described, parent = json.loads(Path(spec).read_text()), os.getppid()
    signal.signal(STOP, _terminated)
    ended = False
    job, cluster = TrainingJob.model_validate(described["job"]), cluster_of(described["cluster"])
    with suppress(HoldfastError, Terminated), control_job(job, cluster) as run:
        if isinstance(run, JobController):
            run.launcher = True
            try:
                if run.state is State.LAUNCHING and not run.reattached:
                    turn = _launch(run, int(started), flow_late)
                    without_flow = turn.reason == SIGTERM and (flow_failed or os.getppid() != parent)
                    run.move(turn.event, NO_FLOW if without_flow else turn.reason)
            finally:
                ended = run.ended
    return ENDED if ended else 0


class Terminated(BaseException):
    """This process received SIGTERM and was too busy to take it as a request."""


def _terminated(*_: object) -> None:
    raise Terminated


class _Stage:
    """How far the launcher has got with a job, and what of it is left to the flow."""

    def __init__(self, run: JobController) -> None:
        from holdfast.control.supervisor.stages import RECOVERY, migrate  # noqa: PLC0415 (after SIGUSR1 is handled)
        from holdfast.prefect.server import is_configured  # noqa: PLC0415 (as above)

        self._run = run
        self._work = {**RECOVERY, State.MIGRATING: migrate}
        self.launching = True
        self.failure: Transition | None = None
        """No recovery is possible, which the flow is to find and record."""
        self.ends = ENDS if is_configured() else ENDS | {Event.FAILED}
        """What ends the job here."""
        self.of_the_flow = OF_THE_FLOW

    def take_all(self) -> None:
        """Leave nothing to the flow any more."""
        self.ends, self.of_the_flow = ENDS | {Event.FINISHED, Event.FAILED}, frozenset()

    def turn(self) -> Transition | None:
        """Do what is to be done in the job's state, and return the transition that follows, if any."""
        from holdfast.control.supervisor.controller import ending, poll  # noqa: PLC0415 (as above)
        from holdfast.control.supervisor.launch import begin  # noqa: PLC0415 (as above)

        if self.failure is not None:
            return ending(self._run) or self.failure
        if self.launching:
            turn = begin(self._run)
            self.launching = turn is None
            return turn
        return self._work.get(self._run.state, poll)(self._run)

    def is_at_work(self) -> bool:
        """Return whether something is done in the job's state that takes its own time."""
        return self.failure is None and self._run.state in self._work

    def may_be_left(self) -> bool:
        """Return whether the flow can continue here: not, for example, between the command that starts ranks and their start.

        It would start them again.
        """
        run, generations = self._run, self._run.generations
        if self.launching:
            return not generations.members
        if run.state is State.RESUMING:
            return generations.state.all_started()
        return self.failure is not None or run.state not in IN_WORK


def _launch(run: JobController, started: int, flow_late: list[int]) -> Transition:
    """Launch the job and handle its faults until the flow takes over (`JobDetached`); return how the job is to end.

    *flow_late* gets an item when the flow cannot start for now: what is left to it is done here from then on.
    """
    from holdfast.control.supervisor.controller import TICK  # noqa: PLC0415

    stage = _Stage(run)
    run.detach.is_possible = stage.may_be_left
    while True:
        if flow_late and stage.of_the_flow:
            run.log.record_event(LATE)
            stage.take_all()
        turn = stage.turn()
        if started >= 0 and (not stage.launching or run.generations.state.all_started()):
            os.close(started)
            started = -1
        if turn is not None and turn.event in stage.ends:
            return turn
        if turn is not None and turn.event is Event.FAILED:
            stage.failure = turn
        elif turn is not None and turn.event not in stage.of_the_flow:
            run.move(*turn)
        run.pump(0.0 if stage.launching or stage.is_at_work() else TICK)


if __name__ == "__main__":
    from holdfast.control.supervisor.detach import handle_sigusr1

    handle_sigusr1()  # before anything that takes long
    sys.exit(main(*sys.argv[1:]))
