"""This process's managed groups, and what brings them into a new generation.

The watch thread hears the agent's orders. It only cuts waits short and notes what is asked; all else happens in the training thread, at
the boundary between two steps, in phases that can each be given up: store, council, facts, groups. All ranks go through the
groups in one order, that of their names, so that no two wait for each other crosswise.
"""

from __future__ import annotations

import base64
import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from holdfast.protocol import Message
from holdfast.runtime.agent_client import link
from holdfast.runtime.groups import first_exchanges, recorded_collectives
from holdfast.runtime.groups.backends import BackendGroup, BuildOptions, GenerationEnded, build, in_thread, pause_after
from holdfast.runtime.groups.control_tree import ControlTree, PeerAcceptor
from holdfast.runtime.groups.first_exchanges import FirstExchanges
from holdfast.runtime.groups.kv_store_access import KvStoreAccess, ReachedStore
from holdfast.runtime.groups.process_group import BACKEND, ManagedGroup
from holdfast.runtime.groups.recorded_collectives import CollectiveRecorder, OnGroup
from holdfast.runtime.groups.step_transaction import StepTransaction
from holdfast.runtime.snapshots.restore import servers_of

log = logging.getLogger("holdfast.runtime")

STUCK_SECONDS: Final = 10.0
"""Seconds after the end of a generation from which on a rank that has come into no other says where it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupGeneration:
    """One agreed membership, as this rank sees it."""

    number: int
    rank: int
    world: int
    incarnations: Mapping[int, int]
    """The generation in which each rank's process took the rank: another number means another process."""
    store: tuple[str, int]
    serve: int
    """The rank that hosts the store."""
    changed: frozenset[int] = frozenset()
    since: int = 0
    every: int | None = None
    """Steps between two checkpoints from this generation on, for all its ranks alike; empty: as before."""
    memory: Mapping[str, tuple[str, int]] | None = None
    """Where the memory of the job's nodes is served now; None: where this process was told when it started."""

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that are there. Where the job has shrunk the places of others are vacant: numbers have gaps then."""
        return sorted(self.incarnations)

    @classmethod
    def of(cls, message: Message) -> GroupGeneration:
        """Return the generation in an order ``regroup`` or ``prepare``."""
        host, port = message["store"]
        return cls(
            number=int(message["generation"]),
            rank=int(message["rank"]),
            world=int(message["world"]),
            incarnations={rank: int(since) for first, last, since in message["incarnations"] for rank in range(int(first), int(last) + 1)},
            store=(str(host), int(port)),
            serve=int(message["serve"]),
            changed=frozenset(int(rank) for rank in message["changed"]),
            since=int(message.get("since", 0)),
            every=None if message.get("every") is None else int(message["every"]),
            memory=None if message.get("memory") is None else servers_of(message["memory"]),
        )

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> GroupGeneration:
        """Return the generation that this process was started for: all ranks begin together."""
        number, world = int(environment.get("HOLDFAST_GENERATION") or 1), int(environment["WORLD_SIZE"])
        return cls(
            number=number,
            rank=int(environment["RANK"]),
            world=world,
            incarnations=dict.fromkeys(range(world), number),
            store=(environment["MASTER_ADDR"], int(environment["MASTER_PORT"])),
            serve=0,
            changed=frozenset(range(world)),
        )


class MembershipManager:
    """The managed groups of this process."""

    def __init__(self, generation: GroupGeneration, token: str, stride: int, devices: tuple[str, ...]) -> None:
        self.generation, self.token, self.stride, self.devices = generation, token, stride, devices
        self.width = generation.world
        """Ranks of the job when no place is vacant."""
        self.transaction = StepTransaction()
        self.acceptor = PeerAcceptor(token)
        self.control_tree: ControlTree | None = None
        self.groups: list[ManagedGroup] = []
        """In the order of their making, which is the same on every rank of a role."""
        self.stores = KvStoreAccess(self.acceptor.port, token)
        self.generation_store: ReachedStore | None = None
        """The store of the present generation, or of the one that is being come into."""
        self.dry_run: Any = None
        """Answers for peers while there are none: in a standby, and in a rank that is about to join."""
        self.listener: Any = None
        self.recorder: CollectiveRecorder | None = None
        self.startup: first_exchanges.ExchangeRecorder | None = None
        """Records what is exchanged before the first step, until that begins."""
        self.records: dict[int, bytes] = {}
        """What ranks received before their first step: of this one, and of those that have it kept here."""
        self._told_records: set[tuple[int, int]] = set()
        """Ranks, with their incarnations, that keep this one's."""
        self.planned: Callable[[Message], None] | None = None
        """Takes orders that belong to planned moves."""
        self.orders: dict[str, Message] = {}
        """The newest order of each kind that is not carried out yet."""
        self._heir: Callable[[Message], None] | None = None
        """Takes what orders there are when the script runs again."""
        self._addresses: dict[tuple[int, int], tuple[str, int]] = {}
        self._news = threading.Condition()
        self._over = 0
        """The newest generation that the flow has ended."""
        self._forgotten: set[int] = set()
        """Generations that were prepared for a planned move and given up."""
        self._watched = 0
        """The newest generation whose end somebody watches."""
        self._met = 0
        """The newest generation that this rank has left for a meeting."""

    def record(self) -> None:
        """Record what operations bring before the first step, from the first group on."""
        first_exchanges.watch()
        self.transaction.final = True
        self.listener = self.startup = first_exchanges.ExchangeRecorder(self.groups, self.generation.number)

    def begin_steps(self, restored: set[int]) -> None:
        """End the beginning of the script, which no rank does twice; the session restores what lies in the memory *restored*.

        From now on what operations bring is recorded for standbys, until the keeper says that it is enough.
        """
        if self.dry_run is not None:
            self.dry_run.begin_steps(restored)
        if self.startup is None:
            return
        record, self.startup = self.startup.close(restored), None
        for one in record.lost[:1]:
            log.warning("a fault of this rank restarts all: '%s' at %s cannot be replayed: %s", one.key, one.where, one.lost)
        self.records[self.generation.rank] = record.packed()
        self.recorder = CollectiveRecorder()
        self.watch(OnGroup(self.groups, self.recorder))
        self.transaction.final = False

    def share_records(self) -> None:
        """Have the buddies keep what this rank received before its first step, and keep that of the wards; all ranks come here together."""
        control_tree, rank = self.control_tree, self.generation.rank
        assert control_tree is not None

        def own(buddy: int) -> bytes:
            key = buddy, control_tree.incarnations[buddy]
            fresh = key not in self._told_records
            self._told_records.add(key)
            return self.records.get(rank, b"") if fresh else b""

        try:
            control_tree.exchange(own, self.records.__setitem__)
        except BaseException:
            self._told_records.clear()  # nobody knows what has arrived
            raise

    def leave_records(self, generation: GroupGeneration, generation_store: ReachedStore) -> None:
        """Leave in the store of *generation* what those received who come as new processes, as far as it is kept here.

        They are those who were others in the generation that this rank came into last: orders follow each other before one is carried out.
        """
        prefixed, before = generation_store.prefixed("startup"), self.generation.incarnations
        for rank, incarnation in generation.incarnations.items():
            if rank in self.records and incarnation != before.get(rank):
                prefixed.set(f"record/{rank}", base64.b64encode(self.records[rank]).decode())
        prefixed.set(f"told/{generation.rank}", "")

    def find_record(self) -> tuple[int, FirstExchanges | None]:
        """Return what the rank that this process becomes received before its first step, and the generation that is being come into.

        None where no rank that stays has it, and no disk. Orders are looked at and not taken.
        """
        newer = 0
        while True:
            generation = GroupGeneration.of(self._look_for("regroup", "prepare", newer=newer))
            newer = generation.number
            try:
                found = self._record_in(generation)
            except GenerationEnded:
                continue
            except RuntimeError as error:
                link().report("broken", generation=newer, step=0, group="", why=str(error)[:500])
                continue
            place = recorded_collectives.folder()
            if found is None and place is not None:
                left = recorded_collectives.read_startup(recorded_collectives.startup_of(place, self.width, generation.rank))
                found = None if left is None else left.packed()
            if found is not None:
                self.records[generation.rank] = found
            return newer, None if found is None else FirstExchanges.of(found)

    @property
    def born(self) -> int | None:
        """Return the generation in which the processes began together whose values this one has; none where it was not asked."""
        record = self.records.get(self.generation.rank)
        return None if not record else FirstExchanges.of(record).born

    def startup_matches(self) -> bool:
        """Tell whether this standby received before its first step what the rank received that it is to become."""
        replay = self.dry_run.replay
        if replay is None or self.dry_run.strayed:
            return False
        _, record = self.find_record()
        return record is not None and record.digest() == replay.record.digest()

    def _record_in(self, generation: GroupGeneration) -> bytes | None:
        """Wait in the store of *generation* for this rank's record, or for all who stay to have left what they have."""
        store, is_cancelled = self.stores.look(generation, self.is_cancelled(generation.number)), self.is_cancelled(generation.number)
        try:
            prefixed = dist.PrefixStore(f"generation-{generation.number}/startup", store)
            name = f"record/{generation.rank}"
            since = generation.incarnations[generation.rank]
            told = [f"told/{rank}" for rank in generation.ranks if generation.incarnations[rank] < since]
            began = time.monotonic()
            while True:
                over = not told or bool(prefixed.check(told))  # asked first: a record is left before that
                if prefixed.check([name]):
                    return base64.b64decode(prefixed.get(name))
                if over:
                    return None
                if is_cancelled():
                    raise GenerationEnded
                time.sleep(pause_after(time.monotonic() - began))
        finally:
            store.close()

    def _look_for(self, *words: str, newer: int) -> Message:
        """Wait for an order of one of these kinds for a generation above *newer*, and leave it for who takes it."""
        with self._news:
            while True:
                found = [order for word in words if (order := self.orders.get(word)) is not None and int(order["generation"]) > newer]
                if found:
                    return max(found, key=lambda one: int(one["generation"]))
                self._news.wait()

    def hear_nothing(self) -> None:
        """Let operations go unrecorded from now on."""
        self.watch(None)
        self.recorder = None

    def watch(self, listener: Any) -> None:  # noqa: ANN401 (a `Listener`, or none)
        """Have *listener* told of the operations of all groups."""
        self.listener = listener
        for group in self.groups:
            group.listener = listener

    # -- orders -------------------------------------------------------------------------------------------------------

    def hear(self, order: Message) -> None:
        """Take in an order of the agent, in the watch thread."""
        word = str(order.get("do"))
        try:
            if word == "abandon":
                self._abandon(int(order["generation"]), frozenset(int(rank) for rank in order.get("lost", ())))
            elif word == "regroup":
                self._abandon(int(order["generation"]) - 1, frozenset(int(rank) for rank in order.get("changed", ())))
        except Exception:
            log.exception("the order '%s' could not be carried out", word)
        if self.planned is not None:
            self.planned(order)
        with self._news:
            heir = self._heir
            if heir is None:
                self.orders[word] = newest(self.orders.get(word), order)
                self._news.notify_all()
        if heir is not None:
            heir(order)

    def _abandon(self, generation: int, lost: frozenset[int]) -> None:
        """End every wait of *generation* that a lost rank, or an end of the council, could make endless."""
        if generation < self.generation.number and generation <= self._over:
            return
        self._over = max(self._over, generation)
        control_tree = self.control_tree
        if control_tree is not None and control_tree.generation <= generation:
            control_tree.give_up()
        if self.dry_run is None and generation >= self.generation.number:
            if self._watched < generation:
                self._watched = generation
                self._watch_the_way_out(generation)
            self.transaction.fail(f"the flow has ended generation {generation}")
            if self.generation_store is not None:
                self.generation_store.root.end_long_waits(f"the flow has ended generation {generation}")
            for group in list(self.groups):
                if lost & set(group.ranks):
                    group.abandon(f"rank(s) {', '.join(map(str, sorted(lost & set(group.ranks))))} lost")

    def _watch_the_way_out(self, generation: int) -> None:
        """Leave in the log where this rank is when it has come into no other generation after a while: it may wait for ever."""

        def look() -> None:
            if self.generation.number <= generation:
                where = "waits for the next one" if self._met >= generation else "is still in it"
                log.warning("generation %d ended %.0f s ago, this rank %s; its threads stand here:", generation, STUCK_SECONDS, where)
                with suppress(OSError, ValueError):  # an output that is no file
                    faulthandler.dump_traceback(all_threads=True)

        timer = threading.Timer(STUCK_SECONDS, look)
        timer.daemon = True
        timer.start()

    def note_meeting(self) -> None:
        """Note that this rank has left whatever it did in the present generation."""
        self._met = max(self._met, self._over, self.generation.number)

    def wait_for(self, *words: str, newer: int = 0) -> Message:
        """Wait for an order of one of these kinds for a generation above *newer*, and take it."""
        with self._news:
            while True:
                for word in words:
                    order = self.orders.get(word)
                    if order is not None and int(order.get("generation", newer + 1)) > newer:
                        return self.orders.pop(word)
                self._news.wait()

    def put_back(self, order: Message) -> None:
        """Leave *order* for who waits next, unless a newer one has come."""
        word = str(order["do"])
        with self._news:
            self.orders[word] = newest(self.orders.get(word), order)

    def hand_over(self, heir: Callable[[Message], None]) -> None:
        """Give *heir* the orders that nobody has taken, and all that still come."""
        with self._news:
            self._heir, left = heir, list(self.orders.values())
        for order in left:
            heir(order)

    def is_cancelled(self, number: int) -> Callable[[], bool]:
        """Return what tells whether generation *number* has been ended while it was still being made."""
        return lambda: self._over >= number or number in self._forgotten

    def forget(self, number: int) -> None:
        """Give up generation *number*, which is still being prepared."""
        self._forgotten.add(number)

    def cut(self, why: str) -> None:
        """Cut all connections: who waits in them for this rank would wait in vain."""
        for group in list(self.groups):
            if group.inner is not None and not group.is_broken:
                group.abandon(why)

    # -- the first generation -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Meet the other ranks of the generation that this process was started for: each comes when its script has come so far."""
        self.connect(self.generation, default_pg_timeout)
        self.connect_neighbours(self.generation, default_pg_timeout)

    def create(self, options: Any, _more: Any) -> ManagedGroup:  # noqa: ANN401 (torch's options)
        """Make the group that torch asks for."""
        present = self.generation.ranks
        ranks = [present[number] for number in options.global_ranks_in_group or range(options.group_size)]
        group = ManagedGroup(str(options.group_id), ranks, self.generation.rank, self.transaction, options.timeout)
        group.listener = self.listener
        if self.dry_run is not None:
            group.dry_run = self.dry_run
        else:
            group.give(self.build(group, self.generation, first=True), dict(self.generation.incarnations))
        self.groups.append(group)
        return group

    # -- phases -------------------------------------------------------------------------------------------------------

    def connect(self, generation: GroupGeneration, patience: timedelta | None = None) -> None:
        """Reach the store of *generation*, or host it."""
        self.take(self.reach(generation, patience=patience))

    def reach(self, generation: GroupGeneration, *, leaving: bool = False, patience: timedelta | None = None) -> ReachedStore:
        """Reach the store of *generation* without taking it as the present one; see `KvStoreAccess.reach`."""
        return self.stores.reach(generation, self.is_cancelled(generation.number), leaving=leaving, patience=patience)

    def take(self, generation_store: ReachedStore) -> None:
        """Take *generation_store* as the present store."""
        self.generation_store = generation_store
        self.stores.keep(generation_store)

    def connect_neighbours(self, generation: GroupGeneration, patience: timedelta | None = None) -> int:
        """Connect to the neighbours in the council of *generation*; return how many connections were made."""
        control_tree = ControlTree(generation.rank, generation.number, dict(generation.incarnations), self.stride)
        before, self.control_tree = self.control_tree, control_tree
        if self._over >= generation.number:
            control_tree.give_up()
        seconds = None if patience is None else patience.total_seconds()
        return control_tree.connect_neighbours(
            before, self.acceptor, self.token, lambda rank: self._find(rank, generation.incarnations[rank]), seconds=seconds
        )

    def _find(self, rank: int, incarnation: int) -> tuple[str, int] | None:
        """Return where the desk of *rank* is, once that process has told."""
        key = rank, incarnation
        if key not in self._addresses:
            assert self.generation_store is not None
            with suppress(RuntimeError):
                address = self.generation_store.find(rank, incarnation)
                if address is not None:
                    self._addresses[key] = address
        return self._addresses.get(key)

    def patiently(self, make: Callable[[], Any], generation: GroupGeneration) -> Any:  # noqa: ANN401 (whatever is made)
        """Return what *make* makes; give up when *generation* ends meanwhile."""
        return in_thread(make, self.is_cancelled(generation.number))

    def build(
        self, group: ManagedGroup, generation: GroupGeneration, over: ReachedStore | None = None, *, first: bool = False
    ) -> BackendGroup:
        """Build connections for *group* in *generation*, *over* its store where that is not the present one; say if it had none before."""
        generation_store, members = over or self.generation_store, group.among(generation.ranks)
        assert generation_store is not None
        return build(
            generation_store.prefixed("groups", group.timeout if first else None),
            f"group-{group.group_name}",
            members.index(generation.rank),
            len(members),
            way=BuildOptions(devices=self.devices, timeout=group.timeout, host=generation_store.host, first=first),
            is_cancelled=self.is_cancelled(generation.number),
        )

    def enter(self, generation: GroupGeneration) -> None:
        """Take *generation* as the present one."""
        self.generation = generation
        link().generation, link().rank = generation.number, generation.rank
        default = c10d._world.default_pg  # noqa: SLF001 (torch has no public way to give a group another store)
        if default is not None and self.generation_store is not None:
            c10d._world.pg_map[default] = (BACKEND, self.generation_store.prefixed("torch", default_pg_timeout))  # noqa: SLF001

    def status(self, generation: GroupGeneration) -> dict[str, list[int | bool]]:
        """Return what must be known of each group to decide whether its connections stay: operations, broken, used."""
        return {
            group.group_name: [
                group.operations,
                group.is_broken or group.inner is None or group.built != {rank: generation.incarnations[rank] for rank in group.ranks},
                group.used,
            ]
            for group in self.groups
        }

    def fill(self, generation: GroupGeneration) -> None:
        """Have only ranks as members of groups that are there in *generation*."""
        for group in self.groups:
            group.fill(generation.ranks)

    def rebuild(
        self, generation: GroupGeneration, told: Mapping[int, Mapping[str, list[int | bool]]]
    ) -> tuple[int, int, list[ManagedGroup]]:
        """Give new connections to the groups that need them; return how many were made, how many stay, and those left for later.

        A group needs them when a member changed, when a member saw it break, or when members do not agree how far they are in it.
        One that nobody ever used can wait.
        """
        made, kept, later = 0, 0, []
        for group in sorted(self.groups, key=lambda one: one.group_name):
            views = [told[rank].get(group.group_name) for rank in group.ranks]
            alike = {view[0] for view in views if view is not None}
            if all(view is not None and not view[1] for view in views) and len(alike) == 1:
                kept += 1
                continue
            before = group.give(None, {})
            if before is not None:
                before.close()
            if not any(view is not None and view[2] for view in views):
                later.append(group)
                continue
            inner = self.build(group, generation)
            if self.is_cancelled(generation.number)():
                inner.close()
                raise GenerationEnded
            group.give(inner, dict(generation.incarnations))
            made += 1
        return made, kept, later

    def rebuild_later(self, generation: GroupGeneration, groups: list[ManagedGroup]) -> None:
        """Give connections to *groups* in the background, in the same order on every rank."""

        def work() -> None:
            for group in groups:
                try:
                    inner = self.build(group, generation)
                except (GenerationEnded, RuntimeError) as error:
                    if self.generation.number == generation.number:
                        group.abandon(f"it could not be built anew: {error}")
                    return
                if self._over >= generation.number or self.generation.number != generation.number:
                    inner.close()
                    return
                group.give(inner, dict(generation.incarnations))

        if groups:
            threading.Thread(target=work, name="holdfast-later", daemon=True).start()

    def renew(self) -> None:
        """Let steps be attempted again."""
        self.transaction.renew()
        if self._over >= self.generation.number:  # ended again in this very moment
            self.transaction.fail(f"the flow has ended generation {self.generation.number}")

    def take_places(self, table: list[tuple[str, list[int]]], rank: int) -> None:
        """Become *rank*: its groups are, in the order of their making, those in *table*."""
        if len(table) != len(self.groups):
            raise ValueError(f"rank {rank} is a member of {len(table)} groups, this standby was built with {len(self.groups)}")
        for group, (name, ranks) in zip(self.groups, table, strict=True):
            group.take_place(name, list(ranks), rank)
        self.generation = replace(self.generation, rank=rank)

    def close(self) -> None:
        """Give everything back."""
        if self.control_tree is not None:
            self.control_tree.close()
        self.acceptor.close()


def newest(waiting: Message | None, order: Message) -> Message:
    """Return which of two orders of a kind counts: that of the newer generation.

    Orders come close together when one fault follows another, and one is heard again after it was taken. What made a standby a rank stands
    in the first of them only, and holds on.
    """
    if waiting is None:
        return order
    older, newer = sorted((waiting, order), key=lambda one: int(one.get("generation", 0)))
    return {**{name: older[name] for name in ("environment", "log") if name in older}, **newer}


_ours: MembershipManager | None = None


def membership() -> MembershipManager | None:
    """Return this process's assembly, if its groups are managed."""
    return _ours


def install(made: MembershipManager | None) -> None:
    """Have torch make its groups through *made*."""
    global _ours  # noqa: PLW0603 (a process has one default group, and one assembly that made it)
    _ours = made
    if made is not None and BACKEND.upper() not in dist.Backend._plugins:  # noqa: SLF001 (asked, not changed)
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, more: Any) -> ManagedGroup:  # noqa: ANN401 (torch's options)
    assert _ours is not None
    return _ours.create(options, more)


def devices() -> tuple[str, ...]:
    """Return the kinds of devices that groups must serve."""
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
