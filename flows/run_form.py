"""The training-job flow as the deployment `train` starts it: its parameters are the run form, with few fields for every job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from prefect import flow
from prefect.client.schemas.objects import State as FlowState
from pydantic import Field, WithJsonSchema

from flows.training_job import training_job
from holdfast.errors import BadParameters, Problem
from holdfast.prefect_client.ending import ended_in_words
from holdfast.prefect_client.named_clusters import Choice, chosen
from holdfast.spec import Cluster, TrainingJob, checks
from holdfast.spec.form import NAME_PATTERN, SCRIPT_PATTERN, WORKDIR_PATTERN, advanced_schema, as_form_problems, job_of


def shown(title: str, **more: Any) -> Any:  # noqa: ANN401 (as pydantic's own Field; JSON)
    """Return how the form shows a field: Prefect takes its title and limits from here, and the description from the docstring."""
    return Field(json_schema_extra={"title": title, **more})


Name = Annotated[str, shown("Name", pattern=NAME_PATTERN, examples=["gpt-small"])]
Script = Annotated[str, shown("Script or command", pattern=SCRIPT_PATTERN, examples=["/data/gpt/train.py", "python -m gpt.train"])]
Args = Annotated[str, shown("Arguments", examples=["--steps 10000 --lr 3e-4"])]
Number = Annotated[int, shown("Number of nodes", minimum=1)]
Ranks = Annotated[int, shown("Ranks per node", minimum=1)]
Folder = Annotated[str, shown("Working directory", pattern=WORKDIR_PATTERN, examples=["/data/gpt"])]
Advanced = Annotated[dict[str, Any], WithJsonSchema(advanced_schema()), shown("Advanced")]

DEFAULTS: Final[dict[str, Any]] = {}


@flow(
    name=training_job.name,
    flow_run_name="train {name}",
    retries=0,
    on_completion=training_job.on_completion_hooks,
    on_failure=training_job.on_failure_hooks,
    on_cancellation=training_job.on_cancellation_hooks,
    on_crashed=training_job.on_crashed_hooks,
    on_running=training_job.on_running_hooks,
)
def train(  # noqa: PLR0913, PLR0917 (each is a field of the form)
    name: Name,
    script: Script,
    args: Args = "",
    nnodes: Number = 1,
    nproc_per_node: Ranks = 1,
    workdir: Folder = "",
    cluster: Choice = "local",
    advanced: Advanced = DEFAULTS,
) -> FlowState:
    """Train a job to its end, through faults. Run it again under the same name to go on from its last checkpoint.

    Args:
        name: Lowercase letters, digits and dashes. A job of this name that is still training is reattached.
        script: Absolute path of a Python script (/data/gpt/train.py), or a command (python -m gpt.train).
        args: Arguments of the script, as on a command line.
        nnodes: How many nodes train. Spare nodes and the least number are under Advanced.
        nproc_per_node: Ranks (worker processes) on each node: usually one for each GPU.
        workdir: Absolute path in which the script starts; empty: the folder that the script is in, or for a command the home folder.
        cluster: local (the worker's machine; local:3 has three nodes), the name of a cluster saved on the worker or in Prefect, or the
            path of a cluster file on the worker.
        advanced: Spare nodes, environment, checkpoints, recovery, timeouts: all other fields of a job file.
    """
    return ended_in_words(
        lambda: _train(
            {"name": name, "script": script, "args": args, "nnodes": nnodes, "nproc_per_node": nproc_per_node, "workdir": workdir},
            cluster,
            dict(advanced),
        )
    )


def _train(fields: Mapping[str, Any], cluster: Cluster | str | Mapping[str, Any], advanced: dict[str, Any]) -> FlowState:
    standby = bool(advanced.pop("standby", False))
    job = job_of(fields, advanced)
    where = chosen(cluster, nodes=job.nodes.wanted + job.nodes.spare)
    if problems := checks(job, where):
        raise BadParameters(tuple(_as_filled_in(problem, job, fields["workdir"]) for problem in as_form_problems(problems)))
    return training_job.fn(job, where, standby=standby)


def _as_filled_in(problem: Problem, job: TrainingJob, workdir: str) -> Problem:
    """Return a problem with a folder that nobody named as one with the script that it was taken from."""
    if problem.field == "workdir" and not workdir and job.script is not None:
        return Problem(field="script", reason=f"{job.script} does not exist", cure="Mend the path; it is one on the worker's machine")
    return problem
