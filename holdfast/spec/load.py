"""Read job and cluster files: YAML, or Python that sets ``job`` and ``cluster``. Only `BadFile` leaves this module."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from holdfast.errors import BadFile, Problem
from holdfast.spec.check import checks
from holdfast.spec.cluster import Cluster, LocalCluster
from holdfast.spec.job import TrainingJob, contradictions
from holdfast.spec.problems import dotted, nearest, path_of, problems_in, shown
from holdfast.spec.python_file import values_of
from holdfast.spec.yaml_text import MOST_BYTES, Document, Unreadable

YAML: Final = frozenset({".yaml", ".yml", ".json"})
KINDS: Final = ("local",)
"""Kinds of clusters there are."""

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass
class Draft:
    """What a file says so far: its parts where they could be read, and all that is wrong."""

    job: TrainingJob | None = None
    cluster: Cluster | None = None
    problems: list[Problem] = field(default_factory=list)


def load_job(path: str | os.PathLike[str]) -> tuple[TrainingJob, Cluster | None]:
    """Return the job in the file at *path*, and the cluster if the file names one. Its folders become absolute."""
    draft = _job_draft(Path(path))
    if draft.problems or draft.job is None:
        raise BadFile(shown(str(path)), tuple(draft.problems))
    return draft.job, draft.cluster


def load_cluster(path: str | os.PathLike[str]) -> Cluster:
    """Return the cluster in the file at *path*."""
    draft = _cluster_draft(Path(path))
    if draft.problems or draft.cluster is None:
        raise BadFile(shown(str(path)), tuple(draft.problems))
    return draft.cluster


def review(job_file: str | os.PathLike[str], cluster_file: str | os.PathLike[str] | None = None) -> Draft:
    """Read a job file, check it against this machine, and tell all that is wrong. A cluster file goes before the job's own cluster."""
    draft = _job_draft(Path(job_file))
    if cluster_file is not None:
        other = _cluster_draft(Path(cluster_file))
        draft.cluster = other.cluster
        draft.problems += other.problems
    if draft.job is not None:
        told = {problem.field for problem in draft.problems}
        draft.problems += [problem for problem in checks(draft.job, draft.cluster or LocalCluster()) if problem.field not in told]
    return draft


def _job_draft(path: Path) -> Draft:
    draft = Draft()
    try:
        if path.suffix.lower() == ".py":
            found, lines = values_of(path, _text(path), ("job", "cluster")), None
            _expect_models(found)
            draft.job, draft.cluster = found["job"], found["cluster"]
        else:
            lines = _document(path)
            fields = _mapping(lines)
            if "cluster" in fields:
                draft.cluster = _model(LocalCluster, fields.pop("cluster"), draft.problems, lines, "cluster")
            draft.job = _model(TrainingJob, fields, draft.problems, lines)
    except Unreadable as error:
        draft.problems.append(error.problem)
    except ValidationError as error:
        draft.problems += _raised_in_python(error)
    return _at_home(draft, path)


def _cluster_draft(path: Path) -> Draft:
    draft = Draft()
    try:
        if path.suffix.lower() == ".py":
            found = values_of(path, _text(path), ("cluster",))
            _expect_models(found)
            draft.cluster = found["cluster"]
        else:
            document = _document(path)
            draft.cluster = _model(LocalCluster, _mapping(document), draft.problems, document)
    except Unreadable as error:
        draft.problems.append(error.problem)
    except ValidationError as error:
        draft.problems += _raised_in_python(error)
    return _at_home(draft, path)


def _at_home(draft: Draft, path: Path) -> Draft:
    """Make the folders in *draft* absolute, as seen from the file's own folder."""
    home = path.absolute().parent
    if draft.job is not None:
        directory = Path(home, Path(draft.job.directory).expanduser())
        plan = draft.job.checkpoint
        if plan.directory is not None:
            plan = plan.model_copy(update={"directory": str(Path(directory, Path(plan.directory).expanduser()))})
        draft.job = draft.job.model_copy(update={"directory": os.path.normpath(directory), "checkpoint": plan})
    if draft.cluster is not None and draft.cluster.directory is not None:
        draft.cluster = draft.cluster.model_copy(update={"directory": str(Path(home, Path(draft.cluster.directory).expanduser()))})
    return draft


def _model(model: type[ModelT], fields: object, problems: list[Problem], document: Document, under: str = "") -> ModelT | None:
    """Return *fields* as a *model*. What is wrong joins *problems*; then the model is made of the rest, so that it can be checked too."""
    if unknown := _unknown_kind(model, fields):
        problems.append(_placed(unknown, document, under))
        return None
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        told = problems_in(error, model)
        if model is TrainingJob and isinstance(fields, Mapping) and error.errors()[0]["type"] != "contradiction":
            meant = {name for name in ("script", "command") if any(f"'{name}'" in problem.cure for problem in told)}
            told += [problem for problem in contradictions(dict(fields)) if not (problem.field == "script" and meant)]
        problems += [_placed(problem, document, under) for problem in told]
        return _rest(model, fields, error)


def _unknown_kind(model: type[BaseModel], fields: object) -> Problem | None:
    kind = fields.get("kind", "local") if isinstance(fields, Mapping) else "local"
    if model is not LocalCluster or not isinstance(kind, str) or kind in KINDS:
        return None
    cure = nearest(kind, list(KINDS)) or f"This version knows: {', '.join(KINDS)}"
    return Problem(field="kind", reason=f"no kind of cluster is called {shown(repr(kind))}", cure=cure)


def _placed(problem: Problem, document: Document, under: str) -> Problem:
    """Return *problem* with the line it is on."""
    name = ".".join(part for part in (under, problem.field) if part and part != "file") or "file"
    line = next((number for path, number in document.lines.items() if dotted(path) == name), None)
    reason = problem.reason if line is None else f"line {line}: {problem.reason}"
    return Problem(field=name, reason=reason, cure=problem.cure)


def _rest(model: type[ModelT], fields: object, error: ValidationError) -> ModelT | None:
    """Return the *model* without the fields that *error* refused, or None when that is none."""
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
    """Return *fields* without those at a *refused* path; a list goes as a whole."""
    kept = {}
    for name, value in fields.items():
        path = (*at, name)
        if path in refused or (isinstance(value, list) and any(bad[: len(path)] == path for bad in refused)):
            continue
        kept[name] = _without(value, refused, path) if isinstance(value, Mapping) else value
    return kept


def _mapping(document: Document) -> dict[str, Any]:
    if document.data is None:
        raise Unreadable(Problem(field="file", reason="is empty", cure="Write at least `name:` and `script:`; examples/ has job files"))
    if not isinstance(document.data, dict):
        raise Unreadable(Problem(field="file", reason="holds no fields", cure="Write one `name: value` a line; examples/ has job files"))
    return document.data


def _document(path: Path) -> Document:
    text = _text(path)
    if path.suffix.lower() not in YAML:
        cure = "Name it .yaml (fields) or .py (a module that sets `job`)"
        raise Unreadable(Problem(field="file", reason=f"the ending '{shown(path.suffix)}' says neither YAML nor Python", cure=cure))
    return Document(text)


def _text(path: Path) -> str:
    """Return the text of the file at *path*; raise `Unreadable` for anything that has none."""
    try:
        data = None
        if stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for ever
            with path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        near = nearest(path.name, _neighbours(path)) or "Check the path"
        raise Unreadable(Problem(field="file", reason="does not exist", cure=near)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise Unreadable(Problem(field="file", reason=f"cannot be read: {reason}", cure="Name a file that you may read")) from None
    if data is None:
        raise Unreadable(Problem(field="file", reason="is not an ordinary file", cure="Name a job file (.yaml or .py)"))
    if len(data) > MOST_BYTES:
        raise Unreadable(
            Problem(field="file", reason=f"is larger than {MOST_BYTES // 1024} KiB", cure="This is hardly a job file; check the path")
        )
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
    for name, model in (("job", TrainingJob), ("cluster", LocalCluster)):
        value = found.get(name)
        if name in found and not isinstance(value, model) and not (name == "cluster" and "job" in found and value is None):
            reason = f"`{name}` is a {type(value).__name__}, not a {model.__name__}"
            cure = f"Write `from holdfast.spec import {model.__name__}` and `{name} = {model.__name__}(...)`"
            raise Unreadable(Problem(field=name, reason=reason, cure=cure))


def _raised_in_python(error: ValidationError) -> Iterator[Problem]:
    """Tell what a model refused inside a Python file; which model it was stands in the error's title."""
    for model in (TrainingJob, LocalCluster, *(type(info.default) for info in TrainingJob.model_fields.values())):
        if isinstance(model, type) and issubclass(model, BaseModel) and model.__name__ == error.title:
            yield from problems_in(error, model)
            return
    yield Problem(field="file", reason=f"raised a ValidationError of {error.title}", cure="Mend the values given to it")
