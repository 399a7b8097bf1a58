"""docs/how-to/workflows.md describes what `holdfast.workflows` has: no less, and nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from prefect.flows import Flow
from prefect.tasks import Task

from holdfast import workflows

PAGE = (Path(__file__).parents[2] / "docs/how-to/workflows.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_pages_code_imports_what_is_there() -> None:
    """Each block of Python parses, and each name that it imports from us exists."""
    assert len(CODE) > 1
    for code in CODE:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module == "holdfast.workflows":
                assert {name.name for name in node.names} <= set(workflows.__all__)


def test_every_flow_task_and_error_is_on_the_page() -> None:
    """A block without content is not there; the table names no other."""
    public = {name: getattr(workflows, name) for name in workflows.__all__}
    named = {
        name
        for name, value in public.items()
        if isinstance(value, Flow | Task) or (isinstance(value, type) and issubclass(value, Exception))
    }
    words = set(re.findall(r"`(\w+)`", PAGE))
    assert named <= words
    table = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert set(table) <= set(workflows.__all__)


def test_every_block_is_described_with_its_parameters() -> None:
    """Its docstring is what the UI and an editor show: every parameter of a task stands there."""
    for name in workflows.__all__:
        block = getattr(workflows, name)
        if isinstance(block, Task):
            text = block.fn.__doc__ or ""
            missing = [one for one in parameters_of(block) if not re.search(rf"^ +{one}: ", text, re.MULTILINE)]
            assert not missing, f"{name} does not describe {missing}"


def parameters_of(block: Task[..., object]) -> list[str]:
    """Return the names of a task's parameters."""
    return list(block.fn.__annotations__.keys() - {"return"})
