"""An unknown field names the field to use: by spelling, and by the words of torchrun, sbatch, Kubernetes and version 0.1."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from holdfast.spec import LocalCluster, SlurmCluster, SshCluster, TrainingJob
from holdfast.spec.files import synonyms
from holdfast.spec.files.problems import model_in, problems_in
from holdfast.spec.policy import PolicyFile, review_policy
from tests.mentions import mentions

RIGHT: dict[type[BaseModel], dict[str, Any]] = {
    TrainingJob: {"name": "a", "script": "b.py"},
    LocalCluster: {},
    SshCluster: {"kind": "ssh", "hosts": ["a"]},
    SlurmCluster: {"kind": "slurm"},
    PolicyFile: {},
}


def cure(model: type[BaseModel], word: str, part: str = "") -> str:
    """Return what is advised for the field *word* in *part* of a file that is valid without it."""
    given: Any = {word: 3}
    for name in reversed([one for one in part.split(".") if one]):
        items = name in {"maintenance", "hosts"}
        given = {name: [given] if items else given}
    with pytest.raises(ValidationError) as refused:
        model.model_validate({**RIGHT[model], **given})
    problem = next(one for one in problems_in(refused.value, model) if one.field.endswith(word) and one.reason == "unknown field")
    return problem.cure


def fields(model: type[BaseModel], at: str = "") -> Iterator[str]:
    """Yield the dotted names of all fields of a file."""
    for name, info in model.model_fields.items():
        yield at + name
        if (inner := model_in(info.annotation)) is not None:
            yield from fields(inner, f"{at}{name}.")


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ({"nproc-per-node": "nproc_per_node", "num_nodes": "nnodes", "max-restarts": "max_recoveries", "m": "module"}, TrainingJob),
        ({"ntasks-per-node": "nproc_per_node", "nodes": "nnodes", "time": "walltime", "chdir": "workdir", "export": "env"}, TrainingJob),
        ({"job-name": "name", "gpus-per-node": "nproc_per_node", "signal": "timeouts.termination_grace"}, TrainingJob),
        ({"replicas": "nnodes", "minReplicas": "nnodes", "backoffLimit": "max_recoveries", "workingDir": "workdir"}, TrainingJob),
        (
            {
                "terminationGracePeriodSeconds": "timeouts.termination_grace",
                "activeDeadlineSeconds": "walltime",
                "nodeSelector": "node_labels",
            },
            TrainingJob,
        ),
        ({"wanted": "nnodes", "ranks": "nproc_per_node", "environment": "env", "directory": "workdir", "limits": "timeouts"}, TrainingJob),
        ({"deadlines": "timeouts.recovery", "standbys": "hot_spares", "fruitless": "max_recoveries_without_progress"}, TrainingJob),
        ({"nodelist": "exclude", "jobid": "allocation", "share": "exclusive", "ahead": "lead_time"}, SlurmCluster),
        ({"domains": "failure_domains", "notice": "preemption_notice", "plan": "maintenance_file"}, LocalCluster),
        ({"misses": "failure_threshold"}, SshCluster),
        ({"frequent": "recurring", "common": "correlated", "deadlines": "timeouts", "budget": "max_recoveries"}, PolicyFile),
    ],
    ids=["torchrun", "sbatch", "sbatch-2", "kubernetes", "kubernetes-2", "0.1", "0.1-2", "slurm", "local", "ssh", "policy"],
)
def test_words_of_each_family_name_the_field(words: dict[str, str], model: type[BaseModel]) -> None:
    """Whoever writes them meant that field."""
    for word, field in words.items():
        assert f"`{field}" in cure(model, word), word
        assert cure(model, word).startswith("Use ")


@pytest.mark.parametrize("word", ["nodes", "ranks", "ntasks-per-node", "spare_nodes"])
@pytest.mark.parametrize("model", [SlurmCluster, SshCluster])
def test_what_a_job_says_is_no_field_of_its_cluster(word: str, model: type[BaseModel]) -> None:
    """The spelling of another field, such as `maintenance.nodes`, would mislead."""
    assert cure(model, word).startswith(synonyms.OF_THE_JOB)


@pytest.mark.parametrize("word", ["rdzv-backend", "master_addr", "node_rank", "tee", "image", "cpus-per-task"])
def test_what_needs_no_field_says_why(word: str) -> None:
    """Removing it is right, and it is explained."""
    assert cure(TrainingJob, word).startswith("Leave it out: ")


@pytest.mark.parametrize(
    ("word", "part", "field"),
    [("every", "checkpoint", "interval"), ("limit", "checkpoint.memory", "max_memory"), ("last_save", "timeouts", "final_checkpoint")],
)
def test_words_in_parts_of_a_job(word: str, part: str, field: str) -> None:
    """The field is named as it is written there."""
    assert cure(TrainingJob, word, part) == f"Use `{field}`"


def test_a_cure_names_a_field_that_this_kind_of_cluster_has() -> None:
    """Others have other fields, and what is the opposite is said to be."""
    assert mentions(cure(SshCluster, "domains"), "`failure_domains`", "`kind: ssh`", "`failure_domain`")
    for word in ("ahead", "replicas"):
        assert cure(SshCluster, word).startswith(("Remove it", "Did you mean", "Use `maintenance")), word
    assert "opposite" in cure(SlurmCluster, "share")
    assert mentions(cure(TrainingJob, "walltime", "timeouts"), "`walltime`", "top level", "`timeouts`")


def test_words_in_parts_of_a_cluster() -> None:
    """In lists of hosts and windows too."""
    assert cure(LocalCluster, "share", "quarantine") == "Use `max_unavailable`"
    assert cure(LocalCluster, "lasts", "maintenance") == "Use `duration`"
    assert cure(SshCluster, "domain", "hosts") == "Use `failure_domain`"


def test_a_field_of_another_part_or_another_file_is_sent_there() -> None:
    """Its place is named."""
    assert cure(TrainingJob, "keep") == "Use `checkpoint.keep`"
    assert cure(TrainingJob, "max_memory") == "Use `checkpoint.memory.max_memory`"
    assert "`cluster:`" in cure(TrainingJob, "partition")
    assert "`policy`" in cure(TrainingJob, "actions")


def test_spelling_is_still_corrected() -> None:
    """And without any likeness all fields are listed."""
    assert cure(TrainingJob, "nnode") == "Did you mean 'nnodes'?"
    assert cure(TrainingJob, "chekpoint") == "Did you mean 'checkpoint'?"
    assert mentions(cure(TrainingJob, "xyzzy"), *TrainingJob.model_fields)


@pytest.mark.parametrize(
    ("tables", "models"),
    [(synonyms.JOB, [TrainingJob]), (synonyms.CLUSTER, [LocalCluster, SshCluster, SlurmCluster]), (synonyms.POLICY, [PolicyFile])],
    ids=["job", "cluster", "policy"],
)
def test_every_synonym_names_a_field_that_there_is(tables: tuple[synonyms.Table, ...], models: list[type[BaseModel]]) -> None:
    """And is none itself, in every model that has the part."""
    known = {name for model in models for name in fields(model)}
    for table in tables:
        for part, words in table.items():
            for word, meant in words.items():
                assert word == synonyms.plain(word)
                if " " in meant:
                    named = re.match(r"`(\w+)", meant)
                    assert named[1] in known if named else meant.startswith("Leave it out: "), (part, word)
                    continue
                assert f"{part}.{meant}".removeprefix(".") in known or meant in known, (part, word)


def test_actions_and_kinds_of_version_0_1_are_named_in_policies(tmp_path: Any) -> None:
    """As values, not as fields."""
    path = tmp_path / "p.yaml"
    path.write_text("actions: [take-over, shrink]\nrecommended_actions: {loss-lost: monitor}\n")
    _, problems = review_policy(path)
    assert {one.field: one.cure for one in problems} == {
        "actions[0]": "Use 'replace-ranks'",
        "actions[1]": "Use 'shrink-restart'",
        "recommended_actions.loss-lost": "Use 'loss-diverged'",
    }
