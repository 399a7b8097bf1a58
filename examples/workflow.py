"""A Prefect flow of your own around a training job: prepare data, check nodes, train, evaluate, publish.

- `python examples/workflow.py`: once, on this machine
- `prefect deploy --all --prefect-file examples/prefect.yaml`: as a deployment run by a worker (docs/how-to/workflows.md)

Training survives faults as any job does; the flow around it needs no code for that.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Final

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from pydantic import BaseModel
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from holdfast.workflows import (
    Capacity,
    Evaluation,
    LocalCluster,
    TrainingJob,
    TrainingResult,
    evaluate_checkpoint,
    load_cluster,
    probe_cluster,
    training_job,
    wait_for_capacity,
)

HERE: Final = Path(__file__).resolve().parent
SHAPE: Final = ["--width", "64", "--layers", "2", "--heads", "4", "--context", "64"]
"""Size of the model, the same for training and evaluation."""


class Data(BaseModel):
    """Two files of text."""

    train: Path
    held_out: Path


@task(task_run_name="prepare data")
def prepare_data(folder: Path, megabytes: float = 1.0) -> Data:
    """Collect the source of the Python standard library; a tenth of it is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[: int(megabytes * 1e6)]
    folder.mkdir(parents=True, exist_ok=True)
    data, cut = Data(train=folder / "train.txt", held_out=folder / "held_out.txt"), len(text) * 9 // 10
    data.train.write_bytes(text[:cut])
    data.held_out.write_bytes(text[cut:])
    return data


@task(task_run_name="describe job {name}")
def describe_job(name: str, data: Data, capacity: Capacity, nodes: int, steps: int) -> TrainingJob:
    """Return the job: the content of a job file, in Python. A remaining node becomes a spare."""
    return TrainingJob.model_validate(
        {
            "name": name,
            "script": str(HERE / "byte_gpt.py"),
            "args": ["--text", str(data.train), "--steps", str(steps), *SHAPE],
            "nnodes": nodes,
            "spare_nodes": int(len(capacity.free) > nodes),
            "checkpoint": {"interval": 50},
        }
    )


@task(task_run_name="publish step {evaluation.step}")
def publish(trained: TrainingResult, evaluation: Evaluation, folder: Path, max_loss: float) -> Path:
    """Write the model as one file, unless its loss is too high, and describe it in an artifact of the Prefect UI."""
    loss = float(evaluation.metrics["loss"])
    if not loss <= max_loss:  # also refuses NaN
        raise ValueError(f"the loss on held-out text is {loss:.3f}, above {max_loss:g}: not published")
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / f"{trained.job}-step-{evaluation.step}.pt"
    dcp_to_torch_save(evaluation.checkpoint, model)
    facts = {
        "Step": evaluation.step,
        "Loss on held-out text": f"{loss:.4f}",
        "Incidents while training": trained.incidents,
        "Job": f"`{trained.job}` ({trained.job_id})",
        "Model": f"`{model}`",
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    create_markdown_artifact(f"| Published | |\n|---|---|\n{rows}\n", key=f"{trained.job}-published", description=f"{model.name} published")
    return model


@flow(name="train-and-publish", flow_run_name="train and publish {name}", retries=0)
def train_and_publish(  # noqa: PLR0913, PLR0917 (the fields of the run form)
    name: str = "workflow",
    cluster_file: str | None = None,
    nodes: int = 2,
    steps: int = 300,
    folder: Path = Path("workflow-output"),
    max_loss: float = 5.5,
) -> Path:
    """Train a small language model and publish it.

    Args:
        name: Name of the training job.
        cluster_file: Cluster to train on; empty: nodes are simulated by folders on this machine.
        nodes: Nodes to train on.
        steps: Training steps.
        folder: Folder for data and the published model.
        max_loss: A model with a higher loss on held-out text is not published.
    """
    cluster = load_cluster(cluster_file) if cluster_file else LocalCluster(nodes=nodes + 1)
    folder = folder.absolute()
    data = prepare_data(folder / "data")
    health = probe_cluster(cluster, min_healthy=nodes)
    capacity = wait_for_capacity(cluster, nodes=nodes, timeout_seconds=600, poll_seconds=10, wait_for=[health])
    trained = training_job(job=describe_job(name, data, capacity, nodes, steps), cluster=cluster)
    evaluation = evaluate_checkpoint(
        trained, script=HERE / "evaluate_byte_gpt.py", args=["--text", str(data.held_out), *SHAPE], timeout_seconds=600
    )
    return publish(trained, evaluation, folder / "published", max_loss)


if __name__ == "__main__":
    train_and_publish()
