"""Reading files: every problem at once, with its place and its cure, and nothing but `BadFile` whatever the file holds."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import BadFile, Problem
from holdfast.spec import LocalCluster, load_cluster, load_job, review
from holdfast.spec.files.load import kind_of_file
from tests.mentions import mentions


def problems_of(path: Path) -> dict[str, Problem]:
    """Return the problems that `load_job` finds in the file, by field."""
    with pytest.raises(BadFile) as refused:
        load_job(path)
    found = refused.value.problems
    assert found
    for problem in found:
        assert problem.field
        assert problem.reason
        assert problem.cure
    return {problem.field: problem for problem in found}


def test_a_yaml_file_has_the_job_and_its_cluster(file: Any) -> None:
    """Folders become absolute, seen from the file."""
    path = file("name: a\nscript: b.py\nworkdir: sub\ncheckpoint: {directory: ckpt}\ncluster: {nodes: 2, directory: fleet}\n")
    job, cluster = load_job(path)
    assert job.workdir == str(path.parent / "sub")
    assert job.checkpoint.directory == str(path.parent / "sub" / "ckpt")
    assert cluster == LocalCluster(nodes=2, directory=str(path.parent / "fleet"), maintenance_file=str(path))


def test_a_python_file_has_the_job_and_its_cluster(file: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It may import its neighbours; what it prints does not mix with our output."""
    file("STEPS = 7\n", "neighbour_of_job.py")
    source = "from neighbour_of_job import STEPS\nfrom holdfast.spec import *\nprint('hello')\n"
    path = file(source + "job = TrainingJob(name='a', script='b.py', args=[str(STEPS)])\ncluster = LocalCluster(nodes=3)\n", "job.py")
    before = sys.path.copy()
    job, cluster = load_job(path)
    assert (job.args, cluster) == (["7"], LocalCluster(nodes=3))
    assert load_cluster(path) == cluster
    assert sys.path == before
    assert capsys.readouterr().out == ""


def test_arguments_and_environment_stay_as_written(file: Any) -> None:
    """What YAML would take for numbers and booleans is text to a command line."""
    path = file("name: a\nscript: b.py\nargs: [--rate, 1e-3, 010, yes, 1:30, 2024-01-01, true, 1_000]\nenv: {N: 4, DEBUG: no, F: 1.50}\n")
    job, _ = load_job(path)
    assert job.args == ["--rate", "1e-3", "010", "yes", "1:30", "2024-01-01", "true", "1_000"]
    assert job.env == {"N": "4", "DEBUG": "no", "F": "1.50"}


def test_all_problems_are_reported_with_their_lines(file: Any) -> None:
    """One round of mending is enough."""
    path = file("name: Foo\nscript: b.py\nnnode: 2\nnproc_per_node: two\ntimeouts: {lease: soon}\ncluster: {kind: locl, nodes: 0}\n")
    found = problems_of(path)
    assert set(found) == {"name", "nnode", "nproc_per_node", "timeouts.lease", "cluster.kind"}
    assert found["nnode"].reason == "line 3: unknown field"
    assert mentions(found["nnode"].cure, "'nnodes'")
    assert found["nproc_per_node"].reason.startswith("line 4")


def test_what_this_machine_lacks_is_reported_with_its_line(file: Any) -> None:
    """And what is missing in a part of the file, with the line of that part."""
    path = file(
        "name: a\nscript: gone.py\npython: /no/python\nnnodes: 9\npreflight: maybe\npolicy: gone.yaml\n"
        "checkpoint:\n  directory: /proc/x\ncluster:\n  nodes: 2\n"
    )
    found = {problem.field: problem.reason.partition(":")[0] for problem in review(path).problems}
    assert found == {
        "script": "line 2", "python": "line 3", "nnodes": "line 4", "preflight": "line 5", "policy": "line 6",
        "checkpoint.directory": "line 8",
    }  # fmt: skip
    (missing,) = review(file("name: a\ncommand: [sh]\ncluster:\n  kind: ssh\n")).problems
    assert (missing.field, missing.reason) == ("cluster.hosts", "line 3: is missing")
    (missing,) = review(file("name: a\ncommand: [sh]\ncheckpoint: {interval: 5}\ncluster: {kind: slurm}\n")).problems
    assert missing.reason.startswith("line 3")


@pytest.mark.parametrize(
    ("content", "field", "words"),
    [
        ("", "file", "is empty"),
        ("# only a comment\n", "file", "is empty"),
        ("just words", "file", "holds no fields"),
        ("- a\n- b\n", "file", "holds no fields"),
        ("name: a\nscript: b\nname: c\n", "line 3", "twice"),
        ("name: a\nscript: [b\n", "line 3, column 1", "not valid YAML"),
        ("name: a\n\tscript: b\n", "line 2, column 1", "a tab"),
        ("a: 1\n---\nb: 2\n", "line 2, column 1", "single document"),
        ("name: *nobody\n", "line 1, column 7", "undefined alias"),
        ("name: &a [*a]\n", "line 1", "too many levels"),
        ("[" * 5000, "file", "nested too deep"),
        ("name: !!python/object:os.system x\nscript: b\n", "line 1", "not supported"),
        ("name: !!int abc\nscript: b\n", "line 1", "not of type int"),
        ("? [a]\n: b\n", "line 1", "must be text"),
        ("<<: {name: a}\nscript: b\n", "line 1", "merge keys"),
        (b"\x80\x81\x82", "file", "not UTF-8"),
        (b"name: \x00\x01", "file", "not text"),
        (b"\x7fELF" + bytes(range(256)), "file", "not"),
        ("name: a\n" + "#" * 300_000, "file", "larger than"),
        ("name: a\nscript: b\ncheckpoint: 3\n", "checkpoint", "holds no fields"),
        ("name: a\nscript: b\ncluster: 3\n", "cluster", "holds no fields"),
        ("name: a\nscript: b\ncluster: {kind: kubernetes}\n", "cluster.kind", "kubernetes"),
        ("name: a\ncommand: python train.py\n", "command", "is not"),
        ("name: 3\nscript: b\n", "name", "3 is not text"),
        ("name: a\nscript: b\npreflight: maybe\n", "preflight", "is neither true nor false"),
        ("name: a\nscript: b\ntimeouts: {hang_multiplier: much}\n", "timeouts.hang_multiplier", "is not a number"),
        ("script: b\n", "name", "is missing"),
        ("name: a\n", "script", "nothing to run"),
        ("name: a\nscript: b\nargs: [~]\n", "args[0]", "None is not"),
        ("name: a\nscript: b\nenv: {RANK: 1}\n", "env.RANK", "set by Holdfast"),
        ('name: a\nscript: "\\0"\n', "script", "NUL"),
        ('name: "\\ud800"\nscript: b\n', "name", "not"),
        ('name: a\nscript: b\n"\\ud800\\n": b\n', "file", "\\ud800"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_bad_yaml_file_is_reported_with_place_and_reason(file: Any, content: str | bytes, field: str, words: str) -> None:
    """Field or line, and what is wrong there."""
    found = problems_of(file(content))
    assert field in found
    assert words in found[field].reason
    str(next(iter(found.values()))).encode()


def test_a_few_lines_cannot_grow_into_gigabytes(file: Any) -> None:
    """The billion-laughs file is refused before it is written out."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert "too many values" in next(iter(problems_of(file("\n".join(lines))).values())).reason


@pytest.mark.parametrize(
    ("content", "field", "words"),
    [
        ("job = (\n", "line 1", "not valid Python"),
        ("job = None\0", "file", "not valid Python"),
        ("import torch_not_there\njob = 1\n", "line 1", "ModuleNotFoundError"),
        ("job = 1\nraise SystemExit(3)\n", "line 2", "SystemExit: 3"),
        ("job = 1\n\n1 / 0\n", "line 3", "ZeroDivisionError"),
        ("def f(): f()\njob = f()\n", "line 1", "RecursionError"),
        ("job = {'name': 'a'}\n", "job", "is a dict"),
        ("from holdfast.spec import *\njob = TrainingJob(name='a', script='b')\ncluster = 3\n", "cluster", "is a int"),
        ("from holdfast.spec import *\njob = TrainingJob(nam='a', script='b')\n", "nam", "unknown field"),
        ("from holdfast.spec import *\njob = TrainingJob(name='a', script='b', nnodes=0)\n", "nnodes", "is not a number of nodes"),
        ("from holdfast.spec.job import RecoveryTimeouts\njob = RecoveryTimeouts(take_over='1s')\n", "take_over", "unknown field"),
        ("import pydantic\nclass M(pydantic.BaseModel):\n    x: int\njob = M()\n", "file", "ValidationError of M"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\njob = 1\nraise E\n", "line 4", "raised E"),
        ("import torch\nmodel = 1\n", "job", "sets no `job`"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_bad_python_file_is_reported_with_place_and_reason(file: Any, content: str, field: str, words: str) -> None:
    """Whatever it raises, and whatever it sets instead of a job."""
    found = problems_of(file(content, "job.py"))
    assert field in found
    assert words in found[field].reason


def test_a_python_file_that_is_nested_too_deeply_is_reported(file: Any) -> None:
    """The parser gives up; what kind of file it is cannot be seen then."""
    path = file("job = " + "(" * 10_000 + ")" * 10_000 + "\n", "job.py")
    assert kind_of_file(path) == "job"
    assert problems_of(path)


def test_a_training_script_is_not_run_by_mistake(file: Any, tmp_path: Path) -> None:
    """`holdfast run train.py` explains itself instead of training in the wrong place."""
    found = problems_of(file(f"open({str(tmp_path / 'trace')!r}, 'w')\n", "train.py"))
    assert mentions(found["job"].cure, "`holdfast run train.py`", "`holdfast init train.py`")
    assert not (tmp_path / "trace").exists()


def test_a_path_that_is_not_a_file_is_reported(tmp_path: Path, file: Any) -> None:
    """Missing (with a similar name), a folder, a pipe, a device, an unknown suffix."""
    file("name: a\nscript: b\n", "job.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    assert mentions(problems_of(tmp_path / "jbo.yaml")["file"].cure, "'job.yaml'")
    assert "not a regular file" in problems_of(tmp_path)["file"].reason
    assert "not a regular file" in problems_of(tmp_path / "pipe.yaml")["file"].reason
    assert "not a regular file" in problems_of(Path("/dev/zero"))["file"].reason
    assert mentions(problems_of(file("name: a\n", "job.toml"))["file"].reason, "YAML", "Python")
    assert "cannot be read" in problems_of(tmp_path / ("x" * 300 + ".yaml"))["file"].reason
    assert "cannot be read" in problems_of(Path("a\0b.yaml"))["file"].reason


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20) | st.dates(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)
NAMES = st.sampled_from(
    ["name", "script", "command", "args", "python", "workdir", "nnodes", "nproc_per_node", "env", "checkpoint", "timeouts", "lease",
     "recovery", "cluster", "kind", "policy", "progress", "interval", "keep", "window"]
)  # fmt: skip
NEARLY = st.recursive(JUNK, lambda inner: st.dictionaries(NAMES, inner, max_size=8), max_leaves=30)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def load_all(path: Path) -> None:
    """Read *path* both ways; anything but `BadFile` is a failure, and its message can be printed."""
    for load in (load_job, load_cluster):
        with contextlib.suppress(BadFile):
            try:
                load(path)
            except BadFile as error:
                str(error).encode()
                raise


@QUICK
@given(st.binary(max_size=300) | st.text(max_size=300).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_no_bytes_bring_a_loader_down(file: Any, content: bytes) -> None:
    """Only `BadFile` leaves it."""
    load_all(file(content))


@settings(QUICK, max_examples=50)  # large trees: a tenth of a second each
@given(NEARLY)
def test_no_yaml_tree_brings_a_loader_down(file: Any, tree: Any) -> None:
    """Only `BadFile` leaves it."""
    load_all(file(yaml.safe_dump(tree)))


@QUICK
@given(st.text(alphabet="name: script[]{}&*!|>-?\"'\n\t #%@,x0.", max_size=80))
def test_no_broken_yaml_brings_a_loader_down(file: Any, text: str) -> None:
    """Only `BadFile` leaves it."""
    load_all(file("name: a\nscript: b\n" + text))
