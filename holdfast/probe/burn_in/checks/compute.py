"""Arithmetic with known answers on every core: the silent errors of a core show up as wrong results, and nowhere else.

Three kinds of work take turns until the time is over: a chain of hashes with a known end; Fermat's little theorem for a random base
modulo a Mersenne prime, where the answer is always 1; and an exact sum of products in floating point, compared with integers.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from holdfast.detectors.nodes.burn_in_results import Check
from holdfast.probe.burn_in.checks.core_pool import CoreEnded, judged, on_each, processors

NAME: Final = "compute"
LINKS: Final = 2_000
"""Hashes in a chain."""
CHAIN_END: Final = "6f74bf5ea646831fe61db6de8cb59a0de74a0c6a0532f5d087cd2ba67a2703dc"
"""The last hash of the chain, as `sha256sum` computes it."""
PRIME: Final = (1 << 1279) - 1
TERMS: Final = 2_000
TERM_LIMIT: Final = 1 << 20
"""Terms are below this: a product is below 2**40 and the sum below 2**53, so floating point holds each exactly."""

Work = Callable[[], str]
"""One piece of work; returns what was wrong, or nothing."""


def chain() -> str:
    """Hash a hash, again and again."""
    value = b"holdfast"
    for _ in range(LINKS):
        value = hashlib.sha256(value).digest()
    return "" if value.hex() == CHAIN_END else f"a chain of {LINKS} hashes ended in {value.hex()[:16]}, not in {CHAIN_END[:16]}"


def power() -> str:
    """Raise a random base to the prime less one, modulo the prime."""
    base = random.getrandbits(1200) + 2
    answer = pow(base, PRIME - 1, PRIME)
    return "" if answer == 1 else f"{base:#x} to the power of p - 1 is {answer:#x} modulo the prime p = 2**1279 - 1, not 1"


def products() -> str:
    """Add products in floating point, and the same in integers."""
    drawn = random.sample(range(TERM_LIMIT), 2 * TERMS)
    pairs = list(zip(drawn[::2], drawn[1::2], strict=True))
    exact, float_sum = sum(a * b for a, b in pairs), math.fsum(float(a) * float(b) for a, b in pairs)
    return "" if float_sum == exact else f"a sum of {TERMS} products is {float_sum!r} in floating point, and {exact} in integers"


WORKS: Final[Mapping[str, Work]] = {"hashes": chain, "powers": power, "products": products}


def compute(seconds: float) -> Check:
    """Work for *seconds* on all cores that this process may use at once, and compare."""
    begun, cores = time.monotonic(), processors()
    found = on_each(cores, lambda _: _work_until(begun + seconds, WORKS))
    rounds = [one["rounds"] for one in found.values() if not isinstance(one, CoreEnded)]
    figures = {"cores": float(len(cores)), "rounds": float(sum(rounds))}
    return judged(NAME, found, figures, fine="every answer is the known one", seconds=time.monotonic() - begun)


def _work_until(until: float, works: Mapping[str, Work]) -> dict[str, Any]:
    """Do all kinds of work in turn until *until* (monotonic), at least once; stop at the first wrong answer."""
    rounds = 0
    while True:
        for name, work in works.items():
            wrong = work()
            if wrong:
                return {"rounds": rounds, "wrong": f"{name}: {wrong}"}
        rounds += 1
        if time.monotonic() >= until:
            return {"rounds": rounds, "wrong": ""}
