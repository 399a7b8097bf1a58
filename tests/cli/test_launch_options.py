"""`holdfast run` with a script and options in place of a job file, and `holdfast init`: torchrun's options work or are refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

from holdfast.cli import app
from holdfast.cli.parser.launch import REJECTED, is_job_file
from holdfast.exit_codes import OPERATOR_ERROR
from holdfast.history.models import Job
from holdfast.history.store import History
from holdfast.spec import LocalCluster, TrainingJob
from holdfast.spec.files.load import load_job
from tests.cli.conftest import Command
from tests.mentions import mentions

POSITIONAL = {"training_script", "training_script_args"}
VALUES = {"--nnodes": "1:2", "--nproc-per-node": "2", "--tee": "3", "--local-ranks-filter": "0"}
"""Values of options of torchrun that are no number."""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a script in the folder where the commands run, outside Slurm."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("HOLDFAST_CLUSTER", raising=False)
    file = tmp_path / "train.py"
    file.write_text("print('trains')\n")
    return file


def printed(here: Command, *arguments: str) -> dict[str, Any]:
    """Return job and cluster that `--print-job` prints for *arguments*."""
    done = here("run", "--print-job", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


TORCHRUN = [one for one in get_args_parser()._actions if one.dest not in POSITIONAL and one.dest != "help"]


def spellings() -> list[tuple[str, argparse.Action]]:
    """Return every way of writing every option of the installed torchrun."""
    return [(name, one) for one in TORCHRUN for name in one.option_strings]


@pytest.mark.parametrize(("name", "action"), spellings(), ids=[name for name, _ in spellings()])
def test_every_option_of_torchrun_works_or_is_refused_with_a_reason(here: Command, name: str, action: argparse.Action) -> None:
    """Under each of its spellings, with a value of its own or attached; an option that a new torch adds fails here."""
    plain = f"--{name[2:].replace('_', '-')}" if name.startswith("--") else name
    value = [] if action.nargs == 0 else [VALUES.get(f"--{action.dest.replace('_', '-')}", "1")]
    program = "json.tool" if action.dest == "module" else "true" if action.dest == "no_python" else "train.py"
    done = here("run", "--print-job", name, *value, program)
    if plain in REJECTED:
        assert done.returncode == OPERATOR_ERROR
        assert REJECTED[plain] in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        attached = (
            here("run", "--print-job", f"{name}={value[0]}" if name.startswith("--") else f"{name}{value[0]}", program) if value else done
        )
        assert attached.stdout == done.stdout, attached.stderr


def test_no_option_is_declared_and_rejected() -> None:
    """The table of rejected options names no option that the command has."""
    assert not {name for one in app.commands["run"].params for name in one.opts} & set(REJECTED)


def test_options_stand_for_the_fields_of_a_job_file(here: Command, tmp_path: Path) -> None:
    """What follows the script is the script's, also where it looks like an option."""
    found = printed(
        here, "--nnodes", "2:4", "--nproc_per_node=8", "--spare-nodes", "1", "--hot-spares", "2", "--max-restarts", "3",
        "--shutdown-timeout", "5", "--env", "A=B=C", "--env", "D=", "--policy", "patient", "--checkpoint-dir", "saved",
        "train.py", "--lr", "1e-3", "--nnodes", "9", "--",
        "-m",
    )  # fmt: skip
    job = TrainingJob.model_validate(found["job"])
    assert (job.name, job.script, job.args) == ("train", "train.py", ["--lr", "1e-3", "--nnodes", "9", "--", "-m"])
    assert (job.nnodes, job.nproc_per_node, job.spare_nodes, job.hot_spares, job.max_recoveries) == ("2:4", 8, 1, 2, 3)
    assert job.timeouts.termination_grace.total_seconds() == 5
    assert (job.env, job.policy, job.workdir) == ({"A": "B=C", "D": ""}, "patient", str(tmp_path))
    assert job.checkpoints == tmp_path / "saved"
    assert found["cluster"]["nodes"] == 5, "the local nodes of the job, spare ones included"


def test_without_options_one_rank_runs_on_this_machine(here: Command) -> None:
    """As with torchrun."""
    found = printed(here, "train.py")
    job = TrainingJob.model_validate(found["job"])
    assert (job.nnodes, job.nproc_per_node, job.args) == (1, 1, [])
    assert LocalCluster.model_validate(found["cluster"]) == LocalCluster(name="train", nodes=1)


def test_a_module_and_a_program_are_run_as_torchrun_runs_them(here: Command) -> None:
    """The job is named after the last part of the module."""
    module = printed(here, "-m", "json.tool", "--indent", "2")["job"]
    assert (module["name"], module["module"], module["args"]) == ("tool", "json.tool", ["--indent", "2"])
    program = printed(here, "--no-python", "sleep", "1")["job"]
    assert (program["name"], program["command"]) == ("sleep", ["sleep", "1"])


@pytest.mark.parametrize(("written", "name"), [("My Train_v2.py", "my-train-v2"), ("---.py", "job"), ("a" * 80 + ".py", "a" * 63)])
def test_a_job_is_named_after_its_script(here: Command, tmp_path: Path, written: str, name: str) -> None:
    """As far as a name may have its letters."""
    (tmp_path / written).write_text("")
    assert printed(here, "--", written)["job"]["name"] == name


def test_options_replace_fields_of_a_job_file_wherever_they_stand(here: Command, tmp_path: Path) -> None:
    """All else stays as the file has it."""
    (tmp_path / "job.yaml").write_text("name: gpt\nscript: train.py\nnnodes: 1\nspare_nodes: 1\nenv: {A: '1', B: '2'}\n")
    job = printed(here, "--nproc-per-node", "2", "job.yaml", "--spare_nodes", "0", "--env", "A=3")["job"]
    assert (job["name"], job["nproc_per_node"], job["spare_nodes"], job["env"]) == ("gpt", 2, 0, {"A": "3", "B": "2"})
    done = here("run", "job.yaml", "--print-job", "--nnodes", "0")
    assert (done.returncode, "--nnodes" in done.stderr) == (OPERATOR_ERROR, True)


def test_what_an_option_replaces_in_a_job_file_may_be_wrong_there(here: Command, tmp_path: Path) -> None:
    """What it does not replace may not, and is named with its line; the option's own value is named as the option."""
    (tmp_path / "job.yaml").write_text("name: gpt\nscript: train.py\nnnodes: 9\nspare_nodes: lots\n")
    job = printed(here, "--nnodes", "2", "--spare-nodes", "1", "--shutdown-timeout", "1m", "job.yaml")["job"]
    assert (job["nnodes"], job["spare_nodes"], job["timeouts"]["termination_grace"]) == (2, 1, "1m")
    done = here("run", "job.yaml", "--print-job", "--spare-nodes", "1")
    assert mentions(done.stderr, "nnodes: line 3", 9, "'local'")
    done = here("run", "job.yaml", "--print-job", "--nnodes", "9")
    assert mentions(done.stderr, "2 problems", "spare_nodes: line 4", "--nnodes: the job needs 9")


def test_the_printed_job_is_a_job_file_that_describes_the_same_job(here: Command, tmp_path: Path) -> None:
    """From any folder."""
    options = ["--nnodes", "1:2", "--nproc-per-node", "2", "--env", "A=1", "train.py", "--lr", "1e-3"]
    found = printed(here, *options)
    text = here("run", "--print-job", *options).stdout
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "job.yaml").write_text(text)
    job, cluster = load_job(tmp_path / "elsewhere" / "job.yaml")
    assert job == TrainingJob.model_validate(found["job"])
    assert isinstance(cluster, LocalCluster)
    assert (cluster.name, cluster.names) == ("train", ["node-0", "node-1"])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("from holdfast.spec import TrainingJob\njob = TrainingJob(name='a', script='train.py')\n", True),
        ("import holdfast.spec\njob = holdfast.spec.TrainingJob(name='a', script='train.py')\n", True),
        ("job = 'training'\nprint(job)\n", False),
        ("from holdfast import Session\n", False),
        ("this is no Python", False),
    ],
)
def test_a_python_file_that_makes_a_job_is_a_job_file_and_any_other_a_script(tmp_path: Path, content: str, *, expected: bool) -> None:
    """It is read for that, not run."""
    file = tmp_path / "some.py"
    file.write_text(content)
    assert is_job_file(str(file)) == expected


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["missing.py"], ["missing.py", "SCRIPT"]),
        (["."], ["SCRIPT"]),
        (["missing.yaml"], ["missing.yaml"]),
        (["-m", "1 2"], ["SCRIPT"]),
        (["-m", "--no-python", "train.py"], ["--module", "--no-python"]),
        (["--nproc-per-node", "many", "train.py"], ["--nproc-per-node", "many"]),
        (["--nnodes", "4:2", "train.py"], ["--nnodes", "2:4"]),
        (["--hot-spares", "some", "train.py"], ["--hot-spares", "some"]),
        (["--groups", "nonsense", "train.py"], ["--groups", "auto", "managed", "stock"]),
        (["--groups", "managed", "--no-python", "/bin/true"], ["--groups", "holdfast.join()"]),
        (["--name", "No Name", "train.py"], ["--name"]),
        (["--env", "A", "train.py"], ["--env", "NAME=VALUE"]),
        (["--env", "RANK=1", "train.py"], ["--env", "RANK"]),
        (["--policy", "none", "train.py"], ["--policy"]),
        (["--tee", "7", "train.py"], ["--tee"]),
        (["--local-ranks-filter", "1", "train.py"], ["--local-ranks-filter"]),
        (["--tee", "3", "--log-ranks", "0", "train.py"], ["--tee", "--log-ranks"]),
        (["--standalone", "--cluster", "c.yaml", "train.py"], ["--standalone", "--cluster"]),
        (["--cluster", "c.yaml", "train.py"], ["c.yaml"]),
        (["job.yaml", "--lr", "3"], ["--lr"]),
        (["job.yaml", "more"], ["job.yaml", "more", "args"]),
        (["--standalone", "job.yaml"], ["--standalone", "job.yaml"]),
        (["--nproc"], ["--nproc"]),
        ([], ["SCRIPT|JOB_FILE"]),
    ],
    ids=" ".join,
)
def test_bad_options_are_refused_by_name(here: Command, tmp_path: Path, arguments: list[str], names: list[str]) -> None:
    """In one message, before anything is started."""
    (tmp_path / "job.yaml").write_text("name: gpt\nscript: train.py\n")
    done = here("run", "--print-job", *arguments)
    assert done.returncode == OPERATOR_ERROR
    assert not done.stdout
    assert all(name in done.stderr for name in names), done.stderr


@pytest.mark.parametrize(
    ("options", "ranks"),
    [
        (["--tee", "3"], None),
        (["-t", "0"], []),
        (["-t0:3,1:0"], [0, 2]),
        (["--local_ranks_filter", "1"], [1, 3]),
        (["--log-ranks", "1"], [1]),
    ],
    ids=str,
)
def test_the_output_that_is_shown_is_selected_as_with_torchrun(options: list[str], ranks: list[int] | None) -> None:
    """On two nodes of two ranks; None: all."""
    from holdfast.cli.arguments import ranks_in  # noqa: PLC0415
    from holdfast.cli.commands.run.launch_options import shown_ranks  # noqa: PLC0415

    command = app.commands["run"]
    context = command.make_context("run", [*options, "train.py"])
    text = shown_ranks(context.params, TrainingJob(name="a", script="train.py", nnodes=2, nproc_per_node=2))
    assert text is not None
    assert ranks_in(text, 4) == (None if ranks is None else frozenset(ranks))


def test_an_option_behind_the_script_is_the_scripts_and_that_is_said(here: Command) -> None:
    """A user of job files may expect otherwise."""
    done = here("run", "--print-job", "train.py", "--detach")
    assert done.returncode == 0
    assert yaml.safe_load(done.stdout)["args"] == ["--detach"]
    assert "--detach" in done.stderr


def test_two_scripts_of_one_name_do_not_share_a_job(here: Command, book: History, tmp_path: Path) -> None:
    """Checkpoints are found by the job's name."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "train.py").write_text("")
    with book.session() as session:
        session.add(Job(name="train", spec={"name": "train", "script": str(other / "train.py")}, cluster={}, directory="", at=1.0))
        session.commit()
    done = here("run", "train.py")
    assert done.returncode == OPERATOR_ERROR
    assert str(other / "train.py") in done.stderr
    assert "--name" in done.stderr


# -- holdfast init ----------------------------------------------------------------------------------------------------


def test_a_new_job_file_is_valid_and_says_what_its_options_say(here: Command, tmp_path: Path) -> None:
    """Its comments explain every field; each offered field is valid once its mark is removed."""
    options = ["--nproc-per-node", "2", "--env", "A=1", "train.py", "--lr", "1e-3"]
    done = here("init", *options)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "train.yaml").read_text()
    job, _ = load_job(tmp_path / "train.yaml")
    assert job == TrainingJob.model_validate(printed(here, *options)["job"])
    schema = text.splitlines()[0].partition("$schema=")[2]
    assert json.loads(Path(schema).read_text())["title"] == "Holdfast job file"
    assert "\nnproc_per_node: 2\n" in text, "a number, not text in quotes"
    for line in text.splitlines():
        name = line.removeprefix("# ").partition(":")[0]
        if line.startswith("# ") and name in TrainingJob.model_fields:
            (tmp_path / "train.yaml").write_text(text.replace(line, line.removeprefix("# ")))
            changed, _ = load_job(tmp_path / "train.yaml")
            assert name in changed.model_fields_set


@pytest.mark.parametrize("item", ["--lr 1e-3", "-c a.yaml"])
def test_an_option_and_its_value_in_one_argument_are_warned_of(here: Command, tmp_path: Path, item: str) -> None:
    """The script would be given one argument, which argparse refuses; other texts with spaces are fine."""
    option, value = item.split()
    job = tmp_path / "job.yaml"
    for arguments, warned in (([item], True), ([option, value], False), (["--note=a b", "a -b c", "- b"], False)):
        job.write_text(json.dumps({"name": "a", "script": "train.py", "args": arguments, "checkpoint": {"directory": "c"}}))
        for command in (("validate", str(job)), ("run", "--print-job", str(job)), ("run", "--print-job", "train.py", *arguments)):
            done = here(*command)
            assert (done.returncode, mentions(done.stderr, "args", f"'{item}'", f'["{option}", "{value}"]')) == (0, warned), done.stderr


def test_a_home_that_cannot_be_written_is_named_by_its_variable(here: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gave the folder of the checkpoints, which lies in it, so no option is named as the culprit."""
    monkeypatch.setenv("HOLDFAST_HOME", "/proc/foo")
    done = here("run", "--print-job", "train.py")
    assert done.returncode == OPERATOR_ERROR
    assert mentions(done.stderr, "HOLDFAST_HOME", "/proc/foo/jobs/train/checkpoints", "cannot be written", "Name a folder of your own")
    assert "--checkpoint-dir" not in done.stderr
    assert mentions(here("run", "--print-job", "--checkpoint-dir", "/proc/foo", "train.py").stderr, "--checkpoint-dir", "/proc/foo")


def test_a_file_that_exists_is_replaced_only_by_force(here: Command, tmp_path: Path) -> None:
    """The message says how."""
    assert here("init", "train.py").returncode == 0
    before = (tmp_path / "train.yaml").read_text()
    done = here("init", "--nnodes", "3", "train.py")
    assert (done.returncode, "--force" in done.stderr, (tmp_path / "train.yaml").read_text()) == (OPERATOR_ERROR, True, before)
    assert here("init", "--nnodes", "3", "--force", "train.py").returncode == 0
    assert load_job(tmp_path / "train.yaml")[0].nnodes == 3
    assert here("init", "-o", "missing/folder.yaml", "train.py").returncode == OPERATOR_ERROR
    assert mentions(here("init", "gone.py").stderr, "no job file was written", "gone.py")
    assert mentions(here("init", "-o", "b.yaml", "train.py", "--nnodes", "3").stderr, "--nnodes", "script gets it")
    assert here("init", "train.yaml").returncode == OPERATOR_ERROR
