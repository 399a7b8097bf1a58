"""What the jobs of a page are, for readers who have only the page: versions, the job file and the cluster, without secrets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml
from pydantic import ValidationError

import holdfast
from holdfast.detectors.nodes.gpu_readings import GpuReading
from holdfast.history import History, queries
from holdfast.history.health_samples import latest_health
from holdfast.history.models import Job
from holdfast.plurals import plural
from holdfast.spec import TrainingJob, cluster_of
from holdfast.spec.launch_options import fields_of_cluster, fields_of_job
from holdfast.support.redactor import Redactor

HIDDEN_VALUES: Final = frozenset({"env", "headers"})
"""Mappings whose values are hidden: reports are sent around, and secrets are in environments."""
MOST_CHARACTERS: Final = 20_000
MOST_HOSTS: Final = 16
MOST_VALUES: Final = 6
_NAMES: Final = {"holdfast": "Holdfast", "python": "Python", "torch": "PyTorch", "prefect": "Prefect", "cuda": "CUDA", "hip": "ROCm",
                 "driver": "NVIDIA driver", "git_commit": "git commit"}  # fmt: skip
_LOCAL: Final = re.compile(r"\+(cpu|cu\d+|rocm[\d.]+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Facts about a job, each with its name, and its files as YAML; of several jobs only the facts that they have in common."""

    facts: list[tuple[str, str]]
    job_file: str = ""
    cluster_file: str = ""


def configuration_of(history: History, jobs: Sequence[Job]) -> Configuration:
    """Return what is known about one job, or about several."""
    if len(jobs) == 1:
        return configuration(jobs[0], gpus_of(history, jobs[0]))
    redactor = Redactor()
    return Configuration(facts=[(name, redactor.text(text)) for name, text in _facts_of_several(jobs) if text])


def configuration(job: Job, gpus: str) -> Configuration:
    """Return what is known about *job*, which runs on these *gpus*."""
    redactor = Redactor()
    return Configuration(
        facts=[(name, redactor.text(text)) for name, text in _facts(job, gpus) if text],
        job_file=_yaml(redactor, _job_file(job.spec)),
        cluster_file=_yaml(redactor, _cluster_file(job.cluster)),
    )


def gpus_of(history: History, job: Job) -> str:
    """Return the most common GPUs and driver of the nodes of the newest generation, as the last health check found them."""
    newest = queries.newest_generation(history, job.id)
    nodes = newest.ranks if newest is not None else {}
    known = latest_health(history, str(job.cluster.get("name", ""))) if nodes else {}
    readings = [one.reading.gpus for node, one in known.items() if node in nodes and one.reading is not None]
    found = [
        f"{len(one.gpus)} × {one.gpus[0].name}, driver {one.driver_version}"  # noqa: RUF001 (times)
        for one in readings
        if isinstance(one, GpuReading) and isinstance(one.gpus, tuple) and one.gpus and isinstance(one.driver_version, str)
    ]
    return max(found, key=found.count, default="")


def _facts_of_several(jobs: Sequence[Job]) -> Iterator[tuple[str, str]]:
    """Yield clusters, policies and versions, each value with the number of its jobs if there are several."""
    yield "Jobs", f"{len(jobs):,}"
    yield "Clusters", _counted(_cluster(job) for job in jobs)
    yield "Policies", _counted(str(job.spec.get("policy") or "") for job in jobs)
    for name, called in _NAMES.items():
        yield called, _counted(str((job.provenance or {}).get(name) or "") for job in jobs)
    yield "Page by", f"Holdfast {holdfast.__version__}"


def _counted(values: Iterable[str]) -> str:
    known = Counter(value for value in values if value).most_common()
    shown = [value if len(known) == 1 else f"{value} ({plural(number, 'job')})" for value, number in known[:MOST_VALUES]]
    return ", ".join(shown) + (f" and {len(known) - MOST_VALUES} more" if len(known) > MOST_VALUES else "")


def _cluster(job: Job) -> str:
    name, kind = (str(job.cluster.get(key) or "") for key in ("name", "kind"))
    return f"{name} ({kind})" if name and kind and name != kind else name or kind


def _facts(job: Job, gpus: str) -> Iterator[tuple[str, str]]:
    known = job.provenance or {}
    yield "Command", command(job.spec)
    yield "Size", size(job.spec)
    yield "Folder", job.directory
    yield "Cluster", _cluster(job)
    yield "Policy", str(job.spec.get("policy") or "")
    yield from ((_NAMES.get(name, name), str(value)) for name, value in known.items())
    if "torch" in known and not {"cuda", "hip"} & known.keys():
        built = _LOCAL.search(str(known["torch"]))
        yield "CUDA", "none: this PyTorch is built for CPUs" if built is not None and built[1] == "cpu" else ""
    yield "GPUs", gpus
    yield "Page by", f"Holdfast {holdfast.__version__}"


def command(spec: Mapping[str, Any]) -> str:
    """Return what each rank runs; the job file may be of any version."""
    listed = {name: list(map(str, value)) if isinstance(value := spec.get(name), list) else [] for name in ("args", "command")}
    if spec.get("module"):
        return " ".join(["-m", str(spec["module"]), *listed["args"]])
    return " ".join([str(spec["script"]), *listed["args"]] if spec.get("script") else listed["command"])


def size(spec: Mapping[str, Any]) -> str:
    """Return how many nodes and ranks a job requests; empty if its file, of another version, does not say so."""
    nodes, ranks, spare = spec.get("nnodes", 1), spec.get("nproc_per_node", 1), spec.get("spare_nodes", 0)
    if not {"nnodes", "nproc_per_node"} & spec.keys():
        return ""
    text = f"{nodes} {'node' if nodes == 1 else 'nodes'} × {ranks} {'rank' if ranks == 1 else 'ranks'} on each"  # noqa: RUF001 (times)
    return text + (f", {spare} spare" if spare else "")


def _job_file(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the job's fields without those that have their default value; all of them if this version cannot read them."""
    try:
        return fields_of_job(TrainingJob.model_validate(spec))
    except ValidationError:
        return spec


def _cluster_file(cluster: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        found = fields_of_cluster(cluster_of(dict(cluster)))
    except ValidationError:
        return cluster
    hosts = found.get("hosts")
    if isinstance(hosts, list) and len(hosts) > MOST_HOSTS:
        found["hosts"] = [*hosts[:MOST_HOSTS], f"and {len(hosts) - MOST_HOSTS} more"]
    return found


def _yaml(redactor: Redactor, fields: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(redactor.value(_hidden(fields)), sort_keys=False, allow_unicode=True, width=100)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}\n# {len(text) - MOST_CHARACTERS:,} characters left out"


def _hidden(value: Any, name: str = "") -> Any:  # noqa: ANN401 (any JSON)
    if isinstance(value, Mapping):
        return {str(key): "(not shown)" if name in HIDDEN_VALUES else _hidden(inner, str(key)) for key, inner in value.items()}
    return [_hidden(one) for one in value] if isinstance(value, list) else value
