"""The training-job flow with a run form: the deployment `train` starts it, and its parameters are the form's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from prefect import flow
from prefect.client.schemas.objects import State as FlowState
from pydantic import Field, WithJsonSchema

from holdfast.errors import BadParameters, Problem
from holdfast.flows.training_job import training_job
from holdfast.prefect_client.flow_end import run_or_fail
from holdfast.prefect_client.named_clusters import ClusterParameter, resolve_cluster
from holdfast.spec import Cluster, TrainingJob, checks
from holdfast.spec.form import NAME_TEXT, SCRIPT_TEXT, WORKDIR_TEXT, advanced_schema, as_form_problems, job_of


def form_field(title: str, **more: Any) -> Any:  # noqa: ANN401 (as pydantic's own Field; JSON)
    """Describe a field of the form: title and limits. Prefect takes the description from the flow's docstring."""
    return Field(json_schema_extra={"title": title, **more})


Name = Annotated[str, form_field("Name", **NAME_TEXT, examples=["gpt-small"])]
Script = Annotated[str, form_field("Script or command", **SCRIPT_TEXT, examples=["/data/gpt/train.py", "python -m gpt.train"])]
Args = Annotated[str, form_field("Arguments", examples=["--steps 10000 --lr 3e-4"])]
Number = Annotated[int, form_field("Number of nodes", minimum=1)]
Ranks = Annotated[int, form_field("Ranks per node", minimum=1)]
Folder = Annotated[str, form_field("Working directory", **WORKDIR_TEXT, examples=["/data/gpt"])]
Advanced = Annotated[dict[str, Any], WithJsonSchema(advanced_schema()), form_field("Advanced")]

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
def train(  # noqa: PLR0913, PLR0917 (each is a form field)
    name: Name,
    script: Script,
    args: Args = "",
    nnodes: Number = 1,
    nproc_per_node: Ranks = 1,
    workdir: Folder = "",
    cluster: ClusterParameter = "local",
    advanced: Advanced = DEFAULTS,
) -> FlowState:
    """Train a job to its end and recover from faults. Run it again under the same name to continue from its last checkpoint.

    Args:
        name: Lowercase letters, digits and dashes. A job of this name that is still training is reattached.
        script: Absolute path of a Python script (/data/gpt/train.py), or a command (python -m gpt.train).
        args: Arguments of the script, as on a command line.
        nnodes: Number of nodes. Spare nodes and the minimum are under Advanced.
        nproc_per_node: Ranks (worker processes) per node: usually one per GPU.
        workdir: Absolute path in which the script starts; empty: the script's folder, or the home folder for a command.
        cluster: local (the worker's machine; local:3 has three nodes), the name of a cluster saved on the worker or in Prefect, or the
            path of a cluster file on the worker.
        advanced: Spare nodes, environment, checkpoints, recovery, timeouts: all other fields of a job file.
    """
    return run_or_fail(
        lambda: _train(
            {"name": name, "script": script, "args": args, "nnodes": nnodes, "nproc_per_node": nproc_per_node, "workdir": workdir},
            cluster,
            dict(advanced),
        )
    )


def _train(fields: Mapping[str, Any], cluster: Cluster | str | Mapping[str, Any], advanced: dict[str, Any]) -> FlowState:
    standby = bool(advanced.pop("standby", False))
    job = job_of(fields, advanced)
    target = resolve_cluster(cluster, nodes=job.max_nodes + job.spare_nodes)
    if problems := checks(job, target):
        raise BadParameters(tuple(_for_form(problem, job, fields["workdir"]) for problem in as_form_problems(problems)))
    return training_job.fn(job, target, standby=standby)


def _for_form(problem: Problem, job: TrainingJob, workdir: str) -> Problem:
    """Report a missing working directory as a missing script where the form left it empty and it was derived from the script."""
    if problem.field == "workdir" and not workdir and job.script is not None:
        return Problem(field="script", reason=f"{job.script} does not exist", cure="Fix the path; it is one on the worker's machine")
    return problem
