"""The page of the Python API: `holdfast.__all__`, drawn by mkdocstrings from the docstrings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from docs.generator.markdown import page

MEMBERS: Final[Mapping[str, tuple[str, ...]]] = {
    "session": (),
    "Session": (
        *("steps_done", "loss", "saved", "resumed_from", "extra", "rank", "group"),
        *("steps", "start", "step", "close", "micro_batches", "section", "stabilize_ddp"),
    ),
    "Step": ("number", "skip", "end"),
    "MicroBatch": ("batch", "weight", "last"),
    "Loader": ("epoch", "consumed", "state_dict", "load_state_dict"),
    "join": (),
    "section": (),
    "heartbeat": (),
    "TrainingJob": (),
    "Cluster": (),
    "LocalCluster": (),
    "SshCluster": (),
    "SlurmCluster": (),
    "__version__": (),
}
"""Each name of `holdfast.__all__`, in the order of the page, with the members that are public."""

MADE_BY_HOLDFAST: Final = frozenset({"Session", "Step", "MicroBatch"})
"""Classes whose objects a script gets, and does not create."""

JOB_FILE: Final = """# job.py
import holdfast

job = holdfast.TrainingJob(name="gpt-small", script="train.py", nnodes="2:4", nproc_per_node=8)
cluster = holdfast.LocalCluster(nodes=4)
"""
"""A job file in Python, which a test loads."""

GROUPS: Final = (
    (
        "In a training script",
        "These import `torch`. A script that uses them also runs under `torchrun`, or alone, without recovery.",
        ("session", "Session", "Step", "MicroBatch", "Loader", "join", "section", "heartbeat"),
    ),
    (
        "Jobs and clusters",
        (
            "These describe what a job file and a cluster file describe, for a job file in Python or a Prefect flow of your own. "
            "Their arguments are the fields of the [job file](job-file.md) and the [cluster file](cluster-file.md); "
            "a wrong argument raises `pydantic.ValidationError`, which names the field. `holdfast run job.py` runs this job:\n\n"
            f"```python\n{JOB_FILE}```"
        ),
        ("TrainingJob", "Cluster", "LocalCluster", "SshCluster", "SlurmCluster"),
    ),
    ("Version", "", ("__version__",)),
)
"""Title, introduction and names of each section."""


def api_page() -> str:
    """List what can be imported from `holdfast`, and the integrations."""
    parts = [
        "# Python API\n",
        "`import holdfast` gives the names below, and imports neither torch nor Prefect until one of them is used.",
        "Flows and tasks for Prefect are in `holdfast.workflows`: see [Training jobs in your own flows](../how-to/workflows.md).",
        "`holdfast.integrations` also has modules for [torchtitan](../how-to/torchtitan.md) and [Megatron-LM](../how-to/megatron.md).",
        "Other modules are internal and change without notice.\n",
    ]
    for title, intro, names in GROUPS:
        parts += [f"## {title}\n", *([f"{intro}\n"] if intro else []), *(_entry(f"holdfast.{name}", MEMBERS[name]) for name in names)]
    parts += ["## Integrations\n", *(_entry(f"holdfast.integrations.{name}.HoldfastCallback", ()) for name in ("huggingface", "lightning"))]
    return page(*parts)


def _entry(name: str, members: tuple[str, ...]) -> str:
    listed = f"[{', '.join(members)}]" if members else "false"
    signature = "" if name.rpartition(".")[2] not in MADE_BY_HOLDFAST else "      merge_init_into_class: false\n"
    return f"::: {name}\n    options:\n      members: {listed}\n{signature}"
