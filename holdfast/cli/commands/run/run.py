"""`holdfast run`: start the job's flow (or a new one that reattaches), then watch the job."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from holdfast.cli.arguments import ranks_in
from holdfast.cli.commands.run.launch_options import launched, refuse_other_program, shown_ranks
from holdfast.cli.commands.run.validate import summary
from holdfast.cli.flow_process import FlowProcess, StartLock, write_spec
from holdfast.cli.output import echo, echo_json, hint
from holdfast.cli.parser.launch import is_job_file
from holdfast.cli.rank_output import RankOutput
from holdfast.cli.screens import screen_for
from holdfast.cli.watch import JobWatcher, Signals, counted_signals
from holdfast.control.supervisor import early_launch
from holdfast.errors import HistoryError, JobAlreadyRunning
from holdfast.history import queries
from holdfast.history.errors import wait_for_history
from holdfast.history.lease import describe_holder, holder_of
from holdfast.history.models import Job, Lease
from holdfast.history.store import History
from holdfast.spec import Cluster, TrainingJob
from holdfast.spec.launch_options import effective_text


def run(  # noqa: PLR0913 (as many as the command has options)
    target: str,
    cluster_file: Path | None,
    *,
    default_cluster: Path | None,
    detach: bool,
    standby: bool,
    print_job: bool,
    as_json: bool,
    **given: Any,  # noqa: ANN401 (options of the command)
) -> int:
    """Run the job that *target* and the options *given* describe, and watch it; as a *standby*, even while another controller runs it."""
    job, cluster = launched(target, cluster_file, default_cluster, given)
    log_ranks = shown_ranks(given, job)
    wanted = ranks_in(log_ranks or ("none" if as_json or detach else "0"), _world_size(job))
    if print_job:
        _print_job(job, cluster, as_json=as_json)
        return 0
    with closing(wait_for_history(History.open, _waiting) if standby else History.open()) as history, StartLock(job.name) as lock:
        live, holder, known = wait_for_history(lambda: _present(history, job.name), _waiting) if standby else _present(history, job.name)
        if given["name"] is None and not is_job_file(target):
            refuse_other_program(job, next(iter(queries.jobs(history, job.name, limit=1)), None))
        if not standby and live is not None and holder is not None:
            raise JobAlreadyRunning(job.name, describe_holder(holder))
        new = {"job": job.model_dump(mode="json"), "cluster": cluster.model_dump(mode="json")}
        if live is not None and not isinstance(job.nproc_per_node, int):  # counted on the nodes when it was launched
            new["job"]["nproc_per_node"] = live.spec.get("nproc_per_node")
        spec = {"job": live.spec, "cluster": live.cluster} if live else new
        name = "standby" if standby else "flow"
        with counted_signals() as signals:  # before the flow starts: no Ctrl-C may leave one behind that nobody watches
            flow = FlowProcess(
                job.name,
                write_spec(job.name, {**spec, "standby": standby, early_launch.FIELD: live is None and not standby}, name),
                lock,
                known,
                name,
            )
            screen = screen_for(as_json=as_json, hint="Ctrl-C stops the job · closing the terminal does not")
            watch = JobWatcher(history, screen, flow=flow, job=live, from_now=live is not None)
            watch.output = RankOutput(wanted, from_now=live is not None)
            if live is None:
                watch.show("start", f"{summary(job, cluster)} Log: {flow.log}", job=job.name, pid=flow.pid, log=str(flow.log))
            else:
                text = _reattaching(job.name, changed=spec != new, holder=holder)
                watch.show("reattach", text, job=job.name, id=live.id, pid=flow.pid, log=str(flow.log))
            return _until_it_trains(watch, signals, as_json=as_json) if detach else watch.until_the_end(signals)


def _print_job(job: TrainingJob, cluster: Cluster, *, as_json: bool) -> None:
    if as_json:
        echo_json({"job": job.model_dump(mode="json"), "cluster": cluster.model_dump(mode="json")})
    else:
        echo(effective_text(job, cluster).rstrip())


def _world_size(job: TrainingJob) -> int | None:
    """Return the number of ranks; None where the nodes are still to be counted."""
    return job.max_nodes * job.nproc_per_node if isinstance(job.nproc_per_node, int) else None


def _present(history: History, name: str) -> tuple[Job | None, Lease | None, frozenset[str]]:
    """Return the live job of this name, who holds its lease, and the ids of all jobs of the name."""
    live = queries.live_job(history, name)
    return live, holder_of(history, live.id) if live else None, frozenset(old.id for old in queries.jobs(history, name, limit=None))


def _waiting(error: HistoryError) -> None:
    hint(f"{error} The standby controller waits for it.")


def _until_it_trains(watch: JobWatcher, signals: Signals, *, as_json: bool) -> int:
    """Watch until the job trains, and show how to watch it again."""
    watch.enough = lambda view: view.state == "RUNNING" and view.holder is not None
    status = watch.until_the_end(signals)
    view = watch.view
    if view is not None and status == 0 and not view.ended:
        name = view.job.name
        if as_json:
            echo_json({"event": "detached", **view.as_record()}, indent=None)
        else:
            echo(f"Job '{name}' trains. Watch it: holdfast status {name} --follow. Stop it: holdfast stop {name}.")
    return status


def _reattaching(name: str, *, changed: bool, holder: Lease | None) -> str:
    if holder is not None:
        return f"standby controller for job '{name}', which {describe_holder(holder)} controls. Ctrl-C ends the standby only"
    text = f"job '{name}' runs without a controller; a new one reattaches, and the workers are not interrupted"
    return text + ". The files differ from what runs: the job keeps what it was started with" * changed
