"""Snapshots of a training in this process: each has the state of the step in its label, whatever training does meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.memstore import notification, store_folders, write_requests
from holdfast.memstore.notification import ReplicationProgress
from holdfast.memstore.shared_memory import Snapshot, labels
from holdfast.runtime.groups.recovery_manager import RecoveryManager
from holdfast.runtime.snapshots.config import PendingWrite, SnapshotConfig, SnapshotPlace
from holdfast.runtime.snapshots.copy_schedule import SnapshotLimits
from holdfast.runtime.snapshots.restore import RestoreError, Restorer, SnapshotSource
from holdfast.runtime.snapshots.restore_planner import Fetch
from holdfast.runtime.snapshots.snapshotter import REPORT_SKIPPED, SLOTS, Snapshotter
from holdfast.runtime.state.training import Training
from tests.mentions import mentions
from tests.runtime.counting_device import CountingRuntime
from tests.runtime.trainer import FIRST, Trainer, opened, restore, same, stored
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close all snapshotters when a test has ended; no sender of replicas counts as gone because this process waits for its turn."""
    monkeypatch.setattr(notification, "STALE_SECONDS", 600.0)
    yield
    while opened:
        opened.pop().close()


def test_a_snapshot_is_the_step_it_names(tmp_path: Path) -> None:
    """Copied at different times of the next step; a new training that restores it is equal in everything."""
    trainer = Trainer(tmp_path)
    trainer.to(FIRST + 2)
    wanted = trainer.state()
    trainer.begin()
    trainer.end()  # buffers, counters and generators have changed; the copy ended before the optimizer's step
    other = Trainer(tmp_path)
    assert len(restore(other, tmp_path, FIRST + 2)) == 1
    assert same(other.state(), wanted)
    assert not same(trainer.state(), wanted)


@pytest.mark.parametrize("runtime", [None, CountingRuntime], ids=["host", "device"])
def test_a_state_that_changes_without_the_optimizers_hook_has_no_snapshots(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, runtime: type[CountingRuntime] | None
) -> None:
    """As by replays of a graph: nobody says when, so a copy may be of two steps. The reason is logged once; the optimizer ends it."""
    trainer = Trainer(tmp_path, runtime=runtime() if runtime else None)
    trainer.to(FIRST + 6, trainer.replay)
    assert stored(tmp_path) == {}
    (message,) = [one.message for one in caplog.records if "no snapshots in memory" in one.message]
    assert mentions(message, "CUDA graph", "optimizer.step()", "interval: 0")
    assert trainer.snapshotter.why in message
    trainer.to(FIRST + 8)
    assert sorted(stored(tmp_path)) == [FIRST + 7]
    assert trainer.snapshotter.why == ""


@pytest.mark.parametrize("runtime", [None, CountingRuntime], ids=["host", "device"])
@pytest.mark.parametrize("complete", ["no", "copied", "voted"])
def test_a_snapshot_after_which_the_state_changes_unannounced_is_discarded(
    tmp_path: Path, runtime: type[CountingRuntime] | None, complete: str
) -> None:
    """Those before it stay. It may be complete by then: all was copied sooner, or the vote at the end of the step has closed it."""
    trainer = Trainer(tmp_path, runtime=runtime() if runtime else None)
    trainer.to(FIRST + 3)
    for turn in range(2):
        trainer.begin()
        if complete == "copied" and turn == 0:
            work = trainer.snapshotter._draft.work  # type: ignore[union-attr]
            work.spread, work.gate = 0.0, lambda _window: 1 << 60
            trainer.snapshotter._copier._wake.set()
            assert trainer.idle.enter("pipeline")
            wait_until(lambda: FIRST + 3 in stored(tmp_path), seconds=60)
            trainer.idle.leave()
        trainer.end(trainer.replay)
        if complete == "voted":
            trainer.snapshotter.finish()
            assert (FIRST + 3 in stored(tmp_path)) == (turn == 0)
    trainer.begin()
    assert sorted(stored(tmp_path))[-2:] == [FIRST + 1, FIRST + 2]
    assert (trainer.snapshotter.counts.newest, trainer.snapshotter.counts.given_up) == (FIRST + 2, 1)
    trainer.end()
    wanted = trainer.state()
    trainer.begin()
    trainer.end()
    other = Trainer(tmp_path / "none")
    restore(other, tmp_path, FIRST + 6)
    assert same(other.state(), wanted)


def test_the_vote_announces_the_change_of_an_optimizer_whose_class_calls_no_hooks(tmp_path: Path) -> None:
    """With managed groups the optimizer's step waits for the vote, whatever its class is."""
    trainer = Trainer(tmp_path)
    votes: list[int] = []

    def may_apply() -> bool:
        trainer.snapshotter.finish()
        votes.append(trainer.step)
        return True

    def apply() -> None:
        trainer.replay()

    vars(apply)["_wrapped_by_lr_sched"] = True
    trainer.optimizer.step = apply  # type: ignore[method-assign, assignment]
    recovery: Any = SimpleNamespace(may_apply=may_apply, snapshotter=trainer.snapshotter)
    RecoveryManager._guard(recovery, trainer.optimizer)
    trainer.to(FIRST + 3)
    assert votes == list(range(FIRST + 3))
    assert sorted(stored(tmp_path)) == [FIRST, FIRST + 1, FIRST + 2]
    assert trainer.snapshotter.why == ""


@pytest.mark.parametrize("runtime", [None, CountingRuntime], ids=["host", "device"])
@pytest.mark.parametrize("window", [False, True])
def test_steps_that_change_nothing_neither_end_snapshots_nor_tear_one(
    tmp_path: Path, runtime: type[CountingRuntime] | None, *, window: bool
) -> None:
    """Gradients are accumulated over three steps, or a scaler skips some. A snapshot has until the optimizer's next step."""
    trainer = Trainer(tmp_path, runtime=runtime() if runtime else None)
    wanted: dict[int, Any] = {}
    while trainer.step < 18:
        if trainer.step % 3 == 0:
            wanted[trainer.step] = trainer.state()
        trainer.begin()
        if window and trainer.idle.enter("pipeline"):
            trainer.idle.leave()
        trainer.end(None if trainer.step % 3 == 2 else int)
        if trainer.step > FIRST + 1:
            assert trainer.snapshotter.why == ""
    found = sorted(stored(tmp_path))
    assert found == [9, 12, 15]
    for step in found:
        other = Trainer(tmp_path / "none")
        restore(other, tmp_path, step)
        assert same(other.state(), wanted[step])


def test_a_checkpoint_of_a_step_that_changed_nothing_is_written_all_the_same(tmp_path: Path) -> None:
    """The snapshot before is completed first: both are of the same parameters, and differ in their position."""
    trainer = Trainer(tmp_path)
    trainer.to(FIRST + 2)
    trainer.begin()
    trainer.end(int)
    trainer.snapshotter.request_write(PendingWrite(step=FIRST + 3, directory=tmp_path / "c", keep=2, loss=None, paused=0.0))
    wanted = trainer.state()
    trainer.begin()
    trainer.end()
    assert sorted(stored(tmp_path)) == [FIRST + 1, FIRST + 2, FIRST + 3]
    assert len(write_requests.pending(tmp_path)) == 1
    other = Trainer(tmp_path / "none")
    restore(other, tmp_path, FIRST + 3)
    assert same(other.state(), wanted)


def test_three_slots_take_turns_and_keep_the_newest_two(tmp_path: Path) -> None:
    """The third is the one being written."""
    trainer = Trainer(tmp_path)
    trainer.to(FIRST + 8)
    assert len(list(tmp_path.iterdir())) == SLOTS
    assert sorted(stored(tmp_path)) == [FIRST + 5, FIRST + 6, FIRST + 7]
    trainer.begin()
    trainer.snapshotter.give_up()
    assert max(stored(tmp_path)) == FIRST + 7
    assert trainer.snapshotter.counts.taken == 8


def test_copies_share_a_state_and_both_parts_are_needed(tmp_path: Path) -> None:
    """Two ranks of one model, each its part."""
    both = [Trainer(tmp_path, place=SnapshotPlace(rank, 1, "net", rank, 2)) for rank in range(2)]
    for one in both:
        torch.manual_seed(9)  # the same data
        one.to(FIRST + 3)
    sizes = [label.size for label in labels(tmp_path).values()]
    whole = sum(entry.size for entry in _entries(tmp_path))
    assert max(sizes) < whole
    other = Trainer(tmp_path)
    restore(other, tmp_path, FIRST + 2)
    again = Trainer(tmp_path / "elsewhere")
    again.snapshotter.enabled = False
    torch.manual_seed(9)
    again.to(FIRST + 2)
    assert same(other.state()["net"], again.state()["net"])


def _entries(memstore: Path) -> Any:
    with Snapshot(next(iter(labels(memstore)))) as snapshot:
        return snapshot.entries


def _loaded(trainer: Trainer) -> None:
    """Let the optimizer load a state: it then has other tensors, in another dict."""
    trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))


def _elsewhere(trainer: Trainer) -> None:
    """Put a parameter's data into other memory."""
    weight = trainer.net.get_parameter("rest.1.weight")
    weight.data = weight.data.clone()


def _assigned(trainer: Trainer) -> None:
    """Let the model replace its own parameters, as a model that was built on `meta` does."""
    trainer.net.load_state_dict(copy.deepcopy(trainer.net.state_dict()), assign=True)
    trainer.optimizer.param_groups[0]["params"] = list(trainer.net.parameters())
    trainer.optimizer.state.clear()


@pytest.mark.parametrize("move", [_loaded, _elsewhere, _assigned])
def test_tensors_that_move_are_found_again(tmp_path: Path, move: Callable[[Trainer], None]) -> None:
    """The current tensors are copied, not the earlier ones."""
    trainer = Trainer(tmp_path)
    trainer.to(FIRST + 2)
    move(trainer)
    trainer.end()  # so that old and new differ; its snapshot was begun before the move, if at all
    wanted = trainer.state()
    trainer.begin()
    trainer.end()
    other = Trainer(tmp_path)
    restore(other, tmp_path, FIRST + 3)
    assert same(other.state(), wanted)


def test_a_slot_that_is_being_read_is_not_written(tmp_path: Path) -> None:
    """It is being sent to another node."""
    trainer = Trainer(tmp_path)
    trainer.to(FIRST + 3)
    oldest = min(labels(tmp_path).items(), key=lambda item: item[1].step)
    with Snapshot(oldest[0]) as snapshot:
        trainer.to(FIRST + 5)
        snapshot.verify()
        assert snapshot.label == oldest[1]
    assert trainer.snapshotter.counts.given_up > 0


def test_a_node_without_memory_trains_on_and_reports_it_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three slots would exceed the limit."""
    trainer = Trainer(tmp_path, limit=100_000)
    trainer.to(FIRST + 4)
    assert stored(tmp_path) == {}
    (message,) = [one.message for one in caplog.records if "snapshot-no-memory" in one.message]
    assert mentions(message, "checkpoint.memory.max_memory")


def test_extra_state_counts_towards_the_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It may grow long after all slots were allocated."""
    trainer = Trainer(tmp_path)
    trainer.to(FIRST + 4)
    limit = store_folders.usage(tmp_path) + 2**20
    again = Trainer(tmp_path, limit=limit)
    again.to(FIRST + 8)
    assert FIRST + 7 in stored(tmp_path)
    again.extra["said"] = "x" * 2**22
    again.to(FIRST + 11)
    assert store_folders.usage(tmp_path) <= limit
    (message,) = [one.message for one in caplog.records if "snapshot-no-memory" in one.message]
    assert "4 MiB more would exceed" in message


def test_copying_goes_on_in_windows_and_nowhere_else(tmp_path: Path) -> None:
    """A step that waits long enough has its snapshot before its optimizer needs it."""
    trainer = Trainer(tmp_path)
    trainer.to(FIRST + 1)
    trainer.snapshotter.planning.profile.clear()  # as in a new process, which copies whenever it waits
    trainer.begin()
    assert FIRST + 1 not in stored(tmp_path)
    assert trainer.idle.enter("pipeline")
    while FIRST + 1 not in stored(tmp_path):
        torch.cuda.is_available()
    trainer.idle.leave()
    before = trainer.snapshotter.counts.copied
    trainer.end()
    assert trainer.snapshotter.counts.overlapped > 0
    assert trainer.snapshotter.counts.copied > before


def test_a_damaged_part_is_reported_and_not_used_again(tmp_path: Path) -> None:
    """It is reported, and not used a second time."""
    trainer = Trainer(tmp_path)
    trainer.to(FIRST + 2)
    (one,) = stored(tmp_path)[FIRST + 1]
    data = bytearray((tmp_path / one.name).read_bytes())
    data[5000] ^= 1
    (tmp_path / one.name).write_bytes(data)
    memory = SnapshotSource(tmp_path, "here", {}, "")
    with pytest.raises(RestoreError, match="changed in memory"):
        Restorer(Trainer(tmp_path).training, memory).take(Fetch(target=0, parts=(one,), rank_state=one), lambda _rank_state: None)
    assert memory.usable([memory.listed(1)]) == {other for steps in stored(tmp_path).values() for other in steps} - {one}


def test_an_error_in_copying_costs_a_snapshot_and_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is copied in the optimizer's step: training must not get the error."""
    trainer = Trainer(tmp_path)
    trainer.to(FIRST + 2)

    def fails(*_: object) -> int:
        raise RuntimeError("the device says no")

    with monkeypatch.context() as broken:
        broken.setattr(trainer.snapshotter._copier.slices, "submit", fails)
        trainer.to(FIRST + 4)
    assert trainer.snapshotter.counts.given_up == 2
    trainer.to(FIRST + 6)
    assert max(stored(tmp_path)) == FIRST + 5


class Counting(torch.optim.SGD):
    """Has numbers and a mapping in its state in addition to tensors."""

    def step(self, closure: Any = None) -> Any:
        """Apply a step, and count."""
        loss = super().step(closure)
        for number, parameter in enumerate(one for group in self.param_groups for one in group["params"]):
            state = self.state[parameter]
            state["notes"] = {"last": state.get("count", 0)}
            state["count"] = state.get("count", 0) + 1 + number
        return loss


def test_all_optimizer_state_is_restored_to_its_parameter(tmp_path: Path) -> None:
    """Numbers and mappings are distinguished from tensors by their type."""
    trainers = []
    for _ in range(2):
        trainer = Trainer(tmp_path)
        trainer.optimizer = Counting(trainer.net.parameters(), lr=0.01, momentum=0.9)  # type: ignore[assignment]
        trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 2, 0.5)
        trainer.training = Training(model=trainer.net, optimizers=[trainer.optimizer], schedulers=[trainer.scheduler], extra=trainer.extra)
        trainer.snapshotter = Snapshotter(
            trainer.training, SnapshotConfig(memstore=tmp_path, max_bytes=0, limits=SnapshotLimits()), windows=trainer.idle
        )
        opened.append(trainer.snapshotter)
        trainer.snapshotter.set_place(SnapshotPlace(0, 1, "net"), 1)
        trainers.append(trainer)
    trainers[0].to(FIRST + 2)
    wanted = trainers[0].state()
    trainers[0].begin()
    trainers[0].end()
    restore(trainers[1], tmp_path, FIRST + 2)
    assert same(trainers[1].state()["optimizer"], wanted["optimizer"])


def test_only_slow_ranks_report_that_replicas_are_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All ranks skip snapshots because some are not replicated yet; those report it, once."""
    trainer, sender = Trainer(tmp_path), ReplicationProgress(tmp_path, 0)
    trainer.to(FIRST + 2)
    sender.complete(FIRST, 1)
    trainer.snapshotter.replicas_behind = True  # because of another rank
    trainer.to(FIRST + 2 + REPORT_SKIPPED)
    assert trainer.snapshotter.counts.skipped >= REPORT_SKIPPED
    assert "replica-lag" not in caplog.text
    trainer.snapshotter.replicas_behind = False
    trainer.to(FIRST + 4 + REPORT_SKIPPED)
    assert trainer.snapshotter.behind()
    trainer.snapshotter.replicas_behind = True
    trainer.to(FIRST + 7 + REPORT_SKIPPED)
    assert caplog.text.count("replica-lag") == 1


def test_no_snapshot_overwrites_the_last_replicated_one(tmp_path: Path) -> None:
    """The older of the newest two must be on the other node before the next begins; without replication no rank waits."""
    trainer, sender = Trainer(tmp_path), ReplicationProgress(tmp_path, 0)
    trainer.to(FIRST + 2)
    assert not trainer.snapshotter.behind()
    sender.sent()  # bytes are sent, and no replica is complete
    assert trainer.snapshotter.behind()
    sender.complete(FIRST, 1)
    assert not trainer.snapshotter.behind()
    trainer.begin()
    trainer.end()
    assert trainer.snapshotter.behind()
    trainer.snapshotter.replicas_behind = True  # as agreed by all ranks
    trainer.to(FIRST + 5)
    assert sorted(stored(tmp_path)) == [FIRST, FIRST + 1, FIRST + 2]
    assert trainer.snapshotter.counts.skipped == 2
    trainer.snapshotter.request_write(PendingWrite(step=FIRST + 5, directory=tmp_path, keep=2, loss=None, paused=0.0))
    trainer.begin()
    trainer.end()
    assert sorted(stored(tmp_path)) == [FIRST, FIRST + 1, FIRST + 2, FIRST + 5]  # the replicated one stays
    sender.end()
    assert not trainer.snapshotter.behind()
