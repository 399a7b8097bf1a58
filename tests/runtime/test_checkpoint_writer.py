"""Checkpoints written to disk from snapshots: the same as ranks write themselves, complete or absent, whatever happens."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from holdfast.memstore import write_requests
from holdfast.memstore.shared_memory import PAGE, labels
from holdfast.memstore.write_requests import WriteRequest
from holdfast.runtime.agent_client import AgentAnswer, AgentLink
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.save import CheckpointSettings, Saver
from holdfast.runtime.checkpoint.storage import CheckpointReader, WriteRate
from holdfast.runtime.checkpoint.storage_errors import StorageErrorReporter
from holdfast.runtime.checkpoint_writer import rendezvous
from holdfast.runtime.checkpoint_writer.rank_shard import boxes
from holdfast.runtime.checkpoint_writer.service import WriteTask
from holdfast.runtime.snapshots.config import SnapshotPlace
from holdfast.runtime.world import World
from tests.mentions import mentions
from tests.runtime.trainer import FIRST, Trainer, opened, same

STEP = FIRST + 2


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Close all snapshotters when a test has ended."""
    yield
    while opened:
        opened.pop().close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Give a real file system of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root mounts a disk")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


class RecordingLink(AgentLink):
    """A connection without an agent, which records messages and gives permission unless set otherwise."""

    def __init__(self) -> None:
        super().__init__(None)
        self.saves: list[int] = []
        self.storage_errors: list[tuple[str, str]] = []
        self.over = False

    def saved(self, step: int, path: Path, seconds: float, size: int, **more: float) -> None:
        """Take note."""
        assert path.is_dir()
        assert size > 0
        self.saves.append(step)

    def storage_error(self, kind: str, step: int | None, path: Path, why: str, *, rank: int | None = None) -> None:
        """Take note."""
        self.storage_errors.append((kind, why))

    def may_commit(self, step: int, seconds: float = 1.0, *, generation: int | None = None) -> AgentAnswer:
        """Answer as the agent would."""
        return AgentAnswer(ok=not self.over, why="generation 1 is over" if self.over else "")


def trained(folder: Path, places: list[SnapshotPlace], step: int = STEP) -> list[Trainer]:
    """Return a trainer for each place, all equal, which have done *step* steps and hold a snapshot of that."""
    trainers = []
    for place in places:
        trainers.append(Trainer(store_of(folder, place.rank), place=place))  # sets the generators
        trainers[-1].to(step)
    return trainers


def store_of(folder: Path, rank: int) -> Path:
    """Return the memory store of *rank*, which has a node of its own."""
    place = folder / f"memstore-{rank}"
    place.mkdir(parents=True, exist_ok=True)
    return place


def request_for(
    trainer: Trainer, memstore: Path, directory: Path, rank: int, world: int, *, step: int = STEP, keep: int = 2
) -> WriteRequest:
    """Have the newest snapshot ended, as the next step does, and request it written."""
    trainer.begin()
    trainer.end()
    (path,) = [path for path, label in labels(memstore).items() if label.step == step]
    more: dict[str, Any] = {"lineage": 1, "generation": 1, "loss": 0.5, "directory": str(directory), "keep": keep}
    request = WriteRequest(snapshot=path.name, step=step, rank=rank, world=world, **more)
    request.write(memstore)
    assert write_requests.pending(memstore) == [request]
    return request


def carried_out(folder: Path, requests: list[WriteRequest]) -> RecordingLink:
    """Carry *requests* out, each as if on its own node; return the recorded messages."""
    reported = RecordingLink()
    jobs = [
        WriteTask(request, store_of(folder, request.rank), reported, WriteRate(None), StorageErrorReporter(reported))
        for request in requests
    ]
    threads = [threading.Thread(target=job.run) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for request in requests:
        assert not write_requests.pending(store_of(folder, request.rank))  # whatever came of it, the slot is free
    return reported


def leftovers(directory: Path) -> list[str]:
    """Return the entries that are not complete checkpoints."""
    return sorted(path.name for path in directory.iterdir() if not manifest.looks_complete(path))


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_cover_all_elements_once_and_in_order(shape: list[int], data: st.DataObject) -> None:
    """Of any stretch of any tensor, in no more boxes than there must be."""
    size = math.prod(shape)
    begin = data.draw(st.integers(0, size))
    end = data.draw(st.integers(begin, size))
    whole = torch.arange(size).view(shape)
    found = list(boxes(shape, begin, end))
    parts = [whole[tuple(slice(at, at + length) for at, length in zip(*box, strict=True))].reshape(-1) for box in found]
    assert torch.cat([torch.empty(0, dtype=torch.long), *parts]).tolist() == list(range(begin, end))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_it_is_the_checkpoint_that_ranks_write_themselves(tmp_path: Path, copies: int) -> None:
    """Bit-identical, for Holdfast and for plain PyTorch, whichever copy wrote which part of it."""
    trainers = trained(tmp_path, [SnapshotPlace(rank, copies, "net", rank, copies) for rank in range(copies)])
    wanted = trainers[0].state()
    torch.manual_seed(1)  # the generators are part of the state
    by_ranks = tmp_path / "by-ranks"
    saver = Saver(CheckpointSettings(directory=by_ranks, every=1, keep=2), World(0, 1, "none"), 1)
    state = trainers[0].training.collect({"step": STEP, "loss": 0.5}, 0)
    assert saver.save(state, STEP, lowest=trainers[0].training.buffers())
    ours = tmp_path / "ours"
    requests = [request_for(one, store_of(tmp_path, rank), ours, rank, copies) for rank, one in enumerate(trainers)]
    reported = carried_out(tmp_path, requests)
    assert (reported.saves, reported.storage_errors) == ([STEP], [])
    assert manifest.read(ours / f"step-{STEP:08d}").world_size == copies
    assert not leftovers(ours)

    found = []
    for rank, place in enumerate((by_ranks, *[ours] * copies)):
        other = Trainer(tmp_path / "none")
        progress = other.training.load(CheckpointReader(manifest.folder_of(place, STEP)), max(0, rank - 1))
        assert (progress["step"], progress["loss"]) == (STEP, 0.5)
        assert same(other.state(), wanted)
        found.append(progress["rng"])
    assert same(found[1].keys(), found[0].keys())
    plain = []
    for place in (by_ranks, ours):
        dcp_to_torch_save(manifest.folder_of(place, STEP), tmp_path / "plain.pt")
        plain.append(torch.load(tmp_path / "plain.pt", weights_only=True))
    assert same(plain[0]["model"], plain[1]["model"])
    moments = [key for key in plain[0] if "exp_avg" in key]
    assert moments
    assert all(torch.equal(plain[0][key], plain[1][key]) for key in moments)


def test_what_several_shards_have_is_written_once(tmp_path: Path) -> None:
    """Ranks with the same model and states of their own: as where an optimizer is split over them."""
    trainers = trained(tmp_path, [SnapshotPlace(0, 2, "a"), SnapshotPlace(1, 2, "b")])
    wanted = trainers[0].state()
    ours = tmp_path / "ours"
    reported = carried_out(tmp_path, [request_for(one, store_of(tmp_path, rank), ours, rank, 2) for rank, one in enumerate(trainers)])
    assert reported.saves == [STEP]
    sizes = {name: file.size for name, file in manifest.read(ours / f"step-{STEP:08d}").files.items()}
    assert sizes["__1_0.distcp"] < sizes["__0_0.distcp"] / 10
    other = Trainer(tmp_path / "none")
    other.training.load(CheckpointReader(manifest.folder_of(ours, STEP)), 1)
    assert same(other.state(), wanted)


def test_only_the_newest_complete_checkpoints_are_kept(tmp_path: Path) -> None:
    """As many as were asked for."""
    (trainer,) = trained(tmp_path, [SnapshotPlace(0, 1, "net")])
    ours = tmp_path / "ours"
    for step in range(STEP, STEP + 4):
        assert carried_out(tmp_path, [request_for(trainer, store_of(tmp_path, 0), ours, 0, 1, step=step, keep=2)]).saves == [step]
    assert [path.name for path in manifest.candidates(ours)] == [f"step-{STEP + 3:08d}", f"step-{STEP + 2:08d}"]


def test_a_flipped_bit_in_memory_never_gets_a_digest(tmp_path: Path) -> None:
    """The rank that has it finds it before anything is written; the other gives up, and no file is left."""
    trainers = trained(tmp_path, [SnapshotPlace(rank, 2, "net", rank, 2) for rank in range(2)])
    ours = tmp_path / "ours"
    requests = [request_for(one, store_of(tmp_path, rank), ours, rank, 2) for rank, one in enumerate(trainers)]
    with (store_of(tmp_path, 1) / requests[1].snapshot).open("r+b") as file:
        file.seek(PAGE + 1000)
        byte = file.read(1)[0]
        file.seek(PAGE + 1000)
        file.write(bytes([byte ^ 4]))
    reported = carried_out(tmp_path, requests)
    assert not reported.saves
    ((kind, why),) = reported.storage_errors
    assert kind == "snapshot-spoiled"
    assert mentions(why, "changed in memory")
    assert not ours.exists() or not list(ours.iterdir())


def test_a_replaced_snapshot_is_not_written(tmp_path: Path) -> None:
    """Whatever happened meanwhile: a checkpoint is of one step."""
    trainers = trained(tmp_path, [SnapshotPlace(rank, 2, "net", rank, 2) for rank in range(2)])
    ours = tmp_path / "ours"
    requests = [request_for(one, store_of(tmp_path, rank), ours, rank, 2) for rank, one in enumerate(trainers)]
    (newer,) = [path for path, label in labels(store_of(tmp_path, 1)).items() if label.step == STEP - 1]
    newer.replace(store_of(tmp_path, 1) / requests[1].snapshot)
    reported = carried_out(tmp_path, requests)
    assert not reported.saves
    assert [kind for kind, _ in reported.storage_errors] == ["snapshot-spoiled"]


def test_nothing_is_published_for_a_generation_that_is_over(tmp_path: Path) -> None:
    """And no fault is reported, as there is none."""
    (trainer,) = trained(tmp_path, [SnapshotPlace(0, 1, "net")])
    ours = tmp_path / "ours"
    request, reported = request_for(trainer, store_of(tmp_path, 0), ours, 0, 1), RecordingLink()
    reported.over = True
    WriteTask(request, store_of(tmp_path, 0), reported, WriteRate(None), StorageErrorReporter(reported)).run()
    assert (reported.saves, reported.storage_errors, list(ours.iterdir())) == ([], [], [])


def test_a_rank_that_never_arrives_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others do not wait for it for ever."""
    monkeypatch.setattr(rendezvous, "STALL", 0.2)
    trainers = trained(tmp_path, [SnapshotPlace(rank, 3, "net", rank, 3) for rank in range(3)])
    ours = tmp_path / "ours"
    requests = [request_for(one, store_of(tmp_path, rank), ours, rank, 3) for rank, one in enumerate(trainers)]
    requests[1].remove(store_of(tmp_path, 1))
    reported = carried_out(tmp_path, [requests[0], requests[2]])
    assert not reported.saves
    assert any(mentions(why, "rank 1") for _, why in reported.storage_errors)
    assert not list(ours.iterdir())


def test_a_full_disk_costs_one_checkpoint(tmp_path: Path, disk: Path) -> None:
    """It is reported as what it is, all files are removed, and with room again the next one is complete."""
    (trainer,) = trained(tmp_path, [SnapshotPlace(0, 1, "net")])
    filler = disk / "filler"
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    filler.write_bytes(bytes(free - 500_000))
    reported = carried_out(tmp_path, [request_for(trainer, store_of(tmp_path, 0), disk / "c", 0, 1)])
    assert [kind for kind, _ in reported.storage_errors] == ["checkpoint-disk-full"]
    assert not list((disk / "c").iterdir())
    filler.unlink()
    reported = carried_out(tmp_path, [request_for(trainer, store_of(tmp_path, 0), disk / "c", 0, 1, step=STEP + 1)])
    assert (reported.saves, reported.storage_errors) == ([STEP + 1], [])


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    """A file where the folder should be, a folder of no one."""
    (trainer,) = trained(tmp_path, [SnapshotPlace(0, 1, "net")])
    (tmp_path / "file").write_text("")
    reported = carried_out(tmp_path, [request_for(trainer, store_of(tmp_path, 0), tmp_path / "file" / "c", 0, 1)])
    assert [kind for kind, _ in reported.storage_errors] == ["checkpoint-write-failed"]
    assert "Not a directory" in reported.storage_errors[0][1]


@pytest.mark.long
@pytest.mark.parametrize("killed", [(0, 1), (1, 0)], ids=["the leader", "another"])
def test_a_checkpoint_writer_killed_anywhere_does_not_harm_complete_checkpoints(tmp_path: Path, killed: tuple[int, ...]) -> None:
    """At every file that it opens, renames or removes in turn: what stood stands, and the next checkpoint writer ends what this one began.

    The checkpoint writer of the other node has done its part meanwhile and comes to it no more.
    """
    world, ours = len(killed), tmp_path / "ours"
    trainers = trained(tmp_path, [SnapshotPlace(rank, world, "net", rank, world) for rank in range(world)])

    def ordered(step: int) -> list[WriteRequest]:
        return [request_for(one, store_of(tmp_path, rank), ours, rank, world, step=step, keep=1) for rank, one in enumerate(trainers)]

    assert carried_out(tmp_path, ordered(STEP)).saves == [STEP]
    ordered(STEP + 1)
    memstores = [store_of(tmp_path, rank) for rank in killed]
    program = [sys.executable, "-m", "tests.runtime.killed_writer", *map(str, (ours, *memstores))]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rounds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rounds) > 10
    assert all(one["killed"] for one in rounds[:-1])
    assert all(one["whole"] for one in rounds)  # after the kill, before any repair
    assert [one for one in rounds if one["after"] != [STEP + 1]] == []
    assert not rounds[-1]["killed"]


def test_without_a_checkpoint_writer_ranks_write_themselves(tmp_path: Path) -> None:
    """Pending requests are removed, so that no slot waits for them; another agent accepts requests again."""
    (trainer,) = trained(tmp_path, [SnapshotPlace(0, 1, "net")])
    memstore = store_of(tmp_path, 0)
    request_for(trainer, memstore, tmp_path / "ours", 0, 1)
    write_requests.close(memstore)
    assert write_requests.is_closed(memstore)
    assert write_requests.pending(memstore) == []
    write_requests.reopen(memstore)
    assert not write_requests.is_closed(memstore)
