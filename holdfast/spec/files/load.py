"""Read job and cluster files: YAML, or Python that sets ``job`` and ``cluster``. The public functions raise only `BadFile`."""

from __future__ import annotations

import ast
import os
import re
import shutil
import stat
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from holdfast.errors import BadFile, Problem
from holdfast.security.secrets import is_secret_reference
from holdfast.spec.check import checks
from holdfast.spec.cluster import KINDS, Cluster, LocalCluster, SshHop, kind_of
from holdfast.spec.files.problems import dotted, models_in, nearest, path_of, problems_in, shown
from holdfast.spec.files.python_file import values_of
from holdfast.spec.files.synonyms import POLICY_ONLY
from holdfast.spec.files.yaml_text import MAX_FILE_BYTES, Document, Unreadable
from holdfast.spec.job import PROGRAMS, TrainingJob, contradictions, is_policy_file
from holdfast.spec.slurm import SlurmCluster

YAML: Final = frozenset({".yaml", ".yml", ".json"})
SLURM: Final = ("scontrol", "squeue", "sbatch", "srun")
"""Commands without which no allocation can be used."""
LOGIN: Final = ("key", "passphrase")
"""Fields of a machine that name files."""
OUTER: Final = re.compile(r"(.+)(?:\.[^.]+|\[\d+\])", re.DOTALL)
"""A field within another one, as `dotted` writes it."""
FileKind = Literal["job", "cluster", "policy"]
ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass
class Draft:
    """What a file contains: its parts as far as they are valid, and all problems."""

    job: TrainingJob | None = None
    cluster: Cluster | None = None
    problems: list[Problem] = field(default_factory=list)
    document: Document | None = None
    """Where the fields of the job stand; None for a job that was not read from YAML."""


def load_job(path: str | os.PathLike[str]) -> tuple[TrainingJob, Cluster | None]:
    """Return the job in the file at *path*, and the cluster if the file names one. Its folders become absolute."""
    draft = _job_draft(Path(path))
    if draft.problems or draft.job is None:
        raise BadFile(shown(str(path)), tuple(draft.problems))
    return draft.job, draft.cluster


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Return the cluster in the file at *path*."""
    return _cluster_or_raise(_cluster_draft(Path(path)), path)


def parse_cluster(given: str | Mapping[str, Any] | object, source: str) -> Cluster:
    """Return the cluster that *given* describes, as YAML, JSON or fields; *source* is its name in messages.

    Relative files in it are seen from the home of the user that runs this.
    """
    draft = Draft()
    try:
        document = Document(given) if isinstance(given, str) else Document("{}")  # fields have no lines
        fields = fields_of(document, "Write at least `kind:`") if isinstance(given, str) else given
        draft.cluster = _cluster(fields, draft.problems, document)
    except Unreadable as error:
        draft.problems.append(error.problem)
    return _absolute_cluster(_cluster_or_raise(draft, source), Path.home())


def reread_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Return the cluster in the file at *path*, which may be the file of a job; problems of the job are ignored."""
    draft, file = Draft(), Path(path)
    try:
        document = read_yaml(file)
        fields, under = fields_of(document), ""
        if "cluster" in fields:
            fields, under = fields["cluster"], "cluster"
        elif fields.keys() & set(PROGRAMS):
            fields = {}
        draft.cluster = _cluster(fields, draft.problems, document, under)
    except Unreadable as error:
        draft.problems.append(error.problem)
    return _cluster_or_raise(with_absolute_paths(draft, file), path)


def _cluster_or_raise(draft: Draft, source: str | os.PathLike[str]) -> Cluster:
    if draft.problems or draft.cluster is None:
        raise BadFile(shown(str(source)), tuple(draft.problems))
    return draft.cluster


def review(
    job_file: str | os.PathLike[str],
    cluster_file: str | os.PathLike[str] | None = None,
    default_cluster: str | os.PathLike[str] | None = None,
) -> Draft:
    """Read a job file, check it against this machine, and collect all problems.

    A cluster file replaces the job's own cluster; a default one only stands in where the job names none.
    """
    return checked(draft_of(job_file, cluster_file, default_cluster))


def draft_of(
    job_file: str | os.PathLike[str],
    cluster_file: str | os.PathLike[str] | None = None,
    default_cluster: str | os.PathLike[str] | None = None,
) -> Draft:
    """Read a job file as `review` does, and leave out whether this machine and the cluster have what the job needs."""
    draft = _job_draft(Path(job_file))
    names_one = draft.cluster is not None or any(problem.field.partition(".")[0] == "cluster" for problem in draft.problems)
    cluster_file = cluster_file or (None if names_one else default_cluster)
    if cluster_file is not None:
        other = _cluster_draft(Path(cluster_file))
        draft.cluster = other.cluster
        draft.problems += other.problems
    elif not names_one:
        choose_cluster(draft)
    return draft


def checked(draft: Draft, elsewhere: Container[str] = ()) -> Draft:
    """Add the problems that keep the job from running here now, with their lines, except of fields that were set *elsewhere*."""
    if draft.job is not None:
        reported = {problem.field for problem in draft.problems}
        found = [problem for problem in checks(draft.job, draft.cluster or LocalCluster()) if problem.field not in reported]
        lines = draft.document
        draft.problems += [one if lines is None or one.field.partition(".")[0] in elsewhere else located(lines, one) for one in found]
    return draft


def review_cluster(path: str | os.PathLike[str]) -> Draft:
    """Read a cluster file and collect all problems."""
    return _cluster_draft(Path(path))


def kind_of_file(path: str | os.PathLike[str]) -> FileKind:
    """Return what the file at *path* describes, by its fields; `job` where that cannot be seen."""
    file = Path(path)
    try:
        if file.suffix.lower() == ".py":
            names = {target.id for line in ast.parse(read_text(file)).body for target in ast.walk(line) if isinstance(target, ast.Name)}
            return "cluster" if "cluster" in names and "job" not in names else "job"
        names = set(fields_of(read_yaml(file)))
    except (Unreadable, SyntaxError, ValueError, RecursionError, MemoryError):
        return "job"
    if names & set(PROGRAMS):
        return "job"
    if names & {"kind", "hosts"}:
        return "cluster"
    return "policy" if names & POLICY_ONLY else "job"


def allocation() -> str:
    """Return the number of the Slurm job in which this process runs; empty where it runs in none."""
    return os.environ.get("SLURM_JOB_ID", "").strip()


def choose_cluster(draft: Draft) -> None:
    """Choose the cluster of a job that names none: the Slurm allocation in which this process runs, else this machine.

    A batch host is one node of the allocation, and often one that must not train: a user who asked for nodes does not mean it alone.
    """
    number = allocation()
    missing = [program for program in SLURM if not shutil.which(program)] if number else []
    if missing:
        reason = (
            f"the job names no cluster, and this is within Slurm job {number}, whose nodes cannot be used: '{missing[0]}' is not on PATH"
        )
        cure = "Put Slurm's commands on PATH, or write `cluster: {kind: local}` into the job file to use this host alone"
        draft.problems.append(Problem(field="cluster", reason=reason, cure=cure))
    else:
        draft.cluster = SlurmCluster(kind="slurm") if number else LocalCluster()


def _job_draft(path: Path) -> Draft:
    draft = Draft()
    try:
        if path.suffix.lower() == ".py":
            found = values_of(path, read_text(path), ("job", "cluster"))
            _expect_models(found)
            draft.job, draft.cluster = found["job"], found["cluster"]
        else:
            draft.document = read_yaml(path)
            fields = fields_of(draft.document)
            _expect_a_job(fields, path)
            if "cluster" in fields:
                draft.cluster = _cluster(fields.pop("cluster"), draft.problems, draft.document, "cluster")
            draft.job = validated(TrainingJob, fields, draft.problems, draft.document)
    except Unreadable as error:
        draft.problems.append(error.problem)
    except ValidationError as error:
        draft.problems += _raised_in_python(error)
    return with_absolute_paths(draft, path)


def _cluster_draft(path: Path) -> Draft:
    draft = Draft()
    try:
        if path.suffix.lower() == ".py":
            found = values_of(path, read_text(path), ("cluster",))
            _expect_models(found)
            draft.cluster = found["cluster"]
        else:
            document = read_yaml(path)
            fields = fields_of(document)
            _expect_a_cluster(fields)
            draft.cluster = _cluster(fields, draft.problems, document)
    except Unreadable as error:
        draft.problems.append(error.problem)
    except ValidationError as error:
        draft.problems += _raised_in_python(error)
    return with_absolute_paths(draft, path)


def _expect_a_job(fields: Mapping[str, Any], path: Path) -> None:
    if fields.keys() & {"kind", "hosts"} and not fields.keys() & set(PROGRAMS):
        cure = f"Name a job's file, with `name:` and `script:`, and this one with `--cluster {shown(path.name)}`"
        raise Unreadable(Problem(field="file", reason="describes a cluster, not a job", cure=cure))


def _expect_a_cluster(fields: Mapping[str, Any]) -> None:
    if fields.keys() & set(PROGRAMS):
        cure = "Name a cluster's file, with `kind:` and its nodes: what is under `cluster:` of a job may be a file of its own"
        raise Unreadable(Problem(field="file", reason="describes a job, not a cluster", cure=cure))


# -- absolute paths ---------------------------------------------------------------------------------------------------


def with_absolute_paths(draft: Draft, path: Path) -> Draft:
    """Make the folders in *draft* absolute, as seen from the file's own folder."""
    home = path.absolute().parent
    if draft.job is not None:
        directory = Path(home, Path(draft.job.workdir).expanduser())
        plan = draft.job.checkpoint
        if plan.directory is not None:
            plan = plan.model_copy(update={"directory": str(Path(directory, Path(plan.directory).expanduser()))})
        policy = draft.job.policy
        policy = str(Path(home, Path(policy).expanduser())) if is_policy_file(policy) else policy
        draft.job = draft.job.model_copy(update={"workdir": os.path.normpath(directory), "checkpoint": plan, "policy": policy})
    if draft.cluster is not None:
        draft.cluster = _absolute_cluster(draft.cluster, home)
        if draft.cluster.maintenance_file is None and path.suffix.lower() in YAML:  # a module would have to be run again
            draft.cluster = draft.cluster.model_copy(update={"maintenance_file": str(path.absolute())})
    return draft


def _absolute_cluster(cluster: Cluster, home: Path) -> Cluster:
    """Make the files and folders that *cluster* names absolute."""
    if isinstance(cluster, LocalCluster):
        return cluster.model_copy(update=_absolute(cluster, home, "directory", "maintenance_file"))
    if isinstance(cluster, SlurmCluster):  # its folder is on the nodes
        return cluster.model_copy(update=_absolute(cluster, home, "maintenance_file"))

    def hops(jump: list[SshHop] | None) -> list[SshHop] | None:
        return None if jump is None else [hop.model_copy(update=_absolute(hop, home, *LOGIN)) for hop in jump]

    hosts = [host.model_copy(update={**_absolute(host, home, *LOGIN), "jump": hops(host.jump)}) for host in cluster.hosts]
    files = _absolute(cluster, home, *LOGIN, "known_hosts", "maintenance_file")
    return cluster.model_copy(update={**files, "hosts": hosts, "jump": hops(cluster.jump)})


def _absolute(model: BaseModel, home: Path, *names: str) -> dict[str, str]:
    """Return the fields of *names* that name a file, as seen from *home*."""
    given = {name: getattr(model, name) for name in names}
    files = {name: value for name, value in given.items() if value is not None and not is_secret_reference(value)}
    return {name: str(Path(home, Path(value).expanduser())) for name, value in files.items()}


# -- validation -------------------------------------------------------------------------------------------------------


def _cluster(fields: object, problems: list[Problem], document: Document, under: str = "") -> Cluster | None:
    """Return *fields* as the kind of cluster that they name, or None; problems join *problems*."""
    kind, problem = kind_of(fields), None
    if isinstance(fields, str) and under:
        cure = f"Write the cluster's fields under it, or leave it out and name their file on the command line: `--cluster {shown(fields)}`"
        problem = Problem(field="", reason=f"{shown(repr(fields))} holds no fields", cure=cure)
    elif isinstance(fields, Mapping) and "hosts" in fields and "kind" not in fields:
        problem = Problem(field="kind", reason="is missing, and a cluster without it is of this machine alone", cure="Add `kind: ssh`")
    elif isinstance(kind, str) and kind not in KINDS:
        cure = nearest(kind, list(KINDS)) or f"This version knows: {', '.join(KINDS)}"
        problem = Problem(field="kind", reason=f"no kind of cluster is called {shown(repr(kind))}", cure=cure)
    if problem is not None:
        problems.append(located(document, problem, under))
        return None
    return validated(KINDS[kind] if isinstance(kind, str) else LocalCluster, fields, problems, document, under)


def validated(model: type[ModelT], fields: object, problems: list[Problem], document: Document, under: str = "") -> ModelT | None:
    """Return *fields* as a *model*. Problems join *problems*; then the model is made of the valid fields, so that it can be checked too."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        found = problems_in(error, model)
        if model is TrainingJob and isinstance(fields, Mapping) and error.errors()[0]["type"] != "contradiction":
            meant = {name for name in PROGRAMS if any(f"'{name}'" in problem.cure for problem in found)}
            found += [problem for problem in contradictions(dict(fields)) if not (problem.field == "script" and meant)]
        problems += [located(document, problem, under) for problem in found]
        return _valid_part(model, fields, error)


def located(document: Document, problem: Problem, under: str = "") -> Problem:
    """Return *problem* with its line in *document*, or with that of the part to which a missing field belongs."""
    name = ".".join(part for part in (under, problem.field) if part and part != "file") or "file"
    lines = {dotted(path): number for path, number in document.lines.items()}
    place = name
    while place not in lines and (outer := OUTER.match(place)):
        place = outer[1]
    line = lines.get(place)
    reason = problem.reason if line is None else f"line {line}: {problem.reason}"
    return Problem(field=name, reason=reason, cure=problem.cure)


def _valid_part(model: type[ModelT], fields: object, error: ValidationError) -> ModelT | None:
    """Return the *model* without the fields that *error* refused, or None when that is not valid either."""
    if not isinstance(fields, Mapping):
        return None
    refused = [path_of(details) for details in error.errors()]
    kept = _without(fields, set(refused))
    if model is TrainingJob and ("name",) in refused:
        kept["name"] = "unnamed"
    try:
        return model.model_validate(kept)
    except ValidationError:
        return None


def _without(fields: Mapping[str, Any], refused: set[tuple[str | int, ...]], at: tuple[str | int, ...] = ()) -> dict[str, Any]:
    """Return *fields* without those at a *refused* path; of a list with a refused item nothing is kept."""
    kept = {}
    for name, value in fields.items():
        path = (*at, name)
        if path in refused or (isinstance(value, list) and any(bad[: len(path)] == path for bad in refused)):
            continue
        kept[name] = _without(value, refused, path) if isinstance(value, Mapping) else value
    return kept


def fields_of(document: Document, cure: str = "Write at least `name:` and `script:`; examples/ has job files") -> dict[str, Any]:
    """Return the fields of *document*; raise `Unreadable` with the *cure* where there are none."""
    if document.data is None:
        raise Unreadable(Problem(field="file", reason="is empty", cure=cure))
    if not isinstance(document.data, dict):
        raise Unreadable(Problem(field="file", reason="holds no fields", cure="Write one `name: value` a line; examples/ has job files"))
    return document.data


def read_yaml(path: Path) -> Document:
    """Return the YAML in the file at *path*; raise `Unreadable` for anything else."""
    text = read_text(path)
    if path.suffix.lower() not in YAML:
        cure = "Name it .yaml (fields) or .py (a module that sets `job`)"
        raise Unreadable(
            Problem(field="file", reason=f"the suffix '{shown(path.suffix)}' is neither that of YAML nor of Python", cure=cure)
        )
    return Document(text)


def read_text(path: Path) -> str:
    """Return the text of the file at *path*; raise `Unreadable` for anything that has none."""
    try:
        data = None
        if stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        near = nearest(path.name, _neighbours(path)) or "Check the path"
        raise Unreadable(Problem(field="file", reason="does not exist", cure=near)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Unreadable(Problem(field="file", reason=f"cannot be read: {reason}", cure="Name a file that you may read")) from None
    if data is None:
        raise Unreadable(Problem(field="file", reason="is not a regular file", cure="Name a job file (.yaml or .py)"))
    if len(data) > MAX_FILE_BYTES:
        reason = f"is larger than {MAX_FILE_BYTES // 1024} KiB"
        raise Unreadable(Problem(field="file", reason=reason, cure="This is hardly a job file; check the path"))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8 text"
        raise Unreadable(Problem(field="file", reason=reason, cure="Save the file as UTF-8, or check the path")) from None


def _neighbours(path: Path) -> list[str]:
    try:
        return [found.name for found in path.absolute().parent.iterdir()]
    except (OSError, ValueError):
        return []


def _expect_models(found: Mapping[str, object]) -> None:
    for name, models in (("job", (TrainingJob,)), ("cluster", tuple(KINDS.values()))):
        value = found.get(name)
        if name in found and not isinstance(value, models) and not (name == "cluster" and "job" in found and value is None):
            classes = [model.__name__ for model in models]
            reason = f"`{name}` is a {type(value).__name__}, not a {' or '.join(classes)}"
            cure = f"Write `from holdfast.spec import {classes[0]}` and `{name} = {classes[0]}(...)`"
            raise Unreadable(Problem(field=name, reason=reason, cure=cure))


def _raised_in_python(error: ValidationError) -> Iterator[Problem]:
    """Yield the problems that a model found within a Python file; the error's title names the model."""
    for model in (one for top in (TrainingJob, *KINDS.values()) for one in models_in(top)):
        if model.__name__ == error.title:
            yield from problems_in(error, model)
            return
    yield Problem(field="file", reason=f"raised a ValidationError of {error.title}", cure="Fix the values given to it")
