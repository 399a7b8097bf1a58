"""The run form: its defaults are valid, bad input is refused in words, and what is filled in becomes the job that was meant."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect import Flow
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate
from pydantic import BaseModel

from holdfast.errors import BadFile, BadParameters, UnknownCluster
from holdfast.flows.cluster_health import cluster_health
from holdfast.flows.node_repair import node_repair
from holdfast.flows.run_form import train
from holdfast.flows.training_job import training_job
from holdfast.prefect_client.named_clusters import resolve_cluster
from holdfast.spec import CheckpointPlan, LocalCluster, SlurmCluster, SshCluster, TrainingJob, cluster_of
from holdfast.spec.files.units import format_size, parse_size
from holdfast.spec.form import advanced_schema, job_of, parameters_of
from holdfast.spec.job import MemoryPlan, SpecModel
from tests.mentions import mentions

FLOWS: list[Flow[..., Any]] = [train, training_job, cluster_health, node_repair]
GOOD = {"name": "gpt", "script": "/data/train.py"}


def schema_of(flow: Flow[..., Any]) -> dict[str, Any]:
    """Return the schema that Prefect's server holds the parameters of *flow* against."""
    return parameter_schema(flow).model_dump_for_openapi()


def held(value: Any, schema: dict[str, Any]) -> None:
    """Fail where *value* does not hold against *schema*."""
    assert validate(value, schema, preprocess=False) == []


def parts(model: type[BaseModel] = SpecModel) -> Iterator[type[BaseModel]]:
    """Yield all that a user writes, at whatever depth."""
    for one in model.__subclasses__():
        yield one
        yield from parts(one)


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)
def test_the_defaults_of_every_flow_are_valid_by_its_own_schema(flow: Flow[..., Any]) -> None:
    """As the form submits them: each field with the default that its schema names."""
    schema = schema_of(flow)
    defaults = {name: field["default"] for name, field in schema["properties"].items() if "default" in field}
    assert defaults.keys() | set(schema.get("required", [])) == set(inspect.signature(flow.fn).parameters)
    assert validate(defaults, schema, ignore_required=True) == []


@pytest.mark.parametrize("part", [pytest.param(part, id=part.__name__) for part in sorted(parts(), key=lambda part: part.__name__)])
def test_the_defaults_of_every_part_are_valid_by_its_own_schema(part: type[BaseModel]) -> None:
    """Amounts of memory are text there, and were numbers: no form that held a cluster could be submitted."""
    schema = part.model_json_schema()
    for name, field in schema["properties"].items():
        if "default" in field:
            held(field["default"], {**field, "$defs": schema.get("$defs", {})})
            assert part.model_fields[name].is_required() is False
    if not any(field.is_required() for field in part.model_fields.values()):
        held(part().model_dump(mode="json"), schema)


@given(st.integers(min_value=0, max_value=2**62))
def test_an_amount_of_memory_is_read_as_it_was_written(size: int) -> None:
    """Also one that is no whole number of any unit but bytes."""
    assert parse_size(format_size(size)) == size


def shown(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each field that the form shows, with its name."""
    for name, field in schema.get("properties", {}).items():
        yield name, field
        for choice in field.get("anyOf", []):
            yield from shown(choice)


def test_the_form_describes_each_field_and_requires_few() -> None:
    """Two are required; what most jobs leave alone is in one object that shows nothing unless it is asked to; no field is `None`."""
    schema = schema_of(train)
    assert schema["required"] == ["name", "script"]
    assert list(schema["properties"]) == ["name", "script", "args", "nnodes", "nproc_per_node", "workdir", "cluster", "advanced"]
    assert schema["properties"]["advanced"]["anyOf"][0]["properties"] == {}
    fields = list(shown(schema))
    assert len(fields) > 60
    assert [name for name, field in fields if not (field.get("title") and field.get("description"))] == []
    assert '"null"' not in json.dumps([field for _, field in fields if "then" not in field])
    assert [field["title"] for _, field in fields if field["title"] in {"MemoryPlan", "RecoveryTimeouts"}] == [], "no name of a class"
    assert [field["description"] for _, field in fields if "`" in field["description"]] == [], "the UI shows it verbatim"
    known = dict(fields)
    assert "pattern" not in known["max_overhead"], "nobody fills in a form by a regular expression"
    for name in ("env", "node_labels"):  # the UI has a JSON editor for them
        assert json.loads(known[name]["description"].partition("e.g. ")[2].partition(";")[0])
    assert known["progress"]["enum"] == ["auto", "steps", "none"]
    assert len(json.dumps(schema)) < 100_000


def test_the_form_has_every_field_of_a_job() -> None:
    """What a job file can say the form can say too."""
    named = {"name", "script", "module", "command", "args", "workdir", "nnodes"}
    own = {"min_nodes", "as_command", "standby"}
    assert advanced_schema()["then"]["properties"].keys() == TrainingJob.model_fields.keys() - named | own


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"script": "/data/train.py"}, "'name' is a required property"),
        ({"name": "gpt"}, "'script' is a required property"),
        ({**GOOD, "advanced": {"checkpoint": {"memory": {"max_overhead": "five"}}}}, "'a text such as 25%' was expected"),
        (
            {**GOOD, "name": "Bad Name"},
            "'name'. Failure reason: 'lowercase letters, digits and dashes, at most 63' was expected",
        ),
        ({**GOOD, "script": "train.py"}, "'script'. Failure reason: 'an absolute path, such as /data/train.py, or a command"),
        (
            {**GOOD, "script": "./train.py --steps 3"},
            "'an absolute path, such as /data/train.py, or a command",
        ),
        ({**GOOD, "script": " "}, "'an absolute path, such as /data/train.py, or a command"),
        ({**GOOD, "workdir": "gpt"}, "'workdir'. Failure reason: 'an absolute path, such as /data/gpt, or nothing' was expected"),
        ({**GOOD, "nnodes": 0}, "'nnodes'. Failure reason: 0 is less than the minimum of 1"),
        ({**GOOD, "cluster": ""}, "'cluster'"),
        ({**GOOD, "advanced": {"checkpnt": {}}}, "'advanced'. Failure reason: Additional properties are not allowed ('checkpnt' was"),
        ({**GOOD, "advanced": {"checkpoint": {"keep": 1}}}, "'advanced.checkpoint.keep'. Failure reason: 1 is less than the minimum of 2"),
        (
            {**GOOD, "advanced": {"progress": "maybe"}},
            "'advanced.progress'. Failure reason: 'maybe' is not one of ['auto', ",
        ),
        ({**GOOD, "advanced": {"command": ["x"]}}, "Additional properties are not allowed ('command' was unexpected)"),
    ],
)
def test_the_server_refuses_bad_input_field_by_field(given: dict[str, Any], words: str) -> None:
    """Before there is a run: these are the words of its 409."""
    with pytest.raises(ValidationError) as refused:
        validate(given, schema_of(train), raise_on_error=True)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "script", ["/data/train.py", "~/train.py --steps 3", "'/data/my runs/t.py'", "python train.py", "python -m gpt", "gpt"]
)
def test_a_script_is_an_absolute_path_or_a_command(script: str) -> None:
    """With its arguments, if one likes."""
    assert validate({**GOOD, "script": script}, schema_of(train)) == []


def filled_in(advanced: dict[str, Any] | None = None, **fields: Any) -> TrainingJob:
    """Return the job of a form in which no more than *fields* is filled in."""
    defaults = {"args": "", "nnodes": 1, "nproc_per_node": 1, "workdir": ""}
    return job_of({**GOOD, **defaults, **fields}, advanced or {})


def test_what_is_filled_in_becomes_the_job_that_was_meant() -> None:
    """A script with the folder that it is in, a command with the home folder, words as a shell splits them."""
    plain = filled_in(args="--data 'my text' -v", nnodes=2, nproc_per_node=8)
    assert (plain.script, plain.args, plain.workdir) == ("/data/train.py", ["--data", "my text", "-v"], "/data")
    assert (plain.max_nodes, plain.ranks_per_node) == (2, 8)
    module = filled_in(script="python -m gpt", args="--steps 3")
    assert (module.module, module.workdir, module.args) == ("gpt", "~", ["--steps", "3"])
    there = filled_in(script="python train.py", workdir="/data/gpt", advanced={"spare_nodes": 1, "checkpoint": {"interval": 10}})
    assert (there.workdir, there.spare_nodes, there.max_nodes, there.checkpoint.interval) == ("/data/gpt", 1, 1, 10)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"script": "python train.py"},
            ("script", "train.py", "relative", "workdir"),
        ),
        ({"script": "/data/train.py 'open"}, ("script", "/data/train.py 'open", "closing quotation")),
        ({"name": "Bad Name"}, ("name", "'Bad Name'", "lowercase letters, digits and dashes")),
        ({"advanced": {"checkpoint": {"keep": 1}}}, ("advanced.checkpoint.keep", 1, 2)),
        ({"advanced": {"min_nodes": 3}}, ("advanced.min_nodes", 3, "`nnodes`", 1)),
        ({"advanced": {"nodes": 3}}, ("advanced.nodes", "unknown field")),
        ({"nnodes": 0}, ("nnodes", 0)),
    ],
)
def test_the_worker_reports_problems_with_the_names_of_the_form(given: dict[str, Any], words: tuple[object, ...]) -> None:
    """What the server's schema cannot know, and what comes past it, as from a flow that calls this one."""
    with pytest.raises(BadParameters) as refused:
        filled_in(**given)
    assert mentions(str(refused.value), *words)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "script": "/data/gpt/train.py",
            "args": ["--data", "my text"],
            "nnodes": 2,
            "nproc_per_node": 8,
            "spare_nodes": 1,
            "node_labels": {"gpu": "h200"},
        },
        {
            "command": ["python", "-c", "print('a b')"],
            "env": {"A": "1"},
            "checkpoint": {"interval": "auto", "memory": {"max_memory": "8GB"}},
        },
        {"module": "gpt.train", "args": ["--steps", "3"], "nnodes": "2:4", "nproc_per_node": "gpu", "hot_spares": 2},
        {"command": ["python", "-m", "gpt.train", "--steps", "3"], "spare_nodes": 1},
        {"command": ["/data/gpt/train.py", "--data", "my text"]},
        {"command": ["./train.py"], "nproc_per_node": 2},
        {"command": ["python", "-m", "no module"]},
        {"module": "gpt", "args": ["-m", "a b", ""]},
    ],
)
def test_a_job_can_be_written_as_the_form_takes_it(fields: dict[str, Any]) -> None:
    """For `run_deployment` in a flow of one's own: the deployment then runs the very job."""
    job = TrainingJob.model_validate({"name": "gpt", "workdir": "/data/gpt", **fields})
    given = json.loads(json.dumps(parameters_of(job, LocalCluster(nodes=3), standby=True)))
    assert validate(given, schema_of(train)) == []
    assert resolve_cluster(given.pop("cluster")) == LocalCluster(nodes=3)
    advanced = given.pop("advanced")
    assert advanced.pop("standby") is True
    assert job_of(given, advanced) == job


def test_parameters_come_back_as_they_were_sent() -> None:
    """Prefect keeps them as JSON, and hands them to the flow again on Retry."""
    given = {**GOOD, "nnodes": 2, "cluster": "local:2", "advanced": {"spare_nodes": 1}}
    defaults = {"args": "", "nproc_per_node": 1, "workdir": ""}
    first = train.validate_parameters(given)
    assert first == {**defaults, **given}
    assert train.validate_parameters(json.loads(json.dumps(train.serialize_parameters(first)))) == first
    plan, cluster = CheckpointPlan(memory=MemoryPlan(max_memory=8 * 10**9)), LocalCluster(nodes=2)
    job = TrainingJob(name="a", script="/a.py", checkpoint=plan)
    stored = json.loads(json.dumps(training_job.serialize_parameters({"job": job, "cluster": cluster, "standby": False})))
    again = training_job.validate_parameters(stored)
    assert again["job"] == job
    assert resolve_cluster(again["cluster"]) == cluster


# -- the cluster ------------------------------------------------------------------------------------------------------


def test_a_cluster_is_found_by_name(holdfast_home: Path, tmp_path: Path) -> None:
    """This machine, a file, a file in the worker's folder of clusters, YAML and fields; Prefect is not asked for these."""
    (tmp_path / "lab.yaml").write_text("kind: ssh\nname: lab\nhosts: [a, b]\nkey: keys/id\n")
    (holdfast_home / "clusters.d").mkdir()
    (holdfast_home / "clusters.d" / "rack.yaml").write_text("kind: slurm\nname: rack\n")
    assert resolve_cluster("local") == LocalCluster()
    assert resolve_cluster("local", nodes=9) == LocalCluster(nodes=9)
    assert resolve_cluster("local:2") == LocalCluster(nodes=2)
    lab = resolve_cluster(str(tmp_path / "lab.yaml"))
    assert isinstance(lab, SshCluster)
    assert lab.key == str(tmp_path / "keys/id")
    assert isinstance(resolve_cluster("rack"), SlurmCluster)
    assert resolve_cluster('{"kind": "local", "nodes": 3}') == resolve_cluster({"kind": "local", "nodes": 3}) == LocalCluster(nodes=3)
    assert resolve_cluster(LocalCluster(nodes=7)) == LocalCluster(nodes=7)
    written = json.loads(json.dumps(lab.model_dump(mode="json")))
    assert resolve_cluster(written) == cluster_of(written)


@pytest.mark.parametrize(
    ("said", "error", "words"),
    [
        ("lab.yaml", UnknownCluster, ("'lab.yaml'", "relative path")),
        ("local:0", BadFile, ("nodes", 0, 1)),
        ("/nowhere/lab.yaml", BadFile, ("/nowhere/lab.yaml", "1 problem", "does not exist")),
        ({"kind": "lcal"}, BadFile, ("'lcal'", "'local'")),
        ({"kind": "local", "nods": 3}, BadFile, ("nods", "'nodes'")),
        ("{foo", BadFile, ("YAML",)),
    ],
)
def test_an_unusable_cluster_is_refused_with_a_message(said: Any, error: type[Exception], words: tuple[object, ...]) -> None:
    """Before any node is looked at."""
    with pytest.raises(error) as refused:
        resolve_cluster(said)
    assert mentions(str(refused.value), *words)
