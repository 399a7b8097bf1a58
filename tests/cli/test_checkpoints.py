"""`holdfast checkpoint ls`: what a job could go back to, listed without torch, and audited to the last byte."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints.memstores import connect_stores
from holdfast.checkpoints.verify import MemoryVerifier, VerifierProcess
from holdfast.cli.commands.checkpoints import inventory as checkpoints
from holdfast.cluster.local import LocalNodes
from holdfast.control.agents.pool import AgentPool
from holdfast.control.config.worker_env import token_of
from holdfast.errors import NotReadable, UnknownJob
from holdfast.history.models import Checkpoint, Generation, JobTransition, StepRecord
from holdfast.history.store import History
from holdfast.host.process import mark_of
from holdfast.memstore import shared_memory, store_folders
from holdfast.memstore.reader import RemoteMemstore
from holdfast.paths import cluster_directory, job_directory
from holdfast.report.text.wording import NOTHING
from tests.agent.memory_rig import TOKEN, MemoryNode
from tests.cli.conftest import PROGRAM, Command, environment, refused
from tests.cli.terminal import ESCAPES, Terminal
from tests.cli.written_history import Author
from tests.mentions import mentions, one_line_mentions
from tests.runtime.damage import biggest, cut, flip_a_bit
from tests.runtime.ranks import Ranks
from tests.runtime.saved_run import STEP, Made, make, reseal
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def original(torch_imported: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Give what two real ranks left: checkpoints of steps 11 and 12, snapshots of steps 9 to 11."""
    ranks = Ranks(torch_imported, tmp_path_factory.mktemp("ranks"))
    try:
        return make(ranks, tmp_path_factory.mktemp("made"))
    finally:
        ranks.close()


class Scene:
    """A job in the history, with its checkpoints, and the memory stores of its two nodes on this machine."""

    def __init__(self, book: History, made: Made) -> None:
        self.made = made
        self.author = Author(book, "gpt", time.time() - 60)
        job = self.author.job
        job.spec = {"name": "gpt", "script": "train.py", "checkpoint": {"directory": str(made.directory)}, "python": sys.executable}
        job.cluster = {"name": "local", "nodes": 2}
        with book.session() as session:
            session.merge(job)
        self.author.write(Generation(job_id=job.id, number=1, at=time.time() - 50, world_size=2, ranks={"node-0": [0], "node-1": [1]}))
        self.author.write(StepRecord(job_id=job.id, generation=1, step=14, at=time.time(), seconds=0.1))
        self._move("RUNNING", "it trains")
        self.memstores = [store_folders.memstore_of(mark_of(cluster_directory("local") / f"node-{number}"), job.id) for number in range(2)]
        for rank, place in enumerate(self.memstores):
            store_folders.make(place)
            for path in made.memstore.glob(f"rank-{rank:05d}.*"):
                shutil.copyfile(path, place / path.name)

    def _move(self, after: str, reason: str) -> None:
        self.author.write(
            JobTransition(job_id=self.author.job.id, at=time.time(), before="X", event="x", after=after, reason=reason, generation=1)
        )

    def end(self) -> None:
        """End the job, as a flow does: memory goes with it."""
        self._move("COMPLETED", "all steps done")
        self.wipe()

    def wipe(self) -> None:
        """Give the memory back."""
        for place in self.memstores:
            store_folders.wipe(place)

    def file(self, rank: int, step: int, *, of: int | None = None) -> Path:
        """Return the file in which the snapshot of *rank* at *step* lies, on the node of rank *of*."""
        held = shared_memory.labels(self.memstores[rank if of is None else of])
        return next(path for path, label in held.items() if (label.rank, label.step) == (rank, step))

    def replicate(self) -> None:
        """Put a copy of all that rank 0 has on the other node, under the name that a memory server gives it."""
        for path in self.memstores[0].glob("rank-00000.*"):
            shutil.copyfile(path, self.memstores[1] / path.name.replace("rank-", f"copy-{'a' * 16}-"))

    def forget_disk(self) -> None:
        """Remove the checkpoint that is newer than all snapshots."""
        shutil.rmtree(self.made.directory / f"step-{STEP + 1:08d}")


@pytest.fixture
def scene(book: History, original: Made, tmp_path: Path) -> Iterator[Scene]:
    """Give a job that trains, with copies that may be damaged."""
    one = Scene(book, original.copied(tmp_path))
    yield one
    one.wipe()


def record(here: Command, verb: str = "ls", status: int = 0) -> dict[str, Any]:
    """Return the JSON output of the command."""
    done = here("checkpoint", verb, "gpt", "--json")
    assert (done.returncode, done.stderr) == (status, "")
    output: dict[str, Any] = json.loads(done.stdout)
    return output


def brought(folders: list[Path]) -> dict[str, bytes]:
    """Return every file below *folders*."""
    return {str(path): path.read_bytes() for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()}


def test_all_tiers_are_listed_newest_first(here: Command, scene: Scene) -> None:
    """Each with its step and whether it is complete; one line names what a recovery would resume from."""
    scene.replicate()
    output = record(here)
    assert [(one["step"], one["status"], one["world_size"]) for one in output["disk"]] == [(12, "complete", 2), (11, "complete", 2)]
    assert [(one["step"], one["lineage"], one["status"]) for one in output["memory"]] == [
        (11, 0, "complete"),
        (10, 0, "complete"),
        (9, 0, "complete"),
    ]
    assert {(one["tier"], one["node"], one["rank"]) for one in output["memory"][0]["snapshots"]} == {
        ("memory", "node-0", 0), ("memory", "node-1", 1), ("replicas", "node-1", 0),
    }  # fmt: skip
    assert output["recovery"] == {"tier": "disk", "step": 12, "steps_recomputed": 2}


def test_the_output_fits_80_columns(here: Command, scene: Scene) -> None:
    """Except for the path of the folder."""
    scene.replicate()
    scene.forget_disk()
    flip_a_bit(scene.file(1, 10))
    for verb, status in ("ls", 0), ("verify", 1):
        done = here("checkpoint", verb, "gpt")
        assert (done.returncode, done.stderr) == (status, ""), done.stdout
        lines = [line for line in done.stdout.splitlines() if str(scene.made.directory) not in line]
        assert max(map(len, lines)) <= 80
        assert lines[0] == "gpt  RUNNING at step 14"
        assert lines[1].split() == ["TIER", "STEP", "LINEAGE", "STATE", "AGE", "SIZE", "WHERE"]
        assert lines[2].startswith(f"disk      11    {NOTHING}        complete")
        tiers = [line.split()[:4] for line in lines[3:]]
        assert ["memory", "11", "0", "complete"] in tiers
        assert ["replicas", "11", "0", "complete"] in tiers
        assert mentions(" ".join(done.stdout.split()), "step 11", "from the checkpoint", "3 steps")
    assert "memory, step 10, lineage 0: damaged" in lines
    assert any(mentions(line, "proven", "every rank", "step 11") for line in lines)


@pytest.mark.long
def test_on_a_terminal_it_fits_too(scene: Scene) -> None:
    """Lines of the table are cut at its edge."""
    with Terminal([*PROGRAM, "checkpoint", "ls", "gpt"], environment(), columns=60) as terminal:
        wait_until(lambda: terminal.status() is not None, seconds=60)
        assert terminal.status() == 0
        lines = ESCAPES.sub("", terminal.text).splitlines()
    assert max(len(line) for line in lines if line.startswith(("TIER", "disk", "memory "))) <= 60


def test_a_recovery_prefers_newer_in_memory_snapshots(here: Command, scene: Scene) -> None:
    """Until a part of it is missing: then the part is named, and an older step is used."""
    shutil.rmtree(scene.made.directory)
    assert record(here)["recovery"] == {"tier": "memory", "step": 11, "steps_recomputed": 3}
    scene.file(1, 11).unlink()
    output = record(here)
    assert [one["status"] for one in output["memory"]] == ["partial", "complete", "complete"]
    assert "rank" in output["memory"][0]["missing"]
    assert output["recovery"]["step"] == 10
    scene.file(1, 10).unlink()
    assert record(here, status=1)["recovery"]["step"] == 9


def test_a_replica_replaces_the_snapshot_of_a_lost_node(here: Command, scene: Scene) -> None:
    """Node 0 is lost with all its snapshots; the replica of its rank on node 1 completes the step."""
    shutil.rmtree(scene.made.directory)
    scene.replicate()
    store_folders.wipe(scene.memstores[0])
    assert record(here)["recovery"]["step"] == 11


def test_torn_and_corrupt_ones_are_named(here: Command, scene: Scene) -> None:
    """Sizes and manifests show it, without reading the files."""
    cut(biggest(scene.made.directory / "step-00000012"))
    output = record(here, status=1)
    assert output["disk"][0]["status"] == "torn"
    assert "is cut off" in output["disk"][0]["broken"][0]
    assert output["recovery"]["step"] == 11
    done = here("checkpoint", "ls", "gpt")
    assert "step-00000012: " in done.stdout
    (scene.made.directory / "step-00000012" / "manifest.json").unlink()
    assert record(here, status=1)["disk"][0]["broken"] == ["it has no manifest.json"]


def test_intact_checkpoints_are_verified_without_changes(here: Command, scene: Scene) -> None:
    """Both checkpoints, three moments in memory; the one step that is in both is compared to the bit."""
    scene.replicate()
    folders = [scene.made.directory, *scene.memstores]
    before = brought(folders)
    output = record(here, "verify")
    assert output["sound"]
    assert [one["status"] for one in output["disk"] + output["memory"]] == ["complete"] * 5
    assert any("SHA-256" in line for line in output["disk"][0]["proven"])
    assert any(mentions(line, "every rank", "step 12") for line in output["disk"][0]["proven"])
    compared = [any("equal to the bit" in line for line in one["proven"]) for one in output["memory"]]
    assert compared == [True, False, False]
    assert brought(folders) == before
    assert not list(store_folders.root().glob("audit-*"))


def test_bits_and_bytes_that_changed_are_found_by_reading(here: Command, scene: Scene) -> None:
    """Listing does not read them, the audit does: on the disk, in a page that says what a snapshot is of, and in a tensor.

    Of the last all sums are right; only the comparison of the same step shows it.
    """
    disk, page = biggest(scene.made.directory / "step-00000012"), scene.file(1, 9)
    flip_a_bit(disk)
    assert record(here)["disk"][0]["status"] == "complete"
    flip_a_bit(page, 200 / page.stat().st_size)
    reseal(scene.file(0, 11), lambda data, _blobs, _label: data.__setitem__(5, data[5] ^ 1))
    output = record(here, "verify", status=1)
    assert output["disk"][0]["status"] == "corrupt"
    (on_disk,), (damaged,), (in_memory,) = output["disk"][0]["broken"], output["damaged"], output["memory"][0]["broken"]
    assert mentions(on_disk, disk.name, "SHA-256", "manifest")
    assert mentions(damaged, page.name, "node-1", "label"), "nobody knows then of which step it was"
    assert mentions(in_memory, "'model.0.weight'", "rank 0", "memory", "disk")
    assert output["recovery"]["step"] == 11


def test_what_a_verification_found_is_remembered(here: Command, scene: Scene) -> None:
    """The list says it until a verification finds the checkpoint intact again, and claims no check that was not made."""
    shown = here("checkpoint", "ls", "gpt").stdout
    assert mentions(" ".join(shown.split()), "not verified", "holdfast checkpoint verify")
    disk = biggest(scene.made.directory / "step-00000012")
    intact = disk.read_bytes()
    flip_a_bit(disk)
    assert record(here, "verify", status=1)["disk"][0]["status"] == "corrupt"
    output = record(here, status=1)
    assert [one["status"] for one in output["disk"]] == ["corrupt", "complete"]
    assert mentions(output["disk"][0]["broken"][0], disk.name, "SHA-256", "holdfast checkpoint verify")
    assert output["recovery"]["step"] == 11
    disk.write_bytes(intact)
    assert record(here, "verify")["disk"][0]["status"] == "complete"
    assert [one["status"] for one in record(here)["disk"]] == ["complete", "complete"]


def test_damage_in_an_earlier_checkpoint_of_a_step_says_nothing_of_a_later_one(here: Command, scene: Scene, book: History) -> None:
    """It was removed and written again since."""
    folder = scene.made.directory / "step-00000012"
    row = Checkpoint(job_id=scene.author.job.id, at=1.0, step=12, generation=1, path=str(folder), problem="checkpoint-corrupt")
    with book.session() as session:
        session.add(row)
    assert record(here)["disk"][0]["status"] == "complete"


def test_a_bit_in_memory_is_found_by_reading(here: Command, scene: Scene) -> None:
    """In a tensor or in the index: file, rank and node are named, and a recovery takes the step before."""
    shutil.rmtree(scene.made.directory)
    data, tail = scene.file(0, 11), scene.file(0, 10)
    label = shared_memory.labels(scene.memstores[0])[tail]
    flip_a_bit(data, (shared_memory.PAGE + 100.5) / data.stat().st_size)
    flip_a_bit(tail, (shared_memory.PAGE + label.size + 40.5) / tail.stat().st_size)
    output = record(here, "verify", status=1)
    for moment, file, part in zip(output["memory"], (data, tail), ("'model.0.weight'", "index"), strict=False):
        assert moment["status"] == "damaged"
        (line,) = moment["broken"]
        assert mentions(line, file.name, "rank 0", "node-0", part)
    assert output["recovery"]["step"] == 9


def test_memory_of_other_machines_is_read_through_its_server(original: Made) -> None:
    """Downloaded and verified, and a flipped bit is found; a node without its server is named with the reason."""
    nodes = [MemoryNode(f"audited-{rank}") for rank in range(2)]
    try:
        for rank, node in enumerate(nodes):
            for path in original.memstore.glob(f"rank-{rank:05d}.*"):
                shutil.copyfile(path, node.memstore / path.name)
            node.begin()
        stores = {node.name: RemoteMemstore(node.address, TOKEN) for node in nodes}
        with VerifierProcess(sys.executable) as verifier:
            memory = MemoryVerifier(stores, 2, [], verifier)
            assert [(one.step, one.status) for one in memory.snapshot_sets()] == [(11, "complete"), (10, "complete"), (9, "complete")]
            newest = next(path for path, label in shared_memory.labels(nodes[0].memstore).items() if label.step == STEP)
            flip_a_bit(newest, (shared_memory.PAGE + 100.5) / newest.stat().st_size)
            assert next((one.step, one.status) for one in memory.snapshot_sets()) == (11, "damaged")
            nodes[1].kill()
            nodes[1].listening.close()
            memory.snapshot_sets()
            assert list(memory.unreachable) == ["audited-1"]
    finally:
        for node in nodes:
            node.end()


class Elsewhere:
    """Nodes known only through the interface of all clusters, like other machines."""

    def __init__(self, nodes: LocalNodes) -> None:
        self._nodes = nodes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nodes, name)


@pytest.fixture
def elsewhere(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    """Serve the job's two nodes, of four, by real agents; a third one serves another job, the fourth has none."""
    source, job = Elsewhere(LocalNodes("local", cluster_directory("local"), 4)), scene.author.job
    monkeypatch.setattr(checkpoints, "open_cluster", lambda _cluster: source)
    folder = str(scene.made.directory)
    how = {"warm": False, "python": sys.executable, "preload": [], "argv": ["true"], "directory": folder, "log_directory": folder}
    plan = {"lease": 60.0, **how, "environment": {"HOLDFAST_TOKEN": token_of(job)}, "memory": {"limit": None}}
    mine, other = (AgentPool(source, {**plan, "job": name}, epoch=1) for name in (job.id, "another"))
    mine.each(["node-0", "node-1"], mine.bring_up)
    other.bring_up("node-2")
    yield source
    for fleet in (mine, other):
        fleet.close(end=True)


def test_memory_of_other_machines_is_found_through_their_agents(here: Command, scene: Scene, elsewhere: Elsewhere) -> None:
    """Listed, downloaded and verified; of the unreachable nodes those with ranks are named."""
    scene.forget_disk()
    output = record(here, "verify")
    assert isinstance(connect_stores(elsewhere, scene.author.job).stores["node-0"], RemoteMemstore)
    assert [(one["step"], one["status"]) for one in output["memory"]] == [(11, "complete"), (10, "complete"), (9, "complete")]
    assert {(one["node"], one["rank"]) for one in output["memory"][0]["snapshots"]} == {("node-0", 0), ("node-1", 1)}
    assert (output["sound"], output["unreachable"]) == (True, {})
    assert any("equal to the bit" in line for line in output["memory"][0]["proven"])
    file = scene.file(0, 11)
    flip_a_bit(file, (shared_memory.PAGE + 100.5) / file.stat().st_size)
    output = record(here, "verify", status=1)
    assert "was changed in memory" in output["memory"][0]["broken"][0]
    elsewhere.power_off("node-1")
    output = record(here, status=1)
    assert list(output["unreachable"]) == ["node-1"]
    assert "switched off" in output["unreachable"]["node-1"]
    assert [one["status"] for one in output["memory"]] == ["partial"] * 3
    assert "memory of node-1 is unreachable" in here("checkpoint", "ls", "gpt").stdout


def test_a_remote_memory_store_opens_with_the_token_of_its_agents(here: Command, scene: Scene, elsewhere: Elsewhere) -> None:
    """The controller may run on another host; once the job has ended, no token is needed."""
    (job_directory("gpt") / "token").unlink()
    output = record(here)
    assert [one["step"] for one in output["memory"]] == [11, 10, 9]
    assert output["unreachable"] == {}
    for node in ("node-0", "node-1"):
        elsewhere.clear(node)
    scene.end()
    assert record(here)["unreachable"] == {}


def test_after_the_end_the_missing_snapshots_are_explained(here: Command, scene: Scene) -> None:
    """The disk is what is left."""
    scene.end()
    output = record(here)
    assert (output["memory"], output["recovery"]["tier"], output["sound"]) == ([], "disk", True)
    done = here("checkpoint", "ls", "gpt")
    assert one_line_mentions(done.stdout, "memory: none", "deleted", "ends")
    assert mentions(" ".join(done.stdout.split()), "step 12", "from the checkpoint")


def test_without_any_checkpoint_the_output_says_so(here: Command, scene: Scene) -> None:
    """A missing folder and empty memory are not errors."""
    scene.wipe()
    shutil.rmtree(scene.made.directory)
    done = here("checkpoint", "ls", "gpt")
    assert done.returncode == 0
    assert "disk: no checkpoint" in done.stdout
    assert one_line_mentions(done.stdout, "memory: none", "no controller")
    assert mentions(done.stdout, "step 0")


def test_an_unreadable_checkpoint_folder_is_reported_with_the_cure(here: Command, scene: Scene) -> None:
    """A file where the folder should be, an unknown job."""
    shutil.rmtree(scene.made.directory)
    scene.made.directory.write_text("no folder")
    done = here("checkpoint", "ls", "gpt")
    assert refused(done, NotReadable("checkpoint directory", str(scene.made.directory), os.strerror(errno.ENOTDIR)))
    assert refused(here("checkpoint", "ls", "gtp"), UnknownJob("gtp", ("gpt",)))


def test_a_python_without_torch_is_named(here: Command, scene: Scene, book: History) -> None:
    """Verification needs the job's own Python; its problem is shown."""
    scene.author.job.spec |= {"python": "/no/such/python"}
    with book.session() as session:
        session.merge(scene.author.job)
    output = record(here, "verify", status=1)
    assert mentions(output["disk"][0]["broken"][0], "/no/such/python")


def test_it_starts_without_torch(holdfast: Command, scene: Scene, tmp_path: Path) -> None:
    """A listing in a process in which importing torch fails."""
    (tmp_path / "shadow").mkdir()
    (tmp_path / "shadow" / "torch.py").write_text("raise ImportError('not here')\n")
    done = holdfast("checkpoint", "ls", "gpt", PYTHONPATH=os.pathsep.join([str(tmp_path / "shadow"), environment()["PYTHONPATH"]]))
    assert (done.returncode, done.stderr) == (0, "")
