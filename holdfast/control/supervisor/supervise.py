"""Control a job from the lease to its release: launch it or reattach to it, and at the end stop, save and record what has to be."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from holdfast import paths
from holdfast.cluster import NodeBackend, open_cluster
from holdfast.control.agents.pool import AgentPool
from holdfast.control.backup.outbox import ControllerOutbox
from holdfast.control.backup.standby import BackupPrerequisites
from holdfast.control.checkpoints.final_checkpoint import newest_on_disk, save_final_checkpoint
from holdfast.control.checkpoints.interval import CheckpointInterval
from holdfast.control.config import gc_tuning
from holdfast.control.config.worker_env import log_directory, prepare_fields
from holdfast.control.supervisor.controller import JobController
from holdfast.control.supervisor.detach import (
    Detach,
    end_at_once,
    first_sigterm_ignored,
    note_left,
    note_taken,
    sigterm_as_request,
    sigusr1_handled,
)
from holdfast.control.supervisor.flow_run import FlowRun
from holdfast.control.supervisor.leadership import Deposed, JobEnded, Leadership, StandbyController, stand_by, take_leadership
from holdfast.control.supervisor.reattach import reattach
from holdfast.control.supervisor.requests import Requests
from holdfast.detectors.catalogue import Fault
from holdfast.detectors.confirmation import confirmed
from holdfast.errors import HistoryError, HoldfastError, JobDetached, LeaseLost, WorldError
from holdfast.history import History, Job, LeaseRenewer, Recorder, absorb, queries, this_host
from holdfast.history.errors import wait_for_history
from holdfast.history.lease import Fence
from holdfast.history.statistics import fleet, work
from holdfast.host.rlimits import raise_descriptor_limit
from holdfast.log import note
from holdfast.paths import make_private, outbox_file
from holdfast.plurals import plural
from holdfast.policies.nodes.node_faults import NodeFault, isolating_fault
from holdfast.policies.states import Event, State
from holdfast.spec import Cluster, TrainingJob
from holdfast.spec.policy import LONGEST
from holdfast.stored_job import recorded_cluster, recorded_spec

log = logging.getLogger("holdfast.control")

T = TypeVar("T")
Publish = Callable[[str, dict[str, Any]], None]

SOON: Final = 10.0
"""Seconds within which a script that exits without having reported a step is suspicious."""
END_SECONDS: Final = 10.0
"""How long to wait for the database to store the last rows; the outbox file of the job keeps the rest for the next time."""
SPARE_SECONDS: Final = 5.0
"""How long a controller that detaches waits for a node that it is bringing up, so that the next one finds it either up or idle."""
AWAY_SECONDS: Final = 600.0
"""How long the last rows of a job that has ended wait for an unreachable database: its agents, which could keep them, are gone."""


@contextmanager
def control_job(
    spec: TrainingJob,
    cluster: Cluster,
    publish: Publish = lambda _event, _facts: None,
    *,
    standby: bool = False,
    flow_run: FlowRun | None = None,
) -> Iterator[JobController | JobEnded | Deposed]:
    """Control the job while the block runs: launch it, or reattach to it if it runs; as a *standby*, once no other controller has it.

    However the block ends, nothing is lost: a job that has ended takes its processes along; any other goes on under its agents, and the
    next controller reattaches to it. SIGTERM to this process means to stop the job, unless HOLDFAST_SIGTERM says otherwise or the machine
    shuts down and the job runs elsewhere; SIGUSR1 and requests in the history make the controller detach. *flow_run*: the Prefect flow
    run that this process runs in; its requests to cancel or suspend reach the controller through it.
    """
    flow_run = flow_run or FlowRun()
    gc_tuning.begin()
    history = _once_reachable(History.open, spec.name) if standby else History.open()
    prerequisites = BackupPrerequisites()
    try:
        with sigusr1_handled() as detach:
            if standby:
                _once_reachable(lambda: _absorb_all(history), spec.name)
                leadership = stand_by(StandbyController(history, spec, prerequisites, wanted=cluster, flow_run=flow_run), detach)
            elif detach.why:
                leadership = Deposed(f"the controller ends before it took the job: {detach.why}")
            else:
                _absorb_all(history)
                leadership = take_leadership(history, spec, cluster, flow_run)
            if isinstance(leadership, Leadership):
                with _controlled(leadership, history, publish, detach, prerequisites.take if standby else open_cluster) as run:
                    yield run
            else:
                if isinstance(leadership, Deposed):
                    note_left(spec.name, detached=True)
                yield leadership
    finally:
        prerequisites.close()
        history.close()


def stop_without_controller(job: Job) -> None:
    """End *job*, which no controller has, with its workers and agents, and record it as cancelled; raise `JobAlreadyRunning` if one has."""
    with control_job(recorded_spec(job), recorded_cluster(job)) as run:
        if isinstance(run, JobController) and not run.ended:
            run.move(Event.STOP_ASKED, "stopped while no controller ran it")


def _once_reachable(act: Callable[[], T], job: str) -> T:
    """Return what *act* returns, however long the database is unreachable."""
    return wait_for_history(act, lambda error: note(log, "standby.history-unreachable", level=logging.WARNING, job=job, error=error))


@contextmanager
def _controlled(
    leadership: Leadership, history: History, publish: Publish, detach: Detach, open_nodes: Callable[[Cluster], NodeBackend]
) -> Iterator[JobController]:
    """Control the job, whose lease was taken, while the block runs; that the controller detaches is no error of the block."""
    make_private(paths.job_directory(leadership.job.name))
    recorder = Recorder(history, outbox_file(leadership.job.name), Fence(leadership.job.id, leadership.lease.epoch))
    run = None
    try:
        run = _begin(leadership, history, recorder, detach, open_nodes)
        run.log.publisher = publish
        note_taken(run.job.name)
        try:
            publish("began", run.overview())
            with sigterm_as_request(run):
                yield run
        except JobDetached as error:
            note(log, "job.detached", job=run.job.name, why=error.why)
        except (HoldfastError, GeneratorExit):
            raise
        except Exception:
            run.log.record_event("the controller failed; training continues under its agents. Run the same command again to reattach")
            raise
        except BaseException as error:  # a signal to this process, as Prefect or Python turn it into an exception
            end_at_once(run, error)
            raise
        finally:
            _release(run)
    finally:
        recorder.close(END_SECONDS)
        if run is None or not run.suspended:  # one that is suspended may be taken up by this process again
            note_left(leadership.job.name, detached=run is not None and run.detached)


def _absorb_all(history: History) -> None:
    """Store the rows that controllers on this host could not write, of any job."""
    for outbox in sorted(paths.home().glob("jobs/*/history.outbox.jsonl")):
        absorb(history, outbox)


def _begin(
    leadership: Leadership, history: History, recorder: Recorder, detach: Detach, open_nodes: Callable[[Cluster], NodeBackend]
) -> JobController:
    job, spec, cluster = leadership.job, leadership.spec, leadership.cluster
    raise_descriptor_limit(f"job '{spec.name}'", spec.max_nodes + spec.spare_nodes)
    run = JobController(
        job=job,
        spec=spec,
        cluster=cluster,
        history=history,
        recorder=recorder,
        agents=AgentPool(open_nodes(cluster), prepare_fields(spec, cluster, job), epoch=leadership.lease.epoch),
        requests=Requests(history, recorder, leadership.lease, detach, leadership.flow_run),
        detach=detach,
        flow_run=leadership.flow_run,
        reattached=leadership.runs_already,
        handed_over=leadership.handed_over,
    )
    lease = run.lease = LeaseRenewer(history, leadership.lease, run.depose, lambda: run.faults.connectivity.reported)
    run.agents.lease_until = lambda: lease.good_until
    run.agents.raise_epoch = partial(_raise_epoch, run)
    recorder.remote_outbox = ControllerOutbox(run.agents, leadership.lease.outbox_key, lease.settle)
    run.requests.begin()
    run.nodes.approvals.begin()
    run.nodes.eligibility.begin()
    run.nodes.allocations.begin()
    run.faults.history.remember(queries.faults_of_hardware(history, cluster.name, since=time.time() - LONGEST.total_seconds(), but=job.id))
    with detach.deferred():
        if leadership.runs_already:
            reattach(run)
        else:
            run.machine.submit()
    if leadership.stood_by and leadership.runs_already:
        run.log.record_event(f"the standby controller on {_this_machine()} controls the job from now on")
    if spec.checkpoint.interval == "auto":  # read now, as a recovery cannot wait for a database
        run.checkpoints.interval = CheckpointInterval(
            plan=spec.checkpoint, fleet=fleet(history), work=work(history, spec.name), answered=run.incidents.decided()
        )
    return run


def _raise_epoch(run: JobController, epoch: int) -> int:
    """Get an epoch above *epoch* from the history, and return it; raise `LeaseLost` if another controller has the job."""
    try:
        with run.recorder.paused():  # a row of the former epoch would be refused as that of a deposed controller
            lease = run.lease.raise_epoch(epoch)
            run.recorder.fence = Fence(run.job.id, lease.epoch)
    except HistoryError as error:  # without the history the node's answer counts
        raise LeaseLost(run.job.name, f"a newer flow (epoch {epoch})") from error
    run.requests.epoch = lease.epoch
    run.log.record_event(
        f"agents have commands of epoch {epoch}, the history has a lower one, as after a restored backup: this controller's epoch is now "
        f"{lease.epoch}"
    )
    return lease.epoch


# -- the end ------------------------------------------------------------------------------------------------------------


def _release(run: JobController) -> None:
    """Stop what has to stop, store what is to be stored, and release the lease."""
    run.log.publish("released", {"over": run.ended})
    try:
        if run.detached and run.deposed_by is None and not run.launcher:
            run.log.record_event(f"the controller on {_this_machine()} detaches from the job; training continues: {run.detach.why}")
        if run.released and run.deposed_by is None:
            run.nodes.spare_pool.finish()
            with first_sigterm_ignored(run):
                _end(run)
        else:
            run.nodes.spare_pool.finish(SPARE_SECONDS if run.deposed_by is None else 0.0)
            run.agents.close(end=False)
    finally:  # asked again, as the lease may be lost while the job ends: then the allocation and the rows are another controller's
        run.nodes.allocations.close(end=run.released and run.deposed_by is None)
        run.nodes.preflight.close()
        run.requests.close()
        run.nodes.eligibility.close()
        run.nodes.approvals.close(ended=run.released and run.deposed_by is None)
        run.policy_file.close()
        run.cluster_file.close()
        # stored before another controller may take the lease: with fewer rows it would not know that the job has ended
        if run.deposed_by is None and not run.recorder.flush(END_SECONDS) and run.released:
            note(log, "job.end-waits", level=logging.WARNING, job=run.job.name, why="the history is unreachable", seconds=AWAY_SECONDS)
            run.recorder.flush(AWAY_SECONDS)
        run.lease.release()


def _end(run: JobController) -> None:
    """End the job's processes: with a grace period when a person requested it, at once otherwise."""
    requested = run.state in (State.CANCELLED, State.SUSPENDED)
    try:
        if run.state is State.COMPLETED:
            _note_end_without_steps(run)
        if requested:
            _stop_with_grace(run)
        if run.state is not State.COMPLETED:
            save_final_checkpoint(run)
            _record_saved(run)
        run.nodes.eligibility.record_faults(_isolating_faults(run))
        if run.incidents.current is not None:
            run.close_incident("stopped" if requested else "failed")
        run.generations.end()
    except WorldError as error:
        note(log, "job.end-failed", why=error)
    finally:  # a second signal to this process cuts the grace period short, and must not leave workers behind
        for node in [one for one in run.generations.members if one not in run.agents.clients]:
            run.agents.clear(node)  # a lost node has no connection, but may have processes
        _clear_unknown_nodes(run)
        run.agents.close(end=True)
        run.handlers.read_replayed()


def _stop_with_grace(run: JobController) -> None:
    grace = run.spec.timeouts.termination_grace.total_seconds()
    nodes = set(run.generations.members) & set(run.agents.alive())
    run.agents.send_command(nodes, "stop", generation=run.generations.number, signal=int(signal.SIGTERM), grace=grace)
    until = time.monotonic() + grace + 2.0
    while not run.generations.state.all_ended(nodes & set(run.agents.alive())) and time.monotonic() < until:
        run.pump(0.05)


def _record_saved(run: JobController) -> None:
    """Record where a resume continues from, as far as Holdfast knows: a script without managed state saves in its own way."""
    step = newest_on_disk(run) if run.generations.managed else 0
    if step:
        lost = plural(run.generations.best - step, "step") + " after it are lost; " if run.generations.best > step else ""
        run.saved = f"saved at step {step}; {lost}resume continues from there"
    elif run.generations.state.ranks and not _never_trained(run):
        run.saved = "Holdfast has no checkpoint of it; its script resumes from what it saved itself, or from its first step"
    if run.saved:
        run.log.record_event(run.saved)


def _never_trained(run: JobController) -> bool:
    """Return whether the job failed before any generation of it made progress: then there is nothing to continue from."""
    if run.state is not State.FAILED or run.generations.best or run.generations.state.any_stepped():
        return False
    return not run.incidents.progressed(time.time()) and not any(attempt.progressed for attempt in run.incidents.attempts)


def _clear_unknown_nodes(run: JobController) -> None:
    """Clear the nodes that an earlier controller took for the job and did not record.

    It took them in its last moment, or their agents were killed together with it: then only memory is left of the job there.
    """
    if not run.reattached:
        return
    known = {*run.agents.clients, *run.generations.members}
    for node in [one for one in run.agents.source.survey() if one.name not in known]:
        if node.job == run.job.id:
            run.agents.clear(node.name)
        elif node.status == "idle":
            with suppress(WorldError):
                run.agents.wipe(node.name)


def _isolating_faults(run: JobController) -> list[NodeFault]:
    """Return the faults that isolate nodes on which the job went on, or which could not be replaced: now they are idle."""
    case = run.incidents.current.case if run.incidents.current is not None else None
    seen, by_node = run.generations.state.node_faults, dict[str, list[Fault]]()
    signals = {**confirmed(seen), **(case.diagnosis.confirmed if case is not None else {})}
    actions = replace(run.recommended_actions, confirmed=signals)
    for fault in [*seen, *(case.against_nodes() if case is not None else ())]:
        if fault.node in run.generations.members and not run.nodes.eligibility.is_excused(fault, actions):
            by_node.setdefault(str(fault.node), []).append(fault)
    return [found for faults in by_node.values() if (found := isolating_fault(faults, actions)) is not None]


def _note_end_without_steps(run: JobController) -> None:
    """Record that the job was complete before, or a warning when its script did nothing visible."""
    if run.generations.complete_before is not None:
        run.generations.record_resumed()
        return
    started = [rank.started for rank in run.generations.state.ranks.values() if rank.started is not None]
    seconds = time.time() - min(started, default=time.time())
    if run.generations.best or seconds >= SOON or run.generations.number > 1 or run.generations.state.startup() is not None:
        return  # it took its time, was recovered, or printed something: then it has worked, whether it reports steps or not
    logs = f"`holdfast logs {run.job.name}`" if run.agents.source.remote else str(log_directory(run.job))
    run.log.record_event(
        f"every rank exited with status 0 within {seconds:.1f} s and reported no step. If that was not the whole job, see why in {logs}"
    )


def _this_machine() -> str:
    return this_host().partition("/")[0]
