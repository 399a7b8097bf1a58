"""Every reduce operation, with every collective that reduces and every element type: what a group gives, and what it must give."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

OPERATIONS: Final = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
WHOLE: Final = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
COMPLEX: Final = (torch.complex64, torch.complex128)
FLOATING: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
UNKNOWN: Final = (torch.int16, torch.float8_e4m3fn)
"""Element types that gloo does not know."""
COLLECTIVES: Final = ("all_reduce", "reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_tensor", "all_reduce_async")
PYTHON: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "SUM": operator.add, "AVG": operator.add, "PRODUCT": operator.mul, "MIN": torch.minimum, "MAX": torch.maximum,
    "BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor,
}  # fmt: skip


def value(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Return what *rank* gives: small numbers, so that every order of additions and products is exact."""
    return ((torch.arange(size) + rank) % 3 + 1).to(dtype) if dtype is not torch.bool else (torch.arange(size) + rank) % 3 == 0


def is_refused(operation: str, dtype: torch.dtype) -> bool:
    """Return whether gloo refuses this combination, and so a managed group over gloo."""
    if operation == "PREMUL_SUM" or dtype in UNKNOWN:
        return True
    if dtype in COMPLEX:
        return operation not in {"SUM", "AVG"}
    return dtype not in (FLOATING if operation == "AVG" else WHOLE) and operation in {"AVG", "BAND", "BOR", "BXOR"}


def expected(operation: str, dtype: torch.dtype, ranks: int, size: int) -> Tensor:
    """Return the reduction of what all ranks give, computed without a group."""
    given = [value(rank, size, dtype) for rank in range(ranks)]
    found = reduce(PYTHON[operation], given)
    assert isinstance(found, Tensor)
    return (found / ranks).to(dtype) if operation == "AVG" else found


def _result(collective: str, kind: Any, group: dist.ProcessGroup, dtype: torch.dtype) -> tuple[Tensor, slice]:
    """Run a reduction; return this rank's result, and which part of the whole it is (nothing where this rank gets none)."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    given, mine = value(rank, 2 * ranks, dtype), slice(2 * rank, 2 * rank + 2)
    out = torch.zeros(2).to(dtype)
    match collective:
        case "all_reduce":
            dist.all_reduce(given, kind, group)
        case "all_reduce_async":
            work = dist.all_reduce(given, kind, group, async_op=True)
            assert work is not None
            work.wait()
        case "all_reduce_coalesced":
            dist.all_reduce_coalesced([given], kind, group)
        case "reduce":
            dist.reduce(given, dist.get_global_rank(group, 1), kind, group)
            return (given, slice(None)) if rank == 1 else (given[:0], slice(0, 0))
        case "reduce_scatter":
            dist.reduce_scatter(out, [one.clone() for one in given.view(-1).split(2)], kind, group)
            return out, mine
        case _:
            dist.reduce_scatter_tensor(out, given, kind, group)
            return out, mine
    return given, slice(None)


def _kind(operation: str) -> Any:
    return dist._make_nccl_premul_sum(2.0) if operation == "PREMUL_SUM" else getattr(dist.ReduceOp, operation)


def combinations() -> Iterator[tuple[str, str, torch.dtype]]:
    """Yield every collective, reduce operation and element type."""
    for collective in COLLECTIVES:
        for operation in OPERATIONS:
            for dtype in (*FLOATING, *WHOLE, *COMPLEX, *UNKNOWN):
                yield collective, operation, dtype


def differences(group: dist.ProcessGroup) -> tuple[int, list[str]]:
    """Return how many combinations *group* was tried with, and a line for each that it did not answer as it must.

    A combination that gloo does not know must be refused with a ``RuntimeError`` before or in its wait, and leave the group usable.
    """
    wrong, count, ranks = [], 0, dist.get_world_size(group)
    for collective, operation, dtype in combinations():
        count += 1
        name = f"{collective} {operation} {dtype}"
        try:
            found, part = _result(collective, _kind(operation), group, dtype)
        except (RuntimeError, ValueError) as error:
            if not is_refused(operation, dtype):
                wrong.append(f"{name}: refused: {error}")
            continue
        if is_refused(operation, dtype):
            if found.numel():  # a rank that gets no result need not notice
                wrong.append(f"{name}: not refused, gave {found.tolist()}")
            continue
        due = expected(operation, dtype, ranks, 2 * ranks)[part]
        if not torch.equal(found, due):
            wrong.append(f"{name}: {found.tolist()}, and not {due.tolist()}")
    return count, wrong
