"""Nothing that comes over a network or out of a checkpoint can become code: what could make it so does not stand in our sources."""

from __future__ import annotations

import ast
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from holdfast.runtime.checkpoint.storage import METADATA, CheckpointReader
from holdfast.runtime.state import tree
from tests.test_arrows import TOPS

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for top in TOPS for path in (ROOT / top).rglob("*.py"))

UNPICKLES = {
    *("pickle.load", "pickle.loads", "cPickle.loads", "marshal.load", "marshal.loads", "shelve.open", "dill.loads", "cloudpickle.loads"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "numpy.load", "np.load"),
}
OF_TORCH = {
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list", "recv_object_list"),
    *("dcp.save", "dcp.load", "state_dict_saver", "_tensor_to_object", "async_save"),
}
RUNS = {"eval", "exec"}
MAY_RUN = {
    "holdfast/runtime/process/fork_server.py": "the user's script, in its own worker",
    "holdfast/spec/files/python_file.py": "the user's job or cluster file, in the user's own process",
    "holdfast/probe/remote/remote_main.py": "our own readers, sent over the connection that logged in to the node",
}


def name_of(call: ast.AST) -> str:
    """Return the dotted name that is called."""
    if isinstance(call, ast.Attribute):
        return f"{name_of(call.value)}.{call.attr}"
    return call.id if isinstance(call, ast.Name) else "?"


def is_safe(call: ast.Call) -> bool:
    """Return whether a `torch.load` refuses code."""
    return any(one.arg == "weights_only" and isinstance(one.value, ast.Constant) and one.value.value is True for one in call.keywords)


def wrong_call(node: ast.Call, name: str) -> str | None:
    """Return what is wrong with a call in the file *name*, if anything."""
    called = name_of(node.func)
    last = called.rpartition(".")[2]
    if called.partition(".")[0] == "torch" and last == "load":
        return None if is_safe(node) else f"{called} without weights_only=True"
    bad = called in UNPICKLES | OF_TORCH or last in OF_TORCH | {"Unpickler"} or called == "save"
    return called if bad or (called in RUNS and name not in MAY_RUN) else None


def wrong_import(node: ast.ImportFrom) -> str | None:
    """Return what is wrong with an import, if anything."""
    names = {one.name for one in node.names}
    bad = node.module == "pickle" or names & OF_TORCH or (node.module or "").endswith("state_dict_saver")
    return f"from {node.module} import {', '.join(names)}" if bad else None


def wrong_class(node: ast.ClassDef) -> str | None:
    """Return what is wrong with a class: an unpickler that refuses nothing."""
    if not any(name_of(base).endswith("Unpickler") for base in node.bases):
        return None
    finds = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "find_class"]
    return None if any(isinstance(one, ast.Raise) for find in finds for one in ast.walk(find)) else f"{node.name} refuses nothing"


def found_in(source: str, name: str) -> Iterator[str]:
    """Yield what in *source*, the file *name*, could make code of data."""
    for node in ast.walk(ast.parse(source)):
        why = None
        if isinstance(node, ast.Call):
            why = wrong_call(node, name)
        elif isinstance(node, ast.ImportFrom):
            why = wrong_import(node)
        elif isinstance(node, ast.ClassDef):
            why = wrong_class(node)
        if why is not None:
            yield f"{name}:{getattr(node, 'lineno', 0)}: {why}"


def test_no_source_of_ours_runs_data_as_code() -> None:
    """Neither unpickles what others wrote, nor has torch do so between ranks."""
    assert [one for path in SOURCES for one in found_in(path.read_text(), str(path.relative_to(ROOT)))] == []
    assert all((ROOT / name).exists() for name in MAY_RUN)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(x)",
        "from pickle import loads",
        "import pickle\npickle.Unpickler(x).load()",
        "class A(pickle.Unpickler):\n    pass",
        "class A(pickle.Unpickler):\n    def find_class(self, module, name):\n        return super().find_class(module, name)",
        "torch.load(x)",
        "torch.load(x, weights_only=False)",
        "dist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list",
        "from torch.distributed.checkpoint.state_dict_saver import save",
        "eval(x)",
        "yaml.load(x)",
    ],
)
def test_the_check_itself_can_fail(source: str) -> None:
    """It sees each way."""
    assert list(found_in(source, "a.py"))


class Evil:
    """What runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def test_a_checkpoint_that_would_run_a_command_runs_none(tmp_path: Path) -> None:
    """Neither in its metadata nor in the tree of what is no tensor."""
    mark = tmp_path / "ran"
    (tmp_path / METADATA).write_bytes(pickle.dumps(Metadata({}, planner_data=Evil(mark))))
    with pytest.raises(pickle.UnpicklingError, match="not allowed"):
        CheckpointReader(tmp_path)
    whole = io.BytesIO()
    torch.save({"rng": Evil(mark)}, whole)
    with pytest.raises(pickle.UnpicklingError):
        tree.unpickled(b"t" + whole.getvalue())
    with pytest.raises(pickle.UnpicklingError):
        tree.unpickled(b"q" + pickle.dumps({"rng": Evil(mark)}))
    assert not mark.exists()
    pickle.loads((tmp_path / METADATA).read_bytes())  # noqa: S301 (what it would have done)
    assert mark.exists()


def test_what_a_user_keeps_in_a_checkpoint_survives(tmp_path: Path) -> None:
    """Numbers, texts, bytes, tuples, sets of dicts, keys of any plain kind, tensors, and the states of generators."""
    state = {
        "rng": {"python": (3, tuple(range(5)), None), "torch": torch.get_rng_state()},
        "data": {"position": 7, 3: "three", "order": [2, 0, 1], "seen": b"\x00\xff", "nested": {"a": (1.5, True)}},
    }
    back = tree.unpickled(tree.pickled(state))
    assert torch.equal(back["rng"].pop("torch"), state["rng"].pop("torch"))  # type: ignore[attr-defined]
    assert back == state
