"""Which network devices the ranks of a node use: by their connections, and by the adapters that they have open."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.agent.node import link_use
from holdfast.agent.node.interfaces import interfaces
from holdfast.agent.node.link_use import LinkUse, connected_addresses
from holdfast.agent.workers.worker import Worker

ELSEWHERE = "192.0.2.77"


def rank() -> Worker:
    """Return a rank whose process is this one."""
    return Worker(rank=0, generation=1, log=Path("/nowhere"), pid=os.getpid())


@pytest.fixture
def address() -> Iterator[str]:
    """Give an address of this machine over which this process has a connection."""
    known = [one.address for one in interfaces() if ":" not in one.address]
    if not known:
        pytest.skip("needs a network interface with an address")
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server((known[0], 0)))
        stack.enter_context(socket.create_connection(server.getsockname()[:2]))
        yield known[0]


def open_adapter(root: Path, stack: ExitStack, device: str, adapter: str) -> None:
    """Have this process open the device of an adapter."""
    place = root / "dev/infiniband" / device
    place.parent.mkdir(parents=True)
    place.touch()
    stack.enter_context(place.open())
    known = root / "sys/class/infiniband_verbs" / device
    known.mkdir(parents=True)
    if adapter:
        (known / "ibdev").write_text(f"{adapter}\n")


def test_an_interface_over_which_no_rank_is_connected_is_not_used(address: str, tmp_path: Path) -> None:
    """One over which a rank is connected, or of which nothing is known, may be."""
    use = LinkUse(tmp_path)
    assert address in set(connected_addresses(os.getpid()))
    assert use.is_unused([ELSEWHERE], [], [rank()], stacked=False)
    assert not use.is_unused([ELSEWHERE, address], [], [rank()], stacked=False)
    assert not use.is_unused([], [], [rank()], stacked=True)
    assert not use.is_unused([ELSEWHERE], [], [], stacked=False)
    gone = rank()
    gone.exited = True
    assert not use.is_unused([ELSEWHERE], [], [gone, rank()], stacked=False)


def test_a_connection_that_was_cut_was_used(tmp_path: Path) -> None:
    """It had been seen before."""
    known = [one.address for one in interfaces() if ":" not in one.address]
    if not known:
        pytest.skip("needs a network interface with an address")
    use = LinkUse(tmp_path)
    with socket.create_server((known[0], 0)) as server, socket.create_connection(server.getsockname()[:2]):
        use.look([rank()])
    assert not use.is_unused([known[0]], [], [rank()], stacked=False)


def test_a_worker_that_has_no_process_yet_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number would be 0, of which every process of the machine is a child."""
    seen: list[int] = []

    def note(pid: int) -> tuple[str, ...]:
        seen.append(pid)
        return ()

    monkeypatch.setattr(link_use, "connected_addresses", note)
    starting = Worker(rank=1, generation=1, log=Path("/nowhere"))
    LinkUse(tmp_path).look([starting, rank()])
    assert seen[0] == os.getpid()
    assert 1 not in seen


def test_an_interface_without_address_and_adapter_carries_nothing(tmp_path: Path) -> None:
    """Whatever the ranks do: they may have exited."""
    assert LinkUse(tmp_path).is_unused([], [], [], stacked=False)
    assert not LinkUse(tmp_path).is_unused([], ["mlx5_0"], [], stacked=False)


@pytest.mark.parametrize(
    ("device", "adapter", "unused"),
    [("uverbs0", "mlx5_0", False), ("uverbs0", "mlx5_4", True), ("uverbs0", "", False), ("hfi1_0", "", False)],
    ids=["it", "another", "which-is-not-known", "another-fabric"],
)
def test_a_card_is_used_by_who_has_its_adapter_open(address: str, tmp_path: Path, device: str, adapter: str, *, unused: bool) -> None:
    """What is not known counts as used."""
    with ExitStack() as stack:
        open_adapter(tmp_path, stack, device, adapter)
        use = LinkUse(tmp_path)
        assert use.is_unused([], ["mlx5_0"], [rank()], stacked=False) == unused
        assert use.is_unused([ELSEWHERE], ["mlx5_0"], [rank()], stacked=False) == unused
        assert not use.is_unused([address], ["mlx5_0"], [rank()], stacked=False)
