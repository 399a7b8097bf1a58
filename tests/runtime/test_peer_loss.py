"""Lost peers and the script's own errors are distinguished, by errors that torch really raised."""

from __future__ import annotations

import json
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from holdfast.runtime.groups.backends import BackendGroup
from holdfast.runtime.groups.operations import StepTransaction
from holdfast.runtime.groups.process_group import ManagedGroup
from holdfast.runtime.groups.recovery_manager import RecoveryManager
from holdfast.runtime.peer_errors import LONGEST_MESSAGE, LONGEST_TRACEBACK, describe, is_device_error, is_late_peer, is_peer_loss
from tests.mentions import mentions
from tests.runtime.ranks import Ranks


def lost(errors: list[dict[str, Any]]) -> list[bool]:
    """Return whether each error counts as a lost peer."""
    return [error["peer_lost"] for error in errors]


def test_a_killed_rank_is_a_lost_peer_in_every_collective(ranks: Ranks) -> None:
    """Ring neighbours get resets and closed connections, first and again."""
    ended = ranks.start("lose_a_peer", 3, how="killed").wait()
    assert [one.status for one in ended] == [0, -9, 0]
    for one in (ended[0], ended[2]):
        assert len(one.result) >= 3, one.result
        assert all(lost(one.result)), one.result


def test_a_stopped_rank_is_a_lost_peer_after_the_timeout(ranks: Ranks) -> None:
    """The group's timeout reports a stopped peer."""
    results = ranks.run("lose_a_peer", 3, how="silent")
    assert results[0]
    assert all(lost(results[0] + results[2])), results


def test_a_rank_that_never_came_is_not_an_error_of_the_script(ranks: Ranks) -> None:
    """The store waits for it in vain: to the diagnosis a secondary failure of whatever delays it."""
    results = ranks.run("lose_a_peer", 2, how="never-came")
    assert lost(results[0]) == [True], results
    assert (results[0][0]["type"], "Timed out" in results[0][0]["message"]) == ("torch.distributed.DistStoreError", True)


def test_a_lost_store_is_a_lost_peer(ranks: Ranks) -> None:
    """The store ended with rank 0."""
    ended = ranks.start("lose_the_store", 2).wait()
    assert ended[1].result, ended[1].log
    assert all(lost(ended[1].result)), ended[1].result


def test_a_wrong_collective_is_an_error_of_the_script(ranks: Ranks) -> None:
    """Errors of torch.distributed that no peer caused are not attributed to one."""
    results = ranks.run("mismatch", 2)
    for errors in results:
        assert len(errors) == 2
        assert not any(lost(errors)), errors


NCCL_LOST = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600082 ms",
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or there was a network error",
    "ncclRemoteError: A call failed.\nLast error:\nsocketProgress: Connection closed by remote peer node-b<47268>",
    "NCCL communicator was aborted on rank 1. Original reason for failure was: NCCL error: remote process exited",
    "NCCL timeout in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:196",
    "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run",
)
OWN = (
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details), ncclInvalidUsage: Duplicate GPU detected"),
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    RuntimeError("download failed: Connection reset by peer"),
    ConnectionResetError(104, "Connection reset by peer"),
    TimeoutError("timed out"),
    ValueError("gloo: Connection closed by peer"),
    DistNetworkError("The server socket has failed to listen on any local network address. port: 29500, code: -98, name: EADDRINUSE"),
)


@pytest.mark.parametrize("words", NCCL_LOST)
def test_messages_of_nccl_about_a_lost_peer_are_recognised(words: str) -> None:
    """By the message alone: there is no GPU here."""
    assert is_peer_loss(RuntimeError(words))


@pytest.mark.parametrize("error", OWN, ids=str)
def test_an_error_of_the_script_is_attributed_to_no_peer(error: Exception) -> None:
    """The script's own network errors, a port in use and a wrong shape are not lost peers."""
    assert not is_peer_loss(error)


LATE = (
    DistStoreError("wait timeout after 30000ms, keys: /default_pg/0//cpu//0/0/1"),
    DistStoreError("wait timeout, keys: generation-1/groups/group-0/ports/1"),
    DistStoreError("Timed out after 61 seconds waiting for clients. 1/2 clients joined."),
    DistStoreError("Timed out initializing process group in store based barrier on rank: 0"),
)


@pytest.mark.parametrize("error", LATE, ids=str)
def test_a_missing_value_in_a_store_is_a_late_peer_and_not_a_lost_one(error: Exception) -> None:
    """It may load or compile: its group is not broken. A process that exits over it is still a secondary failure."""
    assert (is_late_peer(error), is_peer_loss(error), describe(error)["peer_lost"]) == (True, False, True)
    group, inner = _group()
    with pytest.raises(DistStoreError):
        group.peer_failed(inner, error)  # type: ignore[arg-type]
    assert not group.transaction.lost


NCCL_DEVICE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), "
    "NCCL version 2.29.7\nncclUnhandledCudaError: Call to CUDA function failed."
)
"""What NCCL says of this process's own GPU. The "Last error" below it is the last of any thread: it may be another rank's loss."""
DEVICE = (
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("HIP error: unspecified launch failure"),
    DistBackendError(f"{NCCL_DEVICE}\nLast error:\nCuda failure 214 'uncorrectable ECC error encountered'"),
    DistBackendError(f"{NCCL_DEVICE}\nLast error:\nsocketProgress: Connection closed by remote peer node-b<47268>"),
    DistBackendError("NCCL error: unhandled system error, NCCL version 2.29.7\nLast error:\nCuda failure 'an illegal memory access'"),
    DistBackendError("NCCL error: internal error\nLast error:\nHIP failure 'unspecified launch failure'"),
)


@pytest.mark.parametrize("error", DEVICE, ids=str)
def test_an_error_of_the_gpu_is_raised_even_when_a_peer_is_lost(error: RuntimeError) -> None:
    """It persists: treated as the consequence of a lost peer it would cause one recovery after the other."""
    assert is_device_error(error)
    group, inner = _group()
    group.transaction.fail("rank 3 is lost")
    group.peer_failed(inner, RuntimeError("a consequence of the loss, whatever it says"))
    for connections in (inner, BackendGroup({})):  # and those that were replaced meanwhile
        with pytest.raises(type(error)):
            group.peer_failed(connections, error)
    error.__cause__ = DistBackendError("NCCL communicator was aborted on rank 1")
    assert not is_peer_loss(error)
    assert not describe(error)["peer_lost"]


@pytest.mark.parametrize("words", ["CUDA out of memory. Tried to allocate 2 GiB", *NCCL_LOST])
def test_a_message_that_only_mentions_cuda_is_not_an_error_of_the_gpu(words: str) -> None:
    """A failed allocation can be retried, and a lost peer is none of this GPU."""
    assert not is_device_error(RuntimeError(words))


@pytest.mark.parametrize(
    ("error", "peer_is_lost", "raises"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True, True),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), True, True),
        (DistBackendError("NCCL communicator was aborted on rank 1"), False, False),
        (RuntimeError("an operation on the device that was given up"), True, False),
        (RuntimeError("an operation on the device that was given up"), False, True),
    ],
    ids=str,
)
def test_errors_of_pending_gpu_work_are_classified_before_the_vote(
    error: RuntimeError,
    peer_is_lost: bool,  # noqa: FBT001 (a table)
    raises: bool,  # noqa: FBT001 (a table)
) -> None:
    """There is no GPU here: its answer is scripted."""
    recovery = object.__new__(RecoveryManager)

    def wait_for_device() -> None:
        raise error

    recovery.membership = SimpleNamespace(  # type: ignore[assignment]
        transaction=StepTransaction(lost=peer_is_lost), wait_for_device=wait_for_device
    )
    with pytest.raises(type(error)) if raises else nullcontext():
        recovery._await_device()
    if raises and peer_is_lost:
        assert not recovery.lost_peer(error)  # nor is it swallowed where all save together


def _group() -> tuple[ManagedGroup, BackendGroup]:
    group, inner = ManagedGroup("g", [0, 1], 0, StepTransaction(), timedelta(minutes=5)), BackendGroup({})
    group.replace_backend(inner, {})
    return group, inner


def test_a_lost_peer_stays_one_when_wrapped() -> None:
    """A script that raises its own error from it, or while handling it, does not hide it; one that says `from None` does."""
    lost_store = DistNetworkError("failed to recv, got 0 bytes. Connection was likely closed")
    raised_from, while_handling, hidden = KeyError(), KeyError(), KeyError()
    raised_from.__cause__ = while_handling.__context__ = hidden.__context__ = lost_store
    hidden.__suppress_context__ = True
    assert is_peer_loss(raised_from)
    assert is_peer_loss(while_handling)
    assert not is_peer_loss(hidden)


def test_an_exception_is_described_whatever_it_is() -> None:
    """Long, unprintable, binary or with an errno: it becomes a message of bounded size."""

    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    def raised(error: BaseException) -> dict[str, Any]:
        with pytest.raises(type(error)) as caught:
            raise error
        return describe(caught.value, 7)

    reported = raised(OSError(28, "No space left on device"))
    assert (reported["type"], reported["errno"], reported["step"], reported["peer_lost"]) == ("OSError", 28, 7, False)
    assert "No space left on device" in reported["traceback"]
    assert mentions(raised(Unprintable())["message"], "not available", "RuntimeError")
    assert raised(KeyboardInterrupt())["type"] == "KeyboardInterrupt"
    long = raised(ValueError("x\ud800\0" * 100_000 + "the end"))
    assert long["message"].endswith("the end")
    assert len(long["message"].encode()) <= LONGEST_MESSAGE
    assert len(long["traceback"].encode()) <= LONGEST_TRACEBACK
    json.dumps(long)
