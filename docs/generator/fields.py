"""The pages of the files that a user writes: job, cluster, policy and scenario file, from their models."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.generator.markdown import anchor, default, named, page, table
from holdfast.spec.files.problems import model_in

EXAMPLE: Final = Path(__file__).parents[2] / "examples/elastic.yaml"
SCENARIO: Final = Path(__file__).parents[2] / "examples/simulation/pretraining-16k.yaml"
HEADINGS: Final = ("Field", "Type", "Default", "Meaning")
UNITS: Final = "Durations are written `90s`, `5m`, `1h30m` or `2d`, sizes `8GB` or `512MiB`, percentages `25%`."

SCHEMA: Final = (
    "Editors that read YAML schemas complete and check the fields if the file begins with the line "
    "`# yaml-language-server: $schema=SCHEMA`; SCHEMA is the path or address of `{file}`, which is installed in `holdfast/spec/schemas`."
)


def job_file_page() -> str:
    """List every field of a job file."""
    from holdfast.spec import TrainingJob  # noqa: PLC0415 (the other pages do not need it)

    return page(
        "# Job file\n",
        f"{TrainingJob.__doc__}\n",
        "A job file is YAML, or Python that assigns a `holdfast.TrainingJob` to `job`. `holdfast validate FILE` checks it.",
        f"{UNITS}\n",
        f"{SCHEMA.format(file='job.json')} `holdfast init` writes that line.\n",
        f"```yaml\n{EXAMPLE.read_text()}```\n",
        "## Top level\n",
        _fields(TrainingJob, ""),
        *_sections([TrainingJob]),
    )


def policy_file_page() -> str:
    """List every field of a policy file."""
    from holdfast.spec.policy import PolicyFile  # noqa: PLC0415 (the other pages do not need it)

    return page(
        "# Policy file\n",
        f"{PolicyFile.__doc__}\n",
        f"{UNITS} `holdfast policy check FILE` checks a policy file.\n",
        f"{SCHEMA.format(file='policy.json')}\n",
        "## Top level\n",
        _fields(PolicyFile, ""),
        *_sections([PolicyFile]),
    )


def scenario_file_page() -> str:
    """List every field of a scenario file."""
    from holdfast.simulator.scenario import Scenario  # noqa: PLC0415 (the other pages do not need it)

    return page(
        "# Scenario file\n",
        f"{Scenario.__doc__}\n",
        f"{UNITS} `holdfast simulate FILE` checks and simulates a scenario; [Plan with the simulator](../how-to/simulate.md) shows how.\n",
        f"{SCHEMA.format(file='scenario.json')}\n",
        f"```yaml\n{SCENARIO.read_text()}```\n",
        "## Top level\n",
        _fields(Scenario, ""),
        *_sections([Scenario]),
    )


def cluster_file_page() -> str:
    """List every field of a cluster file: those of all kinds of clusters once, then those of each kind."""
    from holdfast.spec import LocalCluster, SlurmCluster, SshCluster  # noqa: PLC0415 (the other pages do not need it)

    kinds: dict[str, type[BaseModel]] = {"local": LocalCluster, "ssh": SshCluster, "slurm": SlurmCluster}
    shared = {
        name
        for name, field in LocalCluster.model_fields.items()
        if all(_equal(field, other.model_fields.get(name)) for other in kinds.values())
    }
    parts = [
        "# Cluster file\n",
        "A cluster is given by `--cluster FILE`, or by `cluster` in a job file.",
        "`kind` selects its type; each type has the common fields and its own. `holdfast validate FILE` checks a cluster file.",
        f"{UNITS}\n",
        f"{SCHEMA.format(file='cluster.json')}\n",
        "## Fields of every cluster\n",
        _fields(LocalCluster, "", only=shared),
    ]
    for kind, model in kinds.items():
        parts += [f"## `kind: {kind}`\n", f"{model.__doc__}\n", _fields(model, "", only=set(model.model_fields) - shared)]
    return page(*parts, *_sections(list(kinds.values())))


def _equal(one: FieldInfo, other: FieldInfo | None) -> bool:
    return other is not None and (one.annotation, one.description) == (other.annotation, other.description)


def _sections(tops: Sequence[type[BaseModel]]) -> Iterator[str]:
    """Yield a section for each model below *tops*; one that several of them have at the same place is shown once."""
    seen: dict[tuple[str, type[BaseModel]], None] = {}
    for top in tops:
        for path, model in _below(top, ""):
            seen.setdefault((path, model))
    for path, model in seen:
        yield f"## `{path}`\n"
        yield f"{(model.__doc__ or '').strip()}\n"
        yield _fields(model, path)


def _below(top: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in top.model_fields.items():
        if (inner := model_in(field.annotation)) is not None:
            below = f"{path}.{name}".lstrip(".")
            yield below, inner
            yield from _below(inner, below)


def _fields(model: type[BaseModel], path: str, *, only: set[str] | None = None) -> str:
    """Return the table of the fields of *model*, which stands at *path* of its file."""
    rows = [
        (f"`{name}`", _type(field, f"{path}.{name}".lstrip(".")), default(field), field.description or "")
        for name, field in _named(model.model_fields)
        if only is None or name in only
    ]
    return table(HEADINGS, *rows)


def _named(fields: Mapping[str, FieldInfo]) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in fields.items():
        yield field.alias or name, field


def _type(field: FieldInfo, path: str) -> str:
    """Return the type of a field; one that holds a model has a link to its section."""
    if model_in(field.annotation) is None:
        return named(field.annotation, field.metadata)
    many = any(typing.get_origin(kind) in {list, tuple, dict} for kind in _parts(field.annotation))
    return f"{'list of ' if many else ''}[`{path}`](#{anchor(path)})"


def _parts(annotation: Any) -> tuple[Any, ...]:  # noqa: ANN401 (any annotation)
    return (annotation, *typing.get_args(annotation))
