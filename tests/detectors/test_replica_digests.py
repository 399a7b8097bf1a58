"""Copies of one state that differ: the majority names the liar, two only say that they differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.detectors.evidence import ReplicaDigests
from tests.detectors.evidence_of import seen, the_fault
from tests.mentions import mentions


def copies(*digests: str, sums: dict[int, dict[str, int]] | None = None) -> ReplicaDigests:
    """Return the digests of ranks, each on a node of its own."""
    nodes = {rank: f"n{rank}" for rank in range(len(digests))}
    return ReplicaDigests(at=7.0, step=128, nodes=nodes, digests=dict(enumerate(digests)), sums=sums or {})


def test_equal_copies_are_well() -> None:
    """However many there are."""
    for count in range(1, 9):
        assert seen(copies(*["a"] * count)) == []


@pytest.mark.parametrize("liar", range(3))
def test_the_majority_names_the_liar_and_the_first_tensor_that_differs(liar: int) -> None:
    """In the order of the model, and how many more there are."""
    digests = ["b" if rank == liar else "a" for rank in range(3)]
    honest, wrong = {"w.0": 1, "w.1": 2, "w.2": 3}, {"w.0": 1, "w.1": 9, "w.2": 8}
    fault = the_fault(copies(*digests, sums={rank: wrong if rank == liar else honest for rank in range(3)}))
    assert (fault.kind, fault.rank, fault.node, fault.step) == ("silent-corruption", liar, f"n{liar}", 128)
    assert mentions(fault.quote, "'w.1'", "1 more of 3")


def test_two_copies_only_say_that_they_differ() -> None:
    """Nobody is accused."""
    fault = the_fault(copies("a", "b", sums={0: {"w": 1}, 1: {"w": 2}}))
    assert (fault.kind, fault.rank, fault.node) == ("copies-differ", None, None)
    assert mentions(fault.quote, "'w'", "no majority")


@pytest.mark.parametrize("digests", ["abc", "aabb", "aabc", "abcd"])
def test_without_a_majority_no_rank_is_blamed(digests: str) -> None:
    """Copies that all go their own way are not the fault of some of them."""
    assert the_fault(copies(*digests)).kind == "copies-differ"


def test_several_liars_are_each_named() -> None:
    """Also when they lie alike: fewer than half."""
    assert {fault.rank for fault in seen(copies(*"aabab"))} == {2, 4}


def test_a_diagnosis_says_until_when_they_were_equal() -> None:
    """And what there is to go back to."""
    evidence = replace(copies("a", "a", "b"), equal_at=112, good="the newest checkpoint from before is that of step 100")
    assert mentions(the_fault(evidence).quote, "step 112", "step 100")


def test_a_diagnosis_does_not_wait_for_the_checksums() -> None:
    """They only name the tensor."""
    fault = the_fault(copies("a", "a", "b"))
    assert mentions(fault.quote, "step 128", "rank 2 on n2", 2)
