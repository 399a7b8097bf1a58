"""A planned move: a rank's place goes to another process while training goes on, and changes hands between two steps.

Where the places of ranks are vacant, processes come for which none leaves: one that stays hands its own state on, once all have switched.

Prepare: those who will stay build the groups of the coming generation beside the present ones, in a thread; the process that comes does the
same, and the one that leaves makes a connection to it. Switch: a step whose vote says that all are ready is the last one of the old
generation. Whatever fails before that vote is forgotten; what fails after it is a fault like any other.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from holdfast.protocol import Message
from holdfast.runtime.agent_client import link
from holdfast.runtime.groups.backends import BackendGroup, GenerationEnded, close_later
from holdfast.runtime.groups.kv_store_access import ReachedStore
from holdfast.runtime.groups.membership import GroupGeneration
from holdfast.runtime.groups.transfer_plan import TransferPlan
from holdfast.runtime.state import rng

if TYPE_CHECKING:
    from holdfast.runtime.groups.recovery_manager import RecoveryManager

_log = logging.getLogger("holdfast.runtime")


class Prepared:
    """What a rank has ready for a coming generation."""

    def __init__(self, generation: GroupGeneration, sources: Mapping[int, int] | None = None) -> None:
        self.generation = generation
        self.sources = sources or {}
        """Ranks that come to a vacant place, and who hands its state to each."""
        self.inners: dict[str, BackendGroup] = {}
        self.generation_store: ReachedStore | None = None
        """Its store."""
        self.handovers: dict[int, BackendGroup] = {}
        """The connections to those who come, by rank: of who leaves, or hands its state on."""
        self.ready = False

    def forget(self) -> None:
        """Give everything back."""
        for inner in [*self.inners.values(), *self.handovers.values()]:
            inner.close()
        self.inners.clear()
        self.handovers.clear()
        self.ready = False


class LiveMigrations:
    """This process's part in planned moves."""

    def __init__(self, recovery: RecoveryManager) -> None:
        self._recovery, self._assembly = recovery, recovery.membership
        self.prepared: Prepared | None = None
        self._switch = 0
        self._lock = threading.Lock()

    # -- orders, in the watch thread ----------------------------------------------------------------------------------

    def hear(self, order: Message) -> None:
        """Take in an order that belongs to a planned move."""
        word = order.get("do")
        if word == "prepare" and self._assembly.dry_run is None:
            threading.Thread(target=self._prepare, args=(order,), name="holdfast-prepare", daemon=True).start()
        elif word == "switch":
            self._switch = int(order["generation"])
        elif word in ("forget", "abandon", "regroup"):
            if word == "forget":  # it may have come before there is anything to give up
                self._assembly.forget(int(order["generation"]))
            self.forget()

    def forget(self) -> None:
        """Give up what was prepared."""
        with self._lock:
            prepared, self.prepared, self._switch = self.prepared, None, 0
        if prepared is not None:
            self._assembly.forget(prepared.generation.number)
            prepared.forget()

    # -- prepare ------------------------------------------------------------------------------------------------------

    def _prepare(self, order: Message) -> None:
        """Build what the coming generation needs beside what the present one uses."""
        begin = time.monotonic()
        generation = GroupGeneration.of({"rank": self._assembly.generation.rank, **order})
        prepared = Prepared(generation, sources_of(generation, order, self._recovery.facts))
        with self._lock:
            self.prepared = prepared
        try:
            self._build(prepared)
        except Exception as error:  # noqa: BLE001 (whatever it is, training goes on as if nothing had been asked)
            with self._lock:
                if self.prepared is prepared:  # and not a newer one
                    self.prepared, self._switch = None, 0
            prepared.forget()
            why = str(error) or type(error).__name__
            _log.warning("the move to generation %d cannot be prepared: %s", generation.number, why)
            link().report("unprepared", generation=generation.number, why=why[:500])
            return
        prepared.ready = True
        link().report("prepared", generation=generation.number, seconds=time.monotonic() - begin)

    def _build(self, prepared: Prepared) -> None:
        """Build the groups in which a member changes; a rank that leaves builds the connection to who comes instead."""
        membership, generation = self._assembly, prepared.generation
        leaving = generation.rank in generation.changed
        prepared.generation_store = membership.reach(generation, leaving=leaving)
        membership.leave_records(generation, prepared.generation_store)
        stayers = [rank for rank in generation.ranks if rank not in generation.changed]
        if leaving:
            self._meet(prepared, [generation.rank])
            return
        if generation.rank == min(stayers):
            prepared.generation_store.prefixed("facts").set("facts", json.dumps(self._recovery.facts))
        for group in sorted(membership.groups, key=lambda one: one.group_name):
            if generation.changed & set(group.everybody):
                prepared.inners[group.group_name] = membership.build(group, generation, prepared.generation_store)
                self._check(prepared)
        self._meet(prepared, sorted(rank for rank, source in prepared.sources.items() if source == generation.rank))

    def _meet(self, prepared: Prepared, coming: list[int]) -> None:
        """Make connections to the processes that are *coming* as these ranks: to hand the state over."""
        mover = TransferPlan(self._recovery.training, self._assembly, prepared.generation, prepared.generation_store)
        for rank in coming:
            prepared.handovers[rank] = mover.pair(f"handover-{rank}", 0)
            self._check(prepared)

    def _check(self, prepared: Prepared) -> None:
        """Go no further with what was given up meanwhile."""
        if self.prepared is not prepared:
            raise GenerationEnded

    def ready_for(self) -> int:
        """Return the generation that this rank can switch to and was told to, or 0."""
        prepared = self.prepared
        return self._switch if prepared is not None and prepared.ready and prepared.generation.number == self._switch else 0

    # -- switch, in the training thread -------------------------------------------------------------------------------

    def carry_out(self, number: int) -> None:
        """Switch to generation *number*, which all ranks have agreed on with the step that is done."""
        with self._lock:
            prepared, self.prepared, self._switch = self.prepared, None, 0
        if prepared is None or prepared.generation.number != number:
            raise GenerationEnded  # the flow has ended the present generation in this very moment
        if prepared.generation.rank in prepared.generation.changed:
            self._leave(prepared)
        self._stay(prepared)

    def _leave(self, prepared: Prepared) -> NoReturn:
        """Hand the state over and end: what follows in the script is the other process's."""
        self._hand_over(prepared)
        link().report("left", step=self._recovery.live)
        link().flush(2.0)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _hand_over(self, prepared: Prepared) -> None:
        """Give this rank's state to those who come."""
        recovery, generation = self._recovery, prepared.generation
        mover = TransferPlan(recovery.training, self._assembly, generation, prepared.generation_store)
        for rank, inner in sorted(prepared.handovers.items()):
            mover.put(f"light/{rank}", recovery.live.to_bytes(8, "big") + recovery.rank_state())
            mover.send(inner, 1, rank, 0, 1)
        for rank in sorted(prepared.handovers):
            mover.get(f"arrived/{rank}")

    def _stay(self, prepared: Prepared) -> None:
        """Put the new connections under the groups."""
        begin, membership, generation = time.monotonic(), self._assembly, prepared.generation
        incarnations = dict(generation.incarnations)
        assert prepared.generation_store is not None
        self._hand_over(prepared)
        over = list(prepared.handovers.values())
        membership.take(prepared.generation_store)
        membership.fill(generation)
        membership.connect_neighbours(generation)
        membership.share_records()
        for group in membership.groups:
            inner = prepared.inners.pop(group.group_name, None)
            if inner is not None:
                before = group.give(inner, incarnations)
                over += [before] if before is not None else []
        close_later(over)
        membership.enter(generation)
        self._recovery.learn_of(generation)
        link().report("switched", generation=generation.number, step=self._recovery.live, seconds=time.monotonic() - begin)

    # -- come in ------------------------------------------------------------------------------------------------------

    def take_over(self, order: Message) -> None:
        """Take the place of a rank that hands its state over."""
        recovery, membership, begin = self._recovery, self._assembly, time.monotonic()
        generation = GroupGeneration.of(order)
        membership.connect(generation)
        assert membership.generation_store is not None
        prefixed = membership.generation_store.prefixed("facts")
        facts: dict[str, Any] = json.loads(membership.patiently(lambda: prefixed.get("facts"), generation))
        recovery.take_facts(generation, facts)
        inners = {}
        for group in sorted(membership.groups, key=lambda one: one.group_name):
            inners[group.group_name] = membership.build(group, generation)
        mover = TransferPlan(recovery.training, membership, generation)
        handover = mover.pair(f"handover-{generation.rank}", 1)
        link().report("prepared", generation=generation.number, seconds=time.monotonic() - begin)
        rank_state = mover.take(f"light/{generation.rank}")
        begin = time.monotonic()
        source = sources_of(generation, order, facts).get(generation.rank, generation.rank)
        size = mover.receive([(handover, 0, source, 0, 1)])
        mover.put(f"arrived/{generation.rank}", b"")
        close_later([handover])
        recovery.leave_sandbox(generation)
        membership.connect_neighbours(generation)
        membership.share_records()
        for group in membership.groups:
            group.give(inners[group.group_name], dict(generation.incarnations))
        membership.enter(generation)
        recovery.learn_of(generation)
        recovery.settle_in(int.from_bytes(rank_state[:8], "big"), rank_state[8:])
        if source != generation.rank:  # two ranks that draw the same numbers would drop out the same units
            rng.part(generation.rank)
        took = time.monotonic() - begin
        link().report("switched", generation=generation.number, step=recovery.live, seconds=took, bytes=size, bandwidth=size / took)


def sources_of(generation: GroupGeneration, order: Message, facts: Mapping[str, Any]) -> dict[int, int]:
    """Return who hands its state to whom: to each rank that comes to a vacant place one that stays and holds what it is to hold.

    All ranks compute the same. A rank of which nobody holds the state has none here, and the move cannot be prepared.
    """
    shards, coming = facts.get("shards", {}), sorted(generation.changed - {int(rank) for rank in order["leavers"]})
    found = {}
    for rank in coming:
        holders = [one for one in generation.ranks if one not in generation.changed and shards.get(str(one)) == shards.get(str(rank))]
        if not holders:
            raise RuntimeError(f"no rank that stays holds the state of rank {rank}")
        found[rank] = holders[coming.index(rank) % len(holders)]
    return found
