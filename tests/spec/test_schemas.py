"""The JSON Schemas of files agree with the models, and the examples name theirs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from holdfast.errors import BadFile
from holdfast.spec.files.load import load_cluster, load_job
from holdfast.spec.files.yaml_text import Document
from holdfast.spec.json_schemas import FOLDER, SCHEMAS, text_of
from holdfast.spec.policy import load_policy

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"# yaml-language-server: \$schema=(\S+)")
NO_FILES_OF_OURS = {"prefect.yaml", "compose.yaml", "alerts.yaml"}
YAML = [
    path
    for folder in ("examples", "deployments")
    for path in sorted((ROOT / folder).rglob("*.yaml"))
    if path.name not in NO_FILES_OF_OURS and not re.search("^(groups|apiVersion):", path.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_schema_is_the_one_of_its_model(kind: str) -> None:
    """`make docs` writes it anew."""
    Draft202012Validator.check_schema(SCHEMAS[kind]())
    assert (FOLDER / f"{kind}.json").read_text() == text_of(kind)


@pytest.mark.parametrize("path", YAML, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_example_fits_the_schema_that_it_names(path: Path) -> None:
    """An editor finds the schema beside the example."""
    found = MARK.match(path.read_text())
    assert found is not None
    schema = (path.parent / found[1]).resolve()
    assert schema.parent == FOLDER
    Draft202012Validator(json.loads(schema.read_text())).validate(Document(path.read_text()).data)


JOB = "name: a\nscript: b.py\n"
GOOD = {
    "job": [
        JOB,
        'name: a\nmodule: gpt.train\nnnodes: "2:4"\nnproc_per_node: auto\nhot_spares: auto\nwalltime: 1h30m\n',
        "name: a\ncommand: [run, 3, true]\nenv: {N: 4}\nnnodes: 3\nnproc_per_node: 8\n",
        JOB + "args: [--rate, 1e-3]\ntimeouts: {startup: 90s, final_checkpoint: 0, recovery: {migrate: 2d}}\nmax_recoveries: 3\n",
        JOB + "checkpoint: {interval: auto, bandwidth: 500MB, memory: {max_memory: 8GiB, max_overhead: 2%, when_late: pause}}\n",
        JOB + "cluster: {kind: ssh, hosts: ['gpu[1-4]', {name: x, failure_domain: r}], jump: me@gate:22}\n",
        JOB + "cluster: {nodes: 3}\n",
    ],
    "cluster": [
        "nodes: 2\nquarantine: {max_unavailable: 25%, approval_timeout: 0}\n",
        "kind: slurm\ntime: 2d\nexclusive: false\nlead_time: 1h\n",
        "kind: ssh\nhosts: [a]\nfailure_threshold: 2\npreemption_notice: {interval: 5s, lead_time: 2m}\n",
        "kind: local\nmaintenance: [{nodes: [node-1], start: 2026-12-01 22:00, duration: 2h, interval: 7d, lead_time: 1h}]\n",
        "burn_in: {duration: 30s, max_memory: 1GB, thresholds: {min_disk_bandwidth: 0, max_latency: 20ms}}\n",
    ],
    "policy": [
        "based_on: patient\nactions: [restart-workers, replace-node]\ntimeouts: {restart_workers: 5m}\nmax_recoveries: 3\n",
        "recommended_actions: {gpu-off-bus: evict}\ncorrelated: {min_share: 50%}\nrecurring: {times: 2, window: 1d}\n",
    ],
}
BAD = {
    "job": [
        "name: a\n",
        JOB + "command: [x]\n",
        JOB + "nnodes: 0\n",
        JOB + "nnodes: two\n",
        JOB + "nproc_per_node: many\n",
        JOB + "walltime: 90\n",
        JOB + "walltime: soon\n",
        JOB + "ntasks: 3\n",
        JOB + "checkpoint: {every: 3}\n",
        JOB + "checkpoint: {bandwidth: much}\n",
        JOB + "checkpoint: {memory: {max_overhead: 0.01}}\n",
        JOB + "env: [A]\n",
        JOB + "cluster: {kind: kubernetes}\n",
        "name: Bad Name\nscript: b\n",
    ],
    "cluster": [
        "kind: cloud\n",
        "kind: ssh\n",
        "nodes: 0\n",
        "kind: slurm\nnodes: 3\n",
        "quarantine: {max_unavailable: 0.5}\n",
        "plan: x\n",
    ],
    "policy": ["actions: restart\n", "based_on: bold\n", "deadlines: {}\n", "max_recoveries: -1\n", "timeouts: {restart_workers: 5}\n"],
}
LOAD = {"job": load_job, "cluster": load_cluster, "policy": load_policy}


def accepts(kind: str, text: str, folder: Path) -> tuple[bool, bool]:
    """Return whether the schema and the model accept *text*."""
    path, load = folder / "file.yaml", LOAD[kind]
    path.write_text(text)
    try:
        load(path)
        by_model = True
    except BadFile:
        by_model = False
    return Draft202012Validator(json.loads(text_of(kind))).is_valid(Document(text).data), by_model


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in GOOD.items() for text in texts])
def test_schema_and_model_accept_what_is_right(kind: str, text: str, tmp_path: Path) -> None:
    """Short forms, units, and zero without one."""
    assert accepts(kind, text, tmp_path) == (True, True)


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in BAD.items() for text in texts])
def test_schema_and_model_refuse_what_is_wrong(kind: str, text: str, tmp_path: Path) -> None:
    """The editor shows it before `holdfast validate` does."""
    assert accepts(kind, text, tmp_path) == (False, False)


def test_every_field_has_a_description_that_an_editor_shows() -> None:
    """It is the one of the reference."""

    def fields(node: Any) -> Any:
        if isinstance(node, dict):
            yield from (node.get("properties") or {}).items()
            for value in node.values():
                yield from fields(value)
        elif isinstance(node, list):
            for value in node:
                yield from fields(value)

    for kind, schema in SCHEMAS.items():
        assert [name for name, field in fields(schema()) if not {"description", "$ref"} & field.keys()] == [], kind
