"""What the runtime calls of torch's CUDA build and of NCCL exists in those that are installed, with these arguments. It needs no card.

Most of it is no public interface, and nothing else would show its absence before the first run on a card.
"""

from __future__ import annotations

import functools
import mmap
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.runtime.groups import nccl
from holdfast.runtime.peer_errors import is_device_error, is_peer_loss
from holdfast.runtime.telemetry.nccl_ras import LaunchCounts, parse
from tests.gpu import one_card

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA here, for no GPU")]

CALLS = {
    "_group_start": 0,
    "_group_end": 0,
    "_start_coalescing": 0,
    "_end_coalescing": 0,
    "_comm_ptr": 0,
    "_get_sequence_number_for_group": 0,
    "_set_default_timeout": 1,
    "abort": 0,
    "eager_connect_single_device": 1,
    "get_error": 0,
    "shutdown": 0,
    "_allgather_base": 3,
    "_reduce_scatter_base": 3,
    "allgather": 3,
    "allgather_coalesced": 3,
    "allreduce": 2,
    "allreduce_coalesced": 2,
    "alltoall": 3,
    "alltoall_base": 5,
    "broadcast": 2,
    "gather": 3,
    "recv": 3,
    "recv_anysource": 2,
    "reduce": 2,
    "reduce_scatter": 3,
    "scatter": 3,
    "send": 3,
}
"""Methods of ``ProcessGroupNCCL`` that are called, and with how many arguments."""
OPTIONS = (
    *("AllreduceOptions", "AllreduceCoalescedOptions", "BroadcastOptions", "ReduceOptions", "AllgatherOptions", "ReduceScatterOptions"),
    *("AllToAllOptions", "GatherOptions", "ScatterOptions"),
)


def mapped(name: str) -> mmap.mmap:
    """Return what the file of the library *name* holds, which this process has loaded."""
    path = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if f"/{name}" in line)
    with Path(path).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


@pytest.mark.parametrize(("name", "arguments"), CALLS.items())
def test_a_method_of_torchs_nccl_groups_takes_what_it_is_given(name: str, arguments: int) -> None:
    """By the signatures in its docstring: of C++ there is no other."""
    method: Any = getattr(dist.ProcessGroupNCCL, name)
    signatures = re.findall(rf"\b{name}\((self: .*)\) ->", method.__doc__)
    parameters = [re.findall(r"(?:^|, )(\w+): ", one)[1:] for one in signatures]
    assert any(len(one) == arguments for one in parameters), method.__doc__


def test_a_group_takes_the_options_that_it_is_made_with() -> None:
    """A name that torch does not know would be refused, and a value that it does not keep is none."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(minutes=5)
    options.group_name, options.global_ranks_in_group = "g", [3, 5]
    options.config.blocking = 0
    kept = options._timeout, options.group_name, options.global_ranks_in_group, options.config.blocking
    assert kept == (timedelta(minutes=5), "g", [3, 5], 0)
    assert re.search(r"store: \S+, rank: [^,]+, size: [^,]+, options: ", dist.ProcessGroupNCCL.__init__.__doc__ or "")


def test_every_operation_can_be_asked_for_a_work() -> None:
    """A collective over NCCL returns none otherwise."""
    for name in OPTIONS:
        assert getattr(dist.distributed_c10d, name)().asyncOp is True, name


def test_an_error_of_a_communicator_has_a_name() -> None:
    """Which is how success is told from it."""
    errors: Any = torch._C._distributed_c10d.ErrorType
    assert errors.SUCCESS.name == "SUCCESS"
    assert {"COMM_ERROR", "TIMEOUT"} <= set(errors.__members__)


def test_the_nccl_of_torch_can_be_asked_for_the_state_of_a_communicator() -> None:
    """Found where torch looks it up. It knows these results by number, and refuses what is no communicator."""
    state = nccl.communicator_state()
    assert state is not None
    result, text = state.failure(0)
    assert (result, text.partition(" (")[0]) == (4, "invalid argument")
    names = {number: state._name(number).decode().partition(" (")[0] for number in (nccl._CUDA_ERROR, nccl._IN_PROGRESS)}
    assert names == {1: "unhandled cuda error", 7: "NCCL operation in progress"}


def test_torch_reads_the_settings_that_are_made_for_it() -> None:
    """A name that it does not read would change nothing."""
    header = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"
    named = set(re.findall(r'"(TORCH_NCCL_\w+)"', header.read_text()))
    assert {*nccl.SETTINGS, *nccl.SPEEDS} <= named


def test_torch_says_in_these_words_that_a_peer_is_lost_or_its_gpu_has_failed() -> None:
    """The words by which they are told apart."""
    library = mapped("libtorch_cuda.so")
    lost = (
        "ncclRemoteError: ",
        "NCCL communicator was aborted on rank ",
        "NCCL timeout in: ",
        "Some NCCL operations have failed or timed out",
    )
    assert [text for text in (*lost, "ncclUnhandledCudaError: ") if library.find(text.encode()) < 0] == []
    assert all(is_peer_loss(RuntimeError(f"NCCL error: {text}")) for text in lost)
    assert is_device_error(RuntimeError("ncclUnhandledCudaError: Call to CUDA function failed."))


def test_host_memory_can_be_registered_and_an_error_of_it_is_a_runtime_error() -> None:
    """Snapshots go on without pinned memory, for which they catch that."""
    bindings: Any = torch._C
    runtime = bindings._cudart
    counts = [len(re.findall(r"arg\d+: ", getattr(runtime, name).__doc__)) for name in ("cudaHostRegister", "cudaHostUnregister")]
    assert counts == [3, 1]
    with pytest.raises(RuntimeError, match="out of memory"):
        torch.cuda.check_error(runtime.cudaError(2))
    torch.cuda.check_error(runtime.cudaError.success)


def test_nccl_reads_the_settings_of_ranks_that_share_a_card() -> None:
    """Those for the installed version."""
    version = tuple(torch.cuda.nccl.version())
    assert all(isinstance(one, int) for one in version[:3])
    library = mapped("libnccl.so")
    ours = {name for name in one_card.settings(0, version) if name.startswith("NCCL_")}
    assert {name for name in ours if library.find(name.encode() + b"\0") < 0} == set()


def test_ras_says_what_is_read_of_it() -> None:
    """The lines of its answer, as the installed NCCL writes them."""
    library, lines = mapped("libnccl.so"), list[str]()
    for line, values in (
        ("Communicator ranks have different %s operation counts", ("AllReduce",)),
        ("%d ranks have launched up to operation %ld", (7, 64)),
        ("Rank %d has launched up to operation %ld -- GPU %s managed by process %d on node %s", (7, 60, "3", 1, "node1")),
    ):
        assert library.find(line.encode()) >= 0, line
        lines.append(f"  {line % values}")
    assert parse("\n".join([*lines, ""])) == [LaunchCounts("AllReduce", 8, 64, {7: 60})]
    assert all(library.find(command) >= 0 for command in (b"client protocol ", b"timeout ", b"verbose status"))


@pytest.mark.parametrize(
    "name",
    [
        *("AcceleratorError", "accelerator.is_available", "cuda.CUDAGraph", "cuda.Event.elapsed_time", "cuda.Event.query"),
        *("cuda.Event.record", "cuda.Event.synchronize", "cuda.Stream.cuda_stream", "cuda.Stream.wait_stream", "cuda.current_device"),
        *("cuda.current_stream", "cuda.device", "cuda.device_count", "cuda.empty_cache", "cuda.get_device_name"),
        *("cuda.get_device_properties", "cuda.get_rng_state", "cuda.graph", "cuda.is_current_stream_capturing", "cuda.is_initialized"),
        *("cuda.mem_get_info", "cuda.set_device", "cuda.set_rng_state", "cuda.stream", "cuda.synchronize", "_C._cuda_getDeviceCount"),
        "_C._cuda_isInBadFork",
    ],
)
def test_torch_has_what_is_used_of_cuda(name: str) -> None:
    """By name."""
    assert functools.reduce(getattr, name.split("."), torch) is not None
