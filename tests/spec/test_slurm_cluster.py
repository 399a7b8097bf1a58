"""Clusters whose nodes Slurm lends, as a user writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cluster.slurm.commands import SbatchRequest
from holdfast.errors import BadFile
from holdfast.spec import SlurmCluster, cluster_of, load_cluster


def cluster(tmp_path: Path, text: str) -> SlurmCluster:
    """Return the cluster that a file describes."""
    (tmp_path / "c.yaml").write_text("kind: slurm\n" + text)
    made = load_cluster(tmp_path / "c.yaml")
    assert isinstance(made, SlurmCluster)
    return made


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("partition: 'a b'\n", "partition", "without blanks"),
        ("partition: --wrap=x\n", "partition", "leading dash"),
        ('account: "a\\nb"\n', "account", "without blanks"),
        ("gpus: 0\n", "gpus", "greater than or equal to 1"),
        ("gpus: 8\ngres: gpu:h200:8\n", "gpus", "`gres`"),
        ("options: [-x]\n", "options[0]", "sbatch"),
        (
            "options: ['--mail-type=FAIL; rm x', --partition=a]\n",
            "options[1]",
            "`partition`",
        ),
        ("options: [--wrap=x]\n", "options[0]", "--wrap"),
        ("options: [--mail-type=FAIL, --mail-type=END]\n", "options", "--mail-type is set 2 times"),
        ("exclude: ['gpu[9-1]']\n", "exclude[0]", "is not a range of nodes"),
        ("allocation: here\n", "allocation", "`auto`"),
        ("time: soon\n", "time", "is not a duration"),
        ("allocations: new\n", "allocations", "Did you mean 'allocation'?"),
        ("maintenance: [{start: '2030-01-01 22:00'}]\n", "maintenance[0].nodes", "only Slurm knows"),
    ],
)
def test_problems_have_field_and_cure(tmp_path: Path, text: str, field: str, words: str) -> None:
    """Before any request to Slurm."""
    with pytest.raises(BadFile) as caught:
        cluster(tmp_path, text)
    (problem,) = caught.value.problems
    assert problem.field == field, problem
    assert words in str(problem), problem
    assert problem.cure


def test_every_field_becomes_one_option(tmp_path: Path) -> None:
    """What a shell would take apart stays one item."""
    text = "partition: a,b\naccount: lab\nqos: high\nconstraint: h200&ib\ngpus: 8\ntime: 90s\nexclude: ['n[1-2]']\n"
    made = cluster(tmp_path, text + "options: ['--comment-like=a; b $(c)', --mail-type=FAIL]\n".replace("--comment-like", "--mail-user"))
    assert cluster_of(made.model_dump(mode="json")) == made
    request = SbatchRequest(made, "j1", "big", tmp_path).command(3)
    assert request[:2] == ["sbatch", "--parsable"]
    wanted = ["--nodes=3", "--no-kill", "--requeue", "--exclusive", "--time=2", "--partition=a,b", "--account=lab", "--qos=high"]
    wanted += ["--constraint=h200&ib", "--gpus-per-node=8", "--exclude=n1,n2", "--mail-user=a; b $(c)", "--mail-type=FAIL"]
    wanted += ["--job-name=holdfast-big", "--comment=holdfast:j1"]
    assert set(wanted) <= set(request)
