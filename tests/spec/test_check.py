"""What a job needs from the machine and the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.spec import LocalCluster, SlurmCluster, TrainingJob, checks, review
from tests.mentions import mentions


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    """Give the fields of a job that is fine."""
    (tmp_path / "train.py").touch()
    return {"name": "a", "script": "train.py", "workdir": str(tmp_path), "checkpoint": {"directory": str(tmp_path / "new" / "deep")}}


def reasons(fields: dict[str, Any], cluster: LocalCluster | None = None) -> dict[str, str]:
    """Return the reasons by field."""
    return {problem.field: problem.reason for problem in checks(TrainingJob.model_validate(fields), cluster or LocalCluster())}


def test_a_file_that_is_no_script_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    """Some are valid Python by chance, and would train nothing; what the command line makes of an interpreter is named."""
    (tmp_path / "job.toml").write_text('name = "gpt"\n')
    assert mentions(reasons(fields | {"script": "job.toml"})["script"], "job.toml", "no Python script")
    (problem,) = checks(TrainingJob.model_validate(fields | {"script": "python", "args": ["train.py", "--lr"]}), LocalCluster())
    assert mentions(problem.cure, "`python`", "train.py")


def test_a_valid_job_has_no_problems_and_nothing_is_written(fields: dict[str, Any], tmp_path: Path) -> None:
    """Looking leaves no trace."""
    assert reasons(fields) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        ({"script": "trian.py"}, "script", "does not exist"),
        ({"script": "."}, "script", "is a directory"),
        ({"workdir": "/nowhere/at/all"}, "workdir", "not a directory"),
        ({"script": None, "command": ["no-such-program-anywhere"]}, "command", "not on PATH"),
        ({"script": None, "command": ["sh"], "env": {"PATH": "/nowhere"}}, "command", "not on PATH"),
        ({"script": None, "command": ["./gone"]}, "command", "does not exist"),
        ({"script": None, "command": ["./train.py"]}, "command", "may not be executed"),
        ({"script": None, "command": [""]}, "command", "not on PATH"),
        ({"python": "/no/python"}, "python", "does not exist"),
        ({"checkpoint": {"directory": "train.py/x"}}, "checkpoint.directory", "not a directory"),
        ({"checkpoint": {"directory": "/proc/nothing/here"}}, "checkpoint.directory", "cannot be written"),
        ({"nnodes": 4, "spare_nodes": 1}, "nnodes", "needs 4 and 1 spare"),
    ],
    ids=repr,
)
def test_missing_files_are_reported(fields: dict[str, Any], change: dict[str, Any], field: str, words: str) -> None:
    """Each by its field."""
    assert words in reasons(fields | change)[field]


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("gone.deeper", "no module 'gone'"),
        ("package", "'package' is a package without `__main__`"),
        ("package.inner", "'package.inner' is a package without `__main__`"),
        ("package.gone", "'package' has no module 'package.gone'"),
        ("train.x", "'train' is a module, not a package"),
        ("train.py", "is a file"),
        ("train", ""),
        ("package.part", ""),
        ("package.inner.part", ""),
        ("runnable", ""),
        ("elsewhere", ""),
        ("own_path.gone", ""),
        ("json.tool", ""),
    ],
)
def test_a_module_that_cannot_be_run_is_reported_and_none_is_imported(
    fields: dict[str, Any], tmp_path: Path, module: str, words: str
) -> None:
    """As `python -m` looks for it, in PYTHONPATH too; where a package may change its path, nothing is refused."""
    loud = "raise SystemExit('imported')"
    for path in (
        "package/__init__",
        "package/part",
        "package/inner/__init__",
        "package/inner/part",
        "runnable/__init__",
        "runnable/__main__",
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / f"{path}.py").write_text(loud)
    (tmp_path / "own_path").mkdir()
    (tmp_path / "own_path/__init__.py").write_text("__path__.append('/somewhere')")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/elsewhere.py").write_text(loud)
    found = reasons(fields | {"script": None, "module": module, "env": {"PYTHONPATH": "lib"}})
    assert words in found["module"] if words else found == {}


def test_a_command_may_be_next_to_the_job_file(fields: dict[str, Any], tmp_path: Path) -> None:
    """A path is seen from the job's directory."""
    (tmp_path / "train.py").chmod(0o755)
    assert reasons(fields | {"script": None, "command": ["./train.py"]}) == {}


def test_a_review_reports_bad_fields_and_missing_files_together(tmp_path: Path) -> None:
    """A mistyped field does not hide that the script is not there, nor that the nodes are too few."""
    (tmp_path / "job.yaml").write_text("name: a\nscript: gone.py\nnnodes: 9\nnproc: 2\n")
    draft = review(tmp_path / "job.yaml")
    assert {problem.field for problem in draft.problems} == {"nproc", "script", "nnodes"}


def test_a_cluster_file_goes_before_the_cluster_in_the_job_file(tmp_path: Path) -> None:
    """The command line takes precedence, and its file is reviewed too."""
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text("name: a\nscript: train.py\nnnodes: 9\ncluster: {nodes: 2}\ncheckpoint: {directory: c}\n")
    (tmp_path / "big.yaml").write_text("nodes: 9\n")
    (tmp_path / "bad.yaml").write_text("node: 9\n")
    assert [problem.field for problem in review(tmp_path / "job.yaml").problems] == ["nnodes"]
    assert review(tmp_path / "job.yaml", tmp_path / "big.yaml").problems == []
    assert "node" in {problem.field for problem in review(tmp_path / "job.yaml", tmp_path / "bad.yaml").problems}


def on_hosts(nodes: str, tmp_path: Path) -> list[str]:
    """Return what keeps a job with such *nodes* from running on four machines, two of which are like each other."""
    hosts = "[{name: 'old[1-2]', gpus: 4}, {name: 'new[1-2]', labels: {gpu: h200, net: ib}}]"
    text = f"name: a\nscript: x.py\n{nodes}\ncheckpoint: {{directory: /shared}}\ncluster: {{kind: ssh, gpus: 8, hosts: {hosts}}}\n"
    (tmp_path / "job.yaml").write_text(text)
    draft = review(tmp_path / "job.yaml")
    return [f"{problem.field}: {problem.reason}" for problem in draft.problems]


@pytest.mark.parametrize(
    ("nodes", "wrong"),
    [
        ("nnodes: 4", []),
        ("nnodes: 2\nnode_labels: {gpu: h200}", []),
        (
            "nnodes: 2\nspare_nodes: 1\nnode_labels: {gpu: h200}",
            ["the job needs 2 and 1 spare, but cluster 'ssh' has 2 nodes with gpu: h200"],
        ),
        ("nnodes: 1\nnode_labels: {gpu: b300}", ["the job needs 1, but cluster 'ssh' has 0 nodes with gpu: b300"]),
        ("nnodes: 2\nnproc_per_node: 8\nnode_labels: {net: ib}", []),
        ("nnodes: 2\nnproc_per_node: 8", ["the job has 8 ranks on each node, but old1 has 4 GPUs, and 1 other node has too few"]),
    ],
)
def test_a_job_selects_nodes_by_labels(nodes: str, wrong: list[str], tmp_path: Path) -> None:
    """Too few matching nodes are reported before anything starts."""
    assert [one.split(": ", 2)[2] for one in on_hosts(nodes, tmp_path)] == wrong


@pytest.fixture
def in_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a job file without a cluster, within a Slurm job, without Slurm's commands on PATH."""
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text("name: a\nscript: train.py\ncheckpoint: {directory: c}\n")
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def test_a_job_without_a_cluster_does_not_run_on_a_slurm_batch_host(in_slurm: Path) -> None:
    """It is refused where the allocation cannot be used, and uses it otherwise; only an explicit cluster selects this host alone."""
    draft = review(in_slurm / "job.yaml")
    (problem,) = draft.problems
    assert (draft.cluster, problem.field) == (None, "cluster")
    assert "within Slurm job 123" in problem.reason
    assert "`cluster: {kind: local}`" in problem.cure
    (in_slurm / "local.yaml").write_text("kind: local\n")
    chosen = review(in_slurm / "job.yaml", in_slurm / "local.yaml")
    assert (chosen.problems, chosen.cluster and chosen.cluster.kind) == ([], "local")
    (in_slurm / "bin").mkdir()
    for name in ("scontrol", "squeue", "sbatch", "srun"):
        (in_slurm / "bin" / name).write_text("#!/bin/sh\n")
        (in_slurm / "bin" / name).chmod(0o755)
    draft = review(in_slurm / "job.yaml")
    assert (draft.problems, draft.cluster) == ([], SlurmCluster(kind="slurm"))


def test_outside_of_slurm_a_job_that_names_no_cluster_runs_on_this_machine(in_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ever."""
    monkeypatch.delenv("SLURM_JOB_ID")
    assert review(in_slurm / "job.yaml").cluster == LocalCluster()


@pytest.mark.parametrize(
    ("field", "value", "cure"),
    [
        ("args", "--epochs 3 --lr 1e-3", '["--epochs", "3", "--lr", "1e-3"]'),
        ("args", "{epochs: 3, --lr: 1e-3}", '["--epochs", "3", "--lr", "1e-3"]'),
        ("args", "--name 'a", 'e.g. ["--epochs", "3"]'),
        ("args", "5", '["5"]'),
        ("command", "python train.py --out 'a b'", '["python", "train.py", "--out", "a b"]'),
        ("command", "7.5", '["7.5"]'),
        ("command", "{run: x}", 'e.g. ["python", "train.py"]'),
    ],
)
def test_text_in_place_of_a_list_gets_the_list_as_cure(field: str, value: str, cure: str, tmp_path: Path) -> None:
    """Arguments of a script are no command of Python's."""
    (tmp_path / "train.py").touch()
    script = "" if field == "command" else "script: train.py\n"
    (tmp_path / "job.yaml").write_text(f"name: a\n{script}{field}: {value}\ncheckpoint: {{directory: c}}\n")
    problem = next(one for one in review(tmp_path / "job.yaml").problems if one.field == field)
    assert problem.cure.endswith(cure), problem
