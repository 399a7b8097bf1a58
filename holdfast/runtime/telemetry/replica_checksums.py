"""Digests of the parameters, so that ranks that hold copies of each other can be compared: a bit that fell over shows in the next one.

A tensor's sum is that of its bytes, taken as whole numbers of 64 bits: one pass at the speed of the memory, and any single bit changes it.
Ranks need not agree on how often: each checks at multiples of a power of two that its own cost allows, so all meet at the multiples of
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
from holdfast.runtime.telemetry.rank_status import QUESTIONS

_log = logging.getLogger("holdfast.runtime")

OFTENEST: Final = 16
"""Steps between two checks at least."""
RAREST: Final = 16 * 2**16
SHARE: Final = 0.004
"""Share of the training time that checks may take; the promise is half a percent."""
KEPT: Final = 4
"""Newest checks whose sums are kept, for the case that they turn out to differ."""
_WORD: Final = 8


def sums_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sum of each tensor's bytes, of the part that this rank holds; one wait for the device in all."""
    if not tensors:
        return {}
    found = [_sum(getattr(one, "_local_tensor", one).detach()) for one in tensors.values()]
    return dict(zip(tensors, torch.stack(found).tolist(), strict=True))


def _sum(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1).view(torch.uint8)
    if flat.data_ptr() % _WORD or flat.storage_offset() % _WORD:
        flat = flat.clone()
    whole = flat.numel() // _WORD * _WORD
    total = flat[:whole].view(torch.int64).sum()
    return total + flat[whole:].to(torch.int64).sum() if whole < flat.numel() else total


class ReplicaChecksums:
    """Tells the digest of one rank's parameters at the steps at which it is time."""

    def __init__(self, model: nn.Module, environment: Mapping[str, str]) -> None:
        told = environment.get("HOLDFAST_CHECK_EVERY") or "auto"
        self._fixed = int(told) if told.isdigit() else None
        self._model = model
        self.every = OFTENEST if self._fixed is None else self._fixed
        """Steps between two checks."""
        self._sums: deque[tuple[int, dict[str, int]]] = deque(maxlen=KEPT)
        self._costs: deque[float] = deque(maxlen=KEPT)
        self._before: tuple[int, float] | None = None
        QUESTIONS["sums"] = self._answer

    def look(self, step: int, shard: str) -> None:
        """Tell the digest of the parameters after *step* if it is time; *shard*: whose copy they are, where that is known."""
        if not self.every or step == 0 or step % self.every or not link().attached:
            return
        begin = time.perf_counter()
        try:
            sums = sums_of(dict(self._model.named_parameters()))
        except (RuntimeError, NotImplementedError, TypeError) as error:  # parameters of a kind of their own: training does not end over it
            self.every = 0
            _log.warning("the parameters cannot be compared with those of other ranks: %s", error)
            return
        digest = hashlib.sha256(repr(sums).encode()).hexdigest()[:16]
        link().report("check", step=step, digest=digest, shard=shard, generation=link().generation)
        self._sums.append((step, sums))
        now = time.perf_counter()
        self._costs.append(now - begin)
        if self._fixed is None and self._before is not None and step > self._before[0]:
            self._plan((begin - self._before[1]) / (step - self._before[0]))
        self._before = step, now

    def _plan(self, step_seconds: float) -> None:
        """Choose the least distance that keeps within the share, of those at which all ranks can meet."""
        cost, every = min(self._costs), OFTENEST
        while every < RAREST and cost > SHARE * every * step_seconds:
            every *= 2
        self.every = every

    def _answer(self, question: Message) -> None:
        """Tell the sums of single tensors after a step, which somebody found to differ."""
        for step, sums in list(self._sums):
            if step == question.get("step"):
                link().report("sums", step=step, sums=sums)
