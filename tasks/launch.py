"""Launch: bring the nodes up, agree on the first membership, start the workers."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from holdfast.control import runs
from holdfast.control.run import Run
from holdfast.errors import NodeTrouble, NotEnoughNodes, OperatorError, WorldError
from policies.placement import place
from policies.states import Event
from tasks.monitor import SLICE, watch
from tasks.reschedule import agree
from tasks.resume import start_workers
from tasks.turn import Turn


@task(task_run_name="launch {job}", cache_policy=NO_CACHE)
def launch(job: str) -> Turn | None:
    """Start the job on fresh nodes, or go on watching a start that another flow began."""
    run = runs.of(job)
    if not run.board.all_started() or not run.members:
        try:
            members = gather(run)
        except OperatorError as error:
            return Turn(Event.GAVE_UP, str(error))
        try:
            agree(run, place(members, run.spec.nodes.ranks), because="launch")
        except NodeTrouble as error:  # before any rank ran it is no incident: the node is let go, and the next turn gathers anew
            run.fleet.drop(error.node)
            run.remark(f"{error.node} is left out of the launch: {error}")
            return None
        start_workers(run)
    return watch(run, seconds=SLICE, until=run.begun)


def gather(run: Run) -> tuple[str, ...]:
    """Bring up agents on as many nodes as the job wants, spares included; return those that will hold ranks."""
    nodes = run.spec.nodes
    candidates, refused = run.fleet.free(), []
    while len(run.fleet.alive()) < nodes.wanted + nodes.spare and candidates:
        missing = nodes.wanted + nodes.spare - len(run.fleet.alive())
        batch, candidates = candidates[:missing], candidates[missing:]
        answers = run.fleet.each(batch, run.fleet.bring_up)
        refused += [f"{node}: {answer}" for node, answer in answers.items() if isinstance(answer, WorldError)]
    ready = tuple(node for node in run.fleet.source.names() if node in run.fleet.alive())
    if len(ready) < nodes.wanted:
        raise NotEnoughNodes(nodes.wanted, len(ready), run.cluster.name, "; ".join(refused))
    for node in ready:
        run.stand(node, "healthy", "its agent is up")
    short = nodes.wanted + nodes.spare - len(ready)
    if short:
        run.remark(f"{short} of {nodes.spare} spare node(s) could not be had" + (f": {'; '.join(refused)}" if refused else ""))
    return ready[: nodes.wanted]
