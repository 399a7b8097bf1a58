"""`holdfast faults hang`: dumps that torch writes, and what is no dump."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.detectors.training.flight_recorder import NotADump, explained, missing, read
from holdfast.detectors.training.hang_analysis import MISMATCH, STUCK
from tests.cli.conftest import Command, environment

SCRIPT = """
import json, os, pathlib, sys, time, torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json

rank, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
dist.init_process_group("gloo", rank=rank, world_size=3, init_method=f"file://{folder}/store")
some = dist.new_group([0, 2])
for _ in range(3):
    dist.all_reduce(torch.ones(4))
if rank != 1:
    dist.all_reduce(torch.ones(4), group=some)
    work = dist.all_reduce(torch.ones(7), async_op=True)
while sum(not one["retired"] for one in json.loads(_dump_fr_trace_json())["entries"]) > (rank != 1):
    time.sleep(0.05)  # what is finished is noted a moment later
(folder / f"trace_rank_{rank}").write_bytes(_dump_fr_trace())
(folder / f"trace_rank_{rank}.json").write_bytes(_dump_fr_trace_json())
while len(list(folder.glob("*.json"))) < 3:
    time.sleep(0.05)
os._exit(0)
"""
"""Rank 1 does not arrive at the fourth all_reduce of three ranks."""

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the dumps of three ranks, one of which is missing in a collective."""
    folder = tmp_path_factory.mktemp("dumps")
    (folder / "hangs.py").write_text(SCRIPT)
    command = [sys.executable, "hangs.py"]
    env = environment(TORCH_FR_BUFFER_SIZE="50")
    ranks = [subprocess.Popen([*command, str(rank), str(folder)], cwd=folder, env=env) for rank in range(3)]
    assert [rank.wait(110) for rank in ranks] == [0, 0, 0]
    return folder


def edited(folder: Path, edits: dict[int, Edit]) -> dict[int, Any]:
    """Return the dumps in *folder*, changed by rank as NCCL or another hang would have it."""
    found = {rank: json.loads((folder / f"trace_rank_{rank}.json").read_bytes()) for rank in range(3)}
    for rank, edit in edits.items():
        edit(found[rank])
    return {rank: read(json.dumps(one).encode()) for rank, one in found.items()}


@pytest.mark.parametrize(("ending", "place"), [("", " (hangs.py:10)"), (".json", "")])
def test_the_missing_rank_is_named(here: Command, dumps: Path, ending: str, place: str) -> None:
    """With what the others wait at and, in a pickle, the last line that it is known to have reached."""
    done = here("faults", "hang", *(str(dumps / f"trace_rank_{rank}{ending}") for rank in range(3)))
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("rank 1 did not arrive at all_reduce #4 of group 0 (ranks 0, 2 wait); ")
    assert first.endswith(f"rank 1 is at a place after all_reduce #3 of group 0{place}")
    assert ("hangs.py:13" in done.stdout) == (not ending)


def test_a_rank_without_a_dump_is_not_accused(here: Command, dumps: Path) -> None:
    """It is said to be unknown, and no other is named in its place."""
    done = here("faults", "hang", str(dumps / "trace_rank_0"), str(dumps / "trace_rank_2"), "--json")
    found = json.loads(done.stdout)
    assert (found["rank"], found["text"], found["missing"]) == (None, None, [1])
    assert [one["rank"] for one in found["unfinished"]] == [0, 2]


def _enters(size: int, name: str = "gloo:all_reduce") -> Edit:
    def edit(dump: dict[str, Any]) -> None:
        last = dump["entries"][-1]
        number = {"collective_seq_id": 4, "input_sizes": [[size]], "profiling_name": name, "retired": False}
        dump["entries"].append({**last, **number, "process_group": ["0", "default_pg"]})

    return edit


def _lost(dump: dict[str, Any]) -> None:
    del dump["entries"][:]
    dump["entries"].append(_ELSEWHERE)


_ELSEWHERE = {
    "record_id": 70,
    "process_group": ["2", "undefined"],
    "collective_seq_id": 40,
    "is_p2p": False,
    "profiling_name": "gloo:reduce",
    "input_sizes": [[1]],
    "input_dtypes": ["Float"],
    "retired": True,
    "state": "scheduled",
    "time_created_ns": 1,
}


def _receives(dump: dict[str, Any]) -> None:
    names = {"profiling_name": "nccl:recv 1<-0", "is_p2p": True, "retired": False, "state": "started"}
    dump["entries"].append({**dump["entries"][-1], **names})


def _members(dump: dict[str, Any]) -> None:
    dump["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}


@pytest.mark.parametrize(
    ("edits", "kind", "rank", "words"),
    [
        ({1: _enters(7)}, STUCK.id, None, "all 3 ranks of group 0 are at all_reduce of 7 float values, #4, and it does not finish"),
        ({1: _enters(9)}, MISMATCH.id, 1, "rank 1 entered all_reduce of 9 float values as #4 of group 0 where ranks 0, 2 entered"),
        ({1: _enters(7, "gloo:barrier")}, MISMATCH.id, 1, "rank 1 entered barrier"),
        ({1: _receives}, "", 1, "rank 1 is at recv 1<-0 of group 0"),
    ],
)
def test_other_hangs(dumps: Path, edits: dict[int, Edit], kind: str, rank: int | None, words: str) -> None:
    """All are there, one enters another operation, or one waits elsewhere."""
    found = explained(edited(dumps, edits))
    assert found is not None
    assert (found.kind, found.rank) == (kind, rank)
    assert words in found.quote


def test_what_is_not_known_is_not_said(dumps: Path) -> None:
    """Records that newer ones overwrote, and ranks that only the members of a group tell of."""
    assert explained(edited(dumps, {1: _lost})) is None
    grown = edited(dumps, {0: _members, 1: _enters(7)})
    assert (explained(grown), missing(grown)) == (None, (3,))
    receiving = edited(dumps, {0: _members, 1: _receives})
    assert explained(receiving) is None


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("run",)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"[]", b"{}", b"step 1\n", b"\x80\x04", b'{"entries": [{}]}', b'{"entries": 3}', b"[" * 100_000),
        pickle.dumps({"entries": [_Evil()]}),
        pickle.dumps({"entries": [{**_ELSEWHERE, "time_created_ns": 10**40}]}),
        pickle.dumps(3),
    ],
)
def test_what_is_no_dump_is_refused(data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """With one error, and without running anything."""
    with pytest.raises(NotADump):
        read(data)
    assert not capsys.readouterr().out


def test_files_that_cannot_be_read(here: Command, tmp_path: Path) -> None:
    """Each with its reason."""
    (tmp_path / "trace_rank_1").write_text("text")
    (tmp_path / "nameless").write_text("text")
    (tmp_path / "folder_1").mkdir()
    for name, words in {
        "trace_rank_1": "it is none",
        "trace_rank_2": "no such file",
        "nameless": "does not end with a rank",
        "folder_1": "a directory",
    }.items():
        done = here("faults", "hang", str(tmp_path / name))
        assert done.returncode == 2
        assert words in done.stderr
    done = here("faults", "hang", str(tmp_path / "trace_rank_1"), str(tmp_path / "trace_rank_1"))
    assert done.returncode == 2
