"""Resolve the cluster parameter of a flow: this machine, a cluster file on the worker, or a cluster saved in Prefect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.exceptions import ObjectNotFound
from pydantic import Field, SkipValidation, WithJsonSchema

from holdfast import paths
from holdfast.errors import UnknownCluster
from holdfast.spec import Cluster, LocalCluster, load_cluster
from holdfast.spec.files.load import YAML, parse_cluster

LOCAL: Final = re.compile(r"local(?::([0-9]{1,4}))?")
VARIABLE: Final = "variable:"
BLOCK: Final = "block:"
SITE: Final = Path("/etc/holdfast/clusters")
BLOCK_TYPE: Final = "secret"
"""Slug of the block type that holds clusters: the encrypted one."""


ClusterParameter = Annotated[
    Cluster | str | dict[str, Any],
    SkipValidation,  # `resolve_cluster` reports errors in plain text
    WithJsonSchema({"anyOf": [{"type": "string", "title": "Name", "minLength": 1}, {"type": "object", "title": "Fields"}]}),
    Field(json_schema_extra={"title": "Cluster", "examples": ["local", "local:3", "gpu-lab", "/data/clusters/lab.yaml"]}),
]
"""The cluster parameter of a flow: a name in the UI; over the API also an object with the fields of a cluster file."""


def resolve_cluster(given: Cluster | str | Mapping[str, Any], *, nodes: int = 1) -> Cluster:
    """Return the cluster that a flow parameter names or describes.

    `local` without a number has at least *nodes* nodes. Raise `UnknownCluster`, which lists the known ones, or `BadFile`.
    """
    if isinstance(given, Mapping):
        return parse_cluster(given, "cluster")
    if not isinstance(given, str):
        return given
    given = given.strip()
    if given.startswith("{"):
        return parse_cluster(given, "cluster")
    if found := LOCAL.fullmatch(given):
        return parse_cluster({"nodes": int(found[1])}, given) if found[1] else LocalCluster(nodes=max(nodes, LocalCluster().nodes))
    if "/" in given or Path(given).suffix.lower() in {*YAML, ".py"}:
        path = Path(given).expanduser()
        if not path.is_absolute():
            raise UnknownCluster(given, "it is a relative path, and a flow run has no folder of its own", "Write its absolute path")
        return load_cluster(path)
    return _saved(given)


def cluster_name(given: Cluster | str | Mapping[str, Any]) -> str:
    """Return the name of the cluster in the names of flow runs and task runs."""
    if isinstance(given, str):
        return given
    return str(given.get("name", "local")) if isinstance(given, Mapping) else given.name


def folders() -> tuple[Path, ...]:
    """Return the folders that are searched for cluster files by name, in order."""
    return paths.home() / "clusters.d", SITE


def _saved(given: str) -> Cluster:
    """Return the cluster saved under a name: in a file, else in a Prefect variable, else in a Prefect block."""
    kind, name = next(((kind, given.removeprefix(kind)) for kind in (VARIABLE, BLOCK) if given.startswith(kind)), ("", given))
    if not kind:
        for file in (folder / f"{name}.yaml" for folder in folders()):
            if file.is_file():
                return load_cluster(file)
    with get_client(sync_client=True) as client:
        if kind != BLOCK and (variable := client.read_variable_by_name(name)) is not None:
            return parse_cluster(variable.value, VARIABLE + name)
        if kind != VARIABLE and (saved := _block(client, name)) is not None:
            return parse_cluster(saved, BLOCK + name)
        known = ["local", *_known(client)]
    cure = f'Known here, blocks aside: {", ".join(known)}. Save others: `prefect variable set NAME "$(cat FILE)"`'
    raise UnknownCluster(given, "", cure)


def _block(client: SyncPrefectClient, name: str) -> Any:  # noqa: ANN401 (JSON, or text)
    """Return the value of the block *name*; None if there is none. No other secret is read."""
    try:
        return client.read_block_document_by_name(name, BLOCK_TYPE, include_secrets=True).data.get("value")
    except ObjectNotFound:
        return None


def _known(client: SyncPrefectClient) -> Iterator[str]:
    """Yield the names of the saved clusters, except blocks."""
    for folder in folders():
        yield from sorted(file.stem for file in folder.glob("*.yaml"))
    yield from sorted(one.name for one in client.read_variables() if _looks_like_cluster(one.value))


def _looks_like_cluster(value: object) -> bool:
    """Return whether *value* looks like a cluster, as YAML or as fields."""
    if isinstance(value, str):
        return re.search(r"^\s*\"?kind\"?:", value, re.MULTILINE) is not None
    return isinstance(value, Mapping) and "kind" in value
