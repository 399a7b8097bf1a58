"""Take a job's wheel and let go of it again: the lease, the fleet, adoption of a job that runs already, and the end."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from detectors.catalogue import Fault
from holdfast.cluster import open_cluster
from holdfast.control import runs
from holdfast.control.adoption import adopt
from holdfast.control.cadence import Cadence
from holdfast.control.farewell import save_what_lives
from holdfast.control.fleet import Fleet
from holdfast.control.plan import how_to_run, log_directory
from holdfast.control.requests import Requests
from holdfast.control.run import Run
from holdfast.descriptors import make_room
from holdfast.errors import HoldfastError, JobAlreadyRunning, LeaseLost, WorldError
from holdfast.history import (
    LEASE_SECONDS,
    History,
    Lease,
    LeaseKeeper,
    Recorder,
    absorb,
    holder_of,
    models,
    queries,
    take,
    this_host,
    wait_take,
)
from holdfast.history.figures import fleet, work
from holdfast.log import note
from holdfast.places import job_directory, make_private
from holdfast.spec import Cluster, TrainingJob, cluster_of
from holdfast.spec.load_policy import policy_for
from holdfast.spec.policy import LONGEST
from policies.offences import Offence, takes_out
from policies.states import Event, State

log = logging.getLogger("holdfast.control")

Tell = Callable[[str, dict[str, Any]], None]

SOON: Final = 10.0
"""Seconds within which the end of a script that reported no step is worth a remark."""

END_SECONDS: Final = 10.0
"""How long the history may take to take in the last rows; what is left is spilled beside the job and absorbed next time."""


@contextmanager
def steering(spec: TrainingJob, cluster: Cluster, tell: Tell = lambda _event, _facts: None) -> Iterator[Run]:
    """Steer the job while the block runs: launch it, or adopt it when it runs already.

    However the block ends, nothing is lost: a job that is over takes its processes along; one that is not goes on under its agents, to be
    adopted by the next flow. A termination of this process is a person's wish to stop the job.
    """
    history = History.open()
    recorder = Recorder(history, spill_file(spec.name))
    absorb(history, spill_file(spec.name))
    run: Run | None = None
    try:
        run = _take_wheel(spec, cluster, history, recorder)
        run.tell = tell
        runs.enter(run)
        try:
            yield run
        except (LeaseLost, GeneratorExit):
            raise
        except HoldfastError:
            raise
        except Exception:
            run.remark("the flow failed; training goes on under its agents. Run the same command again to adopt the job")
            raise
        except BaseException as error:  # a signal to this process, as Prefect or Python turn it into an exception
            _stop(run, f"the flow was told to end ({type(error).__name__})")
            raise
        finally:
            _let_go(run)
    finally:
        recorder.close(END_SECONDS)
        history.close()


def spill_file(job: str) -> Path:
    """Return the file that takes rows the database could not."""
    folder = job_directory(job)
    make_private(folder)
    return folder / "history.spill.jsonl"


def _take_wheel(spec: TrainingJob, cluster: Cluster, history: History, recorder: Recorder) -> Run:
    live = queries.live_job(history, spec.name)
    job = live or models.Job(
        name=spec.name,
        spec=spec.model_dump(mode="json"),
        cluster=cluster.model_dump(mode="json"),
        directory=str(job_directory(spec.name)),
        at=time.time(),
    )
    if live is None:
        policy_for(spec)  # a file that cannot be used is refused before anything begins
    make_room(f"job '{spec.name}'", spec.nodes.wanted + spec.nodes.spare)
    holder = "the flow"
    lease = _lease(history, job, holder)
    if live is not None:
        spec, cluster = TrainingJob.model_validate(live.spec), cluster_of(live.cluster)
    source = open_cluster(cluster)
    run = Run(
        job=job,
        spec=spec,
        cluster=cluster,
        history=history,
        recorder=recorder,
        fleet=Fleet(source, how_to_run(spec, cluster, job), epoch=lease.epoch),
    )
    run.keeper = LeaseKeeper(history, lease, run.lose)
    run.requests = Requests(history, recorder, job.id)
    run.consent.begin()
    run.wards.begin()
    run.borrowing.begin()
    run.seen_before.remember(queries.faults_of_hardware(history, cluster.name, since=time.time() - LONGEST.total_seconds(), but=job.id))
    if live is None:
        run.submit()
    else:
        adopt(run)
    if spec.checkpoint.every == "auto":  # read now, as a recovery cannot wait for a database
        run.cadence = Cadence(plan=spec.checkpoint, fleet=fleet(history), work=work(history, spec.name), answered=run.answered())
    return run


def _lease(history: History, job: models.Job, holder: str) -> Lease:
    """Take the job's lease. A holder on another host may be dead without our knowing: its lease is waited out once."""
    try:
        return take(history, job, holder=holder)
    except JobAlreadyRunning:
        present = holder_of(history, job.id)
        if present is None or present.host == this_host():
            raise
        return wait_take(history, job, holder=holder, seconds=LEASE_SECONDS + 1.0)


def _stop(run: Run, because: str) -> None:
    if not run.over:
        run.move(Event.STOP_ASKED, because)


def _let_go(run: Run) -> None:
    """End what has to end, and hand back the lease."""
    try:
        if run.over and run.lost is None:
            _end(run)
        else:
            run.fleet.close(end=False)
    finally:
        run.borrowing.close(end=run.over and run.lost is None)
        run.preflight.close()
        run.requests.close()
        run.wards.close()
        run.consent.close(ended=run.over and run.lost is None)
        run.rulebook.close()
        run.cluster_file.close()
        run.keeper.release()
        runs.leave(run)


def _end(run: Run) -> None:
    """End the job's processes: gently when a person asked for it, at once otherwise."""
    try:
        if run.state is State.COMPLETED:
            _doubt(run)
        if run.state is State.CANCELLED:
            _stop_gently(run)
        if run.state is not State.COMPLETED:
            save_what_lives(run)
        run.wards.accuse(_found_beside(run))
        if run.incident is not None:
            run.close_incident("stopped" if run.state is State.CANCELLED else "gave-up")
        run.end_generation()
    except WorldError as error:
        note(log, "job.end-trouble", why=error)
    finally:  # a second signal to this process cuts the gentle stop short, and must not leave workers behind
        for node in run.members:  # one that was lost has no channel, but may have processes
            if node not in run.fleet.channels:
                run.fleet.clear(node)
        run.fleet.close(end=True)


def _found_beside(run: Run) -> list[Offence]:
    """Return what takes nodes out of service that trained on in spite of it, or could not be replaced: now they are idle."""
    against: dict[str, list[Fault]] = {}
    for fault in run.board.node_faults:
        if fault.node in run.members:
            against.setdefault(str(fault.node), []).append(fault)
    if run.incident is not None and run.incident.case is not None:
        for fault in run.incident.case.against_nodes():
            if fault.node in run.members:
                against.setdefault(str(fault.node), []).append(fault)
    counted = ([fault for fault in faults if not run.wards.pardons(fault, run.levels)] for faults in against.values())
    return [found for faults in counted if (found := takes_out(faults, run.levels)) is not None]


def _doubt(run: Run) -> None:
    """Say so when a script did nothing that can be seen: it may have left early without calling that an error."""
    started = [view.started for view in run.board.ranks.values() if view.started is not None]
    lived = time.time() - min(started, default=time.time())
    if not run.best and lived < SOON:
        run.remark(
            f"every rank ended with status 0 within {lived:.1f} s and reported no step. If that was not the whole job, see why in "
            f"{_where(run)}"
        )


def _where(run: Run) -> str:
    """Return where a person finds what the ranks wrote."""
    if not run.fleet.source.remote:
        return str(log_directory(run.job.name))
    return f"`holdfast logs {run.job.name}`"


def _stop_gently(run: Run) -> None:
    grace = run.spec.limits.stop_grace.total_seconds()
    nodes = set(run.members) & set(run.fleet.alive())
    run.fleet.order(nodes, "stop", generation=run.generation, signal=int(signal.SIGTERM), grace=grace)
    until = time.monotonic() + grace + 2.0
    while not run.board.all_ended(nodes & set(run.fleet.alive())) and time.monotonic() < until:
        run.pump(0.05)
