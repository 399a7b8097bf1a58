"""A job from the options of `holdfast run` instead of a file, and the job file that such options stand for."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from holdfast.errors import Problem
from holdfast.spec.cluster import Cluster, LocalCluster
from holdfast.spec.files.load import Draft, allocation, checked, choose_cluster, review_cluster, validated, with_absolute_paths
from holdfast.spec.files.problems import shown
from holdfast.spec.files.units import format_duration
from holdfast.spec.files.yaml_text import Document
from holdfast.spec.job import NAME, TrainingJob

Program = Literal["script", "module", "command"]
OPTION_OF: Final[Mapping[str, str]] = {
    "script": "SCRIPT",
    "module": "SCRIPT",
    "command": "SCRIPT",
    "args": "ARGUMENT",
    "checkpoint.directory": "--checkpoint-dir",
    "max_recoveries": "--max-restarts",
    "timeouts.termination_grace": "--shutdown-timeout",
    "cluster": "--cluster",
    "name": "--name",
}
"""How a field of a job is called on the command line, where that is not its own name with dashes."""
_OPTIONS: Final = Path("job.options")
"""Stands for the command line where a file is expected: its paths are seen from here."""
CHECKPOINTS: Final = "holdfast-checkpoints"
"""Folder, in the working directory, of the checkpoints of a job within a Slurm allocation, whose nodes share that directory."""
OFFERED: Final[Mapping[str, str]] = {
    "spare_nodes": "0",
    "hot_spares": "auto",
    "groups": "auto",
    "workdir": ".",
    "env": '{OMP_NUM_THREADS: "1"}',
    "checkpoint": "{directory: checkpoints, interval: 100, keep: 2}",
    "policy": "balanced",
    "walltime": "24h",
    "max_recoveries": "20",
    "timeouts": "{log_silence: 10m}",
}
"""Fields that a new job file offers as comments, each with a value; the others are in the reference."""
CLUSTER: Final = "The nodes: a number of them on this machine (`kind: local`), or the path of a cluster file of SSH hosts or Slurm."
"""What a new job file says about `cluster`, which is no field of the job itself."""
WIDTH: Final = 120
"""Columns of a new job file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What the command line says about a job. None: the option was not given."""

    program: Program = "script"
    target: str = ""
    """The script, the module or the program; empty when the options change a job file."""
    arguments: Sequence[str] = ()
    name: str | None = None
    nnodes: str | None = None
    nproc_per_node: str | None = None
    spare_nodes: int | None = None
    hot_spares: str | None = None
    groups: str | None = None
    max_restarts: int | None = None
    shutdown_timeout: float | None = None
    """Seconds."""
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str | None = None
    python: str | None = None
    checkpoint_dir: str | None = None
    policy: str | None = None
    standalone: bool = False

    def fields(self) -> dict[str, Any]:
        """Return the fields of a job file that the options set."""
        grace = self.shutdown_timeout
        given: dict[str, Any] = {
            "name": self.name,
            "nnodes": self.nnodes,
            "nproc_per_node": self.nproc_per_node,
            "spare_nodes": self.spare_nodes,
            "hot_spares": int(self.hot_spares) if self.hot_spares and self.hot_spares.isdecimal() else self.hot_spares,
            "groups": self.groups,
            "workdir": self.workdir,
            "python": self.python,
            "env": dict(self.env) or None,
            "policy": self.policy,
            "max_recoveries": self.max_restarts,
            "checkpoint": self.checkpoint_dir and {"directory": str(Path(self.checkpoint_dir).expanduser().absolute())},
            "timeouts": None if grace is None else {"termination_grace": format_duration(timedelta(seconds=grace))},
        }
        return {name: value for name, value in given.items() if value is not None}


def job_fields(options: LaunchOptions) -> dict[str, Any]:
    """Return the fields of the job file that *options* stand for: what was given, and a name. The script is seen from here."""
    target = str(Path(options.target).absolute()) if options.program == "script" and options.workdir is not None else options.target
    program: dict[str, Any] = {options.program: target, "args": list(options.arguments)}
    if options.program == "command":
        program = {"command": [options.target, *options.arguments]}
    fields = {"name": job_name(options.target, options.program), **program, "nnodes": 1, "nproc_per_node": 1, **options.fields()}
    return {name: value for name, value in fields.items() if value != []}


def job_name(target: str, program: Program) -> str:
    """Return the name of a job that is given none: the script's, as far as a name may have its letters."""
    own = target.rpartition(".")[2] if program == "module" else Path(target).stem
    if program == "module" and own == "__main__":
        own = target.split(".")[-2] if "." in target else own
    name = re.sub(r"[^a-z0-9]+", "-", own.lower()).strip("-")[:63].strip("-")
    return name if re.fullmatch(NAME, name) else "job"


def review_options(options: LaunchOptions, cluster_file: Path | None) -> Draft:
    """Return the job that *options* describe, checked against this machine, with all problems under the names of options.

    Without a cluster file its nodes are those of the Slurm job in which this process runs, else as many local ones as the job requests.
    """
    draft = Draft()
    draft.job = validated(TrainingJob, job_fields(options), draft.problems, Document("{}"))
    if cluster_file is not None:
        other = review_cluster(cluster_file)
        draft.cluster = other.cluster
        draft.problems += [replace(one, field=f"--cluster {shown(str(cluster_file))}, {one.field}") for one in other.problems]
    elif draft.job is not None and (options.standalone or not allocation()):
        draft.cluster = own_machine(draft.job)
    else:
        choose_cluster(draft)
        if draft.job is not None and options.checkpoint_dir is None:
            plan = draft.job.checkpoint.model_copy(update={"directory": f"{CHECKPOINTS}/{draft.job.name}"})
            draft.job = draft.job.model_copy(update={"checkpoint": plan})
    return _finished(draft)


def change(draft: Draft, options: LaunchOptions) -> Draft:
    """Return the job of a file, checked, with the fields that *options* set in place of its own, whatever is wrong with those."""
    given = options.fields()
    if draft.job is None or not given:
        return checked(draft)
    problems: list[Problem] = []
    file = draft.job.model_dump(mode="json", exclude_unset=True)
    merged = {name: {**file.get(name, {}), **value} if isinstance(value, dict) else value for name, value in given.items()}
    job = validated(TrainingJob, {**file, **merged}, problems, Document("{}"))
    replaced = {name for name, value in given.items() if not isinstance(value, dict)}
    kept = [one for one in draft.problems if one.field.partition(".")[0] not in replaced]
    found = with_absolute_paths(Draft(job=job, cluster=draft.cluster, problems=[*kept, *problems], document=draft.document), _OPTIONS)
    found.problems = [_as_option(one) if one.field.partition(".")[0] in given else one for one in checked(found, given).problems]
    return found


def _finished(draft: Draft) -> Draft:
    """Make the folders of the job absolute as seen from here, check it, and call its fields as the command line does."""
    draft = checked(with_absolute_paths(draft, _OPTIONS))
    draft.problems = [_as_option(one) for one in draft.problems]
    return draft


def _as_option(problem: Problem) -> Problem:
    return replace(problem, field=option_of(problem.field))


def own_machine(job: TrainingJob) -> LocalCluster:
    """Return the local cluster of a job without a cluster file: its own, so that jobs at the same time do not share nodes."""
    return LocalCluster(name=job.name, nodes=job.max_nodes + job.spare_nodes)


def option_of(name: str) -> str:
    """Return how the field *name* of a job is called on the command line."""
    if name in OPTION_OF:
        return OPTION_OF[name]
    first, _, rest = name.partition(".")
    if first in OPTION_OF and not rest:
        return OPTION_OF[first]
    return f"--{first.replace('_', '-')}" + (f" {rest}" if rest else "") if first in LaunchOptions.__dataclass_fields__ else name


# -- as text ----------------------------------------------------------------------------------------------------------


def effective_text(job: TrainingJob, cluster: Cluster) -> str:
    """Return the job file, with its cluster, that *job* is run from: what differs from the defaults."""
    size = {"nnodes": job.nnodes, "nproc_per_node": job.nproc_per_node}
    return _yaml({**fields_of_job(job), **size, "cluster": fields_of_cluster(cluster)})


def fields_of_job(job: TrainingJob) -> dict[str, Any]:
    """Return the fields of *job* as a file has them, without those that have their default value."""
    return job.model_dump(mode="json", exclude_defaults=True)


def fields_of_cluster(cluster: Cluster) -> dict[str, Any]:
    """Return the kind of *cluster* and its fields as a file has them, without those that have their default value."""
    return {"kind": cluster.kind, **cluster.model_dump(mode="json", exclude_defaults=True)}


def separate_values(arguments: Sequence[str]) -> list[str]:
    """Return those of *arguments* that hold an option and its value in one item, as in ``"--lr 1e-3"``: argparse refuses them."""
    return [one for one in arguments if re.match(r"--?[A-Za-z][\w-]*\s+\S", one)]


def commented_text(options: LaunchOptions, schema: Path) -> str:
    """Return a job file for *options*, in which each field is explained, and the most important others are offered as comments."""
    fields = job_fields(options)
    for name in ("nnodes", "nproc_per_node"):
        if str(fields[name]).isdecimal():
            fields[name] = int(fields[name])  # YAML puts text that looks like a number in quotes
    nodes = int(str(fields["nnodes"]).rpartition(":")[2]) + (options.spare_nodes or 0)
    lines = [
        f"# yaml-language-server: $schema={schema}",
        "# A job of Holdfast. All fields: docs/reference/job-file.md, `holdfast validate` checks them.",
    ]
    for name, value in fields.items():
        lines += ["", *_explained(name), *_yaml({name: value}).splitlines()]
    lines += ["", "# What follows is optional: remove the `# ` before a field to set it."]
    for name, example in OFFERED.items():
        if name not in fields:
            lines += ["", *_explained(name), f"# {name}: {example}"]
    lines += ["", *_wrapped(CLUSTER), f"# cluster: {{kind: local, nodes: {nodes}}}"]
    return "\n".join(lines) + "\n"


def _explained(name: str) -> Iterator[str]:
    yield from _wrapped(TrainingJob.model_fields[name].description or "")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _yaml(fields: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(fields), sort_keys=False, allow_unicode=True, width=WIDTH)
