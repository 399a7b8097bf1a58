"""Live migration: a rank moves to another process while training goes on, between two steps.

A process may also take a vacant place, where no process leaves: then a rank that stays sends it a copy of its own state, after the switch.

Prepare: the ranks that stay build the groups of the next generation next to the current ones, in a thread; the new process does the same,
and the leaving one connects to it. Switch: a step whose vote says that all are ready is the last one of the old generation. What fails
before that vote is dropped; what fails after it is a fault like any other.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.protocol import Message
from holdfast.runtime.agent_client import link
from holdfast.runtime.groups.backends import (
    FINISH_SECONDS,
    BackendGroup,
    GenerationEnded,
    close_in_background,
    in_thread,
    wait_briefly,
)
from holdfast.runtime.groups.kv_store import GenerationStore
from holdfast.runtime.groups.membership import GroupGeneration
from holdfast.runtime.groups.state_transfer import StateTransfer
from holdfast.runtime.state import rng

if TYPE_CHECKING:
    from holdfast.runtime.groups.recovery_manager import RecoveryManager

_log = logging.getLogger("holdfast.runtime")


@dataclass(slots=True, eq=False)
class Prepared:
    """What a rank has ready for the next generation."""

    generation: GroupGeneration
    sources: Mapping[int, int]
    """For each rank that fills a vacant place, the rank that sends it the state."""
    inners: dict[str, BackendGroup] = field(default_factory=dict)
    """New connections, by the name of their group."""
    store: GenerationStore | None = None
    transfers: dict[int, BackendGroup] = field(default_factory=dict)
    """Connections to the new processes that this rank sends its state to, by their rank."""
    ready: bool = False

    def drop(self) -> None:
        """Close everything."""
        for inner in [*self.inners.values(), *self.transfers.values()]:
            inner.close()
        self.inners.clear()
        self.transfers.clear()
        self.ready = False


class LiveMigrations:
    """This process's part in live migrations."""

    def __init__(self, recovery: RecoveryManager) -> None:
        self._recovery, self._membership = recovery, recovery.membership
        self.prepared: Prepared | None = None
        self._switch = 0
        self._lock = threading.Lock()

    # -- commands, in the command thread ------------------------------------------------------------------------------

    def receive(self, command: Message) -> None:
        """Handle a command that concerns migrations."""
        name = command.get("do")
        if name == "prepare" and self._membership.dry_run is None:
            threading.Thread(target=self._prepare, args=(command,), name="holdfast-prepare", daemon=True).start()
        elif name == "switch":
            self._switch = int(command["generation"])
        elif name in ("forget", "abandon", "regroup"):
            if name == "forget":  # it may have come before there is anything to cancel
                self._membership.cancel(int(command["generation"]))
            with self._lock:
                prepared, self.prepared, self._switch = self.prepared, None, 0
            if prepared is not None:
                self._membership.cancel(prepared.generation.number)
                prepared.drop()

    # -- prepare ------------------------------------------------------------------------------------------------------

    def _prepare(self, command: Message) -> None:
        """Build what the next generation needs, next to what the current one uses."""
        begin = time.monotonic()
        generation = GroupGeneration.of({"rank": self._membership.generation.rank, **command})
        prepared = Prepared(generation, sources_of(generation, command, self._recovery.facts))
        with self._lock:
            self.prepared = prepared
        try:
            self._build(prepared)
        except Exception as error:  # noqa: BLE001 (whatever it is, training goes on without the migration)
            with self._lock:
                if self.prepared is prepared:  # and not a newer one
                    self.prepared, self._switch = None, 0
            prepared.drop()
            why = str(error) or type(error).__name__
            _log.warning("the migration to generation %d cannot be prepared: %s", generation.number, why)
            link().report("unprepared", generation=generation.number, why=why[:500])
            return
        prepared.ready = True
        link().report("prepared", generation=generation.number, seconds=time.monotonic() - begin)

    def _build(self, prepared: Prepared) -> None:
        """Build the groups in which a member changes; a rank that leaves connects to its successor instead."""
        membership, generation = self._membership, prepared.generation
        leaving = generation.rank in generation.changed
        prepared.store = membership.open_store(generation, leaving=leaving)
        membership.publish_records(generation, prepared.store)
        coming = [generation.rank] if leaving else sorted(rank for rank, source in prepared.sources.items() if source == generation.rank)
        if not leaving:
            if generation.rank == min(rank for rank in generation.ranks if rank not in generation.changed):
                prepared.store.prefixed("facts").set("facts", json.dumps(self._recovery.facts))
            for group in sorted(membership.groups, key=lambda one: one.group_name):
                if generation.changed & set(group.all_ranks):
                    prepared.inners[group.group_name] = membership.build(group, generation, prepared.store)
                    self._check(prepared)
        transfer = StateTransfer(self._recovery.training, membership, generation, prepared.store)
        for rank in coming:
            prepared.transfers[rank] = transfer.pair(f"transfer-{rank}", 0)
            self._check(prepared)

    def _check(self, prepared: Prepared) -> None:
        """Stop work on a migration that was cancelled meanwhile."""
        if self.prepared is not prepared:
            raise GenerationEnded

    def ready_for(self) -> int:
        """Return the generation that this rank is ready for and was commanded to switch to, or 0."""
        prepared = self.prepared
        return self._switch if prepared is not None and prepared.ready and prepared.generation.number == self._switch else 0

    # -- switch, in the training thread -------------------------------------------------------------------------------

    def switch(self, number: int) -> None:
        """Switch to generation *number*, which all ranks have agreed on in the last vote; a rank that leaves exits here."""
        with self._lock:
            prepared, self.prepared, self._switch = self.prepared, None, 0
        if prepared is None or prepared.generation.number != number:
            raise GenerationEnded  # the controller ended the current generation at this very moment
        begin = time.monotonic()
        all_are_idle = self._become_idle(prepared)
        self._send_state(prepared)
        if prepared.generation.rank not in prepared.generation.changed:
            self._stay(prepared, begin, all_are_idle)
            return
        wait_briefly(all_are_idle)  # the devices of others may still read from this process's memory
        link().report("departed", step=self._recovery.live)
        link().flush(2.0)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _become_idle(self, prepared: Prepared) -> Callable[[], bool]:
        """Wait until the device has run what lies in its queue: the vote was not the last operation of the old generation.

        Return a function that returns whether the devices of all ranks have. Before that nobody may close a communicator, or exit: an
        operation that has ended here may still run there.
        """
        membership, late = self._membership, time.monotonic() + FINISH_SECONDS
        if membership.device is None:
            return lambda: True
        assert prepared.store is not None
        idle, ranks = prepared.store.prefixed("idle"), len(membership.generation.ranks)
        membership.wait_for_device()
        # operations for which no queue waits; such a one may have its counterpart in the next generation
        membership.wait_for_device(lambda: all(group.in_flight.settle() for group in membership.groups) or time.monotonic() > late)
        idle.add("ranks", 1)

        def all_are_idle() -> bool:
            with suppress(RuntimeError):  # the store has ended with its generation, and so have all operations
                return idle.add("ranks", 0) >= ranks
            return True

        return all_are_idle

    def _send_state(self, prepared: Prepared) -> None:
        """Send this rank's state to its new processes, and wait for its arrival."""
        recovery = self._recovery
        transfer = StateTransfer(recovery.training, self._membership, prepared.generation, prepared.store)
        for rank, inner in sorted(prepared.transfers.items()):
            transfer.put(f"rank-state/{rank}", recovery.live.to_bytes(8, "big") + recovery.training.rank_state())
            transfer.send(inner, 1, rank, 0, 1)
        for rank in sorted(prepared.transfers):
            transfer.get(f"arrived/{rank}")

    def _stay(self, prepared: Prepared, begin: float, all_are_idle: Callable[[], bool]) -> None:
        """Put the new connections under the groups."""
        membership, generation = self._membership, prepared.generation
        assert prepared.store is not None
        replaced = list(prepared.transfers.values())
        membership.use_store(prepared.store)
        membership.set_members(generation)
        membership.connect_neighbours(generation)
        membership.exchange_records()
        for group in membership.groups:
            inner = prepared.inners.pop(group.group_name, None)
            if inner is not None:
                before = group.replace_backend(inner, dict(generation.incarnations))
                replaced += [before] if before is not None else []
        close_in_background(replaced, all_are_idle)
        membership.enter(generation)
        self._recovery.use_memory_of(generation)
        link().report("switched", generation=generation.number, step=self._recovery.live, seconds=time.monotonic() - begin)

    # -- the new process ----------------------------------------------------------------------------------------------

    def take_over(self, command: Message) -> None:
        """Become a rank whose process sends its state and leaves, or a copy of one that stays."""
        recovery, membership, begin = self._recovery, self._membership, time.monotonic()
        generation = GroupGeneration.of(command)
        membership.use_store(membership.open_store(generation))
        assert membership.generation_store is not None
        prefixed = membership.generation_store.prefixed("facts")
        facts: dict[str, Any] = json.loads(in_thread(lambda: prefixed.get("facts"), membership.is_cancelled(generation.number)))
        recovery.take_facts(generation, facts)
        inners = {}
        for group in sorted(membership.groups, key=lambda one: one.group_name):
            inners[group.group_name] = membership.build(group, generation)
        transfer = StateTransfer(recovery.training, membership, generation)
        connection = transfer.pair(f"transfer-{generation.rank}", 1)
        link().report("prepared", generation=generation.number, seconds=time.monotonic() - begin)
        state = transfer.take(f"rank-state/{generation.rank}")
        begin = time.monotonic()
        source = sources_of(generation, command, facts).get(generation.rank, generation.rank)
        size = transfer.receive([(connection, 0, source, 0, 1)])
        transfer.put(f"arrived/{generation.rank}", b"")
        close_in_background([connection])
        recovery.leave_dry_run(generation)
        membership.connect_neighbours(generation)
        membership.exchange_records()
        for group in membership.groups:
            group.replace_backend(inners[group.group_name], dict(generation.incarnations))
        membership.enter(generation)
        recovery.use_memory_of(generation)
        recovery.resume_at(int.from_bytes(state[:8], "big"), state[8:])
        if source != generation.rank:  # two ranks with the same random numbers would drop out the same units
            rng.diverge(generation.rank)
        took = time.monotonic() - begin
        link().report("switched", generation=generation.number, step=recovery.live, seconds=took, bytes=size, bandwidth=size / took)


def sources_of(generation: GroupGeneration, command: Message, facts: Mapping[str, Any]) -> dict[int, int]:
    """Return, for each rank that fills a vacant place, the rank that sends it the state: one that stays and holds the same state.

    All ranks compute the same result. Raise ``RuntimeError`` when no rank that stays holds the state of a new one.
    """
    shards, coming = facts.get("shards", {}), sorted(generation.changed - {int(rank) for rank in command["leavers"]})
    found = {}
    for rank in coming:
        holders = [one for one in generation.ranks if one not in generation.changed and shards.get(str(one)) == shards.get(str(rank))]
        if not holders:
            raise RuntimeError(f"no rank that stays holds the state of rank {rank}")
        found[rank] = holders[coming.index(rank) % len(holders)]
    return found
