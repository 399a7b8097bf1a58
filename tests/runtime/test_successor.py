"""The successor of a hot spare: a process without any line of the script, and without modules that know another rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.ranks import ROOT

MODULES = {
    "plain": "value = 1",
    "asks": "import os\nrank = os.environ.get('RANK')",
    "uses": "import asks",
    "may_use": "try:\n    import asks\nexcept ImportError:\n    asks = None",
    "hides": "try:\n    import asks\nexcept:\n    asks = None",
}

PROGRAM = """
import json, os, sys, sysconfig
from holdfast.host.process import become_subreaper
from holdfast.runtime.process import successor

folder, names = sys.argv[1], sys.argv[2:]
sys.path.insert(0, folder)
sysconfig.get_path = lambda _name: folder  # what lies there counts as installed
become_subreaper()
agent = os.getpid()
if not os.fork():
    os.environ["RANK"] = "0"
    os.environ["OTHER"] = "old"
    order = successor.fork(agent)
    if order is None:
        for name in names:
            __import__(name)
        successor.record_imports()
        successor.send_imports()
        if successor.ready() is None:
            print(json.dumps({"gone": True}), flush=True)
        else:
            successor.go({"RANK": "3"}, [{"do": "regroup"}])
        os._exit(0)
    modules = sorted(set(sys.modules) & {"plain", "asks", "uses", "may_use", "hides"})
    seen = {"modules": modules, "order": order, "child of the agent": os.getppid() == agent, "own session": os.getsid(0) == os.getpid()}
    print(json.dumps(seen), flush=True)
    os._exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


def successor_of(folder: Path, *names: str) -> dict[str, Any]:
    """Return a description of the successor of a hot spare that has imported modules of these *names*."""
    for name, source in MODULES.items():
        (folder / f"{name}.py").write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM, str(folder), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    reported: dict[str, Any] = json.loads(done.stdout)
    return reported


@pytest.mark.parametrize("names", [("plain", "asks", "uses", "may_use"), ("may_use", "uses", "plain")])
def test_a_successor_imports_modules_that_do_not_read_the_rank(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Neither a module that reads it, nor one that imports such a module, whichever came first in the script."""
    reported = successor_of(tmp_path, *names)
    assert reported == {
        "modules": ["plain"],
        "order": {"do": "go", "environment": {"RANK": "3"}, "commands": [{"do": "regroup"}]},
        "child of the agent": True,
        "own session": True,
    }


def test_a_successor_with_an_uncertain_module_exits(tmp_path: Path) -> None:
    """A module that hides a failed import would stay as it is, and the script would use it so."""
    assert successor_of(tmp_path, "asks", "hides") == {"gone": True}
