"""Imports point one way: who may import whom, held on the source and on running interpreters."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOPS = ("flows", "tasks", "policies", "detectors", "holdfast")
"""Folders of the repository; the first four are packages of `holdfast`, which holds links to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """What the modules at and below *of* may import beside the standard library; among arrows the longest *of* speaks."""

    of: str
    ours: tuple[str, ...]
    """Modules of the project, each with all below it; ``-name`` takes one away."""
    theirs: tuple[str, ...] = ()
    """Other packages; ``*`` is any, ``-name`` takes one away."""


LEAVES = (
    "holdfast.errors",
    "holdfast.host.gpu_assignment",
    "holdfast.host.own_variables",
    "holdfast.host.ports",
    "holdfast.host.process",
    "holdfast.log",
    "holdfast.memstore",
    "holdfast.paths",
    "holdfast.peer_error_patterns",
    "holdfast.plurals",
    "holdfast.protocol",
    "holdfast.security.authenticated_listener",
    "holdfast.security.redaction",
    "holdfast.source_tree",
    "holdfast.tensor_layout",
    "holdfast.torch_versions",
)
"""Standard library only, so that everything may stand on them."""

ARROWS = (
    Arrow(of="holdfast.flows", ours=("holdfast", "-holdfast.workflows"), theirs=("*", "-torch")),
    Arrow(of="holdfast.tasks", ours=("holdfast", "-holdfast.flows", "-holdfast.workflows"), theirs=("*", "-torch")),
    Arrow(of="holdfast.policies", ours=("holdfast.policies", "holdfast.detectors", "holdfast.plurals")),
    # Two leaves outside: the runtime, which loads no detector, judges raised errors by the same words; and all texts count alike.
    Arrow(of="holdfast.detectors", ours=("holdfast.detectors", "holdfast.peer_error_patterns", "holdfast.plurals")),
    Arrow(
        of="holdfast",
        ours=("holdfast", "-holdfast.flows", "-holdfast.tasks", "-holdfast.workflows", "-holdfast.prefect_client"),
        theirs=("*", "-torch", "-prefect"),
    ),
    Arrow(
        of="holdfast.prefect_client", ours=("holdfast", "-holdfast.flows", "-holdfast.tasks", "-holdfast.workflows"), theirs=("*", "-torch")
    ),
    # What a user imports stands above everything else, under the one name that is certain to be ours.
    Arrow(of="holdfast.workflows", ours=("holdfast",), theirs=("*", "-torch")),
    Arrow(of="holdfast.agent", ours=("holdfast.agent", "holdfast.probe.readers", "holdfast.detectors", *LEAVES)),
    Arrow(of="holdfast.probe.readers", ours=("holdfast.probe.readers", "holdfast.probe.remote", "holdfast.detectors"), theirs=("pynvml",)),
    Arrow(of="holdfast.probe.remote", ours=("holdfast.probe.remote", "holdfast.source_tree")),
    Arrow(of="holdfast.cluster.slurm.step_launcher", ours=("holdfast.cluster.slurm.step_launcher", *LEAVES)),
    Arrow(
        of="holdfast.probe.burn_in.checks",
        ours=("holdfast.probe.burn_in.checks", "holdfast.security.authenticated_listener", "holdfast.detectors", "holdfast.plurals"),
    ),
    Arrow(
        of="holdfast.runtime",
        ours=(
            "holdfast.runtime",
            "holdfast.security.authenticated_listener",
            "holdfast.memstore",
            "holdfast.peer_error_patterns",
            "holdfast.plurals",
            "holdfast.host.gpu_assignment",
            "holdfast.host.process",
            "holdfast.protocol",
            "holdfast.tensor_layout",
            "holdfast.torch_versions",
        ),
        theirs=("torch",),
    ),
    Arrow(
        of="holdfast.integrations",
        ours=("holdfast.integrations", "holdfast.runtime"),
        theirs=("torch", "transformers", "lightning", "pytorch_lightning", "torchmetrics", "torchtitan", "torchdata"),
    ),
    *(Arrow(of=leaf, ours=LEAVES) for leaf in LEAVES),
)


def inside(name: str, above: str) -> bool:
    """Say whether the module *name* is *above* or lies below it."""
    return name == above or name.startswith(above + ".")


def modules(root: Path) -> dict[str, Path]:
    """Return the file of each module of the project under *root*."""
    files = [file for top in TOPS for file in (root / top).rglob("*.py")]  # which follows no link
    return {module_name(file.relative_to(root)): file for file in files}


def module_name(file: Path) -> str:
    """Return the full name of the module in *file*, a path below the top of the repository."""
    parts = file.with_suffix("").parts
    return ".".join(parts if parts[0] == "holdfast" else ("holdfast", *parts)).removesuffix(".__init__")


def imports(module: str, file: Path, known: dict[str, Path]) -> Iterator[tuple[int, str]]:
    """Yield line and name of everything *module* imports: at the top, in functions, for annotations only."""
    for node in ast.walk(ast.parse(file.read_bytes(), str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, module, is_package=file.stem == "__init__")
            for name in node.names:
                whole = f"{base}.{name.name}"
                yield node.lineno, whole if whole in known else base


def absolute(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """Return the module that a (perhaps relative) ``from ... import`` names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    above = parts[: len(parts) - node.level + is_package]
    return ".".join([*above, *([node.module] if node.module else [])])


def allows(arrow: Arrow, name: str) -> bool:
    """Say whether *arrow* lets its modules import *name*."""
    top = name.partition(".")[0]
    if top == "holdfast":
        away = (ours.removeprefix("-") for ours in arrow.ours if ours.startswith("-"))
        return any(inside(name, ours) for ours in arrow.ours) and not any(inside(name, one) for one in away)
    if top in sys.stdlib_module_names:
        return True
    return f"-{top}" not in arrow.theirs and (top in arrow.theirs or "*" in arrow.theirs)


def violations(root: Path) -> list[str]:
    """Return every import under *root* that goes against the arrows."""
    known = modules(root)
    wrong = []
    for module, file in sorted(known.items()):
        arrow = max((arrow for arrow in ARROWS if inside(module, arrow.of)), key=lambda arrow: len(arrow.of))
        seen = dict.fromkeys(imports(module, file, known))
        wrong += [f"{file.relative_to(root)}:{line} {module} must not import {name}" for line, name in seen if not allows(arrow, name)]
    return wrong


def test_no_module_imports_against_the_arrows() -> None:
    """Each line of the answer is one import to move elsewhere."""
    known = modules(ROOT)
    assert all(below(f"holdfast.{top}") for top in TOPS if top != "holdfast"), "a package has no module: the claim would be empty"
    assert len(below("holdfast")) == len(known) > 400
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("module", "text", "wrong"),
    [
        ("holdfast/agent/node.py", "import torch", "torch"),
        ("holdfast/agent/node.py", "def late():\n    import prefect.flows", "prefect.flows"),
        ("holdfast/agent/node.py", "from holdfast import spec", "holdfast.spec"),
        ("holdfast/agent/node.py", "from .. import spec", "holdfast.spec"),
        ("holdfast/agent/__init__.py", "from ..spec import job", "holdfast.spec"),
        ("holdfast/agent/node.py", "from holdfast.policies.recovery.escalation import decide", "holdfast.policies.recovery.escalation"),
        ("holdfast/runtime/session.py", "import numpy", "numpy"),
        ("holdfast/runtime/session.py", "from holdfast.log import note", "holdfast.log"),
        ("holdfast/cli/main.py", "if TYPE_CHECKING:\n    from prefect import Flow", "prefect"),
        ("holdfast/spec/__init__.py", "from holdfast.tasks import training_job", "holdfast.tasks"),
        ("holdfast/protocol.py", "from holdfast.spec import job", "holdfast.spec"),
        ("detectors/training/process.py", "from holdfast.policies.recovery import escalation", "holdfast.policies.recovery.escalation"),
        ("policies/recovery/escalation.py", "import holdfast.errors", "holdfast.errors"),
        ("tasks/training_job.py", "from holdfast.flows import training_job", "holdfast.flows"),
        ("flows/training_job.py", "import torch", "torch"),
        ("flows/training_job.py", "from holdfast.workflows import training_job", "holdfast.workflows"),
        ("holdfast/cli/main.py", "import holdfast.workflows", "holdfast.workflows"),
        ("holdfast/workflows/__init__.py", "import torch", "torch"),
    ],
)
def test_an_import_against_an_arrow_is_refused(tmp_path: Path, module: str, text: str, wrong: str) -> None:
    """On a small tree of its own: nothing else is complained of, so each refusal is that import's."""
    for name in ("holdfast/spec/__init__.py", "policies/recovery/escalation.py", "detectors/nodes/node.py", "tasks/__init__.py", module):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / module).write_text(text)
    (line,) = violations(tmp_path)
    assert line.endswith(f"must not import {wrong}")


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            "holdfast/agent/node.py",
            "import os\nfrom holdfast import log, protocol\nfrom holdfast.detectors import node\nfrom . import node",
        ),
        ("holdfast/runtime/session.py", "import torch.distributed\nfrom holdfast.protocol import connect"),
        (
            "holdfast/workflows/__init__.py",
            "from holdfast.flows import training_job\nfrom holdfast.tasks import training_job\nfrom prefect import flow",
        ),
        (
            "tasks/training_job.py",
            "from prefect import task\nfrom holdfast.spec import job\nfrom holdfast.policies.recovery.escalation import decide",
        ),
    ],
)
def test_an_import_along_the_arrows_is_let_through(tmp_path: Path, module: str, text: str) -> None:
    """A check that refuses everything holds nothing."""
    for name in (
        "holdfast/log.py",
        "holdfast/protocol.py",
        "holdfast/spec/__init__.py",
        "policies/recovery/escalation.py",
        "detectors/nodes/node.py",
        module,
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / module).write_text(text)
    assert violations(tmp_path) == []


LOAD = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def loaded(*names: str, flags: tuple[str, ...] = ("-I",)) -> set[str]:
    """Import the modules *names* in a fresh interpreter; return the top-level names of all that came with them."""
    child = subprocess.run([sys.executable, *flags, "-c", LOAD, str(ROOT), *names], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return set(json.loads(child.stdout))


def below(*tops: str) -> list[str]:
    """Return every module at and below *tops*."""
    return [name for name in sorted(modules(ROOT)) if any(inside(name, top) for top in tops)]


def test_agent_detectors_and_policies_start_on_the_standard_library_alone() -> None:
    """`-S` hides every installed package, so an import that reaches for one fails here."""
    names = below("holdfast.agent", "holdfast.probe.readers", "holdfast.detectors", "holdfast.policies")
    assert {"holdfast.agent", "holdfast.probe.readers", "holdfast.detectors", "holdfast.policies"} <= set(names)
    came = loaded(*names, flags=("-I", "-S"))
    assert came <= sys.stdlib_module_names | {"__main__", "holdfast"}


def test_importing_holdfast_is_cheap() -> None:
    """A training script says `import holdfast`; what it does not use it does not pay for."""
    assert not loaded("holdfast") & {"torch", "prefect", "pydantic", "sqlmodel", "sqlalchemy"}


def test_the_command_line_loads_neither_torch_nor_prefect() -> None:
    """Each takes seconds; `holdfast status` has a fraction of one."""
    names = [name for name in below("holdfast.cli", "holdfast.history", "holdfast.spec") if "migrations" not in name]  # run by Alembic
    assert {"holdfast.cli", "holdfast.history", "holdfast.spec"} <= set(names)
    assert not loaded(*names) & {"torch", "prefect"}


def test_the_runtime_loads_torch_and_nothing_else_of_ours() -> None:
    """The training process carries no database, no forms, no flow."""
    came = loaded(*below("holdfast.runtime"))
    assert "torch" in came
    assert not came & {"prefect", "pydantic", "sqlmodel", "sqlalchemy", "detectors", "policies", "tasks", "flows"}
