"""A process with no peers: it answers itself, from a tape, or as a group of equals would."""

from __future__ import annotations

import resource
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from holdfast.runtime.groups.dry_run import DryRun
from holdfast.runtime.groups.process_group import ManagedGroup
from holdfast.runtime.groups.recorded_collectives import SMALL, CollectiveRecorder, Coverage, RecordedCollectives, key_of
from holdfast.runtime.groups.step_transaction import StepTransaction

ONE = torch.tensor([1.0, 2.0])
OTHER = torch.tensor([[3.0], [4.0], [5.0]])


def group() -> ManagedGroup:
    """Return a group of three in which this process has the last place."""
    made = ManagedGroup("g", [0, 1, 2], 2, StepTransaction(), timedelta(seconds=1))
    made.dry_run = DryRun(None, [made])
    return made


def room(*like: Tensor) -> list[Tensor]:
    """Return tensors with nothing sensible in them."""
    return [torch.full_like(one, torch.nan) for one in like]


def test_reductions_and_broadcasts_leave_what_is_there() -> None:
    """An average of equals is what each gave."""
    mine = ONE.clone()
    group().allreduce([mine])
    group().broadcast([mine])
    assert torch.equal(mine, ONE)


def test_gathering_gives_every_place_what_this_one_gave() -> None:
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
def test_exchanges_leave_no_garbage(even: bool) -> None:  # noqa: FBT001 (a case of two)
    """What equals would send cannot always be known; then it is zeros, as what comes from a single peer is."""
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


def test_a_tape_answers_in_turn_and_begins_anew_at_its_end(tmp_path: Path) -> None:
    """Several operations alike are told apart by their order."""
    recorder = CollectiveRecorder()
    for number in (1.0, 2.0):
        ended = recorder.begun(0, "allreduce", out := [torch.full((2,), number)], out)
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


def test_a_tape_for_which_there_is_no_room_is_an_error_of_the_disk_and_leaves_nothing(tmp_path: Path) -> None:
    """The words that torch has for it are no OSError, and would end the rank."""
    recorder, many = CollectiveRecorder(), [torch.zeros(SMALL // 4)]
    ended = recorder.begun(0, "allreduce", many, many)
    assert ended is not None
    ended()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL // 2, before[1]))
    try:
        with pytest.raises(OSError, match=r"iostream|enforce|write|pos"):
            recorder.write(tmp_path / "t.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_large_outputs_are_recorded_only_when_asked_for() -> None:
    """Every rank records what is small; what is large costs memory, and one rank of each role is enough."""
    recorder, large = CollectiveRecorder(), [torch.zeros(SMALL // 4 + 1)]
    assert recorder.begun(0, "allreduce", large, large) is None
    recorder.whole = True
    assert recorder.begun(0, "allreduce", large, large) is not None


@pytest.mark.parametrize("content", [None, b"", b"no tape", b"PK\x03\x04 torn"])
def test_a_tape_that_cannot_be_read_is_none(tmp_path: Path, content: bytes | None) -> None:
    """A standby then answers as a group of equals would."""
    path = tmp_path / "t.pt"
    if content is not None:
        path.write_bytes(content)
    assert RecordedCollectives.read(path) is None


def test_coverage_counts_calls_and_lists_those_that_are_new() -> None:
    """By what they are known by: place of the group, name, shapes."""
    known = key_of(0, "allreduce", [ONE], [ONE])
    coverage = Coverage({known})
    for one in (ONE, ONE, OTHER):
        coverage.begun(0, "allreduce", [one], [one])
    assert coverage.told() == {"calls": 3, "foreseen": 2, "kinds": 2, "first_met": ["0/allreduce/(3, 1)float32"]}
