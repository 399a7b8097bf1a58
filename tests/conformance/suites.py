"""The suites: PyTorch's own tests and ours, in ranks that are forked from one process instead of started one by one.

PyTorch's tests read the environment while they are imported: `__main__` has it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import unittest
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch.testing._internal import common_distributed
from torch.testing._internal.common_distributed import MultiProcessTestCase

from holdfast.host.process import die_with_parent
from tests.conformance import cuda_to_cpu, public_api
from tests.conformance.managed_init import enter_job

TORCH_SUITE: Final = "torch.testing._internal.distributed.distributed_test"

logging.getLogger(common_distributed.__name__).setLevel(logging.ERROR)  # a line for each process of each test


class ForkedRanks(MultiProcessTestCase):
    """Forks its ranks: importing torch takes seconds, and nothing here runs an operator before the fork."""

    managed = False
    """Whether the ranks are those of a job with managed groups."""

    def setUp(self) -> None:
        """Start the ranks of this test."""
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **more: Any) -> None:
        die_with_parent(os.getppid())
        if ForkedRanks.managed:
            enter_job()
        super()._run(rank, test_name, file_name, parent_pipe, **more)


def _any_function(*_arguments: Any, **_named: Any) -> Any:
    """Return a decorator that changes nothing."""
    return lambda function: function


@contextmanager
def _replaced(place: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(place, name) for name in values}
    for name, value in values.items():
        setattr(place, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(place, name, value)


def _load(suffix: str, backend: str, **decorators: Any) -> Any:
    """Return PyTorch's module of tests as it is for *backend*, with other *decorators*, and with gloo as the backend in the end.

    A test that wants eight ranks is not skipped: four do for all of them, and PyTorch's own CI skips these everywhere.
    """
    spec = importlib.util.find_spec(TORCH_SUITE)
    assert spec is not None
    assert spec.origin is not None
    made = importlib.util.spec_from_file_location(f"{TORCH_SUITE}_{suffix}", spec.origin)
    assert made is not None
    assert made.loader is not None
    module: Any = importlib.util.module_from_spec(made)
    sys.modules[made.name] = module  # its classes are pickled by name
    os.environ["BACKEND"] = backend
    with _replaced(common_distributed, skip_if_small_worldsize=lambda function: function, **decorators):
        made.loader.exec_module(module)
    os.environ["BACKEND"] = module.BACKEND = "gloo"
    return module


def _case(module: Any, name: str) -> type[Any]:
    """Return the test case of *module*, with forked ranks."""
    return type(name, (ForkedRanks, module.TestDistBackend, module.DistributedTest._DistTestBase), {})


@cache
def suite(name: str) -> type[Any]:
    """Return the test case of the suite *name*."""
    if name == "distributed":
        return _case(_load("gloo", "gloo"), "Distributed")
    if name == "distributed-mpi":
        return _case(_load("mpi", "mpi"), "DistributedAsForMpi")
    if name == "distributed-gpu":
        module = _load("gpu", "gloo", skip_if_lt_x_gpu=_any_function, skip_if_no_gpu=lambda function: function)
        return cuda_to_cpu.on_cpu(_case(module, "DistributedOnCpu"), module)
    return type("PublicApi", (ForkedRanks, public_api.PublicApi), {})


SKIPPED_FOR: Final = {"distributed-mpi": ("Only MPI supports",), "distributed-gpu": ("CUDA device", "CUDA is not available")}
"""Texts in the reasons for which the suite ``distributed`` skips the tests that a suite consists of."""


def tests_of(name: str, skipped: Mapping[str, str]) -> list[str]:
    """Return the tests of the suite *name*; *skipped*: why tests of the suite ``distributed`` are skipped."""
    if name in SKIPPED_FOR:
        return sorted(test for test, why in skipped.items() if any(text in why for text in SKIPPED_FOR[name]))
    return sorted(unittest.TestLoader().getTestCaseNames(suite(name)))
