"""Whatever happened to a checkpoint on the disk, it is seen before a byte of it is loaded."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

import holdfast
from holdfast.runtime.checkpoint import manifest
from holdfast.runtime.checkpoint.manifest import UnusableCheckpoint, WrittenFile
from holdfast.runtime.checkpoint.storage import METADATA, CheckpointReader
from holdfast.runtime.world import World
from tests.runtime.agent_double import AgentDouble
from tests.runtime.damage import biggest, cut, flip_a_bit, lengthen, names, swap_for_a_folder

ALONE = World(0, 1, "none")


def save(directory: Path, until: int, every: int = 1) -> None:
    """Train a small model in this process, without any agent, and save it."""
    model = nn.Linear(16, 16)
    with holdfast.session(model=model, checkpoint_dir=directory, save_every=every, keep=9) as session:
        for step in session.steps(until=until):
            with torch.no_grad():
                model.weight.fill_(step.number)
            step.end(float(step.number))


def usable(folder: Path) -> None:
    """Check all of a checkpoint; raise what is wrong with it."""
    whole = manifest.read(folder)
    for name, file in whole.files.items():
        manifest.check(folder, name, file)


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and seal it again, as another program could."""
    path = folder / manifest.MANIFEST
    values = json.loads(path.read_text())
    del values["sha256"]
    change(values)
    values["sha256"] = manifest._digest_of(values)
    path.write_text(json.dumps(values))


DAMAGES: dict[str, tuple[str, str, Callable[[Path], object]]] = {
    "a flipped bit in a data file": ("checkpoint-corrupt", "was changed", lambda folder: flip_a_bit(biggest(folder))),
    "a flipped bit in the metadata": ("checkpoint-corrupt", "was changed", lambda folder: flip_a_bit(folder / METADATA)),
    "a cut data file": ("checkpoint-torn", "is cut off", lambda folder: cut(biggest(folder))),
    "an empty data file": ("checkpoint-torn", "is cut off", lambda folder: cut(biggest(folder), 0)),
    "a data file with something behind it": (
        "checkpoint-corrupt",
        "was changed",
        lambda folder: lengthen(biggest(folder)),
    ),
    "a missing data file": ("checkpoint-torn", "is missing", lambda folder: biggest(folder).unlink()),
    "missing metadata": ("checkpoint-torn", "is missing", lambda folder: (folder / METADATA).unlink()),
    "a missing manifest": ("checkpoint-torn", "has no manifest", lambda folder: (folder / manifest.MANIFEST).unlink()),
    "an empty manifest": ("checkpoint-torn", "is not complete", lambda folder: cut(folder / manifest.MANIFEST, 0)),
    "a torn manifest": ("checkpoint-torn", "is not complete", lambda folder: cut(folder / manifest.MANIFEST)),
    "binary in the manifest": ("checkpoint-torn", "is not complete", lambda folder: (folder / manifest.MANIFEST).write_bytes(b"\xff\0{")),
    "another JSON for manifest": ("checkpoint-corrupt", "not a manifest", lambda folder: (folder / manifest.MANIFEST).write_text("[1]")),
    "an edited manifest": (
        "checkpoint-corrupt",
        "was changed",
        lambda folder: (folder / manifest.MANIFEST).write_text((folder / manifest.MANIFEST).read_text().replace('"step": 3', '"step": 4')),
    ),
    "an unknown format": ("checkpoint-corrupt", "newer Holdfast", lambda folder: edit(folder, lambda values: values.update(format=99))),
    "the manifest of another step": (
        "checkpoint-corrupt",
        "that of step 7",
        lambda folder: edit(folder, lambda values: values.update(step=7)),
    ),
    "a manifest without files": ("checkpoint-corrupt", "not a manifest", lambda folder: edit(folder, lambda values: values.pop("files"))),
    "a manifest that points outside": (
        "checkpoint-corrupt",
        "outside",
        lambda folder: edit(folder, lambda values: values["files"].update({"../x": {"size": 1, "sha256": ""}})),
    ),
    "a data file that is a folder": (
        "checkpoint-corrupt",
        "cannot be read",
        lambda folder: swap_for_a_folder(biggest(folder)),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path: Path, agent: AgentDouble, damage: str) -> None:
    """The session resumes from the newest complete one, reports the damaged one with its kind, and removes nothing."""
    save(tmp_path, until=3)
    kind, words, act = DAMAGES[damage]
    newest = tmp_path / "step-00000003"
    act(newest)
    with pytest.raises(UnusableCheckpoint) as caught:
        usable(newest)
    assert (caught.value.flaw, words in caught.value.why) == (kind, True), caught.value
    model = nn.Linear(16, 16)
    with holdfast.session(model=model, checkpoint_dir=tmp_path, save_every=0) as session:
        assert (session.steps_done, session.loss, session.resumed_from) == (2, 2.0, tmp_path / "step-00000002")
        assert bool((model.weight == 2).all())
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_every_flipped_bit_of_a_checkpoint_is_caught(tmp_path: Path) -> None:
    """One bit anywhere in any file, 300 attempts: the checkpoint is never accepted (`torch.load` accepts most)."""
    save(tmp_path, until=1)
    folder = tmp_path / "step-00000001"
    usable(folder)
    chance = random.Random(5)
    for _ in range(300):
        path = chance.choice([folder / METADATA, biggest(folder), folder / manifest.MANIFEST])
        before = path.read_bytes()
        flip_a_bit(path, chance.random())
        with pytest.raises(UnusableCheckpoint):
            usable(folder)
        path.write_bytes(before)
    usable(folder)


def test_without_a_complete_checkpoint_training_starts_from_scratch(tmp_path: Path) -> None:
    """All are damaged: nothing is loaded, nothing is removed."""
    save(tmp_path, until=2)
    for folder in manifest.candidates(tmp_path):
        flip_a_bit(biggest(folder))
    with holdfast.session(model=nn.Linear(16, 16), checkpoint_dir=tmp_path, save_every=0) as session:
        assert (session.steps_done, session.resumed_from) == (0, None)
    assert len(names(tmp_path)) == 2


def test_folders_with_other_names_are_ignored(tmp_path: Path) -> None:
    """Other files and folders are no candidates, a file of that name is a torn one."""
    save(tmp_path, until=1)
    for name in ("step-2", "step-00000009.bak", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000012").write_text("not a folder")
    assert [path.name for path in manifest.candidates(tmp_path)] == ["step-00000012", "step-00000001"]
    with pytest.raises(UnusableCheckpoint):
        manifest.read(tmp_path / "step-00000012")


def test_each_file_is_checked_by_one_rank_and_the_bytes_are_balanced() -> None:
    """Every file is checked by one rank, and no rank has more than its share and the biggest file."""
    chance = random.Random(1)
    files = {f"__{n}_0.distcp": WrittenFile(chance.randrange(10**6), "") for n in range(50)}
    shares = [dict(manifest.share(files, rank, 8)) for rank in range(8)]
    assert sorted(name for share in shares for name in share) == sorted(files)
    loads = [sum(file.size for file in share.values()) for share in shares]
    assert max(loads) <= sum(loads) / 8 + max(file.size for file in files.values())


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"format": 1, "files": ' + "[" * 900 + "]" * 900 + "}",
        '{"format": 1, "x": "\\ud800"}',
        "1" * 10_000,
        '{"format": 1e999}',
    ],
    ids=["deep", "deep and whole", "half a character", "a long number", "no number"],
)
def test_an_invalid_manifest_makes_a_checkpoint_unusable(tmp_path: Path, text: str) -> None:
    """Not the program that reads it: the one before is still good."""
    folder = manifest.folder_of(tmp_path, 5)
    folder.mkdir()
    (folder / manifest.MANIFEST).write_text(text)
    with pytest.raises(manifest.UnusableCheckpoint):
        manifest.read(folder)
    assert list(manifest.complete_steps(tmp_path)) == []


class Harm:
    """A pickle that would run a command when loaded."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.touched,)


def test_code_in_the_metadata_is_refused(tmp_path: Path) -> None:
    """DCP's own reader unpickles anything; ours knows DCP's classes only."""
    (tmp_path / METADATA).write_bytes(pickle.dumps(Harm(tmp_path / "harmed")))
    with pytest.raises(pickle.UnpicklingError, match="not allowed"):
        CheckpointReader(tmp_path)
    assert not (tmp_path / "harmed").exists()


class Attribute:
    """What Python before 3.11.4 makes of a member of an enumeration, and could make of anything else."""

    def __init__(self, of: object, name: str) -> None:
        self.of, self.name = of, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.of, self.name)


@pytest.mark.parametrize("of", [Path, Metadata, torch.Size, _MEM_FORMAT_ENCODING, _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST, torch.float32])
@pytest.mark.parametrize("state", [{"exists": 5}, (None, {"exists": 5})], ids=["fields", "slots"])
def test_metadata_changes_no_existing_object(tmp_path: Path, of: object, state: object) -> None:
    """Pickle sets fields of any object it can reach, even of a class."""
    here, before = type(Path("/")) if of is Path else of, dir(of)
    said = pickle.dumps((here, state), protocol=4)
    assert said.endswith(pickle.TUPLE2 + pickle.MEMOIZE + pickle.STOP)
    (tmp_path / METADATA).write_bytes(said[:-3] + pickle.BUILD + pickle.STOP)
    with pytest.raises(pickle.UnpicklingError, match="not allowed"):
        CheckpointReader(tmp_path)
    assert dir(of) == before
    assert Path("/").exists() is True


def test_metadata_that_an_early_python_3_11_wrote_is_read(tmp_path: Path) -> None:
    """It pickles members of enumerations in a way of its own; the same way to anything else is refused."""
    layout = _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    (tmp_path / METADATA).write_bytes(pickle.dumps(Metadata({}, planner_data=Attribute(_MEM_FORMAT_ENCODING, layout.name))))
    assert CheckpointReader(tmp_path).read_metadata().planner_data is layout
    for of, name in ((_MEM_FORMAT_ENCODING, "__subclasses__"), (_MEM_FORMAT_ENCODING, "mro"), (torch.Size, "numel")):
        (tmp_path / METADATA).write_bytes(pickle.dumps(Attribute(of, name)))
        with pytest.raises(pickle.UnpicklingError, match="not allowed"):
            CheckpointReader(tmp_path)


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_metadata_of_another_python_is_read(tmp_path: Path, module: str) -> None:
    """Python 3.13 pickles a path, which DCP's metadata holds, under a name that no other version knows."""
    ours = type(Path("/")).__module__
    said = pickle.dumps(Metadata({}, planner_data=Path("/step-5")), protocol=2)
    (tmp_path / METADATA).write_bytes(said.replace(f"c{ours}\nPosixPath".encode(), f"c{module}\nPosixPath".encode()))
    assert f"c{module}\n".encode() in (tmp_path / METADATA).read_bytes()
    assert CheckpointReader(tmp_path).read_metadata().planner_data == Path("/step-5")


def test_a_state_that_only_code_could_load_is_refused_before_training(tmp_path: Path) -> None:
    """It is reported at the start, with the cure, and not when the job has to resume."""
    with pytest.raises(TypeError, match=r"extra=.*add_safe_globals"):
        holdfast.session(model=nn.Linear(1, 1), extra={"path": Harm(tmp_path)}, checkpoint_dir=tmp_path).__enter__()


def test_a_checkpoint_of_another_model_is_refused_with_the_cure(tmp_path: Path) -> None:
    """A complete checkpoint that does not fit is a user error: training must not start from scratch because of it."""
    save(tmp_path, until=1)
    cases = {
        "'model.weight' has the shape": nn.Linear(8, 16),
        "the model has": nn.Sequential(nn.Linear(16, 16)),
        "there are 1 optimizer": nn.Linear(16, 16),
    }
    for words, model in cases.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if "optimizer" in words else None
        with pytest.raises(RuntimeError, match=f"{words}.*another checkpoint directory"):
            holdfast.session(model=model, optimizer=optimizer, checkpoint_dir=tmp_path).__enter__()
