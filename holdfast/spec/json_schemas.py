"""JSON Schemas of job, cluster, policy and scenario files, with which editors complete and check them; made from the models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from holdfast.spec.cluster import Cluster, LocalCluster
from holdfast.spec.files.units import DURATION_EXAMPLES, SIZE_EXAMPLES
from holdfast.spec.files.yaml_text import AS_TEXT
from holdfast.spec.job import TrainingJob

FOLDER: Final = Path(__file__).parent / "schemas"
DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
DURATION_PATTERN: Final = r"^\s*((\d+(\.\d+)?\s*(ms|[smhd])\s*)+|0+(\.0+)?)$"
SIZE_PATTERN: Final = r"^\s*\d+(\.\d+)?\s*([kKmMgGtT]?[iI]?[bB])?\s*$"
SHORT: Final = frozenset({"hosts", "jump"})
"""Fields of a cluster whose items may be text: a name, or ``user@host:port``."""
Schema = dict[str, Any]


def job_schema() -> Schema:
    """Return the schema of a job file, which may have a cluster in it."""
    schema = TrainingJob.model_json_schema()
    cluster = cluster_schema()
    schema["$defs"] |= cluster.pop("$defs")
    for part in ("$schema", "title"):
        cluster.pop(part)
    schema["properties"]["cluster"] = {**cluster, "description": "Cluster that the job runs on; a file with `--cluster` goes before it."}
    return _finished(schema, "Holdfast job file") | {"oneOf": [{"required": [name]} for name in ("script", "module", "command")]}


def cluster_schema() -> Schema:
    """Return the schema of a cluster file; one without `kind` is of this machine."""
    schema = TypeAdapter(Cluster).json_schema(schema_generator=_Untagged)
    kinds = schema.pop("oneOf")
    local = {"$ref": f"#/$defs/{LocalCluster.__name__}"}
    chosen: Schema = {"if": {"required": ["kind"]}, "then": {"oneOf": kinds}, "else": local}
    return _finished({"type": "object", **chosen, "$defs": schema["$defs"]}, "Holdfast cluster file")


def policy_schema() -> Schema:
    """Return the schema of a policy file."""
    from holdfast.spec.policy import PolicyFile  # noqa: PLC0415 (it imports the whole catalogue)

    return _finished(PolicyFile.model_json_schema(), "Holdfast policy file")


def scenario_schema() -> Schema:
    """Return the schema of a scenario file."""
    from holdfast.simulator.scenario import Scenario  # noqa: PLC0415 (it imports the whole catalogue)

    return _finished(Scenario.model_json_schema(), "Holdfast scenario file")


class _Untagged(GenerateJsonSchema):
    """Leaves out `discriminator`, which is no keyword of JSON Schema."""

    def tagged_union_schema(self, schema: Any) -> Schema:  # noqa: ANN401 (pydantic's own schema)
        found = super().tagged_union_schema(schema)
        found.pop("discriminator", None)
        return found


def _finished(schema: Schema, title: str) -> Schema:
    return {"$schema": DIALECT, **_as_files(schema), "title": title}


def _as_files(node: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return *node* with what only files may do: zero and bytes without a unit, numbers as text, and short forms of hosts."""
    if isinstance(node, list):
        return [_as_files(one) for one in node]
    if not isinstance(node, dict):
        return node
    found = {name: _as_files(value) for name, value in node.items()}
    if found.get("examples") == DURATION_EXAMPLES and found.get("type") == "string":
        found |= {"type": ["string", "integer"], "pattern": DURATION_PATTERN, "minimum": 0, "maximum": 0}
    elif found.get("examples") == SIZE_EXAMPLES and found.get("type") == "string":
        found |= {"type": ["string", "integer"], "pattern": SIZE_PATTERN, "minimum": 0}
    for name, field in (found.get("properties") or {}).items():
        if name in AS_TEXT and isinstance(field, dict):
            _accept_numbers(field)
        elif name in SHORT and isinstance(field, dict):
            _accept_short_forms(field, whole=name != "hosts")
    return found


def _accept_numbers(field: Schema) -> None:
    for part in (field, *field.get("anyOf", [])):
        for items in (part.get("items"), part.get("additionalProperties")):
            if isinstance(items, dict) and items.get("type") == "string":
                items["type"] = ["string", "number", "boolean"]


def _accept_short_forms(field: Schema, *, whole: bool) -> None:
    """Accept a text for each item, and with *whole* for all of them."""
    for part in (field, *field.get("anyOf", [])):
        if part.get("type") == "array":
            part["items"] = {"anyOf": [part["items"], {"type": "string"}]}
    if whole:
        choices = field.pop("anyOf", None) or [{name: field.pop(name) for name in ("type", "items") if name in field}]
        field["anyOf"] = [*choices, {"type": "string"}]


SCHEMAS: Final = {"job": job_schema, "cluster": cluster_schema, "policy": policy_schema, "scenario": scenario_schema}
"""What makes the schema of each kind of file; it is kept in `schemas/KIND.json`."""


def text_of(kind: str) -> str:
    """Return the schema of a *kind* of file as it is written to its file."""
    return json.dumps(SCHEMAS[kind](), indent=1, ensure_ascii=False) + "\n"
