"""Checksums of the parameters, to compare ranks that hold copies of each other: a flipped bit shows at the next check.

The checksum of a tensor is the sum of its bytes as 64-bit integers: one pass at the speed of memory, and any single bit changes it.
Ranks need not agree on an interval: each checks at multiples of a power of two that its own cost allows, so all meet at the multiples of
the largest.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from holdfast.protocol import Message
from holdfast.runtime.agent_client import link
from holdfast.runtime.telemetry.rank_status import QUERIES

_log = logging.getLogger("holdfast.runtime")

MIN_INTERVAL: Final = 16
"""Minimum steps between two checks."""
MAX_INTERVAL: Final = 16 * 2**16
MAX_SHARE: Final = 0.004
"""Maximum fraction of the training time for checks; the documented limit is half a percent."""
KEPT: Final = 4
"""Newest checks whose checksums are kept, in case they differ."""
_WORD: Final = 8


def checksums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the checksum of each tensor, of the part that this rank holds; the device is waited for once."""
    if not tensors:
        return {}
    found = [_checksum(getattr(one, "_local_tensor", one).detach()) for one in tensors.values()]
    return dict(zip(tensors, torch.stack(found).tolist(), strict=True))


def _checksum(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.data_ptr() % _WORD or flat.storage_offset() % _WORD:
        flat = flat.clone()
    words = flat.numel() // _WORD * _WORD
    total = flat[:words].view(torch.int64).sum()
    return total + flat[words:].to(torch.int64).sum() if words < flat.numel() else total


class ReplicaChecksums:
    """Reports the digest of one rank's parameters at the steps at which it is due."""

    def __init__(self, model: nn.Module, environment: Mapping[str, str]) -> None:
        setting = environment.get("HOLDFAST_CHECK_EVERY") or "auto"
        self._fixed = int(setting) if setting.isdigit() else None
        self._model = model
        self.every = MIN_INTERVAL if self._fixed is None else self._fixed
        """Steps between two checks."""
        self._sums: deque[tuple[int, dict[str, int]]] = deque(maxlen=KEPT)
        self._costs: deque[float] = deque(maxlen=KEPT)
        self._before: tuple[int, float] | None = None
        QUERIES["sums"] = self._answer

    def check(self, step: int, shard: str) -> None:
        """Report the digest of the parameters after *step* if it is due; *shard*: whose copy they are, where that is known."""
        if not self.every or step == 0 or step % self.every or not link().attached:
            return
        begin = time.perf_counter()
        try:
            sums = checksums_of(dict(self._model.named_parameters()))
        except (RuntimeError, NotImplementedError, TypeError) as error:  # parameters of a special kind must not end training
            self.every = 0
            _log.warning("the parameters cannot be compared with those of other ranks: %s", error)
            return
        digest = hashlib.sha256(repr(sums).encode()).hexdigest()[:16]
        link().report("check", step=step, digest=digest, shard=shard, generation=link().generation)
        self._sums.append((step, sums))
        now = time.perf_counter()
        self._costs.append(now - begin)
        if self._fixed is None and self._before is not None and step > self._before[0]:
            self._choose_interval((begin - self._before[1]) / (step - self._before[0]))
        self._before = step, now

    def _choose_interval(self, step_seconds: float) -> None:
        """Choose the shortest interval within the maximum cost, of those at which all ranks can meet."""
        cost, every = min(self._costs), MIN_INTERVAL
        while every < MAX_INTERVAL and cost > MAX_SHARE * every * step_seconds:
            every *= 2
        self.every = every

    def _answer(self, query: Message) -> None:
        """Send the checksums of all tensors after a step at which the digests differ."""
        for step, sums in list(self._sums):
            if step == query.get("step"):
                link().report("sums", step=step, sums=sums)
