"""Who sends what to whom, done: one rank's part of a plan."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Mapping

import torch

from holdfast.runtime.groups import state_transfer
from holdfast.runtime.groups.backends import BackendGroup, BuildOptions, build, in_thread
from holdfast.runtime.groups.kv_store_access import ReachedStore
from holdfast.runtime.groups.membership import GroupGeneration, MembershipManager
from holdfast.runtime.groups.process_group import ManagedGroup
from holdfast.runtime.snapshots.restore_planner import RestorePlan, Transfer
from holdfast.runtime.state.training import Training


class TransferPlan:
    """Sends and takes state in one generation."""

    def __init__(
        self, training: Training, membership: MembershipManager, generation: GroupGeneration, over: ReachedStore | None = None
    ) -> None:
        """*over*: the store of *generation*, where that is not the present one."""
        self._training, self._assembly, self._generation = training, membership, generation
        generation_store = over or membership.generation_store
        assert generation_store is not None
        self._store, self._host = generation_store.prefixed("transferable_state"), generation_store.host
        self._temporary: list[BackendGroup] = []

    def move(
        self, plan: RestorePlan, rank_states: Mapping[int, Mapping[int, bytes]], take_light: Callable[[bytes], None]
    ) -> tuple[int, float]:
        """Send to and take from others as *plan* says; return the bytes that this rank sent or took, and the seconds."""
        me, begin, size = self._generation.rank, time.monotonic(), 0
        outgoing = [one for one in plan.transfers if one.source == me]
        incoming = [one for one in plan.transfers if one.target == me]
        for source, target in plan.rank_states:
            if source == me and source != target:
                self.put(f"light/{target}", rank_states[target][plan.step])
        try:
            for one in sorted(outgoing, key=lambda move: (move.target, move.share)):
                size += self._send(one)
            if incoming:
                size += self._receive(incoming)
        finally:
            for inner in self._temporary:
                inner.close()
        if me in {target for _, target in plan.rank_states}:
            take_light(self.take(f"light/{me}"))
        return size, time.monotonic() - begin if size else 0.0

    def _send(self, move: Transfer) -> int:
        inner, place = self._between(move.source, move.target, move.target)
        return self.send(inner, place, move.target, move.share, move.shares)

    def send(self, inner: BackendGroup, place: int, target: int, share: int, shares: int) -> int:
        """Send a share of this rank's state to member *place* of *inner*, who becomes rank *target*."""
        tensors, whole = self._training.transferable_state()
        if share == 0:
            shapes = state_transfer.shapes(tensors)
            self.put(f"tree/{target}", whole)
            self._store.set(f"shapes/{target}", json.dumps(shapes))
        else:  # copies of one state may lie differently in memory
            shapes = json.loads(self.get(f"shapes/{target}"))
        told, size = state_transfer.send(inner, place, state_transfer.laid_out(tensors, shapes), share, shares)
        self._store.set(f"digest/{target}/{share}", told)
        return size

    def _receive(self, moves: list[Transfer]) -> int:
        lines = [(*self._between(one.source, one.target, one.source), one.source, one.share, one.shares) for one in moves]
        return self.receive(lines)

    def receive(self, lines: list[tuple[BackendGroup, int, int, int, int]]) -> int:
        """Take this rank's state: each line is connections, the sender's place in them, its rank, its share, and of how many."""
        me = self._generation.rank
        shapes = json.loads(self.get(f"shapes/{me}"))
        own, _ = self._training.transferable_state()
        device = next((one.device for one in self._training.model.parameters()), torch.device("cpu"))
        found = state_transfer.places_for(shapes, own, device)
        tensors = list(found.values())
        begun = [(source, share, state_transfer.receive(inner, place, tensors, share, of)) for inner, place, source, share, of in lines]
        size = 0
        for source, share, finish in begun:
            told, got = finish()
            size += got
            if told != self.get(f"digest/{me}/{share}").decode():
                raise state_transfer.TransferCorrupted(f"the state that rank {source} sent to rank {me} was damaged on the way")
        self._training.load_state(self.take(f"tree/{me}"), found)
        return size

    def put(self, key: str, value: bytes) -> None:
        """Leave *value* for another rank."""
        self._store.set(key, base64.b64encode(value).decode())

    def take(self, key: str) -> bytes:
        """Return what another rank has put."""
        return base64.b64decode(self.get(key))

    def get(self, key: str) -> bytes:
        """Return what another rank leaves under *key*; give up when the generation ends meanwhile."""
        return in_thread(lambda: bytes(self._store.get(key)), self._assembly.is_cancelled(self._generation.number))

    def _between(self, source: int, target: int, other: int) -> tuple[BackendGroup, int]:
        """Return connections that join *source* and *target*, and the place of *other* in them."""
        common = [group for group in self._assembly.groups if {source, target} <= set(group.ranks) and group.inner is not None]
        if common:
            best: ManagedGroup = min(common, key=lambda group: (len(group.ranks), group.group_name))
            assert best.inner is not None
            return best.inner, best.ranks.index(other)
        pair = sorted((source, target))
        inner = self.pair(f"pair-{pair[0]}-{pair[1]}", pair.index(self._generation.rank))
        self._temporary.append(inner)
        return inner, pair.index(other)

    def pair(self, name: str, place: int) -> BackendGroup:
        """Build connections between two processes, of which this one takes *place*."""
        return build(
            self._store,
            name,
            place,
            2,
            way=BuildOptions(devices=("cpu",), timeout=self._assembly.groups[0].timeout, host=self._host),
            is_cancelled=self._assembly.is_cancelled(self._generation.number),
        )
