"""What a script sees of its launcher: the same as under the torchrun that is installed, and nothing that is Holdfast's own business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.agent.node.directory import inherited_environment
from holdfast.agent.workers.worker import Worker
from holdfast.control.config.worker_env import prepare_fields, rank_environments, seat_environment
from holdfast.control.state.rank_table import RankTable
from holdfast.history import Job
from holdfast.host.own_variables import with_added, without_added
from holdfast.prefect.server import QUIET
from holdfast.spec import LocalCluster, TrainingJob
from tests.agent.rig import Flow, Node

SHOW = """
import json, os, pathlib, sys
facts = {"environment": dict(os.environ), "argv": sys.argv, "file": __file__, "path": sys.path[0]}
pathlib.Path(os.environ["SHOWN"], "rank-" + os.environ["RANK"]).write_text(json.dumps(facts))
"""
OF_PLACES = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",
}  # fmt: skip
ALIKE = {*OF_PLACES, "MASTER_ADDR", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""Variables whose values are the same; those of the others name a run, a port or a file."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder with the script, and an environment as a user's: nothing of torchrun's and nothing of Holdfast's."""
    (tmp_path / "show.py").write_text(SHOW)
    for name in list(os.environ):
        if name in {*ALIKE, "DO_NOT_TRACK"} or name.startswith("TORCHELASTIC_"):
            monkeypatch.delenv(name)
    return tmp_path


def by_torchrun(folder: Path) -> list[dict[str, Any]]:
    """Return what the script saw on two ranks of a real torchrun."""
    (folder / "theirs").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "show.py", "--lr", "1"]
    environment = {**os.environ, "SHOWN": str(folder / "theirs")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / "theirs" / f"rank-{rank}").read_text()) for rank in (0, 1)]


def ours(folder: Path, node: Node, flow: Flow) -> list[dict[str, Any]]:
    """Return what the script saw on two ranks of a real agent, with the commands of a controller."""
    (folder / "ours").mkdir()
    spec = TrainingJob.model_validate({
        "name": "shown", "script": "show.py", "args": ["--lr", "1"], "workdir": str(folder), "nproc_per_node": 2,
        "env": {"SHOWN": str(folder / "ours")},
    })  # fmt: skip
    job = cast("Job", SimpleNamespace(id="j", name="shown", directory=str(folder / "job")))
    plan = prepare_fields(spec, LocalCluster(), job)
    places = rank_environments({"node-0": [0, 1]}, generation=1, rank_table=RankTable(store=("127.0.0.1", 29501)), job="j")["node-0"]
    order = {name: plan[name] for name in ("warm", "preload", "argv", "directory", "environment", "defaults")}
    flow.prepare(node, plan["argv"], **{name: value for name, value in order.items() if name != "argv"})
    flow.ok("start", generation=1, membership={"node-0": [0, 1]}, workers=places)
    flow.until(lambda: len([one for one in flow.events if one["event"] == "worker.exited"]) == 2)
    return [json.loads((folder / "ours" / f"rank-{rank}").read_text()) for rank in (0, 1)]


def test_a_script_sees_what_it_sees_under_torchrun(folder: Path, node: Node, flow: Flow) -> None:
    """The same variables, the same values where these say no run, port or file; argv as typed; beside it only what is called Holdfast's."""
    for mine, theirs in zip(ours(folder, node, flow), by_torchrun(folder), strict=True):
        here, there = mine["environment"], theirs["environment"]
        assert {name for name in there if name not in here} == set()
        assert {name: here[name] for name in ALIKE - {"MASTER_ADDR"}} == {name: there[name] for name in ALIKE - {"MASTER_ADDR"}}
        assert {name for name in here if name not in there and not name.startswith("HOLDFAST_")} <= {"PYTHONPATH", "PYTHONUNBUFFERED"}
        assert here["TORCHELASTIC_ERROR_FILE"] != there["TORCHELASTIC_ERROR_FILE"]
        assert (mine["argv"], mine["path"]) == (theirs["argv"], theirs["path"])
        assert mine["argv"][0] == "show.py"
        assert mine["file"] == str(folder / "show.py")


def test_variables_that_the_user_sets_stay(folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """As under torchrun: threads and NCCL's error handling are defaults."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    for seen in ours(folder, request.getfixturevalue("node"), request.getfixturevalue("flow")):
        assert (seen["environment"]["OMP_NUM_THREADS"], seen["environment"]["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("3", "0")


def test_a_process_that_takes_over_a_rank_gets_the_same_variables() -> None:
    """One that began with the job and one that came later differ in nothing else."""
    rank_table = RankTable(store=("127.0.0.1", 29501), width=2)
    first = rank_environments({"n": [0, 1]}, generation=2, rank_table=rank_table, job="j")["n"][1]["environment"]
    later = seat_environment(1, rank_table, generation=2, ranks_per_node=2, job="j")
    assert {name: value for name, value in later.items() if name != "LOCAL_RANK"} == {
        name: value for name, value in first.items() if name != "LOCAL_RANK"
    }


def test_variables_of_the_controller_and_its_server_reach_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the user had set it."""
    bare = {"HOME": "/h", "PREFECT_API_URL": "http://127.0.0.1:1/api"}
    assert without_added(with_added(bare, QUIET)) == bare
    assert without_added(with_added({**bare, "DO_NOT_TRACK": "0"}, QUIET))["DO_NOT_TRACK"] == "1", "the user's own wish, by another word"
    for name, value in with_added(bare, QUIET).items():
        monkeypatch.setenv(name, value)
    given = inherited_environment()
    assert given["HOME"] == "/h"
    assert {"DO_NOT_TRACK", "HOLDFAST_ADDED", "HOLDFAST_PREFECT_STANDS_IN", "PREFECT_API_URL", *QUIET}.isdisjoint(given)


RECORDED = """
import os, sys
from torch.distributed.elastic.multiprocessing.errors import record
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
@record
def main():
    raise ValueError("the learning rate is -1")
if __name__ == "__main__":
    main()
"""


def test_the_error_that_a_script_records_for_its_launcher_is_what_ended_it(node: Node, flow: Flow) -> None:
    """Though its output says nothing; the file is there once, so that no later end is explained by it."""
    flow.prepare(node, [sys.executable, node.script(RECORDED)])
    flow.start(1)
    ended = flow.exited(generation=1)
    assert (ended["code"], ended["raised"]["type"], ended["raised"]["message"]) == (1, "ValueError", "the learning rate is -1")
    assert ended["raised"]["traceback"].rstrip().endswith("ValueError: the learning rate is -1")
    assert not list((node.folder / "errors").iterdir())


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"message": 7}', '{"message": {"message": "x"}}', '{"message": "\\u0000 ?"}', "[" * 100_000, "x" * (2 << 20)],
)
def test_an_unreadable_error_file_is_ignored(tmp_path: Path, text: str) -> None:
    """The script's own words may be anything."""
    (tmp_path / "1.json").write_text(text)
    assert Worker(rank=0, generation=1, log=tmp_path / "log", error_file=tmp_path / "1.json").take_error() is None
