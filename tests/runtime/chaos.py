"""Faults that a script injects into itself, each at a named place of a named step: ``CHAOS`` in the environment lists them.

A fault names the process it is for: its rank, and the generation in which the process took it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from holdfast.memstore.shared_memory import Slot
from holdfast.protocol import Message
from holdfast.runtime.agent_client import link
from holdfast.runtime.checkpoint.save import Saver
from holdfast.runtime.groups.control_tree import _DOWN, TreePeer
from holdfast.runtime.groups.membership import MembershipManager, membership
from holdfast.runtime.groups.migration import LiveMigrations, Prepared
from holdfast.runtime.groups.process_group import ManagedGroup
from holdfast.runtime.groups.recovery_manager import RecoveryManager
from holdfast.runtime.groups.state_transfer import StateTransfer
from holdfast.runtime.snapshots.restore import Restorer
from holdfast.runtime.snapshots.slice_copiers import HostCopier
from holdfast.runtime.world import World


class Mistake(Exception):
    """An error of the user's own code."""


def fault(rank: int, at: str, step: int | None = None, *, do: str = "kill", generation: int = 1) -> dict[str, Any]:
    """Return a fault of the process that took *rank* in *generation*, at the place *at* of *step*."""
    return {"rank": rank, "at": at, "step": step, "do": do, "generation": generation}


def reach(at: str, step: int | None = None) -> None:
    """Inject the faults of this place."""
    if os.environ.get("HOLDFAST_HOT_SPARE"):
        return
    here = {"rank": int(os.environ["RANK"]), "generation": int(os.environ["HOLDFAST_GENERATION"]), "at": at, "step": step}
    for one in json.loads(os.environ.get("CHAOS") or "[]"):
        if here.items() <= one.items() and one not in _done:
            _done.append(one)
            ACTS[one["do"]]()


def gate(folder: Path, name: str = "gate") -> None:
    """Wait until the controller opens the gate; a hot spare does not wait."""
    while not os.environ.get("HOLDFAST_HOT_SPARE") and not (folder / name).exists():
        time.sleep(0.005)


_done: list[dict[str, Any]] = []
"""Each fault happens once, although a step may be retried."""


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise() -> None:
    raise Mistake("a mistake of the user's own")


def _device() -> None:
    """Raise what torch raises at every call after the GPU of this process has failed."""
    raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")


def _cut() -> None:
    """Shut all connections of this rank's groups down, from another thread."""

    def work() -> None:
        ours = membership()
        assert ours is not None
        cut = 0
        for group in ours.groups:
            assert group.inner is not None
            for one in group.inner.sockets:
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                    cut += 1
        link().report("cut", connections=cut)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _fill() -> None:
    """Let no file grow beyond 1 MiB: one that is written ends in the middle, as on a disk that is full by then."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


ACTS: dict[str, Callable[[], None]] = {"kill": _kill, "stop": _stop, "raise": _raise, "device": _device, "cut": _cut, "fill": _fill}


def _around(kind: type, name: str, before: str, after: str = "") -> None:
    """Make the start and the end of a runtime method places for faults."""
    real = getattr(kind, name)

    def method(self: Any, *args: Any, **more: Any) -> Any:
        step = getattr(self, "_step", link().step)
        reach(before, step)
        result = real(self, *args, **more)
        if after:
            reach(after, step)
        return result

    setattr(kind, name, method)


def _before_answers() -> None:
    """Make a place before each answer to a vote: at ``answer-2`` the root is about to send rank 2 the result of a vote.

    At ``broadcast-2`` it is about to send rank 2 what rank 0 broadcasts.
    """
    real, broadcast, in_broadcast = TreePeer.send, World.broadcast, []

    def broadcasting(self: World, value: Any) -> Any:
        in_broadcast.append(value)
        try:
            return broadcast(self, value)
        finally:
            in_broadcast.pop()

    World.broadcast = broadcasting  # type: ignore[method-assign]

    def send(self: TreePeer, generation: int, number: int, kind: int, body: bytes) -> None:
        if kind == _DOWN:
            reach(f"{'broadcast' if in_broadcast else 'answer'}-{self.rank}", link().step)
        real(self, generation, number, kind, body)

    TreePeer.send = send  # type: ignore[method-assign]


def _before_operations() -> None:
    """Make a place before each operation of a group, under its name."""
    real = ManagedGroup._run

    def run(self: ManagedGroup, name: str, *args: Any, **more: Any) -> Any:
        reach(name.partition(">")[0].partition("<")[0], link().step)
        return real(self, name, *args, **more)

    ManagedGroup._run = run  # type: ignore[method-assign]


def _in_planned_moves() -> None:
    """Make places at the start of the preparation of a rank and of a new process; have a rank report that it may switch."""
    build, take_over, receive = LiveMigrations._build, LiveMigrations.take_over, LiveMigrations.receive

    def preparing(self: LiveMigrations, prepared: Prepared) -> None:
        reach("preparing")
        build(self, prepared)

    def coming(self: LiveMigrations, command: Message) -> None:
        reach("coming")
        take_over(self, command)

    def receiving(self: LiveMigrations, command: Message) -> None:
        receive(self, command)
        if command.get("do") == "switch":
            link().report("may switch", generation=command["generation"])

    LiveMigrations._build, LiveMigrations.take_over, LiveMigrations.receive = preparing, coming, receiving  # type: ignore[method-assign]


if "CHAOS" in os.environ:  # in a worker: a test that only names faults must not break its own process
    _around(RecoveryManager, "_decide", "vote", "voted")
    _around(MembershipManager, "connect_neighbours", "meeting")
    _around(MembershipManager, "rebuild", "rebuilding")
    _around(StateTransfer, "_receive", "loading", "loaded")
    _around(Saver, "save", "saving")
    _around(StateTransfer, "_send", "giving")
    _around(Slot, "begin", "opening", "opened")
    _around(HostCopier, "submit", "copying", "copied")
    _around(Slot, "seal", "sealing", "sealed")
    _around(Restorer, "take", "restoring", "restored")
    _before_answers()
    _before_operations()
    _in_planned_moves()
