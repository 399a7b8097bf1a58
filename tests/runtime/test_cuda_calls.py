"""Which calls of CUDA and NCCL are made, on which device and in which order: over the lowest calls of torch, which do nothing here.

It validates the runtime's part, and nothing of CUDA or NCCL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from holdfast.runtime.groups import device_library, nccl
from holdfast.runtime.groups.backends import BackendGroup, BuildOptions, GenerationEnded, build
from holdfast.runtime.peer_errors import is_device_error, is_peer_loss
from holdfast.runtime.snapshots.device_runtime import CudaRuntime
from tests.runtime.fake_cuda import FakeCuda
from tests.waiting import wait_until

GPU = torch.device("cuda", 3)
"""That of the rank. A thread that has just started is on GPU 0, which is another rank's."""
MINUTES = timedelta(minutes=5)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Take the place of CUDA and NCCL."""
    return FakeCuda(monkeypatch)


def in_a_new_thread(cuda: FakeCuda, call: Callable[[], object]) -> None:
    """Run *call* in a thread that has chosen no device, and find it on the same as before."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
            assert cuda.current_index == 0
        except BaseException as error:  # noqa: BLE001 (raised in the test's thread)
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def test_snapshots_call_cuda_on_the_gpu_of_their_rank_from_any_thread(cuda: FakeCuda) -> None:
    """Also when they make the streams, and in the blocks that launch on them: a call on GPU 0 would take memory of another rank's."""
    made: list[CudaRuntime] = []
    in_a_new_thread(cuda, lambda: made.append(CudaRuntime(GPU)))
    (runtime,) = made
    assert cuda.devices_of("stream made") == [3, 3]

    def copy() -> None:
        runtime.register(4096, 100)
        with runtime.collecting():
            collected = runtime.record()
        with runtime.on_stream():
            runtime.wait(collected)
            runtime.record()
        runtime.record()
        runtime.wait_for_training()
        runtime.hold_training()
        runtime.unregister(4096)

    before = len(cuda.calls)
    in_a_new_thread(cuda, copy)
    calls = cuda.calls[before:]
    assert {device for _, device, *_ in calls} == {3}
    names = [name for name, _, *streams in calls if not name.startswith("stream")]
    assert names[:2] == ["register 4096 100", "checked 0"]
    assert names[-2:] == ["unregister 4096", "checked 0"]


def test_a_copy_waits_for_what_is_collected_and_both_streams_for_training_and_training_for_both(cuda: FakeCuda) -> None:
    """Each on its own stream, of the lowest priority: kernels of training come first."""
    runtime = CudaRuntime(GPU)
    with runtime.collecting():
        collecting = cuda.stream_of(3)
        collected = runtime.record()
    with runtime.on_stream():
        copies = cuda.stream_of(3)
        runtime.wait(collected)
    training = cuda.stream_of(3)
    assert len({training, copies, collecting}) == 3
    assert (copies.priority, collecting.priority) == (0, 0)
    runtime.wait_for_training()
    runtime.hold_training()
    waits = [streams for name, _, *streams in cuda.calls if name.startswith("wait")]
    assert waits == [
        [copies, collecting],
        [copies, training],
        [collecting, training],
        [training, copies],
        [training, collecting],
    ]


# -- NCCL -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def library(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[nccl.Nccl]:
    """Give NCCL's library to this process, whose training thread has chosen its GPU."""
    for name in (*nccl.SETTINGS, *nccl.SPEEDS):
        monkeypatch.setenv(name, "0")  # so that it is as before when the test has ended
        monkeypatch.delenv(name)
    torch.cuda.set_device(GPU)
    made = nccl.Nccl()
    made.prepare()
    assert {name: os.environ[name] for name in nccl.SETTINGS} == dict.fromkeys(nccl.SETTINGS, "0")
    device_library.use(made)
    yield made
    device_library._library.clear()
    torch.cuda.set_device(0)
    assert cuda.current_index == 0


class Member:
    """A member of a group that is being built, in a thread of its own."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.cancelled, self.group, self.error = False, list[BackendGroup](), list[BaseException]()
        options = BuildOptions(devices=("cuda",), timeout=MINUTES, host="127.0.0.1", name="pair", ranks=(4, 7)[:size])

        def run() -> None:
            try:
                self.group.append(build(store, "g", rank, size, options=options, is_cancelled=lambda: self.cancelled))
            except BaseException as error:  # noqa: BLE001 (the test looks at it)
                self.error.append(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait until the group is built, or cannot be."""
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_members_connect_once_all_have_come_on_the_gpu_of_their_rank(cuda: FakeCuda, library: nccl.Nccl) -> None:
    """In a thread of its own, which starts on GPU 0. A group is there when NCCL has carried an operation on a stream beside training's."""
    store = dist.HashStore()
    first = Member(store, 0, 2)
    wait_until(lambda: store.check(["g/device/arrived"]), seconds=60)
    assert cuda.backends == []
    second = Member(store, 1, 2)
    wait_until(lambda: len(cuda.devices_of("wait for the sum")) == 2, seconds=60)
    assert first.group == second.group == []
    cuda.runs.set()
    for one in (first, second):
        one.end()
        assert one.group[0].on_device in cuda.backends
        assert one.group[0].library is library
    for name in ("backend made", "connect", "allreduce", "event"):
        assert cuda.devices_of(name) == [3, 3], name
    for backend in cuda.backends:
        assert (backend.connected_to, backend.summed, backend.aborted) == ([GPU], [GPU], False)
        options = backend.options
        assert options.config.blocking == 0
        assert (options._timeout, options.group_name, options.global_ranks_in_group) == (MINUTES, "pair", [4, 7])
    used = [stream for name, _, *streams in cuda.calls if name in {"allreduce", "event"} for stream in streams]
    assert cuda.stream_of(3) not in used
    assert len(set(used)) == 2


class StateOf:
    """What NCCL says of the communicators, by address: its result."""

    def __init__(self) -> None:
        self.results: dict[int, int] = {}

    def failure(self, communicator: int) -> tuple[int, str]:
        """Return one that has failed."""
        return self.results.get(communicator, 0), "remote process exited"


def test_nccl_itself_is_asked_for_the_state_of_a_communicator(cuda: FakeCuda, library: nccl.Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """From when it has connected until it is aborted. torch's watchdog says nothing; a failed call of CUDA's is no lost peer."""
    state = StateOf()
    monkeypatch.setattr(library, "_state", state)
    cuda.runs.set()
    store = dist.HashStore()
    members = [Member(store, rank, 2) for rank in (0, 1)]
    for one in members:
        one.end()
    assert cuda.devices_of("communicator asked for") == [3, 3]
    first, second = (one.group[0] for one in members)
    assert (first.failure(), second.failure()) == ("", "")
    state.results = {4096: 6}
    assert (first.failure(), second.failure()) == ("NCCL reports for a communicator: remote process exited", "")
    state.results = {4097: 1}
    with pytest.raises(dist.DistBackendError) as failed:
        second.failure()
    assert is_device_error(failed.value)
    assert not is_peer_loss(failed.value)
    second.abandon()
    assert second.failure() == ""


@pytest.mark.parametrize("how", ["given up", "failed", "a failed GPU"])
def test_a_communicator_that_does_not_come_to_carry_an_operation_is_aborted(cuda: FakeCuda, library: nccl.Nccl, how: str) -> None:
    """Because its group was given up meanwhile, or what torch's watchdog says, or the GPU."""
    member = Member(dist.HashStore(), 0, 1)
    wait_until(lambda: cuda.devices_of("wait for the sum"), seconds=60)
    (backend,) = cuda.backends
    assert not backend.aborted
    if how == "given up":
        member.cancelled = True
    elif how == "failed":
        backend.error = "COMM_ERROR"
    else:
        cuda.broken = "CUDA error: an illegal memory access was encountered"
    member.end()
    (error,) = member.error
    assert isinstance(error, GenerationEnded) == (how == "given up")
    assert is_peer_loss(error) == (how == "failed")
    assert is_device_error(error) == (how == "a failed GPU")
    wait_until(lambda: backend.aborted, seconds=60)
    assert library.failure(backend) == ("NCCL reports COMM_ERROR for a communicator" if how == "failed" else "")
