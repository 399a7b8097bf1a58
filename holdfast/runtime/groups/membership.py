"""This process's managed groups, and their transition to a new generation.

The command thread receives the agent's commands. It only ends waits and stores requests; everything else happens in the training thread,
between two steps, in phases that can each be cancelled: store, control tree, facts, groups. All ranks go through the groups in the order of
their names, so no two wait for each other crosswise.
"""

from __future__ import annotations

import base64
import faulthandler
import functools
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.constants import default_pg_timeout

from holdfast.protocol import Message
from holdfast.runtime.agent_client import link
from holdfast.runtime.groups.backends import HOST, BackendGroup, BuildOptions, GenerationEnded, abandon_all, build, poll_interval
from holdfast.runtime.groups.control_tree import ControlTree, PeerAcceptor
from holdfast.runtime.groups.device_library import DeviceLibrary, library, wait_for
from holdfast.runtime.groups.dry_runs import first_exchanges, recorded_collectives
from holdfast.runtime.groups.dry_runs.first_exchanges import FirstExchanges
from holdfast.runtime.groups.dry_runs.recorded_collectives import CollectiveRecorder
from holdfast.runtime.groups.kv_store import GenerationStore, KvStoreAccess
from holdfast.runtime.groups.operations import StepTransaction
from holdfast.runtime.groups.process_group import BACKEND, ManagedGroup, OperationListener
from holdfast.runtime.snapshots.restore import servers_of

log = logging.getLogger("holdfast.runtime")

UNNOTICED_SECONDS: Final = 1.0
"""Seconds after which a rank reports a failure on its device, unless the controller has ended the generation by then."""
STUCK_SECONDS: Final = 10.0
"""Seconds after the end of a generation after which a rank that has entered no other dumps its stacks."""


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
    """Steps between two checkpoints from this generation on, for all ranks alike; None: as before."""
    memory: Mapping[str, tuple[str, int]] | None = None
    """Addresses of the nodes' memory stores; None: those that this process was started with."""

    @property
    def ranks(self) -> list[int]:
        """Return the ranks that are present. Where the job has shrunk, places are vacant and numbers have gaps."""
        return sorted(self.incarnations)

    @classmethod
    def of(cls, message: Message) -> GroupGeneration:
        """Return the generation in a command ``regroup`` or ``prepare``."""
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
        """Return the generation that this process was started for: all ranks start together."""
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

    replaces_init: bool = False
    """The script called `torch.distributed.init_process_group`, not `holdfast.join`: it has promised nothing."""
    declined: str = ""
    """Why the groups are not repaired; empty where they are."""
    reopened: int = 0
    """How often the script has destroyed all groups and created others."""
    requested: tuple[str, ...] = ()
    """What carries the tensors of the group that is being created (`BuildOptions.devices`); empty: all there is."""

    def __init__(self, generation: GroupGeneration, token: str, stride: int, devices: tuple[str, ...]) -> None:
        self.generation, self.token, self.stride, self.devices = generation, token, stride, devices
        self.width = generation.world
        """Ranks of the job when no place is vacant."""
        self.transaction = StepTransaction()
        self.acceptor = PeerAcceptor(token)
        self.control_tree: ControlTree | None = None
        self.groups: list[ManagedGroup] = []
        """In the order of their creation, which is the same on every rank of a role."""
        self.stores = KvStoreAccess(self.acceptor.port, token)
        self.generation_store: GenerationStore | None = None
        """The store of the current generation, or of the one that is being entered."""
        self.dry_run: Any = None
        """Answers operations while there are no peers: in a hot spare, and in a process that is about to take over a rank."""
        self.listener: OperationListener | None = None
        self.recorder: CollectiveRecorder | None = None
        self.startup: first_exchanges.ExchangeRecorder | None = None
        """Records what is exchanged before the first step, until that begins."""
        self.records: dict[int, bytes] = {}
        """What ranks received before their first step: this one, and those that it keeps the record for."""
        self._sent_records: set[tuple[int, int]] = set()
        """Ranks, with their incarnations, that keep this one's."""
        self.on_command: Callable[[Message], None] | None = None
        """Handles commands that concern live migrations."""
        self.commands: dict[str, Message] = {}
        """The newest command of each kind that has not been carried out."""
        self._forward: Callable[[Message], None] | None = None
        """Receives the commands when the script runs again."""
        self._addresses: dict[tuple[int, int], tuple[str, int]] = {}
        self._editions: dict[str, int] = {}
        """Groups that were made with each name."""
        self._news = threading.Condition()
        self._ended = 0
        """The newest generation that the controller has ended."""
        self._cancelled: set[int] = set()
        """Generations that were prepared for a migration and cancelled."""
        self._watched = 0
        """The newest generation whose end is watched."""
        self._left = 0
        """The newest generation that this rank has left for a rendezvous."""

    # -- what the ranks exchange before their first step --------------------------------------------------------------

    def record(self) -> None:
        """Record the results of operations before the first step, from the first group on."""
        first_exchanges.watch()
        self.transaction.final = True
        self.listener = self.startup = first_exchanges.ExchangeRecorder(self.groups, self.generation.number)

    def begin_steps(self, restored: set[int]) -> None:
        """End the beginning of the script, which no rank repeats; the session restores what lies in the memory *restored*.

        From now on results are recorded for hot spares, until `stop_recording`.
        """
        if self.dry_run is not None:
            self.dry_run.begin_steps(restored)
        if self.startup is None:
            return
        record, self.startup = self.startup.close(restored), None
        for one in record.lost[:1]:
            log.warning("a fault of this rank restarts all: '%s' at %s cannot be replayed: %s", one.key, one.where, one.lost)
        self.records[self.generation.rank] = record.packed()
        self.recorder = CollectiveRecorder(self.groups)
        self.set_listener(self.recorder)
        self.transaction.final = False

    def exchange_records(self) -> None:
        """Have the backup ranks keep what this rank received before its first step; all ranks call this together."""
        control_tree, rank = self.control_tree, self.generation.rank
        assert control_tree is not None

        def own(backup: int) -> bytes:
            key = backup, control_tree.incarnations[backup]
            new = key not in self._sent_records
            self._sent_records.add(key)
            return self.records.get(rank, b"") if new else b""

        try:
            control_tree.exchange(own, self.records.__setitem__)
        except BaseException:
            self._sent_records.clear()  # what has arrived is unknown
            raise

    def publish_records(self, generation: GroupGeneration, store: GenerationStore) -> None:
        """Put the records of replaced ranks into the *store* of *generation*, as far as they are kept here.

        A rank is replaced when its process is not that of the generation that this rank entered last: commands may follow each other before
        one is carried out.
        """
        prefixed, before = store.prefixed("startup"), self.generation.incarnations
        for rank, incarnation in generation.incarnations.items():
            if rank in self.records and incarnation != before.get(rank):
                prefixed.set(f"record/{rank}", base64.b64encode(self.records[rank]).decode())
        prefixed.set(f"published/{generation.rank}", "")

    def find_record(self) -> tuple[int, FirstExchanges | None]:
        """Return the generation to enter, and what the rank that this process becomes received before its first step.

        The record is None where neither a rank that stays nor the disk has it. Commands are read and not taken.
        """
        newer = 0
        while True:
            generation = GroupGeneration.of(self._await_command("regroup", "prepare", newer=newer))
            newer = generation.number
            try:
                found = self._published_record(generation)
            except GenerationEnded:
                continue
            except RuntimeError as error:
                link().report("broken", generation=newer, step=0, group="", why=str(error)[:500])
                continue
            place = recorded_collectives.folder()
            if found is None and place is not None:
                on_disk = recorded_collectives.read_startup(recorded_collectives.startup_path(place, self.width, generation.rank))
                found = None if on_disk is None else on_disk.packed()
            if found is not None:
                self.records[generation.rank] = found
            return newer, None if found is None else FirstExchanges.of(found)

    def _published_record(self, generation: GroupGeneration) -> bytes | None:
        """Wait in the store of *generation* for this rank's record, or until all ranks that stay have published what they have."""
        is_cancelled = self.is_cancelled(generation.number)
        store = self.stores.connect(generation, is_cancelled)
        try:
            prefixed = dist.PrefixStore(f"generation-{generation.number}/startup", store)
            name = f"record/{generation.rank}"
            since = generation.incarnations[generation.rank]
            published = [f"published/{rank}" for rank in generation.ranks if generation.incarnations[rank] < since]
            began = time.monotonic()
            while True:
                complete = not published or bool(prefixed.check(published))  # checked first: a record is published before that
                if prefixed.check([name]):
                    return base64.b64decode(prefixed.get(name))
                if complete:
                    return None
                if is_cancelled():
                    raise GenerationEnded
                time.sleep(poll_interval(time.monotonic() - began))
        finally:
            store.close()

    @property
    def startup_generation(self) -> int | None:
        """Return the generation in which the processes started together whose values this one has; None if it did not ask."""
        record = self.records.get(self.generation.rank)
        return None if not record else FirstExchanges.of(record).generation

    def startup_matches(self) -> bool:
        """Return whether this hot spare received before its first step the same as the rank that it is to become."""
        replay = self.dry_run.replay
        if replay is None or self.dry_run.diverged:
            return False
        _, record = self.find_record()
        return record is not None and record.digest() == replay.record.digest()

    def stop_recording(self) -> None:
        """Record no more operations."""
        self.set_listener(None)
        self.recorder = None

    def set_listener(self, listener: OperationListener | None) -> None:
        """Have *listener* observe the operations of all groups."""
        self.listener = listener
        for group in self.groups:
            group.listener = listener

    def decline(self, why: str) -> None:
        """Leave the groups as they are after a fault, because *why*: the loss of a peer raises in every operation, and all ranks restart.

        All ranks must do so. `membership` returns None from then on. A hot spare exits: it cannot take a rank in such groups.
        """
        if os.environ.get("HOLDFAST_HOT_SPARE"):
            raise SystemExit(f"a hot spare cannot take a rank: {why}")
        self.declined = why
        self.transaction.final = True
        self.startup = None
        self.stop_recording()

    # -- commands -----------------------------------------------------------------------------------------------------

    def receive(self, command: Message) -> None:
        """Handle a command of the agent, in the command thread."""
        name = str(command.get("do"))
        try:
            if name == "abandon":
                self._end_generation(int(command["generation"]), frozenset(int(rank) for rank in command.get("lost", ())))
            elif name == "regroup":
                self._end_generation(int(command["generation"]) - 1, frozenset(int(rank) for rank in command.get("changed", ())))
        except Exception:
            log.exception("the command '%s' failed", name)
        if self.on_command is not None:
            self.on_command(command)
        with self._news:
            forward = self._forward
            if forward is None:
                self.commands[name] = newest(self.commands.get(name), command)
                self._news.notify_all()
        if forward is not None:
            forward(command)

    def _end_generation(self, generation: int, lost: frozenset[int]) -> None:
        """End every wait of *generation* that a lost rank, or the end of the control tree, could make endless."""
        if generation < self.generation.number and generation <= self._ended:
            return
        self._ended = max(self._ended, generation)
        control_tree = self.control_tree
        if control_tree is not None and control_tree.generation <= generation:
            control_tree.cancel()
        if self.dry_run is None and generation >= self.generation.number:
            if self._watched < generation:
                self._watched = generation
                timer = threading.Timer(STUCK_SECONDS, self._dump_if_stuck, (generation,))
                timer.daemon = True
                timer.start()
            why = f"the controller ended generation {generation}"
            self.transaction.fail(why)
            if self.generation_store is not None:
                self.generation_store.root.end_long_waits(why)
            self.abandon_device_groups(why)  # also those that have lost nobody: their members may wait for a rank that has left
            for group in list(self.groups):
                if (members := sorted(lost & set(group.ranks))) and not group.is_broken:
                    # Numbers and no ranges: the diagnosis reads them (`detectors.causes.peers_in`).
                    noun, verb = ("rank", "is") if len(members) == 1 else ("ranks", "are")
                    group.abandon(f"{noun} {', '.join(map(str, members))} {verb} lost")

    def _dump_if_stuck(self, generation: int) -> None:
        """Log the stacks of this rank if it has entered no other generation by now: it may wait for ever."""
        if self.generation.number <= generation:
            where = "waits for the next one" if self._left >= generation else "is still in it"
            log.warning("generation %d ended %.0f s ago, this rank %s; stacks of its threads:", generation, STUCK_SECONDS, where)
            with suppress(OSError, ValueError):  # an output that is no file
                faulthandler.dump_traceback(all_threads=True)

    def note_rendezvous(self) -> None:
        """Record that this rank has left its work in the current generation."""
        self._left = max(self._left, self._ended, self.generation.number)

    def wait_for(self, *names: str, newer: int = 0) -> Message:
        """Wait for a command with one of these names for a generation above *newer*, and take it."""
        with self._news:
            while True:
                for name in names:
                    command = self.commands.get(name)
                    if command is not None and int(command.get("generation", newer + 1)) > newer:
                        return self.commands.pop(name)
                self._news.wait()

    def _await_command(self, *names: str, newer: int) -> Message:
        """Wait for a command with one of these names for a generation above *newer*, and leave it for `wait_for`."""
        with self._news:
            while True:
                found = [one for name in names if (one := self.commands.get(name)) is not None and int(one["generation"]) > newer]
                if found:
                    return max(found, key=lambda one: int(one["generation"]))
                self._news.wait()

    def put_back(self, command: Message) -> None:
        """Leave *command* for the next `wait_for`, unless a newer one has arrived."""
        name = str(command["do"])
        with self._news:
            self.commands[name] = newest(self.commands.get(name), command)

    def forward_to(self, receiver: Callable[[Message], None]) -> None:
        """Send *receiver* the commands that have not been taken, and all later ones."""
        with self._news:
            self._forward, waiting = receiver, list(self.commands.values())
        for command in waiting:
            receiver(command)

    def is_cancelled(self, number: int) -> Callable[[], bool]:
        """Return a function that returns whether generation *number* has ended before it was complete."""
        return lambda: self._ended >= number or number in self._cancelled

    def cancel(self, number: int) -> None:
        """Cancel generation *number*, which is still being prepared."""
        self._cancelled.add(number)

    def abandon_groups(self, why: str) -> None:
        """Cut all connections: ranks that wait in them for this rank would wait in vain."""
        self.abandon_device_groups(why)
        for group in list(self.groups):
            if group.inner is not None and not group.is_broken:
                group.abandon(why)

    def abandon_device_groups(self, why: str) -> None:
        """End every wait in all groups whose operations a device runs: one that waits there holds up those of other groups."""
        found = [(group, inner) for group in list(self.groups) if (inner := group.inner) is not None and inner.on_device is not None]
        for group, _ in found:
            group.mark_broken(why)
        abandon_all(inner for _, inner in found)

    def on_device_failure(self, why: str) -> None:
        """End the operations of the device in all groups, because this rank has noticed that one of them cannot end.

        Members of its groups may notice nothing, and wait for this rank. So the controller learns it if it has not ended the generation
        soon: of a process that died it hears sooner from its agent.
        """
        noticed, generation = not self.transaction.lost, self.generation.number
        self.abandon_device_groups(why)

        def report() -> None:
            if self._ended < generation == self.generation.number:
                link().report("broken", generation=generation, step=max(0, (link().step or 0) - 1), group="", why=why[:500])

        if noticed:
            timer = threading.Timer(UNNOTICED_SECONDS, report)
            timer.daemon = True
            timer.start()

    @property
    def device(self) -> DeviceLibrary | None:
        """The library that runs operations of these groups on a device; None where gloo runs all."""
        device = library()
        return device if device is not None and any(device.name in group.devices for group in self.groups) else None

    def wait_for_device(self, is_done: Callable[[], bool] | None = None) -> None:
        """Wait until the device has run all that lies in its queue, or until *is_done*.

        When a peer is lost meanwhile, the operations of all groups end. Raise ``RuntimeError`` when the device has failed.
        """
        device, transaction = self.device, self.transaction
        if device is None:
            return

        def must_end() -> str:
            if transaction.lost:
                return transaction.why
            inners = [inner for group in list(self.groups) if (inner := group.inner) is not None]
            return next(filter(None, (one.failure() for one in inners)), "")

        wait_for(is_done or device.record().query, must_end, self.on_device_failure)
        why = must_end()
        if why and not transaction.lost:  # the library has ended the operation itself, and its results are worth nothing
            self.on_device_failure(why)
        for group in list(self.groups):
            group.in_flight.settle()

    # -- the first generation -----------------------------------------------------------------------------------------

    def begin(self, timeout: timedelta = default_pg_timeout) -> None:
        """Connect to the other ranks that were started together with this one: each arrives when its script does, within *timeout*."""
        self.use_store(self.open_store(self.generation, timeout=timeout))
        self.connect_neighbours(self.generation, timeout)

    def create(self, options: Any, more: Any) -> ManagedGroup:  # noqa: ANN401 (torch's options)
        """Make the group that torch asks for; *more*, its ``pg_options``, is not used."""
        if more is not None and self.devices != (HOST,) and self.generation.rank == 0:
            log.warning(
                "`pg_options` of the group '%s' are ignored: it is managed, and a repaired one would not have them", options.group_id
            )
        present = self.generation.ranks
        ranks = [present[number] for number in options.global_ranks_in_group or range(options.group_size)]
        group = ManagedGroup(str(options.group_id), ranks, self.generation.rank, self.transaction, options.timeout)
        group.listener, group.on_shutdown, group.on_device_failure = self.listener, self._forget, self.on_device_failure
        group.edition = self._editions[group.group_name] = self._editions.get(group.group_name, 0) + 1
        group.devices = self.requested or self.devices
        if self.dry_run is not None:
            group.dry_run = self.dry_run
        else:
            group.replace_backend(self.build(group, self.generation, first=True), dict(self.generation.incarnations))
        self.groups.append(group)
        return group

    def _forget(self, group: ManagedGroup) -> None:
        """Forget *group*, which the script destroys: no recovery shall rebuild it."""
        with suppress(ValueError):
            self.groups.remove(group)

    # -- phases of a transition ---------------------------------------------------------------------------------------

    def open_store(self, generation: GroupGeneration, *, leaving: bool = False, timeout: timedelta | None = None) -> GenerationStore:
        """Return the store of *generation*, which is not used as the current one yet; see `KvStoreAccess.open`."""
        return self.stores.open(generation, self.is_cancelled(generation.number), leaving=leaving, timeout=timeout)

    def use_store(self, store: GenerationStore) -> None:
        """Use *store* as the current one."""
        self.generation_store = store
        self.stores.use(store)

    def connect_neighbours(self, generation: GroupGeneration, timeout: timedelta | None = None) -> int:
        """Connect to the neighbours in the control tree of *generation*; return how many connections were made."""
        control_tree = ControlTree(generation.rank, generation.number, dict(generation.incarnations), self.stride)
        before, self.control_tree = self.control_tree, control_tree
        if self._ended >= generation.number:
            control_tree.cancel()
        seconds = None if timeout is None else timeout.total_seconds()
        return control_tree.connect_neighbours(
            before, self.acceptor, self.token, lambda rank: self._find(rank, generation.incarnations[rank]), seconds=seconds
        )

    def _find(self, rank: int, incarnation: int) -> tuple[str, int] | None:
        """Return the address of the acceptor of *rank*, once that process has published it."""
        key = rank, incarnation
        if key not in self._addresses:
            assert self.generation_store is not None
            with suppress(RuntimeError):
                address = self.generation_store.find(rank, incarnation)
                if address is not None:
                    self._addresses[key] = address
        return self._addresses.get(key)

    def build(
        self, group: ManagedGroup, generation: GroupGeneration, store: GenerationStore | None = None, *, first: bool = False
    ) -> BackendGroup:
        """Build connections for *group* in *generation*, over its *store* if that is not the current one; *first*: it had none before."""
        opened, members = store or self.generation_store, group.members_in(generation.ranks)
        assert opened is not None
        return build(
            opened.prefixed("groups", group.timeout if first else None),
            f"group-{group.group_name}" + (f"-{group.edition}" if group.edition > 1 else ""),
            members.index(generation.rank),
            len(members),
            options=BuildOptions(
                devices=group.devices,
                timeout=group.timeout,
                host=opened.host,
                first=first,
                name=group.group_name,
                ranks=tuple(generation.ranks.index(rank) for rank in members),
            ),
            is_cancelled=self.is_cancelled(generation.number),
        )

    def enter(self, generation: GroupGeneration) -> None:
        """Make *generation* the current one."""
        self.generation = generation
        link().generation, link().rank = generation.number, generation.rank
        default = c10d._world.default_pg  # noqa: SLF001 (torch has no public way to give a group another store)
        if default is not None and self.generation_store is not None:
            store = self.generation_store.prefixed("torch", default_pg_timeout)
            c10d._world.pg_map[default] = (c10d._world.pg_map[default][0], store)  # noqa: SLF001

    def group_status(self, generation: GroupGeneration) -> dict[str, list[int | bool]]:
        """Return what decides whether the connections of each group stay: number of operations, broken, used."""
        return {
            group.group_name: [
                group.operations,
                group.is_broken or group.inner is None or group.built != {rank: generation.incarnations[rank] for rank in group.ranks},
                group.used,
            ]
            for group in self.groups
        }

    def set_members(self, generation: GroupGeneration) -> None:
        """Keep only ranks as members of groups that are present in *generation*."""
        for group in self.groups:
            group.set_members(generation.ranks)

    def rebuild(
        self, generation: GroupGeneration, status: Mapping[int, Mapping[str, list[int | bool]]]
    ) -> tuple[int, int, list[ManagedGroup]]:
        """Make new connections where they are needed; return how many groups were rebuilt, how many kept, and those for `rebuild_later`.

        *status*: every rank's `group_status`. A group is rebuilt when a member changed, when it broke for a member, or when members
        disagree about its operations. An unused group can wait.
        """
        made, kept, later = 0, 0, []
        for group in sorted(self.groups, key=lambda one: one.group_name):
            views = [status[rank].get(group.group_name) for rank in group.ranks]
            counts = {view[0] for view in views if view is not None}
            if all(view is not None and not view[1] for view in views) and len(counts) == 1:
                kept += 1
                continue
            before = group.replace_backend(None, {})
            if before is not None:
                before.close()
            if not any(view is not None and view[2] for view in views):
                later.append(group)
                continue
            inner = self.build(group, generation)
            if self.is_cancelled(generation.number)():
                inner.close()
                raise GenerationEnded
            group.replace_backend(inner, dict(generation.incarnations))
            made += 1
        return made, kept, later

    def rebuild_later(self, generation: GroupGeneration, groups: list[ManagedGroup]) -> None:
        """Make connections for *groups* in the background, in the same order on every rank."""

        def work() -> None:
            for group in groups:
                try:
                    inner = self.build(group, generation)
                except (GenerationEnded, RuntimeError) as error:
                    if self.generation.number == generation.number:
                        group.abandon(f"it could not be rebuilt: {error}")
                    return
                if self._ended >= generation.number or self.generation.number != generation.number:
                    inner.close()
                    return
                group.replace_backend(inner, dict(generation.incarnations))

        if groups:
            threading.Thread(target=work, name="holdfast-rebuild", daemon=True).start()

    def renew(self) -> None:
        """Allow steps again."""
        self.transaction.renew()
        if self._ended >= self.generation.number:  # ended again at this very moment
            self.transaction.fail(f"the controller ended generation {self.generation.number}")

    def become_rank(self, table: list[tuple[str, list[int]]], rank: int) -> None:
        """Become *rank*, whose groups are, in the order of their creation, those in *table*: name and ranks."""
        if len(table) != len(self.groups):
            raise ValueError(f"rank {rank} is a member of {len(table)} groups, this hot spare was built with {len(self.groups)}")
        for group, (name, ranks) in zip(self.groups, table, strict=True):
            group.become(name, list(ranks), rank)
        self.generation = replace(self.generation, rank=rank)

    def close(self) -> None:
        """Close all connections of the control tree."""
        if self.control_tree is not None:
            self.control_tree.close()
        self.acceptor.close()


def newest(waiting: Message | None, command: Message) -> Message:
    """Return the valid one of two commands of a kind: that of the newer generation.

    Commands follow each other quickly when one fault follows another, and one may arrive again after it was taken. What makes a hot spare a
    rank is in the first of them only, and stays valid.
    """
    if waiting is None:
        return command
    older, newer = sorted((waiting, command), key=lambda one: int(one.get("generation", 0)))
    return {**{name: older[name] for name in ("environment", "log") if name in older}, **newer}


_ours: MembershipManager | None = None


def membership() -> MembershipManager | None:
    """Return the manager of this process's groups; None where they are torch's own, or are not repaired after a fault."""
    return None if _ours is None or _ours.declined else _ours


def installed() -> MembershipManager | None:
    """Return the manager that made this process's groups, whether they are repaired or not; None where they are torch's own."""
    return _ours


def install(made: MembershipManager | None) -> None:
    """Have torch make its groups through *made*."""
    global _ours  # noqa: PLW0603 (a process has one default group, and one manager that made it)
    _ours = made
    if made is not None and BACKEND.upper() not in dist.Backend._plugins:  # noqa: SLF001 (read, not changed)
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
        # From torch 2.15 on its flight recorder attaches to groups whose backend does not record by itself: the one under ours does.
        recording: set[str] = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recording.add(BACKEND)
    if made is not None:
        _replace_creation()
        _replace_batches()
        replace_coalescing()


def _create(options: Any, more: Any) -> ManagedGroup:  # noqa: ANN401 (torch's options)
    assert _ours is not None
    return _ours.create(options, more)


def devices() -> tuple[str, ...]:
    """Return what carries the tensors of a group that serves all devices: see `BuildOptions.devices`."""
    device = library()
    return (HOST,) if device is None else (HOST, device.name)


def devices_of(backend: str) -> tuple[str, ...]:
    """Return what carries the tensors of a managed group in place of *backend*, as torch names it; none: it cannot take its place.

    As in torch, a group for ``nccl`` carries no tensors of the host. So it has no connection over gloo from each member to each other.
    """
    parts = backend.lower().split(",")
    names = {part.partition(":")[2] if ":" in part else part for part in parts}
    if not names <= {"gloo", "nccl", "undefined"}:
        return ()
    if names == {"nccl"}:
        return devices()[1:] or devices()
    return (HOST,) if names == {"gloo"} else devices()


# -- the names of groups ------------------------------------------------------------------------------------------------


def _replace_creation() -> None:
    """Have torch create managed groups under the name of the backend that was asked for, which `torch.distributed.get_backend` returns.

    Frameworks ask for that name, and know only gloo and NCCL. It is also the one that torch gives to groups without one of their own.
    """
    real = c10d._new_process_group_helper  # noqa: SLF001 (the one function in which torch creates any group)
    if getattr(real, "of_holdfast", False):
        return
    signature, process = inspect.signature(real), os.getpid()

    @functools.wraps(real)
    def new_group(*given: Any, **named: Any) -> Any:  # noqa: ANN401 (torch's own)
        manager, call = _ours, signature.bind(*given, **named)
        backend, device = str(call.arguments["backend"]), call.arguments.get("device_id")
        served = devices_of(backend)
        if manager is None or not served or os.getpid() != process:  # a forked process makes its own
            return real(*given, **named)
        if device is not None and device.type != "cpu":
            call.arguments["device_id"] = None  # torch would have NCCL connect at once: ours may only while it can be given up
        call.arguments["backend"], manager.requested = dist.Backend(BACKEND), served
        try:
            group, store = real(*call.args, **call.kwargs)
        finally:
            manager.requested = ()
        if isinstance(group, ManagedGroup):
            c10d._world.pg_map[group] = (dist.Backend(backend), store)  # noqa: SLF001
            c10d._world.pg_backend_config[group] = str(dist.BackendConfig(dist.Backend(backend)))  # noqa: SLF001
        return group, store

    new_group.of_holdfast = True  # type: ignore[attr-defined]
    c10d._new_process_group_helper = new_group  # noqa: SLF001


# -- messages that must start together ------------------------------------------------------------------------------------


def _replace_batches() -> None:
    """Have `torch.distributed.batch_isend_irecv` start all its messages as one also in a managed group whose operations a device runs.

    torch does so for a group of its own class only, and starts them one after the other otherwise. Two ranks that both send first would
    then wait for each other on the device, as soon as a message is larger than NCCL's buffers: pipeline schedules do exactly that.
    """
    real = c10d.batch_isend_irecv
    if getattr(real, "of_holdfast", False):
        return

    @functools.wraps(real)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        c10d._check_p2p_op_list(p2p_op_list)  # noqa: SLF001 (it has the error messages)
        group: Any = p2p_op_list[0].group
        device = p2p_op_list[0].tensor.device
        group = c10d._get_default_group() if group is None else group  # noqa: SLF001 (as torch itself does)
        if not isinstance(group, ManagedGroup) or not group.coalesces(device):
            return list(real(p2p_op_list))
        with c10d._coalescing_manager(group, device, async_ops=True) as together:  # noqa: SLF001 (as torch itself does)
            for one in p2p_op_list:
                peer = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
                one.op(one.tensor, group=one.group, tag=one.tag, **peer)
        return list(together.works)

    batch_isend_irecv.of_holdfast = True  # type: ignore[attr-defined]
    _replace_everywhere("batch_isend_irecv", real, batch_isend_irecv)


def replace_coalescing() -> None:
    """Have torch forget a batch of operations of a managed group that an exception has cut short.

    torch notes that a batch has begun, has the group begin one, and forgets and ends it only if nothing was raised in between. Otherwise
    later collectives of the group would be collected for it and never start, and the next batch of collectives would be refused.
    """
    real = c10d._coalescing_manager  # noqa: SLF001 (frameworks use it, and `batch_isend_irecv` does)
    if getattr(real, "of_holdfast", False):
        return

    @contextmanager
    def coalescing_manager(group: Any = None, device: torch.device | None = None, async_ops: bool = False) -> Iterator[Any]:  # noqa: ANN401, FBT001, FBT002 (torch's signature)
        chosen = group or c10d._get_default_group()  # noqa: SLF001 (as torch itself does)
        noted = c10d._world.pg_coalesce_state  # noqa: SLF001 (torch has no call for it)
        outermost = chosen not in noted
        try:
            with real(group, device, async_ops) as together:
                yield together
        except BaseException:
            if isinstance(chosen, ManagedGroup) and outermost:
                noted.pop(chosen, None)
                chosen.end_open_batch(device or torch.device(HOST))
            raise

    coalescing_manager.of_holdfast = True  # type: ignore[attr-defined]
    _replace_everywhere("_coalescing_manager", real, coalescing_manager)


def _replace_everywhere(name: str, real: object, ours: object) -> None:
    """Put *ours* in the place of torch's function *name* in all modules: scripts and frameworks import it by name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is real:
            setattr(module, name, ours)
