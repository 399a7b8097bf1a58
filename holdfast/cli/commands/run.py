"""`holdfast run`: start the flow (or let a new one adopt the job), then watch."""

from __future__ import annotations

from pathlib import Path

from holdfast.cli.commands.validate import checked, describe
from holdfast.cli.flow_process import FlowProcess, FlowProcessStep, write_spec
from holdfast.cli.output import hint, say, say_json
from holdfast.cli.rank_output import RankOutput, ranks_in
from holdfast.cli.screens import screen_for
from holdfast.cli.watch import JobWatcher, Taps, counted_taps
from holdfast.errors import HistoryError, JobAlreadyRunning
from holdfast.history import queries
from holdfast.history.errors import wait_for_history
from holdfast.history.lease import describe_holder, holder_of
from holdfast.history.models import Job, Lease
from holdfast.history.store import History


def run(  # noqa: PLR0913 (as many as the command has options)
    job_file: Path, cluster_file: Path | None, *, detach: bool, standby: bool, log_ranks: str | None, as_json: bool
) -> int:
    """Run the job in *job_file* and watch it, with the output of *log_ranks*; as a *standby*, also while another flow steers it."""
    job, cluster = checked(job_file, cluster_file)
    wanted = ranks_in(log_ranks or ("none" if as_json or detach else "0"), job.nodes.wanted * job.nodes.ranks)
    history = wait_for_history(History.open, _waits) if standby else History.open()
    try:
        with FlowProcessStep(job.name) as turn:
            adopted, steered, known = (
                wait_for_history(lambda: _looked(history, job.name), _waits) if standby else _looked(history, job.name)
            )
            if not standby and adopted is not None and steered is not None:
                raise JobAlreadyRunning(job.name, describe_holder(steered))
            fresh = {"job": job.model_dump(mode="json"), "cluster": cluster.model_dump(mode="json")}
            spec = {"job": adopted.spec, "cluster": adopted.cluster} if adopted else fresh
            name = "standby" if standby else "flow"
            with counted_taps() as taps:  # from before there is a flow: no Ctrl-C may leave one behind that nobody watches
                flow = FlowProcess(job.name, write_spec(job.name, {**spec, "standby": standby}, name), turn, known, name)
                screen = screen_for(as_json=as_json, hint="Ctrl-C stops the job · closing the terminal does not")
                watch = JobWatcher(history, screen, flow=flow, job=adopted, from_now=adopted is not None)
                watch.output = RankOutput(wanted, from_now=adopted is not None)
                if adopted is None:
                    watch.say("start", f"{describe(job, cluster)} Log: {flow.log}", job=job.name, pid=flow.pid, log=str(flow.log))
                else:
                    text = _adoption(job.name, changed=spec != fresh, steered=steered)
                    watch.say("adopt", text, job=job.name, id=adopted.id, pid=flow.pid, log=str(flow.log))
                return _detached(watch, taps, as_json=as_json) if detach else watch.until_the_end(taps)
    finally:
        history.close()


def _looked(history: History, name: str) -> tuple[Job | None, Lease | None, frozenset[str]]:
    """Return the live job of this name, who steers it, and the ids of all there were."""
    live = queries.live_job(history, name)
    return live, holder_of(history, live.id) if live else None, frozenset(old.id for old in queries.jobs(history, name, limit=None))


def _waits(error: HistoryError) -> None:
    hint(f"{error} This standby waits for it.")


def _detached(watch: JobWatcher, taps: Taps, *, as_json: bool) -> int:
    """Watch until the job trains, and say how to see it again."""
    watch.enough = lambda outlook: outlook.state == "RUNNING" and outlook.holder is not None
    status = watch.until_the_end(taps)
    outlook = watch.outlook
    if outlook is not None and status == 0 and not outlook.ended:
        name = outlook.job.name
        if as_json:
            say_json({"event": "detached", **outlook.as_record()}, indent=None)
        else:
            say(f"Job '{name}' trains. Watch it: holdfast status {name} --follow. Stop it: holdfast stop {name}.")
    return status


def _adoption(name: str, *, changed: bool, steered: Lease | None) -> str:
    if steered is not None:
        return f"stands by for job '{name}', which {describe_holder(steered)} steers. Ctrl-C ends the standby only"
    text = f"job '{name}' runs without a flow; a new flow adopts it and its workers go on"
    return text + ". The files say something else than what runs: the job keeps what it was started with" * changed
