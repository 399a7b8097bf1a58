"""Groups whose operations a device runs, on a stand-in without a GPU (`device_stand_in.py`): order, marks, aborts, culprits, batches.

This validates the runtime's logic, and not NCCL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from holdfast.control.faults.rank_status import parse_rank_status
from holdfast.detectors.evidence import RankProgress
from holdfast.detectors.training.hang_analysis import explain
from holdfast.protocol import Message
from holdfast.runtime.groups import backends, device_library, membership, nccl, process_group
from holdfast.runtime.groups.backends import BackendGroup, BuildOptions, GenerationEnded, build
from holdfast.runtime.groups.device_library import ABORT_STATUS, Communicator
from holdfast.runtime.groups.operations import InFlightOperations, StepTransaction
from holdfast.runtime.groups.process_group import ManagedGroup
from holdfast.runtime.peer_errors import is_device_error, is_late_peer
from holdfast.runtime.snapshots.device_runtime import CapturedStep
from holdfast.runtime.telemetry.device_times import DeviceTimes
from tests.mentions import mentions
from tests.runtime.chaos import fault
from tests.runtime.device_stand_in import StandIn, StandInCommunicator
from tests.runtime.flow_double import UNTIL, Ended, FlowDouble, Job, Workers, assert_undisturbed, undisturbed
from tests.runtime.test_rank_status import standings
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def on_device(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Return a run of the same ranks that nothing disturbs."""
    return undisturbed(FlowDouble(workers, tmp_path_factory.mktemp("f"), "device_groups", UNTIL))


def _pending(status: Message) -> bool:
    return any(group["pending"] for group in status["groups"])


def test_survivors_in_healthy_groups_are_freed_when_a_rank_dies_in_backward(job: Job, on_device: Ended) -> None:
    """No communicator reports anything: rank 3 waits for ranks 1 and 2, which wait for rank 0, until the controller's command ends all.

    They wait in the driver, as a script does that reads its loss, so no wait of the runtime's own can end. At step 12 rank 2 loses a
    message without any rank's dying. The others wait for it, and are freed as well.
    """
    flow = job("silent", "item", "refuses-12-2", script="device_groups", chaos=[fault(0, "backward", 4), fault(3, "forward", 9)])
    first = dict(flow.pids)
    for lost in (0, 3):
        flow.until_dead(lost)
        assert not [one for one in flow.of("broken") if one["generation"] == flow.generation]
        flow.regroup([lost])
        assert {(one["source"], one["kept"]) for one in flow.mended()} == {("live", 0)}
    assert mentions(flow.receive("broken", 2, generation=3)["why"], "ncclRemoteError")
    flow.until(lambda: all(_pending(one) for one in standings(flow).values() if one["pid"] != flow.pids[2]), "the waits of the others")
    flow.regroup()
    assert {(one["source"], one["kept"]) for one in flow.mended()} == {("live", 0)}
    assert [flow.pids[rank] for rank in (1, 2)] == [first[rank] for rank in (1, 2)]
    assert_undisturbed(flow, on_device)
    for rank in (1, 2):  # three groups, made four times, of which the last ones work still
        report = flow.receive("device", rank)
        assert (report["communicators"], report["aborted"], report["batches"]) == (12, 9, [2])


@pytest.fixture(scope="module")
def under_ddp(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Return a run of the same ranks under DDP that nothing disturbs."""
    return undisturbed(FlowDouble(workers, tmp_path_factory.mktemp("f"), "device_groups", UNTIL, "ddp"))


def test_a_rank_notices_a_failed_communicator_by_itself_and_a_rank_that_hangs_is_named(job: Job, under_ddp: Ended) -> None:
    """Rank 1 dies, and those that wait for it on the device report it; later rank 2 starts no step, and the others' marks show it.

    At last rank 0 dies, and the communicators of rank 3 cannot be aborted: it exits, and both are replaced.
    """
    flow = job("ddp", "gate-12-2", "stuck-3", script="device_groups", chaos=[fault(1, "backward", 5), fault(0, "backward", 14)])
    flow.until_dead(1)
    flow.until(lambda: flow.of("broken"), "a report of a broken group")
    flow.regroup([1])
    flow.mended()
    flow.receive("at the gate", 2)
    flow.until(lambda: all(standings(flow)[rank]["waits"] == "device" for rank in (0, 1, 3)), "the waits of the others for their devices")
    statuses = standings(flow)
    assert [_pending(statuses[rank]) for rank in range(4)] == [True, True, False, True]
    finding = explain({rank: RankProgress(node="n", step=12, age=1.0, status=parse_rank_status(one)) for rank, one in statuses.items()})
    assert finding is not None
    assert finding.rank == 2
    flow.pass_gate()
    flow.until_dead(0)
    flow.regroup([0])
    report = flow.receive("exception", 3)
    assert (report["type"].rpartition(".")[2], report["peer_lost"]) == ("AbortTimedOut", False)
    assert flow.until(lambda: flow.workers.ended().get(flow.pids[3]), "the end of rank 3") == ABORT_STATUS
    flow.regroup([0, 3])
    flow.mended()
    assert_undisturbed(flow, under_ddp)
    timings = [one["timing"] for one in flow.of("beat") if one.get("timing")]
    assert len(timings) > UNTIL
    assert all(one["own"] > 0 and one["talk"] > 0 for one in timings)


def test_a_rank_whose_call_into_the_library_does_not_return_is_replaced(job: Job, under_ddp: Ended) -> None:
    """Rank 1 starts a message, and waits in the library for more than a message. Then rank 3 dies, and nothing frees rank 1's thread."""
    flow = job("ddp", "blocks-12-1", script="device_groups")
    flow.receive("in the library", 1)
    flow.kill(3)
    flow.until_dead(3)
    flow.regroup([3])
    report = flow.receive("exception", 1)
    assert (report["type"].rpartition(".")[2], report["peer_lost"]) == ("AbortTimedOut", False)
    assert mentions(report["message"], "a call into the device's library")
    assert flow.until(lambda: flow.workers.ended().get(flow.pids[1]), "the end of rank 1") == ABORT_STATUS
    flow.regroup([1, 3])
    flow.mended()
    assert_undisturbed(flow, under_ddp)


def test_a_communicator_that_a_migration_replaces_stays_until_the_devices_of_all_ranks_have_done_with_it(job: Job) -> None:
    """The device of rank 1 comes late to what follows the vote: rank 0 aborts none before that, and rank 2 does not exit."""
    flow = job("gate-6-0", "late-1", script="device_groups")
    flow.hot_spare(0)
    flow.receive("parked", "s0")
    flow.receive("at the gate", 0)
    flow.prepare(2, "s0")
    flow.prepared()
    flow.may_switch()
    flow.pass_gate()
    late = flow.receive("goes on", 1)["at"]
    assert min(flow.receive("aborts", 0)["at"], flow.receive("exits", 2)["at"]) > late
    flow.switched()
    assert flow.finish().status == [0] * 4


# -- two ranks in this process ------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[list[tuple[StandIn, ManagedGroup]]]:
    """Give the two members of a group, each with a device of its own."""
    store, timeout, made = dist.HashStore(), timedelta(minutes=5), dict[int, tuple[StandIn, ManagedGroup]]()

    def make(rank: int) -> None:
        device, group = StandIn(), ManagedGroup("pair", [0, 1], rank, StepTransaction(), timeout)
        members = Communicator(name="pair", rank=rank, ranks=(0, 1), timeout=timeout, arrival=timeout, host="127.0.0.1")
        backend = device.connect(store, members, lambda: False)
        group.replace_backend(BackendGroup({device.name: backend}, device), {})
        made[rank] = device, group

    threads = [threading.Thread(target=make, args=(rank,)) for rank in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    yield [made[0], made[1]]
    for _, group in made.values():
        group.abandon("the test is over")
        group.shutdown()


def test_a_wait_returns_at_once_and_an_operation_stays_marked_until_the_device_has_run_it(pair: list[tuple[StandIn, ManagedGroup]]) -> None:
    """The other rank's device is busy. Two sums on one tensor come in order once it is not, and the time until then counts as waiting."""
    (device, group), (busy, other) = pair
    there, here, times = torch.ones(3), torch.ones(3), DeviceTimes()
    released = busy.stall()
    for _ in range(2):
        other.allreduce([there]).wait()
    times.begin(device)
    works = [group.allreduce([here]) for _ in range(2)]
    with times.waiting():
        for one in works:
            one.wait()
    times.end()
    assert (here.tolist(), [one.is_completed() for one in works]) == ([1.0] * 3, [False, False])
    assert not group.in_flight.settle()
    assert [mark.number for mark in group.in_flight.pending.values()] == [1, 2]
    assert (other.in_flight.counts, other.in_flight.progress()) == ({"": 2}, ({"": 0}, []))  # its device has come to none of them
    assert times.seconds() is None
    wait_until(times._waits[0][0].query, seconds=60)
    begun = time.perf_counter()
    busy_for = time.perf_counter() - begun
    released.set()
    device.synchronize()
    assert here.tolist() == [4.0] * 3
    assert group.in_flight.settle()
    assert group.in_flight.pending == {}
    took, waited = times.seconds() or (0.0, 0.0)
    assert busy_for <= waited <= took


def test_an_operation_that_the_script_waits_for_at_once_can_be_waited_for(pair: list[tuple[StandIn, ManagedGroup]]) -> None:
    """Torch asks for no work then, and NCCL returns none: nothing would mark the operation, nor end the wait for it."""
    here = [torch.full((2,), rank + 1.0) for rank in (0, 1)]
    for rank, (_, group) in enumerate(pair):
        options = dist.AllreduceOptions()
        options.asyncOp = False  # as `torch.distributed.all_reduce` does
        work = group.allreduce([here[rank]], options)
        assert [mark.name for mark in group.in_flight.pending.values()] == ["allreduce"]
        work.wait()
    for device, group in pair:
        device.synchronize()
        assert group.in_flight.settle()
    assert [one.tolist() for one in here] == [[3.0, 3.0]] * 2


def test_messages_that_start_as_one_do_not_wait_for_each_other(pair: list[tuple[StandIn, ManagedGroup]]) -> None:
    """Both ranks send first. One after the other that can never end; as one, as `batch_isend_irecv` starts them, it does."""
    received = [torch.zeros(5), torch.zeros(5)]
    cpu = torch.device("cpu")
    for rank, (_, group) in enumerate(pair):
        group._start_coalescing(cpu)
        group.send([torch.full((5,), rank + 1.0)], 1 - rank)
        group.recv([received[rank]], 1 - rank)
        group._end_coalescing(cpu).wait()
    for device, group in pair:
        device.synchronize()
        assert group.in_flight.settle()
    assert [one.tolist() for one in received] == [[2.0] * 5, [1.0] * 5]
    works = [[group.send([torch.ones(5)], 1 - rank), group.recv([torch.zeros(5)], 1 - rank)] for rank, (_, group) in enumerate(pair)]
    for _, group in pair:
        assert not any(work.is_completed() for work in works[group.me])
        assert not group.in_flight.settle()
        assert [mark.channel for mark in group.in_flight.pending.values()] == [f"send>{1 - group.me}", f"recv<{1 - group.me}"]


def test_a_failed_device_is_no_lost_peer(pair: list[tuple[StandIn, ManagedGroup]]) -> None:
    """Its error is raised, also while the rank waits for a peer that does not come, and no step is given up for it."""
    (device, group), _ = pair
    group.allreduce([torch.ones(1)]).wait()
    end = device.record()
    device.broken = "CUDA error: uncorrectable ECC error encountered"
    with pytest.raises(torch.AcceleratorError) as raised:
        group.wait_for_device(end.query)
    assert is_device_error(raised.value)
    assert not group.transaction.lost
    device.broken = ""


def test_an_error_of_a_communicator_ends_the_wait_for_the_device(pair: list[tuple[StandIn, ManagedGroup]]) -> None:
    """The rank's own look at its communicators is enough: no command comes, and the library ends nothing by itself."""
    (device, group), _ = pair
    group.allreduce([torch.ones(1)]).wait()
    waiting = group.allreduce([torch.ones(1)])
    device.communicators[0].error = "ncclRemoteError"
    group.wait_for_device(device.record().query)
    assert (group.transaction.lost, group.transaction.why) == (True, "ncclRemoteError")
    wait_until(device.communicators[0].ended.is_set, seconds=60)
    alone = torch.full((2,), 3.0)
    waiting.wait()
    group.allreduce([alone]).wait()
    assert alone.tolist() == [3.0] * 2


def test_the_wait_for_a_work_that_has_failed_aborts_no_communicator_by_itself(
    pair: list[tuple[StandIn, ManagedGroup]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was found failed when it was asked whether it has run. Its own wait would abort one communicator, in the thread that trains."""
    (device, group), _ = pair
    aborting, real = list[str](), StandInCommunicator.abort

    def abort(one: StandInCommunicator) -> None:
        aborting.append(threading.current_thread().name)
        real(one)

    monkeypatch.setattr(StandInCommunicator, "abort", abort)
    alone = torch.full((2,), 3.0)
    waiting = group.allreduce([alone])
    device.communicators[0].error = "ncclRemoteError"
    assert waiting.is_completed()
    waiting.wait()
    assert (group.transaction.lost, group.transaction.why) == (True, "ncclRemoteError")
    wait_until(device.communicators[0].ended.is_set, seconds=60)
    assert alone.tolist() == [3.0] * 2
    assert aborting == ["holdfast-abort-one"]
    assert group.inner is not None
    assert group.inner.failure() == ""  # nobody may ask for a communicator that is gone


def test_a_wait_with_a_timeout_holds_up_the_host_and_then_ends_all_groups(pair: list[tuple[StandIn, ManagedGroup]]) -> None:
    """The other rank comes in time to the first sum, and not to the second."""
    (device, group), (_, other) = pair
    here, alone = torch.ones(2), torch.full((2,), 3.0)
    other.allreduce([torch.ones(2)])
    group.allreduce([here]).wait(timedelta(minutes=5))
    assert here.tolist() == [2.0] * 2
    assert not group.transaction.lost
    group.allreduce([alone]).wait(timedelta(seconds=0.05))
    assert mentions(group.transaction.why, "NCCL timeout in `allreduce` of group 'pair'", "0.05 s")
    wait_until(device.communicators[0].ended.is_set, seconds=60)
    assert alone.tolist() == [3.0] * 2


def test_an_abort_waits_for_calls_into_the_library_and_keeps_others_out(
    pair: list[tuple[StandIn, ManagedGroup]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A communicator that is aborted under a call takes the calling thread with it. Messages that start as one are one call."""
    monkeypatch.setattr(device_library, "CALL_SECONDS", 60.0)
    (device, group), (other_device, other) = pair
    communicator, alone, cpu = device.communicators[0], torch.full((2,), 3.0), torch.device("cpu")
    device.launches.clear()
    calling = threading.Thread(target=lambda: group.allreduce([alone]).wait(), daemon=True)
    calling.start()
    wait_until(device.blocked.is_set, seconds=60)
    assert group.inner is not None
    group.inner.abandon()
    assert not communicator.aborted.wait(0.1)
    assert not group.transaction.lost
    group._start_coalescing(cpu)  # in another thread, which does not know of it yet
    group.send([torch.ones(1)], 1)
    group._end_coalescing(cpu).wait()
    group.transaction.renew()
    group.allreduce([torch.ones(1)]).wait()
    assert (communicator.entered, communicator.batches, group.is_broken) == (1, [], True)
    device.launches.set()
    calling.join(60)
    assert not calling.is_alive()
    wait_until(communicator.ended.is_set, seconds=60)
    assert alone.tolist() == [3.0] * 2

    aborted = other_device.communicators[0].aborted
    other._start_coalescing(cpu)
    other.send([torch.ones(1)], 0)
    other.abandon("a peer is lost")
    assert not aborted.wait(0.1)
    other.recv([torch.ones(1)], 0)
    other._end_coalescing(cpu).wait()
    wait_until(aborted.is_set, seconds=60)


def test_a_call_that_never_returns_costs_the_process_after_the_abort(
    pair: list[tuple[StandIn, ManagedGroup]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The communicators are aborted all the same: the call may wait for an operation that never ends."""
    replaced: list[str] = []
    for name, value in (("CALL_SECONDS", 0.05), ("ABORT_SECONDS", 4.0), ("replace_process", replaced.append)):
        monkeypatch.setattr(device_library, name, value)
    (device, group), _ = pair
    device.launches.clear()
    threading.Thread(target=lambda: group.allreduce([torch.ones(1)]), daemon=True).start()
    wait_until(device.blocked.is_set, seconds=60)
    group.abandon("a peer is lost")
    wait_until(lambda: replaced, seconds=60)
    assert device.communicators[0].ended.is_set()
    assert mentions(replaced[0], "a call into the device's library")


@pytest.mark.parametrize("ends", [False, True])
def test_a_group_that_is_given_up_while_it_connects_costs_the_process_if_that_never_ends(
    monkeypatch: pytest.MonkeyPatch,
    ends: bool,  # noqa: FBT001 (whether it does)
) -> None:
    """Whoever waits for the group goes on at once. The thread that connects it is in the library, where nobody can end it."""
    device, replaced = StandIn(), list[str]()
    device.connects.clear()
    monkeypatch.setattr(device_library, "GIVEN_UP_SECONDS", 60.0 if ends else 0.1)
    monkeypatch.setattr(device_library, "replace_process", replaced.append)
    device_library.use(device)
    try:
        options = BuildOptions(devices=(device.name,), timeout=timedelta(minutes=5), host="127.0.0.1", name="pair")
        with pytest.raises(GenerationEnded):
            build(dist.HashStore(), "g", 0, 1, options=options, is_cancelled=lambda: device.connecting > 0)
        if ends:
            device.connects.set()
        wait_until(lambda: not any(one.name == "holdfast-connecting" for one in threading.enumerate()), seconds=60)
        assert len(replaced) == (not ends)
        assert ends or mentions(replaced[0], "group 'pair'")
    finally:
        device.connects.set()
        device_library._library.clear()


def test_a_group_that_the_script_destroys_waits_for_no_peer_that_is_lost(
    pair: list[tuple[StandIn, ManagedGroup]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its operations have ended it is one of the groups that end together: nobody else would end them."""
    monkeypatch.setattr(backends, "FINISH_SECONDS", 0.1)  # for its connections, once its operations have ended
    device, group = pair[0]
    groups = [group]

    def end_all(why: str) -> None:
        for one in groups:
            assert one.inner is not None
            one.mark_broken(why)
            one.inner.abandon()

    group.on_shutdown, group.on_device_failure = groups.remove, end_all
    group.allreduce([torch.ones(1)]).wait()
    device.communicators[0].error = "ncclRemoteError"
    ending = threading.Thread(target=group.shutdown, daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive()
    assert (groups, group.inner) == ([], None)
    group.on_shutdown = None


def test_a_script_that_destroys_its_group_after_an_exception_ends_with_that(
    pair: list[tuple[StandIn, ManagedGroup]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank will never come to the sum: it may wait for one that this rank has not started, and for nobody's loss."""
    monkeypatch.setattr(process_group, "FINISH_SECONDS", 0.1)
    (device, group), _ = pair

    def script() -> None:
        try:
            group.allreduce([torch.ones(1)])
            raise ZeroDivisionError
        finally:
            group.shutdown()

    with pytest.raises(ZeroDivisionError):
        script()
    assert group.inner is None
    assert device.communicators[0].ended.is_set()


def test_a_group_that_has_done_its_work_does_not_cost_the_process_when_its_end_hangs(
    pair: list[tuple[StandIn, ManagedGroup]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shutdown waits for a member that does not come, and holds what an abort needs. Nothing runs in it any more."""
    replaced: list[str] = []
    monkeypatch.setattr(device_library, "ABORT_SECONDS", 0.3)
    monkeypatch.setattr(device_library, "replace_process", replaced.append)
    monkeypatch.setattr(backends, "FINISH_SECONDS", 0.1)
    device, group = pair[0]
    device.closings.clear()
    group.shutdown()
    assert replaced == []
    assert not device.communicators[0].aborted.is_set()
    device.closings.set()
    wait_until(device.communicators[0].finished.is_set, seconds=60)


def test_a_graph_with_an_operation_of_a_group_is_refused_before_anything_is_started(pair: list[tuple[StandIn, ManagedGroup]]) -> None:
    """Also in a group that answers nothing more, whose zeros a replay would repeat for ever. The group goes on working."""
    (device, group), (_, other) = pair
    device_library.use(device)
    try:
        for broken in (False, True):
            if broken:
                group.abandon("a peer is lost")
            with device.capture():
                with pytest.raises(CapturedStep) as raised:
                    group.allreduce([torch.ones(1)])
                assert mentions(str(raised.value), "`allreduce` of group 'pair'", "CUDA graph", "reduce-overhead", "groups: stock")
                with pytest.raises(CapturedStep):
                    group._start_coalescing(torch.device("cpu"))
            assert group.operations == broken  # that of the first turn
            if not broken:
                sums = [torch.ones(1), torch.ones(1)]
                for one, tensor in zip((group, other), sums, strict=True):
                    one.allreduce([tensor]).wait()
                for library, _ in pair:
                    library.synchronize()
                assert [tensor.tolist() for tensor in sums] == [[2.0], [2.0]]
    finally:
        device_library._library.clear()


def test_a_group_sums_after_a_batch_of_messages_was_refused(
    pair: list[tuple[StandIn, ManagedGroup]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is noted by torch before it asks the group: what the group refuses must not leave that note behind.

    torch would go on to collect operations for the batch, and `all_reduce` would return without having done anything. The refusal is that
    of a capture, and an error of the library.
    """
    (device, group), (_, other) = pair
    cpu, sums = torch.device("cpu"), [torch.ones(2), torch.ones(2)]
    membership.replace_coalescing()
    device_library.use(device)
    try:
        with device.capture(), pytest.raises(CapturedStep), c10d._coalescing_manager(group, cpu, async_ops=True):
            pytest.fail("the batch has begun")
    finally:
        device_library._library.clear()
    with monkeypatch.context() as failing:

        def fails(_backend: object) -> None:
            raise RuntimeError("the library says no")

        failing.setattr(StandInCommunicator, "_start_coalescing", fails)
        with pytest.raises(RuntimeError, match="says no"), c10d._coalescing_manager(group, cpu, async_ops=True):
            pytest.fail("the batch has begun")
    for one, tensor in zip((group, other), sums, strict=True):
        dist.all_reduce(tensor, group=one)
        assert one.operations == 1
    for library, _ in pair:
        library.synchronize()
    assert [one.tolist() for one in sums] == [[2.0] * 2] * 2


def _cut_short(group: ManagedGroup, kind: str, start_message: Callable[[], object]) -> None:
    """Begin a batch that does not come to its end: for an error of the script, or of what torch calls there."""
    with pytest.MonkeyPatch.context() as failing, dist._coalescing_manager(group, torch.device("cpu"), async_ops=True):
        if kind == "messages":
            start_message()
            raise ZeroDivisionError
        dist.all_reduce(torch.ones(2), group=group)
        if kind == "collectives":
            raise ZeroDivisionError
        failing.setattr(group, "allreduce_coalesced", lambda *_: 1 / 0)


@pytest.mark.parametrize("kind", ["messages", "collectives", "collectives that fail at the end"])
def test_a_batch_that_an_exception_cuts_short_leaves_nothing_behind(
    pair: list[tuple[StandIn, ManagedGroup]], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Both ranks raise in it. Sums and batches after it do what they should, and an abort does not take it for a call in progress."""
    membership.replace_coalescing()
    replaced: list[str] = []
    monkeypatch.setattr(device_library, "replace_process", replaced.append)
    monkeypatch.setattr(device_library, "ABORT_SECONDS", 3.0)
    cpu = torch.device("cpu")
    sent, received = torch.full((2,), 7.0), torch.zeros(2)
    for rank, (device, group) in enumerate(pair):
        with pytest.raises(ZeroDivisionError):
            _cut_short(group, kind, partial(group.recv, [received], 0) if rank else partial(group.send, [sent], 1))
        assert group not in c10d._world.pg_coalesce_state
        assert device.communicators[0].batches == ([1] if kind == "messages" else [])
    tensors = [[torch.ones(2), torch.ones(3)] for _ in pair]
    for (_, group), (single, batched) in zip(pair, tensors, strict=True):
        dist.all_reduce(single, group=group)
        with dist._coalescing_manager(group, async_ops=True) as together:
            dist.all_reduce(batched, group=group)
        together.wait()
    messages = [torch.zeros(4), torch.zeros(4)]
    for rank, (_, group) in enumerate(pair):
        with dist._coalescing_manager(group, cpu, async_ops=True) as together:
            group.send([torch.full((4,), rank + 1.0)], 1 - rank)
            group.recv([messages[rank]], 1 - rank)
        together.wait()
    for device, group in pair:
        device.synchronize()
        assert group.in_flight.settle()
    assert [[one.tolist() for one in both] for both in tensors] == [[[2.0] * 2, [2.0] * 3]] * 2
    assert [one.tolist() for one in messages] == [[2.0] * 4, [1.0] * 4]
    assert received.tolist() == ([7.0] * 2 if kind == "messages" else [0.0] * 2)
    for device, group in pair:
        group.abandon("a peer is lost")
        wait_until(device.communicators[0].ended.is_set, seconds=60)
    assert replaced == []


# -- what needs no device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, ""),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, ""),  # torchrun's, and ours
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "false"}, ""),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "TORCH_NCCL_ASYNC_ERROR_HANDLING=3"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "TORCH_NCCL_BLOCKING_WAIT=1"),
        ({"TORCH_NCCL_ENABLE_MONITORING": "1"}, "unset it, or set it to 0"),
        ({"TORCH_DISTRIBUTED_DEBUG": "Detail"}, "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    ],
)
def test_settings_of_the_user_that_contradict_managed_groups_are_named(given: dict[str, str], why: str) -> None:
    """Others are set, for the first communicator to read."""
    if why:
        assert mentions(nccl.why_not_with(given), why)
        with pytest.raises(RuntimeError, match="managed groups cannot work with"):
            nccl.set_up(given)
        return
    assert nccl.why_not_with(given) == ""
    nccl.set_up(given)
    assert {name: given[name] for name in nccl.SETTINGS} == dict.fromkeys(nccl.SETTINGS, "0")


def test_two_threads_may_look_at_once_at_what_the_device_has_run() -> None:
    """The training thread settles its operations, and the thread that reports its progress does too: both find the same one ended."""
    operations, both, seen = InFlightOperations(), threading.Barrier(2, timeout=60), []
    marks = [operations.enter("allreduce", []) for _ in range(2)]
    operations.follow(marks[:1], lambda: True, lambda: both.wait() >= 0)
    operations.follow(marks[1:], lambda: True, lambda: True)

    def look() -> None:
        operations.settle()
        seen.append(operations.progress())

    threads = [threading.Thread(target=look) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert seen == [({"": 2}, [])] * 2


def test_a_member_that_does_not_come_to_connect_is_late_and_not_lost() -> None:
    """The others wait for it where they can be called off: in the store, and not in NCCL."""
    store, seconds = dist.HashStore(), timedelta(0)
    group = Communicator(name="pair", rank=0, ranks=(0, 1), timeout=seconds, arrival=seconds, host="127.0.0.1")
    with pytest.raises(GenerationEnded):
        nccl._meet(store, group, lambda: True)
    with pytest.raises(dist.DistStoreError) as late:
        nccl._meet(dist.PrefixStore("again", store), group, lambda: False)
    assert mentions(str(late.value), "1 of the 2 members of group 'pair'")
    assert is_late_peer(late.value)
