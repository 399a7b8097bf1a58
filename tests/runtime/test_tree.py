"""Trees of plain values and tensors as bytes: quick to make at every step, and unable to run code."""

from __future__ import annotations

import collections
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from holdfast.runtime.state import rng, tree

KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
TENSORS = st.builds(
    lambda shape, kind: torch.randint(0, 2, shape).to(kind), st.lists(st.integers(0, 3), max_size=3), st.sampled_from(KINDS)
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
TREES = st.recursive(
    PLAIN | TENSORS,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def same(one: Any, other: Any) -> bool:
    """Return whether two trees are equal to the bit, types and all."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(whole=TREES)
def test_unpickled_trees_are_equal(whole: Any) -> None:
    """Every shape and type, including empty and 0-dimensional tensors."""
    data = tree.pickled(whole)
    assert data[:1] == b"q"
    assert same(tree.unpickled(data), whole)


def test_views_are_unpickled_as_contiguous_copies() -> None:
    """A transposed tensor, a slice."""
    base = torch.arange(12.0).view(3, 4)
    for view in (base.t(), base[:, 1], base[1:, ::2]):
        assert same(tree.unpickled(tree.pickled(view)), view.contiguous())


def test_other_values_are_saved_as_torch_does() -> None:
    """By `torch.save`."""
    whole = {"order": collections.OrderedDict(b=1, a=torch.ones(2)), "parameter": torch.nn.Parameter(torch.ones(2))}
    data = tree.pickled(whole)
    assert data[:1] == b"t"
    restored = tree.unpickled(data)
    assert list(restored["order"]) == ["b", "a"]
    assert restored["parameter"].tolist() == [1.0, 1.0]


def test_generator_states_survive_pickling() -> None:
    """Of every generator."""
    state = tree.unpickled(tree.pickled(rng.capture()))
    first = torch.rand(3)
    rng.apply(state)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.parametrize("evil", [print, collections.OrderedDict, torch.Tensor])
def test_code_is_refused(evil: Any) -> None:
    """Bytes from elsewhere produce nothing but plain values and tensors."""
    data = b"q" + pickle.dumps({"x": evil})
    with pytest.raises(pickle.UnpicklingError, match="not expected"):
        tree.unpickled(data)


@pytest.mark.parametrize("state", [b"}X\x08\x00\x00\x00__name__X\x01\x00\x00\x00xs", b"N}X\x08\x00\x00\x00__name__X\x01\x00\x00\x00xs\x86"])
def test_pickled_bytes_cannot_change_the_reader(state: bytes) -> None:
    """A state for it is refused, and later reads work as before."""
    data = b"q\x80\x04choldfast.runtime.state.tree\n_tensor\n" + state + b"b."
    with pytest.raises(pickle.UnpicklingError, match="state"):
        tree.unpickled(data)
    assert torch.equal(tree.unpickled(tree.pickled(torch.ones(2))), torch.ones(2))
