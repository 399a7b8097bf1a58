"""A dry run without peers: answers from a recording, or neutral results."""

from __future__ import annotations

import resource
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from holdfast.runtime.groups.dry_runs.dry_run import DryRun
from holdfast.runtime.groups.dry_runs.recorded_collectives import MAX_SMALL, CollectiveRecorder, Coverage, RecordedCollectives, key_of
from holdfast.runtime.groups.operations import StepTransaction
from holdfast.runtime.groups.process_group import ManagedGroup

ONE = torch.tensor([1.0, 2.0])
OTHER = torch.tensor([[3.0], [4.0], [5.0]])


def group() -> ManagedGroup:
    """Return a group of three in which this process is the last member."""
    made = ManagedGroup("g", [0, 1, 2], 2, StepTransaction(), timedelta(seconds=1))
    made.dry_run = DryRun(None, [made])
    return made


def room(*like: Tensor) -> list[Tensor]:
    """Return tensors filled with NaN."""
    return [torch.full_like(one, torch.nan) for one in like]


def test_reductions_and_broadcasts_leave_what_is_there() -> None:
    """The average of equal values is that value."""
    mine = ONE.clone()
    group().allreduce([mine])
    group().broadcast([mine])
    assert torch.equal(mine, ONE)


def test_a_gather_returns_this_members_value_for_all() -> None:
    """In lists, in one tensor, and for several tensors at once, which come member by member."""
    lists = [room(ONE, ONE, ONE)]
    group().allgather(lists, [ONE], AllgatherOptions())
    assert all(torch.equal(one, ONE) for one in lists[0])
    (whole,) = room(torch.cat([OTHER] * 3))
    group().all_gather_single(whole, OTHER, AllgatherOptions())
    assert torch.equal(whole, torch.cat([OTHER] * 3))
    several = [room(ONE, OTHER) for _ in range(3)]
    group().allgather_coalesced(several, [ONE, OTHER], AllgatherOptions())
    assert all(torch.equal(one, ONE) and torch.equal(other, OTHER) for one, other in several)


def test_scattered_reductions_give_this_members_part() -> None:
    """The last of three."""
    given = torch.arange(6.0).view(6, 1)
    (part,) = room(torch.zeros(2, 1))
    group().reduce_scatter_single(part, given)
    assert torch.equal(part, given[4:])
    (part,) = room(ONE)
    group().reduce_scatter([part], [[ONE, ONE + 1, ONE + 2]])
    assert torch.equal(part, ONE + 2)


@pytest.mark.parametrize("even", [True, False])
def test_exchanges_leave_no_uninitialised_memory(even: bool) -> None:  # noqa: FBT001 (a case of two)
    """What equal members would send cannot always be known; then it is zeros, as for data from one peer."""
    (out,) = room(torch.zeros(6 if even else 5))
    group().all_to_all_single(out, torch.arange(6.0), [], [])
    assert torch.equal(out, torch.arange(6.0) if even else torch.zeros(5))
    outs = room(ONE, ONE, OTHER if not even else ONE)
    group().alltoall(outs, [ONE] * 3)
    assert all(not bool(torch.isnan(one).any()) for one in outs)
    (received,) = room(ONE)
    group().recv([received], 0)
    assert torch.equal(received, torch.zeros(2))
    (part,) = room(ONE)
    group().scatter([part], [])
    assert torch.equal(part, torch.zeros(2))


def test_a_recording_answers_in_turn_and_starts_over_at_its_end(tmp_path: Path) -> None:
    """Identical operations are distinguished by their order."""
    made = group()
    recorder = CollectiveRecorder([made])
    for number in (1.0, 2.0):
        ended = recorder.started(made, "allreduce", out := [torch.full((2,), number)], out)
        assert ended is not None
        ended()
    recorder.write(tmp_path / "recordings" / "t.pt")
    played = RecordedCollectives.read(tmp_path / "recordings" / "t.pt")
    assert played is not None
    answers = []
    for _ in range(3):
        answer = room(ONE)
        assert played.play(key_of(0, "allreduce", answer, answer), answer)
        answers.append(answer[0][0].item())
    assert answers == [1.0, 2.0, 1.0]
    assert not played.play(key_of(1, "allreduce", [ONE], [ONE]), [ONE])
    assert sorted(path.name for path in (tmp_path / "recordings").iterdir()) == ["t.pt"]


def test_a_recording_that_does_not_fit_on_the_disk_is_an_os_error_and_leaves_no_file(tmp_path: Path) -> None:
    """An error of torch that is not an OSError would end the rank."""
    made = group()
    recorder, many = CollectiveRecorder([made]), [torch.zeros(MAX_SMALL // 4)]
    ended = recorder.started(made, "allreduce", many, many)
    assert ended is not None
    ended()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_SMALL // 2, before[1]))
    try:
        with pytest.raises(OSError, match=r"iostream|enforce|write|pos"):
            recorder.write(tmp_path / "t.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_large_outputs_are_recorded_only_on_request() -> None:
    """Every rank records small outputs; large ones cost memory, and one rank per role is enough."""
    made = group()
    recorder, large = CollectiveRecorder([made]), [torch.zeros(MAX_SMALL // 4 + 1)]
    assert recorder.started(made, "allreduce", large, large) is None
    recorder.complete = True
    assert recorder.started(made, "allreduce", large, large) is not None


@pytest.mark.parametrize("content", [None, b"", b"no recording", b"PK\x03\x04 torn"])
def test_an_unreadable_recording_is_none(tmp_path: Path, content: bytes | None) -> None:
    """A hot spare then uses neutral results."""
    path = tmp_path / "t.pt"
    if content is not None:
        path.write_bytes(content)
    assert RecordedCollectives.read(path) is None


def test_coverage_counts_calls_and_lists_those_that_are_new() -> None:
    """Operations are identified by the index of the group, name and shapes."""
    made = group()
    known = key_of(0, "allreduce", [ONE], [ONE])
    coverage = Coverage([made], {known})
    for one in (ONE, ONE, OTHER):
        coverage.started(made, "allreduce", [one], [one])
    assert coverage.summary() == {"calls": 3, "foreseen": 2, "kinds": 2, "first_met": ["0/allreduce/(3, 1)float32"]}
