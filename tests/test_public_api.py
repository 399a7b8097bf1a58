"""The public Python API: what `holdfast.__all__` lists is documented and typed, and nothing else is offered."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from docs.generate import DOCS
from docs.generator.api import GROUPS, JOB_FILE, MADE_BY_HOLDFAST, MEMBERS
from holdfast.integrations.huggingface import HoldfastCallback
from holdfast.spec import load_job

NAMES = [name for name in holdfast.__all__ if name != "__version__"]


def functions() -> Iterator[tuple[str, Any]]:
    """Yield every public function and method, and the constructor of each class that a user creates, by its name."""
    for name in NAMES:
        public = getattr(holdfast, name)
        if not inspect.isclass(public):
            yield name, public
            continue
        for member in MEMBERS[name]:
            found = inspect.getattr_static(public, member, None)
            if inspect.isfunction(found):
                yield f"{name}.{member}", found
    yield "Loader.__init__", holdfast.Loader.__init__
    yield "HoldfastCallback.__init__", HoldfastCallback.__init__


FUNCTIONS = dict(functions())


def doc_of(name: str) -> str:
    """Return the docstring of a public function; a constructor is described by its class."""
    owner = {"Loader.__init__": holdfast.Loader, "HoldfastCallback.__init__": HoldfastCallback}.get(name, FUNCTIONS[name])
    return inspect.cleandoc(owner.__doc__ or "")


def section_of(doc: str, title: str) -> set[str]:
    """Return the names that the section *title* of a docstring describes."""
    found = re.search(rf"^{title}:\n((?:    .*\n?|\n)+)", doc, re.MULTILINE)
    return set(re.findall(r"^    (\*{0,2}\w+):", found[1], re.MULTILINE)) if found else set()


def test_the_page_describes_each_public_name_and_no_other() -> None:
    """`__all__`, the sections of the page and its entries list the same names."""
    page = (DOCS / "reference/python-api.md").read_text()
    assert sorted(MEMBERS) == sorted(holdfast.__all__) == sorted(name for *_, names in GROUPS for name in names)
    assert sorted(re.findall(r"^::: holdfast\.(\w+)$", page, re.MULTILINE)) == sorted(holdfast.__all__)


def test_nothing_else_is_offered() -> None:
    """`dir` lists the public names; another one is refused with those."""
    assert dir(holdfast) == sorted(holdfast.__all__)
    with pytest.raises(AttributeError) as refused:
        _ = holdfast.settled
    assert all(name in str(refused.value) for name in holdfast.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_describes_arguments_result_and_errors(name: str) -> None:
    """Each parameter has an entry under Args; a result is described, and so is each error that the function itself raises."""
    function, doc = FUNCTIONS[name], doc_of(name)
    parameters = set(inspect.signature(function).parameters) - {"self"}
    assert section_of(doc, "Args") == parameters
    returned = inspect.signature(function).return_annotation
    assert name.endswith("__init__") or (returned == "None") != bool(re.search(r"^(Returns|Yields):$", doc, re.MULTILINE))
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    raised = {node.exc.func.id for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
              and isinstance(node.exc.func, ast.Name)}  # fmt: skip
    assert raised <= section_of(doc, "Raises")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_is_fully_annotated(name: str) -> None:
    """An editor shows the type of each parameter, and of the result."""
    signature = inspect.signature(FUNCTIONS[name])
    assert [one for one in signature.parameters.values() if one.name != "self" and one.annotation is one.empty] == []
    assert signature.return_annotation is not signature.empty


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isclass(getattr(holdfast, name))])
def test_a_public_class_describes_itself_and_each_public_member(name: str) -> None:
    """A docstring stands at the class, at its properties and below its attributes, which have a type."""
    public = getattr(holdfast, name)
    assert public.__doc__
    tree = ast.parse(textwrap.dedent(inspect.getsource(public)))
    described, typed = set(), set()
    for body in [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]:
        for node, below in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign):
                target = node.target.attr if isinstance(node.target, ast.Attribute) else getattr(node.target, "id", "")
                typed.add(target)
                described |= {target} if isinstance(below, ast.Expr) else set()
    for member in MEMBERS[name]:
        found = inspect.getattr_static(public, member, None)
        getter = found.fget if isinstance(found, property) else found
        if inspect.isfunction(getter):
            assert getter.__doc__, member
            assert "return" in getter.__annotations__, member
        else:
            assert member in described, member
            assert member in typed, member


def test_classes_that_a_script_only_receives_are_types_for_annotations() -> None:
    """A user annotates with what he gets: the same class that `session` and `steps` are annotated with."""
    assert set(NAMES) >= MADE_BY_HOLDFAST
    assert inspect.signature(holdfast.session).return_annotation == "Session"


@pytest.mark.parametrize(("kind", "name"), [("local", "LocalCluster"), ("ssh", "SshCluster"), ("slurm", "SlurmCluster")])
def test_creating_a_cluster_of_no_class_names_the_class(kind: str, name: str) -> None:
    """The type of all clusters is for annotations; a call says what to create."""
    with pytest.raises(TypeError, match=rf"holdfast\.{name}"):
        holdfast.Cluster(kind=kind)  # type: ignore[operator]


def test_the_page_shows_a_job_file_in_python(tmp_path: Path) -> None:
    """The example is a job file with a cluster."""
    (tmp_path / "job.py").write_text(JOB_FILE)
    job, cluster = load_job(tmp_path / "job.py")
    assert isinstance(job, holdfast.TrainingJob)
    assert isinstance(cluster, holdfast.LocalCluster)
    assert JOB_FILE in (DOCS / "reference/python-api.md").read_text()


def test_every_class_of_clusters_is_a_cluster() -> None:
    """`isinstance` and pydantic know the type of all clusters."""
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 (this test alone)

    assert isinstance(holdfast.LocalCluster(nodes=2), holdfast.Cluster)
    assert not isinstance("local", holdfast.Cluster)
    adapter: TypeAdapter[Any] = TypeAdapter(holdfast.Cluster | None)
    assert adapter.validate_python({"kind": "local", "nodes": 3}) == holdfast.LocalCluster(nodes=3)
    assert adapter.validate_python(None) is None
    with pytest.raises(ValidationError):
        adapter.validate_python({"kind": "nowhere"})
