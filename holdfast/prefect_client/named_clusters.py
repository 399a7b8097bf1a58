"""Find a cluster by what a person says of it in the run form: this machine, a file on the worker, or what is saved in Prefect."""

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
from holdfast.spec.load import YAML, parse_cluster

LOCAL: Final = re.compile(r"local(?::([0-9]{1,4}))?")
VARIABLE: Final = "variable:"
BLOCK: Final = "block:"
SITE: Final = Path("/etc/holdfast/clusters")
SLUG: Final = "secret"
"""Of the type of block that holds clusters: the one that Prefect encrypts, the same that holds keys."""


Choice = Annotated[
    Cluster | str | dict[str, Any],
    SkipValidation,  # `chosen` says in words what is wrong with it
    WithJsonSchema({"anyOf": [{"type": "string", "title": "Name", "minLength": 1}, {"type": "object", "title": "Fields"}]}),
    Field(json_schema_extra={"title": "Cluster", "examples": ["local", "local:3", "gpu-lab", "/data/clusters/lab.yaml"]}),
]
"""What a flow takes as its cluster: in the UI a name, over the API also an object with the fields of a cluster file."""


def chosen(said: Cluster | str | Mapping[str, Any], *, nodes: int = 1) -> Cluster:
    """Return the cluster that a flow was given: itself, its fields, or a name for it.

    `local` alone has as many nodes as it takes for *nodes*. Raise `UnknownCluster` with the known ones, or `BadFile`.
    """
    if isinstance(said, Mapping):
        return parse_cluster(said, "cluster")
    if not isinstance(said, str):
        return said
    said = said.strip()
    if said.startswith("{"):
        return parse_cluster(said, "cluster")
    if found := LOCAL.fullmatch(said):
        return parse_cluster({"nodes": int(found[1])}, said) if found[1] else LocalCluster(nodes=max(nodes, LocalCluster().nodes))
    if "/" in said or Path(said).suffix.lower() in {*YAML, ".py"}:
        return load_cluster(_absolute(said))
    return _saved(said)


def name_of(said: Cluster | str | Mapping[str, Any]) -> str:
    """Return what a flow run calls the cluster that it was given."""
    if isinstance(said, str):
        return said
    return str(said.get("name", "local")) if isinstance(said, Mapping) else said.name


def folders() -> tuple[Path, ...]:
    """Return where cluster files lie that are found by their names, the first one first."""
    return paths.home() / "clusters.d", SITE


def _absolute(said: str) -> Path:
    path = Path(said).expanduser()
    if not path.is_absolute():
        raise UnknownCluster(said, "it is a relative path, and a flow run has no folder of its own", "Write its absolute path")
    return path


def _saved(said: str) -> Cluster:
    """Return the cluster saved under a name: in a file, then in a variable of Prefect's, then in a block."""
    kind, name = next(((kind, said.removeprefix(kind)) for kind in (VARIABLE, BLOCK) if said.startswith(kind)), ("", said))
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
    raise UnknownCluster(said, "", cure)


def _block(client: SyncPrefectClient, name: str) -> Any:  # noqa: ANN401 (JSON, or text)
    """Return what the block of that name holds; nothing where there is none. No other secret is read."""
    try:
        return client.read_block_document_by_name(name, SLUG, include_secrets=True).data.get("value")
    except ObjectNotFound:
        return None


def _known(client: SyncPrefectClient) -> Iterator[str]:
    """Yield the names under which there are clusters."""
    for folder in folders():
        yield from sorted(file.stem for file in folder.glob("*.yaml"))
    yield from sorted(one.name for one in client.read_variables() if _may_be_one(one.value))


def _may_be_one(value: object) -> bool:
    """Tell whether *value* looks like a cluster, as YAML or as fields."""
    if isinstance(value, str):
        return re.search(r"^\s*\"?kind\"?:", value, re.MULTILINE) is not None
    return isinstance(value, Mapping) and "kind" in value
