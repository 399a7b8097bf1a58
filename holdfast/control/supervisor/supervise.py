"""Take a job's wheel and let go of it again: the lease, the fleet, adoption of a job that runs already, and the end."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

from detectors.catalogue import Fault
from holdfast import paths
from holdfast.cluster import NodeBackend, open_cluster
from holdfast.control.agents.pool import AgentPool
from holdfast.control.backup.outbox import ControllerOutbox
from holdfast.control.backup.prerequisites import BackupPrerequisites
from holdfast.control.checkpoints.final_checkpoint import newest_on_disk, save_final_checkpoint
from holdfast.control.checkpoints.interval import CheckpointInterval
from holdfast.control.config import gc_tuning
from holdfast.control.config.worker_env import log_directory, prepare_fields
from holdfast.control.supervisor import former_jobs
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.detach import Detach, heeding_the_signal
from holdfast.control.supervisor.flow_run import FlowRun
from holdfast.control.supervisor.leadership import Deposed, JobEnded, Leadership, StandbyController, stand_by, take_leadership
from holdfast.control.supervisor.news import began
from holdfast.control.supervisor.reattach import reattach
from holdfast.control.supervisor.requests import Requests
from holdfast.control.supervisor.termination import end_at_once, heeding_termination, undisturbed
from holdfast.errors import HistoryError, HoldfastError, JobDetached, LeaseLost, WorldError
from holdfast.history import History, LeaseRenewer, Recorder, absorb, queries, this_host
from holdfast.history.fence import Fence
from holdfast.history.retry import wait_for_history
from holdfast.history.statistics import fleet, work
from holdfast.log import note
from holdfast.paths import make_private, outbox_file
from holdfast.report import wording
from holdfast.rlimits import raise_descriptor_limit
from holdfast.spec import Cluster, TrainingJob
from holdfast.spec.policy import LONGEST
from policies.node_faults import NodeFault, isolating_fault
from policies.states import State

log = logging.getLogger("holdfast.control")

T = TypeVar("T")
Tell = Callable[[str, dict[str, Any]], None]

SOON: Final = 10.0
"""Seconds within which the end of a script that reported no step is worth a remark."""

END_SECONDS: Final = 10.0
"""How long the history may take to take in the last rows; what is left is spilled beside the job and absorbed next time."""
HELP_SECONDS: Final = 5.0
"""How long a flow that lets go of its job waits for a node that it is bringing up, so that the next one finds it up, or idle."""
AWAY_SECONDS: Final = 600.0
"""How long the last rows of a job that is over wait for a history that is away: its agents, with which rows could be left, are gone."""


@contextmanager
def steering(
    spec: TrainingJob,
    cluster: Cluster,
    tell: Tell = lambda _event, _facts: None,
    *,
    standby: bool = False,
    flow_run: FlowRun | None = None,
) -> Iterator[JobController | JobEnded | Deposed]:
    """Steer the job while the block runs: launch it, or adopt it when it runs already; as a *standby*, once no other flow steers it.

    However the block ends, nothing is lost: a job that is over takes its processes along; one that is not goes on under its agents, to be
    adopted by the next flow. A termination of this process is a person's wish to stop the job, unless HOLDFAST_SIGTERM says otherwise or
    the machine goes down and the job is elsewhere; SIGUSR1 has the flow let go of the job, as does a request to hand it over. Where this
    process runs in Prefect, *flow_run* says in which run, and learns when that is cancelled or suspended.
    """
    flow_run = flow_run or FlowRun()
    gc_tuning.begin()
    history, ahead = (_when_there(History.open, spec.name) if standby else History.open()), BackupPrerequisites()
    try:
        with heeding_the_signal() as handover:
            if standby:
                _when_there(lambda: _absorb_all(history), spec.name)
                leadership = stand_by(StandbyController(history, spec, ahead, wanted=cluster, flow_run=flow_run), handover)
            elif handover.why:
                leadership = Deposed(f"the flow ends before it took the job: {handover.why}")
            else:
                _absorb_all(history)
                leadership = take_leadership(history, spec, cluster, flow_run)
            if isinstance(leadership, Leadership):
                with _steered(leadership, history, tell, handover, ahead.take if standby else open_cluster) as run:
                    yield run
            else:
                if isinstance(leadership, Deposed):
                    former_jobs.leave(spec.name, handed_over=True)
                yield leadership
    finally:
        ahead.close()
        history.close()


def _when_there(act: Callable[[], T], job: str) -> T:
    """Return what *act* does with the history, however long that is away."""
    return wait_for_history(act, lambda error: note(log, "standby.history-away", level=logging.WARNING, job=job, error=error))


@contextmanager
def _steered(
    leadership: Leadership, history: History, tell: Tell, handover: Detach, reach: Callable[[Cluster], NodeBackend]
) -> Iterator[JobController]:
    """Have the job, whose lease was taken, steered while the block runs; that it is handed over is no error of the block."""
    make_private(paths.job_directory(leadership.job.name))
    recorder = Recorder(history, outbox_file(leadership.job.name), Fence(leadership.job.id, leadership.lease.epoch))
    run = None
    try:
        run = _begin(leadership, history, recorder, handover, reach)
        run.log.publisher = tell
        former_jobs.take_up(run.job.name)
        try:
            tell("began", began(run))
            with heeding_termination(run):
                yield run
        except JobDetached as error:
            note(log, "job.handed-over", job=run.job.name, why=error.why)
        except (LeaseLost, GeneratorExit):
            raise
        except HoldfastError:
            raise
        except Exception:
            run.log.record_event("the flow failed; training goes on under its agents. Run the same command again to adopt the job")
            raise
        except BaseException as error:  # a signal to this process, as Prefect or Python turn it into an exception
            end_at_once(run, error)
            raise
        finally:
            _let_go(run)
    finally:
        recorder.close(END_SECONDS)
        if run is None or not run.suspended:  # one that is suspended may be taken up by this process again
            former_jobs.leave(leadership.job.name, handed_over=run is not None and run.detached)


def _absorb_all(history: History) -> None:
    """Bring in what flows on this host could not write, of whatever job."""
    for outbox_path in sorted(paths.home().glob("jobs/*/history.outbox_path.jsonl")):
        absorb(history, outbox_path)


def _begin(
    leadership: Leadership, history: History, recorder: Recorder, handover: Detach, reach: Callable[[Cluster], NodeBackend]
) -> JobController:
    job, spec, cluster = leadership.job, leadership.spec, leadership.cluster
    raise_descriptor_limit(f"job '{spec.name}'", spec.nodes.wanted + spec.nodes.spare)
    run = JobController(
        job=job,
        spec=spec,
        cluster=cluster,
        history=history,
        recorder=recorder,
        agents=AgentPool(reach(cluster), prepare_fields(spec, cluster, job), epoch=leadership.lease.epoch),
        requests=Requests(history, recorder, leadership.lease, handover, leadership.flow_run),
        detach=handover,
        flow_run=leadership.flow_run,
        reattached=leadership.adopted,
    )
    keeper = run.lease = LeaseRenewer(history, leadership.lease, run.depose, lambda: run.faults.connectivity.told)
    run.agents.lease_until = lambda: keeper.good_until
    run.agents.raise_epoch = partial(_outrank, run)
    recorder.elsewhere = ControllerOutbox(run.agents, leadership.lease.outbox_key, keeper.settle)
    run.requests.begin()
    run.nodes.approvals.begin()
    run.nodes.eligibility.begin()
    run.nodes.allocations.begin()
    run.faults.history.remember(queries.faults_of_hardware(history, cluster.name, since=time.time() - LONGEST.total_seconds(), but=job.id))
    if leadership.adopted:
        reattach(run)
    else:
        run.machine.submit()
    if leadership.stood_by and leadership.adopted:
        run.log.record_event(f"the standby on {this_host().partition('/')[0]} steers the job from now on")
    if spec.checkpoint.every == "auto":  # read now, as a recovery cannot wait for a database
        run.checkpoints.interval = CheckpointInterval(
            plan=spec.checkpoint, fleet=fleet(history), work=work(history, spec.name), answered=run.incidents.decided()
        )
    return run


def _outrank(run: JobController, epoch: int) -> int:
    """Have the history give this flow an epoch above *epoch*, in which it goes on; raise `LeaseLost` if another flow has the job."""
    try:
        with run.recorder.at_rest():  # a row of the former epoch would be refused as that of a flow that was overtaken
            lease = run.lease.raise_epoch(epoch)
            run.recorder.fence = Fence(run.job.id, lease.epoch)
    except HistoryError as error:  # who cannot ask must take the node's word for it
        raise LeaseLost(run.job.name, f"a newer flow (epoch {epoch})") from error
    run.requests.epoch = lease.epoch
    run.log.record_event(
        f"agents remember orders of epoch {epoch}, the history knew of fewer, as after a restored backup: this flow is {lease.epoch}"
    )
    return lease.epoch


def _let_go(run: JobController) -> None:
    """End what has to end, and hand back the lease."""
    run.log.publish("released", {"over": run.ended})
    try:
        if run.detached and run.deposed_by is None:
            run.log.record_event(f"the flow on {this_host().partition('/')[0]} lets go of the job, which trains on: {run.detach.why}")
        if run.released and run.deposed_by is None:
            run.nodes.spare_pool.finish()
            with undisturbed(run):
                _end(run)
        else:
            run.nodes.spare_pool.finish(HELP_SECONDS if run.deposed_by is None else 0.0)
            run.agents.close(end=False)
    finally:
        run.nodes.allocations.close(end=run.released and run.deposed_by is None)
        run.nodes.preflight.close()
        run.requests.close()
        run.nodes.eligibility.close()
        run.nodes.approvals.close(ended=run.released and run.deposed_by is None)
        run.policy_file.close()
        run.cluster_file.close()
        if run.deposed_by is None:
            _write_out(run)
        run.lease.release()


def _write_out(run: JobController) -> None:
    """Have all written before another flow may take the lease: whoever reads less would not know that the job is over."""
    if not run.recorder.flush(END_SECONDS) and run.released:
        note(log, "job.end-waits", level=logging.WARNING, job=run.job.name, why="the history is away", seconds=AWAY_SECONDS)
        run.recorder.flush(AWAY_SECONDS)


def _end(run: JobController) -> None:
    """End the job's processes: gently when a person asked for it, at once otherwise."""
    asked_for = run.state in (State.CANCELLED, State.SUSPENDED)
    try:
        if run.state is State.COMPLETED:
            _doubt(run)
        if asked_for:
            _stop_gently(run)
        if run.state is not State.COMPLETED:
            save_final_checkpoint(run)
            _say_what_is_saved(run)
        run.nodes.eligibility.record_faults(_found_beside(run))
        if run.incidents.current is not None:
            run.close_incident("stopped" if asked_for else "gave-up")
        run.generations.end()
    except WorldError as error:
        note(log, "job.end-trouble", why=error)
    finally:  # a second signal to this process cuts the gentle stop short, and must not leave workers behind
        for node in [one for one in run.generations.members if one not in run.agents.clients]:
            run.agents.clear(node)  # one that was lost has no channel, but may have processes
        _clear_forgotten(run)
        run.agents.close(end=True)
        run.handlers.hear_out()


def _say_what_is_saved(run: JobController) -> None:
    """Say where a resume continues from, as far as Holdfast knows: a script without managed state saves in its own way."""
    step = newest_on_disk(run) if run.generations.managed else 0
    if step:
        lost = wording.plural(run.generations.best - step, "step") + " after it are lost; " if run.generations.best > step else ""
        run.saved = f"saved at step {step}; {lost}resume continues from there"
    elif run.generations.state.ranks:
        run.saved = "Holdfast has no checkpoint of it; its script resumes from what it saved itself, or from its first step"
    if run.saved:
        run.log.record_event(run.saved)


def _clear_forgotten(run: JobController) -> None:
    """Clear the nodes that a flow before took for the job, and of which this one has never heard.

    It took them in its last moment, or their agents were killed together with it: then memory is all that is left of the job.
    """
    if not run.reattached:
        return
    views = [one for one in run.agents.source.survey() if one.name not in run.agents.clients and one.name not in run.generations.members]
    for one in views:
        if one.job == run.job.id:
            run.agents.clear(one.name)
        elif one.status == "idle":
            with suppress(WorldError):
                run.agents.wipe(one.name)


def _found_beside(run: JobController) -> list[NodeFault]:
    """Return what takes nodes out of service that trained on in spite of it, or could not be replaced: now they are idle."""
    against: dict[str, list[Fault]] = {}
    for fault in run.generations.state.node_faults:
        if fault.node in run.generations.members:
            against.setdefault(str(fault.node), []).append(fault)
    if run.incidents.current is not None and run.incidents.current.case is not None:
        for fault in run.incidents.current.case.against_nodes():
            if fault.node in run.generations.members:
                against.setdefault(str(fault.node), []).append(fault)
    counted = (
        [fault for fault in faults if not run.nodes.eligibility.is_excused(fault, run.recommended_actions)] for faults in against.values()
    )
    return [found for faults in counted if (found := isolating_fault(faults, run.recommended_actions)) is not None]


def _doubt(run: JobController) -> None:
    """Say so when a script did nothing that can be seen: it may have left early without calling that an error."""
    started = [view.started for view in run.generations.state.ranks.values() if view.started is not None]
    lived = time.time() - min(started, default=time.time())
    if not run.generations.best and lived < SOON:
        run.log.record_event(
            f"every rank ended with status 0 within {lived:.1f} s and reported no step. If that was not the whole job, see why in "
            f"{_where(run)}"
        )


def _where(run: JobController) -> str:
    """Return where a person finds what the ranks wrote."""
    if not run.agents.source.remote:
        return str(log_directory(run.job))
    return f"`holdfast logs {run.job.name}`"


def _stop_gently(run: JobController) -> None:
    grace = run.spec.limits.stop_grace.total_seconds()
    nodes = set(run.generations.members) & set(run.agents.alive())
    run.agents.send_command(nodes, "stop", generation=run.generations.number, signal=int(signal.SIGTERM), grace=grace)
    until = time.monotonic() + grace + 2.0
    while not run.generations.state.all_ended(nodes & set(run.agents.alive())) and time.monotonic() < until:
        run.pump(0.05)
